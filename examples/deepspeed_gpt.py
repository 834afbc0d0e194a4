"""Train a character-level GPT with DeepSpeed ZeRO in an ordinary training loop.

    accelerate-core launch --cpu --num_processes 2 examples/deepspeed_gpt.py
    accelerate-core launch --cpu --num_processes 2 examples/deepspeed_gpt.py --config CONFIG
    accelerate-core launch --cpu --num_processes 1 examples/deepspeed_gpt.py --resume

CONFIG is one of examples/deepspeed/*.json, or your own file. The default is stage 2. You can resume a
checkpoint on any number of processes with the same stage (stages 1 and 2 are interchangeable). The
text is the source code of Python's standard library, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import string
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator, DeepSpeedPlugin
from accelerate_core.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

ALPHABET = "\n" + string.printable[:95]


class GPT(nn.Module):
    def __init__(self, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        # If a config says "auto", stage 3 derives its bucket sizes from the hidden size.
        self.config = SimpleNamespace(hidden_size=width)
        self.length = length
        self.letter = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(ALPHABET))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return scores of the next letters, of shape [batch, length, alphabet]."""
        length = letters.shape[1]
        x = self.letter(letters) + self.place(torch.arange(length, device=letters.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=letters.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.out(self.norm(x))


class Progress:
    """The number of optimizer steps. It is registered for checkpointing."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def standard_library(letters: int, length: int) -> torch.Tensor:
    """Rows of `length + 1` letters, as indices into ALPHABET."""
    number = {letter: index for index, letter in enumerate(ALPHABET)}
    text: list[int] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        text += [number[letter] for letter in source if letter in number]
        if len(text) > letters:
            break
    rows = len(text) // (length + 1)
    return torch.tensor(text[: rows * (length + 1)]).view(rows, length + 1)


def write(model: Any, start: str, letters: int, seed: int) -> str:
    """Generate text. All ranks must call this, because each may hold a part of the weights."""
    device, length = next(model.parameters()).device, model.module.length
    generator = torch.Generator().manual_seed(seed)
    text = [ALPHABET.index(letter) for letter in start]
    for _ in range(letters):
        scores = model(torch.tensor([text[-length:]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((scores / 0.7).softmax(0), 1, generator=generator)))
    return "".join(ALPHABET[index] for index in text)


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(args.seed)
    model: Any = GPT(args.length, args.width, args.heads, args.layers)
    weights = sum(parameter.numel() for parameter in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    data = TensorDataset(standard_library(args.letters, args.length))
    loader: Any = DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    stage = accelerator.deepspeed_plugin.stage
    accelerator.print(
        f"ZeRO stage {stage} on {accelerator.num_processes} process(es), {weights:,} weights"
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.print(f"resuming from {accelerator.load_state()}")
    started, losses = time.perf_counter(), []
    while progress.step < args.steps:
        for (rows,) in loader:
            with accelerator.accumulate(model):
                scores = model(rows[:, :-1])
                loss = F.cross_entropy(scores.flatten(0, 1).float(), rows[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            if progress.step % args.report_every == 0 or progress.step == args.steps:
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                seconds = time.perf_counter() - started
                accelerator.print(f"step {progress.step:>4}  loss {mean:6.3f}  {seconds:5.0f} s")
                losses.clear()
                accelerator.save_state()
            if progress.step == args.steps:
                break
    accelerator.save_model(model, args.output_dir)  # unsharded, for other programs
    model.eval()
    with torch.no_grad():
        sample = write(model, "def ", args.sample, args.seed)
    accelerator.print(f"\nwritten by the model:\n{'-' * 60}\n{sample}\n{'-' * 60}")
    accelerator.print(f"checkpoints and model.safetensors are in {args.output_dir}")
    accelerator.end_training()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a GPT with DeepSpeed on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", help="DeepSpeed config file (JSON); default: ZeRO stage 2")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched, or no")
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch_size", type=int, default=32, help="rows per batch on all processes together")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--letters", type=int, default=1_000_000, help="how much text to read")
    add("--length", type=int, default=64, help="letters per row")
    add("--width", type=int, default=128, help="size of the hidden vectors")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--sample", type=int, default=200, help="letters to write at the end")
    add("--report_every", type=int, default=50, help="steps between two reports and checkpoints")
    add("--seed", type=int, default=0, help="for weights, shuffling and the sample")
    add("--output_dir", type=Path, default=Path("deepspeed_gpt_output"), help="where to write")
    add("--resume", action="store_true", help="resume from the newest checkpoint")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
