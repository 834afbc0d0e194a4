"""Serve Accelerate's names from the modules of the package `accelerate`.

These modules are files in the folder `served`, which contain no code except scripts for tests and functions
whose source libraries look for. The names of each module are in `names.json`, which was read from Accelerate.
They are looked up in the packages of accelerate-core when they are used.
"""

from __future__ import annotations

import dis
import functools
import importlib
import json
import logging
import re
import sys
from collections.abc import Callable
from importlib import resources
from types import FrameType, ModuleType
from typing import Any

from accelerate_core.plugin import MissingPluginError
from accelerate_drop_in.absent import absent, left_out
from accelerate_drop_in.pickled import publish
from accelerate_tracking.rank_logger import get_logger

_CONFIG, _ESTIMATE, _PARSERS = (
    f"accelerate_drop_in.commands.{name}" for name in ("config", "estimate", "parsers")
)
_DATA = "accelerate_core.data"
#: For each module, the modules in which its names are looked up before `accelerate_core.utils`.
_HOMES = {
    "": ("accelerate_drop_in.accelerator",),
    "accelerator": ("accelerate_drop_in.accelerator", "accelerate_core.accelerator"),
    "checkpointing": ("accelerate_drop_in.checkpointing",),
    **{
        f"commands.{name}": (f"accelerate_drop_in.commands.{name}", _PARSERS, _CONFIG)
        for name in ("config", "env", "estimate", "launch", "merge")
    },
    "commands.config.config_args": (_CONFIG, "accelerate_drop_in.constants"),
    "commands.to_fsdp2": ("accelerate_drop_in.commands.to_fsdp2", _PARSERS),
    "commands.test": (
        *("accelerate_drop_in.commands.test", _PARSERS, "accelerate_drop_in.testing.helpers"),
    ),
    "commands.tpu": ("accelerate_drop_in.commands.tpu", _PARSERS, _CONFIG),
    "commands.utils": (_PARSERS,),
    "commands.accelerate_cli": (
        *("accelerate_drop_in.commands", _PARSERS, _ESTIMATE),
        *(f"accelerate_drop_in.commands.{name}" for name in ("env", "to_fsdp2", "tpu")),
    ),
    "data_loader": (
        "accelerate_drop_in.by_hand",
        "accelerate_drop_in.data_loader",
        *(f"{_DATA}.{name}" for name in ("loader", "shard", "order", "prepare_loader", "rng")),
    ),
    "hooks": ("accelerate_big_model.hooks",),
    "inference": ("accelerate_drop_in.inference",),
    "launchers": ("accelerate_launch", "accelerate_drop_in.state"),
    "logging": ("accelerate_tracking.rank_logger",),
    "optimizer": ("accelerate_drop_in.by_hand", "accelerate_drop_in.models"),
    "scheduler": ("accelerate_drop_in.by_hand",),
    "state": (
        *("accelerate_drop_in.by_hand", "accelerate_drop_in.state"),
        *("accelerate_core.state", "accelerate_core.config.enums"),
    ),
    "test_utils": ("accelerate_drop_in.testing.helpers", "accelerate_drop_in.testing.training"),
    "test_utils.testing": ("accelerate_drop_in.testing.helpers",),
    "test_utils.training": ("accelerate_drop_in.testing.training",),
    "tracking": ("accelerate_drop_in.tracking", "accelerate_tracking"),
    "utils.ao": ("accelerate_drop_in.fp8",),
    "utils.bnb": ("accelerate_drop_in.quantization",),
    "utils.constants": ("accelerate_drop_in.constants", "accelerate_drop_in.models"),
    "utils.dataclasses": (
        *("accelerate_drop_in.enums", "accelerate_drop_in.models", "accelerate_drop_in.fp8"),
    ),
    "utils.deepspeed": ("accelerate_drop_in.by_hand",),
    "utils.environment": ("accelerate_drop_in.environment",),
    "utils.imports": ("accelerate_drop_in.environment",),
    "utils.launch": ("accelerate_drop_in.launching",),
    "utils.modeling": ("accelerate_drop_in.models", "accelerate_big_model.device_map"),
    "utils.operations": ("accelerate_drop_in.trees", "accelerate_drop_in.verbs"),
    "utils.other": ("accelerate_drop_in.other", "accelerate_drop_in.models"),
    "utils.transformer_engine": ("accelerate_drop_in.fp8",),
    "utils.versions": ("accelerate_drop_in.versions",),
}
#: Modules in `_HOMES` that are not used to look up names of other modules.
_APART = re.compile(r"\.(commands|testing)\b")

