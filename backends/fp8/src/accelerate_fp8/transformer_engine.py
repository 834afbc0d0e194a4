"""fp8 with Transformer Engine, which replaces torch's layers and runs them in its own autocast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from accelerate_core.plugin import (
    AcceleratorView,
    ConfigurationError,
    MissingPluginError,
    PrepareError,
    RuntimeView,
    listing,
    origin_of,
    process_global,
    warn,
)
from accelerate_fp8.layers import (
    ALREADY,
    Layer,
    converted,
    names_of,
    note_replaced,
    own_behaviour,
    survey,
)
from accelerate_fp8.precision import FP8
from accelerate_fp8.settings import TE_RECIPES

_INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
_NORM = "te.LayerNorm"
#: Where layers keep the state of delayed scaling, and which of its tensors are saved.
_SIDES, _KEPT = ("scaling_fwd", "scaling_bwd"), ("scale", "amax_history")


class TransformerEngine(FP8):
    """Transformer Engine's linear layers and LayerNorms, in torch's bf16 autocast and its own.

    Delayed scaling reduces maximum values over ranks when a forward leaves the library's autocast.
    Every rank must therefore run every training forward. In evaluation mode nothing is reduced and
    no scale changes, so a rank can evaluate alone.
    """

    engine = "TE"
    library = "Transformer Engine"
    #: Types of devices that the library runs on.
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings, handlers)
        recipe, name = self.recipe, self.recipe.recipe_name
        own = recipe.recipe
        delayed = name == "delayed" or hasattr(own, "amax_history_len")
        needs = {"autocast", "modules"}
        # The factory of a custom recipe may use delayed scaling.
        shares = getattr(own, "reduce_amax", hasattr(own, "qfactory"))
        if shares or (name == "delayed" and recipe.reduce_amax):
            needs.add("forward_collectives")
        if recipe.quantized_weights:
            needs |= {"parameters", "subclasses"}
        self.needs = frozenset(needs)
        # Tensor parallelism cannot split the library's layers; torch.compile cannot trace delayed
        # scaling.
        self.supports = {"compile": not delayed, "mesh": ("dp_replicate", "dp_shard", "cp", "sp")}
        self._te: Any = None
        self._recipe: Any = None

    # --- the library ----------------------------------------------------------------------------

    def check(self, runtime: RuntimeView) -> None:
        """Import the library, create the recipe, and check that the device supports it.

        Raises:
            ConfigurationError: the library does not run on this type of device, the device does
                not support the recipe, or `quantized_weights` is not supported here.
            MissingPluginError: the library cannot be imported. The message says what to install.
        """
        kind = runtime.device.type
        if kind not in self.devices:
            raise ConfigurationError(
                f"Transformer Engine needs a CUDA device, but this run uses {kind!r}. torchao runs "
                "here: remove TERecipeKwargs and set ACCELERATE_FP8_BACKEND=AO."
            )
        self._te = library()
        self._recipe = make_recipe(self.recipe)
        if reason := lacking(self._te, self._recipe):
            name = torch.cuda.get_device_name(runtime.device) if kind == "cuda" else kind
            raise ConfigurationError(
                f"Transformer Engine's {type(self._recipe).__name__} does not run on this device "
                f"({name}). {reason} recipe='delayed' and 'current' need compute capability 8.9 or "
                "higher."
            )
        if self.recipe.quantized_weights:
            self._check_quantized(runtime.backend)

    def _check_quantized(self, backend: Any) -> None:
        if self._recipe.delayed():
            raise ConfigurationError(
                "quantized_weights does not work with delayed scaling, which would quantize the "
                "weights with a scale of 1 and round small ones to 0. Use another recipe, such as "
                "'current'."
            )
        if any("weights" in parts for parts in backend.shards.values()):
            raise ConfigurationError(
                f"quantized_weights is not supported by the backend {backend.name}, which cannot "
                "shard weights in 8 bits. Leave it out, or use the backend ddp."
            )

    def on_start(self, accelerator: AcceleratorView) -> None:
        """Reset the library's global state when training ends.

        Otherwise it would keep reducing the values of old models, over groups that no longer exist.
        """
        process_global("transformer_engine.quantization", "", lambda: None, _forget)

    # --- models ---------------------------------------------------------------------------------

    def convert(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Replace torch's layers by the library's, which use the same parameters.

        Raises:
            PrepareError: `quantized_weights` is set, but no linear weight is frozen.
        """
        layers = survey_all(model, 32 if self._recipe.mxfp8() else 16)
        frozen: set[str] = set()
        if self.recipe.quantized_weights:
            names = [name for name in converted(layers) if _linear_at(model, name)]
            frozen = {n for n in names if not model.get_submodule(n).weight.requires_grad}
            if names and not frozen:
                raise PrepareError(
                    "quantized_weights only applies to frozen weights, because 8 bits cannot represent "
                    f"the small updates of an optimizer, but all linear weights of "
                    f"{type(model).__name__} are trained. Freeze some with requires_grad_(False), as "
                    "LoRA does, or leave quantized_weights out."
                )
        for index, one in enumerate(layers):
            if one.name in frozen and not one.reason:
                layers[index] = Layer(one.name, one.sizes, "", "fp8, weight in 8 bits")
        self.note_layers(accelerator, model, layers)
        for name in converted(layers):
            layer = model.get_submodule(name)
            made = note_replaced(self._made(layer, name in frozen), layer)
            model = replace(model, name, made)
        hide_extra_state(model)
        return model

    def _made(self, layer: Any, quantized: bool) -> nn.Module:
        if self._recipe.mxfp8():
            rows = 32
        elif self._recipe.nvfp4():
            rows = 16
        else:
            rows = 8
        if not quantized:
            return to_library(self._te, layer, rows)

        def fill(weight: torch.Tensor) -> None:
            with torch.no_grad():
                weight.copy_(layer.weight)

        with self._te.quantized_model_init(enabled=True, recipe=self._recipe):
            made = to_library(self._te, layer, rows, fill)
        made.get_parameter("weight").requires_grad_(False)
        return made

    def autocast(
        self, accelerator: AcceleratorView, model: nn.Module | None, options: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Return torch's autocast and, inside it, the library's, for a forward of `model`."""
        mixed = super().autocast(accelerator, model, options)
        if model is None:
            return mixed
        if model.training and "forward_collectives" in self.needs:
            _refuse_join(accelerator)
        inner = self._te.autocast(
            enabled=model.training or self.recipe.use_autocast_during_eval,
            recipe=self._recipe,
            amax_reduction_group=accelerator.backend.scope_group("loss"),
        )
        return _both(mixed, inner, model.training)

    def recompute(self, accelerator: AcceleratorView) -> Callable[..., Any]:
        """Return the library's checkpoint function, which recomputes with the scales of forward."""
        checkpoint = self._te.checkpoint

        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The library has keyword options itself, so the function's are bound here.
            called = partial(function, **kwargs) if kwargs else function
            return checkpoint(called, *args, use_reentrant=False)

        return run

    # --- checkpoints ----------------------------------------------------------------------------

    def plain_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with 8-bit weights converted to their nominal dtype."""
        return {name: _plain(self._te, value) for name, value in state.items()}

    def on_save(self, accelerator: AcceleratorView, directory: Path) -> None:
        """Write this rank's scales and their history as tensors."""
        from safetensors.torch import save_file

        found = {
            f"{prefix}{side}.{what}": tensor.detach().cpu().clone()
            for prefix, module in _modules(accelerator)
            for side, what, tensor in _scales(module)
        }
        if found:
            save_file(found, directory / _file(accelerator.process_index))

    def on_load(self, accelerator: AcceleratorView, directory: Path) -> None:
        """Read this rank's scales.

        If this rank has no file, it uses rank 0's. If there are no files, scales start from scratch.
        """
        from safetensors.torch import load_file

        files = [directory / _file(rank) for rank in (accelerator.process_index, 0)]
        read = next((load_file(file) for file in files if file.exists()), {})
        for prefix, module in _modules(accelerator):
            keys = {(side, what): f"{prefix}{side}.{what}" for side in _SIDES for what in _KEPT}
            saved = {place: read[key] for place, key in keys.items() if key in read}
            if saved and not [*_scales(module)]:
                self._start_scales(module, len(saved["scaling_fwd", "scale"]) // 3)
            for side, what, tensor in _scales(module):
                _fill(tensor, saved.get((side, what)), 1.0 if what == "scale" else 0.0)

    def _start_scales(self, module: nn.Module, gemms: int) -> None:
        """Create a layer's scales before its first forward."""
        meta: Any = module.fp8_meta
        if not self._recipe.delayed():
            return
        meta.update(num_gemms=gemms, recipe=self._recipe)
        with torch.no_grad(), self._te.autocast(enabled=True, recipe=self._recipe):
            module.init_fp8_meta_tensors(self._recipe)  # type: ignore[operator]

    def details(self) -> str:
        """Return the recipe and its notable options."""
        recipe = self.recipe
        words = [f"recipe {recipe.recipe_name}" if recipe.recipe_name else "recipe from the script"]
        if "forward_collectives" in self.needs:
            words += ["maximum values shared in forward"]
        words += ["in evaluation too"] if recipe.use_autocast_during_eval else []
        return f"; {', '.join(words)}"


# --- the library ------------------------------------------------------------------------------------


def library() -> Any:
    """Import `transformer_engine.pytorch`.

    Raises:
        MissingPluginError: it cannot be imported. The message says what to install.
    """
    try:
        import transformer_engine.pytorch as te
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            raise MissingPluginError(
                f"Transformer Engine is not installed. Install it with: {_INSTALL}"
            ) from None
        raise _unusable(error) from None
    except Exception as error:  # depending on what is missing, it raises all kinds of errors
        raise _unusable(error) from None
    if not hasattr(te, "autocast"):
        raise MissingPluginError(
            "This version of Transformer Engine is too old: it has no autocast. Install 2.20 or "
            f"newer: {_INSTALL}"
        )
    return te


def _unusable(error: Exception) -> MissingPluginError:
    message = (str(error).splitlines() or [type(error).__name__])[0]
    if "meta package" in message:
        problem = "is installed without its extension for PyTorch"
        fix = f"Install it with: {_INSTALL}"
    elif "cudnn" in message.lower():
        problem = f"does not find a suitable cuDNN ({message})"
        fix = (
            "Run: pip install -U nvidia-cudnn-cu13 (or -cu12, depending on your CUDA version). Or "
            "set CUDNN_HOME."
        )
    else:
        problem = f"cannot be imported ({type(error).__name__}: {message})"
        fix = f"Install it with: {_INSTALL}"
    return MissingPluginError(f"Transformer Engine {problem}. {fix}")


def make_recipe(given: Any) -> Any:
    """Create the library's recipe from a `TERecipeKwargs`, or return the recipe object in it.

    Raises:
        ConfigurationError: `recipe` is neither a name nor a recipe object of the library.
    """
    from transformer_engine.common import recipe as recipes

    if not given.recipe_name:
        if not isinstance(given.recipe, recipes.Recipe):
            kind = type(given.recipe).__name__
            raise ConfigurationError(
                f"recipe= is a {kind}, not a recipe object of Transformer Engine. Pass one of those, "
                f"or one of the names {listing(TE_RECIPES)}."
            )
        return given.recipe
    name, options = TE_RECIPES[given.recipe_name]
    arguments = {key: getattr(given, key) for key in options if origin_of(given, key) != "default"}
    if "fp8_format" in arguments:
        arguments["fp8_format"] = getattr(recipes.Format, arguments["fp8_format"])
    return getattr(recipes, name)(**arguments)


def lacking(te: Any, recipe: Any) -> str:
    """Return the library's reason why the device cannot run a recipe, or an empty string.

    The library's autocast does this check too, but not for NVFP4.
    """
    asked = [te.is_fp8_available]
    asked += [te.is_mxfp8_available] if recipe.mxfp8() else []
    asked += [te.is_nvfp4_available] if recipe.nvfp4() else []
    asked += [te.is_fp8_block_scaling_available] if recipe.float8_block_scaling() else []
    answers = [ask(return_reason=True) for ask in asked]
    return next((reason for can, reason in answers if not can), "")


def _refuse_join(accelerator: AcceleratorView) -> None:
    """Reject a forward under `join_uneven_inputs`. A rank without a batch would not join it."""
    joins = (getattr(one, "_join_config", None) for one in accelerator.models)
    if any(one is not None and one.enable for one in joins):
        raise ConfigurationError(
            "join_uneven_inputs does not work with delayed scaling: ranks share maximum values in "
            "every training forward, but a rank without batches runs no forward. Pass "
            "TERecipeKwargs(reduce_amax=False), use another recipe, or give all ranks the same "
            "number of batches."
        )


def _forget(_: Any) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


@contextmanager
def _both(
    outer: AbstractContextManager[Any], inner: AbstractContextManager[Any], update_scales: bool
) -> Iterator[None]:
    """Enter both contexts. On exit, the library updates scales only if `update_scales`.

    The library updates scales, with a collective, if gradients are enabled when its context exits.
    After an error scales are not updated, because other ranks may not have the error.
    """
    with outer:
        inner.__enter__()
        try:
            yield
        except BaseException:
            update_scales = False
            raise
        finally:
            with nullcontext() if update_scales else torch.no_grad():
                inner.__exit__(None, None, None)


# --- layers -----------------------------------------------------------------------------------------


def survey_all(model: nn.Module, multiple: int = 16) -> list[Layer]:
    """Determine which linear layers and LayerNorms can be replaced by the library's.

    Args:
        multiple: the sizes of linear layers must be multiples of this.
    """

    def fits(layer: Any, _: str) -> bool:
        # Not from the weight, which is empty with ZeRO-3.
        return not (layer.in_features % multiple or layer.out_features % multiple)

    found = survey(model, fits, f"sizes are not multiples of {multiple}")
    holders = names_of(model)
    for name, layer in model.named_modules():
        if hasattr(layer, "fp8_meta") and _is_library_layer(layer):
            sizes = getattr(getattr(layer, "weight", None), "shape", ())
            found.append(Layer(name, " x ".join(map(str, sizes)), ALREADY))
        if not isinstance(layer, nn.LayerNorm):
            continue
        own = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
        reason = ""
        if type(layer) is not nn.LayerNorm:
            reason = f"a {type(layer).__name__}, not torch's LayerNorm"
        elif len(own) < 2:
            reason = f"it has no {'bias' if own else 'weight'}"
        elif any(len(holders[id(parameter)]) > 1 for parameter in own):
            reason = "shares its parameters with another layer"
        else:
            reason = own_behaviour(layer)
        found.append(Layer(name, " x ".join(map(str, layer.normalized_shape)), reason, _NORM))
    return found


def _linear_at(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), nn.Linear)


@cache
def _padding(base: Any) -> Any:
    class Linear(base):
        """The library's linear layer, padding inputs to a number of rows that it accepts."""

        rows = 1

        def forward(self, inp: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            *shape, size = inp.shape
            count = math.prod(shape)
            if not (missing := -count % self.rows):
                made: torch.Tensor = super().forward(inp, *args, **kwargs)
                return made
            # Rows of zeros change neither maximum values nor gradients.
            filled = F.pad(inp.reshape(count, size), (0, 0, 0, missing))
            padded: torch.Tensor = super().forward(filled, *args, **kwargs)
            return padded[:count].view(*shape, padded.shape[-1])

    Linear.__qualname__ = "Linear"  # so that pickle finds the class
    return Linear


def __getattr__(name: str) -> Any:
    if name == "Linear":
        return _padding(library().Linear)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def to_library(
    te: Any, layer: nn.Module, rows: int = 1, fill: Callable[[torch.Tensor], None] | None = None
) -> nn.Module:
    """Return the library's equivalent of `layer`, with the same parameters.

    Args:
        rows: a linear layer pads the rows of its input to a multiple of this.
        fill: initialises the weight of the new layer, instead of using the weight of `layer`.
    """
    # On meta, nothing is allocated and no random numbers are drawn.
    weight: Any = layer.weight
    device = weight.device if fill else "meta"
    if isinstance(layer, nn.Linear):
        linear = _padding(te.Linear) if rows > 1 else te.Linear
        made = linear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=weight.dtype,
            init_method=fill,
            device=device,
        )
        made.rows = rows
    else:
        shape: Any = layer.normalized_shape
        made = te.LayerNorm(shape, eps=layer.eps, dtype=weight.dtype, device=device)
    return _take(made, layer, ("bias",) if fill else ("weight", "bias"))


def to_torch(te: Any, layer: Any) -> nn.Module | None:
    """Return torch's equivalent of one of the library's layers, or None if torch has none."""
    made: nn.Module
    if type(layer) in (te.Linear, _padding(te.Linear)):
        if layer.weight_names != ["weight"] or layer.return_bias or layer.tp_size > 1:
            return None
        sizes = layer.in_features, layer.out_features
        made = nn.Linear(*sizes, layer.use_bias, device="meta", dtype=layer.weight.dtype)
    elif type(layer) is te.LayerNorm and not layer.zero_centered_gamma:
        made = nn.LayerNorm(layer.weight.shape, layer.eps, device="meta", dtype=layer.weight.dtype)
    else:
        return None
    made = _take(made, layer, [name for name, _ in made.named_parameters()])
    if (plain := _plain(te, layer.weight)) is not layer.weight:
        made.weight = nn.Parameter(plain, layer.weight.requires_grad)
    return made


def _take(made: nn.Module, layer: nn.Module, names: Sequence[str]) -> nn.Module:
    """Give `made` the parameters and the training mode of `layer`."""
    for name in names:
        parameter = getattr(layer, name)
        if isinstance(parameter, nn.Parameter):
            setattr(made, name, parameter)
    made.train(layer.training)
    weight: Any = made.weight
    # This moves no parameter, but the library sets its layer up for the device.
    return made.to(weight.device)


def replace(model: nn.Module, name: str, made: nn.Module) -> nn.Module:
    """Replace the submodule `name` and return the model, or `made` if the name is empty."""
    if not name:
        return made
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, made)
    return model


