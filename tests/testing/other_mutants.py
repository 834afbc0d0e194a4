"""Mutants: plugins of every kind but backends with one fault, and the check that must notice each.

Run with the plugins of its entry points on the path, in one process or on ranks:
`other_mutants.py PLACE FOLDER` writes `PLACE.RANK.said` to the folder, a list of
`[mutant, check, state, error]`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate_diary import DiaryTracker
from accelerate_grid import GridPrecision, GridSettings
from accelerate_records import RecordsLoader, RecordsLoaderFactory
from accelerate_starter import StarterLauncher
from accelerate_tally import TallyExtension, TallySettings

from accelerate_checkpoint import DirectoryCheckpointer, TrainingState
from accelerate_core import hookimpl
from accelerate_core.errors import CheckpointError
from accelerate_core.plugin import KwargsHandler, Precision, option, settings
from accelerate_core.training.gradient_state import BatchInfo
from accelerate_launch.simple import target_command
from accelerate_testing import CheckContext, checks_of
from accelerate_testing.suites import ending, leaving
from accelerate_testing.worker import Ranks, run_check

READERS = {"read": "reading:read", "read_config": "reading:read_config"}
OPTIONS = {"tracker": READERS, "loaders": {"make": "making:make"}}
#: Name of the plugin -> its class, its kind, and the expected result of each check.
PLUGINS: dict[str, tuple[type, str, dict[str, str]]] = {}


def _register(kind: str, checks: dict[str, str]) -> Any:
    def register(cls: Any) -> Any:
        cls.name = cls.__name__.lower()
        PLUGINS[cls.name] = cls, kind, checks
        return cls

    return register


def caught_by(kind: str, check: str) -> Any:
    return _register(kind, {check: "failed"})


def passes(kind: str, *checks: str) -> Any:
    """Register an unusual but correct plugin."""
    return _register(kind, dict.fromkeys(checks, "passed"))


def _add(kind: str, check: str, name: str, base: type, **members: Any) -> None:
    made = type(name, (base,), {"__module__": __name__, **members})
    globals()[name] = caught_by(kind, check)(made)


def also(kind: str, check: str, name: str, base: type, method: str, act: Any) -> None:
    """Register a plugin that first calls `act` with itself in a method."""
    if method.startswith("on_"):  # a hook, which the correct plugin may lack

        def hook(self, accelerator):
            act(self)

        marked = hookimpl(hook) if kind == "extension" else hook
        return _add(kind, check, name, base, **{method: marked})
    own = getattr(base, method)

    @functools.wraps(own)
    def both(self, *args, **kwargs):
        act(self)
        return own(self, *args, **kwargs)

    return _add(kind, check, name, base, **{method: both})


def keeps(kind: str, check: str, name: str, changed: Any) -> None:
    """Register a tracker that writes the values that `changed` returns."""

    def log(self, values, step=None, **kwargs):
        DiaryTracker.log(self, changed(values, step), step)

    _add(kind, check, name, DiaryTracker, log=log)


def starts(kind: str, check: str, name: str, line: str) -> None:
    """Register a launcher that runs a line of code before it starts its ranks."""
    main = "sys.exit(start.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]))"
    code = f"import os, sys\nfrom accelerate_starter import start\n{line}\n{main}"
    _add(kind, check, name, Other, code=code)


def shrink(optimizer: Any, factor: float) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


# --- faults of any kind of plugin ---------------------------------------------------------------------

OPENED: list[Any] = []


def reseed(_: Any) -> None:
    torch.manual_seed(0)


def draw(_: Any) -> None:
    torch.rand(1)


def set_threads(_: Any) -> None:
    torch.set_num_threads(3)


def refuse(_: Any) -> None:
    raise RuntimeError("not this one")


def say(_: Any) -> None:
    print("a step or a run")


def leave_a_thread(_: Any) -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def leave_a_process(plugin: Any) -> None:
    plugin.child = subprocess.Popen(["sleep", "543"])


def leave_a_file_open(_: Any) -> None:
    OPENED.append(open(__file__, encoding="utf-8"))  # noqa: SIM115


def leave_a_variable(_: Any) -> None:
    os.environ["TALLY"] = "1"


def leave_a_file(_: Any) -> None:
    tempfile.mkstemp(prefix="left_by_a_mutant")


def write_beside_the_run(_: Any) -> None:
    Path("last_run.txt").write_text("suite")


def write_into_the_home(_: Any) -> None:
    (Path.home() / ".left_by_a_mutant").write_text("suite")


def remove_what_was_written(tracker: Any) -> None:
    (tracker.folder / "values.csv").unlink(missing_ok=True)


also("precision", "randomness", "ReseedsAtTheStart", GridPrecision, "on_start", reseed)
also("precision", "once_more", "LeavesAThread", GridPrecision, "on_start", leave_a_thread)
also("precision", "once_more", "LeavesAThreadSetting", GridPrecision, "on_start", set_threads)
also("extension", "randomness", "ReseedsAtEachStep", TallyExtension, "on_step_end", reseed)
also("extension", "one_process", "DrawsAtEachStep", TallyExtension, "on_step_end", draw)
also("extension", "errors", "RaisesAfterAnError", TallyExtension, "on_error", refuse)
also("extension", "once_more", "RaisesWhereMemoryIsFreed", TallyExtension, "on_free", refuse)
also("extension", "once_more", "PrintsEachStep", TallyExtension, "on_step_end", say)
also("extension", "once_more", "LeavesAVariable", TallyExtension, "on_start", leave_a_variable)
also("extension", "once_more", "LeavesAProcess", TallyExtension, "on_start", leave_a_process)
also("extension", "once_more", "LeavesAFileOpen", TallyExtension, "on_start", leave_a_file_open)
also("extension", "once_more", "LeavesOneMoreThread", TallyExtension, "on_start", leave_a_thread)
also("extension", "once_more", "LeavesATemporaryFile", TallyExtension, "on_end", leave_a_file)
also("tracker", "once_more", "LeavesAThreadPerRun", DiaryTracker, "start", leave_a_thread)
also("tracker", "once_more", "LeavesAProcessPerRun", DiaryTracker, "start", leave_a_process)
also("tracker", "once_more", "PrintsEachRun", DiaryTracker, "start", say)
also("tracker", "once_more", "RemovesTheRunBefore", DiaryTracker, "start", remove_what_was_written)
also("tracker", "once_more", "WritesBesideTheRun", DiaryTracker, "finish", write_beside_the_run)
also("tracker", "once_more", "WritesIntoTheHome", DiaryTracker, "finish", write_into_the_home)
also("checkpointer", "ending", "LeavesItsThread", DirectoryCheckpointer, "attach", leave_a_thread)
also("checkpointer", "ending", "PrintsWhereItSaves", DirectoryCheckpointer, "save_state", say)
also("loaders", "ending", "LeavesAWorker", RecordsLoaderFactory, "make_loader", leave_a_thread)


# --- precisions --------------------------------------------------------------------------------------


@caught_by("precision", "settings")
class ForgetsItsBits(GridPrecision):
    def __init__(self, settings=None):
        super().__init__(GridSettings())


@caught_by("precision", "modes_stay")
class StopsDropout(GridPrecision):
    def convert(self, model):
        return super().convert(model).eval()


@caught_by("precision", "modes_stay")
class ThawsWhatIsFrozen(GridPrecision):
    def convert(self, model):
        return super().convert(model).requires_grad_(True)


@caught_by("precision", "one_process")
class SkipsEveryStep(GridPrecision):
    needs = frozenset({"modules", "loss_scaling"})

    def scaler(self, runtime, options):
        return torch.amp.GradScaler(runtime.device.type, init_scale=2.0**127, backoff_factor=0.999)


@caught_by("precision", "randomness")
class ReseedsAtEachModel(GridPrecision):
    def convert(self, model):
        torch.manual_seed(0)
        return super().convert(model)


@caught_by("precision", "names_stay")
class MakesFloat32OfModels(GridPrecision):
    def convert(self, model):
        return super().convert(model).float()


@caught_by("precision", "save_and_load")
class SavesTheFirstModelOnly(GridPrecision):
    """Shrinks each model more with every step, but saves the progress of one of them only."""

    def __init__(self, settings=None):
        super().__init__(settings)
        self.ages = {}

    def on_step_end(self, accelerator, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        which = [one.param_groups[0]["params"][0] is first for one in accelerator.optimizers].index(
            True
        )
        self.ages[which] = self.ages.get(which, 0) + 1
        shrink(optimizer, 1.0 - 0.01 * self.ages[which])

    def on_save(self, accelerator, directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "age.json").write_text(json.dumps(self.ages.get(0, 0)))

    def on_load(self, accelerator, directory):
        self.ages = {0: json.loads((directory / "age.json").read_text())}


@caught_by("precision", "two_processes")
class RanksDriftApart(GridPrecision):
    def on_step_end(self, accelerator, optimizer):
        shrink(optimizer, 1.0 + 0.002 * accelerator.process_index)


@caught_by("precision", "one_process")
class LeavesAutocastOn(GridPrecision):
    needs = frozenset({"modules", "autocast"})

    def autocast(self, accelerator, model, options):
        torch.set_autocast_enabled(accelerator.device.type, True)
        return super().autocast(accelerator, model, options)


@caught_by("precision", "needs")
class SaysAnotherWord(GridPrecision):
    needs = frozenset({"parameters"})


@caught_by("precision", "needs")
class ReplacesTheOptimizer(GridPrecision):
    def prepare(self, accelerator, plan):
        plan.each("optimizer", lambda one, _: torch.optim.Adam([{**g} for g in one.param_groups]))


@caught_by("precision", "forward_collectives")
class TalksInForward(GridPrecision):
    def convert(self, accelerator, model):
        def meet(_, given):
            accelerator.reduce(given[0], "max")

        model.register_forward_pre_hook(meet)
        return super().convert(model)


@caught_by("precision", "compiled")
class ComputesOtherwiseCompiled(GridPrecision):
    def convert(self, model):
        model.out.register_forward_hook(
            lambda _, __, out: out + 9.0 * torch.compiler.is_compiling()
        )
        return super().convert(model)


@caught_by("precision", "needs")
class DoesNothing(GridPrecision):
    def convert(self, model):
        return model


@caught_by("precision", "needs")
class DeclaresAutocastOnly(Precision):
    api_version = (1, 0)
    needs = frozenset({"autocast"})


@passes("precision", "needs", "forward_collectives")
class SaysWhatItDoes(TalksInForward):
    needs = frozenset({"modules", "forward_collectives", "subclasses"})


@passes("precision", "one_process", "save_and_load", "two_processes")
class ScalesFromFarAbove(GridPrecision):
    needs = frozenset({"modules", "loss_scaling"})

    def scaler(self, runtime, options):
        return torch.amp.GradScaler(runtime.device.type, init_scale=2.0**127, backoff_factor=0.25)


@passes("precision", "two_processes", "one_process")
class ScalesByItsOwnSamples(GridPrecision):
    """In training, the outputs depend on the samples that this rank has seen."""

    def convert(self, model):
        model = super().convert(model)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.top = torch.zeros(())
                module.register_forward_hook(self._scale)
        return model

    def _scale(self, module, inputs, output):
        if not module.training:
            return output
        module.top = torch.maximum(0.9 * module.top, inputs[0].detach().abs().max().cpu())
        step = float(module.top) / 127
        rounded = (output / step).round() * step
        return output + (rounded - output).detach()


@_register("precision", {"one_process": "skipped", "randomness": "skipped"})
class NeedsAGpu(GridPrecision):
    def check(self, runtime):
        from accelerate_core.errors import ConfigurationError

        raise ConfigurationError(f"there is no grid on {runtime.device}")


# --- extensions --------------------------------------------------------------------------------------


@caught_by("extension", "settings")
class ForgetsItsSettings(TallyExtension):
    def __init__(self, settings=None):
        super().__init__(TallySettings())


@caught_by("extension", "attributes")
class HidesTheDevice(TallyExtension):
    @hookimpl
    def state_attributes(self):
        return {"device": "mine"}


@caught_by("extension", "settings")
class SharesItsVariables(TallyExtension):
    """Reads its settings from the variables of another distribution's plugin."""

    @settings(env_prefix="ACCELERATE_DDP_", section="shares_config")
    class Settings(KwargsHandler):
        bucket_cap_mb: int = option(default=1, help="also a setting of ddp")


