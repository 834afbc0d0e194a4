"""Run the cases of a file one after the other, because importing a library takes most of the time.

A file registers functions with `case`, which return the results to compare, and ends with `main()`. Start it
as `FILE OUT.json [CASE...]` on every rank. Rank 0 writes the results after each case. If a case raises, its
traceback is written, and with several ranks the run ends. This file runs with Accelerate and with the
drop-in.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
#: The numbers of processes for each case; by default one and two.
ON: dict[str, tuple[int, ...]] = {}
CASES: dict[str, Callable[[Path], Mapping[str, Any]]] = {}


def case(*on: int) -> Callable[[Any], Any]:
    """Register a function that takes a separate folder, which is the same on all ranks."""

    def register(function: Any) -> Any:
        if function.__module__ != "__main__":
            return function  # a case of another file, which was imported
        CASES[function.__name__] = function
        ON[function.__name__] = on or (1, 2)
        return function

    return register


def weights(model: torch.nn.Module) -> dict[str, float]:
    """Return the norm of all parameters together, and the norms of the last trained ones."""
    norms = {name: float(p.detach().double().norm()) for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad][-4:]
    whole = sum(norm * norm for norm in norms.values()) ** 0.5
    return {"all": whole, **{name: norms[name] for name in trained}}


def lines(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a Trainer's log without times."""
    timed = ("runtime", "per_second", "time", "total_flos")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in history
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (str, bool, int, float, type(None))) else str(value)


def reset(environment: Mapping[str, str]) -> None:
    """Reset all states after a case, as the libraries' own tests do."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()


def main() -> None:
    out, *names = sys.argv[1:]
    environment = dict(os.environ)
    made: dict[str, Any] = {}
    # The folder is named after the output file, so that it is the same on all ranks.
    with tempfile.TemporaryDirectory() as own:
        shared = Path(f"{out}.files") if WORLD > 1 else Path(own)
        names = names or [one for one in CASES if WORLD in ON[one]]
        Path(f"{out}.names").write_text(json.dumps(names))
        for name in names:
            folder = shared / name
            folder.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            try:
                made[name] = _plain(CASES[name](folder))
            except Exception:
                made[name] = {"error": traceback.format_exc()}
                print(made[name]["error"], file=sys.stderr, flush=True)
            made[name]["seconds"] = round(time.perf_counter() - began, 2)
            place = Path(out) if RANK == 0 else Path(f"{out}.{RANK}")
            place.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            if "error" in made[name] and WORLD > 1:
                os._exit(1)
            reset(environment)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
