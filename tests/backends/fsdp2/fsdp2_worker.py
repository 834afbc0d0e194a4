"""Cases for parity and for `prepare` with FSDP2, on two and on four ranks."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import KEPT, fsdp, whole
from gpt import GPT, LENGTH, PLAN, loss_of, text
from parity_worker import train
from small_model import Tower, close, data, reference, steps
from torch import nn
from torch.distributed.tensor import DTensor
from worker import RANK, SIZE, case, run_cases, same_on_ranks, scratch

from accelerate_core.errors import (
    ConfigurationError,
    PrepareError,
)
from accelerate_core.utils import (
    set_seed,
)

# --- parity ---------------------------------------------------------------------------------------

MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"sp": 2}, {"dp_replicate": 2}],
    4: [
        {"dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_shard": 2, "sp": 2},
    ],
}


@case
def each_mesh_trains_like_one_process() -> None:
    expected = train(None)
    for sizes in MESHES[SIZE]:
        result = train(sizes)
        for one, other in zip(expected["losses"], result["losses"], strict=True):
            assert abs(one - other) <= 1e-5, (sizes, expected, result)
        for one, other in zip(expected["norms"], result["norms"], strict=True):
            assert abs(one - other) <= 1e-4 * one, (sizes, expected, result)


@case
def half_precision_trains_like_ddp() -> None:
    for precision, tolerance in (("bf16", 1e-2), ("fp16", 1e-2)):
        result = train({"dp_shard": SIZE}, mixed_precision=precision)
        other = train({}, backend="ddp", mixed_precision=precision)["losses"]
        for one, two in zip(result["losses"], other, strict=True):
            assert abs(one - two) <= tolerance, (precision, result, other)


@case
def bf16_gradients_are_reduced_in_fp32() -> None:
    accelerator = fsdp(mixed_precision="bf16")
    policy = accelerator.fsdp_plugin.precision_policy(torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert accelerator.distributed_type == "FSDP"
    assert accelerator.is_fsdp2
    model = accelerator.prepare(Tower())
    seen = []
    model.layers[1].register_forward_pre_hook(lambda m, i: seen.append(m.weight.dtype))
    assert model(data()[0]).dtype is torch.float32
    assert seen == [torch.bfloat16]
    assert all(p.dtype is torch.float32 for p in model.parameters()), "shards stay fp32"
    accelerator.end_training()


# --- preparing ------------------------------------------------------------------------------------


@case
def optimizer_keeps_its_groups_options_and_state() -> None:
    model = Tower()
    plain = copy.deepcopy(model)
    adam, other = (
        torch.optim.AdamW(
            [
                {"params": [p for n, p in m.named_parameters() if "weight" in n], "lr": 0.02},
                {"params": [p for n, p in m.named_parameters() if "bias" in n]},
            ],
            lr=0.05,
            weight_decay=0.1,
        )
        for m in (model, plain)
    )
    steps(model, adam)  # so that the optimizer already has a state
    steps(plain, other)
    accelerator = fsdp()
    prepared, wrapped = accelerator.prepare(model, adam)
    assert wrapped.optimizer is adam
    assert [group["lr"] for group in adam.param_groups] == [0.02, 0.05]
    assert all(isinstance(p, DTensor) for g in adam.param_groups for p in g["params"])
    assert all(isinstance(v["exp_avg"], DTensor) for v in adam.state.values())
    steps(prepared, wrapped, accelerator)
    steps(plain, other)
    close(whole(prepared), plain.state_dict())
    later = accelerator.prepare(torch.optim.SGD(prepared.parameters(), lr=0.1))
    steps(prepared, later, accelerator)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    close(whole(prepared), plain.state_dict())
    accelerator.end_training()


@case
def weights_that_only_rank_0_has_are_sent_to_all() -> None:
    if SIZE == 2:
        meshes: list[Any] = [None, {"dp_replicate": 2}, {"tp": 2}]
    else:
        meshes = [None, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}]
    for sizes in meshes:
        torch.manual_seed(0)
        original = GPT(tied=True)
        expected = {n: t.clone() for n, t in original.state_dict().items()}
        if RANK:
            with torch.device("meta"):
                original = GPT(tied=True)
        accelerator = fsdp(sizes, plan=PLAN)
        adam = torch.optim.AdamW(original.parameters(), lr=0.01)
        model, adam = accelerator.prepare(original, adam)
        close(whole(model), expected, atol=0)
        assert model.head.weight is model.tokens.weight
        rows = text(4)
        loss = loss_of(model, rows[:, :-1], torch.arange(LENGTH).expand(4, -1), rows[:, 1:])
        accelerator.backward(loss)
        adam.step()
        accelerator.end_training()


@case
def model_on_meta_on_all_ranks_is_filled_by_load_state() -> None:
    folder = scratch("meta")
    accelerator = fsdp()
    model = accelerator.prepare(Tower())
    accelerator.save_state(folder / "state")
    expected = whole(model)
    accelerator.end_training()
    accelerator = fsdp()
    with torch.device("meta"):
        empty = Tower(seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = accelerator.prepare(empty)
    assert sum("has no weights yet" in str(one.message) for one in caught) == (RANK == 0)
    assert all(bool(p.to_local().isnan().all()) for p in model.parameters())
    accelerator.load_state(folder / "state")
    close(whole(model), expected, atol=0)
    accelerator.end_training()


@case
def buffers_of_models_on_meta_are_kept_or_rejected() -> None:
    class Rotary(Tower):
        def __init__(self, real: bool) -> None:
            super().__init__()
            with torch.device("cpu" if real else "meta"):
                self.register_buffer("turns", torch.arange(8), persistent=False)

    accelerator = fsdp()
    with torch.device("meta"):
        kept, lost = Rotary(True), Rotary(False)
    model = accelerator.prepare(kept)
    assert torch.equal(model.turns, torch.arange(8))
    with pytest.raises(PrepareError, match=r"The buffer 'turns' .* no checkpoint contains"):
        accelerator.prepare(lost)
    accelerator.end_training()


@case
def weights_that_differ_between_ranks_are_rejected_without_sync_module_states() -> None:
    accelerator = fsdp(sync_module_states=False)
    with pytest.raises(PrepareError, match=r"on rank 1 differ from rank 0.*layers\.0\.weight"):
        accelerator.prepare(Tower(seed=RANK))
    model = accelerator.prepare(Tower())
    assert isinstance(model.layers[0].weight, DTensor)
    accelerator.end_training()


@case
def frozen_and_trained_parameters_can_be_in_one_unit() -> None:
    class Adapted(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(3))
            self.b = nn.ModuleList(nn.Linear(2, 8, bias=False) for _ in range(3))
            for layer in self.layers:
                layer.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
                x = torch.tanh(layer(x) + b(a(x)))
            return x

    torch.manual_seed(0)
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = copy.deepcopy(model)
    steps(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01))
    accelerator = fsdp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))
    steps(model, optimizer, accelerator)
    close(whole(model), plain.state_dict())
    accelerator.end_training()


@case
def layers_that_are_unfrozen_later_train_like_on_one_process() -> None:
    """`layers.0` is sharded and `layers.1` is not. Both are frozen when `prepare` is called."""

    def freeze(model: Any, frozen: bool) -> None:
        model.layers[0].requires_grad_(not frozen)
        model.layers[1].requires_grad_(not frozen)

    plain = Tower()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    accelerator = fsdp(ignored_modules="layers.1")
    model = Tower()
    freeze(model, True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for frozen in (True, False, True, False):
        freeze(plain, frozen)
        freeze(model, frozen)
        steps(plain, sgd)
        steps(model, optimizer, accelerator)
        close(whole(model), plain.state_dict())
    model.extra = nn.Linear(8, 8)
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    with pytest.raises(ConfigurationError, match=r"'extra.weight'.*added after prepare"):
        steps(model, optimizer, accelerator)
    accelerator.end_training()


@case
def root_parameters_that_are_unfrozen_later_train_like_on_one_process() -> None:
    """Between forward and backward, the root holds whole parameters, which the user did not add."""

    class Scaled(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.late = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x * self.scale * self.late)

    for options in ({}, {"auto_wrap_policy": "no_wrap"}, {"reshard_after_forward": False}):
        plain, model = Scaled(), Scaled()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        accelerator = fsdp(**options)
        model.late.requires_grad_(False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for frozen in (True, False, True, False):
            for net in (plain, model):
                net.late.requires_grad_(not frozen)
            steps(plain, sgd)
            steps(model, optimizer, accelerator)
            close(whole(model), plain.state_dict())
        accelerator.end_training()


@case
def options_for_memory_do_not_change_weights() -> None:
    expected = reference(Tower(), torch.optim.AdamW, lr=0.01)
    options: list[dict[str, Any]] = [
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"forward_prefetch": True},
        {"reshard_after_forward": False},
        {"auto_wrap_policy": "no_wrap"},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 70},
        {"transformer_cls_names_to_wrap": "Linear"},
        {"auto_wrap_policy": lambda module: isinstance(module, nn.Linear)},
    ]
    if SIZE == 4:
        options.append({"reshard_after_forward": 2})
    for option in options:
        accelerator = fsdp(**option)
        model = Tower()
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        steps(model, optimizer, accelerator)
        close(whole(model), expected)
        accelerator.end_training()


@case
def compiled_models_train_like_uncompiled_ones() -> None:
    from accelerate_core.utils import TorchDynamoPlugin

    expected = reference(Tower(), torch.optim.AdamW, lr=0.01)
    for regional in (False, True):
        accelerator = fsdp(
            dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        )
        model = Tower()
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        steps(model, optimizer, accelerator)
        close(whole(model), expected)
        accelerator.end_training()
        torch._dynamo.reset()


@case
def parameters_tied_across_units_stay_tied() -> None:
    class Tied(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.layers[1].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(super().forward(x))

    class Odd(Tower):
        """One layer shares a parameter with the model itself, another with its own submodule."""

        def __init__(self) -> None:
            super().__init__()
            self.own = self.layers[0].weight
            self.layers.append(Tower())
            self.layers[3].own = self.layers[3].layers[1].weight

    for option in ({}, {"transformer_cls_names_to_wrap": ["Linear", "Tower"]}):
        accelerator = fsdp(**option)
        odd = accelerator.prepare(Odd())
        assert odd.own is odd.layers[0].weight
        assert odd.layers[3].own is odd.layers[3].layers[1].weight
        accelerator.end_training()
    model = Tied()
    expected = reference(model, torch.optim.AdamW, lr=0.01)
    accelerator = fsdp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert model.layers[2].weight is model.layers[0].weight
    steps(model, optimizer, accelerator)
    close(whole(model), expected)
    accelerator.end_training()


@case
def default_units_are_the_members_of_stacks() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ModuleList(
                nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(2)
            )
            self.stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = torch.tanh(part["a"](x) + part["b"](x))
            return self.stack(x)

    class Expert(Tower):
        """Each rank uses another of its layers."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[RANK % 3](x)

    chosen = nn.Sequential(*(Expert(seed=n) for n in range(2)))
    x = data()[0]
    by_hand = chosen(x).detach()
    accelerator = fsdp()
    sharded = accelerator.prepare(chosen)
    torch.testing.assert_close(sharded(x).detach(), by_hand)
    accelerator.end_training()
    calls: list[int] = []
    for option in ({}, {"activation_checkpointing": True}):
        model = Odd()
        expected = reference(model, torch.optim.SGD, lr=0.1)
        accelerator = fsdp(**option)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert type(model.stack[0]).__name__ == "FSDPLinear"
        assert type(model.parts[0]["a"]) is nn.Linear
        steps(model, optimizer, accelerator)
        close(whole(model), expected)
        accelerator.end_training()
    whole_model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    whole_model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    accelerator = fsdp(activation_checkpointing=True)
    model = accelerator.prepare(whole_model)
    accelerator.backward(model(data()[0]).sum())
    assert len(calls) == 2, "called again in backward"
    accelerator.end_training()


