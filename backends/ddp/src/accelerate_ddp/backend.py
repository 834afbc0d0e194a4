"""The ddp backend: every rank holds the whole model, and gradients are averaged during backward."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accelerate_core.plugin import (
    NEEDS,
    AcceleratorView,
    Backend,
    Claim,
    ConfigurationError,
    GradientReducer,
    PrepareError,
    Request,
    TrainableChange,
    uncompiled,
)
from accelerate_ddp.hooks import register_reducer, wait_for_pending_hooks
from accelerate_ddp.settings import DistributedDataParallelKwargs
from accelerate_ddp.trainable import (
    average_leftovers,
    check_agreement,
    rebuild_reducer,
    refuse_change,
)

#: Numbers the backends of this process, in the same order on every rank.
_numbers = itertools.count()


class DDPBackend(Backend):
    """Wrap models in `DistributedDataParallel`. The default backend for more than one process."""

    name = "ddp"
    api_version = (1, 0)
    reduces_gradients = "backward"
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {"": ()}
    supports: ClassVar[Mapping[str, Any]] = {
        "accepts": tuple(NEEDS),
        "mesh": (),
        "devices": None,
        "no_sync": True,
        "join": True,
        "compile": True,
        "several_models": True,
    }
    Settings = DistributedDataParallelKwargs
    handlers = (DistributedDataParallelKwargs,)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or DistributedDataParallelKwargs(), handlers)
        self._has_python_hook: bool = self.settings.has_comm_hook
        self._begun: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._number = next(_numbers)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs of several processes, with a low priority: a backend requested by name wins."""
        count = request.topology.num_processes
        return Claim(10, f"{count} processes") if count > 1 else None

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `MULTI_CPU`, `MULTI_GPU`, or `MULTI_` and the type of another device."""
        if accelerator.num_processes == 1:
            return "NO"
        kind = accelerator.device.type
        return "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `accelerator.ddp_handler`."""
        return {"ddp_handler": self.settings}

    def on_end(self, accelerator: AcceleratorView) -> None:
        """Wait until the group has no pending work."""
        if accelerator.num_processes > 1 and self._has_python_hook:
            wait_for_pending_hooks()

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Wrap the model, unless nothing in it trains or there is only one process.

        Raises:
            PrepareError: the model is already sharded, which DDP cannot train.
        """
        if evaluation_mode or accelerator.num_processes == 1:
            return model
        if isinstance(
            model, DistributedDataParallel
        ):  # wrapped by the script or another Accelerator
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        _refuse_sharded(model)
        # Passed even without a device, because some libraries replace the constructor and require both.
        arguments: dict[str, Any] = {"device_ids": None, "output_device": None}
        arguments |= self.settings.constructor_arguments()
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1 and accelerator.device.type != "cpu" and accelerator.device in devices:
            arguments["device_ids"] = [accelerator.device.index]
            arguments["output_device"] = accelerator.device.index
        with warnings.catch_warnings():
            # torch deprecates it for an option with another meaning.
            warnings.filterwarnings("ignore", ".*broadcast_buffers.* is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(model, **arguments)
        self.settings.register_comm_hook(wrapped)
        return wrapped

    def use_reducer(
        self, accelerator: AcceleratorView, model: torch.nn.Module, reducer: GradientReducer
    ) -> None:
        """Average each bucket with the reducer, as a communication hook.

        Raises:
            ConfigurationError: a communication hook is set, too.
        """
        if not isinstance(model, DistributedDataParallel):
            return
        if self.settings.has_comm_hook:
            raise ConfigurationError(
                f"comm_hook={self.settings.comm_hook} and comm_wrapper={self.settings.comm_wrapper} "
                "conflict with the plugin that implements reduce_gradients: only one of them can "
                "average the gradients. Set both to no, or disable the plugin."
            )
        register_reducer(model, reducer)
        self._has_python_hook = True

    def follow_trainable(
        self, accelerator: AcceleratorView, change: TrainableChange, loss: torch.Tensor | None
    ) -> bool:
        """Give the model another reducer, for the parameters that require gradients now.

        torch's reducer only averages parameters that required gradients when it was made, and waits for
        all of them.

        Raises:
            ConfigurationError: the model isn't wrapped, the ranks disagree about the change, or an option
                forbids it.
        """
        if accelerator.num_processes == 1:
            return True
        model = uncompiled(change.model)
        refuse_change(model, change)
        assert isinstance(model, DistributedDataParallel)
        if not model.require_backward_grad_sync:
            return False  # this backward reduces nothing
        step = accelerator.gradient_state.backwards
        key = f"{self._number}/{step}/{list(accelerator.models).index(change.model)}"
        check_agreement(model, change, key)
        average_leftovers(model, change)
        if not any(parameter.requires_grad for parameter in model.module.parameters()):
            return False  # torch has no reducer for nothing
        rebuild_reducer(model, loss)
        return True

    def unwrap_model(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Return the wrapped module."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, accelerator: AcceleratorView, model: Any) -> AbstractContextManager[Any]:
        """Keep gradients local, except in the first backward of a static graph.

        torch aborts if the first backward of a static graph is not reduced.
        """
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if self.settings.static_graph and model not in self._begun:
            self._begun.add(model)
            return nullcontext()
        context: AbstractContextManager[Any] = model.no_sync()
        return context

    def trigger_sync_in_backward(
        self, accelerator: AcceleratorView, model: Any
    ) -> AbstractContextManager[Any]:
        """Make the next backward reduce gradients, even if its forward ran under `no_sync`."""
        return _reduce_next(model) if isinstance(model, DistributedDataParallel) else nullcontext()

    def join_uneven_inputs(
        self, accelerator: AcceleratorView, joinables: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """Let ranks that have no batches left join the collectives of the others."""
        able = [one for one in joinables if isinstance(one, Joinable)]
        return Join(able) if able else nullcontext()


@contextmanager
def _reduce_next(model: DistributedDataParallel) -> Iterator[None]:
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    # The forward does this unless it runs under no_sync.
    model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def _refuse_sharded(model: torch.nn.Module) -> None:
    """Raise an error if a parameter is a DTensor. DDP would fail later, without naming the reason."""
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)  # importing DTensor takes long
        if mesh is not None:
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) or mesh.shape
            raise PrepareError(
                f"{type(model).__name__} is already sharded: its parameter {name!r} is a DTensor on a "
                f"mesh of {sizes}. The backend 'ddp' trains whole copies of a model. Use "
                "Accelerator(backend='fsdp2'), which trains it as it is sharded, or load the model "
                "without sharding it."
            )
