"""Indexed data with megatron: written from Python's own source, read, trained on and resumed."""

from __future__ import annotations

import inspect
import json.decoder
import json.encoder
import pickle
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LENGTH, VOCABULARY, tiny
from torch.utils.data import DataLoader
from training import adam, made, step
from worker import RANK, scratch

from accelerate_core import Accelerator, MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accelerate_core.errors import ConfigurationError, PrepareError
from accelerate_core.utils import set_seed
from accelerate_megatron import build_datasets
from accelerate_megatron.library import imported

EOD = 0


def documents(module: Any) -> list[list[int]]:
    """Return a module's paragraphs with bytes as tokens, each followed by its end."""
    texts = inspect.getsource(module).split("\n\n")
    return [[1 + ord(one) % (VOCABULARY - 1) for one in text] + [EOD] for text in texts]


def write(accelerator: Any, folder: Path, module: Any = json.decoder, name: str = "") -> str:
    prefix = str(folder / (name or module.__name__))
    accelerator.wait_for_everyone()  # until no rank reads the old files
    if accelerator.is_main_process:
        indexed = imported("datasets.indexed_dataset")
        builder = indexed.IndexedDatasetBuilder(
            f"{prefix}.bin", indexed.DType.optimal_dtype(VOCABULARY)
        )
        for document in documents(module):
            builder.add_document(torch.tensor(document), [len(document)])
        builder.finalize(f"{prefix}.idx")
    accelerator.wait_for_everyone()
    return prefix


def samples_of(dataset: Any) -> list[list[int]]:
    return [[*one["tokens"].tolist(), int(one["labels"][-1])] for one in dataset]


