"""Find the script, module or program to launch before any process starts."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules

from accelerate_core.plugin import ConfigurationError, did_you_mean
from accelerate_launch.plan import Target


def find_target(
    name: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    module: bool = False,
    no_python: bool = False,
) -> Target:
    """Return the target to launch.

    Raises:
        ConfigurationError: the script, module or program does not exist; the text has the most
            similar name.
    """
    target = make_target(name, arguments, module=module, no_python=no_python)
    if module:
        try:
            find_module(name, first=[str(Path.cwd())])
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"Cannot launch {name!r}: {error}") from None
    elif no_python:
        if shutil.which(name, path=environ.get("PATH")) is None:
            raise ConfigurationError(
                f"The program {name!r} was not found, or is not executable. To run it with the Python "
                "interpreter, leave out --no_python."
            )
    else:
        _check_script(name)
    return target


def make_target(
    name: str, arguments: Sequence[str], *, module: bool = False, no_python: bool = False
) -> Target:
    """Return a target without looking for it, because it may exist only on other machines.

    Raises:
        ConfigurationError: it would be both a module and a program.
    """
    if module and no_python:
        raise ConfigurationError("--module and --no_python cannot be used together.")
    if module:
        return Target(name, tuple(arguments), "module")
    return Target(name, tuple(arguments), "program" if no_python else "script")


def _check_script(name: str) -> None:
    path = Path(name)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    folder = path.parent
    if path.is_dir():
        raise ConfigurationError(f"{name!r} is a folder without a __main__.py, not a script.")
    if not folder.is_dir():
        raise ConfigurationError(
            f"The script {name!r} does not exist: there is no folder {str(folder)!r}."
        )
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError:
        names = []
    hint = did_you_mean(path.name, names)
    raise ConfigurationError(f"The script {name!r} does not exist in {folder.resolve()}.{hint}")


def find_module(name: str, *, first: Sequence[str] = ()) -> ModuleSpec:
    """Find a module as an import would, without importing its packages.

    Args:
        first: folders to search before `sys.path`.

    Raises:
        ModuleNotFoundError: it does not exist; the text has the missing part and the most similar
            name.
    """
    found = None
    package = ""
    places = [*first, *sys.path]
    for part in name.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None and not package:
            found = importlib.util.find_spec(part)  # a built-in module, or one with a custom finder
        if found is None:
            near = did_you_mean(part, {info.name for info in iter_modules(places)})
            where = f" in package {package!r}" if package else ""
            raise ModuleNotFoundError(f"There is no module {part!r}{where}.{near}")
        package = f"{package}.{part}".lstrip(".")
        places = list(found.submodule_search_locations or ())
    assert found is not None
    return found
