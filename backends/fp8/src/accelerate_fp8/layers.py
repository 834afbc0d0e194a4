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
#: fp8 matrix products need sizes that are multiples of this.
MULTIPLE = 16
#: Reason for a layer that already computed in fp8 before it was prepared.
ALREADY = "in fp8 already"


@dataclass(frozen=True)
class Layer:
    """A layer of a model, and the reason why it is not converted ("" if it is)."""

    name: str
    sizes: str
    reason: str
    #: What it is converted to. For linear layers, this starts with "fp8".
    becomes: str = "fp8"

    @property
    def rows(self) -> int:
        """Number of rows of its weight."""
        return int(self.sizes.partition(" ")[0])

    @property
    def in_fp8(self) -> bool:
        """Whether it computes in fp8."""
        return self.reason in ("", ALREADY)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return all linear layers in the model's order.

    This includes the `Conv1D` of Transformers' GPT-2, a linear layer with a transposed weight.
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
    """Return the default filter for a model.

    It accepts all linear layers whose sizes are multiples of 16, except the first and the last.
    """
    names = [name for name, layer in linear_layers(model).items() if isinstance(layer, nn.Linear)]

    def takes(module: nn.Module, name: str) -> bool:
        return name not in names[:1] + names[-1:] and not _odd_sizes(module)

    return takes


def survey(
    model: nn.Module, chosen: Filter | None, refusal: str = "module_filter_func returned False"
) -> list[Layer]:
    """Determine which linear layers can be converted, and why the others cannot.

    A layer is not converted if a replacement might behave differently: if it has its own class,
    hooks, a replaced `forward`, attributes that are not plain data, or a weight that it shares
    with another module.

    Args:
        chosen: the user's filter, or None for `usual_filter`.
        refusal: the reason to report for layers that the filter rejects.
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
            reason = f"shares its weight with {others[0]}"
        elif own := own_behaviour(layer):
            reason = own
        elif not takes(layer, name):
            reason = _why(layer, name, ends) if chosen is None else refusal
        found.append(Layer(name, " x ".join(map(str, _sizes(layer))), reason))
    return found


def own_behaviour(layer: nn.Module) -> str:
    """Return what a replacement of this layer would lack, or an empty string.

    Private attributes are ignored, because libraries set them on every layer.
    """
    has = vars(layer)
    if "forward" in has or any(has[name] for name in has if name.endswith("_hooks")):
        return "it has hooks or a replaced forward"
    names = [*layer._parameters, *layer._buffers, *layer._modules]
    more = [name for name in names if name not in _usual(isinstance(layer, nn.Linear))]
    more += [name for name, value in _own(layer).items() if not isinstance(value, _PLAIN)]
    return f"it has the attribute {more[0]!r}, which torch's layer doesn't have" if more else ""


#: Types of attributes that can be copied to a replacement, because they change nothing themselves.
_PLAIN = (bool, int, float, str, type(None))


def _own(layer: nn.Module) -> dict[str, Any]:
    """Return the public attributes that were set on a layer."""
    usual = _usual(isinstance(layer, nn.Linear))
    return {k: v for k, v in vars(layer).items() if k[0] != "_" and k not in usual}


def carry_attributes(made: nn.Module, layer: nn.Module) -> None:
    """Copy the plain attributes of `layer` to its replacement `made`.

    Raises:
        PrepareError: the replacement already has an attribute with that name.
    """
    for name, value in _own(layer).items():
        if hasattr(made, name):
            raise PrepareError(
                f"A layer to convert to fp8 has the attribute {name}={value!r}, but its replacement "
                f"{type(made).__name__} already has an attribute with that name. Rename yours."
            )
        setattr(made, name, value)


@cache
def _usual(linear: bool) -> frozenset[str]:
    made = nn.Linear(1, 1, device="meta") if linear else nn.LayerNorm(1, device="meta")
    return frozenset([*vars(made), *made._parameters])


def note_replaced(made: nn.Module, layer: nn.Module) -> nn.Module:
    """Record that `made` replaces `layer`, and copy the attributes set by the script.

    Backends use the record to find a replacement for a layer or class that the user named.
    """
    carry_attributes(made, layer)
    made._replaced_class = type(layer).__name__  # type: ignore[assignment]
    vars(layer)["_replaced_by"] = made  # a plain assignment would register it as a submodule
    return made


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, by its id. A tied parameter has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _sizes(layer: Any) -> tuple[int, ...]:
    # Not from the weight of a linear layer, which is empty with ZeRO-3.
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return tuple(layer.weight.shape)


def _odd_sizes(module: Any) -> bool:
    return any(size % MULTIPLE for size in _sizes(module))


def _why(layer: nn.Module, name: str, ends: list[str]) -> str:
    if _odd_sizes(layer):
        return f"sizes are not multiples of {MULTIPLE}"
    return "the first linear layer" if name == ends[0] else "the last linear layer"


def table(layers: list[Layer]) -> list[str]:
    """Return the lines of the table of layers.

    Layers that are alike share one line if their names only differ in numbers.
    """
    rows: dict[tuple[str, str, str], int] = {}
    for one in layers:
        pattern = re.sub(r"\b\d+\b", "*", one.name) or "(the model itself)"
        key = (pattern, one.sizes, one.reason or one.becomes)
        rows[key] = rows.get(key, 0) + 1
    width = max((len(name) for name, _, _ in rows), default=0)
    return [
        f"  {name:<{width}}  {count:>4}  {sizes:>13}  {status}"
        for (name, sizes, status), count in rows.items()
    ]


def linear(layers: list[Layer]) -> list[Layer]:
    """Return only the linear layers. Some libraries convert other layers too."""
    return [one for one in layers if one.becomes.startswith("fp8")]


def converted(layers: list[Layer]) -> Mapping[str, Layer]:
    """Return the layers that are converted, by name."""
    return {one.name: one for one in layers if not one.reason}
