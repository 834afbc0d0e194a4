"""Norms in torch that support sequence parallelism, and megatron's layers with these norms."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accelerate_core.plugin import ConfigurationError, listing
from accelerate_megatron.library import imported


class Norm(nn.Module):
    """`LayerNorm` or `RMSNorm`, depending on `config.normalization`.

    With sequence parallelism, each tensor parallel rank normalises a part of the tokens. The
    parameters are marked, so that megatron sums their gradients. Megatron's own norm supports this
    only with Transformer Engine.

    Args:
        config: megatron's `TransformerConfig`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        kinds = ("LayerNorm", "RMSNorm")
        if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
            raise ConfigurationError(
                f"normalization={config.normalization!r} with layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma} needs Transformer Engine. Without it, use "
                f"one of {listing(kinds)} and layernorm_zero_centered_gamma=False."
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        if self.bias is None:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the `transformer_layer_spec` of a `GPTModel`, for one stage.

    The layers come from Transformer Engine if it is installed, and otherwise from megatron itself,
    with `Norm`.

    Args:
        config: megatron's `TransformerConfig`.
        vp_stage: number of the rank's virtual stage, or None without virtual stages.

    Raises:
        ConfigurationError: only some layers have experts.
    """
    if config.moe_layer_freq != 1:
        raise ConfigurationError(
            f"moe_layer_freq={config.moe_layer_freq} is not supported by layer_spec, which makes all "
            "layers the same. Create a list of megatron-core's specs instead, with "
            "accelerate_megatron.models.norms.Norm as their norm."
        )
    specs = imported("models.gpt.gpt_layer_specs")
    experts = config.num_moe_experts
    if importlib.util.find_spec("transformer_engine") is not None:
        return specs.get_gpt_layer_with_transformer_engine_spec(experts)
    layer = specs.get_gpt_layer_local_spec(experts)
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    block = imported("transformer.transformer_block")
    layers = [layer] * block.get_num_layers_to_build(config, vp_stage)
    return block.TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
