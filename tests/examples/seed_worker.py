"""Runs the examples of the seed documents for this number of processes, in each of them.

Called as `seed_worker.py REPORT [CASE ...]`. The cases run in order in every process, until one fails.
The result `{case: "" or traceback}` is written to `REPORT.RANK`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import seed_class_reference
import seed_guides
from seed_parts import CASES

from accelerate_core import Accelerator
from accelerate_core.utils import InitProcessGroupKwargs

DOCUMENTS = (seed_class_reference, seed_guides)  # importing them filled CASES


def main(report: str, only: list[str]) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    group = Accelerator(kwargs_handlers=[timeout])
    results: dict[str, str] = {}
    for index, (name, case) in enumerate(CASES.items()):
        if size not in case.processes or (only and name not in only):
            continue
        folder = Path(f"{report}.files", str(index))  # shared by all processes
        folder.mkdir(parents=True, exist_ok=True)
        try:
            case.run(folder)
        except BaseException:
            # Other ranks may be waiting in a collective, so later cases would be unreliable.
            results[name] = traceback.format_exc()
            Path(f"{report}.{rank}").write_text(json.dumps(results))
            traceback.print_exc()
            os._exit(1)
        results[name] = ""
        Path(f"{report}.{rank}").write_text(json.dumps(results))
    group.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
