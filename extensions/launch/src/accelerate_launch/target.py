"""Check that what is to be launched exists, before any process is started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules

from accelerate_core.errors import ConfigurationError, did_you_mean
from accelerate_launch.plan import Target


def find_target(
    name: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    module: bool = False,
    no_python: bool = False,
) -> Target:
    """Return the target, or say what is missing and what is nearest to it.

    Raises:
        ConfigurationError: no such script, module or program.
    """
    if module and no_python:
        raise ConfigurationError("--module and --no_python exclude each other.")
    if module:
        _check_module(name)
        return Target(name, tuple(arguments), "module")
    if no_python:
        _check_program(name, environ)
        return Target(name, tuple(arguments), "program")
    _check_script(name)
    return Target(name, tuple(arguments), "script")


def _check_script(name: str) -> None:
    path = Path(name)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise ConfigurationError(f"{name!r} is a folder without a __main__.py, not a script.")
    folder = path.parent
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


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    if shutil.which(name, path=environ.get("PATH")) is None:
        raise ConfigurationError(
            f"The program {name!r} was not found, or may not be executed. Without --no_python it "
            f"is run by the Python interpreter."
        )


def _check_module(name: str) -> None:
    """Look for the module as `python -m` would, without importing its packages."""
    places: Sequence[str] = [str(Path.cwd()), *sys.path]
    walked: list[str] = []
    for part in name.split("."):
        found = _find(part, places)
        if found is None:
            near = did_you_mean(part, {info.name for info in iter_modules(list(places))})
            where = f" in package {'.'.join(walked)!r}" if walked else ""
            raise ConfigurationError(
                f"There is no module {part!r}{where} to launch {name!r}.{near}"
            )
        walked.append(part)
        places = list(found.submodule_search_locations or [])


def _find(part: str, places: Sequence[str]) -> ModuleSpec | None:
    if part in sys.builtin_module_names:
        return ModuleSpec(part, None)
    return PathFinder.find_spec(part, list(places))
