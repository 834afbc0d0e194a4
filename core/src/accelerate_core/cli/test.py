"""`accelerate-core test`: is this machine, as it is set up, fit to train?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from accelerate_core.cli.console import console
from accelerate_core.cli.options import GroupedCommand, launch_options, underscores

__all__ = ["command"]

_SELF_CHECK = "accelerate_core.cli.self_check"


@click.command(
    "test",
    cls=GroupedCommand,
    context_settings={"token_normalize_func": underscores, "max_content_width": 100},
)
@launch_options
@click.option("--timeout", type=float, default=300.0, help="Seconds before the check is given up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(config_file: str | None, timeout: float, as_json: bool, **given: Any) -> None:
    """Run a short self-check with the options of launch; by default two processes on the CPU.

    Checks ranks, collectives on nested data, exactly-once data loading, training
    against plain PyTorch, and saving. Exits with 1 if anything failed.
    """
    from accelerate_core.launch.resolve import find_config

    environ = dict(os.environ)
    config = find_config(config_file, environ)
    if given["num_processes"] is None and (config is None or config.get("num_processes") is None):
        from accelerate_core.launch.devices import count_accelerators

        forced = given["cpu"] or environ.get("ACCELERATE_USE_CPU")
        if forced or not (given["multi_gpu"] or given["gpu_ids"] or count_accelerators(environ)):
            given["num_processes"], given["cpu"] = 2, True
    given["module"] = True
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        status, output = _run(given, config, environ, file, timeout)
        results = _read(file)
    failed = [result for result in results if result["error"]]
    passed = bool(results) and status == 0 and not failed
    if as_json:
        click.echo(json.dumps({"passed": passed, "checks": results, "output": output}, indent=2))
    else:
        _print(results, status, output, passed)
    sys.exit(0 if passed else 1)


def _run(
    given: Mapping[str, Any],
    config: Any,
    environ: Mapping[str, str],
    file: Path,
    timeout: float,
) -> tuple[int, str]:
    from accelerate_core.cli.launch import print_reasons
    from accelerate_core.launch.resolve import make_plan
    from accelerate_core.launch.start import child_environment, choose_launcher

    plan = make_plan(_SELF_CHECK, [str(file)], given, environ, config)
    if given["explain"]:
        print_reasons(plan)
    child = subprocess.Popen(
        choose_launcher(plan).launch_command(plan),
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
