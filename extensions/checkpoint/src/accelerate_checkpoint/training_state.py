"""What there is to save of a run: captured here, and given back here."""

from __future__ import annotations

import importlib.metadata
import io
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import rng_state
from accelerate_core.plugin import (
    Backend,
    CheckpointError,
    CommunicatorView,
    Contribution,
    ProjectConfiguration,
    RunParts,
    SharedHooksView,
)

#: Under this key a rank's state has what no other library would read.
OWN = "accelerate_core"


class TrainingState:
    """All that there is to save of a run, and to go on from.

    Methods that gather are called by all ranks in the same order.

    Attributes:
        process: ranks, device, store and timeout of this process.
        collectives: the world; `duplicate()` returns one for a thread, or None where there is no
            second group.
        project: `ProjectConfiguration`: directories, naming and retention.
        backend: name of the backend.
        owns_format: whether the backend writes and reads models and optimizers itself.
        events: the loop's slot `loop_body_end`, and what it has counted.
        models, schedulers, registered: objects in the order of their preparing.
        scaler: the gradient scaler or None.
    """

    def __init__(self, run: RunParts) -> None:
        accelerator = run.accelerator
        self._accelerator = accelerator
        self._tokens = run.tokens
        self._restore_positions = run.restore_positions
        self._project = run.project
        self._plugins = run.plugins
        self._shared_hooks = run.shared_hooks
        self._tracking = run.tracking
        hooks = accelerator.hooks
        self.process = run.process
        self.collectives: CommunicatorView = accelerator.communicator
        self.backend = accelerator.backend.name
        #: What `supports["gradients"]` of the backend says: True, "same_layout" or False.
        self.gives_gradients: Any = accelerator.backend.supports.get("gradients", True)
        self.events = accelerator.gradient_state
        self.models = accelerator.models
        self.schedulers = accelerator.schedulers
        self.registered = run.registered
        self.scaler = accelerator.scaler
        # What the backend alone answers: `(model, state, strict)`, `(optimizer)`, `(optimizer,
        # state)`, `(directory, options, later)` -> None or a function that writes the rest later,
        # `(directory, options)`.
        self.load_model_state = hooks.load_model_state
        self.optimizer_state = hooks.optimizer_state
        self.load_optimizer_state = hooks.load_optimizer_state
        self.backend_save = hooks.save_state
        self.backend_load = hooks.load_state
        self.save_hooks = run.save_hooks.values
        self.load_hooks = run.load_hooks.values
        #: Applies a scale update that waits for other optimizers.
        self.update_scale = run.update_scale
        #: The model without the backend's wrapping and `torch.compile`'s.
        self.inner = run.inner_model
        #: What `save_model` writes: the whole weights, where they are needed.
        self.whole_model_state = run.whole_state
        #: Warns, once per text, on the main process.
        self.warn_once = accelerator.warn_once
        #: Ends the run; called by preemption once its save stands.
        self.end_training = run.end_training

    @property
    def project(self) -> ProjectConfiguration:
        """The `ProjectConfiguration` in force, which a script may replace."""
        return self._project()

    @property
    def owns_format(self) -> bool:
        """Whether the backend writes and reads models and optimizers itself, as its settings say now."""
        return "checkpoint" in self._accelerator.backend.owns

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers as they were before `prepare` wrapped them."""
        return [prepared.optimizer for prepared in self._accelerator.optimizers]

    @property
    def saves_here(self) -> bool:
        """Whether this rank writes what is written once (per machine, if so configured)."""
        per_machine, process = self.project.save_on_each_node, self.process
        return (process.local_process_index if per_machine else process.process_index) == 0

    @property
    def whole_on_main(self) -> bool:
        """Whether the main process holds all that is written once, and asks nobody for it."""
        backend: Any = type(self._accelerator.backend)
        hooks = ("model_state", "optimizer_state", "save_state")
        return all(getattr(backend, hook) is getattr(Backend, hook) for hook in hooks)

    def is_sharded(self, model: torch.nn.Module) -> bool:
        """Whether a model's parameters are here in part: as DTensors, or empty as ZeRO-3 has them."""
        parameters = self.inner(model).parameters()
        return any(hasattr(one, "placements") or not one.numel() for one in parameters)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this process save without the others."""
        every = self.collectives
        self.collectives = every.alone()
        try:
            yield
        finally:
            self.collectives = every

    # --- what the backend and the plugins keep ------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state as the backend gives it."""
        state = self._accelerator.hooks.model_state(model)
        return self._accelerator.precision.plain_state(self.inner(model), state)

    def contributors(self) -> list[Contributor]:
        """Return the plugins that have `on_save` or `on_load`, by name."""
        found: dict[str, Contributor] = {}
        for hook in ("on_save", "on_load"):
            for one in self._shared_hooks.implementations(hook):
                contributor = found.setdefault(one.key, Contributor(one.key, self._shared_hooks))
                contributor.hooks[hook] = one
        return [one for _, one in sorted(found.items())]

    # --- what is this rank's own --------------------------------------------------------------

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's own: step, generators, loaders, cycle, runs of trackers.

        Plain data and tensors. Generators and `step` have Accelerate's keys, all else is under
        "accelerate_core".
        """
        accelerator = self._accelerator
        devices = {accelerator.device}
        devices.update(p.device for model in self.models for p in model.parameters())
        loaders = [
            loader.state_dict() if hasattr(loader, "state_dict") else None
            for loader in self._accelerator.loaders
        ]
        return {
            "step": self._accelerator.step,
            **rng_state.capture_rng_state(sorted(devices, key=str)),
            OWN: {
                "cycle": self._cycle(),
                "loaders": loaders,
                "trackers": self._tracking.state_dict(),
                "generators": dict(accelerator.hooks.rng_state()),
            },
        }

    def unsaved_loader(self, own: Mapping[str, Any]) -> str:
        """Name the loader whose part of `rank_state` cannot be saved, "" if it is none of them."""
        states = own.get(OWN, {}).get("loaders", ())
        for index, (loader, state) in enumerate(
            zip(self._accelerator.loaders, states, strict=False)
        ):
            try:
                torch.save(state, io.BytesIO())
            except Exception:
                kind = type(getattr(loader, "base", loader))  # the loader inside, not our wrapper
                return f"state_dict of loader {index} ({kind.__module__}.{kind.__qualname__})"
        return ""

    def load_rank_state(
        self,
        states: Mapping[int, Mapping[str, Any]],
        saved_by: int,
        gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]],
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        """Go on from `rank_state`; called last, since the generators are set here.

        Args:
            states: by the rank that saved them: rank 0's and this one's; those of all ranks if
                the layout has changed. One of Accelerate's has step and generators only.
            saved_by: how many ranks saved.
            gradients: this rank's `pending_gradients`, or those of all ranks likewise; read one
                after the other.
            mesh: the mesh of the ranks that saved, as in `facts`; None if it is not known.
        """
        same_layout = self.has_layout(saved_by, mesh)
        accelerator = self._accelerator
        rank, count = self.process.process_index, self.process.num_processes
        first, own = states[0], states.get(rank)
        if OWN not in first:
            self._accelerator.step = int(first.get("step", 0))
        else:
            if saved_by != count:
                self.warn_once(
                    f"The checkpoint was saved by {saved_by} process(es) and is loaded by {count}: "
                    "the position in the data is carried over; ranks that were not there keep "
                    "their own random states."
                )
            self._load_positions(first[OWN]["loaders"])
            cycles = [one[OWN]["cycle"] for _, one in sorted(states.items())]
            mine = first if own is None else own
            self._load_cycle(mine[OWN]["cycle"], None if same_layout else cycles)
            if own is not None:  # a rank that was not there has no runs to go on in
                runs = own[OWN].get("trackers") or {}
                self._tracking.load_state_dict(runs)
        self._load_gradients(gradients, None if same_layout else saved_by)
        if own is None:
            return
        generators = own.get(OWN, {}).get("generators")
        if generators:
            accelerator.hooks.load_rng_state(generators)
        missed = rng_state.restore_rng_state(own)
        if missed:
            accelerator.warn_once(
                f"No random state could be set on rank {rank} for {', '.join(missed)}.",
                every_rank=True,
            )

    def _load_positions(self, states: Sequence[Any]) -> None:
        """Put the loaders where they stood; one of other data stays at its beginning."""
        if not self._restore_positions():
            return
        loaders = self._accelerator.loaders
        if len(states) != len(loaders):
            self.warn_once(
                f"The checkpoint has the positions of {len(states)} loaders, and {len(loaders)} "
                "are prepared here: they are matched in the order of their preparing."
            )
        for index, (loader, state) in enumerate(zip(loaders, states, strict=False)):
            if state is None or not hasattr(loader, "load_state_dict"):
                continue
            was, now = state.get("dataset_size"), getattr(loader, "dataset_size", None)
            if was is not None and was != now:
                self.warn_once(
                    f"Loader {index} had {was} samples when the checkpoint was saved, and has "
                    f"{now} here: its position is not taken over. Loaders are matched in the "
                    "order of their preparing."
                )
                continue
            loader.load_state_dict(state)

    # --- the accumulation cycle that has begun ------------------------------------------------

    def waiting(self) -> list[Any]:
        """Return the optimizers that have not stepped since the last backward."""
        events = self.events
        return [
            optimizer
            for optimizer in self._accelerator.optimizers
            if not events.sync_gradients or optimizer.seen_backwards < events.backwards
        ]

    def pending_gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the gradients that wait for an optimizer step, by model and the backend's names."""
        accelerator = self._accelerator
        found: dict[int, dict[str, torch.Tensor]] = {}
        waiting = self.waiting()
        if not waiting:
            return found
        parameters = [
            parameter
            for optimizer in waiting
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        for index, model in enumerate(self.models):
            named = accelerator.hooks.pending_gradients(model, parameters)
            if named:
                found[index] = dict(named)
        return found

    def check_gradients_can_be_saved(self) -> None:
        """Refuse a save in the middle of a cycle whose gradients the backend cannot give.

        Raises:
            CheckpointError: there are such gradients.
        """
        if self.gives_gradients is not False or not self.waiting():
            return
        raise CheckpointError(
            f"save_state was called in the middle of an accumulation cycle, and the backend "
            f"{self.backend!r} cannot save the gradients of one. Save after the optimizer's step, "
            "where accelerator.sync_gradients is True."
        )

    def check_gradients_fit(
        self, directory: str, saved_by: int, mesh: Mapping[str, int] | None
    ) -> None:
        """Refuse a checkpoint with gradients that the backend cannot move to this layout.

        Args:
            directory: of the checkpoint, for the message.
            saved_by: how many ranks saved it.
            mesh: the mesh they had, as in `facts`.

        Raises:
            CheckpointError: the layout has changed.
        """
        if self.gives_gradients != "same_layout" or self.has_layout(saved_by, mesh):
            return
        there = _layout(saved_by, mesh)
        here = _layout(self.process.num_processes, self.mesh_sizes())
        raise CheckpointError(
            f"{directory} was saved in the middle of an accumulation cycle on {there}, and the "
            f"backend {self.backend!r} cannot move its gradients to {here}. Load it on the layout "
            "that saved it, or load a checkpoint saved after an optimizer step."
        )

    def has_layout(self, ranks: int, mesh: Mapping[str, int] | None) -> bool:
        """Tell whether this run has as many ranks, on the same mesh; None is an unknown mesh."""
        if ranks != self.process.num_processes:
            return False
        here = self.mesh_sizes()
        if mesh is None or here is None:
            return True
        # A dimension of one rank is the same as none.
        wide = [{name: size for name, size in one.items() if size > 1} for one in (mesh, here)]
        return wide[0] == wide[1]

    def _load_gradients(
        self, gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]], saved_by: int | None
    ) -> None:
        """Put gradients back; after a change of layout their mean over the ranks stays the same.

        Where items are counted it is the sum that does.

        Args:
            saved_by: how many ranks saved; None if this rank gets its own back.
        """
        factor = None
        if saved_by is not None:
            _, loss_ranks = self._accelerator.hooks.loss_shard()
            factor = 1.0 / (loss_ranks if self._tokens.open else saved_by)
        for model in self.models:
            for parameter in self.inner(model).parameters():
                parameter.grad = None
        accelerator = self._accelerator
        for found in gradients:
            self.events.backwards += 1  # they wait for a step, here too
            for index, named in found.items():
                model = self.models[index]
                accelerator.hooks.load_pending_gradients(model, named, factor)

    def _cycle(self) -> dict[str, Any]:
        return {
            "step": self._accelerator.step,
            "sync_gradients": self.events.sync_gradients,
            "items": self._tokens.state_dict(),
            "steps_taken": [optimizer.steps_taken for optimizer in self._accelerator.optimizers],
        }

    def _load_cycle(
        self, state: Mapping[str, Any], all_ranks: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Go on in the cycle; `all_ranks`: the states of those that saved on another layout."""
        self._accelerator.step = int(state["step"])
        self.events.sync_gradients = bool(state["sync_gradients"])
        items = dict(state["items"])
        if all_ranks is not None:
            counts = [float(one["items"]["local"]) for one in all_ranks]
            index, _ = self._accelerator.hooks.loss_shard()
            items["local"] = sum(counts) if index == 0 else 0
        self._tokens.load_state_dict(items)
        self.events.backwards += 1
        for optimizer, steps in zip(
            self._accelerator.optimizers, state["steps_taken"], strict=False
        ):
            optimizer.steps_taken = steps
        for optimizer in self._accelerator.optimizers:
            optimizer.seen_backwards = self.events.backwards

    def mesh_sizes(self) -> dict[str, int] | None:
        """Return the size of each dimension of the mesh, None without one."""
        mesh = self._accelerator.torch_device_mesh
        if mesh is None:
            return None
        return {str(name): int(mesh[name].size()) for name in (mesh.mesh_dim_names or ())}

    # --- what a reader of the checkpoint is told ----------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return step, epoch, world, mesh, precision, plugins, versions and numbers of objects."""
        accelerator = self._accelerator
        epochs = [int(getattr(loader, "iteration", 0)) for loader in self._accelerator.loaders]
        steps = [optimizer.steps_taken for optimizer in self._accelerator.optimizers]
        return {
            "step": max(steps, default=0),
            "epoch": max(epochs, default=0),
            "world_size": self.collectives.size,
            "mesh": self.mesh_sizes(),
            "mixed_precision": accelerator.mixed_precision,
            "written_by": {
                "accelerate-core": importlib.metadata.version("accelerate-core"),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "plugins": [dict(plugin) for plugin in self._plugins],
            },
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "objects": {
                "models": len(self.models),
                "optimizers": len(self._accelerator.optimizers),
                "schedulers": len(self.schedulers),
                "loaders": len(self._accelerator.loaders),
                "registered": len(self.registered),
            },
        }


def _layout(ranks: int, mesh: Mapping[str, int] | None) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in (mesh or {}).items() if size > 1)
    return f"{ranks} process(es)" + (f" ({sizes})" if sizes else "")


@dataclass
class Contributor:
    """One plugin's `on_save` and `on_load`, whichever it has."""

    key: str
    shared_hooks: SharedHooksView
    #: Its implementation of each hook.
    hooks: dict[str, Contribution] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        if "on_save" in self.hooks and "directory" in self.hooks["on_save"].names:
            directory.mkdir(exist_ok=True)
        self._call("on_save", directory)

    def load(self, directory: Path) -> None:
        self._call("on_load", directory)

    def _call(self, hook: str, directory: Path) -> None:
        if hook in self.hooks:
            self.shared_hooks.call(self.hooks[hook], directory=directory)
