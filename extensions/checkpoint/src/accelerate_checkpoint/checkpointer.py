"""`DirectoryCheckpointer`: the part of an Accelerator that saves and loads.

To save, all ranks write files that readers cannot see yet, and the store then publishes one manifest
of all files in a single step. To load, all ranks together verify the checkpoint, then read it, and
only then apply it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accelerate_checkpoint import interrupted
from accelerate_checkpoint.background import Background, show_failure
from accelerate_checkpoint.draft import (
    Draft,
    PublishFailure,
    Report,
    gather_failures,
    new_draft,
    raise_any,
)
from accelerate_checkpoint.export import save_in_parallel
from accelerate_checkpoint.load import (
    LoadedState,
    Source,
    check_fits,
    check_format,
    open_together,
    read_checkpoint,
    run_collectively,
    stored_version,
)
from accelerate_checkpoint.local_storage import LocalStorage, refuse_url
from accelerate_checkpoint.model import is_index, is_weights, save_object, save_weights
from accelerate_checkpoint.numbering import Numbering
from accelerate_checkpoint.preemption import Preemption, read_signals
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.quantized_weights import has_wrappers, refuse_wrappers, undo_packing
from accelerate_checkpoint.rendezvous import Call, Rendezvous, synchronize
from accelerate_checkpoint.save import Writer, write_state
from accelerate_checkpoint.storage import Storage, basename
from accelerate_checkpoint.training_state import TrainingState
from accelerate_checkpoint.transfer import upload
from accelerate_core.plugin import CheckpointError

if TYPE_CHECKING:
    from accelerate_core.plugin import Checkpointer, CommunicatorView, RunParts


#: How often `load_state` starts again because another process deleted or replaced the checkpoint.
_ATTEMPTS = 20


class Replaced(Exception):
    """Another process deleted or replaced a checkpoint while this one read it."""


def _changes_too_often(place: object) -> CheckpointError:
    return CheckpointError(
        f"{place} was not loaded: each of {_ATTEMPTS} times, another process deleted or replaced the "
        "checkpoint before it was read. Keep more checkpoints with ProjectConfiguration("
        "total_limit=...), or load a copy."
    )


class DirectoryCheckpointer:
    """Keeps each checkpoint in a directory that is either complete or absent.

    To keep checkpoints elsewhere, write a subclass that passes another `storage` to this
    constructor.

    Args:
        project: the `ProjectConfiguration`.
        signals: the setting `preemption_signals`, such as "SIGTERM,SIGUSR1".
        storage: where checkpoints are kept. The default is directories on this machine.
        root: parent of the numbered checkpoints. Replaces `project.project_dir`.

    Raises:
        ConfigurationError: one of the signals cannot be caught.
        CheckpointError: without a storage, `project_dir` is a URL.
    """

    name = "directory"
    api_version = (1, 0)

    def __init__(
        self,
        project: Any,
        signals: str | None,
        storage: Storage | None = None,
        root: str | None = None,
    ) -> None:
        if storage is None:
            refuse_url(project.project_dir)
        self.storage: Storage = LocalStorage() if storage is None else storage
        self._root = root
        self._signals = read_signals(signals)
        #: The save that runs in the background.
        self.background = Background()
        # If this object is deleted, nothing else can raise the error of its last save.
        weakref.finalize(self, show_failure, self.background)
        self._preemption: Preemption | None = None

    def attach(self, run: RunParts) -> None:
        """Receive the parts of the run, and start to watch its loop for preemption."""
        state = TrainingState(run)
        self._state = state
        self._numbering = Numbering(state, self.storage, self._root)
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
        """Write models, optimizers, schedulers, scaler, registered objects and the state per rank.

        See `Accelerator.save_state` for the arguments.

        Raises:
            CheckpointError: any rank failed (raised on every rank), and earlier checkpoints are
                unchanged. Or only the main process called this, and it holds only a part of the
                state.
        """
        state = self._state
        options = output_dir, safe_serialization, blocking, max_shard_size, save_model_func_kwargs
        target = self._target(output_dir)
        if self._together("save_state", target, state.whole_on_main):
            return self._save(*options)
        if state.process.process_index:
            return target  # the main process has saved without this rank
        with state.alone():
            return self._save(*options)

    def _together(self, verb: str, target: str, whole: bool) -> bool:
        """Return True if all ranks save together, False if the main process saves alone."""
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
        state = self._state
        background = self.background
        numbered = self._numbering.automatic
        beside = None if blocking else background.open(state.collectives)
        if beside is None and not blocking:
            state.warn_once(
                "save_state(blocking=False) blocks with this backend: it has no second process "
                "group for a background thread."
            )
        state.update_scale()
        state.check_gradients_can_be_saved()
        draft = self._begin(output_dir)
        directory = draft.directory
        writer = Writer(directory, None if beside is None else background.staging)
        try:
            with writer.part(f"{directory} does not exist on this machine"):
                if not directory.is_dir():
                    raise CheckpointError(draft.advice)
            background.staging.begin()
            options = safe_serialization, max_shard_size, save_model_func_kwargs
            write_state(state, writer, *options)
            facts = {"saved_at": time.time(), **state.facts()}
        except BaseException:  # an interrupt; the writer records failures of single parts
            draft.abandon()
            draft.close()
            raise
        limit = state.project.total_limit if numbered else None
        finish = partial(self._finish, draft, writer, facts, limit, blocking)
        if beside is None:
            finish(state.collectives)
        else:
            synchronize(state.process.device)  # waits for the copies to host memory
            background.run(partial(finish, beside))
        if numbered:
            state.project.iteration += 1
        return draft.place

    def _begin(self, output_dir: Any) -> Draft:
        """Create the draft that all ranks write to."""
        state = self._state
        place = self._target(output_dir)
        trouble = None
        if self._numbering.automatic:
            place, trouble = self._numbering.next()
        save = f"save-{state.collectives.broadcast_object(secrets.token_hex(6))}"
        draft = new_draft(state, self.storage, place, save)
        answer = None
        cause: Exception | None = None
        if trouble is None:
            try:
                answer = draft.begin()
            except CheckpointError as error:
                trouble = str(error)
                cause = error
            except Exception as error:
                trouble = f"{place} cannot be written: {error}"
                cause = error
        sums = None if trouble else state.weight_sums()
        try:
            raise_any(gather_failures(state.collectives, trouble), place, cause)
        except CheckpointError:
            draft.close()
            raise
        if not state.collectives.all_equal(sums):
            state.warn_if_ranks_differ(state.collectives.gather_object(sums))
        if draft.needs_answers:
            draft.join(state.collectives.gather_object(answer))
        return draft

    def _target(self, output_dir: Any) -> str:
        """Return where to save. With automatic naming, rank 0 may still choose a later number."""
        if self._numbering.automatic:
            return self._numbering.place_of(self._state.project.iteration)
        if output_dir is not None:
            return self.storage.locate(output_dir, saving=True)
        raise CheckpointError(
            'save_state() got no directory. Pass one, as in save_state("checkpoints/step_100"), or '
            f"turn on automatic checkpoint naming: {self._numbering.how_to_ask}."
        )

    def _finish(
        self,
        draft: Draft,
        writer: Writer,
        facts: dict[str, Any],
        limit: int | None,
        shown: bool,
        collectives: CommunicatorView,
    ) -> None:
        """Complete a save: report, upload and publish. Runs on the main or the background thread."""
        process = self._state.process
        try:
            writer.finish()
            machine = process.process_index - process.local_process_index
            failures = gather_failures(collectives, writer.error)
            raise_any(failures, draft.place, writer.cause)
            reports = draft.collect(Report(writer.files, machine), collectives)
            written = draft.deliver(reports, collectives.gather_object, shown)
            failure, cause = None, None
            if draft.publishes:
                try:
                    draft.publish(written, facts)
                except Exception as error:
                    text = f"{draft.place} could not be completed: {error}"
                    failure, cause = PublishFailure(text, draft.published), error
            publish_failures = gather_failures(collectives, failure)
            raise_any(
                [each and each.text for each in publish_failures],
                draft.place,
                cause,
                published=any(each is not None and each.published for each in publish_failures),
            )
        except BaseException:
            draft.abandon()
            raise
        finally:
            draft.close()
        self._numbering.saved(draft.place, limit)
        interrupted.remember(draft.place)

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
        """Restore what `save_state` wrote into the same objects.

        See `Accelerator.load_state` for the arguments.

        Raises:
            CheckpointError: the directory, or a file in it, is missing or damaged. The message
                names it, and no object has been changed.
        """
        self.wait()
        for _ in range(_ATTEMPTS):
            source = self._find(input_dir, verify)
            try:
                self._load(source, load_kwargs or {}, load_model_func_kwargs, trust)
            except Replaced:
                continue
            self._numbering.loaded(source.place)
            interrupted.remember(source.place)
            return source.place
        raise _changes_too_often(input_dir or self._numbering.root)

    def _load(
        self,
        source: Source,
        load_kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        trust: bool,
    ) -> None:
        """Load a checkpoint that was examined.

        Raises:
            Replaced: it failed because another process deleted or replaced the checkpoint. Raised
                on every rank.
        """
        state = self._state
        with source:
            check_format(state, source)
            check_fits(state, source)
            read = partial(read_checkpoint, state, source, load_kwargs, options, trust)
            loaded: LoadedState | None = None
            try:
                loaded = run_collectively(state, "read", read)
                run_collectively(state, "loaded", loaded.apply_objects)
                run_collectively(state, "loaded", loaded.call_hooks)
                if not state.owns_format:
                    run_collectively(state, "loaded", loaded.apply)
            except Exception as error:  # every rank is here, because the jobs ran collectively
                if loaded is not None:
                    loaded.undo()
                if self._was_replaced(source.place, source.version):
                    raise Replaced from error
                raise
            if state.owns_format:
                try:
                    loaded.apply()  # the backend uses collectives here, so all ranks fail together
                except Exception:
                    loaded.undo()
                    raise
            if source.fetched is not None:
                state.collectives.barrier()  # other ranks may still read the fetched files

    def _find(self, input_dir: Any, verify: bool) -> Source:
        """Return the requested checkpoint or the newest intact one, the same on every rank."""
        state, numbering = self._state, self._numbering
        if input_dir is None and not numbering.automatic:
            raise CheckpointError(
                "load_state() got no directory. Pass one, as in "
                'load_state("checkpoints/step_100"), or turn on automatic checkpoint naming to '
                f"load the newest: {numbering.how_to_ask}."
            )
        requested = None if input_dir is None else self.storage.locate(input_dir)
        if state.saves_here:
            self._recover(numbering.place_of(0) if requested is None else requested)
        state.collectives.barrier()
        for _ in range(_ATTEMPTS):
            places = numbering.newest_first() if requested is None else [requested]
            try:
                return self._first_intact(places, verify, automatic=requested is None)
            except Replaced:
                continue
        raise _changes_too_often(requested or numbering.root)

    def _first_intact(self, places: Sequence[str], verify: bool, *, automatic: bool) -> Source:
        """Return the first checkpoint that is intact. All ranks examine the same ones.

        Args:
            automatic: the places are numbered checkpoints, newest first.

        Raises:
            CheckpointError: none is intact.
            Replaced: another process deleted or replaced one while it was examined.
        """
        state, numbering = self._state, self._numbering
        skipped: list[str] = []
        for place in places:
            version = stored_version(self.storage, place)
            source, problem = open_together(state, self.storage, place, verify)
            if source is not None:
                source.version = version
                for text in skipped:
                    state.warn_once(
                        f"load_state skipped {text} It loads {basename(place)} instead."
                    )
                return source
            if self._was_replaced(place, version):
                raise Replaced
            if not automatic:
                raise CheckpointError(problem)
            skipped.append(f"{basename(place)}: {problem}")
            numbering.pass_over(place)
        if skipped:
            raise CheckpointError(
                f"Every checkpoint in {numbering.root} is damaged. {' '.join(skipped)}"
            )
        raise CheckpointError(f"There is no checkpoint in {numbering.root} to load.")

    def _was_replaced(self, place: str, version: object) -> bool:
        """Return whether rank 0 sees another checkpoint than before, or none. All ranks call this."""
        replaced = version is not None and stored_version(self.storage, place) != version
        return bool(self._state.collectives.broadcast_object(replaced))

    def _recover(self, place: str) -> None:
        """Finish the rename of a save that was killed.

        Stores that files are uploaded to have nothing to finish, and may be read-only.
        """
        if self.storage.path(place) is not None:
            self.storage.clean(place)

    # --- models and objects -------------------------------------------------------------------

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model in a form that `load_checkpoint_in_model` reads.

        If the model's parameters are DTensors, each rank writes its parts. Otherwise, only the main
        process writes. See `Accelerator.save_model` for the arguments.

        Raises:
            CheckpointError: the path is a file, the model has weights on the meta device or weights that
                torchao quantized, or the model is sharded and only the main process called this.
        """
        place = self.storage.locate(save_directory)
        directory = self.storage.path(place)
        if directory is not None and directory.is_file():
            raise CheckpointError(f"save_model needs a directory, but {directory} is a file.")
        inner = self._state.inner(model)
        undo_packing(inner)
        if has_wrappers(inner):  # a precision may keep plain weights in tensor subclasses
            refuse_wrappers(self._state.plain_model_state(model))
        if self._state.is_sharded(model):
            self._together("save_model", place, False)
            where = directory if safe_serialization else None
            if where is not None and save_in_parallel(self._state, model, where, max_shard_size):
                return
        weights = self._state.whole_model_state(model)
        offloaded = None
        empty = any(t.is_meta for t in weights.values() if isinstance(t, torch.Tensor))
        if empty and any("_hf_hook" in vars(module) for module in model.modules()):
            # Some weights are on disk or in host memory, where only the model's hooks find them.
            # The package that attached these hooks exports a class that reads the weights.
            from accelerate_core import OffloadedState

            offloaded = OffloadedState(model)
            weights = offloaded.tensors
        elif empty:
            raise CheckpointError(
                "The model has weights on the meta device, so there is nothing to save."
            )
        if not self._state.saves_here:
            return
        write = partial(
            save_weights,
            weights,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
            read=None if offloaded is None else offloaded.read,
        )
        if directory is None:
            self._upload(place, write)
            return
        write(directory)
        if offloaded is not None:
            offloaded.saved_in(directory)

    def _upload(self, place: str, write: Callable[[Path], object]) -> None:
        """Call `write` with a temporary directory, and upload the files that it writes.

        An older index is deleted before, and the new one is uploaded last, so readers never find
        shards of two models. Other older weight files at the place are deleted afterwards.
        """
        with tempfile.TemporaryDirectory(prefix="accelerate-save-") as folder:
            directory = Path(folder, basename(place))
            write(directory)
            sources = {path.name: path for path in directory.iterdir()}
            size = sum(path.stat().st_size for path in sources.values())
            for name in filter(is_index, sources):
                self.storage.delete(place, name)
            with byte_bar(f"Uploading {basename(place)}", size) as advance:
                for last in (False, True):
                    part = {n: p for n, p in sources.items() if is_index(n) == last}
                    upload(self.storage, place, part, advance)
            for name in self.storage.list(place):
                if is_weights(name) and name not in sources:
                    self.storage.delete(place, name)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object with torch or safetensors. Only the main process writes.

        Args:
            f: a path, an open file, or any address that the storage accepts.
            safe_serialization: write safetensors instead of using `torch.save`.
        """
        if not self._state.saves_here:
            return
        place = None if hasattr(f, "write") else self.storage.locate(f)
        if place is None or self.storage.path(place) is not None:
            save_object(obj, f, safe_serialization)
            return
        with tempfile.TemporaryDirectory(prefix="accelerate-save-") as folder:
            name = basename(place)
            path = Path(folder, name)
            save_object(obj, path, safe_serialization)
            parent = place[: -len(name)].rstrip("/")
            upload(self.storage, parent, {name: path}, lambda count: None)

    # --- life ---------------------------------------------------------------------------------

    @property
    def preemption_requested(self) -> bool:
        """Whether this run has received one of the signals."""
        return self._preemption is not None and self._preemption.requested

    def wait(self) -> None:
        """Wait for the current background save. If it failed, raise its exception, once."""
        self.background.wait()

    def release(self) -> None:
        """Wait for the current save and free the memory of its copies."""
        self.wait()
        self.background.staging.release()

    def close(self, failed: bool) -> None:
        """Stop watching for signals. Unless the run failed, also wait for the current save."""
        if self._preemption is not None:
            self._preemption.close()
        if not failed:
            self.release()


if TYPE_CHECKING:  # the type checker verifies that it implements the protocol
    _: type[Checkpointer] = DirectoryCheckpointer
