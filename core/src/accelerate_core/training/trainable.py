"""Notices parameters of prepared models that are frozen, unfrozen or added after `prepare`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from accelerate_core.builtin.compiled import canonical_key
from accelerate_core.contract.trainable import TrainableChange, shorten
from accelerate_core.errors import ConfigurationError

#: Reads whether a parameter requires gradients, without a Python call.
requires_grad = operator.attrgetter("requires_grad")


@dataclass(eq=False)
class TrainableRecord:
    """The trainable parameters of one prepared model, as its backend knows them.

    Args:
        model: the prepared model.
        module: the user's own model inside it.
    """

    model: torch.nn.Module
    module: torch.nn.Module
    #: The model's parameters, and whether each required gradients when it was last read.
    parameters: list[torch.Tensor] = field(init=False)
    seen: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._names: dict[str, torch.Tensor] = {}
        self._names = self._read()
        self._passing: dict[int, torch.Tensor] = {}
        self.accept()

    @property
    def differs(self) -> bool:
        """Whether a parameter was frozen or unfrozen since this was last read."""
        return list(map(requires_grad, self.parameters)) != self.seen

    def note(self) -> None:
        """Record what trains in a micro-batch that doesn't synchronise, until one does."""
        self._passing |= _trained(self._read())
        self.seen = []  # differs from every state

    def change(self) -> TrainableChange | None:
        """Return what changed since the backend last adapted; None if nothing did.

        While nothing in the model requires gradients, there is nothing to adapt to. So a model that is
        frozen as a whole in every second step, as in a GAN, costs nothing. But gradients from earlier
        micro-batches of the cycle still have to be combined.
        """
        self._names = self._read()
        trained = _trained(self._names)
        names = {id(parameter): name for name, parameter in self._names.items()}
        unfrozen = {names[key]: p for key, p in trained.items() if key not in self._trained}
        gone = {key: p for key, p in (self._trained | self._passing).items() if key not in trained}
        if not (trained or self._passing) or not (unfrozen or gone):
            self._passing = {}
            return None
        frozen = {names[key]: parameter for key, parameter in gone.items() if key in names}
        removed = tuple(self._known[key] for key in gone if key in self._known.keys() - names)
        added = {name: p for name, p in unfrozen.items() if id(p) not in self._known}
        return TrainableChange(self.model, unfrozen, frozen, added, removed)

    def accept(self) -> None:
        """Record that the backend has adapted to the present parameters."""
        self._passing = {}
        self._trained = _trained(self._names)
        self._known = {id(parameter): name for name, parameter in self._names.items()}

    def _read(self) -> dict[str, torch.Tensor]:
        # With all names of tied parameters: whole parameters in place of sharded ones need not be tied.
        named = self.module.named_parameters(remove_duplicate=False)
        names: dict[str, torch.Tensor] = {canonical_key(name): p for name, p in named}
        # Between forward and backward, a module may hold whole parameters in place of sharded ones.
        for name, earlier in self._names.items():
            if hasattr(earlier, "device_mesh") and name in names:
                names[name] = earlier
        # A subclass such as a quantized weight may answer in Python, which would cost a call for each
        # parameter in every step.
        plain = torch._C._disabled_torch_function_impl
        distinct = {id(p): p for p in names.values()}.values()
        self.parameters = [p for p in distinct if getattr(p, "__torch_function__", None) is plain]
        self.seen = list(map(requires_grad, self.parameters))
        return names


def _trained(names: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {id(p): p for p in names.values() if p.requires_grad}


def refuse_half_weights(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse to train fp16 weights under a gradient scaler, which cannot unscale fp16 gradients.

    Args:
        optimizer: an optimizer of torch.
        names: id of a parameter -> its name.

    Raises:
        ConfigurationError: names some of the parameters, and says what to do.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return  # a fused optimizer unscales by itself, in any dtype
    held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    halves = [p for p in held if p.dtype is torch.float16 and p.requires_grad]
    if halves:
        labels = [names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in halves]
        raise ConfigurationError(
            f"{type(optimizer).__name__} would train {len(halves)} parameter(s) that are stored in "
            f"torch.float16: {shorten(labels)}. mixed_precision='fp16' scales the loss, and gradients in "
            "torch.float16 cannot be unscaled. It computes in fp16 by itself, so keep the weights in "
            "fp32: call model.float(), or load them with torch_dtype=torch.float32, before prepare(). "
            "Frozen weights may stay in fp16: call requires_grad_(False) on them. To train weights that "
            "are stored in 16 bits, use bfloat16 weights and mixed_precision='bf16'."
        )


def foreign_parameters(
    optimizer: torch.optim.Optimizer, records: Iterable[TrainableRecord]
) -> list[torch.Tensor]:
    """Return an optimizer's parameters that have gradients and belong to no prepared model.

    The list is empty if none of its parameters belongs to one, because then it isn't meant to train them.
    """
    known = {id(p) for record in records for p in record.module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if known.isdisjoint(map(id, held)):
        return []
    return [p for p in held if p.grad is not None and id(p) not in known]
