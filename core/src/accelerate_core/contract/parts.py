"""The replaceable parts of an Accelerator: what the core asks of each, and what each is handed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from accelerate_core.config.handlers import ProjectConfiguration
from accelerate_core.contract.members import Stateful
from accelerate_core.contract.topology import Process
from accelerate_core.contract.view import AcceleratorView
from accelerate_core.errors import PluginError, listing

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpointer", "LoaderFactory", "LogKwargs", "PreparedLoader", "RunParts", "Tracking"]


class TokenCountView(Stateful, Protocol):
    """The items of one accumulation cycle."""

    @property
    def open(self) -> bool:
        """Whether the current cycle counts its items."""


class Contribution(Protocol):
    """One plugin's implementation of a hook that several plugins may implement."""

    @property
    def key(self) -> str:
        """Kind and name of the plugin: `kind:name`."""

    @property
    def names(self) -> Iterable[str]:
        """The hook's arguments that it takes."""

    def __call__(self, arguments: Mapping[str, object]) -> object:
        """Call it with the hook's arguments by name, the Accelerator included."""


class SharedHooksView(Protocol):
    """The hooks that several plugins may implement, bound to one Accelerator."""

    def implementations(self, hook: str) -> Sequence[Contribution]:
        """Return the implementations of a hook, ordered by plugin name."""

    def call(self, implementation: Contribution, **arguments: object) -> object:
        """Call one implementation with the hook's arguments, and return its answer."""


@dataclass(frozen=True)
class RunParts:
    """What a checkpointer saves of one Accelerator, and restores.

    `accelerate_checkpoint.TrainingState(run)` does both.

    Attributes:
        accelerator: has the models, optimizers, schedulers, loaders, scaler and the cycle's step.
        process: ranks, device, store.
        project: returns directories, naming and retention, which the script may replace.
        registered: the objects of `register_for_checkpointing`.
        save_hooks: the script's `hook(models, weights, output_dir)`, by number.
        load_hooks: the script's `hook(models, input_dir)`, by number.
        tokens: the items counted in the current accumulation cycle.
        update_scale: applies a scale update that waits for other optimizers; call it before reading.
        restore_positions: returns whether loaders continue where the checkpoint was saved.
        inner_model: returns a model without the backend's wrapping and without `torch.compile`'s.
        whole_state: returns a model's whole state dict; on every rank, in the same order.
        plugins: kind, name, distribution and version of each active plugin.
        shared_hooks: `on_save` and `on_load` of these.
        tracking: feeds the trackers.
        end_training: ends the run.
    """

    accelerator: AcceleratorView
    process: Process
    project: Callable[[], ProjectConfiguration]
    registered: Sequence[Stateful]
    save_hooks: Mapping[int, Callable[..., None]]
    load_hooks: Mapping[int, Callable[..., None]]
    tokens: TokenCountView
    update_scale: Callable[[], None]
    restore_positions: Callable[[], bool]
    inner_model: Callable[[torch.nn.Module], torch.nn.Module]
    whole_state: Callable[[torch.nn.Module], dict[str, Any]]
    plugins: Sequence[Mapping[str, str]]
    shared_hooks: SharedHooksView
    tracking: Tracking
    end_training: Callable[[], None]


