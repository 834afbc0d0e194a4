"""The Accelerator's methods for tracking."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate_core.accelerator.saving import Saving
from accelerate_core.contract.parts import LogKwargs, Tracking


class TrackingVerbs:
    """The Accelerator's methods for tracking."""

    _tracking: Tracking
    _saving: Saving

    @property
    def logging_dir(self) -> Any:
        """The directory for the trackers' files."""
        return self._saving.project.logging_dir

    @property
    def log_with(self) -> list[str]:
        """Names of the requested trackers."""
        return self._tracking.names

    @property
    def trackers(self) -> list[Any]:
        """The running trackers."""
        return self._tracking.trackers

    @property
    def resumed_runs(self) -> dict[str, str]:
        """Tracker name -> id of its run in the loaded checkpoint."""
        return self._tracking.resumed_runs

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
        self._tracking.init_trackers(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name. With `unwrap`, return the run object of its library."""
        return self._tracking.get_tracker(name, unwrap)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: LogKwargs = None
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
        self._tracking.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
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
        self._tracking.log_images(values, step, channels_first, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log a table, given either as `columns` and `data` (a list of rows) or as a `dataframe`.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """
        self._tracking.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def log_figure(
        self, name: str, figure: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure. Don't change it until all trackers have read it.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """
        self._tracking.log_figure(name, figure, step, log_kwargs)

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Store a file or directory with the run.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """
        self._tracking.log_artifact(path, name, log_kwargs)

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """
        self._tracking.log_text(name, text, step, log_kwargs)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a histogram of an array or tensor of any shape.

        Args:
            log_kwargs: tracker name -> additional arguments of its method.
        """
        self._tracking.log_histogram(name, values, step, log_kwargs)

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has received everything logged so far. `end_training` also does this.

        Args:
            timeout: in seconds. With None, wait as long as a tracker makes progress.

        Returns:
            Names of the trackers that haven't finished.
        """
        return self._tracking.flush_trackers(timeout)
