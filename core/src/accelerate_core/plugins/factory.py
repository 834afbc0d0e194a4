"""Create plugins: load them, check their version, resolve their settings, and name them in errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.contract.checkpointer import Checkpointer
from accelerate_core.contract.parts import LoaderFactory, Tracking, check_members
from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    MissingPluginError,
    Mistakes,
    PluginError,
    listing,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins.sections import add_section_mistakes

#: The kinds of parts, each with the Protocol that it implements. A core setting of that name selects one.
PARTS: dict[str, type] = {
    "checkpointer": Checkpointer,
    "tracking": Tracking,
    "loaders": LoaderFactory,
}


@dataclass
class PluginFactory:
    """Creates plugins of any kind, for an Accelerator, a launch or your own kind.

    Args:
        sources: environment and config file.
        handlers: the objects of `kwargs_handlers` by class.
        arguments: the arguments of the Accelerator; some are a plugin's settings.
    """

    sources: Sources
    handlers: Mapping[type, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: The resolved settings: plugin -> field of its `Settings` -> value with its source.
    settings: dict[PluginRecord, dict[str, SourcedValue]] = field(default_factory=dict)

    def create(
        self, record: PluginRecord, *arguments: Any, plugin: Any = None, **named: Any
    ) -> Any:
        """Create an instance of a plugin.

        The class is called with `arguments`, its settings if it has any, its handlers if it takes
        some, and the keyword arguments `named`. A backend always gets settings and handlers.

        Args:
            record: the plugin.
            arguments: the first arguments of the class.
            plugin: a class that is already checked, or an instance, which is returned unchanged;
                default: load and check the record.
            named: keyword arguments of the class.

        Raises:
            ConfigurationError: one of its settings has an invalid value.
            PluginError: the plugin is broken, has no `api_version`, or has another name.
            PluginVersionError: it was written for another major version of the contract.
        """
        if plugin is None:
            plugin = record.load_checked()
        self.settings[record] = {}
        if not isinstance(plugin, type):
            return plugin
        settings = None
        if getattr(plugin, "Settings", None) is not None:
            settings, sources = self._settings(plugin, record.name)
            self.settings[record] = sources
        takes_handlers = getattr(plugin, "handlers", None)
        if takes_handlers or (takes_handlers is not None and record.kind == "backend"):
            wanted = tuple(takes_handlers)
            mine = [one for one in self.handlers.values() if isinstance(one, wanted)]
            arguments += (settings, mine)
        elif settings is not None:
            arguments += (settings,)
        with attribution("__init__", record):
            return plugin(*arguments, **named)

    def create_part(self, record: PluginRecord, *arguments: Any) -> Any:
        """Create a part whose exceptions name the plugin.

        Raises:
            PluginError: it lacks a member of its Protocol, or for the reasons of `create`.
        """
        part = self.create(record, *arguments)
        check_members(part, PARTS[record.kind], f"The {record.kind} plugin {record.label}")
        return Attributed(part, record)

    def _settings(self, plugin: Any, name: str) -> tuple[Any, dict[str, SourcedValue]]:
        cls = plugin.Settings
        names = getattr(cls, "__settings_arguments__", ()) or (f"{name}_plugin",)
        spelled = [one for one in names if self.arguments.get(one) is not None]
        if len(spelled) > 1:
            raise ConfigurationError(
                f"{listing(spelled)} are different names of the same argument. Pass only one of them."
            )
        argument = spelled[0] if spelled else names[0]
        passed = self.arguments[argument] if spelled else self.handlers.get(cls)
        if isinstance(passed, Mapping) and passed and getattr(plugin, "several_settings", False):
            several = {
                str(key): self._resolved(cls, value, f"{argument}[{key!r}]", name)
                for key, value in passed.items()
            }
            first = next(iter(several.values()))
            return {key: made for key, (made, _) in several.items()}, first[1]
        return self._resolved(cls, passed, argument, name)

    def _resolved(
        self, cls: type[Any], passed: Any, argument: str, owner: str
    ) -> tuple[Any, dict[str, SourcedValue]]:
        if passed is not None and not isinstance(passed, cls):
            raise ConfigurationError(
                f"Accelerator({argument}=...) takes a {cls.__name__}, not {type(passed).__name__}."
            )
        mistakes = Mistakes()
        with mistakes:
            return resolve_settings(cls, passed, self.sources, owner=owner)
        add_section_mistakes(self.arguments, self.sources, mistakes)
        mistakes.report()
        raise AssertionError("a mistake was collected")


@dataclass(frozen=True)
class Part:
    """A selected part, which is imported when it is created.

    Attributes:
        record: the plugin.
        reason: why it was selected.
        factory: creates it.
    """

    record: PluginRecord
    reason: str
    factory: PluginFactory

    def make(self, *arguments: Any) -> Any:
        """Create the part with these arguments and its settings."""
        return self.factory.create_part(self.record, *arguments)


# --- attribution of errors ------------------------------------------------------------------------


def add_plugin_note(error: BaseException, hook: str, record: PluginRecord) -> None:
    """Add a note to an exception that names the hook and the plugin that raised it.

    A missing plugin is a configuration error, so no plugin is named. Errors that our own packages
    raise on purpose get no note either, because their message says what the caller did wrong.
    """
    if isinstance(error, MissingPluginError):
        return
    on_purpose = isinstance(error, AccelerateError) and not isinstance(error, PluginError)
    if on_purpose and record.distribution in catalog.distributions():
        return
    error.add_note(f"accelerate-core: hook {hook!r} of plugin {record.label}")


def attribute_methods(plugin: Any, record: PluginRecord, names: Iterable[str]) -> None:
    """Name the plugin in exceptions of these methods. Each call of a method costs one more call."""
    for name in names:
        method = getattr(plugin, name)
        setattr(plugin, name, functools.wraps(method)(attributed(method, name, record)))


@contextmanager
def attribution(hook: str, record: PluginRecord) -> Iterator[None]:
    """Name the plugin in exceptions that the block raises."""
    try:
        yield
    except BaseException as error:
        add_plugin_note(error, hook, record)
        raise


class Attributed:
    """Forwards everything to an object, and names its plugin in exceptions of its methods."""

    def __init__(self, part: Any, record: PluginRecord) -> None:
        self.__dict__.update(_part=part, _record=record)

    def __getattr__(self, name: str) -> Any:
        if name == "_record":  # not set yet: unpickling, copying
            raise AttributeError(name)
        with attribution(name, self._record):
            value = getattr(self._part, name)
        if callable(value):
            value = functools.wraps(value)(attributed(value, name, self._record))
            self.__dict__[name] = value  # looked up once
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)


def attributed(method: Callable[..., Any], name: str, record: PluginRecord) -> Callable[..., Any]:
    """Return a method that names its plugin in exceptions."""

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except BaseException as error:
            add_plugin_note(error, name, record)
            raise

    return call
