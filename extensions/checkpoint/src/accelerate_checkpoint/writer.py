"""What one rank writes into a checkpoint: now, or copied now and written later."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import files
from accelerate_checkpoint.files import FileEntry
from accelerate_checkpoint.manifest import MARK
from accelerate_checkpoint.staging import Staging
from accelerate_checkpoint.weights import clean_state_dict_for_safetensors, shard_state_dict

__all__ = ["Writer"]


class Writer:
    """Writes files into `directory` and keeps their checksums in `files`, by path.

    The first failure is kept in `error`, and nothing more is written after it; but whoever
    calls goes on, since the other ranks count on the collectives that are still to come.

    Args:
        staging: where to copy states if they are to be written by `finish`; None: at once.
    """

    def __init__(self, directory: Path, staging: Staging | None = None) -> None:
        self.directory = directory
        self.files: dict[str, FileEntry] = {}
        self.error: str | None = None
        self.cause: Exception | None = None
        self._staging = staging
        self._later: list[Callable[[], None]] = []

    @property
    def puts_off(self) -> bool:
        """Whether states are copied now and written by `finish`."""
        return self._staging is not None

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Keep an exception of the block as this rank's failure of saving `what`."""
        try:
            yield
        except Exception as error:
            self.failed(what, error)

    def failed(self, what: str, error: Exception) -> None:
        """Keep the first failure."""
        if self.error is None:
            kind = traceback.format_exception_only(error)[0].strip()
            self.error, self.cause = f"{what}: {kind}", error

    def torch(self, name: str, state: Any) -> None:
        """Write what `torch.save` makes of an object."""
        held = self._held(state)
        self._put(name, lambda: {name: files.write_torch(self.directory / name, held)})

    def text(self, name: str, text: str) -> None:
        """Write a text."""
        self._put(name, lambda: {name: files.write_text(self.directory / name, text)})

    def weights(
        self, state: Mapping[str, Any], *, stem: str, max_shard_size: int | str, safe: bool
    ) -> None:
        """Write a model's state dict: safetensors or torch's format, in shards with an index."""
        whole = clean_state_dict_for_safetensors(state) if safe else dict(state)
        held = self._held(whole)
        self._put(stem, lambda: write_weights(self.directory, held, stem, max_shard_size, safe))

    def later(self, what: str, job: Callable[[], None]) -> None:
        """Run a job that writes files by itself: now, or with the others.

        Also after a failure here: it may meet the other ranks.
        """

        def run() -> None:
            with self.part(what):
                job()

        if self._staging is None:
            run()
        else:
            self._later.append(run)

    def finish(self) -> None:
        """Write what was put off."""
        jobs, self._later = self._later, []
        for job in jobs:
            job()

    def _held(self, state: Any) -> Any:
        return state if self._staging is None else self._staging.copy(state)

    def _put(self, what: str, job: Callable[[], Mapping[str, FileEntry]]) -> None:
        def run() -> None:
            self.files.update(job())

        if self._staging is None:
            self._run(what, run)
        else:
            self._later.append(lambda: self._run(what, run))

    def _run(self, what: str, job: Callable[[], None]) -> None:
        if self.error is None:
            with self.part(what):
                job()


def write_weights(
    directory: Path,
    state: Mapping[str, Any],
    stem: str,
    max_shard_size: int | str,
    safe: bool,
    durable: bool = True,
) -> dict[str, FileEntry]:
    """Write a state dict as `model.safetensors`, or in shards of at most `max_shard_size` bytes.

    For safetensors it has been cleaned of aliases. Returns the files with their checksums.
    """
    suffix = ".safetensors" if safe else ".bin"
    name = stem if safe else stem.replace(files.MODEL, "pytorch_model", 1)
    shards, index = _shards(state, max_shard_size, f"{name}{{suffix}}{suffix}")
    mark = {"format": "pt", MARK: "1"}
    made = {}
    for filename, shard in shards.items():
        path = directory / filename
        if safe:
            made[filename] = files.write_safetensors(path, shard, mark, durable=durable)
        else:
            made[filename] = files.write_torch(path, shard, durable=durable)
    if index is not None:
        import json

        filename = f"{name}{suffix}.index.json"
        text = json.dumps(index, indent=2, sort_keys=True)
        made[filename] = files.write_text(directory / filename, text, durable=durable)
    return made


def _shards(
    state: Mapping[str, Any], max_shard_size: int | str, pattern: str
) -> tuple[Mapping[str, Any], Any]:
    plain = all(isinstance(value, torch.Tensor) for value in state.values())
    if not plain:  # extra state of modules, which cannot be measured
        return {pattern.format(suffix=""): dict(state)}, None
    return shard_state_dict(state, max_shard_size, pattern)
