"""GPT-2, Llama and Mistral of Transformers as megatron-core's `GPTModel`: settings and weights.

Based on what the classes of both libraries compute. Transformers is not imported: a model or config
is recognized by its class. Only Transformers' own classes are converted, because the forward pass of
other classes is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional

from accelerate_core.plugin import ConfigurationError, did_you_mean, listing
from accelerate_megatron.models.weights import (
    Read,
    Source,
    Weight,
    collect,
    fill,
    leave_untrained,
    mark,
    parameters_of,
)

_PROVIDER = (
    "pass a provider to prepare() instead, a function of pre_process, post_process and vp_stage "
    "that returns a model of megatron-core"
)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute the approximation of GELU with which GPT-2 was trained."""
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}


@dataclass(frozen=True)
class Conversion:
    """How a Transformers model is built for a given number of tensor parallel ranks.

    Attributes:
        family: "gpt2", "llama" or "mistral".
        tp: the number of tensor parallel ranks.
        transformer: arguments of megatron's `TransformerConfig`, without parallel sizes and precision.
        model: arguments of `GPTModel`, besides the config, the layers and the stage.
        vocab_size: the size without padding; `model["vocab_size"]` includes the padding.
        weights: by megatron's global name with `{}` for the layer, as in the names of the sources.
        tied: the names in Transformers of a head that is the embedding, and of the embedding.
        padding_token: the token whose row of the embedding is not trained.
    """

    family: str
    tp: int
    transformer: dict[str, Any]
    model: dict[str, Any]
    vocab_size: int
    weights: Mapping[str, Weight]
    tied: tuple[str, str] | None = None
    padding_token: int | None = None

    def weight(self, name: str) -> Weight:
        """Return what a parameter is made of; its name counts the layers of all stages.

        Raises:
            ConfigurationError: a `GPTModel` of this conversion has no such parameter.
        """
        # In Transformer Engine the norms are in the linear layer that follows them.
        general = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        general = general.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        number = re.match(r"decoder\.layers\.(\d+)\.", general)
        if number:
            general = f"decoder.layers.{{}}.{general[number.end() :]}"
        found = self.weights.get(general)
        if found is None or (number and int(number[1]) >= self.transformer["num_layers"]):
            raise ConfigurationError(
                f"The conversion of {self.family} models doesn't know the parameter {name!r}."
                f"{did_you_mean(general, self.weights)} To train a model with layers of your own, "
                f"{_PROVIDER}."
            )
        return found.of_layer(int(number[1])) if number else found

    def names(self) -> list[str]:
        """Return the global names of all parameters; a tied head counts as the embedding."""
        layers = range(self.transformer["num_layers"])
        names = [name for name in self.weights if not (self.tied and name == _HEAD)]
        return [
            name.format(number)
            for name in names
            for number in (layers if "{}" in name else range(1))
        ]

    def padded(self, rank: int) -> int:
        """Return the number of padding columns at the end of a tensor parallel rank's logits."""
        share = int(self.model["vocab_size"]) // self.tp
        return min(max((rank + 1) * share - self.vocab_size, 0), share)


_HEAD = "output_layer.weight"


def is_convertible(candidate: object) -> bool:
    """Return whether `conversion_of` accepts it: a language model, or the config of one."""
    return _family(candidate) is not None


def is_config(candidate: object) -> bool:
    """Return whether it is the config of a model that can be converted."""
    return is_convertible(candidate) and not isinstance(candidate, nn.Module)


