"""`accelerate-core estimate-memory`: estimate a model's memory from the shapes of its tensors."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate_big_model import STRATEGIES
from accelerate_core.plugin import (
    ConfigurationError,
    PluginError,
    console,
    did_you_mean,
    disabled_names,
    installed,
    listing,
)

if TYPE_CHECKING:
    from accelerate_big_model.device_map import DeviceName, Plan

#: Bytes per element. Models with less than two bytes per element can't be trained in that dtype.
DTYPES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}

#: The number of states that each optimizer keeps for every weight.
_OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}

_BLOCK = re.compile(r"^(.*?\.\d+)(\.|$)")


def _words(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(value.replace(",", " ").split())


def _limits(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> dict[DeviceName, float | str] | None:
    if value is None:
        return None
    pairs = [pair.partition("=") for pair in value.split(",")]
    return {int(name) if name.isdigit() else name: size for name, _, size in pairs}


class _ManyDtypes(click.Command):
    """Accepts `--dtypes float32 float16` as well as `--dtypes float32,float16`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
    "--dtypes", callback=_words, default="float32,bfloat16,int8,int4", help="Dtypes of the weights."
)
@click.option(
    "--world_sizes",
    callback=_words,
    default="1,2,8",
    help="Numbers of processes for the estimates per backend.",
)
@click.option("--optimizer", default="adamw", metavar="NAME", help="adamw, sgd or momentum.")
@click.option("--library_name", metavar="NAME", help="Accepted for compatibility; has no effect.")
@click.option("--trust_remote_code", is_flag=True, help="Run code from the model's folder.")
@click.option(
    "--png", metavar="FILE", type=click.Path(path_type=Path), help="Draw a bar chart into FILE."
)
@click.option(
    "--device_map",
    type=click.Choice(STRATEGIES),
    help="Show which device each part would be placed on instead, in the first dtype.",
)
@click.option(
    "--max_memory",
    metavar="DEVICE=SIZE,...",
    callback=_limits,
    help="With --device_map: limits such as 0=10GiB,cpu=30GiB; default: the free memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    model: str,
    dtypes: tuple[str, ...],
    world_sizes: tuple[str, ...],
    optimizer: str,
    library_name: str | None,
    trust_remote_code: bool,
    png: Path | None,
    device_map: str | None,
    max_memory: dict[DeviceName, float | str] | None,
    as_json: bool,
) -> None:
    """Show how much memory MODEL needs: to load it, to train it, and on each rank of each backend.

    MODEL is a checkpoint in safetensors or torch format, a folder with a checkpoint or a config.json,
    or a name on the Hugging Face Hub. Activations are not included, because they depend on the batch.
    """
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--png needs matplotlib: pip install matplotlib")
    if max_memory is not None and device_map is None:
        raise click.UsageError("--max_memory can only be used with --device_map.")
    with _waiting(f"Reading the shapes of {model}"):
        sizes = shapes_of(model, trust_remote_code=trust_remote_code)
    if device_map is not None:
        _show_plan(model, plan_of(sizes, dtypes[0], device_map, max_memory), as_json)
        return
    if not world_sizes or not all(word.isdigit() and int(word) for word in world_sizes):
        raise ConfigurationError(f"world_sizes={' '.join(world_sizes)!r} must be positive numbers.")
    worlds = sorted({int(word) for word in world_sizes})
    rows = by_dtype(sizes, dtypes, optimizer)
    ranks = by_backend(sizes, dtypes, optimizer, worlds, os.environ)
    if png is not None:  # first, so that nothing is printed if it fails
        _draw(png, model, ranks)
    if as_json:
        click.echo(json.dumps({"model": model, "dtypes": rows, "per_rank": ranks}, indent=2))
    else:
        _print(model, sizes, rows, ranks, worlds)


