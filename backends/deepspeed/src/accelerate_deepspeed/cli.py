"""The command `accelerate-core deepspeed`, which shows configs and converts checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from accelerate_checkpoint import save_weights
from accelerate_core.plugin import AccelerateError, Sources, console, resolve_core, resolve_settings
from accelerate_deepspeed import automatic, library
from accelerate_deepspeed.checkpoint import to_universal
from accelerate_deepspeed.checkpoint_files import merge
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.optimizers import DummyOptim, DummyScheduler
from accelerate_deepspeed.settings import DeepSpeedPlugin

_HELP = {"help_option_names": ["-h", "--help"]}


@contextmanager
def _errors_shown() -> Iterator[None]:
    try:
        yield
    except (AccelerateError, OSError) as error:
        raise click.ClickException(str(error)) from error


@click.group("deepspeed", context_settings=_HELP)
def command() -> None:
    """Show DeepSpeed's resolved config, and convert its checkpoints."""


@command.command("show-config", context_settings=_HELP)
@click.argument("config", required=False)
@click.option("--zero_stage", type=int, help="zero_stage of DeepSpeedPlugin")
@click.option("--mixed_precision", default=None, help="no, bf16 or fp16")
@click.option("--gradient_accumulation_steps", type=click.IntRange(1), default=None)
@click.option("--num_processes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--micro_batch", type=click.IntRange(1), help="batch size of the loader, per process")
@click.option("--hidden_size", type=click.IntRange(1), help="hidden size in the model's config")
@click.option("--lr", type=float, help="learning rate of DummyOptim, if the config has auto")
@click.option("--weight_decay", type=float, default=0.0, show_default=True)
@click.option("--total_num_steps", type=click.IntRange(1), help="total_num_steps of DummyScheduler")
@click.option("--warmup_num_steps", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--json", "as_json", is_flag=True, help="print only the config that DeepSpeed receives"
)
def show_config(config: str | None, as_json: bool, **options: Any) -> None:
    """Show each value of the resolved config and its source.

    Every "auto" is resolved. Values that depend on the run, such as the loader's batch size or the
    model's hidden size, stay "auto" unless you pass them as options.

    CONFIG is a JSON file, JSON, or base64-encoded JSON. Without it, the config comes from the
    environment and the launcher's config file, as in a run.
    """
    with _errors_shown():
        resolved = _resolve(config, options)
    if as_json:
        click.echo(json.dumps(resolved.config, indent=2))
        return
    columns = (Column(head, overflow="fold") for head in ("setting", "value", "reason"))
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, value in resolved.values():
        why = resolved.provenance.get(name, f"in {resolved.origin}")
        table.add_row(*map(Text, (name, json.dumps(value), why)))
    for name, why in resolved.provenance.items():
        if not resolved.has(name):
            table.add_row(*map(Text, (name, "", why)))
    console().print(f"DeepSpeed, from {resolved.origin}", style="italic", markup=False)
    console().print(table)


def _resolve(config: str | None, options: dict[str, Any]) -> HfDeepSpeedConfig:
    fields = {"hf_ds_config": config, "zero_stage": options["zero_stage"]}
    given = {name: value for name, value in fields.items() if value is not None}
    sources = Sources.of(dict(os.environ))
    asked = DeepSpeedPlugin(**given) if given else None
    plugin, _ = resolve_settings(DeepSpeedPlugin, asked, sources, owner="deepspeed")
    automatic.resolve_fields(plugin)
    found: HfDeepSpeedConfig = plugin.hf_ds_config
    names = ("mixed_precision", "gradient_accumulation_steps")
    core = resolve_core({name: options[name] for name in names}, sources, {})
    precision, steps = (core[name] for name in names)
    own = automatic.own_precision(found)
    wanted = own[0] if own and precision.origin == "default" else str(precision.value)
    automatic.resolve_precision(found, wanted, precision.origin)
    there = automatic.check_accumulation(found, steps)
    count = options["num_processes"]
    sizes = automatic.RunSizes(
        data_ranks=count,
        all_ranks=count,
        accumulation=there or steps.value,
        accumulation_origin=found.where("gradient_accumulation_steps") if there else steps.origin,
        micro_batch=options["micro_batch"],
    )
    automatic.resolve_batches(found, sizes)
    if (hidden := options["hidden_size"]) is not None:
        automatic.resolve_sizes(found, SimpleNamespace(config=SimpleNamespace(hidden_size=hidden)))
    if found.has("optimizer") and options["lr"] is not None:
        optimizer = DummyOptim([], options["lr"], options["weight_decay"])
        scheduler = None
        total = options["total_num_steps"]
        if found.has("scheduler") and total is not None:
            scheduler = DummyScheduler(optimizer, total, options["warmup_num_steps"])
        if not found.has("scheduler") or scheduler is not None:
            automatic.resolve_optimizer(found, optimizer, scheduler, count, split=False)
    automatic.resolve_engine(found, not found.has("optimizer"))
    if importlib.util.find_spec("deepspeed") is not None:
        library.load(torch.device("cpu"))
        library.check_sections(found)
    return found


def _engines(directory: Path) -> list[Path]:
    """Return the folders of engines in a checkpoint, in its `backend_deepspeed`, or the engine's own."""
    for root in (directory / "backend_deepspeed", directory):
        found = sorted(path for path in root.glob("engine_*") if path.is_dir())
        if found:
            return found
    if list(directory.glob("*mp_rank_*_model_states.pt")):
        return [directory]
    raise click.ClickException(
        f"{directory} contains no files of a DeepSpeed engine. Pass the directory that save_state "
        "wrote, or a checkpoint of DeepSpeed that contains *_model_states.pt."
    )


@command.command("consolidate", context_settings=_HELP)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--engine", type=int, default=0, show_default=True, help="number of the model")
@click.option("--max_shard_size", default="10GB", show_default=True)
def consolidate(checkpoint: Path, output: Path, engine: int, max_shard_size: str) -> None:
    """Write the whole fp32 weights of CHECKPOINT as safetensors.

    DeepSpeed doesn't need to be installed. CHECKPOINT can also be written by DeepSpeed itself.
    """
    found = _engines(checkpoint)
    if not 0 <= engine < len(found):
        raise click.ClickException(
            f"--engine {engine} does not exist: {checkpoint} has {len(found)} engine(s), numbered "
            "from 0."
        )
    with _errors_shown():
        with console(stderr=True).status(f"Merging {found[engine]}"):
            weights = merge(found[engine])
        save_weights(weights, output, max_shard_size=max_shard_size, safe_serialization=True)
    count = sum(value.numel() for value in weights.values())
    click.echo(f"{len(weights)} tensors, {count:,} values, in {output}")


@command.command("to-universal", context_settings=_HELP)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
def universal(checkpoint: Path, output: Path, workers: int) -> None:
    """Convert CHECKPOINT to DeepSpeed's universal format.

    The result is for other programs. You don't need it for `load_state`, which converts checkpoints if the
    number of ranks changes.
    """
    with _errors_shown():
        for folder in _engines(checkpoint):
            target = output / folder.name
            if target.exists():
                raise click.ClickException(f"{target} already exists. Pass another OUTPUT.")
            to_universal(folder, target, workers)
            click.echo(str(target))
