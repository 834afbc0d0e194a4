"""megatron-core's indexed datasets (.bin, .idx): as samples of a model, and as loaders of a script."""

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
#: Prefixes of files, and the weight of each where they are weighted.
Blend = tuple[list[str], list[float] | None]


class IndexedSamples(Dataset[dict[str, torch.Tensor]]):
    """The first `size` samples of one of megatron-core's datasets, as a model takes them.

    Args:
        dataset: gives mappings.
        size: how many of them.
        names: what is kept of each; None: all but the number of the dataset in its blend.
    """

    def __init__(self, dataset: Any, size: int, names: Sequence[str] | None = None) -> None:
        self.dataset = dataset
        self.size = size
        self.names = names

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"Sample {index} of {self.size}.")
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
    """Return datasets for training, validation and test; None where there is nothing for one.

    All ranks call it. Rank 0 builds the indices and writes them to the cache, then the others read
    them; an error of one is an error on all. A sample has `tokens`, `labels` (the next tokens) and
    `loss_mask`, each of `seq_length`. They are shuffled by `seed`, so a loader need not shuffle.

    Args:
        accelerator: the Accelerator.
        seq_length: tokens of a sample; documents follow each other in it.
        samples: how many for each of the three: the documents are passed as often as that takes,
            and shuffled anew each time. None: one pass. 0: none are built.
        data_path: the files' path without `.bin` and `.idx`, a list of such, or weights and paths
            in turns, `[0.3, "a", 0.7, "b"]`; `split` shares their documents out.
        split: parts of the three.
        train_data_path, valid_data_path, test_data_path: files of each, instead.
        seed: of the order.
        tokenizer: whose `eos_token_id` (or `eod`) ends a document, and whose `pad_token_id` (or
            `pad`) counts for no loss.
        eod: the token that ends a document, without a tokenizer.
        eod_mask_loss: what follows an end of document counts for no loss.
        reset_attention_mask: nothing attends to what was before an end of document; samples have
            an `attention_mask`, of `seq_length` x `seq_length`.
        reset_position_ids: positions begin anew behind it; samples have `position_ids`. Models
            with learned positions only.
        data_cache_path: folder of the indices, which all machines share; None: beside the data.
        mmap_bin_files: map files into memory rather than read from them.
        num_dataset_builder_threads: build so many files' indices at a time.
        mid_level_dataset_surplus: by what part more samples of each file are built for a blend.
        allow_ambiguous_pad_tokens: a token that pads counts for no loss, even if it ends documents.

    Raises:
        ConfigurationError: arguments that cannot be or files that are not there; a rank failed.
    """
    eod = _token(tokenizer, "eod", "eos_token_id") if eod is None else eod
    pad = _token(tokenizer, "pad", "pad_token_id")
    if eod is None and (eod_mask_loss or reset_attention_mask or reset_position_ids):
        raise ConfigurationError(
            "eod_mask_loss, reset_attention_mask and reset_position_ids need to know which token "
            "ends a document: say tokenizer=... or eod=..."
        )
    given = {"train_data_path": train_data_path, "valid_data_path": valid_data_path}
    own = [_blend(n, v) for n, v in {**given, "test_data_path": test_data_path}.items()]
    shared = _blend("data_path", data_path)
    if (shared is None) == (own == [None] * 3):
        raise ConfigurationError(
            "Documents come from data_path, shared out by split, or from train_data_path, "
            "valid_data_path and test_data_path: give the first, or some of the others."
        )
    there = [part > 0 for part in _shares(split)] if shared else [one is not None for one in own]
    if seq_length < 1:
        raise ConfigurationError(f"seq_length={seq_length}: a sample has one token at least.")
    if len(samples) == 3 and any(count is not None and count < 0 for count in samples):
        raise ConfigurationError(f"samples={samples!r}: none can be below 0; None is one pass.")
    if len(samples) != 3:
        raise ConfigurationError(f"samples={samples!r}: three numbers, for {listing(SPLITS)}.")
    wanted = [count if here else 0 for count, here in zip(samples, there, strict=True)]
    own = [one if count != 0 else None for one, count in zip(own, wanted, strict=True)]
    each = [shared] * 3 if shared else own
    if any(n is None and one and one[1] for n, one in zip(wanted, each, strict=True)):
        raise ConfigurationError(
            "Weights of paths need to know how many samples are wanted: say samples=(...), or "
            "train_iters of MegatronLMPlugin. Without weights it is one pass over all documents."
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
            create_attention_mask=reset_attention_mask,  # without one attention is causal
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
                f"{count} samples are wanted for {name}, and the data has {len(dataset)}: files "
                "without weights are passed once."
            )
        size = len(dataset) if count is None else min(count, len(dataset))
        made.append(IndexedSamples(dataset, size, names))
    return tuple(made)


