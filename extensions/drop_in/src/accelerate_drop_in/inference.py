"""Pipelined inference on several devices with torch.distributed.pipelining."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from accelerate_big_model.device_map import calculate_maximum_sizes, infer_auto_device_map
from accelerate_core import PartialState
from accelerate_core.plugin import ConfigurationError, send_to_device
from accelerate_drop_in.trees import ignorant_find_batch_size, pad_input_tensors
from accelerate_drop_in.verbs import copy_tensor_to_devices


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Return a device map that gives every process about the same share of the weights.

    Args:
        max_memory: bytes for each process, instead of equal shares.
    """
    whole: Any = {"no_split_module_classes": no_split_module_classes, "clean_result": False}
    if num_processes == 1:
        return infer_auto_device_map(model, **whole)
    if max_memory is None:
        size, (largest, _) = calculate_maximum_sizes(model)
        # A tenth plus one layer more than the share. Layers that don't fit go to the next process, and
        # the last one gets the rest.
        share = int((size + largest) / num_processes * 1.1) + 1
        # The planner reserves memory for offloaded layers on the first device. A dummy device without
        # memory keeps that from affecting process 0.
        max_memory = {-1: 0, **dict.fromkeys(range(num_processes), share), num_processes - 1: size}
    return infer_auto_device_map(model, max_memory=max_memory, **whole)


def find_pippy_batch_size(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> int | None:
    """Return the batch size of the first input that has one, None if there is none."""
    sizes = map(ignorant_find_batch_size, [*(args or ()), *(kwargs or {}).values()])
    return next((size for size in sizes if size is not None), None)


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Split a model into stages, and return the schedule that runs this process's stage.

    Args:
        split_points: modules at which a new stage begins.
        args, kwargs: example inputs for one micro-batch.
        num_chunks: the number of micro-batches per batch.

    Raises:
        ConfigurationError: the number of stages differs from the number of processes.
    """
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    state = PartialState()
    if len(split_points) + 1 != state.num_processes:
        raise ConfigurationError(
            f"split_points has {len(split_points)} modules, which makes {len(split_points) + 1} stages, "
            f"but num_processes={state.num_processes}. Pass num_processes - 1 split points."
        )
    spec = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=args, mb_kwargs=kwargs, split_spec=spec)
    stage = pipe.build_stage(state.process_index, device=state.device)
    return ScheduleGPipe(stage, num_chunks)


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a pipeline. The first process passes the inputs, and the last one returns the output.

    Args:
        num_chunks: batches are padded to a multiple of this number of samples.
        gather_output: send the output to every process.

    Raises:
        ConfigurationError: no input of the first process has a batch size.
    """
    state = PartialState()
    if state.num_processes == 1:
        return forward(*args, **kwargs)
    output = None
    if state.is_main_process:
        size = find_pippy_batch_size(args, kwargs)
        if size is None:
            raise ConfigurationError("No input of the pipeline is a tensor with a batch dimension.")
        if size % num_chunks:
            args = pad_input_tensors(args, size, num_chunks)
            kwargs = pad_input_tensors(kwargs, size, num_chunks)
        forward(*args, **kwargs)
    elif state.is_last_process:
        output = forward()
    else:
        forward()
    return copy_tensor_to_devices(output) if gather_output else output


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Split a model into pipeline stages, one per process, and return the model.

    With one process, the model is not changed.

    Args:
        split_points: modules at which the next process's stage begins; "auto" makes equal shares.
        no_split_module_classes: names of classes that stay in one stage.
        example_args, example_kwargs: example inputs for tracing the model.
        num_chunks: the number of micro-batches per batch; by default the number of processes.
        gather_output: send the output to every process, instead of only the last.

    Raises:
        ConfigurationError: the number of split points doesn't match the number of processes.
    """
    state = PartialState()
    shown = cast(Any, model)
    if state.num_processes == 1:
        shown.hf_split_points = []
        return model
    chunks = num_chunks or state.num_processes
    if split_points == "auto":
        placed = generate_device_map(model, state.num_processes, no_split_module_classes)
        firsts: dict[Any, str] = {}
        for name, process in placed.items():
            firsts.setdefault(process, name)
        split_points = [name for process, name in firsts.items() if process != 0]
    points = list(split_points or ())
    schedule = build_pipeline(
        model,
        points,
        send_to_device(example_args or (), "cpu"),
        send_to_device(example_kwargs, "cpu"),
        chunks,
    )
    original: Any = model.forward
    shown.hf_split_points = points
    shown._original_forward = original
    shown._original_call = model.__call__
    shown.pippy_stage = schedule

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return pippy_forward(schedule.step, chunks, bool(gather_output), *args, **kwargs)

    model.forward = forward
    return model
