"""A wrong address of machine 0 is an error within seconds, but a late start is not an error."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from support import clean_environment

from accelerate_core.config.files import ConfigFile, parse_config
from accelerate_core.errors import ConfigurationError
from accelerate_launch import agent, machine_0
from accelerate_launch.devices import get_free_port
from accelerate_launch.machine_0 import MachineZero, find_machine_0, resolve, split_endpoint
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.planning import make_plan
from accelerate_launch.torchrun import TorchrunLauncher

SOURCE = "main_process_ip from config.yaml line 3"
#: The setting that made a machine number 0, as the launcher describes it.
CLAIM = "command line --machine_rank 0"
#: An address that is reserved for documentation (RFC 5737), so no test machine has it.
ELSEWHERE = "198.51.100.1"
#: The launch command on one of two machines.
LAUNCH = [sys.executable, "-m", "accelerate_core.cli", "launch", "--cpu"]
LAUNCH += ["--num_machines", "2", "--num_processes", "2"]


def machine(
    port: int, host: str = "127.0.0.1", backend: str = "static", **conf: Any
) -> MachineZero:
    return MachineZero(host, port, SOURCE, backend, conf)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text("print('trained')\n")
    return subprocess.Popen(
        [*LAUNCH, *arguments, "train.py"],
        cwd=folder,
        env=clean_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_unresolvable_address_is_an_immediate_error(tmp_path: Path, backend: str) -> None:
    began = time.monotonic()
    address = ["--main_process_ip", "no-such-host.invalid", "--main_process_port", "29511"]
    run = start(tmp_path, "--machine_rank", "1", *address, "--rdzv_backend", backend)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - began < 15
    assert "host name 'no-such-host.invalid' of machine 0, port 29511" in said
    assert "main_process_ip from command line --main_process_ip" in said
    assert "Traceback" not in said


def test_scheduler_rank_does_not_wait_for_an_unresolvable_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    done = subprocess.run(
        [*LAUNCH[:5], "train.py"],
        cwd=tmp_path,
        env=clean_environment(**size, **rank, MASTER_ADDR="no-such-host.invalid"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "'no-such-host.invalid' of machine 0" in done.stderr
    assert "MASTER_ADDR from Open MPI" in done.stderr


def test_silent_name_service_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_0, "_RESOLVE", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3) or [])
    with pytest.raises(OSError, match="no name service answered"):
        resolve("somewhere", 1)


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port on which connections hang, because its queue is full and nothing accepts them."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        yield port


def test_silent_machine_0_is_an_error_with_the_source_of_the_address() -> None:
    began = time.monotonic()
    with silent_port() as port, pytest.raises(ConfigurationError) as failure:
        find_machine_0(machine(port), is_machine_0=False)
    assert time.monotonic() - began < 11
    assert f"machine 0 at 127.0.0.1, port {port} ({SOURCE}): it does not answer" in str(
        failure.value
    )


def test_explicit_timeout_makes_machines_wait_for_a_silent_machine_0() -> None:
    began = time.monotonic()
    with silent_port() as port, pytest.raises(ConfigurationError):
        find_machine_0(machine(port, timeout="9"), is_machine_0=False)
    assert time.monotonic() - began > 8


@pytest.mark.parametrize(("backend", "key"), [("static", "timeout"), ("c10d", "join_timeout")])
def test_waiting_for_machine_0_is_announced_and_limited(
    capfd: pytest.CaptureFixture[str], backend: str, key: str
) -> None:
    nowhere = machine(get_free_port(), backend=backend, **{key: "3"})
    with pytest.raises(ConfigurationError, match=r"nothing listens there yet \(tried for 3 s\)"):
        find_machine_0(nowhere, is_machine_0=False)
    said = capfd.readouterr().err
    assert f"Waiting for {nowhere}: nothing listens there yet" in said
    assert f"gives up after 3 s (--rdzv_conf {key}=SECONDS)" in said


def test_another_service_on_the_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_0, "UNANSWERED", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    caller.close()

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"another service answers there: 'SSH-2\.0"):
            find_machine_0(machine(port), is_machine_0=False)


@pytest.mark.parametrize("libuv", [True, False])
def test_torchs_store_is_recognised_and_keeps_working(libuv: bool) -> None:
    from torch.distributed import TCPStore

    wait = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, use_libuv=libuv)
    find_machine_0(machine(store.port), is_machine_0=False)
    store.set("key", "value")
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=wait)
    assert other.get("key") == b"value"


def test_machine_0_with_another_hosts_address_is_a_quick_error(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    address = ["--main_process_ip", ELSEWHERE, "--main_process_port", str(get_free_port())]
    run = start(tmp_path, "--machine_rank", "0", *address)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - began < 15
    assert f"This is machine 0 at {ELSEWHERE}, port {address[-1]} (main_process_ip from" in said
    assert "cannot reach itself at that address: " in said
    assert "Traceback" not in said


def test_used_port_of_machine_0_is_an_error_with_its_source(
    tmp_path: Path,
) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
        run = start(tmp_path, "--machine_rank", "0", *address)
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert f"machine 0 at 127.0.0.1, port {port} (main_process_ip from command line" in said
    assert "another process on it uses the port" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_scheduler_rank_does_not_wait_for_a_wrong_address(tmp_path: Path, rank: int) -> None:
    (tmp_path / "train.py").write_text("import accelerate_core; accelerate_core.Accelerator()")
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    here = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    port = str(get_free_port())
    address = {"MASTER_ADDR": ELSEWHERE, "MASTER_PORT": port}
    began = time.monotonic()
    with silent_port() if rank else contextlib.nullcontext() as silent:
        if silent is not None:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent)}
        done = subprocess.run(
            [*LAUNCH[:5], "train.py"],
            cwd=tmp_path,
            env=clean_environment(**size, **here, **address),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert time.monotonic() - began < 15
    where = (
        f"machine 0 at {address['MASTER_ADDR']}, port {address['MASTER_PORT']} (MASTER_ADDR from"
    )
    assert where in done.stderr


def test_machine_0_that_cannot_reach_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_0, "_SELF", 0.5)
    monkeypatch.setattr(machine_0, "is_here", lambda host: False)
    port = get_free_port()
    find_machine_0(machine(port), is_machine_0=True)  # 127.0.0.1 does reach this machine
    with pytest.raises(ConfigurationError, match="cannot reach itself"):
        find_machine_0(machine(port, host=ELSEWHERE), is_machine_0=True)


def test_machine_rank_0_with_another_hosts_address_is_an_error_with_c10d(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    address = ["--main_process_ip", ELSEWHERE, "--main_process_port", str(get_free_port())]
    run = start(tmp_path, "--rdzv_backend", "c10d", "--machine_rank", "0", *address)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - began < 15
    assert "command line --machine_rank 0 makes this machine, " in said
    assert f"{ELSEWHERE}, port {address[-1]} (main_process_ip from command line" in said
    assert "is not an address of this machine" in said
    assert "leave out --machine_rank" in said
    assert "Traceback" not in said


def agent_options(port: int, *conf: str) -> Any:
    endpoint = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    settings = ["--rdzv_conf", ",".join(conf)] if conf else []
    local = ["--nnodes", "2", "--local_addr", "10.0.0.7"]
    return torch.distributed.run.parse_args([*local, *endpoint, *settings, "train.py"])


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every address look like the address of another host that is up."""
    monkeypatch.setattr(agent, "is_here", lambda host: False)
    monkeypatch.setattr(agent, "is_reached_by", lambda machine: False)
    monkeypatch.setattr(machine_0, "_ANOTHER", 1.0)


