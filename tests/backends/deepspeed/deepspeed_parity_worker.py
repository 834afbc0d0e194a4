"""Parity with plain PyTorch: eight steps, accumulation 2, clipping, on every rank in turn.

The plain stages of ZeRO are those of the conformance suite: `TestZeRO0` and its neighbours there.
"""

from __future__ import annotations

from common import KEPT
from parity_worker import train
from worker import RANK, case, run_cases

from accelerate_deepspeed import DeepSpeedPlugin

REFERENCE = train(None)


def compare(tolerance: float, norms: float | None = None, config=None, **options) -> None:
    fields = {n: options.pop(n) for n in list(options) if n in DeepSpeedPlugin.__dataclass_fields__}
    told = train({}, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, **fields), **options)
    worst = max(abs(a - b) for a, b in zip(told["losses"], REFERENCE["losses"], strict=True))
    assert worst <= tolerance, (worst, told["losses"], REFERENCE["losses"])
    apart = max(abs(a - b) / b for a, b in zip(told["norms"], REFERENCE["norms"], strict=True))
    assert apart <= (norms or tolerance), (apart, told["norms"], REFERENCE["norms"])


@case
def optimizer_offload_with_torchs_optimizer() -> None:
    for stage in (1, 2, 3):
        compare(
            1e-5,
            config={
                "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
                "zero_force_ds_cpu_optimizer": False,
            },
        )


@case
def parameter_offload() -> None:
    compare(
        1e-5,
        config={
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "zero_force_ds_cpu_optimizer": False,
        },
    )


@case
def bf16_is_torchs_autocast() -> None:
    for stage in (0, 1, 2, 3):
        compare(1e-2, 3e-2, zero_stage=stage, mixed_precision="bf16")


@case
def torch_autocast_of_deepspeed() -> None:
    compare(
        1e-2,
        3e-2,
        config={
            "zero_optimization": {"stage": 2},
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        },
    )


@case
def hpz() -> None:
    compare(1e-5, config={"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})


if __name__ == "__main__":
    assert KEPT.process_index == RANK
    run_cases()
    KEPT.end_training()
