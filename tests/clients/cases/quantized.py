"""8-bit and 4-bit weights with `load_and_quantize_model`, and with `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import running
import torch
from accelerate import init_empty_weights
from accelerate.utils import BnbQuantizationConfig, has_4bit_bnb_layers, load_and_quantize_model
from running import case
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
    set_seed,
)

IDS = torch.tensor([[1, 5, 9, 33, 12], [1, 40, 3, 21, 8]])
#: Accelerate accepts the CPU only as a `torch.device`, not by its name.
CPU = torch.device("cpu")
SPLIT: dict[str, Any] = {
    **dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm"), "cpu"),
    "model.rotary_emb": "cpu",
    "model.layers.1": "disk",
    "lm_head": "cpu",
}


def made() -> Any:
    """Return a model whose layers are wide enough for 4 bits."""
    set_seed(2)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers, pad_token_id=0)).eval()


def asked(model: Any) -> dict[str, Any]:
    """Return facts about a model's weights, and its outputs. It runs twice, which reveals lost weights."""
    model.eval()
    named = dict(model.named_parameters())
    placed = getattr(model, "hf_device_map", {})
    facts = {
        "dtypes": {name: str(one.dtype) for name, one in named.items()},
        "weights": {
            name: float(one.detach().double().norm())
            for name, one in named.items()
            if not one.is_meta and "torchao" not in type(one).__module__
        },
        "kinds": sorted({type(one).__name__ for one in model.modules()}),
        "map": {name: str(device) for name, device in placed.items()},
        "4 bits": has_4bit_bnb_layers(model),
    }
    if {torch.float16, torch.float32} <= {one.dtype for one in named.values()}:
        return facts  # Llama's layers can't run with mixed dtypes
    with torch.no_grad():
        logits, again, plain = (one(input_ids=IDS).logits for one in (model, model, made()))
    assert torch.equal(logits, again)
    assert torch.allclose(logits.float(), plain, atol=0.2)
    if facts["4 bits"] or logits.dtype != torch.float32:
        return facts  # results of kernels for 4 and 16 bits depend on the CPU
    return {**facts, "logits": [float(logits.double().norm()), logits[0, 0, :4]]}


@case(1)
def by_hand(folder: Path) -> Any:
    plain = made()
    # Accelerate can't load safetensors to a `torch.device`.
    torch.save(plain.state_dict(), folder / "weights.bin")
    kinds: dict[str, Any] = {
        "8": {"load_in_8bit": True},
        "8 outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.5, "torch_dtype": "fp32"},
        "8 kept": {
            "load_in_8bit": True,
            "skip_modules": ["mlp", "model.layers.1", "lm_head"],
            "keep_in_fp32_modules": ["input_layernorm", "o_proj"],
        },
        "4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
        "4 nf4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bf16",
        },
        "4 kept": {
            "load_in_4bit": True,
            "torch_dtype": torch.float16,
            "skip_modules": ["self_attn"],
            "keep_in_fp32_modules": ["lm_head", "norm"],
        },
    }
    found = {}
    for name, how in kinds.items():
        with init_empty_weights(include_buffers=False):
            empty = LlamaForCausalLM(plain.config)
        model = load_and_quantize_model(
            empty,
            BnbQuantizationConfig(**how),
            weights_location=str(folder / "weights.bin"),
            device_map={"": CPU},
        )
        found[name] = {
            **asked(model),
            "flags": [model.is_loaded_in_8bit, model.is_loaded_in_4bit],
        }
    return found


@case(1)
def from_pretrained(folder: Path) -> Any:
    """Transformers quantizes, and uses Accelerate for device maps, empty weights and hooks."""
    made().save_pretrained(folder / "saved")
    eight = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"])
    mixed = BitsAndBytesConfig(
        load_in_8bit=True,
        llm_int8_enable_fp32_cpu_offload=True,
        llm_int8_skip_modules=["lm_head", "model.layers.1"],
    )
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    weights = TorchAoConfig(Int8WeightOnlyConfig())
    kinds: dict[str, Any] = {
        "8 cpu": (eight, "cpu"),
        "8 auto": (eight, "auto"),
        "8 and the disk": (mixed, SPLIT),
        "4 cpu": (four, "cpu"),
        "4 auto": (four, "auto"),
        "torchao cpu": (weights, "cpu"),
        "torchao auto": (weights, "auto"),
    }
    found = {}
    for name, (how, device_map) in kinds.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder / "saved",
            quantization_config=how,
            device_map=device_map,
            offload_folder=folder / name,
            dtype=torch.float32,
        )
        found[name] = asked(model)
    return found


running.main()