@pytest.mark.usefixtures("other_host")
def test_machine_rank_0_with_a_wrong_address_suggests_its_own() -> None:
    with pytest.raises(ConfigurationError) as failure:
        agent._find_machine_0(agent_options(get_free_port(), "is_host=false"), SOURCE, CLAIM)
    said = str(failure.value)
    assert f"{CLAIM} makes this machine, " in said
    assert "nothing listens there yet (tried for 1 s)" in said
    assert "--main_process_ip 10.0.0.7" in said
    assert "--rdzv_conf join_timeout=SECONDS" in said


@pytest.mark.usefixtures("other_host")
def test_machine_rank_0_waits_for_another_machine_0_until_the_timeout() -> None:
    began = time.monotonic()
    options = agent_options(get_free_port(), "is_host=false", "join_timeout=3")
    with pytest.raises(ConfigurationError, match="tried for 3 s"):
        agent._find_machine_0(options, SOURCE, CLAIM)
    assert time.monotonic() - began > 2.5


@pytest.mark.usefixtures("other_host")
def test_machine_rank_0_joins_another_machine_that_opened_the_port() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = agent_options(store.port, "is_host=false")
    agent._find_machine_0(options, SOURCE, CLAIM)
    assert options.rdzv_conf == "is_host=false"


def test_machine_rank_0_opens_the_port_if_the_address_is_forwarded_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_0, "is_here", lambda host: False)  # as behind NAT
    options = agent_options(get_free_port(), "is_host=false", "join_timeout=3")
    agent._find_machine_0(options, SOURCE, CLAIM)
    assert options.rdzv_conf == "is_host=true,join_timeout=3"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rdzv_backend": "c10d", "machine_rank": 0}, True),
        ({"rdzv_backend": "c10d"}, False),  # all machines run this command
        ({"rdzv_backend": "c10d", "machine_rank": 1}, False),
        ({"rdzv_backend": "c10d", "machine_rank": 0, "rdzv_conf": "is_host=0"}, False),
        ({"rdzv_backend": "static", "machine_rank": 0}, False),
    ],
)
def test_machine_rank_0_on_the_command_line_is_passed_to_the_agent(
    tmp_path: Path, given: dict[str, Any], told: bool
) -> None:
    command = TorchrunLauncher().launch_command(plan_of(tmp_path, **given))
    assert ("--claim" in command) == told


