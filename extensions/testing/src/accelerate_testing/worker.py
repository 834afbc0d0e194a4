"""The process in which checks run: `python -m accelerate_testing.worker TASK.json`.

Each rank writes the result of each check to `CHECK.RANK.json`. After a check, all ranks wait for each
other by these files. After a failure they drop what the check left, and continue together. If a rank
does not appear, they exit, and the runner starts new processes for the remaining checks.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate_core.contract.hooks import HOOKS
from accelerate_testing import fake_device
from accelerate_testing.checks import checks_of, own_classes
from accelerate_testing.context import CheckContext
from accelerate_testing.results import CREATES, Skip, prevents_others
from accelerate_testing.stack_dump import DUMP_SIGNAL, stack_dump_file
from accelerate_testing.suites.leaving import Started

#: The exit status of a rank that gave up waiting for the others.
LOST = 75


def main(task_file: str) -> None:
    """Run the checks of a task in order."""
    task: dict[str, Any] = json.loads(Path(task_file).read_text(encoding="utf-8"))
    kind = task["kind"]
    name = task["name"]
    folder = Path(task["folder"])
    timeout = task["timeout"]
    known = checks_of(kind)
    prelude = task["prelude"]
    ranks = Ranks(folder, timeout)
    dump = stack_dump_file(folder, ranks.rank).open("w", encoding="utf-8")
    faulthandler.register(DUMP_SIGNAL, dump)
    started = Started()
    ctx = CheckContext(kind, name, name, folder, timeout, task["options"], task["device"])
    cause = ""
    for name in task["checks"]:
        made = known[name]
        if cause:
            ranks.say(name, _result("skipped", f"not run: {cause} failed"))
            continue
        if name != "imports":  # which measures what the plugin itself imports
            if prelude:
                importlib.import_module(prelude)
            if task["device"] == fake_device.NAME:
                fake_device.install()
        function = made.before if task["dying"] == name else made.function
        ranks.begin(name)
        line = run_check(function, ctx)
        started.note(name)
        if prevents_others(name, line["state"], line["error"]):
            cause = name
            if name == CREATES:  # its error says what is missing
                line["trace"] = ""
        ranks.say(name, line)
        if made.judge and line["error"]:
            raise SystemExit(line["trace"])
        if not ranks.all_well(name):
            ctx.abandon()
    left = started.left()
    ranks.say("end", left)
    if left["threads"]:  # the interpreter would wait for them
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def run_check(function: Any, ctx: CheckContext) -> dict[str, Any]:
    """Run one check on this rank; return its result."""
    line = _result("passed")
    started = time.perf_counter()
    ctx.hooks = ""
    try:
        line["detail"] = function(ctx) or ""
        ctx.end()
    except Skip as why:
        line["state"] = "skipped"
        line["detail"] = str(why)
        ctx.end()
    except (Exception, SystemExit) as error:
        # Notes name the plugin, the hook and the version.
        said = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        line["state"] = "failed"
        line["error"] = "\n".join([f"{said}{error}", *getattr(error, "__notes__", ())])
        line["trace"] = traceback.format_exc()
        line["hooks"] = _raised_in(error, ctx) or ctx.hooks
        error.__traceback__ = None
    line["seconds"] = time.perf_counter() - started
    return line


def _result(state: str, detail: str = "") -> dict[str, Any]:
    return {"state": state, "detail": detail, "error": "", "trace": "", "hooks": "", "seconds": 0.0}


def _raised_in(error: BaseException, ctx: CheckContext) -> str:
    """Return the plugin's hooks that an exception passed through, the innermost first."""
    found = []
    at = error.__traceback__
    classes = []
    with suppress(Exception):  # the plugin may be impossible to import
        classes = own_classes(ctx.found)
    while at is not None:
        code, at = at.tb_frame.f_code, at.tb_next
        its = [getattr(vars(cls).get(code.co_name), "__code__", None) for cls in classes]
        found += [code.co_name] if code in its and code.co_name in HOOKS else []
    return " ".join(dict.fromkeys(reversed(found)))


class Ranks:
    """Lets the ranks wait for each other without a process group, by files."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder = folder
        self.timeout = timeout
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))

    def begin(self, name: str) -> None:
        """Tell the runner which check this rank begins, and which process it is."""
        path = self.folder / f"now.{self.rank}"
        path.write_text(f"{name} {os.getpid()} .", encoding="utf-8")

    def say(self, name: str, line: dict[str, Any]) -> None:
        """Write this rank's result."""
        path = self.folder / f"{name}.{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(line), encoding="utf-8")
        path.with_suffix(".part").rename(path)

    def all_well(self, name: str) -> bool:
        """Wait for the results of the other ranks; return whether no rank failed."""
        until = time.monotonic() + self.timeout + 5
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
