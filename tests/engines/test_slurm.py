"""Jobs on a real SLURM controller with two nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ways
from elastic_runs import ELASTIC_WORKER, records, run_alone, wait_until
from simulated_machines import LOGIN
from slurm_cluster import SlurmCluster
from table import Row

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

WHO = """
import os, sys
import torch
from accelerate_core import Accelerator

accelerator = Accelerator(process_group_timeout=60)
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
node = os.uname().nodename
rank, local = accelerator.process_index, accelerator.local_process_index
# print() would write the end of the line separately, so lines of ranks that share a file could mix.
sys.stdout.write(f"{node}: rank {rank} local {local} of {ranks}\\n")
accelerator.end_training()
"""
LAUNCH = "accelerate-core launch"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "who.py").write_text(WHO)
    return tmp_path


def ranks_of(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if ": rank " in line)


def wait_for_step(folder: Path, rank: int, step: int) -> None:
    """Wait until a rank of train_digits.py has completed a step."""
    file, until = folder / f"step.{rank}", time.monotonic() + 90
    while time.monotonic() < until:
        if file.exists() and int(file.read_text().split()[2]) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} has not reached step {step}")


def output_of(folder: Path) -> str:
    return (folder / "job.out").read_text()


# --- Ranks ----------------------------------------------------------------------------------------

TWO_RANKS = ["n1: rank 0 local 0 of [0, 1]", "n2: rank 1 local 0 of [0, 1]"]
FOUR_RANKS = [
    f"n{1 + rank // 2}: rank {rank} local {rank % 2} of [0, 1, 2, 3]" for rank in range(4)
]
STEPS = {
    "one task per node": (["srun", "-N2", "-n2"], TWO_RANKS),
    "two tasks per node": (["srun", "-N2", "--ntasks-per-node=2"], FOUR_RANKS),
    "PMI-2": (["srun", "--mpi=pmi2", "-N2", "-n2"], TWO_RANKS),
    "PMI-2, two tasks per node": (["srun", "--mpi=pmi2", "-N2", "--ntasks-per-node=2"], FOUR_RANKS),
    "mpirun in an allocation": (
        ["salloc", "-N2", "-n2", "mpirun.mpich", "-genv", "MASTER_ADDR", "n1"],
        TWO_RANKS,
    ),
}


@pytest.mark.parametrize(("start", "expected"), STEPS.values(), ids=STEPS)
def test_launch_takes_the_ranks_from_slurm(
    slurm: SlurmCluster, folder: Path, start: list[str], expected: list[str]
) -> None:
    done = slurm.run(*start, *LAUNCH.split(), "who.py", cwd=folder)
    assert ranks_of(done.stdout) == expected, done.stderr[-3000:]


PYTHON = {name: step for name, step in STEPS.items() if name != "mpirun in an allocation"}


@pytest.mark.parametrize(("start", "expected"), PYTHON.values(), ids=PYTHON)
def test_srun_without_launcher_takes_the_ranks_from_slurm(
    slurm: SlurmCluster, folder: Path, start: list[str], expected: list[str]
) -> None:
    done = slurm.run(*start, "python", "who.py", cwd=folder)
    assert ranks_of(done.stdout) == expected, done.stderr[-3000:]


def test_python_in_an_allocation_of_several_tasks_runs_alone(
    slurm: SlurmCluster, folder: Path
) -> None:
    done = slurm.run("salloc", "-N2", "-n2", "python", "who.py", cwd=folder)
    assert ranks_of(done.stdout) == ["login: rank 0 local 0 of [0]"], done.stderr
    job = slurm.submit("#!/bin/bash\npython who.py\n", "-N2", "-n2", cwd=folder)
    assert slurm.wait_for_job(job) == "COMPLETED"
    assert ranks_of(output_of(folder)) == ["n1: rank 0 local 0 of [0]"]


def test_nodes_with_different_numbers_of_tasks_are_refused(
    slurm: SlurmCluster, folder: Path
) -> None:
    done = slurm.run("srun", "-N2", "-n4", *LAUNCH.split(), "who.py", cwd=folder)
    assert done.returncode != 0
    assert "4 tasks on 2 nodes (3,1), but every node needs the same number" in done.stderr


def test_heterogeneous_step_is_one_run(slurm: SlurmCluster, folder: Path) -> None:
    component = ["-N1", "-n1", *LAUNCH.split(), "who.py"]
    done = slurm.run("srun", *component, ":", *component, cwd=folder)
    assert ranks_of(done.stdout) == TWO_RANKS, done.stderr[-3000:]


def test_launch_in_a_heterogeneous_job_is_refused(slurm: SlurmCluster, folder: Path) -> None:
    launch = [*LAUNCH.split(), "who.py"]
    done = slurm.run("salloc", "-N1", "-n1", ":", "-N1", "-n1", *launch, cwd=folder)
    assert done.returncode != 0
    assert "srun --het-group=0-1 accelerate-core launch" in done.stderr


def test_overlapping_runs_of_one_job_do_not_mix(slurm: SlurmCluster, folder: Path) -> None:
    script = f"""#!/bin/bash
