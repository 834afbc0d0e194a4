"""Trackio: a local database, and a dashboard that reads it."""

from __future__ import annotations

import functools
import io
import re
from typing import Any

from accelerate_tracking import Columns, GeneralTracker, Rows, pictures


def repair_figure_check(html: Any) -> None:
    """Let trackio keep values that are logged while another thread imports a plotting library.

    `Run.log` asks `trackio.Html` whether a value, number or not, is a figure. It looks for
    `sys.modules["matplotlib.figure"].Figure` and the like, and drops the value with a warning when
    the module is only half imported. A class that does not exist yet has no instances.
    """
    check: Any = getattr(html, "is_loggable_figure", None)
    if check is None or hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def repaired(value: Any) -> bool:
        try:
            return bool(check(value))
        except AttributeError:
            return False

    html.is_loggable_figure = staticmethod(repaired)


class TrackioTracker(GeneralTracker):
    """A run in the local database of Trackio, or in a Space with `space_id=`.

    Args:
        run_name: the project.
        kwargs: for `trackio.init`.
    """

    name = "trackio"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "trackio>=0.30"
    resumes = True
    groups = True
    packages = ("trackio",)

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The run that `trackio.init` returned."""
        return self.run

    @property
    def run_id(self) -> str:
        return str(self.run.name)

    def start(self) -> None:
        import trackio

        self._trackio: Any = trackio
        repair_figure_check(trackio.Html)
        options: dict[str, Any] = {"project": self.run_name, "embed": False}
        if self.resume_id is not None:
            options |= {"name": self.resume_id, "resume": "allow"}
        if self.run_group is not None:
            options["group"] = self.run_group.name
        self.run: Any = trackio.init(**{**options, **self._kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)  # it is written with the first values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each image by itself; `kwargs` go to `trackio.Image`."""
        found = {name: self._trackio.Image(image, **kwargs) for name, _, image in pictures(values)}
        self.run.log(found, step=step)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        table = self._trackio.Table(columns=columns, data=data, **kwargs)
        self.run.log({table_name: table}, step=step)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        from PIL import Image

        file = io.BytesIO()
        figure.savefig(file, format="png")
        file.seek(0)
        self.run.log({name: self._trackio.Image(Image.open(file), **kwargs)}, step=step)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Keep a file or directory; `kwargs` go to `trackio.Run.log_artifact`."""
        name = re.sub(r"[^a-zA-Z0-9_.\-]+", "_", name)[:128]
        self.run.log_artifact(path, **{"name": name, "type": "file", **kwargs})

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: self._trackio.Markdown(text, **kwargs)}, step=step)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: self._trackio.Histogram(values, **kwargs)}, step=step)

    def flush(self) -> bool:
        """Write out what its thread has queued; a Space gives no such promise."""
        try:
            if self.run._client is not None:
                return False
            with self.run._client_lock:
                self.run._flush_queues_inline()
        except AttributeError:  # not part of the library's public face
            return False
        return True

    def finish(self) -> None:
        self.run.finish()
