"""Resolve the arguments and settings of `Accelerator(...)`, and choose and create its plugins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelerate_core.accelerator import arguments
from accelerate_core.accelerator.compatibility import (
    check_device,
    check_needs,
    check_supported,
    parallelism,
    refuse_unasked,
)
from accelerate_core.accelerator.saving import Saving
from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.builtin.no_tracking import NoTracking, asks
from accelerate_core.config import lookup
from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.config.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.config.schema import per_rank_fields, settings_fields
from accelerate_core.contract.capabilities import check_declarations
from accelerate_core.contract.parts import LoaderFactory, Tracking
from accelerate_core.contract.topology import Topology
from accelerate_core.contract.view import RuntimeView
from accelerate_core.data.rng import check_rng_types
from accelerate_core.distributed import process
from accelerate_core.distributed.digest import comparable
from accelerate_core.distributed.process import Runtime
from accelerate_core.errors import Mistakes, PluginError, did_you_mean, warn
from accelerate_core.plugins import catalog
from accelerate_core.plugins.devices import start_device
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    disabled_names,
    find,
    installed,
)
from accelerate_core.plugins.factory import (
    PARTS,
    Part,
    PluginFactory,
    attribute_methods,
    attribution,
)
from accelerate_core.plugins.manager import ActivePlugins, BoundHooks, OwnerMethod
from accelerate_core.plugins.sections import add_section_mistakes
from accelerate_core.plugins.selection import (
    DETECTED,
    NOTHING,
    RULES,
    Request,
    Selection,
    check_arguments,
    select,
)
from accelerate_core.prepare.prepared import PrepareOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Setup:
    """The resolved setup of an Accelerator: its settings and plugins, before anything starts."""

    provenance: Mapping[str, SourcedValue]
    backend: Backend
    backend_record: PluginRecord
    #: The backend's implementations of the owner hooks.
    owner_methods: Mapping[str, OwnerMethod]
    precision: Precision
    mixed_precision: str
    #: Backend, precision and extensions.
    plugins: ActivePlugins
    #: The settings of each plugin: plugin -> field -> value and source.
    settings: dict[PluginRecord, dict[str, SourcedValue]]
    #: The plugin that creates each kind of part, or None if there is no such part.
    parts: Mapping[str, Part | None]
    #: The objects in `kwargs_handlers`, by class.
    handlers: dict[type, Any]
    options: PrepareOptions
    accumulation: GradientAccumulationPlugin
    project: ProjectConfiguration
    dynamo_plugin: TorchDynamoPlugin
    parallelism_config: ParallelismConfig | None
    timeout: timedelta | None
    #: A warning about a backend that was detected but not requested, or "".
    unasked: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} is not available before on_start")

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The `AutocastKwargs` among `kwargs_handlers`, or None."""
        return self.options.autocast_handler

    def make_scaler(self, runtime: RuntimeView) -> torch.amp.GradScaler | None:
        """Return the gradient scaler, or None if the backend owns the precision."""
        if "precision" in self.backend.owns:
            return None
        handler = self.handlers.get(GradScalerKwargs)
        options = {} if handler is None else handler.to_kwargs()
        return self.precision.scaler(runtime, options)

    def make_tracking(self, log_with: Any, process: Runtime) -> Tracking:
        """Return the object that passes logged values to the trackers in `log_with`."""
        part = self.parts["tracking"] if asks(log_with) else None
        make: Callable[..., Tracking] = NoTracking if part is None else part.make
        rank, size = process.process_index, process.num_processes
        return make(log_with, self.project.logging_dir, rank, size, rank == 0)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value, source) for every setting and active plugin."""
        values = {**self.provenance, **self.plugin_settings()}
        rows = [(name, repr(one.value), one.origin) for name, one in values.items()]
        active = [(record, why) for record, _, why in self.plugins.plugins]
        active += [(part.record, part.reason) for part in self.parts.values() if part]
        return rows + [(f"plugin {one.kind}", one.label, why) for one, why in active]

    def plugin_settings(self, compared: bool = False) -> dict[str, SourcedValue]:
        """Return the settings of all active plugins, with keys of the form `kind plugin.field`.

        Args:
            compared: leave out those that may differ between ranks.
        """
        return {
            f"{record.kind} {record.name}.{name}": value
            for record, settings in self.settings.items()
            for name, value in settings.items()
            if not (compared and name in per_rank_fields(record.load()))
        }

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal on every rank."""
        labels = [(record.kind, record.label) for record, _, _ in self.plugins.plugins]
        facts: dict[str, Any] = {
            **{kind: label for kind, label in labels if kind != "extension"},
            "extensions": [label for kind, label in labels if kind == "extension"],
            "gradient_accumulation_steps": self.accumulation.num_steps,
            "compiler": self.dynamo_plugin.backend if self.dynamo_plugin.enabled else "no",
        }
        for kind, part in self.parts.items():
            facts[kind] = part.record.label if part is not None else "none"
        if self.parallelism_config is not None:
            facts["parallelism_config"] = self.parallelism_config.arithmetic()
        loading = self.options.dataloader_config
        for one in dataclasses.fields(loading):
            facts[f"dataloader_config.{one.name}"] = getattr(loading, one.name)
        for name, value in self.plugin_settings(compared=True).items():
            facts[name] = comparable(value.value)
        return facts