@caught_by("extension", "save_and_load")
class SavesNoFloat(TallyExtension):
    total = 0.0

    @hookimpl
    def on_step_end(self, accelerator):
        self.total += 0.5

    @hookimpl
    def state_attributes(self):
        return {"total": self.total}


@caught_by("extension", "save_and_load")
class SavesNoList(TallyExtension):
    def __init__(self, settings=None):
        super().__init__(settings)
        self.seen = []

    @hookimpl
    def on_step_end(self, accelerator):
        self.seen.append({"step": len(self.seen)})

    @hookimpl
    def state_attributes(self):
        return {"seen": self.seen}


@caught_by("extension", "save_and_load")
class ForgetsHowFarItWas(TallyExtension):
    """No attribute shows its state, but training continues differently without it."""

    age = 0

    @hookimpl
    def on_step_end(self, accelerator, optimizer):
        self.age += 1
        shrink(optimizer, 1.0 - 0.01 * self.age)


@caught_by("extension", "save_and_load")
class SavesNoTensor(TallyExtension):
    mean = torch.zeros(3)

    @hookimpl
    def on_step_end(self, accelerator):
        self.mean = self.mean + 1.0

    @hookimpl
    def state_attributes(self):
        return {"mean": self.mean}


@caught_by("extension", "save_and_load")
class SavesNoListOfTensors(TallyExtension):
    """Keeps an average of each parameter, and loses it."""

    def __init__(self, settings=None):
        super().__init__(settings)
        self.means = []

    @hookimpl
    def prepare_objects(self, plan):
        for model in plan.values("model"):
            self.means += [(p, p.detach().clone()) for p in model.parameters()]

    @hookimpl
    def on_step_end(self, accelerator):
        for parameter, mean in self.means:
            mean.lerp_(parameter.detach(), 0.01)

    @hookimpl
    def state_attributes(self):
        return {"means": [mean for _, mean in self.means]}