@case
def forward_methods_gather_parameters() -> None:
    class Speaks(Tower):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x) + 1

        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0].weight.sum() + self.forward(x).sum()

    x = data()[0]
    expected = Speaks()
    accelerator = fsdp(forward_methods=["score"], auto_wrap_policy="no_wrap")
    model = accelerator.prepare(Speaks())
    with torch.no_grad():
        torch.testing.assert_close(model.generate(x), expected.generate(x))
        torch.testing.assert_close(model.score(x), expected.score(x))
    with pytest.raises(ConfigurationError, match="forward_methods names 'speak'"):
        fsdp(forward_methods="speak").prepare(Tower())
    accelerator.end_training()


@case
def gradients_of_unsharded_parameters_are_averaged() -> None:
    class Scaled(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    expected = reference(Scaled(), torch.optim.SGD, lr=0.1)
    sizes = {"dp_replicate": 2, "dp_shard": 2} if SIZE == 4 else None
    accelerator = fsdp(sizes, ignored_modules=r"layers\.1")
    model = Scaled()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not isinstance(model.layers[1].weight, DTensor)
    steps(model, optimizer, accelerator)
    close(whole(model), expected)
    assert same_on_ranks(model.layers[1].weight.detach())
    accelerator.end_training()
    # The same if only rank 0 has weights.
    accelerator = fsdp(sizes, ignored_modules=r"layers\.1")
    model = Scaled()
    if RANK:
        with torch.device("meta"):
            model = Scaled()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps(model, optimizer, accelerator)
    close(whole(model), expected)
    accelerator.end_training()

    class Sometimes(Tower):
        """Only the first rank calls the unsharded layer."""

        def __init__(self) -> None:
            super().__init__()
            self.extra, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return self.extra(x) if RANK == 0 else x

    accelerator = fsdp(ignored_modules="extra|never")
    model = accelerator.prepare(Sometimes())
    accelerator.backward(model(data()[0]).sum())
    assert same_on_ranks(model.extra.weight.grad)
    assert model.never.weight.grad is None
    with pytest.raises(ConfigurationError, match="matches no module"):
        fsdp(ignored_modules="layer1").prepare(Tower())
    accelerator.end_training()


@case
def unsupported_models_and_settings_are_rejected() -> None:
    accelerator = fsdp()
    mixed = Tower()
    mixed.layers[0].bias.data = mixed.layers[0].bias.data.to(torch.bfloat16)
    with pytest.raises(
        PrepareError, match=r"several dtypes: .*float32 \(weight\).*bfloat16 \(bias\)"
    ):
        accelerator.prepare(mixed)
    model = Tower()
    with pytest.raises(ConfigurationError, match="LBFGS needs whole parameters"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(PrepareError, match="already a DistributedDataParallel"):
        accelerator.prepare(nn.parallel.DistributedDataParallel(Tower()))
    with pytest.raises(ConfigurationError, match=r"no module of class 'Linaer'.*'Linear'"):
        fsdp(transformer_cls_names_to_wrap=["Linaer"]).prepare(Tower())
    with pytest.raises(ConfigurationError, match=r"dp_shard 3 x tp 2 = 6 processes, but \d were"):
        fsdp({"dp_shard": 3, "tp": 2})
    with pytest.raises(ConfigurationError, match="not divisible by reshard_after_forward=3"):
        fsdp(reshard_after_forward=3).prepare(Tower())
    plan = {"layers.*.fc": "colwise"}
    tp = fsdp({"tp": SIZE}, plan=plan)
    with pytest.raises(
        ConfigurationError, match=r"'layers.\*.fc' in the tensor parallel plan matches no module"
    ):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"layers.*": "colwise"})
    with pytest.raises(ConfigurationError, match=r"out_features=9 of 'layers.0' is not divisible"):
        tp.prepare(Tower(width=9))
    tp = fsdp({"tp": SIZE}, plan={"": "colwise", "layers": "colwise"})
    with pytest.raises(ConfigurationError, match="matches no module"):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"layers": "colwise"})
    with pytest.raises(
        ConfigurationError, match="splits 'layers', a ModuleList, but its style only"
    ):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"layers.*": "colwize"})
    with pytest.raises(ConfigurationError, match=r"style 'colwize'.*'colwise'"):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"layers.*": "colwise"}, ignored_modules=r"layers\.1")
    with pytest.raises(
        PrepareError, match=r"'layers.1.weight' is split by the tensor parallel plan, but"
    ):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"head": "rowwise", "tokens": "rowwise"})
    with pytest.raises(ConfigurationError, match="are the same parameter"):
        tp.prepare(GPT(tied=True))
    tp = fsdp({"tp": SIZE}, plan={"head": "colwise_rep", "tokens": "rowwise"})
    tied = tp.prepare(GPT(tied=True))
    assert tied.head.weight is tied.tokens.weight
    with pytest.raises(ConfigurationError, match="needs a plan"):
        fsdp({"tp": SIZE}, plan={}).prepare(nn.Linear(4, 4))


