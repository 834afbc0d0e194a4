"""What FSDP2 does on two and on four ranks. One Accelerator lives on, so that the group does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import GPT, LENGTH, PLAN, loss_of, text
from parity_worker import train
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases, same_on_ranks, scratch

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.errors import (
    AccelerateError,
    CheckpointError,
    ConfigurationError,
    PrepareError,
)
from accelerate_core.utils import (
    GradientAccumulationPlugin,
    TorchTensorParallelConfig,
    load_checkpoint_in_model,
    set_seed,
)
from accelerate_fsdp2 import FullyShardedDataParallelPlugin
from accelerate_fsdp2.testing import enable_cpu_ring_attention

torch.set_num_threads(1)
enable_cpu_ring_attention()
KEPT = Accelerator(cpu=True, backend="fsdp2", process_group_timeout=PG_TIMEOUT)


def fsdp(sizes: dict[str, int] | None = None, plan: Any = None, **options: Any) -> Accelerator:
    """Return an Accelerator; what is no argument of it is the plugin's."""
    plugin = {
        name: options.pop(name)
        for name in list(options)
        if name in FullyShardedDataParallelPlugin.__dataclass_fields__
    }
    config = None
    if sizes:
        handler = TorchTensorParallelConfig(plan=PLAN if plan is None else plan)
        config = ParallelismConfig(
            **{f"{name}_size": size for name, size in sizes.items()}, tp_handler=handler
        )
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        parallelism_config=config,
        process_group_timeout=PG_TIMEOUT,
        **options,
    )


class Tower(nn.Module):
    """Layers in a list, as FSDP2 likes them."""

    def __init__(self, seed: int = 0, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def data(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(rows, 8, generator=generator),
        torch.randn(rows, 8, generator=generator),
    )


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return tensor.chunk(SIZE)[RANK]


def steps(model: nn.Module, optimizer: Any, accelerator: Any = None, count: int = 3) -> None:
    x, y = data()
    for _ in range(count):
        if accelerator is None:
            mse_loss(model(x), y).backward()
        else:
            accelerator.backward(mse_loss(model(mine(x)), mine(y)))
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=name)


def reference(model: nn.Module, make: Callable[..., Any], count: int = 3, **options: Any) -> Any:
    model = copy.deepcopy(model)
    optimizer = make(model.parameters(), **options)
    steps(model, optimizer, count=count)
    return model.state_dict()


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
def parity() -> None:
    expected = train(None)
    for sizes in MESHES[SIZE]:
        told = train(sizes)
        for one, other in zip(expected["losses"], told["losses"], strict=True):
            assert abs(one - other) <= 1e-5, (sizes, expected, told)
        for one, other in zip(expected["norms"], told["norms"], strict=True):
            assert abs(one - other) <= 1e-4 * one, (sizes, expected, told)


@case
def half_precision_is_that_of_ddp() -> None:
    for precision, tolerance in (("bf16", 1e-2), ("fp16", 1e-2)):
        told = train({"dp_shard": SIZE}, mixed_precision=precision)
        other = train({}, backend="ddp", mixed_precision=precision)["losses"]
        for one, two in zip(told["losses"], other, strict=True):
            assert abs(one - two) <= tolerance, (precision, told, other)


@case
def bf16_is_reduced_in_fp32() -> None:
    accelerator = fsdp(mixed_precision="bf16")
    policy = accelerator.fsdp_plugin.precision_policy("bf16")
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