@passes("extension", "settings")
class HandsItsSettingsOn(TallyExtension):
    def __init__(self, settings=None):
        self.later = [lambda: settings.every]


@caught_by("extension", "two_processes")
class SkewsOneRank(TallyExtension):
    @hookimpl
    def on_step_end(self, accelerator, optimizer):
        shrink(optimizer, 1.0 + 0.001 * accelerator.process_index)


class Averages(TallyExtension):
    """Averages gradients itself, correctly."""

    @hookimpl
    def reduce_gradients(self, accelerator, model):
        return self

    def all_reduce(self, gradients, bucket, group):
        torch.distributed.all_reduce(gradients, group=group)
        return gradients / group.size()

    def reduce_scatter(self, output, gradients, bucket, group): ...


@passes("extension", "two_processes")
class AveragesItself(Averages): ...


@caught_by("extension", "two_processes")
class AddsGradientsUp(Averages):
    def all_reduce(self, gradients, bucket, group):
        return super().all_reduce(gradients, bucket, group) * group.size()


@caught_by("extension", "two_processes")
class ForgetsToReduce(Averages):
    def all_reduce(self, gradients, bucket, group):
        return gradients


@caught_by("extension", "one_process")
class ReplacesTheRate(TallyExtension):
    @hookimpl
    def prepare_objects(self, plan):
        for optimizer in plan.values("optimizer"):
            optimizer.param_groups[0]["lr"] *= 2


