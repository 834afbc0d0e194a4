"""Accelerate's classes for states, loaders, optimizers and schedulers, for scripts that create them.

They have the names and arguments of Accelerate's classes. The objects that `prepare` returns are
instances of them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accelerate_core import state as states
from accelerate_core.data import loader as loaders
from accelerate_core.data.loader import CoreLoader
from accelerate_core.distributed.process import current_runtime, current_user
from accelerate_core.plugin import MissingPluginError, RuntimeConflictError, send_to_device
from accelerate_core.training import gradient_state as gradients
from accelerate_core.training import optimizer as optimizers
from accelerate_core.training import scheduler as schedulers
from accelerate_core.training.metric import StepArguments
from accelerate_drop_in import private  # noqa: F401
from accelerate_drop_in.accelerator import Accelerator
from accelerate_drop_in.data_loader import prepare_data_loader, shown, with_state_of_base


class _Prepared(type):
    """A metaclass for classes that also accept the core's objects as instances."""

    core: Any = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.core) or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.core) or super().__subclasscheck__(subclass)

    def __getattr__(cls, name: str) -> Any:
        value = getattr(cls.core, name)
        if isinstance(value, property):  # only instances have properties
            raise AttributeError(name)
        return value


# --- states -------------------------------------------------------------------------------------

#: The gradient state of a script without an Accelerator.
_alone: list[gradients.GradientState] = []


class _SharedState:
    """`_shared_state`, which is not empty once a state was created, even without an Accelerator."""

    def __get__(self, one: Any, owner: Any) -> Any:
        core: Any = gradients.GradientState
        return dict(vars(_alone[0])) if _alone else core._shared_state


class GradientState(metaclass=_Prepared):
    """The gradient state of the latest Accelerator, or else of the process.

    Args:
        gradient_accumulation_plugin: settings that are copied into it.
    """

    core: Any = gradients.GradientState
    _shared_state = _SharedState()

    def __new__(  # type: ignore[misc]
        cls, gradient_accumulation_plugin: Any = None
    ) -> gradients.GradientState:
        if current_user() is None and not _alone:
            _alone.append(gradients.GradientState())
        state: gradients.GradientState = (
            gradients.GradientState() if current_user() is not None else _alone[0]
        )
        if gradient_accumulation_plugin is not None:
            for name, value in gradient_accumulation_plugin.to_dict().items():
                setattr(state, name, value)
        return state


class AcceleratorState(states.AcceleratorState, metaclass=_Prepared):
    """The state of the latest Accelerator. If there is none, one is created with the arguments.

    Args:
        mixed_precision, cpu, dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin,
            megatron_lm_plugin, parallelism_config, kwargs: see `Accelerator`.

    Raises:
        RuntimeConflictError: there is already an Accelerator with another precision.
    """

    core: Any = states.AcceleratorState

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        user = current_user()
        if user is None:
            plugins = {
                "dynamo_plugin": dynamo_plugin,
                "deepspeed_plugin": deepspeed_plugin,
                "fsdp_plugin": fsdp_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
            }
            given = {name: value for name, value in plugins.items() if value is not None}
            user = Accelerator(mixed_precision=mixed_precision, cpu=cpu, **given, **kwargs)
        elif mixed_precision not in (None, user.mixed_precision):
            raise RuntimeConflictError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}) contradicts the existing "
                f"Accelerator, which has mixed_precision={user.mixed_precision!r}."
            )
        super().__init__(user)


# --- loaders ------------------------------------------------------------------------------------


def get_sampler(dataloader: Any) -> Any:
    """Return the innermost sampler of a loader, which decides the order."""
    batches = dataloader.sampler
    batches = batches if isinstance(batches, BatchSampler) else dataloader.batch_sampler
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)


class DataLoaderStateMixin(metaclass=_Prepared):
    """The part of a loader that records its end. Loaders from `prepare` are instances of it."""

    core: Any = CoreLoader
    end_of_dataloader = False
    remainder = -1

    def reset(self) -> None:
        """Reset the record of the last iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start an iteration."""
        self.reset()

    def end(self) -> None:
        """End an iteration."""


class DataLoaderAdapter:
    """Wraps a new loader for a dataset, and passes as an instance of the loader's class.

    Args:
        dataset: the dataset to read.
        use_stateful_dataloader: create torchdata's `StatefulDataLoader`.
        batch_sampler, kwargs: arguments of the loader.
    """

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = _plain(
            dataset, use_stateful_dataloader, batch_sampler=batch_sampler, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the wrapped loader, so that `isinstance` is true for it."""
        return type(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self.__dict__)


def _rebuilt(cls: type, state: dict[str, Any]) -> Any:
    made: Any = object.__new__(cls)
    made.__dict__.update(state)
    return made


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that skips its first `skip_batches` batches; see also `skip_first_batches`."""

    core: Any = ()

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.base_dataloader, self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.skip_batches, 0)


def _plain(dataset: Any, stateful: bool, **kwargs: Any) -> Any:
    if not stateful:
        return DataLoader(dataset, **kwargs)
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingPluginError(
            'use_stateful_dataloader needs torchdata. Install it with: pip install "torchdata>=0.8"'
        ) from error
    return StatefulDataLoader(dataset, **kwargs)


