"""What it costs to compare facts of the ranks: Python calls per step, and CPU time per comparison."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS = 64
#: The numbers of parameters of the models, and of simulated ranks.
PARAMETERS = (2, 100, 1_000, 10_000)
RANKS = (2, 16, 256)


def calls() -> None:
    """Count on this rank the Python calls of steps after which nothing is captured, and of all steps."""
    import torch

    from accelerate_core import Accelerator

    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = torch.ones(2, 4)
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    per_step = []
    for _ in range(STEPS):
        before = count
        sys.setprofile(note)
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
        per_step.append(count - before)
    if accelerator.is_main_process:
        print(json.dumps({"ordinary": min(per_step), "all": sum(per_step) / STEPS}))
    accelerator.end_training()


def launched_calls(mode: str) -> dict[str, float]:
    """Run `calls` on two ranks with a value of `drift`."""
    command = [
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        __file__,
        "--count",
    ]
    environ = {**os.environ, "ACCELERATE_WATCH_DRIFT": mode, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", *command], env=environ, capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


def cpu(function: Callable[[], object], times: int = 5) -> float:
    """Return the least CPU time of a call, in milliseconds."""
    found = []
    for _ in range(times):
        begun = time.thread_time()
        function()
        found.append(time.thread_time() - begun)
    return 1000 * min(found)


def capture(parameters: int) -> dict[str, Any]:
    """Return what it takes to capture the facts of a model with so many parameters, each in a group."""
    import torch

    from accelerate_watch import drift

    layers = [torch.nn.Linear(1, 1) for _ in range(parameters // 2)]
    model = torch.nn.ModuleList(layers)
    few = torch.optim.AdamW(model.parameters()).param_groups
    groups = [{**few[0], "params": [one]} for one in model.parameters()]

    def facts(groups: Any) -> dict[str, Any]:
        return {
            "trained parameters": drift._packed(drift.trained_parameters([model])),
            "hyperparameters": drift._packed(drift.hyperparameters(groups)),
        }

    return {
        "one group": cpu(lambda: facts(few)),
        "a group for each": cpu(lambda: facts(groups)),
        "bytes published": len(json.dumps(facts(groups))),
    }


def compare(ranks: int) -> float:
    """Return the CPU time of one rank's comparison, in a world of so many ranks that share a store."""
    import torch.distributed as dist

    from accelerate_watch import drift

    def record(step: int) -> Any:
        return drift.Record(0, "AdamW", step, step, step, step, {"order": ("0", {"loader": "0"})})

    class Alone:
        process_index = 0
        provenance = {"scheduler_metric": type("Value", (), {"value": "mean"})}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    every = []
    for rank in range(ranks):
        Alone.process_index = rank
        one: Any = drift.Drift(Alone(), False, range(ranks), lambda: None)  # type: ignore[arg-type]
        one._key = "drift"
        every.append(one)
    step = 0

    def check() -> None:
        nonlocal step
        step += 1
        for one in every:
            one._captured.append(record(step))
            one.look(store)

    return cpu(check) / ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().count:
        calls()
        return
    for mode in ("off", "warn"):
        found = launched_calls(mode)
        print(f"drift={mode}: {found['ordinary']:.0f} Python calls in an ordinary step, "
              f"{found['all']:.1f} on average over {STEPS} steps")  # fmt: skip
    for parameters in PARAMETERS:
        costs = capture(parameters)
        print(f"{parameters} parameters: {costs['one group']:.2f} ms of CPU per capture with one group, "
              f"{costs['a group for each']:.2f} ms with a group for each; "
              f"{costs['bytes published']} bytes")  # fmt: skip
    for ranks in RANKS:
        print(f"{ranks} ranks: {compare(ranks):.3f} ms of CPU per rank and comparison")


if __name__ == "__main__":
    main()
