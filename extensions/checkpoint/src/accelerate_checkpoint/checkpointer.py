"""`DirectoryCheckpointer`: the part of an Accelerator that saves and loads.

All ranks write beside, one manifest is made of it, one rename shows it. What is loaded is verified
first, by all ranks together, then read, then taken over.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accelerate_checkpoint.background import Background
from accelerate_checkpoint.directories import SaveInProgress, clean_up, real_path, target_of
from accelerate_checkpoint.files import FileEntry, checksum, write_text
from accelerate_checkpoint.load import (
    Source,
    agreed,
    check_fits,
    examine_together,
    read_states,
    take_over,
)
from accelerate_checkpoint.manifest import MANIFEST, Manifest, problems
from accelerate_checkpoint.model import save_object, save_weights
from accelerate_checkpoint.numbering import Numbering
from accelerate_checkpoint.preemption import Preemption, read_signals
from accelerate_checkpoint.rendezvous import Call, Rendezvous, synchronize
from accelerate_checkpoint.save import Writer, write_state
from accelerate_checkpoint.training_state import TrainingState
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_core.contract.parts import Checkpointer, RunParts


class DirectoryCheckpointer:
    """Checkpoints that are directories, each there whole or not at all.

    Args:
        project: the `ProjectConfiguration`.
        signals: text of `preemption_signals`.

    Raises:
        ConfigurationError: one of the signals is none that can be caught.
    """

    name = "directory"
    api_version = (1, 0)

    def __init__(self, project: Any, signals: str | None) -> None:
        self._signals = read_signals(signals)
        #: The save that goes on beside the training.
        self.background = Background()
        self._preemption: Preemption | None = None

    def attach(self, run: RunParts) -> None:
        """Take the run; what has to watch its loop begins here."""
        self._state = state = TrainingState(run)
        self._numbering = Numbering(state)
        if self._signals:
            self._preemption = Preemption(state, self._signals, self.wait, self._save)

    # --- saving -------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write models, optimizers, schedulers, scaler, registered objects and each rank's own.

        The arguments are those of `Accelerator.save_state`.

        Raises:
            CheckpointError: on every rank, if any of them failed; what stood before still stands.
                On the main process, if it alone called this and holds a part of the state only.
        """
        state = self._state
        options = output_dir, safe_serialization, blocking, max_shard_size, save_model_func_kwargs
        target = str(self._target(output_dir))
        if self._together("save_state", target, state.whole_on_main):
            return self._save(*options)
        if state.process.process_index:
            return target  # the main process has saved without this rank
        with state.alone():
            return self._save(*options)

    def _together(self, verb: str, target: str, whole: bool) -> bool:
        """Return whether all ranks save, and not the main process alone."""
        meeting, events = Rendezvous.of(self._state.process), self._state.events
        call = Call.here(verb, target, (events.steps, events.backwards))
        return meeting is None or meeting.together(call, whole)

    def _save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        save_model_func_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        self.wait()
        state, background, numbered = self._state, self.background, self._numbering.automatic
        beside = None if blocking else background.open(state.collectives)
        if beside is None and not blocking:
            state.note_once("This backend has no second group of ranks: saving blocks.")
        state.settle()
        state.check_gradients_can_be_saved()
        saving = self._begin(output_dir)
        writer = Writer(saving.path, None if beside is None else background.staging)
        try:
            with writer.part(f"{saving.path} is not there on this machine"):
                if not saving.path.is_dir():
                    raise CheckpointError(
                        "save to a file system that all machines share, or set "
                        "ProjectConfiguration(save_on_each_node=True)"
                    )
            background.staging.begin()
            options = safe_serialization, max_shard_size, save_model_func_kwargs
            write_state(state, writer, *options)
            facts = {"saved_at": time.time(), **state.facts()}
        except BaseException:  # not a failure of one part: an interrupt
            saving.abandon()
            raise
        limit = state.project.total_limit if numbered else None
        finish = partial(self._finish, saving, writer, facts, limit)
        if beside is None:
            finish(state.collectives.gather_object)
        else:
            synchronize(state.process.device)  # the copies to host memory
            background.run(partial(finish, beside.gather_object))
        if numbered:
            state.project.iteration += 1
        return str(saving.target)

    def _begin(self, output_dir: Any) -> SaveInProgress:
        """Make the directory that all ranks write into."""
        state, target, trouble = self._state, self._target(output_dir), None
        if self._numbering.automatic:
            target, trouble = self._numbering.next()
        saving = SaveInProgress(target, state.collectives.broadcast_object(secrets.token_hex(6)))
        if state.saves_here and trouble is None:
            try:
                clean_up(target.parent)
                saving.make()
            except OSError as error:
                trouble = f"{target} cannot be written: {error}"
        _raise_any(state.collectives.gather_object(trouble), target)
        return saving

    def _target(self, output_dir: Any) -> Path:
        """Return where to save; what the number is with automatic naming, rank 0 knows."""
        if self._numbering.automatic:
            return self._numbering.root / f"checkpoint_{self._state.project.iteration}"
        if output_dir is not None:
            return target_of(output_dir)
        raise CheckpointError(
            'save_state() has no directory to save to. Pass one, save_state("checkpoints/step_100"), or '
            f"let checkpoints be numbered: {self._numbering.how_to_ask}."
        )

    def _finish(
        self,
        saving: SaveInProgress,
        writer: Writer,
        facts: dict[str, Any],
        limit: int | None,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """End a save, on the main thread or beside it: report, commit, learn the verdict."""
        process, here = self._state.process, self._state.saves_here
        try:
            writer.finish()
            machine = process.process_index - process.local_process_index
            reports = gather((writer.error, writer.files, machine))
            _raise_any([error for error, _, _ in reports], saving.target, writer.cause)
            trouble = None
            if here:
                try:
                    everywhere = not self._state.project.save_on_each_node
                    found = [files for _, files, node in reports if everywhere or node == machine]
                    _commit(saving, found, facts)
                except Exception as error:
                    trouble = f"{saving.target} could not be completed: {error}"
            _raise_any(gather(trouble), saving.target)
        except BaseException:
            if here:
                saving.abandon()
            raise
        self._numbering.saved(saving.target, limit, saving.identity)

    # --- loading ------------------------------------------------------------------------------

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        verify: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Read what `save_state` wrote into the same objects.

        The arguments are those of `Accelerator.load_state`.

        Raises:
            CheckpointError: the directory or a file of it is missing or damaged, by name. Nothing
                has been changed then.
        """
        self.wait()
        state, options = self._state, load_model_func_kwargs
        source = self._find(input_dir, verify)
        check_fits(state, source)
        read = partial(read_states, state, source, load_kwargs or {}, options, trust)
        loads = agreed(state, "read", read)
        state.settle()  # what is pending belongs to the state that is replaced
        load = partial(take_over, state, source, loads, options)
        if state.owns_format:
            load()  # it communicates on the way, and agrees by itself
        else:
            agreed(state, "loaded", load)
        self._numbering.loaded(source.directory)
        return str(source.directory)

    def _find(self, input_dir: Any, verify: bool) -> Source:
        """Return the checkpoint that was asked for, or the newest whole one, the same on every rank."""
        state, numbering = self._state, self._numbering
        if input_dir is None and not numbering.automatic:
            raise CheckpointError(
                'load_state() has no directory to load from. Pass one, load_state("checkpoints/step_100"), '
                f"or let checkpoints be numbered to load the newest: {numbering.how_to_ask}."
            )
        given = None if input_dir is None else real_path(input_dir)
        parent = numbering.root if given is None else given.parent
        if state.saves_here:
            clean_up(parent)
        state.collectives.barrier()
        passed: list[str] = []
        for directory in numbering.newest_first() if given is None else [given]:
            manifest, wrong = examine_together(state, directory, verify)
            if not wrong:
                for text in passed:
                    state.note_once(
                        f"load_state passed over {text} It goes on from {directory.name}."
                    )
                return Source(directory, manifest)
            if given is not None:
                raise CheckpointError(wrong)
            passed.append(f"{directory.name}: {wrong}")
            numbering.pass_over(directory)
        if passed:
            raise CheckpointError(f"No checkpoint in {parent} is whole. {' '.join(passed)}")
        raise CheckpointError(f"There is no checkpoint in {parent} to load.")

    # --- models and objects -------------------------------------------------------------------

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model once, where `load_checkpoint_in_model` finds them.

        The arguments are those of `Accelerator.save_model`.

        Raises:
            CheckpointError: the path is a file, or the model has weights on the meta device; or it
                is sharded, and the main process alone called this.
        """
        directory = Path(save_directory)
        if directory.is_file():
            raise CheckpointError(f"save_model needs a directory, and {directory} is a file.")
        if self._state.is_sharded(model):
            self._together("save_model", str(directory), False)
        weights = self._state.whole_model_state(model)
        offloaded = None
        empty = any(t.is_meta for t in weights.values() if isinstance(t, torch.Tensor))
        if empty and any("_hf_hook" in vars(module) for module in model.modules()):
            # Parts are on disk or in host memory, and their hooks know where. The package that
            # attached the hooks exports what reads them.
            from accelerate_core import OffloadedState

            offloaded = OffloadedState(model)
            weights = offloaded.tensors
        elif empty:
            raise CheckpointError(
                "The model has weights on the meta device, so there is nothing to save."
            )
        if self._state.saves_here:
            save_weights(
                weights,
                directory,
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
                read=None if offloaded is None else offloaded.read,
            )
            if offloaded is not None:
                offloaded.saved_in(directory)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object once, with torch or safetensors.

        Args:
            safe_serialization: write safetensors, else by `torch.save`.
        """
        if self._state.saves_here:
            save_object(obj, f, safe_serialization)

    # --- life ---------------------------------------------------------------------------------

    @property
    def preemption_requested(self) -> bool:
        """Whether one of the signals has come."""
        return self._preemption is not None and self._preemption.requested

    def wait(self) -> None:
        """Return when the save under way is complete; raise what it failed with, once."""
        self.background.wait()

    def release(self) -> None:
        """Wait, and give back the memory of the copies."""
        self.wait()
        self.background.staging.release()

    def close(self, failed: bool) -> None:
        """End; of a run that failed the save under way is left to its thread."""
        if self._preemption is not None:
            self._preemption.close()
        if not failed:
            self.release()


def _commit(
    saving: SaveInProgress, written: list[dict[str, FileEntry]], facts: dict[str, Any]
) -> None:
    """List what the ranks of this directory wrote, and show it."""
    directory = saving.path
    listed = {name: entry for files in written for name, entry in files.items()}
    # What plugins and the user's own hooks wrote has not passed through our hands.
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in listed:
            listed[name] = checksum(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    manifest = Manifest(listed, facts)
    write_text(directory / MANIFEST, manifest.render())
    wrong = problems(directory, manifest, contents=False)
    if wrong:
        raise CheckpointError(wrong[0])
    saving.publish()


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


if TYPE_CHECKING:  # that it keeps to the protocol
    _: type[Checkpointer] = DirectoryCheckpointer
