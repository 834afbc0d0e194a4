"""How long the import of a plugin takes, beyond that of what it requires."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

#: Seconds by which a plugin may delay the scripts that use it; parts of torch take half of that.
LIMIT = 1.5

_MEASURE = """
import importlib, sys, time

def seconds(names):
    wall, busy = time.perf_counter(), time.process_time()
    for name in names:
        importlib.import_module(name)
    return time.perf_counter() - wall, time.process_time() - busy

wall, busy = seconds(sys.argv[1].split())
stretch = max(1.0, wall / busy)  # by which other work lengthens what this process computes
for names in (sys.argv[3].split(), [sys.argv[2]]):
    wall, busy = seconds(names)
    print("SECONDS", busy + max(0.0, wall - busy * stretch))
"""


def check_import_time(target: str, seconds: float, first: str, needed: Iterable[str]) -> None:
    """Fail if an import that took longer than is allowed does so again, in a process of its own.

    Args:
        target: what an entry point names.
        seconds: which it has taken here: with other work beside it, or from files read for the first time.
        first: a module that a script has imported by then.
        needed: packages it requires.
    """
    if seconds <= LIMIT:
        return
    module = target.partition(":")[0]
    packages = " ".join(sorted(needed))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, first, module, packages],
        capture_output=True, text=True, timeout=seconds * 10 + 120,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    told = [float(line.split()[1]) for line in lines if line.startswith("SECONDS")]
    before, own = told if len(told) == 2 else (0.0, seconds)
    assert own <= LIMIT, (
        f"importing {module} takes {own:.1f} s, beside {before:.1f} s for what it requires; "
        f"{LIMIT:g} s are allowed: import heavy libraries when they are used, and wait for nothing"
    )
