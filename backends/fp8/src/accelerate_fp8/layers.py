"""Which linear layers of a model compute in fp8, and why others do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from accelerate_core.plugin import PrepareError

#: `(module, name) -> bool`: whether a layer is converted.
Filter = Callable[[nn.Module, str], bool]
#: Matrix products in fp8 take sizes that are multiples of it.
MULTIPLE = 16
#: Reason of a layer that computes in fp8 and was not converted here.
ALREADY = "in fp8 already"


@dataclass(frozen=True)
class Layer:
    """A layer of a model, and why it is not converted: "" if it is."""

    name: str
    sizes: str
    reason: str
    #: What it is once converted; of linear layers it begins with "fp8".
    becomes: str = "fp8"

    @property
    def rows(self) -> int:
        """Rows of its weight."""
        return int(self.sizes.partition(" ")[0])

    @property
    def in_fp8(self) -> bool:
        """Whether it computes in fp8."""
        return self.reason in ("", ALREADY)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that are linear, or called so by a library, in the model's order.

    Transformers' `Conv1D` of GPT-2 is one whose weight is transposed.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or _is_transposed(module)
    }


def _is_transposed(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def usual_filter(model: nn.Module) -> Filter:
    """Return the filter for a model that takes all linear layers but the first and the last,
    whose sizes are multiples of 16.
    """
    names = [name for name, layer in linear_layers(model).items() if isinstance(layer, nn.Linear)]

    def takes(module: nn.Module, name: str) -> bool:
        return name not in names[:1] + names[-1:] and not _odd_sizes(module)

    return takes


def survey(
    model: nn.Module, chosen: Filter | None, refusal: str = "module_filter_func says no"
) -> list[Layer]:
    """Say of each linear layer whether it can be converted; `chosen` is the user's filter.

    `refusal` is the reason of those that it does not take.

    Left alone is what another layer would not behave like: one of a class of its own, with hooks,
    attributes that are no plain data or a forward put in its place, or with a weight that another
    module has too.
    """
    takes = usual_filter(model) if chosen is None else chosen
    holders = names_of(model)
    layers = linear_layers(model)
    ends = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    found = []
    for name, layer in layers.items():
        reason = ""
        weight = f"{name}.weight".lstrip(".")
        others = [n for n in holders.get(id(getattr(layer, "weight", None)), ()) if n != weight]
        if type(layer).__module__.startswith("torchao.float8"):
            reason = ALREADY
        elif type(layer) is not nn.Linear:
            reason = f"a {type(layer).__name__}, not torch's Linear"
        elif others:
            reason = f"its weight is {others[0]}, too"
        elif own := own_behaviour(layer):
            reason = own
        elif not takes(layer, name):
            reason = _why(layer, name, ends) if chosen is None else refusal
        found.append(Layer(name, " x ".join(map(str, _sizes(layer))), reason))
    return found


def own_behaviour(layer: nn.Module) -> str:
    """Return what a layer has that one in its place would not, "" if nothing.

    Private attributes are not looked at: libraries leave marks on every layer.
    """
    has = vars(layer)
    if "forward" in has or any(has[name] for name in has if name.endswith("_hooks")):
        return "it has hooks, or another forward"
    names = [*layer._parameters, *layer._buffers, *layer._modules]
    more = [name for name in names if name not in _usual(isinstance(layer, nn.Linear))]
    more += [name for name, value in _own(layer).items() if not isinstance(value, _PLAIN)]
    return f"it has {more[0]!r}, which torch's has not" if more else ""


#: What another layer can have as well: it changes nothing by itself.
_PLAIN = (bool, int, float, str, type(None))


def _own(layer: nn.Module) -> dict[str, Any]:
    """Return the public attributes that were set on a layer."""
    usual = _usual(isinstance(layer, nn.Linear))
    return {k: v for k, v in vars(layer).items() if k[0] != "_" and k not in usual}


def carry_attributes(made: nn.Module, layer: nn.Module) -> None:
    """Give the layer in another's place the numbers and texts that were set on that one.

    Raises:
        PrepareError: it has something of that name itself.
    """
    for name, value in _own(layer).items():
        if hasattr(made, name):
            raise PrepareError(
                f"A layer that is to compute in fp8 has the attribute {name}={value!r}, and so has the "
                f"{type(made).__name__} in its place. Rename it."
            )
        setattr(made, name, value)


@cache
def _usual(linear: bool) -> frozenset[str]:
    made = nn.Linear(1, 1, device="meta") if linear else nn.LayerNorm(1, device="meta")
    return frozenset([*vars(made), *made._parameters])


def note_replaced(made: nn.Module, layer: nn.Module) -> nn.Module:
    """Let backends that are told of layers, or of their classes, find what is in their place.

    What a script has set on a layer goes along.
    """
    carry_attributes(made, layer)
    made._replaced_class = type(layer).__name__  # type: ignore[assignment]
    vars(layer)["_replaced_by"] = made  # a module's own way would make it a part of the layer
    return made


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, by its id: several where it is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _sizes(layer: Any) -> tuple[int, ...]:
    # Not of a linear layer's weight, which ZeRO-3 has empty.
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return tuple(layer.weight.shape)


def _odd_sizes(module: Any) -> bool:
    return any(size % MULTIPLE for size in _sizes(module))


def _why(layer: nn.Module, name: str, ends: list[str]) -> str:
    if _odd_sizes(layer):
        return f"sizes are no multiples of {MULTIPLE}"
    return "the first linear layer" if name == ends[0] else "the last linear layer"


def table(layers: list[Layer]) -> list[str]:
    """Return a line for all layers alike: names that differ in numbers alone are one."""
    rows: dict[tuple[str, str, str], int] = {}
    for one in layers:
        pattern = re.sub(r"\b\d+\b", "*", one.name) or "(the model itself)"
        key = (pattern, one.sizes, one.reason or one.becomes)
        rows[key] = rows.get(key, 0) + 1
    width = max((len(name) for name, _, _ in rows), default=0)
    return [
        f"  {name:<{width}}  {count:>4}  {sizes:>13}  {told}"
        for (name, sizes, told), count in rows.items()
    ]


def linear(layers: list[Layer]) -> list[Layer]:
    """Return those that are linear, of all a library converts."""
    return [one for one in layers if one.becomes.startswith("fp8")]


def converted(layers: list[Layer]) -> Mapping[str, Layer]:
    """Return the layers that are converted, by name."""
    return {one.name: one for one in layers if not one.reason}
