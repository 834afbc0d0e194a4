"""Record the clients' results with Accelerate: `record.py [GROUP[:CASE,CASE]...] [--processes N]`.

`make clients-recorded` creates the environment for this script and runs it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from clients import ENVIRONMENTS, HERE, RECORDED, groups, launch_project, recorded, run


def write(group: str, processes: int, made: Any) -> None:
    place = RECORDED / f"{group}-{processes}.json"
    text = json.dumps(made, indent=1)
    # Write a list of numbers on one line, because people read losses and orders of samples as a whole.
    text = re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    place.write_text(text + "\n", encoding="utf-8")


def record_project(processes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = Path(shutil.copytree(HERE / "project", Path(folder, "project")))
        write("project", processes, launch_project(ENVIRONMENTS / "theirs/bin", project, processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP[:CASE,CASE]")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="default: both")
    given = parser.parse_args()
    for asked in given.groups or [*groups(), "project"]:
        group, _, cases = asked.partition(":")
        for processes in [given.processes] if given.processes else (1, 2):
            if group == "project":
                record_project(processes)
                continue
            made = run("theirs", group, processes, cases.split(",") if cases else ())
            failed = {name: one for name, one in made.items() if "error" in one}
            for name, one in failed.items():
                print(f"{group}-{processes} {name}: {one['error'][-600:]}", file=sys.stderr)
            kept = {name: one for name, one in made.items() if name not in failed}
            for one in kept.values():
                del one["seconds"]
            if cases:
                kept = {**recorded(group, processes), **kept}
            if kept:
                write(group, processes, kept)
            print(f"{group}-{processes}: {len(kept)} recorded, {len(failed)} failed")


if __name__ == "__main__":
    main()