@caught_by("extension", "one_process")
class LosesTheOptimizersGroups(TallyExtension):
    @hookimpl
    def prepare_objects(self, plan):
        plan.each("optimizer", lambda one, _: torch.optim.SGD(one.param_groups[0]["params"], 0.1))


@passes("extension", "once_more", "two_processes")
class HasOneWorker(TallyExtension):
    worker = None

    @hookimpl
    def on_start(self, accelerator):
        if HasOneWorker.worker is None:
            HasOneWorker.worker = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
            HasOneWorker.worker.start()


@passes("extension", "save_and_load", "settings")
class ServesClocks(TallyExtension):
    def __init__(self, settings=None):
        self.lines = settings.every if settings else 0
        self.began, self.steps = time.monotonic(), 0

    @hookimpl
    def on_step_end(self, accelerator):
        self.steps += 1

    @hookimpl
    def state_attributes(self):
        passed = time.monotonic() - self.began
        return {
            "uptime_ms": int(1000 * passed),
            "uptime_s": int(passed),
            "rate": self.steps / passed,
            "steps": self.steps,
        }


# --- trackers ----------------------------------------------------------------------------------------


def without(kind: type) -> Any:
    return lambda values, step: {k: v for k, v in values.items() if not isinstance(v, kind)}


def with_short_texts(values: dict[str, Any], step: int | None) -> dict[str, Any]:
    return {k: v[:4] if isinstance(v, str) else v for k, v in values.items()}


