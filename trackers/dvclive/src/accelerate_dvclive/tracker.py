"""`DVCLiveTracker`, which writes plain files that can be committed with the code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_core.plugin import warn
from accelerate_tracking import Columns, GeneralTracker, Rows, each, pictures, split


class DVCLiveTracker(GeneralTracker):
    """A `dvclive.Live`, with the step of the script as its step.

    It is opened when the first value is logged, because opening it deletes the files of an earlier
    run in its directory, and a checkpoint loaded before that may continue that run.

    In a git repository, DVCLive sets up DVC (`.dvc`, `dvc.yaml`). At the end, it saves the
    workspace as an experiment, which is a commit under `refs/exps`. To avoid the commit, pass
    `save_dvc_exp=False`.

    Args:
        run_name: kept for compatibility. DVCLive does not use it.
        live: your own `Live`.
        kwargs: passed to `dvclive.Live`.
    """

    name = "dvclive"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "dvclive>=3.40"
    resumes = True
    groups = True
    packages = ()
    counts_steps = True
    artifacts_in_place = True  # DVC tracks the file itself

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._given = live
        self._kwargs = kwargs
        self._live: Any = live
        self._options: dict[str, Any] = {}
        self._config: dict[str, Any] | None = None
        self._names: dict[str, str] = {}

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        why = super().unusable(environ)
        here = Path.cwd()
        if why is None and any((folder / ".git").exists() for folder in (here, *here.parents)):
            return (
                "it would set up DVC and commit experiments in this git repository. To use it, "
                "add its name to log_with"
            )
        return why

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @property
    def live(self) -> Any:
        """The `dvclive.Live`, which this opens if needed."""
        if self._live is None:
            from dvclive import Live

            self._live = Live(**self._options)
        if self._config is not None:
            config = self._config
            self._config = None
            self._live.log_params(config)
        return self._live

    @property
    def run_id(self) -> str:
        directory = self._options["dir"] if self._live is None else self._live.dir
        return Path(directory).absolute().name

    def start(self) -> None:
        import dvclive  # noqa: F401  fails now if the library is broken

        self._live = self._given
        self._options = {"dir": "dvclive", **self._kwargs}
        if self.run_group is not None:
            self._options["dir"] = Path(self._options["dir"], f"rank{self.run_group.rank}")
        if self.resume_id is not None:
            directory = Path(self._options["dir"]).absolute().with_name(self.resume_id)
            self._options |= {"dir": str(directory), "resume": True}

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._config = values

    def discard(self) -> None:
        if self._live is not None:
            self.finish()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings. `kwargs` go to `Live.log_metric`."""
        if step is not None:
            self.live.step = step
        numbers, texts, _ = split(values)
        each(
            {**numbers, **texts},
            lambda key, value: self.live.log_metric(self._name(key), value, **kwargs),
        )

    def _name(self, key: str) -> str:
        """Return a metric name that does not clash with the files and folders of other metrics."""
        if key in self._names:
            return self._names[key]
        taken = set(self._names.values())
        parts = [part[:150] for part in key.split("/") if part not in ("", ".", "..")]
        name = "/".join(parts) or "_"
        above = {"/".join(parts[:i]) for i in range(1, len(parts))}
        if name in taken or above & taken or any(each.startswith(f"{name}/") for each in taken):
            name = name.replace("/", "_") + "_"
        if name in taken:
            name += hashlib.sha256(key.encode()).hexdigest()[:8]
        if name != key:
            warn(
                f"dvclive stores each value in a file named after it. {key[:200]!r} is not a valid file "
                f"name or clashes with another one, so it is logged as {name!r}.",
            )
        self._names[key] = name
        return name

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Save `NAME/STEP.png`, or `NAME/INDEX/STEP.png` for a batch. DVC shows steps as a slider."""
        for name, _, image in pictures(values):
            self.live.log_image(_file(name, step), image, **kwargs)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        """Save the rows as a DVC plot of the second column over the first.

        See `Accelerator.log_table` for the arguments.
        """
        points = [dict(zip(columns, row, strict=True)) for row in data]
        axes = {"x": columns[0], "y": columns[-1 if len(columns) < 3 else 1]}
        self.live.log_plot(table_name, points, **{**axes, **kwargs})

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self.live.log_image(_file(name, step), figure, **kwargs)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Track a file or directory with DVC. Outside a DVC repository, the library only warns."""
        self.live.log_artifact(path, **{"name": Path(name).stem, **kwargs})

    def flush(self) -> None:
        self.live.make_summary()  # the values themselves are already on disk

    def finish(self) -> None:
        self.live.end()


def _file(name: str, step: int | None) -> str:
    return f"{name}.png" if step is None else f"{name}/{step}.png"
