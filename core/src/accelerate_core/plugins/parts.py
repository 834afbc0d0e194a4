"""The replaceable parts of an Accelerator beside its backend: one plugin of each kind, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_core.config.provenance import Because
from accelerate_core.config.resolve import Sources, resolve_settings
from accelerate_core.errors import PluginError
from accelerate_core.plugins import discovery
from accelerate_core.plugins.discovery import (
    PluginRecord,
    check_api_version,
    disabled_names,
    find,
)
from accelerate_core.plugins.manager import blame

#: Kind -> the plugin that is taken where none is named; None: the core does it itself.
DEFAULTS = {"checkpointer": "directory", "tracking": "queued", "loaders": None}


class Part:
    """A chosen part: its class is imported when it is made, and whatever it raises names it."""

    def __init__(self, record: PluginRecord, because: str) -> None:
        self.record = record
        self.because = because
        #: Fields of its `Settings`, once it is made: value and where that came from.
        self.settings: dict[str, Because] = {}
        self._sources, self._handlers = Sources({}), dict[type, Any]()

    def reads(self, sources: Sources, handlers: Mapping[type, Any]) -> Part:
        """Take the settings of the part from here, should it have any; return the part.

        Args:
            handlers: those of `kwargs_handlers`, by class.
        """
        self._sources, self._handlers = sources, dict(handlers)
        return self

    def make(self, *arguments: Any) -> Any:
        """Return the part, made with `arguments`, and its `Settings` after them if it has some.

        Raises:
            ConfigurationError: one of its settings has a value it cannot have.
            PluginError: the plugin is broken, no class, or of another version of the contract.
        """
        plugin = self.record.load()
        check_api_version(self.record, plugin)
        if not callable(plugin):
            raise PluginError(f"The {self.record.kind} plugin {self.record.label} is no class.")
        own = getattr(plugin, "Settings", None)
        if own is not None:
            settings, self.settings = resolve_settings(
                own, self._handlers.get(own), self._sources, owner=self.record.name
            )
            arguments += (settings,)
        try:
            made = plugin(*arguments)
        except BaseException as error:
            blame(error, "__init__", self.record)
            raise
        return _Blamed(made, self.record)


class _Blamed:
    """Hands everything on; what a method raises gets a note with the plugin's name."""

    def __init__(self, part: Any, record: PluginRecord) -> None:
        self.__dict__.update(_part=part, _record=record)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if not callable(value):
            return value
        record = self._record

        @functools.wraps(value)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return value(*arguments, **named)
            except BaseException as error:
                blame(error, name, record)
                raise

        bound: Callable[..., Any] = call
        self.__dict__[name] = bound  # looked up once
        return bound

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)


def select_part(kind: str, wanted: Because) -> Part | None:
    """Choose the plugin of one kind; nothing of it is imported yet.

    Args:
        kind: a key of `DEFAULTS`.
        wanted: the name that was asked for, or None.

    Returns:
        None where none is named and the usual one is not installed, or kept out.

    Raises:
        MissingPluginError, PluginError: the one that is named is not there, or there twice.
    """
    if wanted.value is not None:
        name = str(wanted.value)
        return Part(find(kind, name, because=wanted.origin), wanted.origin)
    usual = DEFAULTS[kind]
    there = {record.name for record in discovery.installed().of_kind(kind)} - disabled_names()
    if usual is None or usual not in there:
        return None
    return Part(find(kind, usual, because="default"), "default")
