"""Run the cases of a setup one after the other in one process, and write their results as JSON.

python xla_worker.py SETUP FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate_core import Accelerator, ParallelismConfig, set_seed
from accelerate_core.data.rng import GENERATORS
from accelerate_core.distributed import process

FOLDER = Path(sys.argv[2]) if __name__ == "__main__" else Path()
PLAN = {"0": "colwise", "2": "rowwise"}
MESHES = {
    "dp": {"dp_replicate_size": 4},
    "fsdp": {"dp_shard_size": 4},
    "tp_dp": {"dp_replicate_size": 2, "tp_size": 2, "tp_handler": PLAN},
    "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2},
}
CASES: dict[str, list[Callable[[], Any]]] = {}


def case(*setups: str) -> Any:
    def register(function: Any) -> Any:
        for setup in setups:
            CASES.setdefault(setup, []).append(function)
        return function

    return register


def begin(mesh: str = "", **more: Any) -> Accelerator:
    if mesh:
        more["parallelism_config"] = ParallelismConfig(**MESHES[mesh])
    return Accelerator(**more)


def plugin(**options: Any) -> Any:
    from accelerate_xla import XLAPlugin

    return XLAPlugin(**options)


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Dropout(dropout))


def data(count: int = 124) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (count,), generator=generator))


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


class Run:
    """A model, AdamW and shuffled data, prepared by one Accelerator."""

    def __init__(self, accelerator: Accelerator, dropout: float = 0.0, size: int = 8) -> None:
        set_seed(0)
        self.accelerator = accelerator
        model = network(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(data(), batch_size=size, shuffle=True)
        prepared = accelerator.prepare(model, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared

    def train(self, batches: int = 16) -> list[float]:
        """Return the loss of each micro-batch and the gradient norm of each step."""
        seen: list[torch.Tensor] = []
        for index, (x, y) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, x, y)
                self.accelerator.backward(loss)
                seen.append(loss.detach())
                if self.accelerator.sync_gradients:
                    seen.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if index + 1 == batches:
                break
        return [float(one) for one in seen]


def trained(mesh: str = "", precision: str = "no") -> list[float]:
    with begin(mesh, mixed_precision=precision, gradient_accumulation_steps=2) as accelerator:
        return Run(accelerator).train()


def raised(call: Callable[[], Any]) -> str:
    try:
        return f"no error, but {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def spec(tensor: torch.Tensor) -> str:
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor.data))


def compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return int(metrics.counter_value("UncachedCompile") or 0)


# --- the same with torch on the CPU, with DDP, on one device and on a mesh -----------------------


@case("cpu", "one")
def parity() -> Any:
    return {name: trained(precision=name) for name in ("no", "bf16")}


@case("mesh")
def parity_of_meshes() -> Any:
    found = {mesh: trained(mesh) for mesh in MESHES}
    return {**found, "bf16": trained("fsdp", "bf16")}


@case("cpu", "one", "mesh")
def counted() -> Any:
    """Train with counted items and cycles of different lengths, and record CPU fallbacks."""
    losses = []
    with begin("dp" if "mesh" in sys.argv[1] else "", gradient_accumulation_steps=2) as accelerator:
        run = Run(accelerator)
        for x, y in run.loader:
            items = (y > 0).sum()
            with accelerator.accumulate(run.model, num_items=items):
                kept = y.masked_fill(y == 0, -100)
                loss = nn.functional.cross_entropy(run.model(x), kept, reduction="sum")
                accelerator.backward(loss)
                losses.append(loss.detach())
                run.optimizer.step()
                run.optimizer.zero_grad()
    result = {"losses": [float(one) for one in losses]}
    if sys.argv[1] != "cpu":
        import torch_xla.debug.metrics as metrics

        result["fallbacks"] = metrics.executed_fallback_ops()
    return result


@case("one", "mesh")
def metrics_are_exact() -> Any:
    """Gather metrics with a short last batch, which is padded for the graph."""
    with begin("dp" if "mesh" in sys.argv[1] else "") as accelerator:
        loader = accelerator.prepare(DataLoader(torch.arange(22.0).view(22, 1), batch_size=8))
        shapes, kept = set(), []
        for batch in loader:
            shapes.add(tuple(batch.shape))
            kept += accelerator.gather_for_metrics(batch).flatten().tolist()
        return {"shapes": sorted(shapes), "kept": kept}


# --- ties, graphs and other behaviour -----------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@case("cpu", "one", "mesh")
def ties() -> Any:
    plan = {"embed": "rowwise", "head": "colwise"}
    more = {}
    if sys.argv[1] == "mesh":
        config = ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=plan)
        more = {"parallelism_config": config}
    with Accelerator(**more) as accelerator:
        set_seed(0)
        model = Tied()
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        x = torch.arange(16).to(accelerator.device)
        losses = []
        for _ in range(4):
            loss = nn.functional.cross_entropy(model(x), x.roll(1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        state = accelerator.get_state_dict(model)
        return {
            "tied": model.head.weight is model.embed.weight,
            "trained": len(optimizer.param_groups[0]["params"]),
            "losses": losses,
            "state": [value.device.type for value in state.values()],
            "one": state["head.weight"].data_ptr() == state["embed.weight"].data_ptr(),
        }


@case("one")
def graphs() -> Any:
    """Count compiled graphs after each batch, with a short last cycle and a second epoch."""
    with begin(gradient_accumulation_steps=2) as accelerator:
        run = Run(accelerator, size=8)
        counts = []
        for _ in range(2):
            before = compiled()
            for x, y in run.loader:  # 16 batches, the last one short
                with accelerator.accumulate(run.model):
                    accelerator.backward(loss_of(run.model, x, y))
                    accelerator.clip_grad_norm_(run.model.parameters(), 0.3)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                counts.append(compiled() - before)
        return counts


@case("bench")
def step_time() -> Any:
    """Return the median seconds of a step with the Accelerator and without, measured alternately."""
    import torch_xla

    times: dict[bool, list[float]] = {True: [], False: []}
    with begin() as accelerator:
        device = accelerator.device
        runs = []
        for bare in (False, True):
            set_seed(0)
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if bare:
                model.to(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            else:
                model, optimizer = accelerator.prepare(model, optimizer)
            runs.append((bare, model, optimizer))
        x, y = torch.randn(8, 8).to(device), torch.randint(0, 4, (8,)).to(device)
        for _ in range(200):
            for bare, model, optimizer in runs:
                began = time.perf_counter()
                loss = loss_of(model, x, y)
                if bare:
                    loss.backward()
                    torch_xla.sync()
                else:
                    accelerator.backward(loss)
                optimizer.step()
                if bare:
                    torch_xla.sync()
                optimizer.zero_grad()
                torch_xla.sync(wait=True)
                times[bare].append(time.perf_counter() - began)
    return [statistics.median(times[bare][50:]) for bare in (False, True)]


class Growing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for length in (4, 4, 4, 4, 5, 6, 7, 8, 9, 9):
            yield torch.ones(length, 8)


@case("one")
def new_shape_gives_a_warning() -> Any:
    with begin() as accelerator, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Growing(), batch_size=None)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "compiled" in str(one.message)]


@case("one")
def short_epochs_are_watched() -> Any:
    """Each epoch has one batch, with a new shape."""
    with begin() as accelerator, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for length in range(24, 30):
            loader = accelerator.prepare(DataLoader(torch.ones(length, 8), batch_size=length))
            for x in loader:
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in caught if "compiled" in str(one.message)]


@case("one")
def logged() -> Any:
    """Log a loss on the device in each step."""
    folder = FOLDER / "logged"
    with begin(log_with="jsonl", project_dir=str(folder)) as accelerator:
        accelerator.init_trackers("run")
        run = Run(accelerator)
        for step, (x, y) in enumerate(list(run.loader) * 6):
            loss = loss_of(run.model, x, y)
            accelerator.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
            accelerator.log({"loss": loss}, step=step)
        accelerator.end_training()
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [step + 1, sum('"loss"' in line for line in lines)]


@case("one", "mesh")
def within_a_cycle() -> Any:
    """Save shards within a cycle, which includes gradients, and resume."""
    mesh = "fsdp" if sys.argv[1] == "mesh" else ""
    target, losses = str(FOLDER / f"within_{sys.argv[1]}"), []
    more = {"xla_plugin": plugin(state_dict_type=KINDS[1]), "gradient_accumulation_steps": 2}
    for resumed in (False, True):
        with begin(mesh, **more) as accelerator:
            run = Run(accelerator)
            if resumed:
                accelerator.load_state(target)
            seen = []
            for index, (x, y) in enumerate(run.loader):
                with accelerator.accumulate(run.model):
                    loss = loss_of(run.model, x, y)
                    accelerator.backward(loss)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    seen.append(float(loss.detach()))
                if index == 4 and not resumed:
                    accelerator.save_state(target)
            losses.append(seen)
    return {"whole": losses[0], "resumed": losses[1]}


@case("one")
def random_numbers() -> Any:
    with begin() as accelerator:
        device = accelerator.device
        drawn = []
        for seed in (1, 1, 2):
            set_seed(seed)
            drawn.append(torch.rand(3, device=device).tolist())
        return drawn


@case("cpu", "one")
def compilers() -> Any:
    """Train with torch_xla's compiler under its own name and Accelerate's two names."""
    found = {}
    for name in ("openxla", "torchxla_trace_once", "aot_torchxla_trace_once"):
        name = "eager" if sys.argv[1] == "cpu" else name
        with begin(dynamo_backend=name) as accelerator:
            found[name] = Run(accelerator).train(6)
    return found


@case("one")
def downcast() -> Any:
    with begin(mixed_precision="bf16", xla_plugin=plugin(downcast_bf16=True)) as accelerator:
        run = Run(accelerator)
        losses = run.train(4)
        return [losses, sorted({str(one.dtype) for one in run.model.parameters()})]


@case("one", "mesh")
def explained() -> Any:
    mesh = "hybrid" if sys.argv[1] == "mesh" else ""
    with begin(mesh, xla_plugin=plugin(metrics=True)) as accelerator:
        Run(accelerator).train(4)
        return [accelerator.explain(), accelerator.device_count, accelerator.num_processes]


@case("one")
def generators() -> Any:
    """Synchronize XLA's generator, and draw again from the same state."""
    with begin(rng_types=["xla", "torch"]) as accelerator:
        shared = GENERATORS["xla"]
        state = shared.get_rng_state()
        draws = []
        for _ in range(2):
            shared.set_rng_state(state)
            draws.append(torch.rand(3, device=accelerator.device).tolist())
        return {"types": accelerator.rng_types, "state": str(state.dtype), "draws": draws}


