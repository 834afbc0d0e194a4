"""Train a small character-level GPT on the source code of Python's standard library.

    python examples/char_gpt.py
    accelerate-core launch --num_processes 2 examples/char_gpt.py
    accelerate-core launch --num_processes 2 examples/char_gpt.py --resume

The script shows gradient accumulation, clipping, a cosine schedule with warm-up, saving everything
with `save_state`, and resuming (`--resume`). Python's source code is already on your machine, so
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import string
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate_core import Accelerator
from accelerate_core.utils import DataLoaderConfiguration, set_seed

ALPHABET = "\n" + string.printable[:95]  # newline, letters, digits, punctuation, space
NOT_READ = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def standard_library(megabytes: float) -> torch.Tensor:
    """The first `megabytes` million letters of the standard library, as indices into ALPHABET."""
    root = Path(sysconfig.get_path("stdlib"))
    number = {letter: index for index, letter in enumerate(ALPHABET)}
    wanted = int(megabytes * 1e6)
    text: list[int] = []
    for file in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if NOT_READ.isdisjoint(file.relative_to(root).parts):
            source = file.read_text(encoding="utf-8", errors="ignore")
            text += [number[letter] for letter in source if letter in number]
        if len(text) >= wanted:
            break
    return torch.tensor(text[:wanted], dtype=torch.uint8)


class Windows(Dataset):
    """Consecutive pieces of `length` letters, each with the letters that follow."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        piece = self.text[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, size]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.length = length
        self.letter = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(ALPHABET), bias=False)
        self.apply(self._first_weights)
        for block in self.blocks:  # so that adding all layers doesn't increase the activations
            for layer in (block.mix, block.think[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _first_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, length, alphabet] of the next letters for letters [batch, length]."""
        x = self.letter(letters) + self.position[: letters.shape[1]]
        return self.out(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, start: str, letters: int, seed: int, temperature: float = 0.7) -> str:
        device = self.position.device
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([[ALPHABET.index(letter) for letter in start]], device=device)
        for _ in range(letters):
            scores = self(text[:, -self.length :])[0, -1].float().cpu()
            choice = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)
            text = torch.cat([text, choice.view(1, 1).to(device)], dim=1)
        return "".join(ALPHABET[index] for index in text[0].tolist())


class Position:
    """The progress of the training. It is registered for checkpointing, so it is saved too."""

    def __init__(self) -> None:
        self.step = 0  # optimizer steps done
        self.batches = 0  # batches seen, on each process

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.batches = state["batches"]


def cosine(step: int, warmup: int, total: int) -> float:
    """The factor of the learning rate: it rises to 1 during warm-up, and then falls to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        cpu=args.cpu,
        # The order of the batches then only depends on the seed and the epoch, as --resume needs.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        # The scheduler counts optimizer steps, independent of the number of processes.
        step_scheduler_with_optimizer=False,
    )
    set_seed(args.seed)
    text = standard_library(args.megabytes)
    held_out = len(text) // 50
    train_set = Windows(text[:-held_out], args.length)
    test_set = Windows(text[-held_out:], args.length)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size)
    model = GPT(args.length, args.width, args.heads, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step, args.steps // 20, args.steps)
    )
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    position = Position()
    accelerator.register_for_checkpointing(position)
    checkpoint = args.output_dir / "checkpoint"
    if args.resume:
        accelerator.load_state(checkpoint)
        accelerator.print(f"resuming after step {position.step} from {checkpoint}")
    else:
        weights = sum(parameter.numel() for parameter in model.parameters())
        accelerator.print(
            f"{len(text):,} letters, {weights:,} weights, {accelerator.num_processes} process(es), "
            f"{accelerator.device}, precision {accelerator.mixed_precision}"
        )
        report(accelerator, model, test_loader, position, None, 0.0, Console().print)

    started = time.perf_counter()
    loss_sum = torch.zeros((), device=accelerator.device)
    losses = 0
    with progress_bar(accelerator) as bar:
        task = bar.add_task("training", total=args.steps, completed=position.step)
        for inputs, targets in batches_from(accelerator, train_loader, position):
            if position.step >= args.steps:
                break
            with accelerator.accumulate(model):
                scores = model(inputs)
                loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            position.batches += 1
            loss_sum += loss.detach()
            losses += 1
            if not accelerator.sync_gradients:
                continue

            position.step += 1
            bar.update(task, completed=position.step)
            if position.step % args.report_every == 0 or position.step == args.steps:
                mean_loss = accelerator.reduce(loss_sum / losses, reduction="mean").item()
                loss_sum.zero_()
                losses = 0
                seconds = time.perf_counter() - started
                report(
                    accelerator, model, test_loader, position, mean_loss, seconds, bar.console.print
                )
                accelerator.save_state(checkpoint)

    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        sample = accelerator.unwrap_model(model).eval().write("def ", args.sample, args.seed)
        print(f"\nwritten by the model:\n{'-' * 60}\n{sample}\n{'-' * 60}")
        print(f"model and checkpoint are in {args.output_dir}")
    accelerator.end_training()


def batches_from(accelerator: Accelerator, loader: DataLoader, position: Position) -> Any:
    """Endless batches, epoch after epoch, starting at `position`."""
    epoch, skip = divmod(position.batches, len(loader))
    while True:
        loader.set_epoch(epoch)
        yield from accelerator.skip_first_batches(loader, skip) if skip else loader
        epoch, skip = epoch + 1, 0


@torch.no_grad()
def report(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader,
    position: Position,
    train_loss: float | None,
    seconds: float,
    write: Any,
) -> None:
    """Write one line about the training so far, with the loss on held-out text."""
    model.eval()
    losses = []
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(1)
        losses.append(accelerator.gather_for_metrics(loss))  # one number per window
    model.train()
    if accelerator.is_main_process:
        trained = "     -" if train_loss is None else f"{train_loss:6.3f}"
        write(
            f"step {position.step:>4}  training loss {trained}  "
            f"held-out loss {torch.cat(losses).mean():6.3f}  {seconds:5.0f} s",
            highlight=False,
        )


def progress_bar(accelerator: Accelerator) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), disable=not accelerator.is_main_process)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched, or no")
    add("--steps", type=int, default=300, help="optimizer steps")
    add("--batch_size", type=int, default=16, help="windows per batch, on each process")
    add("--gradient_accumulation_steps", type=int, default=2, help="batches per optimizer step")
    add("--lr", type=float, default=3e-3, help="largest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--megabytes", type=float, default=3.0, help="how much text to read")
    add("--length", type=int, default=64, help="letters per window")
    add("--width", type=int, default=128, help="size of the hidden vectors")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--sample", type=int, default=400, help="letters to write at the end")
    add("--report_every", type=int, default=50, help="steps between two reports and checkpoints")
    add("--seed", type=int, default=0, help="for the initial weights, shuffling and the sample")
    add("--output_dir", type=Path, default=Path("char_gpt_output"), help="where to write")
    add("--resume", action="store_true", help="resume from the checkpoint in the output folder")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
