"""The Accelerator's prepared objects, and its methods for a single object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.data.prepare_loader import skip_first_batches
from accelerate_core.plugins.manager import BoundHooks
from accelerate_core.prepare.prepared import Prepared, PrepareOptions
from accelerate_core.training.optimizer import AcceleratedOptimizer


class PreparedVerbs:
    """The Accelerator's prepared objects, and its methods for a single object."""

    hooks: BoundHooks
    _prepared: Prepared
    _options: PrepareOptions

    @property
    def models(self) -> list[torch.nn.Module]:
        """The prepared models, as `prepare` returned them."""
        return self._prepared.objects.models

    @property
    def optimizers(self) -> list[Any]:
        """The prepared optimizers."""
        return self._prepared.objects.optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The prepared schedulers."""
        return self._prepared.objects.schedulers

    @property
    def loaders(self) -> list[Any]:
        """The prepared loaders."""
        return self._prepared.objects.loaders

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How data is split across the ranks."""
        return self._options.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._options.dataloader_config = value

    @property
    def rng_types(self) -> Sequence[str]:
        """Random generators that are synchronised at the start of each iteration over a loader."""
        return self._options.rng_types

    @rng_types.setter
    def rng_types(self, value: Sequence[str]) -> None:
        self._options.rng_types = value

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self._options.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._options.device_placement = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step when optimizers do."""
        return self._options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._options.step_scheduler_with_optimizer = value

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """Options for autocast, or None for the defaults."""
        return self._options.autocast_handler

    @autocast_handler.setter
    def autocast_handler(self, value: AutocastKwargs | None) -> None:
        self._options.autocast_handler = value

    @property
    def upcast_outputs(self) -> bool:
        """Whether half precision outputs are converted to fp32."""
        return self._options.upcast_outputs

    @upcast_outputs.setter
    def upcast_outputs(self, value: bool) -> None:
        self._options.upcast_outputs = value

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """The settings for `torch.compile`."""
        return self._options.dynamo_plugin

    @property
    def scheduler_steps(self) -> str:
        """How often schedulers step when the optimizer steps: "per_process" or "per_step"."""
        return str(self._options.scheduler_steps.value)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is for all ranks together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all ranks. None means only for iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that all ranks get the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the shuffled order depends only on the seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders become torchdata's `StatefulDataLoader`."""
        return self.dataloader_config.use_stateful_dataloader

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return a loader that yields this rank's part of the data.

        Args:
            data_loader: a `DataLoader`, or any iterable of batches.
            device_placement: whether batches are moved to the device.
            slice_fn_for_dispatch: `(batch, slice, process_index, num_processes) -> part`. Loaders created
                by plugins don't support it.
        """
        return self._prepared.prepare_data_loader(
            data_loader, device_placement, slice_fn_for_dispatch
        )

    def wrap_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        """Return an optimizer that follows the accumulation cycle."""
        return self._prepared.wrap_optimizer(optimizer)

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """Return a scheduler that steps with these prepared optimizers, according to `scheduler_steps`."""
        return self._prepared.wrap_scheduler(scheduler, list(optimizers))

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's own model inside a prepared one.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: whether forward stays in mixed precision.
            keep_torch_compile: whether the model stays compiled. False returns an uncompiled view with the
                same parameters.

        Example:
            own = accelerator.unwrap_model(model)  # has the attributes of your class
        """
        return self._prepared.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a prepared model.

        Args:
            model: a prepared model.
            unwrap: whether to use the keys of the user's own model instead of the wrapper's keys.

        Example:
            weights = accelerator.get_state_dict(model)  # call this on all ranks
            accelerator.save(weights, "weights.pt")
        """
        return self._prepared.get_state_dict(model, unwrap)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a model is distributed over several devices for inference."""
        return self._prepared.verify_device_map(model)

    def init_model_context(self) -> AbstractContextManager[Any]:
        """Return the context in which to construct models for the active backend."""
        return self.hooks.init_model_context()

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps.

        On one process, it has no effect. If the backend doesn't support it, it has no effect either, and a
        warning is logged.

        Args:
            joinables: prepared models.
            even_batches: overrides the loaders' setting inside the block.

        Example:
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for x, y in loader:
                    accelerator.backward(loss_function(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return self._prepared.join_uneven_inputs(joinables, even_batches)

    skip_first_batches = staticmethod(skip_first_batches)
