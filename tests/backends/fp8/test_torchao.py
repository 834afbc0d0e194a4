"""torchao: which layers are converted, how options are set, and training on one to three ranks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import case_names, check_case, run_workers
from torch import nn
from torch.nn.functional import mse_loss

from accelerate_core import Accelerator
from accelerate_core.config.schema import settings_fields
from accelerate_core.errors import ConfigurationError, PrepareError
from accelerate_core.utils import (
    AORecipeKwargs,
    AutocastKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accelerate_fp8.layers import survey, usual_filter
from accelerate_fp8.settings import FP8RecipeKwargs

HERE = Path(__file__).parent


class Net(nn.Module):
    """A model with every kind of linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(32, 64)
        self.first = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.middle = nn.Sequential(nn.Linear(64, 48, bias=False), nn.ReLU(), nn.Linear(48, 64))
        self.odd = nn.Linear(64, 24)
        self.back = nn.Linear(24, 64)
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_hook(lambda *_: None)
        self.other = nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
        self.tied = nn.Linear(64, 32, bias=False)
        self.tied.weight = self.letters.weight
        self.last = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(self.letters(x)))
        x = self.other(self.hooked(self.back(self.odd(self.middle(x)))))
        return self.last(self.tied(x))


LETTERS = torch.arange(64).view(4, 16) % 32


def fp8(**options: Any) -> Accelerator:
    recipe = AORecipeKwargs(**{"emulate": True, **options.pop("recipe", {})})
    handlers = [recipe, *options.pop("more", ())]
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers, **options)


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"]


def test_explain_gives_the_reason_for_each_unconverted_layer() -> None:
    accelerator, model = fp8(), Net()
    model.eval()
    model = accelerator.prepare_model(model)
    assert in_fp8(model) == ["frozen", "middle.0", "middle.2"]
    assert {module.training for module in model.modules()} == {False}
    assert not model.frozen.weight.requires_grad
    text = accelerator.explain()
    assert "Net: 3 of 10 linear layers compute in fp8" in text
    for name, reason in {
        "first": "the first linear layer",
        "odd": "sizes are not multiples of 16",
        "hooked": "it has hooks",
        "other": "a NonDynamicallyQuantizableLinear, not torch's Linear",
        "tied": "shares its weight with letters.weight",
        "last": "the last linear layer",
    }.items():
        assert any(line.split()[0] == name and reason in line for line in text.splitlines()), name


def mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


