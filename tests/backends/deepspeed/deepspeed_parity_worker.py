"""Compare eight steps with accumulation and clipping with plain PyTorch.

The ZeRO stages without further options are tested by the conformance suite (`TestZeRO0` and
others).
"""

from __future__ import annotations

from common import KEPT
from parity_worker import train
from worker import RANK, case, run_cases

from accelerate_deepspeed import DeepSpeedPlugin

REFERENCE = train(None)


def compare(tolerance: float, norms: float | None = None, config=None, **options) -> None:
    fields = {n: options.pop(n) for n in list(options) if n in DeepSpeedPlugin.__dataclass_fields__}
    found = train({}, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, **fields), **options)
    worst = max(abs(a - b) for a, b in zip(found["losses"], REFERENCE["losses"], strict=True))
    assert worst <= tolerance, (worst, found["losses"], REFERENCE["losses"])
    apart = max(abs(a - b) / b for a, b in zip(found["norms"], REFERENCE["norms"], strict=True))
    assert apart <= (norms or tolerance), (apart, found["norms"], REFERENCE["norms"])


@case
def optimizer_offload_with_torchs_optimizer_matches_plain_torch() -> None:
    for stage in (1, 2, 3):
        compare(
            1e-5,
            config={
                "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
                "zero_force_ds_cpu_optimizer": False,
            },
        )


@case
def parameter_offload_matches_plain_torch() -> None:
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
def bf16_autocast_of_the_core_is_close_to_fp32() -> None:
    for stage in (0, 1, 2, 3):
        compare(1e-2, 3e-2, zero_stage=stage, mixed_precision="bf16")


@case
def torch_autocast_of_deepspeed_is_close_to_fp32() -> None:
    compare(
        1e-2,
        3e-2,
        config={
            "zero_optimization": {"stage": 2},
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        },
    )


@case
def hpz_matches_plain_torch() -> None:
    compare(1e-5, config={"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})


if __name__ == "__main__":
    assert KEPT.process_index == RANK
    run_cases()
    KEPT.end_training()
