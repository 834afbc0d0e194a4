"""One process, a mesh of all devices: which tensor lies where.

XLA places every operation by the shardings of what goes in, and adds the collectives. So a sharding
is a hint: results are those of one device, whatever it is.
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

#: Style -> which dimension of a Linear's weight, and of an Embedding's, lies over `tp`.
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
    """Where a parameter lies: the dimension of the mesh, or None, per dimension of its own."""

    parameter: nn.Parameter
    spec: Spec


class Sharding:
    """The shardings of one mesh.

    Args:
        mesh: of torch_xla.
        sizes: dimension -> number of devices, those above 1.
        hosts: processes that each give a part of the global batch.
    """

    def __init__(self, mesh: Any, sizes: Mapping[str, int], hosts: int = 1) -> None:
        self.mesh = mesh
        self._sizes = dict(sizes)
        self._hosts = hosts
        data = tuple(name for name in ("dp_replicate", "dp_shard") if name in sizes)
        #: What a batch's first dimension lies over.
        self._data: Any = data[0] if len(data) == 1 else data or None
        self._batches: dict[int, Any] = {}
        self._of: dict[int, Placed] = {}

    @property
    def data_parallel(self) -> int:
        """Number of parts of a batch."""
        return self._sizes.get("dp_replicate", 1) * self._sizes.get("dp_shard", 1)

    # --- batches ----------------------------------------------------------------------------------

    def put(self, batch: Any, device: torch.device) -> Any:
        """Move a batch, its samples dealt to the devices; what cannot be dealt is on each of them."""
        send = imported("core.xla_model").send_cpu_data_to_device

        def put(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            dealt = tensor.ndim and not tensor.shape[0] % (self.data_parallel // self._hosts)
            spec = self._batch_spec(tensor) if dealt and self._data else None
            moved: torch.Tensor = send([tensor], device, input_sharding=spec)[0]
            return moved

        return map_tensors(put, batch)

    def _batch_spec(self, tensor: torch.Tensor) -> Any:
        """Return how samples are dealt, None where torch_xla cannot say it.

        A tensor of fewer dimensions than the mesh, such as labels, is moved whole; XLA takes each
        device's part of it.
        """
        if tensor.ndim not in self._batches:
            make = imported("distributed.spmd").ShardingSpec
            spec = make(self.mesh, (self._data, *(None,) * (tensor.ndim - 1)), self._hosts > 1)
            can = tensor.ndim >= len(self._sizes)
            self._batches[tensor.ndim] = spec if can else None
        return self._batches[tensor.ndim]

    # --- parameters and what belongs to them ------------------------------------------------------

    def place(self, model: nn.Module, plan: Mapping[str, Any] | None) -> None:
        """Place a model's parameters: over `tp` by the plan, then over `dp_shard`.

        Raises:
            ConfigurationError: the plan names no module, or a style that is not known.
        """
        chosen = self._by_plan(model, plan) if self._sizes.get("tp", 1) > 1 else {}
        shards = self._sizes.get("dp_shard", 1)
        for parameter in model.parameters():
            spec = list(chosen.get(id(parameter), (None,) * parameter.ndim))
            if shards > 1:
                # As FSDP does, along the first dimension that can be divided.
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
                f"Tensor parallelism needs a plan, and {type(model).__name__} has no tp_plan: "
                "ParallelismConfig(tp_handler={'layers.*.fc1': 'colwise', 'layers.*.fc2': 'rowwise'})."
            )
        chosen: dict[int, Spec] = {}
        for name, module, style in _matches(model, plan):
            dimensions = _dimensions(style)
            if dimensions is None:
                continue
            if not isinstance(module, nn.Linear | nn.Embedding):
                raise ConfigurationError(
                    f"The tensor parallel plan splits {name!r}, a {type(module).__name__}; only Linear "
                    "and Embedding can be split. Name the layers inside of it."
                )
            at = dimensions[isinstance(module, nn.Embedding)]
            if module.weight.shape[at] % self._sizes["tp"]:
                raise ConfigurationError(
                    f"Tensor parallelism over {self._sizes['tp']} devices cannot divide dimension {at} of "
                    f"{name}.weight, which is {list(module.weight.shape)}. Choose a size it divides, "
                    "or leave that module out of the plan."
                )
            spec = tuple("tp" if dimension == at else None for dimension in range(2))
            if chosen.setdefault(id(module.weight), spec) != spec:
                raise ConfigurationError(
                    f"{name}.weight is also another module's, which the tensor parallel plan splits "
                    "along the other dimension. Give both modules styles that split it alike (an "
                    "embedding 'rowwise' and a head 'colwise'), or leave both out."
                )
            bias = getattr(module, "bias", None)
            if bias is not None and at == 0:
                chosen[id(bias)] = ("tp",)
        return chosen

    def placed(self, parameter: torch.Tensor) -> Placed | None:
        """Return where a parameter lies, None for one that was not placed."""
        found = self._of.get(id(parameter))
        return found if found is not None and found.parameter is parameter else None

    def place_state(self, optimizer: Any) -> None:
        """Place an optimizer's state that was loaded, as its parameters lie."""
        for parameter, state in optimizer.state.items():
            if (found := self.placed(parameter)) is None:
                continue
            for value in state.values():
                alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if alike and value.device.type == "xla":
                    self._mark(value, found.spec)

    def again(self, model: nn.Module) -> None:
        """Place a model's parameters as before, after they were loaded."""
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
        """Return one line for each sharding: how many tensors, and bytes per device."""
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
                f"The tensor parallel plan names {pattern!r}, which matches no module of "
                f"{type(model).__name__}.{did_you_mean(pattern, general)}"
            )
        for name in hits:
            yield name, modules[name], style


def _dimensions(style: Any) -> tuple[int, int] | None:
    if not isinstance(style, str) or style not in _STYLES:
        raise ConfigurationError(
            f"The tensor parallel plan has the style {style!r}; XLA, which places activations by "
            f"itself, takes {listing(_STYLES)}.{did_you_mean(str(style), _STYLES)}"
        )
    return _STYLES[style]
