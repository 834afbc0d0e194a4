"""Train a small network on handwritten digits, on one process or on many.

    python examples/quickstart.py
    accelerate-core launch --num_processes 2 examples/quickstart.py
    python -m torch.distributed.run --nproc_per_node 2 examples/quickstart.py

This is an ordinary PyTorch script. With the five lines marked `# accelerate 1` to `# accelerate 5`, it
runs on any number of processes, on any device, and in any precision. Everything else is plain PyTorch,
or shows the progress.

The data are the 1797 scanned digits of 8x8 pixels that scikit-learn includes, so nothing is downloaded.
359 of them are not used for training, but to measure the accuracy of the network.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator, load_checkpoint_in_model
from accelerate_core.utils import set_seed

TEST_SAMPLES = 359


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The training set and the test set. The split does not depend on the seed of the training."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.tensor(data.target)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_SAMPLES, stratify=labels, random_state=0
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 2 * 2, 10),
        )


def train(args: argparse.Namespace) -> None:
    set_seed(args.seed)  # the same initial weights and the same shuffling on every process
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.05, total_iters=optimizer_steps(train_loader, args)
    )

    accelerator = Accelerator(  # accelerate 1: finds the rank, the other processes and the device
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        cpu=args.cpu,
    )
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(  # accelerate 2
        model, optimizer, train_loader, test_loader, scheduler
    )

    losses: list[float] = []
    accuracies: list[float] = []
    started = time.perf_counter()
    with progress_bar(accelerator) as bar:
        task = bar.add_task("training", total=args.epochs * len(train_loader))
        for epoch in range(args.epochs):
            model.train()
            loss_sum = torch.zeros((), device=accelerator.device)
            for images, labels in train_loader:  # batches arrive on the right device
                with accelerator.accumulate(model):  # accelerate 3
                    loss = F.cross_entropy(model(images), labels)
                    accelerator.backward(loss)  # accelerate 4: instead of loss.backward()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                loss_sum += loss.detach()
                bar.advance(task)

            mean_loss = accelerator.reduce(loss_sum / len(train_loader), reduction="mean")
            losses.append(mean_loss.item())
            correct, total = evaluate(accelerator, model, test_loader)
            accuracies.append(correct / total)
            bar.console.print(
                f"epoch {epoch + 1:>2}/{args.epochs}  loss {losses[-1]:.4f}  "
                f"test accuracy {accuracies[-1]:.2%}",
                highlight=False,
            )
    seconds = time.perf_counter() - started

    accelerator.save_model(model, args.output_dir)  # the main process writes model.safetensors
    if accelerator.is_main_process:
        curve = args.output_dir / "learning_curve.png"
        draw_learning_curve(losses, accuracies, curve)
        show_results(accelerator, args, seconds, correct, total)
        print(f"model and learning curve are in {args.output_dir}")
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[int, int]:
    """Return the number of recognised test digits, and the number of test digits.

    Each process evaluates its share. The last batches are padded, so that all processes get the same
    number of samples. `gather_for_metrics` removes the padding, so the count is exact.
    """
    model.eval()
    correct = total = 0
    for images, labels in loader:
        guesses = model(images).argmax(dim=1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))  # accelerate 5
        correct += int((guesses == labels).sum())
        total += len(labels)
    assert total == TEST_SAMPLES, f"counted {total} test digits instead of {TEST_SAMPLES}"
    return correct, total


def evaluate_saved(args: argparse.Namespace) -> None:
    """Evaluate a saved model. The result is the same on any number of processes."""
    accelerator = Accelerator(mixed_precision=args.mixed_precision, cpu=args.cpu)
    model = ConvNet()
    load_checkpoint_in_model(model, args.eval_only)
    model, loader = accelerator.prepare(model, DataLoader(digits()[1], args.batch_size))
    correct, total = evaluate(accelerator, model, loader)
    result = {"correct": correct, "total": total, "processes": accelerator.num_processes}
    accelerator.print(json.dumps(result))
    accelerator.end_training()


def optimizer_steps(loader: DataLoader, args: argparse.Namespace) -> int:
    """The steps that one process would take. On n processes, a schedule advances n times per step."""
    return args.epochs * -(-len(loader) // args.gradient_accumulation_steps)


def progress_bar(accelerator: Accelerator) -> Progress:
    """A progress bar that only the main process shows."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(quiet=not accelerator.is_main_process)
    return Progress(*columns, console=console, disable=not accelerator.is_main_process)


def show_results(
    accelerator: Accelerator, args: argparse.Namespace, seconds: float, correct: int, total: int
) -> None:
    table = Table(title="Handwritten digits", show_header=False, title_justify="left")
    for name, value in {
        "processes": accelerator.num_processes,
        "device": accelerator.device,
        "precision": accelerator.mixed_precision,
        "epochs": args.epochs,
        "train time": f"{seconds:.1f} s",
        "test accuracy": f"{correct / total:.2%}",
        "correct": f"{correct} of {total}",
    }.items():
        table.add_row(name, str(value))
    Console().print(table)


def draw_learning_curve(losses: list[float], accuracies: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws to a file and needs no display
    import matplotlib.pyplot as plt

    epochs = range(1, len(losses) + 1)
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot(epochs, losses, color="tab:orange", label="training loss")
    left.set(xlabel="epoch", ylabel="training loss (cross entropy)", yscale="log")
    right = left.twinx()
    right.plot(epochs, [100 * a for a in accuracies], color="tab:blue", label="test accuracy")
    right.set(ylabel="test accuracy (%)")
    left.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside upper center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits, on one process or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched, or no")
    add("--epochs", type=int, default=20, help="number of epochs")
    add("--batch_size", type=int, default=32, help="digits per batch, on each process")
    add("--gradient_accumulation_steps", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=3e-3, help="initial learning rate")
    add("--seed", type=int, default=0, help="for the initial weights and the shuffling")
    add("--output_dir", type=Path, default=Path("quickstart_output"), help="where to write")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    add("--eval_only", type=Path, metavar="DIR", help="only evaluate the model saved in DIR")
    return parser.parse_args()


if __name__ == "__main__":
    arguments_ = arguments()
    if arguments_.eval_only:
        evaluate_saved(arguments_)
    else:
        train(arguments_)
