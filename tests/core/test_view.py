"""The plugin view of an Accelerator is short, documented, and enough for our plugins."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from accelerate_core import Accelerator, Backend
from accelerate_core.contract.view import AcceleratorView, RuntimeView

ROOT = Path(__file__).parents[2]


def members_of(view: type) -> set[str]:
    views = [cls for cls in view.__mro__ if cls.__module__ == AcceleratorView.__module__]
    return {name for cls in views for name in vars(cls) if not name.startswith("_")}


NAMES = members_of(AcceleratorView)
#: The name of a hook's first argument, and what the hook may read from it.
READABLE = {"accelerator": NAMES, "runtime": members_of(RuntimeView)}
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


def attributes_read(tree: ast.AST, parameter: str = "accelerator") -> set[str]:
    """Return the attributes that are read from a parameter of this name."""
    return {
        node.attr
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(one.arg == parameter for one in function.args.args)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == parameter
    }


def test_search_finds_attributes_that_are_read() -> None:
    code = "def hook(self, accelerator):\n    accelerator.device.type\n    other.thing\n"
    assert attributes_read(ast.parse(code)) == {"device"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: "/".join(path.parts[-3:]))
def test_plugins_read_only_the_plugin_view(path: Path) -> None:
    source = path.read_text()
    for word in ("@package@", "@name@", "@class@", "@settings@", "@api@", "@env@"):
        source = source.replace(word, "word")
    for parameter, readable in READABLE.items():
        assert attributes_read(ast.parse(source), parameter) - readable == set()


class LooksTooEarly(Backend):
    name = "looks"
    api_version = (1, 0)
    reduces_gradients = "never"


def reading(name: str) -> dict[str, Any]:
    """Return hooks that read an attribute of their first argument."""

    def mesh(self: Any, runtime: Any) -> None:
        getattr(runtime, name)

    def check(self: Any, setup: Any) -> None:
        getattr(setup, name)

    return {"mesh": mesh, "check": check}


@pytest.mark.parametrize("name", ["device", "process_index", "models"])
def test_error_for_an_attribute_read_too_early_says_when_it_exists(name: str) -> None:
    backend = type("Looks", (LooksTooEarly,), {"check": reading(name)["check"]})
    with pytest.raises(AttributeError, match="before on_start"):
        Accelerator(cpu=True, backend=backend)


@pytest.mark.parametrize("name", ["communicator", "models", "gradient_state", "prepare"])
def test_mesh_hook_cannot_read_an_unfinished_accelerator(name: str) -> None:
    backend = type("Looks", (LooksTooEarly,), {"mesh": reading(name)["mesh"]})
    with pytest.raises(AttributeError, match=f"'{name}' is not available before on_start"):
        Accelerator(cpu=True, backend=backend)


def test_mesh_hook_reads_every_member_of_the_runtime_view() -> None:
    for name in READABLE["runtime"]:
        backend = type("Looks", (LooksTooEarly,), {"mesh": reading(name)["mesh"]})
        Accelerator(cpu=True, backend=backend).end_training()
