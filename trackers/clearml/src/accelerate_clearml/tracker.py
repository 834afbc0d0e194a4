"""`ClearMLTracker`, which logs to a ClearML task."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from accelerate_core.plugin import TrackerError, parse_bool
from accelerate_tracking import (
    Columns,
    GeneralTracker,
    NotTaken,
    Rows,
    pictures,
    split,
    unreachable,
)

_SERVER = re.compile(r"api_server[\"']?\s*[:=]\s*[\"']?([^\s\"']+)")


class ClearMLTracker(GeneralTracker):
    """A ClearML task, or with `CLEARML_OFFLINE_MODE=1` a session on disk.

    If the script has already opened a task, that task is used and left open. ClearML's automatic
    logging of TensorBoard and matplotlib is turned off, because values would be logged twice.

    Args:
        run_name: name of the project and of the task.
        kwargs: passed to `clearml.Task.init`.
    """

    name = "clearml"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "clearml>=1.16"
    failed_word = "failed"
    resumes = True
    packages = ()
    counts_steps = True

    #: Ids of the tasks that trackers of this class have open.
    _open: ClassVar[set[str]] = set()

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._own = True

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        why = super().unusable(environ)
        offline = environ.get("CLEARML_OFFLINE_MODE") or environ.get("TRAINS_OFFLINE_MODE")
        if why or parse_bool(offline):
            return why
        file = Path(environ.get("CLEARML_CONFIG_FILE") or Path.home() / "clearml.conf")
        key, server = environ.get("CLEARML_API_ACCESS_KEY"), environ.get("CLEARML_API_HOST")
        if not key and not file.exists():
            return "it needs an account: run clearml-init, or set CLEARML_OFFLINE_MODE=1"
        if not key and not server:
            try:  # the library also reads the address from this file
                server = _SERVER.findall(file.read_text("utf-8"))[0]
            except IndexError:
                pass
            except (OSError, UnicodeDecodeError):
                return None
        return unreachable(server or "https://api.clear.ml", environ)

    @property
    def tracker(self) -> Any:
        """The `clearml.Task`."""
        return self.task

    @property
    def run_id(self) -> str:
        return str(self.task.id)

    def start(self) -> None:
        from clearml import Task

        current = Task.current_task()
        if current is not None:
            if str(current.id) in self._open:
                raise TrackerError(
                    "ClearML supports only one task per process, and another Accelerator has "
                    "already opened one"
                )
            self.task: Any = current
            self._own = False
            return
        name = self.run_name or "accelerate"
        options: dict[str, Any] = {
            "project_name": name,
            "task_name": name,
            "reuse_last_task_id": False,
            "auto_connect_frameworks": {"tensorboard": False, "matplotlib": False},
        }
        if self.run_group is not None:
            options["tags"] = [self.run_group.name, f"rank{self.run_group.rank}"]
        if self.resume_id is not None and not Task.is_offline():
            del options["reuse_last_task_id"]
            options["continue_last_task"] = self.resume_id
        if hasattr(Task, "_report_subprocess_enabled"):
            # The library would fork this process to report from the child. If other threads hold
            # locks during the fork, the child hangs, and then `close` does too.
            Task._report_subprocess_enabled = False
        self.task = Task.init(**{**options, **self._kwargs})
        self._open.add(str(self.task.id))
        if self.resume_id is not None:
            self.task.set_initial_iteration(0)  # keep the steps that the script logs

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report `title/series` as a scalar. NaN and infinities go to the task's log only."""
        numbers, texts, _ = split(values)
        problems = {}
        for key, number in numbers.items():
            if math.isfinite(number):
                self._report(key, number, step, **kwargs)
            else:
                problems[key] = (
                    f"is {number}, which ClearML would record as 0, so it was only written to the "
                    "task's log"
                )
                texts[key] = str(number)
        for key, text in texts.items():
            self.log_text(key, text, step)
        if problems:
            raise NotTaken(problems)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report each image as PNG, because the library would save JPEGs."""
        from PIL import Image

        for name, index, image in pictures(values):
            title = name.removesuffix(f"/{index}")
            descriptor, path = tempfile.mkstemp(suffix=".png")
            with open(descriptor, "wb") as file:
                Image.fromarray(image).save(file, format="png")
            self.task.get_logger().report_image(
                title,
                str(index),
                iteration=step or 0,
                local_path=path,
                **{"delete_after_upload": True, **kwargs},
            )

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        self.task.get_logger().report_table(
            *self._place(table_name), iteration=step or 0, table_plot=[columns, *data], **kwargs
        )

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        options = {"report_image": True, **kwargs}
        self.task.get_logger().report_matplotlib_figure(
            *self._place(name), figure, iteration=step or 0, **options
        )

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        self.task.upload_artifact(name, path, **{"wait_on_upload": True, **kwargs})

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        at = "" if step is None else f" [{step}]"
        self.task.get_logger().report_text(f"{name}{at}: {text}", **kwargs)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        import numpy

        counts, edges = numpy.histogram(values, bins=64)
        labels = [f"{edge:.4g}" for edge in edges[:-1]]
        self.task.get_logger().report_histogram(
            *self._place(name), counts.tolist(), iteration=step or 0, xlabels=labels, **kwargs
        )

    def flush(self) -> bool:
        self.task.flush()
        return False  # a thread of the library writes, and does not report when it has

    def finish(self) -> None:
        if self._own:
            self.task.close()
            self._open.discard(str(self.task.id))

    def finish_failed(self) -> None:
        self.task.flush(wait_for_uploads=True)
        if self.task.is_offline():  # offline sessions have no status
            self.task.add_tags([self.failed_word])
        else:
            self.task.mark_failed(status_reason="the script raised", force=True)
        self.finish()

    def _report(self, name: str, number: float, step: int | None, **kwargs: Any) -> None:
        self.task.get_logger().report_scalar(
            *self._place(name), value=number, iteration=step, **kwargs
        )

    @staticmethod
    def _place(name: str) -> tuple[str, str]:
        """Return the title and series for a name."""
        title, _, series = name.rpartition("/")
        # The library gives a series without a name the name of its title.
        return (title, series) if title and title != series else (name, "")
