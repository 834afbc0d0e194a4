"""Transformer Engine: the library's own recipes, and a mock for everything else.

Its arithmetic needs CUDA, cuDNN and its compiled library, so these tests do not run any of it.
"""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
import sys
from pathlib import Path

import pytest
import te_on_cpu as cpu
import torch
from safetensors.torch import load_file
from support import case_names, check_case, run_workers
from te_on_cpu import Net, accelerator, batches, prepared, scales, train
from torch import nn

import accelerate_fp8
from accelerate_core import Accelerator
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.errors import ConfigurationError, MissingPluginError, PrepareError
from accelerate_drop_in.fp8 import has_transformer_engine_layers
from accelerate_fp8 import TERecipeKwargs
from accelerate_fp8 import transformer_engine as engine
from accelerate_fp8.settings import TE_RECIPES, FP8RecipeKwargs

REAL = Path(sys.prefix, "unpacked", "transformer_engine")
WORKER = Path(__file__).with_name("te_worker.py")
pytestmark = pytest.mark.skipif(
    not REAL.exists(),
    reason="needs: pip install --no-deps --target .venv/unpacked transformer-engine (make does it)",
)


def forget() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "transformer_engine":
            del sys.modules[name]


@pytest.fixture(scope="module")
def mock_library():
    path, devices, threads = [*sys.path], engine.TransformerEngine.devices, torch.get_num_threads()
    torch.set_num_threads(1)
    yield cpu.use()
    torch.set_num_threads(threads)
    sys.path[:], engine.TransformerEngine.devices = path, devices
    forget()


@pytest.fixture
def te(mock_library, monkeypatch):
    quantization = sys.modules["transformer_engine.pytorch.quantization"]
    for log in (quantization.ENTERED, quantization.REDUCED, mock_library.CHECKPOINTED):
        log.clear()
    yield mock_library
    quantization.FP8GlobalStateManager.reset()


def resolved(given=None, environ=None) -> TERecipeKwargs:
    return resolve_settings(TERecipeKwargs, given, Sources(environ or {}), owner="fp8")[0]


def fields(recipe) -> dict:
    return {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}


# --- recipes, from the library's own file -------------------------------------------------------------

SAID = {
    "margin": 2, "fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "most_recent",
    "reduce_amax": False,
}  # fmt: skip


@pytest.mark.parametrize("name", TE_RECIPES)
def test_recipe_name_creates_the_librarys_recipe_with_its_options(te, name):
    from transformer_engine.common import recipe as recipes

    cls, options = getattr(recipes, TE_RECIPES[name][0]), TE_RECIPES[name][1]
    plain = engine.make_recipe(resolved(TERecipeKwargs(recipe=name)))
    assert type(plain) is cls
    assert fields(plain) == fields(cls())
    said = {key: SAID[key] for key in options}
    made = engine.make_recipe(resolved(TERecipeKwargs(recipe=name, **said)))
    if "fp8_format" in said:
        said["fp8_format"] = recipes.Format.E4M3
    assert fields(made) == {**fields(cls()), **said}
    for key, value in SAID.items():
        assert (key in options) == (key in fields(plain) and name != "nvfp4")
        if key not in options:
            with pytest.raises(
                ConfigurationError,
                match=rf"TERecipeKwargs: {key}=\S+ is not an option of .*recipe='{name}'",
            ):
                TERecipeKwargs(recipe=name, **{key: value})


def test_every_recipe_class_of_the_library_has_a_name(te):
    from transformer_engine.common import recipe as recipes

    theirs = {cls.__name__ for cls in recipes.Recipe.__subclasses__()} - {"CustomRecipe"}
    assert theirs == {cls for cls, _ in TE_RECIPES.values()}
    # The library's own behaviour explains why 'most_recent' is passed on and E5M2 is rejected.
    assert recipes.DelayedScaling().amax_compute_algo == "max"
    with pytest.raises(ValueError, match="Pure E5M2 training is not supported"):
        recipes.DelayedScaling(fp8_format=recipes.Format.E5M2)
    # These two options are rejected because the library accepts unknown options and ignores them.
    dropped = recipes.DelayedScaling(interval=2, override_linear_precision=(True, True, True))
    assert "interval" not in fields(dropped)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"interval": 2}, "interval=2 is not supported: Transformer Engine removed"),
        ({"override_linear_precision": (False, True, False)}, "override_linear_precision=.* removed"),
        ({"fp8_format": "e5m2"}, "does not support training in E5M2 alone.* HYBRID"),
        ({"fp8_format": "E4M"}, "is not one of .*Did you mean 'E4M3'"),
        ({"amax_compute_algo": "least"}, "is not one of"),
        ({"recipe": "delay"}, "Did you mean 'delayed'"),
        ({"recipe": "block", "use_mxfp8_block_scaling": True}, "Leave one of them out"),
        ({"use_mxfp8_block_scaling": True, "amax_history_len": 4}, "amax_history_len=4 is not .*'mxfp8'"),
    ],
)  # fmt: skip
def test_invalid_option_is_rejected_by_name(said, text):
    with pytest.raises(ConfigurationError, match=text):
        TERecipeKwargs(**said)


