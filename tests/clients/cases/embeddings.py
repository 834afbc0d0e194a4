"""sentence-transformers' trainers: a bi-encoder, with its own batch samplers, and a cross-encoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import running
from datasets import Dataset
from running import case
from safetensors.torch import save_model
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import (
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny import classifier
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from trainer import arguments, trained
from transformers import PreTrainedTokenizerFast, set_seed

WORDS = [f"w{number}" for number in range(56)]


def saved(folder: Path, model: Any) -> str:
    """Save a model with a tokenizer for whole words, in the Hub's format.

    Each rank saves its own copy, because `save_pretrained` only writes on the main rank.
    """
    known = {word: index for index, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    place = folder / f"model-{running.RANK}"
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(place)
    (place / "config.json").write_text(model.config.to_json_string())
    save_model(model, str(place / "model.safetensors"), metadata={"format": "pt"})
    return str(place)


def texts(rows: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(3, 7))) for _ in range(rows)]


def pairs(rows: int, seed: int = 0) -> Dataset:
    first, second = texts(rows, seed), texts(rows, seed + 1)
    return Dataset.from_dict({"anchor": first, "positive": second})


def scored(rows: int, seed: int = 0, kind: Any = float) -> Dataset:
    """Return pairs of texts with their similarity, the share of words that both have."""
    first, second = texts(rows, seed), texts(rows, seed + 1)
    shares = [
        len({*a.split()} & {*b.split()}) / min(len(a.split()), len(b.split()))
        for a, b in zip(first, second)
    ]
    return Dataset.from_dict(
        {"first": first, "second": second, "score": [kind(share > 0) for share in shares]}
    )


def bi_encoder(folder: Path, loss: Any, train: Any, evaluate: Any = None, **more: Any) -> Any:
    set_seed(1)
    transformer = Transformer(saved(folder, classifier().bert))
    pooling = Pooling(transformer.get_embedding_dimension())
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    if evaluate is not None:
        more["eval_strategy"] = "epoch"
    made = SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, SentenceTransformerTrainingArguments, **more),
        train_dataset=train,
        eval_dataset=evaluate,
        loss=loss(model),
    )
    # With negatives from the batch, the order of an epoch affects its losses.
    return by_epoch(trained(made))


def by_epoch(result: dict[str, Any]) -> dict[str, Any]:
    """Split the log into the first epoch and the later ones."""
    log = result.pop("log")
    return {
        "first_epoch": [line for line in log if line["epoch"] <= 1],
        "later": {"log": [line for line in log if line["epoch"] > 1], **result},
    }


@case()
def bi_encoder_with_negatives_in_the_batch(folder: Path) -> Any:
    return bi_encoder(folder, MultipleNegativesRankingLoss, pairs(42))


@case()
def bi_encoder_without_duplicates(folder: Path) -> Any:
    """The batch sampler depends on the epoch that the Trainer sets."""
    more = {"batch_sampler": "no_duplicates", "gradient_accumulation_steps": 2}
    return bi_encoder(folder, MultipleNegativesRankingLoss, pairs(42), **more)


@case()
def bi_encoder_of_several_datasets(folder: Path) -> Any:
    train = {"long": scored(26), "short": scored(17, 5)}
    more = {"multi_dataset_batch_sampler": "proportional"}
    return bi_encoder(folder, CosineSimilarityLoss, train, scored(11, 9), **more)


@case()
def cross_encoder(folder: Path) -> Any:
    set_seed(1)
    model = CrossEncoder(saved(folder, classifier(labels=1)), num_labels=1, device="cpu")
    # By default the Trainer makes DDP search for unused parameters, which marks all as unused here.
    more = {"eval_strategy": "epoch", "ddp_find_unused_parameters": False}
    more["per_device_eval_batch_size"] = 4  # on two processes, a short last batch is dropped
    made = CrossEncoderTrainer(
        model=model,
        args=arguments(folder, CrossEncoderTrainingArguments, **more),
        train_dataset=scored(42),
        eval_dataset=scored(27, 9),
        loss=BinaryCrossEntropyLoss(model),
    )
    result = by_epoch(trained(made))
    return {**result, "scores": model.predict(list(zip(texts(5, 3), texts(5, 4)))).tolist()}


if __name__ == "__main__":
    running.main()
