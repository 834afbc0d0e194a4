"""`prepare` and its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, cast

import torch

from accelerate_core.backend import Backend
from accelerate_core.builtin.no_checkpointer import without_checkpointer
from accelerate_core.compilation import strip_compiled, uncompiled
from accelerate_core.config.truth import flag
from accelerate_core.contract.parts import LoaderMaker, PreparedLoader
from accelerate_core.data.loader import LoaderOptions
from accelerate_core.data.prepare import prepare_loader, skip_first_batches
from accelerate_core.errors import PrepareError
from accelerate_core.facade.place import Place
from accelerate_core.prepare import run as preparing
from accelerate_core.training.forward import unwrap_forward
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.scheduler import AcceleratedScheduler


class Preparing(Place):
    """`prepare` and its parts."""

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; return them in the same order.

        Args:
            args: any of these; other objects are returned as they are.
            device_placement: per object, whether it is moved to the device.

        Raises:
            PrepareError: a model would be left that does not train as asked.
        """
        result = preparing.prepare(self._whole, args, device_placement)
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model; `evaluation_mode` applies precision and compilation only."""
        made = preparing.prepare(self._whole, [model], [device_placement], evaluation_mode)
        return cast(torch.nn.Module, made[0])

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer, of models prepared before."""
        return preparing.prepare(self._whole, [optimizer], [device_placement])[0]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one scheduler, of optimizers prepared before."""
        return preparing.prepare(self._whole, [scheduler])[0]

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Share one loader out between the ranks that read different data.

        Args:
            data_loader: a `DataLoader`, or any iterable of batches.
            device_placement: whether batches are moved to the device.
            slice_fn_for_dispatch: `(batch, slice, process_index, num_processes) -> part`; only the
                core's own loaders have it.
        """
        if self.is_prepared(data_loader):
            return data_loader
        place = self.device_placement if device_placement is None else device_placement
        prepared = None
        if self._loader_maker is not None and slice_fn_for_dispatch is None:
            prepared = self._loader_maker.make_loader(self._whole, data_loader)
        if prepared is None:
            prepared = self._core_loader(data_loader, place, slice_fn_for_dispatch)
        else:
            prepared.put_on_device, prepared.even_batches = place, self.even_batches
        self.loaders.append(prepared)
        return prepared

    def _core_loader(
        self, data_loader: Any, place: bool, slice_fn: Callable[..., Any] | None
    ) -> PreparedLoader:
        index, count = self.hooks.data_shard(self)
        options = LoaderOptions(
            config=self.dataloader_config,
            num_processes=count,
            process_index=index,
            device=self.device,
            put_on_device=place,
            rng_types=self.rng_types,
            slice_fn_for_dispatch=slice_fn,
            comm=self._data_communicator,
            order_comm=self._communicator,
            gradient_state=self.gradient_state,
            feed=partial(self._feed, self.hooks.feed_device) if place else None,
            # The default only moves batches; another one may do more, also where they are in place.
            feed_always=type(self.backend).feed_device is not Backend.feed_device,
            fixed_batch=self.hooks.fixed_batch(self),
        )
        return prepare_loader(data_loader, options)

    @cached_property
    def _loader_maker(self) -> LoaderMaker | None:
        part = self._built.parts["loaders"]
        return None if part is None else cast("LoaderMaker", part.make())

    def _feed(
        self, feed_device: Callable[..., Iterator[Any]], batches: Iterator[Any]
    ) -> Iterator[Any]:
        return feed_device(self, batches, self.non_blocking)

    def is_prepared(self, obj: Any) -> bool:
        """Tell whether this Accelerator has prepared exactly this object."""
        held: Iterable[Any] = (*self.models, *self.optimizers, *self.schedulers, *self.loaders)
        return any(obj is one for one in held)

    def remember(self, kind: str, value: Any, evaluation: bool = False) -> None:
        """Keep a prepared object for saving, unwrapping and `free_memory`."""
        if kind == "model" and not evaluation:
            self.models.append(value)
        elif kind == "optimizer":
            self.optimizers.append(value)
            if self._built.parts["checkpointer"] is None:
                self._whole.note_once(f"This run cannot be saved: {without_checkpointer()}")
        elif kind == "scheduler":
            self.schedulers.append(value)

    def ask_classification(self, obj: Any) -> list[str]:
        """Ask the active plugins what kind of object this is."""
        if not self.plugins.implementations("classify"):
            return []
        return self.plugins.call_each("classify", accelerator=self, obj=obj)

    def wrap_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        """Return the optimizer under the accumulation cycle."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        return AcceleratedOptimizer(
            optimizer,
            gradient_state=self.gradient_state,
            step=partial(self.hooks.optimizer_step, self),
            zero_grad=partial(self.hooks.zero_grad, self),
            after_step=self._tell_step_end if self._step_listeners else None,
        )

    def _tell_step_end(self, optimizer: Any) -> None:
        self.plugins.call_each("on_step_end", accelerator=self, optimizer=optimizer)

    def wrap_scheduler(self, scheduler: Any, optimizers: list[Any]) -> Any:
        """Return the scheduler following its optimizers."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        _, count = self.hooks.data_shard(self)
        return AcceleratedScheduler(
            scheduler,
            optimizers,
            gradient_state=self.gradient_state,
            num_processes=count,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )

    def wrapper_of(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the prepared optimizer that is, or holds, `optimizer`."""
        for prepared in self.optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        return None

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
        if self.use_distributed and not bypass and self.verify_device_map(model):
            raise PrepareError(
                "A model spread over devices by a device map such as 'auto' cannot be trained on several "
                "processes; load it without device_map (or set ACCELERATE_BYPASS_DEVICE_MAP=true)."
            )

    def inner_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model without the backend's wrapping and without `torch.compile`'s."""
        return uncompiled(self.hooks.unwrap_model(self, uncompiled(model)))

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's own model inside a prepared one.

        Args:
            keep_fp32_wrapper: keep forward under mixed precision.
            keep_torch_compile: keep it compiled; False returns an uncompiled view over
                the same parameters.
        """
        inner = self.inner_model(model)
        if not keep_torch_compile:
            inner = strip_compiled(inner)
        if not keep_fp32_wrapper:
            unwrap_forward(inner)
        return inner

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out its first batches, without loading them where it can."""
        return skip_first_batches(dataloader, num_batches)

    def init_model_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the active backend wants models constructed."""
        return cast("AbstractContextManager[Any]", self.hooks.init_model_context(self))
