"""The Trainer of adapters, which requires transformers 4.57."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapters
import running
from adapters import AdapterTrainer
from adapters.composition import Fuse
from running import case
from tiny import Sentences, classifier, writer
from trainer import accuracy, arguments, trained


def run(folder: Path, model: Any, data: Any = None, **more: Any) -> Any:
    data = Sentences(42) if data is None else data
    made = AdapterTrainer(
        model=model,
        args=arguments(folder, **more),
        train_dataset=data,
        eval_dataset=Sentences(19, seed=1),
        compute_metrics=accuracy,
    )
    result = trained(made)
    return {**result, "files": sorted(path.parent.name + path.name for path in folder.glob("*/*"))}


def with_adapters(*names: str, kind: str = "seq_bn") -> Any:
    model = classifier()
    adapters.init(model)
    for name in names:
        model.add_adapter(name, config=kind)
    model.train_adapter(names[0])
    return model


@case()
def bottleneck(folder: Path) -> Any:
    more = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    return run(folder, with_adapters("task"), **more)


@case()
def lora(folder: Path) -> Any:
    more = {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": False}
    return run(folder, with_adapters("task", kind="lora"), **more)


@case()
def unused_adapter_is_found(folder: Path) -> Any:
    """A second adapter gets no gradients, so DDP must search for unused parameters."""
    model = with_adapters("task", "idle")
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or ".idle." in name)
    return run(folder, model, ddp_find_unused_parameters=True)


@case()
def fusion(folder: Path) -> Any:
    model = with_adapters("one", "two")
    together = Fuse("one", "two")
    model.add_adapter_fusion(together)
    model.train_adapter_fusion(together)
    return run(folder, model, num_train_epochs=1)


@case()
def prefix_of_a_writer(folder: Path) -> Any:
    model = writer()
    adapters.init(model)
    model.add_adapter("task", config="prefix_tuning")
    model.train_adapter("task")

    class Copied(Sentences):
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": self.ids[index], "labels": self.ids[index]}

    made = AdapterTrainer(model=model, args=arguments(folder), train_dataset=Copied(42))
    return trained(made)


if __name__ == "__main__":
    running.main()
