"""The plugin view of an Accelerator is short, documented, and enough for our plugins."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from accelerate_core import Accelerator, Backend
from accelerate_core.contract.view import AcceleratorView

ROOT = Path(__file__).parents[2]
VIEWS = [cls for cls in AcceleratorView.__mro__ if cls.__module__ == AcceleratorView.__module__]
NAMES = {name for cls in VIEWS for name in vars(cls) if not name.startswith("_")}
PLUGINS = [
    # Functions from Accelerate's API take the script's Accelerator, with all its names.
    *(path for path in ROOT.glob("backends/*/src/**/*.py") if path.stem != "accelerate_names"),
    *ROOT.glob("examples/**/src/**/*.py"),
    *ROOT.glob("extensions/testing/src/accelerate_testing/scaffold/templates/**/src/**/*.py.in"),
]


def test_plugin_view_is_short_and_documents_each_name() -> None:
    assert 20 < len(NAMES) <= 40
    assert [name for name in NAMES if not inspect.getdoc(getattr(AcceleratorView, name))] == []


def test_accelerator_has_every_name_of_the_plugin_view() -> None:
    accelerator = Accelerator(cpu=True)
    assert [name for name in NAMES if not hasattr(accelerator, name)] == []


def attributes_read(tree: ast.AST) -> set[str]:
    """Return the attributes that are read from a parameter called `accelerator`."""
    return {
        node.attr
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(one.arg == "accelerator" for one in function.args.args)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "accelerator"
    }


def test_search_finds_attributes_that_are_read() -> None:
    code = "def hook(self, accelerator):\n    accelerator.device.type\n    other.thing\n"
    assert attributes_read(ast.parse(code)) == {"device"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: "/".join(path.parts[-3:]))
def test_plugins_read_only_the_plugin_view(path: Path) -> None:
    source = path.read_text()
    for word in ("@package@", "@name@", "@class@", "@settings@", "@api@", "@env@"):
        source = source.replace(word, "word")
    assert attributes_read(ast.parse(source)) - NAMES == set()


class LooksTooEarly(Backend):
    name = "looks"
    api_version = (1, 0)
    reduces_gradients = "never"
    wanted = ""

    def check(self, accelerator: Any) -> None:
        getattr(accelerator, self.wanted)


@pytest.mark.parametrize("name", ["device", "process_index", "models"])
def test_error_for_an_attribute_read_too_early_says_when_it_exists(name: str) -> None:
    backend = type("Looks", (LooksTooEarly,), {"wanted": name})
    with pytest.raises(AttributeError, match="before on_start"):
        Accelerator(cpu=True, backend=backend)