def check_data_is_read_as_written() -> None:
    """Each token is read once, split over data ranks in the order of a single process."""
    accelerator = made({"dp_replicate": 2})
    path = write(accelerator, scratch("read"))
    written = documents(json.decoder)
    train, valid, test = build_datasets(
        accelerator, seq_length=LENGTH, data_path=path, split="1", eod=EOD, eod_mask_loss=True
    )
    assert valid is test is None
    size = sum(map(len, written))
    assert len(train) == (size - 1) // LENGTH
    # A sample is a piece of consecutive documents, so its pairs of tokens occur in a document.
    ends = {tuple(one[-3:]) for one in written}
    inside = {pair for one in written for pair in pairwise(one)}
    for sample, found in zip(train, samples_of(train), strict=True):
        assert sample.keys() == {"tokens", "labels", "loss_mask"}
        assert found[1:] == sample["labels"].tolist()
        for pair in pairwise(found):
            assert pair in inside or pair[0] == EOD
        assert sample["loss_mask"].tolist() == [float(one != EOD) for one in found[:-1]]
        for at in range(2, LENGTH):
            assert found[at] != EOD or tuple(found[at - 2 : at + 1]) in ends
    # Read again from the cache, and prepare a loader.
    again = build_datasets(
        accelerator, seq_length=LENGTH, data_path=path, split="1", eod=EOD, eod_mask_loss=True
    )[0]
    assert samples_of(again) == samples_of(train)
    # A file that was written anew is not read with the old index.
    for module in (json.encoder, json.decoder):
        write(accelerator, scratch("read"), module, name=Path(path).name)
        again = build_datasets(accelerator, seq_length=LENGTH, data_path=path, split="1")[0]
        assert (len(again) == len(train)) == (module is json.decoder)
    loader = accelerator.prepare(DataLoader(train, 4, drop_last=True))
    rows = [accelerator.gather(batch["tokens"]) for batch in loader]
    told = [batch["tokens"] for batch in DataLoader(train, 8, drop_last=True)]
    assert len(rows) == len(told) > 10
    assert all(torch.equal(a.cpu(), b) for a, b in zip(rows, told, strict=True))
    # Several files: one pass over each, or with weights as often as necessary.
    other = write(accelerator, scratch("read"), json.encoder)
    with pytest.warns(UserWarning, match="9999 samples are requested for train"):
        both = build_datasets(
            accelerator, seq_length=LENGTH, data_path=[path, other, path], split="98,1,1",
            samples=(9999, 0, 0), num_dataset_builder_threads=2,
        )[0]  # fmt: skip
    mixed, *_ = build_datasets(
        accelerator, seq_length=LENGTH, data_path=[0.75, path, 0.25, other], split="98,1,1",
        samples=(400, 0, 0),
    )  # fmt: skip
    numbers = [int(mixed.dataset[at]["dataset_id"]) for at in range(400)]
    assert (len(mixed), numbers.count(1)) == (400, 100)
    assert len(both) > len(train)
    assert "dataset_id" not in mixed[0]
    other_size = sum(map(len, documents(json.encoder)))
    own = build_datasets(
        accelerator, seq_length=LENGTH, samples=(10, 5, None),
        train_data_path=[1, path, 1, other], test_data_path=other,
    )  # fmt: skip
    assert [one and len(one) for one in own] == [10, None, (other_size - 1) // LENGTH]
    accelerator.end_training()


def check_documents_are_separate() -> None:
    """Masks and positions start again after the end of a document, and a model uses them."""
    accelerator = made({"tp": 2}, num_micro_batches=2)
    path = write(accelerator, scratch("masks"))
    given = {"eod_mask_loss": True, "reset_attention_mask": True, "reset_position_ids": True}

    class Tokenizer:
        eos_token_id = EOD

        @property
        def pad(self) -> int:
            raise NotImplementedError  # like megatron's tokenizers

    train = build_datasets(
        accelerator, seq_length=LENGTH, data_path=path, split="1", tokenizer=Tokenizer(), **given
    )[0]
    rows = [one for one in train if EOD in one["tokens"][3:12].tolist()][:8]
    assert len(rows) == 8
    for row in rows:
        tokens, mask = row["tokens"].tolist(), row["attention_mask"][0]
        begin = 0
        for at, token in enumerate(tokens):
            seen = [not hidden for hidden in mask[at].tolist()]
            assert seen == [begin <= other <= at for other in range(LENGTH)]
            assert int(row["position_ids"][at]) == at - begin
            begin = at + 1 if token == EOD else begin
    set_seed(0)
    model: Any = tiny()
    reference = tiny()
    reference.load_state_dict(model.state_dict())
    model, _ = accelerator.prepare(model, adam(model))
    batch = next(iter(DataLoader(rows, 8)))
    visible = torch.zeros(8, 1, LENGTH, LENGTH)
    visible = visible.masked_fill(batch["attention_mask"], torch.finfo(torch.float32).min)
    logits = reference(
        batch["tokens"], attention_mask=visible, position_ids=batch["position_ids"]
    ).logits
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    parts = [
        torch.nn.functional.cross_entropy(a.flatten(0, 1), b.flatten())
        for a, b in zip(logits.chunk(2), labels.chunk(2), strict=True)
    ]
    told = sum(parts) / 2
    found = accelerator.train_step({n: v.to(accelerator.device) for n, v in batch.items()}).loss
    assert abs(float(found) - float(told)) <= 1e-5, (found, told)
    accelerator.end_training()


def placeholder(path: str, **more: Any) -> MegatronLMDummyDataLoader:
    options = {"micro_batch_size": 2, "seq_length": LENGTH, "num_workers": 0}
    return MegatronLMDummyDataLoader(
        **{"data_path": path, "splits_string": "90,5,5", **options, **more}
    )


LAYOUTS: list[dict[str, Any]] = [
    {"sizes": {"dp_shard": 2}, "use_distributed_optimizer": True, "num_micro_batches": 1},
    {"sizes": {"tp": 2}, "num_micro_batches": 2},
    {"sizes": {"pp": 2}, "num_micro_batches": 2},
]


def begin(
    path: str, layout: dict[str, Any], **more: Any
) -> tuple[Accelerator, Any, Any, list[Any]]:
    options = dict(layout)
    workers = options.pop("num_workers", 0)
    accelerator = made(
        options.pop("sizes"), eval_iters=2, eval_interval=3, train_iters=6, **options, **more
    )
    set_seed(0)
    model: Any = tiny()
    rows = placeholder(path, num_workers=workers)
    model, optimizer, *loaders = accelerator.prepare(model, adam(model), rows, rows, rows)
    return accelerator, model, optimizer, loaders


def check_resume() -> None:
    """With next() and worker processes, resuming is bit for bit; on another layout within rounding."""
    folder = scratch("resumed")
    accelerator = made({"dp_shard": 2})
    path = write(accelerator, folder)
    accelerator.end_training()
    told: list[float] = []
    for layout in LAYOUTS:
        again = {"num_workers": 1} if not told else {}
        accelerator, model, optimizer, loaders = begin(
            path, {**layout, **again}, project_dir=str(folder)
        )
        train, valid, test = loaders
        # 6 steps of 2 batches of 4 samples; 3 validations of 2 batches; a test of 2.
        assert [len(one) for one in loaders] == [12, 6, 2]
        losses = []
        for number in range(12):
            losses.append(step(accelerator, model, optimizer, next(train)))
            if number == 4:
                accelerator.eval_step(next(valid))
            if number == 5 and not told:
                saved = accelerator.save_state(str(folder / "state"))
        with pytest.raises(StopIteration):
            next(train)
        assert sum(batch["tokens"].size(0) for batch in test) * len(valid) // 6 in (4, 8)
        if told:
            assert max(abs(a - b) for a, b in zip(losses, told, strict=True)) <= 1e-5
        else:
            told = losses
        accelerator.end_training()
    for layout in LAYOUTS:
        accelerator, model, optimizer, (train, valid, _) = begin(path, layout)
        next(train)
        accelerator.load_state(saved)
        same = layout is LAYOUTS[0]
        for_loop = [step(accelerator, model, optimizer, batch) for batch in train]
        rest = told[6:]
        worst = max(abs(a - b) for a, b in zip(for_loop, rest, strict=True))
        assert for_loop == rest if same else worst <= 1e-5, (layout, for_loop, told)
        with torch.no_grad():
            assert len(list(valid)) == 5
        accelerator.end_training()
    check_resume_with_own_loader(saved, path, told[6:])


def check_resume_with_own_loader(saved: str, path: str, rest: list[float]) -> None:
    """The script's own loader continues where the placeholder's loader stopped, in the same order."""
    accelerator = made({"dp_shard": 2}, use_distributed_optimizer=True)
    train = build_datasets(
        accelerator, seq_length=LENGTH, data_path=path, split="90,5,5", samples=(48, 0, 0)
    )[0]
    model: Any = tiny()
    loader: Any = DataLoader(train, 2, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    accelerator.load_state(saved)  # loaders are matched by their order
    assert [step(accelerator, model, optimizer, batch) for batch in loader] == rest
    accelerator.end_training()


def check_plugin_options() -> None:
    """Consumed samples, the script's own datasets, masked ends, and the scheduler's numbers."""
    accelerator = made({"dp_shard": 2})
    path = write(accelerator, scratch("said"))
    accelerator.end_training()
    whole = placeholder(path, train_data_path=path, data_path=None, splits_string="1")
    accelerator = made(
        {"dp_shard": 2}, num_micro_batches=2, consumed_samples=[16], eod_mask_loss=True
    )
    with pytest.raises(ConfigurationError, match="which token ends a document"):
        accelerator.prepare(whole)
    with pytest.raises(ConfigurationError, match="the labels after the ends"):
        accelerator.prepare(DataLoader([1, 2]))
    whole = placeholder(path, eod=EOD)
    late = accelerator.prepare(whole)
    with torch.no_grad():
        rows, again = ([accelerator.gather(batch["tokens"]) for batch in late] for _ in range(2))
    assert [len(row) for row in again] == [8] * (len(rows) + 2)
    assert all(torch.equal(a, b) for a, b in zip(rows, again[2:], strict=True))
    assert all(one["loss_mask"].equal((one["tokens"] != EOD).float()) for one in late)
    accelerator.end_training()

    asked = []

    def provider(wanted: list[int]) -> Any:
        asked.append(wanted)
        rows = [{"tokens": torch.full((4,), at), "dataset_id": 0} for at in range(50)]
        return rows, rows[:30], None

    accelerator = made(
        {"tp": 2}, steps=1, eval_iters=3, eval_interval=4,
        custom_megatron_datasets_provider_function=provider,
    )  # fmt: skip
    model = tiny()
    optimizer = adam(model)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=8)
    rows = placeholder(path)
    _, _, train, valid, test, _ = accelerator.prepare(model, optimizer, rows, rows, rows, schedule)
    assert asked == [[16, 18, 6]]
    assert (len(train), len(valid), test) == (8, 9, None)
    assert next(train)["tokens"].tolist() == [[0] * 4, [1] * 4]
    assert next(valid).keys() == {"tokens"}
    with pytest.raises(PrepareError, match="4 times"):
        accelerator.prepare(rows, rows, rows, rows)
    accelerator.end_training()
    # Samples are counted once: multiply_batch does not apply to the placeholder's batches.
    accelerator = made(
        {"dp_shard": 2}, train_samples=64, eval_iters=1, num_micro_batches=2, multiply_batch=True
    )
    model = tiny()
    optimizer = adam(model)
    schedule = MegatronLMDummyScheduler(optimizer)
    _, _, train, schedule = accelerator.prepare(model, optimizer, placeholder(path), schedule)
    schedule.scheduler.step()
    assert (len(train), schedule.scheduler.state_dict()["num_steps"]) == (8, 16)
    accelerator.end_training()
    accelerator = made({"tp": 2}, consumed_samples=[3])
    with pytest.raises(
        ConfigurationError, match="consumed_samples=3 for train must be a multiple of 2"
    ):
        accelerator.prepare(placeholder(path))
    accelerator.end_training()


def check_errors_are_raised_on_all_ranks() -> None:
    """A file that is missing, unwritable or unreadable on one rank is an error on all."""
    folder = scratch("fails")
    accelerator = made({"dp_shard": 2})
    path = write(accelerator, folder)
    given: dict[str, Any] = {"seq_length": LENGTH, "split": "1"}

    def build(**more: Any) -> Any:
        return build_datasets(accelerator, **{"data_path": path, **given, **more})

    with pytest.raises(ConfigurationError, match=r"json.decode.idx does not exist.*Did you mean"):
        build(data_path=path[:-1])
    file = Path(f"{path}.idx")
    with pytest.raises(ConfigurationError, match=r"Rank 0 could not build .*FileExistsError"):
        build(data_cache_path=file)
    with pytest.raises(ConfigurationError, match=r"0 tokens for test, in 0 of \d+ documents"):
        build(split="9999,0,1", samples=(None, None, 100))
    build(split="9999,0,1", samples=(20, None, 0))
    build()
    accelerator.wait_for_everyone()
    cached = sorted((folder / "json.decoder" / "cache" / "GPTDataset_indices").glob("*.npy"))
    assert cached
    if accelerator.is_main_process:
        for one in cached:
            one.write_bytes(pickle.dumps("a third-party"))
    accelerator.wait_for_everyone()
    with pytest.raises(ConfigurationError, match="is not an array of numbers: delete it"):
        build()
    # A cache that each rank would have for itself.
    with pytest.raises(ConfigurationError, match=r"Rank 1 could not read .*No such file"):
        build(data_cache_path=folder / f"of-rank-{RANK}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(data_cache_path=folder / "of-all")[0] is not None
    accelerator.end_training()
