"""Local SGD: ranks step independently and average their parameters every few steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from accelerate_core.plugin import ConfigurationError

if TYPE_CHECKING:
    import torch

    from accelerate_core.plugin import Accelerator


class LocalSGD:
    """A context in which ranks train independently and average their parameters every few steps.

    Inside the context, gradients are not synchronised. Every `local_sgd_steps` calls of `step`,
    and on exit, each parameter is replaced by its mean over all ranks. The context has no effect
    with one process or `enabled=False`.

    Args:
        accelerator: the Accelerator that prepared `model`.
        model: a prepared model that is not sharded.
        local_sgd_steps: number of calls of `step` between two averages, at least 1.
        enabled: False turns the context off.

    Raises:
        ConfigurationError: `local_sgd_steps` is less than 1, or the model's parameters are
            sharded.

    Example:
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if local_sgd_steps < 1:
            raise ConfigurationError(f"local_sgd_steps={local_sgd_steps} must be at least 1.")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._no_sync: AbstractContextManager[Any] | None = None
        if self.enabled:
            _refuse_sharded(model)

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._no_sync is None:
            return
        no_sync = self._no_sync
        self._no_sync = None
        no_sync.__exit__(kind, error, trace)
        if error is None:  # after an error, the other ranks may never reach the average
            self._average()

    def step(self) -> None:
        """Count a step, and average parameters every `local_sgd_steps` calls.

        Each call counts, including those inside an accumulation cycle.
        """
        if not self.enabled:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Replace the parameters by their mean over all ranks, with one collective per dtype."""
        import torch

        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                by_dtype.setdefault(parameter.dtype, []).append(parameter.detach())
        for tensors in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            mean = self.accelerator.reduce(flat, reduction="mean")
            pieces = torch.split(mean, [tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view_as(tensor))


def _refuse_sharded(model: torch.nn.Module) -> None:
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"LocalSGD averages whole parameters, but {name!r} is sharded across ranks. Use a "
                "backend that keeps the whole model on every rank, or LocalSGD(enabled=False)."
            )
