"""Start the cases in an environment, read what they returned, and compare it with what is recorded."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from environment import OLD
from support import clean_environment

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "clients"
RECORDED = HERE / "recorded"
#: How far a number may be from the recorded one, and for large ones relative to it.
TOLERANCE = 1e-5
TIMEOUT = 400
#: What was compared: the case, the largest difference, and where it is.
ROWS: list[tuple[str, float, str]] = []


#: Files of cases that run with transformers 4.57: those that require it, and those that run with both.
ONLY_OLD = ("adapter_layers",)
ALSO_OLD = ("trainer",)


def groups() -> list[str]:
    """Return the files of cases; `FILE@4.57` runs in the environment with that transformers."""
    files = {path.stem for path in (HERE / "cases").glob("*.py")} - {"running", "tiny", *ONLY_OLD}
    return sorted([*files, *(f"{name}@{OLD}" for name in (*ONLY_OLD, *ALSO_OLD))])


def run(environment: str, group: str, processes: int, cases: Sequence[str] = ()) -> dict[str, Any]:
    """Run a file's cases on so many processes; return what rank 0 got, or an error of any rank."""
    made: dict[str, Any] = {}
    left = list(cases)
    while left or not made:
        got, asked = _launch(environment, group, processes, left)
        if not asked:
            break  # has none for so many processes
        made |= got
        left = [name for name in asked if name not in made]
    return made


def _launch(
    environment: str, group: str, processes: int, cases: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return what the cases got, at least one of them, and the names of all that were asked for."""
    file, _, old = group.partition("@")
    environment = f"{environment}-{old}" if old else environment
    python = ENVIRONMENTS / environment / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [str(python)]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}"]
        command += [str(HERE / "cases" / f"{file}.py"), str(out), *cases]
        environ = clean_environment(
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            ACCELERATE_USE_CPU="true",  # as `accelerate launch --cpu` does; else each rank is alone
            HF_HUB_OFFLINE="1",
            HF_HOME=folder,
            TOKENIZERS_PARALLELISM="false",
            TQDM_DISABLE="1",
            PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        )
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                command, env=environ, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
            code: Any
            try:
                code = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = f"not ended after {TIMEOUT} s"
                process.terminate()  # torch's launcher passes it on to its ranks
                process.wait(60)
            log.seek(0)
            said = f"exit status {code}:\n{log.read()[-6000:]}"
        listed = Path(f"{out}.names")
        asked: list[str] = json.loads(listed.read_text()) if listed.exists() else list(cases)
        made: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        for other in Path(folder).glob("out.json.[0-9]*"):
            for name, one in json.loads(other.read_text()).items():
                if "error" in one:
                    made.setdefault(name, {}).setdefault(
                        "error", f"rank {other.suffix[1:]}: {one['error']}"
                    )
        if code and not any("error" in one for one in made.values()):
            unfinished = [name for name in asked if name not in made]
            if not unfinished:
                raise RuntimeError(f"{group} on {processes}: {said}")
            made[unfinished[0]] = {"error": said}
    return made, asked


def launch_project(programs: Path, project: Path, processes: int) -> dict[str, Any]:
    """Run a copy of the project by `accelerate launch` with its default configuration.

    The original's launch starts only one process on a CPU, so two are started by torchrun.
    """
    command = [str(programs / "accelerate"), "launch"]
    environ = clean_environment(
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        HF_HOME=str(project),
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
    )
    if processes > 1:
        command = [str(programs / "python"), "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}"]
        environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    done = subprocess.run(
        [*command, "train.py", "out.json"],
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The project ended with {done.returncode}:\n{done.stderr[-6000:]}")
    made: dict[str, Any] = json.loads((project / "out.json").read_text())
    return made


def recorded(group: str, processes: int) -> dict[str, Any]:
    """Return what the original returned."""
    place = RECORDED / f"{group}-{processes}.json"
    made: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    return made


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[tuple[float, str]]:
    """Yield how far each number is off, infinite for what is not alike at all, and where it stands."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            if key in ours and key in theirs:
                yield from differences(ours[key], theirs[key], f"{where}.{key}")
            else:
                yield math.inf, f"{where}.{key} is {'missing' if key in theirs else 'added'}"
    elif isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs)):
            yield from differences(*pair, f"{where}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, float | int):
        if math.isnan(theirs) or math.isnan(ours):
            off = 0.0 if math.isnan(theirs) and math.isnan(ours) else math.inf
        else:
            off = abs(ours - theirs) / max(1.0, abs(theirs))
        yield off, f"{where}: {ours!r}, recorded {theirs!r}"
    else:
        yield 0.0 if ours == theirs else math.inf, f"{where}: {ours!r}, recorded {theirs!r}"
