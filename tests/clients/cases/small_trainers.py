"""Trainers in libraries with another main purpose: kornia.x and denoising-diffusion-pytorch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import running
import torch
from accelerate.utils import set_seed
from kornia.x import (
    Configuration,
    ImageClassifierTrainer,
    ModelCheckpoint,
    SemanticSegmentationTrainer,
    Trainer,
)
from running import case
from torch import nn


def load_without_torchvision() -> Any:
    """Return the module for one-dimensional data, which unlike the package needs no torchvision."""
    name = "denoising_diffusion_pytorch"
    found = importlib.util.find_spec(name)
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)  # type: ignore[union-attr, arg-type]
    sys.modules[name] = package
    return importlib.import_module(f"{name}.{name}_1d")


diffusion = load_without_torchvision()
diffusion.cpu_count = lambda: 0  # otherwise it starts one worker per core


def denoiser(folder: Path, **more: Any) -> Any:
    set_seed(3)
    model = diffusion.Unet1D(dim=8, dim_mults=(1, 2), channels=2)
    process = diffusion.GaussianDiffusion1D(model, seq_length=16, timesteps=20)
    rows = torch.rand(44, 2, 16, generator=torch.Generator().manual_seed(4))
    made = diffusion.Trainer1D(
        process,
        dataset=diffusion.Dataset1D(rows),
        train_batch_size=8,
        train_lr=1e-3,
        train_num_steps=8,
        gradient_accumulate_every=2,
        ema_update_every=2,
        save_and_sample_every=4,
        num_samples=4,
        results_folder=str(folder / "results"),
        **more,
    )
    made.seen = []
    made.model.register_forward_hook(lambda *call: made.seen.append(float(call[2])))
    return made


def denoised(made: Any) -> dict[str, Any]:
    made.train()
    found = {
        "losses": made.seen,
        "weights": running.weights(made.accelerator.unwrap_model(made.model)),
    }
    if made.accelerator.is_main_process:
        found["average"] = running.weights(made.ema.ema_model)
        found["samples"] = torch.load(made.results_folder / "sample-2.png").double().norm().item()
    return found


@case(1)
def denoising(folder: Path) -> Any:
    """Train, and resume from the checkpoint in the middle."""
    made = denoiser(folder)
    found = {"trained": denoised(made)}
    again = denoiser(folder)
    again.load(1)
    set_seed(5)
    return {**found, "resumed": {"from": again.step, **denoised(again)}}


@case(2)
def denoising_on_ranks(folder: Path) -> Any:
    """Train on two ranks without sampling, which calls the model on rank 0 only and so can't work."""
    return denoised_without_samples(denoiser(folder, amp=True, mixed_precision_type="bf16"))


def denoised_without_samples(made: Any) -> dict[str, Any]:
    made.save_and_sample_every = 100
    made.train()
    return {
        "losses": made.seen,
        "weights": running.weights(made.accelerator.unwrap_model(made.model)),
    }


def images(rows: int, seed: int, pixels: bool) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(seed)
    data = torch.rand(rows, 3, 8, 8, generator=made)
    target = (data.sum(1) * 4).long() % 5 if pixels else (data.sum((1, 2, 3)) * 4).long() % 6
    return torch.utils.data.TensorDataset(data, target)


def fitted(kind: Any, pixels: bool, **callbacks: Any) -> dict[str, Any]:
    own = {name: vars(Trainer)[name] for name in callbacks}  # kornia sets callbacks on the class
    try:
        return _fitted(kind, pixels, callbacks)
    finally:
        for name, method in own.items():
            setattr(Trainer, name, method)


def _fitted(kind: Any, pixels: bool, callbacks: dict[str, Any]) -> dict[str, Any]:
    set_seed(6)
    head = [nn.Conv2d(4, 5, 1)] if pixels else [nn.Flatten(), nn.Linear(256, 6)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), *head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: dict[str, list[Any]] = {"losses": [], "evaluated": []}

    class Kept(kind):  # type: ignore[misc]
        def backward(self, loss: torch.Tensor) -> None:
            seen["losses"].append(loss.item())
            super().backward(loss)

        def evaluate(self) -> Any:
            stats = super().evaluate()
            seen["evaluated"].append({name: float(one.avg) for name, one in stats.items()})
            return stats

    made = Kept(
        model,
        torch.utils.data.DataLoader(images(46, 0, pixels), batch_size=4, shuffle=True),
        torch.utils.data.DataLoader(images(19, 1, pixels), batch_size=4),
        nn.CrossEntropyLoss(),
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
        Configuration(num_epochs=3),
        callbacks=callbacks,
    )
    made.fit()
    return {
        **seen,
        "rate": optimizer.param_groups[0]["lr"],
        "state": made.state.name,
        "weights": running.weights(made.accelerator.unwrap_model(made.model)),
    }


@case()
def kornia_images(folder: Path) -> Any:
    """Train with checkpoints that contain whole prepared models."""
    own = folder / f"rank-{running.RANK}"
    best = ModelCheckpoint(str(own), "losses", lambda epoch, metric: f"epoch-{epoch}.pt")
    found = fitted(ImageClassifierTrainer, False, on_checkpoint=best)
    files = sorted(own.glob("*.pt"))
    last = torch.load(files[-1], weights_only=False)
    return {
        **found,
        "files": [path.name for path in files],
        "saved": running.weights(getattr(last, "module", last)),
    }


@case()
def kornia_pixels(folder: Path) -> Any:
    return fitted(SemanticSegmentationTrainer, True)


if __name__ == "__main__":
    running.main()
