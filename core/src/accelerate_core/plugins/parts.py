"""The replaceable parts of an Accelerator beside its backend: one plugin of each kind, by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.config.provenance import Because
from accelerate_core.config.resolve import Sources, resolve_settings
from accelerate_core.errors import PluginError
from accelerate_core.plugins.discovery import PluginRecord, check_api_version
from accelerate_core.plugins.manager import blame, blaming
from accelerate_core.plugins.selection import Selection

#: The kinds of parts, each a setting of the core by that name.
PARTS = ("checkpointer", "tracking", "loaders")


@dataclass
class Part:
    """A chosen part: its class is imported when it is made, and whatever it raises names it.

    Attributes:
        sources: where its settings come from, should it have any.
        handlers: those of `kwargs_handlers`, by class.
    """

    record: PluginRecord
    because: str
    sources: Sources
    handlers: Mapping[type, Any]
    #: Fields of its `Settings`, once it is made: value and where that came from.
    settings: dict[str, Because] = field(default_factory=dict)

    @classmethod
    def of(
        cls, selection: Selection, sources: Sources, handlers: Mapping[type, Any]
    ) -> Part | None:
        """Return the part that was chosen; None where there is none.

        Raises:
            MissingPluginError, PluginError: the one that is named is not there, or there twice.
        """
        chosen = selection.settled().active
        return cls(chosen[0].record, chosen[0].because, sources, handlers) if chosen else None

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
                own, self.handlers.get(own), self.sources, owner=self.record.name
            )
            arguments += (settings,)
        with blaming("__init__", self.record):
            return _Blamed(plugin(*arguments), self.record)


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

        self.__dict__[name] = call  # looked up once
        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)