def of_config(config: Any, seed: int) -> nn.Module:
    """Make a causal language model from a config, with the same weights for the same seed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def conversion_of(candidate: Any, tp: int = 1) -> Conversion:
    """Return how to build a Transformers model in megatron-core on `tp` tensor parallel ranks.

    Args:
        candidate: a GPT-2, Llama or Mistral causal language model, or its config.

    Raises:
        ConfigurationError: megatron-core has no counterpart for the model or for a setting of its
            config, or a size is not divisible by `tp`.
    """
    family = _family(candidate)
    if family is None:
        kind = type(candidate).__name__
        classes = [name for one in _FAMILIES.values() for name in (one.model, one.config)]
        raise ConfigurationError(
            f"A {kind} cannot be converted for megatron-core. Only Transformers' own classes "
            f"{listing(classes)} are converted. For other models (other heads, BERT, T5, mixtures of "
            f"experts, subclasses), {_PROVIDER}."
        )
    config = getattr(candidate, "config", candidate)
    if getattr(config, "quantization_config", None) is not None:
        _refuse(config, "quantization_config", "quantized weights cannot be split and trained")
    made = family.convert(config, tp)
    if isinstance(candidate, nn.Module):
        table: Any = candidate.get_input_embeddings()  # type: ignore[operator]
        return replace(made, padding_token=getattr(table, "padding_idx", None))
    return made


def load(chunks: Sequence[nn.Module], conversion: Conversion, read: Read) -> None:
    """Fill this rank's parameters with Transformers' weights; call it once.

    The parameters may have been made with `perform_initialization=False`.

    Args:
        chunks: this rank's `GPTModel`s, one for each virtual stage.
        read: returns a tensor by its name in Transformers, or what safetensors' `get_slice`
            returns; then a rank reads only its own rows.

    Raises:
        ConfigurationError: a tensor is missing or has a different shape.
    """
    for chunk in chunks:
        group: Any = chunk.tp_group
        for name, parameter in parameters_of([chunk]):
            weight = conversion.weight(name)
            fill(parameter, weight, read, group.rank(), group.size())
            mark(parameter, weight)
        if conversion.padding_token is not None and chunk.pre_process:
            leave_untrained(chunk, conversion.padding_token)


def export(
    chunks: Sequence[nn.Module],
    conversion: Conversion,
    master: Callable[[nn.Parameter], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the state dict of the Transformers model, on the CPU of rank 0; empty on other ranks.

    Every rank must call it. Besides the result, only one tensor at a time is in memory.

    Args:
        chunks: this rank's `GPTModel`s, one for each virtual stage.
        master: returns the float32 values of a parameter of this rank; None: the parameter's own.
    """
    skipped = _HEAD if conversion.tied else None
    result = collect(chunks, conversion.weight, skipped, master)
    if result and conversion.tied:
        head, embedding = conversion.tied
        result[head] = result[embedding]
    return result


def trained_names(conversion: Conversion) -> dict[str, str]:
    """Return, for each parameter of the Transformers model, the megatron parameter it becomes.

    Queries, keys and values become one parameter, as do gate and up; a tied head is the embedding.
    """
    names = {hf: name for name in conversion.names() for hf in conversion.weight(name).names}
    if conversion.tied:
        head, embedding = conversion.tied
        names[head] = names[embedding]
    return names


# --- the families ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    model: str
    config: str
    convert: Callable[[Any, int], Conversion]


def _family(candidate: object) -> _Family | None:
    kind = type(candidate)
    for name, family in _FAMILIES.items():
        if kind.__module__.startswith(f"transformers.models.{name}.") and (
            kind.__name__ in (family.model, family.config)
        ):
            return family
    return None


def _refuse(
    config: Any, setting: str, why: str, way: str | None = None, near: str = ""
) -> NoReturn:
    value = getattr(config, setting, None)
    out = f"{way}, or {_PROVIDER}" if way else _PROVIDER[0].upper() + _PROVIDER[1:]
    raise ConfigurationError(
        f"{type(config).__name__}.{setting}={value!r} has no counterpart in megatron-core: "
        f"{why}.{near} {out}."
    )


