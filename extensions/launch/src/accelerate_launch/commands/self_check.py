"""The checks that `accelerate-core test` runs on every rank, each against a known result."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import DataLoaderConfiguration
from accelerate_core.distributed.collectives import broadcast
from accelerate_core.plugin import Accelerator
from accelerate_launch.plan import counted

SAMPLES = 37  # not divisible by the batch size, so that the last batch is shorter on some rank
STEPS = 4
BATCH = 8


def check_ranks(accelerator: Accelerator) -> str:
    """Check that every rank takes part once, and that exactly one is the main process."""
    mine = torch.tensor([accelerator.process_index], device=accelerator.device)
    ranks = accelerator.gather(mine).tolist()
    _equal(ranks, list(range(accelerator.num_processes)), "ranks")
    mains = accelerator.communicator.gather_object(accelerator.is_main_process)
    _equal(sum(mains), 1, "number of main processes")
    return f"{counted(accelerator.num_processes, 'process')} on {accelerator.device.type}"


def check_collectives(accelerator: Accelerator) -> str:
    """Check gather, reduce, broadcast and padding on nested data."""
    rank = accelerator.process_index
    size = accelerator.num_processes
    device = accelerator.device
    tree = {
        "a": torch.full((2, 3), float(rank), device=device),
        "b": [torch.tensor([rank], device=device), (torch.tensor([rank % 2 == 0], device=device),)],
    }
    gathered = accelerator.gather(tree)
    _equal(
        gathered["a"][:, 0].tolist(), [float(r) for r in range(size) for _ in range(2)], "gather"
    )
    _equal(gathered["b"][1][0].tolist(), [r % 2 == 0 for r in range(size)], "gather of bool")
    total = accelerator.reduce({"x": torch.tensor([rank + 1.0], device=device)}, "sum")
    _equal(total["x"].item(), size * (size + 1) / 2, "reduce")
    sent = broadcast(
        {"x": torch.tensor([float(rank)], device=device)}, size - 1, comm=accelerator.communicator
    )
    _equal(sent["x"].item(), float(size - 1), "broadcast")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    _equal(padded.shape[0], size, "length after padding")
    return "gather, reduce, broadcast, pad"


def check_loader(accelerator: Accelerator) -> str:
    """Check that the ranks together see every sample exactly once per epoch."""
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=4, shuffle=True)
    loader = accelerator.prepare(data)
    for _ in range(2):
        seen = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
        _equal(sorted(torch.cat(seen).tolist()), list(range(SAMPLES)), "samples")
    return f"{SAMPLES} samples, 2 epochs"


def check_dispatching_loader(accelerator: Accelerator) -> str:
    """Check the same for a loader that only the main process reads."""
    config = DataLoaderConfiguration(dispatch_batches=True)
    return check_loader(Accelerator(dataloader_config=config))


def check_training(accelerator: Accelerator) -> str:
    """Check that training on all ranks gives the weights of plain PyTorch on the whole batch."""
    size = accelerator.num_processes
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS * BATCH * size, 6, generator=generator)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    plain = _model()
    _train(plain, _optimizer(plain), DataLoader(data, BATCH * size), torch.autograd.backward)
    expected = plain.state_dict()

    model = _model()
    wrapped, optimizer, loader = accelerator.prepare(
        model, _optimizer(model), DataLoader(data, BATCH)
    )
    _train(wrapped, optimizer, loader, accelerator.backward)
    state = accelerator.get_state_dict(wrapped)
    full = accelerator.mixed_precision == "no"
    # Lower precisions round, and a gradient scaler may skip the first steps.
    tolerance = 1e-4 if full else 0.5
    if not accelerator.is_main_process:
        return ""  # only the main process is sure to have the whole state dict
    error = max(float((state[k].cpu().float() - v).abs().max()) for k, v in expected.items())
    if not error <= tolerance:
        raise AssertionError(f"weights differ from plain PyTorch by {error:.2g} (> {tolerance:g})")
    return f"{STEPS} steps, precision {accelerator.mixed_precision}, error {error:.1g}"


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _train(model: Any, optimizer: Any, loader: Any, backward: Callable[..., None]) -> None:
    for batch, target in loader:
        backward(nn.functional.mse_loss(model(batch), target))
        optimizer.step()
        optimizer.zero_grad()


def check_saving(accelerator: Accelerator) -> str:
    """Check that `load_state` restores the weights that `save_state` wrote."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 6, device=accelerator.device)).sum())
    optimizer.step()
    saved = [_own_part(p).clone() for p in model.parameters()]
    made = tempfile.mkdtemp() if accelerator.is_main_process else ""
    folder = accelerator.communicator.broadcast_object(made)
    path = str(Path(folder) / "state")
    path = accelerator.save_state(path) or path
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    accelerator.load_state(path)
    for before, now in zip(saved, model.parameters(), strict=True):
        if not torch.equal(before, _own_part(now)):
            raise AssertionError("weights differ after save_state and load_state")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
    return "save_state, load_state"


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank holds."""
    local: Any = getattr(parameter, "to_local", None)
    whole: torch.Tensor = parameter.detach() if local is None else local().detach()
    return whole


def _equal(got: object, expected: object, what: str) -> None:
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


CHECKS: dict[str, Callable[[Accelerator], str]] = {
    "ranks": check_ranks,
    "collectives": check_collectives,
    "sharded loader": check_loader,
    "dispatching loader": check_dispatching_loader,
    "training": check_training,
    "saving": check_saving,
}


def main(output: str) -> int:
    """Run all checks. The main process writes their names, then one line per check, to `output`."""
    # One step per batch, whatever is configured, because the training check counts the steps.
    accelerator = Accelerator(gradient_accumulation_steps=1)
    failed = 0
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps([*CHECKS]) + "\n", encoding="utf-8")
    for name, check in CHECKS.items():
        start = time.perf_counter()
        detail, problem = "", ""
        try:
            detail = check(accelerator)
        except AssertionError as error:
            problem = f"rank {accelerator.process_index}: {error}"
        problems = [said for said in accelerator.communicator.gather_object(problem) if said]
        failed += bool(problems)
        if accelerator.is_main_process:
            seconds = time.perf_counter() - start
            result = {"name": name, "detail": detail, "error": "; ".join(problems)}
            with Path(output).open("a", encoding="utf-8") as file:
                file.write(json.dumps({**result, "seconds": seconds}) + "\n")
        accelerator.free_memory()
    accelerator.end_training()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
