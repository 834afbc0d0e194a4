"""Count the items (tokens, samples) that the losses of an accumulation cycle are summed over.

The goal is the gradient of `sum of all losses / number of all items`, over the micro-batches of a
cycle and over the ranks. Backends average gradients over the ranks, and the number of items is only
known in the last micro-batch. So gradients are summed first, and multiplied once by `ranks / items`.
Until then, losses are divided by a power of two of about that size, which is exact and keeps low
precision formats in range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.contract.members import CommunicatorView
from accelerate_core.errors import ConfigurationError
from accelerate_core.plugins.devices import widest_float

Count = int | float | torch.Tensor


@dataclass(eq=False)
class TokenCount:
    """Counts the items of one accumulation cycle.

    Args:
        comm: the communicator of the ranks over which a loss is summed.
        scale_gradients: the hook that multiplies the gradients of models by a 0-d tensor.
        refusal: why the backend cannot count; None if it can.

    Attributes:
        open: whether the current cycle counts. The code that ends the cycle sets it to False.
        factor: a 0-d tensor, once the last micro-batch of the cycle has begun.
        applied: whether the gradients have been multiplied by `factor`.
    """

    comm: CommunicatorView
    scale_gradients: Callable[[Sequence[torch.nn.Module], torch.Tensor], None]
    refusal: str | None = None
    open: bool = field(default=False, init=False)
    applied: bool = field(default=False, init=False)
    factor: torch.Tensor | None = field(default=None, init=False)
    _models: Sequence[torch.nn.Module] = field(default=(), init=False)
    _local: Count = field(default=0, init=False)
    _divisor: torch.Tensor | None = field(default=None, init=False)
    _next_divisor: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._powers = torch.tensor([2.0**power for power in range(-30, 127)])
        self._exact = widest_float(self.comm.device.type)

    def begin(
        self, items: Count | None, models: Sequence[torch.nn.Module], *, first: bool, last: bool
    ) -> None:
        """Count the items of one micro-batch on this rank.

        Args:
            items: the number of items; a tensor is not read back to the host.
            models: the models that the micro-batch trains.
            first: whether the micro-batch begins its cycle.
            last: whether the micro-batch ends its cycle.

        Raises:
            ConfigurationError: only some micro-batches of a cycle have a number, it is negative or
                not a number, or the backend cannot count.
        """
        if items is not None and self.refusal is not None:
            raise ConfigurationError(self.refusal)
        self._add(items, first)
        self._models = models
        if items is not None and last:
            self._compute_factor()

    def _add(self, items: Count | None, first: bool) -> None:
        if first:
            self.open = items is not None
            self.applied = False
            self.factor = None
            self._local = 0
            self._divisor = self._next_divisor
        elif self.open != (items is not None):
            given = "this one has none" if self.open else "earlier ones had none"
            raise ConfigurationError(
                f"accumulate(num_items=...) must be passed for every micro-batch of an accumulation "
                f"cycle or for none, and {given}."
            )
        if items is None:
            return
        if isinstance(items, torch.Tensor):
            if items.numel() != 1:
                raise ConfigurationError(
                    f"num_items must be one number, not a tensor of shape {list(items.shape)}. "
                    "Count first, for example with (labels != -100).sum()."
                )
            items = items.detach().reshape(())
        elif isinstance(items, bool) or not isinstance(items, (int, float)) or not items >= 0:
            raise ConfigurationError(
                f"num_items={items!r} must be a number of 0 or more: the number of items (tokens, "
                "samples) that the loss of this micro-batch is summed over."
            )
        self._local = self._local + items

    def state_dict(self) -> dict[str, Any]:
        """Return the count of the current cycle, as plain values and CPU tensors."""
        local = self._local
        return {
            "open": self.open,
            "applied": self.applied,
            "local": local.cpu() if isinstance(local, torch.Tensor) else local,
            "divisor": None if self._divisor is None else self._divisor.cpu(),
            "next_divisor": None if self._next_divisor is None else self._next_divisor.cpu(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the cycle of a state."""
        self.open = bool(state_dict["open"])
        self.applied = bool(state_dict["applied"])
        self.factor = None
        self._local = state_dict["local"]
        self._divisor = state_dict["divisor"]
        self._next_divisor = state_dict["next_divisor"]

    def _compute_factor(self) -> None:
        """Sum the counts of the ranks, without reading a value back to the host."""
        comm = self.comm
        local = torch.as_tensor(self._local, dtype=self._exact, device=comm.device).reshape(1)
        per_rank = (comm.reduce(local) / comm.size).clamp(min=1.0 / comm.size).reshape(())
        self.factor = (1.0 if self._divisor is None else self._divisor) / per_rank
        powers = self._powers.to(comm.device)
        self._next_divisor = torch.where(powers > per_rank, powers, torch.inf).min()

    def divided(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled so that its gradient can be added to the earlier ones."""
        if self.applied and self.factor is not None:
            dtype = torch.promote_types(loss.dtype, torch.float32)
            loss = loss * self.factor.to(loss.device, dtype)
        return loss if self._divisor is None else loss / self._divisor.to(loss.device)

    def apply(self) -> None:
        """Multiply the gradients by the factor, once per cycle and as soon as it is known."""
        if not self.applied and self.factor is not None:
            self.scale_gradients(self._models, self.factor)
            self.applied = True