def _waiting(what: str) -> AbstractContextManager[Any]:
    """Show a spinner on a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.text import Text

    return console(stderr=True).status(Text(what))


def _print(
    model: str, sizes: Any, rows: list[dict[str, Any]], ranks: list[dict[str, Any]], worlds: Any
) -> None:
    names = ("weights", "largest_layer", "gradients", "optimizer", "training")
    count = sum(sizes.values())
    heads = ("dtype", *(name.replace("_", " ") for name in names))
    most = max(row["training"] or row["weights"] for row in rows)
    cells = [
        (row["training"] or row["weights"], row["dtype"], *(_size(row[name]) for name in names))
        for row in rows
    ]
    _print_table(f"{model}: {count:,} parameters", heads, cells, most)
    most = max((value for row in ranks for value in row["bytes"].values()), default=1)
    cells = []
    for row in ranks:
        values = [row["bytes"][str(n)] for n in worlds]
        cells.append((values[-1], row["dtype"], row["backend"], *map(_size, values)))
    if ranks:
        _print_table(
            "training, each rank", ("dtype", "backend", *(f"on {n}" for n in worlds)), cells, most
        )
        console().print("Without activations. The bars show the last column.", style="dim")


def _print_table(
    title: str, heads: Sequence[str], rows: Sequence[tuple[Any, ...]], most: float
) -> None:
    """Print rows, each with the value of its bar and its cells. A narrow terminal gets no bars."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = console()
    bars = min(24, shown.width - 76)
    table = Table(box=SIMPLE_HEAD, title=title, padding=(0, 1, 0, 0))
    for head in (*heads, *([""] if bars > 3 else [])):
        table.add_column(head, overflow="fold")
    for value, *cells in rows:
        table.add_row(*cells, *([_bar(value, most, bars)] if bars > 3 else []))
    shown.print(table)


def _show_plan(model: str, plan: Plan, as_json: bool) -> None:
    from accelerate_big_model.device_map import clean_device_map

    places = clean_device_map(dict(plan.placed))
    rows: list[dict[str, Any]] = [
        {
            "device": device,
            "bytes": plan.held[device],
            "allowed": None if math.isinf(plan.memory[device]) else int(plan.memory[device]),
            "parts": [name for name, place in places.items() if place == device],
        }
        for device in plan.memory
    ]
    if as_json:
        told = {"model": model, "device_map": places, "devices": rows, "why": plan.log}
        click.echo(json.dumps(told, indent=2))
        return
    most = max(1, *(row["bytes"] for row in rows))
    cells = [
        (
            row["bytes"],
            str(row["device"]),
            _size(row["bytes"]),
            _size(row["allowed"]),
            _spans(row["parts"]) or "-",
        )
        for row in rows
    ]
    _print_table(model, ("device", "weights", "allowed", "parts"), cells, most)
    for line in plan.log:
        if " is full: " in line:
            console().print(line, style="dim", markup=False, overflow="fold")


def _spans(names: Sequence[str]) -> str:
    """Join names into a list with consecutive blocks merged, such as `layers.0-7`."""
    spans: list[tuple[str, int, int] | str] = []
    for name in names or ():
        series, _, number = name.rpartition(".")
        if not number.isdigit():
            spans.append(name or "all")
            continue
        last = spans[-1] if spans else ""
        if isinstance(last, tuple) and last[0] == series and last[2] + 1 == int(number):
            spans[-1] = (series, last[1], int(number))
        else:
            spans.append((series, int(number), int(number)))
    return ", ".join(map(_span, spans))


def _span(one: str | tuple[str, int, int]) -> str:
    if isinstance(one, str):
        return one
    series, first, last = one
    begin = f"{series}.{first}".lstrip(".")
    return f"{begin}-{last}" if last > first else begin


def _bar(value: float, most: float, width: int) -> str:
    return "█" * max(1, round(width * value / most)) if most and value else ""


