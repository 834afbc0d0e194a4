"""Collectives on nested structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate_core.config.handlers import DataLoaderConfiguration
from accelerate_core.contract.hooks import Scope, wrong_answer
from accelerate_core.contract.view import AcceleratorView
from accelerate_core.data.batch import gather_samples
from accelerate_core.distributed import collectives, tree
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.training.gradient_state import GradientState


class Collectives:
    """Collectives on nested structures.

    Args:
        accelerator: for the hooks.
        state: which batch was served last.
        loaders: how data is shared out.
    """

    def __init__(
        self, accelerator: AcceleratorView, state: GradientState, loaders: DataLoaderConfiguration
    ) -> None:
        hooks = accelerator.hooks

        def communicator(scope: Scope, shard: Any) -> Communicator:
            match shard:
                case (int(index), int(count)) if 0 <= index < count:
                    pass
                case _:
                    wanted = "(index, count) with 0 <= index < count"
                    raise wrong_answer(f"{scope}_shard", accelerator, shard, wanted)
            made = Communicator(
                rank=shard[0],
                size=shard[1],
                device=accelerator.device,
                hooks=hooks,
                scope=scope,
                debug=bool(accelerator.because["debug"].value),
            )
            if made.size > 1:  # alone it calls no hook, and must not keep the Accelerator alive
                made.accelerator = accelerator
                made.new_group = lambda ranks: hooks.new_group(accelerator, ranks, "cpu")
            return made

        #: All ranks; those that read different samples; those over which a loss is summed.
        self.comm = communicator("world", (accelerator.process_index, accelerator.num_processes))
        self.data_comm = communicator("data", hooks.data_shard(accelerator))
        self.loss_comm = communicator("loss", hooks.loss_shard(accelerator))
        self.flag_tensor: torch.Tensor | None = None
        self._state = state
        self._loaders = loaders
        self._has_mesh = accelerator.parallelism_config is not None

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a nested structure over the ranks, along dimension 0."""
        return collectives.gather(self._joined(tensor), self.data_comm)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was computed from a batch, without the samples repeated to fill the last one."""
        comm = self.data_comm
        input_data = self._joined(input_data)
        leaves = tree.flatten(input_data)
        as_objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        real, whole = self._state.metrics_cut()
        if not real and comm.size == 1 and self._state.end_of_dataloader:
            real = max(self._state.remainder, 0)  # a short last batch, should it be repeated
        if as_objects:
            return gather_samples(input_data, real, whole, comm)
        if comm.size > 1 and not self._loaders.even_batches:
            # Sizes may differ at any step: a rank's last batch is not another's.
            return collectives.gather_uneven(input_data, comm)
        gathered = collectives.gather(input_data, comm)
        if not real:
            return gathered

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            # What is longer than a global batch was gathered from more than the last one.
            fits = tensor.ndim and (whole is None or len(tensor) <= whole)
            return tensor[:real] if fits else tensor

        return tree.map_tensors(cut, gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a nested structure over the ranks; all get the result."""
        return collectives.reduce(self._joined(tensor), reduction, comm=self.loss_comm)

    def pad_across_processes(
        self, tensor: Any, dim: int | Sequence[int] = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor to the largest size any rank has along `dim`, so that it can be gathered."""
        return collectives.pad_across_processes(
            tensor, dim, pad_index, pad_first, comm=self.data_comm
        )

    def set_trigger(self) -> None:
        """Set this process's flag for `check_trigger`."""
        self.flag_tensor = torch.ones(1, dtype=torch.int32, device=self.comm.device)

    def check_trigger(self) -> bool:
        """Tell whether any process has set its flag, and reset it everywhere."""
        mine = self.flag_tensor
        if mine is None:
            mine = torch.zeros(1, dtype=torch.int32, device=self.comm.device)
        self.flag_tensor = None
        return bool(self.comm.reduce(mine, "max").item())

    def _joined(self, data: Any) -> Any:
        """Make tensors whole that are distributed themselves, as a loss over logits in parts is."""
        if not self._has_mesh:
            return data  # only a mesh has such
        from torch.distributed.tensor import DTensor

        return tree.map_tensors(
            lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, data
        )
