"""`load_state`: verified first, by all ranks together, then taken over."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Container, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accelerate_checkpoint import files, foreign
from accelerate_checkpoint.directories import clean_up
from accelerate_checkpoint.manifest import (
    MANIFEST,
    MARK,
    Manifest,
    problems,
    read_manifest,
)
from accelerate_checkpoint.model import load_weights, weights_layout
from accelerate_checkpoint.numbering import Numbering
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

__all__ = ["load_state"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Source:
    """A checkpoint that was found good; without a manifest it is the peer's."""

    directory: Path
    manifest: Manifest | None

    @property
    def listed(self) -> Container[str] | None:
        """The names the manifest vouches for; None without one."""
        return None if self.manifest is None else self.manifest.files

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint has a file: ours only what the manifest lists."""
        if self.manifest is not None:
            return name in self.manifest.files
        return (self.directory / name).is_file()

    def read(self, name: str, *, trust: bool | None = None, **options: Any) -> Any:
        """Read a file of torch's format."""
        if not self.has(name):
            shards = sorted(self.directory.glob("backend_*"))
            way = (
                f" The backend {shards[0].name.removeprefix('backend_')!r} saved it in a form of its "
                "own: load it with that backend, or make weights of it with merge-weights."
                if shards
                else ""
            )
            raise CheckpointError(f"The checkpoint {self.directory} has no {name}.{way}")
        allowed = nullcontext() if self.manifest else foreign.numpy_globals()
        return files.read(self.directory / name, trust=trust, allowed=allowed, **options)


def load_state(
    state: TrainingState,
    numbering: Numbering,
    input_dir: Any,
    load_kwargs: Mapping[str, Any],
    *,
    trust: bool,
    verify: bool,
    options: Mapping[str, Any],
) -> str:
    """Read what `save_state` wrote into the same objects; return the directory.

    Raises:
        CheckpointError: the directory or a file of it is missing or damaged, by name. Nothing
            has been changed then.
    """
    if input_dir is not None:
        directory = Path(os.path.realpath(Path(input_dir).expanduser()))
        _tidy(state, directory.parent)
        wrong = _verdict(state, directory, verify)
        if wrong:
            raise CheckpointError(wrong)
    elif numbering.automatic:
        directory = _newest_whole(state, numbering, verify)
    else:
        raise CheckpointError(
            "load_state needs an input_dir, or "
            "ProjectConfiguration(automatic_checkpoint_naming=True) to find the newest."
        )
    has_manifest = (directory / MANIFEST).exists()
    source = _Source(directory, read_manifest(directory) if has_manifest else None)
    _check_fits(state, source)
    found = _agreed(state, "read", lambda: _read_states(state, source, load_kwargs, trust))
    state.settle()  # what is pending belongs to the state that is replaced

    def load() -> None:
        _load_models(state, source, options)
        _load_rest(state, source, found, options)

    if state.owns_format:
        load()  # it talks on the way, and agrees by itself
    else:
        _agreed(state, "loaded", load)
    numbering.loaded(directory)
    return str(directory)


def _tidy(state: TrainingState, directory: Path) -> None:
    if state.saves_here:
        clean_up(directory)
    state.collectives.barrier()


def _agreed(state: TrainingState, what: str, job: Callable[[], T]) -> T:
    """Do something on every rank; if any of them fails, all do."""
    failure: Exception | None = None
    try:
        result = job()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    said = state.collectives.gather_object(text)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if failed:
        raise CheckpointError(f"The checkpoint could not be {what} on every rank. {failed[0]}")
    return result


# --- which ----------------------------------------------------------------------------------------


def _verdict(state: TrainingState, directory: Path, verify: bool) -> str:
    """Return what is wrong with a checkpoint as any rank sees it, the same on all; "" if nothing.

    The ranks of a machine share the hashing.
    """
    wrong = ""
    try:
        wrong = _look(state, directory, verify)
    except CheckpointError as error:
        wrong = str(error)
    said = state.collectives.gather_object(wrong)
    return next((text for text in said if text), "")


