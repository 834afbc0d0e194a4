"""An elastic launch continues with the machines that are left, and computes the same."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from elastic_runs import ELASTIC_WORKER, records, run_alone, wait_until
from launched import run_cli
from support import clean_environment
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accelerate_core.config.files import parse_config
from accelerate_core.plugin import ConfigurationError
from accelerate_launch.membership import Machine, describe
from accelerate_launch.planning import decide


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machines:
    """Launches that stand for machines, one process each."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        self.command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu", *options]
        self.command += ["--num_processes", "4", "--num_machines", "1:4"]
        self.command += ["--main_process_ip", "127.0.0.1"]
        self.command += ["--main_process_port", str(port)]
        self.folder = folder
        self.launches: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> None:
        # All of them are on this host, so the address doesn't say which of them is machine 0.
        conf = f"last_call_timeout=3,keep_alive_interval=1,is_host={str(number == 0).lower()}"
        command = [*self.command, "--machine_rank", str(number), "--rdzv_conf", conf]
        command += [str(ELASTIC_WORKER), str(self.folder)]
        output = (self.folder / f"output-{len(self.launches)}").open("w")
        process = subprocess.Popen(
            command,
            env=clean_environment(OMP_NUM_THREADS="1"),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self.launches.append(process)

    def lose(self, index: int) -> None:
        """Kill a launch with its rank, as if its machine had lost power."""
        process = psutil.Process(self.launches[index].pid)
        for one in [process, *process.children(recursive=True)]:
            one.send_signal(signal.SIGKILL)

    def text(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("output-*")))

    def end(self) -> None:
        for one in self.launches:
            try:
                os.killpg(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            one.wait(10)


def run_on_4_2_and_3_machines(folder: Path, *options: str) -> tuple[Any, Any]:
    """Lose two of four machines after 6 steps, and add one after 13. Return the `records`."""
    folder.mkdir()
    for step in (2, 6, 13):
        (folder / f"hold-{step}").touch()
    machines = Machines(folder, free_port(), *options)
    try:
        for number in range(4):
            machines.start(number)
        wait_until(lambda: (folder / "size-4").exists(), 120, "4 machines start")
        (folder / "hold-2").unlink()
        wait_until(lambda: (folder / "step-6").exists(), 120, "4 machines take 6 steps")
        machines.lose(3)
        machines.lose(2)
        (folder / "hold-6").unlink()
        wait_until(lambda: (folder / "size-2").exists(), 120, "2 machines continue")
        wait_until(lambda: (folder / "step-13").exists(), 120, "2 machines take 13 steps")
        machines.start(2)
        wait_until(lambda: (folder / "size-3").exists(), 120, "3 machines continue")
        (folder / "hold-13").unlink()
        living = [machines.launches[index] for index in (0, 1, 4)]
        assert [one.wait(120) for one in living] == [0, 0, 0], machines.text()
        host = socket.gethostname()
        changes = re.findall(r"Machines now.*", machines.text())
        assert [re.sub(r"process \d+", "process", one) for one in changes] == [
            f"Machines now: 2 (was 4); left: {host} (process), {host} (process); 2 processes",
            f"Machines now: 3 (was 2); joined: {host} (process); 3 processes",
        ]
    finally:
        machines.end()
        print(machines.text())
    return records(folder)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param((), 1e-5, id="ddp"),
        pytest.param(("--use_fsdp",), 1e-4, id="fsdp2", marks=pytest.mark.soak),
    ],
)
def test_run_continues_on_4_2_and_3_machines(
    tmp_path: Path, options: tuple[str, ...], tolerance: float
) -> None:
    steps, whole = run_alone(tmp_path / "alone", 4)
    its, ends = run_on_4_2_and_3_machines(tmp_path / "elastic", *options)
    assert its.keys() == steps.keys()
    assert [sorted(its[step]) for step in its] == [sorted(steps[step]) for step in steps]
    assert len(ends) == 3
    for end in ends:
        assert end["weights"] == pytest.approx(whole["weights"], abs=tolerance)
        assert (
            "elastic: 3 of 4 processes, policy keep_global_batch; 4 accumulation" in end["explain"]
        )