class DataLoaderShard(DataLoaderStateMixin):
    """A loader for one rank, whose dataset or sampler already selects the rank's part of the data.

    Args:
        dataset: the dataset to read.
        device: the device of the batches; None leaves them where they are.
        rng_types: generators whose state rank 0 sends to the others before every iteration.
        synchronized_generator: the generator for the type "generator"; None uses the sampler's.
        skip_batches: the number of batches to skip at the start of every iteration.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`. Its state is then the
            state of this loader, unless several ranks share the data.
        torch_device_mesh: accepted for compatibility, and ignored.
        iteration: the epoch of the next iteration.
        kwargs: arguments of the loader.
    """

    core: Any = loaders.DataLoaderShard

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> CoreLoader:
        shares = rng_types is not None and current_runtime().num_processes > 1
        made = prepare_data_loader(
            _plain(dataset, use_stateful_dataloader, **kwargs),
            device,
            num_processes=1,
            process_index=0,
            put_on_device=device is not None,
            rng_types=rng_types,
            non_blocking=_non_blocking,
            gradient_state=GradientState(),
            order_comm=states.current_communicator() if shares else None,
        )
        if synchronized_generator is not None:
            made.synchronized_generator = synchronized_generator
        return _started(made, skip_batches, iteration)


class DataLoaderDispatcher(DataLoaderStateMixin):
    """A loader that rank 0 reads for all ranks.

    Args:
        split_batches: divide each batch among the ranks.
        slice_fn: a function `(data, tensor_slice, process_index=, num_processes=)` that returns a
            part of a batch.
        dataset, skip_batches, use_stateful_dataloader, torch_device_mesh, iteration, kwargs: see
            `DataLoaderShard`.
    """

    core: Any = loaders.DataLoaderDispatcher

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> CoreLoader:
        made = prepare_data_loader(
            _plain(dataset, use_stateful_dataloader, **kwargs),
            split_batches=split_batches,
            put_on_device=True,
            dispatch_batches=True,
            slice_fn_for_dispatch=slice_fn,
            non_blocking=_non_blocking,
            gradient_state=GradientState(),
        )
        # On one process the core creates another class, which behaves the same.
        object.__setattr__(made, "__class__", cls.core)
        return _started(made, skip_batches, iteration)


def _started(loader: CoreLoader, skip_batches: int, iteration: int) -> CoreLoader:
    loader.iteration = iteration
    return with_state_of_base(shown(loader.skipping(skip_batches) if skip_batches else loader))


# --- optimizers and schedulers ------------------------------------------------------------------


class AcceleratedOptimizer(optimizers.AcceleratedOptimizer, metaclass=_Prepared):
    """An optimizer that only steps at the end of an accumulation cycle.

    Args:
        optimizer: the wrapped optimizer.
        device_placement: move its state to the device of this process.
        scaler: a gradient scaler through which it steps.
    """

    core: Any = optimizers.AcceleratedOptimizer

    def __init__(
        self, optimizer: torch.optim.Optimizer, device_placement: bool = True, scaler: Any = None
    ) -> None:
        super().__init__(optimizer, gradient_state=GradientState(), hooks=_StepHooks(scaler))
        self.scaler = scaler
        if device_placement and optimizer.state:
            state = send_to_device(optimizer.state_dict(), current_runtime().device)
            optimizer.load_state_dict(state)


class _StepHooks:
    """Steps an optimizer without a backend, through a gradient scaler if there is one."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> bool:
        """Step, and return whether the optimizer stepped."""
        arguments = () if closure is None else (closure,)
        scaler = self._scaler
        if scaler is None:
            optimizer.step(*arguments)
            return True
        before = scaler.get_scale()
        scaler.step(optimizer, *arguments)
        scaler.update()
        return bool(scaler.get_scale() >= before)

    def zero_grad(self, optimizer: Any, set_to_none: bool) -> None:
        """Clear gradients."""
        optimizer.zero_grad(set_to_none=set_to_none)


class AcceleratedScheduler(schedulers.AcceleratedScheduler, metaclass=_Prepared):
    """A scheduler that steps whenever its optimizers step, once per process.

    Args:
        scheduler: the wrapped scheduler.
        optimizers: the `AcceleratedOptimizer` objects that it follows.
        step_with_optimizer: False steps on every call.
        split_batches: batches are divided among the ranks, so it only steps once.
    """

    core: Any = schedulers.AcceleratedScheduler

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        user = current_user()
        super().__init__(
            scheduler,
            optimizers,
            arguments=None if user is None else StepArguments(scheduler, user._prepared.metrics),
            gradient_state=GradientState(),
            num_processes=current_runtime().num_processes,
            step_with_optimizer=step_with_optimizer,
            split_batches=split_batches,
        )


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that a DeepSpeed engine steps. Here `prepare` returns none: use `optimizer.step()`."""

    core: Any = ()

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that a DeepSpeed engine steps. Here `prepare` returns none: use `scheduler.step()`.

    Args:
        scheduler: the wrapped scheduler.
        optimizers: the prepared optimizers that it follows.
    """

    core: Any = ()

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
