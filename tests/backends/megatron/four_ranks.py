"""Training with megatron on four ranks, compared with plain Transformers in one process."""

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
def a_checkpoint_resumes_on_any_layout() -> None:
    training.check_resume_on_any_layout(
        [
            {"sizes": {"tp": 2, "pp": 2}, "num_micro_batches": 2},
            {"sizes": {"tp": 2, "dp_shard": 2}, "use_distributed_optimizer": True},
        ]
    )


@case
def num_items_gives_the_gradients_of_the_whole_batch() -> None:
    training.check_num_items(SIZES)


@case
def eval_step_returns_the_logits_of_transformers() -> None:
    training.check_eval_logits(SIZES)


@case
def a_pipeline_needs_train_step() -> None:
    training.check_pipeline_needs_train_step(SIZES)


@case
def a_provider_makes_the_model() -> None:
    training.check_provider(SIZES)


@case
def trained_weights_can_be_saved_for_transformers() -> None:
    training.check_save_pretrained(SIZES, "gpt2")
    training.check_save_pretrained(SIZES, "llama")


@case
def expert_parallel() -> None:
    ep = {"expert_model_parallel_size": 2}
    sharded = ep | {"use_distributed_optimizer": True}
    check({"dp_shard": 4}, "mixtral", loop=False, parts=4, **sharded)
    check({"pp": 2, "dp_replicate": 2}, "mixtral", loop=False, parts=2, **ep)
    ep |= {"sequence_parallelism": True}
    check({"tp": 2, "dp_replicate": 2}, "mixtral", loop=False, parts=2, **ep)


@case
def a_checkpoint_of_experts_resumes_on_any_layout() -> None:
    ep = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}
    training.check_resume_on_any_layout(
        [
            {"sizes": {"tp": 2, "dp_shard": 2}, "sequence_parallelism": True, **ep},
            {"sizes": {"pp": 2, "dp_shard": 2}},
        ],
        "mixtral",
    )


run_cases(os.environ["CASES"].split() if "CASES" in os.environ else None)
