"""Settings of the fsdp2 backend, with the names that Hugging Face Accelerate uses for FSDP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from accelerate_core.plugin import (
    BackendSettings,
    ConfigurationError,
    KwargsHandler,
    ParallelismConfig,
    Sources,
    did_you_mean,
    listing,
    option,
    parse_bool,
    resolve_settings,
    settings,
    warn,
)

_WRAP = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_STATE = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
#: FSDP1's strategies by number.
_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16,
    "float16": torch.float16, "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


@settings(env_prefix="FSDP_", section="fsdp_config", argument="fsdp_plugin", yaml_prefix="fsdp_")
class FullyShardedDataParallelPlugin(BackendSettings):
    """Options of `torch.distributed.fsdp.fully_shard` and of the backend.

    Fields that only FSDP1 has are translated. Those without an equivalent are an error that names
    the alternative.

    Args:
        auto_wrap_policy: which modules become units, whose parameters are gathered together:
            `transformer_based_wrap` (the classes in `transformer_cls_names_to_wrap`, or else in
            the model's `_no_split_modules`), `size_based_wrap` (see `min_num_params`), `no_wrap`
            (the whole model is one unit), or a function of a module. The default is the classes
            that the model names, or else the members of its `ModuleList`s.
        mixed_precision_policy: a `MixedPrecisionPolicy`, its fields as a dict, or a dtype for
            parameters. The default is the dtype of `mixed_precision`, reduced in fp32.
        ignored_modules: modules, or a pattern of their names, that are not sharded. Their
            gradients are averaged.
        sync_module_states: False compares the ranks' initial weights instead of sending rank 0's.

    Raises:
        ConfigurationError: FSDP1 or one of its options without an equivalent was requested.
    """

    fsdp_version: int | None = option(default=2, help="only 2 is supported", env="FSDP_VERSION")
    sharding_strategy: Any = option(
        default=None,
        help="deprecated; use reshard_after_forward",
        choices=(*_STRATEGIES.values(), "HYBRID_SHARD_ZERO2", *_STRATEGIES),
    )
    reshard_after_forward: Any = option(
        default=None,
        help="free gathered parameters after forward; an integer reshards over that many ranks",
        ask="Free gathered parameters after forward (less memory, more communication)?",
    )
    backward_prefetch: Any = option(
        default=None,
        help="deprecated; FSDP2 always prefetches in backward",
        yaml=("fsdp_backward_prefetch_policy", "backward_prefetch_policy"),
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    )
    mixed_precision_policy: Any = option(
        default=None, help="dtypes for parameters and for reduction"
    )
    auto_wrap_policy: Any = option(
        default=None,
        help="transformer_based_wrap, size_based_wrap, no_wrap, or a function",
        choices=_WRAP,
        ask="Which modules should be gathered together?",
    )
    cpu_offload: Any = option(
        default=None,
        help="keep shards in host memory",
        env="FSDP_OFFLOAD_PARAMS",
        yaml=("fsdp_offload_params", "offload_params"),
        choices=("true", "false"),
        ask="Keep shards in host memory to save device memory?",
    )
    ignored_modules: Any = option(
        default=None, help="modules that are not sharded, or a pattern of their names"
    )
    state_dict_type: Any = option(
        default=None,
        help="form of checkpoints: SHARDED_STATE_DICT or FULL_STATE_DICT (whole tensors)",
        choices=_STATE,
        ask="How should checkpoints be written?",
    )
    state_dict_config: Any = option(default=None, help="deprecated; use state_dict_type")
    optim_state_dict_config: Any = option(default=None, help="deprecated; use state_dict_type")
    limit_all_gathers: bool = option(default=True, help="deprecated; FSDP2 always does this")
    use_orig_params: bool | None = option(default=None, help="deprecated; FSDP2 always does this")
    param_init_fn: Any = option(
        default=None, help="deprecated; create the model on the meta device instead"
    )
    sync_module_states: bool | None = option(
        default=None, help="send rank 0's weights to all ranks; false checks that they are equal"
    )
    forward_prefetch: bool | None = option(
        default=None, help="gather the next unit early in forward"
    )
    activation_checkpointing: bool | None = option(
        default=None,
        help="recompute activations of each unit in backward",
        ask="Recompute activations in backward to save memory?",
    )
    activation_checkpointing_offload: bool | None = option(
        default=None, help="keep activations that checkpointed units save in host memory"
    )
    cpu_ram_efficient_loading: bool | None = option(
        default=None,
        help="only rank 0 loads weights; others create the model on the meta device",
        ask="Load pretrained weights only on the first process?",
    )
    transformer_cls_names_to_wrap: list[str] | str | None = option(
        default=None,
        help="classes of modules that become units",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        yaml=("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap"),
        ask="Module classes to gather together, separated by commas (empty: those the model names)?",
        ask_if="auto_wrap_policy=transformer_based_wrap",
    )
    min_num_params: int | None = option(
        default=None,
        help="minimum number of parameters of a unit with size_based_wrap",
        ge=0,
        ask="Minimum number of parameters of a module that is gathered separately?",
        ask_if="auto_wrap_policy=size_based_wrap",
    )
    forward_methods: list[str] | str | None = option(
        default=None, help="methods besides forward that need gathered parameters, such as generate"
    )

    def __post_init__(self) -> None:
        if self.fsdp_version not in (None, 2):
            raise ConfigurationError(
                f"fsdp_version={self.fsdp_version} is not supported. This backend is FSDP2 (torch's "
                "fully_shard). Set it to 2, or leave it out."
            )
        self._refuse_fsdp1()
        self.sharding_strategy = self._strategy(self.sharding_strategy)
        self.reshard_after_forward = self._reshard(self.reshard_after_forward)
        self.auto_wrap_policy = self._wrap(self.auto_wrap_policy)
        self.state_dict_type = self._state(self._state_of_fsdp1())
        self.transformer_cls_names_to_wrap = _names(self.transformer_cls_names_to_wrap)
        self.forward_methods = _names(self.forward_methods)
        self.cpu_offload = _offload(self.cpu_offload)
        self.mixed_precision_policy = _policy(self.mixed_precision_policy)

    def _refuse_fsdp1(self) -> None:
        if self.param_init_fn is not None:
            raise ConfigurationError(
                "param_init_fn is an option of FSDP1. With FSDP2, create the model on the meta "
                "device and load its weights."
            )
        if self.use_orig_params is False:
            raise ConfigurationError(
                "use_orig_params=False is an option of FSDP1. FSDP2 always keeps the original "
                "parameters, so leave it out."
            )
        if not self.limit_all_gathers:
            warn("limit_all_gathers=False has no effect with FSDP2. Leave it out.")
        text = str(getattr(self.backward_prefetch, "name", self.backward_prefetch)).upper()
        if text not in ("NONE", "BACKWARD_PRE", "NO_PREFETCH", "BACKWARD_POST"):
            raise ConfigurationError(
                f"backward_prefetch={self.backward_prefetch!r} is not a valid value. Leave it out, "
                "because FSDP2 always prefetches in backward."
            )
        if text in ("BACKWARD_POST", "NO_PREFETCH"):
            warn(
                f"backward_prefetch={text} has no effect: FSDP2 always prefetches in backward.",
            )

    def _strategy(self, value: Any) -> Any:
        if value is None:
            return None
        text = strategy_name(value)
        if text in ("FULL_SHARD", "SHARD_GRAD_OP"):
            if self.reshard_after_forward is None:
                self.reshard_after_forward = text == "FULL_SHARD"
            return text
        ways = {
            "NO_SHARD": "use the backend ddp, which keeps the whole model on every rank",
            "HYBRID_SHARD": "use ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)",
            "HYBRID_SHARD_ZERO2": "use ParallelismConfig(dp_replicate_size=..., dp_shard_size=...) "
            "and reshard_after_forward=False",
        }
        if text in ways:
            raise ConfigurationError(
                f"sharding_strategy={text} is an option of FSDP1. With FSDP2, {ways[text]}."
            )
        known = ["FULL_SHARD", "SHARD_GRAD_OP"]
        raise ConfigurationError(
            f"sharding_strategy={value!r} is not a valid value. Allowed values are {listing(known)}."
            f"{did_you_mean(text, [*known, *ways])}"
        )

    def _reshard(self, value: Any) -> bool | int | None:
        value = getattr(value, "name", value)  # FSDP1's ShardingStrategy
        if isinstance(value, str):
            flag = parse_bool(value)
            if flag is None and not value.strip().isdigit():
                return bool(self._strategy(value) == "FULL_SHARD")
            value = int(value) if flag is None else flag
        if isinstance(value, bool | None) or (isinstance(value, int) and value > 0):
            return value
        raise ConfigurationError(
            f"reshard_after_forward={value} must be True, False or a number of ranks."
        )

    def _wrap(self, value: Any) -> Any:
        if value is None or callable(value):
            return value
        text = str(value).lower()
        if text not in _WRAP:
            raise _unknown(
                f"auto_wrap_policy={value!r} is not a valid value", text, _WRAP, " and a function"
            )
        return text

    def _state_of_fsdp1(self) -> Any:
        """Return `state_dict_type`, or the type that FSDP1's config objects imply."""
        found = self.state_dict_type
        for name in ("state_dict_config", "optim_state_dict_config"):
            config = getattr(self, name)
            if config is None:
                continue
            kind = re.fullmatch(
                r"(Full|Sharded|Local)(Optim)?StateDictConfig", type(config).__name__
            )
            if kind is None:
                raise ConfigurationError(
                    f"{name}={config!r} is not torch's FullStateDictConfig or "
                    "ShardedStateDictConfig. Set state_dict_type instead."
                )
            implied = f"{kind[1].upper()}_STATE_DICT"
            if found is not None and self._state(found) != implied:
                raise ConfigurationError(
                    f"{name}={type(config).__name__} implies {implied}, but state_dict_type is "
                    f"{self._state(found)}. Leave one of them out."
                )
            found = implied
            if not getattr(config, "offload_to_cpu", True) or not getattr(
                config, "rank0_only", True
            ):
                warn(
                    f"{name}: offload_to_cpu and rank0_only have no effect with FSDP2, which always "
                    "saves from host memory and gathers whole states only on rank 0."
                )
        return found

    def _state(self, value: Any) -> str:
        text = str(getattr(value, "name", value or "SHARDED_STATE_DICT")).upper()
        if text not in _STATE:
            raise _unknown(f"state_dict_type={value!r} is not supported", text, _STATE)
        return text

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing. `prepare` finds each model's units from `auto_wrap_policy`."""

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set `mixed_precision_policy`, unless it is already set.

        Args:
            mixed_precision: a dtype or the name of a precision.
            buffer_autocast: an option of FSDP1, ignored here. Buffers are not converted.
            override: replace an existing policy.
        """
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = _policy(mixed_precision)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how checkpoints are written. The default is `SHARDED_STATE_DICT`."""
        self.state_dict_type = self._state(state_dict_type)

    def set_cpu_offload(self) -> None:
        """Parse `cpu_offload` again, after it was assigned."""
        self.cpu_offload = _offload(self.cpu_offload)

    validate_cpu_offload = set_cpu_offload

    def validate_mixed_precision_policy(self) -> None:
        """Parse `mixed_precision_policy` again, after it was assigned."""
        self.mixed_precision_policy = _policy(self.mixed_precision_policy)

    def precision_policy(self, compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
        """Return the configured policy, or else `compute_dtype` for parameters, reduced in fp32.

        Args:
            compute_dtype: dtype of the run's precision.
        """
        if isinstance(self.mixed_precision_policy, MixedPrecisionPolicy):
            return self.mixed_precision_policy
        if compute_dtype is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)

    def offload_policy(self, device: torch.device) -> OffloadPolicy:
        """Return the offload policy. Memory is only pinned if there is an accelerator."""
        on_cpu = device.type == "cpu"
        if isinstance(self.cpu_offload, OffloadPolicy):
            pins = on_cpu and getattr(self.cpu_offload, "pin_memory", False)
            return CPUOffloadPolicy(pin_memory=False) if pins else self.cpu_offload
        return CPUOffloadPolicy(pin_memory=not on_cpu) if self.cpu_offload else OffloadPolicy()


def strategy_name(value: Any) -> str:
    """Return the name of an FSDP1 sharding strategy, given as an enum member, name or number."""
    text = str(getattr(value, "name", value)).upper()
    return _STRATEGIES.get(text, text)


def _unknown(what: str, text: str, known: Iterable[str], more: str = "") -> ConfigurationError:
    known = list(known)
    return ConfigurationError(
        f"{what}. Allowed values are {listing(known)}{more}.{did_you_mean(text, known)}"
    )


def _names(value: Any) -> list[str] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    return [name.strip() for name in names if name.strip()]


def _offload(value: Any) -> Any:
    if isinstance(value, OffloadPolicy | None):
        return value
    flag = parse_bool(getattr(value, "offload_params", value))  # an attribute of FSDP1's CPUOffload
    if flag is None:
        raise ConfigurationError(
            f"cpu_offload={value!r} must be True, False or a CPUOffloadPolicy."
        )
    return flag


def _policy(value: Any) -> Any:
    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, Mapping):
        known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        if unknown := [name for name in value if name not in known]:
            raise _unknown(f"mixed_precision_policy has no field {unknown[0]!r}", unknown[0], known)
        fields: dict[str, Any] = {
            n: v if n == "cast_forward_inputs" else _dtype(v) for n, v in value.items()
        }
        fields.setdefault("reduce_dtype", torch.float32)
        return MixedPrecisionPolicy(**fields)
    if hasattr(value, "buffer_dtype"):  # FSDP1's MixedPrecision
        reduced = value.reduce_dtype or torch.float32
        return MixedPrecisionPolicy(param_dtype=value.param_dtype, reduce_dtype=reduced)
    return MixedPrecisionPolicy(param_dtype=_dtype(value), reduce_dtype=torch.float32)


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    text = str(value).removeprefix("torch.")
    if text not in _DTYPES:
        raise _unknown(f"{value!r} is not a dtype for a mixed precision policy", text, _DTYPES)
    return _DTYPES[text]


