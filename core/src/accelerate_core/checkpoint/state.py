"""`save_state`: all ranks write beside, one manifest is made of it, one rename shows it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.checkpoint import files, foreign, rng
from accelerate_core.checkpoint.background import Background
from accelerate_core.checkpoint.directories import (
    Saving,
    clean_up,
    discard,
    numbered_checkpoints,
    target_of,
)
from accelerate_core.checkpoint.files import Entry, checksum
from accelerate_core.checkpoint.manifest import MANIFEST, MARK, Manifest, problems, read_manifest
from accelerate_core.checkpoint.replay import Boundary
from accelerate_core.checkpoint.writer import Writer
from accelerate_core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

__all__ = ["checkpoints_root", "own_state", "save_state"]

#: What each rank reports: its failure, its files, and which machine it is on.
Report = tuple[str | None, dict[str, Entry], int]
Gather = Callable[[Any], list[Any]]


def save_state(
    accelerator: Accelerator,
    output_dir: Any,
    *,
    safe_serialization: bool,
    max_shard_size: int | str,
    blocking: bool,
    options: dict[str, Any],
) -> str:
    """Write models, optimizers, schedulers, scaler, generators, loaders and registered objects.

    Returns:
        The directory.

    Raises:
        CheckpointError: on every rank, if any of them failed; what stood before still stands.
    """
    background: Background = accelerator.background
    background.wait()
    gather = accelerator.communicator.gather_object
    group = background.open(accelerator) if not blocking else None
    if not blocking and group is None:
        accelerator.note_once("This backend has no second group of ranks: saving blocks.")
        blocking = True
    accelerator.settle_scale()
    target, trouble = _agreed_target(accelerator, output_dir)
    identity = accelerator.communicator.broadcast_object(secrets.token_hex(6))
    saving = Saving(target, identity)
    if accelerator.saves_here and trouble is None:
        try:
            clean_up(target.parent)
            saving.make()
        except OSError as error:
            trouble = f"{target} cannot be written: {error}"
    _raise_any(gather(trouble), target)
    writer = Writer(saving.path, None if blocking else background.staging)
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
        _write_all(accelerator, writer, safe_serialization, max_shard_size, options)
        facts = _facts(accelerator)
    except BaseException:  # not a failure of one part: an interrupt
        saving.abandon()
        raise
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    finish = _Finish(
        saving,
        writer,
        facts,
        here=accelerator.saves_here,
        node=_node(accelerator),
        per_node=accelerator.project_configuration.save_on_each_node,
        limit=accelerator.project_configuration.total_limit if automatic else None,
        damaged=accelerator.damaged_checkpoints,
    )
    if group is None or blocking:
        finish(gather)
    else:
        if accelerator.device.type != "cpu":
            torch.accelerator.synchronize()  # the copies to host memory
        background.run(partial(finish, group))
    if automatic:
        accelerator.project_configuration.iteration += 1
    return str(target)


class _Finish:
    """The end of a save, on the main thread or beside it: report, commit, learn the verdict."""

    def __init__(
        self,
        saving: Saving,
        writer: Writer,
        facts: dict[str, Any],
        *,
        here: bool,
        node: int,
        per_node: bool,
        limit: int | None,
        damaged: set[str],
    ) -> None:
        self.saving, self.writer, self.facts = saving, writer, facts
        self.here, self.node, self.per_node, self.limit = here, node, per_node, limit
        self.damaged = damaged

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
        self.damaged.discard(str(target))
        if self.here and self.limit is not None:
            _remove_oldest(target, self.limit, self.damaged, self.saving.identity)

    def _commit(self, reports: list[Report]) -> None:
        directory = self.saving.path
        listed: dict[str, Entry] = {}
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


# --- where ----------------------------------------------------------------------------------------


def checkpoints_root(accelerator: Accelerator) -> Path:
    """Return the directory of the numbered checkpoints."""
    project = accelerator.project_dir
    if project is None:
        raise CheckpointError(
            "Automatic checkpoint naming needs a project_dir: Accelerator(project_dir=...)."
        )
    return Path(os.path.realpath(Path(project).expanduser())) / "checkpoints"


def _agreed_target(accelerator: Accelerator, output_dir: Any) -> tuple[Path, str | None]:
    """Return where to save and, as a text, why not; numbers are chosen by rank 0."""
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        if output_dir is None:
            raise CheckpointError(
                "save_state needs an output_dir, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        return target_of(output_dir), None
    root = checkpoints_root(accelerator)
    number, trouble = config.iteration, None
    if accelerator.is_main_process:
        # One that is later would be the newest for ever, and outlive what this run saves.
        later = [
            other
            for other, path in numbered_checkpoints(root)
            if other >= number and _is_whole(path, accelerator.damaged_checkpoints)
        ]
        if later and not accelerator.resumed:
            trouble = (
                f"{root / f'checkpoint_{later[-1]}'} is there already, of an earlier run. Call "
                "load_state() to go on from it, or set "
                f"ProjectConfiguration(iteration={later[-1] + 1}) to number on behind it."
            )
        elif later:
            number = later[-1] + 1
    number, trouble = accelerator.communicator.broadcast_object((number, trouble))
    if number != config.iteration:
        accelerator.note_once(
            f"checkpoint_{number - 1} is later than the one that was loaded and is kept: "
            f"saving goes on with checkpoint_{number}."
        )
        config.iteration = number
    return root / f"checkpoint_{number}", trouble


def _is_whole(directory: Path, damaged: set[str]) -> bool:
    if str(directory) in damaged:
        return False
    try:
        return not problems(directory, read_manifest(directory), contents=False)
    except CheckpointError:
        return not (directory / MANIFEST).exists() and foreign.why_not(directory) == ""


def _remove_oldest(newest: Path, limit: int, damaged: set[str], identity: str) -> None:
    """Keep `limit` checkpoints, now that the new one stands; damaged ones go first."""
    found = [path for _, path in numbered_checkpoints(newest.parent) if path != newest]
    whole = {path: _is_whole(path, damaged) for path in found}
    # What only has the name of a checkpoint is neither counted nor removed.
    earlier = [path for path in found if whole[path] or (path / MANIFEST).exists()]
    earlier.sort(key=whole.__getitem__)
    for path in earlier[: max(len(earlier) - (limit - 1), 0)]:
        try:
            discard(path, identity)
        except OSError as error:
            import warnings

            warnings.warn(f"The old checkpoint {path} cannot be removed: {error}", stacklevel=2)


def _node(accelerator: Accelerator) -> int:
    return accelerator.process_index - accelerator.local_process_index


# --- what -----------------------------------------------------------------------------------------


def _write_all(
    accelerator: Accelerator,
    writer: Writer,
    safe_serialization: bool,
    max_shard_size: int | str,
    options: dict[str, Any],
) -> None:
    """Write everything in a fixed order: what a backend gathers, all ranks gather together."""
    past = accelerator.last_boundary
    if past is None or not past.needed():
        _write_parts(accelerator, writer, safe_serialization, max_shard_size, options, None)
        return
    with past.buffers():
        _write_parts(accelerator, writer, safe_serialization, max_shard_size, options, past)


def _write_parts(
    accelerator: Accelerator,
    writer: Writer,
    safe_serialization: bool,
    max_shard_size: int | str,
    options: dict[str, Any],
    past: Boundary | None,
) -> None:
    here = accelerator.saves_here
    if "checkpoint" not in accelerator.backend.owns:
        _write_models(accelerator, writer, safe_serialization, max_shard_size)
        for index, optimizer in enumerate(accelerator.optimizers):
            name = files.numbered(files.OPTIMIZER, index, ".bin")
            with writer.part(name):
                state = accelerator.hooks.optimizer_state(accelerator, optimizer.optimizer)
                if here:
                    writer.torch(name, state)
                del state
    else:  # the backend writes the models; hooks may add what they like
        for hook in accelerator.save_state_pre_hooks.values():
            with writer.part("a save_state pre hook"):
                hook(list(accelerator.models), [], str(writer.directory))
    for index, scheduler in enumerate(accelerator.schedulers):
        name = files.numbered(files.SCHEDULER, index, ".bin")
        _write_state(writer, name, past.of(scheduler) if past else scheduler, here)
    if accelerator.scaler is not None:
        _write_state(writer, files.SCALER, accelerator.scaler, here)
    for index, obj in enumerate(accelerator.registered_objects):
        name = f"{files.CUSTOM}_{index}.pkl"
        _write_state(writer, name, past.of(obj) if past else obj, here)
    rank = accelerator.process_index
    with writer.part("loaders, generators and counters"):
        writer.torch(f"{files.RNG}_{rank}.pkl", past.own if past else own_state(accelerator))
    with writer.part("gradients"):
        gradients = pending_gradients(accelerator)
        if gradients:
            writer.torch(f"{files.GRADIENTS}_{rank}.bin", gradients)
    with writer.part(f"the backend {accelerator.backend.name!r}"):
        directory = writer.directory / f"backend_{accelerator.backend.name}"
        job = accelerator.hooks.save_state(accelerator, directory, options, writer.puts_off)
        if job is not None:
            writer.later(directory.name, job)
    for key, function, names in accelerator.plugins.implementations("on_save"):
        contributed = writer.directory / key.replace(":", "_")
        with writer.part(key):
            if "directory" in names:
                contributed.mkdir(exist_ok=True)
            accelerator.plugins.call_one(
                "on_save", key, function, names, accelerator=accelerator, directory=contributed
            )


def _write_models(
    accelerator: Accelerator, writer: Writer, safe_serialization: bool, max_shard_size: int | str
) -> None:
    hooks = list(accelerator.save_state_pre_hooks.values())
    models = list(accelerator.models)
    if hooks:
        weights = [accelerator.hooks.model_state(accelerator, model) for model in models]
        before = list(zip(models, weights, strict=True))
        for hook in hooks:
            with writer.part("a save_state pre hook"):
                hook(models, weights, str(writer.directory))  # may take off either list
        taken = [w for model, w in before if not any(model is one for one in models)]
        states = iter([w for w in weights if not any(w is one for one in taken)])
    else:  # one at a time: a backend may have to gather it
        states = (accelerator.hooks.model_state(accelerator, model) for model in models)
    for index, state in enumerate(states):
        stem = files.numbered(files.MODEL, index, "")
        if accelerator.saves_here:
            with writer.part(stem):
                writer.weights(
                    state, stem=stem, max_shard_size=max_shard_size, safe=safe_serialization
                )


def _write_state(writer: Writer, name: str, obj: Any, here: bool) -> None:
    """Write the `state_dict` of an object; every rank asks for it, as it may talk to the others."""
    with writer.part(f"{name} ({type(obj).__name__}.state_dict)"):
        state = obj.state_dict()
        if here:
            writer.torch(name, state)


def own_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return the positions, generators and counters of this rank."""
    loaders = [
        loader.state_dict() if hasattr(loader, "state_dict") else None
        for loader in accelerator.loaders
    ]
    return {
        "step": accelerator.step,
        **rng.capture(_devices(accelerator)),
        MARK: {
            "cycle": accelerator.cycle_state(),
            "loaders": loaders,
            "trackers": accelerator.tracker_runs(),
        },
    }


