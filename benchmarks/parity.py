"""Losses and gradient norms of every backend and mesh, compared with plain PyTorch in one process.

    python benchmarks/parity.py [--only fsdp2]

Each case takes eight optimizer steps with a small character model, the same data and seed, accumulation
over 2 batches, and clipping. The table shows the largest difference of a loss, and the largest relative
difference of a gradient norm. To add a backend, add a row to CASES.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import torchrun
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]
BACKENDS = ROOT / "tests" / "backends"
WORKER = BACKENDS / "fsdp2" / "parity_worker.py"


@dataclass
class Case:
    title: str
    ranks: int
    mesh: dict[str, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    #: Title of the case to compare with. None is plain PyTorch.
    against: str | None = None
    loss: float = 1e-5
    norm: float = 1e-4
    environment: dict[str, str] = field(default_factory=dict)
    #: The training script, which also defines the model.
    worker: Path = WORKER


def _stage(stage: int) -> dict[str, str]:
    return {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}


OFFLOAD = ROOT / "examples" / "deepspeed" / "offload.json"
ZERO = {"backend": "deepspeed"}
BF16 = {"mixed_precision": "bf16"}
FP16 = {"mixed_precision": "fp16"}
#: DeepSpeed refuses fp16 on CPUs without hardware support, although torch can compute it.
HAS_FP16 = {"PARITY_PRELUDE": str(BACKENDS / "deepspeed" / "cpu_has_fp16.py")}
#: A GPT-2 from Transformers, because megatron cannot split the small model over ranks.
MEGATRON = BACKENDS / "megatron" / "parity_worker.py"
FOUR = {"num_micro_batches": 4}
TWO = {"num_micro_batches": 2}
INTERLEAVED = FOUR | {"num_layers_per_virtual_pipeline_stage": 1}
SHARDED = {"use_distributed_optimizer": True}
#: Models of Transformers, which it shards while it loads them. It has no plan for GPT-2's layers under TP.
LLAMA = BACKENDS / "fsdp2" / "parity_llama_worker.py"
GPT2 = BACKENDS / "fsdp2" / "parity_gpt2_worker.py"
#: A Mixtral, created by a model provider.
EXPERTS = MEGATRON.with_name("parity_experts_worker.py")
EP = {"expert_model_parallel_size": 2}


def _megatron(title: str, mesh: dict[str, int], **more: Any) -> Case:
    ranks = math.prod(mesh.values())
    more = {"options": {}, "worker": MEGATRON} | more
    return Case(f"megatron, {title}", ranks, mesh, **more)


CASES = [
    Case("ddp, 2 ranks", 2, {}, {"backend": "ddp"}),
    Case("ddp, 2 ranks, bf16", 2, {}, {"backend": "ddp", **BF16}, loss=1e-1, norm=1.0),
    Case("ddp, 2 ranks, fp16", 2, {}, {"backend": "ddp", **FP16}, loss=1e-2, norm=1e-1),
    Case("fsdp2, 2 ranks", 2, {"dp_shard": 2}),
    Case("fsdp2, 4 ranks", 4, {"dp_shard": 4}),
    Case("fsdp2, HSDP 2 x 2", 4, {"dp_replicate": 2, "dp_shard": 2}),
    Case("fsdp2, TP 2", 2, {"tp": 2}),
    Case("fsdp2, FSDP x TP 2 x 2", 4, {"dp_shard": 2, "tp": 2}),
    Case("fsdp2, ring attention 2 (CPU test path)", 2, {"cp": 2}),
    Case("fsdp2, Ulysses 2", 2, {"sp": 2}),
    Case("GPT-2 sharded at load, FSDP 2", 2, {"dp_shard": 2}, worker=GPT2, norm=1e-5),
    Case("Llama sharded at load, FSDP 2", 2, {"dp_shard": 2}, worker=LLAMA, norm=1e-5),
    Case("Llama sharded at load, TP 2", 2, {"tp": 2}, worker=LLAMA, norm=1e-5),
    Case(
        "Llama sharded at load, FSDP x TP 2 x 2",
        4,
        {"dp_shard": 2, "tp": 2},
        worker=LLAMA,
        norm=1e-5,
    ),
    *(
        Case(f"deepspeed, stage {stage}, 2 ranks", 2, {}, ZERO, environment=_stage(stage))
        for stage in range(4)
    ),
    Case(
        "deepspeed, stage 3, optimizer and parameters offloaded",
        2,
        {},
        ZERO,
        environment={"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(OFFLOAD)},
    ),
    Case(
        "deepspeed, stage 2, 2 ranks, bf16",
        2,
        {},
        ZERO | BF16,
        "ddp, 2 ranks, bf16",
        loss=1e-2,
        norm=1e-1,
        environment=_stage(2),
    ),
    *(
        Case(
            f"deepspeed, stage {stage}, 2 ranks, fp16",
            2,
            {},
            ZERO | FP16,
            "ddp, 2 ranks, fp16",
            loss=1e-2,
            norm=3e-2,
            environment=_stage(stage) | HAS_FP16,
        )
        for stage in range(4)
    ),
    Case(
        "fsdp2, 2 ranks, bf16", 2, {"dp_shard": 2}, BF16, "ddp, 2 ranks, bf16", loss=1e-2, norm=1e-1
    ),
    _megatron("TP 2", {"tp": 2}),
    _megatron("PP 2", {"pp": 2}, options=FOUR),
    _megatron("PP 2, interleaved", {"pp": 2}, options=INTERLEAVED),
    _megatron("DP 2", {"dp_replicate": 2}),
    _megatron("DP 2, distributed optimizer", {"dp_shard": 2}, options=SHARDED),
    _megatron("TP 2 x PP 2", {"tp": 2, "pp": 2}, options=FOUR),
    _megatron("TP 2 x DP 2", {"tp": 2, "dp_shard": 2}, options=TWO | SHARDED),
    _megatron("EP 2", {"dp_shard": 2}, options=EP, worker=EXPERTS),
    _megatron(
        "TP 2 x EP 2, distributed optimizer",
        {"tp": 2, "dp_shard": 2},
        options=EP | SHARDED | {"sequence_parallelism": True},
        worker=EXPERTS,
    ),
    _megatron("TP 2, bf16", {"tp": 2}, options=BF16, loss=1e-2, norm=1e-1),
    _megatron(
        "DP 2, bf16, distributed optimizer",
        {"dp_shard": 2},
        options=BF16 | SHARDED,
        loss=1e-2,
        norm=1e-1,
    ),
]


def run(case: Case, *, plain: bool = False) -> dict[str, list[float]]:
    """Return losses and norms of a case, or of plain PyTorch with the model of the case."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable] if plain else torchrun(case.ranks)
        mesh, options = (None, {}) if plain else (case.mesh, case.options)
        command += [str(case.worker), json.dumps(mesh), json.dumps(options), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
        environment |= {} if plain else case.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            title = "plain" if plain else case.title
            raise SystemExit(f"{title}: {done.stderr[-3000:]}")
        result: dict[str, list[float]] = json.loads(out.read_text())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cases with this text in the title")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only in case.title]
    needed = {case.against for case in chosen}
    chosen = [case for case in CASES if case in chosen or case.title in needed]
    plain = {one.worker: run(one, plain=True) for one in {c.worker: c for c in chosen}.values()}
    results = {case.title: run(case) for case in track(chosen, "training")}
    table = Table("case", "against", "loss, largest difference", "norm, relative", "")
    table.columns[2].justify = table.columns[3].justify = "right"
    failed = False
    for case in chosen:
        other = results[case.against] if case.against else plain[case.worker]
        one = results[case.title]
        pairs = zip(one["losses"], other["losses"], strict=True)
        loss = max(abs(a - b) for a, b in pairs)
        pairs = zip(one["norms"], other["norms"], strict=True)
        norm = max(abs(a - b) / b for a, b in pairs)
        holds = loss <= case.loss and norm <= case.norm
        failed |= not holds
        table.add_row(
            case.title,
            case.against or "plain PyTorch",
            f"{loss:.1e} (limit {case.loss:g})",
            f"{norm:.1e} (limit {case.norm:g})",
            "holds" if holds else "OVER",
        )
    Console().print(table)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
