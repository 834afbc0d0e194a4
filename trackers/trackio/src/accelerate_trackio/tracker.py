"""`TrackioTracker`, which logs to Trackio's local database."""

from __future__ import annotations

import functools
import io
import re
from typing import Any

from accelerate_tracking import Columns, GeneralTracker, Rows, pictures


def repair_figure_check(html: Any) -> None:
    """Fix lost values in Trackio while another thread imports a plotting library.

    `Run.log` calls `trackio.Html.is_loggable_figure` for every value, even for numbers. That reads
    `sys.modules["matplotlib.figure"].Figure` and similar attributes. If such a module is only
    partly imported, it raises, and Trackio drops the value with a warning. In this case the value
    cannot be a figure, because its class does not exist yet.
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
    """A run in Trackio's local database, or in a Space with `space_id=`.

    Args:
        run_name: name of the project.
        kwargs: passed to `trackio.init`.
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
        self.run.config.update(values)  # written together with the first values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each image separately. `kwargs` go to `trackio.Image`."""
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
        """Store a file or directory. `kwargs` go to `trackio.Run.log_artifact`."""
        name = re.sub(r"[^a-zA-Z0-9_.\-]+", "_", name)[:128]
        self.run.log_artifact(path, **{"name": name, "type": "file", **kwargs})

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: self._trackio.Markdown(text, **kwargs)}, step=step)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: self._trackio.Histogram(values, **kwargs)}, step=step)

    def flush(self) -> bool:
        """Write the values queued for the library's thread. This isn't possible with a Space."""
        try:
            if self.run._client is not None:
                return False
            with self.run._client_lock:
                self.run._flush_queues_inline()
        except AttributeError:  # these are private members of the library
            return False
        return True

    def finish(self) -> None:
        self.run.finish()
