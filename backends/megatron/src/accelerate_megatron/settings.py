"""What users may say about Megatron, by the names Hugging Face Accelerate has for it."""

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
#: Fields of Accelerate's with nothing behind them here, and what does it instead.
_REFUSED = {
    "use_custom_fsdp": "backend='fsdp2' shards parameters, with tensor parallelism if asked",
    "optimizer_cpu_offload": "your own optimizer is stepped where its parameters are; backend="
    "'deepspeed' (offload_optimizer_device='cpu') and 'fsdp2' (cpu_offload=True) keep its state in "
    "host memory",
    "overlap_cpu_optimizer_d2h_h2d": "it is a part of optimizer_cpu_offload, which is not offered "
    "either: see backend='deepspeed'",
    "use_precision_aware_optimizer": "it steps with an optimizer of Transformer Engine's instead of "
    "yours; use_distributed_optimizer=True shards the state, which saves memory, too",
    "pipeline_model_parallel_split_rank": "megatron-core no longer splits a pipeline into encoder and "
    f"decoder; {_PROVIDER} that is passed to prepare makes any model",
    "encoder_seq_length": "a batch's own length is taken",
    "tensorboard_dir": "Accelerator(log_with='tensorboard', project_dir=...) and accelerator.log",
    "set_all_logging_options": "Accelerator(log_with=...) and accelerator.log",
    "no_wd_decay_cond": "groups of your optimizer are kept: put those parameters into one with "
    "weight_decay=0",
    "scale_lr_cond": "groups of your optimizer are kept: put those parameters into one with its own lr",
    "lr_mult": "groups of your optimizer are kept: put those parameters into one with its own lr",
    "calculate_per_token_loss": "accelerator.accumulate(model, num_items=...) with the number of labels "
    "that count, (labels[:, 1:] != -100).sum(), is the mean over all tokens",
    "custom_model_provider_function": f"pass the function itself to prepare in the place of a model, "
    f"{_PROVIDER}, and make the optimizer of what prepare returns",
    "custom_prepare_model_function": f"prepare wraps what {_PROVIDER} returns, which is passed to it in "
    "the place of a model",
}

#: Options of megatron-core's that have a name here already, or are not the user's to set.
_SAID_BY = {
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
        "the backend, which the schedule depends on",
    ),
}


