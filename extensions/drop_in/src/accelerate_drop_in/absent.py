"""Names of Hugging Face Accelerate that do not work here, each with the reason."""

from __future__ import annotations

_MEGATRON = "an internal step of Accelerate's prepare; the backend megatron does it differently"
_XLA = "the backend xla feeds every prepared loader itself, so there is nothing to wrap"
_SAGEMAKER = "SageMaker jobs are not supported; run accelerate launch in the job's script"

#: Can be imported, but raises an error when used.
REFUSED = {
    "MpDeviceLoaderWrapper": _XLA,
    "quantize_and_offload_8bit": "quantized weights cannot be offloaded; list the modules to offload in "
    "skip_modules of BnbQuantizationConfig",
    **dict.fromkeys(
        ("SageMakerConfig", "prepare_sagemager_args_inputs", "sagemaker_launcher"), _SAGEMAKER
    ),
    **dict.fromkeys(
        (
            *("finish_mpu_init", "initialize", "model_provider_func", "prepare_optimizer"),
            *("prepare_model_optimizer_scheduler", "prepare_scheduler"),
            "utils.megatron_lm.prepare_data_loader",
            *("parse_bert_config", "parse_glm4_moe_config", "parse_gpt2_config"),
            *("parse_llama_config", "parse_t5_config"),
        ),
        _MEGATRON,
    ),
}

_HELP = "a part of Accelerate's parser; accelerate launch --help has its own option groups"
_TABLE = "an internal table of Accelerate's converter; use convert_config_to_fsdp2"
_HUB = "a part of Accelerate's command, which creates the model; here, only shapes are read"

#: Cannot be imported: a value, or a helper that only works on Accelerate's internals.
LEFT_OUT = {
    "patch_optimizer_step": "it only works with Accelerate's own optimizer wrapper and scaler",
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS": "an internal table of Accelerate's config readers; for other "
    "models, pass a function (pre_process, post_process) to prepare",
    "FORMAT": _HELP,
    "options_to_group": _HELP,
    **dict.fromkeys(
        ("ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING", "ConversionStatus"),
        _TABLE,
    ),
    **dict.fromkeys(
        ("clean_lines", "compare_against_test", "get_function_contents_by_name"),
        "it compares Accelerate's own examples with each other",
    ),
    "description": "the help text of a command; run accelerate merge-weights --help",
    **dict.fromkeys(
        ("check_has_model", "create_ascii_table", "create_empty_model", "verify_on_hub"), _HUB
    ),
}


#: Modules of Accelerate that do not exist here.
MODULES = {
    **dict.fromkeys(
        ("commands.menu", "commands.config.cluster", "commands.config.config"),
        "internals of accelerate config, which uses a library for its questions here",
    ),
    **dict.fromkeys(
        ("commands.config.config_utils", "commands.config.default", "commands.config.update"),
        "internals of accelerate config; write_basic_config is in accelerate.utils",
    ),
    "commands.config.sagemaker": _SAGEMAKER,
    **dict.fromkeys(
        ("test_utils.scripts.external_deps", "test_utils.scripts.test_merge_weights"),
        "scripts of Accelerate's own tests, which need models and data from the Hugging Face Hub",
    ),
}


def left_out(module: str, name: str) -> str | None:
    """Return why a name cannot be imported, None if it can."""
    return LEFT_OUT.get(name)


def refused(module: str, name: str) -> str | None:
    """Return why using a name raises an error, None if it does not."""
    return REFUSED.get(name) or REFUSED.get(f"{module}.{name}")


def absent(module: str, name: str) -> str | None:
    """Return why using an importable name raises an error, None if it does not."""
    reason = refused(module, name)
    return None if reason is None else f"{name}: {reason}."


