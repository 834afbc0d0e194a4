"""Calls, collectives and copies that a training step adds to the raw library's own loop.

    python benchmarks/step_counts.py [--only fsdp2] [--json results.json]

Each row trains the same small model on two gloo ranks twice: with the library itself
(DistributedDataParallel, fully_shard, a DeepSpeed engine, megatron-core, torchao), and through an
`Accelerator`. These are counted on rank 0 per optimizer step, and the counts of the raw loop subtracted:

* Python calls (`sys.setprofile`), without calls of functions in this file;
* collectives, values read back to the host (`.item()` and similar), and bytes copied (clones, copies and
  conversions);
* `growth`: what a model with three times as many layers adds to the calls. It is 0 unless something
  iterates over the model in every step.

Unlike times, these counts are the same on every machine. The comparison of ranks that accelerate-watch makes
after a few of the first steps is switched off, so that every counted step is an ordinary one. drift_guard.py
measures it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

os.environ["ACCELERATE_WATCH_DRIFT"] = "off"

ROOT = Path(__file__).parents[1]
#: Optimizer steps of the shorter run (counts are differences of two runs), and batches per cycle.
STEPS, CYCLE, BATCH, WIDTH = 5, 4, 16, 16
#: Steps in the tests. Two steps give the same counts as five.
QUICK_STEPS = 2
SMALL, LARGE = 2, 6
#: Power of the loss scale with fp16. It is so small that no step overflows.
LOSS_SCALE_POWER = 4
TIMEOUT = timedelta(seconds=60)


class Block(nn.Module):
    """A layer that backends shard separately, with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return x + torch.relu(self.linear(x))


def make_model(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)], nn.Linear(WIDTH, 1))


class Samples(Dataset[Any]):
    """Samples that are created in advance, so that reading costs the same for both loops."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Ema:
    """Averaged weights, registered for checkpointing. Counts how often its state is read."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        self.copies = 0

    def update(self) -> None:
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(self.weights, parameters, 0.1)

    def state_dict(self) -> dict[str, Any]:
        self.copies += 1
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


@dataclass
class Options:
    """The options of a row."""

    cycle: int = 1
    clip: bool = False
    precision: str = "no"
    #: Three schedulers, averaged weights and a registered object.
    extras: bool = False
    compiled: bool = False
    dispatch: bool = False
    stage: int = 0


# --- counting ---------------------------------------------------------------------------------


