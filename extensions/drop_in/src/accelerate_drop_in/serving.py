"""The modules of the package `accelerate`: each hands out the original's names, from their homes here.

Those modules are real files below `served`, which hold nothing of their own but scripts that tests
launch: the names of each stand in `names.json`, read from the original.
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

from accelerate_core.errors import MissingPluginError
from accelerate_core.logging import get_logger
from accelerate_drop_in.absent import absent, left_out

_CONFIG, _ESTIMATE, _PARSERS = (
    f"accelerate_drop_in.commands.{name}" for name in ("config", "estimate", "parsers")
)
_DATA = "accelerate_core.data"
#: Where else a module's names are looked for, before what all our packages export.
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
    "logging": ("accelerate_core.logging",),
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
#: Homes that are not those of names of other modules.
_APART = re.compile(r"\.(commands|testing)\b")

#: Have private members of the original only once these have been added.
_PRIVATE = {
    *("Accelerator", "AcceleratorState", "GradientState", "PartialState", "ParallelismConfig"),
    *("DataLoaderShard", "DataLoaderDispatcher"),
}
#: Have one home, whichever module they are asked of.
_ONE_HOME = dict.fromkeys(
    ("ParallelismConfig", "TorchDynamoPlugin"), ("accelerate_drop_in.settings",)
)
_PROBE = re.compile(r"is_\w+_available")
#: Modules that have a logger, by what makes it; programs set its level, or replace it.
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
#: What a module of the original uses, and programs replace in it.
_GLOBALS = {"commands.env": ("which",)}
#: Private functions that clients import.
_PRIVATE_NAMES = {
    "_refuse_recurrent_layers_under_sequence_parallelism": (
        *("accelerate_fsdp2.sequence", "refuse_recurrent"),
    ),
    "_validate_launch_command": ("accelerate_drop_in.launching", "validate_launch_command"),
}

#: What had a name before a client assigned to it.
_originals: dict[str, Any] = {}


@functools.cache
def names() -> dict[str, list[str]]:
    """Return the original's public names by module; the package itself is ""."""
    text = resources.files(__package__).joinpath("names.json").read_text(encoding="utf-8")
    made: dict[str, list[str]] = json.loads(text)
    return made


class _Absent(type):
    """A name of a package that is not installed: it can be imported, and using it says what to install."""

    told: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise MissingPluginError(cls.told)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingPluginError(cls.told)


class Served(ModuleType):
    """A module whose names are looked up when they are used.

    An assignment reaches the modules of ours that have the name, too: clients replace functions of the
    original so.
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
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = self._find(name)
        ModuleType.__setattr__(self, name, value)
        return value

    def _find(self, name: str) -> Any:
        if name in _PRIVATE:
            importlib.import_module("accelerate_drop_in.private")
        module = self.__name__.partition(".")[2]
        if (reason := left_out(module, name)) is not None:
            told = f"{self.__name__}.{name} is not served: {reason}"
            # An import says why; hasattr and getattr with a default go on.
            raise (
                ImportError(told, name=name) if _imports(sys._getframe(2)) else AttributeError(told)
            )
        if (missing := absent(module, name)) is not None:
            return _Absent(name, (), {"told": missing, "__doc__": missing})
        own = _ONE_HOME.get(name) or _HOMES.get(module, ())
        if _PROBE.fullmatch(name):
            own = ("accelerate_drop_in.probes",)
        others = (one for homes in _HOMES.values() for one in homes if not _APART.search(one))
        for home in (*own, "accelerate_core.utils", *others):
            try:
                return getattr(importlib.import_module(home), name)
            except MissingPluginError as error:
                missing = missing or str(error)
            except AttributeError:
                continue
        if missing is not None:
            return _Absent(name, (), {"told": missing, "__doc__": missing})
        raise AttributeError(
            f"{self.__name__}.{name} of Hugging Face Accelerate is not served by accelerate-core"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__name__.partition(".")[2]
        other = (*_GLOBALS.get(module, ()), *(("logger",) if module in _LOGGERS else ()))
        if name in names()[module] or name in other:
            if isinstance(value, ModuleType):
                return  # the module `tqdm` is imported, where the function has that name
            old = getattr(self, name, None)
            _originals.setdefault(name, old)
            _replace(name, old, value)
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        value = vars(self)[name]
        ModuleType.__delattr__(self, name)
        if name in _originals:
            _replace(name, value, _originals.pop(name))

    def __dir__(self) -> list[str]:
        module = self.__name__.partition(".")[2]
        served = (name for name in names()[module] if left_out(module, name) is None)
        return sorted({*vars(self), *served})


def _logger(module: str) -> Any:
    """Return the logger of a module: that of the module of ours which logs under its name, or a new one."""
    name = f"accelerate.{module}"
    for home in _HOMES.get(module, ()):
        found = getattr(importlib.import_module(home), "logger", None)
        if found is not None and found.name == name:
            return found
    return _LOGGERS[module](name)


def _imports(frame: FrameType) -> bool:
    """Tell whether a frame is at a `from module import name`."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def _replace(name: str, old: Any, new: Any) -> None:
    """Put another object in the place of one that modules of ours have under its name."""
    for key, module in list(sys.modules.items()):
        if key.startswith("accelerate") and vars(module).get(name) is old is not None:
            vars(module)[name] = new


def serve(name: str) -> None:
    """Turn a module that is being imported into one that serves the names of the original's.

    Run by `python -m`, as `python -m accelerate.commands.launch`, call its `main`.
    """
    if name == "__main__":
        specification = sys.modules[name].__spec__
        if specification is not None:
            main = importlib.import_module(specification.name).main
            raise SystemExit(main())
    sys.modules[name].__class__ = Served
