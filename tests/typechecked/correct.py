"""Correct uses of an Accelerator, which type checkers must accept."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    ProjectConfiguration,
    init_empty_weights,
    is_wandb_available,
    set_seed,
    skip_first_batches,
)
from accelerate_core.errors import AccelerateError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(-1)

    def describe(self) -> str:
        return "a net"


def construct() -> None:
    Accelerator()
    Accelerator(True, None, "bf16", 2, False, DataLoaderConfiguration(split_batches=True))
    Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4, cpu=True)
    Accelerator(log_with=["jsonl", "wandb"], project_dir=Path("runs"), rng_types=["torch"])
    Accelerator(project_config=ProjectConfiguration("runs", automatic_checkpoint_naming=True))
    Accelerator(kwargs_handlers=[AutocastKwargs(), DistributedDataParallelKwargs()])
    Accelerator(backend="ddp", parallelism_config=ParallelismConfig(tp_size=2))
    Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    Accelerator(deepspeed_plugin={"one": DeepSpeedPlugin(), "two": DeepSpeedPlugin()})
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    Accelerator(checkpointer="directory", tracking="queued", preemption_signals="SIGTERM")


def train() -> None:
    set_seed(3)
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
    accelerator.init_trackers("digits", config={"lr": 0.1})
    net = Net()
    sgd = SGD(net.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(
        net, sgd, data, LambdaLR(sgd, lambda epoch: 1.0)
    )
    print(model.describe(), optimizer.param_groups, len(loader), scheduler.get_last_lr())
    for epoch in range(2):
        for x, y in skip_first_batches(loader, 1) if epoch == 0 else loader:
            with accelerator.accumulate(model, num_items=len(x)):
                with accelerator.autocast():
                    loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    accelerator.clip_grad_value_(model.parameters(), clip_value=0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses: torch.Tensor = accelerator.gather(loss.detach())
            accelerator.log({"loss": losses.mean().item()}, step=epoch)
        accelerator.print(accelerator.device, accelerator.num_processes)
        folder: str = accelerator.save_state(Path("checkpoints") / str(epoch), blocking=False)
        accelerator.load_state(folder, trust=True)
    accelerator.save_model(model, "trained", max_shard_size="1GB")
    inner = accelerator.unwrap_model(model)
    accelerator.save(inner.state_dict(), "weights.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def several_objects(objects: list[nn.Module]) -> None:
    with Accelerator() as accelerator:
        one = accelerator.prepare(Net())
        print(one.describe())
        first, second = accelerator.prepare(Net(), Net(), device_placement=[True, None])
        print(first.describe(), second.describe())
        for model in accelerator.prepare(*objects):
            print(model)
        generator, discriminator = Net(), Net()
        g, d, g_optimizer, d_optimizer, train, test, warm, cold = accelerator.prepare(
            generator,
            discriminator,
            SGD(generator.parameters()),
            SGD(discriminator.parameters()),
            DataLoader(TensorDataset(torch.zeros(2))),
            DataLoader(TensorDataset(torch.zeros(2))),
            LambdaLR(SGD(generator.parameters()), lambda epoch: 1.0),
            LambdaLR(SGD(generator.parameters()), lambda epoch: 1.0),
        )
        optimizers: list[Optimizer] = [g_optimizer, d_optimizer]
        schedulers: list[LRScheduler] = [warm, cold]
        print(g.describe(), d.describe(), optimizers, schedulers, len(train), len(test))
        nine = accelerator.prepare(1, 2, 3, 4, 5, 6, 7, 8, 9)
        print(nine)


def around() -> None:
    accelerator = Accelerator()
    metrics = accelerator.gather_for_metrics((torch.zeros(2), {"a": [torch.zeros(2)]}))
    print(metrics[1]["a"], accelerator.reduce({"a": torch.zeros(1)}, "mean")["a"])
    print(accelerator.pad_across_processes(torch.zeros(2), dim=0, pad_first=True).shape)
    accelerator.gradient_accumulation_steps = 2
    accelerator.even_batches = False
    print(accelerator.state.mixed_precision, accelerator.state.deepspeed_plugin)
    print(accelerator.ddp_handler, accelerator.is_fsdp2, accelerator.explain())
    with accelerator.main_process_first(), accelerator.profile() as profiler:
        print(profiler)
    with (
        accelerator.join_uneven_inputs([Net()]),
        accelerator.split_between_processes([1, 2]) as part,
    ):
        print(part)

    @accelerator.on_main_process
    def report(loss: float) -> str:
        return f"{loss}"

    print(report(0.5), is_wandb_available(), PartialState().is_main_process)
    with init_empty_weights():
        Net()
    try:
        accelerator.get_tracker("jsonl", unwrap=True)
    except AccelerateError as error:
        print(error)
    accelerator.free_memory()