class _Dispatched(TorchDispatchMode):
    """Counts collectives, values read back to the host and bytes copied."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.reads = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives += "wait" not in name
        elif name in ("_local_scalar_dense", "is_nonzero", "equal"):
            self.reads += 1
        elif name in ("copy_", "clone", "_to_copy", "_foreach_copy_", "cat", "stack"):
            found = result if isinstance(result, list | tuple) else [result]
            if not found or found[0] is None:
                found = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.copied += sum(one.nbytes for one in found if isinstance(one, torch.Tensor))
        return result


def python_calls(function: Callable[[], None]) -> tuple[int, int]:
    """Return how many Python functions are called in this thread while `function` runs.

    The second number only counts functions of our packages, because the number of calls inside DTensor
    depends a little on what torch has cached before.
    """
    count = own = 0
    here = python_calls.__code__.co_filename
    replacements = str(ROOT / "tests")

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count, own
        where = frame.f_code.co_filename
        if event == "call" and where != here and not where.startswith(replacements):
            count += 1
            own += "accelerate_" in where

    # A collection would count the destruction of an earlier engine.
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, own


def counted(run: Callable[[int], None], steps: int) -> dict[str, float]:
    """Return counts per optimizer step of `run(steps)`, without the fixed costs of an epoch."""
    run(steps)  # so that work of the very first step is not counted
    first, second = (python_calls(lambda n=n: run(n)) for n in (steps, 2 * steps))
    seen = []
    for count in (steps, 2 * steps):
        with _Dispatched() as found:
            run(count)
        seen.append((found.collectives, found.reads, found.copied))
    collectives, reads, copied = ((b - a) / steps for a, b in zip(*seen, strict=True))
    calls, own = ((b - a) / steps for a, b in zip(first, second, strict=True))
    return {
        "calls": calls,
        "own": own,
        "collectives": collectives,
        "reads": reads,
        "copied": copied,
    }


# --- raw loops --------------------------------------------------------------------------------


def schedulers_of(optimizer: Any) -> list[Any]:
    constant = torch.optim.lr_scheduler.LambdaLR
    return [constant(optimizer, lambda _: 1.0) for _ in range(3)]


def raw_loader(steps: int, options: Options) -> Iterator[Any]:
    data = Samples(steps * options.cycle * BATCH * dist.get_world_size())
    if options.dispatch:
        return _dispatched_by_hand(DataLoader(data, BATCH * dist.get_world_size()))
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    return iter(DataLoader(data, BATCH, sampler=sampler))


def _dispatched_by_hand(loader: DataLoader[Any]) -> Iterator[Any]:
    """Read on rank 0, and broadcast every tensor."""
    rank = dist.get_rank()
    own = slice(rank * BATCH, (rank + 1) * BATCH)
    batches = iter(loader) if rank == 0 else None
    for _ in range(len(loader)):
        if batches is not None:
            x, y = next(batches)
        else:
            size = BATCH * dist.get_world_size()
            x, y = torch.empty(size, WIDTH), torch.empty(size, 1)
        dist.broadcast(x, 0)
        dist.broadcast(y, 0)
        yield x[own], y[own]


@dataclass
class Raw:
    """A raw training loop, with the parts that differ between libraries."""

    model: Any
    optimizer: Any
    options: Options
    #: Returns the context of a micro-batch. The argument says whether it is the last of its cycle.
    micro_batch: Callable[[bool], Any] | None = None
    backward: Callable[[Any], None] | None = None
    engine_step: Callable[[], None] | None = None
    sharded: bool = False
    #: Scheduler steps per optimizer step: one for each process, as with DDP and FSDP2.
    scheduler_steps: int = 2

    def __post_init__(self) -> None:
        self.schedulers = schedulers_of(self.optimizer) if self.options.extras else []
        self.ema = Ema(self.model) if self.options.extras else None
        fp16 = self.options.precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", 2.0**LOSS_SCALE_POWER) if fp16 else None
        self.parameters = list(self.model.parameters())
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self.dtype = halves.get(self.options.precision)

    def __call__(self, steps: int) -> None:
        options, cycle = self.options, self.options.cycle
        for index, (x, y) in enumerate(raw_loader(steps, options), 1):
            last = index % cycle == 0
            if cycle == 1 or self.micro_batch is None:
                self.forward_backward(x, y)
            else:
                with self.micro_batch(last):
                    self.forward_backward(x, y)
            if self.engine_step is not None:
                self.engine_step()  # the engine counts micro-batches itself
            elif last:
                self.step()
            if last:
                for scheduler in self.schedulers:
                    for _ in range(self.scheduler_steps):
                        scheduler.step()
                if self.ema is not None:
                    self.ema.update()

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.dtype is not None:
            with torch.autocast("cpu", self.dtype):
                output = self.model(x)
        else:
            output = self.model(x)
        if output.dtype is not torch.float32:
            output = output.float()
        loss = F.mse_loss(output, y)
        if self.options.cycle > 1:
            loss = loss / self.options.cycle
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.backward is not None:
            self.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        if self.options.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            if self.sharded:
                norm.full_tensor()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def raw_ddp(blocks: int, options: Options) -> Raw:
    model = nn.parallel.DistributedDataParallel(make_model(blocks))

    def micro_batch(last: bool) -> Any:
        return contextlib.nullcontext() if last else model.no_sync()

    return Raw(model, sgd(model), options, micro_batch)


def raw_fsdp2(blocks: int, options: Options) -> Raw:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = make_model(blocks)
    if options.compiled:
        model.compile()
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    policy = MixedPrecisionPolicy(half, half, half) if half else MixedPrecisionPolicy()
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = sgd(model)
    # fully_shard casts parameters and inputs, so fp16 only needs the scaler here.
    whole = Options(**{**asdict(options), "precision": "fp16" if half is torch.float16 else "no"})

    def micro_batch(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    raw = Raw(model, optimizer, whole, micro_batch, sharded=True)
    raw.dtype = None
    return raw


def raw_deepspeed(blocks: int, options: Options) -> Raw:
    from accelerate_deepspeed import library

    # Otherwise, DeepSpeed compiles operators for communication on the CPU. A step doesn't use them, and a
    # build that was killed leaves a lock on which every later process waits.
    deepspeed = library.load(torch.device("cpu"))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": options.cycle,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "gradient_clipping": 1.0 if options.clip else 0.0,
    }
    if options.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": LOSS_SCALE_POWER,
        }
    model = make_model(blocks)
    optimizer = sgd(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def backward(loss: Any) -> None:
        engine.backward(loss, scale_wrt_gas=False)

    def step() -> None:
        engine.step()
        if options.clip:
            engine.get_global_grad_norm()

    # The engine handles fp16. For bf16, this uses torch's autocast, as an Accelerator does.
    precision = "no" if options.precision == "fp16" else options.precision
    rest = Options(**{**asdict(options), "precision": precision})
    return Raw(engine, optimizer, rest, backward=backward, engine_step=step, scheduler_steps=1)


def raw_fp8(blocks: int, options: Options) -> Raw:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
    model = make_model(blocks)

    def wanted(module: nn.Module, name: str) -> bool:
        first_or_last = name == "0.linear" or module is model[-1]
        return isinstance(module, nn.Linear) and not first_or_last

    convert_to_float8_training(model, module_filter_fn=wanted, config=config)
    wrapped = nn.parallel.DistributedDataParallel(model)
    bf16 = Options(**{**asdict(options), "precision": "bf16"})
    return Raw(wrapped, sgd(wrapped), bf16)


# --- with an Accelerator ----------------------------------------------------------------------


@dataclass
class Ours:
    """The documented training loop, on any backend."""

    accelerator: Any
    blocks: int
    options: Options

    def __post_init__(self) -> None:
        accelerator = self.accelerator
        model = make_model(self.blocks)
        optimizer = sgd(model)
        schedulers = schedulers_of(optimizer) if self.options.extras else []
        prepared = accelerator.prepare(model, optimizer, *schedulers)
        self.model, self.optimizer, *self.schedulers = prepared
        # Listed once, because `model.parameters()` makes calls inside torch in any loop.
        self.parameters = list(self.model.parameters())
        self.ema = None
        if self.options.extras:
            self.ema = Ema(self.model)
            accelerator.register_for_checkpointing(self.ema)

    def __call__(self, steps: int) -> None:
        accelerator, options, cycle = self.accelerator, self.options, self.options.cycle
        size = BATCH * (accelerator.num_processes if options.dispatch else 1)
        # The same data for any number of steps, because `prepare` looks at some of its entries.
        data = Samples(2 * STEPS * cycle * BATCH * accelerator.num_processes)
        loader = accelerator.prepare_data_loader(DataLoader(data, size))
        for x, y in islice(loader, steps * cycle):
            if cycle == 1:
                self.forward_backward(x, y)
                self.step()
                continue
            with accelerator.accumulate(self.model):
                self.forward_backward(x, y)
                self.step()

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.accelerator.backward(F.mse_loss(self.model(x), y))

    def step(self) -> None:
        accelerator = self.accelerator
        if self.options.clip and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if self.ema is not None and accelerator.sync_gradients:
            self.ema.update()
        self.optimizer.zero_grad()


def ours(backend: str, blocks: int, options: Options) -> Ours:
    from accelerate_core import Accelerator, FullyShardedDataParallelPlugin
    from accelerate_core.utils import DataLoaderConfiguration, GradScalerKwargs

    more: dict[str, Any] = {"backend": backend, "mixed_precision": options.precision}
    if options.precision == "fp16":
        more["kwargs_handlers"] = [GradScalerKwargs(init_scale=2.0**LOSS_SCALE_POWER)]
    if backend == "fsdp2":
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    elif backend == "deepspeed":
        from accelerate_core import DeepSpeedPlugin

        more["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=options.stage)
    elif backend == "fp8":
        from accelerate_core.utils import AORecipeKwargs

        more |= {"backend": "ddp", "mixed_precision": "fp8"}
        more["kwargs_handlers"] = [AORecipeKwargs(emulate=True)]
    if options.compiled:
        more["dynamo_backend"] = "inductor"
    split = DataLoaderConfiguration(
        dispatch_batches=options.dispatch, split_batches=options.dispatch
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.cycle,
        dataloader_config=split,
        step_scheduler_with_optimizer=True,
        process_group_timeout=TIMEOUT.seconds,
        **more,
    )
    return Ours(accelerator, blocks, options)


class MegatronRaw:
    """Makes Megatron's own calls on the objects that our backend built, to avoid building them again."""

    def __init__(self, made: Ours) -> None:
        self.made = made
        self.engine = made.accelerator.backend.engines[-1]

    def __call__(self, steps: int) -> None:
        from accelerate_megatron.library import imported

        finalize = imported("distributed.finalize_model_grads").finalize_model_grads
        engine, options = self.engine, self.made.options
        model, optimizer = engine.chunks[0], engine.optimizer
        for index, (x, y) in enumerate(raw_loader(steps, options), 1):
            loss = F.mse_loss(model(x), y)
            if options.cycle > 1:
                loss = loss / options.cycle
            if options.precision == "fp16":
                loss = optimizer.scale_loss(loss)
            loss.backward()
            if index % options.cycle == 0:
                finalize(engine.chunks)
                optimizer.prepare_grads()
                if options.clip:
                    optimizer.clip_grad_norm(1.0)
                optimizer.step_with_ready_grads()
                for scheduler in self.made.schedulers:
                    scheduler.scheduler.step()
                if self.made.ema is not None:
                    self.made.ema.update()
                optimizer.zero_grad(set_to_none=True)
                model.zero_grad_buffer()


