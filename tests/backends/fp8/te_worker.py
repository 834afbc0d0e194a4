"""Two ranks: how maximum values are shared, and when a rank can run a forward alone."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import te_on_cpu as cpu
import torch
import torch.distributed as dist
from te_on_cpu import Net, accelerator, batches, prepared, scales, train
from worker import PG_TIMEOUT, RANK, case, run_cases, same_on_ranks, scratch

from accelerate_core.errors import ConfigurationError
from accelerate_fp8 import TERecipeKwargs

te = cpu.use()
quantization = sys.modules["transformer_engine.pytorch.quantization"]
KEPT = {"process_group_timeout": PG_TIMEOUT}
DATA = batches(6, RANK)  # maximum values differ by a factor of two


@case
def maximum_values_are_shared_between_data_ranks() -> None:
    for shared in (True, False):
        with accelerator(TERecipeKwargs(amax_history_len=4, reduce_amax=shared), **KEPT) as one:
            model, optimizer = prepared(one)
            quantization.REDUCED.clear()
            train(one, model, optimizer, DATA[:2])
            assert same_on_ranks(scales(one, model)) is shared
            assert bool(quantization.REDUCED) is shared
            assert ("forward_collectives" in one.precision.needs) is shared


@case
def values_are_reduced_over_the_group_of_the_loss() -> None:
    with accelerator(**KEPT) as one:
        groups = [dist.new_group([rank]) for rank in range(2)]
        one.backend._scopes = {"loss": groups[RANK]}
        model, optimizer = prepared(one)
        train(one, model, optimizer, DATA[:2])
        assert quantization.ENTERED[-1][2] is groups[RANK]
        assert not same_on_ranks(scales(one, model))


@case
def rank_can_evaluate_alone() -> None:
    recipe = TERecipeKwargs(amax_history_len=4, use_autocast_during_eval=True)
    with accelerator(recipe, **KEPT) as one:
        model, optimizer = prepared(one)
        train(one, model, optimizer, DATA[:2])
        model.eval()
        if one.is_main_process:
            with torch.no_grad():
                model(DATA[0])
            one.unwrap_model(model)(DATA[0])  # with gradients on, the library would reduce
        model.train()
        train(one, model, optimizer, DATA[2:4])
        assert same_on_ranks(scales(one, model))


@case
def join_uneven_inputs_is_rejected_if_values_are_shared() -> None:
    for shared in (True, False):
        with accelerator(TERecipeKwargs(amax_history_len=4, reduce_amax=shared), **KEPT) as one:
            model, optimizer = prepared(one)
            message = "join_uneven_inputs does not work with delayed scaling"
            raises = pytest.raises(ConfigurationError, match=message)
            with raises if shared else nullcontext(), one.join_uneven_inputs([model]):
                train(one, model, optimizer, DATA[: 2 if shared else 2 + RANK])


@case
def micro_batches_share_maximum_values_too() -> None:
    with accelerator(gradient_accumulation_steps=2, **KEPT) as one:
        model, optimizer = prepared(one)
        quantization.REDUCED.clear()
        for batch in DATA[:4]:
            with one.accumulate(model):
                train(one, model, optimizer, [batch])
                assert same_on_ranks(scales(one, model))
        assert len(quantization.REDUCED) == 4 * 3  # layers


@case
def each_rank_resumes_with_its_own_scales() -> None:
    recipe = TERecipeKwargs(amax_history_len=4, reduce_amax=False)
    folder = scratch("own")
    with accelerator(recipe, **KEPT) as one:
        model, optimizer = prepared(one)
        train(one, model, optimizer, DATA[:3])
        one.save_state(folder / "state")
        expected = train(one, model, optimizer, DATA[3:]), scales(one, model)
    with accelerator(recipe, **KEPT) as one:
        model, optimizer = prepared(one, Net(seed=1))
        one.load_state(folder / "state")
        assert train(one, model, optimizer, DATA[3:]) == expected[0]
        assert torch.equal(scales(one, model), expected[1])
    assert {file.name for file in (folder / "state").rglob("scales_*")} == {
        "scales_0.safetensors", "scales_1.safetensors",
    }  # fmt: skip


@case
def trains_and_resumes_under_fsdp2_with_activation_checkpointing() -> None:
    from accelerate_core import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
    )  # fmt: skip
    folder = scratch("fsdp2")
    te.CHECKPOINTED.clear()
    with accelerator(fsdp_plugin=plugin, **KEPT) as one:
        model, optimizer = prepared(one)
        losses = train(one, model, optimizer, DATA[:2] * 4)
        assert sum(losses[-2:]) < sum(losses[:2])
        assert te.CHECKPOINTED[0] == {"use_reentrant": False}
        assert same_on_ranks(scales(one, model))
        one.save_state(folder / "state")
        keys = one.get_state_dict(model).keys()
        assert not RANK or not keys
        assert RANK or keys == Net().state_dict().keys()
        expected = train(one, model, optimizer, DATA[2:]), scales(one, model)
    with accelerator(fsdp_plugin=plugin, **KEPT) as one:
        model, optimizer = prepared(one, Net(seed=1))
        one.load_state(folder / "state")
        assert train(one, model, optimizer, DATA[2:]) == expected[0]
        assert torch.equal(scales(one, model), expected[1])


@case
def quantized_weights_are_rejected_by_fsdp2() -> None:
    recipe = TERecipeKwargs(recipe="current", quantized_weights=True)
    with pytest.raises(ConfigurationError, match="not supported by the backend fsdp2"):
        accelerator(recipe, backend="fsdp2", **KEPT)


if __name__ == "__main__":
    run_cases(sys.argv[1:])
