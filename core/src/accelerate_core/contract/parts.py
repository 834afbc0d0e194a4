"""The replaceable parts of an Accelerator: checkpointer, loader factory and tracking."""

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
        """Whether items are counted in the current cycle."""


class Contribution(Protocol):
    """One plugin's implementation of a hook that several plugins may implement."""

    @property
    def key(self) -> str:
        """Kind and name of the plugin, as `kind:name`."""

    @property
    def names(self) -> Iterable[str]:
        """The hook's arguments that the implementation takes."""

    def __call__(self, arguments: Mapping[str, object]) -> object:
        """Call the implementation with the hook's arguments by name, including the Accelerator."""


class SharedHooksView(Protocol):
    """The hooks that several plugins may implement, bound to one Accelerator."""

    def implementations(self, hook: str) -> Sequence[Contribution]:
        """Return the implementations of a hook, ordered by plugin name."""

    def call(self, implementation: Contribution, **arguments: object) -> object:
        """Call one implementation with the hook's arguments, and return its result."""


@dataclass(frozen=True)
class RunParts:
    """What a checkpointer saves and restores of a run; `accelerate_checkpoint.TrainingState` does both.

    Attributes:
        accelerator: has the models, optimizers, schedulers, loaders, the scaler and the step in the cycle.
        process: rank, world size, device and store.
        project: returns directories, naming and retention. Scripts may replace them at any time.
        registered: the objects passed to `register_for_checkpointing`.
        save_hooks: the script's `hook(models, weights, output_dir)`, by number.
        load_hooks: the script's `hook(models, input_dir)`, by number.
        tokens: the items counted in the current accumulation cycle.
        update_scale: applies a pending update of the loss scale. Call it before reading the scaler.
        restore_positions: returns whether loaders continue at the position of the checkpoint.
        inner_model: returns a model without the wrappers of the backend and of `torch.compile`.
        whole_state: returns the full state dict of a model. Call it on every rank, in the same order.
        plugins: kind, name, distribution and version of each active plugin.
        shared_hooks: the implementations of `on_save` and `on_load`.
        tracking: the active `Tracking`.
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
    """Saves and loads the checkpoints of one Accelerator.

    The class declares `name`, which must match its entry point, and `api_version`. If it has a `Settings`
    class, decorated with `accelerate_core.settings`, the constructor gets an instance as its third argument,
    with values from `kwargs_handlers`, the environment and the config file.
    """

    def __init__(self, project: ProjectConfiguration, signals: str | None) -> None:
        """Create the checkpointer; raise an error for invalid settings.

        It is created before the process group starts if the settings affect checkpoints (signals, naming,
        a limit, or a backend that cannot save gradients), otherwise on first use.

        Args:
            project: directories, naming and retention.
            signals: the value of `preemption_signals`, or None.
        """

    def attach(self, run: RunParts) -> None:
        """Set the run to save and load; called once, before any other method."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: object,
    ) -> str:
        """Save everything that is needed to resume the run, and return the directory.

        The directory appears complete or not at all, with a manifest of sizes and checksums. It replaces an
        existing one atomically. Call this on all ranks.

        Args:
            output_dir: the directory to write. Leave it out with automatic naming (`ProjectConfiguration`).
            safe_serialization: whether to write weights as safetensors instead of in torch's format.
            blocking: with False, copy the state to host memory, return, and write it while training
                continues. The next save, `load_state`, `wait_for_checkpoint` or `end_training` waits for
                the write and raises its error.
            max_shard_size: largest size of a weights file, in bytes or as a string such as "5GB".
            save_model_func_kwargs: options for backends that write checkpoints themselves.

        Raises:
            CheckpointError: saving failed on some rank; raised on every rank. Earlier checkpoints are kept.

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
        """Load a checkpoint into the prepared objects, and return its directory.

        The checkpoint is verified first. If it is damaged, nothing is changed. A loop over a prepared loader
        then continues at the position where the checkpoint was saved. Checkpoints of Hugging Face
        Accelerate 1.x can be loaded too.

        Args:
            input_dir: the checkpoint. If None, use the newest complete one with an automatic name; damaged
                ones are skipped with a warning.
            load_kwargs: arguments of `torch.load` for optimizers.
            trust: whether to unpickle Python objects in the states of optimizers, schedulers and
                registered objects. Only use this for checkpoints that you wrote yourself.
            verify: with False, compare only sizes, not checksums.
            load_model_func_kwargs: `strict=False`, and options for backends that read checkpoints
                themselves.

        Raises:
            CheckpointError: names what is missing, damaged or incompatible.

        """

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights in the form that `load_checkpoint_in_model` reads.

        Args:
            model: a model, prepared or not.
            save_directory: the folder to write to. It is created if necessary.
            max_shard_size: largest size of a file, in bytes or as a string such as "5MB".
            safe_serialization: whether to write safetensors instead of torch's pickle format.

        Example:
            from safetensors.torch import load_file

            accelerator.save_model(model, "trained")
            weights = load_file("trained/model.safetensors")
        """

    def save(
        self, obj: object, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Save an object like `torch.save`, but only once, or once per machine with `save_on_each_node`.

        Args:
            obj: the object to save.
            f: a path or an open file.
            safe_serialization: whether to write safetensors. The object must then be a dict of tensors.
        """

    @property
    def preemption_requested(self) -> bool:
        """Whether one of the preemption signals was received."""

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error if it failed."""

    def release(self) -> None:
        """Wait for a save in the background, and free the memory that is reserved for such saves."""

    def close(self, failed: bool) -> None:
        """Shut down. If `failed`, other ranks may have exited, so don't communicate with them."""


class PreparedLoader(Protocol):
    """A data loader that yields this rank's part of the data, in batches on its device.

    If its `dataset_size` and length are known, it should provide them. The position in a checkpoint is then
    only restored if it belongs to a dataset of the same size.
    """

    #: Whether to fill up the last global step so that all ranks get batches of the same size. The core sets
    #: it after creating the loader, and `join_uneven_inputs` changes it temporarily.
    even_batches: bool
    #: Whether the backend's `feed_device` moves the batches. The core sets it after creating the loader.
    put_on_device: bool

    @property
    def iteration(self) -> int:
        """The epoch of the next iteration: the number of finished epochs, or the one set by `set_epoch`."""

    @property
    def remainder(self) -> int:
        """The number of real samples in the last global batch if it is short or filled up.

        0 means that the batch is complete, -1 that the number is unknown.
        """

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration, at the position of `load_state_dict` or at the beginning of the epoch.

        Return `accelerator.gradient_state.serve(self, start, whole)`. `whole` is the number of samples in a
        full global batch, or None if unknown. `start(served)` opens the data and returns an iterator of
        batches on the device. When it yields a batch, it must have set:

        * `served.last`: whether this is the last batch on this rank. If so, accumulation ends and the
          optimizer steps.
        * `served.real`: if the global batch was filled up, the number of real samples in it, otherwise
          None. The global batch consists of the batches of all ranks in rank order, with real samples
          first. `gather_for_metrics` drops the rest.

        In each global step, ranks must get different samples. With `even_batches`, all ranks get the same
        number of batches. If a script leaves an iteration with `break`, the next iteration starts the epoch
        again.
        """

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The shuffled order depends on it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain values and CPU tensors.

        After loading it, batches that were already yielded are not repeated. Between two epochs, it is the
        beginning of the next epoch.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue at a position that `state_dict` returned.

        This and later epochs yield the same batches in the same order as an uninterrupted run.

        Raises:
            ConfigurationError: the position was saved by an incompatible loader.
        """

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return this loader without the first `num_batches` batches of each rank in an epoch."""


class LoaderFactory(Protocol):
    """Creates prepared loaders instead of the core.

    The class declares `name`, which must match its entry point, and `api_version`. If it has a `Settings`
    class, decorated with `accelerate_core.settings`, the constructor gets an instance as its only argument,
    with values from `kwargs_handlers`, the environment and the config file. It is created together with the
    Accelerator.
    """

    def make_loader(self, accelerator: AcceleratorView, loader: object) -> PreparedLoader | None:
        """Return a prepared loader, or None to leave this loader to the core.

        Called on all ranks. `prepare` recognises every `DataLoader` and every object with a `dataset`. For
        other objects, a plugin must implement the hook `classify`.

        Args:
            accelerator: provides this rank's part of the data (`hooks.data_shard()` returns index and
                count), the transfer to the device (`hooks.feed_device(batches, non_blocking)`), the required
                multiple of the batch size (`hooks.fixed_batch()`), and `gradient_state`.
            loader: the object that was passed to `prepare`.
        """


#: Name of a tracker -> additional arguments for its method.
LogKwargs = Mapping[str, Mapping[str, Any]] | None


class Tracking(Protocol):
    """Passes logged values to all trackers of one Accelerator.

    The constructor raises an error for a tracker that isn't installed. An Accelerator without trackers uses
    `NoTracking` instead. No method communicates with other ranks, and `log` doesn't wait for any library. If
    a tracker doesn't support a method, it is skipped, with one warning.

    Args:
        asked: the value of `log_with`. `"all"` is resolved here.
        logging_dir: the directory for the trackers' files, or None.
        rank: the rank of this process.
        size: the world size.
        is_main: whether this rank logs.
    """

    trackers: list[Any]
    #: Tracker name -> id of its run in the loaded checkpoint.
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
        """Names of the requested trackers, including disabled ones."""

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: LogKwargs = None
    ) -> None:
        """Start a run in every requested tracker.

        Args:
            project_name: name of the project in each tracker.
            config: hyperparameters to record with the run.
            init_kwargs: tracker name -> additional arguments of its constructor.

        Example:
            accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            accelerator.init_trackers("digits", config={"lr": 1e-3, "batch_size": 8})
            accelerator.log({"loss": 0.5}, step=1)
            accelerator.end_training()
        """

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name. With `unwrap`, return the run object of its library."""

    def log(
        self, values: Mapping[str, object], step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log values to all trackers, on the main process.

        Args:
            values: name -> value, such as a number or a 0-d tensor.
            step: the step that the values belong to.
            log_kwargs: tracker name -> additional arguments of its `log`.

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
            values: name -> one image of shape (H, W, C) or a batch of shape (N, H, W, C), with 1, 3 or 4
                channels, as float in [0, 1] or as uint8. NumPy arrays, tensors and lists of images of the
                same shape are allowed.
            step: the step that the images belong to.
            channels_first: whether shapes are (C, H, W) or (N, C, H, W).
            log_kwargs: tracker name -> additional arguments of its `log_images`.

        Raises:
            ConfigurationError: an image has an invalid shape, type or range; the error names it.
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
        """Log a table, given either as `columns` and `data` or as a `dataframe`.

        Args:
            table_name: name of the table.
            columns: names of the columns.
            data: a list of rows.
            dataframe: a pandas DataFrame, instead of the other two.
            step: the step that the table belongs to.
            log_kwargs: tracker name -> additional arguments of its method.
        """

    def log_figure(
        self, name: str, figure: object, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure. Don't change it until all trackers have read it.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Store a file or directory with the run.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """

    def log_histogram(
        self, name: str, values: object, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a histogram of an array or tensor of any shape.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has received everything logged so far. `end_training` also does this.

        Args:
            timeout: in seconds. With None, wait as long as a tracker makes progress.

        Returns:
            Names of the trackers that haven't finished.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain values with which a resumed script continues the same runs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the runs of a checkpoint. Empty runs that `init_trackers` started are dropped."""

    def is_failing(self) -> bool:
        """Return whether the script is failing with an exception."""

    def finish(self, failed: bool) -> None:
        """Deliver the remaining values and close the runs. Calling this again has no effect.

        Args:
            failed: whether to mark the runs as failed.
        """


def check_members(thing: object, protocol: type, label: str) -> None:
    """Refuse an object without all members of a part's Protocol.

    Args:
        thing: the object.
        protocol: the Protocol that it should implement.
        label: a description of the object for the error.

    Raises:
        PluginError: names the missing members.
    """
    declared = [n for n in vars(protocol) if n == "__iter__" or not n.startswith("_")]
    if lacks := [n for n in declared if not (hasattr(type(thing), n) or hasattr(thing, n))]:
        where = f"{protocol.__name__} in {protocol.__module__}"
        raise PluginError(f"{label} has no {listing(lacks)}. See {where}.")
