"""DVCLive: plain files, beside the code in git."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate_core.tracking import GeneralTracker, pictures, split

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(GeneralTracker):
    """A `dvclive.Live`, whose step is the one that is logged.

    Args:
        run_name: the experiment's name where DVC gives none; not used by the files.
        live: a `Live` of your own.
        kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "dvclive>=3.40"
    resumes = True
    groups = True
    packages = ()

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self._given, self._kwargs = run_name, live, kwargs
        self._auto = 0

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @property
    def run_id(self) -> str:
        return str(Path(self.live.dir).absolute())

    def start(self) -> None:
        from dvclive import Live

        options = dict(self._kwargs)
        if self.resume_id is not None:
            options |= {"dir": self.resume_id, "resume": True}
        elif self.run_group is not None:
            options["dir"] = f"{options.get('dir', 'dvclive')}/rank{self.run_group.rank}"
        self.live: Any = self._given if self._given is not None else Live(**options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings; `kwargs` go to `Live.log_metric`."""
        self._go_to(step)
        numbers, texts, _ = split(values)
        for key, value in {**numbers, **texts}.items():
            self.live.log_metric(key, value, **kwargs)

    def _go_to(self, step: int | None) -> None:
        self.live.step = self._auto if step is None else step
        self._auto = self.live.step + 1

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Save `NAME/STEP.png`, of a batch `NAME/INDEX/STEP.png`, which DVC shows as a slider."""
        for name, _, image in pictures(values):
            self.live.log_image(_file(name, step), image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str],
        data: list[list[Any]],
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the rows as a plot of DVC, the second column over the first."""
        points = [dict(zip(columns, row, strict=True)) for row in data]
        axes = {"x": columns[0], "y": columns[-1 if len(columns) < 3 else 1]}
        self.live.log_plot(table_name, points, **{**axes, **kwargs})

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self.live.log_image(_file(name, step), figure, **kwargs)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Track a file or directory with DVC; outside a DVC repository the library only warns."""
        self.live.log_artifact(path, **{"name": Path(name).stem, **kwargs})

    def flush(self) -> None:
        self.live.sync()

    def finish(self) -> None:
        self.live.end()


def _file(name: str, step: int | None) -> str:
    return f"{name}.png" if step is None else f"{name}/{step}.png"