def resolve(own: Mapping[str, Any], more: Mapping[str, Any], topology: Topology) -> Setup:
    """Resolve every argument of `Accelerator`, and choose and create its plugins.

    Args:
        own: the arguments in the signature of `Accelerator`.
        more: other keyword arguments, which belong to plugins or are older names.

    Raises:
        UnknownArgumentError: neither the core nor an installed plugin has this argument.
        ConfigurationError: a value is invalid, or two values contradict each other.
        MissingPluginError: a requested plugin is not installed; the message has the pip command.
    """
    core = {**dict.fromkeys(arguments.OLDER), **own}
    given = {**core, **more}
    mistakes = Mistakes()
    with mistakes:
        check_arguments(more, core)
    with mistakes:
        arguments.prepare_arguments(given)
    environ = dict(os.environ)
    sources = lookup.Sources.of(environ)
    known = [name for setting in CORE_SETTINGS for name in setting.env]
    lookup.warn_near_misses(environ, [*known, *installed().triggers, *catalog.VARIABLES])
    _warn_of_unknown_plugins(environ)
    # `cpu=False` is only the default, not a request; a backend may be a class.
    passed = {**given, "cpu": given["cpu"] or None, "backend": None}
    values = lookup.resolve_core(passed, sources, {}, mistakes)
    cpu = bool(values.get("cpu", NOTHING).value)
    request = Request(given, environ, topology, sources.config, cpu)
    wanted = values.get("backend", NOTHING)
    if given["backend"] is not None:
        wanted = SourcedValue(given["backend"], "constructor argument backend")
    selection = select("backend", request, wanted)
    # This selection only collects mistakes. It is repeated below, with the defaults of the backend.
    named = {"precision": "mixed_precision", **{kind: kind for kind in PARTS}}
    chosen = [select(kind, request, values.get(name, NOTHING)) for kind, name in named.items()]
    for choice in (selection, *chosen):
        # Report invalid values first. Broken plugins are reported once all values are valid.
        if not mistakes.found or not isinstance(choice.error, PluginError):
            with mistakes:
                choice.or_raise()
    if mistakes.found:
        add_section_mistakes(given, sources, mistakes)
    mistakes.report()
    record = selection.record
    if (has := getattr(selection.plugin, "Settings", None)) is not None:
        fields = settings_fields(has, owner=record.name)
        lookup.warn_near_misses(environ, [name for field in fields for name in field.env])
    handlers = arguments.sort_handlers(given["kwargs_handlers"])
    factory = PluginFactory(sources, handlers, given)
    plugins = ActivePlugins({"backend": Backend, "precision": Precision})
    backend: Backend = factory.create(record, plugin=selection.plugin)
    plugins.add(backend, record, selection.reason)
    check_declarations(backend, f"the backend plugin {record.label}")
    with attribution("core_defaults", record):
        defaults = {**backend.core_defaults(), "parallelism_config": None}
    detected = {name: SourcedValue(v, f"backend {record.name}") for name, v in defaults.items()}
    values = lookup.resolve_core(passed, sources, detected)
    values["backend"] = SourcedValue(record.name, selection.reason)
    wanted = values["mixed_precision"]
    precise = select("precision", request, wanted).or_raise().record
    precision: Precision = factory.create(precise)
    plugins.add(precision, precise, wanted.origin)
    check_needs(precision, precise)
    if precise.distribution != OWN_DISTRIBUTION:  # the core's precisions need no attribution
        methods = ("check", "scaler", "autocast", "prepare", "plain_state", "recompute")
        attribute_methods(precision, precise, methods)
    for one in select("extension", request).or_raise().active:
        plugins.add(factory.create(one.record), one.record, one.reason)
    dynamo = lookup.resolve_compiler(given, sources)
    if dynamo.enabled:  # fails if the extension is disabled
        find("extension", "torch_compile", source=f"the compiler {dynamo.backend!r}")
    arguments.check_owners(
        {k: v for k, v in more.items() if k not in core}, selection, set(factory.settings)
    )
    active = [plugin for _, plugin, _ in plugins.plugins]
    arguments.refuse_unclaimed(handlers, active)
    refuse_unasked({one.label for one, _, _ in plugins.plugins}, sources)
    group = handlers.get(InitProcessGroupKwargs)
    setup = Setup(
        provenance=values,
        backend=backend,
        backend_record=record,
        owner_methods=plugins.owner_methods(backend, record, Backend),
        precision=precision,
        mixed_precision=precise.name,
        plugins=plugins,
        settings=factory.settings,
        accumulation=arguments.accumulation(given, values),
        options=_options(given, values, handlers.get(AutocastKwargs), dynamo),
        project=arguments.project(given),
        dynamo_plugin=dynamo,
        parallelism_config=parallelism(given, sources, request, record.name, backend),
        parts={kind: _part(select(kind, request, values[kind]), factory) for kind in PARTS},
        handlers=handlers,
        timeout=arguments.timeout(values["process_group_timeout"].value, group),
        unasked=_unasked(selection),
    )
    check_supported(backend, record, precision, values, dynamo, setup.parallelism_config)
    return setup