# --- rows -------------------------------------------------------------------------------------

MAKERS = {"ddp": raw_ddp, "fsdp2": raw_fsdp2, "deepspeed": raw_deepspeed, "fp8": raw_fp8}
ACCUMULATED = Options(cycle=CYCLE)
ROWS: dict[str, dict[str, Options]] = {
    "ddp": {
        "plain": Options(),
        "accumulation": ACCUMULATED,
        "clipping": Options(clip=True),
        "bf16": Options(precision="bf16"),
        "fp16, clipping": Options(precision="fp16", clip=True),
        "EMA, 3 schedulers, registered": Options(extras=True),
        "dispatched loader": Options(dispatch=True),
    },
    "fsdp2": {
        "plain": Options(),
        "accumulation": ACCUMULATED,
        "clipping": Options(clip=True),
        "bf16": Options(precision="bf16"),
        "fp16, clipping": Options(precision="fp16", clip=True),
        "EMA, 3 schedulers, registered": Options(extras=True),
        "accumulation, EMA, 3 schedulers": Options(cycle=CYCLE, extras=True),
        "compiled": Options(compiled=True),
    },
    "deepspeed": {
        **{f"ZeRO {stage}": Options(stage=stage) for stage in range(4)},
        "ZeRO 2, accumulation": Options(stage=2, cycle=CYCLE),
        "ZeRO 3, accumulation": Options(stage=3, cycle=CYCLE),
        "ZeRO 2, clipping": Options(stage=2, clip=True),
        "ZeRO 3, clipping": Options(stage=3, clip=True),
        "ZeRO 2, bf16": Options(stage=2, precision="bf16"),
        "ZeRO 2, fp16, clipping": Options(stage=2, precision="fp16", clip=True),
        "ZeRO 2, EMA, 3 schedulers, registered": Options(stage=2, extras=True),
    },
    "megatron": {
        "plain": Options(),
        "accumulation": ACCUMULATED,
        "clipping": Options(clip=True),
        "bf16": Options(precision="bf16"),
        "fp16, clipping": Options(precision="fp16", clip=True),
        "EMA, 3 schedulers, registered": Options(extras=True),
    },
    "fp8": {"torchao": Options()},
}