@case
def tokens_are_counted_exactly() -> None:
    """Ragged micro-batches, `num_items`: the gradients of one big batch."""
    x, y = data(8 * SIZE)
    lengths = [1, 3, 2, 2]
    model = Tower()
    plain = copy.deepcopy(model)
    rows, used = [], 0
    for micro in range(2):
        for rank in range(SIZE):
            size = lengths[(micro * 2 + rank) % 4]
            rows.append((micro, rank, slice(used, used + size)))
            used += size
    (mse_loss(plain(x[:used]), y[:used], reduction="sum") / used).backward()
    accelerator = fsdp(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _, rank, part in rows:
        if rank != RANK:
            continue
        with accelerator.accumulate(model, num_items=float(part.stop - part.start)):
            accelerator.backward(mse_loss(model(x[part]), y[part], reduction="sum"))
            if accelerator.sync_gradients:
                got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    close(got, {n: p.grad for n, p in plain.named_parameters()})
    accelerator.end_training()


# --- preparing ------------------------------------------------------------------------------------


@case
def an_optimizer_keeps_what_it_is() -> None:
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
    steps(model, adam)  # it has a state already
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
def only_rank_0_has_the_weights() -> None:
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
def nobody_has_the_weights() -> None:
    folder = scratch("meta")
    accelerator = fsdp()
    model = accelerator.prepare(Tower())
    accelerator.save_state(folder / "state")
    expected = whole(model)
    accelerator.end_training()
    accelerator = fsdp()
    with torch.device("meta"):
        empty = Tower(seed=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = accelerator.prepare(empty)
    assert sum("has no weights yet" in str(one.message) for one in said) == (RANK == 0)
    assert all(bool(p.to_local().isnan().all()) for p in model.parameters())
    accelerator.load_state(folder / "state")
    close(whole(model), expected, atol=0)
    accelerator.end_training()


@case
def buffers_of_models_that_nobody_has() -> None:
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
    with pytest.raises(PrepareError, match=r"The buffer 'turns' .* in no checkpoint"):
        accelerator.prepare(lost)
    accelerator.end_training()


@case
def weights_that_differ_are_sent_or_refused() -> None:
    accelerator = fsdp()
    model = accelerator.prepare(Tower(seed=RANK))
    close(whole(model), Tower(seed=0).state_dict(), atol=0)
    accelerator.end_training()
    accelerator = fsdp(sync_module_states=False)
    with pytest.raises(PrepareError, match=r"of rank 1 are not those of rank 0.*layers\.0\.weight"):
        accelerator.prepare(Tower(seed=RANK))
    model = accelerator.prepare(Tower())
    assert isinstance(model.layers[0].weight, DTensor)
    accelerator.end_training()


@case
def frozen_and_trained_side_by_side() -> None:
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
def options_change_nothing_but_memory() -> None:
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
def compiled_whole_and_by_blocks() -> None:
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
def ties_across_units_are_kept() -> None:
    class Tied(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.layers[1].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(super().forward(x))

    model = Tied()
    expected = reference(model, torch.optim.AdamW, lr=0.01)
    accelerator = fsdp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert model.layers[2].weight is model.layers[0].weight
    steps(model, optimizer, accelerator)
    close(whole(model), expected)
    accelerator.end_training()


@case
def blocks_are_found() -> None:
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
        """Each rank uses another part of it."""

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
    assert len(calls) == 2, "once again in backward"
    accelerator.end_training()


@case
def methods_besides_forward() -> None:
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
def what_stays_whole_is_averaged() -> None:
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
    # The same where only rank 0 has made weights.
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
        """Only the first rank goes through the part that stays whole."""

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
def what_cannot_work_is_refused() -> None:
    accelerator = fsdp()
    mixed = Tower()
    mixed.layers[0].bias.data = mixed.layers[0].bias.data.to(torch.bfloat16)
    with pytest.raises(
        PrepareError, match=r"several dtypes: .*float32 \(weight\).*bfloat16 \(bias\)"
    ):
        accelerator.prepare(mixed)
    model = Tower()
    with pytest.raises(ConfigurationError, match="LBFGS computes over whole parameters"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(PrepareError, match="DistributedDataParallel already"):
        accelerator.prepare(nn.parallel.DistributedDataParallel(Tower()))
    with pytest.raises(ConfigurationError, match=r"no module of class 'Linaer'.*'Linear'"):
        fsdp(transformer_cls_names_to_wrap=["Linaer"]).prepare(Tower())
    with pytest.raises(ConfigurationError, match=r"dp_shard 3 x tp 2 = 6 processes, and \d were"):
        fsdp({"dp_shard": 3, "tp": 2})
    with pytest.raises(ConfigurationError, match="does not divide"):
        fsdp(reshard_after_forward=3).prepare(Tower())
    plan = {"layers.*.fc": "colwise"}
    tp = fsdp({"tp": SIZE}, plan=plan)
    with pytest.raises(ConfigurationError, match=r"names 'layers.\*.fc', which matches no module"):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"layers.*": "colwise"})
    with pytest.raises(ConfigurationError, match=r"cannot divide out_features=9 of 'layers.0'"):
        tp.prepare(Tower(width=9))
    tp = fsdp({"tp": SIZE}, plan={"layers.*": "colwize"})
    with pytest.raises(ConfigurationError, match=r"style 'colwize'.*'colwise'"):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"layers.*": "colwise"}, ignored_modules=r"layers\.1")
    with pytest.raises(PrepareError, match=r"'layers.1.weight' is to stay whole"):
        tp.prepare(Tower())
    tp = fsdp({"tp": SIZE}, plan={"head": "rowwise", "tokens": "rowwise"})
    with pytest.raises(ConfigurationError, match="are one parameter"):
        tp.prepare(GPT(tied=True))
    tp = fsdp({"tp": SIZE}, plan={"head": "colwise_rep", "tokens": "rowwise"})
    tied = tp.prepare(GPT(tied=True))
    assert tied.head.weight is tied.tokens.weight
    with pytest.raises(ConfigurationError, match="needs a plan"):
        fsdp({"tp": SIZE}, plan={}).prepare(nn.Linear(4, 4))


