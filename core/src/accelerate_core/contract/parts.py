"""The replaceable parts of an Accelerator: what the core asks of each, and what each is handed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from accelerate_core.contract.topology import Process
from accelerate_core.contract.view import AcceleratorView

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpointer", "Run", "Tracking"]


@dataclass(frozen=True)
class Run:
    """The parts of one Accelerator, as a checkpointer is handed them.

    `accelerate_checkpoint.TrainingState(run)` says what there is to save, and gives it back.

    Attributes:
        accelerator: for the hooks.
        process: ranks, device, store.
        training: the `TrainingLoop`: accumulation cycle, scaler, token count.
        prepared: the `Prepared` models, optimizers, schedulers and loaders.
        saving: the project, registered objects and hooks of `Saving`.
        tracking: feeds the trackers.
        end_training: ends the run.
    """

    accelerator: AcceleratorView
    process: Process
    training: Any
    prepared: Any
    saving: Any
    tracking: Tracking
    end_training: Callable[[], None]


class Checkpointer(Protocol):
    """Writes and reads checkpoints of one Accelerator.

    The class states `name`, as its entry point has it, and `api_version`. With a `Settings`, made
    by `accelerate_core.settings`, it is made with one of these as a third argument: from
    `kwargs_handlers`, the environment and the config file.
    """

    def __init__(self, project: Any, signals: str | None) -> None:
        """Refuse impossible settings.

        Made before the process group starts if the settings ask for something (signals, naming,
        a limit, a backend without gradients), else when it is first used.

        Args:
            project: the `ProjectConfiguration`.
            signals: text of `preemption_signals`, None without.
        """

    def attach(self, run: Run) -> None:
        """Take the run whose checkpoints are to be written; called once, before all else."""

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

    @property
    def preemption_requested(self) -> bool:
        """Whether one of the signals has come."""

    def wait(self) -> None:
        """Return when what is being written stands; raise what it failed with."""

    def release(self) -> None:
        """Wait, and give back the memory kept for saving beside the training."""

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