for i in 1 2; do srun -N2 -n2 --overlap {LAUNCH} who.py > step$i & done
wait
for i in 3 4; do {LAUNCH} who.py > step$i & done
wait
"""
    job = slurm.submit(script, "-N2", "--ntasks-per-node=2", cwd=folder)
    assert slurm.wait_for_job(job) == "COMPLETED", output_of(folder)
    found = [ranks_of((folder / f"step{number}").read_text()) for number in (1, 2, 3, 4)]
    assert found == [TWO_RANKS] * 4, output_of(folder)


def test_tasks_of_a_job_array_are_separate_runs(slurm: SlurmCluster, folder: Path) -> None:
    launch = f"{LAUNCH} --num_processes 2 who.py > array$SLURM_ARRAY_TASK_ID"
    job = slurm.submit(f"#!/bin/bash\n{launch}\n", "-N1", "--array=0-1", cwd=folder)
    for task in (0, 1):
        assert slurm.wait_for_job(f"{job}_{task}") == "COMPLETED", output_of(folder)
        lines = ranks_of((folder / f"array{task}").read_text())
        assert [line.partition(": ")[2] for line in lines] == [
            "rank 0 local 0 of [0, 1]",
            "rank 1 local 1 of [0, 1]",
        ]


# --- Addresses ------------------------------------------------------------------------------------

WRONG = {
    "name, per node": (["-n2"], "--main_process_ip nowhere", {}, "command line --main_process_ip"),
    "name, per task": (["--ntasks-per-node=2"], "", {"MASTER_ADDR": "nowhere"}, "MASTER_ADDR"),
    "address, per node": (["-n2"], "--main_process_ip 10.78.0.99", {}, "--main_process_ip"),
    "address, per task": (
        ["--ntasks-per-node=2"],
        "",
        {"MASTER_ADDR": "10.78.0.99"},
        "MASTER_ADDR",
    ),
}


@pytest.fixture(scope="module")
def import_seconds(slurm_session: SlurmCluster) -> float:
    """How long it takes to start Python with torch's launcher on both nodes."""
    begun = time.monotonic()
    words = ["srun", "-N2", "-n2", "python", "-c", "import torch.distributed.run"]
    assert slurm_session.run(*words, cwd=slurm_session.folder).returncode == 0
    return time.monotonic() - begun


@pytest.mark.parametrize(("tasks", "option", "variables", "source"), WRONG.values(), ids=WRONG)
def test_wrong_address_is_an_error_within_15_seconds(
    slurm: SlurmCluster,
    folder: Path,
    import_seconds: float,
    tasks: list[str],
    option: str,
    variables: dict[str, str],
    source: str,
) -> None:
    begun = time.monotonic()
    words = ["srun", "-N2", *tasks, *LAUNCH.split(), *option.split(), "who.py"]
    done = slurm.run(*words, cwd=folder, **variables)
    seconds = time.monotonic() - begun
    assert done.returncode != 0
    host = variables.get("MASTER_ADDR", option.split()[-1] if option else "")
    (line, *_) = [line for line in done.stderr.splitlines() if host in line]
    assert "port 2" in line
    assert source in done.stderr
    assert seconds < 15 + 2 * import_seconds  # other tests run at the same time


# --- Ends of jobs ---------------------------------------------------------------------------------


def train(arguments: str) -> str:
    return f"srun --ntasks-per-node=1 {LAUNCH} {ways.TRAIN} {arguments}"