def _token(tokenizer: Any, *names: str) -> int | None:
    """Return a special token by megatron's name for it or by that of Transformers."""
    for name in names:
        try:
            found = getattr(tokenizer, name, None)
        except NotImplementedError:  # megatron's tokenizers say so that they have none
            continue
        if isinstance(found, int):
            return found
    return None


def _blend(name: str, given: Any) -> Blend | None:
    """Read paths, or weights and paths in turns.

    Raises:
        ConfigurationError: neither of the two.
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
            f"{name}={given!r}: a path without .bin and .idx, a list of such, or weights and paths in "
            "turns, [0.3, 'a', 0.7, 'b']."
        )
    if any(weight is not None and weight <= 0 for weight in weights):
        raise ConfigurationError(f"{name}={given!r}: weights have to be above 0.")
    weighted = [weight for weight in weights if weight is not None] if len(paths) > 1 else None
    return [os.fspath(one) for one in paths], weighted or None


def _number(given: Any) -> float | None:
    try:
        return float(given)
    except (TypeError, ValueError):
        return None


def _shares(split: str) -> list[float]:
    """Return the three parts of a split.

    Raises:
        ConfigurationError: it has others.
    """
    found = [_number(one) for one in str(split).split(",")]
    parts = [part for part in found if part is not None and part >= 0]
    if len(parts) != len(found) or len(parts) > 3 or not sum(parts):
        raise ConfigurationError(
            f"split={split!r}: up to three numbers, the parts of {listing(SPLITS)}, as '969,30,1'."
        )
    return parts + [0.0] * (3 - len(parts))


class _Tokens:
    """What megatron-core asks a tokenizer: two tokens, and what a cached index depends on.

    What their indices hold belongs to it: a cached index of files that were written anew is not read.
    """

    vocab_size = None

    def __init__(self, eod: int | None, pad: int | None, files: list[str]) -> None:
        self.eod = -2 if eod is None else eod  # -1 stands for padding, as long as nothing else does
        if pad is not None:
            self.pad = pad
        self.unique_identifiers = {"eod": eod, "pad": pad, "files": files}


def _identities(prefixes: Sequence[str]) -> list[str]:
    """Return what tells an index from another; indices of samples are cached under it."""
    found = []
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(prefix + suffix):
                folder = Path(prefix).parent
                there = sorted(str(one.with_suffix("")) for one in folder.glob("*.idx"))
                raise ConfigurationError(
                    f"There is no {prefix + suffix}. A path of indexed data is without .bin and .idx, "
                    f"and {folder} has {listing(there)}.{did_you_mean(prefix, there)}"
                )
        index = Path(prefix + ".idx").read_bytes()
        found.append(hashlib.sha256(index).hexdigest())
        _check_whole(prefix)
    return found


def _check_whole(prefix: str) -> None:
    """Compare a file of tokens with its index.

    Raises:
        ConfigurationError: it is shorter, or the index is none.
    """
    dataset = imported("datasets.indexed_dataset")
    try:
        index = dataset._IndexReader(prefix + ".idx", False)
        ends = index.sequence_pointers[-1:] + index.sequence_lengths[-1:] * index.dtype_size
    except Exception as error:
        raise ConfigurationError(f"{prefix}.idx is no index of megatron's: {error}") from error
    size = os.path.getsize(prefix + ".bin")
    wanted = int(ends.sum())
    if size < wanted:
        raise ConfigurationError(
            f"{prefix}.bin has {size} bytes, and its index says {wanted}: the copy is not whole."
        )


def _check_cache(folder: Path) -> None:
    """Refuse files that numpy, as megatron-core calls it, would unpickle."""
    for file in folder.glob("*.npy"):
        with file.open("rb") as opened:
            if opened.read(6) != b"\x93NUMPY":
                raise ConfigurationError(f"{file} is no array of numbers: delete it.")


def _gpt_dataset() -> Any:
    return imported("datasets.gpt_dataset").GPTDataset


@cache
def _builder() -> Any:
    """Return megatron-core's builder without its barriers: the ranks wait in `_in_turn`.

    In a barrier they would wait for ever for one that failed.
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
                # Counting its passes megatron-core would not come to an end.
                raise ConfigurationError(
                    f"{path} has {tokens} tokens for {split.name}, in {len(documents)} of "
                    f"{len(data)} documents, and a sample takes seq_length + 1 = {length + 1}: change "
                    "split, or do without that dataset."
                )
            return kind(*args)

        def _build_megatron_datasets_parallel(
            self, prefixes: list[str], split: Any, sizes: list[Any]
        ) -> list[list[Any]]:
            with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
                # Without weights it asks for a pass also where nothing is wanted.
                each = [
                    [0 if wanted == 0 else own for own, wanted in zip(one, self.sizes, strict=True)]
                    for one in sizes
                ]
                build = partial(self._build_megatron_dataset_splits, synchronize_ranks=False)
                made = pool.map(build, prefixes, [split] * len(each), each)
                return [list(one) for one in zip(*made, strict=True)]

    return Builder