def test_recipe_object_of_the_library_is_used_unchanged(te):
    from transformer_engine.common import recipe as recipes

    mine = recipes.DelayedScaling(amax_history_len=3, reduce_amax=False)
    assert engine.make_recipe(resolved(TERecipeKwargs(recipe=mine))) is mine
    with pytest.raises(
        ConfigurationError, match=r"a DelayedScaling object, .* unchanged\. Set margin=1"
    ):
        TERecipeKwargs(recipe=mine, margin=1)
    with pytest.raises(
        ConfigurationError, match="a dict, not a recipe object of Transformer Engine"
    ):
        engine.make_recipe(resolved(TERecipeKwargs(recipe={})))
    needs = [
        engine.TransformerEngine(None, [TERecipeKwargs(recipe=one)]).needs
        for one in (mine, recipes.DelayedScaling(), recipes.CustomRecipe(qfactory=print), "current")
    ]
    assert ["forward_collectives" in one for one in needs] == [False, True, True, False]


def test_variables_of_accelerate_are_read(te, monkeypatch):
    environ = {
        "ACCELERATE_FP8_MARGIN": "1",
        "ACCELERATE_FP8_FORMAT": "e4m3",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "8",
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "MOST_RECENT",
        "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "true",
    }
    made = resolved(None, environ)
    assert made.use_autocast_during_eval
    recipe = engine.make_recipe(made)
    shown = recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo
    assert shown == (1, "E4M3", 8, "most_recent")
    assert resolved(None, {"ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "1"}).recipe_name == "mxfp8"
    assert resolved(None, {"ACCELERATE_FP8_TE_RECIPE": "Block"}).recipe_name == "block"
    with pytest.raises(ConfigurationError, match=r"interval=2.*ACCELERATE_FP8_INTERVAL"):
        resolved(None, {"ACCELERATE_FP8_INTERVAL": "2"})
    with pytest.warns(FutureWarning, match="deprecated"):
        older = FP8RecipeKwargs(backend="te", margin=3)
    with pytest.warns(FutureWarning):
        assert type(accelerate_fp8.FP8(None, [older])) is engine.TransformerEngine
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_DGRAD", "true")
    with pytest.raises(ConfigurationError, match="ACCELERATE_FP8_OVERRIDE_DGRAD"):
        accelerator()


# --- the mock has the library's API ---------------------------------------------------------------------

#: Name that we use -> file of the library that defines it.
SOURCES = {
    "autocast": "quantization", "quantized_model_init": "quantization",
    "is_fp8_available": "quantization", "is_mxfp8_available": "quantization",
    "is_nvfp4_available": "quantization", "is_fp8_block_scaling_available": "quantization",
    "FP8GlobalStateManager": "quantization", "DelayedScalingRecipeState": "quantization",
    "checkpoint": "distributed", "Linear": "module/linear", "LayerNorm": "module/layernorm",
    "TransformerEngineBaseModule": "module/base", "QuantizedTensor": "quantized_tensor",
}  # fmt: skip
#: File of the library -> attributes of its classes that we read or write.
ATTRIBUTES = {
    "module/linear": ["weight_names", "return_bias", "use_bias", "tp_size", "bias"],
    "module/base": ["fp8_meta", "tp_size"],
    "ops/basic/layer_norm": ["eps", "zero_centered_gamma", "weight", "bias"],
    "quantization": ["scale", "amax_history"],
}


def tree(path: Path) -> dict[str, ast.AST]:
    return {getattr(one, "name", ""): one for one in ast.parse(path.read_text()).body}


def methods(node: ast.AST) -> dict[str, ast.FunctionDef]:
    if isinstance(node, ast.FunctionDef):
        return {"": node}
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def parameters(node: ast.FunctionDef) -> dict[str, str]:
    """Return the names and defaults of a function's parameters, in order."""
    args = node.args
    names = [one.arg for one in args.posonlyargs + args.args]
    defaults = [None] * (len(names) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    out = dict(zip(names, defaults, strict=True))
    out |= {f"*{one.arg}": "" for one in (args.vararg, args.kwarg) if one}
    return out | {
        f"{one.arg}=": default and ast.unparse(default)
        for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    }


def test_mock_has_the_signatures_of_the_library():
    ours = {}
    for file in (cpu.MOCK_LIBRARIES / "transformer_engine" / "pytorch").glob("*.py"):
        ours |= tree(file)
    compared = 0
    for name, file in SOURCES.items():
        theirs = methods(tree(REAL / "pytorch" / f"{file}.py")[name])
        for method, node in methods(ours[name]).items():
            if method not in theirs and method in ("get_extra_state", "set_extra_state"):
                theirs = (
                    methods(tree(REAL / "pytorch" / "ops" / "op.py")["BasicOperation"]) | theirs
                )
            want, have = parameters(theirs[method]) if method in theirs else None, parameters(node)
            if method == "forward" or (want is None and method.startswith("_")):
                continue
            assert want is not None, f"{name}.{method} is not the library's"
            # We don't use its arguments for the device and the roles of tensors.
            if name == "DelayedScalingRecipeState":
                want = {key: want[key] for key in have}
            assert have == want, f"{name}.{method}"
            compared += 1
    assert compared > 20
    for file, attributes in ATTRIBUTES.items():
        source = (REAL / "pytorch" / f"{file}.py").read_text()
        lost = [
            one for one in attributes if not re.search(rf"self\.{one}\b|self, name|{one}:", source)
        ]
        assert not lost, f"{file}: {lost}"


def test_engine_only_uses_names_that_the_library_exports():
    folder = Path(engine.__file__).parent
    source = "".join(
        (folder / name).read_text() for name in ("transformer_engine.py", "accelerate_names.py")
    )
    used = set(re.findall(r"\bte\.([A-Za-z_0-9]+)", source)) - {"Linear`", "pytorch"}
    used |= set(re.findall(r"_te\.([A-Za-z_0-9]+)", source))
    exported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((REAL / "pytorch" / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert used <= exported, used - exported
    assert used <= {*SOURCES}, used - {*SOURCES}
    base = (REAL / "pytorch" / "module" / "base.py").read_text()
    for words in ('"scaling_fwd" if fwd else "scaling_bwd"', 'self.fp8_meta["num_gemms"] * 3'):
        assert words in base


# --- installation and device ----------------------------------------------------------------------------


def error_when_installed(monkeypatch, path: Path | None = None) -> str:
    """Return the error of an Accelerator if `transformer_engine` is imported from `path`."""
    with monkeypatch.context() as patch:
        for name in [one for one in sys.modules if one.partition(".")[0] == "transformer_engine"]:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "path", [one for one in sys.path if one != str(cpu.MOCK_LIBRARIES)])
        patch.setattr(engine.TransformerEngine, "devices", ("cpu",))
        if path is not None:
            patch.syspath_prepend(path)
        with pytest.raises(MissingPluginError) as caught:
            accelerator()
        forget()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("RuntimeError('cudnn shared object not found.')", "suitable cuDNN .*nvidia-cudnn"),
        (
            "RuntimeError('Transformer Engine requires cuDNN 9.12.0 or later, but ...')",
            r"requires cuDNN 9\.12\.0.*nvidia-cudnn",
        ),
        (
            "FileNotFoundError('Could not find shared object file')",
            "FileNotFoundError: .*transformer-en",
        ),
        ("AssertionError", r"\(AssertionError: AssertionError\)"),
        ("ModuleNotFoundError('No module named x', name='x')", "No module named x"),
    ],
)
def test_broken_library_gives_a_one_line_error(monkeypatch, tmp_path, error, text):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}")
    assert re.search(text, error_when_installed(monkeypatch, tmp_path))


def test_missing_old_or_incomplete_library_gives_a_one_line_error(monkeypatch, tmp_path):
    text = error_when_installed(monkeypatch)
    assert "is not installed. Install it with: pip install --no-build-isolation" in text
    # The library's own wheel is incomplete without the extension.
    text = error_when_installed(monkeypatch, REAL.parent)
    assert "without its extension for PyTorch. Install it with: pip install" in text
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    assert "too old" in error_when_installed(monkeypatch, tmp_path)


def test_device_without_cuda_is_rejected(te, monkeypatch):
    monkeypatch.setattr(engine.TransformerEngine, "devices", ("cuda",))
    with pytest.raises(
        ConfigurationError, match=r"needs a CUDA device, but this run uses 'cpu'.*torchao"
    ):
        accelerator()


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("delayed", (8, 0), "8.9 or higher required for FP8"),
        ("block", (8, 9), "requires compute capability 9.0"),
        ("mxfp8", (9, 0), "10.0 or higher required for MXFP8"),
        ("nvfp4", (9, 0), "10.0 or higher required for NVFP4"),
    ],
)
def test_unsupported_format_is_rejected_with_the_required_capability(
    te, monkeypatch, name, capability, reason
):
    quantization = sys.modules["transformer_engine.pytorch.quantization"]
    monkeypatch.setattr(quantization, "CAPABILITY", capability)
    with pytest.raises(ConfigurationError, match=f"{TE_RECIPES[name][0]} does not run .*{reason}"):
        accelerator(TERecipeKwargs(recipe=name))
    monkeypatch.setattr(quantization, "CAPABILITY", (10, 0))
    with accelerator(TERecipeKwargs(recipe=name)) as one:
        assert f"recipe {name}" in one.explain()


