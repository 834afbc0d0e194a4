"""The precision `fp8`, and the choice of its engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, cast

import torch

from accelerate_core.plugin import (
    AcceleratorView,
    ConfigurationError,
    Precision,
    Sources,
    env_flag,
    listing,
    origin_of,
    resolve_settings,
)
from accelerate_fp8.layers import Layer, linear, table
from accelerate_fp8.settings import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    FP8Settings,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)

#: Engine -> module, class, and class of its recipe.
_ENGINES: dict[str, tuple[str, str, type[Any]]] = {
    "AO": ("accelerate_fp8.torchao", "TorchAO", AORecipeKwargs),
    "TE": ("accelerate_fp8.transformer_engine", "TransformerEngine", TERecipeKwargs),
    "MSAMP": ("accelerate_fp8.msamp", "MSAMP", MSAMPRecipeKwargs),
}

#: Values that Accelerate's launcher sets for every engine, where they differ from our defaults.
_ACCELERATE_DEFAULTS = {"amax_compute_algo": "most_recent", "enable_fsdp_float8_all_gather": True}


class FP8(Precision):
    """Linear layers multiply matrices in 8 bits, with torchao, Transformer Engine or MS-AMP.

    `FP8(...)` returns an instance of the engine's class. The recipe in `kwargs_handlers` selects
    the engine, or else the setting `backend`. The default is torchao.
    """

    name = "fp8"
    api_version = (1, 0)
    needs = frozenset({"autocast", "modules"})
    dtype = torch.bfloat16
    Settings = FP8Settings
    more_settings: ClassVar[tuple[type[Any], ...]] = (
        AORecipeKwargs,
        TERecipeKwargs,
        MSAMPRecipeKwargs,
    )
    handlers = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
    #: Name of the engine, and of its library.
    engine: ClassVar[str]
    library: ClassVar[str]
    #: Why this engine was chosen.
    engine_reason: str

    def __new__(cls, settings: Any = None, handlers: Sequence[Any] = ()) -> FP8:
        """Choose the engine, and create an instance of its class.

        Raises:
            ConfigurationError: `handlers` has recipes of several engines.
        """
        engine, reason = choose(settings, handlers)
        if cls is FP8:
            module, name, _ = _ENGINES[engine]
            cls = getattr(import_module(module), name)
        made = super().__new__(cls)
        made.engine_reason = reason
        return made

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings, handlers)
        given = handlers[0] if handlers else None
        _, _, recipe = _ENGINES[self.engine]
        cls = type(given) if given is not None else recipe
        sources = Sources.of(os.environ)
        self.recipe: Any = resolve_settings(cls, given, sources, owner="fp8")[0]
        self._refuse_options_of_others(given, recipe, sources)
        #: For each converted model: the name of its class, and its layers.
        self._converted: list[tuple[str, list[Layer]]] = []

    def _refuse_options_of_others(self, given: Any, recipe: type[Any], sources: Sources) -> None:
        """Refuse options of another engine, except those that Accelerate's launcher sets for every engine."""
        for word in ("FPROP", "DGRAD", "WGRAD"):
            variable = f"ACCELERATE_FP8_OVERRIDE_{word}"
            if env_flag(sources.environ, variable):
                raise ConfigurationError(
                    f"{variable} is set, but Transformer Engine removed override_linear_precision. "
                    "Unset the variable. The library's own recipe objects have backward_override "
                    "instead."
                )
        for name, (module, cls_name, other) in _ENGINES.items():
            if other is recipe:
                continue
            handler = given if isinstance(given, other) else None
            values, provenance = resolve_settings(other, handler, sources, owner="fp8")
            for field in dataclasses.fields(other):
                value = getattr(values, field.name)
                if value in (field.default, _ACCELERATE_DEFAULTS.get(field.name, field.default)):
                    continue
                library = getattr(import_module(module), cls_name).library
                raise ConfigurationError(
                    f"{field.name}={value!r} (from {provenance[field.name].origin}) is an option of "
                    f"{library}, but this run computes fp8 with {self.library} "
                    f"({self.engine_reason}). Remove the option, or select {library} with "
                    f"ACCELERATE_FP8_BACKEND={name}, --fp8_backend {name.lower()}, or "
                    f"{other.__name__} in kwargs_handlers."
                )

    @classmethod
    def explain_choice(cls, sources: Sources) -> str:
        """Return which engine a run would use, and why.

        Args:
            sources: the environment, the config file and the command line.
        """
        settings, _ = resolve_settings(FP8Settings, None, sources, owner="fp8")
        engine, reason = choose(settings, ())
        return f"engine {engine}: {reason}"

    # --- reports --------------------------------------------------------------------------------

    def note_layers(self, accelerator: AcceleratorView, model: Any, layers: list[Layer]) -> None:
        """Record a model's layers for `explain`, and warn if none was converted."""
        kind = type(model).__name__
        self._converted.append((kind, layers))
        if not any(one.in_fp8 for one in linear(layers)):
            first = next(iter(linear(layers)), None)
            reason = "it has no linear layer"
            if first is not None:
                reason = f"{first.name or 'the model itself'}: {first.reason}"
            accelerator.warn_once(
                f"mixed_precision='fp8': no layer of {kind} computes in fp8 ({reason}). To see the "
                "reason for every layer, print accelerator.explain()."
            )

    def details(self) -> str:
        """Return a few words about the engine's options, or an empty string."""
        return ""

    def explain(self, accelerator: AcceleratorView) -> str:
        """Return the engine, why it was chosen, and which layers were converted."""
        lines = [f"fp8 by {self.library}: {self.engine_reason}{self.details()}"]
        for kind, layers in self._converted:
            ours = linear(layers)
            count = f"{sum(one.in_fp8 for one in ours)} of {len(ours)} linear layers"
            lines += [f"{kind}: {count} compute in fp8", *table(layers)]
        return "\n".join([*lines, *_untrained(accelerator)])

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Forget the models."""
        self._converted.clear()

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide the engine and the recipe under Accelerate's names."""
        names = {
            "AO": "ao_recipe_handler",
            "TE": "te_recipe_handler",
            "MSAMP": "msamp_recipe_handler",
        }
        given = self.given_handlers
        return {
            "fp8_backend": self.engine,
            "fp8_enabled": True,
            "has_fp8_handler": bool(given),
            "fp8_recipe_handler": self.recipe,
            names[self.engine]: self.recipe,
        }


