"""torchao on three ranks, where no layer has a divisible number of rows."""

from __future__ import annotations

import torch
from training import Run, fp8
from worker import case, run_cases

torch.set_num_threads(1)


@case
def layers_with_indivisible_rows_are_gathered_in_bf16() -> None:
    run = Run(backend="fsdp2", **fp8())
    losses = run.train(0, 6)
    assert losses[-1] < losses[0]
    text = run.accelerator.explain()
    assert "7 of 9 linear layers compute in fp8" in text
    assert "64 x 64  fp8, gathered in bf16 (its rows are not divisible by 3 ranks)" in text
    assert "192 x 64  fp8\n" in text
    run.end()


run_cases()
