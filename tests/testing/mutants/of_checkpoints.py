"""Faults in checkpoints."""

from __future__ import annotations

import torch
from registry import Sound, caught_by, passes


@caught_by("save_and_load")
class ModelHalfSaved(Sound):
    def model_state(self, accelerator, model):
        state = super().model_state(accelerator, model)
        return {key: value for key, value in state.items() if "bias" not in key}

    def load_model_state(self, accelerator, model, state, strict):
        super().load_model_state(accelerator, model, state, False)


@caught_by("save_and_load")
class TakesWhatLacksTensors(Sound):
    def load_model_state(self, accelerator, model, state, strict):
        super().load_model_state(accelerator, model, state, False)


@caught_by("save_and_load")
class LoadsOnTheMainRankOnly(Sound):
    def load_model_state(self, accelerator, model, state, strict):
        if accelerator.process_index == 0:
            super().load_model_state(accelerator, model, state, strict)


@caught_by("save_and_load")
class KeepsMomentumOnly(Sound):
    def optimizer_state(self, accelerator, optimizer):
        made = dict(super().optimizer_state(accelerator, optimizer))
        made["state"] = {
            index: {key: value for key, value in held.items() if key == "momentum_buffer"}
            for index, held in made["state"].items()
        }
        return made


@caught_by("resume")
class OptimizerHalfSaved(Sound):
    def optimizer_state(self, accelerator, optimizer):
        return {**super().optimizer_state(accelerator, optimizer), "state": {}}


class WithMeans(Sound):
    """Keeps its own momentum, correctly."""

    supports = {**Sound.supports, "exact": False}

    def __init__(self, settings=None, handlers=()):
        super().__init__(settings, handlers)
        self.means = {}

    def optimizer_step(self, accelerator, optimizer, closure):
        for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            if p.grad is not None:
                mean = self.means.setdefault(index, torch.zeros_like(p.grad))
                p.grad.copy_(mean.lerp_(p.grad, 0.5))
        return super().optimizer_step(accelerator, optimizer, closure)

    def save_state(self, accelerator, directory, options, later):
        means = {index: mean.clone() for index, mean in self.means.items()}
        return self._writes(accelerator, directory, means, later)

    def _writes(self, accelerator, directory, means, later):
        def write():
            directory.mkdir(parents=True, exist_ok=True)
            if accelerator.is_main_process:
                torch.save(means, directory / "means.pt")

        return write if later else write()

    def load_state(self, accelerator, directory, options):
        self.means = torch.load(directory / "means.pt", weights_only=True)


@passes(
    "save_later", "two_at_once", "resume", "learning", "training", "accumulation", "small_gradients",
    "clip_norm", "counted_items", "another_size", "overflow",
)  # fmt: skip
class KeepsItsMeans(WithMeans):
    pass


@caught_by("save_later")
class WritesWhatTrainingMadeOfIt(WithMeans):
    def save_state(self, accelerator, directory, options, later):
        return self._writes(accelerator, directory, self.means, later)


@caught_by("two_at_once")
class SharesItsMeans(WithMeans):
    _shared = {}

    def __init__(self, settings=None, handlers=()):
        super().__init__(settings, handlers)
        self.means = self._shared


@caught_by("resume")
class OptimizerIsNotLoaded(Sound):
    def load_optimizer_state(self, accelerator, optimizer, state):
        return None


@caught_by("resume")
class OwnStateIsNotSaved(Sound):
    """Keeps its own momentum, but does not save it."""

    def __init__(self, settings=None, handlers=()):
        super().__init__(settings, handlers)
        self._mean = {}

    def optimizer_step(self, accelerator, optimizer, closure):
        for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            if p.grad is not None:
                p.grad = self._mean[index] = 0.5 * (self._mean.get(index, 0.0) + p.grad)
        return super().optimizer_step(accelerator, optimizer, closure)


@caught_by("another_size")
class EachRankKeepsAPart(Sound):
    """Spreads the optimizer's state over files of the ranks, but reads only those of current ranks."""

    def optimizer_state(self, accelerator, optimizer):
        return {**super().optimizer_state(accelerator, optimizer), "state": {}}

    def save_state(self, accelerator, directory, options, later):
        rank, count = accelerator.process_index, accelerator.num_processes
        state = accelerator.optimizers[0].optimizer.state_dict()["state"]
        directory.mkdir(parents=True, exist_ok=True)
        part = {index: held for index, held in state.items() if index % count == rank}
        torch.save(part, directory / f"rank{rank}.pt")

    def load_state(self, accelerator, directory, options):
        optimizer, state = accelerator.optimizers[0].optimizer, {}
        for rank in range(accelerator.num_processes):
            if (directory / f"rank{rank}.pt").exists():
                state |= torch.load(directory / f"rank{rank}.pt", weights_only=True)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@caught_by("save_fails")
class SavingWaitsForWhoFailed(Sound):
    def save_state(self, accelerator, directory, options, later):
        raise OSError("and another reason instead of the first")

    def load_state(self, accelerator, directory, options):
        return None
