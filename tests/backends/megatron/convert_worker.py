"""Convert models of Transformers to megatron-core and back, on two and on four ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import cuda_on_cpu
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases, scratch

from accelerate_core.errors import ConfigurationError
from accelerate_megatron.library import imported
from accelerate_megatron.models import (
    Conversion,
    conversion_of,
    export,
    load,
    parameters_of,
    reader,
    trained_names,
)
from accelerate_megatron.models.norms import layer_spec

cuda_on_cpu.install()

LENGTH = 12


def small(kind: type, **given: Any) -> Any:
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4}
    return kind(max_position_embeddings=24, bos_token_id=0, eos_token_id=0, **sizes | given)


def gpt2(**given: Any) -> Any:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(small(GPT2Config, vocab_size=37, **rates | given))


def llama(**given: Any) -> Any:
    sizes = {"vocab_size": 33, "num_key_value_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(small(LlamaConfig, **sizes | given))


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "gpt2": gpt2,
    "gpt2, untied": lambda: gpt2(
        tie_word_embeddings=False, n_inner=24, activation_function="relu", scale_attn_weights=False
    ),
    "llama": lambda: llama(head_dim=8),
    "llama, biases, tied, llama3": lambda: llama(
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        pad_token_id=int(tokens(33)[0, 3]),  # only the head trains its row
        head_dim=8,
        rope_parameters=LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    ),
    "llama, one group, linear": lambda: llama(
        num_key_value_heads=1, rope_parameters={"rope_type": "linear", "factor": 3.0}
    ),
    "mistral": lambda: MistralForCausalLM(
        small(
            MistralConfig,
            vocab_size=34,
            num_key_value_heads=4,
            intermediate_size=20,
            sliding_window=24,
        )
    ),
}


def made(name: str) -> Any:
    """Return the model with random values everywhere, also in biases and norms."""
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) / 4)
    return model.eval()


@contextmanager
def layout(tp: int = 1, pp: int = 1, vp: int = 1) -> Iterator[None]:
    state = imported("parallel_state")
    state.initialize_model_parallel(tp, pp, vp if vp > 1 else None)
    imported("tensor_parallel.random").model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16 calls collectives by names that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
            yield
    finally:
        state.destroy_model_parallel()


def build(conversion: Conversion, tp: int, pp: int = 1, vp: int = 1, **more: Any) -> list[Any]:
    """Return this rank's chunks, with uninitialized values."""
    more = {"use_cpu_initialization": True, "perform_initialization": False} | more
    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if vp > 1:
        parallel["virtual_pipeline_model_parallel_size"] = vp
    config = imported("transformer.transformer_config").TransformerConfig(
        **conversion.transformer, **parallel, pipeline_dtype=torch.float32, **more
    )
    state = imported("parallel_state")
    chunks = []
    for number in range(vp):
        stage = number if vp > 1 else None
        where = {"ignore_virtual": False, "vp_stage": number}
        chunks.append(
            imported("models.gpt.gpt_model").GPTModel(
                config,
                layer_spec(config, stage),
                pre_process=state.is_pipeline_first_stage(**where),
                post_process=state.is_pipeline_last_stage(**where),
                vp_stage=stage,
                **conversion.model,
            )
        )
    return chunks


def tokens(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(vocab_size, (3, LENGTH), generator=generator)


def attributes(parameter: nn.Parameter) -> list[Any]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return [getattr(parameter, name, None) for name in (*names, "allreduce", "shared_embedding")]


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def compare(name: str, tp: int, **more: Any) -> None:
    plain = made(name)
    conversion = conversion_of(plain, tp)
    x = tokens(conversion.vocab_size)
    wanted = plain(x).logits
    size = conversion.vocab_size
    nn.functional.cross_entropy(wanted[:, :-1].reshape(-1, size), x[:, 1:].reshape(-1)).backward()
    with layout(tp):
        (model,) = build(conversion, tp, **more)
        load([model], conversion, reader(plain, ExitStack()))
        (initialised,) = build(conversion, tp, perform_initialization=True, **more)
        for ours, theirs in zip(model.parameters(), initialised.parameters(), strict=True):
            assert attributes(ours) == attributes(theirs)
        if conversion.family != "gpt2":
            rotary = model.rotary_pos_emb
            frequencies = rotary.inv_freq / (rotary.seq_len_interpolation_factor or 1)
            torch.testing.assert_close(frequencies, plain.model.rotary_emb.inv_freq)
        logits = model(x, torch.arange(LENGTH).expand_as(x), None)
        padded = conversion.padded(model.tp_group.rank())
        local = logits.masked_fill(
            torch.arange(logits.size(-1)) >= logits.size(-1) - padded, float("-inf")
        )
        parallel = imported("tensor_parallel")
        loss = parallel.vocab_parallel_cross_entropy(local[:, :-1].contiguous(), x[:, 1:])
        loss.mean().backward()
        whole = parallel.gather_from_tensor_model_parallel_region(logits.detach())
        assert whole.size(-1) == conversion.model["vocab_size"]
        torch.testing.assert_close(whole[..., :size], wanted.detach(), rtol=0, atol=1e-5)
        for parameter in model.parameters():  # megatron does the same at the end of a step
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=model.tp_group)
        gradients = export([model], conversion, master=gradient)
    if RANK == 0:
        for theirs, parameter in plain.named_parameters():
            torch.testing.assert_close(
                gradients[theirs],
                parameter.grad,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, n=theirs: n + m,
            )


