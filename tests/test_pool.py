"""Processes forked by the pool behave like those of a launch: environment, arguments, exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pool
import pytest
from support import RESULTS_VARIABLE, clean_environment, run_workers
from warm_python import warm_python

from accelerate_testing import processes

WORKER = """
import os, random, sys, torch, threading
import numpy
from worker import write_result
found = [dict(os.environ), sys.argv, sys.path, os.getcwd(), os.getsid(0) == os.getpid()]
threads = torch.get_num_threads(), threading.active_count(), os.path.exists("/proc/self/fd/3")
drawn = random.random(), numpy.random.rand(), torch.initial_seed()
write_result([*found, threads, __name__, __file__, hash("a"), *drawn])
"""
#: Variables that differ between runs.
OWN = (RESULTS_VARIABLE, "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


@pytest.mark.dist
def test_forked_rank_has_the_same_environment_as_with_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "worker_of_two.py"
    script.write_text(WORKER)
    found, drawn = [], []
    for launched in (True, False, False):
        run = run_workers(script, 2, ["a", 1], env={"MINE": "1"}, launched=launched).checked()
        for rank in run.results:
            drawn += [rank.pop() for _ in range(3)]
            assert all(rank[0].pop(name) for name in OWN)
            rank[0].pop(processes.MARK, None)  # identifies processes of a launch
        hashes = {rank.pop() for rank in run.results}
        assert len(hashes) == 2, "equal hashes would hide code that depends on them"
        found.append(run.results)
    assert found[0] == found[1] == found[2]
    assert len(set(drawn)) == 18, "a fork has the random numbers of its parent"


ENDINGS = {
    "raise ValueError('x')": (1, "ValueError: x"),
    "sys.exit('said')": (1, "said"),
    "sys.exit(7)": (7, ""),
    "sys.exit()": (0, ""),
    "os._exit(9)": (9, ""),
    "os.kill(os.getpid(), 9)": (-9, ""),
    "threading.Timer(0.1, lambda: print('late', file=sys.stderr)).start()": (0, "late"),
    "atexit.register(lambda: print('last', file=sys.stderr))": (0, "last"),
    "print(input())": (1, "EOFError"),
}


@pytest.mark.parametrize("code", ENDINGS)
def test_forked_process_ends_like_a_new_one(code: str) -> None:
    code = f"import atexit, os, sys, threading; print('out', flush=True); {code}"
    done = pool.run(["-c", code], clean_environment(), 60)
    command = [sys.executable, "-c", code]
    real = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    status, message = ENDINGS[code.split("; ", 2)[2]]
    assert (done.returncode, done.stdout) == (real.returncode, real.stdout) == (status, "out\n")
    assert message in done.stderr
    assert done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.dist
def test_failing_rank_ends_the_other_ranks(tmp_path: Path) -> None:
    script = tmp_path / "one_fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': os._exit(3)\ntime.sleep(60)")
    began = time.monotonic()
    run = run_workers(script, 2, timeout=50)
    assert (run.returncode, run.timed_out) == (1, False)
    assert time.monotonic() - began < 40


@pytest.mark.dist
def test_hanging_rank_is_killed_with_its_child_processes(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import signal, subprocess, time\n"
        "from worker import write_result\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "write_result(subprocess.Popen(['sleep', '60']).pid)\n"
        "time.sleep(60)"
    )
    run = run_workers(script, 2, timeout=8)
    assert run.timed_out
    assert not run.ok
    for pid in run.results:
        assert not _runs(pid)
    with pytest.raises(subprocess.TimeoutExpired):
        pool.run(["-c", "import time; time.sleep(60)"], clean_environment(), 1)
    assert pool.run(["-c", "pass"], clean_environment(), 60).returncode == 0, "the pool still works"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_children_of_a_killed_parent_are_marked_as_ended() -> None:
    parent = pool._Parent()
    task = {"command": ["-c", "import time; time.sleep(60)"], "environ": {}, "cwd": "/"}
    with open(os.devnull, "w") as out:
        children = [parent.ask(task, [out.fileno()] * 3) for _ in range(2)]
        for child in children:
            child._has_begun.wait(60)
            assert child.pid
        parent.process.kill()
        for child in children:
            assert child.wait(20) == -9
            os.kill(child.pid, signal.SIGKILL)
        assert parent.ask(task, [out.fileno()] * 3).wait(20) == -9
    parent.close()


def test_modules_and_code_run_like_with_python() -> None:
    done = pool.run(["-m", "json.tool", "--help"], clean_environment(), 60)
    assert done.returncode == 0
    assert "usage: python -m json.tool" in done.stdout
    code = "import json, sys; print(json.dumps([sys.argv, sys.path[0], __name__]))"
    done = pool.run(["-c", code, "x"], clean_environment(), 60)
    assert json.loads(done.stdout) == [["-c", "x"], "", "__main__"]


COMMANDS = """
import subprocess, sys
print(sys.argv, flush=True)
print(input(), flush=True)
code = "import sys; print('from', sys.executable); sys.exit(7)"
print(subprocess.run([sys.executable, "-u", "-c", code]).returncode, flush=True)
print(subprocess.run([sys.executable, "--version"], capture_output=True, text=True).stdout)
"""


def test_warm_python_forks_commands_and_their_children(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(COMMANDS)
    python = str(warm_python())
    done = subprocess.run(
        [python, "typed.py", "a b"],
        cwd=tmp_path,
        env=clean_environment(),
        input="given\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    version = f"Python {sys.version.split()[0]}"
    assert done.stderr == ""
    assert done.stdout.split("\n") == [
        "['typed.py', 'a b']", "given", f"from {python}", "7", version, "", "",
    ]  # fmt: skip


def test_warm_python_forwards_signals_and_the_exit_status() -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); print('ready', flush=True)"
    code = f"import signal, sys, time; {code}; time.sleep(60)"
    for number, status in ((signal.SIGTERM, 9), (signal.SIGUSR1, -signal.SIGUSR1)):
        command = [str(warm_python()), "-c", code]
        with subprocess.Popen(
            command, env=clean_environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(60) == status


def test_killing_warm_python_kills_the_forked_process() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        [str(warm_python()), "-c", code],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        assert forked != process.pid
        process.kill()
        process.wait(20)
    until = time.monotonic() + 20
    while _runs(forked) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(forked)
