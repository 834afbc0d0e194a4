"""`FsspecCheckpointer`: the part of an Accelerator that saves and loads, on any file system."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import torch

from accelerate_checkpoint import (
    Preemption,
    TrainingState,
    read_signals,
    save_object,
    save_weights,
)
from accelerate_core.contract.parts import RunParts
from accelerate_core.errors import CheckpointError
from accelerate_fsspec.load import agreed, restore
from accelerate_fsspec.location import Location, Manifest, absolute, is_url, locate, new_save
from accelerate_fsspec.numbering import Numbering
from accelerate_fsspec.settings import FsspecSettings
from accelerate_fsspec.stage import MERGED, Stage, write

__all__ = ["FsspecCheckpointer"]

Gather = Callable[[Any], list[Any]]


class FsspecCheckpointer:
    """Checkpoints on any file system of fsspec, each there whole or not at all.

    Args:
        project: the `ProjectConfiguration`.
        signals: text of `preemption_signals`.
        settings: where relative targets are, and how their file system is opened.
    """

    name = "fsspec"
    api_version = (1, 0)
    Settings = FsspecSettings

    def __init__(self, project: Any, signals: str | None, settings: FsspecSettings) -> None:
        self.settings = settings
        self._signals = read_signals(signals)
        self._preemption: Preemption | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._beside: Any = None

    def attach(self, run: RunParts) -> None:
        """Take the run; what has to watch its loop begins here."""
        self._state = state = TrainingState(run)
        self._numbering = Numbering(state, self._place, self.settings.url)
        if self._signals:
            self._preemption = Preemption(state, self._signals, self.wait, self.save_state)

    def _place(self, target: Any) -> Location:
        text = str(target)
        base = self.settings.url
        if base is not None and not is_url(text) and not Path(text).is_absolute():
            text = f"{base.rstrip('/')}/{text}"
        return locate(absolute(text), self.settings.options)

    # --- saving -------------------------------------------------------------------------------

    def save_state(
        self,
        /,
        output_dir: Any = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write a checkpoint and return its URL.

        Raises:
            CheckpointError: on every rank, if any of them failed; what stood before still stands.
        """
        self.wait()
        state, comm = self._state, self._state.collectives
        numbered = self._numbering.automatic
        if output_dir is None and not numbered:
            raise CheckpointError(
                "save_state needs an output_dir, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        place = self._numbering.next() if numbered else self._place(output_dir)
        if place.for_one_process and state.process.num_processes > 1:
            raise CheckpointError(
                f"{place.url} can be written by one process only, and there are "
                f"{state.process.num_processes}: save to a file system that they share."
            )
        if not blocking and self._beside is None:
            self._beside = comm.duplicate()
            if self._beside is None:
                state.note_once("This backend has no second group of ranks: saving blocks.")
        later = not blocking and self._beside is not None
        state.settle()
        state.check_gradients_can_be_saved()
        save: str = comm.broadcast_object(new_save())
        stage = Stage()
        try:
            options = safe_serialization, max_shard_size, save_model_func_kwargs
            write(state, stage, *options, later)
            facts = {"saved_at": time.time(), **state.facts()}
        except BaseException:
            stage.remove()
            raise
        limit = state.project.total_limit if numbered else None
        finish = partial(self._finish, place, stage, save, facts, limit)
        if later:
            self._thread = threading.Thread(
                target=self._run, args=(finish,), name="accelerate-fsspec"
            )
            self._thread.start()
        else:
            finish(comm.gather_object)
        if numbered:
            state.project.iteration += 1
        return place.url

    def _run(self, finish: Callable[[Gather], None]) -> None:
        try:
            finish(self._beside.gather_object)
        except BaseException as error:
            self._failure = error

    def _finish(
        self,
        place: Location,
        stage: Stage,
        save: str,
        facts: Mapping[str, Any],
        limit: int | None,
        gather: Gather,
    ) -> None:
        """Bring everything there: each rank its own, and rank 0 the manifest after all of them."""
        rank = self._state.process.process_index
        try:
            files = stage.finish()
            _raise_any(gather(stage.error), place, stage.cause)
            trouble, cause = _tried(lambda: place.write(stage.folder, rank, files, save))
            listed = gather((trouble, files))
            _raise_any([one for one, _ in listed], place, cause)
            manifest = Manifest(save, {r: named for r, (_, named) in enumerate(listed)}, facts)
            if rank == 0:
                trouble, cause = _tried(lambda: place.publish(manifest, stage.scratch))
            _raise_any(gather(trouble), place, cause)
            if rank == 0 and limit is not None:
                self._numbering.keep(limit, place)
        except BaseException:
            if rank == 0:
                _tried(lambda: place.discard(save))
            raise
        finally:
            stage.remove()

    # --- loading ------------------------------------------------------------------------------

    def load_state(
        self,
        /,
        input_dir: Any = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        verify: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Read a checkpoint into the same objects and return its URL.

        Raises:
            CheckpointError: it, or an object of it, is missing or damaged, by name. Nothing has
                been changed then.
        """
        self.wait()
        if input_dir is None and not self._numbering.automatic:
            raise CheckpointError(
                "load_state needs an input_dir, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True) to find the newest."
            )
        places = self._numbering.newest_first() if input_dir is None else [self._place(input_dir)]
        passed: list[str] = []
        for place in places:
            folder = Path(tempfile.mkdtemp(prefix="accelerate-fsspec-"))
            try:
                fetch = partial(self._fetch, place, folder, verify)
                try:
                    manifest = agreed(self._state, fetch)
                except CheckpointError as error:
                    if input_dir is not None:
                        raise
                    passed.append(str(error))
                    continue
                for text in passed:
                    self._state.note_once(f"load_state passed over a damaged one: {text}")
                options = load_model_func_kwargs
                given = load_kwargs or {}
                restore(self._state, place.url, manifest, folder, given, trust, options)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            self._numbering.loaded(place)
            return place.url
        raise CheckpointError(f"There is no whole checkpoint to load. {' '.join(passed)}".strip())

    def _fetch(self, place: Location, folder: Path, verify: bool) -> Manifest:
        """Bring what this rank needs to this machine, and look at it."""
        manifest = place.manifest()
        process = self._state.process
        mesh = manifest.facts.get("mesh")
        regrouped = not self._state.has_layout(len(manifest.files), mesh)

        def wanted(rank: int, name: str) -> bool:
            mine = rank in (0, process.process_index)
            return mine or regrouped or name.partition("/")[0] in MERGED

        place.fetch(manifest, folder, wanted, verify)
        return manifest

    # --- models and objects -------------------------------------------------------------------

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model: into a local directory, or below a URL."""
        weights = self._state.whole_model_state(model)
        how: dict[str, Any] = {
            "max_shard_size": max_shard_size,
            "safe_serialization": safe_serialization,
        }
        if any(t.device.type == "meta" for t in weights.values() if isinstance(t, torch.Tensor)):
            raise CheckpointError(
                "The model has weights on the meta device: there are none to save."
            )
        if not is_url(str(save_directory)):
            if self._state.saves_here:
                save_weights(weights, Path(save_directory), **how)
        elif self._state.process.process_index == 0:
            fs, root = fsspec.core.url_to_fs(str(save_directory), **self.settings.options)
            with tempfile.TemporaryDirectory(prefix="accelerate-fsspec-") as folder:
                save_weights(weights, Path(folder), **how)
                fs.makedirs(root, exist_ok=True)
                for path in sorted(Path(folder).iterdir()):
                    fs.put_file(str(path), f"{root.rstrip('/')}/{path.name}")

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object once: to a path, an open file or a URL."""
        if not isinstance(f, str) or not is_url(f):
            if self._state.saves_here:
                save_object(obj, f, safe_serialization)
        elif self._state.process.process_index == 0:
            with fsspec.open(f, "wb", **self.settings.options) as file:
                save_object(obj, file, safe_serialization)

    # --- life ---------------------------------------------------------------------------------

    @property
    def preemption_requested(self) -> bool:
        """Whether one of the signals has come."""
        return self._preemption is not None and self._preemption.requested

    def wait(self) -> None:
        """Return when the save under way is complete; raise what it failed with, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def release(self) -> None:
        """Wait: no memory is kept between saves."""
        self.wait()

    def close(self, failed: bool) -> None:
        """End; of a run that failed the save under way is left to its thread."""
        if self._preemption is not None:
            self._preemption.close()
        if not failed:
            self.wait()


def _tried(job: Callable[[], None]) -> tuple[str | None, Exception | None]:
    """Return what a job failed with, as a text for the other ranks and as it is."""
    try:
        job()
    except Exception as error:
        return f"{type(error).__name__}: {error}", error
    return None, None


def _raise_any(troubles: list[str | None], place: Location, cause: Exception | None) -> None:
    """Raise on every rank what any of them could not do."""
    said = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
    if said:
        raise CheckpointError(
            f"The checkpoint {place.url} was not saved; what stood there before still stands. "
            + " ".join(said)
        ) from cause
