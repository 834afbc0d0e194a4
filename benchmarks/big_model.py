"""Models larger than memory: loading, and running with all layers on disk.

    python benchmarks/big_model.py [--gb 1 8] [--rounds 5] [--without-limit]

This compares accelerate-core, Accelerate and raw PyTorch. Each case runs in a separate process, the cases
take turns, and medians are compared. In the last part, a Llama of 2 GB generates text in a control group
of 1 GB. That part needs Linux and root, and otherwise prints that it is skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from harness import OURS, PEER, RAW, machine, memory
from rich.console import Console
from rich.table import Table

NAMES = {"raw": RAW, "ours": OURS, "peer": PEER}
NOT_INSTALLED = 77
WIDTH = 1024
BLOCK = 8 * WIDTH * WIDTH * 4  # bytes of the two matrices
#: Tokens of a forward. Warm forwards are bound by computation, and cold ones by the disk.
WARM_TOKENS, COLD_TOKENS = 64, 4


def library(name: str):
    """Return the package to measure."""
    if name == "ours":
        import accelerate_core as package
    else:
        try:
            import accelerate as package
        except ImportError:
            sys.exit(NOT_INSTALLED)
    assert package.load_checkpoint_and_dispatch  # ours imports it on first access
    return package


def make(mb: int, meta: bool = True):
    """Return a model of residual blocks with `mb` MB of float32 weights."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    with torch.device("meta" if meta else "cpu"):
        blocks = (Block() for _ in range(round(mb * 1e6 / BLOCK)))
        return nn.Sequential(*blocks, nn.LayerNorm(WIDTH))


def on_disk(model) -> dict[str, str]:
    """Return a map with all layers on disk but one, because Accelerate fails if all of them are."""
    names = [name for name, _ in model.named_children()]
    return {**dict.fromkeys(names, "disk"), names[-1]: "cpu"}


def drop_from_cache(file: Path) -> None:
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(file: Path) -> float:
    """Return the bytes per second of reading a file from the disk sequentially."""
    drop_from_cache(file)
    buffer = bytearray(8 << 20)
    total = 0
    start = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while got := opened.readinto(buffer):
            total += got
    return total / (time.perf_counter() - start)


@contextmanager
def timed(found: dict[str, float], name: str, before: float | None = None):
    """Record the seconds of the block, and the peak of additional memory in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS") if before is None else before
    start = time.perf_counter()
    yield
    found[name] = time.perf_counter() - start
    found[f"{name} MB"] = max(0.0, memory("VmHWM") - before)


def forwards(model, inputs, found: dict[str, float]) -> float:
    """Time a warm forward. Return the memory before the first one, because libraries keep some."""
    before = memory("VmRSS")
    for _ in range(3):
        model(inputs)
    with timed(found, "warm", before):
        model(inputs)
    return before


def in_turn(model, other, inputs, found: dict[str, float]) -> None:
    """Compare warm forwards of a model on disk with one in memory, five times each, in turn."""
    ratios = []
    for _ in range(6):
        took = []
        for one in (other, model):
            start = time.perf_counter()
            one(inputs)
            took.append(time.perf_counter() - start)
        ratios.append(took[1] / took[0])
    found["of memory"] = statistics.median(ratios[1:])


def case(name: str, mb: int, file: Path) -> dict[str, float]:
    """Load and run a model once with one library."""
    import torch

    torch.manual_seed(0)
    found: dict[str, float] = {}
    warm, cold = torch.randn(WARM_TOKENS, WIDTH), torch.randn(COLD_TOKENS, WIDTH)
    package = library(name) if name != "raw" else None
    gc.collect()
    gc.freeze()  # a collection of everything torch has imported takes as long as a load
    inputs = torch.no_grad()
    inputs.__enter__()
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # starts the threads of torch
    if name == "raw":
        from safetensors.torch import load_file

        model = make(mb)
        with timed(found, "load"):
            model.load_state_dict(load_file(file), assign=True)
        del model
        model = make(mb, meta=False)  # in separate memory, not mapped from the file
        forwards(model, warm, found)
        found["disk"] = read_through(file)
        return found
    model = make(mb)
    with timed(found, "load"):
        package.load_checkpoint_and_dispatch(model, str(file), device_map={"": "cpu"})
    del model
    model = make(mb)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        with timed(found, "to disk"):
            model = package.load_checkpoint_and_dispatch(
                model, str(file), device_map=on_disk(model), offload_folder=folder
            )
        written = sum(one.stat().st_size for one in Path(folder).iterdir())
        found["written MB"] = written / 1e6
        before = forwards(model, warm, found)
        tries = []
        for _ in range(3):  # in turn, so that noise on a shared disk affects both
            disk = read_through(file)
            for path in [file, *Path(folder).iterdir()]:
                drop_from_cache(path)
            with timed(found, "cold", before):
                model(cold)
            rate = file.stat().st_size / found["cold"]
            tries.append((rate / disk, found["cold"], rate, disk))
        found["of disk"], found["cold"], found["rate"], found["disk"] = sorted(tries)[1]
        in_turn(model, make(mb, meta=False), warm, found)
    return found


def run(*arguments: str, **options) -> dict[str, float] | None:
    """Run a case in a separate process. Return None if the library is not installed."""
    command = [sys.executable, __file__, "--case", *arguments]
    # Large blocks are allocated separately, so that memory kept in glibc's heap is not counted.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, env=environ, **options
    )
    if done.returncode == NOT_INSTALLED:
        return None
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compare(gb: float, rounds: int, folder: Path, console: Console) -> dict[str, dict[str, float]]:
    """Measure one size, and print the results and whether they are within the limits."""
    from safetensors.torch import save_file

    mb = round(gb * 1000)
    file = folder / f"{gb}.safetensors"
    save_file(make(mb, meta=False).state_dict(), file, {"format": "pt"})
    os.sync()
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name in NAMES:
            found = run(name, str(mb), str(file))
            if found is not None:
                rows.setdefault(name, []).append(found)
    file.unlink()
    medians = {
        name: {key: statistics.median(one[key] for one in taken) for key in taken[0]}
        for name, taken in rows.items()
    }
    table = Table("", *(NAMES[name] for name in medians), title=f"{gb} GB, medians of {rounds}")
    for key in medians["ours"]:
        values = [medians[name].get(key) for name in medians]
        table.add_row(key if "MB" in key or is_rate(key) else f"{key} s", *map(shown_value, values))
    console.print(table)
    ours = medians["ours"]
    own = medians["raw"]["warm MB"]  # memory that every forward needs
    limits = {
        "load to the CPU, s": (ours["load"], 0.1),
        "load to the disk, s": (ours["to disk"], 0.1),
        "a warm forward, relative to one in memory": (ours["of memory"], 1.2),
        "rate of the disk, relative to a cold forward": (1 / ours["of disk"], 1 / 0.9),
        "extra memory of a warm forward, blocks": ((ours["warm MB"] - own) * 1e6 / BLOCK, 2),
        "extra memory of a cold forward, blocks": ((ours["cold MB"] - own) * 1e6 / BLOCK, 2),
    }
    for what, (value, limit) in limits.items():
        sign = "within" if value <= limit else "OVER"
        console.print(f"  {what}: {value:.3f} ({sign} the limit of {limit:.2f})")
    return medians


def shown_value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e9:.2f} GB/s" if value > 1e6 else f"{value:.3f}"


def is_rate(key: str) -> bool:
    return key in ("rate", "disk", "of disk", "of memory")


def llama(folder: Path):
    """Save a Llama of about 2 GB in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=20,
        num_attention_heads=16,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def generate(where: str, folder: Path) -> dict[str, object]:
    """Generate 12 tokens with the model in memory, or with a part of it on disk."""
    if where != "memory":
        Path(where, "cgroup.procs").write_text(str(os.getpid()))
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    import accelerate_core

    prompt = torch.arange(1, 9)[None]
    start = time.perf_counter()
    if where == "memory":
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        config = AutoConfig.from_pretrained(folder)
        with accelerate_core.init_empty_weights():
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model = accelerate_core.load_checkpoint_and_dispatch(model, folder, device_map="auto")
    loaded = time.perf_counter() - start
    start = time.perf_counter()
    out = model.generate(prompt, max_new_tokens=12, do_sample=False)
    took = time.perf_counter() - start
    places = set(getattr(model, "hf_device_map", {"": "memory"}).values())
    peak = memory("VmHWM")
    return {
        "tokens": out.tolist(), "load": loaded, "generate": took, "peak": peak,
        "places": sorted(map(str, places)),
    }  # fmt: skip


