"""Known packages outside the core: the one place that turns a missing plugin into a pip command."""

from __future__ import annotations

from collections.abc import Iterable

from accelerate_core.plugins import known_packages

#: Plugin name -> extra of accelerate-core, per kind.
NAMES: dict[str, dict[str, str]] = {
    **known_packages.NAMES,
    "backend": {
        **known_packages.NAMES["backend"],
        "fsdp": "fsdp2",
        "megatron": "megatron",
        "megatron_lm": "megatron",
        "xla": "xla",
    },
    "precision": {**known_packages.NAMES["precision"], "fp8": "fp8"},
    "command": {**known_packages.NAMES["command"], "tpu-config": "xla"},
}

#: Command -> its line in the help.
SUMMARIES = known_packages.SUMMARIES

#: What several processes need when nothing more is asked for.
SEVERAL_PROCESSES = "ddp"

#: Constructor arguments that belong to a plugin.
ARGUMENTS = {
    **known_packages.ARGUMENTS,
    "torch_tp_plugin": "fsdp2",
    "megatron_lm_plugin": "megatron",
}

#: Environment variables that ask for a plugin; those of backends begin with ACCELERATE_USE_.
VARIABLES = {**known_packages.VARIABLES, "ACCELERATE_USE_MEGATRON_LM": "megatron"}

#: `distributed_type` of a peer's config file -> the backend it asks for.
DISTRIBUTED_TYPES = {
    "FSDP": "fsdp2",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
    "XLA": "xla",
    "TPU": "xla",
}

#: Sections of a peer's config file that belong to a plugin.
SECTIONS = {
    **known_packages.SECTIONS,
    "megatron_lm_config": "megatron",
    "fp8_config": "fp8",
}

#: Other keys of a peer's config file that belong to a plugin.
KEYS = {
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo"), "xla"),
    **dict.fromkeys(("tpu_vm", "tpu_env", "command_file", "commands", "downcast_bf16"), "xla"),
}

#: Options of a peer's launcher that ask for a backend.
SWITCHES = {
    "use_fsdp": "fsdp2",
    "use_deepspeed": "deepspeed",
    "use_megatron_lm": "megatron",
    "use_parallelism_config": "fsdp2",
    "tpu": "xla",
}

#: Options of a peer's launcher that are a plugin's, under names that do not say so.
OPTIONS = {
    **dict.fromkeys(
        (
            "zero_stage",
            "offload_optimizer_device",
            "offload_param_device",
            "offload_optimizer_nvme_path",
            "offload_param_nvme_path",
            "gradient_clipping",
            "zero3_init_flag",
            "zero3_save_16bit_model",
            "parallelism_config_sp_seq_length",
            "parallelism_config_sp_seq_length_is_variable",
            "parallelism_config_sp_attn_implementation",
        ),
        "deepspeed",
    ),
    **dict.fromkeys(
        (
            "tpu_cluster",
            "no_tpu_cluster",
            "tpu_use_sudo",
            "vm",
            "env",
            "downcast_bf16",
        ),
        "xla",
    ),
}

#: How other options of a plugin begin.
_PREFIXES = {
    "fsdp_": "fsdp2",
    "deepspeed_": "deepspeed",
    "megatron_lm_": "megatron",
    "fp8_": "fp8",
    "tpu_": "xla",
}

_SAGEMAKER = (
    "Amazon SageMaker jobs are not started from here: name accelerate-core launch as the command "
    "of the job's container. Credentials do not belong on a command line."
)

#: Options of a peer's launcher that no plugin will take, with the reason.
REFUSED_OPTIONS = {
    "aws_access_key_id": _SAGEMAKER,
    "aws_secret_access_key": _SAGEMAKER,
    "use_xpu": "It was dropped by the peer too; the device is found by torch.accelerator.",
    "ipex": "It was dropped by the peer too; torch itself has what it added.",
}

#: Keys of older config files of a peer that say nothing today, with the reason.
OBSOLETE_KEYS = {
    "ipex_config": REFUSED_OPTIONS["ipex"],
    "use_xpu": REFUSED_OPTIONS["use_xpu"],
}