class Sizes(NamedTuple):
    """How a run is split.

    Attributes:
        tp: ranks that share each layer.
        pp: stages of the pipeline, each of a rank or of those of `tp`.
        ep: ranks that share the experts.
        etp: ranks that share each expert's layers.
        vp: stages on each rank of the pipeline that take turns; 1 without interleaving.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1


def _of_code(what: str, default: Any = None) -> Any:
    """Declare a field that only a script can fill: a function, a class, their arguments."""
    return option(default=default, help=what, cli=(), key="")


@settings(
    env_prefix="MEGATRON_LM_",
    section="megatron_lm_config",
    argument="megatron_lm_plugin",
    yaml_prefix="megatron_lm_",
)
class MegatronLMPlugin(BackendSettings):
    """Options of megatron-core: how a model is split over ranks, its schedule and its optimizer.

    None is what the model or megatron-core has: no recomputation, one rank along each dimension, the
    dropout and the positions of the model's own config. A field of Accelerate's that nothing here
    stands behind is refused with what does it instead.

    Args:
        tp_degree: ranks that share each layer; or `ParallelismConfig(tp_size=...)`.
        pp_degree: stages of the pipeline; or `ParallelismConfig(pp_size=...)`.
        num_micro_batches: parts that a batch is run in; it divides a data rank's batch.
        gradient_clipping: largest norm of the gradients, applied in a step that the script has not
            clipped itself; None and 0 clip nothing that `clip_grad_norm_` is not called for. The
            Accelerate's default of 1.0, which clips where nothing was asked for, is ignored.
        recompute_activations: compute attention again in backward: `recompute_granularity`
            "selective". With "full" whole layers are: `recompute_num_layers` of each stage ("block")
            or as long a chunk each ("uniform", as is the default, of one layer).
        num_layers_per_virtual_pipeline_stage: interleaved schedule: each rank has several stages of
            so many layers.
        decoder_last_pipeline_num_layers: layers of the last stage; the others share the rest.
        attention_backend: auto, flash, fused, unfused, local; True is auto, False unfused. flash and
            fused need Transformer Engine.
        use_rotary_position_embeddings: only compared with the model's positions.
        consumed_samples: how many samples of `MegatronLMDummyDataLoader`, for training, validation and
            test, an earlier run has used up; `load_state` puts loaders where they were by itself.
        eod_mask_loss: of `MegatronLMDummyDataLoader`, as are `eval_iters`, `eval_interval` and
            `custom_megatron_datasets_provider_function`: `(numbers of samples) -> (train, valid,
            test)`, called on all ranks in the place of `build_datasets`.
        megatron_dataset_flag: without effect: `MegatronLMDummyDataLoader` says it.
        seq_length: without effect, as `decoder_seq_length`: batches have their own length.
        no_load_optim: `load_state` leaves the optimizer as it is; `no_save_optim`: `save_state`
            leaves it out.
        is_train_batch_min: without effect: each loader has its own batch.
        custom_train_step_class: made with the Accelerator, the plugin and
            `custom_train_step_kwargs`; its `get_forward_step_func` is the step of a micro-batch.
        other_megatron_args: further fields of megatron-core's `TransformerConfig`.
        forward_runs_step: Accelerate's form: calling a model in training runs the whole step, and
            `backward`, `step` and `zero_grad` after it do nothing.
        multiply_batch: Accelerate's count: a loader's batch is one micro-batch, and is made
            `num_micro_batches` times as large.

    Raises:
        ConfigurationError: a field that is not offered, or fields that contradict each other.
    """

    tp_degree: int | None = option(
        default=None, help="ranks that share each layer", ge=1, ask="Tensor parallel ranks?"
    )
    pp_degree: int | None = option(
        default=None, help="stages of the pipeline", ge=1, ask="Stages of the pipeline?"
    )
    use_custom_fsdp: bool | None = option(default=None, help="not supported: see backend fsdp2")
    overlap_cpu_optimizer_d2h_h2d: bool | None = option(default=None, help="not supported")
    no_load_optim: bool | None = option(
        default=None, help="loading a checkpoint leaves the optimizer unchanged"
    )
    eod_mask_loss: bool | None = option(
        default=None, help="indexed data: ignore what follows an end of document in the loss"
    )
    no_save_optim: bool | None = option(default=None, help="save checkpoints without the optimizer")
    optimizer_cpu_offload: bool | None = option(default=None, help="not supported")
    use_precision_aware_optimizer: bool | None = option(default=None, help="not supported")
    decoder_last_pipeline_num_layers: int | None = option(
        default=None, help="layers of the last stage; the others share the rest", ge=1
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        default=None,
        help="what to recompute in backward: full (layers) or selective (attention)",
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        default=None, help="with full: chunks of all layers, or only the first ones of a stage"
    )
    recompute_num_layers: int | None = option(
        default=None, help="with full: layers of a chunk, or of a stage", ge=1
    )
    attention_backend: Any = option(
        default=None,
        help="auto, flash, fused, unfused, local; flash and fused need Transformer Engine",
        choices=(*_ATTENTION, "true", "false"),
    )
    expert_model_parallel_size: int | None = option(
        default=None, help="ranks that share the experts", ge=1
    )
    context_parallel_size: int | None = option(
        default=None, help="not supported above 1: see backend fsdp2", ge=1
    )
    attention_dropout: float | None = option(
        default=None, help="dropout of attention; None: the model's", ge=0, le=1
    )
    hidden_dropout: float | None = option(
        default=None, help="dropout of layers' outputs; None: the model's", ge=0, le=1
    )
    attention_softmax_in_fp32: bool | None = option(
        default=None, help="softmax of attention in fp32"
    )
    expert_tensor_parallel_size: int | None = option(
        default=None, help="ranks that share each expert's layers; None: tp_degree", ge=1
    )
    calculate_per_token_loss: bool | None = option(
        default=None, help="not supported: see accumulate(num_items=...)"
    )
    use_rotary_position_embeddings: bool | None = option(
        default=None, help="only checked against the model's positions"
    )
    num_micro_batches: int | None = option(
        default=None,
        help="number of parts that a batch is split into",
        ge=1,
        ask="Micro-batches of a batch?",
    )
    gradient_clipping: float | None = option(
        default=None,
        help="largest norm of the gradients in steps that the script has not clipped; 0: no limit",
        ge=0,
    )
    sequence_parallelism: bool | None = option(
        default=None,
        help="also split activations between layers along the sequence (tp above 1)",
        ask="Share activations between layers along the sequence, too?",
    )
    recompute_activations: bool | None = option(
        default=None,
        help="recompute attention in backward (selective)",
        ask="Compute attention again in backward, for less memory?",
    )
    use_distributed_optimizer: bool | None = option(
        default=None,
        help="share the optimizer's state among data ranks",
        ask="Share the optimizer's state among data ranks?",
    )
    pipeline_model_parallel_split_rank: int | None = option(default=None, help="not supported")
    num_layers_per_virtual_pipeline_stage: int | None = option(
        default=None, help="interleaved schedule: layers of each of a rank's stages", ge=1
    )
    is_train_batch_min: bool = option(default=True, help="no effect")
    train_iters: int | None = option(
        default=None, help="optimizer steps of the whole training, for the schedule", ge=1
    )
    train_samples: int | None = option(
        default=None, help="samples of the whole training, for the schedule", ge=1
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        default="constant", help="how weight decay grows"
    )
    start_weight_decay: float | None = option(
        default=None, help="weight decay at the beginning", ge=0
    )
    end_weight_decay: float | None = option(default=None, help="weight decay at the end", ge=0)
    lr_decay_style: _LR_DECAY = option(default="linear", help="how the learning rate falls")
    lr_decay_iters: int | None = option(
        default=None, help="optimizer steps until min_lr; None: train_iters", ge=1
    )
    lr_decay_samples: int | None = option(
        default=None, help="samples until min_lr; None: train_samples", ge=1
    )
    lr_warmup_iters: int | None = option(default=None, help="optimizer steps of the warm-up", ge=0)
    lr_warmup_samples: int | None = option(default=None, help="samples of the warm-up", ge=0)
    lr_warmup_fraction: float | None = option(
        default=None, help="warm-up as a fraction of the time until min_lr", ge=0, lt=1
    )
    min_lr: float = option(default=0, help="smallest learning rate", ge=0)
    consumed_samples: list[int] | None = option(
        default=None, help="indexed data: samples of train, valid and test that were already used"
    )
    no_wd_decay_cond: Any = _of_code("not supported: give groups of the optimizer a weight decay")
    scale_lr_cond: Any = _of_code("not supported: give groups of the optimizer an lr")
    lr_mult: float = option(default=1.0, help="not supported: give groups of the optimizer an lr")
    megatron_dataset_flag: bool = option(default=False, help="no effect")
    seq_length: int | None = option(default=None, help="no effect", ge=1)
    encoder_seq_length: int | None = option(default=None, help="not supported")
    decoder_seq_length: int | None = option(default=None, help="no effect", ge=1)
    tensorboard_dir: str | None = option(default=None, help="not supported: see log_with")
    set_all_logging_options: bool = option(default=False, help="not supported: see log_with")
    eval_iters: int = option(default=100, help="indexed data: batches of a validation", ge=0)
    eval_interval: int = option(
        default=1000, help="indexed data: optimizer steps from one validation to the next", ge=1
    )
    return_logits: bool = option(default=False, help="steps return logits in addition to the loss")
    custom_train_step_class: Any = _of_code(
        "in the script: a subclass of AbstractTrainStep that runs the forward step"
    )
    custom_train_step_kwargs: dict[str, Any] | None = _of_code(
        "in the script: further arguments of that class"
    )
    custom_model_provider_function: Any = _of_code("not supported: pass the function to prepare")
    custom_prepare_model_function: Any = _of_code("not supported: pass the function to prepare")
    custom_megatron_datasets_provider_function: Any = _of_code(
        "in the script: creates indexed datasets of the given sizes"
    )
    custom_get_batch_function: Any = _of_code("in the script: turns a batch into model inputs")
    custom_loss_function: Any = _of_code("in the script: computes the loss from outputs")
    other_megatron_args: dict[str, Any] | None = option(
        default=None, help="further fields of megatron-core's TransformerConfig", cli=()
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
                raise ConfigurationError(f"{name}={value!r} is not offered: {way}.")
        self._resolve_attention()
        self._resolve_recomputation()
        self._resolve_pipeline()
        consumed = self.consumed_samples or []
        if len(consumed) > 3 or any(count < 0 for count in consumed):
            raise ConfigurationError(
                f"consumed_samples={consumed}: up to three numbers from 0 on, of training, validation "
                "and test."
            )
        self._tell_what_has_no_effect()
        self._check_functions()
        _check_other(self.other_megatron_args or {})
        if (cp := self.context_parallel_size or 1) > 1:
            raise ConfigurationError(
                f"context_parallel_size={cp}: sequences are not shared out here, with Transformer Engine "
                f"either. Use backend='fsdp2' with ParallelismConfig(cp_size={cp}) or sp_size={cp}, or "
                f"'deepspeed' with sp_size={cp}."
            )

    def _resolve_attention(self) -> None:
        given = self.attention_backend
        if given is None:
            return
        text = str(getattr(given, "name", given)).lower()  # megatron-core's AttnBackend has one
        said = parse_bool(text)
        self.attention_backend = text
        if said is not None:
            self.attention_backend = "auto" if said else "unfused"
        if self.attention_backend not in _ATTENTION:
            raise ConfigurationError(
                f"attention_backend={given!r} is not known; allowed are {listing(_ATTENTION)}, True and "
                f"False.{did_you_mean(text, _ATTENTION)}"
            )
        if self.attention_backend in ("flash", "fused") and not has_transformer_engine():
            raise ConfigurationError(
                f"attention_backend={self.attention_backend!r} needs Transformer Engine, which is not "
                "installed here. Install it (pip install transformer-engine[pytorch]), or leave "
                "attention_backend out: 'auto' is megatron-core's own attention then."
            )

    def _resolve_recomputation(self) -> None:
        details = [
            name for name in ("recompute_method", "recompute_num_layers")
            if getattr(self, name) is not None
        ]  # fmt: skip
        if self.recompute_activations:
            if self.recompute_granularity == "full":
                raise ConfigurationError(
                    "recompute_activations=True is recompute_granularity='selective', and 'full' is "
                    "said: leave one of them out."
                )
            self.recompute_granularity = "selective"
        if details and self.recompute_granularity is None and self.recompute_activations is None:
            self.recompute_granularity = "full"
        if self.recompute_granularity == "full":
            self.recompute_method = self.recompute_method or "uniform"
            self.recompute_num_layers = self.recompute_num_layers or 1
        elif details:
            raise ConfigurationError(
                f"{' and '.join(details)} belong to recompute_granularity='full'; 'selective' "
                "recomputes attention in each layer. Leave them out, or say 'full'."
            )

    def _resolve_pipeline(self) -> None:
        uneven = self.decoder_last_pipeline_num_layers is not None
        if uneven and self.num_layers_per_virtual_pipeline_stage is not None:
            raise ConfigurationError(
                "decoder_last_pipeline_num_layers makes stages of unlike length, and "
                "num_layers_per_virtual_pipeline_stage equal ones: leave one of them out."
            )

    def _tell_what_has_no_effect(self) -> None:
        for name in ("seq_length", "decoder_seq_length"):
            if getattr(self, name) is not None:
                warn(f"{name} has no effect: a batch's own length is taken.")
        if not self.is_train_batch_min:
            warn("is_train_batch_min has no effect: each loader has its own batch.")

    def _check_functions(self) -> None:
        for name in vars(self):
            value = getattr(self, name)
            if not name.startswith("custom_") or name.endswith("_kwargs") or value is None:
                continue
            if not callable(value):
                raise ConfigurationError(f"{name}={value!r} must be a function or a class.")
        if self.custom_train_step_kwargs and self.custom_train_step_class is None:
            raise ConfigurationError(
                "custom_train_step_kwargs are arguments of custom_train_step_class, which is not given."
            )

    def sizes(self, num_layers: int | None = None) -> Sizes:
        """Return how the run is split.

        Args:
            num_layers: of the model. `vp` follows from it, so that without it `vp` is 1 even if
                `num_layers_per_virtual_pipeline_stage` is said.

        Raises:
            ConfigurationError: stages of that many layers do not make up the model.
        """
        sizes = Sizes(
            self.tp_degree or 1,
            self.pp_degree or 1,
            self.expert_model_parallel_size or 1,
            self.expert_tensor_parallel_size or self.tp_degree or 1,
        )
        return sizes._replace(vp=self.virtual_stages(num_layers, sizes.pp)) if num_layers else sizes

    def virtual_stages(self, num_layers: int, pp: int) -> int:
        """Return how many stages each rank of the pipeline has; 1 without interleaving.

        Raises:
            ConfigurationError: there is no pipeline, or the layers are no multiple.
        """
        each = self.num_layers_per_virtual_pipeline_stage
        if each is None:
            return 1
        if pp == 1:
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={each} interleaves the stages of a pipeline, "
                "and there is none: set pp_degree, or leave it out."
            )
        if num_layers % (pp * each):
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={each} does not fit: {num_layers} layers / "
                f"({pp} stages x {each}) = {num_layers / (pp * each):g} is not whole."
            )
        return num_layers // (pp * each)

    def transformer_options(self, sizes: Sizes | None = None) -> dict[str, Any]:
        """Return keyword arguments of megatron-core's `TransformerConfig`: those that are said.

        Args:
            sizes: how the run is split, if not by this plugin alone.
        """
        sizes = sizes or self.sizes()
        attention = self.attention_backend
        if attention is not None:
            attention = _megatron("transformer.enums").AttnBackend[attention]
        said = {
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
            # The default sends several messages between one pair at once: wrong losses, no error.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
        return {
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "context_parallel_size": 1,
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.etp,
            **{name: value for name, value in said.items() if value is not None},
            **(interleaved if sizes.vp > 1 else {}),
            **(self.other_megatron_args or {}),
        }

    def optimizer_options(self) -> dict[str, Any]:
        """Return keyword arguments of megatron-core's `OptimizerConfig`, besides those of precision."""
        return {
            "clip_grad": self.gradient_clipping or 0.0,
            "use_distributed_optimizer": bool(self.use_distributed_optimizer),
        }

    def ddp_options(self) -> dict[str, Any]:
        """Return keyword arguments of megatron-core's `DistributedDataParallelConfig`."""
        return {"use_distributed_optimizer": bool(self.use_distributed_optimizer)}

    def check_positions(self, rotary: bool, model: str) -> None:
        """Compare `use_rotary_position_embeddings` with what a model has.

        Raises:
            ConfigurationError: they differ.
        """
        said = self.use_rotary_position_embeddings
        if said is not None and said != rotary:
            has = "rotary" if rotary else "learned"
            raise ConfigurationError(
                f"use_rotary_position_embeddings={said}, and the positions of {model} are {has}: leave "
                "it out, as the model has them already."
            )


