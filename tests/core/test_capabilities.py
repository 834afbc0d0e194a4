"""A third-party precision with a third-party backend: unmet needs are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from dummies import distribution, run

CODE = """
import torch
from accelerate_core import Backend, Precision

class Narrow(Backend):
    name = "narrow"
    api_version = (1, 0)
    reduces_gradients = "never"
    supports = {"accepts": ("autocast",), "precisions": ("own",)}

class Mute(Backend):
    name = "mute"
    api_version = (1, 0)

class Usual(Mute):
    name = "usual"
    reduces_gradients = "never"

class Declares(Usual):
    name = "declares"
    reduces_gradients = "step"

class Misdeclares(Usual):
    name = "misdeclares"
    reduces_gradients = "steps"

class Layers(Precision):
    name = "layers"
    api_version = (1, 0)
    needs = frozenset({"modules"})
    supports = {"compile": False}

    def convert(self, model):
        return model

class Own(Precision):
    name = "own"
    api_version = (1, 0)

    def __init__(self, settings=None):
        super().__init__(settings)
        self.needs = frozenset({"optimizer"})  # of an instance: what it needs may follow its settings

class Silent(Precision):
    name = "silent"
    api_version = (1, 0)

    def convert(self, model):
        return model

class Misspelt(Precision):
    name = "misspelt"
    api_version = (1, 0)
    needs = frozenset({"module"})
"""
TRY = """
from accelerate_core import Accelerator
try:
    Accelerator(cpu=True, backend={backend!r}, mixed_precision={precision!r}, dynamo_backend={dynamo!r})
except Exception as error:
    out([type(error).__name__, str(error)])
else:
    out(["", ""])
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("capabilities")
    backends = ("Narrow", "Mute", "Usual", "Declares", "Misdeclares")
    names = ("Layers", "Own", "Silent", "Misspelt")
    groups = {
        "backends": {name.lower(): name for name in backends},
        "precisions": {name.lower(): name for name in names},
    }
    distribution(root, "capable", CODE, groups)
    return root


@pytest.mark.parametrize(
    ("backend", "precision", "dynamo", "kind", "expected"),
    [
        ("usual", "layers", None, "", []),
        ("narrow", "bf16", None, "", []),
        (
            "narrow",
            "own",
            None,
            "",
            [],
        ),  # the precision casts by itself, so the backend needs nothing
        ("narrow", "layers", None, "ConfigurationError", ["'modules'", "layers are replaced"]),
        ("narrow", "fp16", None, "ConfigurationError", ["'loss_scaling'", "accepts 'autocast'"]),
        ("usual", "own", None, "ConfigurationError", ["'optimizer'"]),
        ("usual", "layers", "eager", "ConfigurationError", ["cannot run compiled"]),
        ("usual", "silent", None, "PluginError", ["'convert'", "'modules', 'parameters'"]),
        ("usual", "misspelt", None, "PluginError", ["'module'", "Did you mean 'modules'?"]),
    ],
)
def test_needs_of_a_precision_are_met_or_reported(
    root: Path, backend: str, precision: str, dynamo: str | None, kind: str, expected: list[str]
) -> None:
    found, text = run(root, TRY.format(backend=backend, precision=precision, dynamo=dynamo))
    assert found == kind, text
    assert [word for word in expected if word not in text] == []


ASK = """
from accelerate_core.accelerator.construction import resolve
from accelerate_core.contract.topology import Topology
import inspect
from accelerate_core import Accelerator
own = {name: one.default for name, one in inspect.signature(Accelerator.__init__).parameters.items()}
del own["self"], own["plugin_arguments"]
try:
    built = resolve({**own, "cpu": True, "backend": BACKEND}, {}, Topology(0, COUNT, 0, COUNT))
except Exception as error:
    out([type(error).__name__, str(error)])
else:
    out(["", built.backend.reduces_gradients])
"""


@pytest.mark.parametrize(
    ("backend", "processes", "kind", "expected"),
    [
        ("single", 1, "", ["never"]),
        ("declares", 2, "", ["step"]),
        ("ddp", 2, "", ["backward"]),
        pytest.param("fsdp2", 2, "", ["backward"], marks=pytest.mark.needs("torch>=2.11")),
        ("deepspeed", 2, "", ["engine"]),
        ("mute", 1, "PluginError", ["mute", "dummy-capable 1.0", "reduces_gradients=None"]),
        ("mute", 3, "PluginError", ["'backward': at", "'step': when", "'engine': ", "'never': "]),
        ("misdeclares", 1, "PluginError", ["'steps'", "Did you mean 'step'?"]),
    ],
)
def test_backend_must_declare_when_it_reduces_gradients(
    root: Path, backend: str, processes: int, kind: str, expected: list[str]
) -> None:
    code = ASK.replace("BACKEND", repr(backend)).replace("COUNT", str(processes))
    found, text = run(root, code)
    assert found == kind, text
    assert [word for word in expected if word not in text] == []
