"""`load_state`: verified first, by all ranks together, then taken over."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accelerate_core.checkpoint import files, foreign, rng
from accelerate_core.checkpoint.directories import clean_up, numbered_checkpoints
from accelerate_core.checkpoint.manifest import (
    MANIFEST,
    MARK,
    Manifest,
    problems,
    read_manifest,
)
from accelerate_core.checkpoint.model import load_weights, weights_layout
from accelerate_core.checkpoint.state import checkpoints_root
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

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
    accelerator: Accelerator,
    input_dir: Any,
    load_kwargs: dict[str, Any],
    *,
    trust: bool,
    verify: bool,
    options: dict[str, Any],
) -> str:
    """Read what `save_state` wrote into the same objects; return the directory.

    Raises:
        CheckpointError: the directory or a file of it is missing or damaged, by name. Nothing
            has been changed then.
    """
    accelerator.background.wait()
    if input_dir is None and not accelerator.project_configuration.automatic_checkpoint_naming:
        raise CheckpointError(
            "load_state needs an input_dir, or "
            "ProjectConfiguration(automatic_checkpoint_naming=True) to find the newest."
        )
    if input_dir is not None:
        directory = Path(os.path.realpath(Path(input_dir).expanduser()))
        if accelerator.saves_here:
            clean_up(directory.parent)
        accelerator.wait_for_everyone()
        wrong = _verdict(accelerator, directory, verify)
        if wrong:
            raise CheckpointError(wrong)
        automatic = None
    else:
        automatic, directory = _newest_whole(accelerator, verify)
    has_manifest = (directory / MANIFEST).exists()
    source = _Source(directory, read_manifest(directory) if has_manifest else None)
    _check_fits(accelerator, source)
    states = _agreed(
        accelerator, "read", lambda: _read_states(accelerator, source, load_kwargs, trust)
    )
    accelerator.settle_scale()  # what is pending belongs to the state that is replaced

    def load() -> None:
        _load_models(accelerator, source, dict(options))
        _load_rest(accelerator, source, states, options)

    if "checkpoint" in accelerator.backend.owns:
        load()  # it talks on the way, and agrees by itself
    else:
        _agreed(accelerator, "loaded", load)
    _continue_numbering(accelerator, directory, automatic)
    return str(directory)


def _agreed(accelerator: Accelerator, what: str, job: Callable[[], T]) -> T:
    """Do something on every rank; if any of them fails, all do."""
    failure: Exception | None = None
    try:
        result = job()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    said = accelerator.communicator.gather_object(text)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if failed:
        raise CheckpointError(f"The checkpoint could not be {what} on every rank. {failed[0]}")
    return result


# --- which ----------------------------------------------------------------------------------------


def _verdict(accelerator: Accelerator, directory: Path, verify: bool) -> str:
    """Return what is wrong with a checkpoint as any rank sees it, the same on all; "" if nothing.

    The ranks of a machine share the hashing.
    """
    wrong = ""
    try:
        wrong = _look(accelerator, directory, verify)
    except CheckpointError as error:
        wrong = str(error)
    said = accelerator.communicator.gather_object(wrong)
    return next((text for text in said if text), "")


def _look(accelerator: Accelerator, directory: Path, verify: bool) -> str:
    if directory.is_file():
        return f"{directory} is a file, and load_state needs the directory that save_state wrote."
    if not directory.is_dir():
        return f"There is no checkpoint directory {directory}."
    if not (directory / MANIFEST).exists():
        return foreign.why_not(directory)
    manifest = read_manifest(directory)
    part, parts = accelerator.local_process_index, accelerator.local_process_count
    mine = sorted(manifest.files, key=lambda name: manifest.files[name].size)[part::parts]
    wrong = problems(directory, manifest, contents=verify, names=mine)
    return wrong[0] if wrong else ""


def _newest_whole(accelerator: Accelerator, verify: bool) -> tuple[int, Path]:
    """Return number and path of the newest checkpoint that is whole, the same on every rank."""
    root = checkpoints_root(accelerator)
    if accelerator.saves_here:
        clean_up(root)
    accelerator.wait_for_everyone()
    numbers = [number for number, _ in numbered_checkpoints(root)]
    numbers = accelerator.communicator.broadcast_object(numbers)
    passed: list[str] = []
    for number in reversed(numbers):
        directory = root / f"checkpoint_{number}"
        wrong = _verdict(accelerator, directory, verify)
        if not wrong:
            for text in passed:
                accelerator.note_once(
                    f"load_state passed over {text} It goes on from {directory.name}."
                )
            return number, directory
        passed.append(f"{directory.name}: {wrong}")
        accelerator.damaged_checkpoints.add(str(directory))
    if passed:
        raise CheckpointError(f"No checkpoint in {root} is whole. " + " ".join(passed))
    raise CheckpointError(f"There is no checkpoint in {root} to load.")


def _continue_numbering(accelerator: Accelerator, directory: Path, number: int | None) -> None:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return
    if number is None:
        of = {str(path): found for found, path in numbered_checkpoints(directory.parent)}
        number = of.get(str(directory))
    if number is not None:
        accelerator.project_configuration.iteration = number + 1
        accelerator.resumed = True


def _check_fits(accelerator: Accelerator, source: _Source) -> None:
    """Refuse a checkpoint of other objects before anything is changed."""
    if source.manifest is None:
        return
    said = source.manifest.facts.get("objects", {})
    have = {
        "models": len(accelerator.models),
        "optimizers": len(accelerator.optimizers),
        "schedulers": len(accelerator.schedulers),
        "registered": len(accelerator.registered_objects),
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
        accelerator.note_once(
            f"{source.directory} holds {' and '.join(more)} more than this run has prepared or "
            "registered; they are left."
        )


# --- taking over ----------------------------------------------------------------------------------


def _load_models(accelerator: Accelerator, source: _Source, options: dict[str, Any]) -> None:
    models = list(accelerator.models)
    for hook in list(accelerator.load_state_pre_hooks.values()):
        hook(models, str(source.directory))
    if "checkpoint" in accelerator.backend.owns:
        return
    strict = bool(options.get("strict", True))
    inner = [accelerator.inner_model(model) for model in models]
    stems = [files.numbered(files.MODEL, index, "") for index in range(len(models))]
    for stem, model in zip(stems, inner, strict=True):
        _compare_layout(source, stem, model, strict)
    for stem, wrapped, model in zip(stems, models, inner, strict=True):
        state = load_weights(source.directory, stem, model, source.listed)
        accelerator.hooks.load_model_state(accelerator, wrapped, state, strict)


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
    accelerator: Accelerator, source: _Source, load_kwargs: dict[str, Any], trust: bool
) -> _States:
    """Read everything but weights and gradients, so that what cannot be read changes nothing.

    Raises:
        CheckpointError: a file cannot be read, or is of another optimizer.
    """
    states = _States([], [], [], [], None, _read_ranks(accelerator, source))
    optimizers = [] if "checkpoint" in accelerator.backend.owns else accelerator.optimizers
    for index, optimizer in enumerate(optimizers):
        name = files.numbered(files.OPTIMIZER, index, ".bin")
        mapped = not load_kwargs and zipfile.is_zipfile(source.directory / name)
        state = source.read(name, trust=trust, **({"mmap": True} if mapped else load_kwargs))
        _compare_groups(source, name, index, state, optimizer)
        states.optimizers.append(state)
        states.mapped.append(mapped)
    for index in range(len(accelerator.schedulers)):
        name = files.numbered(files.SCHEDULER, index, ".bin")
        states.schedulers.append(source.read(name, trust=trust))
    for index in range(len(accelerator.registered_objects)):
        states.registered.append(source.read(f"{files.CUSTOM}_{index}.pkl", trust=trust))
    if accelerator.scaler is not None and source.has(files.SCALER):
        states.scaler = source.read(files.SCALER)
    return states


def _compare_groups(source: _Source, name: str, index: int, state: Any, optimizer: Any) -> None:
    path, groups = source.directory / name, optimizer.param_groups
    classes = source.manifest.facts.get("optimizers", []) if source.manifest else []
    own = type(optimizer.optimizer).__name__
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
    accelerator: Accelerator, source: _Source, states: _States, options: dict[str, Any]
) -> None:
    for index, state in enumerate(states.optimizers):
        optimizer = accelerator.optimizers[index].optimizer
        if states.mapped[index]:
            state = _off_the_file(state, optimizer)
        accelerator.hooks.load_optimizer_state(accelerator, optimizer, state)
    for scheduler, state in zip(accelerator.schedulers, states.schedulers, strict=True):
        scheduler.load_state_dict(state)
    if accelerator.scaler is not None:
        if states.scaler is not None:
            accelerator.scaler.load_state_dict(states.scaler)
        else:
            accelerator.note_once(
                f"{source.directory} was saved without a gradient scaler: its scale starts anew."
            )
    for obj, state in zip(accelerator.registered_objects, states.registered, strict=True):
        obj.load_state_dict(state)
    if accelerator.backend.name:
        directory = source.directory / f"backend_{accelerator.backend.name}"
        accelerator.hooks.load_state(accelerator, directory, options)
    for key, function, names in accelerator.plugins.implementations("on_load"):
        accelerator.plugins.call_one(
            "on_load",
            key,
            function,
            names,
            accelerator=accelerator,
            directory=source.directory / key.replace(":", "_"),
        )
    _load_ranks(accelerator, source, states.ranks)


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


def _read_ranks(accelerator: Accelerator, source: _Source) -> dict[int, Any]:
    """Read the files of the ranks this one needs: the first, its own, and all if they are regrouped."""
    rank, count = accelerator.process_index, accelerator.num_processes
    saved_by = _world_size(source)
    wanted = {0, rank} if saved_by == count else {*range(saved_by)}
    names = {other: f"{files.RNG}_{other}.pkl" for other in sorted(wanted)}
    return {
        other: source.read(name) for other, name in names.items() if other == 0 or source.has(name)
    }


def _load_ranks(accelerator: Accelerator, source: _Source, found: dict[int, Any]) -> None:
    """Take over what each rank has of its own; generators last, as loading may draw from them."""
    rank, count = accelerator.process_index, accelerator.num_processes
    first, own = found[0], found.get(rank)
    saved_by = _world_size(source)
    if saved_by != count and MARK in first:
        accelerator.note_once(
            f"{source.directory} was saved by {saved_by} processes and is loaded by {count}: the "
            "position in the data is carried over; ranks that were not there keep their own "
            "random states."
        )
    ours = first.get(MARK)
    if ours is None:
        accelerator.step = int(first.get("step", 0))
        accelerator.note_once(foreign.NOT_TAKEN_OVER.format(directory=source.directory))
    else:
        _load_positions(accelerator, source, ours["loaders"])
        cycles = [one[MARK]["cycle"] for _, one in sorted(found.items())]
        mine = (own or first)[MARK]["cycle"]
        accelerator.load_cycle_state(mine, None if saved_by == count else cycles)
        if own is not None:  # a rank that was not there has no runs to go on in
            accelerator.expect_tracker_runs(own[MARK].get("trackers") or {})
    _load_gradients(accelerator, source, saved_by)
    if own is not None:
        missed = rng.restore(own)
        if missed:
            accelerator.note_once(
                f"No random state could be set on rank {rank} for {', '.join(missed)}.",
                every_rank=True,
            )


def _load_positions(accelerator: Accelerator, source: _Source, states: list[Any]) -> None:
    """Put the loaders where they stood; one of other data stays at its beginning."""
    loaders = accelerator.loaders
    if len(states) != len(loaders):
        accelerator.note_once(
            f"{source.directory} has the positions of {len(states)} loaders, and {len(loaders)} "
            "are prepared here: they are matched in the order of their preparing."
        )
    for index, (loader, state) in enumerate(zip(loaders, states, strict=False)):
        if state is None or not hasattr(loader, "load_state_dict"):
            continue
        was, now = state.get("dataset_size"), getattr(loader, "dataset_size", None)
        if was is not None and was != now:
            accelerator.note_once(
                f"Loader {index} had {was} samples when {source.directory.name} was saved, and has "
                f"{now} here: its position is not taken over. Loaders are matched in the order of "
                "their preparing."
            )
            continue
        loader.load_state_dict(state)


def _world_size(source: _Source) -> int:
    if source.manifest is not None:
        return int(source.manifest.facts.get("world_size", 1))
    return sum(1 for _ in source.directory.glob(f"{files.RNG}_*.pkl"))


def _load_gradients(accelerator: Accelerator, source: _Source, saved_by: int) -> None:
    """Put back the gradients of a begun cycle; of other ranks' the mean, which a sync takes."""
    rank, count = accelerator.process_index, accelerator.num_processes
    for model in accelerator.models:
        for parameter in accelerator.inner_model(model).parameters():
            parameter.grad = None
    chosen = [rank] if saved_by == count else range(saved_by)
    factor = 1.0 if saved_by == count else accelerator.regrouped(saved_by)
    for other in chosen:
        name = f"{files.GRADIENTS}_{other}.bin"
        if not source.has(name):
            continue
        found = source.read(name)
        accelerator.gradient_state.backwards += 1  # they wait for a step, here too
        for index, gradients in found.items():
            model = accelerator.inner_model(accelerator.models[index])
            for key, gradient in gradients.items():
                parameter = model.get_parameter(key)
                value = gradient.to(parameter.device)
                value = value if factor == 1.0 else value * factor
                if parameter.grad is None:
                    parameter.grad = value
                else:
                    parameter.grad += value
