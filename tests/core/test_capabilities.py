"""A stranger's precision meets a stranger's backend: what one needs, the other accepts, or is told."""

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
    supports = {"accepts": ("autocast",), "precisions": ("own",)}

class Usual(Backend):
    name = "usual"
    api_version = (1, 0)

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
    names = ("Layers", "Own", "Silent", "Misspelt")
    groups = {
        "backends": {"narrow": "Narrow", "usual": "Usual"},
        "precisions": {name.lower(): name for name in names},
    }
    distribution(root, "capable", CODE, groups)
    return root


@pytest.mark.parametrize(
    ("backend", "precision", "dynamo", "kind", "said"),
    [
        ("usual", "layers", None, "", []),
        ("narrow", "bf16", None, "", []),
        ("narrow", "own", None, "", []),  # it brings it about by itself
        ("narrow", "layers", None, "ConfigurationError", ["'modules'", "layers are replaced"]),
        ("narrow", "fp16", None, "ConfigurationError", ["'loss_scaling'", "accepts 'autocast'"]),
        ("usual", "own", None, "ConfigurationError", ["'optimizer'"]),
        ("usual", "layers", "eager", "ConfigurationError", ["does not support compiled"]),
        ("usual", "silent", None, "PluginError", ["'convert'", "'modules', 'parameters'"]),
        ("usual", "misspelt", None, "PluginError", ["'module'", "Did you mean 'modules'?"]),
    ],
)
def test_what_is_needed_is_accepted_or_named(
    root: Path, backend: str, precision: str, dynamo: str | None, kind: str, said: list[str]
) -> None:
    found, text = run(root, TRY.format(backend=backend, precision=precision, dynamo=dynamo))
    assert found == kind, text
    assert [word for word in said if word not in text] == []
