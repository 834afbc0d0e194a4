"""Mistakes that authors of backends have made, or are likely to make."""

from __future__ import annotations

import torch
import torch.distributed as dist
from registry import Sound, caught_by, passes

# --- gradients ----------------------------------------------------------------------------------------


@caught_by("training")
class DivTwice(Sound):
    def _average(self, accelerator, model):
        super()._average(accelerator, model)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= accelerator.num_processes


@caught_by("training")
class SumInsteadOfMean(Sound):
    def _average(self, accelerator, model):
        super()._average(accelerator, model)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= accelerator.num_processes


@caught_by("training")
class RoundedGradients(Sound):
    def _average(self, accelerator, model):
        super()._average(accelerator, model)
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad.to(torch.bfloat16).to(p.dtype)


@caught_by("training")
class ZeroGradNoop(Sound):
    def zero_grad(self, accelerator, optimizer, set_to_none):
        return None


@caught_by("clip_norm")
class ClipIgnored(Sound):
    def clip_grad(self, accelerator, parameters, max_norm, norm_type, clip_value):
        grads = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type) if max_norm is not None else None


@caught_by("clip_value")
class ClipValueIgnored(ClipIgnored):
    pass


@caught_by("backward_errors")
class SwallowsExceptions(Sound):
    def backward(self, accelerator, loss, kwargs):
        try:
            super().backward(accelerator, loss, kwargs)
        except Exception:
            return


# --- steps --------------------------------------------------------------------------------------------


@caught_by("groups")
class DoubleLearningRate(Sound):
    def prepare_optimizer(self, accelerator, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 2
        return optimizer


@caught_by("training")
class StepsTwiceOnRank1(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        stepped = super().optimizer_step(accelerator, optimizer, closure)
        if accelerator.process_index == 1:
            optimizer.step()
        return stepped


@caught_by("schedule")
class StepsAndReturnsFalse(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        super().optimizer_step(accelerator, optimizer, closure)
        return False


@caught_by("prepare")
class StaleOptimizer(Sound):
    """The optimizer keeps the parameters of the model from before `prepare`."""

    def prepare_optimizer(self, accelerator, optimizer):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        stale = [torch.nn.Parameter(p.detach().clone()) for p in held]
        return torch.optim.SGD(stale, optimizer.defaults["lr"])


# --- long runs and large tensors ------------------------------------------------------------------------


class Counts(Sound):
    reductions = 0

    def _average(self, accelerator, model):
        self.reductions += 1
        if self.averages(self.reductions):
            super()._average(accelerator, model)

    def averages(self, number):
        return True


@caught_by("long_run")
class StopsAfterThirtyReductions(Counts):
    def averages(self, number):
        return number <= 30


@caught_by("long_run")
class StopsAfterFiftyReductions(Counts):
    def averages(self, number):
        return number <= 50


@caught_by("long_run")
class LooseStopsAfterThirtyReductions(StopsAfterThirtyReductions):
    supports = {**Sound.supports, "exact": False}


@caught_by("long_run")
class LooseStopsAfterManyReductions(Counts):
    """Like thirty averages of parameters, one every 8 steps."""

    supports = {**Sound.supports, "exact": False}

    def averages(self, number):
        return number <= 8 * 30


@caught_by("long_run")
class ForgetsEveryThirdStep(Counts):
    def averages(self, number):
        return number % 3 != 0


class Selects(Sound):
    """Averages only the gradients that `chosen` selects."""

    def _average(self, accelerator, model):
        for p in model.parameters():
            if p.grad is not None and self.chosen(p):
                dist.all_reduce(p.grad)
                p.grad /= accelerator.num_processes

    def chosen(self, p):
        return True


@caught_by("long_run")
class AveragesSmallTensorsOnly(Selects):
    def chosen(self, p):
        return p.numel() <= 5000


@caught_by("long_run")
class AveragesTensorsUpTo100000Only(Selects):
    def chosen(self, p):
        return p.numel() <= 100_000


@caught_by("long_run")
class LooseAveragesSmallTensorsOnly(AveragesSmallTensorsOnly):
    supports = {**Sound.supports, "exact": False}


# --- models -------------------------------------------------------------------------------------------


@caught_by("same_start")
class NoStart(Sound):
    """Never sends the weights of rank 0."""

    def prepare_model(self, accelerator, model, evaluation_mode):
        return model


@caught_by("same_start")
class BuffersOff(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        return model


@passes("ties")
class BreakTies(Sound):
    """The core restores ties that `prepare_model` breaks."""

    def prepare_model(self, accelerator, model, evaluation_mode):
        model = super().prepare_model(accelerator, model, evaluation_mode)
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                copy = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, name, copy)
        return model


@caught_by("ties")
class BreakTiesLater(Sound):
    def backward(self, accelerator, loss, kwargs):
        super().backward(accelerator, loss, kwargs)
        for module in accelerator.models[-1].modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                copy = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                copy.grad = parameter.grad
                setattr(module, name, copy)


@caught_by("fine_tuning")
class Unfreeze(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        model.requires_grad_(True)
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("calls_of_models")
class EvalInPrepare(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        return super().prepare_model(accelerator, model, evaluation_mode).eval()


# --- data and collectives -------------------------------------------------------------------------------


@caught_by("ranks")
class LyingShard(Sound):
    def data_shard(self, runtime):
        return runtime.process_index, 2 * runtime.num_processes


@caught_by("ranks")
class SameDataTwice(Sound):
    def data_shard(self, runtime):
        return 0, runtime.num_processes


@caught_by("loader")
class DropEveryFifthBatch(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        fed = super().feed_device(accelerator, batches, non_blocking)
        return (batch for number, batch in enumerate(fed, 1) if number % 5)


@caught_by("collectives")
class GatherOrder(Sound):
    def gather(self, accelerator, tensor, scope):
        parts = super().gather(accelerator, tensor, scope).chunk(accelerator.num_processes)
        return torch.cat(parts[::-1])


@caught_by("collectives")
class GathersAnotherDtype(Sound):
    def gather(self, accelerator, tensor, scope):
        return super().gather(accelerator, tensor, scope).double()


@caught_by("collectives")
class GathersOneRankOnly(Sound):
    def gather(self, accelerator, tensor, scope):
        return super().gather(accelerator, tensor, scope)[: tensor.numel()]


@caught_by("collectives")
class BroadcastFromWrongRank(Sound):
    def broadcast(self, accelerator, tensor, src, scope):
        last = accelerator.num_processes - 1
        return super().broadcast(accelerator, tensor, last - src, scope)


# --- checkpoints ----------------------------------------------------------------------------------------


@caught_by("save_and_load")
class IgnoreModelOnLoad(Sound):
    def load_model_state(self, accelerator, model, state, strict):
        return None


@caught_by("resume")
class IgnoreOptimizerOnLoad(Sound):
    def load_optimizer_state(self, accelerator, optimizer, state):
        return None


@caught_by("resume")
class OwnGeneratorNotSaved(Sound):
    """Adds noise from its own generator, the same on all ranks."""

    supports = {**Sound.supports, "exact": False}

    def __init__(self, settings=None, handlers=()):
        super().__init__(settings, handlers)
        self.generator = torch.Generator().manual_seed(0)

    def optimizer_step(self, accelerator, optimizer, closure):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad += 0.1 * torch.randn(p.shape, generator=self.generator)
        return super().optimizer_step(accelerator, optimizer, closure)


# --- attributes -----------------------------------------------------------------------------------------


@caught_by("attributes")
class ServesTheDevice(Sound):
    def state_attributes(self, accelerator):
        return {"device": "mine"}
