"""Settings of fp8: the choice of a library, and one recipe class per library."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

from accelerate_core.plugin import (
    ConfigurationError,
    KwargsHandler,
    did_you_mean,
    listing,
    option,
    parse_bool,
    settings,
    warn,
)

_NAMES: dict[str, Any] = {
    "env_prefix": "ACCELERATE_FP8_",
    "section": "fp8_config",
    "yaml_prefix": "fp8_",
}


@settings(**_NAMES)
class FP8Settings:
    """The library that computes in 8 bits. A recipe in `kwargs_handlers` also selects it."""

    backend: Literal["AO", "TE", "MSAMP"] | None = option(
        default=None,
        help="library: AO (torchao, the default), TE (Transformer Engine) or MSAMP",
        ask="Which fp8 library do you want to use?",
    )


AO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@settings(**_NAMES)
class AORecipeKwargs(KwargsHandler):
    """Options for torchao. Its linear layers multiply in fp8, with new scales in each step.

    Args:
        config: a `torchao.float8.Float8LinearConfig`, instead of all options below except
            `module_filter_func`.
        module_filter_func: `(module, name) -> bool`, whether to convert a layer. The default is
            `accelerate_fp8.layers.usual_filter(model)`.
        pad_inner_dim: pad matrices whose inner dimension is not a multiple of 16. In backward,
            that dimension is the number of tokens in the batch.
        enable_fsdp_float8_all_gather: gather sharded weights in fp8. By default, this is on with
            FSDP2 and `recipe="tensorwise"`.
        recipe: `tensorwise`, `rowwise`, or `rowwise_with_gw_hp`, which computes the gradients of
            weights in high precision.
        emulate: emulate fp8 in fp32. By default, this is on if the device has no fp8 matrix
            product.
        precompute_scales: if weights are gathered in fp8, compute the scales of all weights in one
            collective after each optimizer step.
    """

    config: Any = option(
        default=None, help="a torchao Float8LinearConfig to use instead", env=(), key="", cli=()
    )
    module_filter_func: Callable[..., Any] | None = option(
        default=None, help="(module, name) -> whether to convert it", env=(), key="", cli=()
    )
    pad_inner_dim: bool = option(
        default=True,
        help="pad matrices whose inner dimension is not a multiple of 16",
        ask="Pad matrices whose inner dimension is not a multiple of 16?",
        ask_if="backend=AO",
    )
    enable_fsdp_float8_all_gather: bool | None = option(
        default=None, help="gather weights in fp8 with FSDP2 (default: with recipe tensorwise)"
    )
    recipe: str = option(
        default="tensorwise",
        choices=AO_RECIPES,
        help="how tensors are scaled",
        ask="How should tensors be scaled?",
        ask_if="backend=AO",
    )
    emulate: bool | None = option(
        default=None, help="compute fp8 in fp32 (default: if the device does not support fp8)"
    )
    precompute_scales: bool = option(
        default=True, help="compute the scales of all weights in one collective after each step"
    )

    def __post_init__(self) -> None:
        if self.recipe.lower() in ("mxfp8", "nvfp4"):
            raise ConfigurationError(
                f"recipe={self.recipe!r} needs Transformer Engine and a GPU with compute capability "
                f"10.0. Use TERecipeKwargs(recipe={self.recipe!r}), or set "
                "ACCELERATE_FP8_BACKEND=TE and ACCELERATE_FP8_TE_RECIPE. The recipes of torchao are "
                f"{listing(AO_RECIPES)}."
            )
        self.recipe = _one_of("recipe", self.recipe, AO_RECIPES)
        if not (self.config is None or hasattr(self.config, "enable_fsdp_float8_all_gather")):
            raise ConfigurationError(
                f"config={self.config!r} is not a torchao.float8.Float8LinearConfig. To select a "
                f"recipe by name, pass recipe= with one of {listing(AO_RECIPES)} instead."
            )
        given = sorted(
            self.to_kwargs().keys() - {"config", "module_filter_func", "precompute_scales"}
        )
        if self.config is not None and given:
            raise ConfigurationError(
                f"config= already contains {listing(given)}. Set it there, or remove config."
            )
        if self.recipe != "tensorwise" and self.enable_fsdp_float8_all_gather:
            raise ConfigurationError(
                f"enable_fsdp_float8_all_gather needs one scale per weight, but "
                f"recipe={self.recipe!r} has one per row. Use recipe='tensorwise'."
            )


#: Recipe of Transformer Engine -> name of the library's class, and its options.
TE_RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "delayed": (
        "DelayedScaling",
        ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    ),
    "current": ("Float8CurrentScaling", ("fp8_format",)),
    "block": ("Float8BlockScaling", ("fp8_format",)),
    "mxfp8": ("MXFP8BlockScaling", ("margin", "fp8_format")),
    "nvfp4": ("NVFP4BlockScaling", ()),
}
_TE_OPTIONS = TE_RECIPES["delayed"][1]
#: Suffixes of Accelerate's variables ACCELERATE_FP8_OVERRIDE_....
_PASSES = ("FPROP", "DGRAD", "WGRAD")
_FORMATS, _ALGORITHMS = ("HYBRID", "E4M3", "E5M2"), ("max", "most_recent")


def _one_of(name: str, value: str, allowed: Collection[str]) -> str:
    """Return the allowed word that equals `value`, ignoring case."""
    for word in allowed:
        if word.lower() == value.lower():
            return word
    raise ConfigurationError(
        f"{name}={value!r} is not one of {listing(allowed)}.{did_you_mean(value, allowed)}"
    )


@settings(**_NAMES)
class TERecipeKwargs(KwargsHandler):
    """Options for Transformer Engine. Its layers compute in fp8 inside its autocast.

    Args:
        use_autocast_during_eval: compute in fp8 in evaluation mode too.
        margin: margin of the scales in bits (`delayed`, `mxfp8`).
        interval: removed from the library; the only valid value is 1.
        fp8_format: `HYBRID` (E4M3 in forward, E5M2 in backward) or `E4M3`. The library cannot
            train in `E5M2` alone. The default depends on the recipe: `HYBRID` for `delayed` and
            `current`, `E4M3` for `block` and `mxfp8`.
        amax_history_len: number of steps of which the maximum values are kept (`delayed`).
        amax_compute_algo: `max` of the history, or `most_recent` (`delayed`).
        override_linear_precision: removed from the library; all values must be False.
        use_mxfp8_block_scaling: Accelerate's name for `recipe="mxfp8"`.
        recipe: `delayed` (the default), `current`, `block`, `mxfp8` or `nvfp4`, or a recipe object
            of the library.
        quantized_weights: keep frozen weights only in 8 bits (`quantized_model_init`).
        reduce_amax: share the maximum values between data ranks (`delayed`). This needs a
            collective in every training forward.
    """

    use_autocast_during_eval: bool = option(
        default=False,
        help="compute in fp8 in evaluation mode too",
        ask="Compute in fp8 in evaluation mode too?",
        ask_if="backend=TE",
    )
    margin: int = option(default=0, help="margin of the scales in bits (delayed, mxfp8)")
    interval: int = option(default=1, help="removed from Transformer Engine; only 1 is accepted")
    fp8_format: str = option(
        default="HYBRID",
        env="ACCELERATE_FP8_FORMAT",
        key="format",
        choices=_FORMATS,
        help="HYBRID or E4M3 (default: the recipe's own)",
    )
    amax_history_len: int = option(
        default=1024,
        help="number of steps in the history (delayed)",
        yaml="amax_history_length",
        cli="fp8_amax_history_len",
        ge=1,
    )
    amax_compute_algo: str = option(
        default="max",
        choices=_ALGORITHMS,
        yaml="amax_compute_algorithm",
        cli="fp8_amax_compute_algo",
        help="max or most_recent value of the history (delayed)",
    )
    override_linear_precision: Any = option(
        default=(False, False, False),
        env=[f"ACCELERATE_FP8_OVERRIDE_{one}" for one in ("LINEAR_PRECISION", *_PASSES)],
        help="removed from Transformer Engine; only false,false,false is accepted",
    )
    use_mxfp8_block_scaling: bool = option(default=False, help="the same as recipe mxfp8")
    recipe: Any = option(
        default=None,
        env="ACCELERATE_FP8_TE_RECIPE",
        key="te_recipe",
        cli="fp8_te_recipe",
        choices=TE_RECIPES,
        help="scaling recipe of Transformer Engine",
        ask="Which recipe of Transformer Engine do you want to use?",
        ask_if="backend=TE",
    )
    quantized_weights: bool = option(default=False, help="keep frozen weights only in 8 bits")
    reduce_amax: bool = option(default=True, help="share maximum values over data ranks (delayed)")

    def __post_init__(self) -> None:
        self.fp8_format = _one_of("fp8_format", self.fp8_format, _FORMATS)
        self.amax_compute_algo = _one_of("amax_compute_algo", self.amax_compute_algo, _ALGORITHMS)
        if isinstance(self.recipe, str):
            self.recipe = _one_of("recipe", self.recipe, TE_RECIPES)
        if self.interval != 1:
            raise ConfigurationError(
                f"interval={self.interval} is not supported: Transformer Engine removed the option "
                "and updates its scales in every step. Leave it out."
            )
        given: Any = self.override_linear_precision
        each = given.split(",") if isinstance(given, str) else given
        each = each if isinstance(each, list | tuple) else [each]
        if any(parse_bool(one) is not False for one in each):
            raise ConfigurationError(
                f"override_linear_precision={given!r} is not supported: Transformer Engine removed "
                "the option. Leave it out. The library's own recipe objects have backward_override "
                "instead."
            )
        self.override_linear_precision = (False, False, False)
        if self.fp8_format == "E5M2":
            raise ConfigurationError(
                "fp8_format='E5M2': Transformer Engine does not support training in E5M2 alone. Use "
                "HYBRID (E4M3 in forward, E5M2 in backward) or E4M3."
            )
        if self.use_mxfp8_block_scaling and self.recipe not in (None, "mxfp8"):
            raise ConfigurationError(
                f"use_mxfp8_block_scaling means recipe='mxfp8', but recipe={self.recipe!r} is also "
                "set. Leave one of them out."
            )
        self._check_options()

    def _check_options(self) -> None:
        name = self.recipe_name
        changed = self.to_kwargs()
        has = TE_RECIPES[name][1] if name else ()
        others = [key for key in _TE_OPTIONS if key in changed and key not in has]
        given = ", ".join(f"{key}={changed[key]!r}" for key in others)
        if others and not name:
            kind = type(self.recipe).__name__
            raise ConfigurationError(
                f"recipe= is a {kind} object, which is used unchanged. Set {given} on it instead."
            )
        if others:
            have = [one for one, (_, options) in TE_RECIPES.items() if others[0] in options]
            raise ConfigurationError(
                f"{given} is not an option of Transformer Engine's recipe={name!r}, which has "
                f"{listing(has) if has else 'none'}. Leave it out, or use recipe "
                f"{listing(have)}."
            )

    @property
    def recipe_name(self) -> str:
        """Name of the recipe, or an empty string for a recipe object of the library."""
        if self.recipe is not None:
            return self.recipe if isinstance(self.recipe, str) else ""
        return "mxfp8" if self.use_mxfp8_block_scaling else "delayed"


@settings(**_NAMES)
class MSAMPRecipeKwargs(KwargsHandler):
    """Options for MS-AMP, which is no longer maintained. Never tested with the real library.

    Args:
        opt_level: `O1` (weights and gradients in 8 bits) or `O2` (optimizer states too).
    """

    opt_level: Literal["O1", "O2"] = option(
        default="O2",
        help="optimization level of MS-AMP",
        yaml="optimization_level",
        cli="fp8_opt_level",
        ask="Which optimization level do you want to use?",
        ask_if="backend=MSAMP",
    )


@settings(**_NAMES)
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Deprecated: use `TERecipeKwargs` or `MSAMPRecipeKwargs`."""

    backend: str | None = option(
        default=None, env="ACCELERATE_FP8_BACKEND", choices=("TE", "MSAMP"), help="TE or MSAMP"
    )

    def __post_init__(self) -> None:
        warn(
            "FP8RecipeKwargs is deprecated. Use TERecipeKwargs or MSAMPRecipeKwargs.", FutureWarning
        )
        if self.backend is not None:
            self.backend = _one_of("backend", self.backend, ("TE", "MSAMP"))
        super().__post_init__()