keeps("tracker", "kept", "LosesTexts", without(str))
keeps("tracker", "kept", "LosesFlags", without(bool))
keeps("tracker", "kept", "LosesWhatHasNoStep", lambda values, step: {} if step is None else values)
keeps("tracker", "read_back", "EveryValueIsZero", lambda values, step: dict.fromkeys(values, 0.0))
keeps("tracker", "read_back", "TextsAreCutOff", with_short_texts)


@caught_by("tracker", "step_numbers")
class CountsStepsFromOne(DiaryTracker):
    def log(self, values, step=None, **kwargs):
        super().log(values, None if step is None else step + 1)


@caught_by("tracker", "kept")
class LosesTheConfig(DiaryTracker):
    def store_init_configuration(self, values):
        pass


@caught_by("tracker", "read_back")
class ConfigIsRounded(DiaryTracker):
    def store_init_configuration(self, values):
        rounded = {k: round(v) if isinstance(v, float) else v for k, v in values.items()}
        super().store_init_configuration(rounded)


class Unread(DiaryTracker):
    """A tracker without a reader, which needs no directory."""

    name = "unread"
    requires_logging_directory = False
    suite_options: dict[str, Any] = {}

    def __init__(self, project_name):
        super().__init__(project_name)


@passes("tracker", "kept", "once_more")
class WritesWhereItIs(Unread):
    pass


@caught_by("tracker", "kept")
class ReplacesNumbersWhereItIs(Unread):
    def log(self, values, step=None, **kwargs):
        super().log({k: v if isinstance(v, str) else 0.0 for k, v in values.items()}, step)


@caught_by("tracker", "kept")
class KeepsZerosInMemory(Unread):
    def start(self):
        self.file, self.seen = None, []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.seen += [dict.fromkeys(values, 0.0)]

    flush = finish = lambda self: None


@caught_by("tracker", "values")
class RaisesAnExitAtALog(DiaryTracker):
    def log(self, values, step=None, **kwargs):
        raise SystemExit("no licence")


@caught_by("tracker", "values")
class RaisesAnExitWhereItIsReached(DiaryTracker):
    @property
    def tracker(self):
        raise SystemExit("no licence")


class Resumes(DiaryTracker):
    name = "resumes"
    resumes = True
    run_id = property(lambda self: self.folder.name)


@passes("tracker", "resumed", "once_more")
class GoesOnInItsRun(Resumes):
    def start(self):
        self.folder /= self.resume_id or f"run_{time.time_ns()}"
        super().start()


@caught_by("tracker", "resumed")
class IgnoresTheRunToResume(Resumes):
    def start(self):
        self.folder /= f"run_{time.time_ns()}"
        super().start()


@caught_by("tracker", "resumed")
class BeginsTheResumedRunAnew(Resumes):
    def start(self):
        (self.folder / "values.csv").unlink(missing_ok=True)
        super().start()


@caught_by("tracker", "resumed")
class TellsNoRunToResume(Resumes):
    run_id = None


@caught_by("tracker", "flushed")
class FlushesNothing(DiaryTracker):
    def flush(self):
        pass


@caught_by("tracker", "two_processes")
class LosesTheOtherRank(DiaryTracker):
    main_process_only = False

    def log(self, values, step=None, **kwargs):
        if self.run_group.rank == 0:
            super().log(values, step)


