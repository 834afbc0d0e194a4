"""Loads that fail must change nothing, on any rank. Arguments: folder, backend."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, SIZE, write_result

from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError

Change = Callable[["Parts"], None]


class Counter:
    """A registered object, with state in an attribute, a list and a tensor."""

    def __init__(self) -> None:
        self.step = 1
        self.history = [1, 2]
        self.mean = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step + 6, "mean": self.mean + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class NewKey(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]


class FailsLate(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.history.append(state["step"])
        self.mean += state["mean"]
        self.more = True
        raise RuntimeError("planned")


class FailsOnOneRank(FailsLate):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if RANK == SIZE - 1:
            super().load_state_dict(state)
        self.step = state["step"]


class Fragile(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = 7.0
        raise KeyError("planned")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5)


class Parts:
    """The objects to prepare and to register."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Linear(4, 4)
        self.optimizer = sgd
        self.scheduler: Callable[[Any], Any] = step_lr
        self.first: Any = Counter()
        self.second: Any = Counter()
        self.hook: Callable[..., None] | None = None


def fail(models: list[Any], directory: str) -> None:
    torch.rand(3)
    raise OSError("planned")


#: name -> (change of the parts, words of the error)
CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "scheduler": (
        lambda p: setattr(
            p, "scheduler", lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1.0)
        ),
        ("scheduler.bin", "LambdaLR", "lr_lambdas"),
    ),
    "new key": (lambda p: setattr(p, "second", NewKey()), ("custom_checkpoint_1.pkl", "NewKey")),
    "changed itself": (
        lambda p: setattr(p, "second", FailsLate()),
        ("custom_checkpoint_1.pkl", "FailsLate", "planned"),
    ),
    "one rank": (lambda p: setattr(p, "first", FailsOnOneRank()), ("custom_checkpoint_0.pkl",)),
    "optimizer class": (
        lambda p: setattr(p, "optimizer", lambda m: torch.optim.Adam(m.parameters())),
        ("SGD", "Adam"),
    ),
    "fragile optimizer": (
        lambda p: setattr(p, "optimizer", lambda m: Fragile(m.parameters(), lr=0.1, momentum=0.9)),
        ("Fragile",),
    ),
    "groups": (
        lambda p: setattr(
            p,
            "optimizer",
            lambda m: torch.optim.SGD([{"params": [q]} for q in m.parameters()], 0.1, 0.9),
        ),
        ("group",),
    ),
    "shape": (lambda p: setattr(p, "model", nn.Linear(4, 6)), ("shape",)),
    "hook": (lambda p: setattr(p, "hook", fail), ("fail", "planned")),
}


class Run:
    def __init__(self, parts: Parts, backend: str) -> None:
        options: dict[str, Any] = {"backend": backend} if SIZE > 1 else {}
        self.parts = parts
        self.accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **options)
        optimizer = parts.optimizer(parts.model)
        scheduler = parts.scheduler(optimizer)
        loader = DataLoader(TensorDataset(torch.arange(32.0)), 2, shuffle=True)
        prepared = self.accelerator.prepare(parts.model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.accelerator.register_for_checkpointing(parts.first, parts.second)
        if parts.hook is not None:
            self.accelerator.register_load_state_pre_hook(parts.hook)

    def train(self, steps: int) -> None:
        for _, batch in zip(range(steps), self.loader, strict=False):
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter) * batch[0].sum()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def facts(self) -> Any:
        """Return copies of everything that a load may change."""
        parts = self.parts
        return copy.deepcopy(
            {
                "weights": [_local(p) for p in self.model.parameters()],
                "momenta": [
                    {key: _local(v) for key, v in state.items()}
                    for state in self.optimizer.optimizer.state.values()
                ],
                "lr": [group["lr"] for group in self.optimizer.param_groups],
                "scheduler": {
                    k: v for k, v in vars(self.scheduler.scheduler).items() if k == "last_epoch"
                },
                "registered": [vars(parts.first), vars(parts.second)],
                "position": self.loader.state_dict()["batches_seen"],
                "rng": [torch.get_rng_state().tolist(), random.getstate()],
                "step": self.accelerator.step,
            }
        )


def _local(tensor: Any) -> Any:
    local = getattr(tensor, "to_local", lambda: tensor)()
    return local.tolist() if isinstance(local, torch.Tensor) else local


def main(folder: Path, backend: str) -> None:
    kept = Run(Parts(), backend)
    kept.train(3)
    place = kept.accelerator.save_state(folder / "whole")
    bins = kept.accelerator.save_state(folder / "bins", safe_serialization=False)
    failures: dict[str, str] = {}
    for name, (change, words) in CASES.items():
        if backend != "single" and name == "fragile optimizer" and backend != "ddp":
            continue  # FSDP2 does not call load_state_dict of optimizers for shards
        for source in (place, bins) if name == "shape" else (place,):
            parts = Parts()
            change(parts)
            run = Run(parts, backend)
            run.train(2)
            random.seed(RANK)
            before = run.facts()
            try:
                run.accelerator.load_state(source)
                failures[name] = "loaded"
            except CheckpointError as error:
                missing = [word for word in words if word not in str(error)]
                if missing:
                    failures[name] = f"{missing} not in {error}"
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
            after = run.facts()
            changed = [key for key, value in before.items() if repr(after[key]) != repr(value)]
            if changed:
                failures[f"{name} changed"] = str(changed)
            run.train(1)
    again = Run(Parts(), backend)
    again.accelerator.load_state(place)
    if again.parts.first.step != 7:
        failures["a good load"] = "did not load"
    write_result(failures)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
