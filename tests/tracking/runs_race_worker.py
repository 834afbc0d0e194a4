"""Starts and ends a run on every rank again and again, all in one folder.

Arguments: the folder, and the number of runs.
"""

from __future__ import annotations

import os
import sys

from accelerate_tracking import TrackerHub
from accelerate_tracking.jsonl import JsonlTracker

folder, rank = sys.argv[1], int(os.environ["RANK"])
for number in range(int(sys.argv[2])):
    hub = TrackerHub(["jsonl"], folder, rank=rank, size=2, is_main=rank == 0)
    hub.init_trackers("race", None, {"jsonl": {"main_process_only": False}})
    assert [type(tracker) for tracker in hub.trackers] == [JsonlTracker]  # none was turned off
    hub.log({"value": number}, number, None)
    assert hub.flush_trackers(None) == []
    hub.finish(failed=False)