@passes("tracker", "kept", "flushed", "read_back", "once_more", "two_processes")
class HasARunPerRank(DiaryTracker):
    main_process_only = False

    def start(self):
        if self.run_group.rank:
            self.folder /= f"rank{self.run_group.rank}"
        super().start()


@passes("tracker", "kept", "flushed")
class WritesAtTheEnd(DiaryTracker):
    def flush(self):
        return False


# --- launchers ---------------------------------------------------------------------------------------


class Other(StarterLauncher):
    """Starts its ranks with other code."""

    name = "other"
    code = ""

    def launch_command(self, plan):
        words = [str(plan.num_processes), str(plan.main_process_port or 0)]
        return [sys.executable, "-c", self.code, *words, "--", *target_command(plan.target)]


DROP_VARIABLES = """
for name in list(os.environ):
    if not name.startswith(("ACCELERATE_", "PATH", "HOME", "PYTHON")):
        del os.environ[name]
"""

starts("launcher", "terminated", "LeavesItsRanks", "start.signal.signal = lambda *_: None")
starts("launcher", "ranks", "TakesAnotherPort", "sys.argv[2] = '0'")
starts("launcher", "ranks", "StartsTwoAtMost", "sys.argv[1] = str(min(int(sys.argv[1]), 2))")
starts("launcher", "ranks", "DropsVariables", DROP_VARIABLES)
starts("launcher", "ranks", "WorksElsewhere", "os.chdir('/')")
AT_MOST_EIGHT = "sys.argv[1] = str(min(int(sys.argv[1]), 8))"
SUCCEEDS = "start.signal.signal(start.signal.SIGINT, lambda *_: sys.exit(0))"
ONE = "whole = start.main; start.main = lambda *words: min(1, whole(*words))"
starts("launcher", "many_ranks", "StartsEightAtMost", AT_MOST_EIGHT)
starts("launcher", "interrupted", "TakesCtrlCForSuccess", SUCCEEDS)
starts("launcher", "preempted", "LosesTheStatus", ONE)
starts("launcher", "preempted", "DoesNotWaitForSaving", "start.signal.signal = lambda *_: None")
starts("launcher", "one_process", "KeepsTheOutput", "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)")


@caught_by("launcher", "failure")
class WatchesTheLastRankOnly(Other):
    code = """
import os, subprocess, sys
from accelerate_starter import start
count, command = int(sys.argv[1]), sys.argv[4:]
ranks = [
    subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count)})
    for rank in range(count)
]
code = ranks[-1].wait()
for one in ranks:
    one.kill()
sys.exit(code)
"""


#: Collects the lines of its ranks, and shows them when all have ended.
LINES = """
import os, subprocess, sys
count, command = int(sys.argv[1]), sys.argv[4:]
ranks = [
    subprocess.Popen(
        command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    for rank in range(count)
]
lines = [line for one in ranks for line in one.communicate()[0].splitlines()]
"""


@caught_by("launcher", "output")
class SortsTheOutput(Other):
    code = LINES + "print('\\n'.join(sorted(lines)))"


@caught_by("launcher", "output")
class LosesTheLastLine(Other):
    code = LINES + "print('\\n'.join(lines[:-1]))"


@caught_by("launcher", "output")
class CutsLines(Other):
    code = LINES + "print('\\n'.join(line[:25] for line in lines))"


@passes("launcher", "output")
class ShowsTheOutputAtTheEnd(Other):
    code = LINES + "print('\\n'.join(f'[prefix] {line}' for line in lines))"


@caught_by("launcher", "targets")
class KnowsScriptsOnly(Other):
    def launch_command(self, plan):
        words = super().launch_command(plan)
        return [*words[: words.index("--") + 1], sys.executable, plan.target.name]


@passes("launcher", "one_process")
class PrefixesLines(Other):
    code = """
import subprocess, sys
done = subprocess.run(sys.argv[4:], capture_output=True, text=True)
for line in done.stdout.splitlines():
    print("[rank 0]", line)
sys.exit(done.returncode)
"""