def test_engine_declares_its_needs_and_limits(te):
    with pytest.raises(ConfigurationError, match="cannot run compiled models"):
        accelerator(dynamo_backend="eager")
    needs = [
        engine.TransformerEngine(None, [TERecipeKwargs(**said)]).needs - {"autocast", "modules"}
        for said in ({}, {"reduce_amax": False}, {"recipe": "block"})
    ]
    assert needs == [{"forward_collectives"}, set(), set()]
    current = engine.TransformerEngine(None, [TERecipeKwargs(recipe="current")])
    assert current.supports == {"compile": True, "mesh": ("dp_replicate", "dp_shard", "cp", "sp")}


# --- models ---------------------------------------------------------------------------------------------


class Odd(nn.LayerNorm):
    pass


def test_converted_layers_keep_parameters_modes_and_options(te):
    net = Net().to(torch.float64).eval()
    net.body.train()
    net.tied = nn.Linear(32, 32, bias=False)
    net.tied.weight = net.head.weight
    net.hooked = nn.Linear(16, 16)
    net.hooked.register_full_backward_hook(lambda *_: None)
    net.masked, net.noted = nn.Linear(16, 16), nn.LayerNorm(16)
    net.masked.register_buffer("mask", torch.ones(1))
    net.noted.note = ["x"]
    net.unfit = nn.ModuleList(
        [nn.LayerNorm(16, bias=False), nn.LayerNorm(16, elementwise_affine=False)]
    )
    net.odd, net.frozen = Odd(16), nn.Linear(16, 16).requires_grad_(False)
    before = dict(net.named_parameters())
    modes = {name: module.training for name, module in net.named_modules()}
    state = torch.get_rng_state()
    with accelerator() as one:
        model = one.unwrap_model(one.prepare_model(net))
        lines = one.explain().splitlines()
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        n: id(p) for n, p in before.items()
    }
    assert {name: module.training for name, module in model.named_modules()} == modes
    kinds = {name: type(module) for name, module in model.named_modules()}
    theirs = [name for name, kind in kinds.items() if issubclass(kind, te.Linear | te.LayerNorm)]
    assert theirs == ["norm", "body.0", "body.2", "frozen"]
    assert model.norm.eps == 1e-3
    assert not model.body[0].use_bias
    shown = {line.split()[0]: line for line in lines if line.startswith("  ")}
    for name, reason in {
        "first": "not multiples of 16", "head": "shares its weight with tied.weight",
        "hooked": "has hooks", "norm": "te.LayerNorm", "odd": "a Odd", "frozen": "fp8",
        "masked": "has the attribute 'mask', which", "noted": "has the attribute 'note', which",
    }.items():  # fmt: skip
        assert reason in shown[name], shown
    assert "  unfit.*" in "\n".join(lines)
    for text in (
        "has no bias",
        "has no weight",
        "3 of 8 linear layers compute in fp8",
        "recipe delayed",
    ):
        assert text in "\n".join(lines)