#: Signatures that differ from Accelerate's, each with the reason. `*` means the constructor and all
#: members.
DIFFERENT: dict[str, str] = {
    "accelerator.Accelerator": "gradient_accumulation_steps=None means 1, and that no value was passed",
    **dict.fromkeys(
        (
            "accelerator.Accelerator.deepspeed_ulysses_dl_adapter",
            "state.AcceleratorState.get_deepspeed_plugin",
            "state.AcceleratorState.select_deepspeed_plugin",
        ),
        "exists only with the backend deepspeed",
    ),
    **{
        f"commands.config.config_args.{name}.*": "takes the values of any config file by name "
        "and checks them when they are used"
        for name in ("BaseConfig", "ClusterConfig")
    },
    **{
        f"data_loader.{name}.adjust_state_dict_for_prefetch": "positions count the batches "
        "that the loop received, so there is nothing to adjust"
        for name in (
            *("DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard", "SkipDataLoader"),
        )
    },
    **{
        f"data_loader.{name}.set_sampler": "set the sampler before you prepare the loader"
        for name in ("DataLoaderDispatcher", "DataLoaderShard")
    },
    **dict.fromkeys(
        (
            *("data_loader.DataLoaderAdapter.state_dict", "data_loader.SkipDataLoader.state_dict"),
            "data_loader.DataLoaderAdapter.load_state_dict",
            "data_loader.SkipDataLoader.load_state_dict",
        ),
        "the wrapped loader's method, if it has one",
    ),
    **{
        f"{owner}.{name}": "the wrapped scheduler's method, if it has one"
        for owner in (
            *("scheduler.AcceleratedScheduler", "utils.deepspeed.DeepSpeedSchedulerWrapper"),
        )
        for name in ("get_lr", "print_lr")
    },
    **dict.fromkeys(
        (
            "optimizer.AcceleratedOptimizer.zero_grad",
            "utils.deepspeed.DeepSpeedOptimizerWrapper.zero_grad",
        ),
        "None means True, torch's default",
    ),
    "parallelism_config.ParallelismConfig": "the default is 1, and None also means 1",
    "tracking.AimTracker.log_images": "pass the library's arguments by name, not as a dict",
    "tracking.WandBTracker.log_table": "takes columns and rows; for a dataframe, pass "
    "df.columns and df.values.tolist()",
    **{
        f"tracking.MLflowTracker.{name}": "same arguments as every tracker (docs/tracking.md); for "
        f"MLflow's own, call tracker.tracker.{name}"
        for name in ("log_artifact", "log_artifacts", "log_figure")
    },
    **{
        f"utils.dataclasses.DeepSpeedPlugin.{name}": "an internal step of Accelerate's "
        "prepare; here prepare fills in the remaining values"
        for name in ("deepspeed_config_process", "fill_match")
    },
    "utils.dataclasses.DeepSpeedPlugin.selected": "the Accelerator keeps the selected plugin",
    "utils.dataclasses.DeepSpeedSequenceParallelConfig": "None means True and sdpa",
    "utils.dataclasses.DistributedDataParallelKwargs.to_dict": "returns all fields: all can be copied",
    "utils.dataclasses.FullyShardedDataParallelPlugin": "None means 2, the only version",
    **{
        f"utils.dataclasses.{name}": "the signature shows the defaults instead of None"
        for name in ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs")
    },
    "utils.dataclasses.InitProcessGroupKwargs": "None means the default of the device, such as nccl for CUDA",
    "utils.dataclasses.TorchContextParallelConfig": "None means allgather",
    **{
        f"utils.dataclasses.MegatronLMPlugin.{name}": "an internal step of Accelerate's prepare; "
        "fields are read when they are needed"
        for name in (
            *("set_mixed_precision", "set_network_size_args", "set_optimizer_type"),
            *("set_scheduler_args", "set_tensorboard_logging_options", "set_training_args"),
        )
    },
    **{
        f"utils.megatron_lm.{name}.*": "prepare returns objects of this class; use "
        "accelerator.train_step to run a step, and save_state and load_state for checkpoints"
        for name in (
            *("MegatronEngine", "MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper"),
        )
    },
    **{
        f"utils.megatron_lm.{name}TrainStep.*": "raises an error; use a provider and a "
        "custom_train_step_class"
        for name in ("Bert", "T5")
    },
    "utils.megatron_lm.MegatronLMDummyDataLoader.*": "prepare creates the "
    "loaders; accelerate_megatron.build_datasets creates only the datasets",
    "utils.deepspeed.DeepSpeedEngineWrapper.backward": "call accelerator.backward(loss)",
    "utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload": "both are read when they are needed",
}