# --- states -----------------------------------------------------------------------------------------


def _is_library_layer(module: nn.Module) -> bool:
    return any(cls.__module__.startswith("transformer_engine.") for cls in type(module).__mro__)


def _extra_keys(model: nn.Module) -> tuple[str, ...]:
    names = [name for name, module in model.named_modules() if _is_library_layer(module)]
    return tuple(f"{name}._extra_state".lstrip(".") for name in names)


def hide_extra_state(model: Any) -> None:
    """Keep the library's extra state, which is a pickle, out of a model's state dict."""
    if _extra_keys(model) and _drop not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_drop)
        model.register_load_state_dict_pre_hook(_ignore)
        model.register_load_state_dict_post_hook(_not_missing)


def _drop(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in _extra_keys(model):
        state.pop(prefix + key, None)


def _ignore(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    held = [state.pop(prefix + key, None) for key in _extra_keys(model)]
    if any(isinstance(one, torch.Tensor) and one.numel() for one in held):
        warn(
            "The loaded state contains Transformer Engine's extra state, a pickle, which is ignored. "
            "Scales start from scratch."
        )


def _not_missing(model: nn.Module, found: Any) -> None:
    keys = _extra_keys(model)
    found.missing_keys[:] = [key for key in found.missing_keys if not key.endswith(keys)]


def _plain(te: Any, value: Any) -> Any:
    return value.dequantize() if isinstance(value, te.QuantizedTensor) else value


def _file(rank: int) -> str:
    return f"scales_{rank}.safetensors"


def _modules(accelerator: AcceleratorView) -> Iterator[tuple[str, nn.Module]]:
    """Return all layers of the library that have scales, each with the prefix of its keys."""
    for index, model in enumerate(accelerator.models):
        for name, module in accelerator.unwrap_model(model).named_modules():
            if isinstance(getattr(module, "fp8_meta", None), dict):
                yield f"{index}.{name}.", module


def _scales(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Return a layer's tensors for delayed scaling. Before its first forward, it has none."""
    meta: Mapping[str, Any] = module.fp8_meta  # type: ignore[assignment]
    for side in _SIDES:
        for what in _KEPT:
            tensor = getattr(meta.get(side), what, None)
            if isinstance(tensor, torch.Tensor):
                yield side, what, tensor


def _fill(tensor: torch.Tensor, saved: torch.Tensor | None, new: float) -> None:
    """Copy a saved tensor into `tensor`, or only its newest steps if the lengths differ.

    In a history, the first row is the current step and the last row is the step before it.
    """
    with torch.no_grad():
        tensor.fill_(new)
        if saved is None or saved.shape[1:] != tensor.shape[1:]:
            return
        if saved.shape == tensor.shape:
            tensor.copy_(saved)
        elif saved.dim() > 1:
            tensor[0].copy_(saved[0])
            if past := min(len(saved), len(tensor)) - 1:
                tensor[-past:].copy_(saved[-past:])
