"""Record what the clients return with the original: `record.py [GROUP[:CASE,CASE]...] [--processes N]`.

`make clients-recorded` makes the environment that this runs in, and runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from clients import RECORDED, groups, recorded, run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP[:CASE,CASE]")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="default: each")
    given = parser.parse_args()
    for asked in given.groups or groups():
        group, _, cases = asked.partition(":")
        for processes in [given.processes] if given.processes else (1, 2):
            made = run("theirs", group, processes, cases.split(",") if cases else ())
            failed = {name: one for name, one in made.items() if "error" in one}
            for name, one in failed.items():
                print(f"{group}-{processes} {name}: {one['error'][-600:]}", file=sys.stderr)
            kept = {name: one for name, one in made.items() if name not in failed}
            if cases:
                kept = {**recorded(group, processes), **kept}
            if kept:
                place = RECORDED / f"{group}-{processes}.json"
                place.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(f"{group}-{processes}: {len(kept)} recorded, {len(failed)} failed")


if __name__ == "__main__":
    main()
