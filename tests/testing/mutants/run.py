"""A sound backend, damaged in one place at a time: each with the check that is to notice.

Run on two ranks: `run.py FOLDER [MUTANT...]`; a rank reports `{mutant: [check, state, error]}`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import of_checkpoints
import of_endings
import of_models
import of_optimizers
import of_ranks
import of_steps
from registry import MUTANTS

from accelerate_testing import CheckContext, checks_of, write_result
from accelerate_testing.suites import leaving
from accelerate_testing.worker import Ranks, run_check

__all__ = ["of_checkpoints", "of_endings", "of_models", "of_optimizers", "of_ranks", "of_steps"]


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    os.chdir(folder)
    leaving._GRACE = 0.5  # what is left on purpose does not end
    found: dict[str, Any] = {}
    known = checks_of("backend")
    for name in wanted or MUTANTS:
        cls, check = MUTANTS[name]
        here = folder / f"of_{name}"
        here.mkdir(exist_ok=True)
        found[name] = [check, "began", ""]
        write_result(found)
        ctx = CheckContext("backend", "sound", cls, here, timeout=4.0)
        ranks = Ranks(here, 4.0)
        line = run_check(known[check].function, ctx)
        ranks.say(check, line)
        if not ranks.all_well(check):
            ctx.abandon()
        found[name] = [check, line["state"], line["error"]]
        write_result(found)


if __name__ == "__main__":
    main()
