"""fp8 by MS-AMP, whose layers, optimizer, clipping and reduction of gradients are its own.

The library is no longer maintained. Nothing here was run with it: tests have a stand-in of its public
surface.
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
)
from accelerate_fp8.layers import carry_attributes, converted, survey
from accelerate_fp8.precision import FP8


class MSAMP(FP8):
    """Weights, gradients and optimizer states in 8 and 16 bits, under bf16 autocast.

    One model with one Adam or AdamW, whole on each rank. Gradients of its weights are no plain tensors:
    torch's DDP leaves them out, so they are reduced when they are unscaled, once a step.
    """

    engine = "MSAMP"
    library = "MS-AMP"
    needs = frozenset(
        {"autocast", "loss_scaling", "modules", "optimizer", "parameters", "subclasses"}
    )
    supports: Mapping[str, Any] = {"compile": False, "mesh": ()}
    #: Types of devices that it runs on.
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings, handlers)
        self._msamp: Any = None
        self._trained: nn.Module | None = None

    def check(self, accelerator: AcceleratorView) -> None:
        """Import the library.

        Raises:
            ConfigurationError: a device that it does not run on.
            MissingPluginError: it is not installed.
        """
        if accelerator.device.type not in self.devices:
            raise ConfigurationError(
                f"MS-AMP does not run on the device type {accelerator.device.type!r}; it runs on "
                f"{', '.join(self.devices)}. {_INSTEAD}"
            )
        try:
            import msamp
        except ImportError as error:
            raise MissingPluginError(
                f"MS-AMP cannot be imported ({error}). It is on no package index, only on "
                "https://github.com/Azure/MS-AMP, is no longer maintained, and was made for torch 2.1. "
                f"{_INSTEAD}"
            ) from error
        self._msamp = msamp

    def prepare(self, accelerator: AcceleratorView, plan: Any) -> None:
        """Put the library's model and optimizer in the place of those that are prepared.

        Raises:
            PrepareError: not one model and one optimizer, together and once; an optimizer that has
                stepped.
            ConfigurationError: an optimizer that the library has no form of.
        """
        models = [entry for entry in plan.of_kind("model") if not entry.evaluation_mode]
        optimizers = list(plan.of_kind("optimizer"))
        if not models and not optimizers:
            return
        if len(models) != 1 or len(optimizers) != 1 or self._trained is not None:
            before = ", after those of an earlier call" if self._trained is not None else ""
            raise PrepareError(
                "MS-AMP takes one model and its optimizer, in one call of prepare: this one has "
                f"{len(models)} and {len(optimizers)}{before}. Prepare models that are not trained "
                "with prepare_model(model, evaluation_mode=True)."
            )
        model, optimizer = models[0], optimizers[0]
        _check_optimizer(optimizer.value, model.value)
        layers = survey(model.value, lambda layer, _: not hasattr(layer, "use_fp32_linear"))
        for index, one in enumerate(layers):
            if one.reason:
                own = one.reason.startswith("module_filter_func")
                layers[index] = dataclasses.replace(one, reason="use_fp32_linear") if own else one
                layer: Any = model.value.get_submodule(one.name)
                layer.use_fp32_linear = True  # or the library converts it all the same
        replaced = {name: (one, one.training) for name, one in model.value.named_modules()}
        _share_weights(accelerator, model.value, converted(layers))
        decoupled = isinstance(optimizer.value, torch.optim.AdamW)
        made = self._msamp.initialize(model.value, optimizer.value, opt_level=self.recipe.opt_level)
        model.value = made[0]
        optimizer.value = made[1]
        if decoupled and not type(optimizer.value).__name__.endswith("W"):
            raise ConfigurationError(
                f"MS-AMP made a {type(optimizer.value).__name__} of an AdamW, which this torch "
                f"({torch.__version__}) calls a kind of Adam: weights would decay otherwise. Use Adam."
            )
        for name in converted(layers):  # layers of the library's begin in training
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
        """Let go of the model."""
        super().on_free(accelerator)
        self._trained = None

    def scaler(self, accelerator: AcceleratorView, options: dict[str, Any]) -> Any:
        """Return the scaler without which the library's gradients underflow.

        Raises:
            ConfigurationError: it is switched off.
        """
        if not options.get("enabled", True):
            raise ConfigurationError(
                "GradScalerKwargs(enabled=False): MS-AMP trains with a scaler."
            )
        several = accelerator.num_processes > 1
        return _Scaler(self._reduce if several else None, accelerator.device.type, **options)

    def _reduce(self, optimizer: Any) -> None:
        optimizer.all_reduce_grads(self._trained)

    def clip_grad(
        self, parameters: Any, max_norm: Any, norm_type: float, clip_value: Any
    ) -> torch.Tensor:
        """Clip by the norm, with the library.

        Raises:
            ConfigurationError: element by element, which it cannot.
        """
        if clip_value is not None:
            raise ConfigurationError(
                "clip_grad_value_ is not possible with MS-AMP; clip_grad_norm_ is."
            )
        clipped: torch.Tensor = self._msamp.clip_grad_norm_(
            parameters, max_norm, norm_type=norm_type
        )
        return clipped

    def details(self) -> str:
        """Return the level."""
        return f"; opt_level {self.recipe.opt_level}"


_INSTEAD = "torchao does the same, maintained: ACCELERATE_FP8_BACKEND=AO, or AORecipeKwargs()."


class _Scaler(torch.amp.GradScaler):
    """Has gradients reduced over ranks before it looks for infinite ones: the last moment for both."""

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
        # torch's asks for parameters that are tensors; the library's are none, and it has put a function
        # that takes their gradients, too, in the place of this one of torch's.
        held = [one for group in optimizer.param_groups for one in group["params"]]
        grads = [one.grad for one in held if one.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        return {found_inf.device: found_inf}


def _share_weights(accelerator: AcceleratorView, model: nn.Module, names: Iterable[str]) -> None:
    """Give every rank the first one's weights of these layers: later DDP leaves them out."""
    if accelerator.num_processes == 1:
        return
    for name in names:
        weight = model.get_submodule(name).get_parameter("weight").detach()
        flat = weight.flatten().to(accelerator.device)
        weight.copy_(accelerator.communicator.broadcast(flat).view_as(weight))


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    kind = type(optimizer).__name__
    if not (isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or kind == "FusedAdam"):
        raise ConfigurationError(f"MS-AMP has Adam, AdamW and FusedAdam, and no {kind}. {_INSTEAD}")
    if optimizer.state:
        raise PrepareError(f"The {kind} has stepped, and MS-AMP begins its state anew.")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(one) not in own for group in optimizer.param_groups for one in group["params"]):
        raise PrepareError(f"The {kind} holds parameters that are not in {type(model).__name__}.")


def _is_scaled(value: Any) -> bool:
    # Its classes say at times that they are torch.Tensor.
    return hasattr(value, "qtype")


def _make_plain(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have a state with fp32 tensors, which can be read without the library."""
    state.update({name: one.float() for name, one in state.items() if _is_scaled(one)})


class _Loading:
    """Fills the library's weights from plain tensors, which torch would not copy into them."""

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
