"""The replaceable parts of an Accelerator: what the core asks of each, and what each is handed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from accelerate_core.contract.topology import Process
from accelerate_core.contract.view import AcceleratorView

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpointer", "LoaderMaker", "PreparedLoader", "Run", "Tracking"]


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


class PreparedLoader(Protocol):
    """A loader as `prepare` returns it: this rank's part of the data, in batches on its device.

    Where `dataset_size` and `len` are known it has them too: a checkpoint's position of another
    dataset is then left alone.
    """

    #: Whether the last global step is filled up, so that all ranks get batches of one size; the
    #: core sets it after making, and `join_uneven_inputs` for a while.
    even_batches: bool
    #: Whether batches are moved by the backend's `feed_device`; set by the core after making.
    put_on_device: bool

    @property
    def iteration(self) -> int:
        """The epoch to which the next iteration belongs: how many were finished, or were set."""

    @property
    def remainder(self) -> int:
        """Real samples in the last global batch if it is filled up or short, 0 if it is whole.

        -1: not known.
        """

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration: where `load_state_dict` said, else at the beginning of the epoch.

        Return `accelerator.gradient_state.serve(self, start, whole)`. There `whole` is the number
        of samples of a full global batch, None if that is not known, and `start(served)` opens
        the data and returns an iterator of batches on the device. When a batch comes out of it
        the record of the iteration has to say

        * `served.last`: that no batch follows on this rank. Accumulation steps then.
        * `served.real`: of how many real samples the global batch is (all ranks' batches joined in
          rank order, the real ones first) if it was filled up, else None. `gather_for_metrics`
          cuts there.

        In every global step the ranks' batches are different samples; with `even_batches` all
        ranks get equally many batches. An iteration that is left by `break` ends there: the next
        one begins the epoch anew.
        """

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; what is shuffled depends on it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data and tensors on the CPU.

        The batches handed out do not come again after loading; between two epochs it is the
        beginning of the next.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there with the next iteration: the same batches in the same order, and the next
        epochs too, as if the run had not been interrupted.

        Raises:
            ConfigurationError: the position does not fit this loader.
        """

    def skipping(self, num_batches: int) -> Any:
        """Return this loader without its first batches (per rank), counted from an epoch's start."""


class LoaderMaker(Protocol):
    """Makes prepared loaders, in the place of the core.

    The class states `name`, as its entry point has it, and `api_version`. With a `Settings`, made
    by `accelerate_core.settings`, it is made with one of these as its only argument: from
    `kwargs_handlers`, the environment and the config file. It is made when the first loader is
    prepared, once per Accelerator.
    """

    def make_loader(self, accelerator: AcceleratorView, loader: Any) -> PreparedLoader | None:
        """Return the prepared form of a loader; None leaves it to the core.

        Args:
            accelerator: tells the part of the data (`hooks.data_shard(accelerator)` returns index
                and count), the device's feed (`hooks.feed_device(accelerator, batches,
                non_blocking)`), the smallest unit of a batch (`hooks.fixed_batch(accelerator)`) and
                `gradient_state`.
            loader: what was given to `prepare`.

        Called on all ranks alike. A loader that has not a `dataset` and is no `DataLoader` is
        recognised by `prepare` if a plugin classifies it.
        """


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
