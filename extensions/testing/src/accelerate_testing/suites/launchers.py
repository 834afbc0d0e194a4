"""What a launcher must do: start each rank once, pass everything on, and report the result."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from accelerate_core.config.provenance import SourcedValue
from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.starting import child_environment, choose_launcher
from accelerate_testing.checks import changed, check
from accelerate_testing.processes import CompletedRun, clean_environment, free_port, run_command

if TYPE_CHECKING:
    from accelerate_testing.context import CheckContext

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
_SAVING = """
import os, signal, sys, time
rank = os.environ.get("RANK", "0")

def save(number, frame):
    time.sleep(1.5)
    open(os.path.join(sys.argv[1], rank + ".saved"), "w").close()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
open(os.path.join(sys.argv[1], rank + ".waits"), "w").close()
time.sleep(100)
"""
#: Each line is one write, as a rank's own log would be.
_WRITING = """
import os, sys, time
rank = os.environ.get("RANK", "0")
for number in range(int(sys.argv[1])):
    for out in (sys.stdout, sys.stderr):
        out.write(f"<{rank} writes line {number} of {out.name}>\\n")
        out.flush()
    time.sleep(0.002)
"""
_LINES = 100
_COUNTED = """
import os, sys
name = "-".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
open(os.path.join(sys.argv[1], name + ".counted"), "a").write("once")
"""
#: More processes than any of the other checks starts, as on a large machine.
MOST_RANKS = 64
_TRAINING = """
import torch
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True, process_group_timeout=30)
total = accelerator.reduce(torch.ones(1), "sum").item()
accelerator.print("TOTAL", accelerator.num_processes, total)
accelerator.end_training()
"""
#: A separate program, like a notebook. Arguments: FOLDER LAUNCHER COUNT START_METHOD.
_FUNCTIONS = """
import json, os, sys
from pathlib import Path
from accelerate_core.config.provenance import SourcedValue
from accelerate_launch.notebook import PrepareForLaunch
from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.starting import choose_launcher

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")

def start(function, args, plan):
    prepared = PrepareForLaunch(function, environment=plan.environment)
    return choose_launcher(plan).launch_function(prepared, args, plan)

def work(folder, failing):
    said = {name: os.environ.get(name) for name in NAMES}
    said["address"] = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    with open(Path(folder, f"{said['RANK'] or 0}.function"), "a") as out:
        out.write(json.dumps(said) + "\\n")
    if failing == (said["RANK"] or "0"):
        raise ValueError("this rank gives up")
    return said["RANK"] or "0"

if __name__ == "__main__":
    folder, launcher, count, method = Path(sys.argv[1]), *sys.argv[2:]
    plan = LaunchPlan(
        Target("work", kind="function"), int(count), launcher=launcher, start_method=method,
        environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
        provenance={"launcher": SourcedValue(launcher, "plugins check")},
    )
    before = dict(os.environ)
    values = start(work, (str(folder), ""), plan)
    texts = [path.read_text() for path in sorted(folder.glob("*.function"))]
    report = {"calls": [json.loads(line) for text in texts for line in text.splitlines()]}
    report["values"] = values
    report["changed"] = [n for n in {*before, *os.environ} if before.get(n) != os.environ.get(n)]
    try:
        start(work, (str(folder), str(int(count) - 1)), plan)
    except Exception as error:
        report["raised"] = f"{type(error).__name__}: {error}"
    (folder / "report").write_text(json.dumps(report))
