"""`TrainingState`: captures and restores everything about a run that a checkpoint holds."""

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
from accelerate_checkpoint.quantized_weights import undo_packing
from accelerate_checkpoint.weight_sums import first_difference, weight_sums
from accelerate_core.plugin import (
    Backend,
    CheckpointError,
    CommunicatorView,
    Contribution,
    ProjectConfiguration,
    RunParts,
    SharedHooksView,
    plain_keys,
)

#: Key in a rank's state for everything that Accelerate does not save.
OWN = "accelerate_core"


class TrainingState:
    """The state of a run that a checkpoint saves and restores.

    All ranks must call the methods that gather, in the same order.

    Attributes:
        process: ranks, device, store and timeout of this process.
        collectives: collectives of all ranks. `duplicate()` returns a copy for a background
            thread, or None if there cannot be a second group.
        project: the `ProjectConfiguration` with directories, naming and retention.
        backend: name of the backend.
        owns_format: whether the backend writes and reads models and optimizers itself.
        events: counters of the training loop, and its callback `loop_body_end`.
        models, schedulers, registered: objects in the order in which they were prepared.
        scaler: the gradient scaler or None.
    """

    def __init__(self, run: RunParts) -> None:
        self._hooks = run.hooks
        self._backend = run.backend
        self._precision = run.precision
        self._cycle = run.cycle
        self._restore_positions = run.restore_positions
        self._project = run.project
        self._plugins = run.plugins
        self._shared_hooks = run.shared_hooks
        self._tracking = run.tracking
        self.process = run.process
        self.collectives: CommunicatorView = run.communicator
        #: Number of comparisons of the ranks' weights.
        self._compared = 0
        self.backend = run.backend.name
        #: Whether the backend reads all its shards with `SafeReader`, which fetches missing ones.
        self.shards_on_demand = bool(getattr(run.backend, "shards_on_demand", False))
        #: The backend's `supports["gradients"]`: True, "same_layout" or False.
        self.gives_gradients: Any = run.backend.supports.get("gradients", True)
        self.events = run.gradient_state
        self.models = run.models
        self._optimizers = run.optimizers
        self.schedulers = run.schedulers
        self._loaders = run.loaders
        self.registered = run.registered
        self.scaler = run.scaler
        # Hooks of the backend, with the arguments `(model, state, strict)`, `(optimizer)`,
        # `(optimizer, state)`, `(directory, options, later)` and `(directory, options)`.
        # `backend_save` returns None or a function that writes the rest later and may return the
        # checksums of its files.
        self.load_model_state = run.hooks.load_model_state
        self.optimizer_state = run.hooks.optimizer_state
        self.load_optimizer_state = run.hooks.load_optimizer_state
        self.backend_save = run.hooks.save_state
        self.backend_load = run.hooks.load_state
        self.save_hooks = run.save_hooks.values
        self.load_hooks = run.load_hooks.values
        #: Applies a pending update of the loss scale.
        self.update_scale = run.cycle.update_scale
        #: Returns the model without the wrappers of the backend and `torch.compile`.
        self.inner = run.inner_model
        #: Returns the unsharded weights that `save_model` writes, on the ranks that need them.
        self.whole_model_state = run.whole_state
        #: Warns once per text, on the main process.
        self.warn_once = run.warn_once
        #: Ends the run. Preemption calls it after its save.
        self.end_training = run.end_training

    @property
    def project(self) -> ProjectConfiguration:
        """The current `ProjectConfiguration`, which a script may replace."""
        return self._project()

    @property
    def owns_format(self) -> bool:
        """Whether the backend, with its current settings, writes models and optimizers itself."""
        return "checkpoint" in self._backend.owns

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers as they were before `prepare` wrapped them."""
        return [prepared.optimizer for prepared in self._optimizers]

    @property
    def saves_here(self) -> bool:
        """Whether this rank writes the shared files, on one rank in all or one per machine."""
        per_machine, process = self.project.save_on_each_node, self.process
        return (process.local_process_index if per_machine else process.process_index) == 0

    @property
    def whole_on_main(self) -> bool:
        """Whether the main process holds the whole shared state and can save it alone."""
        backend: Any = type(self._backend)
        hooks = ("model_state", "optimizer_state", "save_state")
        return all(getattr(backend, hook) is getattr(Backend, hook) for hook in hooks)

    def is_sharded(self, model: torch.nn.Module) -> bool:
        """Whether this rank holds only parts of the parameters: DTensors, or empty with ZeRO-3."""
        parameters = self.inner(model).parameters()
        return any(hasattr(one, "placements") or not one.numel() for one in parameters)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use collectives of this process alone inside the block."""
        every = self.collectives
        self.collectives = every.alone()
        try:
            yield
        finally:
            self.collectives = every

    # --- comparing the weights of the ranks ---------------------------------------------------

    def weight_sums(self) -> dict[str, int] | None:
        """Return sums of this rank's weights, which must be equal on all ranks.

        If the model is large, each save only reads a part of it, and the next save another part.
        Returns None if the weights may differ: on one process, on a mesh where ranks share samples,
        or if the backend does not compute the same as one process.
        """
        size = self.collectives.size
        _, parts = self._hooks.data_shard()
        exact = (
            self._backend.supports.get("exact", True) and self._backend.reduces_gradients != "never"
        )
        if size == 1 or parts != size or not exact:
            return None
        self._compared += 1
        trained = {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        named = (
            (f"{index}.{name}" if index else name, parameter)
            for index, model in enumerate(self.models)
            for name, parameter in self.inner(model).named_parameters()
            if id(parameter) in trained
        )
        return weight_sums(named, self._compared)

    def warn_if_ranks_differ(self, sums: Sequence[dict[str, int] | None]) -> None:
        """Warn on every rank if `sums`, one per rank, show weights other than the saved ones of rank 0."""
        found = first_difference(sums)
        if found is None:
            return
        rank, name, number = found
        self.warn_once(
            f"The ranks train different models: {name!r} and {number - 1} other parameter(s) of rank "
            f"{rank} differ from those of rank 0, and the checkpoint has rank 0's. The backend is "
            f"{self.backend!r}. To stop at the step where they start to differ, set "
            "ACCELERATE_DEBUG_MODE=1 (launch --debug).",
            every_rank=True,
        )

    # --- state of the backend and of plugins --------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state dict from the backend."""
        undo_packing(self.inner(model))
        inner = self.inner(model)
        state = self._precision.plain_state(inner, self._hooks.model_state(model))
        return plain_keys(inner, state)

    def plain_model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict that this rank holds, with shards, as plain tensors of the model."""
        inner = self.inner(model)
        undo_packing(inner)
        return plain_keys(inner, self._precision.plain_state(inner, inner.state_dict()))

    def contributors(self) -> list[Contributor]:
        """Return the plugins with `on_save` or `on_load`, sorted by name."""
        found: dict[str, Contributor] = {}
        for hook in ("on_save", "on_load"):
            for one in self._shared_hooks.implementations(hook):
                contributor = found.setdefault(one.key, Contributor(one.key, self._shared_hooks))
                contributor.hooks[hook] = one
        return [one for _, one in sorted(found.items())]

    # --- state of this rank -------------------------------------------------------------------

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's step, generators, loaders, accumulation cycle and tracker runs.

        The result consists of plain data and tensors. Generators and `step` have the same keys as
        in Accelerate. Everything else is under "accelerate_core".
        """
        loaders = [
            loader.state_dict() if hasattr(loader, "state_dict") else None
            for loader in self._loaders
        ]
        return {
            "step": self._cycle.step,
            **rng_state.capture_rng_state(sorted(self.devices, key=str)),
            OWN: {
                "cycle": self._cycle_state(),
                "loaders": loaders,
                "trackers": self._tracking.state_dict(),
                "generators": dict(self._hooks.rng_state()),
            },
        }

    def unsaved_loader(self, own: Mapping[str, Any]) -> str:
        """Return the loader whose part of `rank_state` cannot be saved, or ""."""
        states = own.get(OWN, {}).get("loaders", ())
        for index, (loader, state) in enumerate(zip(self._loaders, states, strict=False)):
            try:
                torch.save(state, io.BytesIO())
            except Exception:
                kind = type(getattr(loader, "base", loader))  # the user's loader, not our wrapper
                return f"state_dict of loader {index} ({kind.__module__}.{kind.__qualname__})"
        return ""

    def load_rank_state(
        self,
        states: Mapping[int, Mapping[str, Any]],
        saved_by: int,
        gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]],
        mesh: Mapping[str, int] | None = None,
        *,
        positions: bool = True,
    ) -> None:
        """Restore `rank_state`. Call this last, because it sets the generators.

        Args:
            states: rank that saved it -> state, for rank 0 and this rank. If the layout has changed
                within a cycle that counts items, for all ranks. States saved by Accelerate only have
                step and generators.
            saved_by: number of ranks that saved.
            gradients: `pending_gradients` of this rank, or of all ranks if the layout has
                changed. They are read one at a time.
            mesh: the mesh of the ranks that saved, as in `facts`. None if it is not known.
            positions: whether to restore the positions of the loaders as well.
        """
        same_layout = self.has_layout(saved_by, mesh)
        rank, count = self.process.process_index, self.process.num_processes
        first, own = states[0], states.get(rank)
        if OWN not in first:
            self._cycle.step = int(first.get("step", 0))
        else:
            if saved_by != count:
                self.warn_once(
                    f"The checkpoint was saved by {saved_by} process(es) and is loaded by {count}. "
                    "The position in the data is restored. Ranks that did not exist then keep "
                    "their own random states."
                )
            if positions:
                self.load_positions(first[OWN]["loaders"])
            cycles = [one[OWN]["cycle"] for _, one in sorted(states.items())]
            mine = first if own is None else own
            self._load_cycle(mine[OWN]["cycle"], None if same_layout else cycles)
            if own is not None:  # a rank that did not exist then has no runs to continue
                runs = own[OWN].get("trackers") or {}
                self._tracking.load_state_dict(runs)
        self._load_gradients(gradients, None if same_layout else saved_by)
        if own is None:
            return
        generators = own.get(OWN, {}).get("generators")
        if generators:
            self._hooks.load_rng_state(generators)
        missed = rng_state.restore_rng_state(own)
        if missed:
            self.warn_once(
                f"The random state of {', '.join(missed)} could not be restored on rank {rank}.",
                every_rank=True,
            )

    @property
    def devices(self) -> set[torch.device]:
        """This process's device, and those of the models' parameters."""
        devices = {self.process.device}
        devices.update(p.device for model in self.models for p in model.parameters())
        return devices

    @property
    def resumed_loaders(self) -> list[Any]:
        """The loaders whose positions are restored."""
        if not self._restore_positions():
            return []
        return [loader for loader in self._loaders if hasattr(loader, "load_state_dict")]

    def load_positions(self, states: Sequence[Any]) -> None:
        """Restore the positions of the loaders. A loader with other data starts from the beginning."""
        if not self._restore_positions():
            return
        loaders = self._loaders
        if len(states) != len(loaders):
            self.warn_once(
                f"The checkpoint has the positions of {len(states)} loaders, but this run has "
                f"prepared {len(loaders)}. They are matched in the order in which they were "
                "prepared."
            )
        for index, (loader, state) in enumerate(zip(loaders, states, strict=False)):
            if state is None or not hasattr(loader, "load_state_dict"):
                continue
            was, now = state.get("dataset_size"), getattr(loader, "dataset_size", None)
            if was is not None and was != now:
                self.warn_once(
                    f"Loader {index} had {was} samples when the checkpoint was saved, but has "
                    f"{now} now, so its position is not restored. Loaders are matched in the "
                    "order in which they were prepared."
                )
                continue
            loader.load_state_dict(state)

    # --- the current accumulation cycle -------------------------------------------------------

    def waiting(self) -> list[Any]:
        """Return the optimizers that have not stepped since the last backward."""
        events = self.events
        return [
            optimizer
            for optimizer in self._optimizers
            if not events.sync_gradients or optimizer.seen_backwards < events.backwards
        ]

    def pending_gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return accumulated gradients without a step yet, by model and the backend's names."""
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
            named = self._hooks.pending_gradients(model, parameters)
            if named:
                found[index] = dict(named)
        return found

    def check_gradients_can_be_saved(self) -> None:
        """Refuse to save in the middle of a cycle if the backend cannot save its gradients.

        Raises:
            CheckpointError: there are such gradients.
        """
        if self.gives_gradients is not False or not self.waiting():
            return
        raise CheckpointError(
            f"save_state was called in the middle of an accumulation cycle, and the backend "
            f"{self.backend!r} cannot save accumulated gradients. Save after the optimizer step, "
            "when accelerator.sync_gradients is True."
        )

    def check_gradients_fit(
        self, directory: str, saved_by: int, mesh: Mapping[str, int] | None
    ) -> None:
        """Refuse a checkpoint with gradients that the backend cannot move to this layout.

        Args:
            directory: path of the checkpoint, for the message.
            saved_by: number of ranks that saved it.
            mesh: the mesh of these ranks, as in `facts`.

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
            "that saved it, or load a checkpoint that was saved after an optimizer step."
        )

    def has_layout(self, ranks: int, mesh: Mapping[str, int] | None) -> bool:
        """Return whether this run has this number of ranks and this mesh. None matches any mesh."""
        if ranks != self.process.num_processes:
            return False
        here = self.mesh_sizes()
        if mesh is None or here is None:
            return True
        # A dimension of size 1 does not change the layout.
        wide = [{name: size for name, size in one.items() if size > 1} for one in (mesh, here)]
        return wide[0] == wide[1]

    def _load_gradients(
        self, gradients: Iterable[Mapping[int, Mapping[str, torch.Tensor]]], saved_by: int | None
    ) -> None:
        """Restore gradients. A change of layout preserves their mean over the ranks.

        If items are counted, it preserves their sum instead.

        Args:
            saved_by: number of ranks that saved. None if this rank restores its own gradients.
        """
        factor = None
        if saved_by is not None:
            _, loss_ranks = self._hooks.loss_shard()
            factor = 1.0 / (loss_ranks if self._cycle.tokens.open else saved_by)
        for model in self.models:
            for parameter in self.inner(model).parameters():
                parameter.grad = None
        for found in gradients:
            self.events.backwards += 1  # so that they count as waiting for a step
            for index, named in found.items():
                model = self.models[index]
                self._hooks.load_pending_gradients(model, named, factor)

    def _cycle_state(self) -> dict[str, Any]:
        return {
            "step": self._cycle.step,
            "sync_gradients": self.events.sync_gradients,
            "items": self._cycle.tokens.state_dict(),
            "steps_taken": [optimizer.steps_taken for optimizer in self._optimizers],
        }

    def _load_cycle(
        self, state: Mapping[str, Any], all_ranks: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Restore the cycle.

        Args:
            all_ranks: after a change of layout, the states of all ranks if the cycle counts items.
        """
        self.events.sync_gradients = bool(state["sync_gradients"])
        # Another number of ranks may come with another number of accumulation steps, by which the
        # count of micro-batches is divided to find the end of a cycle.
        begins = all_ranks is not None and self.events.sync_gradients
        self._cycle.step = 0 if begins else int(state["step"])
        items = dict(state["items"])
        if all_ranks is not None:
            counts = [float(one["items"]["local"]) for one in all_ranks]
            index, _ = self._hooks.loss_shard()
            items["local"] = sum(counts) if index == 0 else 0
        self._cycle.tokens.load_state_dict(items)
        self.events.backwards += 1
        for optimizer, steps in zip(self._optimizers, state["steps_taken"], strict=False):
            optimizer.steps_taken = steps
        for optimizer in self._optimizers:
            optimizer.seen_backwards = self.events.backwards

    def mesh_sizes(self) -> dict[str, int] | None:
        """Return the size of each dimension of the mesh, or None without a mesh."""
        mesh = self._hooks.mesh()
        if mesh is None:
            return None
        return {str(name): int(mesh[name].size()) for name in (mesh.mesh_dim_names or ())}

    # --- facts for readers of the checkpoint --------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the facts about this run that go into the manifest."""
        epochs = [int(getattr(loader, "iteration", 0)) for loader in self._loaders]
        steps = [optimizer.steps_taken for optimizer in self._optimizers]
        return {
            "step": max(steps, default=0),
            "epoch": max(epochs, default=0),
            "world_size": self.collectives.size,
            "mesh": self.mesh_sizes(),
            "mixed_precision": self._precision.name,
            "written_by": {
                "accelerate-core": importlib.metadata.version("accelerate-core"),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "plugins": [dict(plugin) for plugin in self._plugins],
            },
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "objects": {
                "models": len(self.models),
                "optimizers": len(self._optimizers),
                "schedulers": len(self.schedulers),
                "loaders": len(self._loaders),
                "registered": len(self.registered),
            },
        }


def _layout(ranks: int, mesh: Mapping[str, int] | None) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in (mesh or {}).items() if size > 1)
    return f"{ranks} process(es)" + (f" ({sizes})" if sizes else "")


@dataclass
class Contributor:
    """The `on_save` and `on_load` of one plugin, which may have only one of them."""

    key: str
    shared_hooks: SharedHooksView
    #: Hook name -> the plugin's implementation.
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
