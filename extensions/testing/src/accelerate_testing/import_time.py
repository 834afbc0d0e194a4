"""How long the import of a plugin takes, beyond that of what it requires."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

#: Seconds by which a plugin may delay every script that finds it.
LIMIT = 1.0

_MEASURE = """
import importlib, sys, time

def seconds(names):
    began = time.perf_counter()
    for name in names:
        importlib.import_module(name)
    return time.perf_counter() - began

seconds(sys.argv[1].split())
needed = seconds(sys.argv[3].split())
print("SECONDS", needed, seconds([sys.argv[2]]))
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
    module, packages = target.partition(":")[0], " ".join(sorted(needed))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, first, module, packages],
        capture_output=True, text=True, timeout=seconds * 10 + 120,
    )  # fmt: skip
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    before, own = map(float, told[-1]) if told else (0.0, seconds)
    assert own <= LIMIT, (
        f"importing {module} takes {own:.1f} s, beside {before:.1f} s for what it requires; "
        f"{LIMIT:g} s are allowed: import heavy libraries when they are used, and wait for nothing"
    )
