"""Register, check and call the plugins of one Accelerator."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from accelerate_core.contract.hooks import (
    API_VERSION,
    DEPRECATED,
    HOOKS,
    PROJECT,
    HookSpecs,
    hooks_of_kind,
    is_newer,
    mark_hooks,
    written_before,
)
from accelerate_core.errors import PluginError, did_you_mean, warn
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins.factory import add_plugin_note

if TYPE_CHECKING:
    import torch

    from accelerate_core.contract.checkpointer import Contribution
    from accelerate_core.contract.owner_hooks import OwnerHooks
    from accelerate_core.contract.view import AcceleratorView, SetupView
else:
    OwnerHooks = object

R = TypeVar("R")

#: Takes the name of a hook, the plugin (`kind:name`, or `core` for a default) and its function, and
#: returns the function to call instead. Extensions provide it as the method `wrap_hook`.
HookWrapper = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]


@dataclass
class OwnerMethod:
    """The active backend's implementation of one owner hook.

    Attributes:
        name: the name of the hook.
        function: takes the Accelerator and the hook's other arguments, in order.
        plugin: the plugin to name in errors; None for the core's default.
    """

    name: str
    function: Callable[..., Any]
    plugin: PluginRecord | None


class SharedHooks:
    """The stage, broadcast and registration hooks of one Accelerator.

    Several plugins may implement each hook. The tables are built once, when all plugins are active.
    Like `BoundHooks`, this holds a weak reference to the Accelerator.
    """

    def __init__(self, plugins: ActivePlugins, accelerator: AcceleratorView) -> None:
        self._accelerator = weakref.ref(accelerator)
        names = [name for name, kind in HOOKS.items() if kind != "owner"]
        self._table = {name: plugins.implementations(name) for name in names}

    def implementations(self, hook: str) -> Sequence[Implementation]:
        """Return the implementations of a hook, ordered by plugin name."""
        return self._table[hook]

    def call(self, implementation: Contribution, **arguments: Any) -> Any:
        """Call one implementation with the hook's arguments, and return its result."""
        arguments["accelerator"] = self._accelerator()
        return implementation(arguments)

    def call_each(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a broadcast or registration hook of every plugin; return the results that are not None."""
        arguments["accelerator"] = self._accelerator()
        answers = [one(arguments) for one in self._table[hook]]
        return [answer for answer in answers if answer is not None]

    def provided_attributes(self) -> dict[str, object]:
        """Return the attributes that plugins provide; the last plugin wins."""
        provided: dict[str, object] = {}
        for attributes in self.call_each("state_attributes"):
            provided |= attributes
        return provided

    def warn_of_hidden_attributes(
        self, reserved: Collection[str], warn_once: Callable[[str], None]
    ) -> None:
        """Warn about attributes of plugins whose names are not unique.

        Args:
            reserved: names that the Accelerator has itself, which take precedence.
            warn_once: warns, once per text.
        """
        owners = dict.fromkeys(reserved, "the Accelerator")
        for one in self._table["state_attributes"]:
            attributes: Mapping[str, object] = self.call(one) or {}
            for name in attributes.keys() & owners.keys():
                warn_once(
                    f"{one.record.label} serves the attribute {name!r}, which {owners[name]} also has. "
                    "Scripts only see one of them, so the plugin should rename it."
                )
            owners |= dict.fromkeys(attributes, one.record.label)

    def run_stage(self, stage: str, model: torch.nn.Module) -> torch.nn.Module:
        """Run every implementation of a stage on the model.

        Raises:
            PluginError: an implementation returned something that is not a module.
        """
        for one in self._table[stage]:
            model = self.call(one, model=model)
            if not callable(getattr(model, "named_parameters", None)):
                raise PluginError(
                    f"Stage {stage!r} of {one.record.label} returned "
                    f"{type(model).__name__}; a stage must return the model."
                )
        return model


def bind(method: Callable[..., R], accelerator: AcceleratorView) -> Callable[..., R]:
    """Bind the first argument of a method to the Accelerator, with a weak reference."""
    reference = weakref.ref(accelerator)
    return lambda *arguments: method(reference(), *arguments)


class BoundHooks(OwnerHooks):
    """The owner hooks of one Accelerator: `hooks.backward(loss, {})`.

    The parts of an Accelerator hold these hooks, so the hooks refer to it weakly; otherwise only the
    garbage collector could free it. Objects that a script may use after it drops the Accelerator,
    such as a prepared optimizer, need `holding()`.

    Args:
        methods: the methods by the name of the hook.
        accelerator: the first argument of every hook; before the Accelerator exists, its setup.
        hold: whether the hooks keep the Accelerator alive.
    """

    def __init__(
        self, methods: Mapping[str, OwnerMethod], accelerator: SetupView, hold: bool = False
    ) -> None:
        self._methods = methods
        self._accelerator = weakref.ref(accelerator)
        self._held = accelerator if hold else None

    def is_overridden(self, name: str) -> bool:
        """Return whether the backend implements this hook itself, on its class or on its instance."""
        return self._methods[name].plugin is not None

    def holding(self) -> BoundHooks:
        """Return the same hooks, which keep the Accelerator alive."""
        accelerator = self._accelerator()
        assert accelerator is not None, "holding() must be called while the Accelerator exists"
        return BoundHooks(self._methods, accelerator, hold=True)

    if not TYPE_CHECKING:  # type checkers read the hooks' own signatures

        def __getattr__(self, name: str) -> Callable[..., Any]:
            method = vars(self).get("_methods", {}).get(name)
            if method is None:
                raise AttributeError(
                    f"there is no owner hook {name!r}{did_you_mean(name, hooks_of_kind('owner'))}"
                )
            call = self._bind(method)
            setattr(self, name, call)  # bound once
            return call

    def _bind(self, method: OwnerMethod) -> Callable[..., Any]:
        function, accelerator = method.function, self._accelerator
        if method.plugin is None:
            # A partial costs no Python call. `autocast` passes the Accelerator to a precision, which
            # may keep it, so it cannot get a proxy.
            if self._held is not None:
                return functools.partial(function, self._held)
            if method.name != "autocast":
                return functools.partial(function, weakref.proxy(accelerator()))
            return lambda *arguments: function(accelerator(), *arguments)
        name, plugin = method.name, method.plugin

        def call(*arguments: Any) -> Any:
            try:
                return function(accelerator(), *arguments)
            except BaseException as error:
                add_plugin_note(error, name, plugin)
                raise

        return call


@dataclass(frozen=True)
class Implementation:
    """One plugin's implementation of a hook. The plugin is named in exceptions that it raises."""

    hook: str
    key: str
    record: PluginRecord
    function: Callable[..., Any]
    names: Iterable[str]

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.function(*map(arguments.__getitem__, self.names))
        except BaseException as error:
            add_plugin_note(error, self.hook, self.record)
            raise


class ActivePlugins:
    """The plugin manager of one Accelerator, with its active set only.

    Args:
        bases: the kind of plugin -> the core's base class. The methods of `Backend` are the owner specs.
    """

    def __init__(self, bases: Mapping[str, type]) -> None:
        self._bases = bases
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self._manager.add_hookspecs(bases["backend"])
        self._active: dict[str, tuple[PluginRecord, Any, str]] = {}
        self._wrappers: list[HookWrapper] = []

    def add(self, plugin: Any, record: PluginRecord, reason: str) -> None:
        """Register a plugin instance.

        Raises:
            PluginError: it is not an instance of the base class of its kind; it implements an unknown
                hook, a hook with unknown arguments, a hook as a wrapper, or an owner hook without
                being the backend; the name of a method is close to that of a hook; or it is an
                extension without hooks.
        """
        key = f"{record.kind}:{record.name}"
        label = f"The {record.kind} plugin {record.label}"
        base = self._bases.get(record.kind, object)
        if not isinstance(plugin, base):
            raise PluginError(f"{label} is not a subclass of accelerate_core.{base.__name__}.")
        mark_hooks(plugin, base, label)
        try:
            self._manager.register(plugin, name=key)
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"{record.label} violates the contract: {error}{_written_for(plugin)}. "
                "`accelerate-core plugins hooks NAME` shows what a hook may take."
            ) from None
        callers = self._manager.get_hookcallers(plugin) or []
        wrap = getattr(plugin, "wrap_hook", None)
        if wrap is not None:
            self._wrappers.append(wrap)
        elif record.kind == "extension" and not callers:
            raise PluginError(f"{label} has no hook, so it would never be called.")
        for caller in callers:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    self._check(implementation, caller.name, record)
        self._active[key] = (record, plugin, reason)

    @staticmethod
    def _check(implementation: Any, hook: str, record: PluginRecord) -> None:
        if hook not in HOOKS:
            if is_newer(implementation.plugin) or implementation.optionalhook:
                return  # a hook of a newer contract, which this version does not call
            raise PluginError(
                f"{record.label} violates the contract: unknown hook {hook!r}."
                f"{did_you_mean(hook, HOOKS)}"
            )
        for name in (hook, *(f"{hook}({argument})" for argument in implementation.argnames)):
            if name in DEPRECATED:
                gone = DEPRECATED[name]
                since = ".".join(map(str, gone.since))
                warn(
                    f"{record.label} uses {name!r}, which version {since} of the contract deprecated "
                    f"and {gone.gone_in}.0 will remove: {gone.instead}.",
                    FutureWarning,
                )
        if implementation.hookwrapper or implementation.wrapper:
            raise PluginError(
                f"{record.label} wraps hook {hook!r}, but this contract does not allow wrappers."
            )
        if HOOKS.get(hook) == "owner" and record.kind != "backend":
            raise PluginError(
                f"{record.label} implements {hook!r}, which only the active backend may implement."
            )

    @property
    def plugins(self) -> list[tuple[PluginRecord, Any, str]]:
        """The active plugins with their reasons, in registration order."""
        return list(self._active.values())

    def implementations(self, hook: str) -> list[Implementation]:
        """Return the implementations of a hook, ordered by plugin name."""
        found = {i.plugin_name: i for i in getattr(self._manager.hook, hook).get_hookimpls()}
        made = []
        for key in sorted(found):
            function = self._wrapped(hook, key, found[key].function)
            record = self._active[key][0]
            made.append(Implementation(hook, key, record, function, found[key].argnames))
        return made

    def _wrapped(self, hook: str, plugin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for wrap in self._wrappers:
            function = wrap(hook, plugin, function)
        return function

    def owner_methods(
        self, backend: Any, record: PluginRecord, base: type
    ) -> dict[str, OwnerMethod]:
        """Return the method of the backend for each owner hook.

        Raises:
            PluginError: a method has an argument that its hook does not have.
        """
        methods = [_owner_method(backend, record, name, base) for name in hooks_of_kind("owner")]
        for method in methods:
            owner = "core" if method.plugin is None else f"{record.kind}:{record.name}"
            method.function = self._wrapped(method.name, owner, method.function)
        return {method.name: method for method in methods}


def _written_for(plugin: Any) -> str:
    if not is_newer(plugin):
        return ""
    major, minor = plugin.api_version
    ours = ".".join(map(str, API_VERSION))
    return (
        f" It was written for version {major}.{minor} of the contract, and this accelerate-core "
        f"has {ours}. Upgrade accelerate-core."
    )


def _owner_method(backend: Any, record: PluginRecord, name: str, base: type) -> OwnerMethod:
    method: Callable[..., Any] = getattr(backend, name)
    if written_before(backend, name):
        return OwnerMethod(name, getattr(base, name).__get__(backend), None)
    if getattr(type(backend), name) is getattr(base, name) and name not in vars(backend):
        return OwnerMethod(name, method, None)
    wanted = tuple(inspect.signature(getattr(base, name)).parameters)[1:]
    taken = tuple(inspect.signature(method).parameters)
    unknown = [argument for argument in taken if argument not in wanted]
    if unknown:
        raise PluginError(
            f"{record.label}: hook {name!r} takes the argument {unknown[0]!r}, which does not exist."
            f"{did_you_mean(unknown[0], wanted)}{_written_for(backend)}"
        )
    if taken == wanted:
        return OwnerMethod(name, method, record)
    indices = [wanted.index(argument) for argument in taken]

    def call_subset(*arguments: Any) -> Any:
        return method(*[arguments[index] for index in indices])

    return OwnerMethod(name, call_subset, record)