def test_model_that_is_a_single_layer_is_replaced_and_trains(te):
    with accelerator() as one:
        for layer, kind in ((nn.Linear(16, 16), te.Linear), (nn.LayerNorm(16), te.LayerNorm)):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            model, optimizer = one.prepare(layer, optimizer)
            assert isinstance(model, kind)
            one.backward((model(torch.randn(8, 16)) - 1).square().mean())
            before = layer.weight.detach().clone()
            optimizer.step()
            assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", TE_RECIPES)
def test_model_trains_with_each_recipe(te, monkeypatch, name):
    quantization = sys.modules["transformer_engine.pytorch.quantization"]
    monkeypatch.setattr(quantization, "CAPABILITY", (10, 0))
    with accelerator(TERecipeKwargs(recipe=name)) as one:
        model, optimizer = prepared(one)
        losses = train(one, model, optimizer, batches(4) * 5)
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
        plain = Net()
        for (key, was), now in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert not torch.equal(was, now), key
        assert "3 of 4 linear layers compute in fp8" in one.explain()
        assert f"not multiples of {32 if name == 'mxfp8' else 16}" in one.explain()
        enabled, recipe, group = quantization.ENTERED[0]
        assert (enabled, type(recipe).__name__, group) == (True, TE_RECIPES[name][0], None)
        assert one.state.fp8_backend == "TE"
        assert one.state.te_recipe_handler.recipe_name == name
        # As in Accelerate, where this is always False because it compares with another name.
        assert not one.delayed_fp8_autocast


