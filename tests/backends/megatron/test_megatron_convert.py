"""Models of Transformers that are converted for megatron-core compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import case_names, check_case, run_workers

from accelerate_core.errors import ConfigurationError
from accelerate_megatron.models import (
    conversion_of,
    is_convertible,
    trained_names,
)

WORKER = Path(__file__).parent / "convert_worker.py"
#: Cases that differ with pipelines of tensor parallel ranks, or with more ranks than groups of heads.
ON_FOUR = [
    "tensor_parallel_ranks_compute_the_same_logits_and_gradients",
    "exported_weights_are_identical",
    "a_rank_reads_only_its_shard_of_a_saved_model",
]
CASES = {2: case_names(WORKER), 4: ON_FOUR}


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks, cases in CASES.items() for case in cases]
)
def test_case(runs, ranks, case):
    if ranks not in runs:
        one_thread = {"OMP_NUM_THREADS": "1"}
        runs[ranks] = run_workers(WORKER, ranks, CASES[ranks], timeout=240, env=one_thread)
    check_case(runs[ranks], case)


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 33,
}


def small(kind: str, **given: Any) -> Any:
    config = getattr(transformers, kind)
    return config(**{**SMALL, "max_position_embeddings": 64, **given})


def test_only_known_model_classes_are_convertible() -> None:
    class Own(transformers.LlamaForCausalLM):
        pass

    config = small("LlamaConfig")
    with torch.device("meta"):
        models = {
            True: [
                transformers.LlamaForCausalLM(config),
                transformers.GPT2LMHeadModel(small("GPT2Config")),
            ],
            False: [
                Own(config),
                transformers.LlamaModel(config),
                transformers.LlamaForSequenceClassification(config),
                torch.nn.Linear(2, 2),
            ],
        }
    models[True] += [config, small("MistralConfig")]
    models[False] += [small("Qwen2Config"), small("MixtralConfig"), None]
    for expected, ones in models.items():
        for one in ones:
            assert is_convertible(one) is expected, type(one)
            if not expected:
                with pytest.raises(ConfigurationError, match=r"cannot be converted.*provider"):
                    conversion_of(one)


REFUSED = [
    ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("GPT2Config", {"reorder_and_upcast_attn": True}, "Set it to False"),
    ("GPT2Config", {"add_cross_attention": True}, "add_cross_attention"),
    ("GPT2Config", {"embd_pdrop": 0.2}, r"embd_pdrop=0.2.*resid_pdrop=0.1.*equal"),
    ("GPT2Config", {"activation_function": "gelu_neu"}, "Did you mean 'gelu_new'"),
    ("LlamaConfig", {"attention_bias": True}, r"attention_bias=True.*mlp_bias=False"),
    ("LlamaConfig", {"mlp_bias": True}, r"attention_bias=False.*mlp_bias=True"),
    ("LlamaConfig", {"num_key_value_heads": 3}, "4 is not divisible by 3"),
    ("LlamaConfig", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
    ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'llama3'"),
    (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope types are 'default', 'linear', 'llama3'",
    ),
    (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4096,
            }
        },
        "original_max_position_embeddings=8192",
    ),
    ("MistralConfig", {"sliding_window": 32}, r"sliding_window=32.*64 tokens.*more than 32.*None"),
    ("MistralConfig", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
]


@pytest.mark.parametrize(("kind", "given", "text"), REFUSED, ids=[one[2][:30] for one in REFUSED])
def test_unsupported_configs_are_rejected(kind: str, given: dict[str, Any], text: str) -> None:
    config = small(kind, **given)
    with pytest.raises(ConfigurationError, match=text):
        conversion_of(config)
    assert is_convertible(config)  # the family is known; the error names the setting


@pytest.mark.parametrize(
    ("kind", "given", "tp", "text"),
    [
        (
            "GPT2Config",
            {},
            3,
            r"n_head=4 is not divisible by 3, n_inner=64 is not.*sizes: 1, 2, 4\.",
        ),
        (
            "LlamaConfig",
            {"intermediate_size": 18},
            4,
            r"intermediate_size=18 is not divisible by 4.*: 1, 2\.",
        ),
        (
            "MistralConfig",
            {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 4},
            6,
            r"num_key_value_heads=4 is neither.*6.*: 1, 2, 4\.",
        ),
    ],
)
def test_indivisible_sizes_are_rejected(
    kind: str, given: dict[str, Any], tp: int, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        conversion_of(small(kind, **given), tp)


def test_the_vocabulary_is_padded() -> None:
    conversion = conversion_of(transformers.GPT2Config(), 4)
    assert (conversion.vocab_size, conversion.model["vocab_size"]) == (50257, 50260)
    assert [conversion.padded(rank) for rank in range(4)] == [0, 0, 0, 3]
    # More padding than the last rank has columns.
    tiny = conversion_of(small("GPT2Config", vocab_size=5), 4)
    assert [tiny.padded(rank) for rank in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["GPT2Config", "LlamaConfig", "MistralConfig"])
def test_every_parameter_has_a_name_in_megatron(kind: str, tied: bool) -> None:
    config = small(kind, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    conversion = conversion_of(model, 2)
    names = trained_names(conversion)
    assert set(names) == set(model.state_dict())
    assert set(names.values()) == set(conversion.names())
    if kind != "GPT2Config":
        attention = "model.layers.1.self_attn"
        joined = {names[f"{attention}.{one}_proj.weight"] for one in "qkv"}
        assert joined == {"decoder.layers.1.self_attention.linear_qkv.weight"}
