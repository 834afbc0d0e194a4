"""PEFT's LoRA in Transformers' Trainer and in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import running
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from running import case
from tiny import Sentences, classifier, writer
from trainer import arguments, run, trained
from transformers import AutoModelForCausalLM, Trainer, get_linear_schedule_with_warmup


def adapted() -> Any:
    model = classifier()
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.1)
    return get_peft_model(model, config)


@case()
def lora_by_trainer(folder: Path) -> Any:
    return run(folder, model=adapted(), eval_strategy="epoch")


@case()
def lora_by_trainer_resumed(folder: Path) -> Any:
    more = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
    run(folder, rows=40, model=adapted(), **more)
    again = Trainer(model=adapted(), args=arguments(folder, **more), train_dataset=Sentences(40))
    return trained(again, resume_from_checkpoint=str(folder / "checkpoint-3"))


@case(1)
def lora_on_a_dispatched_model(folder: Path) -> Any:
    """Load an adapter into a model with parts on disk, use it, and disable it."""
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "v_proj"])
    set_seed(5)
    plain = get_peft_model(writer(tie_word_embeddings=False), config).eval()
    for name, weight in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    plain.save_pretrained(folder / "adapter")
    writer(tie_word_embeddings=False).save_pretrained(folder / "base")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    split = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    away = {"offload_folder": str(folder / "off")}
    base = AutoModelForCausalLM.from_pretrained(folder / "base", device_map=split, **away)
    limits = {"max_memory": {"cpu": 20_000}}
    loaded = PeftModel.from_pretrained(base, folder / "adapter", **limits, **away).eval()
    ids = torch.tensor([[1, 5, 9, 33, 12]])
    with torch.no_grad():
        wanted, first, again = (one(ids).logits for one in (plain, loaded, loaded))
        assert torch.equal(first, wanted)
        assert torch.equal(first, again)
        with loaded.disable_adapter():
            without = loaded(ids).logits
    written = loaded.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    places = dict(loaded.hf_device_map)
    return {"logits": first, "without": without, "written": written, "places": places}


def by_hand(folder: Path, accumulate: int = 1, **given: Any) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **given)
    set_seed(5)
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(writer(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    rows = Sentences(30, generate=True)
    data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    held = torch.utils.data.DataLoader(Sentences(11, seed=1, generate=True), batch_size=4)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 16)
    model, optimizer, data, held, schedule = accelerator.prepare(
        model, optimizer, data, held, schedule
    )
    losses, rates = [], []
    for _ in range(2):
        model.train()
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).tolist())
            rates.append(schedule.get_last_lr()[0])
    model.eval()
    said = []
    for batch in held:
        with torch.no_grad():
            logits = model(**batch).logits
        said += accelerator.gather_for_metrics(logits.mean((1, 2))).tolist()
    accelerator.wait_for_everyone()
    whole = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    whole.save_pretrained(
        str(folder),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.wait_for_everyone()
    back = PeftModel.from_pretrained(writer(), str(folder))
    return {
        "losses": losses,
        "rates": rates,
        "said": said,
        "weights": running.weights(whole),
        "saved": running.weights(back),
        "files": sorted(path.name for path in folder.iterdir()),
    }


@case()
def lora_by_hand(folder: Path) -> Any:
    return by_hand(folder)


@case()
def lora_by_hand_accumulated(folder: Path) -> Any:
    return by_hand(folder, accumulate=3)


@case()
def lora_by_hand_in_bf16(folder: Path) -> Any:
    return by_hand(folder, mixed_precision="bf16")


if __name__ == "__main__":
    running.main()
