"""Run each mutant, a backend with one fault, through the check that must notice it.

Run on two ranks: `run.py FOLDER [MUTANT...]`. Each rank reports
`{mutant: [check, state, error, attribution, hooks with the fault]}`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from every_mutant import MUTANTS

from accelerate_core.contract.hooks import HOOKS
from accelerate_testing import CheckContext, checks_of, write_result
from accelerate_testing.checks import about, missing_capability
from accelerate_testing.suites import leaving
from accelerate_testing.worker import Ranks, run_check


def damaged(cls: type) -> list[str]:
    its = [one for one in cls.__mro__ if one.__module__.startswith("of_")]
    return [hook for one in its for hook in vars(one) if hook in HOOKS]


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    os.chdir(folder)
    leaving._GRACE = 0.5  # mutants leave threads and processes that never end
    found: dict[str, Any] = {}
    known = checks_of("backend")
    for name in wanted or MUTANTS:
        cls, check = MUTANTS[name]
        here = folder / f"of_{name}"
        here.mkdir(exist_ok=True)
        found[name] = [check, "began", "", "", []]
        write_result(found)
        ctx = CheckContext("backend", "sound", cls, here, timeout=4.0)
        ranks = Ranks(here, 4.0)
        line = run_check(known[check].function, ctx)
        if missing_capability(known[check], cls.supports, cls.owns):
            line["state"] = "skipped"  # as in the suite
        ranks.say(check, line)
        if not ranks.all_well(check):
            ctx.abandon()
        attribution = about(check, cls, meant=line["hooks"].split())
        found[name] = [check, line["state"], line["error"], attribution, damaged(cls)]
        write_result(found)


if __name__ == "__main__":
    main()
