"""fp8 with torchao, which replaces linear layers by `Float8Linear`, with new scales in each step."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_core.plugin import (
    AcceleratorView,
    ConfigurationError,
    MissingPluginError,
    RuntimeView,
)
from accelerate_fp8.layers import Filter, Layer, converted, note_replaced, survey
from accelerate_fp8.precision import FP8


class TorchAO(FP8):
    """Linear layers in fp8 under bf16 autocast.

    `rowwise_with_gw_hp` runs without autocast. It computes weight gradients from unconverted
    activations, which must have the dtype of the weights.
    """

    engine = "AO"
    library = "torchao"

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings, handlers)
        recipe = self.recipe
        self._gathers: bool | None = recipe.enable_fsdp_float8_all_gather
        mixed = recipe.recipe == "rowwise_with_gw_hp"
        if recipe.config is not None:
            self._gathers = recipe.config.enable_fsdp_float8_all_gather
            mixed = (
                recipe.config.cast_config_grad_output_for_grad_weight.scaling_type.name
                == "DISABLED"
            )
        if mixed:
            self.dtype = None  # type: ignore[misc, assignment]
            self.autocast = _no_autocast  # type: ignore[method-assign]
        self.needs = frozenset(
            {"modules"}
            | (set() if mixed else {"autocast"})
            | ({"subclasses"} if self._gathers else set())
        )
        self._config: Any = None
        #: For each mesh, the sharded layers. Their scales are computed together.
        self._scaled: list[nn.ModuleList] | None = None

    def check(self, runtime: RuntimeView) -> None:
        """Create the library's configuration for this device.

        Raises:
            ConfigurationError: autocast was requested with a recipe that runs without it, or
                weights should be gathered in fp8 by a backend that does not shard them.
            MissingPluginError: the library is not installed.
        """
        with _quiet():
            try:
                from torchao.float8 import Float8LinearConfig
            except ImportError as error:
                raise MissingPluginError(
                    f"torchao cannot be imported ({error}). Install it with: pip install torchao"
                ) from error
        handler = runtime.autocast_handler
        if self.dtype is None and handler is not None and handler.enabled:
            raise ConfigurationError(
                "recipe='rowwise_with_gw_hp' runs without autocast, but AutocastKwargs enables it. "
                "Remove AutocastKwargs and convert the model to bf16, or use recipe='rowwise'."
            )
        shards = any("weights" in parts for parts in runtime.backend.shards.values())
        if self._gathers and not shards:
            raise ConfigurationError(
                "enable_fsdp_float8_all_gather has no effect, because the backend "
                f"{runtime.backend.name} does not shard weights. Leave it out, or use the "
                "backend fsdp2."
            )
        recipe = self.recipe
        if recipe.config is None:
            if self._gathers is None:
                accepts = runtime.backend.supports.get("accepts", ())
                self._gathers = shards and "subclasses" in accepts and recipe.recipe == "tensorwise"
            emulate = not _multiplies(runtime.device) if recipe.emulate is None else recipe.emulate
            self._config = dataclasses.replace(
                Float8LinearConfig.from_recipe_name(recipe.recipe),
                pad_inner_dim=recipe.pad_inner_dim,
                enable_fsdp_float8_all_gather=self._gathers,
                emulate=emulate,
            )
        else:
            self._config = recipe.config
        if self._config.emulate and recipe.emulate is None and recipe.config is None:
            runtime.warn_once(
                f"fp8 is emulated, because {_device_name(runtime.device)} does not support fp8 "
                "matrix products. Losses are the same as with fp8, but training is slower than in bf16. To "
                "hide this warning, pass emulate=True."
            )

    def convert(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Replace linear layers by torchao's.

        Parameters stay the same objects, except weights that are gathered in fp8.
        """
        layers = survey(model, self.recipe.module_filter_func)
        if self._gathers:  # torch pads rows before a gather, but torchao doesn't
            sizes = accelerator.parallelism_config
            ranks = accelerator.num_processes // (sizes.size("dp_replicate") if sizes else 1)
            whole = f"fp8, gathered in bf16 (its rows are not divisible by {ranks} ranks)"
            layers = [
                one if one.rows % ranks == 0 else dataclasses.replace(one, becomes=whole)
                for one in layers
            ]
        self.note_layers(accelerator, model, layers)
        self._scaled = None
        gathered = [one for one in layers if one.becomes == "fp8"]
        made = _replaced(model, gathered, self._config)
        others = [one for one in layers if one.becomes != "fp8"]
        if converted(others):
            config = dataclasses.replace(self._config, enable_fsdp_float8_all_gather=False)
            made = _replaced(made, others, config)
        if self.dtype is None and converted(layers):
            made.register_forward_pre_hook(_refuse_autocast)
        return made

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Forget the models."""
        super().on_free(accelerator)
        self._scaled = None

    def on_step_end(self, accelerator: AcceleratorView, optimizer: Any) -> None:
        """Compute the scales of all weights that are gathered in fp8, in one collective per mesh."""
        self._precompute(accelerator)

    def on_load(self, accelerator: AcceleratorView) -> None:
        """Compute the scales of the loaded weights."""
        self._precompute(accelerator)

    def _precompute(self, accelerator: AcceleratorView) -> None:
        if not (self._gathers and self.recipe.precompute_scales):
            return
        if self._scaled is None:  # first use after a model was converted
            by_mesh: dict[Any, list[nn.Module]] = {}
            for model in accelerator.models:
                for module in model.modules():
                    weight = getattr(module, "weight", None)
                    if isinstance(weight, DTensor):
                        by_mesh.setdefault(weight.device_mesh, []).append(module)
            self._scaled = [nn.ModuleList(modules) for modules in by_mesh.values()]
        self._compute_scales()

    def _compute_scales(self) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for modules in self._scaled or ():
            # Tensors created in inference mode could not be used in training.
            with torch.inference_mode(False):
                precompute_float8_dynamic_scale_for_fsdp(modules)
            for module in modules:
                weight: Any = module.weight
                # A weight that is gathered at this moment is not a DTensor. It keeps its scale.
                local: Any = getattr(weight, "_local_tensor", None)
                if getattr(local, "_precomputed_scale", None) is not None:
                    weak = weakref.ref(module), weakref.ref(weight)
                    again = weakref.WeakMethod(self._compute_scales)
                    local.fsdp_pre_all_gather = partial(
                        _gather, *weak, _state(module, weight), again
                    )

    def plain_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state without torchao's tensor subclass. The tensors share memory with `state`."""
        return {name: _plain(value) for name, value in state.items()}

    def details(self) -> str:
        """Return the recipe, and whether fp8 is emulated and weights are gathered in fp8."""
        config, name = self._config, self.recipe.recipe
        words = [f"recipe {name}" if self.recipe.config is None else "config from the script"]
        if config is not None:
            words += [word for word in ("emulate", "pad_inner_dim") if getattr(config, word)]
            words += ["weights gathered in fp8"] if config.enable_fsdp_float8_all_gather else []
        return f"; {', '.join(words)}"