@case("cpu")
def no_generator() -> Any:
    return raised(lambda: begin(rng_types=["xla"]))


@case("one")
def refused() -> Any:
    def touched() -> Any:
        return begin("dp")

    def unset() -> Any:
        with begin():
            return touched()

    found = {
        "fp16": raised(lambda: begin(mixed_precision="fp16")),
        "downcast": raised(lambda: begin(xla_plugin=plugin(downcast_bf16=True))),
        "cpu": raised(lambda: begin(cpu=True, backend="xla")),
        "touched": raised(touched),
    }
    return found


@case("one", "mesh")
def device_tensors_in_torch() -> Any:
    """Collect errors of `torch.distributed` for device tensors and for torch_xla's process group."""
    import torch.distributed as dist
    from torch.distributed.nn import functional as differentiable

    group = {"world_size": 1, "rank": 0}
    found = {}
    with begin("dp" if "mesh" in sys.argv[1] else "") as accelerator:
        dist.init_process_group("gloo", store=dist.HashStore(), **group)
        x, host = torch.ones(3, device=accelerator.device), torch.ones(3)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x]),
            "async": lambda: dist.all_reduce(x, async_op=True),
            "reduce": lambda: dist.reduce(x, 0),
            "broadcast": lambda: dist.broadcast(x, 0),
            "all_gather": lambda: dist.all_gather([host], x),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, host),
            "gather": lambda: dist.gather(x, [host]),
            "scatter": lambda: dist.scatter(x, [host]),
            "reduce_scatter": lambda: dist.reduce_scatter(x, [host]),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, host),
            "all_to_all": lambda: dist.all_to_all([host], [x]),
            "all_to_all_single": lambda: dist.all_to_all_single(host, x),
            "send": lambda: dist.group.WORLD.send([x], 0, 0),
            "recv": lambda: dist.recv(x),
            "differentiable": lambda: differentiable.all_reduce(x),
            "DDP": lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(x.device)),
        }
        found = {name: raised(call) for name, call in calls.items()}
        dist.all_reduce(host)
        dist.broadcast_object_list([{"a": 1}], 0)
        dist.barrier()
        found["unchanged"] = [x.tolist(), host.tolist()]
        dist.destroy_process_group()
        url = {"init_method": "xla://"}
        found["group"] = raised(lambda: dist.init_process_group("xla", **url))
    return found


