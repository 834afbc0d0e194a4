"""The built-in tracker `jsonl`: each run is a directory with the file `run.jsonl`."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, TextIO

from accelerate_tracking.recorded_runs import RUN_FILE, strict
from accelerate_tracking.tracker import GeneralTracker


class JsonlTracker(GeneralTracker):
    """Writes `LOGGING_DIR/PROJECT/RUN/run.jsonl`. It needs no other package.

    Each line is an object with a `kind`: `start`, `config`, `log`, `table`, `text`, `images`,
    `histogram`, `artifact`, `figure` or `end` (with `status`: finished or failed), and a `time` in
    seconds since 1970. JSON has no NaN and no infinities, so these are the strings `NaN`,
    `Infinity` and `-Infinity`. Arrays and figures are saved in `media/`, and artifacts in
    `artifacts/`.

    Args:
        project_name: name of the folder for all runs of the project.
        logging_dir: the directory that contains this folder.
        run_name: name of the run. The default is the time and a random suffix.
    """

    name = "jsonl"
    api_version = (1, 0)
    requires_logging_directory = True
    failed_word = "failed"
    resumes = True
    groups = True
    packages = ()
    takes_not_finite = True

    def __init__(
        self, project_name: str, logging_dir: str | os.PathLike[str], run_name: str | None = None
    ) -> None:
        super().__init__()
        self.project_name = project_name
        self._root = Path(logging_dir) / _file_name(project_name)
        self._run_name = run_name
        self._file: TextIO | None = None
        self._files = 0

    @property
    def tracker(self) -> Path:
        """The directory of the run."""
        return self._root / str(self._run_name)

    @property
    def run_id(self) -> str | None:
        return self._run_name

    def start(self) -> None:
        if self.resume_id is not None:
            self._run_name = self.resume_id
        elif self._run_name is None:
            self._run_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            if self.run_group is not None:
                self._run_name += f"-rank{self.run_group.rank}"
        self._made = not self.tracker.exists()
        self.tracker.mkdir(parents=True, exist_ok=True)
        self._file = open(self.tracker / RUN_FILE, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        group = {"group": self.run_group.name} if self.run_group else {}
        self._write("start", project=self.project_name, resumed=self.resume_id is not None, **group)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write("config", values=values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write("log", step=step, values=values, **kwargs)

    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None
    ) -> None:
        self._write("table", step=step, name=table_name, columns=columns, data=data)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        self._write("text", step=step, name=name, text=text)

    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        import numpy

        for name, batch in values.items():
            path = self._media(name, step, "npy")
            numpy.save(path, batch)
            self._write("images", step=step, name=name, file=path.name, shape=list(batch.shape))

    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        import numpy

        finite = values[numpy.isfinite(values)]
        counts, edges = numpy.histogram(finite, bins=64)
        bars = {"counts": counts.tolist(), "edges": edges.tolist()}
        lost = int(values.size - finite.size)
        self._write("histogram", step=step, name=name, **bars, not_finite=lost)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        path = self._media(name, step, "png")
        figure.savefig(path)
        self._write("figure", step=step, name=name, file=path.name)

    def log_artifact(self, path: str, name: str) -> None:
        inside = [part for part in Path(name).parts if part not in ("/", "..", ".")]
        target = self.tracker.joinpath("artifacts", *(inside or ["_"]))
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copy2(path, target)
        self._write("artifact", name=name, file=str(target.relative_to(self.tracker)))

    def discard(self) -> None:
        self._close()
        if self._made:  # keep a run of the same name from an earlier start
            shutil.rmtree(self.tracker, ignore_errors=True)

    def finish(self) -> None:
        self._write("end", status="finished")
        self._close()

    def finish_failed(self) -> None:
        self._write("end", status="failed")
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _media(self, name: str, step: int | None, suffix: str) -> Path:
        folder = self.tracker / "media"
        folder.mkdir(exist_ok=True)
        self._files += 1
        return folder / f"{_file_name(name)[:100]}_{step}_{self._files}.{suffix}"

    def _write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            raise ValueError("the run is closed")
        # With line buffering, each line is one system call, so it survives a kill of this process.
        line = {"kind": kind, "time": round(time.time(), 3), **fields}
        try:
            text = json.dumps(line, default=str, allow_nan=False)
        except ValueError:  # NaN or an infinity
            text = json.dumps(strict(line), default=str)
        self._file.write(text + "\n")


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", text).strip(".") or "_"
