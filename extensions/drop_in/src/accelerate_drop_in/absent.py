"""The names of the original that nothing here stands behind, each with the reason."""

from __future__ import annotations

_MEGATRON = "a step of the original's prepare; the backend megatron has its own"
_XLA = "the backend xla feeds every prepared loader itself, so there is nothing to wrap"
_SAGEMAKER = "jobs of SageMaker are not started here; run accelerate launch within the job's script"

#: Can be imported, and refuses when it is used.
REFUSED = {
    "MpDeviceLoaderWrapper": _XLA,
    "quantize_and_offload_8bit": "quantized weights are not offloaded; name what is to be offloaded in "
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

_HELP = "a detail of the original's parser; accelerate launch --help has groups of its own"
_TABLE = "a table of the original's converter; ours is convert_config_to_fsdp2"
_HUB = "a detail of the original's command, which makes a model; ours reads shapes alone"

#: Cannot be imported: a value, or what only works on the original's own insides.
LEFT_OUT = {
    "patch_optimizer_step": "it marks steps of the original's own optimizer wrapper for its scaler",
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS": "a table of the original's readers of models' configs; other "
    "models come from a function (pre_process, post_process) that is passed to prepare",
    "FORMAT": _HELP,
    "options_to_group": _HELP,
    **dict.fromkeys(
        ("ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING", "ConversionStatus"),
        _TABLE,
    ),
    **dict.fromkeys(
        ("clean_lines", "compare_against_test", "get_function_contents_by_name"),
        "it compares the original's own examples with each other",
    ),
    "description": "the help of a command, see accelerate merge-weights --help",
    **dict.fromkeys(
        ("check_has_model", "create_ascii_table", "create_empty_model", "verify_on_hub"), _HUB
    ),
}


#: Modules of the original that are not there.
MODULES = {
    **dict.fromkeys(
        ("commands.menu", "commands.config.cluster", "commands.config.config"),
        "questions in a terminal; accelerate config asks with a library",
    ),
    **dict.fromkeys(
        ("commands.config.config_utils", "commands.config.default", "commands.config.update"),
        "details of accelerate config; write_basic_config is in accelerate.utils",
    ),
    "commands.config.sagemaker": _SAGEMAKER,
    **dict.fromkeys(
        ("test_utils.scripts.external_deps", "test_utils.scripts.test_merge_weights"),
        "scripts of the original's own tests, on models and data of its hub",
    ),
}


def left_out(module: str, name: str) -> str | None:
    """Return why a name cannot be imported, None if it can."""
    return LEFT_OUT.get(name)


def refused(module: str, name: str) -> str | None:
    """Return why a name refuses to be used, None if it does not."""
    return REFUSED.get(name) or REFUSED.get(f"{module}.{name}")


def absent(module: str, name: str) -> str | None:
    """Return why a name that can be imported refuses to be used, None if it does not."""
    reason = refused(module, name)
    return None if reason is None else f"{name}: {reason}."


#: Calls of the original that ours does not take, or takes otherwise, each with the reason. A `*` stands
#: for the constructor and all members.
DIFFERENT: dict[str, str] = {
    "accelerator.Accelerator": "None stands for 1, and tells that nothing was said",
    **dict.fromkeys(
        (
            "accelerator.Accelerator.deepspeed_ulysses_dl_adapter",
            "state.AcceleratorState.get_deepspeed_plugin",
            "state.AcceleratorState.select_deepspeed_plugin",
        ),
        "there when the backend deepspeed runs",
    ),
    **{
        f"commands.config.config_args.{name}.*": "values by name, of any kind of config file; they "
        "are checked when they are used"
        for name in ("BaseConfig", "ClusterConfig")
    },
    **{
        f"data_loader.{name}.adjust_state_dict_for_prefetch": "positions are counted as batches "
        "are handed out, so that there is nothing to adjust"
        for name in (
            *("DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard", "SkipDataLoader"),
        )
    },
    **{
        f"data_loader.{name}.set_sampler": "a loader is given its sampler before it is prepared"
        for name in ("DataLoaderDispatcher", "DataLoaderShard")
    },
    **dict.fromkeys(
        (
            *("data_loader.DataLoaderAdapter.state_dict", "data_loader.SkipDataLoader.state_dict"),
            "data_loader.DataLoaderAdapter.load_state_dict",
            "data_loader.SkipDataLoader.load_state_dict",
        ),
        "the held loader's own, if it has one",
    ),
    **{
        f"{owner}.{name}": "the held scheduler's own, if it has one"
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
        "True, torch's default, is what None stands for",
    ),
    "parallelism_config.ParallelismConfig": "1 is what None stands for, which may be given, too",
    "tracking.AimTracker.log_images": "what the library takes is passed by name, not as a dict",
    "tracking.WandBTracker.log_table": "a table has columns and rows; a dataframe's are "
    "df.columns and df.values.tolist()",
    **{
        f"tracking.MLflowTracker.{name}": "as of every tracker, see docs/tracking.md; the original's "
        f"is tracker.tracker.{name} of the library"
        for name in ("log_artifact", "log_artifacts", "log_figure")
    },
    **{
        f"utils.dataclasses.DeepSpeedPlugin.{name}": "a step of the original's prepare; what is "
        "left to be filled in is filled in there"
        for name in ("deepspeed_config_process", "fill_match")
    },
    "utils.dataclasses.DeepSpeedPlugin.selected": "the Accelerator knows which plugin it runs with",
    "utils.dataclasses.DeepSpeedSequenceParallelConfig": "None stands for True and sdpa",
    "utils.dataclasses.DistributedDataParallelKwargs.to_dict": "all fields, which can all be copied",
    "utils.dataclasses.FullyShardedDataParallelPlugin": "None stands for 2, the only version",
    **{
        f"utils.dataclasses.{name}": "defaults are written out, where None stands for them"
        for name in ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs")
    },
    "utils.dataclasses.InitProcessGroupKwargs": "None lets the device decide, nccl for CUDA",
    "utils.dataclasses.TorchContextParallelConfig": "None stands for allgather",
    **{
        f"utils.dataclasses.MegatronLMPlugin.{name}": "a step of the original's prepare; fields are "
        "read when they are needed"
        for name in (
            *("set_mixed_precision", "set_network_size_args", "set_optimizer_type"),
            *("set_scheduler_args", "set_tensorboard_logging_options", "set_training_args"),
        )
    },
    **{
        f"utils.megatron_lm.{name}.*": "the class of what prepare returns; accelerator.train_step runs "
        "a step, save_state and load_state keep it"
        for name in (
            *("MegatronEngine", "MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper"),
        )
    },
    **{
        f"utils.megatron_lm.{name}TrainStep.*": "refuses: such models come from a provider, with a "
        "custom_train_step_class"
        for name in ("Bert", "T5")
    },
    "utils.megatron_lm.MegatronLMDummyDataLoader.*": "prepare makes the loaders; "
    "accelerate_megatron.build_datasets the datasets alone",
    "utils.deepspeed.DeepSpeedEngineWrapper.backward": "accelerator.backward(loss) is the one way",
    "utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload": "both are read when they are asked",
}
