"""Hugging Face Accelerate's functions for FSDP on two ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import KEPT, fsdp, whole
from small_model import Tower, close, steps
from worker import RANK, case, run_cases, scratch

from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_core.utils import (
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    deepspeed_required,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    load_fsdp_model,
    load_fsdp_optimizer,
    load_state_dict,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

FILES = {
    "FULL_STATE_DICT": {"pytorch_model_fsdp.bin", "optimizer.bin"},
    "SHARDED_STATE_DICT": {"pytorch_model_fsdp_0", "optimizer_0"},
    "": {f"{name}_0_rank{n}.bin" for name in ("pytorch_model_fsdp", "optimizer") for n in (0, 1)},
}


@case
def checkpoint_files_have_accelerates_names_and_training_resumes_from_them() -> None:
    for kind, names in FILES.items():
        folder = scratch(f"accelerate{kind}")
        how = {} if kind else {"use_dcp": False}
        runs = []
        for seed in (0, 1):
            accelerator = fsdp(state_dict_type=kind or "SHARDED_STATE_DICT")
            model = Tower(seed=seed)
            model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            plugin: Any = accelerator.state.fsdp_plugin
            if seed:
                load_fsdp_model(plugin, accelerator, model, folder, **how)
                load_fsdp_optimizer(plugin, accelerator, adam, model, folder, **how)
                assert adam.steps_taken == 0
            else:
                steps(model, adam, accelerator)
                save_fsdp_model(plugin, accelerator, model, folder, **how)
                save_fsdp_optimizer(plugin, accelerator, adam, model, folder, **how)
                dist.barrier()
                assert {path.name for path in folder.iterdir()} == names
                saved = whole(model)
            steps(model, adam, accelerator)
            runs.append(whole(model))
            accelerator.end_training()
        close(*runs)
        if kind == "SHARDED_STATE_DICT":
            merge_fsdp_weights(folder / "pytorch_model_fsdp_0", folder / "merged")
            if RANK == 0:
                close(load_state_dict(folder / "merged" / "model.safetensors"), saved)
    with pytest.raises(CheckpointError, match="use_dcp"):
        load_fsdp_model(plugin, accelerator, model, folder / "nowhere", use_dcp=False)


@case
def functions_for_the_steps_of_prepare() -> None:
    accelerator = fsdp(auto_wrap_policy="size_based_wrap", min_num_params=10)
    plugin = accelerator.state.fsdp_plugin
    model = fsdp2_apply_ac(accelerator, Tower())
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert policy is not None
    assert policy(model.layers[0])
    assert not policy(model.layers)
    model = fsdp2_prepare_model(accelerator, model)
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    full = Tower(seed=3).state_dict()
    fsdp2_load_full_state_dict(accelerator, model, full if RANK == 0 else {})
    close(whole(model), full)
    sgd = torch.optim.SGD([torch.ones(1)])
    sgd.param_groups[0]["params"] = [SimpleNamespace(data_ptr=3)]
    fsdp2_switch_optimizer_parameters(sgd, {3: model.layers[0].weight})
    assert sgd.param_groups[0]["params"] == [model.layers[0].weight]
    names = {"_orig_mod.a.weight": 1, "b._checkpoint_wrapped_module.c": 2, "d._orig_mod": 3}
    assert fsdp2_canonicalize_names(names) == {"a.weight": 1, "b.c": 2, "d": 3}
    assert compile_regions_fsdp2 is compile_regions_deepspeed
    with pytest.raises(ConfigurationError, match="this run is FSDP"):
        deepspeed_required(print)()
    accelerator.end_training()


@case
def tied_weights_stay_tied() -> None:
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2, device="meta")
    )
    model[1].weight = model[0].weight
    model._tied_weights_keys = ["1.weight"]
    make = ensure_weights_retied(lambda one: one.to_empty(device="cpu"), model, "cpu")
    for module in model:
        make(module)
    assert model[0].weight is model[1].weight
    assert model[0].bias is not model[1].bias
    assert not model[1].weight.is_meta


if __name__ == "__main__":
    run_cases()
    dist.barrier()
    KEPT.end_training()
