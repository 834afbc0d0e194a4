"""Models with a few thousand weights, and generated data."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

VOCABULARY = 64


def classifier(dropout: float = 0.1, labels: int = 3) -> Any:
    set_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            num_labels=labels,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=more.pop("vocab_size", VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **more,
    )


def writer(**more: Any) -> Any:
    set_seed(2)
    return LlamaForCausalLM(_llama(**more))


def judge(**more: Any) -> Any:
    set_seed(3)
    return LlamaForSequenceClassification(_llama(num_labels=1, **more))


def old_writer() -> Any:
    set_seed(6)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def rewriter() -> Any:
    set_seed(7)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def translator() -> Any:
    set_seed(4)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    )


class Sentences(torch.utils.data.Dataset[Any]):
    """Rows of token ids. The label of each depends on the sum of its ids."""

    def __init__(self, rows: int, length: int = 8, seed: int = 0, generate: bool = False) -> None:
        made = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCABULARY, (rows, length), generator=made)
        self.generate = generate

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        ids = self.ids[index]
        label = ids.flip(0) if self.generate else ids.sum() % 3
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same rows as a stream without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = Sentences(rows)

    def __iter__(self) -> Any:
        for index in range(len(self.rows)):
            yield self.rows[index]
