"""Settings of the deepspeed backend, with the names that Hugging Face Accelerate uses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, get_args

from accelerate_core.plugin import (
    AcceleratorState,
    BackendSettings,
    ConfigurationError,
    RuntimeConflictError,
    option,
    settings,
)
from accelerate_deepspeed.config import NO_MSAMP, HfDeepSpeedConfig

_Device = Literal["none", "cpu", "nvme"]
_Launcher = Literal["standard", "pdsh", "openmpi", "mvapich", "mpich", "impi", "slurm", "nossh"]


@settings(
    env_prefix="ACCELERATE_DEEPSPEED_",
    section="deepspeed_config",
    argument=("deepspeed_plugin", "deepspeed_plugins"),
    yaml_prefix="deepspeed_",
)
class DeepSpeedPlugin(BackendSettings):
    """Options of DeepSpeed. `hf_ds_config` can contain all other options that DeepSpeed has.

    A field must not contradict the config. The default stage is 2, if there is no config.

    Args:
        hf_ds_config: path of a JSON file, dict, JSON, base64-encoded JSON, or `HfDeepSpeedConfig`.
        gradient_accumulation_steps: micro-batches per optimizer step, the same as the
            Accelerator's. The loss is divided by the core, not by DeepSpeed.
        gradient_clipping: maximum norm of the gradients. If it is not set or "auto", gradients are
            only clipped when you call `clip_grad_norm_`.
        zero3_init_flag: with stage 3, shard parameters while a model is created inside
            `accelerator.init_model_context()` or by Transformers' `from_pretrained`.

    Raises:
        ConfigurationError: a value is invalid or contradicts the config.
    """

    hf_ds_config: Any = option(
        default=None,
        help="DeepSpeed's own config: a JSON file, JSON, or base64-encoded JSON",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        yaml="deepspeed_config_file",
    )
    gradient_accumulation_steps: int | Literal["auto"] | None = option(
        default=None,
        help="micro-batches per optimizer step",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    gradient_clipping: float | Literal["auto"] | None = option(
        default=None,
        help="maximum norm of the gradients",
        env="ACCELERATE_GRADIENT_CLIPPING",
        cli="gradient_clipping",
    )
    zero_stage: int | None = option(
        default=None,
        help="what to shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters",
        cli="zero_stage",
        choices=("2", "0", "1", "3"),
        ge=0,
        le=3,
        ask="ZeRO stage (1 shards optimizer state, 2 also gradients, 3 also parameters)?",
    )
    is_train_batch_min: bool = option(
        default=True, help="with several loaders, the smallest batch is the micro-batch"
    )
    offload_optimizer_device: _Device | None = option(
        default=None,
        help="where to keep the optimizer's state: none (on the device), cpu, nvme",
        cli="offload_optimizer_device",
        ask="Where should the optimizer's state be kept?",
    )
    offload_param_device: _Device | None = option(
        default=None,
        help="where to keep parameters (stage 3): none (on the device), cpu, nvme",
        cli="offload_param_device",
        ask="Where should parameters be kept?",
        ask_if="zero_stage=3",
    )
    offload_optimizer_nvme_path: str | None = option(
        default=None,
        help="directory for offload_optimizer_device=nvme",
        cli="offload_optimizer_nvme_path",
    )
    offload_param_nvme_path: str | None = option(
        default=None, help="directory for offload_param_device=nvme", cli="offload_param_nvme_path"
    )
    zero3_init_flag: bool | None = option(
        default=None,
        help="shard parameters while the model is created (stage 3)",
        ask="Shard parameters while the model is created?",
        ask_if="zero_stage=3",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        cli="zero3_init_flag",
    )
    zero3_save_16bit_model: bool | None = option(
        default=None,
        help="gather whole weights when a model is saved (stage 3)",
        cli="zero3_save_16bit_model",
    )
    transformer_moe_cls_names: list[str] | str | None = option(
        default=None,
        help="classes of mixture-of-experts blocks, which stage 3 gathers as a whole",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        yaml="deepspeed_moe_layer_cls_names",
    )
    enable_msamp: bool | None = option(
        default=None, help="not supported: MS-AMP needs DeepSpeed 0.13"
    )
    msamp_opt_level: str | None = option(default=None, help="not supported")
    hostfile: str | None = option(
        default=None, help="file with hosts and their slots, for several machines"
    )
    exclusion_filter: str | None = option(default=None, help="hosts and slots to leave out")
    inclusion_filter: str | None = option(
        default=None, help="hosts and slots to use; all others are left out"
    )
    multinode_launcher: _Launcher | None = option(
        default=None, help="how to reach other machines: " + ", ".join(get_args(_Launcher))
    )
    multinode_launcher_args: str | None = option(
        default=None, help="more arguments for multinode_launcher, as one string"
    )

    def __post_init__(self) -> None:
        if isinstance(self.transformer_moe_cls_names, str):
            names = self.transformer_moe_cls_names.split(",")
            self.transformer_moe_cls_names = [name.strip() for name in names if name.strip()]
        given = self.hf_ds_config
        # A HfDeepSpeedConfig is not copied, because its owner may fill in values later.
        if not isinstance(given, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig({} if given is None else given)
        if given is None:
            self.hf_ds_config.origin = "the plugin's defaults"
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ConfigurationError(f"enable_msamp {NO_MSAMP}")

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's config, resolved as far as possible. Changes before `prepare` take effect."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        if self.hf_ds_config.has("zero_optimization.stage"):
            return int(self.hf_ds_config.stage)
        if self.zero_stage is not None:
            return self.zero_stage
        return 2 if not self.hf_ds_config.config else 0

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the config.

        Args:
            ds_key_long: a dotted name, such as `zero_optimization.stage`.
            default: returned if the config doesn't have the name.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the config is "auto".

        Args:
            ds_key_long: a dotted name.
        """
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Check that a precision doesn't contradict the config. The Accelerator sets the precision.

        Args:
            mixed_precision: `no`, `fp16` or `bf16`.

        Raises:
            ConfigurationError: the config turns on another precision.
        """
        other = {"fp16": "bf16", "bf16": "fp16"}.get(str(mixed_precision))
        if other is not None and self.hf_ds_config.is_true(f"{other}.enabled"):
            raise ConfigurationError(
                f"mixed_precision={mixed_precision!r} contradicts {other}.enabled=true "
                f"({self.hf_ds_config.where(other)}). Leave one of them out."
            )

    def set_deepspeed_weakref(self) -> None:
        """Tell Transformers whether to shard models while loading them."""
        tell_transformers(self)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Do nothing. `prepare` marks the classes of `transformer_moe_cls_names`."""

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are sharded while they are created."""
        return bool(self.zero3_init_flag) and self.stage == 3

    def zero3_init_context_manager(self, enable: bool = False) -> AbstractContextManager[Any]:
        """Return a context that sets `zero3_init_flag`.

        Args:
            enable: the value of the flag.
        """
        return self._switched_init(enable) if self.stage == 3 else nullcontext()

    @contextmanager
    def _switched_init(self, enable: bool) -> Iterator[None]:
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        tell_transformers(self)
        try:
            yield
        finally:
            self.zero3_init_flag = before
            tell_transformers(self)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Raise an error, as Accelerate does. Plugins are selected by name.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "Select a plugin with accelerator.state.select_deepspeed_plugin(name)."
        )


@settings(
    env_prefix="PARALLELISM_CONFIG_",
    section="parallelism_config",
    yaml_prefix="parallelism_config_",
)
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's Ulysses (ALST) splits a sequence: `ParallelismConfig(sp_handler=…)`.

    Args:
        sp_seq_length: number of tokens in the whole sequence.
        sp_seq_length_is_variable: False if every batch has exactly that length.
        sp_attn_implementation: the attention that Ulysses uses: sdpa, flash_attention_2 or
            flash_attention_3.
    """

    sp_seq_length: int | None = option(default=None, help="number of tokens in the whole sequence")
    sp_seq_length_is_variable: bool = option(
        default=True, help="whether batches have different sequence lengths"
    )
    sp_attn_implementation: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = option(
        default="sdpa", help="attention that Ulysses uses"
    )


