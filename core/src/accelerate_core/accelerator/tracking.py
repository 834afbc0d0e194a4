"""What a script logs, handed to the part that feeds the trackers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate_core.contract.parts import Tracking

LogKwargs = Mapping[str, Mapping[str, Any]] | None


class TrackingVerbs:
    """The verbs of tracking. A tracker that does not have one is skipped, and said so once.

    Args:
        part: feeds the trackers.
    """

    def __init__(self, part: Tracking) -> None:
        self.part = part

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start a run in every tracker asked for, with a configuration.

        Args:
            init_kwargs: per tracker name, arguments of its constructor.
        """
        self.part.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` the library's own object."""
        return self.part.get(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log values to all trackers, on the main process.

        Args:
            log_kwargs: per tracker name, arguments of its `log`.
        """
        self.part.log(values, step, log_kwargs)

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
        arguments = {"values": values, "channels_first": channels_first}
        self.part.log_media("images", arguments, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log a table: names of `columns` with `data`, a list of rows; or a `dataframe`."""
        arguments = {
            "table_name": table_name,
            "columns": columns,
            "data": data,
            "dataframe": dataframe,
        }
        self.part.log_media("table", arguments, step, log_kwargs)

    def log_figure(
        self, name: str, figure: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure, which must stay as it is until the trackers have it."""
        self.part.log_media("figure", {"name": name, "figure": figure}, step, log_kwargs)

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Keep a file or directory with the run."""
        self.part.log_media("artifact", {"path": path, "name": name}, None, log_kwargs)

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text."""
        self.part.log_media("text", {"name": name, "text": text}, step, log_kwargs)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log the distribution of an array or tensor of any shape."""
        self.part.log_media("histogram", {"name": name, "values": values}, step, log_kwargs)

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has taken what was logged so far; `end_training` does it too.

        Args:
            timeout: seconds; None waits for whom makes progress.

        Returns:
            Names of the trackers that are not done.
        """
        return self.part.flush(timeout)
