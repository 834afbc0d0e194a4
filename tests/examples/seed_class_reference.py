"""The code of the class references (seeds 000 and 001), with assertions.

Names that an example uses without defining them are in `seed_parts`. The code between "seed" and the
assertions comes from the document, with the corrections listed in `test_seed_examples.MISTAKES`.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from seed_parts import (
    BATCH,
    Inputs,
    MyModel,
    assert_trained_as_plain,
    data,
    gradients,
    loss_func,
    parts,
    printed,
    same_everywhere,
    seed,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader

from accelerate_core import Accelerator
from accelerate_core.utils import gather_object


@seed("000-constructor", 1)
def old_constructor(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # seed
        accelerator = Accelerator(
            device_placement=True,
            split_batches=True,
            fp16=True,
            cpu=True,
            deepspeed_plugin=None,
            rng_types=["torch"],
            dispatch_batches=True,
            kwargs_handlers=None,
        )
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.split_batches is True
    assert accelerator.dispatch_batches is True
    assert accelerator.device == torch.device("cpu")
    texts = " ".join(str(warning.message) for warning in caught)
    assert "fp16" in texts
    assert "dispatch_batches" in texts


@seed("000-five steps")
def five_steps(folder: Path) -> None:
    dataloader, model, optimizer, _ = parts()
    # seed
    accelerator = Accelerator()
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for inputs, targets in dataloader:
        optimizer.zero_grad()
        loss = loss_func(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    gathered = accelerator.gather(model(inputs))

    assert gathered.shape == (BATCH * accelerator.num_processes, 3)
    assert_trained_as_plain(accelerator, model, loss_func)


@seed("001-available attributes")
def available_attributes(folder: Path) -> None:
    accelerator = Accelerator()
    n = int(os.environ.get("WORLD_SIZE", 1))
    assert isinstance(accelerator.device, torch.device)
    assert accelerator.distributed_type == ("NO" if n == 1 else accelerator.distributed_type)
    assert accelerator.local_process_index == int(os.environ.get("LOCAL_RANK", 0))
    assert accelerator.mixed_precision == "no"
    assert accelerator.num_processes == n
    assert accelerator.optimizer_step_was_skipped is False
    assert accelerator.process_index == int(os.environ.get("RANK", 0))
    assert accelerator.state.num_processes == n
    assert accelerator.sync_gradients is True
    assert accelerator.use_distributed is (n > 1)


@seed("001-accumulate")
def accumulate(folder: Path) -> None:
    dataloader, model, optimizer, scheduler = parts()
    # seed
    accelerator = Accelerator(gradient_accumulation_steps=1)
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )
    for input, _output in dataloader:
        with accelerator.accumulate(model):
            outputs = model(input)
            loss = loss_func(outputs)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    assert_trained_as_plain(accelerator, model, lambda out, _: loss_func(out), scheduled=True)


@seed("001-check_trigger")
@seed("001-set_trigger")
def trigger(folder: Path) -> None:
    dataloader, model, _, _ = parts()
    broken_off_at = None
    # seed
    accelerator = Accelerator()
    dataloader = accelerator.prepare(dataloader)

    def should_do_breakpoint(loss: torch.Tensor) -> bool:
        return step == 1 and accelerator.is_last_process

    model.to(accelerator.device)
    for step, (inputs, _) in enumerate(dataloader):
        loss = loss_func(model(inputs))
        if should_do_breakpoint(loss):
            accelerator.set_trigger()
        # Assume later in the training script
        if accelerator.check_trigger():
            broken_off_at = step
            break

    assert broken_off_at == 1
    assert accelerator.check_trigger() is False


@seed("001-clip_grad_norm_")
def clip_grad_norm(folder: Path) -> None:
    dataloader, model, optimizer, scheduler = parts()
    max_grad_norm = 0.05
    # seed
    accelerator = Accelerator(gradient_accumulation_steps=2)
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )
    for input, target in dataloader:
        optimizer.zero_grad()
        output = model(input)
        loss = loss_func(output, target)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()

    torch.testing.assert_close(gradients(model).norm(), torch.tensor(max_grad_norm))
    assert_trained_as_plain(
        accelerator,
        model,
        lambda out, targets: loss_func(out, targets) / 2,
        lambda parameters: nn.utils.clip_grad_norm_(parameters, max_grad_norm),
    )


@seed("001-clip_grad_value_")
def clip_grad_value(folder: Path) -> None:
    dataloader, model, optimizer, scheduler = parts()
    clip_value = 0.01
    # seed
    accelerator = Accelerator(gradient_accumulation_steps=2)
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )
    for input, target in dataloader:
        optimizer.zero_grad()
        output = model(input)
        loss = loss_func(output, target)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()

    torch.testing.assert_close(gradients(model).abs().max(), torch.tensor(clip_value))
    assert_trained_as_plain(
        accelerator,
        model,
        lambda out, targets: loss_func(out, targets) / 2,
        lambda parameters: nn.utils.clip_grad_value_(parameters, clip_value),
    )


@seed("001-gather", 4)
def gather(folder: Path) -> None:
    # seed: Assuming four processes
    accelerator = Accelerator()
    process_tensor = torch.tensor([accelerator.process_index], device=accelerator.device)
    gathered_tensor = accelerator.gather(process_tensor)

    assert gathered_tensor.tolist() == [0, 1, 2, 3]


@seed("001-gather_for_metrics", 2)
def gather_for_metrics(folder: Path) -> None:
    # seed: Assuming two processes, with a batch size of 5 on a dataset with 9 samples
    accelerator = Accelerator()
    dataloader = torch.utils.data.DataLoader(range(9), batch_size=5)
    dataloader = accelerator.prepare(dataloader)
    batch = next(iter(dataloader))
    gathered_items = accelerator.gather_for_metrics(batch)

    assert len(gathered_items) == 9
    assert gathered_items.tolist() == list(range(9))


@seed("001-join_uneven_inputs", 2)
def join_uneven_inputs(folder: Path) -> None:
    _, model, optimizer, _ = parts()
    dataloader = DataLoader(data(5), batch_size=1)
    steps = 0
    # seed
    accelerator = Accelerator(even_batches=True)
    ddp_model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    with accelerator.join_uneven_inputs([ddp_model], even_batches=False):
        for input, _output in dataloader:
            outputs = ddp_model(input)
            loss = loss_func(outputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

    assert gather_object([steps]) == [3, 2]
    assert same_everywhere(accelerator, weights(ddp_model))
    assert accelerator.even_batches is True


def first_in(accelerator: Accelerator, context: Any) -> tuple[list[str], list[float]]:
    """Return what each process printed in the context, and when. Process 0 is slow."""
    with printed() as lines, context:
        if accelerator.is_main_process:
            time.sleep(0.3)
        print(f"This will be printed by process {accelerator.process_index}")
        moment = time.time()
    return gather_object(lines), gather_object([moment])


@seed("001-local_main_process_first")
def local_main_process_first(folder: Path) -> None:
    # seed
    accelerator = Accelerator()
    lines, moments = first_in(accelerator, accelerator.local_main_process_first())

    n = accelerator.num_processes
    assert lines == [f"This will be printed by process {rank}" for rank in range(n)]
    assert moments[0] == min(moments)


@seed("001-main_process_first")
def main_process_first(folder: Path) -> None:
    # seed
    accelerator = Accelerator()
    lines, moments = first_in(accelerator, accelerator.main_process_first())

    n = accelerator.num_processes
    assert lines == [f"This will be printed by process {rank}" for rank in range(n)]
    assert moments[0] == min(moments)


@seed("001-maybe_context_parallel")
def maybe_context_parallel(folder: Path) -> None:
    dataloader, model, optimizer, _ = parts()
    # seed
    accelerator = Accelerator()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)
    for inputs, targets in dataloader:
        before = inputs.clone()
        with accelerator.maybe_context_parallel(
            buffers=[inputs, targets], buffer_seq_dims=[1, 0], no_restore_buffers={inputs, targets}
        ):
            assert torch.equal(inputs, before)  # no effect without a mesh
            optimizer.zero_grad()
            accelerator.backward(loss_func(model(inputs), targets))
            optimizer.step()

    assert_trained_as_plain(accelerator, model, loss_func)


@seed("001-no_sync")
def no_sync(folder: Path) -> None:
    _, model, optimizer, _ = parts()
    dataloader = DataLoader(Inputs(), BATCH)
    # seed
    accelerator = Accelerator()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)
    input_a = next(iter(dataloader))
    input_b = next(iter(dataloader))
    with accelerator.no_sync():
        outputs = model(input_a)
        loss = loss_func(outputs)
        accelerator.backward(loss)
        # No synchronization across processes, only accumulate gradients
    alone = same_everywhere(accelerator, gradients(model))
    outputs = model(input_b)
    loss = loss_func(outputs)
    accelerator.backward(loss)
    # Synchronization across all processes
    together = same_everywhere(accelerator, gradients(model))
    optimizer.step()
    optimizer.zero_grad()

    assert alone is (accelerator.num_processes == 1)
    assert together
    assert same_everywhere(accelerator, weights(model))


@seed("001-on_local_main_process")
def on_local_main_process(folder: Path) -> None:
    with printed() as lines:
        # seed
        accelerator = Accelerator()

        @accelerator.on_local_main_process
        def print_something() -> None:
            print("This will be printed by process 0 only on each server.")

        print_something()

    assert gather_object([lines])[0] == ["This will be printed by process 0 only on each server."]
    assert all(other == [] for other in gather_object([lines])[1:])


@seed("001-on_local_process", 4)
def on_local_process(folder: Path) -> None:
    with printed() as lines:
        # seed: four processes per server
        accelerator = Accelerator()

        @accelerator.on_local_process(local_process_index=2)
        def print_something() -> None:
            print(f"Printed on process {accelerator.local_process_index}")

        print_something()

    assert gather_object([lines]) == [[], [], ["Printed on process 2"], []]


@seed("001-pad_across_processes", 2)
def pad_across_processes(folder: Path) -> None:
    # seed: two processes, the first having a tensor of size 1 and the second of size 2
    accelerator = Accelerator()
    process_tensor = torch.arange(accelerator.process_index + 1).to(accelerator.device)
    padded_tensor = accelerator.pad_across_processes(process_tensor)

    assert padded_tensor.shape == torch.Size([2])
    assert padded_tensor.tolist() == [[0, 0], [0, 1]][accelerator.process_index]


@seed("001-prepare")
def prepare(folder: Path) -> None:
    data_loader, model, optimizer, scheduler = parts()
    # seed
    accelerator = Accelerator()
    # Assume a model, optimizer, data_loader and scheduler are defined
    model, optimizer, data_loader, scheduler = accelerator.prepare(
        model, optimizer, data_loader, scheduler
    )

    assert isinstance(accelerator.unwrap_model(model), MyModel)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert next(iter(data_loader))[0].device.type == accelerator.device.type


@seed("001-prepare with device_placement")
def prepare_with_device_placement(folder: Path) -> None:
    data_loader, model, optimizer, scheduler = parts()
    # seed
    accelerator = Accelerator()
    # Assume a model, optimizer, data_loader and scheduler are defined
    device_placement = [True, True, False, False]
    # Will place the first two items passed in automatically to the right device but not the rest
    model, optimizer, data_loader, scheduler = accelerator.prepare(
        model, optimizer, data_loader, scheduler, device_placement=device_placement
    )

    assert next(model.parameters()).device.type == accelerator.device.type
    assert next(iter(data_loader))[0].device.type == "cpu"


def train_iteration() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def train() -> None:
    for _ in range(3):
        train_iteration()


@seed("001-profile with default settings")
def profile(folder: Path) -> None:
    with printed() as lines:
        # seed
        accelerator = Accelerator()

        with accelerator.profile() as prof:
            train()

        accelerator.print(prof.key_averages().table())

    assert any("aten::" in line for line in lines) is accelerator.is_main_process


@seed("001-profile with the custom handler")
def profile_with_handler(folder: Path) -> None:
    from accelerate_core.utils import ProfileKwargs

    with printed() as lines:
        # seed
        def custom_handler(prof: Any) -> None:
            print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))

        kwargs = ProfileKwargs(
            schedule_option={"wait": 1, "warmup": 1, "active": 1}, on_trace_ready=custom_handler
        )
        accelerator = Accelerator(kwargs_handlers=[kwargs])
        with accelerator.profile() as prof:
            for _ in range(10):
                train_iteration()
                prof.step()

    assert sum("Self CPU time total" in line for line in lines) == 3  # ten steps, three rounds


@seed("001-profile and export to Chrome trace")
def profile_to_trace(folder: Path) -> None:
    from accelerate_core.utils import ProfileKwargs

    # seed
    kwargs = ProfileKwargs(output_trace_dir=str(folder / "output_trace"))
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    with accelerator.profile():
        train()

    accelerator.wait_for_everyone()
    traces = sorted((folder / "output_trace").iterdir())
    assert len(traces) == accelerator.num_processes
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in traces)


@seed("001-reduce", 2)
def reduce(folder: Path) -> None:
    # seed: Assuming two processes
    accelerator = Accelerator()
    process_tensor = torch.arange(accelerator.num_processes) + 1 + (2 * accelerator.process_index)
    process_tensor = process_tensor.to(accelerator.device)
    reduced_tensor = accelerator.reduce(process_tensor, reduction="sum")

    assert reduced_tensor.tolist() == [4, 6]


@seed("001-register_for_checkpointing, register_save_state_pre_hook, register_load_state_pre_hook")
def checkpoint_hooks(folder: Path) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    called: list[str] = []
    _, model, optimizer, scheduler = parts()
    accelerator = Accelerator()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    # seed
    def save_hook(
        models: list[nn.Module], weights: list[dict[str, torch.Tensor]], input_dir: str
    ) -> None:
        called.append(f"save {len(models)} {len(weights)} {Path(input_dir).is_dir()}")

    def load_hook(models: list[nn.Module], input_dir: str) -> None:
        called.append(f"load {len(models)} {Path(input_dir) == folder / 'state'}")

    handle = accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)

    counter.count = 5
    before = weights(model).clone()
    accelerator.save_state(folder / "state")
    counter.count = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder / "state")

    assert called == ["save 1 1 True", "load 1 True"]
    assert counter.count == 5
    assert torch.equal(weights(model), before)
    handle.remove()
    accelerator.save_state(folder / "state again")
    assert len(called) == 2


@seed("001-skip_first_batches")
def skip_first_batches(folder: Path) -> None:
    dataloader, model, optimizer, scheduler = parts()
    # seed
    accelerator = Accelerator()
    dataloader, model, optimizer, scheduler = accelerator.prepare(
        dataloader, model, optimizer, scheduler
    )
    skipped_dataloader = accelerator.skip_first_batches(dataloader, num_batches=2)
    # for the first epoch only
    for input, target in skipped_dataloader:
        optimizer.zero_grad()
        output = model(input)
        loss = loss_func(output, target)
        accelerator.backward(loss)
        optimizer.step()
    # subsequent epochs
    for input, target in dataloader:
        optimizer.zero_grad()
        output = model(input)
        loss = loss_func(output, target)
        accelerator.backward(loss)
        optimizer.step()

    assert_trained_as_plain(accelerator, model, loss_func, skip=2, epochs=2)


@seed("001-split_between_processes", 2)
def split_between_processes(folder: Path) -> None:
    # seed: Assume there are two processes
    accelerator = Accelerator()
    with accelerator.split_between_processes(["A", "B", "C"]) as inputs:
        assert inputs == [["A", "B"], ["C"]][accelerator.process_index]
    with accelerator.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
        assert inputs == [["A", "B"], ["C", "C"]][accelerator.process_index]


@seed("001-trigger_sync_in_backward")
def trigger_sync_in_backward(folder: Path) -> None:
    dataloader, model, optimizer, _ = parts()
    # seed
    accelerator = Accelerator()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)
    (input_a, _), (input_b, _) = list(dataloader)[:2]
    with accelerator.no_sync():
        loss_a = loss_func(model(input_a))  # first forward pass
        loss_b = loss_func(model(input_b))  # second forward pass
    accelerator.backward(loss_a)  # No synchronization across processes, only accumulate gradients
    alone = same_everywhere(accelerator, gradients(model))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss_b)  # Synchronization across all processes
    together = gradients(model).clone()
    optimizer.step()
    optimizer.zero_grad()

    n = accelerator.num_processes
    inputs = data().tensors[0][: 2 * n * BATCH]
    _, plain, _, _ = parts()
    (2 * loss_func(plain(inputs))).backward()  # the sum of two means, over all processes
    assert alone is (n == 1)
    torch.testing.assert_close(together, gradients(plain), rtol=1e-5, atol=1e-6)


@seed("001-unwrap_model")
def unwrap_model(folder: Path) -> None:
    with printed() as lines:
        # seed: two processes
        accelerator = Accelerator()
        model = accelerator.prepare(MyModel())
        print(model.__class__.__name__)
        model = accelerator.unwrap_model(model)
        print(model.__class__.__name__)

    alone = accelerator.num_processes == 1
    assert lines == ["MyModel" if alone else "DistributedDataParallel", "MyModel"]


@seed("001-wait_for_everyone", 2)
def wait_for_everyone(folder: Path) -> None:
    with printed() as lines:
        # seed: two processes
        accelerator = Accelerator()
        accelerator.wait_for_everyone()
        start = time.time()
        if accelerator.is_main_process:
            time.sleep(2)
        else:
            print("I'm waiting for the main process to finish its sleep...")
        accelerator.wait_for_everyone()
        # Should print on every process at the same time
        print("Everyone is here")
        moment = time.time()

    waiting = "I'm waiting for the main process to finish its sleep..."
    assert lines == (["Everyone is here"], [waiting, "Everyone is here"])[accelerator.process_index]
    # No rank continues before rank 0 has slept, no matter when it started to wait.
    starts, moments = gather_object([start]), gather_object([moment])
    assert min(moments) >= starts[0] + 2


@seed("001-gather_object")
def gather_objects(folder: Path) -> None:
    accelerator = Accelerator()
    # seed
    gathered = gather_object([{"process": accelerator.process_index}])

    assert gathered == [{"process": rank} for rank in range(accelerator.num_processes)]