@case
def one_rank_computes_the_same_logits_and_gradients() -> None:
    for name in MODELS:
        compare(name, tp=1)


@case
def tensor_parallel_ranks_compute_the_same_logits_and_gradients() -> None:
    # Four ranks are more than there are groups of heads, so they share a group's rows.
    for name in MODELS if SIZE == 2 else ["llama, one group, linear"]:
        compare(name, tp=SIZE)


@case
def sequence_parallel_ranks_compute_the_same_logits_and_gradients() -> None:
    for name in ("gpt2", "llama, biases, tied, llama3"):
        compare(name, tp=2, sequence_parallel=True)


@case
def exported_weights_are_identical() -> None:
    layouts = {2: [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2)], 4: [(2, 2, 1), (2, 2, 2)]}[SIZE]
    for name in MODELS:
        plain = made(name).state_dict()
        for tp, pp, vp in layouts:
            conversion = conversion_of(made(name), tp)
            with layout(tp, pp, vp):
                chunks = build(conversion, tp, pp, vp)
                load(chunks, conversion, reader(plain, ExitStack()))
                own = {one for one, _ in parameters_of(chunks)}
                assert own <= {*trained_names(conversion).values(), "output_layer.weight"}
                back = export(chunks, conversion)
            where = f"{name} {tp, pp, vp}"
            assert set(back) == (set(plain) if RANK == 0 else set()), where
            for key, value in back.items():
                assert torch.equal(value, plain[key]), f"{where} {key}"
            if back and conversion.tied:
                head, embedding = conversion.tied
                assert back[head] is back[embedding]


@case
def a_rank_reads_only_its_shard_of_a_saved_model() -> None:
    for number, name in enumerate(MODELS):
        plain = made(name)
        folder = scratch(f"saved{number}")
        if RANK == 0:
            plain.save_pretrained(folder, max_shard_size="6KB")
            assert len(list(folder.glob("*.safetensors"))) > 1
        dist.barrier()
        conversion = conversion_of(plain, 2)
        count = 0

        class Counted:
            def __init__(self, rows: Any) -> None:
                self.rows, self.get_shape = rows, rows.get_shape

            def __getitem__(self, key: Any) -> torch.Tensor:
                nonlocal count
                given: torch.Tensor = self.rows[key]
                count += given.numel()
                return given

        with layout(2, SIZE // 2), ExitStack() as opened:
            chunks = build(conversion, 2, SIZE // 2)
            read = reader(folder, opened)
            load(chunks, conversion, lambda name, read=read: Counted(read(name)))
            size = sum(one.numel() for chunk in chunks for one in chunk.parameters())
            tables = [
                one for one, _ in parameters_of(chunks) if "word_emb" in one or "output" in one
            ]
            padding = conversion.padded(chunks[0].tp_group.rank()) * len(tables)
            assert count == size - padding * conversion.transformer["hidden_size"], (
                name,
                count,
                size,
            )
            for one, parameter in parameters_of(chunks):
                if one in tables and padding:
                    assert not parameter[-conversion.padded(1) :].any()
            back = export(chunks, conversion)
        for key, value in back.items():
            assert torch.equal(value, plain.state_dict()[key]), key


@case
def errors_name_the_weights_that_do_not_match() -> None:
    conversion = conversion_of(made("llama"), 1)
    with layout():
        chunks = build(conversion, 1)
        name = "model.layers.2.self_attn.k_proj.weight"
        state = made("llama").state_dict()
        wrong = {
            "no tensor 'model.layers.2.self_attn.k_proj.weight'": {
                one: value for one, value in state.items() if one != name
            },
            r"has the shape \(8, 16\).* 16 rows": {**state, name: state[name][:8]},
            r"shape \(.*, 8\) where \(.*, 16\)": {**state, name: state[name][:, :8]},
            "meta": made("llama").to("meta").state_dict(),
        }
        for text, given in wrong.items():
            with pytest.raises(ConfigurationError, match=text):
                load(chunks, conversion, reader(given, ExitStack()))
        with pytest.raises(ConfigurationError, match="know the parameter"):
            conversion.weight("decoder.layers.4.mlp.linear_fc1.weight")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=PG_TIMEOUT))
    run_cases(sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