def _part(selection: Selection, factory: PluginFactory) -> Part | None:
    chosen = selection.or_raise().active
    return Part(chosen[0].record, chosen[0].reason, factory) if chosen else None


def _options(
    given: Mapping[str, Any],
    values: Mapping[str, SourcedValue],
    autocast: AutocastKwargs | None,
    dynamo: TorchDynamoPlugin,
) -> PrepareOptions:
    upcast = values["upcast_outputs"].value
    if autocast is not None and autocast.upcast_outputs is not None:
        upcast = autocast.upcast_outputs
    return PrepareOptions(
        dataloader_config=arguments.dataloader(given),
        rng_types=check_rng_types(given["rng_types"]),
        device_placement=given["device_placement"],
        step_scheduler_with_optimizer=given["step_scheduler_with_optimizer"],
        scheduler_steps=values["scheduler_steps"],
        autocast_handler=autocast,
        upcast_outputs=bool(upcast),
        dynamo_plugin=dynamo,
    )


def _unasked(selection: Selection) -> str:
    """Return a warning if the backend was detected rather than requested and is not a usual one."""
    record = selection.record
    usual = (RULES["backend"].usual, catalog.SEVERAL_PROCESSES)
    named = selection.wanted.value is not None
    if named or selection.active[0].asked is not DETECTED or record.name in usual:
        return ""
    return (
        f"The backend {record.label} is active although it was not requested: {selection.reason}. "
        f"Set ACCELERATE_DISABLED_PLUGINS={record.name} to disable it."
    )


def check(setup: Setup) -> tuple[Saving, LoaderFactory | None]:
    """Refuse settings that the backend or a part cannot support, before any process group exists.

    Returns:
        The access to the checkpointer, and the loader factory, or None if the core creates the loaders.
        The factory is created here so that the ranks can compare its settings.
    """
    with attribution("check", setup.backend_record):
        setup.backend.check(setup)
    # Create a checkpointer that was named, or that a URL needs, now: its mistakes fail before training.
    named = bool(setup.provenance["checkpointer"].value or "://" in str(setup.project.project_dir))
    signals = setup.provenance["preemption_signals"]
    saving = Saving(setup.parts["checkpointer"], setup.project, signals, named)
    loaders = setup.parts["loaders"]
    return saving, None if loaders is None else loaders.make()


def _warn_of_unknown_plugins(environ: Mapping[str, str]) -> None:
    known = {record.name for record in installed().plugins}.union(*catalog.NAMES.values())
    for name in disabled_names(environ) - known:
        warn(
            f"ACCELERATE_DISABLED_PLUGINS names {name!r}, but no installed plugin has this name."
            f"{did_you_mean(name, known)}",
        )


def start_process(user: object, setup: Setup) -> Runtime:
    """Start this process's device and process group, or reuse the ones that are running.

    Args:
        user: they keep running until this object is released.

    Raises:
        ConfigurationError: the backend does not run on the available device.
        RuntimeConflictError: the running device or group conflicts with the settings.
    """
    values, record = setup.provenance, setup.backend_record
    group = setup.handlers.get(InitProcessGroupKwargs)
    if (running := process.running()) is not None:
        check_device(setup.backend, record, running.device.type, "this process already runs on it")
    else:
        start_device()
    hooks = BoundHooks(setup.owner_methods, setup)

    def choose(topology: Topology, cpu: bool) -> torch.device:
        chosen = hooks.device(topology, cpu)
        check_device(setup.backend, record, chosen.type, "the device that was detected")
        return chosen

    return process.acquire(
        user,
        cpu=values["cpu"].value,
        debug=values["debug"].value,
        device=values["torch_device"].value,
        timeout=setup.timeout,
        comm_backend=group.backend if group else None,
        init_method=group.init_method if group else None,
        needs_group=setup.backend.needs_group,
        choose_device=choose,
        init_group=hooks.init_process_group,
    )
