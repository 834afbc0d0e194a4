"""Transformers' Trainer and a plain loop with DeepSpeed's ZeRO 1 to 3 on two processes.

Accelerate uses DeepSpeed on the CPU only if `PartialState` alone selects the CPU, as with a Trainer's
`use_cpu`. If the launcher or the Accelerator selects it, Accelerate silently trains without sharding. So the
launcher's variable is removed, and each case returns the engine that it ran with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import running
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import set_seed
from running import case
from sharded import Texts
from tiny import writer
from trainer import arguments, parsed, trained
from transformers import Trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

os.environ.pop("ACCELERATE_USE_CPU", None)


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }


def ran_on(model: Any) -> dict[str, Any]:
    return {
        "model": type(model).__name__,
        "stage": model.zero_optimization_stage(),
        "dtype": str(next(model.module.parameters()).dtype),
        "optimizer": type(model.optimizer).__name__,
    }


def run(folder: Path, given: dict[str, Any], rows: int = 40, **more: Any) -> Any:
    resumed = more.pop("resumed", None)
    stage = given["zero_optimization"]["stage"]
    return run_with(lambda: arguments(folder, deepspeed=given, **more), stage, rows, resumed)


def run_with(
    make_args: Callable[[], Any], stage: int, rows: int = 40, resumed: str | None = None
) -> Any:
    try:
        # Created before the model, as the documentation requires for ZeRO 3.
        args = make_args()
        made = Trainer(
            model=writer(), args=args, train_dataset=Texts(rows), eval_dataset=Texts(11, seed=1)
        )
        result = trained(made, resume_from_checkpoint=resumed)
        if stage == 3:
            del result["weights"]  # they are sharded
        evaluated = running.lines([made.evaluate()])[0]
        return {"ran on": ran_on(made.model_wrapped), **result, "evaluated": evaluated}
    finally:
        unset_hf_deepspeed_config()


@case(2)
def stage_1(folder: Path) -> Any:
    return run(folder, settings(1))


def of_a_file(folder: Path, stage: int) -> Any:
    """Pass `--deepspeed FILE`, as to Transformers' example scripts."""
    file = folder / f"zero-{running.RANK}.json"
    file.write_text(json.dumps(settings(stage, bf16={"enabled": "auto"})))
    more = ["--gradient_accumulation_steps", "2", "--lr_scheduler_type", "cosine"]
    return run_with(lambda: parsed(folder, "--deepspeed", str(file), *more), stage)


@case(2)
def stage_2_of_a_file(folder: Path) -> Any:
    return of_a_file(folder, 2)


@case(2)
def stage_3_of_a_file(folder: Path) -> Any:
    return of_a_file(folder, 3)


@case(2)
def stage_2_accumulation(folder: Path) -> Any:
    return run(folder, settings(2), gradient_accumulation_steps=3, max_grad_norm=0.5)


@case(2)
def stage_2_bf16(folder: Path) -> Any:
    return run(folder, settings(2, bf16={"enabled": "auto"}), bf16=True)


@case(2)
def stage_2_resume(folder: Path) -> Any:
    more = {"save_strategy": "steps", "save_steps": 4}
    run(folder, settings(2), **more)
    return run(folder, settings(2), resumed=str(folder / "checkpoint-4"), **more)


@case(2)
def stage_3(folder: Path) -> Any:
    return run(folder, settings(3))


OWN = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}


@case(2)
def stage_2_with_its_own_optimizer(folder: Path) -> Any:
    return run(folder, settings(2, optimizer=OWN))


@case(2)
def stage_2_with_its_own_optimizer_and_scheduler(folder: Path) -> Any:
    rates = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    own = {"type": "WarmupLR", "params": {"warmup_type": "linear", **dict.fromkeys(rates, "auto")}}
    more = {"warmup_steps": 4, "lr_scheduler_type": "constant_with_warmup"}
    return run(folder, settings(2, optimizer=OWN, scheduler=own), **more)


@case(2)
def by_hand(folder: Path) -> Any:
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=0.5)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    set_seed(5)
    model = writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(Texts(30), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    state = accelerator.get_state_dict(model)
    norms = {name: float(one.double().norm()) for name, one in list(state.items())[:6]}
    return {"ran on": ran_on(model), "losses": losses, "norms": norms}


if __name__ == "__main__":
    running.main()