def _look(state: TrainingState, directory: Path, verify: bool) -> str:
    if directory.is_file():
        return f"{directory} is a file, and load_state needs the directory that save_state wrote."
    if not directory.is_dir():
        return f"There is no checkpoint directory {directory}."
    if not (directory / MANIFEST).exists():
        return foreign.why_not(directory)
    manifest = read_manifest(directory)
    part, parts = state.process.local_process_index, state.process.local_num_processes
    mine = sorted(manifest.files, key=lambda name: manifest.files[name].size)[part::parts]
    wrong = problems(directory, manifest, contents=verify, names=mine)
    return wrong[0] if wrong else ""


def _newest_whole(state: TrainingState, numbering: Numbering, verify: bool) -> Path:
    """Return the newest checkpoint that is whole, the same on every rank."""
    _tidy(state, numbering.root)
    passed: list[str] = []
    for directory in numbering.newest_first():
        wrong = _verdict(state, directory, verify)
        if not wrong:
            for text in passed:
                state.note_once(f"load_state passed over {text} It goes on from {directory.name}.")
            return directory
        passed.append(f"{directory.name}: {wrong}")
        numbering.pass_over(directory)
    if passed:
        raise CheckpointError(f"No checkpoint in {numbering.root} is whole. " + " ".join(passed))
    raise CheckpointError(f"There is no checkpoint in {numbering.root} to load.")


def _check_fits(state: TrainingState, source: _Source) -> None:
    """Refuse a checkpoint of other objects before anything is changed."""
    if source.manifest is None:
        return
    said = source.manifest.facts.get("objects", {})
    have = {
        "models": len(state.models),
        "optimizers": len(state.optimizers),
        "schedulers": len(state.schedulers),
        "registered": len(state.registered),
    }
    differ = [
        f"{said[what]} {what}, and {count} here"
        for what, count in have.items()
        if said.get(what, count) < count
    ]
    more = [
        f"{said[what] - count} {what}" for what, count in have.items() if said.get(what, 0) > count
    ]
    if differ:
        raise CheckpointError(
            f"{source.directory} does not fit this run: it holds {'; '.join(differ)}. Prepare and "
            "register the same objects in the same order as when it was saved."
        )
    if more:
        state.note_once(
            f"{source.directory} holds {' and '.join(more)} more than this run has prepared or "
            "registered; they are left."
        )


# --- taking over ----------------------------------------------------------------------------------


def _load_models(state: TrainingState, source: _Source, options: Mapping[str, Any]) -> None:
    models = list(state.models)
    for hook in state.load_hooks():
        hook(models, str(source.directory))
    if state.owns_format:
        return
    strict = bool(options.get("strict", True))
    inner = [state.inner(model) for model in models]
    stems = [files.numbered(files.MODEL, index, "") for index in range(len(models))]
    for stem, model in zip(stems, inner, strict=True):
        _compare_layout(source, stem, model, strict)
    for stem, wrapped, model in zip(stems, models, inner, strict=True):
        weights = load_weights(source.directory, model, stem, source.listed)
        state.load_model_state(wrapped, weights, strict)


def _compare_layout(source: _Source, stem: str, model: torch.nn.Module, strict: bool) -> None:
    """Compare names and shapes, which is cheap, before the first model is changed."""
    layout = weights_layout(source.directory, stem, model, source.listed)
    if layout is None:
        return
    own = {n: list(t.shape) for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    wrong = [
        f"{name} has shape {layout[name]} there and {shape} here"
        for name, shape in own.items()
        if name in layout and layout[name] != shape and 0 not in shape
    ]
    if strict:
        wrong += [f"{name} is missing there" for name in own if name not in layout]
        wrong += [f"{name} is not in the model" for name in layout if name not in own]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The weights {stem} of {source.directory} do not fit the model: {'; '.join(wrong[:3])}{more}."
        )


@dataclass
class _States:
    """What was read before anything was changed; optimizers may still be in their files."""

    optimizers: list[Any]
    mapped: list[bool]
    schedulers: list[Any]
    registered: list[Any]
    scaler: Any | None
    ranks: dict[int, Any]