@case
def two_models_cannot_share_a_parameter() -> None:
    accelerator = fsdp()
    one, other = Tower(), Tower()
    other.layers[1].weight = one.layers[2].weight
    with pytest.raises(
        PrepareError, match=r"'layers.1.weight' of Tower is a parameter of Tower, too"
    ):
        accelerator.prepare(one, other)
    accelerator.end_training()


@case
def parts_of_the_mesh_have_names() -> None:
    sizes = {"tp": 2} if SIZE == 2 else {"dp_replicate": 2, "tp": 2}
    accelerator = fsdp(sizes)
    assert accelerator.sub_mesh("tp").size() == 2
    assert accelerator.sub_mesh("dp").size() == accelerator.sub_mesh("dp_cp").size() == SIZE // 2
    assert accelerator.sub_mesh("dp_shard_cp").size() == 1
    assert accelerator.tensor_parallel_rank == RANK % 2
    with pytest.raises(ConfigurationError, match=r"has no 'pp'; it has 'dp_"):
        accelerator.sub_mesh("pp")
    accelerator.end_training()


@case
def ranks_of_one_group_draw_the_same() -> None:
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    accelerator = fsdp(sizes, plan={"layers.*": "colwise_rep"})
    tower = Tower()
    set_seed(3, device_specific=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.prepare(tower)
    assert sum("different random states" in str(one.message) for one in said) == RANK % 2
    drawn = accelerator.communicator.gather_object(torch.rand(4).tolist())
    assert drawn[0] == drawn[1]
    assert SIZE == 2 or (drawn[2] == drawn[3] and drawn[0] != drawn[2])
    accelerator.end_training()


# --- the step -------------------------------------------------------------------------------------


@case
def a_step_without_gradients_is_refused() -> None:
    accelerator = fsdp(gradient_accumulation_steps=2)
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = data()
    before = whole(model)
    with accelerator.no_sync(model):
        accelerator.backward(mse_loss(model(x), y))
        for call in (
            optimizer.step,
            lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
            lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        ):
            with pytest.raises(ConfigurationError, match="under no_sync"):
                call()
    with pytest.raises(ConfigurationError, match="under no_sync"):
        optimizer.step()  # the block is over, and nothing is reduced all the same
    other = Tower(seed=1)
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.backward(mse_loss(other(x), y))
    with accelerator.no_sync(model):
        second.step()  # of another model
    optimizer.zero_grad()  # drops what was not reduced
    accelerator.backward(mse_loss(model(x), y))
    once = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(100 * mse_loss(model(x), y))
    optimizer.zero_grad()
    accelerator.backward(mse_loss(model(x), y))
    close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, once)
    optimizer.zero_grad()
    place = scratch("dropped") / "state"
    accelerator.save_state(place)
    with accelerator.no_sync(model):
        accelerator.backward(100 * mse_loss(model(x), y))
    accelerator.load_state(place)
    accelerator.backward(mse_loss(model(x), y))
    close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, once)
    optimizer.zero_grad()
    with accelerator.accumulate(model):  # the usual no-op
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
    close(whole(model), before, atol=0)
    accelerator.end_training()


