"""Train on handwritten digits, and log everything that trackers support.

    python examples/tracking.py
    accelerate-core runs show tracking_output
    accelerate-core launch --num_processes 2 examples/tracking.py --log_with jsonl,tensorboard

The script logs values, misread digits as images and as a table, the learning curve as a figure, the
distribution of the weights, and the model file. They go to all trackers that are installed and usable,
or to those named by `--log_with`. `jsonl` is built in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.utils import set_seed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log_with", default="all", help="comma-separated names, or all")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("tracking_output"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    set_seed(options.seed)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, test = TensorDataset(images[:1400], labels[:1400]), (images[1400:], labels[1400:])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        cpu=options.cpu,
        log_with=options.log_with.split(","),
        project_dir=options.output_dir,
    )
    # The `with` block closes the runs at the end. If it raises, they are marked as failed.
    with accelerator:
        accelerator.init_trackers("digits", config=options)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
        loader = DataLoader(train, batch_size=32, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step, curve = 0, []
        for epoch in range(options.epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                # A background thread reads the tensor, so this does not wait for the device.
                accelerator.log({"train": {"loss": loss.detach(), "epoch": epoch}}, step=step)
                step += 1
            curve.append(evaluate(accelerator, model, *test, step))
        report(accelerator, model, *test, curve, step)
        accelerator.print(
            f"test accuracy {curve[-1]:.2%}. Show the runs with: accelerate-core runs show "
            f"{options.output_dir}"
        )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    step: int,
) -> float:
    found = model(inputs.to(accelerator.device)).argmax(1).cpu()
    accuracy = (found == labels).float().mean()
    accelerator.log({"test/accuracy": accuracy}, step=step)
    return float(accuracy)


@torch.no_grad()
def report(
    accelerator: Accelerator,
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    curve: list[float],
    step: int,
) -> None:
    found = model(inputs.to(accelerator.device)).argmax(1).cpu()
    wrong = (found != labels).nonzero().flatten()[:8]
    rows = [[int(index), int(labels[index]), int(found[index])] for index in wrong]
    if rows:
        accelerator.log_images({"misread": inputs[wrong]}, step=step, channels_first=True)
        accelerator.log_table("misread_digits", ["sample", "is", "read as"], rows, step=step)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="test accuracy")
    axes.plot(range(1, len(curve) + 1), curve, marker="o")
    accelerator.log_figure("learning_curve", figure, step=step)
    weights = torch.cat([weight.flatten() for weight in model.parameters()])
    accelerator.log_histogram("weights", weights, step=step)
    accelerator.log_text("summary", f"{len(labels)} digits, {len(rows)} of them shown", step=step)
    folder = Path(accelerator.project_dir) / "model"
    accelerator.save_model(model, folder)
    if accelerator.is_main_process:
        accelerator.log_artifact(folder / "model.safetensors")


if __name__ == "__main__":
    main()