@settings(env_prefix="PARALLELISM_CONFIG_TP_")
class TorchTensorParallelConfig(KwargsHandler):
    """Options of tensor parallelism.

    `plan` maps names of modules, with `*` for one part of a name, to a style: `colwise`, `rowwise`,
    `sequence` or one of torch's `ParallelStyle` objects. The default is the model's own `tp_plan`.
    `enable_async_tp` exists for compatibility with Accelerate, but True is an error.
    """

    enable_async_tp: bool = option(default=False, help="overlap communication with matmuls")
    plan: dict[str, Any] | None = option(default=None, help="module name pattern -> style")
    loss_parallel: bool = option(default=False, help="keep the logits sharded in the loss")


@settings(
    env_prefix="PARALLELISM_CONFIG_",
    section="parallelism_config",
    yaml_prefix="parallelism_config_",
)
class TorchContextParallelConfig(KwargsHandler):
    """How context parallelism (ring attention) exchanges keys and values."""

    cp_comm_strategy: Literal["allgather", "alltoall"] = option(
        default="allgather", help="collective for keys and values: allgather or alltoall"
    )


def check_handlers(config: ParallelismConfig) -> None:
    """Fill in the handlers of the mesh, and check them.

    Raises:
        ConfigurationError: a handler is for another backend, or an option is not supported.
    """
    handlers = {
        "tp_handler": TorchTensorParallelConfig,
        "cp_handler": TorchContextParallelConfig,
    }
    for name, cls in handlers.items():
        given = getattr(config, name)
        if given is None:
            setattr(config, name, resolve_settings(cls, None, Sources.of(os.environ))[0])
        elif not isinstance(given, cls):
            raise ConfigurationError(
                f"With the backend fsdp2, {name} must be a {cls.__name__}, not a "
                f"{type(given).__name__}."
            )
    if config.tp_handler.enable_async_tp:
        raise ConfigurationError(
            "enable_async_tp is not supported. It needs symmetric memory of CUDA devices and "
            "was never tested. Leave it out."
        )