def test_evaluation_runs_in_bf16_by_default_and_changes_no_scale(te):
    quantization = sys.modules["transformer_engine.pytorch.quantization"]
    for during in (False, True):
        with accelerator(
            TERecipeKwargs(use_autocast_during_eval=during, amax_history_len=4)
        ) as one:
            model, optimizer = prepared(one)
            train(one, model, optimizer, batches(2))
            before = one.unwrap_model(model).head.fp8_meta["scaling_fwd"].scale.clone()
            quantization.ENTERED.clear()
            model.eval()
            model(batches(1)[0] * 100)  # with gradients on, the library alone would update scales
            assert [entered[0] for entered in quantization.ENTERED] == [during]
            assert torch.equal(one.unwrap_model(model).head.fp8_meta["scaling_fwd"].scale, before)
            quantization.ENTERED.clear()
            with one.autocast():
                assert torch.is_autocast_enabled("cpu")
            assert not quantization.ENTERED


def test_error_in_forward_exits_both_contexts_and_changes_no_scale(te):
    with accelerator() as one:
        model, optimizer = prepared(one)
        train(one, model, optimizer, batches(2))
        before = one.unwrap_model(model).body[0].fp8_meta["scaling_fwd"].scale.clone()
        one.unwrap_model(model).head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batches(1)[0] * 100)
        assert not torch.is_autocast_enabled("cpu")
        assert te.FP8GlobalStateManager.quantization_state.autocast_depth == 0
        assert torch.equal(one.unwrap_model(model).body[0].fp8_meta["scaling_fwd"].scale, before)


def test_end_of_training_resets_the_librarys_global_state(te):
    with accelerator() as one:
        train(one, *prepared(one), batches(1))
        assert len(te.FP8GlobalStateManager.quantization_state.states) == 3
    assert not te.FP8GlobalStateManager.quantization_state.states


def test_recomputation_uses_the_scales_of_the_forward(te):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: torch.Tensor, debug: int = 1) -> torch.Tensor:
            return self.inner(x) * debug

    class Outer(nn.Module):
        def __init__(self, recompute) -> None:
            super().__init__()
            self.block, self.recompute = Block(), recompute

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.recompute is None:
                return self.block(x, debug=3)
            return self.recompute(self.block.forward, x, debug=3)

    gradients = []
    for again in (False, True):
        with accelerator() as one:
            recompute = one.precision.recompute(one) if again else None
            model, optimizer = prepared(one, Outer(recompute))
            train(one, model, optimizer, batches(3)[1:])
            one.backward(model(batches(1)[0]).square().mean())
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert te.CHECKPOINTED == [{"use_reentrant": False}] * 3
    assert torch.equal(*gradients)


# --- states -----------------------------------------------------------------------------------------------