@case
def no_communication_before_the_boundary() -> None:
    """Counted: collectives of a micro-batch that is not the last one only gather weights."""
    sizes = {"dp_replicate": 2, "dp_shard": 2} if SIZE == 4 else None
    x, y = data()
    for each_batch, expected in ((False, (False, False)), (True, (True, False))):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
        accelerator = fsdp(sizes, auto_wrap_policy="no_wrap", gradient_accumulation_plugin=plugin)
        model = Tower()
        plain = copy.deepcopy(model)
        model = accelerator.prepare(model)
        for micro in range(2):
            with accelerator.accumulate(model), torch.profiler.profile() as seen:
                accelerator.backward(mse_loss(model(mine(x)), mine(y)))
            names = [event.key for event in seen.key_averages()]
            scattered = any("reduce_scatter" in name for name in names)
            reduced = any(name == "c10d::allreduce_" for name in names)
            if micro == 0:
                assert (scattered, reduced) == expected, names
            else:
                assert (scattered, reduced) == (True, SIZE == 4), names
        mse_loss(plain(x), y).backward()
        got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        close(got, {n: p.grad for n, p in plain.named_parameters()})
        accelerator.end_training()


@case
def an_overflow_on_one_rank_is_everybodys() -> None:
    accelerator = fsdp(mixed_precision="fp16")
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before, scale = whole(model), accelerator.scaler.get_scale()
    x, y = data()
    for clips in (False, True):
        loss = mse_loss(model(x), y)
        accelerator.backward(loss * (float("inf") if RANK == SIZE - 1 else 1.0))
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
    close(whole(model), before, atol=0)
    assert accelerator.scaler.get_scale() == scale / 4
    folder = scratch("scaler")
    accelerator.save_state(folder / "state")
    accelerator.scaler.update(8.0)
    accelerator.load_state(folder / "state")
    assert accelerator.scaler.get_scale() == scale / 4
    accelerator.end_training()


# --- sequences ------------------------------------------------------------------------------------


@case
def logits_may_stay_in_parts() -> None:
    plan = {**PLAN, "head": "colwise_loss"}
    config = ParallelismConfig(
        dp_shard_size=SIZE // 2,
        tp_size=2,
        tp_handler=TorchTensorParallelConfig(plan=plan, loss_parallel=True),
    )
    set_seed(0)
    plain = GPT()
    rows = text(4)
    places = torch.arange(LENGTH).expand(4, -1)
    expected = loss_of(plain, rows[:, :-1], places, rows[:, 1:])
    expected.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    accelerator = Accelerator(cpu=True, parallelism_config=config, process_group_timeout=PG_TIMEOUT)
    model = accelerator.prepare(copy.deepcopy(plain).requires_grad_())
    index, count = accelerator.hooks.data_shard(accelerator)
    part = rows.chunk(count)[index]
    loss = loss_of(model, part[:, :-1], places[: len(part)], part[:, 1:])
    assert isinstance(loss, DTensor)
    accelerator.backward(loss)
    mean = accelerator.reduce(loss.detach(), "mean")
    assert abs(float(mean) - float(expected.detach())) <= 1e-5
    assert accelerator.gather(loss.detach()).numel() == count
    got = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert abs(float(got) - float(norm)) <= 1e-4 * float(norm)
    accelerator.end_training()


