"""Collectives on nested structures."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_core import collectives
from accelerate_core.facade.place import Place

__all__ = ["Talking"]


class Talking(Place):
    """Collectives on nested structures."""

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a nested structure over the ranks, along dimension 0.

        A tensor [b, ...] becomes [n * b, ...], a 0-d one [n]; all ranks get the
        result. One collective for the whole structure.
        """
        return collectives.gather(tensor, self._communicator)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was computed from a batch, without the samples repeated to fill the last one.

        Args:
            input_data: nested structure of tensors, or objects.
            use_gather_object: gather as objects whatever they are (tensors of differing sizes).
        """
        leaves = [leaf for _, leaf in collectives.iterate_leaves(input_data)]
        as_objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        remainder = self.gradient_state.metrics_remainder()
        if as_objects:
            gathered = collectives.gather_object(input_data, self._communicator)
            return gathered[:remainder] if remainder and self.use_distributed else gathered
        if self.use_distributed and not self.even_batches:
            # Sizes may differ at any step: a rank's last batch is not another's.
            return collectives.gather_uneven(input_data, self._communicator)
        gathered = self.gather(input_data)
        if not remainder or not self.use_distributed:
            return gathered
        return collectives.recursively_apply(
            lambda tensor: tensor[:remainder] if tensor.ndim else tensor, gathered
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a nested structure over the ranks; all get the result.

        Args:
            reduction: `sum`, `mean` or `none`.
            scale: used by backends that scale inside the reduction; else no effect.
        """
        return collectives.reduce(tensor, reduction, comm=self._communicator)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor to the largest size any rank has along `dim`, so that it can be gathered."""
        return collectives.pad_across_processes(
            tensor, dim, pad_index, pad_first, comm=self._communicator
        )

    def set_trigger(self) -> None:
        """Set this process's flag for `check_trigger`."""
        self.flag_tensor = torch.ones(1, dtype=torch.int32, device=self.device)

    def check_trigger(self) -> bool:
        """Tell whether any process has set its flag, and reset it everywhere."""
        mine = self.flag_tensor
        if mine is None:
            mine = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.flag_tensor = None
        return bool(self._communicator.reduce(mine, "max").item())