#: Classes that need the private members of Accelerate's classes, which `private` adds.
_PRIVATE = {
    *("Accelerator", "AcceleratorState", "GradientState", "PartialState", "ParallelismConfig"),
    *("DataLoaderShard", "DataLoaderDispatcher"),
}
#: Names that are always looked up in the same modules.
_ONE_HOME = dict.fromkeys(
    ("ParallelismConfig", "TorchDynamoPlugin"), ("accelerate_drop_in.settings",)
)
_PROBE = re.compile(r"is_\w+_available")
#: Modules that have a logger, with the function that creates it. Scripts set its level or replace it.
_LOGGERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        (
            *("big_modeling", "commands.launch", "commands.to_fsdp2", "state", "utils.bnb"),
            *("utils.dataclasses", "utils.environment", "utils.modeling"),
        ),
        logging.getLogger,
    ),
    **dict.fromkeys(
        (
            *("accelerator", "checkpointing", "data_loader", "tracking"),
            *("utils.fsdp_utils", "utils.other"),
        ),
        get_logger,
    ),
}
#: Globals of Accelerate's modules that scripts replace.
_GLOBALS = {"commands.env": ("which",)}
#: Private functions that libraries import.
_PRIVATE_NAMES = {
    "_refuse_recurrent_layers_under_sequence_parallelism": (
        *("accelerate_fsdp2.sequence", "refuse_recurrent"),
    ),
    "_validate_launch_command": ("accelerate_drop_in.launching", "validate_launch_command"),
    "_accelerate_added_attributes": ("accelerate_drop_in.constants", "ADDED_ATTRIBUTES"),
    "_get_proper_dtype": ("accelerate_drop_in.models", "proper_dtype"),
}
#: Functions whose source text libraries look for in the served file.
_IN_FILES = dict.fromkeys(("fsdp2_prepare_model",), ("accelerate.utils.fsdp_utils",))

#: The original value of each name that a script has replaced.
_originals: dict[str, Any] = {}


@functools.cache
def names() -> dict[str, list[str]]:
    """Return Accelerate's public names by module; the package itself is ""."""
    table: dict[str, list[str]] = _table("names")
    return table


