"""Plugins that test what the contract can express: reductions, optimizers, schedulers, roles and membership.

`write` installs them in a folder. They are active with `ACCELERATE_PLUGINS=NAME`.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from support import clean_environment
from torch.distributed import checkpoint as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer

from accelerate_core.plugin import (
    AcceleratorView,
    Backend,
    PreparePlanView,
    RuntimeView,
    option,
    process_global,
    settings,
)

EXTENSIONS = {
    "mean": "Mean",
    "later": "Later",
    "int8_gradients": "Int8Gradients",
    "half_gradients": "HalfGradients",
    "failing": "Failing",
    "incomplete": "Incomplete",
    "warmup": "Warmup",
    "ema": "EMA",
    "zero": "Zero",
    "decay": "Decay",
    "forgetful": "Forgetful",
    "roles": "Roles",
    "changes": "Changes",
}
BACKENDS = {"own_average": "OwnAverage", "replicas": "Replicas"}


def write(folder: Path) -> dict[str, str]:
    """Install the plugins in a folder; return the variables with which ranks find them."""
    info = folder / "ideas-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ideas\nVersion: 1.0\n")
    lines = []
    for group, classes in (("extensions", EXTENSIONS), ("backends", BACKENDS)):
        lines.append(f"[accelerate_core.{group}]")
        lines += [f"{name} = idea_plugins:{cls}" for name, cls in classes.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = [str(folder), str(Path(__file__).parent), clean_environment()["PYTHONPATH"]]
    return {"PYTHONPATH": ":".join(paths)}


def documented(name: str) -> type:
    """Return a plugin as docs/plugins.md shows it."""
    page = Path(__file__).parents[2].joinpath("docs", "plugins.md").read_text()
    (code,) = re.findall(rf"```python\n((?:(?!```)[\s\S])*class {name}:[\s\S]*?)```", page)
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    made: type = names[name]
    return made


# --- gradients ------------------------------------------------------------------------------------


class Reducer:
    """The mean in full precision. `Int8Gradients` changes what is sent."""

    def all_reduce(self, gradients: torch.Tensor, bucket: int, group: Any) -> Any:
        dist.all_reduce(gradients, group=group)
        return gradients.div_(dist.get_world_size(group))

    def reduce_scatter(
        self, output: torch.Tensor, gradients: torch.Tensor, bucket: int, group: Any
    ) -> None:
        count = dist.get_world_size(group)
        dist.reduce_scatter(output, list(gradients.chunk(count)), group=group)
        output /= count


class Mean:
    name = "mean"
    api_version = (1, 0)

    def reduce_gradients(self, accelerator: AcceleratorView, model: Any) -> Reducer:
        return Reducer()


class Later(Mean):
    """Returns futures, so that the reduction overlaps with the rest of backward."""

    name = "later"
    api_version = (1, 0)

    def reduce_gradients(self, accelerator: AcceleratorView, model: Any) -> Reducer:
        return LaterReducer()


class LaterReducer(Reducer):
    def all_reduce(self, gradients: torch.Tensor, bucket: int, group: Any) -> Any:
        work = dist.all_reduce(gradients, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size(group))


class Int8Gradients:
    """Sends gradients in 8 bits, and adds what was rounded away to the next step's gradients."""

    name = "int8_gradients"
    api_version = (1, 0)

    def __init__(self) -> None:
        self.reducers: list[Int8Reducer] = []

    def reduce_gradients(self, accelerator: AcceleratorView, model: Any) -> Int8Reducer:
        self.reducers.append(Int8Reducer())
        return self.reducers[-1]

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        return {"sent_bytes": sum(one.sent_bytes for one in self.reducers)}


