"""Parity of a GPT-2 that Transformers shards while it loads it. See `parity_worker.py`."""

from __future__ import annotations

from sharded_at_load import VOCABULARY, main
from transformers import GPT2Config, GPT2LMHeadModel


def new() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


if __name__ == "__main__":
    # Transformers has no plan for the layers of GPT-2, neither for FSDP nor for tensor parallelism.
    main(new, {"fsdp_plan": {"transformer.h.*": "free_full_weight"}})
