"""The Accelerator's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from accelerate_core.accelerator.scoped_collectives import Collectives


class CollectiveVerbs:
    """The Accelerator's collectives on nested structures of tensors."""

    _collectives: Collectives

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """The flag that `set_trigger` sets."""
        return self._collectives.flag_tensor

    @flag_tensor.setter
    def flag_tensor(self, value: torch.Tensor | None) -> None:
        self._collectives.flag_tensor = value

    @overload
    def gather(self, tensor: torch.Tensor) -> torch.Tensor: ...
    @overload
    def gather(self, tensor: Any) -> Any: ...
    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a nested structure over the ranks, along dimension 0.

        A tensor of shape [b, ...] becomes [n * b, ...], and a 0-d tensor [n]. All ranks get the result. The
        whole structure needs one collective. Ranks that work on the same samples are counted once.

        Example:
            losses = accelerator.gather(loss.detach())  # one for each rank
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of a batch, without samples that were repeated to fill the last batch.

        Args:
            input_data: a nested structure of tensors, or objects: a list of samples, or a tuple or mapping
                of such lists.
            use_gather_object: gather everything as objects, for example tensors of different sizes.

        Returns:
            Tensors in the form of `gather`, or objects in one list, in the form of `gather_object`. Every
            rank gets the result. It needs one collective.

        Example:
            right = total = 0
            for x, y in loader:
                guesses, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
                right += (guesses == labels).sum().item()
                total += len(labels)
            assert total == len(dataset)
        """
        return self._collectives.gather_for_metrics(input_data, use_gather_object)

    @overload
    def reduce(
        self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0
    ) -> torch.Tensor: ...
    @overload
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any: ...
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a nested structure over the ranks. All ranks get the result.

        Ranks that work on the same samples are counted once.

        Args:
            tensor: a nested structure of tensors.
            reduction: `sum`, `mean` or `none`.
            scale: used by backends that scale in the reduction; no effect otherwise.

        Example:
            mean = accelerator.reduce(loss.detach(), "mean")
        """
        return self._collectives.reduce(tensor, reduction, scale)

    @overload
    def pad_across_processes(
        self,
        tensor: torch.Tensor,
        dim: int | Sequence[int] = 0,
        pad_index: int = 0,
        pad_first: bool = False,
    ) -> torch.Tensor: ...
    @overload
    def pad_across_processes(
        self, tensor: Any, dim: int | Sequence[int] = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any: ...
    def pad_across_processes(
        self, tensor: Any, dim: int | Sequence[int] = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor to the largest size on any rank along `dim`, so that it can be gathered.

        Args:
            tensor: a nested structure of tensors.
            dim: the dimension, or a sequence of dimensions.
            pad_index: the value of the padding.
            pad_first: put the padding before the data instead of after.

        Example:
            ids = torch.tensor([[5, 7, 2]])  # the length of this rank's longest text
            ids = accelerator.gather(accelerator.pad_across_processes(ids, dim=1))
        """
        return self._collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set this process's flag for `check_trigger`.

        Example:
            if not loss.isfinite():  # may be true on one rank only
                accelerator.set_trigger()
            if accelerator.check_trigger():  # on all ranks
                accelerator.print("stop")
        """
        self._collectives.set_trigger()

    def check_trigger(self) -> bool:
        """Return whether any process has set its flag, and reset the flag on all processes."""
        return self._collectives.check_trigger()
