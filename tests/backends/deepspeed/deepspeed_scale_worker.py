"""Save a run whose loss scale has decreased from 256, or load it, and write the scale as the result.

Arguments: the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import KEPT, speed
from small_model import Tower
from worker import write_result

from accelerate_core import GradScalerKwargs

if __name__ == "__main__":
    scales = {}
    for stage in (1, 2, 3):
        scaling = [GradScalerKwargs(init_scale=256.0)]
        accelerator = speed(zero_stage=stage, mixed_precision="fp16", kwargs_handlers=scaling)
        model = Tower()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        folder = Path(sys.argv[1], str(stage))
        if folder.exists():
            accelerator.load_state(str(folder))
        else:
            for factor in (1.0, float("inf")):
                accelerator.backward(model(torch.ones(2, 8)).sum() * factor)
                optimizer.step()
            accelerator.save_state(str(folder))
        scales[stage] = [float(model.optimizer.loss_scale), model.optimizer.loss_scaler.cur_iter]
    write_result(scales)
    KEPT.end_training()
