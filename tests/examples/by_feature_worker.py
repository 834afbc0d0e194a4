"""Runs all scripts of examples/by_feature, one after the other, in one process or on every rank."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"

#: Scripts whose `main` takes a folder.
WRITERS = ("checkpointing", "profiling", "tracking")


def main(output: Path) -> None:
    sys.path.insert(0, str(FOLDER))
    made: dict[str, Any] = {}
    for path in sorted(FOLDER.glob("*.py")):
        name = path.stem
        if name == "digits":
            continue
        module = importlib.import_module(name)
        made[name] = module.main(output / name) if name in WRITERS else module.main()
    rank = os.environ.get("RANK", "0")
    (output / f"results{rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
