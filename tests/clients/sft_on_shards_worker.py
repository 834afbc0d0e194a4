"""TRL's SFTTrainer with a PEFT adapter. On two ranks, FSDP2 shards the model.

Arguments: a folder that all ranks share, and "lora" or "qlora". One process trains the whole model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from adapters_worker import FOUR, SIZES
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer
from trl_trainers import arguments, texts, tokenizer

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FSDP: dict[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    },
}


def trainer(folder: Path, kind: str, resumes: bool = False) -> Any:
    options: dict[str, Any] = {}
    if kind == "qlora":
        options = {"quantization_config": BitsAndBytesConfig(**FOUR), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder / f"base_{RANK}", **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu") and WORLD == 1:
            # Otherwise, evaluation would round the weights of one process.
            module.support_avx512bf16_for_cpu = False
    set_seed(4)
    return SFTTrainer(
        model=model,
        args=arguments(
            folder / "out",
            SFTConfig,
            max_length=16,
            per_device_train_batch_size=8 // WORLD,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            save_strategy="steps",
            save_steps=2,
            **(FSDP if WORLD > 1 else {}),
        ),
        train_dataset=Dataset.from_dict({"text": texts(64, 10, 0)}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def main(folder: Path, kind: str) -> None:
    set_seed(2)
    LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2)).save_pretrained(
        folder / f"base_{RANK}"
    )
    made = trainer(folder, kind)
    made.train()
    held = [p for p in made.model.parameters() if not p.requires_grad]
    sharded = all(isinstance(p, DTensor) for p in held)
    found: dict[str, Any] = {
        "sharded": sharded,
        "bytes": sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in held),
        "losses": [line["loss"] for line in made.state.log_history if "loss" in line],
        "norms": [line["grad_norm"] for line in made.state.log_history if "loss" in line],
    }
    made.save_model(str(folder / "final"))
    if WORLD > 1 or kind == "lora":
        again = trainer(folder, kind)
        again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
        again.save_model(str(folder / "resumed"))
    made.accelerator.wait_for_everyone()
    if RANK == 0:
        adapters = {
            name: load_file(folder / name / "adapter_model.safetensors")
            for name in ("final", "resumed")
            if (folder / name).exists()
        }
        final = adapters["final"]
        found["adapters"] = {name: one.flatten().tolist() for name, one in final.items()}
        found["resumed"] = all(
            torch.equal(one, final[name]) for name, one in adapters.get("resumed", final).items()
        )
        (folder / f"{kind}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
