"""MLflow."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate_core.plugin import env_flag, warn
from accelerate_tracking import Columns, GeneralTracker, Rows, pictures, split

#: What the server takes at once.
METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
PARAM_LENGTH = 6000
KEY_LENGTH = 250

_TEXTS = {".txt", ".md", ".json", ".html", ".csv", ".yaml", ".yml", ".log"}
_FIGURES = {".png", ".pdf", ".svg", ".jpg", ".jpeg"}


class MLflowTracker(GeneralTracker):
    """A run in MLflow, wherever `MLFLOW_TRACKING_URI` points; by default a local database.

    Args:
        experiment_name: the experiment; `MLFLOW_EXPERIMENT_NAME` is stronger.
        logging_dir: where a new experiment keeps its artifacts.
        run_id: a run to go on in; `MLFLOW_RUN_ID` is stronger.
        tags: of the run, a dict or JSON; `MLFLOW_TAGS` is stronger.
        nested_run: start it inside an active run; `MLFLOW_NESTED_RUN` is stronger.
        run_name: its name.
        description: its text.
    """

    name = "mlflow"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "mlflow>=2.10"
    failed_word = "FAILED"
    resumes = True
    groups = True
    packages = ()
    counts_steps = True
    finishes_in_place = True  # the active run is one of the thread that started it

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        environ = os.environ
        self.experiment_name = environ.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self._given_id = environ.get("MLFLOW_RUN_ID") or run_id
        tags = environ.get("MLFLOW_TAGS") or tags or {}
        self.tags = json.loads(tags) if isinstance(tags, str) else dict(tags)
        self.nested_run = env_flag(environ, "MLFLOW_NESTED_RUN", bool(nested_run))
        self.run_name = run_name
        self.description = description
        self._names: dict[str, str] = {}

    @property
    def tracker(self) -> Any:
        """The `mlflow.ActiveRun`."""
        return self.active_run

    @property
    def run_id(self) -> str:
        return str(self.active_run.info.run_id)

    def start(self) -> None:
        import mlflow

        # Ranks that start at once would make the tables of a new database at once.
        with _alone(mlflow.get_tracking_uri()) if self.run_group else contextlib.nullcontext():
            self._start(mlflow)

    def _start(self, mlflow: Any) -> None:
        self.client: Any = mlflow.MlflowClient()
        name = self.experiment_name or "Default"
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            where = None if self.logging_dir is None else Path(self.logging_dir).absolute().as_uri()
            experiment_id = self.client.create_experiment(name, artifact_location=where)
        else:
            experiment_id = experiment.experiment_id
        if self.run_group is not None:
            self.tags |= {"group": self.run_group.name, "rank": str(self.run_group.rank)}
        run_id = self.resume_id or self._given_id
        if mlflow.active_run() is not None and not self.nested_run and run_id is None:
            # There is an active run: another Accelerator's, or the script's own.
            note = {"mlflow.note.content": self.description} if self.description else {}
            tags = self.tags | note
            run = self.client.create_run(experiment_id, tags=tags, run_name=self.run_name)
            self.active_run: Any = mlflow.ActiveRun(run)
            return
        self.active_run = mlflow.start_run(
            run_id=run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags or None,
            description=self.description,
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        known = self.client.get_run(self.run_id).data.params
        params = []
        for key, value in values.items():
            key = self._key(key)
            text = str(value)
            if len(text) > PARAM_LENGTH:
                text = text[:PARAM_LENGTH]
                warn(f"mlflow keeps {PARAM_LENGTH} characters of {key!r}.")
            if known.get(key, text) != text:
                # A resumed run: what was written once cannot be changed.
                warn(f"mlflow keeps {key!r} at {known[key]!r}, not {text!r}.")
            elif key not in known:
                params.append(Param(key, text))
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self.client.log_batch(self.run_id, params=params[start : start + PARAMS_AT_ONCE])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and strings as tags; `kwargs` go to `log_batch`."""
        self.log_many([(values, step)], **kwargs)

    def log_many(self, entries: Sequence[tuple[dict[str, Any], int | None]], **kwargs: Any) -> None:
        from mlflow.entities import Metric

        metrics: list[Any] = []
        tags: dict[str, str] = {}
        now = int(time.time() * 1000)
        for values, step in entries:
            numbers, texts, _ = split(values)
            metrics += [Metric(self._key(k), v, now, step or 0) for k, v in numbers.items()]
            tags |= texts
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            some = metrics[start : start + METRICS_AT_ONCE]
            self.client.log_batch(self.run_id, metrics=some, **kwargs)
        for key, text in tags.items():
            self.client.set_tag(self.run_id, self._key(key), text)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, _, image in pictures(values):
            self.client.log_image(self.run_id, image, key=self._key(name), step=step or 0, **kwargs)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        """Log a table as a JSON artifact; a second one of the name is added below the first.

        The arguments are those of `Accelerator.log_table`.
        """
        table = {name: [row[i] for row in data] for i, name in enumerate(columns)}
        file = _clean(table_name)
        file = file if file.endswith((".json", ".parquet")) else f"{file}.json"
        self.client.log_table(self.run_id, data=table, artifact_file=file, **kwargs)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        file = _file(name, step, _FIGURES, ".png")
        self.client.log_figure(self.run_id, figure, file, **kwargs)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Keep a directory, or a file in a folder of the name if it is not the file's own."""
        upload = self.client.log_artifacts if Path(path).is_dir() else self.client.log_artifact
        if Path(path).is_dir() or name != Path(path).name:
            kwargs = {"artifact_path": _clean(name), **kwargs}
        upload(self.run_id, path, **kwargs)

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        file = _file(name, step, _TEXTS, ".txt")
        self.client.log_text(self.run_id, text, file, **kwargs)

    def _key(self, name: str) -> str:
        """Return the server's key of a name; two names never share one."""
        if name in self._names:
            return self._names[name]
        key = _clean(name)
        if len(key) > KEY_LENGTH or key in self._names.values():
            key = f"{key[: KEY_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            warn(f"mlflow keeps {name[:200]!r} as {key!r}.")
        self._names[name] = key
        return key

    def finish(self) -> None:
        self._end("FINISHED")

    def finish_failed(self) -> None:
        self._end(self.failed_word)

    def _end(self, status: str) -> None:
        import mlflow

        active = mlflow.active_run()
        if active is not None and active.info.run_id == self.run_id:
            mlflow.end_run(status)
        else:  # the script started another one, or ends in another thread
            self.client.set_terminated(self.run_id, status)


def _clean(name: str) -> str:
    """Return a name as a path inside the run that the server takes."""
    parts = re.sub(r"[^\w./ :-]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _file(name: str, step: int | None, known: set[str], ending: str) -> str:
    """Return the file of a name at a step; a later step does not overwrite an earlier one."""
    path = _clean(name)
    suffix = Path(path).suffix.lower()
    if suffix in known:
        path = path[: -len(suffix)]
        ending = suffix
    return f"{path}_{step}{ending}" if step is not None else f"{path}{ending}"


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Hold a lock among the processes of this machine, for which they wait a minute at most."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    name = f"accelerate-mlflow-{hashlib.sha256(uri.encode()).hexdigest()[:12]}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.1)
        yield
