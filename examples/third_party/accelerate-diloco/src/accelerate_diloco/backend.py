"""The backend: gradients stay local, and parameters are averaged every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accelerate_core.plugin import AcceleratorView, Backend, Claim, Request
from accelerate_diloco.outer import Outer
from accelerate_diloco.settings import DiLoCoSettings


class DiLoCoBackend(Backend):
    """Distributed low-communication training (arXiv 2311.08105).

    Each rank steps with the user's optimizer, the inner one. Every `sync_every` steps, the ranks
    average the changes of their parameters, and an outer SGD with Nesterov momentum takes a step with
    the average. Gradients are never exchanged.
    """

    name = "diloco"
    reduces_gradients = "never"
    api_version = (1, 0)
    # Not "exact": the result differs from one process with all samples, unless sync_every is 1.
    supports = {"no_sync": True, "several_models": True, "exact": False}
    Settings = DiLoCoSettings

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or DiLoCoSettings(), handlers)
        # An outer optimizer is deleted together with its inner one.
        self._outer: WeakKeyDictionary[Any, Outer] = WeakKeyDictionary()

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if the argument or the environment variable is set."""
        if request.arguments.get("diloco_plugin") is not None:
            return Claim(60, "diloco_plugin was passed")
        if request.env_flag("ACCELERATE_USE_DILOCO"):
            return Claim(50, "ACCELERATE_USE_DILOCO is set")
        return None

    @property
    def outer_steps(self) -> int:
        """The number of outer steps. Several optimizers that step together count once."""
        return max((outer.outer_steps for outer in self._outer.values()), default=0)

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `DILOCO`."""
        return "DILOCO" if accelerator.num_processes > 1 else "NO"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Add `accelerator.diloco_outer_steps`."""
        return {"diloco_outer_steps": self.outer_steps}

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Copy the weights of rank 0 to every rank."""
        if accelerator.num_processes > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        return model

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Take the inner step, and the outer one when it is due."""
        outer = self._outer_of(optimizer)  # stores the parameters before the first inner step
        taken = super().optimizer_step(accelerator, optimizer, closure)
        # Skipped steps count too, because an overflow may occur on one rank only.
        outer.after_inner_step(lambda flat: accelerator.reduce(flat, "mean"))
        return taken

    def _outer_of(self, optimizer: Any) -> Outer:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer not in self._outer:
            self._outer[optimizer] = Outer(held, self.settings)
        outer = self._outer[optimizer]
        if len(held) > len(outer.parameters):  # add_param_group
            outer.extend(held)
        return outer

    # --- saving: between two outer steps, each rank has different parameters -------------------

    def consolidate(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the mean of the weights over all ranks."""
        state = accelerator.unwrap_model(model).state_dict()
        return {
            key: accelerator.reduce(value, "mean") if value.is_floating_point() else value
            for key, value in state.items()
        }

    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write the state of each rank, and the outer state, which is the same on all ranks."""
        own = {
            "models": [dict(accelerator.unwrap_model(m).state_dict()) for m in accelerator.models],
            "optimizers": [one.optimizer.state_dict() for one in accelerator.optimizers],
        }
        shared = {
            "outer": [self._outer_of(one.optimizer).state() for one in accelerator.optimizers],
        }
        if later:
            own, shared = _copied(own), _copied(shared)
        rank, main = accelerator.process_index, accelerator.is_main_process

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            torch.save(own, directory / f"rank_{rank}.pt")
            if main:
                torch.save(shared, directory / "outer.pt")

        if later:
            return write
        write()
        return None

    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Restore the state of each rank. New ranks start from the last outer step."""
        if not (directory / "outer.pt").exists():  # a checkpoint of another backend
            self._outer.clear()  # starts anew from the loaded parameters
            return
        shared = torch.load(directory / "outer.pt", weights_only=True, map_location="cpu")
        file = directory / f"rank_{accelerator.process_index}.pt"
        own = torch.load(file, weights_only=True, map_location="cpu") if file.exists() else None
        if own is not None:
            for model, state in zip(accelerator.models, own["models"], strict=True):
                accelerator.unwrap_model(model).load_state_dict(state)
            for one, state in zip(accelerator.optimizers, own["optimizers"], strict=True):
                one.optimizer.load_state_dict(state)
        for one, state in zip(accelerator.optimizers, shared["outer"], strict=True):
            outer = self._outer_of(one.optimizer)
            outer.load(state)
            if own is None:
                with torch.no_grad():
                    for parameter, theta in zip(outer.parameters, outer.theta, strict=True):
                        parameter.copy_(theta)


def _copied(value: Any) -> Any:
    """Copy the tensors of a state, so that training can continue while it is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value
