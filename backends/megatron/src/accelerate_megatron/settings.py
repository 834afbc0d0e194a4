"""Settings of the megatron backend, with the names that Hugging Face Accelerate uses."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from accelerate_core.plugin import (
    BackendSettings,
    ConfigurationError,
    did_you_mean,
    listing,
    option,
    parse_bool,
    settings,
    warn,
)

_ATTENTION = ("auto", "flash", "fused", "unfused", "local")
_LR_DECAY = Literal["constant", "linear", "cosine", "inverse-square-root"]

_PROVIDER = "a function (pre_process, post_process, vp_stage=None)"
#: Fields of Accelerate that are not supported, and what to do instead.
_REFUSED = {
    "use_custom_fsdp": "Use backend='fsdp2', which shards parameters and supports tensor parallelism",
    "optimizer_cpu_offload": "Use backend='deepspeed' (offload_optimizer_device='cpu') or 'fsdp2' "
    "(cpu_offload=True), which keep the optimizer's state in host memory",
    "overlap_cpu_optimizer_d2h_h2d": "It needs optimizer_cpu_offload, which is not supported either. "
    "Use backend='deepspeed'",
    "use_precision_aware_optimizer": "It would replace your optimizer by one of Transformer Engine. To "
    "save memory, use use_distributed_optimizer=True, which shards the optimizer's state",
    "pipeline_model_parallel_split_rank": "megatron-core no longer splits a pipeline into encoder and "
    f"decoder. To create your own model, write {_PROVIDER} that is passed to prepare",
    "encoder_seq_length": "Leave it out, because each batch's own length is used",
    "tensorboard_dir": "Use Accelerator(log_with='tensorboard', project_dir=...) and accelerator.log",
    "set_all_logging_options": "Use Accelerator(log_with=...) and accelerator.log",
    "no_wd_decay_cond": "Put the parameters into a group of your optimizer with weight_decay=0",
    "scale_lr_cond": "Put the parameters into a group of your optimizer with its own lr",
    "lr_mult": "Put the parameters into a group of your optimizer with its own lr",
    "calculate_per_token_loss": "Use accelerator.accumulate(model, num_items=...) with the number of "
    "labels that are not ignored, (labels[:, 1:] != -100).sum(), which gives the mean over all tokens",
    "custom_model_provider_function": f"Write {_PROVIDER}, pass the function itself to prepare instead "
    "of a model, and create the optimizer from the model that prepare returns",
    "custom_prepare_model_function": f"prepare wraps the model that {_PROVIDER} returns. Pass that "
    "function to prepare instead of a model",
}

#: Options of megatron-core that have another name here, or that users cannot set.
_SET_BY = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "virtual_pipeline_model_parallel_size": "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size": "context_parallel_size of the plugin",
    "expert_model_parallel_size": "expert_model_parallel_size of the plugin",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size of the plugin",
    "sequence_parallel": "sequence_parallelism",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "attention_backend": "attention_backend of the plugin",
    "attention_dropout": "attention_dropout of the plugin",
    "hidden_dropout": "hidden_dropout of the plugin",
    "attention_softmax_in_fp32": "attention_softmax_in_fp32 of the plugin",
    "calculate_per_token_loss": "accelerator.accumulate(num_items=...)",
    "recompute_granularity": "recompute_granularity of the plugin",
    "recompute_method": "recompute_method of the plugin",
    "recompute_num_layers": "recompute_num_layers of the plugin",
    **dict.fromkeys(
        ("fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
        "mixed_precision of the Accelerator",
    ),
    **dict.fromkeys(
        (
            *("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func"),
            *("grad_sync_func", "param_sync_func", "overlap_p2p_comm", "batch_p2p_comm"),
            *("variable_seq_lengths", "deallocate_pipeline_outputs", "barrier_with_L1_time"),
        ),
        "the backend",
    ),
}


class Sizes(NamedTuple):
    """How a run is split.

    Attributes:
        tp: number of ranks that share each layer.
        pp: number of pipeline stages. Each stage consists of `tp` ranks.
        ep: number of ranks that share the experts.
        etp: number of ranks that share each expert's layers.
        vp: number of interleaved stages on each pipeline rank, or 1 without interleaving.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1


