"""`accelerate-core test`: is this machine, as it is set up, fit to train?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from accelerate_core.builtin.console import console
from accelerate_launch.commands.options import GroupedCommand, launch_options, underscores

_SELF_CHECK = "accelerate_launch.commands.self_check"


@click.command(
    "test",
    cls=GroupedCommand,
    context_settings={"token_normalize_func": underscores, "max_content_width": 100},
)
@launch_options
@click.option("--timeout", type=float, default=300.0, help="Seconds before the check is given up.")
@click.option("--matrix", is_flag=True, help="Run it for every backend that is installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    config_file: str | None, timeout: float, matrix: bool, as_json: bool, **given: Any
) -> None:
    """Run a short self-check with the options of launch; by default two processes on the CPU.

    Checks ranks, collectives on nested data, exactly-once data loading, training
    against plain PyTorch, and saving. Exits with 1 if anything failed.
    """
    from accelerate_launch.planning import find_config

    environ = dict(os.environ)
    config = find_config(config_file, environ)
    if given["num_processes"] is None and (config is None or config.get("num_processes") is None):
        from accelerate_launch.devices import count_accelerators

        forced = given["cpu"] or environ.get("ACCELERATE_USE_CPU")
        if forced or not (given["multi_gpu"] or given["gpu_ids"] or count_accelerators(environ)):
            given["num_processes"], given["cpu"] = 2, True
    given["module"] = True
    backends = _installed() if matrix else [None]
    made = {name: _check(given, name, config, environ, timeout) for name in backends}
    if as_json and matrix:
        click.echo(json.dumps({str(name): one.as_dict() for name, one in made.items()}, indent=2))
    elif as_json:
        click.echo(json.dumps(made[None].as_dict(), indent=2))
    elif matrix:
        _print_matrix(made)
    else:
        one = made[None]
        _print(one.results, one.status, one.output, one.passed)
    sys.exit(0 if all(one.passed for one in made.values()) else 1)


@dataclass(frozen=True)
class Outcome:
    """How one run of the self-check ended."""

    results: list[dict[str, Any]]
    status: int
    output: str

    @property
    def passed(self) -> bool:
        """Whether every check was run and none failed."""
        failed = any(result["error"] for result in self.results)
        return bool(self.results) and self.status == 0 and not failed

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {"passed": self.passed, "checks": self.results, "output": self.output}


def _installed() -> list[str | None]:
    from accelerate_core.plugins.discovery import disabled_names, installed

    off = disabled_names()
    return [one.name for one in installed().of_kind("backend") if one.name not in off]


def _check(
    given: Mapping[str, Any],
    backend: str | None,
    config: Any,
    environ: Mapping[str, str],
    timeout: float,
) -> Outcome:
    options = dict(given)
    if backend is not None:
        options["backend"] = backend
        if backend == "single":
            options["num_processes"] = 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        status, output = _run(options, config, environ, file, timeout)
        return Outcome(_read(file), status, output)


def _print_matrix(made: Mapping[str | None, Outcome]) -> None:
    """Print one row per check and one column per backend; then what failed, and how it ended."""
    from rich.table import Table
    from rich.text import Text

    table = Table("check", *(str(name) for name in made), title="self-check of every backend")
    checks = list(dict.fromkeys(row["name"] for one in made.values() for row in one.results))
    for check in checks:
        cells = []
        for one in made.values():
            found = next((row for row in one.results if row["name"] == check), None)
            if found is None:
                cells.append(Text("not run", style="red"))
            elif found["error"]:
                cells.append(Text("failed", style="red"))
            else:
                cells.append(Text(f"passed, {found['seconds']:.2f} s", style="green"))
        table.add_row(check, *cells)
    console().print(table)
    for name, one in made.items():
        for row in one.results:
            if row["error"]:
                click.echo(f"{name}, {row['name']}: {row['error']}", err=True)
        if not one.passed and not any(row["error"] for row in one.results):
            click.echo(f"{name}: {one.output.rstrip()}", err=True)
        if not one.passed:
            click.echo(f"{name}: the self-check failed (exit status {one.status}).", err=True)


def _run(
    given: Mapping[str, Any],
    config: Any,
    environ: Mapping[str, str],
    file: Path,
    timeout: float,
) -> tuple[int, str]:
    from accelerate_launch.commands.launch import print_reasons
    from accelerate_launch.planning import make_plan
    from accelerate_launch.start import child_environment, command_of

    plan = make_plan(_SELF_CHECK, [str(file)], given, environ, config)
    if given["explain"]:
        print_reasons(plan, environ)
    child = subprocess.Popen(
        command_of(plan),
        env=child_environment(plan, environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.terminate()  # torch's agent ends its ranks on this signal
        try:
            output, _ = child.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
        output += f"\nGiven up after {timeout:g} seconds."
    return child.returncode, output


def _read(file: Path) -> list[dict[str, Any]]:
    """Return one result per check that was finished; the file grows line by line."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _print(results: list[dict[str, Any]], status: int, output: str, passed: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "result", "seconds", "detail", title="self-check")
    for result in results:
        verdict = Text("failed", style="red") if result["error"] else Text("passed", style="green")
        detail = Text(result["error"] or result["detail"], overflow="fold")
        table.add_row(result["name"], verdict, f"{result['seconds']:.2f}", detail)
    console().print(table)
    if not passed:
        click.echo(output.rstrip(), err=True)
        click.echo(f"The self-check failed (exit status {status}).", err=True)
