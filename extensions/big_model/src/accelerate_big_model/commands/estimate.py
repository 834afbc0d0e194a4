"""`accelerate-core estimate-memory`: what a model takes, from the shapes of its tensors alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from accelerate_core.builtin.console import console


def _words(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(value.replace(",", " ").split())


class _ManyDtypes(click.Command):
    """Takes `--dtypes float32 float16` as well as `--dtypes float32,float16`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from accelerate_big_model.estimating import DTYPES

        made: list[str] = []
        for word in args:
            if made and word in DTYPES and made[-1].split(",")[0] in DTYPES:
                made[-1] += f",{word}"
            else:
                made.append(word)
        return super().parse_args(ctx, made)


@click.command(
    "estimate-memory",
    cls=_ManyDtypes,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)
@click.argument("model")
@click.option(
    "--dtypes",
    callback=_words,
    default="float32,bfloat16,int8,int4",
    help="Types of the weights.",
)
@click.option(
    "--world_sizes",
    callback=_words,
    default="1,2,8",
    help="Numbers of processes, for the backends.",
)
@click.option("--optimizer", default="adamw", metavar="NAME", help="adamw, sgd or momentum.")
@click.option("--library_name", metavar="NAME", help="Accepted: shapes need no library.")
@click.option("--trust_remote_code", is_flag=True, help="Let code of the model's folder run.")
@click.option("--png", metavar="FILE", type=click.Path(path_type=Path), help="Draw a bar chart.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    model: str,
    dtypes: tuple[str, ...],
    world_sizes: tuple[str, ...],
    optimizer: str,
    library_name: str | None,
    trust_remote_code: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Show the memory MODEL takes: to hold it, to train it, and on each rank of each backend.

    MODEL is a checkpoint (safetensors, or torch's), a folder with one or with a config.json, or a
    name on the Hugging Face hub. Activations come on top: they depend on the batch.
    """
    from accelerate_big_model import estimating

    sizes = estimating.shapes_of(model, trust_remote_code=trust_remote_code)
    worlds = estimating.world_sizes(world_sizes)
    rows = estimating.by_dtype(sizes, dtypes, optimizer)
    ranks = estimating.by_backend(sizes, dtypes, optimizer, worlds, os.environ)
    if as_json:
        click.echo(json.dumps({"model": model, "dtypes": rows, "per_rank": ranks}, indent=2))
    else:
        _print(model, sizes, rows, ranks, worlds)
    if png is not None:
        _draw(png, model, ranks)


def _print(
    model: str, sizes: Any, rows: list[dict[str, Any]], ranks: list[dict[str, Any]], worlds: Any
) -> None:
    from rich.table import Table

    names = ("weights", "largest_layer", "gradients", "optimizer", "training")
    count = sum(sizes.values())
    heads = ("dtype", *(name.replace("_", " ") for name in names), "")
    table = Table(*heads, title=f"{model}: {count:,} parameters")
    most = max(row["training"] or row["weights"] for row in rows)
    for row in rows:
        bar = _bar(row["training"] or row["weights"], most)
        table.add_row(row["dtype"], *(_size(row[name]) for name in names), bar)
    console().print(table)
    table = Table("dtype", "backend", *(f"on {n}" for n in worlds), "", title="training, each rank")
    most = max((value for row in ranks for value in row["bytes"].values()), default=1)
    for row in ranks:
        values = [row["bytes"][str(n)] for n in worlds]
        table.add_row(row["dtype"], row["backend"], *map(_size, values), _bar(values[-1], most))
    if ranks:
        console().print(table)
        console().print("Bars: the last column. Activations come on top.", style="dim")


def _bar(value: float, most: float) -> str:
    return "█" * max(1, round(24 * value / most)) if most else ""


def _size(count: float | None) -> str:
    from rich.filesize import pick_unit_and_suffix

    if count is None:
        return "-"
    unit, suffix = pick_unit_and_suffix(int(count), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{count / unit:.{0 if unit == 1 else 2}f} {suffix}"


def _draw(png: Path, model: str, ranks: list[dict[str, Any]]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.UsageError("--png needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 0.6 + 0.35 * sum(len(row["bytes"]) for row in ranks)))
    axes = figure.subplots()
    labels = [f"{r['dtype']}, {r['backend']}, on {n}" for r in ranks for n in r["bytes"]]
    values = [value / 2**30 for row in ranks for value in row["bytes"].values()]
    axes.barh(labels[::-1], values[::-1])
    axes.set_xlabel("GiB on each rank, training, without activations")
    axes.set_title(model)
    try:
        figure.savefig(png, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--png {png} cannot be drawn: {error}") from None