def _of_code(what: str, default: Any = None) -> Any:
    """Declare a field that only a script can set, such as a function or a class."""
    return option(default=default, help=what, cli=(), key="")


@settings(
    env_prefix="MEGATRON_LM_",
    section="megatron_lm_config",
    argument="megatron_lm_plugin",
    yaml_prefix="megatron_lm_",
)
class MegatronLMPlugin(BackendSettings):
    """Options of megatron-core: how a model is split across ranks, its schedule and its optimizer.

    None means the default of the model or of megatron-core: no recomputation, one rank in each
    dimension, and the dropout and positions of the model's config. Fields of Accelerate that are not
    supported are an error that says what to use instead.

    Args:
        tp_degree: number of ranks that share each layer, the same as
            `ParallelismConfig(tp_size=...)`.
        pp_degree: number of pipeline stages, the same as `ParallelismConfig(pp_size=...)`.
        num_micro_batches: number of parts into which each data rank's batch is split.
        gradient_clipping: maximum norm of the gradients, used in steps that the script doesn't clip
            itself. With None or 0, gradients are only clipped by `clip_grad_norm_`. Accelerate's
            default is 1.0.
        recompute_activations: recompute attention in backward, the same as `recompute_granularity`
            "selective". With "full", whole layers are recomputed: the first `recompute_num_layers` of
            each stage (method "block"), or chunks of that many layers ("uniform", the default, with
            one layer).
        num_layers_per_virtual_pipeline_stage: use the interleaved schedule, in which each rank has
            several stages with this number of layers.
        decoder_last_pipeline_num_layers: number of layers in the last stage. The other stages share
            the rest equally.
        attention_backend: auto, flash, fused, unfused or local. True means auto, False unfused. flash
            and fused need Transformer Engine.
        use_rotary_position_embeddings: only compared with the model's positions.
        consumed_samples: number of samples of `MegatronLMDummyDataLoader` that an earlier run has
            used, for training, validation and test. Not needed with `load_state`, which restores the
            positions of loaders.
        eod_mask_loss: an option of `MegatronLMDummyDataLoader`, like `eval_iters` and
            `eval_interval`.
        custom_megatron_datasets_provider_function: `(numbers of samples) -> (train, valid, test)`,
            called on all ranks instead of `build_datasets`.
        megatron_dataset_flag: no effect. Use `MegatronLMDummyDataLoader` for indexed data.
        seq_length: no effect, like `decoder_seq_length`. Each batch's own length is used.
        no_load_optim: `load_state` doesn't load the optimizer.
        no_save_optim: `save_state` doesn't save the optimizer.
        is_train_batch_min: no effect. Each loader has its own batch size.
        custom_train_step_class: a class that is created with the Accelerator, the plugin and
            `custom_train_step_kwargs`. Its `get_forward_step_func` returns the step of a micro-batch.
        other_megatron_args: more fields of megatron-core's `TransformerConfig`.
        forward_runs_step: calling a model in training runs the whole step, as in Accelerate.
            `backward`, `step` and `zero_grad` then do nothing.
        multiply_batch: a loader's batch is one micro-batch, as in Accelerate. The batch size is
            multiplied by `num_micro_batches`.

    Raises:
        ConfigurationError: a field is not supported, or fields contradict each other.
    """

    tp_degree: int | None = option(
        default=None,
        help="number of ranks that share each layer",
        ge=1,
        ask="Number of tensor parallel ranks?",
    )
    pp_degree: int | None = option(
        default=None,
        help="number of pipeline stages",
        ge=1,
        ask="Number of pipeline stages?",
    )
    use_custom_fsdp: bool | None = option(default=None, help="not supported: see backend fsdp2")
    overlap_cpu_optimizer_d2h_h2d: bool | None = option(default=None, help="not supported")
    no_load_optim: bool | None = option(
        default=None, help="loading a checkpoint leaves the optimizer unchanged"
    )
    eod_mask_loss: bool | None = option(
        default=None, help="indexed data: ignore the token after an end of document in the loss"
    )
    no_save_optim: bool | None = option(default=None, help="save checkpoints without the optimizer")
    optimizer_cpu_offload: bool | None = option(default=None, help="not supported")
    use_precision_aware_optimizer: bool | None = option(default=None, help="not supported")
    decoder_last_pipeline_num_layers: int | None = option(
        default=None,
        help="number of layers in the last stage; the other stages share the rest",
        ge=1,
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        default=None,
        help="what to recompute in backward: full (whole layers) or selective (attention)",
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        default=None,
        help="with full: uniform (chunks of all layers) or block (the first layers of a stage)",
    )
    recompute_num_layers: int | None = option(
        default=None, help="with full: number of layers per chunk, or per stage", ge=1
    )
    attention_backend: Any = option(
        default=None,
        help="auto, flash, fused, unfused, local; flash and fused need Transformer Engine",
        choices=(*_ATTENTION, "true", "false"),
    )
    expert_model_parallel_size: int | None = option(
        default=None, help="number of ranks that share the experts", ge=1
    )
    context_parallel_size: int | None = option(
        default=None, help="not supported above 1: see backend fsdp2", ge=1
    )
    attention_dropout: float | None = option(
        default=None, help="dropout of attention (default: the model's)", ge=0, le=1
    )
    hidden_dropout: float | None = option(
        default=None, help="dropout of the layers' outputs (default: the model's)", ge=0, le=1
    )
    attention_softmax_in_fp32: bool | None = option(
        default=None, help="compute the softmax of attention in fp32"
    )
    expert_tensor_parallel_size: int | None = option(
        default=None,
        help="number of ranks that share each expert's layers (default: tp_degree)",
        ge=1,
    )
    calculate_per_token_loss: bool | None = option(
        default=None, help="not supported: see accumulate(num_items=...)"
    )
    use_rotary_position_embeddings: bool | None = option(
        default=None, help="only compared with the model's positions"
    )
    num_micro_batches: int | None = option(
        default=None,
        help="number of micro-batches per batch",
        ge=1,
        ask="Number of micro-batches per batch?",
    )
    gradient_clipping: float | None = option(
        default=None,
        help="maximum norm of the gradients in steps that the script doesn't clip; 0 means no limit",
        ge=0,
    )
    sequence_parallelism: bool | None = option(
        default=None,
        help="also split activations between layers along the sequence (tp above 1)",
        ask="Split activations between layers along the sequence too?",
    )
    recompute_activations: bool | None = option(
        default=None,
        help="recompute attention in backward (selective)",
        ask="Recompute attention in backward to save memory?",
    )
    use_distributed_optimizer: bool | None = option(
        default=None,
        help="shard the optimizer's state over data ranks",
        ask="Shard the optimizer's state over data ranks?",
    )
    pipeline_model_parallel_split_rank: int | None = option(default=None, help="not supported")
    num_layers_per_virtual_pipeline_stage: int | None = option(
        default=None, help="interleaved schedule: number of layers per virtual stage", ge=1
    )
    is_train_batch_min: bool = option(default=True, help="no effect")
    train_iters: int | None = option(
        default=None, help="total number of optimizer steps, for the schedule", ge=1
    )
    train_samples: int | None = option(
        default=None, help="total number of samples, for the schedule", ge=1
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        default="constant", help="how weight decay increases"
    )
    start_weight_decay: float | None = option(default=None, help="initial weight decay", ge=0)
    end_weight_decay: float | None = option(default=None, help="final weight decay", ge=0)
    lr_decay_style: _LR_DECAY = option(default="linear", help="how the learning rate decays")
    lr_decay_iters: int | None = option(
        default=None, help="optimizer steps until min_lr (default: train_iters)", ge=1
    )
    lr_decay_samples: int | None = option(
        default=None, help="samples until min_lr (default: train_samples)", ge=1
    )
    lr_warmup_iters: int | None = option(default=None, help="number of warm-up steps", ge=0)
    lr_warmup_samples: int | None = option(default=None, help="number of warm-up samples", ge=0)
    lr_warmup_fraction: float | None = option(
        default=None, help="warm-up as a fraction of the time until min_lr", ge=0, lt=1
    )
    min_lr: float = option(default=0, help="minimum learning rate", ge=0)
    consumed_samples: list[int] | None = option(
        default=None, help="indexed data: numbers of train, valid and test samples already used"
    )
    no_wd_decay_cond: Any = _of_code("not supported: set weight_decay in the optimizer's groups")
    scale_lr_cond: Any = _of_code("not supported: set lr in the optimizer's groups")
    lr_mult: float = option(default=1.0, help="not supported: set lr in the optimizer's groups")
    megatron_dataset_flag: bool = option(default=False, help="no effect")
    seq_length: int | None = option(default=None, help="no effect", ge=1)
    encoder_seq_length: int | None = option(default=None, help="not supported")
    decoder_seq_length: int | None = option(default=None, help="no effect", ge=1)
    tensorboard_dir: str | None = option(default=None, help="not supported: see log_with")
    set_all_logging_options: bool = option(default=False, help="not supported: see log_with")
    eval_iters: int = option(
        default=100, help="indexed data: number of batches per validation", ge=0
    )
    eval_interval: int = option(
        default=1000, help="indexed data: optimizer steps between validations", ge=1
    )
    return_logits: bool = option(default=False, help="steps return logits in addition to the loss")
    custom_train_step_class: Any = _of_code(
        "in the script: a subclass of AbstractTrainStep that defines the forward step"
    )
    custom_train_step_kwargs: dict[str, Any] | None = _of_code(
        "in the script: more arguments for that class"
    )
    custom_model_provider_function: Any = _of_code("not supported: pass the function to prepare")
    custom_prepare_model_function: Any = _of_code("not supported: pass the function to prepare")
    custom_megatron_datasets_provider_function: Any = _of_code(
        "in the script: creates indexed datasets of the given sizes"
    )
    custom_get_batch_function: Any = _of_code("in the script: turns a batch into model inputs")
    custom_loss_function: Any = _of_code("in the script: computes the loss from outputs")
    other_megatron_args: dict[str, Any] | None = option(
        default=None, help="more fields of megatron-core's TransformerConfig", cli=()
    )
    forward_runs_step: bool = option(
        default=False, help="calling the model runs the whole step, as in Accelerate"
    )
    multiply_batch: bool = option(
        default=False, help="a loader's batch is one micro-batch, as in Accelerate"
    )

    def __post_init__(self) -> None:
        fields = type(self).__dataclass_fields__
        for name, way in _REFUSED.items():
            value = getattr(self, name)
            default = fields[name].default
            if value not in (None, default) and value is not False:
                raise ConfigurationError(f"{name}={value!r} is not supported. {way}.")
        self._resolve_attention()
        self._resolve_recomputation()
        self._resolve_pipeline()
        consumed = self.consumed_samples or []
        if len(consumed) > 3 or any(count < 0 for count in consumed):
            raise ConfigurationError(
                f"consumed_samples={consumed} must be up to three numbers, each at least 0, for "
                "training, validation and test."
            )
        self._warn_about_options_without_effect()
        self._check_functions()
        _check_other(self.other_megatron_args or {})
        if (cp := self.context_parallel_size or 1) > 1:
            raise ConfigurationError(
                f"context_parallel_size={cp} is not supported, not even with Transformer Engine. "
                f"{self._instead_of_context_parallel(cp)}"
            )

    def _instead_of_context_parallel(self, cp: int) -> str:
        """Return a sentence about backends that accept all that is requested."""
        sizes = self.sizes()
        if sizes.pp > 1 or sizes.ep > 1:
            return "No other backend supports it with a pipeline or experts on several ranks."
        tp = f", tp_size={sizes.tp}" if sizes.tp > 1 else ""
        text = f"Use backend='fsdp2' with ParallelismConfig(cp_size={cp}{tp}) or sp_size={cp}"
        return f"{text}." if tp else f"{text}, or 'deepspeed' with sp_size={cp}."

    def _resolve_attention(self) -> None:
        given = self.attention_backend
        if given is None:
            return
        text = str(getattr(given, "name", given)).lower()  # megatron-core's AttnBackend has a name
        flag = parse_bool(text)
        self.attention_backend = text
        if flag is not None:
            self.attention_backend = "auto" if flag else "unfused"
        if self.attention_backend not in _ATTENTION:
            raise ConfigurationError(
                f"attention_backend={given!r} is not a valid value. Allowed values are "
                f"{listing(_ATTENTION)}, True and False.{did_you_mean(text, _ATTENTION)}"
            )
        if self.attention_backend in ("flash", "fused") and not has_transformer_engine():
            raise ConfigurationError(
                f"attention_backend={self.attention_backend!r} needs Transformer Engine, which is not "
                "installed. Install it with pip install transformer-engine[pytorch], or leave "
                "attention_backend out to use megatron-core's own attention."
            )

    def _resolve_recomputation(self) -> None:
        details = [
            name for name in ("recompute_method", "recompute_num_layers")
            if getattr(self, name) is not None
        ]  # fmt: skip
        if self.recompute_activations:
            if self.recompute_granularity == "full":
                raise ConfigurationError(
                    "recompute_activations=True means recompute_granularity='selective', but "
                    "recompute_granularity is 'full'. Leave one of them out."
                )
            self.recompute_granularity = "selective"
        if details and self.recompute_granularity is None and self.recompute_activations is None:
            self.recompute_granularity = "full"
        if self.recompute_granularity == "full":
            self.recompute_method = self.recompute_method or "uniform"
            self.recompute_num_layers = self.recompute_num_layers or 1
        elif details:
            raise ConfigurationError(
                f"{' and '.join(details)} can only be used with recompute_granularity='full', because "
                "'selective' recomputes attention in each layer. Leave them out, or use 'full'."
            )

    def _resolve_pipeline(self) -> None:
        uneven = self.decoder_last_pipeline_num_layers is not None
        if uneven and self.num_layers_per_virtual_pipeline_stage is not None:
            raise ConfigurationError(
                "decoder_last_pipeline_num_layers makes stages of different lengths, but "
                "num_layers_per_virtual_pipeline_stage needs equal ones. Leave one of them out."
            )

    def _warn_about_options_without_effect(self) -> None:
        for name in ("seq_length", "decoder_seq_length"):
            if getattr(self, name) is not None:
                warn(f"{name} has no effect, because each batch's own length is used.")
        if not self.is_train_batch_min:
            warn("is_train_batch_min has no effect, because each loader has its own batch size.")

    def _check_functions(self) -> None:
        for name in vars(self):
            value = getattr(self, name)
            if not name.startswith("custom_") or name.endswith("_kwargs") or value is None:
                continue
            if not callable(value):
                raise ConfigurationError(f"{name}={value!r} must be a function or a class.")
        if self.custom_train_step_kwargs and self.custom_train_step_class is None:
            raise ConfigurationError(
                "custom_train_step_kwargs need custom_train_step_class, which is not set. Set it, or "
                "leave both out."
            )

    def sizes(self, num_layers: int | None = None) -> Sizes:
        """Return how the run is split.

        Args:
            num_layers: number of layers in the model, from which `vp` is computed. Without it, `vp`
                is 1 even if `num_layers_per_virtual_pipeline_stage` is set.

        Raises:
            ConfigurationError: the number of layers is not divisible into such stages.
        """
        sizes = Sizes(
            self.tp_degree or 1,
            self.pp_degree or 1,
            self.expert_model_parallel_size or 1,
            self.expert_tensor_parallel_size or self.tp_degree or 1,
        )
        return sizes._replace(vp=self.virtual_stages(num_layers, sizes.pp)) if num_layers else sizes

    def virtual_stages(self, num_layers: int, pp: int) -> int:
        """Return the number of stages on each pipeline rank, or 1 without interleaving.

        Raises:
            ConfigurationError: there is no pipeline, or the number of layers is not divisible.
        """
        each = self.num_layers_per_virtual_pipeline_stage
        if each is None:
            return 1
        if pp == 1:
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={each} needs a pipeline, but pp_degree is 1. "
                "Set pp_degree, or leave it out."
            )
        if num_layers % (pp * each):
            raise ConfigurationError(
                f"The number of layers is not divisible: {num_layers} layers / ({pp} stages x "
                f"num_layers_per_virtual_pipeline_stage {each}) = {num_layers / (pp * each):g}. Change "
                "one of them."
            )
        return num_layers // (pp * each)

    def transformer_options(self, sizes: Sizes | None = None) -> dict[str, Any]:
        """Return keyword arguments for megatron-core's `TransformerConfig`, without unset options.

        Args:
            sizes: how the run is split. The default is this plugin's own sizes.
        """
        sizes = sizes or self.sizes()
        attention = self.attention_backend
        if attention is not None:
            attention = _megatron("transformer.enums").AttnBackend[attention]
        options = {
            "num_layers_in_last_pipeline_stage": self.decoder_last_pipeline_num_layers,
            "recompute_granularity": self.recompute_granularity,
            "recompute_method": self.recompute_method,
            "recompute_num_layers": self.recompute_num_layers,
            "attention_backend": attention,
            "attention_dropout": self.attention_dropout,
            "hidden_dropout": self.hidden_dropout,
            "attention_softmax_in_fp32": self.attention_softmax_in_fp32,
            "sequence_parallel": self.sequence_parallelism,
        }
        interleaved = {
            "virtual_pipeline_model_parallel_size": sizes.vp,
            # By default, several messages between two ranks can be mixed up, which gives wrong losses.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
        return {
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "context_parallel_size": 1,
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.etp,
            **{name: value for name, value in options.items() if value is not None},
            **(interleaved if sizes.vp > 1 else {}),
            **(self.other_megatron_args or {}),
        }

    def optimizer_options(self) -> dict[str, Any]:
        """Return keyword arguments for megatron-core's `OptimizerConfig`, except for precision."""
        return {
            "clip_grad": self.gradient_clipping or 0.0,
            "use_distributed_optimizer": bool(self.use_distributed_optimizer),
        }

    def ddp_options(self) -> dict[str, Any]:
        """Return keyword arguments for megatron-core's `DistributedDataParallelConfig`."""
        return {"use_distributed_optimizer": bool(self.use_distributed_optimizer)}

    def check_positions(self, rotary: bool, model: str) -> None:
        """Compare `use_rotary_position_embeddings` with the model's positions.

        Raises:
            ConfigurationError: they differ.
        """
        wanted = self.use_rotary_position_embeddings
        if wanted is not None and wanted != rotary:
            has = "rotary" if rotary else "learned"
            raise ConfigurationError(
                f"use_rotary_position_embeddings={wanted}, but {model} has {has} positions, which "
                "cannot be changed here. Leave it out."
            )


def _megatron(name: str) -> Any:
    """Import a module of megatron-core without its warnings about optional libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def _check_other(given: Mapping[str, Any]) -> None:
    """Check `other_megatron_args`.

    Raises:
        ConfigurationError: an option doesn't exist, has another name here, or is not supported.
    """
    if not given:
        return
    fields = _megatron("transformer.transformer_config").TransformerConfig.__dataclass_fields__
    known = [name for name in fields if not name.startswith("_")]
    for name in given:
        if name in MegatronLMPlugin.__dataclass_fields__ and name not in known:
            raise ConfigurationError(
                f"other_megatron_args: {name!r} is a field of MegatronLMPlugin. Set it there."
            )
        if name in _SET_BY:
            raise ConfigurationError(
                f"other_megatron_args: {name!r} cannot be set here, because it is set by "
                f"{_SET_BY[name]}."
            )
        if name.startswith(("fp8", "fp4", "tp_comm_")):
            raise ConfigurationError(
                f"other_megatron_args: {name!r} is not supported. It is an option of Transformer "
                "Engine's layers, but models here use megatron-core's own."
            )
        if name not in known:
            raise ConfigurationError(
                f"other_megatron_args: megatron-core's TransformerConfig has no field {name!r}."
                f"{did_you_mean(name, known)} Options of a whole model, such as its vocabulary, are "
                f"set in {_PROVIDER} that is passed to prepare."
            )
