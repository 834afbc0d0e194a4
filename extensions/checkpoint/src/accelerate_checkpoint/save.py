"""`save_state`: all ranks write beside, one manifest is made of it, one rename shows it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_checkpoint import files
from accelerate_checkpoint.background import Background
from accelerate_checkpoint.directories import SaveInProgress, clean_up, target_of
from accelerate_checkpoint.files import FileEntry, checksum
from accelerate_checkpoint.manifest import Manifest, problems
from accelerate_checkpoint.numbering import Numbering
from accelerate_checkpoint.replay import CycleStart
from accelerate_checkpoint.writer import Writer
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState

__all__ = ["save_state"]

#: What each rank reports: its failure, its files, and which machine it is on.
Report = tuple[str | None, dict[str, FileEntry], int]
Gather = Callable[[Any], list[Any]]


def save_state(
    state: TrainingState,
    numbering: Numbering,
    background: Background,
    cycle_start: CycleStart | None,
    output_dir: Any,
    *,
    safe_serialization: bool,
    max_shard_size: int | str,
    blocking: bool,
    options: Mapping[str, Any],
) -> str:
    """Write a checkpoint; return its directory.

    Args:
        cycle_start: what a save inside an accumulation cycle keeps instead, where the backend
            cannot give gradients.

    Raises:
        CheckpointError: on every rank, if any of them failed; what stood before still stands.
    """
    background.wait()
    gather: Gather = state.collectives.gather_object
    beside = None if blocking else background.open(state.collectives)
    if beside is None and not blocking:
        state.note_once("This backend has no second group of ranks: saving blocks.")
    state.settle()
    automatic = numbering.automatic
    target, trouble = numbering.next() if automatic else (_given(output_dir), None)
    saving = SaveInProgress(target, state.collectives.broadcast_object(secrets.token_hex(6)))
    if state.saves_here and trouble is None:
        try:
            clean_up(target.parent)
            saving.make()
        except OSError as error:
            trouble = f"{target} cannot be written: {error}"
    _raise_any(gather(trouble), target)
    writer = Writer(saving.path, None if beside is None else background.staging)
    try:
        if not saving.path.is_dir():
            writer.failed(
                f"{saving.path} is not there on this machine",
                CheckpointError(
                    "save to a file system that all machines share, or set "
                    "ProjectConfiguration(save_on_each_node=True)"
                ),
            )
        background.staging.begin()
        write = partial(_write, state, writer, safe_serialization, max_shard_size, options)
        if cycle_start is not None and cycle_start.needed():
            with cycle_start.buffers():
                write(cycle_start)
        else:
            write(None)
        facts = {"saved_at": time.time(), **state.facts()}
    except BaseException:  # not a failure of one part: an interrupt
        saving.abandon()
        raise
    limit = state.project.total_limit if automatic else None
    finish = _Finish(state, numbering, saving, writer, facts, limit)
    if beside is None:
        finish(gather)
    else:
        if state.process.device.type != "cpu":
            torch.accelerator.synchronize()  # the copies to host memory
        background.run(partial(finish, beside.gather_object))
    if automatic:
        state.project.iteration += 1
    return str(target)


def _given(output_dir: Any) -> Path:
    if output_dir is None:
        raise CheckpointError(
            "save_state needs an output_dir, or "
            "ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return target_of(output_dir)


class _Finish:
    """The end of a save, on the main thread or beside it: report, commit, learn the verdict."""

    def __init__(
        self,
        state: TrainingState,
        numbering: Numbering,
        saving: SaveInProgress,
        writer: Writer,
        facts: dict[str, Any],
        limit: int | None,
    ) -> None:
        self.numbering, self.saving, self.writer = numbering, saving, writer
        self.facts, self.limit = facts, limit
        self.here, self.per_node = state.saves_here, state.project.save_on_each_node
        self.node = state.process.process_index - state.process.local_process_index

    def __call__(self, gather: Gather) -> None:
        target = self.saving.target
        try:
            self.writer.finish()
            report: Report = (self.writer.error, self.writer.files, self.node)
            reports: list[Report] = gather(report)
            _raise_any([error for error, _, _ in reports], target, self.writer.cause)
            trouble = None
            if self.here:
                try:
                    self._commit(reports)
                except Exception as error:
                    trouble = f"{target} could not be completed: {error}"
            _raise_any(gather(trouble), target)
        except BaseException:
            if self.here:
                self.saving.abandon()
            raise
        self.numbering.saved(target, self.limit, self.saving.identity)

    def _commit(self, reports: list[Report]) -> None:
        directory = self.saving.path
        listed: dict[str, FileEntry] = {}
        for _, written, node in reports:
            if not self.per_node or node == self.node:
                listed.update(written)
        # What plugins and the user's own hooks wrote has not passed through our hands.
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory).as_posix()
            if path.is_file() and name not in listed:
                listed[name] = checksum(path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        manifest = Manifest(listed, self.facts)
        manifest.write(directory)
        wrong = problems(directory, manifest, contents=False)
        if wrong:
            raise CheckpointError(wrong[0])
        self.saving.publish()


def _raise_any(troubles: list[str | None], target: Path, cause: Exception | None = None) -> None:
    """Raise on every rank what any of them could not do."""
    found: dict[str, list[int]] = {}
    for rank, trouble in enumerate(troubles):
        if trouble:
            found.setdefault(trouble, []).append(rank)
    if found:
        lines = [
            f"rank {', '.join(map(str, ranks))}: {trouble}" if len(troubles) > 1 else trouble
            for trouble, ranks in found.items()
        ]
        raise CheckpointError(
            f"The checkpoint {target} was not saved; earlier ones are as they were. "
            + " ".join(lines)
        ) from cause


# --- what -----------------------------------------------------------------------------------------


def _write(
    state: TrainingState,
    writer: Writer,
    safe_serialization: bool,
    max_shard_size: int | str,
    options: Mapping[str, Any],
    past: CycleStart | None,
) -> None:
    """Write everything in a fixed order: what a backend gathers, all ranks gather together."""
    here, rank = state.saves_here, state.process.process_index
    if not state.owns_format:
        _write_models(state, writer, safe_serialization, max_shard_size)
        for index, optimizer in enumerate(state.optimizers):
            name = files.numbered(files.OPTIMIZER, index, ".bin")
            with writer.part(name):
                held = state.optimizer_state(optimizer)
                if here:
                    writer.torch(name, held)
                del held
    else:  # the backend writes the models; hooks may add what they like
        for hook in state.save_hooks():
            with writer.part("a save_state pre hook"):
                hook(list(state.models), [], str(writer.directory))
    named = {
        files.numbered(files.SCHEDULER, index, ".bin"): scheduler
        for index, scheduler in enumerate(state.schedulers)
    }
    if state.scaler is not None:
        named[files.SCALER] = state.scaler
    named |= {f"{files.CUSTOM}_{index}.pkl": obj for index, obj in enumerate(state.registered)}
    for name, obj in named.items():
        with writer.part(f"{name} ({type(obj).__name__}.state_dict)"):
            # Every rank asks for it, as it may talk to the others.
            held = obj.state_dict() if past is None else past.state_of(obj)
            if here:
                writer.torch(name, held)
    with writer.part("loaders, generators and counters"):
        own = state.rank_state() if past is None else past.rank_state
        writer.torch(f"{files.RNG}_{rank}.pkl", own)
    with writer.part("gradients"):
        gradients = state.pending_gradients()
        if gradients:
            writer.torch(f"{files.GRADIENTS}_{rank}.bin", gradients)
    with writer.part(f"the backend {state.backend!r}"):
        directory = writer.directory / f"backend_{state.backend}"
        job = state.backend_save(directory, options, writer.puts_off)
        if job is not None:
            writer.later(directory.name, job)
    for one in state.contributors():
        with writer.part(one.key):
            one.save(writer.directory / one.key.replace(":", "_"))


def _write_models(
    state: TrainingState, writer: Writer, safe_serialization: bool, max_shard_size: int | str
) -> None:
    hooks, models = state.save_hooks(), list(state.models)
    if hooks:
        weights = [state.model_state(model) for model in models]
        before = list(zip(models, weights, strict=True))
        for hook in hooks:
            with writer.part("a save_state pre hook"):
                hook(models, weights, str(writer.directory))  # may take off either list
        taken = [w for model, w in before if not any(model is one for one in models)]
        states = iter([w for w in weights if not any(w is one for one in taken)])
    else:  # one at a time: a backend may have to gather it
        states = (state.model_state(model) for model in models)
    for index, held in enumerate(states):
        stem = files.numbered(files.MODEL, index, "")
        if state.saves_here:
            with writer.part(stem):
                writer.weights(
                    held, stem=stem, max_shard_size=max_shard_size, safe=safe_serialization
                )
