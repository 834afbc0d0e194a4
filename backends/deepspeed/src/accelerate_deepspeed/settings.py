"""What users may say about DeepSpeed, by the names Hugging Face Accelerate has for it."""

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
    """Options of DeepSpeed. `hf_ds_config` can set every other option that DeepSpeed has.

    A field that is set must not contradict the config. Without a config and without `zero_stage`
    the stage is 2.

    Args:
        hf_ds_config: path of a JSON file, dict, JSON, base64 of JSON, or `HfDeepSpeedConfig`.
        gradient_accumulation_steps: micro-batches per optimizer step, as of the Accelerator; the
            core divides the loss, DeepSpeed does not.
        gradient_clipping: largest norm of the gradients; without it, or if it is "auto", what
            `clip_grad_norm_` is called with, and nothing if it is not called.
        zero3_init_flag: with stage 3, shard parameters while the model is made, inside of
            `accelerator.init_model_context()` and in Transformers' `from_pretrained`.

    Raises:
        ConfigurationError: something that does not exist, cannot be, or contradicts the config.
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
        help="largest norm of the gradients",
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
        ask="ZeRO stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too",
    )
    is_train_batch_min: bool = option(
        default=True, help="with several loaders, the smallest batch is the micro-batch"
    )
    offload_optimizer_device: _Device | None = option(
        default=None,
        help="where the optimizer's state is kept: none, cpu, nvme",
        cli="offload_optimizer_device",
        ask="Where is the optimizer's state kept?",
    )
    offload_param_device: _Device | None = option(
        default=None,
        help="where parameters are kept (stage 3): none, cpu, nvme",
        cli="offload_param_device",
        ask="Where are parameters kept?",
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
        help="shard parameters while the model is constructed (stage 3)",
        ask="Shard parameters while the model is made?",
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
        help="classes of mixture-of-experts blocks, which stage 3 gathers whole",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        yaml="deepspeed_moe_layer_cls_names",
    )
    enable_msamp: bool | None = option(
        default=None, help="not supported: MS-AMP needs DeepSpeed 0.13"
    )
    msamp_opt_level: str | None = option(default=None, help="not supported")
    hostfile: str | None = option(default=None, help="hosts and their slots, for several machines")
    exclusion_filter: str | None = option(default=None, help="hosts and slots to leave out")
    inclusion_filter: str | None = option(default=None, help="the only hosts and slots to use")
    multinode_launcher: _Launcher | None = option(
        default=None, help="how other machines are reached: " + ", ".join(get_args(_Launcher))
    )
    multinode_launcher_args: str | None = option(
        default=None, help="further arguments of that launcher, in one string"
    )

    def __post_init__(self) -> None:
        if isinstance(self.transformer_moe_cls_names, str):
            names = self.transformer_moe_cls_names.split(",")
            self.transformer_moe_cls_names = [name.strip() for name in names if name.strip()]
        given = self.hf_ds_config
        if not isinstance(given, HfDeepSpeedConfig):  # one that is: its owner goes on filling it
            self.hf_ds_config = HfDeepSpeedConfig({} if given is None else given)
        if given is None:
            self.hf_ds_config.origin = "the plugin's defaults"
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ConfigurationError(f"enable_msamp {NO_MSAMP}")

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's config, as far as it is resolved; what is changed before `prepare` counts."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    @property
    def stage(self) -> int:
        """The ZeRO stage in force."""
        if self.hf_ds_config.has("zero_optimization.stage"):
            return int(self.hf_ds_config.stage)
        if self.zero_stage is not None:
            return self.zero_stage
        return 2 if not self.hf_ds_config.config else 0

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the config by dotted name.

        Args:
            ds_key_long: a dotted name.
            default: returned where it is missing.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Tell whether a value of the config is left to us.

        Args:
            ds_key_long: a dotted name.
        """
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Compare a precision with the config's; it is the Accelerator's to set.

        Args:
            mixed_precision: `no`, `fp16` or `bf16`.

        Raises:
            ConfigurationError: the config asks for another one.
        """
        other = {"fp16": "bf16", "bf16": "fp16"}.get(str(mixed_precision))
        if other is not None and self.hf_ds_config.is_true(f"{other}.enabled"):
            raise ConfigurationError(
                f"mixed_precision={mixed_precision!r}, and {self.hf_ds_config.where(other)} says "
                f"{other}.enabled: leave one of them out."
            )

    def set_deepspeed_weakref(self) -> None:
        """Tell Transformers whether to shard what it loads."""
        tell_transformers(self)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Do nothing: `prepare` marks the classes of `transformer_moe_cls_names`."""

    def is_zero3_init_enabled(self) -> bool:
        """Tell whether models are sharded while they are made."""
        return bool(self.zero3_init_flag) and self.stage == 3

    def zero3_init_context_manager(self, enable: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which `zero3_init_flag` is on or off.

        Args:
            enable: on or off.
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
        """Refuse: plugins are chosen by name, so that the others are let go.

        Raises:
            NotImplementedError: always, as in Accelerate.
        """
        raise NotImplementedError(
            "Choose a plugin by accelerator.state.select_deepspeed_plugin(name)."
        )


@settings(
    env_prefix="PARALLELISM_CONFIG_",
    section="parallelism_config",
    yaml_prefix="parallelism_config_",
)
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed's Ulysses (ALST) splits a sequence: `ParallelismConfig(sp_handler=…)`.

    Args:
        sp_seq_length: tokens of the whole sequence.
        sp_seq_length_is_variable: False if every batch has exactly that length.
        sp_attn_implementation: attention that Ulysses is laid around: sdpa, flash_attention_2,
            flash_attention_3.
    """

    sp_seq_length: int | None = option(default=None, help="tokens of the whole sequence")
    sp_seq_length_is_variable: bool = option(default=True, help="whether lengths differ")
    sp_attn_implementation: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = option(
        default="sdpa", help="attention inside Ulysses"
    )


#: What Transformers was told; its own reference is weak.
_told: list[HfDeepSpeedConfig] = []


def tell_transformers(plugin: DeepSpeedPlugin | None) -> None:
    """Let `from_pretrained` of Transformers shard what it loads, or stop it from doing so."""
    wanted = plugin is not None and plugin.is_zero3_init_enabled()
    if not wanted and "transformers.integrations.deepspeed" not in sys.modules:
        return
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers.integrations import deepspeed as theirs

    if _told:  # what others have told it, as its Trainer does, is theirs
        theirs.unset_hf_deepspeed_config()
        _told.clear()
    if plugin is not None and wanted:
        _told.append(plugin.hf_ds_config.known_by_now())
        theirs.set_hf_deepspeed_config(_told[0])


def get_active_deepspeed_plugin(state: Any = None) -> DeepSpeedPlugin:
    """Return the plugin in use: that of an Accelerator's state, or of the newest Accelerator.

    Raises:
        ValueError: it does not run with DeepSpeed, or there is none.
    """
    found: DeepSpeedPlugin | None = None
    with suppress(RuntimeConflictError):
        found = getattr(AcceleratorState() if state is None else state, "deepspeed_plugin", None)
    if found is None:
        raise ValueError("No Accelerator with the backend deepspeed is there.")
    return found
