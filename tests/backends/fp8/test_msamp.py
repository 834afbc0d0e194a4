"""fp8 with MS-AMP, against a mock of the library's public API.

These tests do not show that the library itself works. It is no longer maintained, needs CUDA and a
torch from 2023, and cannot be installed here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import case_names, check_case, run_workers
from torch import nn

from accelerate_core import Accelerator, GradScalerKwargs
from accelerate_core.errors import AccelerateError, MissingPluginError
from accelerate_core.utils import FP8RecipeKwargs, MSAMPRecipeKwargs
from accelerate_fp8.msamp import MSAMP
from accelerate_fp8.precision import choose

WORKER = Path(__file__).with_name("msamp_worker.py")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make the mock importable, and return the list of its called functions."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("mock_libraries")))
    monkeypatch.setattr(MSAMP, "devices", ("cpu",))
    import msamp

    yield msamp.calls
    del sys.modules["msamp"], torch.Tensor.cast  # type: ignore[attr-defined]


class Net(nn.Module):
    """A model with a tied layer, one excluded by the user, and layers to convert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 16)
        self.kept = nn.Linear(16, 16)
        self.kept.use_fp32_linear = True  # type: ignore[assignment]
        self.down = nn.Linear(16, 8)
        self.down.role = "down"  # type: ignore[assignment]
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.kept(torch.tanh(self.up(self.embed(tokens))))
        out: torch.Tensor = self.head(self.down(x))
        return out


TOKENS = torch.arange(16)


def msamp_run(**options: Any) -> Accelerator:
    handlers = [MSAMPRecipeKwargs(), *options.pop("more", ())]
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers, **options)


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> float:
    loss = nn.functional.cross_entropy(model(TOKENS), TOKENS.flip(0))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_model_trains_with_the_librarys_objects_and_saves_plain_tensors(
    calls: list[str], tmp_path: Path
) -> None:
    accelerator = msamp_run()
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)
    model, optimizer, scheduler = accelerator.prepare(net, adam, decay)
    assert calls == ["initialize O2"]
    assert type(optimizer.optimizer).__name__ == "LBAdam"
    kinds = {name: type(one).__name__ for name, one in model.named_children()}
    assert kinds == {
        "embed": "Embedding", "up": "FP8Linear", "kept": "Linear", "down": "FP8Linear", "head": "Linear"
    }  # fmt: skip
    assert model.head.weight is model.embed.weight
    assert model.down.role == "down"
    held = [one for group in optimizer.param_groups for one in group["params"]]
    assert {*map(id, held)} == {id(one) for one in model.parameters()}

    losses = []
    for _ in range(20):
        losses.append(step(accelerator, model, optimizer))
        scheduler.step()
    assert losses[-1] < losses[0] / 2
    assert optimizer.param_groups[0]["lr"] < 1e-2 * 0.83
    assert calls.count("step") == 20
    assert "all_reduce_grads" not in calls  # one process
    assert isinstance(accelerator.scaler, torch.amp.GradScaler)

    state = accelerator.get_state_dict(model)
    assert state.keys() == before.keys()
    assert {type(one) for one in state.values()} == {torch.Tensor}
    assert {one.dtype for one in state.values()} == {torch.float32}
    assert all(not torch.equal(one, before[name]) for name, one in state.items())
    accelerator.save_state(tmp_path)
    after = [step(accelerator, model, optimizer) for _ in range(3)]
    accelerator.load_state(tmp_path)  # loads plain tensors into the library's weights
    assert [step(accelerator, model, optimizer) for _ in range(3)] == after
    part = {name: one for name, one in state.items() if name != "up.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*up.weight"):
        accelerator.unwrap_model(model).load_state_dict(part)

    text = accelerator.explain()
    assert "fp8 by MS-AMP: kwargs_handlers has MSAMPRecipeKwargs; opt_level O2" in text
    assert "Net: 2 of 4 linear layers compute in fp8" in text
    assert "shares its weight with embed.weight" in text
    assert "use_fp32_linear" in text
    assert accelerator.state.fp8_backend == "MSAMP"
    accelerator.end_training()