class Int8Reducer:
    def __init__(self) -> None:
        self.sent_bytes = 0
        self.rounded_away: dict[int, torch.Tensor] = {}

    def all_reduce(self, gradients: torch.Tensor, bucket: int, group: Any) -> torch.Tensor:
        count = dist.get_world_size(group)
        sent, scale = self.rounded(gradients, bucket, 1)
        every = [torch.empty_like(sent) for _ in range(count)]
        scales = [torch.empty_like(scale) for _ in range(count)]
        dist.all_gather(every, sent, group=group)
        dist.all_gather(scales, scale, group=group)
        parts = [one.float() * its for one, its in zip(every, scales, strict=True)]
        return torch.stack(parts).mean(0)

    def reduce_scatter(
        self, output: torch.Tensor, gradients: torch.Tensor, bucket: int, group: Any
    ) -> None:
        count = dist.get_world_size(group)
        sent, scales = self.rounded(gradients, bucket, count)
        received, its = torch.empty_like(sent), torch.empty_like(scales)
        dist.all_to_all_single(received, sent, group=group)
        dist.all_to_all_single(its, scales, group=group)
        torch.mean(received.view(count, -1).float() * its[:, None], 0, out=output)

    def rounded(
        self, gradients: torch.Tensor, bucket: int, pieces: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients in 8 bits, and a scale for each piece."""
        before = self.rounded_away.get(bucket)
        fits = before is not None and before.shape == gradients.shape  # ddp forms new buckets
        whole = gradients + before if fits else gradients
        scales = whole.view(pieces, -1).abs().amax(1).clamp_min(1e-12) / 127
        sent = (whole.view(pieces, -1) / scales[:, None]).round().to(torch.int8)
        self.rounded_away[bucket] = whole - (sent.float() * scales[:, None]).view(-1)
        self.sent_bytes += sent.numel()
        return sent.view(-1), scales


HalfGradients = documented("HalfGradients")


class Failing(Mean):
    name = "failing"
    api_version = (1, 0)

    def reduce_gradients(self, accelerator: AcceleratorView, model: Any) -> Any:
        return FailingReducer()


class FailingReducer(Reducer):
    def all_reduce(self, gradients: torch.Tensor, bucket: int, group: Any) -> Any:
        raise ValueError("no way to send this")

    def reduce_scatter(
        self, output: torch.Tensor, gradients: torch.Tensor, bucket: int, group: Any
    ) -> None:
        raise ValueError("no way to send this")


class Incomplete(Mean):
    name = "incomplete"
    api_version = (1, 0)

    def reduce_gradients(self, accelerator: AcceleratorView, model: Any) -> Any:
        return object()


class OwnAverage(Backend):
    """A backend that does not implement `use_reducer`."""

    name = "own_average"
    api_version = (1, 0)
    reduces_gradients = "backward"

    def backward(self, accelerator: AcceleratorView, loss: Any, kwargs: dict[str, Any]) -> None:
        loss.backward(**kwargs)
        for parameter in accelerator.models[0].parameters():
            parameter.grad = accelerator.communicator.reduce(parameter.grad, "mean")


# --- optimizers and schedulers --------------------------------------------------------------------


Warmup = documented("Warmup")


class EMA:
    """Keeps a moving average of the weights, sharded as they are, from before the first step on."""

    name = "ema"
    api_version = (1, 0)

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []

    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        self.average += [p.detach().clone() for m in plan.values("model") for p in m.parameters()]

    def on_step_end(self, accelerator: AcceleratorView) -> None:
        weights = [p.detach() for model in accelerator.models for p in model.parameters()]
        torch._foreach_lerp_(self.average, weights, 0.1)

    def on_save(self, accelerator: AcceleratorView, directory: Path) -> None:
        dcp.save({"average": self.average}, checkpoint_id=directory)

    def on_load(self, accelerator: AcceleratorView, directory: Path) -> None:
        dcp.load({"average": self.average}, checkpoint_id=directory)

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        return {"average": self.average}


class Zero:
    """Divides the state of AdamW over the ranks."""

    name = "zero"
    api_version = (1, 0)

    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        plan.each("optimizer", lambda optimizer, _: self.divided(optimizer))

    def divided(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        hyper = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return DividedOptimizer(parameters, type(optimizer), **hyper)


class DividedOptimizer(ZeroRedundancyOptimizer):
    """Collects its state on rank 0 when a checkpoint is saved; all ranks call this together."""

    def state_dict(self) -> dict[str, Any]:
        self.consolidate_state_dict(to=0)
        return super().state_dict() if dist.get_rank() == 0 else {}


class Forgetful:
    """Replaces the optimizer by one that holds a single parameter."""

    name = "forgetful"
    api_version = (1, 0)

    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        plan.each("optimizer", lambda one, _: torch.optim.SGD(one.param_groups[0]["params"][:1]))


class Decay:
    """Shrinks the weights before each step."""

    name = "decay"
    api_version = (1, 0)

    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        for optimizer in plan.values("optimizer"):
            optimizer.register_step_pre_hook(partial(self.shrink))

    def shrink(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                torch._foreach_mul_(group["params"], 0.99)


# --- roles ----------------------------------------------------------------------------------------


@settings(env_prefix="ROLES_")
class RoleSettings:
    bridge: str = option(default="", help="address and port where the roles meet")
    rank: int = option(default=0, per_rank=True, help="this process's rank among all roles")
    size: int = option(default=1, help="processes of all roles together")


class Roles:
    """Connects worlds with different jobs, such as trainers and an evaluator, by a process group."""

    name = "roles"
    api_version = (1, 0)
    Settings = RoleSettings

    def __init__(self, where: RoleSettings) -> None:
        self.where = where

    def on_start(self, accelerator: AcceleratorView) -> None:
        wanted = (self.where.bridge, self.where.rank)
        self.group = process_global("roles", wanted, self.open, lambda group: group.shutdown())

    def open(self) -> Any:
        host, port = self.where.bridge.split(":")
        first = self.where.rank == 0
        store = dist.TCPStore(host, int(port), self.where.size, first, timedelta(seconds=60))
        options = (self.where.rank, self.where.size, timedelta(seconds=60))
        return dist.ProcessGroupGloo(store, *options)

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        return {"bridge": getattr(self, "group", None)}


# --- membership -----------------------------------------------------------------------------------


class Changes:
    """Records the number of ranks after each change."""

    name = "changes"
    api_version = (1, 0)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_membership_change(self, accelerator: AcceleratorView) -> None:
        self.sizes.append(accelerator.hooks.data_shard()[1])

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        return {"membership": self.sizes}


class Replicas(Backend):
    """Every process is a world of its own. Replicas may join or die while the others train.

    The first replica decides whether a step is committed, so it must not die.

    Variables: REPLICA (this process's number), REPLICAS (the numbers at the start) and REPLICA_STORE (the
    address of a TCPStore that survives all of them).
    """

    name = "replicas"
    api_version = (1, 0)
    reduces_gradients = "backward"
    supports: ClassVar[Mapping[str, Any]] = {"elastic": True}

    def mesh(self, runtime: RuntimeView) -> None:
        host, port = os.environ["REPLICA_STORE"].split(":")
        self.store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=30))
        self.me = int(os.environ["REPLICA"])
        self.store.set(f"process/{self.me}", str(os.getpid()))
        members = sorted(map(int, os.environ["REPLICAS"].split(",")))
        self.newcomer = self.me not in members
        self.failed = False
        self.steps = 0
        if self.newcomer:
            self.store.wait(["invited"])  # so that the test knows the step after which it joins
            self.store.set("joins", str(self.me))
            members = [int(one) for one in self.store.get("joined").decode().split(",")]
            self.steps, self.position = pickle.loads(self.store.get("position"))
        self.meet(members)

    def meet(self, members: list[int]) -> None:
        """Form a group of these replicas."""
        self.members = members
        store = dist.PrefixStore(f"{self.steps}/{members}", self.store)
        options = (members.index(self.me), len(members), timedelta(seconds=20))
        self.group = dist.ProcessGroupGloo(store, *options)

    def data_shard(self, runtime: RuntimeView) -> tuple[int, int]:
        return self.members.index(self.me), len(self.members)

    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        if self.newcomer:  # the weights of a replica that trains, and its position in the data
            self.send_weights(plan.values("model"))

    def send_weights(self, models: Sequence[torch.nn.Module]) -> None:
        for model in models:
            for parameter in model.parameters():
                self.group.broadcast(parameter.detach(), root=0).wait()

    def backward(self, accelerator: AcceleratorView, loss: Any, kwargs: dict[str, Any]) -> None:
        loss.backward(**kwargs)
        gradients = [p.grad for m in accelerator.models for p in m.parameters()]
        flat = torch.cat([one.reshape(-1) for one in gradients])
        try:
            self.group.allreduce(flat).wait()
        except RuntimeError:  # a replica died
            self.failed = True
            return
        pieces = flat.div_(len(self.members)).split([one.numel() for one in gradients])
        for one, piece in zip(gradients, pieces, strict=True):
            one.copy_(piece.view_as(one))

    def optimizer_step(self, accelerator: AcceleratorView, optimizer: Any, closure: Any) -> bool:
        """Commit the step only if every replica has reduced its gradients."""
        self.store.set(f"reduced/{self.steps}/{self.me}", str(int(not self.failed)))
        if self.me == self.members[0]:
            self.store.set(f"decision/{self.steps}", pickle.dumps(self.decide()))
        committed, self.next_members = pickle.loads(self.store.get(f"decision/{self.steps}"))
        return committed and super().optimizer_step(accelerator, optimizer, closure)

    def decide(self) -> tuple[bool, list[int]]:
        """Return whether all have reduced, and who takes part in the next step."""
        until = time.monotonic() + 60
        keys = {one: f"reduced/{self.steps}/{one}" for one in self.members}
        while time.monotonic() < until:
            late = [one for one, key in keys.items() if not self.store.check([key])]
            if not any(map(self.lives, late)):
                break
            time.sleep(0.01)
        alive = [one for one, key in keys.items() if self.store.check([key])]
        reduced = [one for one in alive if self.store.get(keys[one]) == b"1"]
        joins = self.store.check(["joins"]) and not self.store.check(["joined"])
        newcomers = [int(self.store.get("joins"))] if joins else []
        return reduced == self.members, alive + newcomers

    def lives(self, replica: int) -> bool:
        """Return whether a replica's process runs. All of them are on this machine."""
        try:
            process = psutil.Process(int(self.store.get(f"process/{replica}")))
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def on_step_end(self, accelerator: AcceleratorView) -> None:
        self.steps += 1
        self.failed = False
        if self.next_members == self.members:
            return
        joins = len(self.next_members) > len(self.members)
        if joins and self.me == self.members[0]:
            position = self.steps, accelerator.loaders[0].state_dict()
            self.store.set("position", pickle.dumps(position))
            self.store.set("joined", ",".join(map(str, self.next_members)))
        self.meet(self.next_members)
        if joins:
            self.send_weights(accelerator.models)
        accelerator.reshare()