def _size(count: float | None) -> str:
    from rich.filesize import pick_unit_and_suffix

    if count is None:
        return "-"
    unit, suffix = pick_unit_and_suffix(int(count), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{count / unit:.{0 if unit == 1 else 2}f} {suffix}"


def _draw(png: Path, model: str, ranks: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

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
        raise click.UsageError(f"Cannot write the chart to --png {png}: {error}") from None


# --- the arithmetic -----------------------------------------------------------------------------------


def shapes_of(model: str, *, trust_remote_code: bool = False) -> dict[str, int]:
    """Return the number of elements of every tensor of a model, by name, without reading weights.

    Raises:
        ConfigurationError: `model` is neither a checkpoint, nor a config, nor a name on the Hub.
    """
    path = Path(model)
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return _of_folder(path, trust_remote_code)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        return _of_hub(model)
    raise ConfigurationError(f"There is no file or folder {model!r}.")


def _of_file(path: Path) -> dict[str, int]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                names = list(file.keys())
                return {name: math.prod(file.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise ConfigurationError(f"{path} is not a safetensors file: {error}.") from None
    if path.name == "config.json":
        return _of_config(path.parent, False)
    if path.suffix in (".bin", ".pt", ".pth"):
        import torch

        try:
            state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many types of errors for invalid files
            text = f"{path} is not a torch checkpoint: {_reason(error)}"
            raise ConfigurationError(text) from None
        tensors = {name: value for name, value in dict(state).items() if hasattr(value, "numel")}
        return {str(name): int(value.numel()) for name, value in tensors.items()}
    raise ConfigurationError(
        f"{path} is not a checkpoint. Pass a .safetensors, .bin, .pt or .pth file or a config.json."
    )


def _of_folder(path: Path, trust_remote_code: bool) -> dict[str, int]:
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = sorted(path.glob(pattern))
        if files:
            return {name: count for file in files for name, count in _of_file(file).items()}
    if (path / "config.json").is_file():
        return _of_config(path, trust_remote_code)
    raise ConfigurationError(
        f"{path} has neither weights (*.safetensors, pytorch_model*.bin) nor a config.json."
    )


def _of_config(path: Path, trust_remote_code: bool) -> dict[str, int]:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"{path} has a config.json but no weights, so transformers is needed to create the model "
            "(without using memory): pip install transformers"
        ) from None
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            # Use the class that the file names, because AutoModel would leave out the head.
            named = getattr(transformers, (config.architectures or [""])[0], None)
            auto: Any = transformers.AutoModel
            if named is not None:
                model = named._from_config(config)
            else:
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types of errors for invalid configs
        text = f"transformers cannot create the model of {path}/config.json: {_reason(error)}"
        raise ConfigurationError(text) from None
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _of_hub(name: str) -> dict[str, int]:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigurationError(
            f"There is no file or folder {name!r}. To look it up on the Hugging Face Hub: "
            "pip install huggingface_hub"
        ) from None
    try:
        found = huggingface_hub.get_safetensors_metadata(name)
    except Exception as error:  # the library raises many types of errors
        raise ConfigurationError(
            f"There is no file or folder {name!r}, and its shapes could not be read from the Hugging "
            f"Face Hub: {_reason(error)}"
        ) from None
    files = found.files_metadata.values()
    return {
        tensor: math.prod(about.shape) for file in files for tensor, about in file.tensors.items()
    }


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def plan_of(
    sizes: Mapping[str, int],
    dtype: str,
    strategy: str,
    max_memory: dict[DeviceName, float | str] | None = None,
) -> Plan:
    """Return the device map that a strategy creates, using only the sizes of the tensors.

    Numbered blocks are not split.
    """
    import torch
    from torch import nn

    from accelerate_big_model.device_map import get_balanced_memory, plan_device_map

    class Block(nn.Module):
        """A module that is not split."""

    _check_dtype(dtype)
    model = nn.Module()
    for name, count in sizes.items():
        *path, leaf = name.split(".")
        owner = model
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, Block() if step.isdigit() else nn.Module())
            owner = owner.get_submodule(step)
        taken = math.ceil(count * DTYPES[dtype])
        owner.register_parameter(
            leaf,
            nn.Parameter(torch.empty(taken, dtype=torch.uint8, device="meta"), requires_grad=False),
        )
    for module in model.modules():  # sort the blocks, because files list 10 before 2
        if all(name.isdigit() for name in module._modules):
            module._modules = dict(sorted(module._modules.items(), key=lambda one: int(one[0])))
    if strategy != "sequential":
        sparing = strategy == "balanced_low_0"
        max_memory = dict(get_balanced_memory(model, max_memory, ["Block"], low_zero=sparing))
    return plan_device_map(model, max_memory, ["Block"])


def largest_layer(sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the largest block and its number of elements. A block is numbered, or else one module."""
    blocks: dict[str, int] = {}
    for name, count in sizes.items():
        found = _BLOCK.match(name)
        block = found.group(1) if found else name.rpartition(".")[0] or name
        blocks[block] = blocks.get(block, 0) + count
    return max(blocks.items(), key=lambda item: item[1]) if blocks else ("", 0)


def by_dtype(
    sizes: Mapping[str, int], dtypes: Sequence[str], optimizer: str
) -> list[dict[str, Any]]:
    """Return one row per dtype, in bytes. Training values are None if the dtype can't be trained."""
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        parts: dict[str, Any] = _parts(sizes, dtype, optimizer)
        parts["training"] = parts["weights"] + parts["gradients"] + parts["optimizer"]
        if DTYPES[dtype] < 2:
            parts |= dict.fromkeys(("gradients", "optimizer", "training"))
        rows.append({"dtype": dtype, **parts})
    return rows


def by_backend(
    sizes: Mapping[str, int],
    dtypes: Sequence[str],
    optimizer: str,
    worlds: Sequence[int],
    environ: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return the bytes that training needs on one rank, per dtype, backend mode and world size.

    Each backend declares what it shards (`Backend.shards`). If that includes weights, the estimate
    adds the largest layer, which is gathered while it computes.
    """
    disabled = disabled_names(environ)
    modes: list[tuple[str, Sequence[str]]] = []
    for record in installed().of_kind("backend"):
        if record.name not in disabled:
            with suppress(PluginError):  # `accelerate-core plugins` shows broken plugins
                shards = getattr(record.load(), "shards", None) or {}
                modes += [(f"{record.name} {mode}".strip(), shards[mode]) for mode in shards]
    rows = []
    for dtype in dtypes:
        parts = _parts(sizes, dtype, optimizer)
        for name, divided in modes if DTYPES[dtype] >= 2 else ():
            taken = {str(world): _rank(parts, divided, world) for world in worlds}
            rows.append({"dtype": dtype, "backend": name, "bytes": taken})
    return rows


def _rank(parts: Mapping[str, int], divided: Sequence[str], world: int) -> int:
    total = sum(
        math.ceil(parts[name] / world) if name in divided else parts[name]
        for name in ("weights", "gradients", "optimizer")
    )
    return total + (parts["largest_layer"] if "weights" in divided and world > 1 else 0)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigurationError(
            f"dtypes: {dtype!r} is not one of {listing(DTYPES)}.{did_you_mean(dtype, DTYPES)}"
        )


def _parts(sizes: Mapping[str, int], dtype: str, optimizer: str) -> dict[str, int]:
    _check_dtype(dtype)
    if optimizer.lower() not in _OPTIMIZERS:
        hint = did_you_mean(optimizer, _OPTIMIZERS)
        raise ConfigurationError(
            f"optimizer={optimizer!r} is not one of {listing(_OPTIMIZERS)}.{hint}"
        )
    weights = math.ceil(sum(sizes.values()) * DTYPES[dtype])
    return {
        "weights": weights,
        "largest_layer": math.ceil(largest_layer(sizes)[1] * DTYPES[dtype]),
        "gradients": weights,
        "optimizer": weights * _OPTIMIZERS[optimizer.lower()],
    }
