"""A sound backend, damaged in one place at a time: each with the check that is to notice.

Run on two ranks: `mutants.py FOLDER [MUTANT...]`; a rank reports `{mutant: [check, state, error]}`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.testing import Lab, checks_of, write_result
from accelerate_core.testing.worker import Ranks, run_check

sys.path.insert(0, str(Path(sys.argv[1], "src")))
from accelerate_sound import SoundBackend as Sound

MUTANTS: dict[str, tuple[type, str]] = {}


def caught_by(check: str) -> Any:
    def register(cls: type) -> type:
        MUTANTS[cls.__name__] = (cls, check)
        return cls

    return register


def passes(*checks: str) -> Any:
    """Register a backend that is unusual and sound, by each check that it is to pass."""

    def register(cls: type) -> type:
        for check in checks:
            MUTANTS[f"{cls.__name__}.{check}"] = (cls, check)
        return cls

    return register


# --- ranks and talking -------------------------------------------------------------------------------


@caught_by("ranks")
class EveryRankIsMain(Sound):
    def main_process_index(self, accelerator):
        return accelerator.process_index


@caught_by("ranks")
class ShardsThatOverlap(Sound):
    def data_shard(self, accelerator):
        return 0, accelerator.num_processes


@caught_by("ranks")
class EveryRankReadsEverything(Sound):
    def data_shard(self, accelerator):
        return 0, 1


@caught_by("loader")
class LastBatchIsLost(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        held = None
        for batch in batches:
            if held is not None:
                yield held
            held = batch


@caught_by("loader")
class AnErrorEndsTheEpoch(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        fed = iter(super().feed_device(accelerator, batches, non_blocking))
        while True:
            try:
                yield next(fed)
            except Exception:
                return


@caught_by("loader")
class ReadsTheEpochFirst(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        yield from list(super().feed_device(accelerator, batches, non_blocking))


@caught_by("collectives")
class GatherInAnotherOrder(Sound):
    def gather(self, accelerator, tensor, scope):
        parts = super().gather(accelerator, tensor, scope).chunk(accelerator.num_processes)
        return torch.cat(parts[::-1])


@caught_by("collectives")
class EverythingTravelsAsFloat(Sound):
    def reduce(self, accelerator, tensor, op, scope):
        return super().reduce(accelerator, tensor.float(), op, scope).to(tensor.dtype)


@caught_by("collectives")
class MeanIsSum(Sound):
    def reduce(self, accelerator, tensor, op, scope):
        return super().reduce(accelerator, tensor, "sum" if op == "mean" else op, scope)


@caught_by("collectives")
class BroadcastFromTheFirst(Sound):
    def broadcast(self, accelerator, tensor, src, scope):
        return super().broadcast(accelerator, tensor, 0, scope)


@caught_by("objects")
class ObjectsOnTheMainRankOnly(Sound):
    def gather_object(self, accelerator, obj, scope):
        found = super().gather_object(accelerator, obj, scope)
        return found if accelerator.process_index == 0 or not isinstance(obj, dict) else [obj]


@caught_by("pieces")
class EveryRankGetsTheFirstPiece(Sound):
    def scatter(self, accelerator, parts, like, src, scope):
        parts = None if parts is None else [parts[0]] * len(parts)
        return super().scatter(accelerator, parts, like, src, scope)


@caught_by("barrier")
class NobodyWaits(Sound):
    def barrier(self, accelerator, scope):
        return None


# --- prepare -----------------------------------------------------------------------------------------


@caught_by("randomness")
class SeedsEachStep(Sound):
    def optimizer_step(self, accelerator, optimizer, closure):
        torch.manual_seed(0)
        return super().optimizer_step(accelerator, optimizer, closure)


@caught_by("randomness")
class SeedsEverythingAgain(Sound):
    def prepare_model(self, accelerator, model):
        torch.manual_seed(0)
        return super().prepare_model(accelerator, model)


@caught_by("same_start")
class RanksStartApart(Sound):
    def prepare_model(self, accelerator, model):
        return model


@caught_by("same_start")
class BuffersStartApart(Sound):
    def prepare_model(self, accelerator, model):
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        return model


@caught_by("kinds_of_models")
class NeedsParameters(Sound):
    def prepare_model(self, accelerator, model):
        next(model.parameters())
        return super().prepare_model(accelerator, model)


@caught_by("several_models")
class TheLastModelOnly(Sound):
    def backward(self, accelerator, loss, kwargs):
        loss.backward(**kwargs)
        self._average(accelerator, accelerator.models[-1])


@caught_by("several_models")
class LoadsTheFirstModelOnly(Sound):
    def load_model_state(self, accelerator, model, state, strict):
        if model is accelerator.models[0]:
            super().load_model_state(accelerator, model, state, strict)


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.held = model

    def forward(self, *arguments):
        return self.held(*arguments)


@caught_by("unwrap")
class NeverUnwraps(Sound):
    def prepare_model(self, accelerator, model):
        return Wrapper(super().prepare_model(accelerator, model))

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


# --- step --------------------------------------------------------------------------------------------


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


@caught_by("learning")
class RanksNeverMeet(Sound):
    supports = {**Sound.supports, "exact": False}

    def _average(self, accelerator, model):
        return None


@caught_by("counted_items")
class ItemsAreNotCounted(Sound):
    def scale_gradients(self, accelerator, models, factor):
        return None


@caught_by("clip_norm")
class ClipsEachTensor(Sound):
    def clip_grad_norm(self, accelerator, parameters, max_norm, norm_type):
        norms = [torch.nn.utils.clip_grad_norm_([p], max_norm) for p in parameters]
        return torch.stack(norms).norm()


@caught_by("small_gradients")
class MakesSmallGradientsLarge(Sound):
    def clip_grad_norm(self, accelerator, parameters, max_norm, norm_type):
        parameters = list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type)
        for p in parameters:
            p.grad.mul_(max_norm / (norm + 1e-6))
        return norm


@caught_by("clip_norm")
class TellsTheNormAfterwards(Sound):
    def clip_grad_norm(self, accelerator, parameters, max_norm, norm_type):
        super().clip_grad_norm(accelerator, parameters, max_norm, norm_type)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])


@caught_by("clip_norm")
class KnowsOneNorm(Sound):
    def clip_grad_norm(self, accelerator, parameters, max_norm, norm_type):
        return super().clip_grad_norm(accelerator, parameters, max_norm, 2.0)


@caught_by("clip_value")
class ClipsNoValues(Sound):
    def clip_grad_value(self, accelerator, parameters, clip_value):
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
    def autocast(self, accelerator, settings):
        return super().autocast(accelerator, None)


# --- models and optimizers as they are in the wild -----------------------------------------------------


@caught_by("fine_tuning")
class NeverTrains(Sound):
    def prepare_model(self, accelerator, model):
        return super().prepare_model(accelerator, model).eval()


@caught_by("fine_tuning")
class FrozenPartsStayApart(Sound):
    def prepare_model(self, accelerator, model):
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.requires_grad or not tensor.is_floating_point():
                dist.broadcast(tensor.detach(), src=0)
        return model


@caught_by("fine_tuning")
class CountersStayApart(Sound):
    def prepare_model(self, accelerator, model):
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
    def autocast(self, accelerator, settings):
        return nullcontext()


@caught_by("precisions")
class StaysApartInHalf(Sound):
    def _average(self, accelerator, model):
        if accelerator.mixed_precision == "no":
            super()._average(accelerator, model)


@caught_by("compiled")
class CannotBeCompiled(Sound):
    def prepare_model(self, accelerator, model):
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise TypeError("a model that is compiled")
        return super().prepare_model(accelerator, model)


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


# --- keep --------------------------------------------------------------------------------------------


@caught_by("save_and_load")
class ModelHalfSaved(Sound):
    def model_state(self, accelerator, model):
        state = super().model_state(accelerator, model)
        return {key: value for key, value in state.items() if "bias" not in key}

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
    """Has a momentum of its own: sound."""

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


@passes("save_later", "two_at_once", "resume", "learning")
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
    """Has momentum of its own, and keeps it to itself."""

    def __init__(self, settings=None, handlers=()):
        super().__init__(settings, handlers)
        self._mean = {}

    def optimizer_step(self, accelerator, optimizer, closure):
        for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            if p.grad is not None:
                p.grad = self._mean[index] = 0.5 * (self._mean.get(index, 0.0) + p.grad)
        return super().optimizer_step(accelerator, optimizer, closure)


@caught_by("save_fails")
class SavingWaitsForWhoFailed(Sound):
    def save_state(self, accelerator, directory, options, later):
        raise OSError("and another reason instead of the first")

    def load_state(self, accelerator, directory, options):
        return None


# --- end ---------------------------------------------------------------------------------------------


@caught_by("once_more")
class OnlyOnce(Sound):
    _used = False

    def on_end(self, accelerator):
        type(self)._used = True

    def check(self, accelerator):
        if self._used:
            raise RuntimeError("this process has had its Accelerator")


@caught_by("once_more")
class LeavesAFileOpen(Sound):
    _open = []

    def prepare_model(self, accelerator, model):
        self._open.append(Path(__file__).open())  # noqa: SIM115
        return super().prepare_model(accelerator, model)


@caught_by("once_more")
class LeavesAProcess(Sound):
    _started = []

    def on_start(self, accelerator):
        self._started.append(subprocess.Popen(["sleep", "600"]))


@caught_by("once_more")
class KeepsEveryModel(Sound):
    _kept = []

    def prepare_model(self, accelerator, model):
        self._kept.append(model)
        return super().prepare_model(accelerator, model)


@caught_by("once_more")
class LeavesVariables(Sound):
    def on_start(self, accelerator):
        os.environ["SOUND_WAS_HERE"] = "1"


@caught_by("once_more")
class LeavesAHandler(Sound):
    def on_start(self, accelerator):
        signal.signal(signal.SIGUSR2, lambda *told: None)


@caught_by("once_more")
class Prints(Sound):
    def prepare_model(self, accelerator, model):
        print("a model")
        return super().prepare_model(accelerator, model)


@caught_by("settings")
class ForgetsItsSettings(Sound):
    def __init__(self, settings=None, handlers=()):
        super().__init__(None, handlers)


@caught_by("two_at_once")
class OneForAll(Sound):
    _first = None

    def on_start(self, accelerator):
        cls = type(self)
        if cls._first is not None and not cls._first.closed:
            raise RuntimeError("there is another Accelerator")
        cls._first = accelerator


# --- sound -------------------------------------------------------------------------------------------


@passes("ranks", "same_start", "training", "several_models", "overflow", "resume")
class TheLastRankIsMain(Sound):
    def main_process_index(self, accelerator):
        return accelerator.num_processes - 1

    def prepare_model(self, accelerator, model):
        if accelerator.num_processes > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=accelerator.num_processes - 1)
        return model


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    found: dict[str, Any] = {}
    known = checks_of("backend")
    for name in wanted or MUTANTS:
        cls, check = MUTANTS[name]
        here = folder / f"of_{name}"
        here.mkdir(exist_ok=True)
        found[name] = [check, "began", ""]
        write_result(found)
        lab = Lab("backend", "sound", cls, here, timeout=4.0)
        ranks = Ranks(here, 4.0)
        line = run_check(known[check].function, lab)
        ranks.say(check, line)
        if not ranks.all_well(check):
            lab.abandon()
        found[name] = [check, line["state"], line["error"]]
        write_result(found)


if __name__ == "__main__":
    main()