REQUEUE = """
if [ $? -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def check_resumed(folder: Path, reference: Callable[[int], ways.Result]) -> ways.Result:
    """Check that a run resumed and ended with the weights of a run without a break, and return its result."""
    result = ways.read_result(folder)
    assert result["resumed"] > 0
    assert {**result, "resumed": 0} == reference(2)
    return result


def test_preempted_job_is_requeued_and_resumes(
    slurm: SlurmCluster, folder: Path, reference: Callable[[int], ways.Result],
    table_row: Callable[[Row], None],
) -> None:  # fmt: skip
    script = f"#!/bin/bash\n{train('run --preempt --pace 0.2')}{REQUEUE}"
    begun = time.time()
    job = slurm.submit(script, "-N2", "--exclusive", "--requeue", cwd=folder)
    wait_for_step(folder / "run", 1, 15)
    first_step = float((folder / "run" / "first.0").read_text()) - begun
    urgent = ["--partition=urgent", "-N2", "--exclusive", "--wrap", "hostname > urgent"]
    assert slurm.run("sbatch", "--wait", *urgent, cwd=folder).returncode == 0
    assert (folder / "urgent").exists()
    assert slurm.wait_for_job(job) == "COMPLETED", output_of(folder)
    assert "Preempted: the state was saved to" in output_of(folder)
    assert slurm.job(job)["Restarts"] == "1"
    result = check_resumed(folder / "run", reference)
    done = f"`scontrol requeue`, continues at the step of the signal ({result['resumed']})"
    status = "75 after the signal"
    table_row(Row("`sbatch --requeue`, preempted", 2, first_step, status, done, result["correct"]))


def test_job_that_reaches_its_time_limit_resumes(
    slurm: SlurmCluster, folder: Path, reference: Callable[[int], ways.Result]
) -> None:
    script = f"#!/bin/bash\n{train('run --preempt --pace 1.2')}{REQUEUE}"
    job = slurm.submit(script, "-N2", "--time=30", "--signal=USR1@30", "--requeue", cwd=folder)
    wait_for_step(folder / "run", 1, 10)
    # SLURM counts in minutes, and the start may take a while: shorten the limit of the running job.
    minutes, _, _ = slurm.job(job)["RunTime"].rpartition(":")
    limit = int(minutes.rpartition(":")[2]) + 2
    set_limit(slurm, job, limit)
    assert slurm.wait_for_job(job, {"PENDING"}) == "PENDING"
    set_limit(slurm, job, 30)
    assert slurm.wait_for_job(job) == "COMPLETED", output_of(folder)
    assert "Preempted: the state was saved to" in output_of(folder)
    check_resumed(folder / "run", reference)


def set_limit(slurm: SlurmCluster, job: str, minutes: int) -> None:
    words = ["scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}"]
    done = slurm.run(*words, cwd=slurm.folder)
    assert done.returncode == 0, done.stderr


def test_job_with_a_killed_rank_is_requeued_and_resumes(
    slurm: SlurmCluster, folder: Path, reference: Callable[[int], ways.Result],
    table_row: Callable[[Row], None],
) -> None:  # fmt: skip
    script = f"""#!/bin/bash
{LAUNCH} {ways.TRAIN} run --kill
status=$?
if [ $status -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ]; then
    echo "status $status"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""
    begun = time.time()
    job = slurm.submit(script, "-N2", "--requeue", cwd=folder)
    assert slurm.wait_for_job(job) == "COMPLETED", output_of(folder)
    result = check_resumed(folder / "run", reference)
    (line, *_) = [line for line in output_of(folder).splitlines() if line.startswith("status ")]
    first_step = float((folder / "run" / "first.0").read_text()) - begun
    done = f"`scontrol requeue`, continues at step {result['resumed']}"
    row = Row(
        "`sbatch --requeue`, launch inside",
        2,
        first_step,
        f"{line.split()[1]} after the kill",
        done,
        result["correct"],
    )
    table_row(row)


def lose_node(slurm: SlurmCluster, end: str, folder: Path) -> None:
    """Set the second node to `down`, or end all of its processes."""
    if end == "down":
        down = ["scontrol", "update", "nodename=n2", "state=down", "reason=test"]
        assert slurm.run(*down, cwd=folder).returncode == 0
    else:
        slurm.machines.crash("n2")


def return_node(slurm: SlurmCluster, end: str, folder: Path) -> None:
    """Undo `lose_node`, and wait until both nodes are free."""
    if end == "down":
        slurm.run("scontrol", "update", "nodename=n2", "state=resume", cwd=folder)
    else:
        slurm.machines.boot("n2")
        slurm.start_node("n2")
    slurm.wait_for_nodes({"idle"})


