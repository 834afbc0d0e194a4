"""Eight optimizer steps of a GPT-2 with accumulation and clipping; rank 0 writes losses and norms.

Arguments: the sizes of the mesh and the options of `training.made` (both JSON), and the output file.
With the sizes `null`, plain Transformers trains in one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from training import made, plain, run, start
from worker import RANK

RATE = 1e-3


def main(family: str = "gpt2", parts: int = 1) -> None:
    sizes, options, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if sizes is None:
        losses, norms, _ = plain(family, RATE, parts)
    else:
        accelerator = made(sizes, **options)
        model, optimizer, loader = start(accelerator, family, RATE)
        losses, norms = run(accelerator, model, optimizer, loader, scheduled=True)
        accelerator.end_training()
    if RANK == 0:
        out.write_text(json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    main()
