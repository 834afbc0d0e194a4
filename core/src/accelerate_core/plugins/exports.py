"""Public names that plugins lend to `accelerate_core`, resolved on first use."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any

from accelerate_core.errors import MissingPluginError, PluginError
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import disabled_names, installed


def resolve(name: str) -> Any:
    """Return what an installed plugin exports under `name`.

    Raises:
        MissingPluginError: a known plugin would bring it; the text has the pip command.
        PluginError: the plugin that lends it is broken.
        AttributeError: nobody knows the name, or an installed plugin does not offer it.
    """
    found = installed().exports.get(name)
    if found is not None and found[1] not in disabled_names():
        target, distribution = found
        try:
            return pkgutil.resolve_name(target)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{name} is lent by {distribution}, which is broken: loading {target} raised "
                f"{type(error).__name__}: {error}. Reinstall or upgrade {distribution}."
            ) from error
    if name in catalog.EXPORTS:
        extra = catalog.EXPORTS[name]
        mine = [record for record in installed().plugins if record.name == extra]
        if mine:
            raise AttributeError(
                f"{name} is a name of Hugging Face Accelerate's that {mine[0].label} does not offer."
            )
        raise MissingPluginError(
            f"{name} comes with a plugin that is not installed. "
            f"Install it with: {catalog.pip_command(extra)}",
            name=name,
        )
    if name in catalog.PROBES:
        return _probe(name, catalog.PROBES[name])
    raise AttributeError(name)


def exported_names() -> list[str]:
    """List the names installed plugins lend, and the probes."""
    return sorted({*installed().exports, *catalog.PROBES})


def _probe(name: str, library: str) -> Callable[..., bool]:
    def probe(*_: bool, **__: bool) -> bool:
        # Some of the peer's take switches that narrow them; without the library all are False.
        try:
            return importlib.util.find_spec(library) is not None
        except (ImportError, ValueError):
            return False

    probe.__name__ = name
    probe.__doc__ = f"Tell whether the library {library} is installed; never raises."
    return probe
