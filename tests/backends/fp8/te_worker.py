"""Two ranks: whose largest values are shared, and who may run a forward alone."""

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
DATA = batches(6, RANK)  # largest values differ by a factor of two


@case
def largest_values_are_shared_over_ranks_with_different_samples() -> None:
    for shared in (True, False):
        with accelerator(TERecipeKwargs(amax_history_len=4, reduce_amax=shared), **KEPT) as one:
            model, optimizer = prepared(one)
            quantization.REDUCED.clear()
            train(one, model, optimizer, DATA[:2])
            assert same_on_ranks(scales(one, model)) is shared
            assert bool(quantization.REDUCED) is shared
            assert ("forward_collectives" in one.precision.needs) is shared


@case
def the_group_is_that_of_the_ranks_over_which_the_loss_is_summed() -> None:
    with accelerator(**KEPT) as one:
        groups = [dist.new_group([rank]) for rank in range(2)]
        one.backend._scopes = {"loss": groups[RANK]}
        model, optimizer = prepared(one)
        train(one, model, optimizer, DATA[:2])
        assert quantization.ENTERED[-1][2] is groups[RANK]
        assert not same_on_ranks(scales(one, model))


@case
def a_rank_may_evaluate_alone() -> None:
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
def ranks_that_run_out_of_batches_are_refused_where_values_are_shared() -> None:
    for shared in (True, False):
        with accelerator(TERecipeKwargs(amax_history_len=4, reduce_amax=shared), **KEPT) as one:
            model, optimizer = prepared(one)
            refused = pytest.raises(ConfigurationError, match="join_uneven_inputs: with delayed")
            with refused if shared else nullcontext(), one.join_uneven_inputs([model]):
                train(one, model, optimizer, DATA[: 2 if shared else 2 + RANK])


@case
def micro_batches_share_them_too() -> None:
    with accelerator(gradient_accumulation_steps=2, **KEPT) as one:
        model, optimizer = prepared(one)
        quantization.REDUCED.clear()
        for batch in DATA[:4]:
            with one.accumulate(model):
                train(one, model, optimizer, [batch])
                assert same_on_ranks(scales(one, model))
        assert len(quantization.REDUCED) == 4 * 3  # layers


@case
def each_rank_keeps_its_own_scales_and_goes_on() -> None:
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
def under_fsdp2_with_activations_computed_again() -> None:
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
def weights_in_8_bits_are_not_sharded() -> None:
    recipe = TERecipeKwargs(recipe="current", quantized_weights=True)
    with pytest.raises(ConfigurationError, match="fsdp2 shards weights"):
        accelerator(recipe, backend="fsdp2", **KEPT)


if __name__ == "__main__":
    run_cases(sys.argv[1:])