@case("refused")
def refused_meshes() -> Any:
    def planned(plan: Any, model: Any = None, **sizes: Any) -> str:
        def make() -> Any:
            config = ParallelismConfig(tp_size=4, tp_handler=plan, **sizes)
            with Accelerator(parallelism_config=config) as accelerator:
                return accelerator.prepare(model or network())

        return raised(make)

    def other(**sizes: Any) -> str:
        return raised(lambda: Accelerator(parallelism_config=ParallelismConfig(**sizes)))

    with begin("dp"):
        other_mesh = raised(lambda: begin("fsdp"))
    no_mesh = raised(begin)
    return {
        "size": other(dp_shard_size=3),
        "dimension": other(cp_size=4),
        "no plan": planned(None),
        "no module": planned({"fc": "colwise"}),
        "style": planned({"0": "colwize"}),
        "kind": planned({"1": "colwise"}),
        "divides": planned({"0": "rowwise"}, nn.Sequential(nn.Linear(6, 4))),
        "tie": planned({"embed": "colwise", "head": "colwise"}, Tied()),
        "other mesh": other_mesh,
        "no mesh": no_mesh,
    }


@case("mesh")
def sharded() -> Any:
    """Return, for each mesh, the bytes of weights and of AdamW's state on one device."""
    import torch_xla.distributed.spmd as spmd

    def held(tensor: torch.Tensor) -> int:
        value = spmd.wrap_if_sharded(tensor.data)
        if not hasattr(value, "local_shards"):  # replicated
            return tensor.numel() * tensor.element_size()
        shards = value.local_shards
        mine = [one for one in shards if one.shard_device.endswith(":0")]
        return sum(one.data.numel() * one.data.element_size() for one in mine)

    found = {}
    for mesh in MESHES:
        with begin(mesh) as accelerator:
            run = Run(accelerator)
            run.train(4)
            parameters = list(run.model.parameters())
            states = [
                value
                for state in run.optimizer.state.values()
                for value in state.values()
                if value.device.type == "xla"
            ]
            batch = next(iter(run.loader))
            found[mesh] = {
                "weights": sum(map(held, parameters)),
                "optimizer": sum(map(held, states)),
                "specs": [spec(one) for one in parameters],
                "batch": [spec(one) for one in batch],
                "explained": accelerator.explain().split("device(s)\n")[1].splitlines(),
            }
    return found


