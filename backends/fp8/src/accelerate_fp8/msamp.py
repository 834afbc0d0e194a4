"""fp8 with MS-AMP, which replaces layers, optimizer, gradient clipping and gradient reduction.

The library is no longer maintained. This module was never run with the real library, only with a
mock of its public API.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate_core.plugin import (
    AcceleratorView,
    ConfigurationError,
    MissingPluginError,
    PrepareError,
    RuntimeView,
)
from accelerate_fp8.layers import carry_attributes, converted, survey
from accelerate_fp8.precision import FP8


class MSAMP(FP8):
    """Weights, gradients and optimizer states in 8 and 16 bits, under bf16 autocast.

    Supports one model with one Adam or AdamW, which every rank holds entirely. DDP ignores the
    converted weights, because they are not plain tensors. Their gradients are reduced once per
    step, when they are unscaled.
    """

    engine = "MSAMP"
    library = "MS-AMP"
    needs = frozenset(
        {"autocast", "loss_scaling", "modules", "optimizer", "parameters", "subclasses"}
    )
    supports: Mapping[str, Any] = {"compile": False, "mesh": ()}
    #: Types of devices that the library runs on.
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings, handlers)
        self._msamp: Any = None
        self._trained: nn.Module | None = None

    def check(self, runtime: RuntimeView) -> None:
        """Import the library.

        Raises:
            ConfigurationError: the library does not run on the device.
            MissingPluginError: the library is not installed.
        """
        if runtime.device.type not in self.devices:
            raise ConfigurationError(
                f"MS-AMP does not run on the device type {runtime.device.type!r}; it runs on "
                f"{', '.join(self.devices)}. {_INSTEAD}"
            )
        try:
            import msamp
        except ImportError as error:
            raise MissingPluginError(
                f"MS-AMP cannot be imported ({error}). It is only available from "
                "https://github.com/Azure/MS-AMP, is no longer maintained, and was written for torch "
                f"2.1. {_INSTEAD}"
            ) from error
        self._msamp = msamp

    def prepare(self, accelerator: AcceleratorView, plan: Any) -> None:
        """Replace the model and the optimizer by the library's.

        Raises:
            PrepareError: there is not exactly one model and one optimizer, they were prepared
                before, or the optimizer has already stepped.
            ConfigurationError: the library does not support the optimizer.
        """
        models = [entry for entry in plan.of_kind("model") if not entry.evaluation_mode]
        optimizers = list(plan.of_kind("optimizer"))
        if not models and not optimizers:
            return
        if len(models) != 1 or len(optimizers) != 1 or self._trained is not None:
            before = ", and an earlier call prepared a model" if self._trained is not None else ""
            raise PrepareError(
                "MS-AMP supports one model and one optimizer, prepared in the same call of prepare. "
                f"This call has {len(models)} models and {len(optimizers)} optimizers{before}. "
                "For a model that you don't train, call prepare_model(model, evaluation_mode=True)."
            )
        model, optimizer = models[0], optimizers[0]
        _check_optimizer(optimizer.value, model.value)
        layers = survey(model.value, lambda layer, _: not hasattr(layer, "use_fp32_linear"))
        for index, one in enumerate(layers):
            if one.reason:
                own = one.reason.startswith("module_filter_func")
                layers[index] = dataclasses.replace(one, reason="use_fp32_linear") if own else one
                layer: Any = model.value.get_submodule(one.name)
                layer.use_fp32_linear = True  # otherwise the library converts it
        replaced = {name: (one, one.training) for name, one in model.value.named_modules()}
        _share_weights(accelerator, model.value, converted(layers))
        decoupled = isinstance(optimizer.value, torch.optim.AdamW)
        made = self._msamp.initialize(model.value, optimizer.value, opt_level=self.recipe.opt_level)
        model.value = made[0]
        optimizer.value = made[1]
        if decoupled and not type(optimizer.value).__name__.endswith("W"):
            raise ConfigurationError(
                f"MS-AMP replaced an AdamW by a {type(optimizer.value).__name__}, because AdamW is a "
                f"subclass of Adam in this version of torch ({torch.__version__}). That would change "
                "the weight decay. Use torch.optim.Adam."
            )
        for name in converted(layers):  # the library's layers start in training mode
            made = model.value.get_submodule(name)
            (was, mode) = replaced[name]
            made.training = mode
            carry_attributes(made, was)
        model.value.register_state_dict_post_hook(_make_plain)
        loading = _Loading()
        model.value.register_load_state_dict_pre_hook(loading.fill)
        model.value.register_load_state_dict_post_hook(loading.drop_filled_keys)
        self.note_layers(accelerator, model.value, layers)
        self._trained = model.value

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Drop the reference to the model."""
        super().on_free(accelerator)
        self._trained = None

    def scaler(self, runtime: RuntimeView, options: dict[str, Any]) -> Any:
        """Return the loss scaler. Without one, the library's gradients would underflow.

        Raises:
            ConfigurationError: the scaler is disabled.
        """
        if not options.get("enabled", True):
            raise ConfigurationError(
                "MS-AMP needs a loss scaler. Remove GradScalerKwargs(enabled=False)."
            )
        several = runtime.num_processes > 1
        return _Scaler(self._reduce if several else None, runtime.device.type, **options)

    def _reduce(self, optimizer: Any) -> None:
        optimizer.all_reduce_grads(self._trained)

    def clip_grad(
        self, parameters: Any, max_norm: Any, norm_type: float, clip_value: Any
    ) -> torch.Tensor:
        """Clip gradients by norm, with the library's function.

        Raises:
            ConfigurationError: clipping by value, which the library does not support.
        """
        if clip_value is not None:
            raise ConfigurationError(
                "MS-AMP does not support clip_grad_value_. Use clip_grad_norm_."
            )
        clipped: torch.Tensor = self._msamp.clip_grad_norm_(
            parameters, max_norm, norm_type=norm_type
        )
        return clipped

    def details(self) -> str:
        """Return the optimization level."""
        return f"; opt_level {self.recipe.opt_level}"


