"""What a plugin may read of an Accelerator: the first argument of every hook."""

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
        """Name of its entry point."""

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of a backend; words of `contract.capabilities.NEEDS`."""

    @property
    def supports(self) -> Mapping[str, Any]:
        """`mesh` (the dimensions it runs with, None for all) and `compile`."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype that layers compute in."""

    def autocast(
        self, accelerator: AcceleratorView, model: torch.nn.Module | None, options: dict[str, Any]
    ) -> AbstractContextManager[object]:
        """Return the context of a forward."""

    def clip_grad(
        self,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> torch.Tensor | None:
        """Clip gradients by their norm, or element by element."""

    def recompute(self, accelerator: AcceleratorView) -> Callable[..., Any] | None:
        """Return its replacement of `torch.utils.checkpoint.checkpoint`, None if it has none."""

    def plain_state(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state with the keys, dtypes and tensors of the unconverted model."""


class SetupView(Protocol):
    """What an Accelerator was asked for, and what was chosen: known before its processes start."""

    @property
    def provenance(self) -> Mapping[str, SourcedValue]:
        """Every core setting: `provenance[name].value`, and where it came from, `.origin`."""

    @property
    def backend(self) -> BackendView:
        """The active backend."""

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh's dimensions, None without a mesh."""

    @property
    def precision(self) -> PrecisionView:
        """The active precision."""

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """The compiler's settings."""

    @property
    def mixed_precision(self) -> str:
        """Name of the precision."""


class AcceleratorView(SetupView, Protocol):
    """The members of an Accelerator that plugins may use, once its processes have started."""

    # --- ranks and devices --------------------------------------------------------------------

    @property
    def hooks(self) -> OwnerHooks:
        """The active backend's owner hooks, bound to this Accelerator: `hooks.backward(loss, {})`."""

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
        """How long a collective may take; None is torch's default."""

    @property
    def communicator(self) -> CommunicatorView:
        """All ranks, for collectives on flat tensors."""

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh, None without one."""

    def wait_for_everyone(self) -> None:
        """Return once every rank has called this."""

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a structure over the ranks: `sum`, `mean`, `max`, `min`, `none`.

        Args:
            reduction: one of these.
            scale: factor of the result.
        """

    # --- how objects are prepared -------------------------------------------------------------

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The one among `kwargs_handlers`, or None."""

    @property
    def upcast_outputs(self) -> bool:
        """Whether half precision outputs of models become fp32."""

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step when optimizers do."""

    @property
    def scheduler_steps(self) -> str:
        """How far schedulers move when the optimizer steps: `per_process` or `per_step`."""

    @property
    def mixes_precision(self) -> bool:
        """Whether forward runs under autocast."""

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""

    # --- what was prepared --------------------------------------------------------------------

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The prepared models, wrapped."""

    @property
    def optimizers(self) -> Sequence[PreparedOptimizer]:
        """The prepared optimizers."""

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """The prepared schedulers."""

    @property
    def loaders(self) -> Sequence[Any]:
        """The prepared loaders; of any class that can be iterated."""

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own model inside a prepared one."""

    def wrap_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Return an optimizer under the accumulation cycle."""

    def wrap_scheduler(
        self, scheduler: Scheduler, optimizers: Sequence[PreparedOptimizer]
    ) -> Scheduler:
        """Return a scheduler that follows these prepared optimizers by the rule in force."""

    # --- the step -----------------------------------------------------------------------------

    @property
    def gradient_state(self) -> GradientStateView:
        """Where the loops are in their accumulation cycle."""

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and optimizers stepped, now."""

    #: Micro-batches seen in the current accumulation cycle.
    step: int

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, None if losses are not scaled."""

    # --- telling ------------------------------------------------------------------------------

    def warn_once(self, text: str, *, every_rank: bool = False) -> None:
        """Warn, once per text, on the main process.

        Args:
            every_rank: warn on each of them.
        """
