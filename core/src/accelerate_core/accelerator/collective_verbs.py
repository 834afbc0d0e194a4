"""The verbs of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from accelerate_core.accelerator.collectives import Collectives


class CollectiveVerbs:
    """Collectives on nested structures of tensors, as a script calls them."""

    _collectives: Collectives

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """What `set_trigger` set."""
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

        A tensor [b, ...] becomes [n * b, ...], a 0-d one [n]; all ranks get the
        result. One collective for the whole structure. Ranks that work on the same
        samples are counted once.

        Example:
            losses = accelerator.gather(loss.detach())  # one for each rank
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of a batch, without the samples that were repeated to fill the last one.

        Args:
            input_data: nested structure of tensors; or objects: a list of samples, or fields
                (a tuple or mapping of lists) of samples each.
            use_gather_object: gather as objects whatever they are (tensors of differing sizes).

        Returns:
            Tensors as `gather` returns them; objects in one list, as `gather_object` returns them.
            Every rank gets the result, in one collective.

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
        """Combine each tensor of a nested structure over the ranks; all get the result.

        Args:
            reduction: `sum`, `mean` or `none`.
            scale: used by backends that scale inside the reduction; else no effect.

        Ranks that work on the same samples are counted once.

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
        """Pad each tensor to the largest size any rank has along `dim`, so that it can be gathered.

        Args:
            tensor: nested structure of tensors.
            dim: the dimension, or several.
            pad_index: value of the new entries.
            pad_first: put them before the old ones instead of after.

        Example:
            ids = torch.tensor([[5, 7, 2]])  # as long as this rank's longest text
            ids = accelerator.gather(accelerator.pad_across_processes(ids, dim=1))
        """
        return self._collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set this process's flag for `check_trigger`.

        Example:
            if not loss.isfinite():  # on one rank, perhaps
                accelerator.set_trigger()
            if accelerator.check_trigger():  # on all ranks
                accelerator.print("stop")
        """
        self._collectives.set_trigger()

    def check_trigger(self) -> bool:
        """Tell whether any process has set its flag, and reset it everywhere."""
        return self._collectives.check_trigger()
