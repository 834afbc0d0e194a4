"""`SwanLabTracker`, which logs to a SwanLab run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_tracking import (
    Columns,
    GeneralTracker,
    NotTaken,
    Rows,
    pictures,
    split,
    unreachable,
)


class SwanLabTracker(GeneralTracker):
    """A SwanLab run. With `SWANLAB_MODE=offline`, it stays on disk for `swanlab sync`.

    Args:
        run_name: name of the project.
        kwargs: passed to `swanlab.init`.
    """

    name = "swanlab"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "swanlab>=0.10"
    failed_word = "crashed"
    resumes = True
    groups = True
    packages = ("swanlab",)
    finishes_in_place = True  # it restores signal handlers, which only the main thread may do

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        why = super().unusable(environ)
        if why or environ.get("SWANLAB_MODE", "").lower() in {"offline", "local", "disabled"}:
            return why
        folder = environ.get("SWANLAB_SAVE_DIR", Path.home() / ".swanlab")
        if environ.get("SWANLAB_API_KEY") or (Path(folder) / ".netrc").exists():
            return unreachable(environ.get("SWANLAB_API_HOST", "https://api.swanlab.cn"), environ)
        return "it needs an account: set SWANLAB_API_KEY, or SWANLAB_MODE=offline"

    @property
    def tracker(self) -> Any:
        """The run that `swanlab.init` returned."""
        return self.run

    @property
    def run_id(self) -> str:
        return str(self.run.id)

    def start(self) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        options: dict[str, Any] = {"project": self.run_name}
        if self.resume_id is not None:
            options |= {"id": self.resume_id, "resume": "allow"}
        if self.run_group is not None:
            options |= {"group": self.run_group.name, "name": f"rank{self.run_group.rank}"}
        self.run: Any = swanlab.init(**{**options, **self._kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        # The library would store None as an empty dict.
        kept = {key: "None" if value is None else value for key, value in values.items()}
        self.run.config.update(kept)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings in one call. `kwargs` go to `swanlab.Run.log`."""
        if step is not None and step < 0:
            problem = f"was logged at step {step}, but SwanLab does not accept negative steps"
            raise NotTaken(dict.fromkeys(values, problem))
        values = {"".join(c if c.isprintable() else "_" for c in k): v for k, v in values.items()}
        numbers, texts, others = split(values)
        objects = {key: self._swanlab.Text(text) for key, text in texts.items()}
        self.run.log({**numbers, **objects, **others}, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each batch as one list. `kwargs` go to `swanlab.Image`."""
        batches = {
            name: [self._swanlab.Image(image, **kwargs) for _, _, image in pictures({name: batch})]
            for name, batch in values.items()
        }
        self.run.log(batches, step=step)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        table = self._swanlab.echarts.Table()
        table.add(columns, data)
        self.run.log({table_name: self._swanlab.ECharts(table, **kwargs)}, step=step)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: self._swanlab.Image(figure, **kwargs)}, step=step)

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: self._swanlab.Text(text, **kwargs)}, step=step)

    def flush(self) -> bool:
        return False  # the library buffers its file until the end

    def finish(self) -> None:
        self.run.finish()

    def finish_failed(self) -> None:
        self.run.finish(state=self.failed_word, error="the script raised")
