"""Functions that scripts for Hugging Face Accelerate import."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from accelerate_core.plugin import ConfigurationError
from accelerate_fp8 import transformer_engine as engine
from accelerate_fp8.layers import converted
from accelerate_fp8.settings import TERecipeKwargs


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> nn.Module:
    """Replace torch's linear layers and LayerNorms by Transformer Engine's, or the other way round.

    The parameters stay the same objects.

    Returns:
        The model, changed in place, or the new layer if the model itself is one of these layers.
    """
    te = engine.library()
    kinds = tuple(
        cls
        for cls, wanted in (
            ((nn.Linear, te.Linear), _convert_linear),
            ((nn.LayerNorm, te.LayerNorm), _convert_ln),
        )
        if wanted
    )
    wanted = {name for name, one in model.named_modules() if isinstance(one, kinds)}
    if to_transformer_engine:
        names = [name for name in converted(engine.survey_all(model)) if name in wanted]
    else:
        names = sorted(wanted)
    for name in names:
        layer = model.get_submodule(name)
        made = engine.to_library(te, layer) if to_transformer_engine else engine.to_torch(te, layer)
        if made is not None:
            model = engine.replace(model, name, made)
    return model


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward function that runs `model_forward` in Transformer Engine's autocast.

    Bind the result to a module. It computes in fp8 if the module is in training mode.

    Args:
        model_forward: the forward of a module.
        fp8_recipe: a recipe of Transformer Engine.
        use_during_eval: compute in fp8 in evaluation mode too.
    """
    te = engine.library()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.autocast(enabled=use_during_eval or self.training, recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Make a model's forward run in Transformer Engine's autocast.

    Args:
        fp8_recipe_handler: a `TERecipeKwargs`, or None for its defaults.

    Raises:
        ConfigurationError: the device does not support the recipe.
    """
    given = TERecipeKwargs() if fp8_recipe_handler is None else fp8_recipe_handler
    te = engine.library()
    recipe = engine.make_recipe(given)
    if reason := engine.lacking(te, recipe):
        raise ConfigurationError(f"{type(recipe).__name__} does not run on this device. {reason}")
    forward = contextual_fp8_autocast(model.forward, recipe, given.use_autocast_during_eval)
    model.forward = MethodType(forward, model)
    return model
