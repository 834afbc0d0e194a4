"""Faults at the end of a run, and leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from pathlib import Path

import torch
from registry import Sound, caught_by


@caught_by("once_more")
class OnlyOnce(Sound):
    _used = False

    def on_end(self, accelerator):
        type(self)._used = True

    def check(self, runtime):
        if self._used:
            raise RuntimeError("this process has had its Accelerator")


@caught_by("once_more")
class LeavesAFileOpen(Sound):
    _open = []

    def prepare_model(self, accelerator, model, evaluation_mode):
        self._open.append(Path(__file__).open())  # noqa: SIM115
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("once_more")
class LeavesAProcess(Sound):
    _started = []

    def on_start(self, accelerator):
        self._started.append(subprocess.Popen(["sleep", "600"]))


@caught_by("once_more")
class LeavesAFileWhereItIs(Sound):
    def on_end(self, accelerator):
        torch.save({}, "left.pt")


@caught_by("once_more")
class KeepsEveryModel(Sound):
    _kept = []

    def prepare_model(self, accelerator, model, evaluation_mode):
        self._kept.append(model)
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("once_more")
class LeavesVariables(Sound):
    def on_start(self, accelerator):
        os.environ["SOUND_WAS_HERE"] = "1"


@caught_by("once_more")
class LeavesTorchAnother(Sound):
    def on_start(self, accelerator):
        torch.use_deterministic_algorithms(True, warn_only=True)


@caught_by("once_more")
class LeavesNoWarnings(Sound):
    def on_end(self, accelerator):
        warnings.simplefilter("ignore")


@caught_by("once_more")
class LeavesAHandler(Sound):
    def on_start(self, accelerator):
        signal.signal(signal.SIGUSR2, lambda *told: None)


@caught_by("once_more")
class Prints(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        print("a model")
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("once_more")
class RaisesWhereMemoryIsFreed(Sound):
    def on_free(self, accelerator):
        raise RuntimeError("not this one")


@caught_by("errors")
class RaisesAfterAnError(Sound):
    def on_error(self, accelerator, error):
        raise RuntimeError("not this one")


@caught_by("graphs_go")
class KeepsLosses(Sound):
    def backward(self, accelerator, loss, kwargs):
        self.__dict__.setdefault("losses", []).append(loss)
        super().backward(accelerator, loss, kwargs)


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