@functools.cache
def _table(name: str) -> Any:
    """Read a table of what Accelerate's modules have, by module."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def _imported(module: str, name: str) -> Any:
    """Return an object that Accelerate's module imports from another library.

    Raises:
        AttributeError: it imports nothing of this name, or the library is not installed.
    """
    where, _, inner = _table("imports").get(module, {}).get(name, "").partition(":")
    try:
        home = importlib.import_module(where) if where else None
        return getattr(home, inner) if inner and home else home
    except (ImportError, AttributeError):
        return None


class _Absent(type):
    """A name that can be imported but not used. Using it raises an error that says what to do."""

    reason: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise MissingPluginError(cls.reason)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingPluginError(cls.reason)


class Served(ModuleType):
    """A module whose names are looked up when they are used.

    An assignment also replaces the name in the modules of accelerate-core that have it, because scripts
    replace Accelerate's functions in this way.
    """

    def __getattr__(self, name: str) -> Any:
        module = self.__name__.partition(".")[2]
        known = names()[module]
        if name == "__all__":
            return [one for one in known if left_out(module, one) is None and hasattr(self, one)]
        if name not in known:
            if name == "logger" and module in _LOGGERS:
                ModuleType.__setattr__(self, name, _logger(module))
                return vars(self)[name]
            if name in _GLOBALS.get(module, ()):
                return getattr(importlib.import_module(_HOMES[module][0]), name)
            if name in _PRIVATE_NAMES:
                home, inner = _PRIVATE_NAMES[name]
                return getattr(importlib.import_module(home), inner)
            if f"{self.__name__}.{name}".partition(".")[2] in names():
                return importlib.import_module(f"{self.__name__}.{name}")
            if (value := _imported(module, name)) is not None:
                ModuleType.__setattr__(self, name, value)
                return value
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = self._find(name)
        if isinstance(value, type) and not isinstance(value, _Absent):
            publish(name, value)
        ModuleType.__setattr__(self, name, value)
        return value

    def _find(self, name: str) -> Any:
        if name in _PRIVATE:
            importlib.import_module("accelerate_drop_in.private")
        module = self.__name__.partition(".")[2]
        if (reason := left_out(module, name)) is not None:
            text = f"{self.__name__}.{name} is not available: {reason}"
            # Only an import must fail with the reason. hasattr and getattr need an AttributeError.
            raise (
                ImportError(text, name=name) if _imports(sys._getframe(2)) else AttributeError(text)
            )
        if (missing := absent(module, name)) is not None:
            return _Absent(name, (), {"reason": missing, "__doc__": missing})
        own = _ONE_HOME.get(name) or _IN_FILES.get(name) or _HOMES.get(module, ())
        if _PROBE.fullmatch(name):
            own = ("accelerate_drop_in.probes",)
        others = (one for homes in _HOMES.values() for one in homes if not _APART.search(one))
        for home in (*own, "accelerate_core.utils", *others):
            if home == self.__name__:
                continue
            try:
                return getattr(importlib.import_module(home), name)
            except MissingPluginError as error:
                missing = missing or str(error)
            except AttributeError:
                continue
        if missing is not None:
            return _Absent(name, (), {"reason": missing, "__doc__": missing})
        raise AttributeError(
            f"{self.__name__}.{name} exists in Hugging Face Accelerate, but not in accelerate-core"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__name__.partition(".")[2]
        other = (*_GLOBALS.get(module, ()), *(("logger",) if module in _LOGGERS else ()))
        if name in names()[module] or name in other:
            if isinstance(value, ModuleType):
                return  # importing the submodule `tqdm` must not replace the function `tqdm`
            old = getattr(self, name, None)
            original = _originals.setdefault(name, old)
            users = _replace(name, old, value)
            self._note(name, original, value, users)
        elif name.startswith("_") and hasattr(self, name) and not name.startswith("__"):
            self._note(name, _originals.setdefault(name, getattr(self, name)), value, [])
        ModuleType.__setattr__(self, name, value)

    def _note(self, name: str, original: Any, value: Any, users: list[ModuleType]) -> None:
        """Tell `replaced` of an assignment, so that it has an effect or a warning."""
        from accelerate_drop_in import replaced  # imports torch

        calls = any(name in used for used in _table("calls").values())
        replaced.note_function(self.__name__, name, original, value, users, calls)

    def __delattr__(self, name: str) -> None:
        value = vars(self)[name]
        ModuleType.__delattr__(self, name)
        if name in _originals:
            original = _originals.pop(name)
            self._note(name, original, original, _replace(name, value, original))

    def __dir__(self) -> list[str]:
        module = self.__name__.partition(".")[2]
        served = (name for name in names()[module] if left_out(module, name) is None)
        return sorted({*vars(self), *served})


def _logger(module: str) -> Any:
    """Return the logger of a module: an existing one with its name, or else a new one."""
    name = f"accelerate.{module}"
    for home in _HOMES.get(module, ()):
        found = getattr(importlib.import_module(home), "logger", None)
        if found is not None and found.name == name:
            return found
    return _LOGGERS[module](name)


def _imports(frame: FrameType) -> bool:
    """Return whether a frame is executing `from module import name`."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def _replace(name: str, old: Any, new: Any) -> list[ModuleType]:
    """Replace an object in all modules that have it under this name, and return our own ones."""
    found = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("accelerate") and vars(module).get(name) is old is not None
    ]
    for module in found:
        vars(module)[name] = new
    return [module for module in found if not isinstance(module, Served)]


def serve(name: str) -> None:
    """Make a module that is being imported serve Accelerate's names.

    If it is run as `python -m accelerate.commands.launch`, call its `main` instead.
    """
    if name == "__main__":
        specification = sys.modules[name].__spec__
        if specification is not None:
            main = importlib.import_module(specification.name).main
            raise SystemExit(main())
    sys.modules[name].__class__ = Served
