"""Transformers' Trainer and a plain loop with FSDP2 on two processes.

Accelerate has no FSDP on the CPU: it silently trains without sharding there, and that is recorded. So these
cases show that sharding does not change the results. A Trainer in bf16 is not compared, because FSDP casts
all parameters. It rounds embeddings, norms and activations that autocast keeps in fp32, and losses differ by
3e-3. `by_hand_in_bf16` has fp32 parameters, so it is compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import running
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from running import case
from tiny import Sentences, writer
from torch.distributed.fsdp import MixedPrecisionPolicy
from trainer import arguments, parsed, trained
from transformers import Trainer

CONFIG: dict[str, Any] = {
    "version": 2,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "cpu_ram_efficient_loading": False,
}


class Texts(Sentences):
    def __getitem__(self, index: int) -> Any:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids}


def run(folder: Path, given: dict[str, Any] = CONFIG, rows: int = 40, **more: Any) -> Any:
    resumed = more.pop("resumed", None)
    given = {"fsdp": "full_shard auto_wrap", "fsdp_config": dict(given), **more}
    return run_with(arguments(folder, **given), rows, resumed)


def run_with(args: Any, rows: int = 40, resumed: str | None = None) -> Any:
    made = Trainer(
        model=writer(),
        args=args,
        train_dataset=Texts(rows),
        eval_dataset=Texts(11, seed=1),
    )
    result = trained(made, resume_from_checkpoint=resumed)
    del result["weights"]  # they are sharded
    return {**result, "evaluated": running.lines([made.evaluate()])[0]}


@case(2)
def basic(folder: Path) -> Any:
    return run(folder)


@case(2)
def config_file(folder: Path) -> Any:
    """Pass `--fsdp_config FILE`, as to Transformers' example scripts."""
    file = folder / f"fsdp-{running.RANK}.json"
    file.write_text(json.dumps({**CONFIG, "activation_checkpointing": True}))
    words = ["--fsdp", "full_shard auto_wrap", "--fsdp_config", str(file)]
    more = ["--gradient_accumulation_steps", "2", "--lr_scheduler_type", "cosine"]
    return run_with(parsed(folder, *words, *more))


@case(2)
def accumulation(folder: Path) -> Any:
    return run(folder, gradient_accumulation_steps=3, max_grad_norm=0.5)


@case(2)
def checkpointed_activations(folder: Path) -> Any:
    return run(folder, given={**CONFIG, "activation_checkpointing": True})


@case(2)
def resume_from_shards(folder: Path) -> Any:
    more = {"save_strategy": "steps", "save_steps": 4}
    run(folder, **more)
    return run(folder, resumed=str(folder / "checkpoint-4"), **more)


@case(2)
def resume_from_a_full_state(folder: Path) -> Any:
    more = {"save_strategy": "steps", "save_steps": 4}
    given = {**CONFIG, "state_dict_type": "FULL_STATE_DICT"}
    run(folder, given=given, **more)
    return run(folder, given=given, resumed=str(folder / "checkpoint-4"), **more)


def loop(plugin: dict[str, Any], **more: Any) -> Any:
    made = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **plugin,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=made, **more)
    set_seed(5)
    model = writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(Texts(30), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(2):
        for batch in data:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    state = accelerator.get_state_dict(model)
    norms = {name: float(one.double().norm()) for name, one in list(state.items())[:6]}
    return {"losses": losses, "norms": norms}


@case(2)
def by_hand(folder: Path) -> Any:
    return loop({})


@case(2)
def by_hand_in_bf16(folder: Path) -> Any:
    return loop({"mixed_precision_policy": MixedPrecisionPolicy()}, mixed_precision="bf16")


if __name__ == "__main__":
    running.main()