def _read_states(
    state: TrainingState, source: _Source, load_kwargs: Mapping[str, Any], trust: bool
) -> _States:
    """Read everything but weights and gradients, so that what cannot be read changes nothing.

    Raises:
        CheckpointError: a file cannot be read, or is of another optimizer.
    """
    states = _States([], [], [], [], None, _read_ranks(state, source))
    for index, optimizer in enumerate(() if state.owns_format else state.optimizers):
        name = files.numbered(files.OPTIMIZER, index, ".bin")
        mapped = not load_kwargs and zipfile.is_zipfile(source.directory / name)
        held = source.read(name, trust=trust, **({"mmap": True} if mapped else load_kwargs))
        _compare_groups(source, name, index, held, optimizer)
        states.optimizers.append(held)
        states.mapped.append(mapped)
    for index in range(len(state.schedulers)):
        name = files.numbered(files.SCHEDULER, index, ".bin")
        states.schedulers.append(source.read(name, trust=trust))
    for index in range(len(state.registered)):
        states.registered.append(source.read(f"{files.CUSTOM}_{index}.pkl", trust=trust))
    if state.scaler is not None and source.has(files.SCALER):
        states.scaler = source.read(files.SCALER)
    return states


def _compare_groups(source: _Source, name: str, index: int, state: Any, optimizer: Any) -> None:
    path, groups = source.directory / name, optimizer.param_groups
    classes = source.manifest.facts.get("optimizers", []) if source.manifest else []
    own = type(optimizer).__name__
    if index < len(classes) and classes[index] != own:
        raise CheckpointError(f"{path} is of a {classes[index]}, and the optimizer is a {own}.")
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        return  # of an optimizer with a form of its own
    there = [len(group.get("params", ())) for group in state["param_groups"]]
    here = [len(group["params"]) for group in groups]
    if there != here:
        raise CheckpointError(
            f"{path} does not fit the optimizer: it has {len(there)} parameter groups of {there} "
            f"parameters, and the optimizer {len(here)} of {here}."
        )


def _load_rest(
    state: TrainingState, source: _Source, states: _States, options: Mapping[str, Any]
) -> None:
    read = zip(states.optimizers, states.mapped, strict=True)
    for optimizer, (held, mapped) in zip(state.optimizers, read, strict=False):
        held = _off_the_file(held, optimizer) if mapped else held
        state.load_optimizer_state(optimizer, held)
    for scheduler, held in zip(state.schedulers, states.schedulers, strict=True):
        scheduler.load_state_dict(held)
    if state.scaler is not None:
        if states.scaler is not None:
            state.scaler.load_state_dict(states.scaler)
        else:
            state.note_once(
                f"{source.directory} was saved without a gradient scaler: its scale starts anew."
            )
    for obj, held in zip(state.registered, states.registered, strict=True):
        obj.load_state_dict(held)
    state.backend_load(source.directory / f"backend_{state.backend}", options)
    for one in state.contributors():
        one.load(source.directory / one.key.replace(":", "_"))
    if MARK not in states.ranks[0]:
        state.note_once(foreign.NOT_TAKEN_OVER.format(directory=source.directory))
    rank, saved_by = state.process.process_index, _world_size(source)
    whose = [rank] if saved_by == state.process.num_processes else range(saved_by)
    names = [f"{files.GRADIENTS}_{other}.bin" for other in whose]
    state.load_rank_state(
        states.ranks, saved_by, (source.read(name) for name in names if source.has(name))
    )


def _off_the_file(state: Any, optimizer: Any) -> Any:
    """Copy a state off the mapped file: into the memory of the present one where that fits.

    A loaded state would keep the file mapped, and fresh memory costs more than the copy.
    """
    present: dict[Any, Any] = optimizer.state_dict().get("state", {})
    same_groups = isinstance(state, dict) and present.keys() == state.get("state", {}).keys()

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


def _read_ranks(state: TrainingState, source: _Source) -> dict[int, Any]:
    """Read the files of the ranks this one needs: the first, its own, and all if they are regrouped."""
    saved_by = _world_size(source)
    same = saved_by == state.process.num_processes
    wanted = {0, state.process.process_index} if same else {*range(saved_by)}
    names = {other: f"{files.RNG}_{other}.pkl" for other in sorted(wanted)}
    return {
        other: source.read(name) for other, name in names.items() if other == 0 or source.has(name)
    }


def _world_size(source: _Source) -> int:
    if source.manifest is not None:
        return int(source.manifest.facts.get("world_size", 1))
    return sum(1 for _ in source.directory.glob(f"{files.RNG}_*.pkl"))
