"""TRL's trainers for SFT, DPO, rewards, KTO and GRPO, some with a PEFT adapter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import running
from datasets import Dataset
from peft import LoraConfig
from running import case
from tiny import judge, writer
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer import trained
from transformers import PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = [f"w{number}" for number in range(56)]


def tokenizer() -> Any:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    known = {word: index for index, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def texts(rows: int, words: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [
        " " + " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(words // 2, words)))
        for _ in range(rows)
    ]


def preferences(rows: int, seed: int = 0) -> Dataset:
    drawn = zip(texts(rows, 6, seed), texts(rows, 6, seed + 1), texts(rows, 6, seed + 2))
    columns = ("prompt", "chosen", "rejected")
    return Dataset.from_list([dict(zip(columns, one)) for one in drawn])


def arguments(folder: Path, kind: Any, **more: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 7,
        **more,
    }
    return kind(**given)


def lora() -> Any:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@case()
def sft(folder: Path) -> Any:
    made = SFTTrainer(
        model=writer(),
        args=arguments(folder, SFTConfig, max_length=16, eval_strategy="epoch"),
        train_dataset=Dataset.from_dict({"text": texts(26, 10, 0)}),
        eval_dataset=Dataset.from_dict({"text": texts(9, 10, 1)}),
        processing_class=tokenizer(),
    )
    return trained(made)


@case()
def sft_of_an_adapter_with_packing(folder: Path) -> Any:
    made = SFTTrainer(
        model=writer(),
        args=arguments(
            folder, SFTConfig, max_length=16, packing=True, gradient_accumulation_steps=2
        ),
        train_dataset=Dataset.from_dict({"text": texts(60, 10, 0)}),
        processing_class=tokenizer(),
        peft_config=lora(),
    )
    return trained(made)


@case()
def dpo(folder: Path) -> Any:
    made = DPOTrainer(
        model=writer(),
        ref_model=writer(),
        args=arguments(folder, DPOConfig, eval_strategy="epoch"),
        train_dataset=preferences(22),
        eval_dataset=preferences(9, 10),
        processing_class=tokenizer(),
    )
    return trained(made)


@case()
def dpo_of_an_adapter(folder: Path) -> Any:
    made = DPOTrainer(
        model=writer(),
        args=arguments(folder, DPOConfig, gradient_accumulation_steps=2),
        train_dataset=preferences(22),
        processing_class=tokenizer(),
        peft_config=lora(),
    )
    return trained(made)


@case()
def reward(folder: Path) -> Any:
    made = RewardTrainer(
        model=judge(),
        args=arguments(folder, RewardConfig, max_length=32, eval_strategy="epoch"),
        train_dataset=preferences(22),
        eval_dataset=preferences(9, 10),
        processing_class=tokenizer(),
    )
    return trained(made)


@case()
def kto(folder: Path) -> Any:
    rows = [
        {"prompt": one["prompt"], "completion": one[key], "label": key == "chosen"}
        for one in preferences(12)
        for key in ("chosen", "rejected")
    ]
    made = KTOTrainer(
        model=writer(),
        ref_model=writer(),
        args=arguments(folder, KTOConfig, eval_strategy="epoch"),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:10]),
        processing_class=tokenizer(),
    )
    return trained(made)


def grow(folder: Path, **more: Any) -> Any:
    def early(completions: list[str], **_: Any) -> list[float]:
        found = [[int(w[1:]) for w in one.split() if w in WORDS] for one in completions]
        return [sum(one) / (56 * max(len(one), 1)) for one in found]

    config = more.pop("peft_config", None)
    made = GRPOTrainer(
        model=writer(),
        reward_funcs=early,
        args=arguments(
            folder,
            GRPOConfig,
            num_generations=4,
            max_completion_length=6,
            max_steps=4,
            **more,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts(16, 6, 3)}),
        processing_class=tokenizer(),
        peft_config=config,
    )
    return trained(made)


@case()
def grpo(folder: Path) -> Any:
    return grow(folder)


@case()
def grpo_of_an_adapter(folder: Path) -> Any:
    more = {"gradient_accumulation_steps": 2, "num_iterations": 2}
    return grow(folder, peft_config=lora(), beta=0.04, **more)


if __name__ == "__main__":
    running.main()
