"""Faults of backends that are not exact, and with models of other dtypes and memory formats."""

from __future__ import annotations

import torch
import torch.distributed as dist
from registry import Sound, caught_by, passes


class Loose(Sound):
    """Is exact, but declares that it is not. This is correct."""

    supports = {**Sound.supports, "exact": False}


class MeansEveryEightSteps(Sound):
    """Averages weights instead of gradients, every 8 steps. It saves its steps; this is correct."""

    supports = {**Sound.supports, "exact": False, "accepts": ("autocast", "modules")}
    steps = 0

    def _average(self, accelerator, model): ...

    def optimizer_step(self, accelerator, optimizer, closure):
        stepped = super().optimizer_step(accelerator, optimizer, closure)
        self.steps += 1
        if self.steps % 8 == 0:
            held = [p.detach() for group in optimizer.param_groups for p in group["params"]]
            for p, mean in zip(held, accelerator.reduce(held, "mean"), strict=True):
                p.copy_(mean)
        return stepped

    def consolidate(self, accelerator, model):
        return accelerator.reduce(super().consolidate(accelerator, model), "mean")

    def save_state(self, accelerator, directory, options, later):
        directory.mkdir(parents=True, exist_ok=True)
        state = {
            "steps": self.steps,
            "models": [accelerator.unwrap_model(one).state_dict() for one in accelerator.models],
            "optimizers": [one.optimizer.state_dict() for one in accelerator.optimizers],
        }
        torch.save(state, directory / f"{accelerator.process_index}.pt")

    def load_state(self, accelerator, directory, options):
        state = torch.load(directory / f"{accelerator.process_index}.pt", weights_only=True)
        self.steps = self.loaded_steps(state)
        for model, held in zip(accelerator.models, state["models"], strict=True):
            accelerator.unwrap_model(model).load_state_dict(held)
        for one, held in zip(accelerator.optimizers, state["optimizers"], strict=True):
            one.optimizer.load_state_dict(held)

    def loaded_steps(self, state):
        return state["steps"]


@passes("resume")
class KeepsItsSteps(MeansEveryEightSteps): ...


@caught_by("resume")
class LosesItsSteps(MeansEveryEightSteps):
    def loaded_steps(self, state):
        return 0


@caught_by("learning")
class RanksNeverMeet(Loose):
    def _average(self, accelerator, model):
        return None


@caught_by("learning")
class OnlyTheMainRankHears(Sound):
    def _average(self, accelerator, model):
        own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        super()._average(accelerator, model)
        if accelerator.process_index:
            for p, gradient in zip(model.parameters(), own, strict=False):
                p.grad.copy_(gradient)


@caught_by("training")
class RanksOfTheirOwnSpeed(Loose):
    def optimizer_step(self, accelerator, optimizer, closure):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(1.0 + 0.1 * accelerator.process_index)
        return super().optimizer_step(accelerator, optimizer, closure)


@caught_by("accumulation")
class DividesLooselyAgain(Loose):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss / accelerator.gradient_accumulation_steps, kwargs)


class SeesSizes(Sound):
    """Records the sizes of the first and the last batch. This is correct."""

    first = now = 0

    def prepare_model(self, accelerator, model, evaluation_mode):
        model.register_forward_pre_hook(self._see)
        return super().prepare_model(accelerator, model, evaluation_mode)

    def _see(self, model, args):
        self.now = len(args[0])
        self.first = self.first or self.now


@caught_by("accumulation")
class TakesEveryBatchForTheFirst(SeesSizes):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss * (self.now / self.first), kwargs)


@caught_by("counted_items")
class TakesTheMeanOfSums(SeesSizes):
    supports = Loose.supports

    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss / self.now, kwargs)


@caught_by("branches")
class OneRankRefuses(Loose):
    seen = 0

    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss, kwargs)
        self.seen += 1
        if accelerator.process_index and self.seen == 3:
            raise RuntimeError("not these parameters")


@caught_by("clip_norm")
class TellsANormOnly(Loose):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        return torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type)


@caught_by("clip_value")
class LeavesValues(Loose):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        return None


@caught_by("small_gradients")
class MakesThemAllLarge(Loose):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        for p in parameters:
            p.grad.mul_(2.0)
        return super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)


@caught_by("state_dict")
class NamesOfALooseOne(Loose):
    def consolidate(self, accelerator, model):
        return {f"module.{k}": v for k, v in super().consolidate(accelerator, model).items()}


@caught_by("fine_tuning")
class DecaysWhatIsFrozen(Loose):
    def optimizer_step(self, accelerator, optimizer, closure):
        with torch.no_grad():
            for p in accelerator.models[-1].parameters():
                p.mul_(0.99)
        return super().optimizer_step(accelerator, optimizer, closure)


@caught_by("overflow")
class SaysThatItStepped(Loose):
    def optimizer_step(self, accelerator, optimizer, closure):
        super().optimizer_step(accelerator, optimizer, closure)
        return True


@caught_by("forms_of_models")
class AveragesFloat32Only(Sound):
    def _average(self, accelerator, model):
        if next(model.parameters()).dtype == torch.float32:
            super()._average(accelerator, model)


@caught_by("forms_of_models")
class TravelsAsFloat32(Sound):
    def _average(self, accelerator, model):
        for p in model.parameters():
            if p.grad is not None:
                sent = p.grad.float()
                dist.all_reduce(sent)
                p.grad.copy_(sent / accelerator.num_processes)


@caught_by("forms_of_models")
class TrainsInFloat32(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return super().prepare_model(accelerator, model.float(), evaluation_mode)


@caught_by("forms_of_models")
class FlattensAsItIsStored(Sound):
    def _average(self, accelerator, model):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.as_strided((g.numel(),), (1,)) for g in gradients])
        dist.all_reduce(flat)
        flat /= accelerator.num_processes
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
