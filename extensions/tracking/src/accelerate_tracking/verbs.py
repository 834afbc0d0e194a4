"""The verbs beside `log`, each handed on with its name; their Protocol documents them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate_core.contract.parts import LogKwargs


class MediaVerbs:
    """Images, tables, figures, files, texts, histograms."""

    def log_media(
        self, verb: str, arguments: Mapping[str, Any], step: int | None, log_kwargs: LogKwargs
    ) -> None:
        """Hand it to the trackers."""
        raise NotImplementedError

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        channels_first: bool = False,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log images by name."""
        arguments = {"values": values, "channels_first": channels_first}
        self.log_media("images", arguments, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log a table."""
        content = {"columns": columns, "data": data, "dataframe": dataframe}
        self.log_media("table", {"table_name": table_name, **content}, step, log_kwargs)

    def log_figure(
        self, name: str, figure: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure."""
        self.log_media("figure", {"name": name, "figure": figure}, step, log_kwargs)

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Keep a file or directory with the run."""
        self.log_media("artifact", {"path": path, "name": name}, None, log_kwargs)

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text."""
        self.log_media("text", {"name": name, "text": text}, step, log_kwargs)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log the distribution of an array or tensor."""
        self.log_media("histogram", {"name": name, "values": values}, step, log_kwargs)
