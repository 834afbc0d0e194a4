"""How long importing a plugin takes, in addition to the packages that it requires."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

#: Seconds by which a plugin may delay a script; some parts of torch take half of that.
LIMIT = 1.5

_MEASURE = """
import importlib, sys, time

def seconds(names):
    wall, busy = time.perf_counter(), time.process_time()
    for name in names:
        importlib.import_module(name)
    return time.perf_counter() - wall, time.process_time() - busy

wall, busy = seconds(sys.argv[1].split())
stretch = max(1.0, wall / busy)  # how much other work slows this process down
for names in (sys.argv[3].split(), [sys.argv[2]]):
    wall, busy = seconds(names)
    print("SECONDS", busy + max(0.0, wall - busy * stretch))
"""


def check_import_time(target: str, seconds: float, first: str, needed: Iterable[str]) -> None:
    """Fail if an import that took too long takes too long again in a new process.

    Args:
        target: what the entry point names.
        seconds: how long it took here, perhaps next to other work or with files not read before.
        first: a module that a script has imported by then.
        needed: the packages that the plugin requires.
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
        f"importing {module} takes {own:.1f} s, in addition to {before:.1f} s for the packages that it "
        f"requires; at most {LIMIT:g} s are allowed. Import heavy libraries in the functions that use "
        "them, and don't wait for anything"
    )
