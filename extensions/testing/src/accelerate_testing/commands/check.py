"""`accelerate-core plugins check NAME`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate_core.plugin import console
from accelerate_launch.commands.tables import print_table, print_terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate_core.plugin import PluginRecord
    from accelerate_testing.results import Result

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@click.command("check")
@click.argument("name")
@click.option(
    "--kind", metavar="KIND", help="The kind of plugin, if several kinds have this name: backend, "
    "precision, tracker, launcher, extension, checkpointer or loaders.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="CHECK", help="Run only this check. Repeatable.")
@click.option(
    "--env", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable. Repeatable."
)
@click.option("--options", metavar="JSON", help="The options of the suite for this kind of plugin.")
@click.option("--timeout", type=float, default=20.0, help="Seconds a collective may wait.")
@click.option("--num_processes", type=int, default=2, help="The number of ranks.")
@click.option(
    "--device", metavar="TYPE", default="",
    help="Run the checks on this type of device, such as cuda, instead of the CPU. "
    "fake: a device in host memory that a C++ compiler builds once.",
)  # fmt: skip
@click.option(
    "--prelude", metavar="MODULE", default="",
    help="A module that each process imports before it uses the plugin.",
)  # fmt: skip
@click.option("--junit", metavar="FILE", help="Also write the results as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a report.")
@click.option("--list", "as_list", is_flag=True, help="List the checks without running them.")
def command(
    name: str,
    kind: str | None,
    only: tuple[str, ...],
    env: tuple[str, ...],
    options: str | None,
    junit: str | None,
    as_json: bool,
    as_list: bool,
    **how: Any,
) -> None:
    """Run the conformance suite against the installed plugin NAME.

    Exits with status 1 if a check fails. Checks for features that the plugin does not declare are
    listed as skipped.
    """
    from accelerate_testing.checks import checks_of
    from accelerate_testing.results import write_junit
    from accelerate_testing.runner import choose_plugin

    record = choose_plugin(name, kind)
    if as_list:
        print_terms((one.name, one.doc) for one in checks_of(record.kind).values())
        return
    if junit is not None and not Path(junit).resolve().parent.is_dir():
        raise click.UsageError(
            f"--junit {junit}: the directory {Path(junit).parent} does not exist."
        )
    how |= {"only": list(only) or None, "environ": _pairs(env), "options": _options(options)}
    with contextlib.redirect_stdout(sys.stderr):  # a plugin may print when it is imported
        results = _run(record, len(only) or len(checks_of(record.kind)), as_json, how)
    if junit is not None:
        write_junit(junit, f"{record.kind} {record.label}", results)
    failed = any(result.state == "failed" for result in results)
    if as_json:
        checks = [dataclasses.asdict(result) for result in results]
        made = {"plugin": record.label, "kind": record.kind, "passed": not failed, "checks": checks}
        click.echo(json.dumps(made, indent=2))
    else:
        _print(record, results)
    sys.exit(1 if failed or not results else 0)


def _pairs(env: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in env]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter(f"--env takes NAME=VALUE, not {name!r}")
    return {name: value for name, _, value in pairs}


def _options(text: str | None) -> dict[str, Any]:
    try:
        made = json.loads(text or "{}")
    except ValueError as error:
        raise click.BadParameter(f"--options is not valid JSON: {error}") from None
    if not isinstance(made, dict):
        raise click.BadParameter(f"--options must be a JSON object, not {text}")
    return made


def _run(record: PluginRecord, total: int, quiet: bool, how: dict[str, Any]) -> list[Result]:
    """Run the suite, with a line that shows its progress."""
    from accelerate_testing.progress import SAY_EVERY, Progress, Tail
    from accelerate_testing.runner import run_suite

    terminal = sys.stderr.isatty()
    tail = Tail(sys.stderr, shutil.get_terminal_size().columns - 1 if terminal else 0)

    def say(text: str) -> None:
        if terminal:
            tail.show(text)
        else:
            click.echo(f"{record.name}: {text}", err=True)

    if quiet:
        return run_suite(record.kind, record.name, **how)
    told = Progress(total, say, 0.0 if terminal else SAY_EVERY)
    try:
        return run_suite(
            record.kind, record.name, on_run=told.on_run, on_result=told.on_result, **how
        )
    finally:
        tail.show("")


def _print(record: PluginRecord, results: Sequence[Result]) -> None:
    from rich.text import Text

    rows = (
        (
            result.name,
            (result.state, _STYLES[result.state]),
            f"{result.seconds:.2f}" if result.seconds else "",
            result.error if result.state == "failed" else result.detail,
        )
        for result in results
    )
    title = f"{record.kind} {record.label}"
    print_table(("check", "result", "seconds", "detail"), rows, title=title)
    out = console()
    counts = {state: sum(r.state == state for r in results) for state in _STYLES}
    out.print(Text(", ".join(f"{n} {state}" for state, n in counts.items() if n)))
    failed = next((result for result in results if result.state == "failed"), None)
    if failed is not None and failed.trace:
        out.print(Text(f"\n{failed.name}:\n{failed.trace.strip()}"), soft_wrap=True)
