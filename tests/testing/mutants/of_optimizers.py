"""Faults with frozen parts, parameter groups and closures."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from registry import Sound, caught_by


@caught_by("fine_tuning")
class NeverTrains(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return super().prepare_model(accelerator, model, evaluation_mode).eval()


@caught_by("fine_tuning")
class FrozenPartsStayApart(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.requires_grad or not tensor.is_floating_point():
                dist.broadcast(tensor.detach(), src=0)
        return model


@caught_by("fine_tuning")
class CountersStayApart(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                dist.broadcast(tensor.detach(), src=0)
        return model


@caught_by("fine_tuning")
class LooksAtTheFirstGradient(Sound):
    def _average(self, accelerator, model):
        if next(model.parameters()).grad is not None:
            super()._average(accelerator, model)


@caught_by("groups")
class OneRateForAll(Sound):
    def load_optimizer_state(self, accelerator, optimizer, state):
        super().load_optimizer_state(accelerator, optimizer, state)
        for group in optimizer.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"]


@caught_by("groups")
class TensorsOnly(Sound):
    def optimizer_state(self, accelerator, optimizer):
        made = dict(super().optimizer_state(accelerator, optimizer))
        made["state"] = {
            index: {key: value for key, value in held.items() if torch.is_tensor(value)}
            for index, held in made["state"].items()
        }
        return made


@caught_by("several_models")
class LoadsTheFirstOptimizerOnly(Sound):
    def load_optimizer_state(self, accelerator, optimizer, state):
        first = accelerator.optimizers[0]
        if optimizer in (first, getattr(first, "optimizer", None)):
            super().load_optimizer_state(accelerator, optimizer, state)


@caught_by("calls")
class NoClosures(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        return super().optimizer_step(accelerator, optimizer, None)


@caught_by("calls")
class KeepsNoGraph(Sound):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss, {})


@caught_by("groups")
class ClearsTheFirstGroup(Sound):
    def zero_grad(self, accelerator, optimizer, set_to_none):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = None


@caught_by("groups")
class WeightsDecayNoMore(Sound):
    def optimizer_state(self, accelerator, optimizer):
        made = dict(super().optimizer_state(accelerator, optimizer))
        made["param_groups"] = [{**group, "weight_decay": 0} for group in made["param_groups"]]
        return made


@caught_by("calls")
class AlwaysNone(Sound):
    def zero_grad(self, accelerator, optimizer, set_to_none):
        optimizer.zero_grad(set_to_none=True)


@caught_by("schedule")
class SchedulersAreToldNothing(Sound):
    def prepare_scheduler(self, accelerator, scheduler):
        step = scheduler.step
        scheduler.step = lambda *told, **named: step(0.0) if told else step()
        return super().prepare_scheduler(accelerator, scheduler)


@caught_by("precisions")
class NoAutocast(Sound):
    def autocast(self, accelerator, model, settings):
        return nullcontext()


@caught_by("precisions")
class StaysApartInHalf(Sound):
    def _average(self, accelerator, model):
        if accelerator.mixed_precision == "no":
            super()._average(accelerator, model)


@caught_by("compiled")
class CannotBeCompiled(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise TypeError("a model that is compiled")
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("join")
class JoinsNobody(Sound):
    supports = {**Sound.supports, "join": True}


@caught_by("join")
class JoinedRanksGoApart(Sound):
    supports = {**Sound.supports, "join": True}
    _joined = False

    @contextmanager
    def _join(self):
        self._joined = True
        yield
        self._joined = False

    def join_uneven_inputs(self, accelerator, joinables):
        return self._join()

    def _average(self, accelerator, model):
        if not self._joined:
            super()._average(accelerator, model)
