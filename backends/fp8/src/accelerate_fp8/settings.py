"""What users may say about fp8: which library does it, and one recipe for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from accelerate_core import KwargsHandler, option, settings
from accelerate_core.config.schema import given_fields
from accelerate_core.errors import ConfigurationError, listing, warn
from accelerate_core.truth import switch

_NAMES: dict[str, Any] = {
    "env_prefix": "ACCELERATE_FP8_",
    "section": "fp8_config",
    "yaml_prefix": "fp8_",
}


@settings(**_NAMES)
class FP8Settings:
    """Which library computes in 8 bits; a recipe in `kwargs_handlers` says so as well."""

    backend: Literal["AO", "TE", "MSAMP"] | None = option(
        default=None,
        help="library: AO (torchao, the default), TE (Transformer Engine) or MSAMP",
        ask="Which library shall compute in fp8?",
    )


@settings(**_NAMES)
class AORecipeKwargs(KwargsHandler):
    """torchao: linear layers multiply in fp8, scaled anew in each step.

    Args:
        config: a `torchao.float8.Float8LinearConfig`, in the place of the options below but
            `module_filter_func`.
        module_filter_func: `(module, name) -> bool`, which layers are converted; the default is
            `accelerate_fp8.layers.usual_filter` of the model.
        pad_inner_dim: pad matrices whose inner dimension (a batch's tokens, in backward) is no
            multiple of 16.
        enable_fsdp_float8_all_gather: gather weights in fp8 where a backend shards them. The
            default is where that is possible: FSDP2 and `recipe="tensorwise"`.
        recipe: `tensorwise`, `rowwise`, or `rowwise_with_gw_hp` (gradients of weights are computed
            in high precision).
        emulate: compute in fp32 what fp8 would give. The default is where the device has no fp8
            matrix product.
        precompute_scales: with the gather in fp8, compute the scales of all weights after each
            optimizer step by one collective.
    """

    config: Any = option(default=None, env=(), key="", cli=())
    module_filter_func: Callable[..., Any] | None = option(default=None, env=(), key="", cli=())
    pad_inner_dim: bool = option(
        default=True, help="pad matrices whose inner dimension is no multiple of 16"
    )
    enable_fsdp_float8_all_gather: bool | None = option(
        default=None, help="gather weights in fp8 with FSDP2 (default: with recipe tensorwise)"
    )
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = option(
        default="tensorwise", help="how tensors are scaled"
    )
    emulate: bool | None = option(
        default=None, help="compute fp8 in fp32 (default: where the device has no fp8)"
    )
    precompute_scales: bool = option(
        default=True, help="compute all weights' scales by one collective after each step"
    )

    def __post_init__(self) -> None:
        said = sorted(
            self.to_kwargs().keys() - {"config", "module_filter_func", "precompute_scales"}
        )
        if self.config is not None and said:
            raise ConfigurationError(
                f"config= holds {listing(said)} already; say it there, or leave config out."
            )
        if self.recipe != "tensorwise" and self.enable_fsdp_float8_all_gather:
            raise ConfigurationError(
                f"enable_fsdp_float8_all_gather gathers one scale per weight, and "
                f"recipe={self.recipe!r} has one per row; use recipe='tensorwise'."
            )


def _three(text: str, variable: str) -> tuple[bool, bool, bool]:
    parts = [switch(part, f"override_linear_precision={text!r}") for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigurationError(
            f"override_linear_precision={text!r} (from {variable}) is not three of true and false."
        )
    return (parts[0], parts[1], parts[2])


@settings(**_NAMES)
class TERecipeKwargs(KwargsHandler):
    """Transformer Engine: its layers compute in fp8 inside of its autocast.

    Args:
        use_autocast_during_eval: compute in fp8 in evaluation mode too.
        margin: bits by which scales are kept below the largest value (delayed scaling).
        interval: gone from the library; 1 is the only value.
        fp8_format: `HYBRID` (E4M3 forward, E5M2 backward) or `E4M3`; the library trains in no
            pure `E5M2`.
        amax_history_len: steps whose largest values are kept (delayed scaling).
        amax_compute_algo: `max` of the history, or `most_recent` (delayed scaling).
        override_linear_precision: gone from the library; all False is the only value.
        use_mxfp8_block_scaling: the peer's name for `recipe="mxfp8"`.
        recipe: `delayed`, `current`, `block`, `mxfp8` or `nvfp4`, or a recipe of the library's;
            None: `mxfp8` where it was asked for by its other name, or else `delayed`.
        quantized_weights: keep weights in fp8 alone (`quantized_model_init`).
        reduce_amax: share the largest values over the ranks that get different samples
            (delayed scaling), which is a collective in forward.
    """

    use_autocast_during_eval: bool = option(
        default=False, help="compute in fp8 in evaluation mode too"
    )
    margin: int = option(default=0, help="bits of margin of the scales")
    interval: int = option(default=1, help="gone from Transformer Engine: 1 alone is taken")
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] = option(
        default="HYBRID", env="ACCELERATE_FP8_FORMAT", help="HYBRID or E4M3"
    )
    amax_history_len: int = option(default=1024, help="steps of history of delayed scaling", ge=1)
    amax_compute_algo: Literal["max", "most_recent"] = option(
        default="max", help="max or most_recent, of the history"
    )
    override_linear_precision: tuple[bool, bool, bool] = option(
        default=(False, False, False),
        read=_three,
        help="gone from Transformer Engine: false,false,false alone is taken",
    )
    use_mxfp8_block_scaling: bool = option(default=False, help="the same as recipe mxfp8")
    recipe: Any = option(
        default=None,
        env="ACCELERATE_FP8_TE_RECIPE",
        key="te_recipe",
        cli="fp8_te_recipe",
        choices=("delayed", "current", "block", "mxfp8", "nvfp4"),
        help="scaling recipe of Transformer Engine",
    )
    quantized_weights: bool = option(default=False, help="keep weights in fp8 alone")
    reduce_amax: bool = option(default=True, help="share largest values over data ranks")


@settings(**_NAMES)
class MSAMPRecipeKwargs(KwargsHandler):
    """MS-AMP, a library that is no longer maintained; nothing of this was run with it.

    Args:
        opt_level: `O1` (weights and gradients in 8 bits) or `O2` (optimizer states too).
    """

    opt_level: Literal["O1", "O2"] = option(default="O2", help="optimization level of MS-AMP")


@settings(**_NAMES)
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Older: the options of both; use `TERecipeKwargs` or `MSAMPRecipeKwargs`."""

    backend: Literal["TE", "MSAMP"] | None = option(default=None, env="ACCELERATE_FP8_BACKEND")

    def __post_init__(self) -> None:
        # Not where the core fills in the rest of one that was told already.
        if "backend" in given_fields(self) or not given_fields(self):
            warn(
                "FP8RecipeKwargs is older; use TERecipeKwargs or MSAMPRecipeKwargs.", FutureWarning
            )
