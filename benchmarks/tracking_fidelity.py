"""How each kind of value arrives in each tracker's files, with accelerate-core and Accelerate.

    python benchmarks/tracking_fidelity.py [--trackers wandb,mlflow]

Each tracker runs offline in a separate process, once with each library, and each kind of value is logged
in a separate call. The values read back from the tracker's files are compared with the logged ones. The
result, a Markdown table, says `ok`, `changed`, `lost` (without a warning), `warned`, or the exception.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trackers"))
import probe

KINDS = ("float", "np.float32", "0-d tensor", "nested dict", "string")
CONFIG = {"lr": 0.125, "layers": [16, 8], "seed": None, "optimizer": {"kind": "adam"}}


def key_of(kind: str) -> str:
    """Return the name for a kind of value. The readers look for texts named `word`."""
    return "word" if kind == "string" else kind.replace(" ", "_").replace("-", "_")


def value_of(kind: str) -> Any:
    import numpy as np
    import torch

    return {
        "float": 1.25,
        "np.float32": np.float32(1.25),
        "0-d tensor": torch.tensor(1.25),
        "nested dict": {"inner": 1.25},
        "string": "a text",
    }[kind]


def attempt(who: str, tracker: str) -> None:
    """Log with one of the libraries in this process, and print its warnings and exceptions."""
    from importlib import import_module

    accelerator_class = import_module(
        "accelerate_core" if who == "ours" else "accelerate"
    ).Accelerator
    said: dict[str, str] = {}
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)

    def trying(what: str, function: Any) -> None:
        logged.clear()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                function()
        except Exception as error:
            said[what] = type(error).__name__
        else:
            if logged or any("accelerate" in str(one.filename) for one in caught):
                said[what] = "warned"

    kwargs = {tracker: probe.INIT_KWARGS.get(tracker, {})}
    accelerator = accelerator_class(cpu=True, log_with=tracker, project_dir="logs")
    if tracker == "clearml":  # otherwise it forks this process and hangs
        from clearml import Task

        Task._report_subprocess_enabled = False
    trying("config", lambda: accelerator.init_trackers("probe", CONFIG, kwargs))
    for step, kind in enumerate(KINDS):
        values = {key_of(kind): value_of(kind)}
        trying(kind, lambda values=values, step=step: accelerator.log(values, step=step))
    if "crash" in sys.argv:
        raise ValueError("the script is at fault")
    trying("end", accelerator.end_training)
    print("SAID" + json.dumps(said), flush=True)


def judge(found: dict[str, Any], said: dict[str, str]) -> dict[str, str]:
    """Compare the values read back with the logged ones."""
    values, texts = found.get("values", {}), found.get("texts", {})
    out = {}
    for kind in KINDS:
        key = key_of(kind)
        if kind == "string":
            ok = texts.get(key) == "a text"
        else:
            # Accelerate reports to ClearML with the series `train`.
            names = [key, f"{key}/train"]
            if kind == "nested dict":
                names = [f"{key}/inner", f"{key}.inner", "inner"]
            ok = any([point[1] for point in values.get(name, [])] == [1.25] for name in names)
        out[kind] = "ok" if ok else said.get(kind, "lost")
    config = found.get("config", {})
    kept = {key: config.get(key, "lost") for key in ("lr", "layers", "seed")}
    as_text = {key: str(value) for key, value in kept.items()}
    if kept == {"lr": 0.125, "layers": [16, 8], "seed": None}:
        out["config"] = "ok"
    elif as_text["lr"] == "0.125" and as_text["layers"] == "[16, 8]" and as_text["seed"] in (
        "None", "null",
    ):  # fmt: skip
        out["config"] = "ok, as strings"
    else:
        out["config"] = said.get("config", "changed" if config else "lost")
    return out


def child(command: list[str], directory: Path) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            [sys.executable, *command],
            cwd=directory,
            env=probe.environment(directory),
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        return None


def measure(who: str, tracker: str, crash: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values in a tracker's files after one run, and the warnings and exceptions."""
    readers = str(Path(__file__).parents[1] / "tests" / "trackers" / "readers.py")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        more = ["crash"] if crash else []
        done = child([__file__, "--attempt", who, tracker, *more], directory)
        if done is None:
            return {}, dict.fromkeys((*KINDS, "config"), "hangs")
        lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
        said = json.loads(lines[0].removeprefix("SAID")) if lines else {}
        if not lines and not crash:
            last = done.stderr.strip().splitlines()[-1:]
            said = dict.fromkeys((*KINDS, "config"), (last or ["?"])[0].split(":")[0])
        read = child([readers, str(directory), tracker], directory)
        found = [line for line in (read.stdout if read else "").splitlines() if "FOUND" in line]
        return (json.loads(found[0].removeprefix("FOUND"))[tracker] if found else {}), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trackers", default=",".join(probe.NINE))
    parser.add_argument("--attempt", nargs=2)
    options, _ = parser.parse_known_args()
    if options.attempt:
        attempt(*options.attempt)
        return
    columns = [*KINDS, "config", "after a crash"]
    print("| tracker | through | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for tracker in options.trackers.split(","):
        for who, label in (("ours", "accelerate-core"), ("peer", "Accelerate 1.15")):
            row = judge(*measure(who, tracker))
            crashed, _ = measure(who, tracker, crash=True)
            row["after a crash"] = crashed.get("status") or "-"
            if crashed.get("error") or not crashed:
                row["after a crash"] = "nothing to read"
            cells = [row[column] for column in columns]
            print(f"| {tracker} | {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
