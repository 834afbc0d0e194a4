"""`accelerate-core test`: check that this machine can train as it is configured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from accelerate_core.plugin import PluginError, PluginRecord, console, disabled_names, installed
from accelerate_launch.commands.click_options import CONTEXT, GroupedCommand, launch_options
from accelerate_launch.commands.launch import print_reasons
from accelerate_launch.commands.tables import print_table
from accelerate_launch.devices import count_accelerators
from accelerate_launch.plan import counted
from accelerate_launch.planning import find_config, make_plan
from accelerate_launch.starting import child_environment, command_of

_SELF_CHECK = "accelerate_launch.commands.self_check"


@click.command("test", cls=GroupedCommand, context_settings=CONTEXT)
@launch_options
@click.option(
    "--timeout", type=float, default=300.0, help="Stop the check after this many seconds."
)
@click.option("--matrix", is_flag=True, help="Run the check for every installed backend.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    config_file: str | None, timeout: float, matrix: bool, as_json: bool, **given: Any
) -> None:
    """Run a short self-check, with the options of launch.

    Without accelerators, it uses two processes on the CPU. It checks ranks, collectives on nested
    data, exactly-once data loading, training against plain PyTorch, and saving. Exits with status 1
    if a check fails.
    """
    environ = dict(os.environ)
    config = find_config(config_file, environ)
    if given["num_processes"] is None and (config is None or config.get("num_processes") is None):
        forced = given["cpu"] or environ.get("ACCELERATE_USE_CPU")
        if forced or not (given["multi_gpu"] or given["gpu_ids"] or count_accelerators(environ)):
            given["num_processes"] = 2
            given["cpu"] = True
    given["module"] = True
    if not matrix:
        made = {"": _check(given, config, environ, timeout)}
    else:
        made = {
            name: _check({**given, **more}, config, environ, timeout) for name, more in _backends()
        }
    if as_json:
        said = {name: one.as_dict() for name, one in made.items()}
        click.echo(json.dumps(said if matrix else said[""], indent=2))
    elif matrix:
        _print_matrix(made)
    else:
        _print(made[""])
    sys.exit(0 if all(one.passed for one in made.values()) else 1)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one self-check: a result for each finished check, exit status and output."""

    results: list[dict[str, Any]]
    status: int
    output: str

    @property
    def passed(self) -> bool:
        """Whether the run succeeded and no check failed."""
        failed = any(result["error"] for result in self.results)
        return bool(self.results) and self.status == 0 and not failed

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {"passed": self.passed, "checks": self.results, "output": self.output}


def _backends() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the installed backends, each with the options that select it.

    Elastic backends are left out, because their processes are not the ranks of one world.
    """
    for one in installed().of_kind("backend"):
        if one.name in disabled_names():
            continue
        if _is_elastic(one):
            click.echo(f"{one.name} is not checked: its processes form several worlds.", err=True)
            continue
        alone = {"num_processes": 1} if one.name == "single" else {}
        yield one.name, {"backend": one.name, **alone}


def _is_elastic(record: PluginRecord) -> bool:
    try:
        backend = record.load()
    except PluginError:  # the check of this backend reports it
        return False
    return bool(backend.supports.get("elastic"))


def _check(
    given: Mapping[str, Any], config: Any, environ: Mapping[str, str], timeout: float
) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        plan = make_plan(_SELF_CHECK, [str(file)], given, environ, config)
        started = counted(plan.num_processes, "process")
        click.echo(f"Running the self-check on {started}, about 15 seconds ...", err=True)
        if given["explain"]:
            print_reasons(plan, environ)
        child = subprocess.Popen(
            command_of(plan),
            env=child_environment(plan, environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = _watched(child, file, timeout)
        _, results = _written(file)
    return Outcome(results, child.returncode, output)


def _watched(child: subprocess.Popen[str], file: Path, timeout: float) -> str:
    """Return the output of the processes. On a terminal, a progress bar shows the current check."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    shown = console(stderr=True)
    hidden = not sys.stderr.isatty()
    deadline = time.monotonic() + timeout
    with progress.Progress(*columns, console=shown, transient=True, disable=hidden) as bar:
        task = bar.add_task("starting", total=None)
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return child.communicate(timeout=0.2)[0]
            names, results = _written(file)
            if len(results) < len(names):
                what = names[len(results)]
                bar.update(task, description=what, total=len(names), completed=len(results))
        child.terminate()  # torch's agent stops its ranks on this signal
        try:
            output, _ = child.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    return f"{output}\nStopped after {timeout:g} seconds (--timeout)."


def _written(file: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of all checks and the results so far, each read from one line."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
    names, *results = [json.loads(line) for line in whole] or [[]]
    return names, results


def _print(one: Outcome) -> None:
    rows = ((row["name"], _verdict(row), row["error"] or row["detail"]) for row in one.results)
    print_table(("check", "result", "detail"), rows, title="self-check")
    if not one.passed:
        click.echo(one.output.rstrip(), err=True)
        click.echo(f"The self-check failed (exit status {one.status}).", err=True)


def _verdict(row: Mapping[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "not run", "red"
    return ("failed", "red") if row["error"] else (f"passed, {row['seconds']:.2f} s", "green")


def _print_matrix(made: Mapping[str, Outcome]) -> None:
    """Print a table with a row per check and a column per backend, then the failures."""
    found = {(name, row["name"]): row for name, one in made.items() for row in one.results}
    rows = (
        (check, *(_verdict(found.get((name, check))) for name in made))
        for check in dict.fromkeys(check for _, check in found)
    )
    print_table(("check", *made), rows, title="self-check of every backend")
    for name, one in made.items():
        errors = [f"{row['name']}: {row['error']}" for row in one.results if row["error"]]
        for error in errors:
            click.echo(f"{name}, {error}", err=True)
        if not one.passed and not errors:
            click.echo(f"{name}: {one.output.rstrip()}", err=True)
        if not one.passed:
            click.echo(f"{name}: the self-check failed (exit status {one.status}).", err=True)
