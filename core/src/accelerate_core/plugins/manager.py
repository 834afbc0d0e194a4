"""One Accelerator's plugins: registered, checked, called, and blamed by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pluggy

from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.config.provenance import Because
from accelerate_core.contract.hooks import (
    API_VERSION,
    DEPRECATED,
    HOOKS,
    PROJECT,
    HookSpecs,
    hooks_of_kind,
    is_newer,
    mark_hooks,
)
from accelerate_core.contract.parts import Checkpointer, LoaderMaker, Tracking, check_members
from accelerate_core.errors import (
    AccelerateError,
    MissingPluginError,
    PluginError,
    did_you_mean,
    warn,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import PluginRecord, check_api_version
from accelerate_core.plugins.selection import Selection


class Hooks(SimpleNamespace):
    """The owner hooks of one backend, bound: `hooks.backward(accelerator, loss, {})`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"there is no owner hook {name!r}{did_you_mean(name, hooks_of_kind('owner'))}"
        )


@dataclass(frozen=True)
class Implementation:
    """What one plugin does at a hook: called with the hook's arguments by name."""

    key: str
    record: PluginRecord
    function: Callable[..., Any]
    names: Iterable[str]

    def __call__(self, **arguments: Any) -> Any:
        return self.function(*[arguments[name] for name in self.names])