class Checkpointer(Protocol):
    """Writes and reads checkpoints of one Accelerator.

    The class states `name`, as its entry point has it, and `api_version`. With a `Settings`, made
    by `accelerate_core.settings`, it is made with one of these as a third argument: from
    `kwargs_handlers`, the environment and the config file.
    """

    def __init__(self, project: ProjectConfiguration, signals: str | None) -> None:
        """Refuse impossible settings.

        Made before the process group starts if the settings ask for something (signals, naming,
        a limit, a backend without gradients), else when it is first used.

        Args:
            project: directories, naming and retention.
            signals: text of `preemption_signals`, None without.
        """

    def attach(self, run: RunParts) -> None:
        """Take the run whose checkpoints are to be written; called once, before all else."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: object,
    ) -> str:
        """Write everything that going on needs into a directory; return the directory.

        It appears whole or not at all, with a manifest of sizes and checksums; what stood there
        is replaced in the same moment. All ranks call this.

        Args:
            output_dir: not with automatic naming (`ProjectConfiguration`).
            safe_serialization: weights as safetensors; False: in torch's own format.
            blocking: False copies the state to host memory and returns; it is written while
                training goes on, and the next save, `load_state`, `wait_for_checkpoint` or
                `end_training` waits for it and raises what it failed with.
            max_shard_size: largest file of weights: bytes, or a text such as "5GB".
            save_model_func_kwargs: for backends that write checkpoints themselves.

        Raises:
            CheckpointError: a rank failed to save; on every rank. Earlier checkpoints stand.

        """

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        trust: bool = False,
        verify: bool = True,
        **load_model_func_kwargs: object,
    ) -> str:
        """Read what `save_state` wrote into the same prepared objects; return the directory.

        The checkpoint is verified first, and nothing is changed if it is damaged. An ordinary
        loop over a prepared loader then goes on where the run stood. Directories that Hugging
        Face Accelerate 1.x wrote load too.

        Args:
            input_dir: if None the newest whole one of those with automatic names; damaged ones
                are passed over, with a warning.
            load_kwargs: for `torch.load`, of optimizers.
            trust: also unpickle Python objects in the states of optimizers, schedulers and
                registered objects; only for directories you wrote yourself.
            verify: False compares sizes only, not checksums.
            load_model_func_kwargs: `strict=False`, and others for backends that read checkpoints
                themselves.

        Raises:
            CheckpointError: something is missing, damaged or does not fit, by name.

        """

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights where `load_checkpoint_in_model` finds them.

        Args:
            max_shard_size: bytes, or a text such as "5MB".
            safe_serialization: safetensors; False: torch's pickle.
            save_directory: a folder, made where it is missing.

        Example:
            from safetensors.torch import load_file

            accelerator.save_model(model, "trained")
            weights = load_file("trained/model.safetensors")
        """

    def save(
        self, obj: object, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Write an object once (per machine, with `save_on_each_node`), in place of `torch.save`.

        Args:
            safe_serialization: write safetensors, where the object is a dict of tensors.
        """

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

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return this loader without its first batches (per rank), counted from an epoch's start."""


class LoaderFactory(Protocol):
    """Makes prepared loaders, in the place of the core.

    The class states `name`, as its entry point has it, and `api_version`. With a `Settings`, made
    by `accelerate_core.settings`, it is made with one of these as its only argument: from
    `kwargs_handlers`, the environment and the config file. It is made with the Accelerator.
    """

    def make_loader(self, accelerator: AcceleratorView, loader: object) -> PreparedLoader | None:
        """Return the prepared form of a loader; None leaves it to the core.

        Args:
            accelerator: tells the part of the data (`hooks.data_shard()` returns index and
                count), the device's feed (`hooks.feed_device(batches, non_blocking)`), the
                smallest unit of a batch (`hooks.fixed_batch()`) and
                `gradient_state`.
            loader: what was given to `prepare`.

        Called on all ranks alike. A loader that has not a `dataset` and is no `DataLoader` is
        recognised by `prepare` if a plugin classifies it.
        """


#: Per tracker name, arguments of its method.
LogKwargs = Mapping[str, Mapping[str, Any]] | None


class Tracking(Protocol):
    """From one `log` call to every tracker of one Accelerator.

    Raises at construction for a tracker that is not there; without one asked for, an Accelerator
    has a `NoTracking`. No method meets another rank, and `log` waits for no library. A tracker that
    does not have one of the verbs is skipped, and said so once.

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

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: LogKwargs = None
    ) -> None:
        """Start a run in every tracker asked for, with a configuration.

        Args:
            init_kwargs: per tracker name, arguments of its constructor.
            project_name: name of the project in each tracker.

        Example:
            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits", config={"lr": 1e-3, "batch_size": 8})
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()
        """

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` the library's own object."""

    def log(
        self, values: Mapping[str, object], step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log values to all trackers, on the main process.

        Args:
            log_kwargs: per tracker name, arguments of its `log`.

        Example:
            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits")
            accelerator.log({"train/loss": loss, "train/lr": 1e-3}, step=1)
            accelerator.end_training()
        """

    def log_images(
        self,
        values: Mapping[str, object],
        step: int | None = None,
        channels_first: bool = False,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log images by name.

        Args:
            values: name -> one image, H W C, or a batch, N H W C; C is 1, 3 or 4; float
                in [0, 1] or uint8; a NumPy array, a tensor, or a list of images of one shape.
            channels_first: they are C H W or N C H W.
            log_kwargs: per tracker name, arguments of its `log_images`.

        Raises:
            ConfigurationError: another shape, type or range, by name.
        """

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[object]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log a table: names of `columns` with `data`, a list of rows; or a `dataframe`.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """

    def log_figure(
        self, name: str, figure: object, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure, which must stay as it is until the trackers have it.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Keep a file or directory with the run.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """

    def log_histogram(
        self, name: str, values: object, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log the distribution of an array or tensor of any shape.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has taken what was logged so far; `end_training` does it too.

        Args:
            timeout: seconds; None waits for whom makes progress.

        Returns:
            Names of the trackers that are not done.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain data by which a resumed script goes on in the same runs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the runs of a checkpoint; after `init_trackers`, empty runs are dropped for them."""

    def is_failing(self) -> bool:
        """Whether an exception is on its way out."""

    def finish(self, failed: bool) -> None:
        """Deliver what is left and close the runs; a second call does nothing.

        Args:
            failed: mark the runs as failed.
        """


def check_members(thing: object, protocol: type, told: str) -> None:
    """Refuse what has not all that a part's Protocol declares.

    Args:
        told: what it is, for the error.

    Raises:
        PluginError: with what it lacks.
    """
    declared = [n for n in vars(protocol) if n == "__iter__" or not n.startswith("_")]
    if lacks := [n for n in declared if not (hasattr(type(thing), n) or hasattr(thing, n))]:
        where = f"{protocol.__name__} in accelerate_core.contract.parts"
        raise PluginError(f"{told} has no {listing(lacks)}: see {where}.")
