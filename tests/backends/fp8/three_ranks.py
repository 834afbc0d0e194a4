"""torchao on three ranks, over which no layer's rows divide."""

from __future__ import annotations

import torch
from training import Run, fp8
from worker import case, run_cases

torch.set_num_threads(1)


@case
def layers_whose_rows_do_not_divide_are_gathered_whole() -> None:
    run = Run(backend="fsdp2", **fp8())
    losses = run.train(0, 6)
    assert losses[-1] < losses[0]
    told = run.accelerator.explain()
    assert "7 of 9 linear layers compute in fp8" in told
    assert "64 x 64  fp8, gathered in bf16: its rows do not divide over 3 ranks" in told
    assert "192 x 64  fp8\n" in told
    run.end()


run_cases()