#: Keys that every file of a peer has and that say nothing here.
IGNORED_KEYS = {
    "main_training_function": "the script is run as a program, whatever its functions are called",
    "same_network": "how machines reach each other follows from main_process_ip",
}

#: Attributes of an Accelerator or its state while no active plugin serves them.
ABSENT_ATTRIBUTES: dict[str, object] = {
    "deepspeed_plugin": None,
    "deepspeed_plugins": None,
    "fsdp_plugin": None,
    "torch_tp_plugin": None,
    "megatron_lm_plugin": None,
    "is_fsdp2": False,
    "is_composable_parallelism_enabled": False,
    "fp8_backend": None,
    **dict.fromkeys(("fp8_enabled", "has_fp8_handler", "delayed_fp8_autocast"), False),
    **dict.fromkeys(f"{name}_recipe_handler" for name in ("ao", "fp8", "msamp", "te")),
    "ddp_handler": None,
    "is_xla_gradients_synced": False,
}

#: Methods of the peer's Accelerator that only make sense with a plugin.
METHODS = {"deepspeed_ulysses_dl_adapter": "deepspeed"}

#: Names of the peer's that no package of ours offers yet -> the extra they belong to.
_NOT_YET = {
    "fsdp2": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading
        ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names
        fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer merge_fsdp_weights
        save_fsdp_model save_fsdp_optimizer compile_regions_fsdp2
    """,
    "deepspeed": """
        DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper compile_regions_deepspeed
        deepspeed_required prepare_deepspeed_cmd_env
    """,
    "megatron": """
        MegatronLMPlugin AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep
        MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronEngine
        MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group
        gather_across_data_parallel_groups megatron_lm_initialize
        megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
        megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler
    """,
    "xla": """
        install_xla prepare_tpu
    """,
    "fp8": """
        AORecipeKwargs TERecipeKwargs MSAMPRecipeKwargs FP8RecipeKwargs FP8BackendType
        convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers
        torchao_required apply_fp8_autowrap contextual_fp8_autocast convert_model
        has_transformer_engine_layers
    """,
}

#: Public names lent by a plugin.
EXPORTS: dict[str, str] = {
    **known_packages.EXPORTS,
    **{name: extra for extra, names in _NOT_YET.items() for name in names.split()},
}

#: `is_…_available` -> the library it asks for.
PROBES = {
    "is_deepspeed_available": "deepspeed",
    "is_megatron_lm_available": "megatron",
    "is_torch_xla_available": "torch_xla",
    "is_torchao_available": "torchao",
    "is_transformer_engine_available": "transformer_engine",
    "is_transformer_engine_mxfp8_available": "transformer_engine",
    "is_msamp_available": "msamp",
    "is_fp8_available": "accelerate_fp8",
    "is_wandb_available": "wandb",
    "is_tensorboard_available": "tensorboard",
    "is_trackio_available": "trackio",
    "is_aim_available": "aim",
    "is_comet_ml_available": "comet_ml",
    "is_mlflow_available": "mlflow",
    "is_clearml_available": "clearml",
    "is_dvclive_available": "dvclive",
    "is_swanlab_available": "swanlab",
}


def extra_for(kind: str, name: str) -> str | None:
    """Return the extra that installs a plugin, None for one we never heard of."""
    return NAMES.get(kind, {}).get(name)


def known_names(kind: str) -> Iterable[str]:
    """Return the plugin names of one kind that this catalog can name a package for."""
    return NAMES.get(kind, {})


def extras() -> set[str]:
    """Return every extra of the core that brings a plugin."""
    return {extra for names in NAMES.values() for extra in names.values()}


def pip_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "accelerate-core[{extra}]"'


def owner_of_option(name: str) -> str | None:
    """Return the extra whose plugin has an option of that name, None for one we never heard of."""
    if name in SWITCHES or name in OPTIONS:
        return SWITCHES.get(name) or OPTIONS[name]
    return next((extra for prefix, extra in _PREFIXES.items() if name.startswith(prefix)), None)
