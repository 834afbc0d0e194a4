"""Train a GPT with linear layers in fp8. The library and the recipe come from the launch options.

    accelerate-core launch --cpu --mixed_precision fp8 examples/fp8_gpt.py
    accelerate-core launch --cpu --mixed_precision bf16 examples/fp8_gpt.py
    accelerate-core launch --cpu --mixed_precision fp8 --fp8_recipe rowwise examples/fp8_gpt.py
    accelerate-core launch --cpu --mixed_precision fp8 --num_processes 2 examples/fp8_gpt.py
    accelerate-core launch --cpu --mixed_precision fp8 --num_processes 2 --use_fsdp examples/fp8_gpt.py
    accelerate-core launch --mixed_precision fp8 --fp8_backend te examples/fp8_gpt.py

The last command needs Transformer Engine and a GPU. On devices without fp8, torchao emulates it, which
is slower. The text is the source code of Python's standard library.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from char_gpt import GPT, Windows, standard_library
from torch.utils.data import DataLoader

from accelerate_core import Accelerator
from accelerate_core.utils import DataLoaderConfiguration, set_seed


def train(args: argparse.Namespace) -> None:
    # The batch size is the total of all processes.
    data_config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(dataloader_config=data_config)
    set_seed(args.seed)
    text = standard_library(args.megabytes)
    loader: Any = DataLoader(Windows(text, args.length), args.batch_size, True, drop_last=True)
    model: Any = GPT(args.length, args.width, args.heads, args.layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(accelerator.explain().partition("fp8 by ")[2] or "no layer computes in fp8")
    step = 0
    losses = []
    started = time.perf_counter()
    while step < args.steps:
        for letters, targets in loader:
            scores = model(letters)
            loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
            if step % args.report_every == 0 or step == args.steps:
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                seconds = time.perf_counter() - started
                accelerator.print(f"step {step:>4}  loss {mean:6.3f}  {seconds:5.0f} s")
                losses.clear()
            if step == args.steps:
                break
    # The weights have the names and dtypes of the original model, so any program can load them.
    accelerator.save_model(model, args.output_dir)
    accelerator.print(f"model.safetensors is in {args.output_dir}")
    accelerator.end_training()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a GPT in fp8 on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch_size", type=int, default=16, help="rows per batch on all processes together")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--megabytes", type=float, default=1.0, help="how much text to read")
    add("--length", type=int, default=64, help="letters per row")
    add("--width", type=int, default=64, help="size of the hidden vectors")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--report_every", type=int, default=50, help="steps between two reports")
    add("--seed", type=int, default=0, help="for weights and shuffling")
    add("--output_dir", type=Path, default=Path("fp8_gpt_output"), help="where to write")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
