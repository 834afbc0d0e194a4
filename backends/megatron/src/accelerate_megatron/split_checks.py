"""Check that models, batches and ranks can be split by the sizes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_core.plugin import ConfigurationError, listing
from accelerate_megatron.settings import MegatronLMPlugin, Sizes


def check_sizes(plugin: MegatronLMPlugin, sizes: Sizes, ranks: int) -> int:
    """Return the number of ranks that read different samples.

    Raises:
        ConfigurationError: the number of ranks is not divisible by the sizes, or a setting needs
            another one.
    """
    copy = sizes.tp * sizes.pp
    shown = f"tp {sizes.tp} x pp {sizes.pp} = {copy}"
    if ranks % copy:
        raise ConfigurationError(
            f"One copy of the model needs {shown} ranks, but {ranks} ranks / {copy} = "
            f"{ranks / copy:g} is not an integer. Start a multiple of {copy} processes, or change "
            "tp_degree or pp_degree."
        )
    experts = sizes.ep * sizes.etp * sizes.pp
    if ranks % experts:
        raise ConfigurationError(
            f"The experts need ep {sizes.ep} x etp {sizes.etp} x pp {sizes.pp} = {experts} ranks, but "
            f"{ranks} ranks / {experts} = {ranks / experts:g} is not an integer. Change "
            "expert_model_parallel_size or expert_tensor_parallel_size."
        )
    if sizes.ep == 1 and plugin.expert_tensor_parallel_size not in (None, sizes.tp):
        raise ConfigurationError(
            f"expert_tensor_parallel_size={sizes.etp} differs from tp {sizes.tp}. Without "
            "expert_model_parallel_size, megatron-core would ignore the experts' gradients on some "
            "tensor parallel ranks. Leave it out, or set expert_model_parallel_size."
        )
    if plugin.sequence_parallelism and sizes.tp == 1:
        raise ConfigurationError(
            "sequence_parallelism=True splits activations over tensor parallel ranks, but tp_degree is "
            "1. Set tp_degree, or leave it out."
        )
    for name in ("decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage"):
        if getattr(plugin, name) is not None and sizes.pp == 1:
            raise ConfigurationError(
                f"{name}={getattr(plugin, name)} needs a pipeline, but pp_degree is 1. Set pp_degree, "
                "or leave it out."
            )
    if plugin.num_layers_per_virtual_pipeline_stage is not None:
        _check_interleaved(plugin.num_micro_batches or 1, sizes.pp)
    return ranks // copy


#: Field of `TransformerConfig` -> the size by which it must be divisible, and that size's setting.
_DIVIDED = {
    "num_attention_heads": ("tp", "tp_degree"),
    "num_query_groups": ("tp", "tp_degree"),
    "ffn_hidden_size": ("tp", "tp_degree"),
    "hidden_size": ("tp", "tp_degree"),
    "num_moe_experts": ("ep", "expert_model_parallel_size"),
}


def check_model(transformer: Mapping[str, Any], sizes: Sizes) -> None:
    """Check that a model is divisible by the sizes of a run, before anything is started.

    Args:
        transformer: keyword arguments of `TransformerConfig`, from the model and the plugin.
        sizes: how the run is split.

    Raises:
        ConfigurationError: it is not divisible. The message has the arithmetic.
    """
    for name, (dimension, setting) in _DIVIDED.items():
        by = getattr(sizes, dimension)
        whole = transformer.get(name)
        if whole is not None and whole % by:
            raise ConfigurationError(
                f"The model is not divisible by {setting}={by}: {name} {whole} / {dimension} {by} = "
                f"{whole / by:g} is not an integer. {_divisors(whole)}"
            )
    if sizes.ep > 1 and transformer.get("num_moe_experts") is None:
        raise ConfigurationError(
            f"expert_model_parallel_size={sizes.ep} needs a model with experts, but the model has none. "
            "Leave it out."
        )
    if (
        sizes.tp > 1
        and transformer.get("num_moe_experts")
        and not transformer.get("sequence_parallel")
    ):
        raise ConfigurationError(
            f"With tp {sizes.tp}, megatron-core can only train experts with sequence parallelism. Set "
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
            f"A stage has {here} layers, which is not divisible by recompute_num_layers={at_once}, as "
            f"recompute_method='uniform' requires. {_divisors(here)}"
        )
    if last is not None and sizes.pp > 1:
        rest, stages = layers - last, sizes.pp - 1
        if rest < stages or rest % stages:
            raise ConfigurationError(
                f"With decoder_last_pipeline_num_layers={last}, the other layers cannot be split "
                f"evenly: ({layers} layers - {last}) / ({sizes.pp} stages - 1) = {rest / stages:g} is "
                "not an integer greater than 0. Change it."
            )
    elif layers % (sizes.pp * sizes.vp):
        parts = f"pp {sizes.pp}" + (f" x vp {sizes.vp}" if sizes.vp > 1 else "")
        raise ConfigurationError(
            f"The layers cannot be split evenly into stages: {layers} layers / {parts} = "
            f"{layers / (sizes.pp * sizes.vp):g} is not an integer. {_divisors(layers)} Or set the "
            "number of layers in the last stage with decoder_last_pipeline_num_layers."
        )


def _check_interleaved(num_micro_batches: int, pp: int) -> None:
    if num_micro_batches % pp:
        raise ConfigurationError(
            f"The interleaved schedule needs a multiple of pp_degree={pp} micro-batches, but "
            f"num_micro_batches {num_micro_batches} / {pp} = {num_micro_batches / pp:g} is not an "
            "integer. Change num_micro_batches."
        )


def check_batch(samples: int, num_micro_batches: int, sizes: Sizes) -> int:
    """Return the number of samples in a micro-batch.

    Args:
        samples: number of samples in a data rank's batch.

    Raises:
        ConfigurationError: the batch is not divisible, or the schedule doesn't support this number
            of micro-batches. The message has the arithmetic.
    """
    if sizes.vp > 1:
        _check_interleaved(num_micro_batches, sizes.pp)
    if samples % num_micro_batches:
        raise ConfigurationError(
            f"A batch of {samples} samples cannot be split evenly into micro-batches: {samples} / "
            f"num_micro_batches {num_micro_batches} = {samples / num_micro_batches:g} is not an "
            f"integer. {_divisors(samples)} If only the last batch is shorter, use "
            "DataLoader(drop_last=True)."
        )
    return samples // num_micro_batches


def _divisors(whole: int) -> str:
    return f"Valid divisors are {listing(n for n in range(1, whole + 1) if whole % n == 0)}."