def _state(module: nn.Module, weight: Any) -> tuple[int, int, bool]:
    """Return values that change when a weight is written to.

    A write through `.data` does not change the version. The training mode is included because
    averaged weights are usually swapped in this way around an evaluation.
    """
    return weight._version, weight._local_tensor._version, module.training


def _gather(module: Any, weight: Any, noted: tuple[int, int, bool], again: Any, mesh: Any) -> Any:
    """Prepare a weight for its gather. Scales are computed again if the weight has changed."""
    local = weight()._local_tensor
    if _state(module(), weight()) != noted:
        local._precomputed_scale = None  # torchao then computes a scale if the next lines do not
        compute = again()
        if compute is not None:
            compute()
    return type(local).fsdp_pre_all_gather(local, mesh)


def _plain(value: Any) -> Any:
    local: Any = value.to_local() if isinstance(value, DTensor) else None
    if hasattr(local, "_linear_mm_config"):
        return DTensor.from_local(
            local._tensor,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value._tensor if hasattr(value, "_linear_mm_config") else value


def _no_autocast(
    accelerator: AcceleratorView, model: nn.Module | None, options: dict[str, Any]
) -> AbstractContextManager[Any]:
    if options.get("enabled"):
        raise ConfigurationError(
            "recipe='rowwise_with_gw_hp' runs without autocast, but the AutocastKwargs passed to "
            "accelerator.autocast enable it. Remove them, or use recipe='rowwise'."
        )
    return nullcontext()


def _refuse_autocast(module: nn.Module, _: Any) -> None:
    device = next(module.parameters()).device.type
    if torch.is_autocast_enabled(device):
        raise ConfigurationError(
            "recipe='rowwise_with_gw_hp' runs without autocast, but the script called the model "
            f"inside torch.autocast({device!r}). Remove the context, or use recipe='rowwise'."
        )


def _multiplies(device: torch.device) -> bool:
    """Return whether the device has fp8 matrix products."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return "gfx94" in name or "gfx95" in name
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type} device"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide log messages that importing torchao causes on every machine.

    torchao tries to load kernels for formats that are not used here, and registers an enum in a way
    that torch deprecated.
    """
    variable = "TORCHAO_FORCE_SKIP_LOADING_SO_FILES"
    was = os.environ.get(variable)
    levels = {name: logging.getLogger(name).level for name in ("torch.utils._pytree", "torchao")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ[variable] = "1"
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if was is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = was


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Filter | None = None
) -> nn.Module:
    """Replace a model's linear layers by torchao's.

    Args:
        config: a `torchao.float8.Float8LinearConfig`.
        module_filter_func: `(module, name) -> bool`, whether to convert a layer. The default is
            `accelerate_fp8.layers.usual_filter(model)`.

    Returns:
        The model, changed in place, or the new layer if the model itself is a linear layer.
    """
    return _replaced(model, survey(model, module_filter_func), config)


def _replaced(model: nn.Module, layers: list[Layer], config: Any) -> nn.Module:
    with _quiet():
        from torchao.float8 import convert_to_float8_training

    names = converted(layers)
    before = {name: layer for name, layer in model.named_modules() if name in names}
    made: nn.Module = convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in names, config=config
    )
    for name, layer in before.items():
        note_replaced(made.get_submodule(name).train(layer.training), layer)
    return made
