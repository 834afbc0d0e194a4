"""Train the char GPT of the examples on two ranks; report the held-out loss and the messages.

char_gpt_worker.py BACKEND STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from char_gpt import GPT, Windows, cosine, standard_library

from accelerate_core import Accelerator
from accelerate_testing import count_communication, write_result


def main(backend: str, steps: int) -> None:
    accelerator = Accelerator(cpu=True, backend=backend, process_group_timeout=60)
    torch.manual_seed(0)
    text = standard_library(1.0)
    held_out = 16_000
    model: Any = GPT(length=64, width=64, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step // accelerator.num_processes, steps // 20, steps)
    )
    loader: Any = torch.utils.data.DataLoader(
        Windows(text[:-held_out], 64), 16, shuffle=True, drop_last=True,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    size = sum(p.nbytes for p in accelerator.unwrap_model(model).parameters())
    sent, done = 0, 0
    for inputs, targets in loader:
        with count_communication() as said:
            scores = model(inputs)
            loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        sent += said.bytes
        done += 1
        if done == steps:
            break
    weights = accelerator.communicator.broadcast_object(accelerator.get_state_dict(model))
    whole = GPT(length=64, width=64, heads=4, layers=2)
    whole.load_state_dict(weights)
    losses = []
    with torch.no_grad():
        for start in range(0, held_out - 64 * 16, 64 * 16):
            windows = Windows(text[-held_out:][start : start + 64 * 16 + 1], 64)
            pairs = [windows[index] for index in range(len(windows))]
            inputs, targets = map(torch.stack, zip(*pairs, strict=True))
            losses.append(F.cross_entropy(whole(inputs).transpose(1, 2), targets).item())
    write_result({"loss": sum(losses) / len(losses), "bytes": sent, "model": size, "steps": done})
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
