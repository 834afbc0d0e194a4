"""Hooks of `save_state` and `load_state` that call methods of the script's own model, with each backend."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "backends" / "deepspeed"))

import cpu_has_fp16  # noqa: F401
import torch
from torch import nn
from worker import PG_TIMEOUT, RANK, case, run_cases, scratch

from accelerate_core import Accelerator
from accelerate_core.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate_drop_in.accelerator import Accelerator as Scripts


class Drawing(nn.Module):
    """A model that saves and loads its own description, like models of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.width = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def save_pretrained(self, directory: str) -> None:
        if RANK == 0:
            Path(directory, "drawing.json").write_text(json.dumps({"width": self.width}))

    def register(self, directory: str) -> None:
        self.width = json.loads(Path(directory, "drawing.json").read_text())["width"]


#: For each backend, its arguments, and whether it writes models itself.
BACKENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "compiled": ({"dynamo_backend": "eager"}, False),
    "sharded": ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, True),
    "stage 1": ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}, True),
    "stage 3": ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, True),
}
KEPT = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)


def prepared(cls: Any, name: str) -> tuple[Any, Drawing, Any]:
    accelerator = cls(cpu=True, process_group_timeout=PG_TIMEOUT, **BACKENDS[name][0])
    drawing = Drawing()
    optimizer = torch.optim.AdamW(drawing.parameters())
    model, _ = accelerator.prepare(drawing, optimizer)
    return accelerator, drawing, model


def flat(accelerator: Any, model: Any) -> list[float]:
    state = accelerator.communicator.broadcast_object(accelerator.get_state_dict(model))
    return [value for tensor in state.values() for value in tensor.flatten().tolist()]


@case
def hooks_get_the_module_that_was_prepared() -> None:
    for name, (_, own_files) in BACKENDS.items():
        folder = scratch(f"core {name}")
        accelerator, drawing, model = prepared(Accelerator, name)
        before = flat(accelerator, model)
        lengths: list[int] = []

        def save(models: list[Any], weights: list[Any], directory: str) -> None:
            (only,) = models
            assert only is drawing, name  # noqa: B023
            only.save_pretrained(directory)
            lengths.append(len(weights))  # noqa: B023

        def load(models: list[Any], directory: str) -> None:
            (only,) = models
            only.register(directory)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state(folder)
        drawing.width = 0
        accelerator.load_state(folder)
        assert drawing.width == 4
        assert lengths == [0 if own_files else 1], name
        assert flat(accelerator, model) == before
        accelerator.free_memory()


@case
def models_that_a_hook_removes_are_its_own_task() -> None:
    for name in ("plain", "compiled"):
        for removes in ("models", "weights"):
            folder = scratch(f"removed {name} {removes}")
            accelerator, _, model = prepared(Accelerator, name)
            before = flat(accelerator, model)

            def save(models: list[Any], weights: list[Any], directory: str) -> None:
                if RANK == 0:
                    torch.save(models[0].state_dict(), Path(directory, "drawing.pt"))
                (models if removes == "models" else weights).pop()  # noqa: B023

            def load(models: list[Any], directory: str) -> None:
                models.pop().load_state_dict(torch.load(Path(directory, "drawing.pt")))

            accelerator.register_save_state_pre_hook(save)
            accelerator.register_load_state_pre_hook(load)
            accelerator.save_state(folder)
            assert not (folder / "model.safetensors").exists()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(folder)
            assert flat(accelerator, model) == before


@case
def only_the_removed_model_is_left_out() -> None:
    folder = scratch("two models")
    accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)
    first, second = accelerator.prepare(nn.Linear(3, 3), Drawing())

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        models.pop(0)

    def load(models: list[Any], directory: str) -> None:
        (taken,) = [model for model in models if isinstance(model, nn.Linear)]
        models.remove(taken)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    before = flat(accelerator, second)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in [*first.parameters(), *second.parameters()]:
            parameter.zero_()
    accelerator.load_state(folder)
    assert flat(accelerator, second) == before
    assert set(flat(accelerator, first)) == {0.0}


@case
def drop_in_passes_what_accelerate_passes() -> None:
    """`accelerator._models`, and what the hooks get, were compared with Accelerate 1.15."""
    for name, (_, own_files) in BACKENDS.items():
        folder = scratch(f"drop-in {name}")
        accelerator, drawing, model = prepared(Scripts, name)
        before = flat(accelerator, model)
        listed = model if name.startswith("stage") else drawing
        calls: list[str] = []

        def save(models: list[Any], weights: list[Any], directory: str) -> None:
            (only,) = models
            assert only is listed, name  # noqa: B023
            only.save_pretrained(directory)
            if weights:
                weights.pop()
            calls.append("save")  # noqa: B023

        def load(models: list[Any], directory: str) -> None:
            # diffusers expects an empty list where Accelerate has loaded the models already.
            assert models == ([] if own_files else [listed]), name  # noqa: B023
            while models:
                models.pop().register(directory)
            calls.append("load")  # noqa: B023

        assert accelerator._models == [listed]
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        assert calls == ["save", "load"]
        assert flat(accelerator, model) == before
        accelerator._models = list(accelerator._models)
        assert accelerator.models == [model], "still the prepared one"
        accelerator._models.append(drawing)
        del accelerator._models[0]
        assert accelerator.models == [drawing]
        accelerator._models.clear()
        accelerator.free_memory()


if __name__ == "__main__":
    run_cases()
    KEPT.end_training()