@pytest.mark.soak
@pytest.mark.dist
def test_deepspeed_continues_on_4_2_and_3_machines_with_other_global_batches(
    tmp_path: Path,
) -> None:
    """DeepSpeed can't change the accumulation steps. It reads the states in its universal format."""
    options = "--use_deepspeed", "--zero_stage", "2", "--elastic_policy", "scale"
    its, ends = run_on_4_2_and_3_machines(tmp_path / "elastic", *options)
    assert len(ends) == 3
    per_process = 2 * 3  # batch size and accumulation steps
    sizes = [len(its[step]) // per_process for step in sorted(its)]
    assert sizes[:15] == [4] * 6 + [2] * 8 + [3]
    samples = [sample for step in sorted(its) for sample in its[step]]
    assert sorted(samples) == sorted([*range(240), *range(240)])  # two epochs


def test_global_batch_must_be_divisible_by_the_processes(tmp_path: Path) -> None:
    environment = clean_environment(
        ACCELERATE_ELASTIC_POLICY="keep_global_batch", ACCELERATE_ELASTIC_PROCESSES="3"
    )
    code = "from accelerate_core import Accelerator; Accelerator(cpu=True, gradient_accumulation_steps=1)"
    launch = [sys.executable, "-m", "accelerate_core", "launch", "--cpu", "--num_processes", "2"]
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [*launch, "--max_restarts", "3", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "has 3 micro-batches, which can't be divided among 2 processes. It can be on 1, 3." in (
        done.stderr
    )
    assert "Restarting" not in done.stderr  # the next attempt would fail as well


@pytest.mark.parametrize(
    ("steps", "restarted", "warned"), [(1, False, True), (3, False, False), (1, True, False)]
)
def test_sizes_that_end_the_run_are_named_when_it_starts(
    tmp_path: Path, steps: int, restarted: bool, warned: bool
) -> None:
    environment = clean_environment(
        ACCELERATE_ELASTIC_POLICY="keep_global_batch",
        ACCELERATE_ELASTIC_PROCESSES="32",
        ACCELERATE_ELASTIC_MACHINES="2:4",
    )
    if restarted:
        environment["ACCELERATE_ELASTIC_RESTARTED"] = "1"
    code = "from accelerate_core import Accelerator; "
    code += f"Accelerator(cpu=True, gradient_accumulation_steps={steps})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stderr.split())
    words = (
        "This run ends with an error if machines leave or join and 24 processes are left: its global "
        "batch of 32 micro-batches (gradient_accumulation_steps=1 on 32 processes) can't be divided "
        "among them. To continue with any number of machines in --num_machines 2:4, set "
        "gradient_accumulation_steps to a multiple of 3, or set --elastic_policy scale."
    )
    assert text.count("ends with an error") == warned, done.stderr
    assert (words in text) == warned, done.stderr


def test_changes_of_the_machines_are_described() -> None:
    n1, n2, n3 = (Machine(f"n{number}", "process 10") for number in (1, 2, 3))
    assert describe({n1, n2}, {n1, n2, n3}) == "Machines now: 3 (was 2); joined: n3"
    assert describe({n1, n2, n3}, {n1}) == "Machines now: 1 (was 3); left: n2, n3"
    again = Machine("n2", "process 11")
    assert describe({n1, n2}, {n1, again}) == (
        "Machines now: 2 (was 2); joined: n2 (process 11); left: n2 (process 10)"
    )


def test_machine_that_comes_after_the_end_says_so(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    settings = RendezvousParameters("c10d", endpoint, "ended", 1, 2, is_host=True)
    ended = get_rendezvous_handler(settings)
    ended.set_closed()
    script = tmp_path / "train.py"
    script.touch()
    command = [sys.executable, "-m", "accelerate_launch.agent", "--nnodes", "1:2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "ended"]
    command += ["--rdzv_conf", "is_host=false", "--local_addr", "127.0.0.1", "--", str(script)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: this machine can't take part in the run, because the run has already ended."
    )
    assert "Traceback" not in done.stderr


def test_machine_that_waits_when_the_run_ends_has_lost_its_connection(tmp_path: Path) -> None:
    port = free_port()
    code = (
        "import time, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False)\n"
        "print('ready', flush=True)\n"
        "time.sleep(120)\n"
    )
    script = tmp_path / "train.py"
    script.touch()
    command = [sys.executable, "-m", "accelerate_launch.agent", "--nnodes", "2:2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv_id", "waiting", "--rdzv_conf", "is_host=false", "--", str(script)]
    store = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    waiting = None
    try:
        assert store.stdout is not None
        assert store.stdout.readline() == b"ready\n"
        waiting = subprocess.Popen(
            command, env=clean_environment(), stderr=subprocess.PIPE, text=True
        )
        assert waiting.stderr is not None
        assert "Still waiting" in waiting.stderr.readline()
        store.kill()
        _, errors = waiting.communicate(timeout=60)
    finally:
        for process in filter(None, (store, waiting)):
            process.kill()
            process.wait(10)
    assert waiting.returncode == 1
    assert "Error: this machine lost the connection to the others at machine 0" in errors
    assert errors.splitlines()[-1] == "The run has ended, or machine 0 was lost."


def test_policy_without_a_range_is_refused() -> None:
    words = (
        r"elastic_policy='scale' \(command line --elastic_policy\) has no effect, because num_mach"
    )
    with pytest.raises(ConfigurationError, match=words):
        decide({"elastic_policy": "scale", "num_processes": 2, "cpu": True}, {})


ELASTIC = ("--num_machines", "2:4", "--num_processes", "8", "--main_process_ip", "n0")


def test_range_of_machines_is_passed_to_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = run_cli("launch", "--cpu", "--dry_run", "--explain", *ELASTIC, str(script), forked=True)
    assert done.returncode == 0, done.stderr
    for words in (
        "--nnodes 2:4",
        "--rdzv_backend c10d",
        "--nproc_per_node 2",
        "--max_restarts 100",
    ):
        assert words in done.stdout, done.stdout
    assert re.search(r"min_machines\s+2\s+command line --num_machines", done.stderr)
    assert re.search(r"rdzv_backend\s+c10d\s+num_machines is a range", done.stderr)


@pytest.mark.parametrize("value", ["2:4", "'2:4'"])
def test_range_of_machines_in_a_config_file(value: str) -> None:
    text = f"num_machines: {value}\nnum_processes: 8\nmain_process_ip: n0\nuse_cpu: true\n"
    chosen = decide({}, {}, parse_config(text, Path("c.yaml"))).chosen
    assert (chosen["min_machines"].value, chosen["num_machines"].value) == (2, 4)
    assert chosen["num_machines"].origin == "c.yaml line 1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--num_machines", "4:1"),
            "begins with the larger number. Write the fewest machines first: 1:4",
        ),
        (("--num_machines", "0:2"), "must be at least 1"),
        (("--num_machines", "0"), "must be at least 1"),
        (("--num_machines", "a:b"), "or a range of the form MIN:MAX, such as 2:4"),
        (("--num_machines", "1:2:3"), "or a range of the form MIN:MAX, such as 2:4"),
        (("--num_machines", "1:"), "or a range of the form MIN:MAX, such as 2:4"),
        ((*ELASTIC, "--rdzv_backend", "static"), "rdzv_backend='static' (command line"),
        (
            (*ELASTIC, "--launcher", "mpirun"),
            "needs the launcher torchrun, srun or ray, but launcher='mpirun' (command line",
        ),
        ((*ELASTIC, "--num_processes", "6"), "is not divisible by num_machines=4"),
    ],
)
def test_impossible_ranges_are_refused(options: tuple[str, ...], words: str) -> None:
    done = run_cli("launch", "--cpu", "--dry_run", *options, str(ELASTIC_WORKER), "x", forked=True)
    assert done.returncode != 0
    assert words in done.stderr
    assert "command line --num_" in done.stderr or "rdzv_backend" in done.stderr


def test_ranks_of_a_scheduler_refuse_a_range() -> None:
    step = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    step |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigurationError, match="has already started a fixed number of ranks"):
        decide({"num_machines": "1:2", "cpu": True}, step)
