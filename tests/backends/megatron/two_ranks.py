"""Training with megatron on two ranks, compared with plain Transformers in one process."""

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
def interleaved_pipeline() -> None:
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
def a_checkpoint_resumes_on_any_layout() -> None:
    training.check_resume_on_any_layout(
        [
            {"sizes": {"tp": 2}},
            {"sizes": {"pp": 2}, "num_micro_batches": 2},
            {"sizes": {"dp_shard": 2}, "use_distributed_optimizer": True},
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
def masks_and_labels_mean_the_same_as_in_transformers() -> None:
    training.check_masks_and_labels()


@case
def unsupported_models_are_rejected() -> None:
    training.check_supported_models()


@case
def a_checkpoint_of_another_model_is_rejected() -> None:
    training.check_checkpoint_of_another_model(scratch("other_models"))


@case
def meta_models_and_plain_modules_train() -> None:
    training.check_meta_models_and_plain_modules()


@case
def a_provider_makes_the_model() -> None:
    training.check_provider(SIZES)


@case
def accelerates_form_of_the_loop_trains() -> None:
    training.check_accelerates_form_of_the_loop()


@case
def a_custom_loss_or_step_is_used() -> None:
    training.check_custom_steps()


@case
def indexed_data_is_read_as_written() -> None:
    indexed.check_data_is_read_as_written()


@case
def indexed_documents_do_not_attend_to_each_other() -> None:
    indexed.check_documents_are_separate()


@case
def training_on_indexed_data_resumes() -> None:
    indexed.check_resume()


@case
def the_plugin_configures_indexed_data() -> None:
    indexed.check_plugin_options()


@case
def an_error_in_indexed_data_is_raised_on_all_ranks() -> None:
    indexed.check_errors_are_raised_on_all_ranks()


@case
def invalid_input_is_rejected() -> None:
    training.check_invalid_input()


@case
def expert_parallel() -> None:
    options = {"expert_model_parallel_size": 2, "parts": 2}
    check({"dp_replicate": 2}, "mixtral", **options)
    check({"dp_shard": 2}, "mixtral", loop=False, use_distributed_optimizer=True, **options)
    options |= {"num_micro_batches": 2, "sequence_parallelism": True}
    check({"tp": 2}, "mixtral", loop=False, expert_tensor_parallel_size=1, **options)
    training.check_biases_of_experts()
    training.check_unsupported_experts()


@case
def a_checkpoint_of_experts_resumes_on_any_layout() -> None:
    training.check_resume_on_any_layout(
        [
            {"sizes": {"dp_shard": 2}, "expert_model_parallel_size": 2},
            {"sizes": {"dp_shard": 2}, "use_distributed_optimizer": True},
        ],
        "mixtral",
    )


run_cases(os.environ["CASES"].split() if "CASES" in os.environ else None)
