"""What `Accelerator(...)` does before it exists: arguments, settings, plugins, and their reasons."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from accelerate_core.accelerator import arguments
from accelerate_core.accelerator.compatibility import (
    check_device,
    check_needs,
    check_supported,
    parallelism,
    refuse_unasked,
)
from accelerate_core.accelerator.sections import add_section_mistakes
from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.config import lookup
from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.config.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.config.provenance import Because
from accelerate_core.config.schema import settings_fields
from accelerate_core.contract.capabilities import check_declarations
from accelerate_core.contract.topology import Topology
from accelerate_core.contract.view import AcceleratorView
from accelerate_core.distributed import process
from accelerate_core.distributed.process import Runtime
from accelerate_core.errors import ConfigurationError, Mistakes, did_you_mean, listing, warn
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    check_api_version,
    disabled_names,
    find,
    installed,
)
from accelerate_core.plugins.manager import PARTS, ActivePlugins, Part, blame_methods, blaming
from accelerate_core.plugins.selection import (
    DETECTED,
    RULES,
    Request,
    check_arguments,
    check_owners,
    select,
)


@dataclass
class Construction:
    """All that is known before the process group starts."""

    because: dict[str, Because]
    backend: Any
    backend_record: PluginRecord
    precision: Any
    precision_name: str
    #: Backend, precision and extensions.
    plugins: ActivePlugins
    #: The plugins' settings: plugin -> field -> value and where it came from.
    settings: dict[PluginRecord, dict[str, Because]]
    #: Kind of part -> the plugin that is to make it; None where there is none.
    parts: dict[str, Part | None]
    handlers: dict[type, Any]
    dataloader: DataLoaderConfiguration
    accumulation: GradientAccumulationPlugin
    project: ProjectConfiguration
    dynamo: TorchDynamoPlugin
    parallelism: ParallelismConfig | None
    timeout: timedelta | None
    #: What to tell about a backend that runs without having been asked for.
    unasked: str = ""

    def rows(self) -> list[tuple[str, str, str]]:
        """Return every value in force with its name and where it came from; and the plugins."""
        values = {**self.because, **self.plugin_settings()}
        rows = [(name, repr(one.value), one.origin) for name, one in values.items()]
        active = [(record, why) for record, _, why in self.plugins.plugins]
        active += [(part.record, part.because) for part in self.parts.values() if part]
        return rows + [(f"plugin {one.kind}", one.label, why) for one, why in active]

    def plugin_settings(self) -> dict[str, Because]:
        """Return the settings of all active plugins as `kind plugin.field`, with their origins."""
        parts = {part.record: part.settings for part in self.parts.values() if part}
        return {
            f"{record.kind} {record.name}.{name}": value
            for record, settings in {**parts, **self.settings}.items()
            for name, value in settings.items()
        }

    def facts(self) -> dict[str, Any]:
        """Return what must be alike on every rank."""
        labels = [(record.kind, record.label) for record, _, _ in self.plugins.plugins]
        facts: dict[str, Any] = {
            **{kind: label for kind, label in labels if kind != "extension"},
            "extensions": [label for kind, label in labels if kind == "extension"],
            "gradient_accumulation_steps": self.accumulation.num_steps,
            "compiler": self.dynamo.backend if self.dynamo.enabled else "no",
        }
        for kind, part in self.parts.items():
            facts[kind] = part.record.label if part is not None else "none"
        if self.parallelism is not None:
            facts["parallelism_config"] = self.parallelism.arithmetic()
        for one in dataclasses.fields(self.dataloader):
            facts[f"dataloader_config.{one.name}"] = getattr(self.dataloader, one.name)
        for name, value in self.plugin_settings().items():
            if isinstance(value.value, str | int | float | bool | None):
                facts[name] = value.value
        return facts


def construct(own: Mapping[str, Any], lent: Mapping[str, Any], topology: Topology) -> Construction:
    """Resolve every argument of `Accelerator`.

    Args:
        own: the arguments of its signature.
        lent: what else it was given, for plugins or by older names.

    Raises:
        UnknownArgumentError: an argument nobody takes.
        ConfigurationError: a wrong value, or two that contradict each other.
        MissingPluginError: something asked for is not installed; the text has the pip command.
    """
    core = {**dict.fromkeys(arguments.OLDER), **own}
    check_arguments(lent, core)
    given = {**core, **lent}
    arguments.prepare_arguments(given)
    environ = dict(os.environ)
    sources = lookup.Sources.of(environ)
    known = [name for setting in CORE_SETTINGS for name in setting.env]
    lookup.warn_near_misses(environ, [*known, *installed().triggers, *catalog.VARIABLES])
    _warn_of_unknown_plugins(environ)
    # The default of the signature for `cpu` is no wish; a backend may be a class.
    passed = {**given, "cpu": given["cpu"] or None, "backend": None}
    mistakes = Mistakes()
    with mistakes:
        values = lookup.resolve_core(passed, sources, {})
    if mistakes.found:
        add_section_mistakes(given, sources, mistakes)
    mistakes.report()
    request = Request(given, environ, topology, sources.config, bool(values["cpu"].value))
    wanted = values["backend"]
    if given["backend"] is not None:
        wanted = Because(given["backend"], "constructor argument backend")
    selection = select("backend", request, wanted).settled()
    record = selection.record
    if (has := getattr(selection.plugin, "Settings", None)) is not None:
        fields = settings_fields(has, owner=record.name)
        lookup.warn_near_misses(environ, [name for field in fields for name in field.env])
    maker = _Maker(given, sources, arguments.sort_handlers(given["kwargs_handlers"]))
    backend = maker.make(record, selection.plugin, selection.because)
    check_declarations(backend, f"the backend plugin {record.label}")
    with blaming("core_defaults", record):
        defaults = {**backend.core_defaults(), "parallelism_config": None}
    detected = {name: Because(v, f"backend {record.name}") for name, v in defaults.items()}
    values = lookup.resolve_core(passed, sources, detected)
    values["backend"] = Because(record.name, selection.because)
    wanted = values["mixed_precision"]
    chosen = select("precision", request, wanted).settled().record
    found = chosen.load()
    check_api_version(chosen, found)
    precision = maker.make(chosen, found, wanted.origin)
    check_needs(precision, chosen)
    if chosen.distribution != OWN_DISTRIBUTION:  # the core's own need no note, and cost no call
        methods = ("check", "scaler", "autocast", "prepare", "plain_state", "recompute")
        blame_methods(precision, chosen, methods)
    for one in select("extension", request).settled().active:
        maker.make(one.record, one.record.load(), one.because)
    dynamo = lookup.resolve_compiler(given, sources)
    if dynamo.enabled:  # one that is kept out is an error
        find("extension", "torch_compile", because=f"the compiler {dynamo.backend!r}")
    check_owners({k: v for k, v in lent.items() if k not in core}, selection, set(maker.settings))
    active = [plugin for _, plugin, _ in maker.plugins.plugins]
    arguments.refuse_unclaimed(maker.handlers, active)
    refuse_unasked({one.label for one, _, _ in maker.plugins.plugins}, sources)
    group = maker.handlers.get(InitProcessGroupKwargs)
    made = Construction(
        because=values,
        backend=backend,
        backend_record=record,
        precision=precision,
        precision_name=chosen.name,
        plugins=maker.plugins,
        settings=maker.settings,
        accumulation=arguments.accumulation(given, values),
        dataloader=arguments.dataloader(given),
        project=arguments.project(given),
        dynamo=dynamo,
        parallelism=parallelism(given, sources, request, record.name, backend),
        parts={
            kind: Part.of(select(kind, request, values[kind]), sources, maker.handlers)
            for kind in PARTS
        },
        handlers=maker.handlers,
        timeout=arguments.timeout(values["process_group_timeout"].value, group),
    )
    usual = (RULES["backend"].usual, catalog.SEVERAL_PROCESSES)
    named = selection.wanted.value is not None
    if not named and selection.active[0].asked is DETECTED and record.name not in usual:
        made.unasked = (
            f"The backend {record.label} is active without having been asked for: {selection.because}. "
            f"ACCELERATE_DISABLED_PLUGINS={record.name} keeps it out."
        )
    check_supported(backend, record, precision, values, dynamo, made.parallelism)
    return made


def _warn_of_unknown_plugins(environ: Mapping[str, str]) -> None:
    known = {record.name for record in installed().plugins}.union(*catalog.NAMES.values())
    for name in disabled_names(environ) - known:
        warn(
            f"ACCELERATE_DISABLED_PLUGINS names {name!r}, and no such plugin is installed."
            f"{did_you_mean(name, known)}",
        )


@dataclass
class _Maker:
    """Makes plugins with the settings that constructor, environment and file have for them."""

    given: Mapping[str, Any]
    sources: lookup.Sources
    handlers: dict[type, Any]
    plugins: ActivePlugins = field(
        default_factory=lambda: ActivePlugins({"backend": Backend, "precision": Precision})
    )
    settings: dict[PluginRecord, dict[str, Because]] = field(default_factory=dict)

    def make(self, record: PluginRecord, plugin: Any, because: str) -> Any:
        """Return the plugin, made unless it is already, and register it as active."""
        settings, self.settings[record] = None, {}
        if isinstance(plugin, type):
            if getattr(plugin, "Settings", None) is not None:
                settings, self.settings[record] = self._settings(plugin, record.name)
            made_with = [settings] if settings is not None else []
            wanted = tuple(getattr(plugin, "handlers", ()))
            if wanted or issubclass(plugin, Backend):
                mine = [one for one in self.handlers.values() if isinstance(one, wanted)]
                made_with = [settings, mine]
            with blaming("__init__", record):
                plugin = plugin(*made_with)
        self.plugins.add(plugin, record, because)
        return plugin

    def _settings(self, plugin: Any, name: str) -> tuple[Any, dict[str, Because]]:
        cls = plugin.Settings
        names = getattr(cls, "__settings_arguments__", ()) or (f"{name}_plugin",)
        spelled = [one for one in names if self.given.get(one) is not None]
        if len(spelled) > 1:
            raise ConfigurationError(
                f"{listing(spelled)} are names of one argument; pass one of them."
            )
        argument = spelled[0] if spelled else names[0]
        passed = self.given[argument] if spelled else self.handlers.get(cls)
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
    ) -> tuple[Any, dict[str, Because]]:
        arguments.expect(argument, passed, cls)
        mistakes = Mistakes()
        with mistakes:
            return lookup.resolve_settings(cls, passed, self.sources, owner=owner)
        add_section_mistakes(self.given, self.sources, mistakes)
        mistakes.report()
        raise AssertionError("a mistake was collected")


def start_process(accelerator: AcceleratorView, built: Construction) -> Runtime:
    """Start this process's device and group, or take those that run.

    Raises:
        ConfigurationError: the backend does not run on the device there is.
        RuntimeConflictError: what runs already does not fit.
    """
    values, record = built.because, built.backend_record
    group = built.handlers.get(InitProcessGroupKwargs)
    if (running := process.running()) is not None:
        check_device(built.backend, record, running.device.type, "where this process runs already")

    def choose(topology: Topology, cpu: bool) -> Any:
        chosen = accelerator.hooks.device(accelerator, topology, cpu)
        check_device(built.backend, record, chosen.type, "what torch finds on this machine")
        return chosen

    return process.acquire(
        accelerator,
        cpu=values["cpu"].value,
        debug=values["debug"].value,
        device=values["torch_device"].value,
        timeout=built.timeout,
        comm_backend=group.backend if group else None,
        init_method=group.init_method if group else None,
        needs_group=built.backend.needs_group,
        choose_device=choose,
        init_group=partial(accelerator.hooks.init_process_group, accelerator),
    )
