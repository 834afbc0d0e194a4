"""Write the state of each rank into a checkpoint, at once or later from a copy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_checkpoint import files
from accelerate_checkpoint.background import Staging
from accelerate_checkpoint.files import FileEntry
from accelerate_checkpoint.model import write_weights
from accelerate_checkpoint.quantized_weights import as_plain_tensors
from accelerate_checkpoint.weights import clean_state_dict_for_safetensors

if TYPE_CHECKING:
    from accelerate_checkpoint.training_state import TrainingState


class Writer:
    """Writes files into `directory` and records their checksums in `files`, by path.

    After the first failure, which is recorded in `error`, nothing more is written. Callers still
    continue, because the other ranks depend on the collectives that follow.

    Args:
        staging: copies the states, which `finish` then writes. None writes them at once.
    """

    def __init__(self, directory: Path, staging: Staging | None = None) -> None:
        self.directory = directory
        self.files: dict[str, FileEntry] = {}
        self.error: str | None = None
        self.cause: Exception | None = None
        self.staging = staging
        self._later: list[Callable[[], None]] = []

    @contextmanager
    def part(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Record an exception raised in the block as this rank's failure to save `what`."""
        try:
            yield
        except Exception as error:
            if self.error is None:
                kind = traceback.format_exception_only(error)[0].strip()
                named = what if isinstance(what, str) else what()
                self.error, self.cause = f"{named}: {kind}", error

    def torch(self, name: str, state: Any, unsaved: Callable[[], str] = str) -> None:
        """Write a state. If that fails, `unsaved` names the part at fault, or "" for the file."""
        path = self.directory / name
        self._write(
            lambda: unsaved() or name, state, lambda held: {name: files.write_torch(path, held)}
        )

    def weights(
        self, state: Mapping[str, Any], *, stem: str, max_shard_size: int | str, safe: bool
    ) -> None:
        """Write a model's state dict as safetensors or with torch, in shards with an index."""
        plain = as_plain_tensors(state)
        whole = clean_state_dict_for_safetensors(plain) if safe else plain
        to = self.directory
        self._write(stem, whole, lambda held: write_weights(to, held, stem, max_shard_size, safe))

    def _write(
        self,
        what: str | Callable[[], str],
        state: Any,
        write: Callable[[Any], Mapping[str, FileEntry]],
    ) -> None:
        held = state if self.staging is None else self.staging.copy(state)

        def run() -> None:
            if self.error is None:
                self.files.update(write(held))

        self.run(what, run)

    def run(self, what: str | Callable[[], str], job: Callable[[], None]) -> None:
        """Run a job that writes its own files, now or in `finish`.

        It runs even after a failure on this rank, because it may be collective.
        """

        def guarded() -> None:
            with self.part(what):
                job()

        if self.staging is None:
            guarded()
        else:
            self._later.append(guarded)

    def backend_files(self, folder: str, job: Callable[[], Mapping[str, FileEntry] | None]) -> None:
        """Run a job of the backend, and record the checksums of the files in `folder` that it returns."""

        def run() -> None:
            written = job() or {}
            self.files.update({f"{folder}/{name}": entry for name, entry in written.items()})

        self.run(folder, run)

    def finish(self) -> None:
        jobs, self._later = self._later, []
        for job in jobs:
            job()


def named_objects(state: TrainingState) -> dict[str, Any]:
    """Return schedulers, scaler and registered objects by file name."""
    named = {
        files.numbered(files.SCHEDULER, index, ".bin"): scheduler
        for index, scheduler in enumerate(state.schedulers)
    }
    if state.scaler is not None:
        named[files.SCALER] = state.scaler
    return named | {f"{files.CUSTOM}_{index}.pkl": o for index, o in enumerate(state.registered)}


def write_state(
    state: TrainingState,
    writer: Writer,
    safe_serialization: bool,
    max_shard_size: int | str,
    options: Mapping[str, Any],
) -> None:
    """Write everything, in the same order on all ranks, because backends gather some states."""
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
    else:  # the backend writes the models; hooks may still add files
        _weights_to_write(state, writer, [])
    for name, obj in named_objects(state).items():
        with writer.part(f"{name} ({type(obj).__name__}.state_dict)"):
            # Called on every rank, because it may be collective.
            held = obj.state_dict()
            if here:
                writer.torch(name, held)
    own: Mapping[str, Any] = {}

    def unsaved() -> str:
        return state.unsaved_loader(own)

    with writer.part(lambda: unsaved() or "loaders, generators and counters"):
        own = state.rank_state()
        writer.torch(f"{files.RNG}_{rank}.pkl", own, unsaved)
    with writer.part("gradients"):
        gradients = state.pending_gradients()
        if gradients:
            writer.torch(f"{files.GRADIENTS}_{rank}.bin", gradients)
    with writer.part(f"the backend {state.backend!r}"):
        directory = writer.directory / f"backend_{state.backend}"
        job = state.backend_save(directory, options, writer.staging is not None)
        if job is not None:
            writer.backend_files(directory.name, job)
    for one in state.contributors():
        with writer.part(one.key):
            one.save(writer.directory / one.key.replace(":", "_"))


def _weights_to_write(state: TrainingState, writer: Writer, weights: list[Any]) -> list[Any]:
    """Call the script's hooks, and return the weights that they did not remove.

    Hooks get the modules that the script prepared, without wrappers, because they call the modules' own
    methods, such as `save_pretrained`.
    """
    models = [state.inner(model) for model in state.models]
    before = list(zip(models, weights, strict=False))
    for hook in state.save_hooks():
        with writer.part("a save_state pre hook"):
            hook(models, weights, str(writer.directory))  # may remove items from both lists
    removed = [held for model, held in before if not any(model is other for other in models)]
    return [held for held in weights if not any(held is other for other in removed)]


def _write_models(
    state: TrainingState, writer: Writer, safe_serialization: bool, max_shard_size: int | str
) -> None:
    # One at a time, because a backend may have to gather each state. Hooks need all of them.
    states: Iterable[Any] = (state.model_state(model) for model in state.models)
    if state.save_hooks():
        states = _weights_to_write(state, writer, list(states))
    for index, held in enumerate(states):
        stem = files.numbered(files.MODEL, index, "")
        if state.saves_here:
            with writer.part(stem):
                writer.weights(
                    held, stem=stem, max_shard_size=max_shard_size, safe=safe_serialization
                )
