"""Run `resume_worker` with several ZeRO stages, one after the other in the same processes.

Arguments: folder, total number of micro-batches, stages. Each stage has its own folder and process
group. The precision comes from the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fsdp2"))

import cpu_has_fp16  # noqa: F401
from resume_worker import main

if __name__ == "__main__":
    for stage in sys.argv[3:]:
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = stage
        folder = Path(sys.argv[1], stage)
        folder.mkdir(exist_ok=True)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        main({"dp_shard": ranks}, folder, int(sys.argv[2]), "deepspeed")