@case
def models_that_share_a_parameter_are_rejected() -> None:
    accelerator = fsdp()
    one, other = Tower(), Tower()
    other.layers[1].weight = one.layers[2].weight
    with pytest.raises(
        PrepareError, match=r"'layers.1.weight' of Tower is also a parameter of Tower"
    ):
        accelerator.prepare(one, other)
    accelerator.end_training()


@case
def sub_meshes_are_available_by_name() -> None:
    sizes = {"tp": 2} if SIZE == 2 else {"dp_replicate": 2, "tp": 2}
    accelerator = fsdp(sizes)
    assert accelerator.sub_mesh("tp").size() == 2
    assert accelerator.sub_mesh("dp").size() == accelerator.sub_mesh("dp_cp").size() == SIZE // 2
    assert accelerator.sub_mesh("dp_shard_cp").size() == 1
    assert accelerator.tensor_parallel_rank == RANK % 2
    with pytest.raises(ConfigurationError, match=r"has no part 'pp'.*'dp_"):
        accelerator.sub_mesh("pp")
    accelerator.end_training()


@case
def ranks_of_the_same_group_draw_the_same_random_numbers() -> None:
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    accelerator = fsdp(sizes, plan={"layers.*": "colwise_rep"})
    tower = Tower()
    set_seed(3, device_specific=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(tower)
    assert sum("different random states" in str(one.message) for one in caught) == RANK % 2
    drawn = accelerator.communicator.gather_object(torch.rand(4).tolist())
    assert drawn[0] == drawn[1]
    assert SIZE == 2 or (drawn[2] == drawn[3] and drawn[0] != drawn[2])
    accelerator.end_training()


@case
def deleted_model_is_freed() -> None:
    accelerator = fsdp()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model, sgd = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(2, 4)).sum())
    sgd.step()
    sgd.zero_grad()
    gone = weakref.ref(model)
    accelerator.free_memory()
    del model, sgd
    gc.collect()
    assert gone() is None
    accelerator.end_training()


if __name__ == "__main__":
    run_cases(sys.argv[1:])
    dist.barrier()
    KEPT.end_training()
