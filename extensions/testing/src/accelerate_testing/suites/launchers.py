"""What a launcher keeps: it starts each rank once, hands everything on, and tells the outcome."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from accelerate_testing.checks import changed, check
from accelerate_testing.lab import Lab
from accelerate_testing.processes import Run, clean_environment, free_port, run_command

_SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
said = {name: os.environ.get(name) for name in names}
said["arguments"] = sys.argv[2:]
said["precision"] = os.environ.get("ACCELERATE_MIXED_PRECISION")
said["variable"] = os.environ.get("OF_THE_USER")
said["directory"] = os.getcwd()
open(os.path.join(sys.argv[1], os.environ.get("RANK", "0") + ".rank"), "w").write(json.dumps(said))
"""
_FAILING = """
import os, sys, time
if os.environ.get("RANK") == sys.argv[1]:
    sys.exit("this rank gives up")
time.sleep(60)
"""
_WAITING = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ.get("RANK", "0") + ".waits"), "w").close()
time.sleep(100)
"""
_TRAINING = """
import torch
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True, process_group_timeout=30)
total = accelerator.reduce(torch.ones(1), "sum").item()
accelerator.print("TOTAL", accelerator.num_processes, total)
accelerator.end_training()
"""


def _plan(
    lab: Lab,
    script: str,
    *arguments: str,
    processes: int = 2,
    port: int | None = None,
    target: Any = None,
) -> Any:
    from accelerate_core.config.provenance import Because
    from accelerate_launch.plan import LaunchPlan, Target

    path = lab.scratch(f"script_{abs(hash(script)) % 10**8}.py")
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    return LaunchPlan(
        target=target or Target(str(path), arguments),
        num_processes=processes,
        main_process_port=port,
        launcher=lab.name,
        environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
        because={"launcher": Because(lab.name, "plugins check")},
    )


def _run(
    lab: Lab, plan: Any, timeout: float = 90, meanwhile: Callable[[], object] = lambda: None
) -> Run:
    from accelerate_launch.start import child_environment, choose_launcher

    command = choose_launcher(plan).launch_command(plan)
    lab.equal(
        isinstance(command, list) and all(isinstance(word, str) for word in command),
        True,
        f"launch_command gives a list of words, not {command!r}",
    )
    environ = child_environment(plan, clean_environment(OF_THE_USER="untouched"))
    words = [name for name, value in environ.items() if not isinstance(value, str)]
    lab.equal(words, [], "variables that are no text")
    return run_command(command, environ, timeout, meanwhile=meanwhile)


@check("launcher", place="alone")
def plans(lab: Lab) -> str | None:
    """It answers whether it takes a plan, and makes a command without starting anything."""
    launcher = lab.found()
    taken = []
    for processes in (1, 2):
        plan = _plan(lab, _SCRIPT, processes=processes)
        answer = launcher.accepts(plan)
        lab.equal(isinstance(answer, bool), True, f"accepts answers with a bool, not {answer!r}")
        if answer:
            taken.append(str(processes))
            before = dict(os.environ)
            launcher.launch_command(plan)
            lab.equal(changed(os.environ, before), [], "variables launch_command changes")
    if not taken:
        lab.skip("it takes neither one process nor two of one machine, without more being said")
    return f"takes {' and '.join(taken)} process(es)"


@check("launcher", place="alone")
def ranks(lab: Lab) -> str | None:
    """Each rank is started once, with its variables; arguments, environment and directory are kept."""
    arguments = ("--flag", "two words", "ä", "")
    taken = []
    for count in (2, 3):
        port = free_port()
        plan = _plan(lab, _SCRIPT, str(lab.folder), *arguments, port=port, processes=count)
        if not lab.found().accepts(plan):
            continue
        run = _run(lab, plan)
        if not run.ok:
            raise AssertionError(f"the launch of {count} failed: {run.story}")
        said = [json.loads(path.read_text()) for path in sorted(lab.folder.glob("*.rank"))]
        lab.equal([one["RANK"] for one in said], [str(rank) for rank in range(count)], "ranks")
        for rank, one in enumerate(said):
            for name, value in {
                "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
                "MASTER_PORT": str(port), "precision": "bf16", "arguments": list(arguments),
                "variable": "untouched", "directory": os.getcwd(),
            }.items():  # fmt: skip
                lab.equal(one[name], value, f"{name} of rank {rank} of {count}")
            lab.equal(bool(one["MASTER_ADDR"]), True, "there is a MASTER_ADDR")
        taken.append(str(count))
    if not taken:
        lab.skip("it takes neither two processes nor three")
    return f"{' and '.join(taken)} ranks"


@check("launcher", place="alone")
def targets(lab: Lab) -> str | None:
    """A module and a program are run as such, where it takes them."""
    from accelerate_launch.plan import Target

    (lab.folder / "suites_module.py").write_text(
        "import sys; print('a module', __name__, __spec__ is not None, sys.argv[1:])"
    )
    path = os.environ.get("PYTHONPATH", "")
    taken = []
    for kind, target, said in (
        ("module", Target("suites_module", ("x y",), "module"), "a module __main__ True ['x y']"),
        ("program", Target("printf", ("a%s\\n", " program"), "program"), "a program"),
    ):
        plan = _plan(lab, "", processes=1, target=target)
        plan.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(lab.folder), path)))
        if not lab.found().accepts(plan):
            plan = replace(plan, num_processes=2)
            if not lab.found().accepts(plan):
                continue
        run = _run(lab, plan, timeout=45)
        if not any(said in line for line in run.stdout.splitlines()):
            raise AssertionError(f"a {kind} is not run as one: {run.story}")
        taken.append(f"a {kind}")
    if not taken:
        lab.skip("it takes scripts only")
    return ", ".join(taken)


@check("launcher", place="alone")
def training(lab: Lab) -> str | None:
    """The ranks find each other and run a collective."""
    from accelerate_testing.suites.precisions import some_backend

    plan = _plan(lab, _TRAINING)
    if not lab.found().accepts(plan):
        lab.skip("it does not take two processes")
    some_backend()
    run = _run(lab, plan)
    if "TOTAL 2 2.0" not in run.stdout:
        raise AssertionError(f"two ranks did not add up: {run.story}")
    return None


@check("launcher", place="alone")
def failure(lab: Lab) -> str | None:
    """Where any rank fails, the others are ended, and the exit status and the reason are seen."""
    told = []
    for rank in ("0", "1"):
        plan = _plan(lab, _FAILING, rank)
        if not lab.found().accepts(plan):
            lab.skip("it does not take two processes")
        run = _run(lab, plan, timeout=45)
        if run.timed_out:
            raise AssertionError(f"rank {rank} failed, and the launch waits for ever for the other")
        lab.equal(run.returncode != 0, True, f"a launch whose rank {rank} failed has a status")
        lab.equal("this rank gives up" in run.stderr + run.stdout, True, "the reason is seen")
        told.append(f"status {run.returncode} after {run.seconds:.1f} s")
    return "; ".join(told)


@check("launcher", place="alone")
def terminated(lab: Lab) -> str | None:
    """SIGTERM to the launch, by which a cluster ends a job, ends it and all of its ranks."""
    plan = _plan(lab, _WAITING, str(lab.folder))
    if not lab.found().accepts(plan):
        plan = _plan(lab, _WAITING, str(lab.folder), processes=1)
        if not lab.found().accepts(plan):
            lab.skip("it takes neither one process nor two")
    before = _children()
    told: list[psutil.Process] = []

    def send() -> None:
        if not told and len(list(lab.folder.glob("*.waits"))) == plan.num_processes:
            told.extend(_children() - before)
            for one in told:
                one.send_signal(signal.SIGTERM)

    run = _run(lab, plan, timeout=60, meanwhile=send)
    if not told:
        raise AssertionError(f"the ranks did not start: {run.story}")
    if run.timed_out:
        raise AssertionError("the launch goes on after SIGTERM")
    if run.left:
        raise AssertionError(f"after SIGTERM these still run: {'; '.join(run.left)}")
    lab.equal(run.returncode != 0, True, "exit status of a launch that was terminated")
    return f"status {run.returncode} after {run.seconds:.1f} s"


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@check("launcher", place="alone")
def one_process(lab: Lab) -> str | None:
    """A launch of one process runs the script, and its exit status is the script's."""
    plan = _plan(lab, "import sys; sys.exit(7)", processes=1)
    if not lab.found().accepts(plan):
        lab.skip("it does not take one process")
    run = _run(lab, plan, timeout=45)
    lab.equal(run.returncode, 7, "exit status of a script that left with 7")
    good = _run(lab, _plan(lab, "print('fine', __name__)", processes=1), timeout=45)
    # A launcher may say in each line whose it is.
    if not any("fine __main__" in line for line in good.stdout.splitlines()):
        raise AssertionError(f"what the script printed is lost: {good.story}")
    return None
