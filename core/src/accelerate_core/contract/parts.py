"""The loader factory and tracking as replaceable parts of an Accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from accelerate_core.contract.view import AcceleratorView
from accelerate_core.errors import PluginError, listing

__all__ = ["LoaderFactory", "LogKwargs", "PreparedLoader", "Tracking"]


class PreparedLoader(Protocol):
    """A data loader that yields this rank's part of the data, in batches on its device.

    If its `dataset_size` and length are known, it should provide them. The position in a checkpoint is then
    only restored if it belongs to a dataset of the same size.
    """

    #: Whether to pad the last global step so that all ranks get batches of the same size. The core sets
    #: it after creating the loader, and `join_uneven_inputs` changes it temporarily.
    even_batches: bool
    #: Whether the backend's `feed_device` moves the batches. The core sets it after creating the loader.
    put_on_device: bool

    @property
    def iteration(self) -> int:
        """The epoch of the next iteration: the number of finished epochs, or the one set by `set_epoch`."""

    @property
    def remainder(self) -> int:
        """The number of real samples in the last global batch if it is short or padded.

        0 means that the batch is complete, -1 that the number is unknown.
        """

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration, at the position of `load_state_dict` or at the beginning of the epoch.

        Return `accelerator.gradient_state.serve(self, start, whole)`. `whole` is the number of samples in a
        full global batch, or None if unknown. `start(info)` opens the data and returns an iterator of
        batches on the device. When it yields a batch, it must have set:

        * `info.last`: whether this is the last batch on this rank. If so, accumulation ends and the
          optimizer steps.
        * `info.real`: if the global batch was padded, the number of real samples in it, otherwise
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
        where = f"{protocol.__name__} in accelerate_core.plugin"
        raise PluginError(f"{label} has no {listing(lacks)}. See {where}.")
