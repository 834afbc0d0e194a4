"""Launching functions with torch's agent and with a third-party launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dummies
import pytest
from support import clean_environment
from warm_python import warm_python

#: A launcher that forks its ranks and sets their rank variables.
FORKING = """
import multiprocessing, os, socket

class Forking:
    name = "forking"
    api_version = (1, 0)

    def accepts(self, plan):
        return plan.num_machines == 1

    def launch_command(self, plan):
        raise AssertionError("this launcher only starts functions")

    def launch_function(self, function, args, plan):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        fork = multiprocessing.get_context(plan.start_method)
        ranks = [fork.Process(target=_rank, args=(rank, port, function, args, plan))
                 for rank in range(plan.num_processes)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        failed = [rank for rank, one in enumerate(ranks) if one.exitcode]
        if failed:
            raise RuntimeError(f"{plan.target.name} failed on the ranks {failed}")

def _rank(rank, port, function, args, plan):
    size = str(plan.num_processes)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port, STARTED_BY="forking")
    function(*args)

class ProgramsOnly:
    name = "programs_only"
    api_version = (1, 0)

    def accepts(self, plan):
        return True

    def launch_command(self, plan):
        return ["true"]
"""

WORK = """
import json, os, sys
from accelerate_core import debug_launcher, notebook_launcher

def work(folder, fail=False):
    import torch
    from accelerate_core import Accelerator
    accelerator = Accelerator(cpu=True, process_group_timeout=60)
    total = accelerator.reduce(torch.ones(1), "sum").item()
    if fail and accelerator.process_index:
        raise ValueError("only here")
    said = [os.environ.get("STARTED_BY"), total, str(accelerator.mixed_precision)]
    with open(os.path.join(folder, str(accelerator.process_index)), "w") as out:
        json.dump(said, out)
    accelerator.end_training()

"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with two launcher plugins, which environment variables can request."""
    groups = {
        "launchers": {"forking": "Forking", "programs_only": "ProgramsOnly"},
        "triggers": {"FORK_IT": "Forking", "PROGRAMS_ONLY": "ProgramsOnly"},
    }
    dummies.distribution(tmp_path, "forking", FORKING, groups)
    return tmp_path


def run(root: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(warm_python()), "-c", WORK + code],
        env=clean_environment(PYTHONPATH=str(root), **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(root: Path) -> list[object]:
    return [json.loads((root / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("call", "variables", "precision"),
    [
        ("notebook_launcher(work, ({0!r},), 2, 'bf16', launcher='forking')", {}, "bf16"),
        ("notebook_launcher(work, ({0!r},), 2, 'bf16')", {"FORK_IT": "1"}, "bf16"),
        ("debug_launcher(work, ({0!r},), launcher='forking')", {}, "no"),
    ],
)
def test_third_party_launcher_starts_functions(
    root: Path, call: str, variables: dict[str, str], precision: str
) -> None:
    code = "before = dict(os.environ)\n" + call.format(str(root))
    done = run(root, f"{code}\nassert dict(os.environ) == before", **variables)
    assert done.returncode == 0, done.stderr
    assert said(root) == [["forking", 2.0, precision]] * 2


@pytest.mark.dist
def test_launcher_without_launch_function_is_skipped_for_functions(root: Path) -> None:
    code = f"notebook_launcher(work, ({str(root)!r},), 2)"
    done = run(root, code, PROGRAMS_ONLY="1")
    assert done.returncode == 0, done.stderr
    assert said(root) == [[None, 2.0, "no"]] * 2


def test_named_launcher_without_launch_function_is_refused(root: Path) -> None:
    done = run(root, "notebook_launcher(work, ('x',), 2, launcher='programs_only')")
    assert "cannot start functions, because it has no launch_function" in done.stderr
    assert "(requested by notebook_launcher(launcher=...))" in done.stderr
    done = run(root, "notebook_launcher(work, ('x',), 2, launcher='forkin')")
    assert "Did you mean 'forking'?" in done.stderr


@pytest.mark.dist
def test_exception_of_the_function_is_not_attributed_to_the_launcher(root: Path) -> None:
    code = f"notebook_launcher(work, ({str(root)!r}, True), 2, launcher='forking')"
    done = run(root, code)
    assert done.stderr.strip().splitlines()[-1] == "RuntimeError: work failed on the ranks [1]"
    assert "ValueError: only here" in done.stderr


FAILING = """
from accelerate_launch import notebook_launcher

def train(where):
    from accelerate_core import Accelerator

    accelerator = Accelerator(cpu=True, process_group_timeout=60)
    if accelerator.process_index == where:
        raise ValueError("my mistake")
    accelerator.wait_for_everyone()
    accelerator.end_training()

notebook_launcher(train, ({where},), num_processes={processes}, max_restarts={restarts})
"""


@pytest.mark.dist
@pytest.mark.parametrize(("processes", "restarts", "limit"), [(2, 0, 10), (1, 0, 8), (2, 1, 16)])
def test_exception_in_a_launched_function_ends_with_the_users_line(
    tmp_path: Path, processes: int, restarts: int, limit: int
) -> None:
    (tmp_path / "cell.py").write_text(
        FAILING.format(where=processes - 1, processes=processes, restarts=restarts)
    )
    lines = failing(tmp_path, sys.executable).splitlines()
    assert len(lines) <= limit, "\n".join(lines)
    assert lines[-1] == "ValueError: my mistake"
    assert lines[-2].strip() == 'raise ValueError("my mistake")'
    assert lines[-3].endswith("in train")
    if processes > 1:
        assert "ChildFailedError: Rank 1 failed: exit status 1, process " in lines[-5]


@pytest.mark.dist
def test_debug_mode_shows_all_frames_of_a_launched_function(tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(FAILING.format(where=1, processes=2, restarts=0))
    said = failing(tmp_path, str(warm_python()), ACCELERATE_DEBUG_MODE="1")
    assert "accelerate_launch/functions.py" in said
    assert "Root Cause" in said


def failing(folder: Path, python: str, **variables: str) -> str:
    done = subprocess.run(
        [python, "cell.py"],
        cwd=folder,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.strip()
