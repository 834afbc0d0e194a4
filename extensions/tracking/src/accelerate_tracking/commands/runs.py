"""`accelerate-core runs`: show the runs of the built-in tracker."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import click

from accelerate_core.plugin import TrackerError, console, did_you_mean, listing
from accelerate_tracking.recorded_runs import RecordedRun, find_runs, read_run, sparkline, strict

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_STYLES = {"finished": "green", "failed": "red", "running": "yellow"}


@click.group("runs")
def command() -> None:
    """Show runs that were logged with log_with="jsonl"."""


@command.command("show")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "--key", "keys", multiple=True, help="Show only these values. `train/*` is a pattern."
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves.")
@click.option("--config", "with_config", is_flag=True, help="Print the configuration too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def show(
    directory: Path, keys: tuple[str, ...], png: Path | None, with_config: bool, as_json: bool
) -> None:
    """Print the last values and curves of all runs in DIRECTORY or below."""
    runs = [read_run(path) for path in find_runs(directory)]
    _choose(directory, runs, keys)
    if png is not None:  # comes first, so that nothing is printed if it fails
        _draw(runs, png)
    if as_json:
        plain = [asdict(run) | {"path": str(run.path), "summary": run.summary()} for run in runs]
        click.echo(json.dumps(strict(plain), indent=1, allow_nan=False))
    else:
        for run in runs:
            _print(run, with_config)
    if png is not None:
        click.echo(f"Saved the curves to {png}.", err=as_json)


def _choose(directory: Path, runs: list[RecordedRun], keys: tuple[str, ...]) -> None:
    """Keep only the values that match `keys`. A key that matches none is an error."""
    known = list(dict.fromkeys(name for run in runs for name in run.curves))
    for key in keys:
        if not any(fnmatchcase(name, key) for name in known):
            raise TrackerError(
                f"No run in {directory} has a value {key!r}. The values are {listing(known)}."
                f"{did_you_mean(key, known)}"
            )
    for run in runs if keys else ():
        run.curves = {
            name: points
            for name, points in run.curves.items()
            if any(fnmatchcase(name, key) for key in keys)
        }


def _print(run: RecordedRun, with_config: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    out = console()
    status = (run.status, _STYLES.get(run.status, ""))
    out.print(Text.assemble((str(run.path), "bold"), "  ", status, f"  {_when(run)}"))
    if with_config:
        for key, value in run.config.items():
            out.print(Text(f"  {key} = {value!r}"))
    heads = ("value", "last", "at step", "smallest", "largest", "logged", "curve")
    columns = (Column(head, overflow="fold") for head in heads)
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    width = 40 if out.width >= 120 else 10
    for key, facts in run.summary().items():
        numbers = [facts["last"], facts["step"], facts["min"], facts["max"], facts["count"]]
        cells = [str(n) if isinstance(n, int) else f"{n:.6g}" for n in numbers]
        table.add_row(Text(key), *cells, sparkline(run.curves[key], width))
    if run.curves:
        out.print(table)
    else:
        out.print("  no values")


def _when(run: RecordedRun) -> str:
    if run.started is None:
        return ""
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    return f"{begun}, {(run.ended or run.started) - run.started:.0f} s"


def _draw(runs: list[RecordedRun], png: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.UsageError("--png needs matplotlib: pip install matplotlib") from None
    keys = list(dict.fromkeys(key for run in runs for key in run.curves))
    if not keys:
        raise click.UsageError("--png: these runs have no values to draw.")
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    for number, key in enumerate(keys, 1):
        axes = figure.add_subplot(rows, columns, number)
        for run in runs:
            points = run.curves.get(key)
            if points:
                mark = "." if len(points) < 30 else ""
                axes.plot(*zip(*points, strict=True), marker=mark, label=run.path.name)
        axes.set_title(key)
        axes.set_xlabel("step")
        if len(runs) > 1:
            axes.legend(fontsize="x-small")
    try:
        figure.savefig(png)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--png {png} cannot be drawn: {error}") from None
