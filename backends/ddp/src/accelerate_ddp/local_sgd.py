"""Local SGD: ranks step on their own and average their parameters now and then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from accelerate_core.plugin import ConfigurationError

if TYPE_CHECKING:
    import torch

    from accelerate_core.plugin import Accelerator


class LocalSGD:
    """A context in which gradients stay on their rank and parameters are averaged instead.

    Inside, no gradient is synchronised; every `local_sgd_steps` calls of `step`, and
    on leaving, each parameter becomes its mean over the ranks. With one process, or
    `enabled=False`, it has no effect.

    Args:
        accelerator: the Accelerator that prepared `model`.
        model: a prepared model, whole on every rank.
        local_sgd_steps: calls of `step` between two averages, at least 1.

    Raises:
        ConfigurationError: `local_sgd_steps` is less than 1, or the model's
            parameters are sharded over ranks and so have no mean.

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
        if error is None:  # after an error the other ranks may never come to the average
            self._average()

    def step(self) -> None:
        """Count one call, in a cycle of accumulation, too; average when there were `local_sgd_steps`."""
        if not self.enabled:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Replace parameters by their mean over ranks, in one collective per dtype."""
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
                f"LocalSGD averages whole parameters, but {name!r} is sharded over ranks. Use a "
                "backend that keeps the model whole on every rank, or LocalSGD(enabled=False)."
            )
