"""Serve the import name `accelerate` from this package, when asked.

    import accelerate_drop_in
    accelerate_drop_in.install()
    from accelerate import Accelerator

or `python -m accelerate_drop_in script.py --its arguments`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from accelerate_core.errors import AccelerateError

__all__ = ["NAME", "install", "uninstall"]

NAME = "accelerate"

#: Where each module's names are looked up, in order.
_HOMES = {
    "": ("accelerate_core", "accelerate_core.utils"),
    "accelerator": ("accelerate_core.accelerator",),
    "big_modeling": ("accelerate_core.utils",),
    "checkpointing": ("accelerate_checkpoint", "accelerate_core.utils"),
    "data_loader": (
        "accelerate_drop_in.data_loader",
        *(
            f"accelerate_core.data.{name}"
            for name in ("loader", "shard", "order", "prepare", "rng")
        ),
    ),
    "hooks": ("accelerate_big_model.hooks", "accelerate_core.utils"),
    "launchers": ("accelerate_launch",),
    "local_sgd": ("accelerate_core",),
    "logging": ("accelerate_core.logging",),
    "optimizer": ("accelerate_core.training.optimizer",),
    "scheduler": ("accelerate_core.training.scheduler",),
    "state": ("accelerate_core.state", "accelerate_core.config.enums", "accelerate_core"),
    "tracking": ("accelerate_tracking", "accelerate_core.utils"),
    "utils": ("accelerate_core.utils", "accelerate_core"),
}


class _Served(ModuleType):
    """A module whose names are looked up here when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        failure: Exception | None = None
        for home in self.__dict__["_homes"]:
            try:
                return getattr(importlib.import_module(home), name)
            except AttributeError as error:
                failure = failure or error
        raise AttributeError(f"module {self.__name__!r}, served by accelerate_core: {failure}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != NAME or not _homes(rest):
            return None
        packaged = rest.split(".")[0] in ("", "utils")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=packaged)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Served(spec.name)
        module.__dict__["_homes"] = _homes(spec.name.partition(".")[2])
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NAME:
            from accelerate_core import __version__

            module.__dict__["__version__"] = __version__


def _homes(rest: str) -> tuple[str, ...]:
    # accelerate.utils.anything: all its names are in the one public namespace.
    return _HOMES["utils"] if rest.startswith("utils.") else _HOMES.get(rest, ())


_finder = _Finder()


def install() -> None:
    """Serve `import accelerate` from accelerate_core from now on; a second call does nothing.

    Raises:
        AccelerateError: the real one is imported already.
    """
    there = sys.modules.get(NAME)
    if there is not None and not isinstance(there, _Served):
        raise AccelerateError(
            f"The package {NAME!r} is imported already, from {getattr(there, '__file__', '?')}. "
            "Call accelerate_drop_in.install() before anything imports it."
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Stop serving the name, and forget the modules served."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, module in list(sys.modules.items()):
        if isinstance(module, _Served):
            del sys.modules[name]


def main() -> None:
    """Run a script with the name served."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m accelerate_drop_in script.py [arguments]")
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0] or ".")
    runpy.run_path(sys.argv[0], run_name="__main__")
