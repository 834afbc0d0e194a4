"""Faults in the training step."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from registry import Sound, caught_by, passes


@caught_by("training")
class OneRankSkipsACollective(Sound):
    def _average(self, accelerator, model):
        if accelerator.process_index == 0:
            super()._average(accelerator, model)


@caught_by("training")
class GradientDividedTwice(Sound):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss / accelerator.num_processes, kwargs)


@caught_by("training")
class GradientAddedUp(Sound):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss * accelerator.num_processes, kwargs)


@caught_by("training")
class GradientsStayApart(Sound):
    def _average(self, accelerator, model):
        return None


@caught_by("training")
class GradientsAreNeverCleared(Sound):
    def zero_grad(self, accelerator, optimizer, set_to_none):
        return None


@caught_by("no_sync")
class ReducesEveryMicroBatch(Sound):
    def no_sync(self, accelerator, model):
        return nullcontext()


@caught_by("no_sync")
class AnExceptionKeepsItApart(Sound):
    @contextmanager
    def _apart(self, model):
        self._unsynced.append(model)
        yield
        self._unsynced.remove(model)

    def no_sync(self, accelerator, model):
        return self._apart(model)


@caught_by("accumulation")
class NeverReducesAgain(Sound):
    def no_sync(self, accelerator, model):
        self._unsynced.append(model)
        return nullcontext()


@caught_by("accumulation")
class DividesByTheCycleAgain(Sound):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss / accelerator.gradient_accumulation_steps, kwargs)


@caught_by("accumulation")
class TheLastOfAnOddEpochStaysApart(Sound):
    _seen = 0

    def backward(self, accelerator, loss, kwargs):
        self._seen += 1
        super().backward(accelerator, loss, kwargs)

    def _average(self, accelerator, model):
        if self._seen % accelerator.gradient_accumulation_steps == 0:
            super()._average(accelerator, model)


@caught_by("branches")
class GradientsOfDifferentParametersMixed(Sound):
    def _average(self, accelerator, model):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= accelerator.num_processes
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


@caught_by("counted_items")
class ItemsAreNotCounted(Sound):
    def scale_gradients(self, accelerator, models, factor):
        return None


@caught_by("clip_norm")
class ClipsEachTensor(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        if max_norm is None:
            return super().clip_grad(accelerator, parameters, None, norm_type, clip_value)
        norms = [torch.nn.utils.clip_grad_norm_([p], max_norm) for p in parameters]
        return torch.stack(norms).norm()


@caught_by("small_gradients")
class MakesSmallGradientsLarge(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        if max_norm is None:
            return super().clip_grad(accelerator, parameters, None, norm_type, clip_value)
        parameters = list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type)
        for p in parameters:
            p.grad.mul_(max_norm / (norm + 1e-6))
        return norm


@caught_by("clip_norm")
class TellsTheNormAfterwards(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        if max_norm is None:
            return super().clip_grad(accelerator, parameters, None, norm_type, clip_value)
        super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])


@caught_by("clip_norm")
class ANormThatIsANumber(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        if max_norm is None:
            return super().clip_grad(accelerator, parameters, None, norm_type, clip_value)
        return float(super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value))


@caught_by("clip_norm")
class KnowsOneNorm(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        return super().clip_grad(accelerator, parameters, max_norm, 2.0, clip_value)


@caught_by("clip_value")
class ClipsNoValues(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        if max_norm is not None:
            return super().clip_grad(accelerator, parameters, max_norm, norm_type, None)
        return None


@caught_by("schedule")
class SaysEveryStepWasSkipped(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        super().optimizer_step(accelerator, optimizer, closure)
        return False


@caught_by("overflow")
class SaysNoStepWasSkipped(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        super().optimizer_step(accelerator, optimizer, closure)
        return True


@caught_by("overflow")
class OverflowStaysOnItsRank(Sound):
    def _average(self, accelerator, model):
        return None


@caught_by("precisions")
class AutocastCannotBeSwitchedOff(Sound):
    def autocast(self, accelerator, model, settings):
        return super().autocast(accelerator, model, None)


@caught_by("gradients_meet")
class ReducesLaterThanItSays(Sound):
    def backward(self, accelerator, loss, kwargs):
        loss.backward(**kwargs)

    def optimizer_step(self, accelerator, optimizer, closure):
        self._average(accelerator, accelerator.models[-1])
        return super().optimizer_step(accelerator, optimizer, closure)


@passes("gradients_meet")
class ReducesInItsStep(ReducesLaterThanItSays):
    reduces_gradients = "step"

    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        self._average(accelerator, accelerator.models[-1])
        return super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)


@caught_by("parameters_unfrozen_later")
class UnfrozenParametersStayApart(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        self._averaged = {id(p) for p in model.parameters() if p.requires_grad}
        return super().prepare_model(accelerator, model, evaluation_mode)

    def follow_trainable(self, accelerator, change, loss):
        return True

    def _average(self, accelerator, model):
        late = [p for p in model.parameters() if p.requires_grad and id(p) not in self._averaged]
        for parameter in late:
            parameter.requires_grad_(False)
        super()._average(accelerator, model)
        for parameter in late:
            parameter.requires_grad_(True)


@caught_by("declarations")
class DoesNotSayWhenGradientsMeet(Sound):
    reduces_gradients = None
