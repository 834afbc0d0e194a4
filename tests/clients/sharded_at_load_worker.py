"""Train a Llama in Transformers' Trainer that `from_pretrained(distributed_config=...)` sharded.

Arguments: a folder that all ranks share, the size of a batch per rank, and the size of `tp`. One process
trains the whole model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import writer
from torch.distributed.tensor import DTensor
from trainer import GIVEN
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from accelerate_core.errors import PrepareError

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 64, (48, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main(folder: Path, batch: int, tp: int) -> None:
    own = folder / f"pretrained_{RANK}"
    writer().save_pretrained(own)
    options: dict[str, Any] = {}
    if WORLD > 1:
        options["distributed_config"] = DistributedConfig(fsdp_size=WORLD // tp, tp_size=tp)

    def trainer(**more: Any) -> Trainer:
        model = AutoModelForCausalLM.from_pretrained(own, **options)
        arguments = TrainingArguments(
            output_dir=str(folder / "out"),
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            **{**GIVEN, "per_device_train_batch_size": batch, **more},
        )
        return Trainer(model=model, args=arguments, train_dataset=Texts())

    result: dict[str, Any] = {"error": "", "resume": ""}
    if tp > 1:
        try:
            trainer().train()
        except PrepareError as error:
            result["error"] = str(error)
        write(folder, result)
        return
    if WORLD > 1:
        try:
            trainer(save_strategy="steps")
        except ValueError as error:  # of Transformers
            result["resume"] = str(error)
    made = trainer(save_strategy="steps", save_steps=2, save_only_model=True)
    assert WORLD == 1 or all(isinstance(one, DTensor) for one in made.model.parameters())
    made.train()
    made.save_model(str(folder / "final"))
    history = [line for line in made.state.log_history if "loss" in line]
    result["losses"] = [line["loss"] for line in history]
    result["norms"] = [line["grad_norm"] for line in history]
    if RANK == 0:
        for name in ("final", "out/checkpoint-2"):
            loaded = AutoModelForCausalLM.from_pretrained(folder / name).eval()
            with torch.no_grad():
                result[name] = loaded(Texts().ids[:2]).logits.flatten().tolist()
    write(folder, result)


def write(folder: Path, result: dict[str, Any]) -> None:
    if RANK == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
