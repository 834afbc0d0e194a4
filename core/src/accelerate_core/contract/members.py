"""What a plugin may use of the objects that an `AcceleratorView` and hooks give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.optim import Optimizer

#: Which ranks take part in a collective: those with different samples, those whose losses are
#: averaged, or all.
Scope = Literal["data", "loss", "world"]

#: How the values of several ranks become one.
ReduceOp = Literal["sum", "mean", "max", "min"]

T = TypeVar("T")

#: What kind of object `prepare` was given.
ObjectKind = Literal["model", "optimizer", "scheduler", "loader", "other"]


class BackendView(Protocol):
    """The active backend, as other plugins read it: its declarations."""

    @property
    def name(self) -> str:
        """Name of its entry point."""

    @property
    def supports(self) -> Mapping[str, Any]:
        """What it can do; the keys are those of `contract.capabilities.SUPPORTS`."""

    @property
    def owns(self) -> frozenset[str]:
        """What the core leaves to it; words of `contract.capabilities.OWNS`."""

    @property
    def reduces_gradients(self) -> str:
        """When ranks have each other's gradients: `backward`, `step`, `engine` or `never`."""

    @property
    def shards(self) -> Mapping[str, tuple[str, ...]]:
        """Mode -> which of `weights`, `gradients`, `optimizer` it divides over the ranks."""

    def scope_group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the process group of a scope; None is the default group."""


class CommunicatorView(Protocol):
    """The processes of one scope: a `Communicator`."""

    rank: int
    size: int
    device: torch.device

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Return the tensors [k] of all ranks as one [size * k]."""

    def reduce(
        self, t: torch.Tensor, op: ReduceOp = "sum", *, overwrite: bool = False
    ) -> torch.Tensor:
        """Return the elementwise sum, mean, max or min over the ranks."""

    def broadcast(self, t: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor of rank `src`."""

    def all_to_all(self, t: torch.Tensor) -> torch.Tensor:
        """Send the i-th of `size` equal pieces to rank i; return the received pieces."""

    def barrier(self) -> None:
        """Return once every rank has called this."""

    def gather_object(self, obj: T) -> list[T]:
        """Return the picklable objects of all ranks, in rank order."""

    def broadcast_object(self, obj: object, src: int = 0) -> Any:
        """Return the picklable object of rank `src`."""

    def scatter_object(self, objs: Sequence[object] | None, src: int = 0) -> Any:
        """Return this rank's one of the objects that rank `src` gives."""

    def open_group(self) -> dist.ProcessGroup | None:
        """Return a new process group of the same ranks, for tensors in host memory."""

    def duplicate(self) -> CommunicatorView | None:
        """Return a communicator of the same ranks for another thread, None if there is no group."""

    def alone(self) -> CommunicatorView:
        """Return a communicator of this process only: every method is the identity."""


class BatchView(Protocol):
    """What is known of the batch that an iteration over a prepared loader has served last."""

    #: Whether no batch follows on this rank.
    last: bool
    #: Real samples of the global batch if it was filled up, else None.
    real: int | None


class GradientStateView(Protocol):
    """Where the loops are in their accumulation cycle: a `GradientState`."""

    num_steps: int
    adjust_scheduler: bool
    sync_with_dataloader: bool
    sync_each_batch: bool
    sync_gradients: bool
    #: How often gradients have been computed, and how often a prepared optimizer has stepped.
    backwards: int
    steps: int
    #: Called by a loader after each pass through the body of its loop.
    loop_body_end: Callable[[], None] | None

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a prepared loader is running."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader has served its last batch."""

    @property
    def remainder(self) -> int:
        """Real samples in its last global batch, 0 if all are, -1 if that is not known."""

    def serve(
        self, loader: object, start: Callable[[BatchView], Iterator[Any]], whole: int | None = None
    ) -> Iterator[Any]:
        """Iterate over a loader's batches, and track where the loop is."""


class PreparedOptimizer(Protocol):
    """An optimizer as `prepare` returns it."""

    #: The optimizer inside it, as the backend steps it.
    optimizer: Optimizer
    #: How many steps were taken, and `GradientStateView.backwards` at the last one.
    steps_taken: int
    seen_backwards: int

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with their hyperparameters."""

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """State of each parameter."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient overflowed."""


class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load a state of `state_dict`."""


class Scheduler(Stateful, Protocol):
    """A learning rate scheduler of any class."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Set the next learning rates; some are given a metric."""


class PlanEntryView(Protocol):
    """One object of a call of `prepare`."""

    #: The object as it was given.
    original: Any
    #: The object as it is now; assign to it to replace the object.
    value: Any
    on_device: bool
    evaluation_mode: bool


class PreparePlanView(Protocol):
    """The objects of one call of `prepare`, in order: a `PreparePlan`."""

    def of_kind(self, kind: ObjectKind) -> Iterator[PlanEntryView]:
        """Iterate over the entries of one kind that are not prepared yet."""

    def values(self, kind: ObjectKind) -> list[Any]:
        """Return the objects of one kind that are not prepared yet, as they are now."""

    def each(self, kind: ObjectKind, change: Callable[[Any, PlanEntryView], object]) -> None:
        """Replace every object of a kind with the result of `change(object, entry)`."""

    def rename(self, model: torch.nn.Module, names: Mapping[str, str]) -> None:
        """Say what parameters of a model are called now: old name -> new name."""

    def rebind(self) -> None:
        """Point the optimizers at the parameters that the models have now, by name."""