def _megatron(name: str) -> Any:
    """Import a module without what it warns about libraries it can do without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


def has_transformer_engine() -> bool:
    """Tell whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def _check_other(given: Mapping[str, Any]) -> None:
    """Refuse further options that megatron-core has not, or that have another name here."""
    if not given:
        return
    fields = _megatron("transformer.transformer_config").TransformerConfig.__dataclass_fields__
    known = [name for name in fields if not name.startswith("_")]
    for name in given:
        if name in MegatronLMPlugin.__dataclass_fields__ and name not in known:
            raise ConfigurationError(
                f"other_megatron_args: {name!r} is a field of MegatronLMPlugin: set it there."
            )
        if name in _SAID_BY:
            raise ConfigurationError(f"other_megatron_args: {name!r} is set by {_SAID_BY[name]}.")
        if name.startswith(("fp8", "fp4", "tp_comm_")):
            raise ConfigurationError(
                f"other_megatron_args: {name!r} is of Transformer Engine's layers; models here have "
                "megatron-core's own."
            )
        if name not in known:
            raise ConfigurationError(
                f"other_megatron_args: {name!r} is no field of megatron-core's TransformerConfig, "
                f"whose fields it takes.{did_you_mean(name, known)} What belongs to a model as a whole, "
                f"such as its vocabulary, stands in {_PROVIDER} that is passed to prepare."
            )


