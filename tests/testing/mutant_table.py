"""The table of mutants in `mutants/README.md`: the check that finds each, and what a run says about it.

`python mutant_table.py` measures all of them and writes the table, which takes some minutes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accelerate_testing import run_workers
from accelerate_testing.scaffold import write_repository

FOLDER = Path(__file__).with_name("mutants")
README = FOLDER / "README.md"
SOURCE = "\n".join(path.read_text() for path in sorted(FOLDER.glob("of_*.py")))
#: Mutant -> the check that must notice it.
CHECKS = {
    name: check
    for check, name in re.findall(r"^@caught_by\(\"(\w+)\"\)\nclass (\w+)", SOURCE, re.MULTILINE)
}
#: Mutants with which gloo sometimes aborts the process, and the note that says so.
ABORTS = {"OneRankSkipsACollective": " (2)"}
_BEGIN, _END = "<!-- measured -->", "<!-- end of measured -->"
#: Mutants in one launch.
_PART = 30


def measured(names: Sequence[str], debug: bool, limit: float = 600) -> dict[str, str]:
    """Return what an ordinary run on two ranks, or one in debug mode, says about each mutant."""
    sys.path.insert(0, str(FOLDER))
    from in_a_run import outcome_of

    found: dict[str, str] = {}
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder, "sound")
        write_repository("sound", "backend", sound)
        while left:
            environ = {"ACCELERATE_DEBUG_MODE": str(int(debug))}
            arguments = [sound, *left[:_PART]]
            run = run_workers(FOLDER / "in_a_run.py", 2, arguments, timeout=limit, env=environ)
            assert not run.timed_out, run.story
            done = [name for name in left if all(name in (rank or {}) for rank in run.results)]
            assert done, run.story
            found |= {name: outcome_of([rank[name] for rank in run.results]) for name in done}
            left = [name for name in left if name not in done]
    return found


def read_table() -> dict[str, list[str]]:
    """Return the rows of the README: mutant -> check, without and with debug mode."""
    text = README.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    return {name: [check, without, with_debug] for name, check, without, with_debug in rows}


def main() -> None:
    without, with_debug = (measured(list(CHECKS), debug) for debug in (False, True))
    lines = ["| mutant | check | the run says | in debug mode |", "|---|---|---|---|"]
    for name, check in CHECKS.items():
        columns = [f"{said[name]}{ABORTS.get(name, '')}" for said in (without, with_debug)]
        lines.append(f"| {name} | `{check}` | {' | '.join(columns)} |")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    table = "\n".join(lines)
    README.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
