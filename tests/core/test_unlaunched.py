"""Tasks that a scheduler started without a launcher take their ranks from it, or are an error."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pool
import pytest
from support import clean_environment

from accelerate_core.contract.topology import (
    check_launched,
    read_topology,
)
from accelerate_core.errors import ConfigurationError
from accelerate_launch import machine_0
from accelerate_launch.cluster import mpi_ranks, pmix_ranks, slurm_task_ranks
from accelerate_launch.slurm import port_of_run

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
#: Variables in the second task of `srun -N2 -n2`.
TASK = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
SCRIPT = """
import sys, time
import torch.distributed as dist
from accelerate_core import Accelerator, PartialState
made = Accelerator(cpu=True) if sys.argv[1:] == [] else PartialState()
if sys.argv[1:] == ["late"] and made.process_index == 1:
    time.sleep(1)
    dist.distributed_c10d._get_default_store().add("key", 1)
print(made.process_index, made.num_processes)
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return pool.run(["train.py", *arguments], clean_environment(**variables), 120, cwd=folder)


@pytest.mark.dist
@pytest.mark.parametrize(
    "arguments", [[], ["state"], ["late"]], ids=["Accelerator", "state", "late"]
)
def test_slurm_tasks_without_launcher_are_ranks(tmp_path: Path, arguments: list[str]) -> None:
    """With `late`, rank 1 uses the store that rank 0 hosts after rank 0 has reached its end."""
    (tmp_path / "train.py").write_text(SCRIPT)
    # A job that other tests don't use, because the port is derived from its number.
    job = {**TASK, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1"}
    command = ["train.py", *arguments]
    files = [tmp_path / rank for rank in "01"]
    tasks = []
    for rank, file in enumerate(files):
        job |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        with file.open("w") as out:
            tasks.append(pool.start(command, clean_environment(**job), out, 2, rank, cwd=tmp_path))
    try:
        ends = [task.wait(120) for task in tasks]
    finally:
        for task in tasks:
            task.send(signal.SIGKILL)
    assert ends == [0, 0]
    assert [file.read_text() for file in files] == ["0 2\n", "1 2\n"]


def test_slurm_tasks_need_accelerate_launch(tmp_path: Path) -> None:
    done = run(tmp_path, **TASK, ACCELERATE_DISABLED_PLUGINS="slurm")
    assert done.returncode == 1, done.stdout
    assert "one of 2 tasks of a SLURM step" in done.stderr
    assert "set RANK=0 and WORLD_SIZE=1" in done.stderr


def test_slurm_task_can_opt_in_to_training_alone(tmp_path: Path) -> None:
    done = run(tmp_path, **TASK, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "0 1\n"), done.stderr


def test_node_name_that_does_not_resolve_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'nohost01' of machine 0, port .* of the SLURM step"
    ):
        slurm_task_ranks({**TASK, "SLURM_STEP_NODELIST": "nohost[01-02]"})


def test_ranks_address_and_port_come_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_0, "resolve", lambda host, port: [host])
    assert slurm_task_ranks({**TASK, "SLURM_STEP_NODELIST": "gpu[01-02]"}) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": str(port_of_run("4711", 0)),
    }


ALONE = {
    "login node": {},
    "salloc": JOB,
    "batch script": {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "numbered batch step": {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
    "interactive step": {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
    # The job has two tasks, but this step has one.
    "srun --ntasks=1": {**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "one task": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    "rank of a launch": {**TASK, "RANK": "1", "WORLD_SIZE": "2"},
    "first process of PMIx": {"PMIX_RANK": "0"},
}


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE)
def test_single_process_or_process_with_ranks_is_left_alone(variables: dict[str, str]) -> None:
    if "RANK" not in variables:
        assert slurm_task_ranks(variables) == {}
    if "PMIX_RANK" in variables:
        assert pmix_ranks(variables) == {}
    check_launched(read_topology(variables), variables)


def test_pmix_rank_without_launcher_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"PMIX_RANK=2\), but RANK and WORLD_SIZE"):
        pmix_ranks({"PMIX_RANK": "2"})


def test_mpi_ranks_on_several_machines_need_an_address() -> None:
    variables = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    topology = read_topology(variables)
    check_launched(topology, variables)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR does not say on which one rank 0 is"):
        mpi_ranks(variables)
    assert mpi_ranks({**variables, "MASTER_ADDR": "node1"}) == {}


#: mpirun inside a SLURM job starts its ranks with srun. Only its own rank variables are right then.
MPI_RANKS = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "MPICH": {"PMI_RANK": "1", "MPI_LOCALRANKID": "0"},
}


@pytest.mark.parametrize("variables", MPI_RANKS.values(), ids=MPI_RANKS)
def test_ranks_of_mpirun_are_not_taken_from_slurm(variables: dict[str, str]) -> None:
    sizes = {name.replace("RANK", "SIZE"): "2" for name in variables if "LOCAL" not in name}
    assert slurm_task_ranks({**TASK, **variables, **sizes}) == {}


def test_pmi2_ranks_of_srun_are_taken_from_slurm() -> None:
    assert slurm_task_ranks({**TASK, "PMI_RANK": "1", "PMI_SIZE": "2"})["LOCAL_WORLD_SIZE"] == "1"


def test_group_that_the_script_started_itself_needs_no_launcher(tmp_path: Path) -> None:
    code = """
import torch.distributed as dist
from accelerate_core import Accelerator
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
print(Accelerator(cpu=True).num_processes)
dist.destroy_process_group()
"""
    (tmp_path / "own.py").write_text(code)
    done = pool.run(["own.py"], clean_environment(**TASK), 120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
