"""Training steps on one GPU, compared with the same loops in raw PyTorch and in other libraries.

    python benchmarks/gpu.py                          everything
    python benchmarks/gpu.py --only steps feeding     some sections
    python benchmarks/gpu.py --device cpu --small     a rehearsal without a GPU

Sections:
* `steps`: a GPT of about 100 million parameters in fp32, bf16, and fp16 with a scaler and clipping
* `optimizers`: the same with AdamW's foreach and fused implementations
* `feeding`: batches that take about as long to copy as to process
* `sharding`: FSDP2 on a mesh of one rank, compared with raw `fully_shard`
* `syncs`: how often the host waits for the device per step, counted by torch's debug mode
* `large`: a model larger than the GPU's memory, with the rest in host memory
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import (
    FABRIC,
    OURS,
    PEER,
    RAW,
    Contender,
    Limit,
    Result,
    measure,
    save,
    show,
    those_installed,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

#: Limit for our time, as a multiple of raw PyTorch's.
LIMIT = 1 / 0.99


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, words: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


LARGE = {"words": 16384, "length": 512, "width": 768, "heads": 12, "layers": 10}
SMALL = {"words": 128, "length": 32, "width": 64, "heads": 4, "layers": 2}


class Repeated(IterableDataset[torch.Tensor]):
    """Yields the same few tensors over and over."""

    def __init__(self, tensors: list[torch.Tensor], count: int) -> None:
        self.tensors = tensors
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            yield self.tensors[number % len(self.tensors)]


class Bench:
    """Settings of this run, and the parts that all contenders are made of."""

    def __init__(self, device: str, small: bool) -> None:
        self.device = device
        self.size = SMALL if small else LARGE
        self.batch, self.steps = (4, 3) if small else (16, 10)

    def parts(self, **optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
        torch.manual_seed(0)
        model = GPT(**self.size).to(self.device)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer)
        shape = (self.batch, self.size["length"])
        tokens = [torch.randint(self.size["words"], shape) for _ in range(4)]
        if self.device != "cpu":
            tokens = [one.pin_memory() for one in tokens]
        return model, adam, DataLoader(Repeated(tokens, self.steps), batch_size=None)

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()

    # Contenders: each returns a function that takes `self.steps` steps and returns their number.

    def raw(self, precision: str, clip: float | None = None, **optimizer: Any) -> Contender:
        model, adam, loader = self.parts(**optimizer)
        return self.raw_loop(model, adam, loader, precision, clip)

    def raw_loop(
        self, model: Any, adam: Any, loader: Any, precision: str, clip: float | None
    ) -> Contender:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        scaler = torch.amp.GradScaler(self.device, enabled=precision == "fp16")

        def epoch() -> int:
            for tokens in loader:
                moved = tokens.to(self.device, non_blocking=True)
                cast = torch.autocast(self.device, dtype) if dtype else nullcontext()
                with cast:
                    loss = model(moved)
                scaler.scale(loss).backward()
                if clip is not None:
                    scaler.unscale_(adam)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(adam)
                scaler.update()
                adam.zero_grad()
            self.synchronize()
            return self.steps

        return epoch

    def wrapped(
        self, make: Callable[..., Any], precision: str, clip: float | None = None, **optimizer: Any
    ) -> Contender:
        accelerator = make(cpu=self.device == "cpu", mixed_precision=precision)
        model, adam, loader = accelerator.prepare(*self.parts(**optimizer))

        def epoch() -> int:
            for tokens in loader:
                loss = model(tokens)
                accelerator.backward(loss)
                if clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                adam.step()
                adam.zero_grad()
            self.synchronize()
            return self.steps

        return epoch

    def ours(self, precision: str, clip: float | None = None, **optimizer: Any) -> Contender:
        from accelerate_core import Accelerator

        return self.wrapped(Accelerator, precision, clip, **optimizer)

    def peer(self, precision: str, clip: float | None = None, **optimizer: Any) -> Contender:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the first precision
        return self.wrapped(Accelerator, precision, clip, **optimizer)

    def fabric(self, precision: str, clip: float | None = None, **optimizer: Any) -> Contender:
        try:
            from lightning_fabric import Fabric
        except ImportError:
            from lightning.fabric import Fabric

        named = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]
        engine = Fabric(
            accelerator="cpu" if self.device == "cpu" else self.device, devices=1, precision=named
        )
        engine.launch()
        model, adam, loader = self.parts(**optimizer)
        model, adam = engine.setup(model, adam)
        loader = engine.setup_dataloaders(loader)

        def epoch() -> int:
            for tokens in loader:
                loss = model(tokens)
                engine.backward(loss)
                if clip is not None:
                    engine.clip_gradients(model, adam, max_norm=clip)
                adam.step()
                adam.zero_grad()
            self.synchronize()
            return self.steps

        return epoch

    def everyone(self, precision: str, **arguments: Any) -> dict[str, Contender]:
        makers = {RAW: self.raw, OURS: self.ours, PEER: self.peer, FABRIC: self.fabric}
        return those_installed(
            {name: partial(make, precision, **arguments) for name, make in makers.items()}
        )

    # Sections

    def steps_section(self, rounds: int) -> Iterator[Result]:
        for title, precision, clip in (
            ("fp32", "no", None),
            ("bf16", "bf16", None),
            ("fp16, scaler and clipping", "fp16", 1.0),
        ):
            if precision == "fp16" and self.device == "cpu":
                continue
            contenders = self.everyone(precision, clip=clip)
            yield self.compare(f"One step of a GPT in {title}", contenders, rounds)

    def optimizers_section(self, rounds: int) -> Iterator[Result]:
        for kind in ("foreach", "fused"):
            contenders = those_installed(
                {
                    RAW: partial(self.raw, "bf16", **{kind: True}),
                    OURS: partial(self.ours, "bf16", **{kind: True}),
                    PEER: partial(self.peer, "bf16", **{kind: True}),
                }
            )
            yield self.compare(f"One step of a GPT in bf16, AdamW {kind}", contenders, rounds)

    def compare(self, title: str, contenders: dict[str, Contender], rounds: int) -> Result:
        times = measure(contenders, rounds, warm_up=2)
        return Result(f"{title}, {self.device}", "step", RAW, times, [Limit(RAW, LIMIT)])

    def feeding_section(self, rounds: int) -> Iterator[Result]:
        """Batches of 64 MiB, with as many matrix products as take about as long as the copy."""
        side = 256 if self.device == "cpu" else 4096
        kind = torch.float32
        count = 16
        given = [torch.zeros(side, side, dtype=kind) for _ in range(4)]
        if self.device != "cpu":
            given = [one.pin_memory() for one in given]
        weight = torch.zeros(side, side, dtype=torch.bfloat16, device=self.device)

        def took(work: Callable[[], Any]) -> float:
            self.synchronize()
            begun = time.perf_counter()
            work()
            self.synchronize()
            return time.perf_counter() - begun

        there = weight
        copy = statistics.median(
            took(lambda: given[0].to(self.device, non_blocking=True)) for _ in range(9)
        )
        product = statistics.median(took(lambda: there @ weight) for _ in range(9))
        products = max(1, round(copy / product))
        print(f"copy {copy * 1e3:.2f} ms, {products} products of {product * 1e3:.2f} ms")

        def process(batch: torch.Tensor) -> None:
            low = batch.to(torch.bfloat16)
            for _ in range(products):
                _ = low @ weight

        def plain(loader: Any, move: bool) -> Contender:
            def epoch() -> int:
                for batch in loader:
                    process(batch.to(self.device, non_blocking=True) if move else batch)
                self.synchronize()
                return count

            return epoch

        def loader() -> DataLoader:
            return DataLoader(Repeated(given, count), batch_size=None)

        def ours() -> Contender:
            from accelerate_core import Accelerator

            return plain(Accelerator(cpu=self.device == "cpu").prepare(loader()), False)

        def peer(**loading: Any) -> Contender:
            from accelerate import Accelerator
            from accelerate.utils import DataLoaderConfiguration

            config = DataLoaderConfiguration(**loading)
            accelerator = Accelerator(cpu=self.device == "cpu", dataloader_config=config)
            return plain(accelerator.prepare(loader()), False)

        contenders = those_installed(
            {
                RAW: lambda: plain(loader(), True),
                OURS: ours,
                PEER: peer,
                f"{PEER}, non_blocking": partial(peer, non_blocking=True),
            }
        )
        times = measure(contenders, rounds, warm_up=2)
        yield Result(f"Feeding, {self.device}", "batch", RAW, times, [Limit(RAW, 0.75)])

    def sharding_section(self, rounds: int) -> Iterator[Result]:
        from accelerate_core import Accelerator

        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29517")
        # Ours starts the process group, which the raw loop then uses, too.
        ours = Accelerator(cpu=self.device == "cpu", backend="fsdp2", mixed_precision="bf16")
        model, adam, loader = self.parts()
        model, adam, loader = ours.prepare(model, adam, loader)

        def sharded() -> int:
            for tokens in loader:
                ours.backward(model(tokens))
                adam.step()
                adam.zero_grad()
            self.synchronize()
            return self.steps

        def raw() -> Contender:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            plain, _, tokens = self.parts()
            mesh = init_device_mesh(self.device, (1,))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in plain.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(plain, mesh=mesh, mp_policy=policy)
            raw_adam = torch.optim.AdamW(plain.parameters(), lr=1e-4)
            return self.raw_loop(plain, raw_adam, tokens, "no", None)

        times = measure({RAW: raw(), OURS: sharded}, rounds, warm_up=2)
        yield Result(
            f"One step of FSDP2 in bf16, one rank, {self.device}",
            "step",
            RAW,
            times,
            [Limit(RAW, LIMIT)],
        )

    def syncs_section(self, rounds: int) -> Iterator[Result]:
        """Print how often each contender's host waits for the device, per step."""
        if self.device != "cuda":
            print("Only CUDA counts synchronizations.")
            return
        for precision, clip in (("no", None), ("bf16", 1.0), ("fp16", 1.0)):
            for name, epoch in self.everyone(precision, clip=clip).items():
                epoch()
                torch.cuda.set_sync_debug_mode("warn")
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    epoch()
                torch.cuda.set_sync_debug_mode("default")
                # One synchronization at the end of the epoch belongs to the benchmark.
                waits = [one for one in seen if "synchroniz" in str(one.message)]
                print(
                    f"{precision}, clip {clip}: {name} waits {len(waits) / self.steps:.1f} per step"
                )
        yield from ()

    def large_section(self, rounds: int) -> Iterator[Result]:
        """A forward of a model of 1.15 times the GPU's memory, in bf16."""
        if self.device == "cpu":
            print("A model larger than the device needs a device.")
            return
        free, _ = torch.get_device_module(self.device).mem_get_info()
        width = 16384
        size = width * width * 2
        count = int(1.15 * free / size)
        resident = int(0.9 * free / size)
        print(f"{count} layers of {size / 2**30:.2f} GiB, {resident} of them on the GPU")
        from accelerate_core.utils import dispatch_model

        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))
            )
        for number, layer in enumerate(model):
            place = self.device if number < resident else "cpu"
            layer.weight = nn.Parameter(
                torch.zeros(width, width, dtype=torch.bfloat16, device=place), requires_grad=False
            )
        inputs = torch.zeros(64, width, dtype=torch.bfloat16, device=self.device)
        host = [layer.weight for layer in model[resident:]]

        @torch.no_grad()
        def by_hand() -> int:
            x = inputs
            for layer in model[:resident]:
                x = F.linear(x, layer.weight)
            for weight in host:
                x = F.linear(x, weight.to(self.device))
            self.synchronize()
            return 1

        begun = measure({RAW: by_hand}, 3)
        spread = {str(n): 0 if n < resident else "cpu" for n in range(count)}
        dispatched = dispatch_model(model, spread, main_device=0)

        @torch.no_grad()
        def ours() -> int:
            dispatched(inputs)
            self.synchronize()
            return 1

        times = begun | measure({OURS: ours}, 3)
        peak = torch.get_device_module(self.device).max_memory_allocated()
        print(f"peak of GPU memory {peak / 2**30:.1f} GiB of {free / 2**30:.1f} free")
        yield Result(f"Forward of {count * size / 2**30:.0f} GiB", "forward", RAW, times)


SECTIONS = ("steps", "optimizers", "feeding", "syncs", "sharding", "large")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a rehearsal")
    parser.add_argument("--out", default="benchmarks/results", help="folder for the JSON file")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.device == "cuda":
        print(torch.cuda.get_device_name())
    results: list[Result] = []
    failed = []
    for name in options.only:
        bench = Bench(options.device, options.small)
        try:
            for result in getattr(bench, f"{name}_section")(options.rounds):
                show(result)
                results.append(result)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        save("gpu", results, options.out)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
