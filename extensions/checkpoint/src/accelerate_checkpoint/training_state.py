"""What there is to save of a run: captured here, and given back here."""

from __future__ import annotations

import importlib.metadata
import io
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import rng_state
from accelerate_core import Backend, GradientState
from accelerate_core.contract.parts import RunParts

#: Under this key a rank's state has what no other library would read.
OWN = "accelerate_core"
_OF_PLUGIN = ("kind", "name", "distribution", "version")


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
        gives_gradients: whether the gradients of a cycle that has begun can be read.
        events: the loop's slots `before_cycle` and `loop_body_end`, and what it has counted.
        models, schedulers, registered: objects in the order of their preparing.
        scaler: the gradient scaler or None.
    """

    def __init__(self, run: RunParts) -> None:
        self._accelerator = accelerator = run.accelerator
        self._training = training = run.training
        self._prepared = prepared = run.prepared
        self._tracking = run.tracking
        hooks, saving = accelerator.hooks, run.saving
        self.process = run.process
        self.collectives: Any = accelerator.communicator
        self._saving = saving
        self.backend = accelerator.backend.name
        self.gives_gradients = bool(accelerator.backend.supports.get("gradients", True))
        self.events: GradientState = training.state
        self.models: Sequence[torch.nn.Module] = prepared.models
        self.schedulers: Sequence[Any] = prepared.schedulers
        self.registered: Sequence[Any] = saving.registered
        self.scaler: Any | None = accelerator.scaler
        # What the backend alone answers: `(model, state, strict)`, `(optimizer)`, `(optimizer,
        # state)`, `(directory, options, later)` -> None or a function that writes the rest later,
        # `(directory, options)`.
        self.load_model_state = partial(hooks.load_model_state, accelerator)
        self.optimizer_state = partial(hooks.optimizer_state, accelerator)
        self.load_optimizer_state = partial(hooks.load_optimizer_state, accelerator)
        self.backend_save = partial(hooks.save_state, accelerator)
        self.backend_load = partial(hooks.load_state, accelerator)
        self.save_hooks = saving.save_hooks.values
        self.load_hooks = saving.load_hooks.values
        #: Finish what the last step left open, such as the loss scale's update.
        self.settle = training.settle
        #: The model without the backend's wrapping and `torch.compile`'s.
        self.inner = prepared.inner_model
        #: What `save_model` writes: the whole weights, where they are needed.
        self.whole_model_state = prepared.get_state_dict
        #: Warns, once per text, on the main process.
        self.note_once = accelerator.note_once
        #: Ends the run; called by preemption once its save stands.
        self.end_training = run.end_training

    @property
    def project(self) -> Any:
        """The `ProjectConfiguration` in force, which a script may replace."""
        return self._saving.project

    @property
    def owns_format(self) -> bool:
        """Whether the backend writes and reads models and optimizers itself, as its settings say now."""
        return "checkpoint" in self._accelerator.backend.owns

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers as they were before `prepare` wrapped them."""
        return [prepared.optimizer for prepared in self._prepared.optimizers]

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
        self.collectives = replace(every, rank=0, size=1)
        try:
            yield
        finally:
            self.collectives = every

    # --- what the backend and the plugins keep ------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state as the backend gives it."""
        state: dict[str, Any] = self._accelerator.hooks.model_state(self._accelerator, model)
        plain: dict[str, Any] = self._accelerator.precision.plain_state(self.inner(model), state)
        return plain

    def contributors(self) -> list[Contributor]:
        """Return the plugins that have `on_save` or `on_load`, by name."""
        found: dict[str, Contributor] = {}
        for hook in ("on_save", "on_load"):
            for one in self._prepared.plugins.implementations(hook):
                contributor = found.setdefault(one.key, Contributor(one.key, self._accelerator))
                contributor.hooks[hook] = one
        return [one for _, one in sorted(found.items())]

    # --- what is this rank's own --------------------------------------------------------------

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's own: step, generators, loaders, cycle, runs of trackers.

        Plain data and tensors. Generators and `step` have the peer's keys, all else is under
        "accelerate_core".
        """
        accelerator = self._accelerator
        devices = {accelerator.device}
        devices.update(p.device for model in self.models for p in model.parameters())
        loaders = [
            loader.state_dict() if hasattr(loader, "state_dict") else None
            for loader in self._prepared.loaders
        ]
        return {
            "step": self._training.step,
            **rng_state.capture(sorted(devices, key=str)),
            OWN: {
                "cycle": self._cycle(),
                "loaders": loaders,
                "trackers": self._tracking.state_dict(),
                "generators": dict(accelerator.hooks.rng_state(accelerator)),
            },
        }

    def unsaved_loader(self, own: Mapping[str, Any]) -> str:
        """Name the loader whose part of `rank_state` cannot be saved, "" if it is none of them."""
        states = own.get(OWN, {}).get("loaders", ())
        for index, (loader, state) in enumerate(zip(self._prepared.loaders, states, strict=False)):
            try:
                torch.save(state, io.BytesIO())
            except Exception:
                kind = loader.__class__  # of one that a plugin made, the plugin's own
                return f"state_dict of loader {index} ({kind.__module__}.{kind.__qualname__})"
        return ""

    def load_rank_state(
        self,
        states: Mapping[int, Mapping[str, Any]],
        saved_by: int,
        gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]],
    ) -> None:
        """Go on from `rank_state`; called last, since the generators are set here.

        Args:
            states: by the rank that saved them: rank 0's and this one's; those of all ranks if
                they were more or fewer than now. One of the peer's has step and generators only.
            saved_by: how many ranks saved.
            gradients: this rank's `pending_gradients`, or those of all ranks likewise; read one
                after the other.
        """
        accelerator = self._accelerator
        rank, count = self.process.process_index, self.process.num_processes
        first, own = states[0], states.get(rank)
        if OWN not in first:
            self._training.step = int(first.get("step", 0))
        else:
            if saved_by != count:
                self.note_once(
                    f"The checkpoint was saved by {saved_by} process(es) and is loaded by {count}: "
                    "the position in the data is carried over; ranks that were not there keep "
                    "their own random states."
                )
            self._load_positions(first[OWN]["loaders"])
            cycles = [one[OWN]["cycle"] for _, one in sorted(states.items())]
            mine = (first if own is None else own)[OWN]["cycle"]
            self._load_cycle(mine, None if saved_by == count else cycles)
            if own is not None:  # a rank that was not there has no runs to go on in
                runs = own[OWN].get("trackers") or {}
                self._tracking.load_state_dict(runs)
        self._load_gradients(gradients, saved_by)
        if own is None:
            return
        if generators := own.get(OWN, {}).get("generators"):
            accelerator.hooks.load_rng_state(accelerator, generators)
        if missed := rng_state.restore(own):
            accelerator.note_once(
                f"No random state could be set on rank {rank} for {', '.join(missed)}.",
                every_rank=True,
            )

    def _load_positions(self, states: Sequence[Any]) -> None:
        """Put the loaders where they stood; one of other data stays at its beginning."""
        if self._prepared.dataloader_config.restore_positions is False:
            return
        loaders = self._prepared.loaders
        if len(states) != len(loaders):
            self.note_once(
                f"The checkpoint has the positions of {len(states)} loaders, and {len(loaders)} "
                "are prepared here: they are matched in the order of their preparing."
            )
        for index, (loader, state) in enumerate(zip(loaders, states, strict=False)):
            if state is None or not hasattr(loader, "load_state_dict"):
                continue
            was, now = state.get("dataset_size"), getattr(loader, "dataset_size", None)
            if was is not None and was != now:
                self.note_once(
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
            for optimizer in self._prepared.optimizers
            if not events.sync_gradients or optimizer.seen_backwards < events.backwards
        ]

    def pending_gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the gradients that wait for an optimizer step, by model and parameter name."""
        if self.owns_format or not self.gives_gradients:
            return {}
        waiting = {
            id(parameter)
            for optimizer in self.waiting()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        found: dict[int, dict[str, torch.Tensor]] = {}
        for index, model in enumerate(self.models if waiting else ()):
            for name, parameter in self.inner(model).named_parameters():
                if parameter.grad is not None and id(parameter) in waiting:
                    found.setdefault(index, {})[name] = parameter.grad
        return found

    def _load_gradients(
        self, gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]], saved_by: int
    ) -> None:
        """Put gradients back; of other ranks' the mean over the ranks stays the same.

        Where items are counted it is the sum that does.
        """
        count = self.process.num_processes
        others = count if self._training.tokens.open else saved_by
        factor = 1.0 if saved_by == count else 1.0 / others
        models = [self.inner(model) for model in self.models]
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None
        for found in gradients:
            self.events.backwards += 1  # they wait for a step, here too
            for index, named in found.items():
                for name, gradient in named.items():
                    parameter = models[index].get_parameter(name)
                    value = gradient.to(parameter.device)
                    value = value if factor == 1.0 else value * factor
                    if parameter.grad is None:
                        parameter.grad = value
                    else:
                        parameter.grad += value

    def _cycle(self) -> dict[str, Any]:
        return {
            "step": self._training.step,
            "sync_gradients": self.events.sync_gradients,
            "items": self._training.tokens.state_dict(),
            "steps_taken": [optimizer.steps_taken for optimizer in self._prepared.optimizers],
        }

    def _load_cycle(
        self, state: Mapping[str, Any], all_ranks: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Go on in the cycle; `all_ranks`: the states of those that saved, if not as many as now."""
        self._training.step = int(state["step"])
        self.events.sync_gradients = bool(state["sync_gradients"])
        items = dict(state["items"])
        if all_ranks is not None:
            counts = [float(one["items"]["local"]) for one in all_ranks]
            items["local"] = sum(counts) if self.process.process_index == 0 else 0
        self._training.tokens.load_state_dict(items)
        self.events.backwards += 1
        for optimizer, steps in zip(self._prepared.optimizers, state["steps_taken"], strict=False):
            optimizer.steps_taken = steps
        for optimizer in self._prepared.optimizers:
            optimizer.seen_backwards = self.events.backwards

    # --- what a reader of the checkpoint is told ----------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return step, epoch, world, mesh, precision, plugins, versions and numbers of objects."""
        accelerator = self._accelerator
        mesh = accelerator.torch_device_mesh
        epochs = [int(getattr(loader, "iteration", 0)) for loader in self._prepared.loaders]
        steps = [optimizer.steps_taken for optimizer in self._prepared.optimizers]
        return {
            "step": max(steps, default=0),
            "epoch": max(epochs, default=0),
            "world_size": self.collectives.size,
            "mesh": None
            if mesh is None
            else {str(name): int(mesh[name].size()) for name in (mesh.mesh_dim_names or ())},
            "mixed_precision": accelerator.mixed_precision,
            "written_by": {
                "accelerate-core": importlib.metadata.version("accelerate-core"),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "plugins": [
                    {name: getattr(record, name) for name in _OF_PLUGIN}
                    for record, _, _ in self._prepared.plugins.plugins
                ],
            },
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "objects": {
                "models": len(self.models),
                "optimizers": len(self._prepared.optimizers),
                "schedulers": len(self.schedulers),
                "loaders": len(self._prepared.loaders),
                "registered": len(self.registered),
            },
        }


@dataclass
class Contributor:
    """One plugin's `on_save` and `on_load`, whichever it has."""

    key: str
    accelerator: Any
    #: Per hook its implementation, called with the arguments by name.
    hooks: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        if "on_save" in self.hooks and "directory" in self.hooks["on_save"].names:
            directory.mkdir(exist_ok=True)
        self._call("on_save", directory)

    def load(self, directory: Path) -> None:
        self._call("on_load", directory)

    def _call(self, hook: str, directory: Path) -> None:
        if hook in self.hooks:
            self.hooks[hook](accelerator=self.accelerator, directory=directory)
