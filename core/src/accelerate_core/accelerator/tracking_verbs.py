"""The verbs of tracking."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate_core.accelerator.saving import Saving
from accelerate_core.contract.parts import LogKwargs, Tracking


class TrackingVerbs:
    """Trackers, as a script calls them."""

    _tracking: Tracking
    _saving: Saving

    @property
    def logging_dir(self) -> Any:
        """Where trackers write."""
        return self._saving.project.logging_dir

    @property
    def log_with(self) -> list[str]:
        """Names of the trackers asked for."""
        return self._tracking.names

    @property
    def trackers(self) -> list[Any]:
        """The trackers that run."""
        return self._tracking.trackers

    @property
    def resumed_runs(self) -> dict[str, str]:
        """Tracker name -> id of its run in the checkpoint that was loaded."""
        return self._tracking.resumed_runs

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
        self._tracking.init_trackers(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` the library's own object."""
        return self._tracking.get_tracker(name, unwrap)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: LogKwargs = None
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
            values: name -> one image, H W C, or a batch, N H W C; C is 1, 3 or 4; float
                in [0, 1] or uint8; a NumPy array, a tensor, or a list of images of one shape.
            channels_first: they are C H W or N C H W.
            log_kwargs: per tracker name, arguments of its `log_images`.

        Raises:
            ConfigurationError: another shape, type or range, by name.
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
        """Log a table: names of `columns` with `data`, a list of rows; or a `dataframe`.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """
        self._tracking.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def log_figure(
        self, name: str, figure: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure, which must stay as it is until the trackers have it.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """
        self._tracking.log_figure(name, figure, step, log_kwargs)

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Keep a file or directory with the run.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """
        self._tracking.log_artifact(path, name, log_kwargs)

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """
        self._tracking.log_text(name, text, step, log_kwargs)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log the distribution of an array or tensor of any shape.

        Args:
            log_kwargs: per tracker name, more arguments of its method.
        """
        self._tracking.log_histogram(name, values, step, log_kwargs)

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has taken what was logged so far; `end_training` does it too.

        Args:
            timeout: seconds; None waits for whom makes progress.

        Returns:
            Names of the trackers that are not done.
        """
        return self._tracking.flush_trackers(timeout)
