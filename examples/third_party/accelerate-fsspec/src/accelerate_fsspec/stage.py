"""What one rank keeps of a run, as files in a temporary directory of this machine."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import TrainingState, save_weights
from accelerate_fsspec.location import checksum

__all__ = ["MERGED", "Stage", "write"]

#: Folders of which every rank reads what all of them wrote.
MERGED = ("hooks", "backend", "plugins")


class Stage:
    """Files to be brought to where checkpoints are.

    The first failure is kept in `error`; whoever calls goes on, since the other ranks count on
    the collectives that are still to come.
    """

    def __init__(self) -> None:
        self._parent = Path(tempfile.mkdtemp(prefix="accelerate-fsspec-"))
        self.folder, self.scratch = self._parent / "files", self._parent / "scratch"
        for path in (self.folder, self.scratch):
            path.mkdir()
        self.error: str | None = None
        self.cause: Exception | None = None
        self.later: list[tuple[str, Callable[[], None]]] = []

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Keep an exception of the block as this rank's failure of saving `what`."""
        try:
            yield
        except Exception as error:
            if self.error is None:
                kind = traceback.format_exception_only(error)[0].strip()
                self.error, self.cause = f"{what}: {kind}", error

    def torch(self, name: str, state: Any) -> None:
        """Write what `torch.save` makes of an object."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path)

    def finish(self) -> dict[str, tuple[int, str]]:
        """Do what a backend put off; return the files with sizes and checksums."""
        for what, job in self.later:
            with self.part(what):
                job()
        if self.error is not None:
            return {}
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): checksum(path) for path in paths}

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._parent, ignore_errors=True)


def write(
    state: TrainingState,
    stage: Stage,
    safe: bool,
    max_shard_size: int | str,
    options: Mapping[str, Any],
    later: bool,
) -> None:
    """Write everything in a fixed order: what a backend gathers, all ranks gather together."""
    first = state.process.process_index == 0
    hooks = stage.folder / "hooks"
    weights = [] if state.owns_format else [state.model_state(model) for model in state.models]
    for hook in state.save_hooks():
        hooks.mkdir(exist_ok=True)
        with stage.part("a save_state pre hook"):
            hook(list(state.models), weights, str(hooks))  # it may take off weights
    for index, held in enumerate(weights if first else ()):
        with stage.part(f"model {index}"):
            folder = stage.folder / f"model_{index}"
            save_weights(held, folder, max_shard_size=max_shard_size, safe_serialization=safe)
    for index, optimizer in enumerate(() if state.owns_format else state.optimizers):
        with stage.part(f"optimizer {index}"):
            held = state.optimizer_state(optimizer)
            if first:
                stage.torch(f"optimizer_{index}.pt", held)
    named: dict[str, Any] = {f"scheduler_{i}": one for i, one in enumerate(state.schedulers)}
    named |= {f"registered_{i}": one for i, one in enumerate(state.registered)}
    if state.scaler is not None:
        named["scaler"] = state.scaler
    for name, one in named.items():
        with stage.part(f"{name} ({type(one).__name__}.state_dict)"):
            held = one.state_dict()
            if first:
                stage.torch(f"{name}.pt", held)
    with stage.part("loaders, generators and counters"):
        stage.torch("rank.pt", state.rank_state())
    with stage.part("gradients"):
        if gradients := state.pending_gradients():
            stage.torch("gradients.pt", gradients)
    with stage.part(f"the backend {state.backend!r}"):
        job = state.backend_save(stage.folder / "backend", options, later)
        if job is not None:
            stage.later.append((f"the backend {state.backend!r}", job))
    plugins = stage.folder / "plugins"
    plugins.mkdir()
    for one in state.contributors():
        with stage.part(one.key):
            one.save(plugins / one.key.replace(":", "_"))