def _in_turn(accelerator: AcceleratorView, build: Callable[[], T]) -> T:
    """Call `build` on rank 0, then on the others.

    Raises:
        ConfigurationError: on all ranks, if it failed on one.
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
                    f"indices of the data, {type(error).__name__}: {error}. Rank 0 writes them to the "
                    "folder data_cache_path, from which all ranks read them."
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
    """Holds the place of the loaders for training, validation and test, as Megatron has them.

    `prepare` is given it three times and returns the three, in this order; once, the first alone.
    Their batches are asked for by `next(loader)` or a `for` loop, have `micro_batch_size` x
    `num_micro_batches` samples for each data rank, and stand where `load_state` or
    `consumed_samples` of the plugin put them.

    How many samples there are follows from `MegatronLMPlugin`: `train_iters` (or the scheduler's
    number) or `train_samples` for training, `eval_iters` for each of `train_iters // eval_interval
    + 1` validations, `eval_iters` for the test; one pass over the documents where no length is said.

    Args:
        dataset_kwargs: `micro_batch_size`, what `build_datasets` takes (`seq_length`, `data_path`,
            `split` or `splits_string`, ...), and `num_workers` (2), `eval_iters`, `eval_interval`
            (those of the plugin), `full_validation` (validate over one pass).

    Raises:
        ConfigurationError: an argument that is not known, is missing or has another place here.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dict(dataset_kwargs)
        options = {name: value for name, value in dataset_kwargs.items() if value is not None}
        for name, way in _ELSEWHERE.items():
            if options.pop(name, False) is not False:
                raise ConfigurationError(f"MegatronLMDummyDataLoader({name}=...): {way}.")
        if options.pop("dataloader_type", "single") != "single":
            raise ConfigurationError(
                "MegatronLMDummyDataLoader reads in the order of the index (dataloader_type='single'). "
                "For another one pass prepare DataLoader(accelerate_megatron.build_datasets(...)[0], "
                "..., shuffle=True)."
            )
        if not options.pop("create_attention_mask_in_dataloader", True) and options.get(
            "reset_attention_mask"
        ):
            raise ConfigurationError(
                "reset_attention_mask=True is a mask of each sample, and "
                "create_attention_mask_in_dataloader=False says there is none: leave one of them out."
            )
        named = options.pop("splits_string", None)
        if named is not None and options.setdefault("split", named) != named:
            raise ConfigurationError(
                f"split={options['split']!r} and splits_string={named!r} are one thing: leave one out."
            )
        known = {*inspect.signature(build_datasets).parameters} - {"accelerator", "samples"}
        takes = sorted({"micro_batch_size", *_OF_LOADERS, *known})
        for name in options.keys() - set(takes):
            of_plugin = name in MegatronLMPlugin.__dataclass_fields__
            raise ConfigurationError(
                f"MegatronLMDummyDataLoader got {name!r}, and takes {listing(takes)}."
                + (
                    " It is a field of MegatronLMPlugin."
                    if of_plugin
                    else did_you_mean(name, takes)
                )
            )
        for name in ("micro_batch_size", "seq_length"):
            if not isinstance(options.get(name), int) or options[name] < 1:
                raise ConfigurationError(
                    f"MegatronLMDummyDataLoader({name}={options.get(name)!r}): it needs a whole number "
                    "above 0."
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
        """Yield as many of the three as `on_device` has entries; None where there is no data for one.

        Args:
            steps: optimizer steps of the training, if the plugin has no `train_samples`.
            on_device: whether the batches of each are moved to the device.
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
            whole: samples of a batch of all ranks.
            accumulated: batches of an optimizer step.
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
    """A prepared loader whose batches can be asked for one by one, with `next`."""

    _running: Iterator[Any] | None = None

    def __next__(self) -> Any:
        """Return the next batch of this rank; after the last one the next call begins anew."""
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except StopIteration:
            self._running = None
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, at the next batch."""
        self._running = None
        super().load_state_dict(state_dict)

    def skipping(self, num_batches: int) -> IndexedLoader:
        """Return this loader without its first batches."""
        rest = super().skipping(num_batches)
        assert isinstance(rest, IndexedLoader)  # of the same class
        rest._running = None
        return rest

    def begin_at(self, samples: int, name: str) -> None:
        """Begin behind so many samples, as if they had been handed out.

        Raises:
            ConfigurationError: they are no whole batches, or all there are.
        """
        whole = self.total_batch_size or 1
        there = self.total_dataset_length
        if samples % whole or samples >= there:
            raise ConfigurationError(
                f"consumed_samples={samples} for {name}: a multiple of {whole}, the samples of a batch "
                f"of all ranks, below {there}, the samples there are."
            )
        state = self.state_dict()
        batches = samples // state["batch_size"]
        self.load_state_dict({**state, "global_batches": batches, "samples_seen": samples})


def place_loaders(accelerator: AcceleratorView, plan: Any, plugin: MegatronLMPlugin) -> None:
    """Put loaders in the place of their stand-ins.

    Raises:
        ConfigurationError: what the plugin says of indexed data cannot be done with another loader.
        PrepareError: more than three are asked for.
    """
    entries: dict[int, list[Any]] = {}
    for entry in plan.of_kind("loader"):
        if isinstance(entry.value, MegatronLMDummyDataLoader):
            entries.setdefault(id(entry.value), []).append(entry)
        elif plugin.eod_mask_loss:
            raise ConfigurationError(
                "eod_mask_loss=True is of MegatronLMDummyDataLoader. For another loader set the labels "
                "behind the ends of documents to -100, which no loss counts."
            )
    for same in entries.values():
        if len(same) > 3:
            raise PrepareError(
                f"prepare got a MegatronLMDummyDataLoader {len(same)} times; it stands for "
                f"{listing(SPLITS)}, in this order."
            )
        steps = _steps(accelerator, plan, plugin)
        moved = [entry.on_device for entry in same]
        made = list(same[0].value.loaders(accelerator, plugin, steps, moved))
        for entry, loader in zip(same, made, strict=True):
            entry.value = loader
            if loader is None:
                entry.kind = "other"  # nothing to prepare: the script gets None


def _steps(accelerator: AcceleratorView, plan: Any, plugin: MegatronLMPlugin) -> int | None:
    """Return the optimizer steps of the training, None if nobody says."""
    if plugin.train_iters is not None:
        return plugin.train_iters
    _, ranks = accelerator.hooks.data_shard()
    for scheduler in plan.values("scheduler"):
        if isinstance(scheduler, MegatronLMDummyScheduler) and scheduler.total_num_steps:
            return -(-scheduler.total_num_steps // (1 if accelerator.split_batches else ranks))
    return None


#: What the stand-in takes beside the options of `build_datasets`; None: as the plugin says.
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
    "data_args_path": "data_path=Path(...).read_text().split()",
    "per_split_data_args_path": "train_data_path, valid_data_path and test_data_path, read by the script",
    "object_storage_cache_path": f"indexed data are {_FILES}",
    "per_dataset_sequences_path": f"the numbers are read from the .idx files, {_FILES}",
    "multiple_validation_sets": "accelerate_megatron.build_datasets(...) for each of them",
    "test_mode": "it is the script's loop",
    "skip_train": "it is the script's loop",
    **dict.fromkeys(
        ("encoder_seq_length", "decoder_seq_length"), "seq_length is the length of a sample"
    ),
    **dict.fromkeys(
        ("retriever_seq_length", "sample_rate", "mask_prob", "short_seq_prob"),
        "samples of other models come from custom_megatron_datasets_provider_function of "
        "MegatronLMPlugin",
    ),
    **dict.fromkeys(
        ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
        "tokenizer=AutoTokenizer.from_pretrained(...), or eod=..., the token that ends a document",
    ),
    **dict.fromkeys(
        ("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"),
        "indices are built where they are missing and read where they are not",
    ),
}
