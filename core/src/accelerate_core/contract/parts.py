"""The replaceable parts of an Accelerator: what the core asks of each, and what each is handed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpointer",
    "Contributor",
    "LoopEvents",
    "Process",
    "Stateful",
    "Tracking",
    "TrainingState",
]


class Stateful(Protocol):
    """What a checkpoint keeps and gives back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Process(Protocol):
    """Where this process stands among the ranks."""

    process_index: int
    num_processes: int
    local_process_index: int
    local_num_processes: int
    device: torch.device
    timeout: timedelta | None


class LoopEvents(Protocol):
    """Two slots of the training loop; None costs nothing."""

    #: Called by a loader before it reads a batch with which an accumulation cycle may begin.
    before_cycle: Callable[[], None] | None
    #: Called by a loader when the body of its loop has run.
    loop_body_end: Callable[[], None] | None


class Contributor(Protocol):
    """A plugin that keeps something of its own in a checkpoint; `key` names its directory."""

    key: str

    def save(self, directory: str) -> None: ...

    def load(self, directory: str) -> None: ...


class TrainingState(Protocol):
    """All that a checkpointer is handed of a training run.

    Methods that gather are called by all ranks in the same order.
    """

    process: Process
    #: The world; `duplicate()` returns one for a thread, or None where there is no second group.
    collectives: Any
    #: `ProjectConfiguration`: directories, naming and retention.
    project: Any
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    registered: Sequence[Stateful]
    scaler: Stateful | None
    #: Whether the backend writes and reads its checkpoints itself.
    owns_format: bool
    #: Whether the gradients of a cycle that has begun can be read.
    gives_gradients: bool
    events: LoopEvents

    def settle(self) -> None:
        """Finish what the last step left open, such as the loss scale's update."""

    def inner(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model without the backend's wrapping and `torch.compile`'s."""

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]: ...

    def load_model_state(
        self, model: torch.nn.Module, state: Mapping[str, Any], strict: bool
    ) -> None: ...

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]: ...

    def load_optimizer_state(self, optimizer: Any, state: Mapping[str, Any]) -> None: ...

    def backend_save(
        self, directory: str, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Let the backend write what is its own; a returned function writes the rest later."""

    def backend_load(self, directory: str, options: Mapping[str, Any]) -> None: ...

    def contributors(self) -> list[Contributor]: ...

    def save_hooks(self) -> list[Callable[..., None]]: ...

    def load_hooks(self) -> list[Callable[..., None]]: ...

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's own: step, generators, loaders, cycle, runs of trackers."""

    def load_rank_state(
        self,
        own: Mapping[str, Any],
        all_ranks: Sequence[Mapping[str, Any]] | None,
        saved_by: int,
    ) -> None:
        """Go on from `rank_state`, generators last; `all_ranks`: if other ranks saved it."""

    def cycle_begun(self) -> bool: ...

    def pending_gradients(self) -> dict[str, Any]: ...

    def load_gradients(self, found: Mapping[str, Any], factor: float) -> None: ...

    def facts(self) -> dict[str, Any]:
        """Return what the manifest says of the run: world, mesh, plugins, versions."""

    def note_once(self, text: str) -> None: ...

    def end_training(self) -> None:
        """End the run; called by preemption once its save stands."""


class Checkpointer(Protocol):
    """Writes and reads checkpoints of one Accelerator."""

    preemption_requested: bool

    @classmethod
    def check(cls, project: Any, signals: str | None) -> None:
        """Refuse impossible settings; called before the process group starts.

        Args:
            project: the `ProjectConfiguration`.
            signals: text of `preemption_signals`, None without.
        """

    def attach(self, state: TrainingState) -> None:
        """Take the run whose checkpoints are to be written; called once, at construction."""

    def save(
        self,
        target: str | os.PathLike[str] | None,
        *,
        safe_serialization: bool,
        max_shard_size: int | str,
        blocking: bool,
        options: Mapping[str, Any],
    ) -> str:
        """Write a checkpoint and return where; `target` None: named automatically."""

    def load(
        self,
        source: str | os.PathLike[str] | None,
        *,
        load_kwargs: Mapping[str, Any],
        trust: bool,
        verify: bool,
        options: Mapping[str, Any],
    ) -> str:
        """Read a checkpoint and return from where; `source` None: the newest whole one."""

    def save_model(
        self,
        model: torch.nn.Module,
        directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None: ...

    def save_object(self, obj: Any, f: Any, safe_serialization: bool) -> None: ...

    def wait(self) -> None:
        """Return when what is being written stands; raise what it failed with."""

    def release(self) -> None:
        """Give back the memory kept for saving beside the training."""

    def close(self, failed: bool) -> None:
        """End; `failed`: the other ranks may be gone, so meet nobody."""


class Tracking(Protocol):
    """From one `log` call to every tracker of one Accelerator.

    Raises at construction for a tracker that is not there; without one asked for, an Accelerator
    has a `NoTracking`. No method meets another rank, and `log` waits for no library.

    Args:
        asked: what `log_with` has; `"all"` is resolved here.
        logging_dir: where trackers write, None without.
        rank, size: of this process in the world.
        is_main: whether this is the rank that logs.
    """

    trackers: list[Any]
    #: Ids of the trackers' runs of the checkpoint that was loaded, by tracker name.
    resumed_runs: dict[str, str]

    def __init__(
        self,
        asked: object,
        logging_dir: str | os.PathLike[str] | None,
        rank: int,
        size: int,
        is_main: bool,
    ) -> None: ...

    @property
    def names(self) -> list[str]:
        """Of the trackers asked for, those switched off included."""

    def init(
        self,
        project_name: str,
        config: Any,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        """Start a run in every tracker.

        Args:
            init_kwargs: per tracker name, arguments of its constructor.
        """

    def get(self, name: str, unwrap: bool) -> Any:
        """Return a tracker, or a blank one where it does not run here."""

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None,
    ) -> None: ...

    def log_media(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        """Log what is no value.

        Args:
            verb: `images`, `table`, `figure`, `artifact`, `text` or `histogram`.
            arguments: those of the Accelerator's `log_<verb>`, but for `step` and `log_kwargs`.
        """

    def flush(self, timeout: float | None) -> list[str]:
        """Wait until the trackers have what was logged; return the names of those not done.

        Args:
            timeout: seconds; None waits for whom makes progress.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain data by which a resumed script goes on in the same runs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the runs of a checkpoint; after `init`, empty runs are dropped for them."""

    def is_failing(self) -> bool:
        """Whether an exception is on its way out."""

    def finish(self, failed: bool) -> None:
        """Deliver what is left and close the runs; a second call does nothing."""