def _untrained(accelerator: AcceleratorView) -> list[str]:
    """Return a line for each model with weights that never got a gradient.

    A weight is reported if it has no optimizer state but another weight of the model has. Without
    any state, the optimizer may be one that keeps none.
    """
    groups = [group for one in accelerator.optimizers for group in one.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    stepped = {id(parameter) for one in accelerator.optimizers for parameter in one.state}
    lines = []
    for model in map(accelerator.unwrap_model, accelerator.models):
        trained = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
        names = [name for name, one in trained.items() if one in held and one not in stepped]
        if names and not stepped.isdisjoint(trained.values()):
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            lines.append(f"{type(model).__name__}: no gradient in any step for {shown}")
    return lines


def choose(settings: Any, handlers: Sequence[Any]) -> tuple[str, str]:
    """Return the engine, and why it was chosen.

    Raises:
        ConfigurationError: `handlers` has recipes of several engines.
    """
    if len(handlers) > 1:
        raise ConfigurationError(
            f"kwargs_handlers has {listing(type(one).__name__ for one in handlers)}, which are "
            "recipes of several fp8 libraries. Pass only one."
        )
    if handlers:
        given = handlers[0]
        reason = f"kwargs_handlers has {type(given).__name__}"
        if isinstance(given, FP8RecipeKwargs):
            older, _ = resolve_settings(FP8RecipeKwargs, given, Sources.of(os.environ))
            return cast("str", older.backend or "TE"), reason
        return next(name for name, (*_, cls) in _ENGINES.items() if isinstance(given, cls)), reason
    if settings is not None and settings.backend is not None:
        return settings.backend, origin_of(settings, "backend")
    return (
        "AO",
        "the default (ACCELERATE_FP8_BACKEND or a recipe in kwargs_handlers selects another)",
    )