"""


def _plan(
    ctx: CheckContext, script: str, *arguments: str, counts: tuple[int, ...] = (2,), **fields: Any
) -> LaunchPlan | None:
    """Return a plan with the first of these numbers of processes that it accepts, None if it accepts none."""
    path = ctx.scratch(f"script_{abs(hash(script)) % 10**8}.py")
    path.write_text(script, encoding="utf-8")
    for count in counts:
        plan = LaunchPlan(
            **{"target": Target(str(path), arguments), **fields},
            num_processes=count,
            launcher=ctx.name,
            environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
            provenance={"launcher": SourcedValue(ctx.name, "plugins check")},
        )
        answer = ctx.create().accepts(plan)
        assert isinstance(answer, bool), f"accepts returned {answer!r}, not a bool"
        if answer:
            return plan
    return None


def _run(
    ctx: CheckContext,
    plan: LaunchPlan,
    timeout: float = 45,
    meanwhile: Callable[[], object] = lambda: None,
    **more: str,
) -> CompletedRun:
    command = choose_launcher(plan).launch_command(plan)
    words = isinstance(command, list) and all(isinstance(word, str) for word in command)
    assert words, f"launch_command returned {command!r}, not a list of strings"
    if getattr(ctx.found, "elsewhere", False):
        ctx.skip("its processes run on other machines")
    environ = child_environment(plan, clean_environment(OF_THE_USER="untouched", **more))
    others = [name for name, value in environ.items() if not isinstance(value, str)]
    ctx.equal(others, [], "variables that are not strings")
    return _whole(run_command(command, environ, timeout, meanwhile=meanwhile))


def _whole(run: CompletedRun) -> CompletedRun:
    left = "; ".join(run.left)
    assert not left, f"the launch has ended, but processes that it started still run: {left}"
    return run


@check("launcher", alone=True)
def plans(ctx: CheckContext) -> str:
    """`accepts` returns a bool, and `launch_command` returns a command without side effects."""
    taken = []
    for count in (1, 2):
        plan = _plan(ctx, _SCRIPT, counts=(count,))
        if plan:
            taken.append(str(count))
            before = dict(os.environ)
            ctx.create().launch_command(plan)
            ctx.equal(changed(os.environ, before), [], "variables that launch_command changes")
    if not taken:
        ctx.skip("it accepts neither one process nor two of one machine, without more being said")
    return f"takes {' and '.join(taken)} process(es)"


@check("launcher", alone=True)
def ranks(ctx: CheckContext) -> str:
    """Each rank is started once, with its variables; arguments, environment and directory are kept."""
    arguments = ("--flag", "two words", "ä", "")
    taken = []
    for count in (2, 3):
        port = free_port()
        plan = _plan(
            ctx, _SCRIPT, str(ctx.folder), *arguments, main_process_port=port, counts=(count,)
        )
        if plan is None:
            continue
        run = _run(ctx, plan, 90)
        assert run.ok, f"the launch of {count} failed: {run.story}"
        said = [json.loads(path.read_text()) for path in sorted(ctx.folder.glob("*.rank"))]
        ctx.equal([one["RANK"] for one in said], [str(rank) for rank in range(count)], "ranks")
        for rank, one in enumerate(said):
            for name, value in {
                "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
                "MASTER_PORT": str(port), "precision": "bf16", "arguments": list(arguments),
                "variable": "untouched", "directory": os.getcwd(),
            }.items():  # fmt: skip
                ctx.equal(one[name], value, f"{name} of rank {rank} of {count}")
            ctx.equal(bool(one["MASTER_ADDR"]), True, "there is a MASTER_ADDR")
        taken.append(str(count))
    if not taken:
        ctx.skip("it accepts neither two processes nor three")
    return f"{' and '.join(taken)} ranks"


@check("launcher", alone=True)
def functions(ctx: CheckContext) -> str:
    """Every rank calls a function once, with its variables; if one raises, the error names the rank.

    The values that it returns, if any, are in the order of ranks.
    """
    if not hasattr(ctx.found, "launch_function"):
        ctx.skip("it has no launch_function, so it only starts programs")
    taken = []
    script = ctx.scratch("functions.py")
    script.write_text(_FUNCTIONS, encoding="utf-8")
    environ = {name: text for name, text in os.environ.items() if name != "MASTER_PORT"}
    for method in ("fork", "spawn"):
        fields: dict[str, Any] = {"target": Target("work", kind="function"), "start_method": method}
        plan = _plan(ctx, "", counts=(2, 1), **fields)
        if plan is None:
            continue
        folder = ctx.scratch(method)
        size = str(plan.num_processes)
        folder.mkdir()
        command = [sys.executable, str(script), str(folder), ctx.name, size, method]
        run = _whole(run_command(command, environ, 90))
        assert run.ok, f"launching a function by {method} failed: {run.story}"
        told = json.loads((folder / "report").read_text())
        ctx.equal(told["changed"], [], f"variables that have changed after the launch, by {method}")
        ranks = [str(rank) for rank in range(plan.num_processes)]
        if told["values"] is not None:
            ctx.equal(told["values"], ranks, f"what launch_function returns, by {method}")
        alone = plan.num_processes == 1  # then the variables of ranks are optional
        ctx.equal(
            [alone or one["RANK"] for one in told["calls"]], [alone or rank for rank in ranks],
            f"ranks that called the function, by {method}",
        )  # fmt: skip
        for rank, one in zip(ranks, told["calls"], strict=True):
            whose = {
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "address": True,
            }
            for name, value in {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                **({} if alone else whose),
            }.items():
                ctx.equal(one[name], value, f"{name} of rank {rank} of {size}, by {method}")
        raised = told.get("raised", "")
        assert raised, (
            f"a function raised on rank {ranks[-1]}, but the launch by {method} succeeded"
        )
        named = alone or re.search(rf"(?i)\b(rank|process)\D{{0,12}}{ranks[-1]}\b", raised)
        assert named, (
            f"the error by {method} does not name rank {ranks[-1]}, which failed: {raised}"
        )
        seen = "this rank gives up" in raised + run.stderr + run.stdout
        assert seen, f"the exception of the function is not shown, by {method}: {run.story}"
        taken.append(f"{size} by {method}")
    if not taken:
        ctx.skip("it accepts neither one process nor two")
    return ", ".join(taken)


@check("launcher", alone=True)
def targets(ctx: CheckContext) -> str:
    """If it accepts modules and programs, it runs them as such."""
    (ctx.folder / "suites_module.py").write_text(
        "import sys; print('a module', __name__, __spec__ is not None, sys.argv[1:])"
    )
    path = os.pathsep.join(filter(None, (str(ctx.folder), os.environ.get("PYTHONPATH", ""))))
    taken = []
    for kind, target, said in (
        ("module", Target("suites_module", ("x y",), "module"), "a module __main__ True ['x y']"),
        ("program", Target("printf", ("a%s\\n", " program"), "program"), "a program"),
    ):
        plan = _plan(ctx, "", target=target, counts=(1, 2))
        if plan:
            run = _run(ctx, plan, PYTHONPATH=path)
            seen = any(said in line for line in run.stdout.splitlines())
            assert seen, f"a {kind} does not run as one: {run.story}"
            taken.append(f"a {kind}")
    if not taken:
        ctx.skip("it only accepts scripts")
    return ", ".join(taken)


@check("launcher", alone=True)
def training(ctx: CheckContext) -> None:
    """The ranks connect to each other and run a collective."""
    plan = _plan(ctx, _TRAINING)
    if plan is None:
        ctx.skip("it does not accept two processes")
    ctx.need_several()
    run = _run(ctx, plan, 90)
    assert "TOTAL 2 2.0" in run.stdout, f"two ranks did not add up: {run.story}"


@check("launcher", alone=True)
def failure(ctx: CheckContext) -> str:
    """If a rank fails, the others are ended, and the exit status and the reason are shown."""
    told = []
    for rank in ("0", "1"):
        plan = _plan(ctx, _FAILING, rank)
        if plan is None:
            ctx.skip("it does not accept two processes")
        run = _run(ctx, plan)
        assert not run.timed_out, f"rank {rank} failed, but the launch waits for the other forever"
        ctx.equal(run.returncode != 0, True, f"the launch fails if rank {rank} fails")
        ctx.equal("this rank gives up" in run.stderr + run.stdout, True, "the reason is shown")
        told.append(f"status {run.returncode} after {run.seconds:.1f} s")
    return "; ".join(told)


@check("launcher", alone=True)
def terminated(ctx: CheckContext) -> str:
    """SIGTERM, with which a cluster ends a job, ends the launch and all of its ranks."""
    return _ends_on(ctx, signal.SIGTERM)


@check("launcher", alone=True)
def interrupted(ctx: CheckContext) -> str:
    """SIGINT, as from Ctrl-C, ends the launch and all of its ranks."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background commands like that, and their children would ignore Ctrl-C as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return _ends_on(ctx, signal.SIGINT)


