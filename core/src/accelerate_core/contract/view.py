"""Protocols of the Accelerator that plugins see, as the first argument of every hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accelerate_core.config.handlers import AutocastKwargs, TorchDynamoPlugin
    from accelerate_core.config.parallelism import ParallelismConfig
    from accelerate_core.config.provenance import SourcedValue
    from accelerate_core.contract.members import (
        BackendView,
        CommunicatorView,
        GradientStateView,
        PreparedOptimizer,
        Scheduler,
    )
    from accelerate_core.contract.owner_hooks import OwnerHooks


class PrecisionView(Protocol):
    """The active precision, as other plugins use it."""

    @property
    def name(self) -> str:
        """Name of the precision's entry point."""

    @property
    def needs(self) -> frozenset[str]:
        """What it needs from a backend, as words of `contract.capabilities.NEEDS`."""

    @property
    def supports(self) -> Mapping[str, Any]:
        """`mesh` (the mesh dimensions it works with, None for all) and `compile`."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that layers compute in."""

    def autocast(
        self, accelerator: AcceleratorView, model: torch.nn.Module | None, options: dict[str, Any]
    ) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""

    def clip_grad(
        self,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> torch.Tensor | None:
        """Clip gradients by their norm, or element by element."""

    def recompute(self, accelerator: AcceleratorView) -> Callable[..., Any] | None:
        """Return its replacement for `torch.utils.checkpoint.checkpoint`, or None."""

    def plain_state(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state with the keys, dtypes and tensors of the unconverted model."""


class SetupView(Protocol):
    """The requested settings and the selected plugins, before the process group starts."""

    @property
    def provenance(self) -> Mapping[str, SourcedValue]:
        """Every core setting: `provenance[name].value` is its value, `.origin` where it was set."""

    @property
    def backend(self) -> BackendView:
        """The active backend."""

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh dimensions, or None without a mesh."""

    @property
    def precision(self) -> PrecisionView:
        """The active precision."""

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """The settings for `torch.compile`."""

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The `AutocastKwargs` among `kwargs_handlers`, or None."""

    @property
    def mixed_precision(self) -> str:
        """Name of the precision."""


class RuntimeView(SetupView, Protocol):
    """The setup, the ranks and the device, before the parts of the Accelerator exist."""

    @property
    def hooks(self) -> OwnerHooks:
        """The active backend's owner hooks, bound to this object: `hooks.backward(loss, {})`."""

    @property
    def num_processes(self) -> int:
        """World size."""

    @property
    def process_index(self) -> int:
        """Rank of this process."""

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""

    @property
    def local_process_count(self) -> int:
        """Number of processes on this machine."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    @property
    def device(self) -> torch.device:
        """Device of this process."""

    @property
    def group_timeout(self) -> timedelta | None:
        """How long a collective may take; None means torch's default."""

    def warn_once(self, text: str, *, every_rank: bool = False) -> None:
        """Warn on the main process, only once for each text.

        Args:
            every_rank: warn on every rank.
        """


class AcceleratorView(RuntimeView, Protocol):
    """The members of an Accelerator that plugins may use, once it is complete."""

    # --- collectives --------------------------------------------------------------------------

    @property
    def communicator(self) -> CommunicatorView:
        """Collectives among all ranks, on flat tensors and objects."""

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh, or None."""

    def wait_for_everyone(self) -> None:
        """Return once every rank has called this."""

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a nested structure over the ranks.

        Args:
            reduction: `sum`, `mean`, `max`, `min` or `none`.
            scale: factor for the result.
        """

    # --- how objects are prepared -------------------------------------------------------------

    @property
    def upcast_outputs(self) -> bool:
        """Whether half precision outputs of models are converted to fp32."""

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step when optimizers do."""

    @property
    def scheduler_steps(self) -> str:
        """How often schedulers step when the optimizer steps: `per_process` or `per_step`."""

    @property
    def mixes_precision(self) -> bool:
        """Whether the forward pass runs under autocast."""

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""

    # --- what was prepared --------------------------------------------------------------------

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The prepared models, with their wrappers."""

    @property
    def optimizers(self) -> Sequence[PreparedOptimizer]:
        """The prepared optimizers."""

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """The prepared schedulers."""

    @property
    def loaders(self) -> Sequence[Any]:
        """The prepared loaders, of any iterable class."""

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own model inside a prepared one."""

    def wrap_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Return an optimizer that follows the accumulation cycle."""

    def wrap_scheduler(
        self, scheduler: Scheduler, optimizers: Sequence[PreparedOptimizer]
    ) -> Scheduler:
        """Return a scheduler that steps with these prepared optimizers, according to `scheduler_steps`."""

    # --- the step -----------------------------------------------------------------------------

    @property
    def gradient_state(self) -> GradientStateView:
        """The position in the accumulation cycle."""

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised and optimizers step in this micro-batch."""

    #: Number of micro-batches so far in the current accumulation cycle.
    step: int

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, or None if losses are not scaled."""

    def run_parts(self) -> Any:
        """Return the `RunParts` that a checkpointer saves and restores.

        An elastic backend sends their state to a rank that joins.
        """

    def reshare(self) -> None:
        """Divide the rest of the data over the ranks of a new `data_shard`; for elastic backends.

        The backend calls this on every rank after the same step. Loaders continue in their order with
        the next global batch. Then `on_membership_change` is called.
        """