# --- checkpointers -----------------------------------------------------------------------------------


class Keeps(DirectoryCheckpointer):
    """Reads the run through methods in `seen`, which a mutant replaces."""

    seen: dict[str, Any] = {}

    def attach(self, run):
        super().attach(run)
        own = type(self._state)
        self._state.__class__ = type(own.__name__, (own,), self.seen)


@passes("checkpointer", "resume", "failing", "damaged", "beside_training_on_ranks", "ending")
class ChangesNothing(Keeps):
    pass


def seeds_anew(self, *arguments, **options):
    TrainingState.load_rank_state(self, *arguments, **options)
    torch.manual_seed(0)


@caught_by("checkpointer", "resume")
class ForgetsTheGenerators(Keeps):
    seen = {"load_rank_state": seeds_anew}


@caught_by("checkpointer", "resume")
class ForgetsGradients(Keeps):
    seen = {"pending_gradients": lambda self: {}}


@caught_by("checkpointer", "failing")
class WritesInPlace(DirectoryCheckpointer):
    def save_state(self, target=None, **how):
        shutil.rmtree(target, ignore_errors=True)
        return super().save_state(target, **how)


@caught_by("checkpointer", "failing_on_ranks")
class TellsTheFailedRankOnly(DirectoryCheckpointer):
    def save_state(self, target=None, **how):
        try:
            return super().save_state(target, **how)
        except CheckpointError:
            if self._state.process.process_index:
                raise
            return target


@caught_by("checkpointer", "damaged")
class ComparesSizesOnly(DirectoryCheckpointer):
    def load_state(self, source=None, **how):
        return super().load_state(source, **{**how, "verify": False})


@caught_by("checkpointer", "ending")
class LeavesAThreadAfterAFailedLoad(DirectoryCheckpointer):
    def load_state(self, source=None, **how):
        try:
            return super().load_state(source, **how)
        except CheckpointError:
            leave_a_thread(self)
            raise


@caught_by("checkpointer", "ending")
class LeavesAFileAfterAFailedLoad(DirectoryCheckpointer):
    def load_state(self, source=None, **how):
        try:
            return super().load_state(source, **how)
        except CheckpointError:
            leave_a_file(self)
            raise


@caught_by("checkpointer", "pickles")
class UnpicklesAnything(DirectoryCheckpointer):
    def load_state(self, source=None, **how):
        return super().load_state(source, **{**how, "trust": True})


@caught_by("checkpointer", "beside_training")
class WritesWhatTrainingMadeOfIt(DirectoryCheckpointer):
    def attach(self, run):
        super().attach(run)
        self.background.staging.copy = lambda held: held


# --- loader factories -------------------------------------------------------------------------------


class Makes(RecordsLoaderFactory):
    """Creates the loader class of a mutant."""

    loader: type[RecordsLoader] = RecordsLoader

    def make_loader(self, accelerator, loader):
        made = super().make_loader(accelerator, loader)
        if made is not None:
            made.__class__ = self.loader
        return made


@passes(
    "loaders",
    "every_sample",
    "order",
    "resume",
    "metrics_on_ranks",
    "resume_on_ranks",
    "slots",
    "ending",
)
class MakesThemWell(Makes):
    pass


@caught_by("loaders", "every_sample_on_ranks")
class ReadsTheSameEverywhere(Makes):
    class loader(RecordsLoader):
        def _places(self, at):
            return super()._places(at - self._index * self.batch_size)


@caught_by("loaders", "metrics_on_ranks")
class KeepsToItselfWhatWasAdded(Makes):
    class loader(RecordsLoader):
        def _start(self, served):
            for batch in super()._start(served):
                served.real = None
                yield batch


@caught_by("loaders", "uneven")
class FillsInAnyCase(Makes):
    class loader(RecordsLoader):
        _fills = property(lambda self: self._count > 1)


@caught_by("loaders", "order")
class ShufflesOnce(Makes):
    class loader(RecordsLoader):
        def _order(self, epoch):
            return super()._order(0)


@caught_by("loaders", "order")
class ShufflesWithTheScriptsGenerator(Makes):
    class loader(RecordsLoader):
        def _order(self, epoch):
            return torch.randperm(len(self.dataset)) if self.shuffle else None