# --- checkpoints --------------------------------------------------------------------------------

KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


def _steps(run: Run, count: int) -> list[float]:
    """Train on the same batch in each step, so that the order of data doesn't matter."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 8, generator=generator).to(run.accelerator.device)
    y = torch.randint(0, 4, (8,), generator=generator).to(run.accelerator.device)
    losses = []
    for _ in range(count):
        loss = loss_of(run.model, x, y)
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@case("one", "mesh")
def saved() -> Any:
    """Resume, also from a save in the background, and load with another mesh and model."""
    found: dict[str, Any] = {}
    for mesh in ("fsdp", "tp_dp") if sys.argv[1] == "mesh" else ("",):
        for kind in KINDS:
            name = f"{mesh or 'one'}_{kind}"
            with begin(mesh, xla_plugin=plugin(state_dict_type=kind)) as accelerator:
                run = Run(accelerator, dropout=0.1)
                _steps(run, 3)
                accelerator.save_state(str(FOLDER / name))
                losses = _steps(run, 3)
                accelerator.load_state(str(FOLDER / name))
                specs = [spec(one) for one in run.model.parameters()]
                again = _steps(run, 3)
                accelerator.save_state(str(FOLDER / f"{name}_later"), blocking=False)
                after = _steps(run, 2)
                accelerator.load_state(str(FOLDER / f"{name}_later"))
                later = _steps(run, 2)
                state = [
                    spec(v) for s in run.optimizer.state.values() for v in s.values() if v.ndim
                ]
                found[name] = {
                    "same": losses == again and after == later,
                    "losses": losses,
                    "specs": specs,
                    "state": state,
                    "files": sorted(one.name for one in (FOLDER / name).iterdir()),
                }
    if sys.argv[1] == "mesh":
        with begin("fsdp", xla_plugin=plugin(state_dict_type=KINDS[1])) as accelerator:
            run = Run(accelerator, dropout=0.1)
            accelerator.load_state(str(FOLDER / "tp_dp_SHARDED_STATE_DICT"))
            found["other mesh"] = _steps(run, 3)
            other = nn.Linear(3, 3)
            accelerator.free_memory()
            accelerator.prepare(other)
            path = str(FOLDER / "tp_dp_SHARDED_STATE_DICT")
            found["other model"] = raised(lambda: accelerator.load_state(path))
    return found


@case("one", "mesh")
def killed() -> Any:
    """Resume in a new process after another was killed."""
    here = [sys.executable, __file__, f"dying_{sys.argv[1]}", str(FOLDER)]
    target = FOLDER / f"killed_{sys.argv[1]}"
    shutil.rmtree(target, ignore_errors=True)
    died = subprocess.run(here, capture_output=True, text=True, timeout=200)
    with begin("fsdp" if sys.argv[1] == "mesh" else "") as accelerator:
        run = Run(accelerator, dropout=0.1)
        accelerator.load_state(str(target))
        return {"rc": died.returncode, "stdout": died.stdout, "losses": _steps(run, 3)}


def die() -> Any:
    with begin("fsdp" if sys.argv[1] == "dying_mesh" else "") as accelerator:
        run = Run(accelerator, dropout=0.1)
        _steps(run, 3)
        name = sys.argv[1].removeprefix("dying_")
        accelerator.save_state(str(FOLDER / f"killed_{name}"))
        print(json.dumps(_steps(run, 3)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


CASES["dying_one"] = CASES["dying_mesh"] = [die]


@case("ddp")
def ddp() -> Any:
    """With DDP on two ranks, save a checkpoint for XLA and load those of XLA."""
    with begin() as accelerator:
        run = Run(accelerator)
        _steps(run, 3)
        accelerator.save_state(str(FOLDER / "ddp"))
        losses = _steps(run, 3)
        read = {}
        for name in ("one_FULL_STATE_DICT", "fsdp_FULL_STATE_DICT"):
            accelerator.load_state(str(FOLDER / name))
            with torch.no_grad():
                read[name] = [float(one.sum()) for one in run.model.parameters()]
        return {"losses": losses, "read": read, "rank": accelerator.process_index}


@case("of_ddp_one", "of_ddp_mesh")
def of_ddp() -> Any:
    with begin("fsdp" if sys.argv[1] == "of_ddp_mesh" else "") as accelerator:
        run = Run(accelerator)
        accelerator.load_state(str(FOLDER / "ddp"))
        losses = _steps(run, 3)
        name = "fsdp" if sys.argv[1] == "of_ddp_mesh" else "one"
        accelerator.load_state(str(FOLDER / f"{name}_FULL_STATE_DICT"))
        return {"losses": losses, "read": [float(one.sum()) for one in run.model.parameters()]}


def main() -> None:
    """Run all cases of the setup. If one fails, end the Accelerators that it created."""
    found = {}
    for function in CASES[sys.argv[1]]:
        if sys.argv[3:] and function.__name__ not in sys.argv[3:]:
            continue
        try:
            found[function.__name__] = function()
        except BaseException:
            found[function.__name__] = traceback.format_exc()
            while (left := process.current_user()) is not None:
                process.release(left)
    rank = os.environ.get("RANK", "0")
    (FOLDER / f"{sys.argv[1]}_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
