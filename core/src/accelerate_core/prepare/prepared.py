"""What has been prepared, and how one object is."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_core.backend import Backend
from accelerate_core.builtin.compile import strip_compiled, uncompiled
from accelerate_core.config.handlers import DataLoaderConfiguration
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.parts import PreparedLoader
from accelerate_core.contract.view import AcceleratorView
from accelerate_core.data.feeding import feed as move_batches
from accelerate_core.data.loader import LoaderOptions
from accelerate_core.data.prepare import override_even_batches, prepare_loader
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import PrepareError
from accelerate_core.plugins.manager import ActivePlugins
from accelerate_core.prepare.made_loader import MadeLoader
from accelerate_core.training.forward import unwrap_forward
from accelerate_core.training.misuse import NotCalled, warn_if_thrown_away
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.scheduler import AcceleratedScheduler
from accelerate_core.truth import flag


class Prepared:
    """What has been prepared, and how one object is.

    Args:
        accelerator: for the hooks; held weakly, as it holds this.
        plugins: the active ones.
        config: how data is shared out.
        rng_types: generators synchronised at the start of each iteration over a loader.
        device_placement: whether models and batches are moved to the device.
        data_comm: the ranks that read different samples.
        loader_maker: who is asked for prepared loaders before the core makes them; None: nobody.
    """

    def __init__(
        self,
        accelerator: AcceleratorView,
        plugins: ActivePlugins,
        *,
        config: DataLoaderConfiguration,
        rng_types: Sequence[str],
        device_placement: bool,
        data_comm: Communicator,
        loader_maker: Any,
    ) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._hooks: Backend = accelerator.hooks
        self._rng_types = rng_types
        self._data_comm = data_comm
        self._loader_maker = loader_maker
        self._step_listeners = plugins.implementations("on_step_end")
        self.plugins = plugins
        self.dataloader_config = config
        self.device_placement = device_placement
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[Any] = []
        #: Parameters that were replaced: old -> (model as prepared, name).
        self.replaced_parameters = WeakIdKeyDictionary()

    @property
    def accelerator(self) -> AcceleratorView:
        """The Accelerator whose objects these are."""
        return cast("AcceleratorView", self._accelerator())

    def forget(self) -> None:
        """Let go of everything that was prepared."""
        held: list[list[Any]] = [self.models, self.optimizers, self.schedulers, self.loaders]
        for one in held:
            one.clear()
        self.replaced_parameters = WeakIdKeyDictionary()

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Share one loader out between the ranks that read different data."""
        if self.is_prepared(data_loader):
            return data_loader
        on_device = self.device_placement if device_placement is None else device_placement
        prepared = None
        if self._loader_maker is not None and slice_fn_for_dispatch is None:
            prepared = self._loader_maker.make_loader(self.accelerator, data_loader)
        if prepared is None:
            prepared = self._core_loader(data_loader, on_device, slice_fn_for_dispatch)
        else:
            record = self._loader_maker._record
            prepared = MadeLoader(prepared, record, self.accelerator.gradient_state)
            prepared.put_on_device = on_device
            prepared.even_batches = self.dataloader_config.even_batches
        self.loaders.append(prepared)
        warn_if_thrown_away([data_loader], [prepared])
        return prepared

    def _core_loader(
        self, data_loader: Any, on_device: bool, slice_fn: Callable[..., Any] | None
    ) -> PreparedLoader:
        accelerator = self.accelerator
        index, count = self._hooks.data_shard(accelerator)
        fixed = self._hooks.fixed_batch(accelerator)
        if fixed is not None and (not isinstance(fixed, int) or fixed < 1):
            raise wrong_answer("fixed_batch", accelerator, fixed, "None or a whole number above 0")
        options = LoaderOptions(
            config=self.dataloader_config,
            num_processes=count,
            process_index=index,
            device=accelerator.device,
            put_on_device=on_device,
            rng_types=self._rng_types,
            slice_fn_for_dispatch=slice_fn,
            comm=self._data_comm,
            order_comm=accelerator.communicator,
            gradient_state=accelerator.gradient_state,
            feed=self._feed() if on_device else None,
            feed_always=self._feeds_itself(),
            fixed_batch=fixed,
        )
        return prepare_loader(data_loader, options)

    def _feeds_itself(self) -> bool:
        """Whether the backend does more than move batches, also when they are in place already."""
        return type(self.accelerator.backend).feed_device is not Backend.feed_device

    def _feed(self) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """Return what moves batches to the device: the backend's hook.

        The loader keeps the Accelerator alive only if the backend's own hook is given it.
        """
        hooks, accelerator = self._hooks, self._accelerator
        held = self.accelerator if self._feeds_itself() else None
        device, non_blocking = self.accelerator.device, self.dataloader_config.non_blocking

        def feed(batches: Iterator[Any]) -> Iterator[Any]:
            given = held or accelerator()
            if given is None:  # it was deleted, and the default needs its device alone
                return move_batches(batches, device, non_blocking)
            return hooks.feed_device(given, batches, non_blocking)

        return feed

    def is_prepared(self, obj: Any) -> bool:
        """Tell whether this Accelerator has prepared exactly this object."""
        held = (*self.models, *self.optimizers, *self.schedulers, *self.loaders)
        return id(obj) in map(id, held)

    def remember(self, kind: str, value: Any, evaluation: bool = False) -> None:
        """Keep a prepared object for saving, unwrapping and `free_memory`."""
        if kind == "model" and not evaluation:
            self.models.append(value)
            if self._is_wrapper(value):
                NotCalled(value)
        elif kind == "optimizer":
            self.optimizers.append(value)
        elif kind == "scheduler":
            self.schedulers.append(value)

    def _is_wrapper(self, model: Any) -> bool:
        """Tell whether the backend put its own module around a model, and nothing compiled that."""
        if not isinstance(model, torch.nn.Module) or uncompiled(model) is not model:
            return False
        if model._compiled_call_impl is not None:
            return False  # a hook that comes and goes would have it compiled again
        return self._hooks.unwrap_model(self.accelerator, model) is not model

    def ask_classification(self, obj: Any) -> list[str]:
        """Ask the active plugins what kind of object this is."""
        return self.plugins.call_each("classify", accelerator=self.accelerator, obj=obj)

    def wrap_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        """Return the optimizer under the accumulation cycle."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        return AcceleratedOptimizer(
            optimizer,
            gradient_state=self.accelerator.gradient_state,
            step=partial(self._hooks.optimizer_step, self.accelerator),
            zero_grad=partial(self._hooks.zero_grad, self.accelerator),
            after_step=self._tell_step_end if self._step_listeners else None,
        )

    def _tell_step_end(self, optimizer: Any) -> None:
        for listener in self._step_listeners:
            listener(accelerator=self.accelerator, optimizer=optimizer)

    def wrap_scheduler(self, scheduler: Any, optimizers: list[Any]) -> Any:
        """Return the scheduler following its optimizers, by the rule in force."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        accelerator = self.accelerator
        _, count = self._hooks.data_shard(accelerator)
        rule = accelerator.because["scheduler_steps"]
        follows = accelerator.step_scheduler_with_optimizer
        announce = None
        if count > 1 and follows and accelerator.is_main_process:
            text = _scheduler_rule(type(scheduler).__name__, rule.value, rule.origin, count)
            announce = partial(print, text, file=sys.stderr)
        return AcceleratedScheduler(
            scheduler,
            optimizers,
            gradient_state=accelerator.gradient_state,
            num_processes=count if rule.value == "per_process" else 1,
            step_with_optimizer=follows,
            split_batches=self.dataloader_config.split_batches,
            on_first_step=announce,
        )

    def wrapper_of(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the prepared optimizer that is, or holds, `optimizer`."""
        found = (one for one in self.optimizers if optimizer in (one, one.optimizer))
        return next(found, None)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Tell whether a model was spread over several devices for inference."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(found is not None and len(set(found.values())) > 1 for found in maps)

    def verify_placeable(self, model: torch.nn.Module) -> None:
        """Refuse a model that is spread over devices, where ranks would each need it whole.

        Raises:
            PrepareError: with the way out.
        """
        bypass = flag(os.environ, "ACCELERATE_BYPASS_DEVICE_MAP")
        if self.accelerator.num_processes > 1 and not bypass and self.verify_device_map(model):
            raise PrepareError(
                "A model spread over devices by a device map such as 'auto' cannot be trained on several "
                "processes; load it without device_map (or set ACCELERATE_BYPASS_DEVICE_MAP=true)."
            )

    def inner_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model without the backend's wrapping and without `torch.compile`'s."""
        return uncompiled(self._hooks.unwrap_model(self.accelerator, uncompiled(model)))

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's own model inside a prepared one."""
        inner = self.inner_model(model)
        if not keep_torch_compile:
            inner = strip_compiled(inner)
        if not keep_fp32_wrapper:
            unwrap_forward(inner)
        return inner

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a prepared model."""
        if not unwrap:
            return dict(model.state_dict())
        state = self._hooks.consolidate(self.accelerator, model)
        plain = self.accelerator.precision.plain_state(self.inner_model(model), state)
        return cast("dict[str, Any]", plain)

    def init_model_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the active backend wants models constructed."""
        return self._hooks.init_model_context(self.accelerator)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps."""
        accelerator, stack = self.accelerator, ExitStack()
        backend, several = accelerator.backend, accelerator.num_processes > 1
        if several and not backend.supports.get("join", False):
            accelerator.note_once(f"join_uneven_inputs does nothing: {backend.name} cannot join.")
        elif several:
            if even_batches is not None:
                stack.enter_context(override_even_batches(self.loaders, even_batches))
            stack.enter_context(self._hooks.join_uneven_inputs(accelerator, joinables))
        return stack


def _scheduler_rule(kind: str, rule: str, origin: str, count: int) -> str:
    """Return the line that says, at the first step, how far a scheduler moves."""
    moves = f"{count} steps, one for each process," if rule == "per_process" else "one step"
    other = "per_step" if rule == "per_process" else "per_process"
    return (
        f"accelerate-core: {kind} moves {moves} whenever the optimizer steps "
        f"(scheduler_steps={rule!r}: {origin}). scheduler_steps={other!r} changes this."
    )
