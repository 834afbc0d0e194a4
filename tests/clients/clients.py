"""Run the cases in an environment, and compare their results with the recorded ones."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from environment import OLD
from support import clean_environment

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "clients"
RECORDED = HERE / "recorded"
#: The allowed difference from a recorded number, relative for numbers above 1.
TOLERANCE = 1e-5
TIMEOUT = 400
#: A row for each compared case: its name, the largest difference, and where that is.
ROWS: list[tuple[str, float, str]] = []


#: Files of cases for Transformers 4.57: those that require it, and those that run with both versions.
ONLY_OLD = ("adapter_layers",)
ALSO_OLD = ("trainer",)


PYTHON = ENVIRONMENTS / "ours" / "bin" / "python"
needs_environment = pytest.mark.skipif(
    not PYTHON.exists(), reason="run `make clients` to create the environment"
)


def run_worker(
    worker: str, ranks: int, *arguments: str | Path, timeout: float = TIMEOUT, **environ: str
) -> str:
    """Run a worker of this folder on the CPU, in the environment with ours. Return its output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [PYTHON, *(torchrun if ranks > 1 else []), HERE / worker, *arguments],
        env=clean_environment(
            PYTHONPATH=str(HERE / "cases"),
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            CUDA_VISIBLE_DEVICES="",
            **environ,
        ),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def groups() -> list[str]:
    """Return the names of the files of cases. `FILE@4.57` runs with that version of Transformers."""
    files = {path.stem for path in (HERE / "cases").glob("*.py")} - {"running", "tiny", *ONLY_OLD}
    return sorted([*files, *(f"{name}@{OLD}" for name in (*ONLY_OLD, *ALSO_OLD))])


def run(environment: str, group: str, processes: int, cases: Sequence[str] = ()) -> dict[str, Any]:
    """Run the cases of a file; return the results of rank 0, or the error of any rank."""
    made: dict[str, Any] = {}
    left = list(cases)
    while left or not made:
        got, asked = _launch(environment, group, processes, left)
        if not asked:
            break  # the file has no case for this number of processes
        made |= got
        left = [name for name in asked if name not in made]
    return made


def _launch(
    environment: str, group: str, processes: int, cases: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the results of at least one case, and the names of all requested cases."""
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
            # As with `accelerate launch --cpu`. Otherwise, ranks don't form a group.
            ACCELERATE_USE_CPU="true",
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
                code = f"not finished after {TIMEOUT} s"
                process.terminate()  # torchrun passes the signal on to its ranks
                process.wait(60)
            log.seek(0)
            failure = f"exit status {code}:\n{log.read()[-6000:]}"
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
                raise RuntimeError(f"{group} on {processes}: {failure}")
            made[unfinished[0]] = {"error": failure}
    return made, asked


def launch_project(programs: Path, project: Path, processes: int) -> dict[str, Any]:
    """Run a copy of the project with `accelerate launch` and its default configuration.

    Accelerate's launch only starts one process on a CPU, so torchrun starts two.
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
        raise RuntimeError(f"The project failed with {done.returncode}:\n{done.stderr[-6000:]}")
    made: dict[str, Any] = json.loads((project / "out.json").read_text())
    return made


def recorded(group: str, processes: int) -> dict[str, Any]:
    """Return the results that were recorded with Accelerate."""
    place = RECORDED / f"{group}-{processes}.json"
    made: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    return made


def differences_from_accelerate(
    ours: Any, recorded: Any, run_here: Callable[[], Any], ignored: tuple[str, ...] = ()
) -> list[tuple[float, str]]:
    """Return the differences from the recorded results; if they are too large, from those on this CPU.

    Other CPUs round differently, and training amplifies that.

    Args:
        run_here: runs the case with Accelerate on this machine.
        ignored: how the places of differences begin that don't count.
    """

    def found(theirs: Any) -> list[tuple[float, str]]:
        return [
            (off, where)
            for off, where in differences(ours, theirs)
            if not re.sub(r"\[\d+\]", "", where).startswith(ignored)
        ]

    recorded_before = found(recorded)
    return recorded_before if max(recorded_before)[0] <= TOLERANCE else found(run_here())


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[tuple[float, str]]:
    """Yield the difference of each number and where it is. Other differences are infinite."""
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