_INSTEAD = (
    "Use torchao instead, which is maintained: set ACCELERATE_FP8_BACKEND=AO, or pass "
    "AORecipeKwargs()."
)


class _Scaler(torch.amp.GradScaler):
    """A loss scaler that reduces gradients over ranks before it checks them for infinities."""

    def __init__(self, reduce: Callable[[Any], None] | None, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._reduce_gradients = reduce

    def unscale_(self, optimizer: Any) -> None:
        if self._reduce_gradients is not None:
            self._reduce_gradients(optimizer)
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # torch's version needs parameters that are tensors, which the library's are not. The library
        # replaced the torch function below by one that accepts their gradients.
        held = [one for group in optimizer.param_groups for one in group["params"]]
        grads = [one.grad for one in held if one.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        return {found_inf.device: found_inf}


def _share_weights(accelerator: AcceleratorView, model: nn.Module, names: Iterable[str]) -> None:
    """Send rank 0's weights of these layers to all ranks, because DDP will ignore them."""
    if accelerator.num_processes == 1:
        return
    for name in names:
        weight = model.get_submodule(name).get_parameter("weight").detach()
        flat = weight.flatten().to(accelerator.device)
        weight.copy_(accelerator.communicator.broadcast(flat).view_as(weight))


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    kind = type(optimizer).__name__
    if not (isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or kind == "FusedAdam"):
        raise ConfigurationError(
            f"MS-AMP supports Adam, AdamW and FusedAdam, not {kind}. {_INSTEAD}"
        )
    if optimizer.state:
        raise PrepareError(
            f"The {kind} has already stepped, and MS-AMP would discard its state. Prepare it "
            "before its first step."
        )
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(one) not in own for group in optimizer.param_groups for one in group["params"]):
        raise PrepareError(f"The {kind} holds parameters that are not in {type(model).__name__}.")


def _is_scaled(value: Any) -> bool:
    # isinstance does not work, because the library's classes can claim to be torch.Tensor.
    return hasattr(value, "qtype")


def _make_plain(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Convert a state dict to fp32 tensors, which can be read without the library."""
    state.update({name: one.float() for name, one in state.items() if _is_scaled(one)})


class _Loading:
    """Loads plain tensors into the library's weights, which torch's `load_state_dict` cannot do."""

    def __init__(self) -> None:
        self._filled: set[str] = set()

    def fill(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._filled.clear()
        for name, weight in module.named_parameters(prefix.rstrip(".")):
            if _is_scaled(weight) and name in state:
                plain: Any = state.pop(name).to(weight.device)
                weight.copy_(plain.cast(weight.qtype))  # type: ignore[attr-defined]
                self._filled.add(name)

    def drop_filled_keys(self, module: nn.Module, incompatible: Any) -> None:
        missing = [name for name in incompatible.missing_keys if name not in self._filled]
        incompatible.missing_keys[:] = missing
