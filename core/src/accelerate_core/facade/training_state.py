"""What a checkpointer is handed of one Accelerator: captured here, and given back here."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.builtin import rng_state

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator
    from accelerate_core.contract.parts import Contributor, LoopEvents, Stateful
    from accelerate_core.contract.topology import Process


#: Under this key a rank's state has what no other library would read.
OWN = "accelerate_core"


class RunState:
    """The `TrainingState` of one Accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._hooks = accelerator.hooks
        self.process: Process = accelerator._process
        self.collectives: Any = accelerator.communicator
        self.backend = accelerator.backend.name
        self.owns_format = "checkpoint" in accelerator.backend.owns
        self.gives_gradients = bool(accelerator.backend.supports.get("gradients", True))
        self.events: LoopEvents = accelerator.gradient_state
        self.models: Sequence[torch.nn.Module] = accelerator.models
        self.schedulers: Sequence[Any] = accelerator.schedulers
        self.registered: Sequence[Stateful] = accelerator.registered_objects
        self.scaler: Stateful | None = accelerator.scaler
        self.settle = accelerator.settle_scale
        self.inner = accelerator.inner_model
        self.whole_model_state = accelerator.get_state_dict
        self.note_once = accelerator.note_once
        self.end_training = accelerator.end_training

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers as they were before `prepare` wrapped them."""
        return [prepared.optimizer for prepared in self._accelerator.optimizers]

    @property
    def project(self) -> Any:
        """Directories, naming and retention."""
        return self._accelerator.project_configuration

    @property
    def saves_here(self) -> bool:
        """Whether this rank writes what is written once."""
        return self._accelerator.saves_here

    # --- what the backend and the plugins keep ------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state as the backend gives it."""
        state: dict[str, Any] = self._hooks.model_state(self._accelerator, model)
        state = self._accelerator.precision.plain_state(self.inner(model), state)
        return state

    def load_model_state(
        self, model: torch.nn.Module, state: Mapping[str, Any], strict: bool
    ) -> None:
        """Load what `model_state` returned."""
        self._hooks.load_model_state(self._accelerator, model, state, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state as the backend gives it."""
        state: dict[str, Any] = self._hooks.optimizer_state(self._accelerator, optimizer)
        return state

    def load_optimizer_state(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` returned."""
        self._hooks.load_optimizer_state(self._accelerator, optimizer, state)

    def backend_save(
        self, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Let the backend write what is its own."""
        job: Callable[[], None] | None = self._hooks.save_state(
            self._accelerator, directory, options, later
        )
        return job

    def backend_load(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Let the backend read what is its own."""
        self._hooks.load_state(self._accelerator, directory, options)

    def contributors(self) -> Sequence[Contributor]:
        """Return the plugins that have `on_save` or `on_load`, by name."""
        found: dict[str, _Contributor] = {}
        for hook in ("on_save", "on_load"):
            for key, function, names in self._accelerator.plugins.implementations(hook):
                one = found.setdefault(key, _Contributor(key, self._accelerator))
                one.hooks[hook] = function, names
        return [one for _, one in sorted(found.items())]

    def save_hooks(self) -> list[Callable[..., None]]:
        """Return what `register_save_state_pre_hook` was given."""
        return list(self._accelerator.save_state_pre_hooks.values())

    def load_hooks(self) -> list[Callable[..., None]]:
        """Return what `register_load_state_pre_hook` was given."""
        return list(self._accelerator.load_state_pre_hooks.values())

    # --- what is this rank's own --------------------------------------------------------------

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's step, generators, loaders, cycle and runs of trackers."""
        accelerator = self._accelerator
        devices = {accelerator.device}
        devices.update(p.device for model in self.models for p in model.parameters())
        loaders = [
            loader.state_dict() if hasattr(loader, "state_dict") else None
            for loader in accelerator.loaders
        ]
        return {
            "step": accelerator.step,
            **rng_state.capture(sorted(devices, key=str)),
            OWN: {
                "cycle": self._cycle(),
                "loaders": loaders,
                "trackers": accelerator._tracking.state_dict(),
                "generators": dict(accelerator.hooks.rng_state(accelerator)),
            },
        }

    def load_rank_state(
        self,
        states: Mapping[int, Mapping[str, Any]],
        saved_by: int,
        gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]],
    ) -> None:
        """Go on from `rank_state` and `pending_gradients`, of this rank or of others."""
        accelerator = self._accelerator
        rank, count = self.process.process_index, self.process.num_processes
        first, own = states[0], states.get(rank)
        if OWN not in first:
            accelerator.step = int(first.get("step", 0))
        else:
            if saved_by != count:
                self.note_once(
                    f"The checkpoint was saved by {saved_by} processes and is loaded by {count}: "
                    "the position in the data is carried over; ranks that were not there keep "
                    "their own random states."
                )
            self._load_positions(first[OWN]["loaders"])
            cycles = [one[OWN]["cycle"] for _, one in sorted(states.items())]
            mine = (first if own is None else own)[OWN]["cycle"]
            self._load_cycle(mine, None if saved_by == count else cycles)
            if own is not None:  # a rank that was not there has no runs to go on in
                runs = own[OWN].get("trackers") or {}
                accelerator._tracking.load_state_dict(runs)
        self._load_gradients(gradients, saved_by)
        if own is not None and (generators := own.get(OWN, {}).get("generators")):
            accelerator.hooks.load_rng_state(accelerator, generators)
        if own is not None and (missed := rng_state.restore(own)):
            accelerator.note_once(
                f"No random state could be set on rank {rank} for {', '.join(missed)}.",
                every_rank=True,
            )

    def _load_positions(self, states: Sequence[Any]) -> None:
        """Put the loaders where they stood; one of other data stays at its beginning."""
        loaders = self._accelerator.loaders
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

    def waits_for_step(self) -> bool:
        """Whether an optimizer has not stepped since the last backward."""
        return bool(self._waiting())

    def _waiting(self) -> list[Any]:
        events = self.events
        return [
            optimizer
            for optimizer in self._accelerator.optimizers
            if not events.sync_gradients or optimizer.seen_backwards < events.backwards
        ]

    def pending_gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the gradients that wait for an optimizer step, by model and parameter name."""
        if self.owns_format or not self.gives_gradients:
            return {}
        waiting = {
            id(parameter)
            for optimizer in self._waiting()
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
        others = count if self._accelerator._items.open else saved_by
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
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "sync_gradients": accelerator.sync_gradients,
            "items": accelerator._items.state_dict(),
            "steps_taken": [optimizer.steps_taken for optimizer in accelerator.optimizers],
        }

    def _load_cycle(
        self, state: Mapping[str, Any], all_ranks: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Go on in the cycle; `all_ranks`: the states of those that saved, if not as many as now."""
        accelerator = self._accelerator
        accelerator.step = int(state["step"])
        accelerator.sync_gradients = bool(state["sync_gradients"])
        items = dict(state["items"])
        if all_ranks is not None:
            counts = [float(one["items"]["local"]) for one in all_ranks]
            items["local"] = sum(counts) if accelerator.is_main_process else 0
        accelerator._items.load_state_dict(items)
        self.events.backwards += 1
        for optimizer, steps in zip(accelerator.optimizers, state["steps_taken"], strict=False):
            optimizer.steps_taken = steps
        for optimizer in accelerator.optimizers:
            optimizer.seen_backwards = self.events.backwards

    # --- what a reader of the checkpoint is told ----------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return step, epoch, world, mesh, precision, plugins, versions and numbers of objects."""
        accelerator = self._accelerator
        mesh = accelerator.torch_device_mesh
        epochs = [int(getattr(loader, "iteration", 0)) for loader in accelerator.loaders]
        return {
            "step": max((optimizer.steps_taken for optimizer in accelerator.optimizers), default=0),
            "epoch": max(epochs, default=0),
            "world_size": self.process.num_processes,
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
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "objects": {
                "models": len(self.models),
                "optimizers": len(accelerator.optimizers),
                "schedulers": len(self.schedulers),
                "loaders": len(accelerator.loaders),
                "registered": len(self.registered),
            },
        }


@dataclass
class _Contributor:
    """One plugin's `on_save` and `on_load`, whichever it has."""

    key: str
    accelerator: Accelerator
    hooks: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        if "directory" in self.hooks.get("on_save", ((), ()))[1]:
            directory.mkdir(exist_ok=True)
        self._call("on_save", directory)

    def load(self, directory: Path) -> None:
        self._call("on_load", directory)

    def _call(self, hook: str, directory: Path) -> None:
        if hook in self.hooks:
            function, names = self.hooks[hook]
            self.accelerator.plugins.call_one(
                hook, self.key, function, names, accelerator=self.accelerator, directory=directory
            )