def test_machine_rank_0_in_a_config_file_is_not_passed_to_the_agent(tmp_path: Path) -> None:
    config = parse_config("machine_rank: 0", tmp_path / "config.yaml")
    plan = plan_of(tmp_path, config, rdzv_backend="c10d")
    assert "--claim" not in TorchrunLauncher().launch_command(plan)


def test_loopback_address_is_not_passed_to_other_machines(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, rdzv_backend="c10d", main_process_ip="127.0.1.1")
    assert plan.local_addr is None
    assert "is_host" not in plan.rdzv_conf


def plan_of(folder: Path, config: ConfigFile | None = None, **given: Any) -> LaunchPlan:
    script = folder / "train.py"
    script.write_text("")
    several = {"cpu": True, "num_machines": 2, "num_processes": 2, "main_process_ip": ELSEWHERE}
    return make_plan(str(script), [], {**several, **given}, {}, config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4000", ("node1", 4000)),
        ("node1", ("node1", 29500)),
        ("[fe80::1]:4000", ("fe80::1", 4000)),
    ],
)
def test_endpoints_are_split_into_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert split_endpoint(text) == expected


@pytest.mark.dist
@pytest.mark.parametrize("first", [1, 0], ids=["machine 1 first", "machine 0 first"])
def test_machines_that_start_at_different_times_connect(tmp_path: Path, first: int) -> None:
    port = str(get_free_port())
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    early = start(tmp_path, "--machine_rank", str(first), *address)
    assert early.stdout is not None
    said = early.stdout.readline()
    awaited = "Still waiting for all 2 machines" if first == 0 else "Waiting for machine 0"
    assert said.startswith(awaited)
    assert f"port {port} (main_process_ip from command line" in said
    late = start(tmp_path, "--machine_rank", str(1 - first), *address)
    outputs = [run.communicate(timeout=120)[0] for run in (early, late)]
    assert [run.returncode for run in (early, late)] == [0, 0], outputs
    assert ["trained" in output for output in outputs] == [True, True]


@pytest.mark.dist
def test_sigterm_ends_an_agent_that_waits_for_other_machines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    options = ("--cpu", "--num_machines", "2", "--machine_rank", "0", "--num_processes", "2")
    port = get_free_port()
    address = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(port))
    command = (sys.executable, "-m", "accelerate_core", "launch", *options, *address, "train.py")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE
    )
    with process:
        until = time.monotonic() + 60
        meeting = None
        while meeting is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                meeting = socket.create_connection(("127.0.0.1", port), 1)
            time.sleep(0.2)
        assert meeting is not None
        meeting.close()
        time.sleep(2)  # by then, torch waits for the other machine
        process.terminate()
        assert process.wait(20) in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_name_that_is_unknown_yet_is_waited_for_if_a_time_is_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def late(host: str, port: int) -> list[Any]:
        asked.append(host)
        if len(asked) == 1:
            raise OSError(0, "Name or service not known")
        return []

    monkeypatch.setattr(machine_0, "resolve", late)
    monkeypatch.setattr(machine_0, "check_hosts", lambda _: None)
    find_machine_0(machine(29500, host="pod-0.job", timeout=30), is_machine_0=True)
    assert len(asked) == 2
    assert "its name does not resolve yet" in capfd.readouterr().err
    asked.clear()
    with pytest.raises(ConfigurationError, match="does not resolve"):
        find_machine_0(machine(29500, host="pod-0.job"), is_machine_0=True)
