"""Training under Megatron on four ranks, against plain Transformers in one process."""

from __future__ import annotations

import os

import training
from training import check
from worker import case, run_cases

SIZES = {"tp": 2, "pp": 2}


@case
def tensor_and_pipeline() -> None:
    check({"tp": 2, "pp": 2}, loop=False, num_micro_batches=4)


@case
def tensor_and_data() -> None:
    check({"tp": 2, "dp_replicate": 2})
    check({"tp": 2, "dp_shard": 2}, loop=False, use_distributed_optimizer=True)


@case
def pipeline_and_data() -> None:
    options = {"num_micro_batches": 2, "use_distributed_optimizer": True}
    check({"pp": 2, "dp_shard": 2}, loop=False, **options)


@case
def experts() -> None:
    ep = {"expert_model_parallel_size": 2}
    sharded = ep | {"use_distributed_optimizer": True}
    check({"dp_shard": 4}, "mixtral", loop=False, parts=4, **sharded)
    check({"pp": 2, "dp_replicate": 2}, "mixtral", loop=False, parts=2, **ep)
    ep |= {"sequence_parallelism": True}
    check({"tp": 2, "dp_replicate": 2}, "mixtral", loop=False, parts=2, **ep)


@case
def resume_experts_on_any_layout() -> None:
    ep = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}
    training.resume_on_any_layout(
        [
            {"sizes": {"tp": 2, "dp_shard": 2}, "sequence_parallelism": True, **ep},
            {"sizes": {"pp": 2, "dp_shard": 2}},
        ],
        "mixtral",
    )


@case
def resume_on_any_layout() -> None:
    training.resume_on_any_layout(
        [
            {"sizes": {"tp": 2, "pp": 2}, "num_micro_batches": 2},
            {"sizes": {"tp": 2, "dp_shard": 2}, "use_distributed_optimizer": True},
        ]
    )


@case
def counted_items() -> None:
    training.counted_items(SIZES)


@case
def evaluation_and_logits() -> None:
    training.evaluation_and_logits(SIZES)


@case
def a_pipeline_is_not_called() -> None:
    training.a_pipeline_is_not_called(SIZES)


@case
def a_provider() -> None:
    training.a_provider(SIZES)


@case
def there_and_back() -> None:
    training.there_and_back(SIZES, "gpt2")
    training.there_and_back(SIZES, "llama")


run_cases(os.environ["CASES"].split() if "CASES" in os.environ else None)
