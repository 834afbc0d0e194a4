"""The Accelerator's collectives on nested structures of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_core.accelerator.started import StartedRuntime
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.members import Scope
from accelerate_core.data.batch import gather_samples
from accelerate_core.distributed import collectives, tree
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.message_history import MessageHistory
from accelerate_core.plugins.manager import BoundHooks
from accelerate_core.prepare.prepared import PrepareOptions
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.metric import SharedMetric


@dataclass(eq=False)
class Collectives:
    """Collectives on nested structures.

    Args:
        world, data, loss: all ranks; those that read different samples; those over which a loss
            is summed.
        state: tracks the last batch that a loader yielded.
        options: how data is split across the ranks.
        has_mesh: whether tensors may be distributed over a device mesh.
        shard: asks the backend for this process's index in a scope, and the scope's size.
    """

    world: Communicator
    data: Communicator
    loss: Communicator
    state: GradientState
    options: PrepareOptions
    has_mesh: bool
    shard: Callable[[Scope], tuple[int, int]]
    #: This process's flag for `check_trigger`.
    flag_tensor: torch.Tensor | None = None

    def resize(self) -> None:
        """Ask the backend again for the sizes of the data and the loss scope."""
        for comm in (self.data, self.loss):
            comm.rank, comm.size = self.shard(comm.scope)
            comm.history = MessageHistory()  # new ranks have none

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a nested structure over the ranks, along dimension 0."""
        return collectives.gather(self._joined(tensor), self.data)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of a batch, without samples that were repeated to fill the last batch."""
        comm = self.data
        input_data = self._joined(input_data)
        leaves = tree.flatten(input_data)
        as_objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        real, whole = self.state.metrics_cut()
        if not real and comm.size == 1 and self.state.end_of_dataloader:
            real = max(self.state.remainder, 0)  # a short last batch, in case it was repeated
        if as_objects:
            if not use_gather_object:
                collectives.check_objects(comm)
            return gather_samples(input_data, real, whole, comm)
        if comm.size > 1 and not self.options.dataloader_config.even_batches:
            # Sizes may differ at any step, because ranks reach their last batch at different steps.
            return collectives.gather_uneven(input_data, comm)
        gathered = collectives.gather(input_data, comm)
        if not real:
            return gathered

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            # Data that is longer than a global batch doesn't only come from the last batch.
            fits = tensor.ndim and (whole is None or len(tensor) <= whole)
            return tensor[:real] if fits else tensor

        return tree.map_tensors(cut, gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a nested structure over the ranks. All ranks get the result."""
        return collectives.reduce(self._joined(tensor), reduction, comm=self.loss)

    def pad_across_processes(
        self, tensor: Any, dim: int | Sequence[int] = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad each tensor to the largest size on any rank along `dim`, so that it can be gathered."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, comm=self.data)

    def set_trigger(self) -> None:
        """Set this process's flag for `check_trigger`."""
        self.flag_tensor = torch.ones(1, dtype=torch.int32, device=self.world.device)

    def check_trigger(self) -> bool:
        """Return whether any process has set its flag, and reset the flag on all processes."""
        mine = self.flag_tensor
        if mine is None:
            mine = torch.zeros(1, dtype=torch.int32, device=self.world.device)
        self.flag_tensor = None
        return bool(self.world.reduce(mine, "max").item())

    def _joined(self, data: Any) -> Any:
        """Convert distributed tensors, such as a loss over sharded logits, to full tensors."""
        if not self.has_mesh:
            return data  # only a mesh has distributed tensors
        from torch.distributed.tensor import DTensor

        return tree.map_tensors(
            lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, data
        )


def make_collectives(
    started: StartedRuntime, hooks: BoundHooks, options: PrepareOptions, state: GradientState
) -> Collectives:
    """Return the collectives for the data, loss and world scopes.

    Args:
        started: ranks, device and settings.
        hooks: the hooks of the Accelerator.
        options: how data is split across the ranks.
        state: tracks the last batch that a loader yielded.

    Raises:
        PluginError: the backend's `data_shard` or `loss_shard` did not return an
            index and a number of ranks.
    """

    def shard(scope: Scope) -> tuple[int, int]:
        answer = started.hooks.data_shard() if scope == "data" else started.hooks.loss_shard()
        elastic = started.backend.supports.get("elastic", False)
        match answer:
            case (int(index), int(count)) if 0 <= index < count:
                if elastic or count <= started.num_processes:
                    return index, count
        wanted = "(index, count) with 0 <= index < count"
        if not elastic:
            wanted += f", and count at most the number of processes, {started.num_processes}"
        raise wrong_answer(f"{scope}_shard", started.backend.name, answer, wanted)

    def communicator(scope: Scope, index: int, count: int) -> Communicator:
        # A script may keep a loader, which uses these, longer than the Accelerator. A single
        # process calls no hook.
        bound = hooks if count == 1 else hooks.holding()
        return Communicator(
            rank=index,
            size=count,
            device=started.device,
            hooks=bound,
            scope=scope,
            debug=bool(started.provenance["debug"].value),
            backend=started.backend.name,
            new_group=lambda ranks: bound.new_group(ranks, "cpu"),
        )

    return Collectives(
        communicator("world", started.process_index, started.num_processes),
        communicator("data", *shard("data")),
        communicator("loss", *shard("loss")),
        shard=shard,
        state=state,
        options=options,
        has_mesh=started.parallelism_config is not None,
    )


def make_metrics(started: StartedRuntime, comms: Collectives) -> SharedMetric:
    """Return what combines the metrics of schedulers over the ranks that train the same model."""
    # All ranks, since those that share a sample also set the same learning rates. The world of an elastic
    # backend is one of several replicas.
    elastic = started.backend.supports.get("elastic", False)
    rule = started.provenance["scheduler_metric"]
    return SharedMetric(rule, comms.loss if elastic else comms.world, started.meet)
