"""Counting what the losses of an accumulation cycle are summed over.

The gradient wanted is that of `sum of all losses / number of all items`, over the micro-batches of
a cycle and over the ranks. Backends average gradients over the ranks, and what the number will be
is known in the last micro-batch only; so gradients are summed as they come and multiplied once by
`ranks / items`. Until then losses are divided by a power of two of about the size of that: it
changes no digit, and keeps low precision formats in their range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerate_core.contract.members import CommunicatorView
from accelerate_core.errors import ConfigurationError

Count = int | float | torch.Tensor


class TokenCount:
    """The items of one accumulation cycle.

    `open` says whether the current cycle counts; who ends it sets it to False. `factor` is a 0-d
    tensor once the cycle's last micro-batch has begun, and `applied` whether the gradients have been
    multiplied by it.

    Args:
        comm: the ranks over which a loss is summed.
        scale_gradients: the hook that multiplies the gradients of models by a 0-d tensor.
        refusal: why the backend cannot count, if it cannot.
    """

    def __init__(
        self,
        comm: CommunicatorView,
        scale_gradients: Callable[[Sequence[torch.nn.Module], torch.Tensor], None],
        refusal: str | None = None,
    ) -> None:
        self._comm = comm
        self._scale_gradients = scale_gradients
        self._refusal = refusal
        self.open = False
        self.applied = False
        self.factor: torch.Tensor | None = None
        self._models: Sequence[torch.nn.Module] = ()
        self._local: Count = 0
        self._divisor: torch.Tensor | None = None
        self._next_divisor: torch.Tensor | None = None
        self._powers = torch.tensor([2.0**power for power in range(-30, 127)])

    def begin(
        self, items: Count | None, models: Sequence[torch.nn.Module], *, first: bool, last: bool
    ) -> None:
        """Count the items of one micro-batch on this rank.

        Args:
            items: how many; a tensor of one element is not read back.
            models: those it trains.
            first, last: whether the micro-batch begins or ends its cycle.

        Raises:
            ConfigurationError: some micro-batches of a cycle give a number and others do not, it
                is negative or no number, or the backend cannot count.
        """
        if items is not None and self._refusal is not None:
            raise ConfigurationError(self._refusal)
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
            given = "this one has none" if self.open else "the earlier ones had none"
            raise ConfigurationError(
                f"accumulate(num_items=...) has to be given for every micro-batch of an "
                f"accumulation cycle or for none, and {given}."
            )
        if items is None:
            return
        if isinstance(items, torch.Tensor):
            if items.numel() != 1:
                raise ConfigurationError(
                    f"num_items has to be one number, not a tensor of shape {list(items.shape)}. "
                    "Count first, e.g. (labels != -100).sum()."
                )
            items = items.detach().reshape(())
        elif isinstance(items, bool) or not isinstance(items, (int, float)) or not items >= 0:
            raise ConfigurationError(
                f"num_items={items!r}: it is the number of items (tokens, samples) that the loss "
                "of this micro-batch is summed over, 0 or more."
            )
        self._local = self._local + items

    def state_dict(self) -> dict[str, Any]:
        """Return the count of a cycle that has begun, as plain values and CPU tensors."""
        local = self._local
        return {
            "open": self.open,
            "applied": self.applied,
            "local": local.cpu() if isinstance(local, torch.Tensor) else local,
            "divisor": None if self._divisor is None else self._divisor.cpu(),
            "next_divisor": None if self._next_divisor is None else self._next_divisor.cpu(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the cycle of a `state_dict`."""
        self.open = bool(state_dict["open"])
        self.applied = bool(state_dict["applied"])
        self.factor = None
        self._local = state_dict["local"]
        self._divisor = state_dict["divisor"]
        self._next_divisor = state_dict["next_divisor"]

    def _compute_factor(self) -> None:
        """Add up the ranks' counts; no value is read back to the host."""
        comm = self._comm
        # Not every device computes in float64, and not everyone who does says so.
        exact = torch.float64 if comm.device.type in ("cpu", "cuda") else torch.float32
        local = torch.as_tensor(self._local, dtype=exact, device=comm.device).reshape(1)
        per_rank = (comm.reduce(local) / comm.size).clamp(min=1.0 / comm.size).reshape(())
        self.factor = (1.0 if self._divisor is None else self._divisor) / per_rank
        powers = self._powers.to(comm.device)
        self._next_divisor = torch.where(powers > per_rank, powers, torch.inf).min()

    def divided(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as its gradient is to be added to those before it."""
        if self.applied and self.factor is not None:
            loss = loss * self.factor.to(
                loss.device, torch.promote_types(loss.dtype, torch.float32)
            )
        return loss if self._divisor is None else loss / self._divisor.to(loss.device)

    def apply(self) -> None:
        """Multiply the gradients by the factor, once it is there and once per cycle."""
        if not self.applied and self.factor is not None:
            self._scale_gradients(self._models, self.factor)
            self.applied = True
