"""Faults with third-party precisions."""

from __future__ import annotations

import torch
from registry import Sound, caught_by, passes

from accelerate_core.contract.capabilities import NEEDS


@passes("accepts")
class AcceptsEverything(Sound):
    supports = {**Sound.supports, "accepts": tuple(NEEDS)}


@caught_by("accepts")
class PutsPlainLayersBack(Sound):
    def prepare_model(self, accelerator, model, evaluation_mode):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.__class__ = torch.nn.Linear
        return super().prepare_model(accelerator, model, evaluation_mode)


@caught_by("accepts")
class AveragesFullPrecisionAlone(Sound):
    def _average(self, accelerator, model):
        if next(model.parameters()).dtype is torch.float32:
            super()._average(accelerator, model)


@caught_by("accepts")
class AveragesPlainParametersAlone(Sound):
    supports = {**Sound.supports, "accepts": ("subclasses",)}

    def _average(self, accelerator, model):
        if type(next(model.parameters())) is torch.nn.Parameter:
            super()._average(accelerator, model)


@caught_by("accepts")
class PutsTheOldOptimizerBack(Sound):
    supports = {**Sound.supports, "accepts": ("optimizer",)}

    def prepare(self, accelerator, plan):
        for entry in plan.of_kind("optimizer"):
            entry.value = entry.original
        super().prepare(accelerator, plan)
