"""Launching with MPI, from inside mpirun or through it, and in a SLURM allocation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import clean_environment

from accelerate_core.errors import ConfigurationError
from accelerate_launch import LaunchPlan, child_environment, choose_launcher, make_plan
from accelerate_launch.mpi import hosts_of
from accelerate_launch.slurm import expand_counts, expand_nodes, port_of_run

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")

#: Allows Open MPI to run as root, as in containers, and two ranks on any number of cores.
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "s.py"
    path.write_text("")
    return path


def plan_of(script: Path, environ: dict[str, str], **given: object) -> LaunchPlan:
    return make_plan(str(script), [], {"cpu": True, **given}, environ)


# --- MPI ------------------------------------------------------------------------------------------

OPEN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "9d030000-4b2d-938f"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"}
MVAPICH |= {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [(OPEN, "Open MPI"), (INTEL, "Intel MPI"), (MPICH, "MPICH"), (MVAPICH, "MVAPICH")],
)
def test_launch_inside_mpirun_runs_the_script_directly(
    script: Path, environ: dict[str, str], name: str
) -> None:
    plan = plan_of(script, environ)
    assert choose_launcher(plan).launch_command(plan) == [sys.executable, str(script)]
    made = child_environment(plan, environ)
    assert (made["RANK"], made["WORLD_SIZE"], made["LOCAL_RANK"]) == ("1", "4", "1")
    assert made["MASTER_ADDR"] == "127.0.0.1"
    assert plan.provenance["num_processes"].origin.startswith(name)
    with pytest.raises(ConfigurationError, match=f"contradicts {name}"):
        plan_of(script, environ, num_processes=2)


def test_mpi_ranks_on_several_machines_need_an_address(script: Path) -> None:
    environ = {**OPEN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigurationError, match="Set MASTER_ADDR to the address of the first"):
        plan_of(script, environ)
    made = child_environment(plan_of(script, {**environ, "MASTER_ADDR": "10.0.0.1"}), environ)
    assert (made["MASTER_ADDR"], made["LOCAL_WORLD_SIZE"]) == ("10.0.0.1", "2")


def test_host_file_selects_mpirun(script: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nnode1 slots=2\nnode2:2\n\nnode1\n")
    plan = plan_of(script, {}, mpirun_hostfile=str(tmp_path / "hosts"), num_processes=4)
    assert choose_launcher(plan).name == "mpirun"
    assert (plan.num_machines, plan.main_process_ip, plan.processes_per_machine) == (2, "node1", 2)
    (tmp_path / "hosts").write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="names no host"):
        hosts_of(str(tmp_path / "hosts"))


#: The first line of `mpirun --version` of each MPI, and its options for two hosts with two slots each.
MPIRUN = {
    "Open MPI": ("mpirun (Open MPI) 4.1.4", "slots", "--host"),
    "Intel MPI": ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1", "colons", "-hosts"),
    "MPICH": ("HYDRA build details:", "colons", "-hosts"),
}


@pytest.mark.parametrize(("version", "reads", "listed"), MPIRUN.values(), ids=MPIRUN)
@pytest.mark.parametrize("file", ["slots", "colons"])
def test_host_file_of_another_mpi_becomes_a_list_of_hosts(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    version: str, reads: str, listed: str, file: str,
) -> None:  # fmt: skip
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", str(mpirun.parent), prepend=os.pathsep)
    text = {"slots": "n1 slots=2\nn2 slots=2 # ours\n", "colons": "n1:2\nn2:2\n"}[file]
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    plan = plan_of(script, {}, mpirun_hostfile=str(hosts), num_processes=4)
    command = choose_launcher(plan).launch_command(plan)
    assert command[0] == str(mpirun)
    if file == reads:
        assert command[4] == str(hosts)
    else:
        assert command[3:5] == [listed, "n1:2,n2:2"]


TRAIN = """
import json, sys, torch
from accelerate_core import Accelerator
accelerator = Accelerator(process_group_timeout=60)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step(); optimizer.zero_grad()
total = accelerator.reduce(torch.ones(1), "sum").item()
alike = accelerator.gather(next(model.parameters()).detach()[None])
if accelerator.is_main_process:
    sys.stdout.write(json.dumps([total, bool(torch.equal(alike[0], alike[1]))]) + "\\n")