def test_clipping_uses_the_librarys_function(calls: list[str]) -> None:
    with msamp_run() as accelerator:
        net = Net()
        model, _ = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-2))
        accelerator.backward(model(TOKENS).square().sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert calls[-1] == "clip_grad_norm_"
        assert norm > 1.0
        with pytest.raises(
            AccelerateError, match=r"does not support clip_grad_value_\. Use clip_grad_norm_"
        ):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        accelerator.free_memory()
        other = Net()  # possible again after `free_memory`
        accelerator.prepare(other, torch.optim.Adam(other.parameters()))


def test_prepare_accepts_only_one_model_with_its_adam(calls: list[str]) -> None:
    net, stepped = Net(), Net()
    adam = torch.optim.Adam(net.parameters())
    began = torch.optim.Adam(stepped.parameters())
    stepped(TOKENS).sum().backward()
    began.step()
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((net,), "one model and one optimizer, .* 1 models and 0 optimizers"),
        ((adam,), "0 models and 1 optimizers"),
        ((net, Net(), adam), "2 models and 1 optimizers.*evaluation_mode=True"),
        ((net, torch.optim.SGD(net.parameters(), 1.0)), "not SGD. Use torchao instead"),
        ((stepped, began), "The Adam has already stepped"),
        ((Net(), adam), "holds parameters that are not in Net"),
        # In this version of torch, AdamW is a subclass of Adam, which the library doesn't expect.
        ((net, torch.optim.AdamW(net.parameters())), "replaced an AdamW by a LBAdam.*Adam"),
    ]
    for objects, message in wrong:
        with msamp_run() as accelerator, pytest.raises(AccelerateError, match=message):
            accelerator.prepare(*objects)
    with msamp_run() as accelerator:
        judge = accelerator.prepare_model(Net(), evaluation_mode=True)
        assert type(judge.up) is nn.Linear
        net = Net()
        accelerator.prepare(net, torch.optim.Adam(net.parameters()))
        net = Net()
        with pytest.raises(AccelerateError, match="an earlier call prepared a model"):
            accelerator.prepare(net, torch.optim.Adam(net.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fsdp2"}, "'fsdp2' cannot run .*needs 'optimizer'"),
        ({"backend": "deepspeed"}, "'deepspeed' cannot run .*needs .*'optimizer'"),
        ({"dynamo_backend": "eager"}, "cannot run compiled models"),
        ({"more": [GradScalerKwargs(enabled=False)]}, "needs a loss scaler"),
    ],
)
def test_unsupported_combinations_are_rejected(
    calls: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AccelerateError, match=message):
        msamp_run(**options)
    assert calls == []


def test_opt_level_is_passed_on_and_checked(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    with msamp_run() as accelerator:
        net = Net()
        accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    assert calls == ["initialize O1"]
    with pytest.raises(AccelerateError, match="'O1' or 'O2'"):
        MSAMPRecipeKwargs(opt_level="O3")  # type: ignore[arg-type]
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O3")
    with pytest.raises(AccelerateError, match=r"O3.*ACCELERATE_FP8_OPT_LEVEL.*not one of"):
        msamp_run()


def test_missing_library_gives_a_one_line_error_with_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AccelerateError, match=r"does not run on the device type 'cpu'.*torchao"):
        msamp_run()
    monkeypatch.setattr(MSAMP, "devices", ("cpu",))
    with pytest.raises(MissingPluginError) as error:
        msamp_run()
    text = str(error.value)
    assert "\n" not in text
    for word in ("github.com/Azure/MS-AMP", "no longer maintained", "torch 2.1", "torchao"):
        assert word in text


def test_backend_of_the_deprecated_recipe_selects_the_engine(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(**fields: Any) -> FP8RecipeKwargs:
        with pytest.warns(FutureWarning, match="FP8RecipeKwargs is deprecated"):
            return FP8RecipeKwargs(**fields)

    said = {name: choose(None, [older(backend=name)]) for name in ("TE", "te", "MSAMP", "msamp")}
    assert [engine for engine, _ in said.values()] == ["TE", "TE", "MSAMP", "MSAMP"]
    assert {reason for _, reason in said.values()} == {"kwargs_handlers has FP8RecipeKwargs"}
    assert choose(None, [older()])[0] == "TE"
    with pytest.raises(AccelerateError, match="'AO' is not one of 'TE', 'MSAMP'"):
        FP8RecipeKwargs(backend="ao".upper())
    with pytest.raises(AccelerateError, match="recipes of several fp8 libraries"):
        choose(None, [older(), MSAMPRecipeKwargs()])
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
    handlers = [older(opt_level="O1")]
    with Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers) as accelerator:
        assert accelerator.state.fp8_backend == "MSAMP"
        net = Net()
        accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    assert calls == ["initialize O1"]


@pytest.fixture(scope="module")
def run() -> Any:
    return run_workers(WORKER, 2, timeout=120)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run: Any, case: str) -> None:
    check_case(run, case)
