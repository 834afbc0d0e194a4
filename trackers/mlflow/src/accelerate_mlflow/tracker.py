"""`MLflowTracker`, which logs to an MLflow run."""

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

#: Limits of the server.
METRICS_AT_ONCE = 1000
PARAMS_AT_ONCE = 100
PARAM_LENGTH = 6000
KEY_LENGTH = 250

_TEXTS = {".txt", ".md", ".json", ".html", ".csv", ".yaml", ".yml", ".log"}
_FIGURES = {".png", ".pdf", ".svg", ".jpg", ".jpeg"}


class MLflowTracker(GeneralTracker):
    """A run on the MLflow server in `MLFLOW_TRACKING_URI`, by default a local database.

    The environment variables named below take precedence over the arguments.

    Args:
        experiment_name: name of the experiment (`MLFLOW_EXPERIMENT_NAME`).
        logging_dir: where a new experiment stores its artifacts.
        run_id: the run to continue (`MLFLOW_RUN_ID`).
        tags: tags of the run, as a dict or JSON (`MLFLOW_TAGS`).
        nested_run: start the run inside the active run (`MLFLOW_NESTED_RUN`).
        run_name: name of the run.
        description: description of the run.
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
    finishes_in_place = True  # the active run belongs to the thread that started it

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

        # Several ranks must not create the tables of a new database at the same time.
        with _locked(mlflow.get_tracking_uri()) if self.run_group else contextlib.nullcontext():
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
            # Another Accelerator or the script has an active run.
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
                warn(f"mlflow: {key!r} in the config was cut to {PARAM_LENGTH} characters.")
            if known.get(key, text) != text:
                # In a resumed run: MLflow does not allow changing a parameter.
                warn(
                    f"mlflow does not allow changing the parameter {key!r}, so it stays "
                    f"{known[key]!r} instead of {text!r}."
                )
            elif key not in known:
                params.append(Param(key, text))
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self.client.log_batch(self.run_id, params=params[start : start + PARAMS_AT_ONCE])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and strings as tags. `kwargs` go to `log_batch`."""
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
        """Log a table as a JSON artifact. A second table with the same name appends its rows.

        See `Accelerator.log_table` for the arguments.
        """
        table = {name: [row[i] for row in data] for i, name in enumerate(columns)}
        file = _clean(table_name)
        file = file if file.endswith((".json", ".parquet")) else f"{file}.json"
        self.client.log_table(self.run_id, data=table, artifact_file=file, **kwargs)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        file = _file(name, step, _FIGURES, ".png")
        self.client.log_figure(self.run_id, figure, file, **kwargs)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Store a file or directory. A file gets a folder `name` if `name` isn't its own name."""
        upload = self.client.log_artifacts if Path(path).is_dir() else self.client.log_artifact
        if Path(path).is_dir() or name != Path(path).name:
            kwargs = {"artifact_path": _clean(name), **kwargs}
        upload(self.run_id, path, **kwargs)

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        file = _file(name, step, _TEXTS, ".txt")
        self.client.log_text(self.run_id, text, file, **kwargs)

    def _key(self, name: str) -> str:
        """Return a key that the server accepts. Two names never get the same key."""
        if name in self._names:
            return self._names[name]
        key = _clean(name)
        if len(key) > KEY_LENGTH or key in self._names.values():
            key = f"{key[: KEY_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            warn(f"mlflow logs {name[:200]!r} as {key!r}.")
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
        else:  # the script started another run, or this is another thread
            self.client.set_terminated(self.run_id, status)


def _clean(name: str) -> str:
    """Return a name as a path that the server accepts."""
    parts = re.sub(r"[^\w./ :-]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _file(name: str, step: int | None, known: set[str], ending: str) -> str:
    """Return a file name that includes the step, so steps don't overwrite each other."""
    path = _clean(name)
    suffix = Path(path).suffix.lower()
    if suffix in known:
        path = path[: -len(suffix)]
        ending = suffix
    return f"{path}_{step}{ending}" if step is not None else f"{path}{ending}"


@contextlib.contextmanager
def _locked(uri: str) -> Iterator[None]:
    """Hold a lock against other processes on this machine. Wait at most one minute for it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    digest = hashlib.sha256(uri.encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir(), f"accelerate-mlflow-{os.getuid()}-{digest}.lock")
    # Another user may have planted a link of that name.
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(opened, "r+") as file:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.1)
        yield
