"""The backend: every rank holds the whole model, gradients are averaged in backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accelerate_core.plugin import NEEDS, AcceleratorView, Backend, Claim, Request
from accelerate_ddp.hooks import let_go
from accelerate_ddp.settings import DistributedDataParallelKwargs


class DDPBackend(Backend):
    """Wraps models in `DistributedDataParallel`; claims every run of more than one process."""

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
        self._begun: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs of several processes, weakly: whoever is asked for by name goes first."""
        count = request.topology.num_processes
        return Claim(10, f"{count} processes") if count > 1 else None

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """`MULTI_CPU`, `MULTI_GPU`, or the like for other devices."""
        if accelerator.num_processes == 1:
            return "NO"
        kind = accelerator.device.type
        return "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Serve `accelerator.ddp_handler`."""
        return {"ddp_handler": self.settings}

    def on_end(self, accelerator: AcceleratorView) -> None:
        """Leave the group without anything under way."""
        if accelerator.num_processes > 1 and self.settings.has_comm_hook:
            let_go()

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Wrap a model that has something to train."""
        if evaluation_mode or accelerator.num_processes == 1:
            return model
        if isinstance(model, DistributedDataParallel):  # the user's own, or another Accelerator's
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        arguments = self.settings.constructor_arguments()
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1 and accelerator.device.type != "cpu" and accelerator.device in devices:
            arguments["device_ids"] = [accelerator.device.index]
            arguments["output_device"] = accelerator.device.index
        with warnings.catch_warnings():
            # torch's new name for it means something else, and says so itself.
            warnings.filterwarnings("ignore", ".*broadcast_buffers.* is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(model, **arguments)
        self.settings.register_comm_hook(wrapped)
        return wrapped

    def unwrap_model(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module inside."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, accelerator: AcceleratorView, model: Any) -> AbstractContextManager[Any]:
        """Keep gradients on their ranks; the first step of a static graph is synchronised all the same.

        torch aborts a static graph whose first backward is not reduced.
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
        """Make the next backward reduce, although its forward ran under `no_sync`."""
        return _reduce_next(model) if isinstance(model, DistributedDataParallel) else nullcontext()

    def join_uneven_inputs(
        self, accelerator: AcceleratorView, joinables: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """Let ranks that have run out shadow the collectives of the others."""
        able = [one for one in joinables if isinstance(one, Joinable)]
        return Join(able) if able else nullcontext()


@contextmanager
def _reduce_next(model: DistributedDataParallel) -> Iterator[None]:
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = True
    # What forward does when it will be reduced, and did not do under no_sync.
    model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync = before
