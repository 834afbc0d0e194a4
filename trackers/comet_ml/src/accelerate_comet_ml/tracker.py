"""`CometMLTracker`, which logs to a Comet experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_tracking import Columns, GeneralTracker, Rows, pictures, split, unreachable


class CometMLTracker(GeneralTracker):
    """A Comet experiment, or with `COMET_START_ONLINE=0` an archive on disk for `comet upload`.

    Args:
        run_name: name of the project.
        kwargs: passed to `comet_ml.start`.
    """

    name = "comet_ml"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "comet_ml>=3.47"
    resumes = True
    packages = ()

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        why = super().unusable(environ)
        if why or environ.get("COMET_START_ONLINE", "").lower() in {"0", "false", "no"}:
            return why
        configured = environ.get("COMET_CONFIG", Path.home() / ".comet.config")
        if environ.get("COMET_API_KEY") or _has_key(Path(configured)):
            server = environ.get("COMET_URL_OVERRIDE", "https://www.comet.com")
            return unreachable(server, environ)
        return "it needs an account: set COMET_API_KEY, or COMET_START_ONLINE=0"

    @property
    def tracker(self) -> Any:
        """The experiment that `comet_ml.start` returned."""
        return self.writer

    @property
    def run_id(self) -> str:
        return str(self.writer.get_key())

    def start(self) -> None:
        import comet_ml

        options: dict[str, Any] = {"project_name": self.run_name}
        if self.resume_id is not None:
            options |= {"experiment_key": self.resume_id, "mode": "get_or_create"}
        self.writer: Any = comet_ml.start(**{**options, **self._kwargs})
        if self.run_group is not None:
            self.writer.log_others({"group": self.run_group.name, "rank": self.run_group.rank})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and strings as "other" values. `kwargs` go to `log_metrics`."""
        numbers, texts, _ = split(values)
        if numbers:
            self.writer.log_metrics(numbers, step=step, **kwargs)
        for key, text in texts.items():
            self.writer.log_other(key, text)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        from PIL import Image

        for name, _, image in pictures(values):
            # Comet would scale an array so that its values cover the whole range.
            self.writer.log_image(Image.fromarray(image), name=name, step=step, **kwargs)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        file = table_name if table_name.endswith((".csv", ".tsv")) else f"{table_name}.csv"
        # The library reads the number of columns from the first row, so it needs at least one.
        rows, headers = (data, columns) if data else ([columns], False)
        self.writer.log_table(file, tabular_data=rows, headers=headers, **{"step": step, **kwargs})

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self.writer.log_figure(figure_name=name, figure=figure, step=step, **kwargs)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Store a file or directory as assets of the experiment."""
        if Path(path).is_dir():
            self.writer.log_asset_folder(path, **{"log_file_name": True, **kwargs})
        else:
            self.writer.log_asset(path, file_name=name, **kwargs)

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.writer.log_text(text, step=step, **{"metadata": {"name": name}, **kwargs})

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.writer.log_histogram_3d(values, name=name, step=step, **kwargs)

    def flush(self) -> bool:
        self.writer.flush()
        return False  # offline, the archive is only written at the end

    def finish(self) -> None:
        self.writer.end()


def _has_key(file: Path) -> bool:
    try:
        return re.search(r"(?m)^\s*api_key\s*[=:]\s*\S", file.read_text("utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False
