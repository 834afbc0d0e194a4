"""Two models and two optimizers in one loop: a tiny GAN that learns to draw digits.

    python examples/gan.py
    accelerate-core launch --num_processes 2 examples/gan.py

The painter turns random numbers into 8x8 images. The critic learns to tell them from real digits, and
the painter learns to deceive the critic. At the end, a grid of painted digits is saved as a PNG.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from accelerate_core import Accelerator
from accelerate_core.utils import set_seed

NOISE = 16


def painter() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 256), nn.LeakyReLU(0.2),
        nn.Linear(256, 64), nn.Sigmoid(),
    )  # fmt: skip


def critic() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3),
        nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1),
    )  # fmt: skip


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(mixed_precision=args.mixed_precision, cpu=args.cpu)
    set_seed(args.seed)  # the same initial weights on every process …
    paint, judge = painter(), critic()
    paint_optimizer = torch.optim.Adam(paint.parameters(), lr=args.lr, betas=(0.5, 0.999))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=args.lr, betas=(0.5, 0.999))
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(images, args.batch_size, shuffle=True, drop_last=True)
    paint, judge, paint_optimizer, judge_optimizer, loader = accelerator.prepare(
        paint, judge, paint_optimizer, judge_optimizer, loader
    )
    # … but each process paints from different random numbers.
    own = torch.Generator().manual_seed(args.seed + accelerator.process_index)

    for epoch in range(args.epochs):
        sums = torch.zeros(2, device=accelerator.device)
        for real in loader:
            painted = paint(torch.randn(len(real), NOISE, generator=own).to(accelerator.device))
            truth = torch.cat([torch.full((len(real), 1), 0.9), torch.zeros(len(real), 1)])

            # Train the critic. `detach` keeps gradients from the painter.
            scores = judge(torch.cat([real, painted.detach().float()]))
            judge_loss = F.binary_cross_entropy_with_logits(scores, truth.to(scores.device))
            accelerator.backward(judge_loss)
            judge_optimizer.step()
            judge_optimizer.zero_grad()

            # Train the painter through the critic. The critic's own gradients are not needed, so
            # they are not reduced between processes, and they are discarded.
            with accelerator.no_sync(judge):
                scores = judge(painted)
                paint_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
                accelerator.backward(paint_loss)
            paint_optimizer.step()
            paint_optimizer.zero_grad()
            judge_optimizer.zero_grad()
            sums += torch.stack([judge_loss.detach(), paint_loss.detach()])

        means = accelerator.reduce(sums / len(loader), reduction="mean")
        critic_loss, painter_loss = means.tolist()
        if (epoch + 1) % 10 == 0 or epoch + 1 == args.epochs:
            accelerator.print(
                f"epoch {epoch + 1:>3}/{args.epochs}  "
                f"critic loss {critic_loss:.3f}  painter loss {painter_loss:.3f}"
            )

    if accelerator.is_main_process:
        path = args.output_dir / "painted.png"
        draw(accelerator.unwrap_model(paint), args.seed, path)
        print(f"painted digits are in {path}")
    accelerator.end_training()


@torch.no_grad()
def draw(paint: nn.Module, seed: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws to a file and needs no display
    import matplotlib.pyplot as plt

    noise = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(seed))
    images = paint(noise.to(next(paint.parameters()).device)).float().cpu()
    grid = F.pad(images.view(8, 8, 8, 8), (1, 1, 1, 1)).permute(0, 2, 1, 3).reshape(80, 80)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.imsave(path, grid.repeat_interleave(6, 0).repeat_interleave(6, 1), cmap="gray")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A tiny GAN that learns to draw digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched, or no")
    add("--epochs", type=int, default=60, help="number of epochs")
    add("--batch_size", type=int, default=32, help="digits per batch, on each process")
    add("--lr", type=float, default=1e-3, help="learning rate of both models")
    add("--seed", type=int, default=0, help="for the initial weights and the random numbers")
    add("--output_dir", type=Path, default=Path("gan_output"), help="where to write")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
