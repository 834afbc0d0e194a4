"""What the collectives on structures have sent so far, which is equal on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.distributed.forecast import Forecast
from accelerate_core.distributed.torch_collectives import ReduceOp

#: A dtype and an operation. Tensors of one form can be reduced together.
Form = tuple[torch.dtype, ReduceOp]
_FIRST_FORM: Form = (torch.float32, "sum")


@dataclass(eq=False)
class MessageHistory:
    """What the collectives on structures have sent so far, which is equal on all ranks."""

    gathers: Forecast = field(default_factory=Forecast)
    reductions: Forecast = field(default_factory=lambda: Forecast(_FIRST_FORM))
    #: Digests on their way from an accelerator to the host: an event, the numbers, and the check.
    arriving: deque[tuple[Any, torch.Tensor, Callable[[torch.Tensor], None]]] = field(
        default_factory=deque
    )
    #: A running digest of all structures.
    digest: int = 0

    def check_arrived(self) -> None:
        """Check the digests that have arrived on the host. Doesn't wait for others."""
        while self.arriving and self.arriving[0][0].query():
            _, numbers, check = self.arriving.popleft()
            check(numbers)