@contextmanager
def control_group(limit: int):
    """Create a control group (v1 or v2) with a memory limit, and yield its folder."""
    old = Path("/sys/fs/cgroup/memory").is_dir()
    group = Path("/sys/fs/cgroup", "memory" if old else "", f"big-model-{os.getpid()}")
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        yield group
    finally:
        time.sleep(0.5)
        group.rmdir()


def larger_than_memory(folder: Path, console: Console) -> dict[str, object]:
    """Generate text with a model twice as large as the memory limit of the process."""
    subprocess.run([sys.executable, __file__, "--case", "llama", "0", str(folder)], check=True)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    os.sync()
    whole = run("generate", "0", str(folder), "memory")
    for file in folder.glob("*.safetensors"):  # pages are charged to the group that read them first
        drop_from_cache(file)
    with control_group(size // 2) as group:
        cut = run("generate", "0", str(folder), str(group))
        fails = (
            int((group / "memory.failcnt").read_text())
            if (group / "memory.failcnt").exists()
            else None
        )
    equal = cut["tokens"] == whole["tokens"]
    console.print(
        f"A Llama of {size / 1e9:.2f} GB in a control group of {size / 2e9:.2f} GB, on"
        f" {cut['places']}: its text is {'equal to' if equal else 'DIFFERENT from'} the text of the"
        f" model in memory. Peak {cut['peak'] / 1e3:.2f} GB including mapped pages,"
        f" {cut['generate'] / 12:.2f} s per token ({whole['generate'] / 12:.2f} in memory). The limit"
        f" was reached {fails} times."
    )
    return {"in memory": whole, "in half of it": cut, "equal": equal, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-limit", action="store_true")
    parser.add_argument("--folder", default=None, help="folder on the disk to measure")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        name, mb, place, *rest = args.case
        if name == "llama":
            llama(Path(place))
        elif name == "generate":
            print(json.dumps(generate(*rest, Path(place))))
        else:
            print(json.dumps(case(name, int(mb), Path(place))))
        return
    console = Console(width=110)
    results: dict[str, object] = {"machine": machine()}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for gb in args.gb:
            results[f"{gb} GB"] = compare(gb, args.rounds, Path(folder), console)
        if not args.without_limit:
            try:
                results["larger"] = larger_than_memory(Path(folder), console)
            except OSError as error:
                console.print(
                    f"Larger than memory: skipped, because no control group can be created: {error}"
                )
    out = Path(args.out, "big_model.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
