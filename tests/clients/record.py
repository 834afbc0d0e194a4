"""Record what the clients return with the original: `record.py [GROUP[:CASE,CASE]...] [--processes N]`.

`make clients-recorded` makes the environment that this runs in, and runs it.
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
    # A list of numbers on one line: losses and orders of samples are read and compared as a whole.
    text = re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    place.write_text(text + "\n", encoding="utf-8")


def record_project(processes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = Path(shutil.copytree(HERE / "project", Path(folder, "project")))
        write("project", processes, launch_project(ENVIRONMENTS / "theirs/bin", project, processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP[:CASE,CASE]")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="default: each")
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
