"""Known packages outside the core: the one place that turns a missing plugin into a pip command.

Most tables are generated into `known_packages.json` from what our packages declare (`make docs`).
Written here is what no package can declare: names of packages that are planned, and words of the
peer's that mean one of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

#: What several processes need when nothing more is asked for.
SEVERAL_PROCESSES = "ddp"

# Tables that are read when the first one is used. Each maps a name to an extra of the core.

#: Per kind: name of a plugin.
NAMES: dict[str, dict[str, str]]
#: Constructor arguments that belong to a plugin.
ARGUMENTS: dict[str, str]
#: Environment variables that ask for a plugin; those of backends begin with ACCELERATE_USE_.
VARIABLES: dict[str, str]
#: Sections of a peer's config file that belong to a plugin.
SECTIONS: dict[str, str]
#: Options of `launch` that ask for a backend.
SWITCHES: dict[str, str]
#: How other options of a plugin begin.
PREFIXES: dict[str, str]
#: Options of a plugin that begin otherwise.
OPTIONS: dict[str, str]
#: Public names lent by a plugin, or the peer's that no package of ours offers yet.
EXPORTS: dict[str, str]
#: `is_…_available` -> the library it asks for.
PROBES: dict[str, str]
#: Command -> its line in the help.
SUMMARIES: dict[str, str]

#: The peer's names that a planned package will lend.
_PLANNED = {
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

#: Libraries that scripts ask for by a probe of that name.
_PROBED = """amdsmi boto3 datasets deepspeed import_timer matplotlib msamp numpy pandas peft pynvml
    pytest rich sagemaker schedulefree timm torch_xla torchao torchdata torchvision tqdm
    transformer_engine transformers triton"""

#: What is added to the generated tables: planned packages, and other names for those there are.
_ADDED_NAMES = {
    "backend": {"fsdp": "fsdp2", "megatron": "megatron", "megatron_lm": "megatron", "xla": "xla"},
    "precision": {"fp8": "fp8"},
    "command": {"tpu-config": "xla"},
}
_ADDED: dict[str, dict[str, str]] = {
    "ARGUMENTS": {"megatron_lm_plugin": "megatron"},
    "VARIABLES": {"ACCELERATE_USE_MEGATRON_LM": "megatron"},
    "SECTIONS": {"megatron_lm_config": "megatron", "fp8_config": "fp8"},
    "EXPORTS": {name: extra for extra, names in _PLANNED.items() for name in names.split()},
    "PROBES": {
        **{f"is_{name}_available": name for name in _PROBED.split()},
        "is_fp8_available": "accelerate_fp8",
        "is_lomo_available": "lomo_optim",
        "is_megatron_lm_available": "megatron.core",
        "is_transformer_engine_mxfp8_available": "transformer_engine",
    },
}


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    file = resources.files(__package__).joinpath("known_packages.json")
    made: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    for kind, names in _ADDED_NAMES.items():
        made["NAMES"][kind] |= names
    for table, entries in _ADDED.items():
        made[table] |= entries
    return made


def __getattr__(name: str) -> Any:
    if name in __annotations__:
        return _tables()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: `distributed_type` of a peer's config file -> the backend it asks for.
DISTRIBUTED_TYPES = {
    "FSDP": "fsdp2",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
    "XLA": "xla",
    "TPU": "xla",
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


def extra_for(kind: str, name: str) -> str | None:
    """Return the extra that installs a plugin, None for one we never heard of."""
    return known_names(kind).get(name)


def known_names(kind: str) -> Mapping[str, str]:
    """Return the plugin names of one kind that this catalog can name a package for."""
    names: Mapping[str, str] = _tables()["NAMES"].get(kind, {})
    return names


def pip_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "accelerate-core[{extra}]"'
