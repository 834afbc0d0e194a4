"""Training under Megatron on two ranks, against plain Transformers in one process."""

from __future__ import annotations

import os

import indexed
import training
from training import check
from worker import case, run_cases, scratch

SIZES = {"pp": 2}


@case
def tensor_parallel() -> None:
    check({"tp": 2}, num_micro_batches=2)
    check({"tp": 2}, "llama", loop=False, num_micro_batches=4)


@case
def pipeline() -> None:
    check({"pp": 2}, loop=False, num_micro_batches=4)
    check({"pp": 2}, "llama", loop=False, num_micro_batches=2)


@case
def interleaved() -> None:
    options = {"num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}
    check({"pp": 2}, loop=False, **options)


@case
def data_parallel() -> None:
    check({"dp_replicate": 2})
    check({"dp_shard": 2}, use_distributed_optimizer=True)


@case
def sequence_parallel() -> None:
    check({"tp": 2}, loop=False, sequence_parallelism=True)
    check({"tp": 2}, "llama", loop=False, sequence_parallelism=True)


@case
def recomputation() -> None:
    options = {"recompute_granularity": "full", "recompute_method": "uniform"}
    check({"pp": 2}, loop=False, num_micro_batches=2, recompute_num_layers=1, **options)


@case
def half_precision() -> None:
    for precision in ("bf16", "fp16"):
        check({"tp": 2}, loop=False, mixed_precision=precision, limit=1e-2, rate=1e-3)
        check(
            {"dp_shard": 2},
            loop=False,
            mixed_precision=precision,
            use_distributed_optimizer=True,
            limit=1e-2,
            rate=1e-3,
        )


@case
def resume_on_any_layout() -> None:
    training.resume_on_any_layout(
        [
            {"sizes": {"tp": 2}},
            {"sizes": {"pp": 2}, "num_micro_batches": 2},
            {"sizes": {"dp_shard": 2}, "use_distributed_optimizer": True},
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
def what_a_batch_says() -> None:
    training.what_a_batch_says()


@case
def models_that_are_taken_or_not() -> None:
    training.models_that_are_taken_or_not()


@case
def checkpoints_of_other_models() -> None:
    training.checkpoints_of_other_models(scratch("other_models"))


@case
def what_belongs_to_modules() -> None:
    training.what_belongs_to_modules()


@case
def a_provider() -> None:
    training.a_provider(SIZES)


@case
def the_form_of_the_peer() -> None:
    training.the_form_of_the_peer()


@case
def a_step_of_the_script() -> None:
    training.a_step_of_the_script()


@case
def indexed_data_is_what_was_written() -> None:
    indexed.what_was_written_is_read()


@case
def indexed_documents_do_not_see_each_other() -> None:
    indexed.documents_do_not_see_each_other()


@case
def indexed_data_is_resumed() -> None:
    indexed.the_three_are_trained_on_and_resumed()


@case
def indexed_data_by_the_plugin() -> None:
    indexed.what_the_plugin_says_of_the_data()


@case
def indexed_data_that_cannot_be_built() -> None:
    indexed.a_rank_that_fails_holds_up_nobody()


@case
def what_cannot_be() -> None:
    training.what_cannot_be()


@case
def experts() -> None:
    options = {"expert_model_parallel_size": 2, "parts": 2}
    check({"dp_replicate": 2}, "mixtral", **options)
    check({"dp_shard": 2}, "mixtral", loop=False, use_distributed_optimizer=True, **options)
    options |= {"num_micro_batches": 2, "sequence_parallelism": True}
    check({"tp": 2}, "mixtral", loop=False, expert_tensor_parallel_size=1, **options)
    training.biases_of_experts()
    training.experts_that_do_not_fit()


@case
def resume_experts_on_any_layout() -> None:
    training.resume_on_any_layout(
        [
            {"sizes": {"dp_shard": 2}, "expert_model_parallel_size": 2},
            {"sizes": {"dp_shard": 2}, "use_distributed_optimizer": True},
        ],
        "mixtral",
    )


run_cases(os.environ["CASES"].split() if "CASES" in os.environ else None)
