"""The names of the original that nothing here stands behind, each with the reason."""

from __future__ import annotations

from accelerate_core.plugins.catalog import pip_command

#: What a package that is planned will bring.
_PLANNED = {
    **dict.fromkeys(
        (
            *("finish_mpu_init", "initialize", "model_provider_func", "prepare_optimizer"),
            *("prepare_model_optimizer_scheduler", "prepare_scheduler"),
            "utils.megatron_lm.prepare_data_loader",
            *("parse_bert_config", "parse_glm4_moe_config", "parse_gpt2_config"),
            *("parse_llama_config", "parse_t5_config"),
        ),
        "megatron",
    ),
    **dict.fromkeys(
        (
            *("MpDeviceLoaderWrapper", "tpu_command_launcher", "tpu_command_parser"),
            *("tpu_launcher", "tpu_pod_launcher", "commands.tpu.main"),
        ),
        "xla",
    ),
    "convert_model_to_fp8_ao": "fp8",
}

_QUANTIZED = (
    "models with weights of bitsandbytes are made by what loads them: "
    "transformers' from_pretrained(quantization_config=BitsAndBytesConfig(...))"
)
_SAGEMAKER = "jobs of SageMaker are not started here; run accelerate launch within the job's script"

#: Can be imported, and refuses when it is used.
_REFUSED = {
    **dict.fromkeys(
        (
            *("load_and_quantize_model", "replace_with_bnb_layers", "quantize_and_offload_8bit"),
            "get_quantized_model_device_map",
        ),
        _QUANTIZED,
    ),
    **dict.fromkeys(
        ("SageMakerConfig", "prepare_sagemager_args_inputs", "sagemaker_launcher"), _SAGEMAKER
    ),
}

_HELP = "a detail of the original's parser; accelerate launch --help has groups of its own"
_TABLE = "a table of the original's converter; ours is convert_config_to_fsdp2"
_HUB = "a detail of the original's command, which makes a model; ours reads shapes alone"

#: Cannot be imported: a value, or what only works on the original's own insides.
LEFT_OUT = {
    "patch_optimizer_step": "it marks steps of the original's own optimizer wrapper for its scaler",
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS": "a table of the Megatron-LM plugin, which is planned",
    "FORMAT": _HELP,
    "options_to_group": _HELP,
    **dict.fromkeys(
        ("ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING", "ConversionStatus", "load_config"),
        _TABLE,
    ),
    "description": "the help of a command, see accelerate merge-weights --help",
    **dict.fromkeys(
        ("check_has_model", "create_ascii_table", "create_empty_model", "verify_on_hub"), _HUB
    ),
}


def left_out(module: str, name: str) -> str | None:
    """Return why a name cannot be imported, None if it can."""
    return None if module.startswith("test_utils") else LEFT_OUT.get(name)


def absent(module: str, name: str) -> str | None:
    """Return why a name that can be imported refuses to be used, None if it does not."""
    extra = _PLANNED.get(name) or _PLANNED.get(f"{module}.{name}")
    if extra is not None:
        return f"{name} comes with a plugin that is not installed: {pip_command(extra)}"
    return f"{name}: {_REFUSED[name]}." if name in _REFUSED else None
