"""A small regression data set, a model for it, and loaders for tests of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

#: Pairs of sentences as in the task MRPC, with 1 for the same meaning.
_PAIRS = [
    ("The train left at noon.", "At noon, the train departed.", 1),
    ("Prices rose in June.", "In June there was a rise of prices.", 1),
    ("She wrote the report.", "The report was not finished.", 0),
    ("It rains in the north.", "The south is dry this year.", 0),
]


class RegressionDataset(Dataset[dict[str, Any]]):
    """Noisy points `x` and `y` on the line `y = a x + b`."""

    def __init__(
        self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None
    ) -> None:
        noise = np.random.default_rng(seed)
        self.length = length
        self.x = noise.normal(size=(length,)).astype(np.float32)
        error = noise.normal(scale=0.1, size=(length,)).astype(np.float32)
        self.y = a * self.x + b + error

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """The line `a x + b`. The first forward prints the dtypes."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a, dtype=torch.float32))
        self.b = torch.nn.Parameter(torch.tensor(b, dtype=torch.float32))
        self.first_batch = True

    def forward(self, x: Any = None) -> Any:
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        return x * self.a + self.b


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[Any, Any]:
    """Return a training and a validation loader with a few sentence pairs, in the form of MRPC.

    The tokenizer is `bert-base-cased`, from the Hub or its cache.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")

    def collate(rows: Any) -> Any:
        first, second, labels = (list(column) for column in zip(*rows, strict=True))
        made = tokenizer(first, second, truncation=True, padding="longest", return_tensors="pt")
        return {**made, "labels": torch.tensor(labels)}

    def loader(size: int, shuffle: bool) -> Any:
        return DataLoader(_PAIRS, batch_size=size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]

    return loader(2, True), loader(1, False)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[Any, Any]:
    """Return a training and a validation loader with a few sentences for next-token prediction."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM-360M")
    tokenizer.pad_token = tokenizer.eos_token

    def collate(rows: Any) -> Any:
        texts = [first for first, _, _ in rows]
        made = tokenizer(texts, truncation=True, padding="longest", return_tensors="pt")
        ids, mask = made["input_ids"], made["attention_mask"]
        labels = torch.where(mask[:, 1:] == 1, ids[:, 1:], -100)
        return {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], "labels": labels}

    def loader(size: int) -> Any:
        return DataLoader(_PAIRS, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]

    return loader(2), loader(1)
