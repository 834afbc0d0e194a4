"""Faults in preparing models."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from registry import Sound, caught_by


@caught_by("randomness")
class SeedsEachStep(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        torch.manual_seed(0)
        return super().optimizer_step(accelerator, optimizer, closure)


@caught_by("randomness")
class SeedsEverythingAgain(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        torch.manual_seed(0)
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("randomness")
class SeedsAtTheStart(Sound):
    def on_start(self, accelerator):
        torch.manual_seed(0)


@caught_by("randomness")
class SeedsWhatWasSeeded(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        torch.manual_seed(torch.initial_seed())
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("same_start")
class RanksStartApart(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return model


@caught_by("same_start")
class BuffersStartApart(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        return model


class FirstArgumentOnly(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, *more, **named):
        return self.module(x)


@caught_by("calls_of_models")
class DropsArguments(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return FirstArgumentOnly(super().prepare_model(accelerator, model, evaluation_mode))

    def unwrap_model(self, accelerator, model):
        return model.module if isinstance(model, FirstArgumentOnly) else model


@caught_by("calls_of_models")
class TrainsEveryModel(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return super().prepare_model(accelerator, model, evaluation_mode).train()


@caught_by("kinds_of_models")
class NeedsParameters(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        next(model.parameters())
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("several_models")
class TheLastModelOnly(Sound):
    def backward(self, accelerator, loss, kwargs):
        loss.backward(**kwargs)
        self._average(accelerator, accelerator.models[-1])


@caught_by("several_models")
class ScalesTheFirstModelOnly(Sound):
    def scale_gradients(self, accelerator, models, factor):
        super().scale_gradients(accelerator, models[:1], factor)


@caught_by("several_models")
class ClipsFourTensors(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        some = list(parameters)[:4] if max_norm is None else parameters
        return super().clip_grad(accelerator, some, max_norm, norm_type, clip_value)


@caught_by("several_models")
class LoadsTheFirstModelOnly(Sound):
    def load_model_state(self, accelerator, model, state, strict):
        if model is accelerator.models[0]:
            super().load_model_state(accelerator, model, state, strict)


@caught_by("several_models")
class LoadsWhatIsTrainedOnly(Sound):
    def load_model_state(self, accelerator, model, state, strict):
        if any(parameter.requires_grad for parameter in model.parameters()):
            super().load_model_state(accelerator, model, state, strict)


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.held = model

    def forward(self, *arguments):
        return self.held(*arguments)


@caught_by("one_of_two")
class NobodyIsInSync(Sound):
    @contextmanager
    def _apart(self, models):
        self._unsynced += models
        try:
            yield
        finally:
            self._unsynced.clear()

    def no_sync(self, accelerator, model):
        return self._apart(list(accelerator.models))


@caught_by("one_of_two")
class StaysApartWhenTriggered(Sound):
    def trigger_sync_in_backward(self, accelerator, model):
        return self.no_sync(accelerator, model)


@caught_by("contexts")
class MakesNoModels(Sound):
    def init_model_context(self, accelerator):
        raise RuntimeError("no models here")


@caught_by("contexts")
class OneGroupForAll(Sound):
    def new_group(self, accelerator, ranks, device_type):
        return dist.group.WORLD


@caught_by("unwrap")
class NeverUnwraps(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return Wrapper(super().prepare_model(accelerator, model, evaluation_mode))

    def model_state(self, accelerator, model):
        return dict(model.held.state_dict())

    def consolidate(self, accelerator, model):
        return dict(model.held.state_dict())


@caught_by("state_dict")
class WeightsInDouble(Sound):
    def consolidate(self, accelerator, model):
        return {k: v.double() for k, v in super().consolidate(accelerator, model).items()}


@caught_by("state_dict")
class NamesOfItsOwn(Sound):
    def consolidate(self, accelerator, model):
        return {f"module.{k}": v for k, v in super().consolidate(accelerator, model).items()}


@caught_by("prepare")
class OptimizerOfCopies(Sound):
    def prepare_optimizer(self, accelerator, optimizer):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        copies = [torch.nn.Parameter(p.detach().clone()) for p in held]
        return torch.optim.SGD(copies, optimizer.defaults["lr"])