def test_resumed_run_continues_bit_for_bit(te, tmp_path):
    data = batches(8)
    with accelerator() as one:
        model, optimizer = prepared(one)
        train(one, model, optimizer, data[:4])
        one.save_state(tmp_path / "state")
        expected = train(one, model, optimizer, data[4:]), scales(one, model)
        assert "norm._extra_state" not in model.state_dict()
    plain = Net()
    written = load_file(tmp_path / "state" / "model.safetensors")
    assert {k: v.dtype for k, v in written.items()} == {
        k: v.dtype for k, v in plain.state_dict().items()
    }
    plain.load_state_dict(written)
    (kept,) = (tmp_path / "state").rglob("scales_0.safetensors")
    found = load_file(kept)
    assert sorted(found)[:2] == ["0.body.0.scaling_bwd.amax_history", "0.body.0.scaling_bwd.scale"]
    for seen in (0, 2):  # load into a new model, and into one that has run a forward
        with accelerator() as one:
            model, optimizer = prepared(one, Net(seed=1))
            train(one, model, optimizer, data[:seen])
            one.load_state(tmp_path / "state")
            assert train(one, model, optimizer, data[4:]) == expected[0]
            assert torch.equal(scales(one, model), expected[1])


def test_checkpoints_load_across_precisions_and_history_lengths(te, tmp_path):
    data = batches(6)
    for name in ("bf16", "fp8"):
        one = accelerator() if name == "fp8" else Accelerator(cpu=True, mixed_precision=name)
        with one:
            model, optimizer = prepared(one)
            train(one, model, optimizer, data)
            one.save_state(tmp_path / name)
    with accelerator() as one:
        model, optimizer = prepared(one)
        train(one, model, optimizer, data[:2])
        one.load_state(tmp_path / "bf16")
        made = one.unwrap_model(model).head.fp8_meta["scaling_fwd"]
        assert (made.scale == 1).all()
        assert not made.amax_history.any()
        train(one, model, optimizer, data[:1])
    with Accelerator(cpu=True, mixed_precision="bf16") as one:
        model, optimizer = prepared(one, Net(seed=1))
        one.load_state(tmp_path / "fp8")
        train(one, model, optimizer, data[:1])
    (file,) = (tmp_path / "fp8").rglob("scales_0.safetensors")
    saved = load_file(file)["0.head.scaling_fwd.amax_history"]
    for length in (2, 7):
        with accelerator(TERecipeKwargs(amax_history_len=length)) as one:
            model, _ = prepared(one)
            one.load_state(tmp_path / "fp8")
            history = one.unwrap_model(model).head.fp8_meta["scaling_fwd"].amax_history
            kept = min(length, 4) - 1
            assert torch.equal(history[-kept:], saved[-kept:])
            assert len(history) == length
            assert history[1:-kept].sum() == 0
    with accelerator(TERecipeKwargs(recipe="current")) as one:
        model, optimizer = prepared(one)
        one.load_state(tmp_path / "fp8")
        train(one, model, optimizer, data[:1])


def test_pickle_of_the_library_is_neither_written_nor_read(te):
    with accelerator() as one:
        model, optimizer = prepared(one)
        train(one, model, optimizer, batches(1))
        head = one.unwrap_model(model).head
        theirs = {**model.state_dict(), "head._extra_state": head.get_extra_state()}
        assert theirs["head._extra_state"].numel()
        with pytest.warns(UserWarning, match="a pickle, which is ignored"):
            model.load_state_dict(theirs)
        assert one.get_state_dict(model).keys() == Net().state_dict().keys()
        missing = {
            name: value for name, value in model.state_dict().items() if name != "norm.weight"
        }
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm.weight"'):
            model.load_state_dict(missing)
    with accelerator() as one:  # also for layers that the script created
        model, optimizer = prepared(one, nn.Sequential(te.Linear(16, 16, device="cpu")))
        assert "1 of 1 linear layers compute in fp8" in one.explain()
        assert "in fp8 already" in one.explain()
        assert [*model.state_dict()] == ["0.weight", "0.bias"]
        model.load_state_dict(model.state_dict())