def check_sizes(plugin: MegatronLMPlugin, sizes: Sizes, ranks: int) -> int:
    """Return how many ranks have different samples.

    Raises:
        ConfigurationError: the sizes do not divide the ranks, or a setting needs another one.
    """
    copy = sizes.tp * sizes.pp
    shown = f"tp {sizes.tp} x pp {sizes.pp} = {copy}"
    if ranks % copy:
        raise ConfigurationError(
            f"One copy of the model takes {shown} ranks, and {ranks} ranks / {copy} = "
            f"{ranks / copy:g} is not whole: start a multiple of {copy} processes, or change "
            "tp_degree or pp_degree."
        )
    experts = sizes.ep * sizes.etp * sizes.pp
    if ranks % experts:
        raise ConfigurationError(
            f"The experts take ep {sizes.ep} x etp {sizes.etp} x pp {sizes.pp} = {experts} "
            f"ranks, and {ranks} ranks / {experts} = {ranks / experts:g} is not whole: change "
            "expert_model_parallel_size or expert_tensor_parallel_size."
        )
    if sizes.ep == 1 and plugin.expert_tensor_parallel_size not in (None, sizes.tp):
        raise ConfigurationError(
            f"expert_tensor_parallel_size={sizes.etp} is not tp {sizes.tp}, and without "
            "expert_model_parallel_size megatron-core would leave gradients of experts on some tensor "
            "parallel ranks out: leave it out, or set expert_model_parallel_size."
        )
    if plugin.sequence_parallelism and sizes.tp == 1:
        raise ConfigurationError(
            "sequence_parallelism=True shares activations among the ranks of tp, of which there is one: "
            "set tp_degree, or leave it out."
        )
    for name in ("decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage"):
        if getattr(plugin, name) is not None and sizes.pp == 1:
            raise ConfigurationError(
                f"{name}={getattr(plugin, name)} is of a pipeline, and there is none: set pp_degree, "
                "or leave it out."
            )
    if plugin.num_layers_per_virtual_pipeline_stage is not None:
        _check_interleaved(plugin.num_micro_batches or 1, sizes.pp)
    return ranks // copy


