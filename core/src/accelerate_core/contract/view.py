"""What a plugin may read of an Accelerator: every hook's first argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class AcceleratorView(Protocol):
    """The names of an Accelerator that are there for plugins, from when its group has started.

    `check` of a backend comes before that: settings stand, device and ranks do not.
    """

    # --- ranks and devices --------------------------------------------------------------------

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
    def communicator(self) -> Any:
        """The world, on flat tensors: a `Communicator`."""

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, None where there is none."""

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the mesh's dimensions (`ParallelismConfig`), None where there is no mesh."""

    def wait_for_everyone(self) -> None:
        """Return when every rank has called it."""

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor of a structure over the ranks: `sum`, `mean`, `max`, `min`, `none`.

        Args:
            reduction: one of these.
            scale: factor of the result.
        """

    # --- what was chosen ----------------------------------------------------------------------

    @property
    def because(self) -> Mapping[str, Any]:
        """Every core setting with where its value came from: `because[name].origin`."""

    @property
    def backend(self) -> Any:
        """The active backend."""

    @property
    def hooks(self) -> Any:
        """The active backend's owner hooks, bound: `hooks.backward(accelerator, loss, {})`."""

    @property
    def precision(self) -> Any:
        """The active precision."""

    @property
    def dynamo_plugin(self) -> Any:
        """The compiler's settings (`TorchDynamoPlugin`)."""

    @property
    def autocast_handler(self) -> Any:
        """The `AutocastKwargs` that was given, or None."""

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
    def mixed_precision(self) -> str:
        """Name of the precision."""

    @property
    def mixes_precision(self) -> bool:
        """Whether forward runs under autocast."""

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""

    # --- what was prepared --------------------------------------------------------------------

    @property
    def models(self) -> Sequence[Any]:
        """The models that were prepared, wrapped."""

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers that were prepared."""

    @property
    def schedulers(self) -> Sequence[Any]:
        """The schedulers that were prepared."""

    @property
    def loaders(self) -> Sequence[Any]:
        """The loaders that were prepared."""

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own model inside a prepared one."""

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return an optimizer under the accumulation cycle."""

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """Return a scheduler that follows these prepared optimizers by the rule in force."""

    # --- the step -----------------------------------------------------------------------------

    @property
    def gradient_state(self) -> Any:
        """Where the loops are in their accumulation cycle (`GradientState`)."""

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and optimizers stepped, now."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""

    @property
    def scaler(self) -> Any:
        """The gradient scaler, None where losses are not scaled."""

    def scaler_stepped(self, optimizer: Any) -> None:
        """Note that the scaler stepped an inner optimizer."""

    # --- telling ------------------------------------------------------------------------------

    def note_once(self, text: str, *, every_rank: bool = False) -> None:
        """Warn, once per text, on the main process.

        Args:
            every_rank: warn on each of them.
        """
