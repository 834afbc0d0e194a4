"""The process in which checks run: `python -m accelerate_testing.worker TASK.json`.

Each rank appends one JSON line per check to `RANK.jsonl`. After a check all ranks wait, through
these files, for each other: after a failure they drop what it left and go on together; where one
does not come, they give up, and whoever started them starts anew with the checks that are left.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["main"]

#: The exit status of ranks that gave up on one another.
LOST = 75


def main(task_file: str) -> None:
    """Run the checks of a task in order."""
    task: dict[str, Any] = json.loads(Path(task_file).read_text(encoding="utf-8"))
    from accelerate_testing.checks import checks_of

    lab = None
    known = checks_of(task["kind"])
    ranks = Ranks(Path(task["folder"]), float(task["timeout"]))
    for name in task["checks"]:
        made = known[name]
        if lab is None and not (made.place == "alone" and name == "imports"):
            lab = make_lab(task)
        function = made.before if task["dying"] == name else made.function
        ranks.begin(name)
        faulthandler.dump_traceback_later(task["timeout"] * 2, exit=False)
        line = run_check(function, lab if lab is not None else _bare(task))
        faulthandler.cancel_dump_traceback_later()
        ranks.say(name, line)
        if made.place == "ends" and line["error"]:
            raise SystemExit(f"{line['trace']}")
        if not ranks.all_well(name) and lab is not None:
            lab.abandon()


def make_lab(task: dict[str, Any]) -> Any:
    """Return the lab of a task; its prelude is imported before."""
    if task["prelude"]:
        importlib.import_module(task["prelude"])
    from accelerate_testing.lab import Lab

    return Lab(
        kind=task["kind"],
        name=task["name"],
        plugin=task["name"],
        folder=Path(task["folder"]),
        timeout=float(task["timeout"]),
        options=task["options"],
    )


def _bare(task: dict[str, Any]) -> Any:
    """Return what the check of imports needs, without torch."""
    from types import SimpleNamespace

    def equal(got: object, expected: object, what: str) -> None:
        if got != expected:
            raise AssertionError(f"{what}: {got!r} instead of {expected!r}")

    return SimpleNamespace(kind=task["kind"], name=task["name"], equal=equal)


def run_check(function: Any, lab: Any) -> dict[str, Any]:
    """Run one check on this rank; return its line."""
    from accelerate_testing.checks import Skip

    line: dict[str, Any] = {"state": "passed", "detail": "", "error": "", "trace": ""}
    started = time.perf_counter()
    try:
        line["detail"] = function(lab) or ""
        if hasattr(lab, "end"):
            lab.end()
    except Skip as why:
        line["state"], line["detail"] = "skipped", str(why)
        lab.end()
    except Exception as error:
        line["state"] = "failed"
        line["error"] = _said(error)
        line["trace"] = traceback.format_exc()
        error.__traceback__ = None
    line["seconds"] = time.perf_counter() - started
    return line


def _said(error: BaseException) -> str:
    """Return what an exception says, with its notes: they name plugin, hook and version."""
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return "\n".join([f"{kind}{error}", *getattr(error, "__notes__", ())])


class Ranks:
    """How the ranks hear from each other without a process group."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder, self.timeout = folder, timeout
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))

    def begin(self, name: str) -> None:
        """Let the one who watches know what runs now."""
        if self.rank == 0:
            (self.folder / "now").write_text(name, encoding="utf-8")

    def say(self, name: str, line: dict[str, Any]) -> None:
        """Write this rank's line."""
        path = self.folder / f"{name}.{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(line), encoding="utf-8")
        path.with_suffix(".part").rename(path)

    def all_well(self, name: str) -> bool:
        """Wait for the other ranks' lines; tell whether none failed."""
        until = time.monotonic() + self.timeout + 10
        paths = [self.folder / f"{name}.{rank}.json" for rank in range(self.size)]
        while not all(path.exists() for path in paths):
            if time.monotonic() > until:
                sys.stderr.flush()
                os._exit(LOST)
            time.sleep(0.005)
        lines = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return all(line["state"] != "failed" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1])
