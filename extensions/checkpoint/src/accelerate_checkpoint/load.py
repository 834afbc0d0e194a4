"""Load a checkpoint on each rank: read and check everything first, then apply it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer

from accelerate_checkpoint import files
from accelerate_checkpoint.contents import (
    check_gradients,
    check_optimizer_state,
    check_rank_state,
    check_scaler_state,
    check_scheduler_state,
    count_parameters,
)
from accelerate_checkpoint.draft import gather_failures
from accelerate_checkpoint.manifest import MANIFEST, MARK, Manifest, examine, numpy_globals
from accelerate_checkpoint.model import is_weights, load_weights, weights_layout
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.quantized_weights import (
    as_plain_tensors,
    has_fixed_shape,
    restore_quantized,
    undo_packing,
)
from accelerate_checkpoint.rollback import Rollback
from accelerate_checkpoint.save import named_objects
from accelerate_checkpoint.shards import METADATA
from accelerate_checkpoint.staged import SharedFolder, fetch_together
from accelerate_checkpoint.storage import Storage, basename
from accelerate_core.plugin import CheckpointError

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

T = TypeVar("T")


@dataclass
class Source:
    """A checkpoint that passed its checks.

    Attributes:
        place: where it is kept.
        directory: where its files are on this machine.
        manifest: its manifest. None means that Hugging Face Accelerate wrote the checkpoint.
        fetched: the temporary directory that its files were fetched to. It is deleted at the end
            of the `with` block.
        version: see `stored_version`.
    """

    place: str
    directory: Path
    manifest: Manifest | None
    fetched: SharedFolder | None = None
    version: object = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        if self.fetched is not None:
            self.fetched.remove()

    @contextmanager
    def naming_place(self) -> Iterator[None]:
        """Make errors name the stored checkpoint instead of its temporary copy."""
        try:
            yield
        except CheckpointError as error:
            if self.fetched is None:
                raise
            text = str(error).replace(str(self.directory), self.place)
            raise CheckpointError(text) from error

    @property
    def listed(self) -> Container[str] | None:
        """The names of the files that the manifest lists, or None without a manifest."""
        return None if self.manifest is None else self.manifest.files

    @property
    def facts(self) -> Mapping[str, Any]:
        return {} if self.manifest is None else self.manifest.facts

    @property
    def saved_by(self) -> int:
        if self.manifest is not None:
            return int(self.facts.get("world_size", 1))
        return sum(1 for _ in self.directory.glob(f"{files.RNG}_*.pkl"))

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a file. With a manifest, only listed files count."""
        if self.manifest is not None:
            return name in self.manifest.files
        return (self.directory / name).is_file()

    def read(self, name: str, *, trust: bool | None = None, **options: Any) -> Any:
        if not self.has(name):
            shards = sorted(self.directory.glob("backend_*"))
            way = (
                f" The backend {shards[0].name.removeprefix('backend_')!r} saved it in its own "
                "format. Load it with that backend, or convert it with `accelerate-core "
                "merge-weights`."
                if shards
                else ""
            )
            raise CheckpointError(f"The checkpoint {self.place} has no {name}.{way}")
        allowed = None if self.manifest else numpy_globals()
        return files.read(self.directory / name, trust=trust, allowed=allowed, **options)


def run_collectively(state: TrainingState, what: str, job: Callable[[], T]) -> T:
    """Run a job on every rank. If it fails on any rank, raise on all of them."""
    failure: Exception | None = None
    try:
        result = job()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    said = gather_failures(state.collectives, text)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if failed:
        raise CheckpointError(f"The checkpoint could not be {what} on every rank. {failed[0]}")
    return result


def open_together(
    state: TrainingState, storage: Storage, place: str, verify: bool
) -> tuple[Source | None, str]:
    """Return a checkpoint, or None and the first problem that any rank found.

    The result is the same on all ranks.

    Args:
        verify: compare checksums as well as sizes.
    """
    directory = storage.path(place)
    if directory is None:
        manifest, fetched, wrong = fetch_together(state, storage, place, verify)
        if fetched is None or fetched.path is None:
            return None, wrong
        return Source(place, fetched.path / basename(place), manifest, fetched), ""
    manifest, wrong = _examine_together(state, directory, verify)
    if wrong:
        return None, wrong
    folder = "" if manifest is None else manifest.folder
    return Source(place, directory / folder, manifest), ""


