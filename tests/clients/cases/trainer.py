"""Transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import running
import torch
from running import case
from tiny import Sentences, Stream, classifier, translator, writer
from transformers import (
    GenerationConfig,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

GIVEN: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "num_train_epochs": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 7,
}


def arguments(folder: Path, kind: Any = TrainingArguments, **more: Any) -> Any:
    return kind(**{"output_dir": str(folder), **GIVEN, **more})


def parsed(folder: Path, *words: str) -> Any:
    """Return the arguments that a script parses from these words on its command line."""
    given = {"output_dir": folder, **GIVEN}
    line = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*line, *words])[0]


def accuracy(predicted: Any) -> dict[str, float]:
    right = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"accuracy": float(right.mean()), "rows": len(right)}


def trained(trainer: Any, **more: Any) -> dict[str, Any]:
    done = trainer.train(**more)
    state = trainer.state
    return {
        "log": running.lines(state.log_history),
        "loss": done.training_loss,
        "steps": state.global_step,
        "max_steps": state.max_steps,
        "epoch": state.epoch,
        "weights": running.weights(trainer.accelerator.unwrap_model(trainer.model)),
    }


def run(folder: Path, rows: int = 46, model: Any = None, data: Any = None, **more: Any) -> Any:
    made = Trainer(
        model=model or classifier(),
        args=arguments(folder, **more),
        train_dataset=data if data is not None else Sentences(rows),
        eval_dataset=Sentences(19, seed=1),
        compute_metrics=accuracy,
    )
    return trained(made)


@case()
def basic(folder: Path) -> Any:
    return run(folder)


@case()
def accumulation(folder: Path) -> Any:
    return run(folder, gradient_accumulation_steps=3, max_grad_norm=0.5, warmup_steps=2)


@case()
def evaluation(folder: Path) -> Any:
    """Evaluate 19 rows in batches that do not divide them, so the last batch is shorter."""
    made = Trainer(
        model=classifier(),
        args=arguments(folder, num_train_epochs=1, eval_strategy="epoch"),
        train_dataset=Sentences(24),
        eval_dataset=Sentences(19, seed=1),
        compute_metrics=accuracy,
    )
    result = trained(made)
    predicted = made.predict(Sentences(13, seed=2))
    logits = predicted.predictions.tolist()
    return {**result, "logits": logits, "metrics": running.lines([predicted.metrics])[0]}


@case()
def resume(folder: Path) -> Any:
    """Resume from a checkpoint in the middle of an epoch."""
    more = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 3, "rows": 40}
    whole = run(folder, **more)
    steps = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    half = next(step for step in steps if step > whole["max_steps"] / 3)
    del more["rows"]
    again = Trainer(model=classifier(), args=arguments(folder, **more), train_dataset=Sentences(40))
    result = trained(again, resume_from_checkpoint=str(folder / f"checkpoint-{half}"))
    return {"whole": whole, "resumed": result, "from": half}


@case()
def resume_with_ignore_data_skip(folder: Path) -> Any:
    more = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 2}
    run(folder, rows=40, **more)
    again = Trainer(
        model=classifier(),
        args=arguments(folder, ignore_data_skip=True, **more),
        train_dataset=Sentences(40),
    )
    return trained(again, resume_from_checkpoint=str(folder / "checkpoint-4"))


@case()
def bf16(folder: Path) -> Any:
    return run(folder, bf16=True)


@case()
def iterable(folder: Path) -> Any:
    return run(folder, data=Stream(45), max_steps=14)


@case()
def iterable_evaluation(folder: Path) -> Any:
    made = Trainer(
        model=classifier(),
        args=arguments(folder, max_steps=4),
        train_dataset=Stream(30),
        eval_dataset=Stream(19),
        compute_metrics=accuracy,
    )
    return {**trained(made), "evaluated": running.lines([made.evaluate()])[0]}


@case()
def batches_split(folder: Path) -> Any:
    return run(folder, accelerator_config={"split_batches": True})


@case()
def batches_dispatched(folder: Path) -> Any:
    return run(folder, accelerator_config={"dispatch_batches": True})


@case()
def iterable_dispatched_and_split(folder: Path) -> Any:
    config = {"dispatch_batches": True, "split_batches": True}
    return run(folder, data=Stream(45), max_steps=12, accelerator_config=config)


@case()
def uneven(folder: Path) -> Any:
    return run(folder, rows=48, accelerator_config={"even_batches": False})


@case()
def shuffled_plainly(folder: Path) -> Any:
    return run(folder, accelerator_config={"use_seedable_sampler": False})


@case()
def not_blocking(folder: Path) -> Any:
    return run(folder, accelerator_config={"non_blocking": True})


@case()
def accumulation_by_kwargs(folder: Path) -> Any:
    config = {"gradient_accumulation_kwargs": {"num_steps": 3, "sync_each_batch": True}}
    return run(folder, accelerator_config=config)


@case()
def not_compiled(folder: Path) -> Any:
    return run(folder, torch_compile=False, num_train_epochs=1)


@case()
def language_model_and_scheduler(folder: Path) -> Any:
    """Average the loss over the tokens in the micro-batches of all ranks."""

    class Ragged(Sentences):
        def __getitem__(self, index: int) -> Any:
            ids = self.ids[index]
            labels = ids.clone()
            labels[: index % 5] = -100
            return {"input_ids": ids, "labels": labels}

    return run(
        folder,
        model=writer(),
        data=Ragged(40),
        gradient_accumulation_steps=2,
        average_tokens_across_devices=True,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        max_steps=9,
    )


@case()
def grouped_by_length_with_workers(folder: Path) -> Any:
    return run(folder, dataloader_num_workers=1, dataloader_drop_last=True, num_train_epochs=1)


@case()
def best_model_and_loaded_back(folder: Path) -> Any:
    made = Trainer(
        model=classifier(),
        args=arguments(
            folder,
            save_strategy="epoch",
            eval_strategy="epoch",
            load_best_model_at_end=True,
            save_total_limit=1,
        ),
        train_dataset=Sentences(24),
        eval_dataset=Sentences(19, seed=1),
        compute_metrics=accuracy,
    )
    result = trained(made)
    names = sorted(path.name for path in folder.glob("checkpoint-*/*"))
    return {**result, "best": made.state.best_metric, "files": names}


@case()
def sequences(folder: Path) -> Any:
    """Use Seq2SeqTrainer, which pads the ranks' generated sequences to one length."""
    made = Seq2SeqTrainer(
        model=translator(),
        args=arguments(
            folder,
            Seq2SeqTrainingArguments,
            num_train_epochs=1,
            predict_with_generate=True,
            generation_config=GenerationConfig(
                max_length=10,
                num_beams=1,
                pad_token_id=0,
                eos_token_id=2,
                decoder_start_token_id=2,
            ),
        ),
        train_dataset=Sentences(24, generate=True),
        eval_dataset=Sentences(11, seed=1, generate=True),
    )
    result = trained(made)
    predicted = made.predict(Sentences(11, seed=2, generate=True))
    return {
        **result,
        "evaluated": running.lines([made.evaluate()])[0],
        "written": torch.as_tensor(predicted.predictions).tolist(),
    }


if __name__ == "__main__":
    running.main()
