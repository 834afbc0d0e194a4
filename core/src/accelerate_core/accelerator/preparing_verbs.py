"""What was prepared, and the verbs on one prepared object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.data.prepare_loader import skip_first_batches
from accelerate_core.delegation import attribute, setting
from accelerate_core.plugins.manager import BoundHooks
from accelerate_core.prepare.prepared import Prepared, PrepareOptions
from accelerate_core.training.optimizer import AcceleratedOptimizer

_LOADING = partial(setting, "dataloader_config", DataLoaderConfiguration)


def _option(name: str, doc: str) -> Any:
    return attribute(f"_options.{name}", doc, settable=True)


class PreparedVerbs:
    """What was prepared, and the verbs on one prepared object, as a script reads and calls them."""

    hooks: BoundHooks
    _prepared: Prepared
    _options: PrepareOptions

    models: list[torch.nn.Module] = attribute(
        "_prepared.objects.models", "The prepared models, wrapped."
    )
    optimizers: list[Any] = attribute("_prepared.objects.optimizers", "The prepared optimizers.")
    schedulers: list[Any] = attribute("_prepared.objects.schedulers", "The prepared schedulers.")
    loaders: list[Any] = attribute("_prepared.objects.loaders", "The prepared loaders.")
    dataloader_config: DataLoaderConfiguration = _option(
        "dataloader_config", "How data is split between ranks."
    )
    rng_types: Sequence[str] = _option("rng_types", "Generators synchronized per iteration.")
    device_placement: bool = _option("device_placement", "Whether objects are moved.")
    step_scheduler_with_optimizer: bool = _option(
        "step_scheduler_with_optimizer", "Whether schedulers step when optimizers do."
    )
    autocast_handler: AutocastKwargs | None = _option("autocast_handler", "Options of autocast.")
    upcast_outputs: bool = _option("upcast_outputs", "Whether half precision outputs become fp32.")
    dynamo_plugin: TorchDynamoPlugin = _option("dynamo_plugin", "The compiler's settings.")
    scheduler_steps: str = attribute("_options.scheduler_steps.value", "How far schedulers move.")
    split_batches: bool = _LOADING("split_batches")
    dispatch_batches: bool | None = _LOADING("dispatch_batches")
    even_batches: bool = _LOADING("even_batches", settable=True)
    use_seedable_sampler: bool = _LOADING("use_seedable_sampler")
    non_blocking: bool = _LOADING("non_blocking")
    use_stateful_dataloader: bool = _LOADING("use_stateful_dataloader")

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Share one loader out between the ranks that read different data.

        Args:
            data_loader: a `DataLoader`, or any iterable of batches.
            device_placement: whether batches are moved to the device.
            slice_fn_for_dispatch: `(batch, slice, process_index, num_processes) -> part`; only the
                core's own loaders have it.
        """
        return self._prepared.prepare_data_loader(
            data_loader, device_placement, slice_fn_for_dispatch
        )

    def wrap_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        """Return the optimizer under the accumulation cycle."""
        return self._prepared.wrap_optimizer(optimizer)

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """Return a scheduler that follows these prepared optimizers by `scheduler_steps`."""
        return self._prepared.wrap_scheduler(scheduler, list(optimizers))

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's own model inside a prepared one.

        Args:
            keep_fp32_wrapper: keep forward under mixed precision.
            keep_torch_compile: keep it compiled; False returns an uncompiled view over
                the same parameters.

        Example:
            own = accelerator.unwrap_model(model)  # has its own attributes again
        """
        return self._prepared.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a prepared model.

        Args:
            unwrap: keys as the user's own model has them; False: as the wrapper has them.

        Example:
            weights = accelerator.get_state_dict(model)  # all ranks call it
            accelerator.save(weights, "weights.pt")
        """
        return self._prepared.get_state_dict(model, unwrap)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Tell whether a model was spread over several devices for inference."""
        return self._prepared.verify_device_map(model)

    def init_model_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the active backend wants models constructed."""
        return self.hooks.init_model_context()

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps.

        It has no effect on one process, or if the backend cannot do this, which logs a warning.

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