@pytest.mark.parametrize("end", ["down", "crash"])
def test_run_continues_on_the_remaining_node(
    slurm: SlurmCluster, folder: Path, end: str, table_row: Callable[[Row], None]
) -> None:
    script = f"#!/bin/bash\n{train('run --pace 0.1')}\n"
    # The batch script runs on the first node of the job, so the second one is lost.
    job = slurm.submit(script, "--nodes=1-2", "--requeue", cwd=folder)
    wait_for_step(folder / "run", 1, 30)
    lose_node(slurm, end, folder)
    try:
        assert slurm.wait_for_job(job) == "COMPLETED", output_of(folder)
    finally:
        return_node(slurm, end, folder)
    result = ways.read_result(folder / "run")
    assert (result["ranks"], result["resumed"]) == (1, 20) or result["resumed"] > 20
    if end == "crash":
        done = f"SLURM requeues it on the other node, continues at step {result['resumed']}"
        table_row(Row("`sbatch --requeue`, a node crashes", 2, None, "-", done, result["correct"]))


@pytest.mark.parametrize(
    ("end", "srun"),
    [("crash", ""), ("crash", "srun --no-kill --ntasks-per-node=1"), ("down", "")],
    ids=["crash, launch calls srun", "crash, srun", "down, launch calls srun"],
)
def test_elastic_run_continues_within_the_job(
    slurm: SlurmCluster, folder: Path, end: str, srun: str
) -> None:
    steps, whole = run_alone(folder / "alone", 2)
    run = folder / "run"
    run.mkdir()
    (run / "hold-6").touch()
    machines = "--num_machines 1:2 --num_processes 2"
    conf = "--rdzv_conf keep_alive_interval=1,last_call_timeout=3"
    script = f"#!/bin/bash\n{srun} {LAUNCH} {machines} {conf} {ELASTIC_WORKER} {run}\n"
    job = slurm.submit(script, "--nodes=2", "--no-kill", "--no-requeue", cwd=folder)
    wait_until((run / "step-6").exists, 120, "2 ranks take 6 steps")
    lose_node(slurm, end, folder)
    try:
        (run / "hold-6").unlink()
        slurm.wait_for_job(job)
        # srun counts the task that SLURM has killed on a node that is down. A lost one doesn't count.
        assert slurm.job(job)["ExitCode"] == ("137:0" if end == "down" else "0:0"), output_of(
            folder
        )
    finally:
        return_node(slurm, end, folder)
    assert (run / "size-1").exists(), output_of(folder)
    taken, [last] = records(run)
    assert {step: sorted(ids) for step, ids in taken.items()} == {
        step: sorted(ids) for step, ids in steps.items()
    }
    assert last["weights"] == pytest.approx(whole["weights"], abs=1e-5)
    assert "elastic: 1 of 2 processes, policy keep_global_batch; 6 accum" in last["explain"]


@pytest.mark.parametrize("kind", ["TERM", "KILL"])
def test_cancelled_job_leaves_no_process(slurm: SlurmCluster, folder: Path, kind: str) -> None:
    job = slurm.submit(f"#!/bin/bash\n{train(f'{folder}/run --pace 0.5')}\n", "-N2", cwd=folder)
    wait_for_step(folder / "run", 1, 5)
    options = ["--signal=KILL", "--full"] if kind == "KILL" else []
    slurm.run("scancel", *options, job, cwd=folder)
    assert slurm.wait_for_job(job) in ("CANCELLED", "FAILED")
    until = time.monotonic() + 20
    while slurm.machines.processes(str(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    assert slurm.machines.processes(str(folder)) == []


def test_interrupted_srun_leaves_no_process(slurm: SlurmCluster, folder: Path) -> None:
    words = [
        "srun",
        "-N2",
        "--ntasks-per-node=1",
        *LAUNCH.split(),
        ways.TRAIN,
        folder / "run",
        "--pace",
        "0.5",
    ]
    env = slurm.environment()
    with slurm.machines.started(LOGIN, *words, env=env, cwd=folder) as process:
        wait_for_step(folder / "run", 1, 5)
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    until = time.monotonic() + 20
    while slurm.machines.processes(str(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    assert slurm.machines.processes(str(folder)) == []