#: Field of `TransformerConfig` -> the size it is divided by, and the setting of that size.
_DIVIDED = {
    "num_attention_heads": ("tp", "tp_degree"),
    "num_query_groups": ("tp", "tp_degree"),
    "ffn_hidden_size": ("tp", "tp_degree"),
    "hidden_size": ("tp", "tp_degree"),
    "num_moe_experts": ("ep", "expert_model_parallel_size"),
}


def check_model(transformer: Mapping[str, Any], sizes: Sizes) -> None:
    """Refuse sizes that do not divide a model, before anything is started.

    Args:
        transformer: keyword arguments of `TransformerConfig`: the model's and those of the plugin.
        sizes: how the run is split.

    Raises:
        ConfigurationError: with the arithmetic.
    """
    for name, (dimension, setting) in _DIVIDED.items():
        by = getattr(sizes, dimension)
        whole = transformer.get(name)
        if whole is not None and whole % by:
            raise ConfigurationError(
                f"{setting}={by} does not divide the model: {name} {whole} / {dimension} {by} = "
                f"{whole / by:g} is not whole; {_divisors(whole)}."
            )
    if sizes.ep > 1 and transformer.get("num_moe_experts") is None:
        raise ConfigurationError(
            f"expert_model_parallel_size={sizes.ep} shares out experts, and the model has none: leave "
            "it out."
        )
    if (
        sizes.tp > 1
        and transformer.get("num_moe_experts")
        and not transformer.get("sequence_parallel")
    ):
        raise ConfigurationError(
            f"tp {sizes.tp} and experts: megatron-core trains them with sequence parallelism alone. Set "
            "sequence_parallelism=True, and sequence_parallel=True in a provider's TransformerConfig."
        )
    layers, last = (
        transformer.get(name) for name in ("num_layers", "num_layers_in_last_pipeline_stage")
    )
    if layers is None:
        return
    at_once = transformer.get("recompute_num_layers")
    here = layers // (sizes.pp * sizes.vp)
    if transformer.get("recompute_method") == "uniform" and at_once and here % at_once:
        raise ConfigurationError(
            f"recompute_num_layers={at_once} does not divide the {here} layers of a stage, which "
            f"recompute_method='uniform' takes so many at a time; {_divisors(here)}."
        )
    if last is not None and sizes.pp > 1:
        rest, stages = layers - last, sizes.pp - 1
        if rest < stages or rest % stages:
            raise ConfigurationError(
                f"decoder_last_pipeline_num_layers={last} does not fit: ({layers} layers - {last}) / "
                f"({sizes.pp} stages - 1) = {rest / stages:g} is not a whole number above 0."
            )
    elif layers % (sizes.pp * sizes.vp):
        parts = f"pp {sizes.pp}" + (f" x vp {sizes.vp}" if sizes.vp > 1 else "")
        raise ConfigurationError(
            f"The layers do not divide into stages: {layers} layers / {parts} = "
            f"{layers / (sizes.pp * sizes.vp):g} is not whole; {_divisors(layers)}. "
            "decoder_last_pipeline_num_layers gives the last stage a number of its own."
        )


def _check_interleaved(num_micro_batches: int, pp: int) -> None:
    if num_micro_batches % pp:
        raise ConfigurationError(
            f"The interleaved schedule runs micro-batches in groups of pp {pp}: num_micro_batches "
            f"{num_micro_batches} / {pp} = {num_micro_batches / pp:g} is not whole."
        )


def check_batch(samples: int, num_micro_batches: int, sizes: Sizes) -> int:
    """Return the samples of a micro-batch.

    Args:
        samples: of one data rank's batch.

    Raises:
        ConfigurationError: the batch, or the schedule, is not divided by these; with the arithmetic.
    """
    if sizes.vp > 1:
        _check_interleaved(num_micro_batches, sizes.pp)
    if samples % num_micro_batches:
        raise ConfigurationError(
            f"A batch of {samples} samples does not divide into micro-batches: {samples} / "
            f"num_micro_batches {num_micro_batches} = {samples / num_micro_batches:g} is not whole; "
            f"{_divisors(samples)}. For the last batch, which is shorter: DataLoader(drop_last=True)."
        )
    return samples // num_micro_batches


def _divisors(whole: int) -> str:
    return f"what divides it: {listing(n for n in range(1, whole + 1) if whole % n == 0)}"