@check("launcher", alone=True)
def preempted(ctx: CheckContext) -> str:
    """SIGTERM reaches every rank, the launch waits while they save, and returns their status 75."""
    folder = ctx.scratch("saving")
    run = _signalled(ctx, _SAVING, signal.SIGTERM, folder)
    assert not run.timed_out, f"the launch does not end after its ranks: {run.story}"
    started, saved = (len(list(folder.glob(f"*.{what}"))) for what in ("waits", "saved"))
    ctx.equal(saved, started, "ranks that could save after SIGTERM")
    # Schedulers start a run again if they see this status.
    ctx.equal(run.returncode, 75, "exit status of a launch whose ranks ended with 75")
    return f"{saved} ranks saved"


@check("launcher", alone=True)
def output(ctx: CheckContext) -> str:
    """Every line of every rank is shown once, whole, and in the rank's order."""
    plan = _plan(ctx, _WRITING, str(_LINES), counts=(2, 1))
    if plan is None:
        ctx.skip("it accepts neither one process nor two")
    run = _run(ctx, plan, 90)
    assert run.ok, f"the launch failed: {run.story}"
    # A launcher may put a prefix before each line, or show both streams on one.
    written = re.findall(r"<(\d+) writes line (\d+) of <(\w+)>>", run.stdout + run.stderr)
    for rank in map(str, range(plan.num_processes)):
        for name in ("stdout", "stderr"):
            numbers = [int(number) for one, number, out in written if (one, out) == (rank, name)]
            whole = list(range(_LINES))
            ctx.equal(len(numbers), _LINES, f"lines of rank {rank} on {name}")
            assert numbers == whole, f"the lines of rank {rank} on {name} are not in order"
    return f"{len(written)} lines of {plan.num_processes} ranks"