def _devices(accelerator: Accelerator) -> list[torch.device]:
    used = {accelerator.device}
    used.update(p.device for model in accelerator.models for p in model.parameters())
    return sorted(used, key=str)


def pending_gradients(accelerator: Accelerator) -> dict[int, dict[str, torch.Tensor]]:
    """Return the gradients that wait for an optimizer step, by model and parameter name."""
    waiting = accelerator.waiting_parameters()
    given = "checkpoint" in accelerator.backend.owns or accelerator.last_boundary is not None
    if not waiting or given:
        return {}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for index, model in enumerate(accelerator.models):
        for name, parameter in accelerator.inner_model(model).named_parameters():
            if parameter.grad is not None and id(parameter) in waiting:
                found.setdefault(index, {})[name] = parameter.grad
    return found


def _facts(accelerator: Accelerator) -> dict[str, Any]:
    mesh = accelerator.torch_device_mesh
    epochs = [int(getattr(loader, "iteration", 0)) for loader in accelerator.loaders]
    return {
        "saved_at": time.time(),
        "step": max((optimizer.steps_taken for optimizer in accelerator.optimizers), default=0),
        "epoch": max(epochs, default=0),
        "world_size": accelerator.num_processes,
        "mesh": None
        if mesh is None
        else {str(name): int(mesh[name].size()) for name in (mesh.mesh_dim_names or ())},
        "mixed_precision": accelerator.mixed_precision,
        "written_by": {
            "accelerate-core": importlib.metadata.version("accelerate-core"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "plugins": [
                {
                    "kind": record.kind,
                    "name": record.name,
                    "distribution": record.distribution,
                    "version": record.version,
                }
                for record, _, _ in accelerator.plugins.plugins
            ],
        },
        "optimizers": [type(optimizer.optimizer).__name__ for optimizer in accelerator.optimizers],
        "objects": {
            "models": len(accelerator.models),
            "optimizers": len(accelerator.optimizers),
            "schedulers": len(accelerator.schedulers),
            "loaders": len(accelerator.loaders),
            "registered": len(accelerator.registered_objects),
        },
    }
