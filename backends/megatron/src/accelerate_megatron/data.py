"""megatron-core's indexed datasets (.bin, .idx), as samples for a model and loaders for a script."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from accelerate_core.plugin import (
    AcceleratorView,
    ConfigurationError,
    DataLoaderShard,
    LoaderOptions,
    PrepareError,
    did_you_mean,
    listing,
    prepare_loader,
    warn,
)
from accelerate_megatron.library import imported
from accelerate_megatron.scheduler import MegatronLMDummyScheduler
from accelerate_megatron.settings import MegatronLMPlugin

SPLITS = ("train", "valid", "test")
T = TypeVar("T")
#: Path prefixes of files, and the weight of each if they are weighted.
Blend = tuple[list[str], list[float] | None]


class IndexedSamples(Dataset[dict[str, torch.Tensor]]):
    """The first `size` samples of one of megatron-core's datasets, in the form a model takes.

    Args:
        dataset: its samples are mappings.
        size: the number of samples.
        names: the entries to keep of each sample; None: all except the dataset's number in its blend.
    """

    def __init__(self, dataset: Any, size: int, names: Sequence[str] | None = None) -> None:
        self.dataset = dataset
        self.size = size
        self.names = names

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"Sample {index} does not exist; there are {self.size} samples.")
        sample = self.dataset[index]
        names = [name for name in sample if name != "dataset_id"]
        return {name: sample[name] for name in self.names or names}


def build_datasets(
    accelerator: AcceleratorView,
    *,
    seq_length: int,
    samples: Sequence[int | None] = (None, None, None),
    data_path: Any = None,
    split: str = "969,30,1",
    train_data_path: Any = None,
    valid_data_path: Any = None,
    test_data_path: Any = None,
    seed: int = 1234,
    tokenizer: Any = None,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    reset_attention_mask: bool = False,
    reset_position_ids: bool = False,
    data_cache_path: str | os.PathLike[str] | None = None,
    mmap_bin_files: bool = True,
    num_dataset_builder_threads: int = 1,
    mid_level_dataset_surplus: float = 0.005,
    allow_ambiguous_pad_tokens: bool = False,
) -> tuple[IndexedSamples | None, ...]:
    """Return the datasets for training, validation and test; None for one that has no data.

    Every rank must call it. Rank 0 builds the indices and writes them to the cache, then the others
    read them; an error on one rank is raised on all. A sample has `tokens`, `labels` (the next
    tokens) and `loss_mask`, each of length `seq_length`. The samples are shuffled with `seed`, so a
    loader need not shuffle.

    Args:
        accelerator: the Accelerator.
        seq_length: the number of tokens in a sample, which may span several documents.
        samples: the number of samples for each of the three datasets: the documents are read as
            often as necessary, and reshuffled each time. None: one pass. 0: none are built.
        data_path: the path of the files without `.bin` and `.idx`, a list of such paths, or
            alternating weights and paths, `[0.3, "a", 0.7, "b"]`; `split` divides their documents.
        split: the shares of the three datasets.
        train_data_path, valid_data_path, test_data_path: the files of each dataset, instead.
        seed: the seed of the order.
        tokenizer: its `eos_token_id` (or `eod`) ends a document, and its `pad_token_id` (or `pad`)
            is left out of the loss.
        eod: the token that ends a document, if there is no tokenizer.
        eod_mask_loss: leave the token after the end of a document out of the loss.
        reset_attention_mask: no token attends to earlier documents; samples have an
            `attention_mask` of `seq_length` x `seq_length`.
        reset_position_ids: positions start again after the end of a document; samples have
            `position_ids`. Only for models with learned positions.
        data_cache_path: the folder of the indices, shared by all machines; None: next to the data.
        mmap_bin_files: map the files into memory instead of reading from them.
        num_dataset_builder_threads: the number of files whose indices are built at the same time.
        mid_level_dataset_surplus: the fraction of extra samples built of each file for a blend.
        allow_ambiguous_pad_tokens: leave the padding token out of the loss even if it also ends
            documents.

    Raises:
        ConfigurationError: an argument is invalid, a file does not exist, or a rank failed.
    """
    eod = _token(tokenizer, "eod", "eos_token_id") if eod is None else eod
    pad = _token(tokenizer, "pad", "pad_token_id")
    if eod is None and (eod_mask_loss or reset_attention_mask or reset_position_ids):
        raise ConfigurationError(
            "eod_mask_loss, reset_attention_mask and reset_position_ids need to know which token "
            "ends a document: pass tokenizer=... or eod=..."
        )
    given = {"train_data_path": train_data_path, "valid_data_path": valid_data_path}
    own = [_blend(n, v) for n, v in {**given, "test_data_path": test_data_path}.items()]
    shared = _blend("data_path", data_path)
    if (shared is None) == (own == [None] * 3):
        raise ConfigurationError(
            "Pass either data_path, whose documents are divided by split, or some of "
            "train_data_path, valid_data_path and test_data_path."
        )
    there = [part > 0 for part in _shares(split)] if shared else [one is not None for one in own]
    if seq_length < 1:
        raise ConfigurationError(f"seq_length={seq_length} must be at least 1.")
    if len(samples) == 3 and any(count is not None and count < 0 for count in samples):
        raise ConfigurationError(
            f"samples={samples!r}: the numbers must be at least 0; None means one pass."
        )
    if len(samples) != 3:
        raise ConfigurationError(
            f"samples={samples!r} must be three numbers, for {listing(SPLITS)}."
        )
    wanted = [count if here else 0 for count, here in zip(samples, there, strict=True)]
    own = [one if count != 0 else None for one, count in zip(own, wanted, strict=True)]
    each = [shared] * 3 if shared else own
    if any(n is None and one and one[1] for n, one in zip(wanted, each, strict=True)):
        raise ConfigurationError(
            "If paths have weights, the number of samples must be known: pass samples=(...), or "
            "train_iters of MegatronLMPlugin. Without weights, the data is read once."
        )
    if wanted == [0, 0, 0]:
        return None, None, None
    prefixes = [path for one in ([shared] if shared else own) if one for path in one[0]]
    folder = Path(data_cache_path or Path(prefixes[0], "cache", "GPTDataset_indices"))

    def build() -> list[Any]:
        identity = _Tokens(eod, pad, _identities(prefixes))
        _check_cache(folder)
        config = imported("datasets.gpt_dataset").GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            path_to_cache=str(folder),
            tokenizer=identity,
            eod_mask_loss=eod_mask_loss,
            reset_attention_mask=reset_attention_mask,
            reset_position_ids=reset_position_ids,
            create_attention_mask=reset_attention_mask,  # without a mask, attention is causal
            mmap_bin_files=mmap_bin_files,
            num_dataset_builder_threads=num_dataset_builder_threads,
            mid_level_dataset_surplus=mid_level_dataset_surplus,
            allow_ambiguous_pad_tokens=allow_ambiguous_pad_tokens,
            **({"blend": shared, "split": split} if shared else {"blend_per_split": own}),
        )
        made: list[Any] = _builder()(_gpt_dataset(), wanted, lambda: True, config).build()
        return made

    names = ["tokens", "labels", "loss_mask"]
    names += ["attention_mask"] if reset_attention_mask else []
    names += ["position_ids"] if reset_position_ids else []
    return _as_wanted(_in_turn(accelerator, build), wanted, names)


def _as_wanted(
    datasets: Sequence[Any], wanted: Sequence[int | None], names: Sequence[str] | None
) -> tuple[IndexedSamples | None, ...]:
    made: list[IndexedSamples | None] = []
    for name, dataset, count in zip(SPLITS, datasets, wanted, strict=True):
        if dataset is None or count == 0:
            made.append(None)
            continue
        if count is not None and len(dataset) < count:
            warn(
                f"{count} samples are requested for {name}, but the data has only {len(dataset)}: "
                "files without weights are read once."
            )
        size = len(dataset) if count is None else min(count, len(dataset))
        made.append(IndexedSamples(dataset, size, names))
    return tuple(made)


def _token(tokenizer: Any, *names: str) -> int | None:
    """Return a special token by its name in megatron or in Transformers."""
    for name in names:
        try:
            found = getattr(tokenizer, name, None)
        except NotImplementedError:  # megatron's tokenizers raise it if they have none
            continue
        if isinstance(found, int):
            return found
    return None


def _blend(name: str, given: Any) -> Blend | None:
    """Read paths, or alternating weights and paths.

    Raises:
        ConfigurationError: it is neither.
    """
    if given is None:
        return None
    parts = [given] if isinstance(given, str | os.PathLike) else list(given)
    weights = [_number(one) for one in parts[::2]]
    if len(parts) % 2 or None in weights:
        weights = []
    paths = parts[1::2] if weights else parts
    if not paths or not all(isinstance(one, str | os.PathLike) for one in paths):
        raise ConfigurationError(
            f"{name}={given!r} must be a path without .bin and .idx, a list of such paths, or "
            "alternating weights and paths, [0.3, 'a', 0.7, 'b']."
        )
    if any(weight is not None and weight <= 0 for weight in weights):
        raise ConfigurationError(f"{name}={given!r}: weights must be greater than 0.")
    weighted = [weight for weight in weights if weight is not None] if len(paths) > 1 else None
    return [os.fspath(one) for one in paths], weighted or None


def _number(given: Any) -> float | None:
    try:
        return float(given)
    except (TypeError, ValueError):
        return None


def _shares(split: str) -> list[float]:
    """Return the three shares of a split.

    Raises:
        ConfigurationError: `split` is invalid.
    """
    found = [_number(one) for one in str(split).split(",")]
    parts = [part for part in found if part is not None and part >= 0]
    if len(parts) != len(found) or len(parts) > 3 or not sum(parts):
        raise ConfigurationError(
            f"split={split!r} must be up to three numbers, the shares of {listing(SPLITS)}, for "
            "example '969,30,1'."
        )
    return parts + [0.0] * (3 - len(parts))


class _Tokens:
    """What megatron-core asks a tokenizer for: two tokens, and what a cached index depends on.

    It depends on the content of the data's indices as well: after files have been written anew, the
    index that was cached for the old ones is not read.
    """

    vocab_size = None

    def __init__(self, eod: int | None, pad: int | None, files: list[str]) -> None:
        self.eod = -2 if eod is None else eod  # -1 is the padding token, unless `pad` is set
        if pad is not None:
            self.pad = pad
        self.unique_identifiers = {"eod": eod, "pad": pad, "files": files}


def _identities(prefixes: Sequence[str]) -> list[str]:
    """Return what distinguishes the files' indices; the indices of samples are cached under it."""
    found = []
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(prefix + suffix):
                folder = Path(prefix).parent
                there = sorted(str(one.with_suffix("")) for one in folder.glob("*.idx"))
                raise ConfigurationError(
                    f"{prefix + suffix} does not exist. Pass the path of indexed data without .bin "
                    f"and .idx; {folder} has {listing(there)}.{did_you_mean(prefix, there)}"
                )
        index = Path(prefix + ".idx").read_bytes()
        found.append(hashlib.sha256(index).hexdigest())
        _check_whole(prefix)
    return found


