"""Train a sharded character-level GPT: FSDP2, HSDP, tensor or sequence parallelism, set by flags.

    accelerate-core launch --cpu --num_processes 2 examples/fsdp2_gpt.py
    accelerate-core launch --cpu --num_processes 4 examples/fsdp2_gpt.py --dp_replicate 2
    accelerate-core launch --cpu --num_processes 4 examples/fsdp2_gpt.py --tp 2
    accelerate-core launch --cpu --num_processes 2 examples/fsdp2_gpt.py --sp 2
    accelerate-core launch --cpu --num_processes 4 examples/fsdp2_gpt.py --resume

The flags say how many processes are used for copies, tensor and sequence parallelism. The remaining
factor of the number of processes shards the parameters. A checkpoint of any of these runs can be
resumed as any other (`--resume`). The text is the source code of Python's standard library, so nothing
is downloaded.
"""

from __future__ import annotations

import argparse
import os
import string
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    TorchTensorParallelConfig,
    set_seed,
)

ALPHABET = "\n" + string.printable[:95]

#: How tensor parallel ranks split the layers. A "colwise" layer splits its outputs and a "rowwise"
#: layer its inputs, so no communication is needed between the two.
TENSOR_PARALLEL = {
    **dict.fromkeys(("layers.*.query", "layers.*.key", "layers.*.value"), "colwise"),
    "layers.*.mix": "rowwise",
    "layers.*.widen": "colwise",
    "layers.*.narrow": "rowwise",
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm_1(x)
        # -1, because this rank may only have a part of the heads.
        query, key, value = (
            layer(h).view(batch, length, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, -1))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.length = length
        self.letter = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, letters: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return scores of the next letters. A rank may only have a part of the text at `places`."""
        x = self.letter(letters) + self.place(places)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))

    @torch.no_grad()
    def generate(self, start: str, letters: int, seed: int) -> str:
        """Generate text. All ranks must call this, because each holds a part of the weights."""
        device = next(self.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        text = [ALPHABET.index(letter) for letter in start]
        for _ in range(letters):
            window = torch.tensor([text[-self.length :]], device=device)
            places = torch.arange(window.shape[1], device=device)[None]
            scores = self(window, places)[0, -1].float().cpu()
            text.append(int(torch.multinomial((scores / 0.7).softmax(0), 1, generator=generator)))
        return "".join(ALPHABET[index] for index in text)


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


def train(args: argparse.Namespace) -> None:
    others = args.dp_replicate * args.tp * args.sp
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        # The batch size is the total of all processes, for any mesh.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        parallelism_config=ParallelismConfig(
            dp_replicate_size=args.dp_replicate,
            dp_shard_size=max(processes // others, 1),
            tp_size=args.tp,
            sp_size=args.sp,
            tp_handler=TorchTensorParallelConfig(plan=TENSOR_PARALLEL),
        ),
        project_config=ProjectConfiguration(
            str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(args.seed)
    model: Any = GPT(args.length, args.width, args.heads, args.layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = TensorDataset(standard_library(args.letters, args.length))
    loader: Any = DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    accelerator.print(
        f"{accelerator.parallelism_config.arithmetic()} process(es), {weights:,} weights, "
        f"{here:,} of them on the first process"
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.print(f"resuming from {accelerator.load_state()}")
    started, losses = time.perf_counter(), []
    while progress.step < args.steps:
        for (rows,) in loader:
            letters, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
            places = torch.arange(args.length, device=rows.device).expand_as(letters).clone()
            # Without sequence parallelism, this does nothing.
            shared = accelerator.maybe_context_parallel(
                buffers=[letters, targets, places], buffer_seq_dims=[1, 1, 1]
            )
            with shared, accelerator.accumulate(model):
                scores = model(letters, places)
                loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
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
                accelerator.save_state(blocking=False)
            if progress.step == args.steps:
                break
    accelerator.wait_for_checkpoint()
    accelerator.save_model(model, args.output_dir)  # unsharded, for other programs
    sample = model.eval().generate("def ", args.sample, args.seed)
    accelerator.print(f"\nwritten by the model:\n{'-' * 60}\n{sample}\n{'-' * 60}")
    accelerator.print(f"checkpoints and model.safetensors are in {args.output_dir}")
    accelerator.end_training()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a sharded GPT on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dp_replicate", type=int, default=1, help="copies of the shards")
    add("--tp", type=int, default=1, help="processes that split each layer")
    add("--sp", type=int, default=1, help="processes that split each sequence (Ulysses)")
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
    add("--output_dir", type=Path, default=Path("fsdp2_gpt_output"), help="where to write")
    add("--resume", action="store_true", help="resume from the newest checkpoint")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