def _gpt2(config: Any, tp: int) -> Conversion:
    if config.scale_attn_by_inverse_layer_idx:
        _refuse(config, "scale_attn_by_inverse_layer_idx", "it scales all layers equally")
    if config.reorder_and_upcast_attn:
        why = "it computes attention scores in the model's precision and their softmax in float32"
        _refuse(config, "reorder_and_upcast_attn", why, "Set it to False")
    if config.add_cross_attention:
        _refuse(config, "add_cross_attention", "GPTModel has no encoder to attend to")
    if config.embd_pdrop != config.resid_pdrop:
        why = f"embeddings and layers use the same rate, but resid_pdrop={config.resid_pdrop!r}"
        _refuse(config, "embd_pdrop", why, "Make the two equal")
    hidden, heads = config.n_embd, config.n_head
    inner = config.n_inner if config.n_inner is not None else 4 * hidden
    _divides(config, tp, {"n_head": heads, "n_inner": inner})
    width = hidden // heads
    transformer = {
        **_common(config, config.n_layer, hidden, heads, "activation_function"),
        "num_query_groups": heads,
        "kv_channels": width,
        "ffn_hidden_size": inner,
        "gated_linear_unit": False,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "attention_dropout": config.attn_pdrop,
        "hidden_dropout": config.resid_pdrop,
        # None is one over the square root of the head's width.
        "softmax_scale": None if config.scale_attn_weights else 1.0,
    }
    vocabulary = _padded(config.vocab_size, tp)
    model = {
        "vocab_size": vocabulary,
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    weights = _Weights(tied=config.tie_word_embeddings, transposed=True)
    weights.vocabulary("transformer.wte", "lm_head", config.vocab_size, vocabulary)
    weights.whole("embedding.position_embeddings.weight", "transformer.wpe.weight")
    weights.norm("decoder.final_layernorm", "transformer.ln_f", bias=True)
    ours, theirs = "decoder.layers.{}", "transformer.h.{}"
    weights.norm(f"{ours}.input_layernorm", f"{theirs}.ln_1", bias=True)
    weights.norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2", bias=True)
    attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
    name = f"{theirs}.attn.c_attn"  # queries, keys and values in one tensor
    third = [(name, start * hidden, hidden, 3 * hidden) for start in range(3)]
    weights.columns(f"{attention}.linear_qkv", third, heads, bias=True)
    weights.rows(f"{attention}.linear_proj", f"{theirs}.attn.c_proj", hidden, bias=True)
    one = [(f"{theirs}.mlp.c_fc", 0, inner, inner)]
    weights.columns(f"{mlp}.linear_fc1", one, 1, bias=True)
    weights.rows(f"{mlp}.linear_fc2", f"{theirs}.mlp.c_proj", inner, bias=True)
    return weights.conversion("gpt2", tp, transformer, model, config.vocab_size)


def _llama(config: Any, tp: int) -> Conversion:
    # Mistral has neither of these two.
    bias = bool(getattr(config, "attention_bias", False))
    if bias != bool(getattr(config, "mlp_bias", False)):
        why = (
            "either all of its linear layers have a bias, or none, or only the queries, keys and "
            f"values; here mlp_bias={config.mlp_bias!r}"
        )
        _refuse(config, "attention_bias", why)
    return _rotary(config, tp, "llama", bias)


def _mistral(config: Any, tp: int) -> Conversion:
    window, positions = config.sliding_window, config.max_position_embeddings
    if window is not None and window < positions:
        why = (
            f"the sequences may have {positions} tokens (max_position_embeddings), and its "
            "attention ignores the padding mask if it has a window"
        )
        way = f"If no sequence has more than {window} tokens, the window has no effect: set it to None"
        _refuse(config, "sliding_window", why, way)
    return _rotary(config, tp, "mistral", bias=False)


def _rotary(config: Any, tp: int, family: str, bias: bool) -> Conversion:
    hidden, heads = config.hidden_size, config.num_attention_heads
    groups = config.num_key_value_heads or heads
    inner = config.intermediate_size
    width = config.head_dim or hidden // heads
    if heads % groups:
        raise ConfigurationError(
            f"{type(config).__name__} has num_attention_heads={heads} and num_key_value_heads="
            f"{groups}: the heads that share keys and values must be in equal groups, but {heads} is "
            f"not divisible by {groups}."
        )
    sizes = {"num_attention_heads": heads, "intermediate_size": inner}
    _divides(config, tp, sizes, groups, width)
    transformer = {
        **_common(config, config.num_hidden_layers, hidden, heads, "hidden_act"),
        "num_query_groups": groups,
        "kv_channels": width,
        "ffn_hidden_size": inner,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": bias,
        "add_qkv_bias": bias,
        "attention_dropout": config.attention_dropout or 0.0,
        "hidden_dropout": 0.0,
        "rotary_interleaved": False,
    }
    vocabulary = _padded(config.vocab_size, tp)
    model = {
        "vocab_size": vocabulary,
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        **_rope(config),
    }
    weights = _Weights(tied=config.tie_word_embeddings)
    weights.vocabulary("model.embed_tokens", "lm_head", config.vocab_size, vocabulary)
    weights.norm("decoder.final_layernorm", "model.norm")
    ours, theirs = "decoder.layers.{}", "model.layers.{}"
    weights.norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm")
    weights.norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm")
    attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
    of_heads = {"q_proj": heads * width, "k_proj": groups * width, "v_proj": groups * width}
    sources = [(f"{theirs}.self_attn.{name}", 0, n, n) for name, n in of_heads.items()]
    weights.columns(f"{attention}.linear_qkv", sources, groups, bias)
    name = f"{theirs}.self_attn.o_proj"
    weights.rows(f"{attention}.linear_proj", name, heads * width, bias)
    gated = [(f"{theirs}.mlp.{name}", 0, inner, inner) for name in ("gate_proj", "up_proj")]
    weights.columns(f"{mlp}.linear_fc1", gated, tp, bias)
    weights.rows(f"{mlp}.linear_fc2", f"{theirs}.mlp.down_proj", inner, bias)
    return weights.conversion(family, tp, transformer, model, config.vocab_size)


_FAMILIES = {
    "gpt2": _Family("GPT2LMHeadModel", "GPT2Config", _gpt2),
    "llama": _Family("LlamaForCausalLM", "LlamaConfig", _llama),
    "mistral": _Family("MistralForCausalLM", "MistralConfig", _mistral),
}

# --- settings -------------------------------------------------------------------------------------


def _common(config: Any, layers: int, hidden: int, heads: int, activation: str) -> dict[str, Any]:
    name = getattr(config, activation)
    if name not in _ACTIVATIONS:
        why = f"it has {listing(_ACTIVATIONS)}"
        _refuse(config, activation, why, near=did_you_mean(str(name), _ACTIVATIONS))
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "activation_func": _ACTIVATIONS[name],
        "init_method_std": config.initializer_range,
    }


