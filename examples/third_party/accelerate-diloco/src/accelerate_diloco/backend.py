"""The backend: gradients stay on their rank, parameters meet every few steps."""

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

    Each rank steps by itself with the user's optimizer, the inner one. Every `sync_every` steps the
    ranks average how far they went, and an outer SGD with Nesterov momentum steps over that. Ranks
    exchange parameters once per `sync_every` steps, and never gradients.
    """

    name = "diloco"
    reduces_gradients = "never"
    api_version = (1, 0)
    # Not "exact": a step is not that of one process on all samples, unless they meet at each one.
    supports = {"no_sync": True, "several_models": True, "exact": False}
    Settings = DiLoCoSettings

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or DiLoCoSettings(), handlers)
        # An optimizer that is gone takes its outer one along.
        self._outer: WeakKeyDictionary[Any, Outer] = WeakKeyDictionary()

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim where it is asked for."""
        if request.arguments.get("diloco_plugin") is not None:
            return Claim(60, "diloco_plugin was passed")
        if request.env_flag("ACCELERATE_USE_DILOCO"):
            return Claim(50, "ACCELERATE_USE_DILOCO is set")
        return None

    @property
    def outer_steps(self) -> int:
        """Outer steps so far: meetings, however many optimizers took part in each."""
        return max((outer.meetings for outer in self._outer.values()), default=0)

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """`DILOCO`, a member of its own."""
        return "DILOCO" if accelerator.num_processes > 1 else "NO"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Serve `accelerator.diloco_outer_steps`."""
        return {"diloco_outer_steps": self.outer_steps}

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Start all ranks from rank 0's weights."""
        if accelerator.num_processes > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        return model

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Take the inner step, and the outer one when it is due."""
        outer = self._outer_of(optimizer)  # remembers where the inner steps began
        taken = super().optimizer_step(accelerator, optimizer, closure)
        # Counted whether taken or not: an overflow is one rank's own, the meeting is everybody's.
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

    # --- keep: between two meetings each rank is somewhere else --------------------------------

    def consolidate(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the mean of the ranks' weights: what the next meeting would start from."""
        state = accelerator.unwrap_model(model).state_dict()
        return {
            key: accelerator.reduce(value, "mean") if value.is_floating_point() else value
            for key, value in state.items()
        }

    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write where each rank is, beside the core's files, and what is alike on all of them."""
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
        """Go on where each rank was; a rank that was not there begins at the last meeting."""
        if not (directory / "outer.pt").exists():  # another backend's checkpoint: begin here
            self._outer.clear()  # the count of meetings with it
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
    """Copy the tensors of a state, so that training may go on while it is written."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value
