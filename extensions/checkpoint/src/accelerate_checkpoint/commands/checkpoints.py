"""`accelerate-core checkpoints`: list, verify and show what `save_state` wrote."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate_core.builtin.console import console

if TYPE_CHECKING:
    from accelerate_checkpoint.manifest import Manifest

__all__ = ["command"]

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group("checkpoints")
def command() -> None:
    """List, verify and show checkpoints that save_state wrote."""


def _found(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory: itself, or those in it and in its `checkpoints`.

    Those that have lost their manifest count too: they are what is looked for.
    """
    if _is_checkpoint(directory):
        return [directory]
    return [
        path
        for root in (directory, directory / "checkpoints")
        if root.is_dir()
        for path in sorted(root.iterdir(), key=_order)
        if path.is_dir() and not path.name.startswith(".") and _is_checkpoint(path)
    ]


def _is_checkpoint(path: Path) -> bool:
    from accelerate_checkpoint.manifest import MANIFEST

    return (path / MANIFEST).exists() or any(path.glob("random_states_*.pkl"))


_FOREIGN = "written by Hugging Face Accelerate, without checksums."


def _is_foreign(path: Path) -> bool:
    from accelerate_checkpoint import foreign
    from accelerate_checkpoint.manifest import MANIFEST

    return not (path / MANIFEST).exists() and foreign.why_not(path) == ""


def _order(path: Path) -> tuple[bool, int, str]:
    """Sort by name, numbered ones by their number and last."""
    number = path.name.removeprefix("checkpoint_")
    return number.isdigit(), int(number) if number.isdigit() else 0, path.name


def _some(directory: Path) -> list[Path]:
    found = _found(directory)
    if not found:
        raise click.UsageError(
            f"There is no checkpoint in {directory}. Give a directory that save_state wrote, or "
            "the project_dir of a run with automatic names."
        )
    return found


def _summary(path: Path) -> dict[str, Any]:
    from accelerate_checkpoint.manifest import problems, read_manifest
    from accelerate_core.errors import CheckpointError

    if _is_foreign(path):
        return {"path": str(path), "state": "unverified", "why": f"{path}: {_FOREIGN}"}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {"path": str(path), "state": "damaged", "why": str(error)}
    wrong = problems(path, manifest, contents=False)
    facts = manifest.facts
    return {
        "path": str(path),
        "state": "damaged" if wrong else "whole",
        "why": wrong[0] if wrong else "",
        "saved_at": facts.get("saved_at"),
        "step": facts.get("step"),
        "epoch": facts.get("epoch"),
        "world_size": facts.get("world_size"),
        "files": len(manifest.files),
        "bytes": manifest.size,
    }


@command.command("list")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_JSON
def list_command(directory: Path, as_json: bool) -> None:
    """List the checkpoints in DIR: a project_dir, its `checkpoints`, or one checkpoint.

    Sizes are compared, contents are not: see verify.
    """
    rows = [_summary(path) for path in _some(directory)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    table = Table("checkpoint", "state", "saved", "step", "epoch", "processes", "files", "size")
    for row in rows:
        known = "saved_at" in row
        table.add_row(
            Path(row["path"]).name,
            _state(row["state"]),
            _when(row["saved_at"]) if known else "",
            *(str(row[key]) if known else "" for key in ("step", "epoch", "world_size", "files")),
            _size(row["bytes"]) if known else "",
        )
    console().print(table)
    for row in rows:
        if row["why"]:
            console().print(row["why"], style="red", markup=False)


@command.command("verify")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_JSON
@click.pass_context
def verify_command(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Compare every file's checksum, of one checkpoint or of all in DIR; status 1 if any differs."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from accelerate_checkpoint.manifest import problems, read_manifest
    from accelerate_core.errors import CheckpointError

    rows = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=console(stderr=True),
        disable=as_json,
        transient=True,
    )
    with bar:
        for path in _some(directory):
            if _is_foreign(path):
                rows.append({"path": str(path), "state": "unverified", "problems": []})
                continue
            try:
                manifest = read_manifest(path)
            except CheckpointError as error:
                rows.append({"path": str(path), "state": "damaged", "problems": [str(error)]})
                continue
            task = bar.add_task(path.name, total=manifest.size)
            wrong = problems(path, manifest, progress=partial(bar.advance, task))
            state = "damaged" if wrong else "whole"
            rows.append({"path": str(path), "state": state, "problems": wrong})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            text = f"{row['path']}: {row['state']}"
            console().print(
                text, style="red" if row["problems"] else "green", markup=False, soft_wrap=True
            )
            for line in row["problems"]:
                console().print(f"  {line}", markup=False, soft_wrap=True)
    if any(row["problems"] for row in rows):
        ctx.exit(1)


@command.command("show")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_JSON
def show_command(directory: Path, as_json: bool) -> None:
    """Show what one checkpoint holds and what wrote it; of several in DIR the newest."""
    from accelerate_checkpoint.manifest import read_manifest

    path = _some(directory)[-1]
    manifest = read_manifest(path)
    if as_json:
        content = json.loads(manifest.render())["content"]
        click.echo(json.dumps({"path": str(path), **content}, indent=2))
        return
    _print(path, manifest)


def _print(path: Path, manifest: Manifest) -> None:
    from rich.table import Table

    facts = Table("", str(path), show_edge=False)
    for name, value in manifest.facts.items():
        if name == "written_by":
            plugins = value.get("plugins", [])
            packages = {key: text for key, text in value.items() if key != "plugins"}
            facts.add_row("written by", ", ".join(f"{k} {v}" for k, v in packages.items()))
            for one in plugins:
                text = f"{one['name']} ({one['distribution']} {one['version']})"
                facts.add_row(f"plugin, {one['kind']}", text)
        elif name == "saved_at":
            facts.add_row("saved", _when(value))
        elif isinstance(value, dict):
            facts.add_row(name, ", ".join(f"{key} {count}" for key, count in value.items()))
        else:
            facts.add_row(name.replace("_", " "), str(value))
    console().print(facts)
    table = Table("file", "size", "xxh3-128")
    table.columns[1].justify = "right"
    for name, entry in sorted(manifest.files.items()):
        table.add_row(name, _size(entry.size), entry.checksum)
    table.add_section()
    table.add_row(f"{len(manifest.files)} files", _size(manifest.size), "")
    console().print(table)


def _state(state: str) -> str:
    colour = {"whole": "green", "damaged": "red"}.get(state, "yellow")
    return f"[{colour}]{state}[/]"


def _when(seconds: Any) -> str:
    import datetime

    if not isinstance(seconds, int | float):
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