def test_inputs_are_padded_to_a_number_of_rows_that_the_library_accepts(te):
    source = torch.randn(3, 16)
    with accelerator(TERecipeKwargs(recipe="current")) as one:
        model, _ = prepared(one, nn.Sequential(nn.Linear(16, 32)))
        with (
            te.autocast(recipe=one.precision._recipe),
            pytest.raises(ValueError, match="FP8 execution"),
        ):
            te.Linear.forward(model[0], source)
        results = []
        for rows in (source, source.view(1, 3, 16), torch.cat([source, torch.zeros(5, 16)])):
            out = model(rows).view(-1, 32)[:3]
            out.square().sum().backward()
            results.append(torch.cat([out, model[0].weight.grad.T, model[0].bias.grad[None]]))
            model.zero_grad()
        assert all(torch.equal(results[0], other) for other in results)
        copied = pickle.loads(pickle.dumps(one.unwrap_model(model, keep_fp32_wrapper=False)))
        assert type(copied[0]) is type(model[0]) is engine.Linear
        assert has_transformer_engine_layers(model)


def test_quantized_weights_keep_only_frozen_weights_in_8_bits(te, tmp_path):
    net = Net()
    net.body[0].requires_grad_(False)
    net.body[2].weight.requires_grad_(False)
    whole = {name: value.clone() for name, value in net.state_dict().items()}
    recipe = TERecipeKwargs(recipe="current", quantized_weights=True)
    with accelerator(recipe) as one:
        assert {"parameters", "subclasses"} <= one.precision.needs
        model, optimizer = prepared(one, net)
        held = {name for name, p in model.named_parameters() if isinstance(p, te.QuantizedTensor)}
        assert held == {"body.0.weight", "body.2.weight"}
        assert "fp8, weight in 8 bits" in one.explain()
        train(one, model, optimizer, batches(2))
        assert not any(p.requires_grad for n, p in model.named_parameters() if n in held)
        one.save_state(tmp_path / "state")
        state = one.get_state_dict(model)
        for name in held:
            assert type(state[name]) is torch.Tensor
            assert torch.allclose(state[name], whole[name], rtol=0.07, atol=1e-4)
        one.load_state(tmp_path / "state")
        with pytest.raises(
            PrepareError, match=r"all linear weights of Net are trained.*requires_grad_\("
        ):
            one.prepare_model(Net())
    with pytest.raises(
        ConfigurationError, match=r"delayed scaling, which would quantize .* scale of 1.*'current'"
    ):
        accelerator(TERecipeKwargs(quantized_weights=True))


# --- Accelerate's functions -------------------------------------------------------------------------------


def test_functions_of_accelerate_convert_models_in_both_directions(te):
    from accelerate_core import apply_fp8_autowrap, contextual_fp8_autocast, convert_model

    net = Net()
    before = {name: id(p) for name, p in net.named_parameters()}
    assert convert_model(net) is net
    kinds = [type(net.first), type(net.norm), type(net.body[0]), type(net.head)]
    assert kinds == [nn.Linear, te.LayerNorm, te.Linear, te.Linear]
    convert_model(net, to_transformer_engine=False, _convert_linear=False)
    assert [type(net.norm), type(net.head)] == [nn.LayerNorm, te.Linear]
    convert_model(net, to_transformer_engine=False)
    assert [type(one) for one in net.modules()] == [type(one) for one in Net().modules()]
    assert {name: id(p) for name, p in net.named_parameters()} == before
    assert (net.norm.eps, net.body[0].bias) == (1e-3, None)
    assert type(convert_model(nn.Linear(16, 16))) is te.Linear
    quantization = sys.modules["transformer_engine.pytorch.quantization"]
    convert_model(net, _convert_ln=False)
    assert (
        apply_fp8_autowrap(net, TERecipeKwargs(recipe="current", use_autocast_during_eval=False))
        is net
    )
    for mode in (True, False):
        net.train(mode)(batches(1)[0])
    assert [(entered[0], type(entered[1]).__name__) for entered in quantization.ENTERED] == [
        (True, "Float8CurrentScaling"), (False, "Float8CurrentScaling"),
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="MXFP8"):
        apply_fp8_autowrap(net, TERecipeKwargs(use_mxfp8_block_scaling=True))
    forward = contextual_fp8_autocast(len, None, use_during_eval=True)
    assert forward(net.eval(), [1, 2]) == 2
    assert forward.__wrapped__ is len
    assert quantization.ENTERED[-1][0]


# --- two ranks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return run_workers(WORKER, 2, timeout=100)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_on_two_ranks(run, case):
    check_case(run, case)