#: Rows that the tests measure. The others are slow, or would find no other regressions: "registered" does all
#: that a plain step does, within the same limit.
QUICK = ("accumulation", "fp16, clipping", "registered", "dispatched loader", "torchao")


def compare(backend: str, options: Options, blocks: int, steps: int) -> dict[str, dict[str, float]]:
    found = {}
    # If a DeepSpeed engine were destroyed later, it would clear state shared by all engines.
    gc.collect()
    if backend != "megatron":
        found["raw"] = counted(MAKERS[backend](blocks, options), steps)
    gc.collect()
    if options.compiled:
        torch.compiler.reset()  # so that guards of the raw loop's model are not counted with ours
    made = ours(backend, blocks, options)
    if backend == "megatron":
        found["raw"] = counted(MegatronRaw(made), steps)
    found["ours"] = counted(made, steps)
    if options.compiled:
        torch.compiler.reset()
    if made.ema is not None:
        found["ours"]["state_dicts"] = made.ema.copies
    made.accelerator.end_training()
    return found


def worker(backend: str, only: str | None, quick: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {}
    keep = None
    if backend == "megatron":
        sys.path.insert(0, str(ROOT / "tests" / "backends" / "megatron"))
        import cuda_on_cpu

        cuda_on_cpu.install()
    if backend == "deepspeed":
        sys.path.insert(0, str(ROOT / "tests" / "backends" / "deepspeed"))
        import cpu_has_fp16  # noqa: F401
    for title, options in ROWS[backend].items():
        if only and only not in title:
            continue
        if quick and not title.endswith(QUICK):
            continue
        if keep is None:
            from accelerate_core import Accelerator

            keep = Accelerator(cpu=True, backend="ddp" if backend != "megatron" else "megatron",
                               process_group_timeout=TIMEOUT.seconds)  # fmt: skip
        steps = QUICK_STEPS if quick else STEPS
        small = compare(backend, options, SMALL, steps)
        large = compare(backend, options, LARGE, steps)
        row = {name: small["ours"][name] - small["raw"][name] for name in small["raw"]}
        grown = {name: large["ours"][name] - large["raw"][name] for name in large["raw"]}
        row["growth"] = grown["calls"] - row["calls"]
        row["own growth"] = grown["own"] - row["own"]
        row["copied growth"] = grown["copied"] - row["copied"]
        row["micro_batches"] = options.cycle
        row["raw calls"] = small["raw"]["calls"]
        row["state_dicts"] = small["ours"].get("state_dicts", 0)
        rows[title] = {name: round(value, 3) for name, value in row.items()}
    return rows


def launch(backend: str, only: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "counts.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local_addr", "127.0.0.1", "--nproc_per_node", "2", __file__]
        command += ["--worker", backend, "--json", str(target), "--row", only or ""]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_CONFIG_HOME": os.devnull}
        done = subprocess.run(command, env=environ, timeout=600, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-6000:])
        return json.loads(target.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="only this backend")
    parser.add_argument("--row", help="only rows with this text in the title")
    parser.add_argument("--json", type=Path, help="write the counts here")
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rows = worker(options.worker, options.row, options.quick)
        if int(os.environ["RANK"]) == 0:
            options.json.write_text(json.dumps(rows))
        return

    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    table = Table(
        "backend", "row", "raw calls", "calls", "growth", "collectives", "reads", "bytes copied"
    )
    results = {}
    for backend in track([options.only] if options.only else list(ROWS), transient=True):
        results[backend] = launch(backend, options.row)
        for title, row in results[backend].items():
            names = ("raw calls", "calls", "growth", "collectives", "reads", "copied")
            table.add_row(backend, title, *(f"{row[name]:+.1f}" for name in names))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