@check("launcher", alone=True)
def many_ranks(ctx: CheckContext) -> str:
    """A launch of 64 processes starts every rank once. The option `most_ranks` sets a lower number."""
    count = int(ctx.options.get("most_ranks", MOST_RANKS))
    plan = _plan(ctx, _COUNTED, str(ctx.folder), counts=(count,))
    if plan is None:
        ctx.skip(f"it does not accept {count} processes")
    run = _run(ctx, plan, 150)
    assert run.ok, f"the launch failed: {run.story}"
    found = {path.stem: path.read_text() for path in ctx.folder.glob("*.counted")}
    expected = {f"{rank}-{rank}-{count}": "once" for rank in range(count)}
    missing = len(expected.keys() - found.keys())
    assert not missing, f"{missing} of {count} ranks did not run with their own variables"
    ctx.equal(found, expected, "ranks that ran, and how often")
    return f"{count} ranks in {run.seconds:.1f} s"


def _ends_on(ctx: CheckContext, number: signal.Signals) -> str:
    """Check that a signal ends a launch whose ranks wait, with an exit status other than 0."""
    run = _signalled(ctx, _WAITING, number, ctx.scratch(number.name.lower()))
    assert not run.timed_out, f"the launch keeps running after {number.name}"
    ctx.equal(run.returncode != 0, True, f"the launch fails after {number.name}")
    return f"status {run.returncode} after {run.seconds:.1f} s"


def _signalled(
    ctx: CheckContext, script: str, number: signal.Signals, folder: Path
) -> CompletedRun:
    """Start a script with an empty folder, and send the launch a signal once all ranks wait."""
    folder.mkdir()
    plan: Any = _plan(ctx, script, str(folder), counts=(2, 1))
    if plan is None:
        ctx.skip("it accepts neither one process nor two")
    before = _children()
    told: list[psutil.Process] = []

    def send() -> None:
        if not told and len(list(folder.glob("*.waits"))) == plan.num_processes:
            told.extend(_children() - before)
            for one in told:
                one.send_signal(number)

    run = _run(ctx, plan, 60, send)
    assert told, f"the ranks did not start: {run.story}"
    return run


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@check("launcher", alone=True)
def one_process(ctx: CheckContext) -> None:
    """A launch of one process runs the script and returns its exit status."""
    plan = _plan(ctx, "import sys; sys.exit(7)", counts=(1,))
    good = _plan(ctx, "print('fine', __name__)", counts=(1,))
    if plan is None or good is None:
        ctx.skip("it does not accept one process")
    ctx.equal(_run(ctx, plan).returncode, 7, "exit status of a script that left with 7")
    run = _run(ctx, good)
    # A launcher may put a prefix before each line.
    fine = any("fine __main__" in line for line in run.stdout.splitlines())
    assert fine, f"the output of the script is not shown: {run.story}"
