"""Begins and ends a journal again and again, in a folder that another rank removes when it is empty.

Arguments: the folder, and how many times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from accelerate_core.tracking.journal import Journal, read_leftover

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
for number in range(int(sys.argv[2])):
    token = f"run{number}"
    journal = Journal(folder, token, rank)
    journal.watch(["one"])
    journal.append(0, {"value": number})
    assert [entry["value"] for entry in read_leftover(folder, token, rank).entries] == [number]
    read_leftover(folder, "of-another-run", rank)
    journal.mark("one", 0)
    journal.close(delete=True)