def _check_whole(prefix: str) -> None:
    """Compare a file of tokens with its index.

    Raises:
        ConfigurationError: it is shorter than the index says, or the index is invalid.
    """
    dataset = imported("datasets.indexed_dataset")
    try:
        index = dataset._IndexReader(prefix + ".idx", False)
        ends = index.sequence_pointers[-1:] + index.sequence_lengths[-1:] * index.dtype_size
    except Exception as error:
        raise ConfigurationError(f"{prefix}.idx is not an index of megatron: {error}") from error
    size = os.path.getsize(prefix + ".bin")
    wanted = int(ends.sum())
    if size < wanted:
        raise ConfigurationError(
            f"{prefix}.bin has {size} bytes, but its index says {wanted}: the file is incomplete."
        )


def _check_cache(folder: Path) -> None:
    """Reject files that numpy, called as megatron-core calls it, would unpickle."""
    for file in folder.glob("*.npy"):
        with file.open("rb") as opened:
            if opened.read(6) != b"\x93NUMPY":
                raise ConfigurationError(f"{file} is not an array of numbers: delete it.")


def _gpt_dataset() -> Any:
    return imported("datasets.gpt_dataset").GPTDataset


@cache
def _builder() -> Any:
    """Return megatron-core's builder without its barriers: the ranks wait in `_in_turn` instead.

    In a barrier they would wait forever for a rank that failed.
    """
    base: Any = imported("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder

    class Builder(base):
        @staticmethod
        def build_generic_dataset(kind: Any, on_rank: Any, synchronize: bool, *args: Any) -> Any:
            if kind is not _gpt_dataset():
                return None if all(one is None for one in args[0]) else kind(*args)
            data, path, documents, size, split, config = args
            if size == 0:
                return None
            tokens = int(data.sequence_lengths[documents].sum())
            length = config.sequence_length
            if not tokens or (size is None and tokens <= length):
                # megatron-core would count passes forever.
                raise ConfigurationError(
                    f"{path} has {tokens} tokens for {split.name}, in {len(documents)} of "
                    f"{len(data)} documents, but a sample needs seq_length + 1 = {length + 1}: "
                    "change split, or leave that dataset out."
                )
            return kind(*args)

        def _build_megatron_datasets_parallel(
            self, prefixes: list[str], split: Any, sizes: list[Any]
        ) -> list[list[Any]]:
            with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
                # Without weights it asks for one pass even if no samples are wanted.
                each = [
                    [0 if wanted == 0 else own for own, wanted in zip(one, self.sizes, strict=True)]
                    for one in sizes
                ]
                build = partial(self._build_megatron_dataset_splits, synchronize_ranks=False)
                made = pool.map(build, prefixes, [split] * len(each), each)
                return [list(one) for one in zip(*made, strict=True)]

    return Builder


def _in_turn(accelerator: AcceleratorView, build: Callable[[], T]) -> T:
    """Call `build` on rank 0, then on the other ranks.

    Raises:
        ConfigurationError: on all ranks, if the call failed on one.
    """
    made: list[T] = []
    for of_main in (True, False):
        trouble: ConfigurationError | None = None
        if accelerator.is_main_process == of_main:
            try:
                made.append(build())
            except ConfigurationError as error:
                trouble = error
            except Exception as error:
                trouble = ConfigurationError(
                    f"Rank {accelerator.process_index} could not {'build' if of_main else 'read'} the "
                    f"indices of the data ({type(error).__name__}: {error}). Rank 0 writes them to "
                    "the folder data_cache_path, and the other ranks read them from there."
                )
                trouble.__cause__ = error
        said = accelerator.communicator.gather_object("" if trouble is None else str(trouble))
        if trouble is not None:
            raise trouble
        if told := next((text for text in said if text), None):
            raise ConfigurationError(told)
    return made[0]


# --- the loaders of a script ----------------------------------------------------------------------


class MegatronLMDummyDataLoader:
    """A placeholder for Megatron's loaders for training, validation and test.

    Pass it to `prepare` three times to get the three loaders, in this order; once, to get only the
    first. Get their batches with `next(loader)` or a `for` loop. A batch has `micro_batch_size` x
    `num_micro_batches` samples for each data rank. The loaders start where `load_state` or
    `consumed_samples` of the plugin positioned them.

    `MegatronLMPlugin` determines the number of samples: `train_iters` (or the number in the
    scheduler) or `train_samples` for training, `eval_iters` for each of `train_iters //
    eval_interval + 1` validations, and `eval_iters` for the test; without any length, one pass
    over the documents.

    Args:
        dataset_kwargs: `micro_batch_size`, the arguments of `build_datasets` (`seq_length`,
            `data_path`, `split` or `splits_string`, ...), and `num_workers` (2), `eval_iters` and
            `eval_interval` (default: those of the plugin), `full_validation` (validate over one
            pass).

    Raises:
        ConfigurationError: an argument is unknown, missing, or has to be set elsewhere.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dict(dataset_kwargs)
        options = {name: value for name, value in dataset_kwargs.items() if value is not None}
        for name, way in _ELSEWHERE.items():
            if options.pop(name, False) is not False:
                raise ConfigurationError(f"MegatronLMDummyDataLoader({name}=...): {way}.")
        if options.pop("dataloader_type", "single") != "single":
            raise ConfigurationError(
                "MegatronLMDummyDataLoader supports only the order of the index "
                "(dataloader_type='single'). For a different order, pass "
                "DataLoader(accelerate_megatron.build_datasets(...)[0], ..., shuffle=True) to prepare."
            )
        if not options.pop("create_attention_mask_in_dataloader", True) and options.get(
            "reset_attention_mask"
        ):
            raise ConfigurationError(
                "reset_attention_mask=True needs a mask for each sample, but "
                "create_attention_mask_in_dataloader=False turns masks off. Leave one of them out."
            )
        named = options.pop("splits_string", None)
        if named is not None and options.setdefault("split", named) != named:
            raise ConfigurationError(
                f"split={options['split']!r} and splits_string={named!r} set the same option. Leave "
                "one of them out."
            )
        known = {*inspect.signature(build_datasets).parameters} - {"accelerator", "samples"}
        takes = sorted({"micro_batch_size", *_OF_LOADERS, *known})
        for name in options.keys() - set(takes):
            of_plugin = name in MegatronLMPlugin.__dataclass_fields__
            raise ConfigurationError(
                f"MegatronLMDummyDataLoader has no argument {name!r}; it takes {listing(takes)}."
                + (
                    " It is a field of MegatronLMPlugin."
                    if of_plugin
                    else did_you_mean(name, takes)
                )
            )
        for name in ("micro_batch_size", "seq_length"):
            if not isinstance(options.get(name), int) or options[name] < 1:
                raise ConfigurationError(
                    f"MegatronLMDummyDataLoader({name}={options.get(name)!r}): pass an integer greater "
                    "than 0."
                )
        self.micro_batch_size: int = options.pop("micro_batch_size")
        self._own = {name: options.pop(name, value) for name, value in _OF_LOADERS.items()}
        self._data: dict[str, Any] = options

    def loaders(
        self,
        accelerator: AcceleratorView,
        plugin: MegatronLMPlugin,
        steps: int | None,
        on_device: Sequence[bool],
    ) -> Iterator[IndexedLoader | None]:
        """Yield a loader for each entry of `on_device`, up to three; None for one without data.

        Args:
            steps: the optimizer steps of the training, if the plugin has no `train_samples`.
            on_device: for each loader, whether its batches are moved to the device.
        """
        rank, ranks = accelerator.hooks.data_shard()
        batch = self.micro_batch_size * (plugin.num_micro_batches or 1)
        wanted = self._samples(
            plugin, steps, batch * ranks, accelerator.gradient_accumulation_steps
        )
        wanted = list(wanted[: len(on_device)])
        wanted += [0] * (3 - len(wanted))
        own = plugin.custom_megatron_datasets_provider_function
        if own is not None:
            datasets = _as_wanted(own(wanted), wanted, None)
        else:
            masked = {"eod_mask_loss": bool(plugin.eod_mask_loss), **self._data}
            datasets = build_datasets(accelerator, samples=wanted, **masked)
        workers = self._own["num_workers"]
        consumed = [*(plugin.consumed_samples or ()), 0, 0, 0]
        for name, dataset, begin, moved in zip(SPLITS, datasets, consumed, on_device, strict=False):
            if dataset is None:
                yield None
                continue
            loader: Any = DataLoader(
                dataset,
                batch,
                drop_last=True,
                num_workers=workers,
                persistent_workers=workers > 0,
                pin_memory=accelerator.device.type == "cuda",
            )
            options = LoaderOptions(
                num_processes=ranks,
                process_index=rank,
                device=accelerator.device,
                put_on_device=moved,
                gradient_state=accelerator.gradient_state,
            )
            loader = prepare_loader(loader, options)
            object.__setattr__(loader, "__class__", IndexedLoader)
            if begin:
                loader.begin_at(begin, name)
            yield loader

    def _samples(
        self, plugin: MegatronLMPlugin, steps: int | None, whole: int, accumulated: int
    ) -> list[int | None]:
        """Return how many samples are wanted; None: one pass.

        Args:
            whole: the samples of a batch, over all ranks.
            accumulated: the batches of an optimizer step.
        """
        train = plugin.train_samples
        if train is None and steps is not None:
            train = steps * whole * accumulated
        if train is None:
            return [None, None, None]
        iters, every = (
            getattr(plugin, name) if self._own[name] is None else self._own[name]
            for name in ("eval_iters", "eval_interval")
        )
        times = train // (whole * accumulated) // every + 1
        valid = None if self._own["full_validation"] else times * iters * whole
        return [train, valid, iters * whole]


class IndexedLoader(DataLoaderShard):
    """A prepared loader that also supports `next`, to get its batches one by one."""

    _running: Iterator[Any] | None = None

    def __next__(self) -> Any:
        """Return this rank's next batch; after the last batch, the next call starts again."""
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except StopIteration:
            self._running = None
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the batch after the one at which `state_dict` was taken."""
        self._running = None
        super().load_state_dict(state_dict)

    def skipping(self, num_batches: int) -> IndexedLoader:
        """Return this loader without its first batches."""
        rest = super().skipping(num_batches)
        assert isinstance(rest, IndexedLoader)  # of the same class
        rest._running = None
        return rest

    def begin_at(self, samples: int, name: str) -> None:
        """Skip the first `samples` samples, as if the loader had already returned them.

        Raises:
            ConfigurationError: they are not whole batches, or nothing would be left.
        """
        whole = self.total_batch_size or 1
        there = self.total_dataset_length
        if samples % whole or samples >= there:
            raise ConfigurationError(
                f"consumed_samples={samples} for {name} must be a multiple of {whole}, the samples of "
                f"a batch over all ranks, and less than {there}, the number of samples."
            )
        state = self.state_dict()
        batches = samples // state["batch_size"]
        self.load_state_dict({**state, "global_batches": batches, "samples_seen": samples})


def place_loaders(accelerator: AcceleratorView, plan: Any, plugin: MegatronLMPlugin) -> None:
    """Replace the placeholders with loaders.

    Raises:
        ConfigurationError: a setting of the plugin for indexed data does not apply to another loader.
        PrepareError: the same placeholder was passed more than three times.
    """
    entries: dict[int, list[Any]] = {}
    for entry in plan.of_kind("loader"):
        if isinstance(entry.value, MegatronLMDummyDataLoader):
            entries.setdefault(id(entry.value), []).append(entry)
        elif plugin.eod_mask_loss:
            raise ConfigurationError(
                "eod_mask_loss=True applies only to MegatronLMDummyDataLoader. For other loaders, set "
                "the labels after the ends of documents to -100, which the loss ignores."
            )
    for same in entries.values():
        if len(same) > 3:
            raise PrepareError(
                f"prepare() got a MegatronLMDummyDataLoader {len(same)} times. Pass it at most three "
                f"times, for {listing(SPLITS)}, in this order."
            )
        steps = _steps(accelerator, plan, plugin)
        moved = [entry.on_device for entry in same]
        made = list(same[0].value.loaders(accelerator, plugin, steps, moved))
        for entry, loader in zip(same, made, strict=True):
            entry.value = loader
            if loader is None:
                entry.kind = "other"  # there is nothing to prepare: the script gets None


def _steps(accelerator: AcceleratorView, plan: Any, plugin: MegatronLMPlugin) -> int | None:
    """Return the optimizer steps of the training; None if unknown."""
    if plugin.train_iters is not None:
        return plugin.train_iters
    _, ranks = accelerator.hooks.data_shard()
    for scheduler in plan.values("scheduler"):
        if isinstance(scheduler, MegatronLMDummyScheduler) and scheduler.total_num_steps:
            return -(-scheduler.total_num_steps // (1 if accelerator.split_batches else ranks))
    return None


#: What the placeholder takes besides the options of `build_datasets`; None: as in the plugin.
_OF_LOADERS: Mapping[str, Any] = {
    "num_workers": 2,
    "eval_iters": None,
    "eval_interval": None,
    "full_validation": False,
}
_FILES = "files on a disk that all machines share"
#: Data options of Accelerate that are not options here, and what to write instead.
_ELSEWHERE: Mapping[str, str] = {
    "mock_data": "write documents with IndexedDatasetBuilder of megatron.core.datasets.indexed_dataset",
    "data_args_path": "pass data_path=Path(...).read_text().split()",
    "per_split_data_args_path": (
        "read the file in the script and pass train_data_path, valid_data_path and test_data_path"
    ),
    "object_storage_cache_path": f"indexed data must be {_FILES}",
    "per_dataset_sequences_path": f"the numbers are read from the .idx files, {_FILES}",
    "multiple_validation_sets": "call accelerate_megatron.build_datasets(...) for each of them",
    "test_mode": "the script has the loop",
    "skip_train": "the script has the loop",
    **dict.fromkeys(
        ("encoder_seq_length", "decoder_seq_length"), "seq_length is the length of a sample"
    ),
    **dict.fromkeys(
        ("retriever_seq_length", "sample_rate", "mask_prob", "short_seq_prob"),
        "provide the samples of other models with custom_megatron_datasets_provider_function of "
        "MegatronLMPlugin",
    ),
    **dict.fromkeys(
        ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
        "pass tokenizer=AutoTokenizer.from_pretrained(...), or eod=..., the token that ends a "
        "document",
    ),
    **dict.fromkeys(
        ("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"),
        "indices that exist are read, and missing ones are built",
    ),
}