accelerator.end_training()
"""


@needs_mpirun
@pytest.mark.dist
@pytest.mark.parametrize("way", ["python", "launch", "ours"])
def test_training_works_with_mpirun(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    cli = [sys.executable, "-m", "accelerate_core.cli", "launch", "--cpu"]
    command = {
        "python": ["mpirun", "-n", "2", sys.executable, "train.py"],
        "launch": ["mpirun", "-n", "2", *cli, "train.py"],
        "ours": [*cli, "--num_processes", "2", "--mpirun_hostfile", "hosts", "train.py"],
    }[way]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(**AS_ROOT, ACCELERATE_USE_CPU="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2.0, True]


def test_missing_mpirun_is_an_error(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = plan_of(script, {}, launcher="mpirun", num_processes=2)
    with pytest.raises(ConfigurationError, match="Neither mpirun nor mpiexec was found"):
        choose_launcher(plan).launch_command(plan)


# --- SLURM ----------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[01-02]"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
STEP |= {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}


def test_slurm_tasks_train_alone_with_num_machines_1(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from accelerate_core import Accelerator\nprint(Accelerator().num_processes)\n"
    )
    launch = [sys.executable, "-m", "accelerate_core.cli", "launch", "--cpu"]
    done = subprocess.run(
        [*launch, "--num_machines", "1", "train.py"],
        cwd=tmp_path,
        env=clean_environment(**STEP),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_slurm_node_with_one_task_is_one_machine(script: Path) -> None:
    plan = plan_of(script, STEP, num_processes=4)
    assert (plan.num_machines, plan.machine_rank, plan.main_process_ip) == (2, 1, "gpu01")
    command = " ".join(choose_launcher(plan).launch_command(plan))
    assert "--nnodes 2 --node_rank 1 --master_addr gpu01 --master_port 24711" in command
    assert plan.provenance["num_machines"].origin == "SLURM job 4711, nodes gpu[01-02]"


def test_several_slurm_tasks_per_node_are_ranks(script: Path) -> None:
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    plan = plan_of(script, environ)
    assert choose_launcher(plan).launch_command(plan) == [sys.executable, str(script)]
    made = child_environment(plan, environ)
    assert (made["RANK"], made["WORLD_SIZE"], made["LOCAL_RANK"]) == ("5", "8", "1")
    assert (made["LOCAL_WORLD_SIZE"], made["MASTER_ADDR"]) == ("4", "gpu01")
    with pytest.raises(ConfigurationError, match="every node needs the same number"):
        plan_of(script, {**environ, "SLURM_STEP_NUM_TASKS": "7"})


def test_launch_from_a_batch_script_starts_all_nodes(script: Path) -> None:
    batch = {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
    # Launches in the background of one batch script must not meet each other.
    port = port_of_run("4711", os.getpid())
    name = f"4711.{os.getpid()}"
    for environ in (JOB, batch):
        plan = plan_of(script, environ, num_processes=4)
        command = choose_launcher(plan).launch_command(plan)
        assert command[:7] == ["srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"]
        rendezvous = f"--rdzv_backend c10d --rdzv_endpoint gpu01:{port} --rdzv_id {name}"
        assert rendezvous in " ".join(command)


def test_overlapping_steps_of_a_job_use_different_ports(script: Path) -> None:
    ports = {plan_of(script, {**STEP, "SLURM_STEP_ID": n}).main_process_port for n in "012"}
    assert len(ports) == 3


def test_ranks_from_pmi2_of_slurm_are_completed_by_slurm(script: Path) -> None:
    environ = {**STEP, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "5"}
    plan = plan_of(script, environ, num_processes=2)
    assert (plan.num_machines, plan.machine_rank, plan.main_process_ip) == (2, 1, "gpu01")
    # An mpirun that was started in a SLURM step knows more than SLURM.
    plan = plan_of(script, {**STEP, **MPICH})
    assert plan.provenance["num_processes"].origin.startswith("MPICH")


@pytest.mark.parametrize(("listed", "even"), [("3,1", False), ("2(x2)", True), ("2,2", True)])
def test_nodes_with_different_numbers_of_tasks_are_refused(
    script: Path, listed: str, even: bool
) -> None:
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": listed}
    if even:
        assert child_environment(plan_of(script, environ), environ)["LOCAL_WORLD_SIZE"] == "2"
    else:
        with pytest.raises(ConfigurationError, match=r"4 tasks on 2 nodes \(3,1\)"):
            plan_of(script, environ)


def test_heterogeneous_job_without_step_is_refused(script: Path) -> None:
    # SLURM numbers the variables of each component, so there is no SLURM_JOB_NUM_NODES.
    environ = {"SLURM_JOB_ID": "6", "SLURM_HET_SIZE": "2", "SLURM_NTASKS": "2"}
    with pytest.raises(ConfigurationError, match="srun --het-group=0-1 accelerate-core launch"):
        plan_of(script, environ)


def test_allocation_of_one_node_launches_as_a_single_machine(script: Path) -> None:
    plan = plan_of(script, {**JOB, "SLURM_JOB_NUM_NODES": "1"}, num_processes=2)
    assert "--standalone" in choose_launcher(plan).launch_command(plan)


def test_num_machines_overrides_the_slurm_allocation(script: Path) -> None:
    plan = plan_of(script, STEP, num_machines=1, num_processes=2, launcher="torchrun")
    assert plan.num_machines == 1
    assert plan.provenance["num_machines"].origin == "command line --num_machines"


def test_explain_shows_values_from_slurm(script: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate_core.cli", "launch", "--cpu", "--explain"),
            *("--dry_run", str(script)),
        ],
        env=clean_environment(**STEP),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "SLURM job 4711, first of gpu[01-02]" in done.stderr
    assert "SLURM job 4711, SLURM_NODEID" in done.stderr


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,21],login", ["gpu08", "gpu09", "gpu10", "gpu21", "login"]),
        ("a1,b[2,4]-ib", ["a1", "b2-ib", "b4-ib"]),
    ],
)
def test_slurm_node_lists_are_expanded(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "[", ",n1"])
def test_invalid_slurm_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a valid SLURM node list"):
        expand_nodes(text)


def test_slurm_counts_per_node_are_expanded() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigurationError, match="not a valid SLURM list of tasks per node"):
        expand_counts("2(x")


def test_non_numeric_rank_variable_is_refused(script: Path) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_NODEID='x' must be a number"):
        plan_of(script, {**STEP, "SLURM_NODEID": "x"})
