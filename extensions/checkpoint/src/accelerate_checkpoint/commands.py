"""The commands `accelerate-core checkpoints` (list, verify, show) and `merge-weights`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from accelerate_core.plugin import console

if TYPE_CHECKING:
    from rich.table import Table

    from accelerate_checkpoint.manifest import Manifest
    from accelerate_checkpoint.places import LocalPlace, StoredPlace

    Place: TypeAlias = LocalPlace | StoredPlace


def _as_place(ctx: click.Context, param: click.Parameter, text: str) -> Place:
    from accelerate_checkpoint.places import place_at

    return place_at(text)


_place = click.argument("place", metavar="DIR", callback=_as_place)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_UNVERIFIED = "written by Hugging Face Accelerate, without checksums."


@click.group("checkpoints")
def checkpoints_command() -> None:
    """List, verify and show checkpoints that save_state wrote."""


def _found(place: Place) -> Sequence[Place]:
    found = place.checkpoints()
    if not found:
        raise click.UsageError(
            f"There is no checkpoint in {place}. Pass what save_state wrote, or the project_dir of a "
            "run with automatic checkpoint naming."
        )
    return found


def _examine(place: Place, **how: Any) -> tuple[Manifest | None, str, list[str]]:
    """Return the manifest of a checkpoint, its state as a word, and its problems."""
    manifest, wrong = place.examine(**how)
    if wrong:
        return manifest, "damaged", wrong
    return manifest, "whole" if manifest else "unverified", []


@checkpoints_command.command("list")
@_place
@_JSON
def list_command(place: Place, as_json: bool) -> None:
    """List the checkpoints in DIR.

    DIR is a project_dir, its `checkpoints` folder, or one checkpoint: a directory, or a URL such as
    s3://bucket/run. This compares file sizes only. To compare checksums, use verify.
    """
    rows: list[dict[str, Any]] = []
    for one in _found(place):
        manifest, state, wrong = _examine(one, contents=False)
        why = f"{one}: {_UNVERIFIED}" if state == "unverified" else "".join(wrong[:1])
        rows.append({"name": one.name, "path": str(one), "state": state, "why": why})
        if manifest is not None:
            names = ("saved_at", "step", "epoch", "world_size")
            rows[-1] |= {name: manifest.facts.get(name) for name in names}
            rows[-1] |= {"files": len(manifest.files), "bytes": manifest.size}
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.text import Text

    out = console()
    table = _table("checkpoint", "state", "saved", "step", "epoch", "ranks", "files", "size")
    if out.width < 100:
        table.columns[2].max_width = 10  # breaks between date and time, so names get more space
    for row in rows:
        colour = {"whole": "green", "damaged": "red"}.get(row["state"], "yellow")
        cells: list[Any] = [row["name"], Text(row["state"], colour)]
        if "saved_at" in row:
            counts = [str(row[key]) for key in ("step", "epoch", "world_size", "files")]
            cells += [_when(row["saved_at"]), *counts, _size(row["bytes"])]
        table.add_row(*cells)
    out.print(table, markup=False)
    for row in rows:
        if row["why"]:
            out.print(row["why"], style="red", markup=False)


def _table(*heads: str) -> Table:
    """Return a table that wraps wide cells and never truncates them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    columns = (Column(head, overflow="fold") for head in heads)
    return Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


@checkpoints_command.command("verify")
@_place
@_JSON
@click.pass_context
def verify_command(ctx: click.Context, place: Place, as_json: bool) -> None:
    """Compare the checksum of every file. Exits with status 1 if any differs.

    DIR is one checkpoint, or a directory of checkpoints, or the URL of either, from which this downloads
    all files.
    """
    from accelerate_checkpoint.progress import byte_bar

    rows = []
    for one in _found(place):
        with ExitStack() as bars:

            def begin(
                manifest: Manifest, name: str = one.name, bars: ExitStack = bars
            ) -> Callable[[int], None]:
                return bars.enter_context(byte_bar(f"Verifying {name}", manifest.size))

            _, state, wrong = _examine(one, contents=True, progress=begin)
        rows.append({"path": str(one), "state": state, "problems": wrong})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            style = "red" if row["problems"] else "green"
            text = f"{row['path']}: {row['state']}"
            console().print(text, style=style, markup=False, soft_wrap=True)
            for line in row["problems"]:
                console().print(f"  {line}", markup=False, soft_wrap=True)
    if any(row["problems"] for row in rows):
        ctx.exit(1)


@checkpoints_command.command("show")
@_place
@_JSON
def show_command(place: Place, as_json: bool) -> None:
    """Show what a checkpoint contains and what wrote it.

    If DIR, a directory or a URL, holds several checkpoints, this shows the newest.
    """
    newest = _found(place)[-1]
    manifest = newest.manifest()
    if as_json:
        click.echo(json.dumps({"path": str(newest), **manifest.content}, indent=2))
    else:
        _print(newest, manifest)


def _print(place: Place, manifest: Manifest) -> None:
    facts = _table("", str(place))
    for name, value in manifest.facts.items():
        if name == "written_by":
            packages = {key: text for key, text in value.items() if key != "plugins"}
            facts.add_row("written by", ", ".join(f"{k} {v}" for k, v in packages.items()))
            for one in value.get("plugins", []):
                text = f"{one['name']} ({one['distribution']} {one['version']})"
                facts.add_row(f"plugin, {one['kind']}", text)
        elif name == "saved_at":
            facts.add_row("saved", _when(value))
        elif isinstance(value, dict):
            facts.add_row(name, ", ".join(f"{key} {count}" for key, count in value.items()))
        else:
            facts.add_row(name.replace("_", " "), str(value))
    console().print(facts, markup=False)
    table = _table("file", "size", "xxh3-128")
    table.columns[1].justify = "right"
    for name, entry in sorted(manifest.files.items()):
        table.add_row(name, _size(entry.size), entry.checksum)
    table.add_section()
    table.add_row(f"{len(manifest.files)} files", _size(manifest.size), "")
    console().print(table, markup=False)


def _when(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _size(count: int) -> str:
    from rich.filesize import decimal

    return decimal(count)


@click.command(
    "merge-weights",
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)
@_place
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--unsafe_serialization",
    is_flag=True,
    help="Write pytorch_model.bin instead of model.safetensors.",
)
@click.option(
    "--remove_checkpoint_dir", is_flag=True, help="Delete DIR after writing the merged file."
)
def merge_weights_command(
    place: Place, output: Path, unsafe_serialization: bool, remove_checkpoint_dir: bool
) -> None:
    """Merge the sharded weights in DIR into one file in the folder OUT.

    DIR was written by save_state, save_model or torch.distributed.checkpoint. It is a directory, or a
    URL such as s3://bucket/run/checkpoints/checkpoint_3.
    """
    from accelerate_core.plugin import CheckpointError

    try:
        made = place.merge(
            output, safe_serialization=not unsafe_serialization, remove=remove_checkpoint_dir
        )
    except OSError as error:
        raise CheckpointError(f"{place} cannot be merged into {output}: {error}") from error
    click.echo(f"Merged weights: {made}")
