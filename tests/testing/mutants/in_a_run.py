"""Train with each mutant, and report what the run itself says about it.

Run on two ranks: `in_a_run.py FOLDER MUTANT...`. Each rank reports `{mutant: outcome}`, and `outcome_of`
combines the ranks' outcomes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Kinds of outcomes, from the most to the least helpful.
KINDS = ("error", "warning", "unnamed error", "lost", "nothing")
#: A kind, the place in the script, and the text.
Outcome = list[str]


def outcome_of(ranks: Sequence[Outcome]) -> str:
    """Return what a user learns from the ranks, such as "error in `save_state`"."""
    kind, place, _ = min(ranks, key=lambda one: KINDS.index(one[0]))
    if kind == "nothing":
        return "nothing"
    if kind == "lost":
        return "the process dies"
    if kind == "unnamed error":
        return f"error in {place} (1)"
    return f"{kind} in {place}"


class Observed:
    """What a run says about its backend, and in which part of the script."""

    def __init__(self) -> None:
        self.place = ""
        self.found: list[Outcome] = []

    def at(self, place: str) -> None:
        """Begin another part of the script."""
        self.place = place

    def warned(self, message: Any, *more: Any) -> None:
        """Keep a warning if it is about the backend."""
        if "backend" in str(message) or "sound" in str(message):
            self.found.append(["warning", self.place, str(message)])

    def raised(self, error: BaseException) -> None:
        """Keep an error. It is named if it or one of its notes names the backend."""
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        named = "sound" in text or "rank" in text.split("\n")[0] or "prepare()" in text
        self.found.append(["error" if named else "unnamed error", self.place, text])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Observe a block, and suppress the error that ends it."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self.warned
            try:
                yield
            except Exception as error:
                self.raised(error)

    def outcome(self) -> Outcome:
        """Return the most helpful one."""
        nothing = ["nothing", "", ""]
        return min([*self.found, nothing], key=lambda one: KINDS.index(one[0]))


def train(ctx: Any, observed: Observed) -> None:
    """Train 60 steps on a model with a tensor of 160,000 elements, evaluate, save and load."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_testing.training import Net, loss_of

    observed.at("the constructor")
    accelerator = ctx.accelerator()
    with torch.random.fork_rng():
        torch.manual_seed(accelerator.process_index)
        model: Any = Net(accelerator.process_index)
        model.inner = torch.nn.Sequential(
            *(torch.nn.Linear(6, 400), torch.nn.Tanh(), torch.nn.Linear(400, 400), torch.nn.Tanh())
        )
        model.out = torch.nn.Linear(400, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.003, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    x = torch.randn(480, 6, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
    observed.at("`prepare`")
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    observed.at("the loader")
    for step, batch in enumerate(loader, 1):
        observed.at(f"step {step}")
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    observed.at("`gather_for_metrics`")
    accelerator.gather_for_metrics(batch[0])
    observed.at("a served attribute")
    _ = getattr(accelerator, "no_such_attribute", None)
    observed.at("`save_state`")
    path = accelerator.save_state(str(ctx.scratch("state")))
    observed.at("`load_state`")
    accelerator.load_state(path)
    observed.at("`end_training`")
    ctx.end()


def main() -> None:
    from every_mutant import MUTANTS

    from accelerate_testing import CheckContext, write_result
    from accelerate_testing.worker import Ranks

    folder, wanted = Path(sys.argv[1]).parent, sys.argv[2:]
    os.chdir(folder)  # some mutants leave files
    found: dict[str, Outcome] = {}
    for name in wanted:
        cls, _ = MUTANTS[name]
        found[name] = ["lost", "", ""]
        write_result(found)
        here = folder / f"run_of_{name}"
        here.mkdir(exist_ok=True)
        ctx = CheckContext("backend", "sound", cls, here, timeout=15.0)
        ranks = Ranks(here, 20.0)
        observed = Observed()
        with observed.watched():
            train(ctx, observed)
        found[name] = observed.outcome()
        ended = all(kind == "warning" for kind, *_ in observed.found)
        ranks.say("run", {"state": "passed" if ended else "failed"})
        if not ranks.all_well("run"):
            ctx.abandon()
        write_result(found)


if __name__ == "__main__":
    main()
