"""SPMD: how tensors are sharded when one process computes on a mesh of all devices.

XLA derives the placement of each operation from the shardings of its inputs, and inserts the
collectives. A sharding is therefore only a hint. Results don't depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate_core.plugin import ConfigurationError, did_you_mean, listing, map_tensors
from accelerate_xla.library import imported

#: Style -> the dimension of a Linear's weight, and of an Embedding's, that is split across `tp`.
_STYLES: dict[str, tuple[int, int] | None] = {
    "colwise": (0, 1),
    "colwise_rep": (0, 1),
    "colwise_gather_output": (0, 1),
    "rowwise": (1, 0),
    "rowwise_rep": (1, 0),
    "embedding_rowwise": (1, 0),
    "replicate": None,
}

Spec = tuple[Any, ...]


@dataclass(frozen=True)
class Placed:
    """The sharding of a parameter: a mesh dimension, or None, for each dimension of the parameter."""

    parameter: nn.Parameter
    spec: Spec


class Sharding:
    """The shardings of one mesh.

    Args:
        mesh: the mesh, an object of torch_xla.
        sizes: dimension -> number of devices, without dimensions of size 1.
        hosts: number of processes that each provide a part of the global batch.
    """

    def __init__(self, mesh: Any, sizes: Mapping[str, int], hosts: int = 1) -> None:
        self.mesh = mesh
        self._sizes = dict(sizes)
        self._hosts = hosts
        data = tuple(name for name in ("dp_replicate", "dp_shard") if name in sizes)
        #: The mesh dimensions over which the first dimension of a batch is split.
        self._data: Any = data[0] if len(data) == 1 else data or None
        self._batches: dict[int, Any] = {}
        self._of: dict[int, Placed] = {}

    @property
    def data_parallel(self) -> int:
        """Number of parts into which a batch is split."""
        return self._sizes.get("dp_replicate", 1) * self._sizes.get("dp_shard", 1)

    # --- batches ----------------------------------------------------------------------------------

    def put(self, batch: Any, device: torch.device) -> Any:
        """Move a batch to the devices, with its samples split between them.

        A tensor that cannot be split evenly is copied to every device.
        """
        send = imported("core.xla_model").send_cpu_data_to_device

        def put(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            splits = tensor.ndim and not tensor.shape[0] % (self.data_parallel // self._hosts)
            spec = self._batch_spec(tensor) if splits and self._data else None
            moved: torch.Tensor = send([tensor], device, input_sharding=spec)[0]
            return moved

        return map_tensors(put, batch)

    def _batch_spec(self, tensor: torch.Tensor) -> Any:
        """Return how samples are split, or None if torch_xla cannot express it.

        A tensor with fewer dimensions than the mesh, such as labels, is copied to every device. XLA
        then uses the part that each device needs.
        """
        if tensor.ndim not in self._batches:
            make = imported("distributed.spmd").ShardingSpec
            spec = make(self.mesh, (self._data, *(None,) * (tensor.ndim - 1)), self._hosts > 1)
            can = tensor.ndim >= len(self._sizes)
            self._batches[tensor.ndim] = spec if can else None
        return self._batches[tensor.ndim]

    # --- parameters and optimizer state -----------------------------------------------------------

    def place(self, model: nn.Module, plan: Mapping[str, Any] | None) -> None:
        """Shard a model's parameters, over `tp` according to the plan, then over `dp_shard`.

        Raises:
            ConfigurationError: there is no plan, it matches no module, has an unknown style, or
                asks for a split that is not possible.
        """
        chosen = self._by_plan(model, plan) if self._sizes.get("tp", 1) > 1 else {}
        shards = self._sizes.get("dp_shard", 1)
        for parameter in model.parameters():
            spec = list(chosen.get(id(parameter), (None,) * parameter.ndim))
            if shards > 1:
                # Along the first dimension that is divisible.
                for dimension, taken in enumerate(spec):
                    if taken is None and not parameter.shape[dimension] % shards:
                        spec[dimension] = "dp_shard"
                        break
            self._of[id(parameter)] = Placed(parameter, tuple(spec))
            self._mark(parameter, tuple(spec))

    def _by_plan(self, model: nn.Module, given: Mapping[str, Any] | None) -> dict[int, Spec]:
        plan = given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not plan:
            raise ConfigurationError(
                f"Tensor parallelism needs a plan, but {type(model).__name__} has no tp_plan. Pass "
                "one, such as ParallelismConfig(tp_handler={'layers.*.fc1': 'colwise', "
                "'layers.*.fc2': 'rowwise'})."
            )
        chosen: dict[int, Spec] = {}
        for name, module, style in _matches(model, plan):
            dimensions = _dimensions(style)
            if dimensions is None:
                continue
            if not isinstance(module, nn.Linear | nn.Embedding):
                raise ConfigurationError(
                    f"The tensor parallel plan splits {name!r}, a {type(module).__name__}, but only "
                    "Linear and Embedding can be split. Name the layers inside it instead."
                )
            at = dimensions[isinstance(module, nn.Embedding)]
            if module.weight.shape[at] % self._sizes["tp"]:
                raise ConfigurationError(
                    f"Dimension {at} of {name}.weight, with shape {list(module.weight.shape)}, is not "
                    f"divisible by tp_size={self._sizes['tp']}. Change the size, or remove this "
                    "module from the plan."
                )
            spec = tuple("tp" if dimension == at else None for dimension in range(2))
            if chosen.setdefault(id(module.weight), spec) != spec:
                raise ConfigurationError(
                    f"{name}.weight is shared with another module, which the tensor parallel plan "
                    "splits along the other dimension. Use styles that split it along the same "
                    "dimension ('rowwise' for an embedding and 'colwise' for a head), or remove both "
                    "from the plan."
                )
            bias = getattr(module, "bias", None)
            if bias is not None and at == 0:
                chosen[id(bias)] = ("tp",)
        return chosen

    def placed(self, parameter: torch.Tensor) -> Placed | None:
        """Return the sharding of a parameter, or None if it has none."""
        found = self._of.get(id(parameter))
        return found if found is not None and found.parameter is parameter else None

    def place_state(self, optimizer: Any) -> None:
        """Shard the loaded state of an optimizer like its parameters."""
        for parameter, state in optimizer.state.items():
            if (found := self.placed(parameter)) is None:
                continue
            for value in state.values():
                alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if alike and value.device.type == "xla":
                    self._mark(value, found.spec)

    def again(self, model: nn.Module) -> None:
        """Shard a model's parameters as before, after new values were loaded."""
        for parameter in model.parameters():
            if (found := self.placed(parameter)) is not None:
                self._mark(parameter, found.spec)

    def forget(self) -> None:
        """Forget the models."""
        self._of.clear()

    def _mark(self, tensor: torch.Tensor, spec: Spec) -> None:
        sharding = imported("distributed.spmd")
        inner = imported()._XLAC
        value = tensor.data
        if inner._get_xla_sharding_spec(value):
            sharding.clear_sharding(value)
        sharding.mark_sharding(value, self.mesh, spec)

    def table(self) -> list[str]:
        """Return a line for each sharding, with the number of tensors and the bytes per device."""
        found: dict[Spec, list[int]] = {}
        for one in self._of.values():
            parts = 1
            for name in one.spec:
                parts *= self._sizes.get(name, 1) if name else 1
            held = one.parameter.numel() * one.parameter.element_size() // parts
            found.setdefault(tuple(sorted({n for n in one.spec if n})), []).append(held)
        return [
            f"over {' and '.join(names) or 'nothing (on each device)'}: {len(sizes)} parameters, "
            f"{sum(sizes)} bytes per device"
            for names, sizes in sorted(found.items())
        ]


def _matches(model: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, Any]]:
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        hits = [name for name in modules if expression.fullmatch(name)]
        if not hits:
            general = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules})
            raise ConfigurationError(
                f"{pattern!r} in the tensor parallel plan matches no module of "
                f"{type(model).__name__}.{did_you_mean(pattern, general)}"
            )
        for name in hits:
            yield name, modules[name], style


def _dimensions(style: Any) -> tuple[int, int] | None:
    if not isinstance(style, str) or style not in _STYLES:
        raise ConfigurationError(
            f"XLA does not support the style {style!r} in a tensor parallel plan. It supports "
            f"{listing(_STYLES)}.{did_you_mean(str(style), _STYLES)}"
        )
    return _STYLES[style]