def _rope(config: Any) -> dict[str, Any]:
    """Return the arguments of GPTModel for the config's frequencies of rotary positions."""
    rope: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise ConfigurationError(
            f"{type(config).__name__} has rope_parameters={rope!r} without 'rope_theta', which is "
            "required. Configs of Transformers 5 and later have it."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(config, "rope_parameters", "in these families the whole head is rotated")
    made = {"rotary_base": rope["rope_theta"], "rotary_percent": 1.0}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return made
    if kind == "linear":
        return {**made, "seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "llama3":
        wanted = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        other = {name: rope.get(name) for name in wanted if rope.get(name) != wanted[name]}
        if other:
            fixed = ", ".join(f"{name}={value}" for name, value in wanted.items())
            _refuse(config, "rope_parameters", f"its llama3 scaling is fixed at {fixed}")
        return {**made, "rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    known = ("default", "linear", "llama3")
    why = f"its rope types are {listing(known)}"
    _refuse(config, "rope_parameters", why, near=did_you_mean(kind, known))


def _padded(vocab_size: int, tp: int) -> int:
    return -(-vocab_size // tp) * tp


def _divides(
    config: Any, tp: int, sizes: Mapping[str, int], groups: int | None = None, width: int = 1
) -> None:
    """Reject sizes that cannot be split across the tensor parallel ranks.

    Args:
        groups: the number of groups of heads: a rank has several groups, or several ranks have one.
        width: the width of a head.
    """

    def fits(ranks: int) -> bool:
        if any(size % ranks for size in sizes.values()):
            return False
        # Ranks that share a group split its rows of queries, keys and values.
        few = groups is not None and ranks % groups == 0 and 2 * groups * width % ranks == 0
        return groups is None or groups % ranks == 0 or few

    if fits(tp):
        return
    told = [f"{name}={n} is not divisible by {tp}" for name, n in sizes.items() if n % tp]
    told = told or [f"num_key_value_heads={groups} is neither a multiple nor a divisor of {tp}"]
    allowed = [str(ranks) for ranks in range(1, min(sizes.values()) + 1) if fits(ranks)]
    raise ConfigurationError(
        f"A {type(config).__name__} cannot be split across {tp} tensor parallel ranks: "
        f"{', '.join(told)}. Possible sizes: {', '.join(allowed)}."
    )


# --- weights --------------------------------------------------------------------------------------


class _Weights:
    """The weights of a family, module by module.

    Args:
        tied: whether the head is the embedding.
        transposed: whether linear layers are stored with the inputs first.
    """

    def __init__(self, *, tied: bool, transposed: bool = False) -> None:
        self.made: dict[str, Weight] = {}
        self.tied = tied
        self.transposed = transposed
        self.names: tuple[str, str] = ("", "")

    def vocabulary(self, embedding: str, head: str, size: int, padded: int) -> None:
        """Add the embedding and the head, which are both split by rows."""
        self.names = (f"{head}.weight", f"{embedding}.weight")
        source = embedding if self.tied else head
        for name, theirs in (("embedding.word_embeddings", embedding), ("output_layer", source)):
            one = Source(f"{theirs}.weight", 0, size, size)
            self.made[f"{name}.weight"] = Weight((one,), 0, padded)

    def whole(self, name: str, theirs: str) -> None:
        """Add a parameter that every tensor parallel rank has."""
        self.made[name] = Weight((Source(theirs, 0, 0, 0),))

    def norm(self, name: str, theirs: str, bias: bool = False) -> None:
        """Add a norm's parameters."""
        for leaf in ("weight", "bias") if bias else ("weight",):
            self.whole(f"{name}.{leaf}", f"{theirs}.{leaf}")

    def columns(
        self, name: str, sources: list[tuple[str, int, int, int]], blocks: int, bias: bool
    ) -> None:
        """Add a linear layer whose outputs are split, both weights and biases."""
        size = sum(source[2] for source in sources)
        for leaf in ("weight", "bias") if bias else ("weight",):
            made = tuple(Source(f"{theirs}.{leaf}", *rest) for theirs, *rest in sources)
            transposed = self.transposed and leaf == "weight"
            self.made[f"{name}.{leaf}"] = Weight(made, 0, size, blocks, transposed)

    def rows(self, name: str, theirs: str, size: int, bias: bool) -> None:
        """Add a linear layer whose inputs are split; every rank has its bias."""
        source = Source(f"{theirs}.weight", 0, size, size)
        self.made[f"{name}.weight"] = Weight((source,), 1, size, transposed=self.transposed)
        if bias:
            self.whole(f"{name}.bias", f"{theirs}.bias")

    def conversion(
        self, family: str, tp: int, transformer: dict[str, Any], model: dict[str, Any], size: int
    ) -> Conversion:
        """Return the conversion: these weights and the settings."""
        tied = self.names if self.tied else None
        return Conversion(family, tp, transformer, model, size, self.made, tied)