@case
def buffers_are_cut_and_given_back() -> None:
    for kind, parts in (("cp", 2 * SIZE), ("sp", SIZE)):
        accelerator = fsdp({kind: SIZE})
        rows = torch.arange(2 * 16).view(2, 16)
        one, other = rows.clone(), rows.clone()
        with accelerator.maybe_context_parallel([one, other], [1, 1], {other}):
            assert one.shape == other.shape == (2, 16 // SIZE)
            seen = accelerator.communicator.gather_object(one[0].tolist())
            assert sorted(chain(*seen)) == list(range(16)), "each position once"
        assert torch.equal(one, rows)
        assert other.shape == (2, 16 // SIZE)
        odd = torch.zeros(2, parts + 1)
        with pytest.raises(ConfigurationError, match=f"multiple of {parts}. Pad it to {2 * parts}"):
            accelerator.maybe_context_parallel([odd], [1]).__enter__()
        with pytest.raises(ConfigurationError, match="needs a gradient"):
            accelerator.maybe_context_parallel([odd.requires_grad_()], [1]).__enter__()
        with pytest.raises(ConfigurationError, match="1 buffers and 2"):
            accelerator.maybe_context_parallel([rows], [1, 1]).__enter__()
        accelerator.end_training()
        # As they are usually made: views of one tensor.
        accelerator = fsdp({kind: SIZE})
        rows = torch.arange(2 * 17).view(2, 17)
        before = rows.clone()
        tokens, labels = rows[:, :-1], rows[:, 1:]
        with accelerator.maybe_context_parallel([tokens, labels], [1, 1]):
            assert torch.equal(labels, tokens + 1)
            assert tokens.shape == (2, 16 // SIZE)
        assert torch.equal(rows, before)
        assert torch.equal(labels, before[:, 1:])
        accelerator.end_training()
    accelerator = fsdp()
    kept = torch.arange(7)
    with accelerator.maybe_context_parallel([kept], [0]):
        assert len(kept) == 7
    accelerator.end_training()


@case
def attention_of_torchs_own_layers() -> None:
    """Inside of MultiheadAttention, and computed again in backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 16)
    expected = layer(x).detach()
    (layer(x).square().sum()).backward()
    grads = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    for again in (False, True):
        accelerator = fsdp({"sp": SIZE}, activation_checkpointing=again)
        model = accelerator.prepare(copy.deepcopy(layer))
        part = x.clone()
        with accelerator.maybe_context_parallel([part], [1]):
            out = model(part)
            accelerator.backward(out.square().sum() * SIZE)  # gradients are averaged
            torch.testing.assert_close(out, expected.chunk(SIZE, 1)[RANK], rtol=0, atol=1e-5)
        close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, grads, atol=1e-4)
        accelerator.end_training()
    accelerator = fsdp({"sp": SIZE})
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    with (
        accelerator.maybe_context_parallel(),
        pytest.raises(ConfigurationError, match="need_weights=False"),
    ):
        attention(x, x, x)
    with (
        pytest.warns(UserWarning, match=r"No scaled_dot_product_attention was called"),
        accelerator.maybe_context_parallel([x.clone()], [1]),
    ):
        pass
    accelerator.end_training()


@case
def heads_that_cannot_be_shared() -> None:
    accelerator = fsdp({"sp": SIZE})
    q = torch.randn(1, 3, 4, 8)
    with (
        accelerator.maybe_context_parallel(),
        pytest.raises(ConfigurationError, match="heads divisible by"),
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    accelerator.end_training()


@case
def ranks_of_one_group_read_the_same() -> None:
    if SIZE == 2:
        meshes = [({"tp": 2}, 1)]
    else:
        meshes = [({"dp_shard": 2, "tp": 2}, 2), ({"dp_replicate": 2, "sp": 2}, 2)]
    for sizes, count in meshes:
        torch.manual_seed(RANK)  # their own generators differ
        accelerator = fsdp(sizes)
        loader = DataLoader(TensorDataset(torch.arange(16)), 2, shuffle=True)
        loader = accelerator.prepare(loader)
        read = accelerator.communicator.gather_object([b.tolist() for (b,) in loader])
        distinct = {str(one) for one in read}
        assert len(distinct) == count, read
        every = [v for one in distinct for batch in eval(one) for v in batch]
        assert sorted(every) == list(range(16)), read
        gathered = accelerator.gather(torch.tensor([RANK]))
        assert len(gathered) == count
        accelerator.end_training()


@case
def a_model_of_transformers_by_its_own_plan() -> None:
    """A small Llama: its layers are the units, its `tp_plan` is the plan, Ulysses shares it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> Any:
        set_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=64, num_hidden_layers=2, num_key_value_heads=4, **sizes)
        )

    def loss_and_norm(model: Any, accelerator: Any) -> tuple[float, float]:
        rows = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(3))
        if accelerator is not None:
            index, count = accelerator.hooks.data_shard(accelerator)
            rows = rows.chunk(count)[index]
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        places = torch.arange(16).expand_as(tokens).clone()
        if accelerator is None:
            loss = loss_of(lambda t, p: model(t, position_ids=p).logits, tokens, places, labels)
            loss.backward()
            return float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        with accelerator.maybe_context_parallel([tokens, labels, places], [1, 1, 1]):
            loss = loss_of(lambda t, p: model(t, position_ids=p).logits, tokens, places, labels)
            accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        return float(accelerator.reduce(loss.detach(), "mean")), float(norm)

    expected = loss_and_norm(make(), None)
    meshes = [{"dp_shard": 2}, {"tp": 2}, {"sp": 2}]
    if SIZE == 4:
        meshes = [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "sp": 2}, {"sp": 4}]
    for sizes in meshes:
        config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
        accelerator = Accelerator(
            cpu=True, parallelism_config=config, process_group_timeout=PG_TIMEOUT
        )
        model = accelerator.prepare(make())
        assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
        assert model.model.layers[0].self_attn.q_proj.weight.to_local().numel() == 1024 // SIZE
        loss, norm = loss_and_norm(model, accelerator)
        assert abs(loss - expected[0]) <= 1e-5, (sizes, loss, expected)
        assert abs(norm - expected[1]) <= 1e-4 * norm, (sizes, norm, expected)
        accelerator.end_training()


