"""The steps of `prepare`, from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelerate_core.backend.precision import Precision
from accelerate_core.builtin.compiled import compile_in_place, is_compiled_in_place, take_compilers
from accelerate_core.errors import PrepareError, warn
from accelerate_core.prepare.classify import check_preparable, classify
from accelerate_core.prepare.plan import Entry, PreparePlan, named_parameters
from accelerate_core.prepare.prepared import Prepared
from accelerate_core.training.trainable import refuse_half_weights


def prepare(
    prepared: Prepared,
    objects: Sequence[Any],
    device_placement: Sequence[bool | None] | None = None,
    evaluation_mode: bool = False,
) -> list[Any]:
    """Prepare objects together, and return them in the same order.

    The order is: classify, make models, record parameters by name, run the stages, restore ties and
    rebind the optimizers and verify, let the backend prepare, restore and rebind and verify again,
    what plugins change or add, schedulers, loaders.
    """
    hooks, backend = prepared.hooks, prepared.backend
    plan = _classify(prepared, objects, device_placement, evaluation_mode)
    plan.each("model", lambda model, _: hooks.make_model(model))
    for entry in plan.of_kind("model"):
        # Before names are recorded: `torch.compile` adds `_orig_mod` to them.
        entry.value, entry.compilers = take_compilers(entry.value)
    plan.record([wrapper.optimizer for wrapper in prepared.objects.optimizers])
    for entry in plan.of_kind("model"):
        entry.value = _stages(prepared, entry)
    # Stages, and moving a model to some devices, replace parameters. Precisions and engines that own
    # the optimizer need the current ones.
    plan.reconcile(prepared.objects.models, tell=False)
    if type(prepared.precision).prepare is not Precision.prepare:
        prepared.prepare_precision(plan)
        plan.reconcile(prepared.objects.models, tell=False)
    _check_trained_dtypes(prepared, plan)
    hooks.prepare(plan)
    if "optimizer" not in backend.owns:
        plan.reconcile(prepared.objects.models, tell=True)
    if prepared.process.num_processes > 1:
        for entry in plan.of_kind("model"):
            prepared.use_reducer(entry)
    if prepared.shared_hooks.implementations("prepare_objects"):
        prepared.shared_hooks.call_each("prepare_objects", plan=plan)
        if "optimizer" not in backend.owns:
            plan.reconcile(prepared.objects.models, tell=False)
    _point_schedulers(plan)
    if backend.compile_at == "after":
        plan.each("model", lambda model, _: prepared.shared_hooks.run_stage("compile", model))
    _wrap_steps(prepared, plan)
    prepare_loader = prepared.wrap_loader
    plan.each("loader", lambda loader, entry: prepare_loader(loader, entry.on_device))
    for entry in plan.entries:
        if not entry.done and entry.kind != "other":
            prepared.remember(entry.kind, entry.value, evaluation=entry.evaluation_mode)
    made = [entry.value for entry in plan.entries[: len(objects)]]
    prepared.shared_hooks.call_each("on_prepared", given=objects, prepared=made)
    return made


def _classify(
    prepared: Prepared,
    objects: Sequence[Any],
    device_placement: Sequence[bool | None] | None,
    evaluation_mode: bool,
) -> PreparePlan:
    placements = [None] * len(objects) if device_placement is None else device_placement
    if len(placements) != len(objects):
        raise PrepareError(
            f"device_placement has {len(placements)} entries for {len(objects)} objects. Pass one per object."
        )
    default = prepared.options.device_placement
    entries = []
    for position, (obj, moved) in enumerate(zip(objects, placements, strict=True), 1):
        kind = classify(obj, prepared.ask_classification)
        if kind == "other":
            check_preparable(obj, position)
        done = obj in prepared.objects
        entry = Entry(kind, obj, obj, default if moved is None else moved, evaluation_mode, done)
        entries.append(entry)
    return PreparePlan(entries, prepared.inner_model, prepared.replaced_parameters)


def _check_trained_dtypes(prepared: Prepared, plan: PreparePlan) -> None:
    """Refuse optimizers that would get fp16 gradients, if losses are scaled."""
    if prepared.loss_scaler is None or not prepared.loss_scaler.enabled:
        return
    models = [*prepared.objects.models, *plan.values("model")]
    names = {
        id(parameter): name
        for model in models
        for name, parameter in named_parameters(prepared.inner_model(model)).items()
    }
    for optimizer in plan.values("optimizer"):
        refuse_half_weights(optimizer, names)


def _stages(prepared: Prepared, entry: Entry) -> torch.nn.Module:
    """Run the stages that come before the backend wraps the model."""
    backend = prepared.backend
    prepared.verify_placeable(entry.value)
    model: torch.nn.Module = entry.value
    places = getattr(model, "hf_device_map", {}).values()  # a device map has placed it
    # torch cannot replace sharded or quantized weights. A model on its device does not have to move.
    on = {one.device for one in (*model.parameters(), *model.buffers())}
    placed = len(places) > 1 or "disk" in places or on == {prepared.process.device}
    if entry.on_device and not placed and "device_placement" not in backend.owns:
        model = model.to(prepared.process.device)
    for stage in ("convert", "tensor_parallel", "activation_checkpointing"):
        model = prepared.shared_hooks.run_stage(stage, model)
    _compile_again(model, entry)
    if backend.compile_at == "before":
        model = prepared.shared_hooks.run_stage("compile", model)
    prepared.mix_precision(model)
    return model


def _compile_again(model: torch.nn.Module, entry: Entry) -> None:
    """Compile in place what the script had compiled, with the same compiler and its options."""
    modules = dict(model.named_modules()) if entry.compilers else {}
    for name, compiler in entry.compilers.items():
        if name not in modules:
            warn(
                f"The script compiled {name!r} of {type(model).__name__}, but the prepared model has no "
                "module with that name, so this part is not compiled."
            )
        elif not is_compiled_in_place(modules[name]):
            compile_in_place(modules[name], compiler)


def _point_schedulers(plan: PreparePlan) -> None:
    """Point schedulers at the replacement of their optimizer, if it has other parameter groups."""
    for optimizer in plan.of_kind("optimizer"):
        was, now = optimizer.original, optimizer.value
        if getattr(now, "param_groups", None) is not getattr(was, "param_groups", None):
            for scheduler in plan.of_kind("scheduler"):
                _repoint(scheduler.value, was, now)


class _StepMark(LRScheduler):
    """Sets no learning rate. Creating one makes torch count the steps of an optimizer."""

    def _initial_step(self) -> None:
        """Do not change learning rates."""


def _repoint(scheduler: Any, before: Any, now: Any) -> None:
    """Make a scheduler, and schedulers inside it, set the learning rates of another optimizer."""
    if getattr(scheduler, "optimizer", None) is before:
        scheduler.optimizer = now
        if isinstance(now, Optimizer) and hasattr(now.step, "__func__"):
            _StepMark(now)  # without it, torch warns that the optimizer did not step
    for inner in getattr(scheduler, "_schedulers", ()):
        _repoint(inner, before, now)


def _wrap_steps(prepared: Prepared, plan: PreparePlan) -> None:
    entries = [entry for entry in plan.entries if entry.kind == "optimizer"]
    # A plugin's scheduler holds the optimizer as the backend prepared it.
    originals = {id(one): e for e in entries for one in (e.original, e.value)}
    plan.each("optimizer", lambda optimizer, entry: prepared.wrap_optimizer(optimizer))
    for entry in plan.of_kind("scheduler"):
        inner = getattr(entry.original, "optimizer", None)
        mine = originals.get(id(inner))
        found = mine.value if mine is not None else prepared.wrapper_of(inner)
        every = [e.value for e in entries] or list(prepared.objects.optimizers)
        entry.value = prepared.wrap_scheduler(entry.value, every if found is None else [found])