class Conv1D(nn.Module):
    """Has the name of a layer of Transformers, but is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(4, 4, 1)


def test_layer_with_hooks_or_own_attributes_is_not_converted() -> None:
    model = mlp().append(Conv1D()).append(nn.Linear(32, 32))
    model[1].register_full_backward_hook(lambda *_: None)
    model[2].register_buffer("mask", torch.ones(32))
    model[3].register_parameter("gain", nn.Parameter(torch.ones(1)))
    model[4].note = ["x"]
    model[5]._mark = "set by a library"
    accelerator = fp8()
    model = accelerator.prepare_model(model)
    assert in_fp8(model) == ["5"]
    text = accelerator.explain()
    assert "it has hooks" in text
    for name in ("mask", "gain", "note"):
        assert f"it has the attribute '{name}', which torch's layer doesn't have" in text


def test_layers_already_in_fp8_are_counted() -> None:
    first = fp8()
    model = first.unwrap_model(first.prepare_model(mlp()))
    first.free_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = fp8()
        second.prepare_model(model)
    text = second.explain()
    assert "Sequential: 4 of 6 linear layers compute in fp8" in text
    assert "in fp8 already" in text


OTHERS = {
    "ACCELERATE_FP8_MARGIN": ("2", "margin=2 .*of Transformer Engine"),
    "ACCELERATE_FP8_TE_RECIPE": ("nvfp4", "recipe='nvfp4' .*of Transformer Engine"),
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": ("1", "use_mxfp8_block_scaling=True"),
    "ACCELERATE_FP8_FORMAT": ("E4M3", "fp8_format='E4M3'.*--fp8_backend te, or TERecipeKwargs"),
    "ACCELERATE_FP8_OPT_LEVEL": ("O1", "opt_level='O1'.* of MS-AMP.*ACCELERATE_FP8_BACKEND=MSAMP"),
    "ACCELERATE_FP8_INTERVAL": ("3", "interval=3 is not supported: Transformer Engine removed"),
    "ACCELERATE_FP8_OVERRIDE_DGRAD": ("true", "Engine removed override_linear_precision"),
}


@pytest.mark.parametrize("variable", OTHERS)
def test_option_of_another_engine_is_rejected(variable: str, monkeypatch: Any) -> None:
    value, text = OTHERS[variable]
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=text):
        fp8()


def test_default_values_of_another_engines_options_are_accepted(monkeypatch: Any) -> None:
    written = {
        "MARGIN": "0", "INTERVAL": "1", "FORMAT": "HYBRID", "AMAX_HISTORY_LEN": "1024",
        "AMAX_COMPUTE_ALGO": "most_recent", "OPT_LEVEL": "O2", "OVERRIDE_FPROP": "False",
        "USE_AUTOCAST_DURING_EVAL": "False",
    }  # fmt: skip
    for name, value in written.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    fp8()
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "abc")
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        fp8()


def test_deprecated_recipe_accepts_options_of_one_engine() -> None:
    for said, text in (
        ({"backend": "MSAMP", "margin": 3}, "margin=3 .*an option of Transformer Engine"),
        ({"backend": "TE", "opt_level": "O1"}, "opt_level='O1' .*an option of MS-AMP"),
    ):
        with pytest.warns(FutureWarning):
            handler = FP8RecipeKwargs(**said)
        with pytest.raises(ConfigurationError, match=text), pytest.warns(FutureWarning):
            Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])


def test_error_for_an_unknown_recipe_says_what_to_use() -> None:
    with pytest.raises(ConfigurationError, match=r"needs Transformer Engine and a GPU .* 10\.0"):
        AORecipeKwargs(recipe="mxfp8")
    with pytest.raises(ConfigurationError, match="Did you mean 'rowwise'"):
        AORecipeKwargs(recipe="rowwis")
    with pytest.raises(ConfigurationError, match=r"config='rowwise' is not a .*pass recipe="):
        AORecipeKwargs(config="rowwise")


def test_module_filter_func_replaces_the_default_filter() -> None:
    model = Net()
    usual = usual_filter(model)
    linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    taken = [name for name, one in linear.items() if usual(one, name)]
    assert taken == ["frozen", "middle.0", "middle.2", "hooked", "other", "tied"]
    asked: list[str] = []

    def mine(module: nn.Module, name: str) -> bool:
        asked.append(name)
        return name == "first"

    accelerator = fp8(recipe={"module_filter_func": mine})
    model = accelerator.prepare_model(model)
    assert in_fp8(model) == ["first"]
    assert "odd" in asked
    assert "tied" not in asked
    assert "module_filter_func returned False" in accelerator.explain()
    assert [one.name for one in survey(nn.Linear(16, 16), None) if one.reason] == [""]


def test_model_that_is_a_single_layer_is_replaced_and_trains() -> None:
    accelerator = fp8(recipe={"module_filter_func": lambda *_: True})
    layer = nn.Linear(16, 16)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    model, optimizer = accelerator.prepare(layer, optimizer)
    assert in_fp8(model) == [""]
    accelerator.backward(mse_loss(model(torch.ones(16, 16)), torch.zeros(16, 16)))
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_warning_if_no_layer_is_converted() -> None:
    accelerator = fp8()
    with pytest.warns(UserWarning, match="no layer of Sequential computes in fp8"):
        accelerator.prepare_model(nn.Sequential(nn.Linear(5, 5)))
    with pytest.warns(UserWarning, match=r"\(the model itself: the first linear layer"):
        fp8().prepare_model(nn.Linear(32, 32))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_each_recipe_trains_all_converted_weights(recipe: str) -> None:
    torch.manual_seed(0)
    accelerator, model = fp8(recipe={"recipe": recipe}), Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    target = torch.randn(4, 16, 16)
    losses = []
    for _ in range(12):
        loss = mse_loss(model(LETTERS), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.9
    after = accelerator.get_state_dict(model)
    assert after.keys() == before.keys()
    same = [name for name, value in after.items() if torch.equal(value, before[name])]
    assert same == ["frozen.weight", "frozen.bias"]


def test_compiled_model_trains_like_the_uncompiled_one() -> None:
    losses = {}
    for compiler in (None, "aot_eager"):
        torch.manual_seed(0)
        accelerator = fp8(dynamo_backend=compiler)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        losses[compiler] = []
        for _ in range(4):
            loss = mse_loss(model(torch.ones(16, 32)), torch.zeros(16, 32))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[compiler].append(loss.item())
        assert len(in_fp8(accelerator.unwrap_model(model))) == 2
    assert losses["aot_eager"] == pytest.approx(losses[None], rel=0.02)


def test_torchao_config_of_the_script_is_used_unchanged() -> None:
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True)
    handler = AORecipeKwargs(config=config)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    model = accelerator.prepare_model(Net())
    assert model.middle[0].config is config
    assert accelerator.state.ao_recipe_handler.config is config
    with pytest.raises(ConfigurationError, match="config= already contains 'recipe'"):
        AORecipeKwargs(config=config, recipe="rowwise")


def test_unrequested_emulation_gives_one_warning() -> None:
    message = "fp8 is emulated, because a cpu device does not support fp8"
    with pytest.warns(UserWarning, match=message) as caught:
        accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert len([one for one in caught if "emulated" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8()
    assert "emulate" in accelerator.explain()


def test_rowwise_with_gw_hp_rejects_autocast() -> None:
    recipe = {"recipe": "rowwise_with_gw_hp"}
    with pytest.raises(ConfigurationError, match="runs without autocast, but AutocastKwargs"):
        fp8(recipe=recipe, more=[AutocastKwargs(enabled=True)])
    model = fp8(recipe=recipe).prepare_model(Net())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigurationError, match=r"called the model inside torch\.autocast"),
    ):
        model(LETTERS)
    assert model(LETTERS).dtype is torch.float32
    accelerator = fp8(recipe=recipe)
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(
        ConfigurationError, match=r"AutocastKwargs passed to accelerator\.autocast enable it"
    ):
        accelerator.autocast(AutocastKwargs(enabled=True))


def test_conflicting_recipes_and_useless_gathering_are_rejected() -> None:
    both = [AORecipeKwargs(), TERecipeKwargs()]
    message = "'AORecipeKwargs', 'TERecipeKwargs', which are recipes of several"
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=both)
    with pytest.raises(ConfigurationError, match="the backend single does not shard weights"):
        fp8(recipe={"enable_fsdp_float8_all_gather": True})
    with pytest.raises(ConfigurationError, match="recipe='rowwise' has one per row"):
        AORecipeKwargs(recipe="rowwise", enable_fsdp_float8_all_gather=True)


@pytest.mark.parametrize("recipe", [AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs])
def test_recipe_without_mixed_precision_fp8_is_rejected(recipe: type[Any]) -> None:
    for given in ({}, {"mixed_precision": "bf16"}):
        with pytest.raises(ConfigurationError, match=r"It is for mixed_precision='fp8'\.$"):
            Accelerator(cpu=True, kwargs_handlers=[recipe()], **given)


def test_options_that_need_python_objects_have_no_variable() -> None:
    fields = {one.name: one for one in settings_fields(AORecipeKwargs, owner="fp8")}
    assert fields["config"].env == fields["module_filter_func"].env == ()
    assert fields["recipe"].env == ("ACCELERATE_FP8_RECIPE",)


def test_plain_attributes_of_a_layer_are_kept_and_other_objects_prevent_conversion() -> None:
    net = Net()
    data = {"scale": 2.0, "role": "query", "index": 3, "seen": True, "other_name": None}
    for name, value in data.items():
        setattr(net.middle[0], name, value)
    net.frozen.listed = [1]  # type: ignore[assignment]
    with fp8() as accelerator:
        model = accelerator.prepare_model(net)
        assert {"middle.0", "middle.2"} <= set(in_fp8(model))
        assert {name: getattr(model.middle[0], name) for name in data} == data
        assert "it has the attribute 'listed', which" in accelerator.explain()
        other = Net()
        other.middle[0].config = "mine"
        with pytest.raises(PrepareError, match=r"config='mine', but its replacement Float8Linear"):
            accelerator.prepare_model(other)


def test_explain_names_layers_that_never_ran() -> None:
    net = Net()
    net.idle = nn.Linear(64, 64, bias=False)
    with fp8() as accelerator:
        made = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        model, optimizer = made
        assert "no step" not in accelerator.explain()
        accelerator.backward(model(LETTERS).square().mean())
        optimizer.step()
        assert accelerator.explain().endswith("\nNet: no gradient in any step for idle.weight")


def test_backend_without_the_need_modules_rejects_fp8() -> None:
    from accelerate_core import Backend

    class Narrow(Backend):
        name = "narrow"
        api_version = (1, 0)
        reduces_gradients = "never"
        supports = {"accepts": ("autocast",)}

    with pytest.raises(ConfigurationError, match="modules"):
        fp8(backend=Narrow)


def _run(code: str) -> tuple[str, str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip(), done.stderr


def test_importing_the_package_imports_no_fp8_library() -> None:
    libraries = ("torchao", "transformer_engine", "msamp")
    code = f"print([m for m in sys.modules if m.split('.')[0] in {libraries}])"
    assert _run(f"import sys, accelerate_fp8; {code}") == ("[]", "")


def test_start_prints_nothing_and_restores_the_environment() -> None:
    code = (
        "import os, warnings; warnings.simplefilter('ignore'); "
        "from accelerate_core import Accelerator; before = dict(os.environ); "
        "Accelerator(cpu=True, mixed_precision='fp8'); print({**os.environ} == before)"
    )
    assert _run(code) == ("True", "")


TWO, THREE = "two_ranks.py", "three_ranks.py"


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_workers(HERE / TWO, 2, timeout=300, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.dist
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", case_names(HERE / TWO))
def test_on_two_ranks(ranks: Any, case: str) -> None:
    check_case(ranks, case)


@pytest.mark.dist
def test_on_three_ranks() -> None:
    (case,) = case_names(HERE / THREE)
    check_case(run_workers(HERE / THREE, 3, timeout=100, env={"OMP_NUM_THREADS": "1"}), case)
