"""Norms in torch that sequence parallelism can use, and megatron's layers made with them."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accelerate_core.plugin import ConfigurationError, listing
from accelerate_megatron.library import imported


class Norm(nn.Module):
    """`LayerNorm` or `RMSNorm`, as `config.normalization` says.

    Under sequence parallelism each tensor parallel rank norms a part of the tokens: the parameters
    are marked, so that megatron adds up their gradients. Its own norm without Transformer Engine
    refuses to be used there.

    Args:
        config: megatron's `TransformerConfig`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        kinds = ("LayerNorm", "RMSNorm")
        if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
            raise ConfigurationError(
                f"normalization={config.normalization!r} with layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma} needs Transformer Engine; without it: "
                f"{listing(kinds)}, with False."
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm the last dimension."""
        if self.bias is None:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return what `GPTModel` takes as its `transformer_layer_spec`, for one stage.

    With Transformer Engine its layers; without it megatron's own, with `Norm`.

    Args:
        config: megatron's `TransformerConfig`.
        vp_stage: which of the rank's virtual stages, None without such.

    Raises:
        ConfigurationError: some layers have experts and others have none.
    """
    if config.moe_layer_freq != 1:
        raise ConfigurationError(
            f"moe_layer_freq={config.moe_layer_freq}: layer_spec makes all layers alike. Put a list of "
            "megatron-core's own specs together, with accelerate_megatron.models.norms.Norm in them."
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
