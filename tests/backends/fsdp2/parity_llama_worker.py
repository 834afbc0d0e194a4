"""Parity of a Llama that Transformers shards while it loads it. See `parity_worker.py`."""

from __future__ import annotations

from sharded_at_load import VOCABULARY, main
from transformers import LlamaConfig, LlamaForCausalLM


def new() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


if __name__ == "__main__":
    main(new, {})
