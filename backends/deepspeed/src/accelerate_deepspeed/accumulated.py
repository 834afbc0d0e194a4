"""Save and load gradients in the middle of an accumulation cycle.

Where DeepSpeed keeps them depends on the stage. Stages 0 and 1 keep unreduced gradients in the
parameters until the cycle ends. Stage 2 reduces each micro-batch and accumulates this rank's part in
lists of tensors. Stage 3 does the same in one flat buffer. With an offloaded optimizer, stages 1 and
2 accumulate in host memory. The names of saved tensors say where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from accelerate_core.plugin import CheckpointError
from accelerate_deepspeed.engines import STAGE_3_PARTS, TrainedEngine

_COUNT = "micro_step"


def read(one: TrainedEngine) -> dict[str, torch.Tensor]:
    """Return the gradients that an engine has accumulated on this rank since its last step.

    Raises:
        CheckpointError: DeepSpeed does not give access to them.
    """
    if not one.dirty:
        return {}
    _refuse_unreadable(one)
    found = dict(_places(one))
    if one.stage > 0:
        found[_COUNT] = torch.tensor(int(one.engine.optimizer.micro_step_id))
    return found


def _places(one: TrainedEngine) -> Iterator[tuple[str, torch.Tensor]]:
    optimizer = one.engine.optimizer
    if one.stage == 3:
        # DeepSpeed's numbers of parameters differ between processes, but their order doesn't.
        for number, (key, part) in enumerate(getattr(optimizer, STAGE_3_PARTS).items()):
            yield f"part.{number}", part
            if key in optimizer._offload_boundary_param_ids:
                yield f"touched.{number}", torch.ones(())
        return
    for number, parameter in enumerate(one.engine.module.parameters()):
        for attribute in ("grad", "grad_accum"):
            value = getattr(parameter, attribute, None)
            if value is not None:
                yield f"{attribute}.{number}", value
    if one.stage == 0:
        return
    for group, tensors in optimizer.all_grad_tensors.items():
        for number, tensor in enumerate(tensors or ()):
            yield f"group.{group}.{number}", tensor
    if getattr(optimizer, "cpu_offload", False):
        optimizer._wait_for_offload_copies()
        for key, tensor in optimizer.accumulated_grads_in_cpu.items():
            yield f"host.{key}", tensor
        for key in sorted(optimizer._offload_accumulated_param_ids):
            yield f"touched.{key}", torch.ones(())


def write(one: TrainedEngine, gradients: Mapping[str, torch.Tensor]) -> None:
    """Restore the gradients that `read` returned, into an engine without gradients."""
    optimizer = one.engine.optimizer
    parameters = list(one.engine.module.parameters())
    parts = getattr(optimizer, STAGE_3_PARTS, {})
    part_keys = list(parts)
    groups: dict[int, list[torch.Tensor]] = {}
    for key, value in gradients.items():
        kind, _, rest = key.partition(".")
        if kind in ("grad", "grad_accum"):
            parameter = parameters[int(rest)]
            setattr(parameter, kind, value.to(parameter.device))
        elif kind == "part":
            with torch.no_grad():
                parts[part_keys[int(rest)]].copy_(value)
        elif kind == "group":
            group = int(rest.split(".")[0])
            groups.setdefault(group, []).append(value.to(one.engine.device))
        elif kind == "host":
            optimizer.accumulated_grads_in_cpu[int(rest)] = value
        elif kind == "touched" and one.stage == 3:
            optimizer._offload_boundary_param_ids.add(part_keys[int(rest)])
        elif kind == "touched":
            optimizer._offload_accumulated_param_ids.add(int(rest))
    for group, tensors in groups.items():
        optimizer.all_grad_tensors[group] = tensors
    if one.stage > 0:
        # Stage 3 increments its counter later than other stages, in the next forward.
        optimizer.micro_step_id = int(gradients[_COUNT]) + (one.stage == 3)
        optimizer._epilogue_ran_this_backward = False
    one.begin_backward()


def _refuse_unreadable(one: TrainedEngine) -> None:
    optimizer = one.engine.optimizer
    why = ""
    if one.finished:
        why = "they were measured or changed before the cycle ended"
    elif one.stage == 3 and getattr(optimizer, "swap_optimizer", False):
        why = "offload to nvme writes them to disk"
    elif (one.stage > 0 and not hasattr(optimizer, "micro_step_id")) or (
        one.stage == 0 and hasattr(optimizer, "fp32_groups_gradients")
    ):
        why = f"{type(optimizer).__name__} gives no access to them"
    elif getattr(optimizer, "zenflow", False):
        why = "ZenFlow gives no access to them"
    if why:
        raise CheckpointError(
            "The state cannot be saved in the middle of this accumulation cycle, because the "
            f"gradients cannot be saved: {why}. Save after an optimizer step, when "
            "accelerator.sync_gradients is True."
        )
