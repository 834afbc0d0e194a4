"""Save with one kind of compilation and load with another, and compare names, weights and optimizer.

Arguments: folder, backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from worker import PG_TIMEOUT, RANK, SIZE, write_result

from accelerate_core import Accelerator


class Graphs:
    """A compiler that counts graphs."""

    count = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        Graphs.count += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Holder(nn.Module):
    """A module of a script that really has a part with this name, as older checkpoints seem to have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend=Graphs())


def blocks(net: Net) -> nn.Module:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = compiled(block)
    return net


def nested(net: Net) -> nn.Module:
    for block in net.blocks:
        block.mix = compiled(block.mix)
    return compiled(blocks(net))


def layer(net: Net) -> nn.Module:
    net.head = compiled(net.head)
    return net


def in_place(net: Net) -> nn.Module:
    net.compile(backend=Graphs())
    return net


def with_hook(net: Net) -> nn.Module:
    blocks(net)
    net.blocks[0].register_forward_hook(lambda module, inputs, output: None)
    return net


def held(net: Net) -> nn.Module:
    net.blocks[0] = Holder(net.blocks[0])
    return net


def late(net: Net) -> nn.Module:
    return net  # compiled after `prepare`


KINDS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda net: net,
    "blocks": blocks,
    "whole": compiled,
    "nested": nested,
    "layer": layer,
    "in_place": in_place,
    "with_hook": with_hook,
    "late": late,
    "held": held,
}
#: (saved as, loaded as); "held" has the names of older checkpoints.
PAIRS = (
    ("blocks", "plain"),
    ("plain", "blocks"),
    ("whole", "nested"),
    ("nested", "plain"),
    ("layer", "in_place"),
    ("held", "plain"),
    ("held", "nested"),
    ("held", "held"),
    ("with_hook", "plain"),
    ("held", "with_hook"),
    ("late", "plain"),
    ("plain", "late"),
)
#: Those that are also tried on several ranks.
ON_RANKS = (("blocks", "plain"), ("held", "nested"), ("late", "plain"))


class Run:
    """A prepared model of one kind, after one step."""

    def __init__(self, kind: str, seed: int, make: Callable[[], Accelerator]) -> None:
        torch.manual_seed(seed)
        self.accelerator = make()
        Graphs.count = 0
        model = KINDS[kind](Net())
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.adam = self.accelerator.prepare(model, adam)
        if kind == "late":
            inner = self.accelerator.unwrap_model(self.model)
            inner.blocks[0] = compiled(inner.blocks[0])
        self.step()
        assert (Graphs.count > 0) == (kind not in ("plain", "held")), kind

    def step(self) -> float:
        x = torch.linspace(0, 1, 8).view(2, 4) + RANK
        loss = self.model(x).square().mean()
        self.accelerator.backward(loss)
        self.adam.step()
        self.adam.zero_grad()
        return float(loss.detach())


def check(saved: str, loaded: str, folder: Path, make: Callable[[], Accelerator]) -> None:
    torch._dynamo.reset()
    one = Run(saved, 0, make)
    state = one.accelerator.get_state_dict(one.model)
    place = one.accelerator.save_state(folder / "state")
    one.accelerator.save_model(one.model, folder / "model")
    here = [one.step(), one.step()]
    if RANK == 0 and saved != "held":
        assert list(state) == list(Net().state_dict()), list(state)
        files = [*Path(place).rglob("*.json"), *(folder / "model").glob("*.safetensors")]
        assert not [path for path in files if b"_orig_mod" in path.read_bytes()]
    other = Run(loaded, 1, make)
    other.accelerator.load_state(place)
    there = [other.step(), other.step()]
    assert here == there, (here, there)


def main(folder: Path, backend: str) -> None:
    def make() -> Accelerator:
        options: dict[str, Any] = {"backend": backend} if SIZE > 1 else {}
        return Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **options)

    kept = make()
    failures = {}
    for saved, loaded in PAIRS if SIZE == 1 else ON_RANKS:
        if backend == "deepspeed" and "late" in (saved, loaded):
            continue  # its engine has the names from `prepare`
        place = folder / f"{saved}-{loaded}"
        if RANK == 0:
            place.mkdir()
        kept.wait_for_everyone()
        try:
            check(saved, loaded, place, make)
        except Exception as error:
            failures[f"{saved} -> {loaded}"] = f"{type(error).__name__}: {error}"[:600]
    write_result(failures)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
