"""The mock of MS-AMP on two ranks under DDP."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from worker import RANK, case, run_cases, same_on_ranks

from accelerate_core import Accelerator
from accelerate_core.utils import MSAMPRecipeKwargs
from accelerate_fp8.msamp import MSAMP

sys.path.insert(0, str(Path(__file__).with_name("mock_libraries")))
import msamp

torch.set_num_threads(1)
MSAMP.devices = ("cpu",)
KEPT = Accelerator(cpu=True, backend="ddp", process_group_timeout=60)


@case
def gradients_are_reduced_once_per_step_before_clipping() -> None:
    accelerator = Accelerator(
        cpu=True,
        backend="ddp",
        mixed_precision="fp8",
        kwargs_handlers=[MSAMPRecipeKwargs()],
        gradient_accumulation_steps=2,
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-2))
    norms = []
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        x = torch.randn(4, 8, generator=generator)
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - x).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    assert msamp.calls == [
        "initialize O2",
        *["all_reduce_grads", "clip_grad_norm_", "step"] * 4,
    ], msamp.calls
    assert same_on_ranks(torch.tensor(norms))
    for value in accelerator.get_state_dict(model).values():
        assert same_on_ranks(value)


if __name__ == "__main__":
    run_cases()
