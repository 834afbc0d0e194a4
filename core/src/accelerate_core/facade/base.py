"""What every part of the facade may use of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_core.assemble import Assembly
from accelerate_core.backend import Backend
from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.provenance import Because
from accelerate_core.contract.parts import Tracking
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import Runtime
from accelerate_core.plugins.manager import ActivePlugins, Hooks
from accelerate_core.precision import Precision
from accelerate_core.state import ProcessVerbs
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.items import ItemCount
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator
    from accelerate_core.contract.parts import Checkpointer


class FacadeBase(ProcessVerbs):
    """The state of an Accelerator; `Accelerator.__init__` fills it."""

    backend: Backend
    precision: Precision
    plugins: ActivePlugins
    #: The backend's owner hooks, bound once: `hooks.backward(accelerator, loss, {})`.
    hooks: Hooks
    #: Every core setting with where its value came from.
    because: dict[str, Because]

    device_placement: bool
    rng_types: list[str]
    step_scheduler_with_optimizer: bool
    upcast_outputs: bool
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    dynamo_plugin: TorchDynamoPlugin
    autocast_handler: AutocastKwargs | None
    profile_handler: ProfileKwargs | None

    gradient_state: GradientState
    #: Micro-batches seen in the current accumulation cycle.
    step: int
    models: list[torch.nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[Any]
    registered_objects: list[Any]
    replaced_parameters: WeakIdKeyDictionary
    save_state_pre_hooks: OrderedDict[int, Callable[..., None]]
    load_state_pre_hooks: OrderedDict[int, Callable[..., None]]
    flag_tensor: torch.Tensor | None
    _checkpointer: Checkpointer | None

    _built: Assembly
    _process: Runtime
    _communicator: Communicator
    _data_communicator: Communicator
    _loss_communicator: Communicator
    _tracking: Tracking
    _scaler: Any | None
    _unscaled: set[int]
    _scaled_steps: set[int]
    _step_listeners: list[Any]
    _divides_loss: bool
    _items: ItemCount
    _counted_models: Sequence[torch.nn.Module]

    @property
    def _whole(self) -> Accelerator:
        return cast("Accelerator", self)

    @property
    def _runtime(self) -> Runtime:
        return self._process

    @property
    def communicator(self) -> Communicator:
        """The world, on flat tensors."""
        return self._communicator

    @property
    def mixes_precision(self) -> bool:
        """Whether forward runs under autocast."""
        return self.precision.mixes