#: The config that Transformers uses. It is kept here because Transformers' reference is weak.
_config_of_transformers: list[HfDeepSpeedConfig] = []


def tell_transformers(plugin: DeepSpeedPlugin | None) -> None:
    """Set whether Transformers' `from_pretrained` shards models while loading them."""
    wanted = plugin is not None and plugin.is_zero3_init_enabled()
    if not wanted and "transformers.integrations.deepspeed" not in sys.modules:
        return
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers.integrations import deepspeed as integration

    if _config_of_transformers:  # don't unset a config that other code set, such as its Trainer
        integration.unset_hf_deepspeed_config()
        _config_of_transformers.clear()
    if plugin is not None and wanted:
        _config_of_transformers.append(plugin.hf_ds_config.known_by_now())
        integration.set_hf_deepspeed_config(_config_of_transformers[0])


def get_active_deepspeed_plugin(state: Any = None) -> DeepSpeedPlugin:
    """Return the plugin of the given Accelerator state, or of the current Accelerator.

    Raises:
        ValueError: there is no Accelerator, or it has another backend.
    """
    found: DeepSpeedPlugin | None = None
    with suppress(RuntimeConflictError):
        found = getattr(AcceleratorState() if state is None else state, "deepspeed_plugin", None)
    if found is None:
        raise ValueError("There is no Accelerator with the backend deepspeed.")
    return found
