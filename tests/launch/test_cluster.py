"""What is around the launcher: an mpirun, ours or another's, and an allocation of SLURM."""

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
from accelerate_launch.slurm import expand_nodes

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")

#: As root, in a container, Open MPI has to be told that this is meant; two ranks on any machine.
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
INTEL = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"}
MVAPICH |= {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "name"), [(OPEN, "Open MPI"), (INTEL, "Intel MPI"), (MVAPICH, "MVAPICH")]
)
def test_a_rank_of_mpirun_runs_the_script_itself(
    script: Path, environ: dict[str, str], name: str
) -> None:
    plan = plan_of(script, environ)
    assert choose_launcher(plan).launch_command(plan) == [sys.executable, str(script)]
    made = child_environment(plan, environ)
    assert (made["RANK"], made["WORLD_SIZE"], made["LOCAL_RANK"]) == ("1", "4", "1")
    assert made["MASTER_ADDR"] == "127.0.0.1"
    assert plan.provenance["num_processes"].origin.startswith(name)
    with pytest.raises(ConfigurationError, match=f"contradicts what is around: {name}"):
        plan_of(script, environ, num_processes=2)


def test_ranks_on_several_machines_need_an_address(script: Path) -> None:
    environ = {**OPEN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigurationError, match="set MASTER_ADDR to the address of the first"):
        plan_of(script, environ)
    made = child_environment(plan_of(script, {**environ, "MASTER_ADDR": "10.0.0.1"}), environ)
    assert (made["MASTER_ADDR"], made["LOCAL_WORLD_SIZE"]) == ("10.0.0.1", "2")


def test_a_host_file_asks_for_mpirun(script: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nnode1 slots=2\nnode2:2\n\nnode1\n")
    plan = plan_of(script, {}, mpirun_hostfile=str(tmp_path / "hosts"), num_processes=4)
    assert choose_launcher(plan).name == "mpirun"
    assert (plan.num_machines, plan.main_process_ip, plan.processes_per_machine) == (2, "node1", 2)
    (tmp_path / "hosts").write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="names no host"):
        hosts_of(str(tmp_path / "hosts"))


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
def test_mpirun_trains(tmp_path: Path, way: str) -> None:
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


def test_without_mpirun_the_error_says_so(
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


def test_each_task_trains_alone_if_the_command_line_says_one_machine(tmp_path: Path) -> None:
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


def test_one_task_per_node_is_a_machine_of_ours(script: Path) -> None:
    plan = plan_of(script, STEP, num_processes=4)
    assert (plan.num_machines, plan.machine_rank, plan.main_process_ip) == (2, 1, "gpu01")
    command = " ".join(choose_launcher(plan).launch_command(plan))
    assert "--nnodes 2 --node_rank 1 --master_addr gpu01 --master_port 24711" in command
    assert plan.provenance["num_machines"].origin == "SLURM job 4711, nodes gpu[01-02]"


def test_many_tasks_per_node_are_ranks(script: Path) -> None:
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    plan = plan_of(script, environ)
    assert choose_launcher(plan).launch_command(plan) == [sys.executable, str(script)]
    made = child_environment(plan, environ)
    assert (made["RANK"], made["WORLD_SIZE"], made["LOCAL_RANK"]) == ("5", "8", "1")
    assert (made["LOCAL_WORLD_SIZE"], made["MASTER_ADDR"]) == ("4", "gpu01")
    with pytest.raises(ConfigurationError, match="every node needs as many"):
        plan_of(script, {**environ, "SLURM_STEP_NUM_TASKS": "7"})


def test_a_batch_script_starts_all_nodes(script: Path) -> None:
    batch = {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
    for environ in (JOB, batch):
        plan = plan_of(script, environ, num_processes=4)
        command = choose_launcher(plan).launch_command(plan)
        assert command[:7] == ["srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"]
        assert "--rdzv_backend c10d --rdzv_endpoint gpu01:24711 --rdzv_id 4711" in " ".join(command)


def test_one_node_is_a_machine_like_any_other(script: Path) -> None:
    plan = plan_of(script, {**JOB, "SLURM_JOB_NUM_NODES": "1"}, num_processes=2)
    assert "--standalone" in choose_launcher(plan).launch_command(plan)


def test_what_is_said_is_stronger_than_the_allocation(script: Path) -> None:
    plan = plan_of(script, STEP, num_machines=1, num_processes=2, launcher="torchrun")
    assert plan.num_machines == 1
    assert plan.provenance["num_machines"].origin == "command line --num_machines"


def test_slurm_is_explained(script: Path) -> None:
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
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "[", ",n1"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no node list"):
        expand_nodes(text)


def test_a_rank_variable_that_is_no_number(script: Path) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_NODEID='x' must be a number"):
        plan_of(script, {**STEP, "SLURM_NODEID": "x"})


def test_nothing_of_this_is_taken_from_the_tests_own_surroundings() -> None:
    assert "OMPI_COMM_WORLD_SIZE" not in os.environ
