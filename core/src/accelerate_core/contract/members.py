"""Protocols of the objects that plugins get from an `AcceleratorView` and from hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.optim import Optimizer

#: Which ranks take part in a collective: those with different samples, those over which losses are
#: averaged, or all ranks.
Scope = Literal["data", "loss", "world"]

#: How the values of several ranks are combined.
ReduceOp = Literal["sum", "mean", "max", "min"]

T = TypeVar("T")

#: The kind of an object that was passed to `prepare`.
ObjectKind = Literal["model", "optimizer", "scheduler", "loader", "other"]


class BackendView(Protocol):
    """The declarations of the active backend, which other plugins may read."""

    @property
    def name(self) -> str:
        """Name of the backend's entry point."""

    @property
    def supports(self) -> Mapping[str, Any]:
        """What the backend supports. The keys are listed in `contract.capabilities.SUPPORTS`."""

    @property
    def owns(self) -> frozenset[str]:
        """What the core leaves to the backend, as words of `contract.capabilities.OWNS`."""

    @property
    def reduces_gradients(self) -> str:
        """When the gradients of all ranks are combined: `backward`, `step`, `engine` or `never`."""

    @property
    def shards(self) -> Mapping[str, tuple[str, ...]]:
        """Mode -> which of `weights`, `gradients` and `optimizer` are split across the ranks."""

    def scope_group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the process group of a scope; None means the default group."""


class CommunicatorView(Protocol):
    """Collectives among the processes of one scope; implemented by `Communicator`."""

    rank: int
    size: int
    device: torch.device

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, of shape [k], as one tensor of shape [size * k]."""

    def reduce(
        self, t: torch.Tensor, op: ReduceOp = "sum", *, overwrite: bool = False
    ) -> torch.Tensor:
        """Return the elementwise sum, mean, max or min over the ranks."""

    def all_equal(self, value: object) -> bool:
        """Return whether all ranks pass a value with the same `repr`, with one reduction."""

    def broadcast(self, t: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor of rank `src`."""

    def all_to_all(self, t: torch.Tensor) -> torch.Tensor:
        """Send the i-th of `size` equal pieces to rank i, and return the received pieces."""

    def barrier(self) -> None:
        """Return once every rank has called this."""

    def gather_object(self, obj: T) -> list[T]:
        """Return the picklable objects of all ranks, in rank order."""

    def broadcast_object(self, obj: object, src: int = 0) -> Any:
        """Return the picklable object of rank `src`."""

    def scatter_object(self, objs: Sequence[object] | None, src: int = 0) -> Any:
        """Return this rank's object from the sequence that rank `src` passes."""

    def open_group(self) -> dist.ProcessGroup | None:
        """Return a new process group of the same ranks for tensors in host memory, or None."""

    def duplicate(self) -> CommunicatorView | None:
        """Return a communicator of the same ranks for another thread, or None without a group."""

    def alone(self) -> CommunicatorView:
        """Return a communicator of this process only, whose methods return their input."""


class BatchView(Protocol):
    """Information about the last batch that a prepared loader yielded."""

    #: Whether it is the last batch on this rank.
    last: bool
    #: Number of real samples in the global batch if it was padded, else None.
    real: int | None
    #: Number of samples in a full global batch; None if unknown.
    whole: int | None


class GradientStateView(Protocol):
    """The position in the accumulation cycle; implemented by `GradientState`."""

    num_steps: int
    adjust_scheduler: bool
    sync_with_dataloader: bool
    sync_each_batch: bool
    sync_gradients: bool
    #: Number of backward passes, and of steps of prepared optimizers.
    backwards: int
    steps: int
    #: Whether ranks may have taken different numbers of steps, because `join_uneven_inputs` was entered.
    uneven_inputs: bool
    #: Called with the loader before each batch of a loop, and once before its end. An elastic backend
    #: changes the ranks here.
    before_batch: Callable[[Any], None] | None
    #: Called by a loader each time the body of the loop over it has run.
    loop_body_end: Callable[[], None] | None

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a prepared loader is running."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether that loader has yielded its last batch."""

    @property
    def remainder(self) -> int:
        """Number of real samples in its last global batch; 0 if all are real, -1 if unknown."""

    def serve(
        self, loader: object, start: Callable[[BatchView], Iterator[Any]], whole: int | None = None
    ) -> Iterator[Any]:
        """Yield the batches of a loader, and keep track of the position."""


class PreparedOptimizer(Protocol):
    """An optimizer as `prepare` returns it."""

    #: The inner optimizer, which the backend steps.
    optimizer: Optimizer
    #: Number of steps taken, and the value of `GradientStateView.backwards` at the last one.
    steps_taken: int
    seen_backwards: int

    def call_after_step(self, step: int, function: Callable[[PreparedOptimizer], None]) -> None:
        """Call a function with this optimizer once, at the end of a step; other steps cost nothing.

        Args:
            step: the number of the step. If it has passed, the function is called after the next one.
        """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with their hyperparameters."""

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """State of each parameter."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient overflowed."""


class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load a state that `state_dict` returned."""


class Scheduler(Stateful, Protocol):
    """A learning rate scheduler of any class."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Set the next learning rates. Some schedulers take a metric."""


class PlanEntryView(Protocol):
    """One object that was passed to a call of `prepare`."""

    #: The object that was passed.
    original: Any
    #: The current object; assign to replace it.
    value: Any
    on_device: bool
    evaluation_mode: bool


class PreparePlanView(Protocol):
    """The objects of one call of `prepare`, in order; implemented by `PreparePlan`."""

    def of_kind(self, kind: ObjectKind) -> Iterator[PlanEntryView]:
        """Iterate over the entries of one kind that are not prepared yet."""

    def values(self, kind: ObjectKind) -> list[Any]:
        """Return the current objects of one kind that are not prepared yet."""

    def each(self, kind: ObjectKind, change: Callable[[Any, PlanEntryView], object]) -> None:
        """Replace every object of one kind with the result of `change(object, entry)`."""

    def rename(self, model: torch.nn.Module, names: Mapping[str, str]) -> None:
        """Report that parameters of a model were renamed: old name -> new name."""

    def rebind(self) -> None:
        """Rebind the optimizers to the current parameters of the models, by name."""

    def add(self, kind: ObjectKind, obj: object) -> None:
        """Prepare an object that the script did not pass. It is saved, but not returned to the script."""

    def drop(self, model: torch.nn.Module, names: Collection[str]) -> None:
        """Report that this rank does not keep some parameters of a model, such as other stages' layers.

        The optimizers drop them too.
        """


class GradientReducer(Protocol):
    """Averages one model's gradients over ranks. An extension returns it from `reduce_gradients`.

    Gradients arrive in buckets, as flat tensors of shape [n] that may be overwritten. Each bucket has
    a number. On all ranks, buckets of the same number have the same size and come in the same order.
    A backend uses one of the two methods.
    """

    def all_reduce(
        self, gradients: torch.Tensor, bucket: int, group: dist.ProcessGroup
    ) -> torch.Tensor | torch.futures.Future[torch.Tensor]:
        """Return the mean over the ranks of the group, of shape [n].

        A future lets the reduction overlap with the rest of backward. A backend may form new buckets, of
        other sizes, after the first backward.
        """

    def reduce_scatter(
        self, output: torch.Tensor, gradients: torch.Tensor, bucket: int, group: dist.ProcessGroup
    ) -> None:
        """Write this rank's part of the mean to `output`, of shape [n / size of the group]."""
