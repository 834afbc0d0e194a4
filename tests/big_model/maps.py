"""Create device maps of small models, with accelerate-core or with Hugging Face Accelerate.

This records the maps of an installed Hugging Face Accelerate:

    python tests/big_model/maps.py tests/big_model/maps.json

`test_maps.py` creates them with accelerate-core and compares.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

Shares = dict[int | str, float]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.act = nn.Linear(width, 3 * width), nn.GELU()
        self.down = nn.Linear(3 * width, width)


class Language(nn.Module):
    """A lone parameter and buffer, an embedding, blocks, and a head."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.position = nn.Parameter(torch.zeros(6, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 40, bias=bias)
        self.register_buffer("scale", torch.zeros(5))


class Declared(Language):
    _no_split_modules = ["Block"]


def layers(*widths: int, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for width in widths))


def triples() -> nn.Module:
    def triple() -> nn.Module:
        return nn.ModuleDict({"p": nn.Linear(3, 4), "q": nn.BatchNorm1d(4), "r": nn.Linear(4, 5)})

    # Accelerate confuses names with several numbers, so the names here are letters.
    return nn.ModuleDict({name: triple() for name in "abc"})


def tied(model: nn.Module, *groups: str) -> nn.Module:
    """Tie the parameters of each group, a string of names, to the first one."""
    for group in groups:
        first, *others = group.split()
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    return model


def buffered(model: nn.Module, sizes: dict[str, int], dtype: Any = None) -> nn.Module:
    """Register a buffer in each named submodule, with the given number of elements."""
    for name, size in sizes.items():
        model.get_submodule(name).register_buffer("extra", torch.zeros(size, dtype=dtype))
    return model


def twice() -> nn.Module:
    model = layers(6, 6, 9)
    return model.append(model[0])


def with_a_parameter() -> nn.Module:
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "second": Block(6)})
    model["second"].register_parameter("own", model["first"].weight)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal": partial(layers, 10, 10, 10, 10, 10, 10, bias=False),
    "growing": partial(layers, 3, 5, 7, 9, 11),
    "shrinking": partial(layers, 11, 9, 7, 5, 3),
    "bfloat16": lambda: layers(4, 12, 6).append(Block(10)).append(nn.Linear(14, 2)).bfloat16(),
    "triples": triples,
    "alone": partial(layers, 5),
    "one child": lambda: nn.Sequential(nn.Sequential(layers(4, 6))),
    "weightless": lambda: nn.Sequential(
        nn.Linear(9, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 3)
    ),
    "language": Language,
    "tied language": lambda: tied(Language(), "embed.weight head.weight"),
    "tied and a bias": lambda: tied(Language(bias=True), "embed.weight head.weight"),
    "tied ends": lambda: tied(triples(), "a.r.weight c.r.weight"),
    "tied thrice": lambda: tied(triples(), "a.r.weight b.r.weight c.r.weight"),
    "tied groups": lambda: tied(triples(), "a.p.weight c.p.weight", "b.r.weight c.r.weight"),
    "tied layers": lambda: tied(layers(6, 8, 6, 8), "0.weight 2.weight", "0.bias 2.bias"),
    "tied parameter": with_a_parameter,
    "tied tenth": lambda: tied(layers(6, 6, 6, 4, 4, 4, 4, 4, 4, 4, 6), "0.weight 10.weight"),
    "twice": twice,
    "buffers": lambda: buffered(triples(), {"a.p": 20, "b.q": 70, "b.r": 30, "c.p": 9}),
    "integers": lambda: buffered(layers(6, 6, 6), {"0": 30, "2": 12}, torch.int64),
    "block's buffer": lambda: buffered(triples(), {"b": 40}),
    "declared": Declared,
}
#: Memory limits by name, as shares of the model's bytes.
MEMORY: dict[str, Shares] = {
    "whole": {0: 1},
    "and cpu": {0: 0.6, "cpu": 3},
    "and disk": {0: 0.55, "cpu": 0.45},
    "two": {0: 0.6, 1: 0.6},
    "three": {0: 0.45, 1: 0.2, 2: 0.35, "cpu": 1},
    "cpu": {"cpu": 0.5},
    "none": {0: 0, 1: 0.7, "cpu": 1},
    "small": {0: 0.3, 1: 0.1, "cpu": 0.2, "disk": 0.1},
    "gap": {1: 0.5, 3: 0.8},
    "mps": {"mps": 0.6, "cpu": 1},
}
#: Options, and the memory limits that they are tried with.
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "": ({}, tuple(MEMORY)),
    "fallback": ({"fallback_allocation": True}, ("and disk", "three", "small")),
    "blocks": (
        {"no_split_module_classes": ["Block", "Sequential", "ModuleDict"]},
        ("and cpu", "three"),
    ),
    "half": ({"dtype": torch.float16}, ("and disk", "three")),
    "special": ({"dtype": "float16", "special_dtypes": True}, ("and disk",)),
    "parts": ({"clean_result": False}, ("and disk", "small")),
    "offload": ({"offload_buffers": True, "fallback_allocation": True}, ("and disk",)),
}
BALANCED: dict[str, Shares] = {
    "two": {0: 0.9, 1: 0.9},
    "three": {0: 0.5, 1: 0.6, 2: 0.7, "cpu": 1},
    "one": {0: 0.9, "cpu": 1},
    "much": {0: 2, 1: 2, 2: 0.1},
}


def limits(model: nn.Module, shares: Shares) -> dict[int | str, int]:
    tensors = {id(one): one.nbytes for one in [*model.parameters(), *model.buffers()]}
    return {device: int(share * sum(tensors.values())) for device, share in shares.items()}


def said(make: Callable[[], dict[Any, Any]]) -> str:
    """Return a map as a line, with "warns" at the end if there was a warning, or an error's name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = sorted(f"{name}={value}" for name, value in make().items())
        except Exception as error:
            return type(error).__name__
    return " ".join([*made, *["warns"] * bool(caught)])


def run(name: str, infer: Any, balance: Any) -> dict[str, str]:
    """Return the lines for one model, by case."""
    model = MODELS[name]()
    biases = [bias for bias, _ in model.named_parameters() if bias.endswith("bias")]
    found: dict[str, str] = {}
    for how, (options, sizes) in OPTIONS.items():
        more = dict(options)
        if "special_dtypes" in more:
            more["special_dtypes"] = dict.fromkeys(biases, torch.float32)
        for size in sizes:
            memory = limits(model, MEMORY[size])
            found[f"{size}, {how}"] = said(partial(infer, model, memory, **more))
    for size, shares in BALANCED.items():
        for how in ("", "blocks", "half"):
            for low in (False, True):
                memory = limits(model, shares)
                more = {**OPTIONS[how][0], "low_zero": low}
                line = said(partial(balance, model, memory, **more))
                found[f"balanced: {size}, {how}{' low' * low}"] = line
    return found


def record(target: Path) -> None:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    found = {name: run(name, infer_auto_device_map, get_balanced_memory) for name in MODELS}
    target.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
