"""Compilation in place keeps classes, keys and results, and really compiles."""

from __future__ import annotations

import copy
import enum
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_compile import compile_model, compile_regions
from accelerate_compile.recognise import is_compiled_module
from accelerate_core import Accelerator, TorchDynamoPlugin
from accelerate_core.builtin.compiled import canonical_key, strip_compiled, uncompiled
from accelerate_core.errors import ConfigurationError, PluginError
from accelerate_drop_in.models import has_compiled_regions


class Counter:
    """A compiler that counts the graphs it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.out(x), -1)


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dynamo(**fields: Any) -> TorchDynamoPlugin:
    return TorchDynamoPlugin(**{"backend": "eager", **fields})


def registered(compiler: Callable[..., Any]) -> str:
    """Register a compiler with torch and return its name."""
    name = f"compiler_{id(compiler)}"
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(compiler, name=name)
    return name


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    out = model(x)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "EAGER"])
def test_compiled_model_has_the_same_results(backend: str, regional: bool) -> None:
    plain = Net()
    model = copy.deepcopy(plain)
    result = compile_model(model, dynamo(backend=backend, use_regional_compilation=regional))
    assert result is model
    assert type(result) is Net
    assert list(result.state_dict()) == list(plain.state_dict())
    x = torch.randn(5, 4)
    out, grads = gradients(result, x)
    expected, expected_grads = gradients(plain, x)
    torch.testing.assert_close(out, expected)
    assert len(grads) == len(expected_grads) > 0
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class NamedSequential(nn.Sequential):
    pass


@pytest.mark.parametrize(
    "make",
    [
        Net,
        sequential,
        lambda: NamedSequential(*sequential()),
        lambda: nn.Linear(4, 3),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    ],
    ids=["own", "Sequential", "SequentialSubclass", "Linear", "TransformerEncoderLayer"],
)
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_model_runs_a_compiled_graph(make: Any, regional: bool) -> None:
    counter = Counter()
    model = make()
    keys = list(model.state_dict())
    compile_model(model, dynamo(backend=registered(counter), use_regional_compilation=regional))
    x = torch.randn(2, 5, 4)
    out = model(x)
    assert counter.graphs > 0
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(out, strip_compiled(model)(x))


def test_model_inside_of_a_torch_wrapper_is_compiled() -> None:
    counter = Counter()
    model = nn.DataParallel(sequential())
    compile_model(model, dynamo(backend=registered(counter)))
    model(torch.randn(2, 4))
    assert counter.graphs == 1
    assert model._compiled_call_impl is None
    assert is_compiled_module(model)
    assert is_compiled_module(model.module)


def test_repeated_blocks_share_one_graph_and_other_layers_stay_eager() -> None:
    counter = Counter()
    model = compile_regions(Net(depth=12), backend=counter)
    assert [name for name, part in model.named_modules() if is_compiled_module(part)] == [
        *(f"blocks.{i}" for i in range(12)),
        "head",
    ]
    model(torch.randn(2, 4, requires_grad=True))
    assert counter.graphs == 2
    assert has_compiled_regions(model)
    assert not is_compiled_module(model)


def test_repeated_blocks_of_a_torch_class_share_one_graph() -> None:
    counter = Counter()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    compile_regions(model, backend=counter)
    model(torch.randn(2, 5, 8, requires_grad=True))
    assert counter.graphs == 1


def test_blocks_of_more_classes_than_the_graph_limit_are_all_compiled() -> None:
    counter = Counter()
    kinds = [type(f"Seq{i}", (nn.Sequential,), {}) for i in range(12)]
    for i, kind in enumerate(kinds):
        model = kind(nn.Linear(4, 4), *[nn.ReLU()] * i)
        compile_model(model, dynamo(backend=registered(counter)))
        model(torch.randn(2, 4))
    assert counter.graphs == 12


def test_plain_containers_are_not_compiled_as_blocks() -> None:
    levels = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    )
    compile_regions(levels, backend="eager")
    assert is_compiled_module(levels)
    assert not has_compiled_regions(levels)


def test_custom_method_named_compile_is_not_called() -> None:
    class Keras(Head):
        def compile(self, optimizer: str) -> None:  # type: ignore[override]
            raise AssertionError("this method must not be called")

    assert is_compiled_module(compile_model(Keras(), dynamo()))


@pytest.mark.parametrize("fields", [{"backend": "no"}, {"backend": "NO"}, {"backend": None}])
def test_nothing_is_compiled_by_default(fields: dict[str, Any]) -> None:
    model = compile_model(Net(), dynamo(**fields))
    assert not is_compiled_module(model)
    assert not is_compiled_module(compile_model(model, dynamo(disable=True)))


def test_compiler_can_be_an_enum_member() -> None:
    class Backend(str, enum.Enum):  # noqa: UP042  Accelerate's enums look like this
        EAGER = "EAGER"

    assert is_compiled_module(compile_model(Net(), dynamo(backend=Backend.EAGER)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"backend": "inductr"},
            "dynamo_backend='inductr' is not a compiler.*Did you mean 'inductor'",
        ),
        (
            {"backend": "inductor", "mode": "max-autotune", "options": {"a": 1}},
            "Leave one of them out",
        ),
        ({"backend": "tvm", "mode": "max-autotune"}, "'tvm' does not support mode"),
        ({"backend": registered(Counter()), "options": {"a": 1}}, "does not support options"),
    ],
)
def test_impossible_compilation_settings_fail_at_construction(
    fields: dict[str, Any], message: str
) -> None:
    model = Net()
    with pytest.raises(ConfigurationError, match=message):
        compile_model(model, dynamo(**fields))
    assert not is_compiled_module(model)


def test_model_that_the_user_compiled_is_not_compiled_again() -> None:
    net = Net()
    wrapped = torch.compile(net, backend="eager")
    assert compile_model(wrapped, dynamo()) is wrapped
    assert not is_compiled_module(net)
    assert is_compiled_module(wrapped)
    assert not has_compiled_regions(wrapped)
    assert uncompiled(wrapped) is net
    assert uncompiled(net) is net
    assert strip_compiled(wrapped) is net
    assert [canonical_key(key) for key in wrapped.state_dict()] == list(net.state_dict())
    assert canonical_key("module._orig_mod.blocks.0._orig_mod.weight") == "module.blocks.0.weight"
    assert canonical_key("my_orig_mod.weight") == "my_orig_mod.weight"


def test_blocks_that_the_user_compiled_are_kept() -> None:
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    before = list(model.blocks)
    assert has_compiled_regions(model)
    compile_regions(model, backend="eager")
    assert list(model.blocks) == before
    assert all(block._compiled_call_impl is None for block in model.blocks)
    view = strip_compiled(model)
    assert all(type(block) is Block for block in view.blocks)
    assert list(view.state_dict()) == list(Net().state_dict())


@pytest.mark.parametrize("regional", [False, True])
def test_uncompiled_view_shares_its_parameters_with_the_model(regional: bool) -> None:
    counter = Counter()
    model = compile_model(
        Net(), dynamo(backend=registered(counter), use_regional_compilation=regional)
    )
    view = strip_compiled(model)
    assert type(view) is Net
    assert not is_compiled_module(view)
    assert not has_compiled_regions(view)
    for (name, mine), (other, theirs) in zip(
        model.named_parameters(), view.named_parameters(), strict=True
    ):
        assert name == other
        assert mine is theirs
    view(torch.randn(2, 4))
    assert counter.graphs == 0
    model.head.out.bias = nn.Parameter(torch.ones(3))
    assert view.head.out.bias is model.head.out.bias
    assert is_compiled_module(model) or has_compiled_regions(model)


def test_uncompiled_view_keeps_shared_modules_and_patched_methods() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Head()
            self.b = self.a

        def forward(self, x: torch.Tensor) -> Any:
            return self

    model = Tied()
    model.forward = model.forward  # type: ignore[method-assign]
    compile_model(model.a, dynamo())
    view = strip_compiled(model)
    assert view.a is view.b
    assert view.a is not model.a
    assert view.forward(torch.ones(1)) is view


def test_uncompiled_view_of_an_uncompiled_model_is_the_model() -> None:
    model = Net()
    assert strip_compiled(model) is model
    assert not is_compiled_module("text")
    assert not has_compiled_regions(None)


def test_checking_for_compiled_modules_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from accelerate_compile.recognise import is_compiled_module\n"
        "from accelerate_core.builtin.compiled import strip_compiled\n"
        "m = torch.nn.Linear(2, 2)\n"
        "assert strip_compiled(m) is m and not is_compiled_module(m)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_compiler_selected_twice_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_PLUGINS", "torch_compile")
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    assert is_compiled_module(accelerator.prepare(nn.Linear(1, 1)))


def test_compiler_settings_alone_do_not_enable_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    with Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(mode="default")) as accelerator:
        assert not is_compiled_module(accelerator.prepare(Net()))
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    with pytest.raises(ConfigurationError, match="ACCELERATE_DYNAMO_USE_FULLGRAPH sets fullgraph"):
        Accelerator(cpu=True)


def test_compilers_are_selected_like_other_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "torch_compile (accelerate-compile 0.1.0)  (the compiler 'eager' is requested)"
    for arguments in ({"dynamo_backend": "eager"}, {"dynamo_plugin": dynamo()}):
        assert reason in Accelerator(cpu=True, **arguments).explain()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    assert reason in Accelerator(cpu=True).explain()
    assert "torch_compile" not in Accelerator(cpu=True, dynamo_backend="no").explain()
    monkeypatch.setenv("ACCELERATE_DISABLED_PLUGINS", "torch_compile")
    with pytest.raises(PluginError, match="disables the extension plugin 'torch_compile'"):
        Accelerator(cpu=True)