def _examine_together(
    state: TrainingState, directory: Path, verify: bool
) -> tuple[Manifest | None, str]:
    """Return the manifest, and the first problem that any rank found, or "".

    The ranks that share the directory divide the files among them, and those that don't, the ranks of each
    machine. All ranks return the same problem.
    """
    process, collectives = state.process, state.collectives
    shared = collectives.all_equal(_identity(directory)) and not state.project.save_on_each_node
    manifest, wrong = None, [f"There is no checkpoint directory {directory}."]
    if directory.is_file():
        wrong = [
            f"{directory} is a file, but load_state needs the directory that save_state wrote."
        ]
    elif directory.is_dir():
        part = process.local_process_index, process.local_num_processes
        if shared:
            part = collectives.rank, collectives.size
        with ExitStack() as bars:

            def begin(manifest: Manifest) -> files.Progress:
                # The bar shows one rank's share; the shares are nearly equal.
                bar = byte_bar(f"Verifying {directory.name}", manifest.size // part[1])
                return bars.enter_context(bar)

            manifest, wrong = examine(directory, contents=verify, part=part, progress=begin)
    said = gather_failures(collectives, wrong[0] if wrong else None)
    return manifest, next((text for text in said if text), "")


def stored_version(storage: Storage, place: str) -> object:
    """Return a value that changes if the checkpoint at a place is deleted or replaced.

    It is None if there is no checkpoint, and for stores that files are fetched from: a copy does not
    change.
    """
    directory = storage.path(place)
    return None if directory is None else _identity(directory)


def _identity(directory: Path) -> tuple[int, ...] | None:
    """Return properties of the manifest that are equal on machines only if they see the same file."""
    try:
        found = (directory / MANIFEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def check_format(state: TrainingState, source: Source) -> None:
    """Refuse a checkpoint whose weights another backend wrote in its own format.

    Raises:
        CheckpointError: names the backend, and what reads the checkpoint.
    """
    if source.manifest is None:
        _check_accelerate_format(source)
        return
    folders = {name.partition("/")[0] for name in source.manifest.files if "/" in name}
    backends = sorted(name.removeprefix("backend_") for name in folders if "backend_" in name)
    # A script's save hook may have taken all models, so look for optimizers as well.
    whole = any(is_weights(n) or n.startswith(files.OPTIMIZER) for n in source.manifest.files)
    models = source.facts.get("objects", {}).get("models", 1)
    if whole or not (backends and models) or (state.backend in backends and state.owns_format):
        return
    saved = backends[0]
    merged = f"backend_{saved}/{METADATA}" in source.manifest.files
    way = (
        f", or write its weights to one file with accelerate-core merge-weights {source.place} OUTPUT"
        if merged
        else ""
    )
    same = " with its present settings" if saved == state.backend else ""
    raise CheckpointError(
        f"{source.place} was saved by the backend {saved!r} in its own format, which the backend "
        f"{state.backend!r} cannot read{same}. Load it with that backend, as with launch --backend "
        f"{saved} or Accelerator(backend={saved!r}), and the settings that saved it{way}."
    )


def _check_accelerate_format(source: Source) -> None:
    """Refuse what Hugging Face Accelerate wrote with a backend that shards models."""
    for folder in sorted(path for path in source.directory.iterdir() if path.is_dir()):
        merged = (folder / METADATA).is_file()
        if merged or any(folder.glob("*_model_states.pt")):
            way = (
                f" accelerate-core merge-weights {folder} OUTPUT writes its weights to one file."
                if merged
                else ""
            )
            raise CheckpointError(
                f"{source.place} was written by Hugging Face Accelerate in shards ({folder.name}). "
                f"load_state only reads checkpoints of one process or of whole models.{way}"
            )


def check_fits(state: TrainingState, source: Source) -> None:
    """Refuse a checkpoint with other objects than this run has, before anything is changed."""
    saved = source.facts.get("objects", {})
    have = {
        "models": len(state.models),
        "optimizers": len(state.optimizers),
        "schedulers": len(state.schedulers),
        "registered": len(state.registered),
    }
    there = {what: saved.get(what, count) for what, count in have.items()}
    if any(there[what] < count for what, count in have.items()):
        raise CheckpointError(
            f"{source.place} does not fit this run: {_compared(there, have)}. Prepare and register the "
            "same objects in the same order as when it was saved."
        )
    names = [f"{files.GRADIENTS}_{rank}.bin" for rank in range(source.saved_by)]
    if any(map(source.has, names)):
        mesh = source.facts.get("mesh")
        state.check_gradients_fit(source.place, source.saved_by, mesh)
    if any(there[what] > count for what, count in have.items()):
        state.warn_once(
            f"{source.place} has more than this run: {_compared(there, have)}. The first ones are loaded, "
            "in the order of prepare() and register_for_checkpointing(), and the rest is ignored. To load "
            "everything, prepare and register the same objects as when it was saved."
        )


#: What users call the objects that a manifest counts, for one and for several.
_KINDS = {
    "models": ("model", "models"),
    "optimizers": ("optimizer", "optimizers"),
    "schedulers": ("scheduler", "schedulers"),
    "registered": (
        "object passed to register_for_checkpointing",
        "objects passed to register_for_checkpointing",
    ),
}


def _compared(saved: Mapping[str, int], have: Mapping[str, int]) -> str:
    """Return how many objects of each kind were saved and how many this run has, where they differ."""
    parts = []
    for what, count in have.items():
        if saved[what] != count:
            kind = _KINDS[what][saved[what] != 1]
            parts.append(f"it was saved with {saved[what]} {kind}, and this run has {count}")
    return "; ".join(parts)


@dataclass
class OptimizerState:
    """The saved state of one optimizer. If `mapped`, its tensors are mapped from the file."""

    optimizer: Optimizer
    held: Any
    mapped: bool


@dataclass
class LoadedState:
    """The parts of a checkpoint that this rank has read.

    They are restored by `apply_objects`, `call_hooks` and `apply`, in this order. `undo` takes back what
    the first has done, if a later one fails on some rank.

    Weights and gradients are missing here. They are read when they are restored, so that memory
    holds them only once.

    Attributes:
        state, source: the run and the checkpoint.
        options: options of the backend, and `strict`.
        optimizers: one per optimizer, or empty if the backend reads them itself.
        objects: states of schedulers, scaler and registered objects, by file name.
        ranks: the states per rank that this rank needs, by rank.
    """

    state: TrainingState
    source: Source
    options: Mapping[str, Any]
    optimizers: list[OptimizerState]
    objects: Mapping[str, Any]
    ranks: Mapping[int, Any]

    def __post_init__(self) -> None:
        state = self.state
        self._before = Rollback([*state.models, *state.optimizers])
        #: The models that the script's hooks left to load.
        self._models: list[torch.nn.Module] = []

    def apply_objects(self) -> None:
        """Restore what can be taken back: schedulers, scaler, registered objects and positions.

        It comes before the weights, because loading a script's own objects may fail.
        """
        with self.source.naming_place():
            self.state.update_scale()  # a pending update belongs to the state being replaced
            self._before.keep_generators(self.state.devices)
            self._apply_objects()
            first = self.ranks[0]
            if MARK in first:
                for loader in self.state.resumed_loaders:
                    self._before.keep_position(loader)
                with self._naming(f"{files.RNG}_0.pkl", "the positions of the loaders"):
                    self.state.load_positions(first[MARK]["loaders"])

    def call_hooks(self) -> None:
        """Call the script's hooks. A hook may load a model itself."""
        with self.source.naming_place():
            self._models = self._models_to_load()
            if self.state.load_hooks() and not self.state.owns_format:
                check_weights(self.state, self.source, self._models, self.options)

    def apply(self) -> None:
        """Restore the rest. Generators come last, because the other steps may draw from them."""
        with self.source.naming_place():
            self._apply_optimizers()
            self._apply_models()
            self._apply_plugins()
            self._apply_rank()

    def undo(self) -> None:
        """Restore the objects as they were before the load."""
        self._before.restore()

    @contextmanager
    def _naming(self, name: str, what: str) -> Iterator[None]:
        """Turn errors of objects into errors that name the file and the object."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.source.directory / name} cannot be loaded into {what}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _apply_models(self) -> None:
        if self.state.owns_format:
            return
        for index, model in enumerate(self._models):
            stem = files.numbered(files.MODEL, index, "")
            inner = self.state.inner(model)
            with self._naming(stem, f"the {type(inner).__name__}"):
                undo_packing(inner)
                weights = load_weights(self.source.directory, inner, stem, self.source.listed)
                weights = restore_quantized(inner, weights)
                self.state.load_model_state(model, weights, _is_strict(self.options))

    def _models_to_load(self) -> list[torch.nn.Module]:
        """Call the script's hooks, and return the prepared models that they left in the list.

        Hooks get the modules that the script prepared, without wrappers.
        """
        prepared = {id(self.state.inner(model)): model for model in self.state.models}
        models = [self.state.inner(model) for model in self.state.models]
        for hook in self.state.load_hooks():
            name = getattr(hook, "__qualname__", type(hook).__name__)
            with self._naming("", f"the models by the hook {name!r}"):
                hook(models, str(self.source.directory))  # may remove models from the list
        return [prepared.get(id(model), model) for model in models]

    def _apply_optimizers(self) -> None:
        for index, one in enumerate(self.optimizers):
            name = files.numbered(files.OPTIMIZER, index, ".bin")
            with self._naming(name, f"the {type(one.optimizer).__name__}"):
                reuses = one.mapped and _loads_like_torch(one.optimizer)
                self._before.keep_attributes(one.optimizer)
                held = _copy_from_map(one.held, one.optimizer, reuses) if one.mapped else one.held
                self.state.load_optimizer_state(one.optimizer, held)

    def _apply_objects(self) -> None:
        for name, obj in named_objects(self.state).items():
            if name in self.objects:
                self._before.keep(obj)
                inner = getattr(obj, "scheduler", obj)
                with self._naming(name, f"the {type(inner).__name__}"):
                    obj.load_state_dict(self.objects[name])
            else:
                self.state.warn_once(
                    f"{self.source.place} was saved without a gradient scaler, so the loss scale "
                    "keeps its initial value."
                )

    def _apply_plugins(self) -> None:
        directory = self.source.directory
        self.state.backend_load(directory / f"backend_{self.state.backend}", self.options)
        for one in self.state.contributors():
            one.load(directory / one.key.replace(":", "_"))

    def _apply_rank(self) -> None:
        if MARK not in self.ranks[0]:
            self.state.warn_once(
                f"{self.source.place} was written by Hugging Face Accelerate and has no checksums. "
                "Models, optimizers, schedulers, scaler, registered objects and random states were "
                "loaded. It has no position in the data: use skip_first_batches to continue a "
                "partial epoch."
            )
        saved_by = self.source.saved_by
        mesh = self.source.facts.get("mesh")
        same_layout = self.state.has_layout(saved_by, mesh)
        ranks = [self.state.process.process_index] if same_layout else range(saved_by)
        names = [f"{files.GRADIENTS}_{rank}.bin" for rank in ranks]
        gradients = (self._read_gradients(name) for name in names if self.source.has(name))
        self.state.load_rank_state(self.ranks, saved_by, gradients, mesh, positions=False)

    def _read_gradients(self, name: str) -> Any:
        held = self.source.read(name)
        check_gradients(self.source.directory / name, held, len(self.state.models))
        return held


def read_checkpoint(
    state: TrainingState,
    source: Source,
    load_kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    trust: bool,
) -> LoadedState:
    """Read a checkpoint and check that it fits the run, without changing the run.

    Raises:
        CheckpointError: a file cannot be read, or belongs to another model or optimizer.
    """
    with source.naming_place():
        if not state.owns_format and not state.load_hooks():
            check_weights(state, source, state.models, options)
        optimizers = []
        if not state.owns_format:
            optimizers = _read_optimizers(state, source, load_kwargs, trust)
        objects = {}
        for name, obj in named_objects(state).items():
            path = source.directory / name
            if name != files.SCALER:
                objects[name] = source.read(name, trust=trust)
                check_scheduler_state(path, objects[name], obj)
            elif source.has(name):
                objects[name] = source.read(name)
                check_scaler_state(path, objects[name])
        ranks = _read_ranks(state, source)
    return LoadedState(state, source, options, optimizers, objects, ranks)


def _read_optimizers(
    state: TrainingState, source: Source, load_kwargs: Mapping[str, Any], trust: bool
) -> list[OptimizerState]:
    found = []
    for index, optimizer in enumerate(state.optimizers):
        name = files.numbered(files.OPTIMIZER, index, ".bin")
        mapped = not load_kwargs and zipfile.is_zipfile(source.directory / name)
        options = {"mmap": True} if mapped else load_kwargs
        held = source.read(name, trust=trust, **options)
        check_optimizer_state(source.directory / name, held, optimizer)
        _compare_groups(source, name, index, held, optimizer)
        found.append(OptimizerState(optimizer, held, mapped))
    return found


def _compare_groups(source: Source, name: str, index: int, held: Any, optimizer: Any) -> None:
    path, classes = source.directory / name, source.facts.get("optimizers", [])
    own = type(optimizer).__name__
    if index < len(classes) and classes[index] != own:
        raise CheckpointError(
            f"{path} is the state of {classes[index]}, but the optimizer here is {own}."
        )
    if not isinstance(held, dict) or not isinstance(held.get("param_groups"), list):
        return  # an optimizer with its own format
    there = count_parameters(path, held)
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"{path} does not fit the optimizer: the file has {len(there)} parameter groups of "
            f"{there} parameters, but the optimizer has {len(here)} groups of {here}."
        )


def _read_ranks(state: TrainingState, source: Source) -> dict[int, Any]:
    """Read the states of rank 0 and of this rank.

    If the layout has changed within a cycle that counts items, read those of all ranks, to add up the counts.
    """
    first = _read_rank(source, 0)
    counts = first.get(MARK, {}).get("cycle", {}).get("items", {}).get("open", False)
    same = state.has_layout(source.saved_by, source.facts.get("mesh"))
    others = [state.process.process_index] if same or not counts else range(source.saved_by)
    found = {0: first}
    for rank in others:
        name = f"{files.RNG}_{rank}.pkl"
        if rank and source.has(name):
            found[rank] = _read_rank(source, rank)
    return found


def _read_rank(source: Source, rank: int) -> Any:
    name = f"{files.RNG}_{rank}.pkl"
    held = source.read(name)
    check_rank_state(source.directory / name, held)
    return held


def _is_strict(options: Mapping[str, Any]) -> bool:
    return bool(options.get("strict", True))


def check_weights(
    state: TrainingState,
    source: Source,
    models: Sequence[torch.nn.Module],
    options: Mapping[str, Any],
) -> None:
    """Refuse weights of other models before any model is changed."""
    for index, model in enumerate(models):
        stem = files.numbered(files.MODEL, index, "")
        inner = state.inner(model)
        undo_packing(inner)
        _compare_layout(source, stem, inner, _is_strict(options))


def _compare_layout(source: Source, stem: str, model: torch.nn.Module, strict: bool) -> None:
    """Compare names and shapes. This is cheap, because it reads no weights."""
    layout = weights_layout(source.directory, stem, model, source.listed)
    if layout is None:
        return
    state = as_plain_tensors(model.state_dict())
    own = {name: list(t.shape) for name, t in state.items() if isinstance(t, torch.Tensor)}
    wrong = [
        f"{name} has shape {layout[name]} in the checkpoint and {shape} in the model"
        for name, shape in own.items()
        if name in layout and layout[name] != shape and 0 not in shape and has_fixed_shape(name)
    ]
    if strict:
        wrong += [f"{name} is not in the checkpoint" for name in own if name not in layout]
        wrong += [f"{name} is not in the model" for name in layout if name not in own]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The weights {stem} of {source.place} do not fit the model: {'; '.join(wrong[:3])}{more}."
        )


def _loads_like_torch(optimizer: Any) -> bool:
    """Return whether torch's own code loads a state, which cannot fail once the groups match."""
    kinds = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("torch.")]
    return not any({"load_state_dict", "__setstate__"} & vars(kind).keys() for kind in kinds)


def _copy_from_map(state: Any, optimizer: Any, reuses: bool) -> Any:
    """Copy a state from its mapped file. Without the copy, the file would stay mapped.

    Args:
        reuses: copy into the memory of the optimizer's state if it fits, because allocating new memory
            costs more than the copy. The optimizer's state is lost if loading then fails.
    """
    try:
        present: dict[Any, Any] = optimizer.state_dict().get("state", {})
    except RuntimeError:  # ZeroRedundancyOptimizer has one only where its shards were collected
        present = {}
    same_groups = (
        reuses and isinstance(state, dict) and present.keys() == state.get("state", {}).keys()
    )

    def walk(value: Any, old: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fits = (
                type(old) is torch.Tensor
                and old.shape == value.shape
                and old.dtype == value.dtype
                and old.layout == value.layout == torch.strided
            )
            return old.copy_(value) if fits else value.clone()
        if type(value) is dict:
            olds = old if isinstance(old, dict) else {}
            return {key: walk(one, olds.get(key)) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(one, None) for one in value)
        return value

    with torch.no_grad():
        return walk(state, {"state": present} if same_groups else None)
