"""The precision `fp8`, whose engine is chosen when it is made."""

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

#: Engine -> module, class, and the recipe it takes.
_ENGINES: dict[str, tuple[str, str, type[Any]]] = {
    "AO": ("accelerate_fp8.torchao", "TorchAO", AORecipeKwargs),
    "TE": ("accelerate_fp8.transformer_engine", "TransformerEngine", TERecipeKwargs),
    "MSAMP": ("accelerate_fp8.msamp", "MSAMP", MSAMPRecipeKwargs),
}

#: What Accelerate's launcher writes for every engine, where that is no default here.
_PEERS_DEFAULTS = {"amax_compute_algo": "most_recent", "enable_fsdp_float8_all_gather": True}


class FP8(Precision):
    """Matrix products of linear layers in 8 bits, by torchao, Transformer Engine or MS-AMP.

    Making one gives an object of the engine's class: the recipe in `kwargs_handlers` says which, or
    the setting `backend`; torchao is the default.
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
    #: Name of the engine, and its library's.
    engine: ClassVar[str]
    library: ClassVar[str]
    #: Why it is this one.
    engine_reason: str

    def __new__(cls, settings: Any = None, handlers: Sequence[Any] = ()) -> FP8:
        """Choose the engine.

        Raises:
            ConfigurationError: recipes of several engines.
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
        #: Class of the model and its linear layers, of each model that was converted.
        self._converted: list[tuple[str, list[Layer]]] = []

    def _refuse_options_of_others(self, given: Any, recipe: type[Any], sources: Sources) -> None:
        """Refuse options of another engine, except those that Accelerate's launcher sets for every engine."""
        for word in ("FPROP", "DGRAD", "WGRAD"):
            variable = f"ACCELERATE_FP8_OVERRIDE_{word}"
            if env_flag(sources.environ, variable):
                raise ConfigurationError(
                    f"{variable} is set, and Transformer Engine has no override_linear_precision any "
                    "more. Leave it out; a recipe of the library's has backward_override."
                )
        for name, (module, cls_name, other) in _ENGINES.items():
            if other is recipe:
                continue
            said = given if isinstance(given, other) else None
            made, provenance = resolve_settings(other, said, sources, owner="fp8")
            for field in dataclasses.fields(other):
                value = getattr(made, field.name)
                if value in (field.default, _PEERS_DEFAULTS.get(field.name, field.default)):
                    continue
                library = getattr(import_module(module), cls_name).library
                raise ConfigurationError(
                    f"{field.name}={value!r} (from {provenance[field.name].origin}) is an option of "
                    f"{library}, and fp8 is computed by {self.library}: {self.engine_reason}. Leave "
                    f"it out, or choose {library}: ACCELERATE_FP8_BACKEND={name}, --fp8_backend "
                    f"{name.lower()}, or {other.__name__} in kwargs_handlers."
                )

    @classmethod
    def explain_choice(cls, sources: Sources) -> str:
        """Tell which engine a run would have, and why.

        Args:
            sources: environment, config file and what stands for the command line.
        """
        settings, _ = resolve_settings(FP8Settings, None, sources, owner="fp8")
        engine, reason = choose(settings, ())
        return f"engine {engine}: {reason}"

    # --- what it tells --------------------------------------------------------------------------

    def note_layers(self, accelerator: AcceleratorView, model: Any, layers: list[Layer]) -> None:
        """Keep what became of a model's layers, for `explain`; say so where nothing was converted."""
        kind = type(model).__name__
        self._converted.append((kind, layers))
        if not any(one.in_fp8 for one in linear(layers)):
            first = next(iter(linear(layers)), None)
            reason = "it has no linear layer"
            if first is not None:
                reason = f"{first.name or 'the model itself'}: {first.reason}"
            accelerator.warn_once(
                f"mixed_precision='fp8': no layer of {kind} computes in fp8 ({reason}; all of them: "
                "print(accelerator.explain()))."
            )

    def details(self) -> str:
        """Say in a few words how the engine computes."""
        return ""

    def explain(self, accelerator: AcceleratorView) -> str:
        """Tell the engine, why it is this one, and what was converted and what not."""
        lines = [f"fp8 by {self.library}: {self.engine_reason}{self.details()}"]
        for kind, layers in self._converted:
            ours = linear(layers)
            told = f"{sum(one.in_fp8 for one in ours)} of {len(ours)} linear layers"
            lines += [f"{kind}: {told} compute in fp8", *table(layers)]
        return "\n".join([*lines, *_untrained(accelerator)])

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Forget the models."""
        self._converted.clear()

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Serve what Accelerate's scripts ask: the engine and the recipe."""
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
    """Tell which weights got no gradient, as of layers that never ran.

    Only of models some of whose weights have a state in an optimizer: others may have none at all.
    """
    groups = [group for one in accelerator.optimizers for group in one.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    stepped = {id(parameter) for one in accelerator.optimizers for parameter in one.state}
    lines = []
    for model in map(accelerator.unwrap_model, accelerator.models):
        its = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
        names = [name for name, one in its.items() if one in held and one not in stepped]
        if names and not stepped.isdisjoint(its.values()):
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            lines.append(f"{type(model).__name__}: no step had a gradient of {shown}")
    return lines


def choose(settings: Any, handlers: Sequence[Any]) -> tuple[str, str]:
    """Return the engine and why it is this one.

    Raises:
        ConfigurationError: recipes of several engines.
    """
    if len(handlers) > 1:
        raise ConfigurationError(
            f"kwargs_handlers has {listing(type(one).__name__ for one in handlers)}, recipes of "
            "several fp8 libraries; pass one."
        )
    if handlers:
        given = handlers[0]
        said = f"kwargs_handlers has {type(given).__name__}"
        if isinstance(given, FP8RecipeKwargs):
            older, _ = resolve_settings(FP8RecipeKwargs, given, Sources.of(os.environ))
            return cast("str", older.backend or "TE"), said
        return next(name for name, (*_, cls) in _ENGINES.items() if isinstance(given, cls)), said
    if settings is not None and settings.backend is not None:
        return settings.backend, origin_of(settings, "backend")
    return (
        "AO",
        "the default (ACCELERATE_FP8_BACKEND, or a recipe in kwargs_handlers, says another)",
    )