# --- keeping --------------------------------------------------------------------------------------


@case
def whole_weights_come_out_on_rank_0() -> None:
    folder = scratch("whole")
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    torch.manual_seed(0)
    original = GPT()
    expected = {n: t.clone() for n, t in original.state_dict().items()}
    accelerator = fsdp(sizes)
    model = accelerator.prepare(original)
    assert accelerator.unwrap_model(model) is model
    state = accelerator.get_state_dict(model)
    if RANK == 0:
        close(state, expected, atol=0)
    else:
        assert state == {}
    accelerator.save_model(model, folder, max_shard_size="10KB")
    accelerator.wait_for_everyone()
    other = GPT()
    load_checkpoint_in_model(other, str(folder))
    close(dict(other.state_dict()), expected, atol=0)
    cleared = accelerator.free_memory(model)
    assert cleared == [None]
    accelerator.end_training()


@case
def a_whole_checkpoint_is_one_of_a_single_process() -> None:
    folder = scratch("full")
    accelerator = fsdp(state_dict_type="FULL_STATE_DICT")
    model = Tower()
    plain = copy.deepcopy(model)
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    steps(model, adam, accelerator)
    accelerator.save_state(folder / "state")
    expected = whole(model)
    steps(model, adam, accelerator)
    accelerator.load_state(folder / "state")
    close(whole(model), expected, atol=0)
    steps(model, adam, accelerator)
    ended = whole(model)
    accelerator.end_training()
    ddp = Accelerator(cpu=True, backend="ddp", process_group_timeout=PG_TIMEOUT)
    plain, adam = ddp.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    ddp.load_state(folder / "state")
    other, sharded = Tower(), fsdp()
    sharded.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
    with pytest.raises(CheckpointError, match=r"not saved in shards.*FULL_STATE_DICT"):
        sharded.load_state(folder / "state")
    steps(plain, adam, ddp)
    close(dict(ddp.unwrap_model(plain).state_dict()), ended)
    ddp.end_training()