class ActivePlugins:
    """The plugin manager of one Accelerator, with its active set only.

    Args:
        bases: kind of plugin -> the core's class for it. The methods of `Backend` are the owner specs.
    """

    def __init__(self, bases: Mapping[str, type]) -> None:
        self._bases = bases
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self._manager.add_hookspecs(bases["backend"])
        self._active: dict[str, tuple[PluginRecord, Any, str]] = {}

    def add(self, plugin: Any, record: PluginRecord, because: str) -> None:
        """Register a plugin instance.

        Raises:
            PluginError: it is not of the class for its kind; it implements a hook the contract does
                not have, with arguments the hook does not have, as a wrapper, or an owner hook
                without being the backend; or a method of it is nearly a hook, or it is an extension
                without any.
        """
        key = f"{record.kind}:{record.name}"
        label = f"The {record.kind} plugin {record.label}"
        base = self._bases.get(record.kind, object)
        if not isinstance(plugin, base):
            raise PluginError(f"{label} is no subclass of accelerate_core.{base.__name__}.")
        mark_hooks(plugin, base, label)
        try:
            self._manager.register(plugin, name=key)
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"{record.label} does not keep the contract: {error}{_written_for(plugin)}. "
                "`accelerate-core plugins hooks NAME` shows what a hook may take."
            ) from None
        callers = self._manager.get_hookcallers(plugin) or []
        if record.kind == "extension" and not callers:
            raise PluginError(f"{label} has no hook: nobody would ever call it.")
        for caller in callers:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    self._check(implementation, caller.name, record)
        self._active[key] = (record, plugin, because)

    @staticmethod
    def _check(implementation: Any, hook: str, record: PluginRecord) -> None:
        if hook not in HOOKS:
            if is_newer(implementation.plugin) or implementation.optionalhook:
                return  # a hook of its own version: what both know is what is used
            raise PluginError(
                f"{record.label} does not keep the contract: unknown hook {hook!r}."
                f"{did_you_mean(hook, HOOKS)}"
            )
        for name in (hook, *(f"{hook}({argument})" for argument in implementation.argnames)):
            if name in DEPRECATED:
                gone = DEPRECATED[name]
                since = ".".join(map(str, gone.since))
                warn(
                    f"{record.label} uses {name!r}, deprecated since version {since} of the contract "
                    f"and gone in {gone.gone_in}.0: {gone.instead}.",
                    FutureWarning,
                )
        if implementation.hookwrapper or implementation.wrapper:
            raise PluginError(
                f"{record.label} wraps hook {hook!r}; hooks of this contract are not wrapped."
            )
        if HOOKS.get(hook) == "owner" and record.kind != "backend":
            raise PluginError(
                f"{record.label} implements {hook!r}, which only the active backend may answer."
            )

    @property
    def plugins(self) -> list[tuple[PluginRecord, Any, str]]:
        """The active plugins with their reasons, in registration order."""
        return list(self._active.values())

    def implementations(self, hook: str) -> list[Implementation]:
        """Return who implements a hook, ordered by plugin name."""
        found = {i.plugin_name: i for i in getattr(self._manager.hook, hook).get_hookimpls()}
        made = []
        for key in sorted(found):
            record, function = self._active[key][0], found[key].function
            blamed = _blamed(function, hook, record)
            made.append(Implementation(key, record, blamed, found[key].argnames))
        return made

    def call_each(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a broadcast or registration hook on everyone; return the answers that are not None."""
        answers = (one(**arguments) for one in self.implementations(hook))
        return [answer for answer in answers if answer is not None]

    def run_stage(self, hook: str, accelerator: Any, model: Any) -> Any:
        """Pass the model through every implementation of a stage.

        Raises:
            PluginError: an implementation returned something that is no module.
        """
        for one in self.implementations(hook):
            model = one(accelerator=accelerator, model=model)
            if not callable(getattr(model, "named_parameters", None)):
                raise PluginError(
                    f"Stage {hook!r} of {one.record.label} returned "
                    f"{type(model).__name__}; a stage returns the model."
                )
        return model

    def bind_owner(self, backend: Any, record: PluginRecord, base: type) -> Hooks:
        """Bind every owner hook of the backend once, so that calling one costs a method call."""
        return Hooks(
            **{name: _bind(backend, record, name, base) for name in hooks_of_kind("owner")}
        )


def _written_for(plugin: Any) -> str:
    if not is_newer(plugin):
        return ""
    major, minor = plugin.api_version
    ours = ".".join(map(str, API_VERSION))
    return (
        f" It was written for version {major}.{minor} of the contract, and this accelerate-core "
        f"speaks {ours}: upgrade accelerate-core."
    )


def blame(error: BaseException, hook: str, record: PluginRecord) -> None:
    """Note on an exception which hook of which plugin let it out.

    A missing plugin is no installed plugin's fault. Neither is an error that one of our own packages
    raises on purpose: its text says what the caller did wrong.
    """
    if isinstance(error, MissingPluginError):
        return
    on_purpose = isinstance(error, AccelerateError) and not isinstance(error, PluginError)
    if on_purpose and record.distribution in catalog.distributions():
        return
    error.add_note(f"accelerate-core: hook {hook!r} of plugin {record.label}")


def blame_methods(plugin: Any, record: PluginRecord, names: Iterable[str]) -> None:
    """Let what these methods of an object raise name its plugin; each costs one more call."""
    for name in names:
        method = getattr(plugin, name)
        setattr(plugin, name, functools.wraps(method)(_blamed(method, name, record)))


@contextmanager
def blaming(hook: str, record: PluginRecord) -> Iterator[None]:
    """Note on whatever the block raises that it came out of this method of this plugin."""
    try:
        yield
    except BaseException as error:
        blame(error, hook, record)
        raise


def _bind(backend: Any, record: PluginRecord, name: str, base: type) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(backend, name)
    if getattr(type(backend), name) is getattr(base, name) and name not in vars(backend):
        return method  # the core's own default: nobody else to blame
    wanted = tuple(inspect.signature(getattr(base, name)).parameters)[1:]
    taken = tuple(inspect.signature(method).parameters)
    unknown = [argument for argument in taken if argument not in wanted]
    if unknown:
        raise PluginError(
            f"{record.label}: hook {name!r} names the argument {unknown[0]!r}, which it does not have."
            f"{did_you_mean(unknown[0], wanted)}{_written_for(backend)}"
        )
    if taken == wanted:
        return _blamed(method, name, record)
    indices = [wanted.index(argument) for argument in taken]

    def call_subset(*arguments: Any) -> Any:
        return method(*[arguments[index] for index in indices])

    return _blamed(call_subset, name, record)


def _blamed(method: Callable[..., Any], name: str, record: PluginRecord) -> Callable[..., Any]:
    """Return a method that notes its plugin on what it raises."""

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except BaseException as error:
            blame(error, name, record)
            raise

    return call


# --- the replaceable parts beside the backend: one plugin of each kind, by name ---------------

#: The kinds of parts, each a setting of the core by that name, and what one has to have.
PARTS = {"checkpointer": Checkpointer, "tracking": Tracking, "loaders": LoaderMaker}


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
        label = f"The {self.record.kind} plugin {self.record.label}"
        own = getattr(plugin, "Settings", None)
        if own is not None:
            settings, self.settings = resolve_settings(
                own, self.handlers.get(own), self.sources, owner=self.record.name
            )
            arguments += (settings,)
        with blaming("__init__", self.record):
            made = plugin(*arguments)
        check_members(made, PARTS[self.record.kind], label)
        return Blamed(made, self.record)


class Blamed:
    """Hands everything on; what a method raises gets a note with the plugin's name."""

    def __init__(self, part: Any, record: PluginRecord) -> None:
        self.__dict__.update(_part=part, _record=record)

    def __getattr__(self, name: str) -> Any:
        if name == "_record":  # not set yet: unpickling, copying
            raise AttributeError(name)
        record = self._record
        with blaming(name, record):
            value = getattr(self._part, name)
        if not callable(value):
            return value
        call = functools.wraps(value)(_blamed(value, name, record))
        self.__dict__[name] = call  # looked up once
        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._part, name, value)
