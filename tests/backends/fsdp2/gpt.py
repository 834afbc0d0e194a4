"""A small character model and its data, to compare all kinds of parallelism."""

from __future__ import annotations

import inspect
import json.decoder
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        # The numbers of heads and positions depend on this rank's part after the layer.
        q, k, v = (
            one(h).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Takes positions as an input, because a rank can have a part of the sequence."""

    def __init__(
        self,
        width: int = WIDTH,
        layers: int = 2,
        heads: int = HEADS,
        length: int = LENGTH,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {
    **dict.fromkeys(("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.up"), "colwise"),
    **dict.fromkeys(("layers.*.o", "layers.*.down"), "rowwise"),
}
#: The same, with activations between layers split along the sequence.
SEQUENCE_PLAN = {
    **dict.fromkeys(("tokens", "places"), "split_sequence"),
    **dict.fromkeys(("layers.*.norm1", "layers.*.norm2", "norm"), "sequence"),
    **dict.fromkeys(("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.up"), "colwise_sequence"),
    **dict.fromkeys(("layers.*.o", "layers.*.down"), "rowwise_sequence"),
    "head": "colwise_sequence_rep",
}


def text(count: int, length: int = LENGTH) -> torch.Tensor:
    """Return `count` rows of `length + 1` characters from a source file of Python."""
    codes = torch.tensor([ord(c) % VOCABULARY for c in inspect.getsource(json.decoder)])
    starts = torch.arange(count) * 7 % (len(codes) - length - 1)
    return torch.stack([codes[start : start + length + 1] for start in starts.tolist()])


def loss_of(model: Any, tokens: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(model(tokens, places).flatten(0, 1).float(), labels.flatten())