@case
def shards_come_back() -> None:
    folder = scratch("sharded")
    for blocking in (True, False):
        accelerator = fsdp()
        model = Tower()
        rate = torch.tensor(0.01)
        model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate))
        steps(model, adam, accelerator)
        place = folder / f"state_{blocking}"
        accelerator.save_state(place, blocking=blocking)
        expected = whole(model)
        steps(model, adam, accelerator)  # while it is written
        ended = whole(model)
        accelerator.wait_for_checkpoint()
        rate.fill_(0.5)
        assert (place / "backend_fsdp2" / ".metadata").exists()
        assert not (place / "model.safetensors").exists()
        accelerator.load_state(place)
        close(whole(model), expected, atol=0)
        assert adam.param_groups[0]["lr"] is rate
        steps(model, adam, accelerator)
        close(whole(model), ended, atol=0)
        adam.optimizer.state[model.layers[0].weight]["history"] = [torch.zeros(1)]
        with pytest.raises(CheckpointError, match=r"keeps 'history' of 0.layers.0.weight"):
            accelerator.save_state(folder / "refused")
        other = Tower(width=4)
        mismatched = fsdp()
        mismatched.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
        with pytest.raises(CheckpointError, match=r"has shape \[8, 8\] there and \[4, 4\] here"):
            mismatched.load_state(place)
        half = Tower().to(torch.bfloat16)
        mismatched = fsdp()
        mismatched.prepare(half, torch.optim.AdamW(half.parameters(), lr=0.01))
        with pytest.raises(
            CheckpointError, match=r"is torch\.float32 there and torch\.bfloat16 here"
        ):
            mismatched.load_state(place)
        accelerator.end_training()


@case
def shards_are_merged_and_hooks_are_heard() -> None:
    import subprocess
    import sys

    from safetensors.torch import load_file

    folder = scratch("merged")
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    torch.manual_seed(0)
    original = GPT(tied=True)
    expected = {n: t.clone() for n, t in original.state_dict().items()}
    accelerator = fsdp(sizes)
    accelerator.prepare(original, torch.optim.AdamW(original.parameters()))
    heard: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], directory: str) -> None:
        heard.append((len(models), len(weights)))
        if RANK == 0:
            with open(f"{directory}/mine.txt", "w") as file:
                file.write("mine")

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(lambda models, directory: heard.append(len(models)))
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    assert heard == [(1, 0), 1]
    assert (folder / "state" / "mine.txt").read_text() == "mine"
    if RANK == 0:
        command = [sys.executable, "-m", "accelerate_core", "merge-weights"]
        for flags, name in (
            ([], "model.safetensors"),
            (["--unsafe_serialization"], "pytorch_model.bin"),
        ):
            subprocess.run(
                [*command, str(folder / "state"), str(folder / "out"), *flags], check=True
            )
            path = folder / "out" / name
            merged = load_file(path) if not flags else torch.load(path)
            close(merged, expected, atol=0)
    accelerator.wait_for_everyone()
    accelerator.end_training()


@case
def a_planted_pickle_runs_nothing() -> None:
    import pickle

    folder = scratch("planted")
    accelerator = fsdp()
    accelerator.prepare(Tower())
    place = folder / "state"
    accelerator.save_state(place)

    class Planted:
        def __reduce__(self) -> Any:
            return (open, (str(folder / "ran"), "w"))

    accelerator.wait_for_everyone()
    if RANK == 0:
        (place / "backend_fsdp2" / ".metadata").write_bytes(pickle.dumps(Planted()))
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="metadata"):
        accelerator.load_state(place, verify=False)
    assert not (folder / "ran").exists()
    accelerator.end_training()


if __name__ == "__main__":
    assert issubclass(CheckpointError, AccelerateError)
    run_cases()
    dist.barrier()
    KEPT.end_training()
