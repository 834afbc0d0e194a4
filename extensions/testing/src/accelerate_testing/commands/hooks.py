"""`accelerate-core plugins hooks`: print the contract, or the hooks that a run calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from accelerate_core.plugin import ConfigurationError, did_you_mean
from accelerate_launch.commands.tables import print_table
from accelerate_launch.hook_trace import VARIABLE, HookCount
from accelerate_launch.planning import find_config, make_plan
from accelerate_launch.starting import child_environment, command_of


@click.command("hooks")
@click.argument("words", nargs=-1, metavar="[NAME] | --trace -- SCRIPT [ARGUMENTS]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--trace", is_flag=True, help="Run SCRIPT and show which hooks it calls.")
@click.option(
    "--num_processes", type=click.IntRange(min=1), help="With --trace: like launch's option."
)
@click.option("--config_file", metavar="FILE", help="With --trace: like launch's option.")
def command(
    words: tuple[str, ...],
    as_json: bool,
    trace: bool,
    num_processes: int | None,
    config_file: str | None,
) -> None:
    """Print the hooks of the contract, or only the hook NAME.

    --json without NAME also prints the public names of the classes that plugin authors use.

    --trace starts SCRIPT as launch would, and prints each hook that was called, in the order of the
    first calls, with its plugin, the number of calls and the total time. The time of a hook includes
    the hooks that it called. With --json, the script's output goes to stderr.
    """
    if trace:
        if not words:
            raise click.UsageError("--trace needs a script: plugins hooks --trace -- script.py")
        given = {"num_processes": num_processes}
        sys.exit(_trace(words, given, config_file, as_json))
    if len(words) > 1 or num_processes is not None or config_file is not None:
        raise click.UsageError("More than one NAME, or an option of --trace. Did you mean --trace?")
    _print_contract(words[0] if words else None, as_json)


def _trace(
    words: Sequence[str], given: dict[str, Any], config_file: str | None, as_json: bool
) -> int:
    """Run a script, print its hooks, and return its exit status."""
    environ = dict(os.environ)
    config = find_config(config_file, environ)
    plan = make_plan(words[0], words[1:], given, environ, config)
    with tempfile.TemporaryDirectory() as folder:
        child = {**child_environment(plan, environ), VARIABLE: folder}
        output = sys.stderr if as_json else None
        status = subprocess.run(command_of(plan), env=child, stdout=output).returncode
        traces = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    if not traces:
        raise ConfigurationError(
            f"No process of {words[0]} wrote a trace (exit status {status}): the script created no "
            "Accelerator, or was killed before it could write."
        )
    ranks = _by_rank(traces)
    if as_json:
        said = {
            str(rank): [asdict(one) for one in counts.values()] for rank, counts in ranks.items()
        }
        click.echo(json.dumps({"exit_status": status, "ranks": said}, indent=2))
    else:
        print_table(_COLUMNS, _rows(ranks), title=f"Hooks called, ranks: {len(ranks)}")
    return status


_Counts = dict[tuple[str, str], HookCount]
_COLUMNS = ("hook", "kind", "plugin", "calls", "total ms")


def _by_rank(traces: Iterable[dict[str, Any]]) -> dict[int, _Counts]:
    """Add up the traces of each rank. A process writes one for each Accelerator."""
    ranks: dict[int, _Counts] = {}
    for trace in traces:
        counts = ranks.setdefault(trace["rank"], {})
        for row in trace["hooks"]:
            one = HookCount(**row)
            same = counts.setdefault((one.hook, one.plugin), one)
            if same is not one:
                same.calls += one.calls
                same.seconds += one.seconds
    return dict(sorted(ranks.items()))


def _rows(ranks: dict[int, _Counts]) -> Iterable[tuple[str, ...]]:
    """Return a row for each hook and plugin, with one number per rank if the ranks differ."""
    keys = dict.fromkeys(key for counts in ranks.values() for key in counts)
    for hook, plugin in keys:
        found = [counts.get((hook, plugin)) for counts in ranks.values()]
        kind = next(one.kind for one in found if one is not None)
        calls = [str(one.calls) if one is not None else "0" for one in found]
        if len(set(calls)) == 1:
            calls = calls[:1]
        times = [f"{1000 * one.seconds:.2f}" if one is not None else "-" for one in found]
        yield hook, kind, plugin, " / ".join(calls), " / ".join(times)


def _print_contract(name: str | None, as_json: bool) -> None:
    from accelerate_testing.contract import HOOK_KINDS, contract

    made = contract()
    hooks = made["hooks"]
    if name is not None:
        if name not in hooks:
            raise ConfigurationError(
                f"The contract has no hook {name!r}.{did_you_mean(name, hooks)}"
            )
        hooks = {name: hooks[name]}
        made = {"version": made["version"], "hooks": hooks}
    if as_json:
        click.echo(json.dumps(made, indent=2))
        return
    click.echo(f"Version {'.'.join(map(str, made['version']))} of the contract.")
    for kind, meaning in HOOK_KINDS.items():
        mine = {hook: its for hook, its in hooks.items() if its["kind"] == kind}
        if not mine:
            continue
        rows = (
            (
                f"{hook}({', '.join(its['arguments'])})",
                ".".join(map(str, its["since"])),
                its["doc"] + "".join(f"\n{key} is deprecated." for key in its["deprecated"]),
            )
            for hook, its in mine.items()
        )
        columns = ("hook", "since", "when it is called, what it returns")
        print_table(columns, rows, title=f"{kind}: {meaning}")
