"""Tasks that a scheduler started without a launcher are an error, because each would train alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pool
import pytest
from support import clean_environment

from accelerate_core.contract.topology import (
    Topology,
    check_address,
    check_launched,
    read_topology,
)
from accelerate_core.errors import ConfigurationError

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
import sys
from accelerate_core import Accelerator, PartialState
made = PartialState() if sys.argv[1:] == ["state"] else Accelerator(cpu=True)
print(made.process_index, made.num_processes)
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return pool.run(["train.py", *arguments], clean_environment(**variables), 120, cwd=folder)


@pytest.mark.parametrize("arguments", [["--lr", "0.1"], ["state"]], ids=["Accelerator", "state"])
def test_slurm_task_without_launcher_is_refused_with_the_right_command(
    tmp_path: Path, arguments: list[str]
) -> None:
    done = run(tmp_path, *arguments, **TASK)
    assert done.returncode == 1, done.stdout
    assert "one of 2 tasks of a SLURM step (SLURM_PROCID=1)" in done.stderr
    command = f"train.py {' '.join(arguments)}\n"
    start = "\n    srun --nodes=2 --ntasks=2 "
    assert f"{start}accelerate-core launch {command}" in done.stderr
    assert f"{start}env RANK=0 WORLD_SIZE=1 python {command}" in done.stderr


def test_slurm_task_can_opt_in_to_training_alone(tmp_path: Path) -> None:
    done = run(tmp_path, **TASK, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "0 1\n"), done.stderr


@pytest.mark.parametrize("rank", ["0", "1"], ids=["first task", "second task"])
def test_every_task_of_a_slurm_step_is_refused(rank: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SLURM_PROCID={rank}"):
        check_launched(Topology(), {**TASK, "SLURM_PROCID": rank})


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
def test_single_process_or_process_with_ranks_is_not_refused(variables: dict[str, str]) -> None:
    check_launched(read_topology(variables), variables)


def test_pmix_rank_without_launcher_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"PMIX_RANK=2\), but RANK and WORLD_SIZE"):
        check_launched(Topology(), {"PMIX_RANK": "2"})


#: MPI ranks on two machines. mpirun sets the ranks per machine, and srun --mpi=pmi2 the number of nodes.
SEVERAL_MACHINES = {
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    },
    "srun --mpi=pmi2": {**TASK, "PMI_RANK": "1", "PMI_SIZE": "2"},
}


@pytest.mark.parametrize("variables", SEVERAL_MACHINES.values(), ids=SEVERAL_MACHINES)
def test_mpi_ranks_on_several_machines_need_an_address(variables: dict[str, str]) -> None:
    topology = read_topology(variables)
    check_launched(topology, variables)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR does not say on which one rank 0 is"):
        check_address(topology, variables)
    check_address(topology, {**variables, "MASTER_ADDR": "node1"})


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
