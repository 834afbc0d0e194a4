"""From fetched files back into a run: all is read before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from accelerate_checkpoint import TrainingState, load_weights
from accelerate_core.errors import CheckpointError
from accelerate_fsspec.location import Manifest
from accelerate_fsspec.stage import MERGED

__all__ = ["agreed", "restore"]

T = TypeVar("T")


def agreed(state: TrainingState, job: Callable[[], T]) -> T:
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
        raise CheckpointError(f"The checkpoint could not be loaded on every rank. {failed[0]}")
    return result


def restore(
    state: TrainingState,
    url: str,
    manifest: Manifest,
    folder: Path,
    load_kwargs: Mapping[str, Any],
    trust: bool,
    options: Mapping[str, Any],
) -> None:
    """Load what was fetched into `folder/<rank>/<name>`.

    Raises:
        CheckpointError: it is of other objects, or holds what only `trust` would read.
    """
    rank, saved_by = state.process.process_index, len(manifest.files)
    mesh = manifest.facts.get("mesh")
    regrouped = not state.has_layout(saved_by, mesh)
    if any((folder / f"{one}/gradients.pt").exists() for one in range(saved_by)):
        state.check_gradients_fit(url, saved_by, mesh)
    common = folder / "0"

    def read(name: str, trusted: bool = trust, **how: Any) -> Any:
        try:
            settled = {"map_location": "cpu", **how, "weights_only": not trusted}
            return torch.load(folder / name, **settled)
        except FileNotFoundError:
            raise CheckpointError(
                f"The checkpoint {url} has no {name}: prepare and register the same objects in the "
                "same order as when it was saved."
            ) from None
        except Exception as error:
            way = "" if trusted else " Python objects are read with trust=True only."
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{url}: {name} cannot be read: {first}.{way}") from error

    def read_all() -> dict[str, Any]:
        optimizers = () if state.owns_format else state.optimizers
        names = [f"optimizer_{index}" for index in range(len(optimizers))]
        found = {name: read(f"0/{name}.pt", **load_kwargs) for name in names}
        rest = [f"scheduler_{index}" for index in range(len(state.schedulers))]
        rest += [f"registered_{index}" for index in range(len(state.registered))]
        if state.scaler is not None and (common / "scaler.pt").exists():
            rest.append("scaler")
        found |= {name: read(f"0/{name}.pt") for name in rest}
        ranks = range(saved_by) if regrouped else sorted({0, rank})
        found["ranks"] = {one: read(f"{one}/rank.pt", False) for one in ranks}
        return found

    found = agreed(state, read_all)
    merged = {name: _merged(folder, name, rank) for name in MERGED}
    state.settle()  # what is pending belongs to the state that is replaced

    def take() -> None:
        models = list(state.models)
        for hook in state.load_hooks():
            hook(models, str(merged["hooks"]))
        strict = bool(options.get("strict", True))
        for index, model in enumerate(() if state.owns_format else models):
            weights = load_weights(common / f"model_{index}", state.inner(model))
            state.load_model_state(model, weights, strict)
        for index, optimizer in enumerate(() if state.owns_format else state.optimizers):
            state.load_optimizer_state(optimizer, found[f"optimizer_{index}"])
        for index, scheduler in enumerate(state.schedulers):
            scheduler.load_state_dict(found[f"scheduler_{index}"])
        for index, one in enumerate(state.registered):
            one.load_state_dict(found[f"registered_{index}"])
        if state.scaler is not None and "scaler" in found:
            state.scaler.load_state_dict(found["scaler"])
        state.backend_load(merged["backend"], options)
        for one in state.contributors():
            one.load(merged["plugins"] / one.key.replace(":", "_"))
        whose = range(saved_by) if regrouped else [rank]
        held = [f"{one}/gradients.pt" for one in whose]
        gradients = (read(name, False) for name in held if (folder / name).exists())
        state.load_rank_state(found["ranks"], saved_by, gradients, mesh)

    if state.owns_format:
        take()  # it communicates on the way, and agrees by itself
    else:
        agreed(state, take)


def _merged(folder: Path, name: str, rank: int) -> Path:
    """Return one directory with what all ranks wrote; of one name this rank's own, or the first."""
    target = folder / "merged" / name
    target.mkdir(parents=True)
    ranks = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    for one in [*sorted((r for r in ranks if r != rank), reverse=True), rank]:
        source = folder / str(one) / name
        for path in sorted(source.rglob("*")) if source.is_dir() else ():
            if path.is_file():
                to = target / path.relative_to(source)
                to.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, to)
    return target
