"""The torchft backends: replicas that train the same model, each in a world of its own.

The ranks of one replica form an ordinary process group and use DDP or FSDP2 inside of it. After each
backward that synchronises, gradients are averaged with the ranks of the same number in the other replicas.
A step is only taken if that worked. Replicas join and leave between two batches.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate_core.plugin import (
    AcceleratorView,
    Backend,
    Claim,
    ConfigurationError,
    Request,
    RuntimeView,
    Scope,
    Sources,
    resolve_settings,
)
from accelerate_ddp import DDPBackend, DistributedDataParallelKwargs
from accelerate_fsdp2 import FSDP2Backend, FullyShardedDataParallelPlugin
from accelerate_torchft.settings import TorchFTKwargs
from accelerate_torchft.state import capture, local, restore

if TYPE_CHECKING:
    from accelerate_torchft.local_steps import LocalSteps
    from accelerate_torchft.replica import Counts, Replica


class Replicated(Backend):
    """What both backends do across replicas. The class after it in the MRO acts inside a replica."""

    needs_group = False
    replica: Replica | None = None
    _local: LocalSteps | None = None
    _accelerator: Callable[[], AcceleratorView | None]

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        ours = next((one for one in handlers if isinstance(one, TorchFTKwargs)), None)
        rest = [one for one in handlers if not isinstance(one, TorchFTKwargs)]
        super().__init__(settings, rest)
        self.replication: TorchFTKwargs = resolve_settings(
            TorchFTKwargs, ours, Sources.of(os.environ)
        )[0]
        self._accelerator = lambda: None
        #: The loader that is being read, and the one whose loop contains the optimizer step.
        self._reading: Any = None
        self._training: object = None
        #: The position of that loader at the last quorum, to which a failed step returns.
        self._position: dict[str, Any] | None = None

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim nothing: these backends are selected by name."""
        return None

    # --- start --------------------------------------------------------------------------------

    def on_start(self, accelerator: AcceleratorView) -> None:
        """Connect to the lighthouse.

        Raises:
            ConfigurationError: no lighthouse is named, or another Accelerator of this process is in a
                quorum.
        """
        from accelerate_torchft.local_steps import LocalSteps
        from accelerate_torchft.replica import Replica

        if not self.replication.lighthouse:
            raise ConfigurationError(
                f"The backend {self.name} needs a lighthouse, but TORCHFT_LIGHTHOUSE is not set. Start "
                f"the script with `accelerate-core launch --backend {self.name}`, which starts one. Or "
                "start one yourself with `torchft_lighthouse --min_replicas 1`, and set "
                "TORCHFT_LIGHTHOUSE=http://HOST:29510."
            )
        _leave_quorums_of_deleted()
        self._accelerator = weakref.ref(accelerator)
        if self.replication.mode != "sync":
            self._local = LocalSteps(self.replication)
        world = accelerator.communicator
        self.replica = Replica(self.replication, world, self._capture, self._restore)
        _connected.append(self)
        atexit.register(self._close)
        accelerator.gradient_state.before_batch = self._before_batch

    def on_end(self, accelerator: AcceleratorView) -> None:
        """Leave the quorum."""
        accelerator.gradient_state.before_batch = None
        self._close()
        super().on_end(accelerator)  # type: ignore[misc]

    def _close(self) -> None:
        atexit.unregister(self._close)
        if self.replica is not None:
            self.replica.close()
            self.replica = None
            _connected.remove(self)

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `accelerator.replica` (this replica's number) and `accelerator.torchft` (its counts)."""
        counts = None if self.replica is None else self.replica.counts
        own = {"replica": self.replication.replica, "torchft": counts}
        return {**super().state_attributes(accelerator), **own}  # type: ignore[misc]

    def explain(self, accelerator: AcceleratorView) -> str:
        """Return the size of the quorum, and the counts of commits and heals."""
        if self.replica is None:
            return "torchft: not connected"
        counts: Counts = self.replica.counts
        mode = self.replication
        often = "" if mode.mode == "sync" else f", averaged every {mode.sync_every} steps"
        return (
            f"torchft: replica {mode.replica}, mode {mode.mode}{often}; {counts.replicas} of "
            f"{mode.expected} replicas train; {counts.commits} steps committed, {counts.failures} "
            f"not committed, {counts.heals} times healed, {counts.changes} changes of membership"
        )

    # --- data and collectives -----------------------------------------------------------------

    def _replicas(self) -> tuple[int, int]:
        """Return this replica's number and the number of replicas; the expected ones at the start."""
        if self.replica is not None and self.replica.place is not None:
            return self.replica.place
        expected = self.replication.expected
        return self.replication.replica % expected, expected

    def data_shard(self, runtime: RuntimeView) -> tuple[int, int]:
        """Return this rank's part of the data among all replicas."""
        index, count = super().data_shard(runtime)
        replica, replicas = self._replicas()
        return replica * count + index, replicas * count

    def loss_shard(self, runtime: RuntimeView) -> tuple[int, int]:
        """Return this rank's place in the sum of a loss. Local steps only sum inside a replica."""
        index, count = self._inside(runtime, "loss")
        if self.replication.mode != "sync":
            return index, count
        replica, replicas = self._replicas()
        return replica * count + index, replicas * count

    def _inside(self, runtime: RuntimeView, scope: Scope) -> tuple[int, int]:
        if scope == "data" or runtime.parallelism_config is None:
            return super().data_shard(runtime)
        return super().loss_shard(runtime)

    def _crosses(self, scope: Scope) -> bool:
        return scope == "data" or (scope == "loss" and self._local is None)

    def gather(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Concatenate over the ranks and the replicas.

        If a replica is lost, a warning is logged, and this replica's own values take its place.
        """
        if not self._crosses(scope):
            return super().gather(accelerator, tensor, scope)
        if self._inside(accelerator, scope)[1] > 1:
            tensor = super().gather(accelerator, tensor, scope)
        return self._across(accelerator, tensor)

    def _across(self, accelerator: AcceleratorView, tensor: torch.Tensor) -> torch.Tensor:
        gathered = None
        if self.replica is not None and self.replica.place is not None:
            gathered = self.replica.gather(tensor)
        if gathered is not None:
            return gathered
        accelerator.warn_once(
            "A gather among replicas failed, because a replica was lost or training has not begun. Its "
            "result has this replica's own values in place of the others'."
        )
        return tensor.repeat(self._replicas()[1])

    def gather_object(self, accelerator: AcceleratorView, obj: Any, scope: Scope) -> list[Any]:
        """Gather objects over the ranks and the replicas."""
        if not self._crosses(scope):
            return super().gather_object(accelerator, obj, scope)
        inside = self._inside(accelerator, scope)[1]
        objects = [obj] if inside == 1 else super().gather_object(accelerator, obj, scope)
        data = torch.frombuffer(bytearray(pickle.dumps(objects)), dtype=torch.uint8)
        data = data.to(accelerator.device)
        lengths = self._across(accelerator, torch.tensor([len(data)], device=data.device)).tolist()
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        rows = self._across(accelerator, padded).view(len(lengths), -1).cpu()
        pairs = zip(rows, lengths, strict=True)
        return [
            one for row, length in pairs for one in pickle.loads(row[:length].numpy().tobytes())
        ]

    def reduce(
        self, accelerator: AcceleratorView, tensor: torch.Tensor, op: Any, scope: Scope
    ) -> torch.Tensor:
        """Combine over the ranks and the replicas. If a replica is lost, the step is repeated."""
        if not self._crosses(scope):
            return super().reduce(accelerator, tensor, op, scope)
        if self._inside(accelerator, scope)[1] > 1:
            tensor = super().reduce(accelerator, tensor, op, scope)
        self._open_if_needed(accelerator)
        assert self.replica is not None
        return self.replica.reduce(tensor, op)

    # --- membership ---------------------------------------------------------------------------

    def _capture(self) -> Any:
        accelerator = self._accelerator()
        assert accelerator is not None, "the Accelerator calls this"
        outer = None if self._local is None else self._local.state_dict()
        return {"outer": outer, **capture(accelerator.run_parts())}

    def _restore(self, state: Any) -> None:
        accelerator = self._accelerator()
        assert accelerator is not None, "the Accelerator calls this"
        restore(accelerator.run_parts(), state)
        if self._local is not None:
            self._local.load_state_dict(state["outer"], accelerator.models)

    def _before_batch(self, loader: Any) -> None:
        """Form the next quorum before the batch that follows a step."""
        accelerator = self._accelerator()
        replica = self.replica
        if accelerator is None or replica is None:
            return
        models = accelerator.models
        if models and not any(model.training for model in models):
            return  # evaluation
        self._reading = loader
        first = replica.place is None
        if not (first or (replica.voted and loader is self._training)):
            return
        self._open(accelerator)
        if not accelerator.loaders:
            return
        self._position = loader.state_dict()

    def _open(self, accelerator: AcceleratorView) -> None:
        replica = self.replica
        assert replica is not None
        expected = self._replicas()
        failed, heals = replica.failed, replica.counts.heals
        rewinds = failed and hasattr(self._reading, "load_state_dict")
        if rewinds and self._position is not None:  # first, because a joining replica gets it
            self._reading.load_state_dict(self._position)
        changed = replica.open()
        healed = replica.counts.heals > heals
        if self._local is not None:
            self._local.keep(accelerator.models)
        # After a failure, a new replica may have taken the place of another one.
        if failed or healed or (changed and replica.place != expected):
            accelerator.reshare()
        if changed or failed:
            self._log(accelerator)

    def _open_if_needed(self, accelerator: AcceleratorView) -> None:
        """Form a quorum for scripts that read their data without a prepared loader."""
        replica = self.replica
        if replica is None:
            raise ConfigurationError(
                "Training continues after end_training, which left the quorum."
            )
        if replica.place is None or (replica.voted and self._reading is None):
            self._open(accelerator)

    def _log(self, accelerator: AcceleratorView) -> None:
        assert self.replica is not None
        counts = vars(self.replica.counts)
        tracking = accelerator.run_parts().tracking
        if tracking.trackers:
            tracking.log({f"torchft/{name}": value for name, value in counts.items()})

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Prepare the model inside the replica, and form quorums before its first forward of a step.

        A prepared loader forms them earlier. Without one, healing in `backward` would be too late, because
        it changes weights that the forward has used.
        """
        prepared: torch.nn.Module = super().prepare_model(accelerator, model, evaluation_mode)
        if evaluation_mode:
            return prepared
        backend = weakref.ref(self)

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            there = backend()
            view = None if there is None else there._accelerator()
            if (
                there is not None
                and view is not None
                and module.training
                and torch.is_grad_enabled()
            ):
                there._open_if_needed(view)

        # Before FSDP2 gathers the weights.
        prepared.register_forward_pre_hook(before_forward, prepend=True)
        return prepared

    # --- step ---------------------------------------------------------------------------------

    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients, and average them over the replicas in the last backward of a cycle."""
        self._open_if_needed(accelerator)
        super().backward(accelerator, loss, kwargs)
        if accelerator.sync_gradients and self._local is None:
            assert self.replica is not None
            self._average(accelerator.models)

    def _average(self, models: Sequence[torch.nn.Module]) -> None:
        replica = self.replica
        assert replica is not None
        if replica.alone:
            return
        missing = []
        gradients = []
        for parameter in dict.fromkeys(_trained(models)):
            # A parameter may be unused here and used in another replica.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                missing.append(parameter)
            gradients.append(local(parameter.grad))
        replica.average(gradients)
        for parameter in missing:
            assert parameter.grad is not None
            if not local(parameter.grad).any():
                parameter.grad = None

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Step if all replicas averaged their gradients; otherwise the batch is read again.

        Raises:
            ConfigurationError: the optimizer evaluates its closure several times, or several optimizers
                take local steps.
        """
        if closure is not None:
            _refuse_line_search(optimizer)
            with torch.enable_grad():
                closure()  # before the vote, which is about its gradients
        self._open_if_needed(accelerator)
        replica = self.replica
        assert replica is not None
        self._training = self._reading
        if self._local is None:
            return replica.vote() and super().optimizer_step(accelerator, optimizer, None)
        if len(accelerator.optimizers) > 1:
            raise ConfigurationError(
                f"mode={self.replication.mode!r} of torchft supports one optimizer, but "
                f"{len(accelerator.optimizers)} are prepared. Use mode='sync'."
            )
        if not super().optimizer_step(accelerator, optimizer, None):
            return False
        last = accelerator.gradient_state.end_of_dataloader
        return self._local.stepped(replica, accelerator.models, last)


#: The backends of this process that are connected to a lighthouse.
_connected: list[Replicated] = []


def _leave_quorums_of_deleted() -> None:
    """Leave the quorums of deleted Accelerators, which the lighthouse would wait for.

    Raises:
        ConfigurationError: another Accelerator is still in a quorum.
    """
    for one in list(_connected):
        if one._accelerator() is not None:
            raise ConfigurationError(
                "A process can only be in one quorum of torchft, and another Accelerator of this process "
                "has not left it. Call its end_training() before you create the next one, or use one "
                "Accelerator for all models."
            )
        one._close()


def _refuse_line_search(optimizer: Any) -> None:
    """Refuse optimizers that can't step without a closure, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates its closure several times in a step. It cannot be used "
            "with torchft, because the replicas vote about a step before it is taken."
        )


def _trained(models: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad:
                yield parameter


class TorchFTBackend(Replicated, DDPBackend):
    """Replicas that keep training when one of them dies; with DDP inside each replica."""

    name = "torchft"
    api_version = (1, 0)
    supports: ClassVar[Mapping[str, Any]] = {
        **DDPBackend.supports,
        "elastic": True,
        "join": False,
    }
    Settings: ClassVar[Any] = None
    handlers: ClassVar[Any] = (TorchFTKwargs, DistributedDataParallelKwargs)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        of_ddp = next((one for one in handlers if not isinstance(one, TorchFTKwargs)), None)
        sources = Sources.of(os.environ)
        ddp, _ = resolve_settings(DistributedDataParallelKwargs, of_ddp, sources)
        super().__init__(ddp, handlers)


class ShardedTorchFTBackend(Replicated, FSDP2Backend):
    """Replicas that keep training when one of them dies; with FSDP2 inside each replica."""

    name = "torchft_fsdp2"
    api_version = (1, 0)
    needs_group = True
    supports: ClassVar[Mapping[str, Any]] = {**FSDP2Backend.supports, "elastic": True}
    handlers: ClassVar[Any] = (TorchFTKwargs, FullyShardedDataParallelPlugin)
