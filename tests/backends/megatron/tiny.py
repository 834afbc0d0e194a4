"""Small models of Transformers with random weights, and text from Python's own source."""

from __future__ import annotations

import inspect
import json.decoder
from typing import Any

import torch

EXPERTS, CHOSEN = 4, 2
VOCABULARY, LENGTH = 65, 16  # no tensor parallel size divides the vocabulary


def tiny(family: str = "gpt2", layers: int = 4) -> Any:
    """Return a causal language model without dropout."""
    import transformers

    shared = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        config: Any = transformers.GPT2Config(
            n_positions=LENGTH,
            n_embd=32,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **shared,
        )
        return transformers.GPT2LMHeadModel(config)
    shared |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "pad_token_id": 0,  # a space: its embedding is not trained
    }
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    # A provider does not pad the vocabulary.
    shared |= {"vocab_size": VOCABULARY + 1, "pad_token_id": None, "router_aux_loss_coef": 0.0}
    shared |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "num_hidden_layers": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shared))


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Return `count` samples: rows of characters, with the same row as labels."""
    source = inspect.getsource(json.decoder)
    numbers = [min(max(ord(one) - 32, 0), VOCABULARY - 1) for one in source]
    rows = torch.tensor(numbers[: count * LENGTH]).view(count, LENGTH)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]