@caught_by("loaders", "resume")
class BeginsTheEpochAnew(Makes):
    class loader(RecordsLoader):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, "samples_seen": 0})


@caught_by("loaders", "resume")
class ForgetsWhichEpochItWas(Makes):
    class loader(RecordsLoader):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, "epoch": 0})


@caught_by("loaders", "resume_on_ranks")
class CountsItsOwnSamplesOnly(Makes):
    class loader(RecordsLoader):
        def state_dict(self):
            state = super().state_dict()
            return {**state, "samples_seen": state["samples_seen"] // self._count}


@caught_by("loaders", "resume_twice")
class CountsFromWhereItWasResumed(Makes):
    class loader(RecordsLoader):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.begun = state_dict["samples_seen"]

        def state_dict(self):
            state = super().state_dict()
            return {**state, "samples_seen": state["samples_seen"] - getattr(self, "begun", 0)}


@caught_by("loaders", "abandoned")
class GoesOnWhereALoopWasLeft(Makes):
    class loader(RecordsLoader):
        def _start(self, served):
            self._position.owner = None
            return super()._start(served)


@caught_by("loaders", "skipping")
class SkipsForGood(Makes):
    class loader(RecordsLoader):
        def skipping(self, num_batches):
            self._skip = num_batches
            return self


@caught_by("loaders", "accumulation")
class NeverSaysThatItEnds(Makes):
    class loader(RecordsLoader):
        def _start(self, served):
            for batch in super()._start(served):
                served.last = False
                yield batch


@caught_by("loaders", "slots")
class HandsItsBatchesOutAlone(Makes):
    class loader(RecordsLoader):
        def __iter__(self):
            state, served = self._accelerator.gradient_state, BatchInfo()
            state._open.append((weakref.ref(self), served))
            for batch in self._start(served):
                state._touched = served
                yield batch
            state._open.clear()


@caught_by("loaders", "placing")
class LeavesBatchesWhereTheyAre(Makes):
    class loader(RecordsLoader):
        def _fed(self, batches):
            return batches


@caught_by("loaders", "others")
class TakesAnyLoader(Makes):
    def make_loader(self, accelerator, loader):
        return super().make_loader(accelerator, loader) or Eight(accelerator)


class Eight:
    """A loader of two fixed batches."""

    iteration = remainder = 0

    def __init__(self, accelerator):
        self._state = accelerator.gradient_state

    def __iter__(self):
        return self._state.serve(self, lambda served: iter([torch.arange(4)] * 2))

    def __len__(self):
        return 2

    def nothing(self, *_):
        return {}

    set_epoch = state_dict = load_state_dict = skipping = nothing


def main(place: str, folder: Path, only: str = "", times: str = "1") -> None:
    leaving._GRACE = 0.5  # what is left on purpose does not end
    ranks = Ranks(folder, 10.0)
    told: list[tuple[str, str, str, str]] = []
    environ = dict(os.environ)
    for name, (cls, kind, checks) in PLUGINS.items():
        known = checks_of(kind)
        for check, number in itertools.product(checks, range(int(times))):
            made = known[check]
            if made.alone != (place == "alone") or only not in ("", f"{name}.{check}"):
                continue
            here = folder / f"{name}.{check}{f'.{number}' if number else ''}"
            here.mkdir(exist_ok=True)
            if kind == "extension":
                os.environ["ACCELERATE_PLUGINS"] = name
            ending.began = ending.Began()  # as in a process of its own
            options = getattr(cls, "suite_options", OPTIONS.get(kind, {}))
            ctx = CheckContext(kind, name, name, here, 10.0, options)
            line = run_check(made.function, ctx)
            ranks.say(here.name, line)
            if not ranks.all_well(here.name):
                ctx.abandon()
            told.append((name, check, line["state"], line["error"]))
            for child in psutil.Process().children():
                child.kill()
            os.environ.clear()
            os.environ.update(environ)
            torch.set_num_threads(1)
            torch.set_autocast_enabled("cpu", False)
    path = folder / f"{place}.{ranks.rank}.said"
    path.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
