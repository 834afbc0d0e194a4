"""What `Accelerator(...)` does before it exists: arguments, settings, plugins, and their reasons."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from accelerate_core.backend import Backend
from accelerate_core.configuration import (
    AutocastKwargs,
    Because,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    Sources,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
    resolve_core,
    resolve_settings,
)
from accelerate_core.configuration.core import CORE_SETTINGS
from accelerate_core.configuration.resolve import warn_near_misses
from accelerate_core.configuration.schema import settings_fields
from accelerate_core.contract.capabilities import ACCEPTED_BY_DEFAULT, NEEDS, check_words, lacking
from accelerate_core.errors import ConfigurationError, PluginError, did_you_mean, listing
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import (
    PluginRecord,
    check_api_version,
    disabled_names,
    find,
    installed,
)
from accelerate_core.plugins.manager import blame, blaming
from accelerate_core.plugins.parts import Part, select_part
from accelerate_core.plugins.selection import (
    Request,
    Selection,
    check_arguments,
    check_owners,
    select_backend,
    select_extensions,
)
from accelerate_core.precision import Precision
from accelerate_core.runtime import Topology

__all__ = ["CORE_ARGUMENTS", "Assembly", "assemble", "check_device"]

#: Arguments of `Accelerator` the core takes itself, with the defaults the signature shows.
CORE_ARGUMENTS: dict[str, Any] = {
    "device_placement": True,
    "split_batches": None,
    "mixed_precision": None,
    "gradient_accumulation_steps": None,
    "cpu": False,
    "dataloader_config": None,
    "rng_types": None,
    "log_with": None,
    "project_dir": None,
    "project_config": None,
    "gradient_accumulation_plugin": None,
    "step_scheduler_with_optimizer": True,
    "kwargs_handlers": None,
    "dynamo_backend": None,
    "dynamo_plugin": None,
    "backend": None,
    "process_group_timeout": None,
    "upcast_outputs": None,
    "preemption_signals": None,
    "checkpointer": None,
    "tracking": None,
    "parallelism_config": None,
    # Older names, mapped with one warning.
    "fp16": None,
    "torch_tp_plugin": None,
    "even_batches": None,
    "dispatch_batches": None,
}

_CORE_HANDLERS = (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)


@dataclass
class Assembly:
    """All that is known before the process group starts."""

    because: dict[str, Because]
    selection: Selection
    backend: Any
    precision: Any
    precision_record: PluginRecord
    extensions: list[tuple[PluginRecord, Any, str]]
    backend_because: dict[str, Because]
    dataloader: DataLoaderConfiguration
    accumulation: GradientAccumulationPlugin
    project: ProjectConfiguration
    dynamo: TorchDynamoPlugin
    #: The settings of precision and extensions: plugin name -> field -> where it came from.
    plugin_because: dict[str, dict[str, Because]] = field(default_factory=dict)
    parallelism: ParallelismConfig | None = None
    #: Kind of part -> the plugin that is to make it; None where there is none.
    parts: dict[str, Part | None] = field(default_factory=dict)
    handlers: dict[type, Any] = field(default_factory=dict)
    timeout: timedelta | None = None

    def handler(self, cls: type) -> Any | None:
        """Return the handler of that class, None if none was given."""
        return self.handlers.get(cls)

    def plugin_settings(self) -> dict[str, Because]:
        """Return the settings of all active plugins as `plugin.field`, with their origins."""
        own = {self.selection.record.name: self.backend_because}
        parts = {part.record.name: part.settings for part in self.parts.values() if part}
        return {
            f"{plugin}.{name}": value
            for plugin, settings in {**parts, **self.plugin_because, **own}.items()
            for name, value in settings.items()
        }

    def facts(self) -> dict[str, Any]:
        """Return what must be alike on every rank."""
        facts: dict[str, Any] = {
            "backend": self.selection.record.label,
            "precision": self.precision_record.label,
            "extensions": [record.label for record, _, _ in self.extensions],
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


def assemble(arguments: dict[str, Any], topology: Topology) -> Assembly:
    """Resolve every argument of `Accelerator`.

    Raises:
        UnknownArgumentError: an argument nobody takes.
        ConfigurationError: a wrong value, or two that contradict each other.
        MissingPluginError: something asked for is not installed; the text has the pip command.
    """
    check_arguments(arguments, CORE_ARGUMENTS)
    given = {**CORE_ARGUMENTS, **arguments}
    _map_older_names(given)
    _check_plain(given)
    environ = dict(os.environ)
    sources = Sources.of(environ)
    known = [name for setting in CORE_SETTINGS for name in setting.env]
    warn_near_misses(environ, [*known, *installed().triggers, *catalog.VARIABLES])
    _warn_of_unknown_plugins(environ)
    passed = {k: v for k, v in given.items() if k in {s.name for s in CORE_SETTINGS}}
    if passed["cpu"] is False:
        passed["cpu"] = None  # the default of the signature is no wish
    values = resolve_core({**passed, "backend": None}, sources, {})
    request = Request(given, environ, topology, sources.config, bool(values["cpu"].value))
    wanted = given["backend"] if given["backend"] is not None else values["backend"].value
    origin = (
        "constructor argument backend" if given["backend"] is not None else values["backend"].origin
    )
    selection = select_backend(wanted, origin, request)
    _check_backend(selection)
    if selection.plugin.Settings is not None:
        fields = settings_fields(selection.plugin.Settings, owner=selection.record.name)
        warn_near_misses(environ, [name for field in fields for name in field.env])
    handlers = _sort_handlers(given["kwargs_handlers"])
    backend, backend_because = _make_backend(selection, given, sources, handlers)
    with blaming("core_defaults", selection.record):
        own = backend.core_defaults()
    detected = {
        name: Because(value, f"backend {selection.record.name}")
        for name, value in own.items()
        if name != "parallelism_config"
    }
    values = resolve_core({**passed, "backend": None}, sources, detected)
    values["backend"] = Because(selection.record.name, selection.because)
    precision, precision_record, more = _make_precision(
        values["mixed_precision"], given, sources, handlers
    )
    plugin_because = {precision_record.name: more}
    extensions = []
    for record, plugin, why in select_extensions(request):
        extension, more = _with_settings(record, plugin, given, sources, handlers)
        extensions.append((record, extension, why))
        plugin_because[record.name] = more
    active = {selection.record.name, *(record.name for record, _, _ in extensions)}
    theirs = {name: value for name, value in arguments.items() if name not in CORE_ARGUMENTS}
    check_owners(theirs, selection, {*active, precision_record.name})
    _refuse_unclaimed(handlers, [backend, precision, *(p for _, p, _ in extensions)])
    accumulation = _accumulation(given, values)
    assembly = Assembly(
        because=values,
        selection=selection,
        backend=backend,
        precision=precision,
        precision_record=precision_record,
        extensions=extensions,
        backend_because=backend_because,
        plugin_because=plugin_because,
        dataloader=_dataloader(given),
        accumulation=accumulation,
        project=_project(given),
        dynamo=_dynamo(given, sources),
        parallelism=_parallelism(given, sources, request, selection.record.name, backend),
        parts={
            kind: part and part.reads(sources, handlers)
            for kind in ("checkpointer", "tracking")
            for part in [select_part(kind, values[kind])]
        },
        handlers=handlers,
        timeout=_timeout(
            values["process_group_timeout"].value, handlers.get(InitProcessGroupKwargs)
        ),
    )
    _check_supported(assembly)
    return assembly


def _map_older_names(given: dict[str, Any]) -> None:
    if given["fp16"] is not None:
        _warn_older("fp16", f"mixed_precision={'fp16' if given['fp16'] else 'no'!r}")
        given["mixed_precision"] = given["mixed_precision"] or ("fp16" if given["fp16"] else "no")
    for name in ("split_batches", "even_batches", "dispatch_batches"):
        if given[name] is not None:
            _warn_older(name, f"dataloader_config=DataLoaderConfiguration({name}={given[name]!r})")

    older = given["torch_tp_plugin"]
    if older is not None:
        _expect("torch_tp_plugin", older, TorchTensorParallelPlugin)
        now = f"ParallelismConfig(tp_size={older.tp_size})"
        _warn_older("torch_tp_plugin", f"parallelism_config={now}")
        if given["parallelism_config"] is None:
            given["parallelism_config"] = ParallelismConfig(tp_size=older.tp_size)


def _warn_older(name: str, now: str) -> None:
    # Python shows it once per line of the script.
    warnings.warn(
        f"Accelerator({name}=...) is an older name; use {now}.", FutureWarning, stacklevel=5
    )


def _sort_handlers(handlers: Sequence[Any] | None) -> dict[type, Any]:
    sorted_: dict[type, Any] = {}
    for handler in handlers or ():
        if isinstance(handler, type) or not (
            isinstance(handler, KwargsHandler) or hasattr(type(handler), "__dataclass_fields__")
        ):
            raise ConfigurationError(
                f"kwargs_handlers takes instances of KwargsHandler, not {handler!r}."
            )
        if type(handler) in sorted_:
            raise ConfigurationError(f"kwargs_handlers has two {type(handler).__name__}; pass one.")
        sorted_[type(handler)] = handler
    return sorted_


def _refuse_unclaimed(handlers: Mapping[type, Any], active: Sequence[Any]) -> None:
    """A handler belongs to the core, to an active plugin, or to one that is installed but not active."""
    classes: tuple[type, ...] = _CORE_HANDLERS
    for plugin in active:
        classes += tuple(getattr(plugin, "handlers", ()))
        if isinstance(getattr(plugin, "Settings", None), type):
            classes += (plugin.Settings,)
    scanned = installed()
    packages = {record.target.split(":")[0].split(".")[0] for record in scanned.plugins}
    packages |= {target.split(":")[0].split(".")[0] for target, _ in scanned.exports.values()}
    for cls in handlers:
        if isinstance(handlers[cls], classes) or cls.__module__.split(".")[0] in packages:
            continue
        names = [c.__name__ for c in classes]
        raise ConfigurationError(
            f"No active plugin takes the handler {cls.__name__} in kwargs_handlers; "
            f"active ones take {listing(names)}.{did_you_mean(cls.__name__, names)}"
        )


def _warn_of_unknown_plugins(environ: Mapping[str, str]) -> None:
    known = {record.name for record in installed().plugins}.union(*catalog.NAMES.values())
    for name in disabled_names(environ) - known:
        warnings.warn(
            f"ACCELERATE_DISABLED_PLUGINS names {name!r}, and no such plugin is installed."
            f"{did_you_mean(name, known)}",
            stacklevel=4,
        )


def _check_backend(selection: Selection) -> None:
    plugin: Any = selection.plugin
    cls = plugin if isinstance(plugin, type) else type(plugin)
    if not issubclass(cls, Backend):
        raise PluginError(
            f"The backend plugin {selection.record.label} is no accelerate_core.Backend but "
            f"{plugin!r}: let the class be a subclass."
        )


def _make_backend(
    selection: Selection, given: Mapping[str, Any], sources: Sources, handlers: Mapping[type, Any]
) -> tuple[Any, dict[str, Because]]:
    name = selection.record.name
    if not isinstance(selection.plugin, type):
        return selection.plugin, {}
    plugin: Any = selection.plugin
    mine = [h for h in handlers.values() if isinstance(h, tuple(plugin.handlers))]
    if plugin.Settings is None:
        return _made(selection, None, mine), {}
    argument, passed = _passed(plugin, name, given, handlers)
    if isinstance(passed, Mapping) and passed and plugin.several_settings:
        several = {
            str(key): _resolved(plugin.Settings, value, f"{argument}[{key!r}]", sources, name)
            for key, value in passed.items()
        }
        first = next(iter(several.values()))
        return _made(selection, {key: made for key, (made, _) in several.items()}, mine), first[1]
    settings, because = _resolved(plugin.Settings, passed, argument, sources, name)
    return _made(selection, settings, mine), because


def _passed(
    plugin: Any, name: str, given: Mapping[str, Any], handlers: Mapping[type, Any]
) -> tuple[str, Any]:
    """Return what was passed for the `Settings` of a plugin, and by which argument."""
    arguments = getattr(plugin.Settings, "__settings_arguments__", ()) or (f"{name}_plugin",)
    spelled = [one for one in arguments if given.get(one) is not None]
    if len(spelled) > 1:
        raise ConfigurationError(f"{listing(spelled)} are names of one argument; pass one of them.")
    argument = spelled[0] if spelled else arguments[0]
    passed = given.get(argument)
    return argument, passed if passed is not None else handlers.get(plugin.Settings)


def _with_settings(
    record: PluginRecord,
    plugin: Any,
    given: Mapping[str, Any],
    sources: Sources,
    handlers: Mapping[type, Any],
) -> tuple[Any, dict[str, Because]]:
    """Make a precision or an extension; one that has `Settings` gets them."""
    if not isinstance(plugin, type):
        return plugin, {}
    made: Any = plugin
    because: dict[str, Because] = {}
    arguments = []
    if getattr(plugin, "Settings", None) is not None:
        argument, passed = _passed(plugin, record.name, given, handlers)
        settings, because = _resolved(made.Settings, passed, argument, sources, record.name)
        arguments = [settings]
    try:
        return made(*arguments), because
    except Exception as error:
        blame(error, "__init__", record)
        raise


def _resolved(
    cls: type[Any], passed: Any, argument: str, sources: Sources, owner: str
) -> tuple[Any, dict[str, Because]]:
    if passed is not None and not isinstance(passed, cls):
        raise ConfigurationError(
            f"Accelerator({argument}=...) takes a {cls.__name__}, not {type(passed).__name__}."
        )
    return resolve_settings(cls, passed, sources, owner=owner)


def _made(selection: Selection, settings: Any, handlers: list[Any]) -> Any:
    try:
        return selection.plugin(settings, handlers)
    except Exception as error:
        blame(error, "__init__", selection.record)
        raise


def _make_precision(
    wanted: Because,
    given: Mapping[str, Any],
    sources: Sources,
    handlers: Mapping[type, Any],
) -> tuple[Any, PluginRecord, dict[str, Because]]:
    record = _find_precision(wanted)
    plugin = record.load()
    check_api_version(record, plugin)
    made, because = _with_settings(record, plugin, given, sources, handlers)
    if not isinstance(made, Precision):
        raise PluginError(f"The precision plugin {record.label} is no accelerate_core.Precision.")
    _check_needs(made, record)
    return made, record, because


def _check_needs(precision: Precision, record: PluginRecord) -> None:
    """Hold a precision to its declaration: what it does and does not declare goes wrong elsewhere."""
    label = f"The precision plugin {record.label}"
    check_words(precision.needs, label, "needs")
    own = type(precision)
    for method, words in (
        ("autocast", ("autocast",)),
        ("scaler", ("loss_scaling",)),
        ("convert", ("modules", "parameters", "subclasses")),
    ):
        does = getattr(own, method, None) is not getattr(Precision, method, None)
        does = does or (method == "autocast" and precision.dtype is not None)
        if does and not precision.needs & {*words}:
            raise PluginError(
                f"{label} has {method!r} and does not say so: put {listing(words)} into its `needs`."
            )


def _find_precision(wanted: Because) -> PluginRecord:
    name = str(wanted.value)
    names = [record.name for record in installed().of_kind("precision")]
    if name not in names and catalog.extra_for("precision", name) is None:
        raise ConfigurationError(
            f"mixed_precision={name!r} (from {wanted.origin}) is not one of {listing(names)}."
            f"{did_you_mean(name, [*names, *catalog.known_names('precision')])}"
        )
    return find("precision", name, because=wanted.origin)


def _accumulation(
    given: Mapping[str, Any], values: dict[str, Because]
) -> GradientAccumulationPlugin:
    plugin: GradientAccumulationPlugin | None = given["gradient_accumulation_plugin"]
    steps = values["gradient_accumulation_steps"]
    _expect("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=steps.value)
    if given["gradient_accumulation_steps"] not in (None, 1):
        raise ConfigurationError(
            "Pass gradient_accumulation_steps or gradient_accumulation_plugin, not both."
        )
    if plugin.num_steps is None:
        plugin = GradientAccumulationPlugin(
            steps.value,
            plugin.adjust_scheduler,
            plugin.sync_with_dataloader,
            plugin.sync_each_batch,
        )
    else:
        values["gradient_accumulation_steps"] = Because(
            plugin.num_steps, "constructor argument gradient_accumulation_plugin"
        )
    return plugin


def _dataloader(given: Mapping[str, Any]) -> DataLoaderConfiguration:
    config = given["dataloader_config"]
    older = {
        name: given[name]
        for name in ("split_batches", "even_batches", "dispatch_batches")
        if given[name] is not None
    }
    if config is None:
        return DataLoaderConfiguration(**older)
    if not isinstance(config, DataLoaderConfiguration):
        raise ConfigurationError(
            f"dataloader_config takes a DataLoaderConfiguration, not {type(config).__name__}."
        )
    if older:
        raise ConfigurationError(
            f"Pass {listing(older)} in dataloader_config, not to Accelerator beside it."
        )
    return config


def _project(given: Mapping[str, Any]) -> ProjectConfiguration:
    config: ProjectConfiguration = given["project_config"] or ProjectConfiguration()
    if given["project_dir"] is not None and config.project_dir is None:
        config.set_directories(given["project_dir"])
    return config


def _dynamo(given: Mapping[str, Any], sources: Sources) -> TorchDynamoPlugin:
    plugin, backend = given["dynamo_plugin"], given["dynamo_backend"]
    if plugin is not None and backend is not None:
        raise ConfigurationError("Pass dynamo_backend or dynamo_plugin, not both.")
    _expect("dynamo_plugin", plugin, TorchDynamoPlugin)
    if backend is not None:
        plugin = TorchDynamoPlugin(backend=str(getattr(backend, "value", backend)))
    resolved, _ = resolve_settings(TorchDynamoPlugin, plugin, sources)
    if resolved.backend is None and plugin is not None:
        resolved.backend = "inductor"  # a plugin without a backend asks for torch's own choice
    made: TorchDynamoPlugin = resolved
    return made


def _parallelism(
    given: Mapping[str, Any], sources: Sources, request: Request, name: str, backend: Any
) -> ParallelismConfig | None:
    """Return the sizes of the mesh, compared with what was started and what the backend can do."""
    config, can = given["parallelism_config"], backend.supports.get("mesh") or ()
    _expect("parallelism_config", config, ParallelismConfig)
    processes = request.topology.num_processes
    in_file = sources.config is not None and "parallelism_config" in sources.config
    if config is None and not request.flag("ACCELERATE_USE_PARALLELISM_CONFIG") and not in_file:
        return _parallelism_of(backend, processes) if "dp_shard" in can else None
    resolved, because = resolve_settings(ParallelismConfig, config, sources)
    sizes: ParallelismConfig = resolved
    asked = [b.origin for n, b in because.items() if n.endswith("_size") and b.origin != "default"]
    cannot = [dimension for dimension in sizes.active_mesh_dims if dimension not in can]
    if cannot:
        raise ConfigurationError(
            f"Backend {name!r} has no mesh dimension {listing(cannot)} "
            f"(from {', '.join(dict.fromkeys(asked))}); it has "
            f"{listing(can) if can else 'none'}."
        )
    sizes.check(processes, ", ".join(dict.fromkeys(asked)))
    if sizes.tp_handler is None:
        sizes.tp_handler = resolve_settings(TorchTensorParallelConfig, None, sources)[0]
    if sizes.cp_handler is None:
        sizes.cp_handler = resolve_settings(TorchContextParallelConfig, None, sources)[0]
    return sizes


def _parallelism_of(backend: Any, processes: int) -> ParallelismConfig:
    """Return the mesh that follows from the backend's own settings; all ranks shard without any."""
    own = backend.core_defaults().get("parallelism_config")
    if own is None:
        return ParallelismConfig(dp_shard_size=processes)
    parts = own.total_size // own.dp_shard_size
    sizes: ParallelismConfig = dataclasses.replace(own, dp_shard_size=max(processes // parts, 1))
    sizes.check(processes, f"backend {backend.name}")
    return sizes


def _expect(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(
            f"Accelerator({name}=...) takes a {kind.__name__}, not {type(value).__name__}."
        )


def _check_plain(given: Mapping[str, Any]) -> None:
    """Check the arguments that are neither settings nor plugins."""
    for name in ("device_placement", "step_scheduler_with_optimizer"):
        if not isinstance(given[name], bool):
            raise ConfigurationError(
                f"Accelerator({name}=...) takes True or False, not {given[name]!r}."
            )
    if given["project_dir"] is not None and not isinstance(given["project_dir"], str | os.PathLike):
        raise ConfigurationError(
            f"Accelerator(project_dir=...) takes a path, not {given['project_dir']!r}."
        )
    _expect("project_config", given["project_config"], ProjectConfiguration)


def _timeout(seconds: float | None, handler: InitProcessGroupKwargs | None) -> timedelta | None:
    if handler is not None and handler.timeout is not None:
        return handler.timeout
    try:
        return timedelta(seconds=seconds) if seconds is not None else None
    except OverflowError:
        raise ConfigurationError(
            f"process_group_timeout={seconds} seconds are more than can be counted; 86400 is a day."
        ) from None


def check_device(assembly: Assembly, kind: str, origin: str) -> None:
    """Refuse to run a backend on a type of device it does not declare.

    Args:
        kind: the type, such as "cpu".
        origin: why it would be that.

    Raises:
        ConfigurationError: with what the backend declares, and the way out.
    """
    declared = assembly.backend.supports.get("devices")
    if declared is None or kind in declared:
        return
    ways = "Choose another backend"
    if "cpu" in declared:
        ways += " or the CPU: Accelerator(cpu=True), ACCELERATE_USE_CPU=1, launch --cpu"
    elif kind == "cpu":
        ways += f" or a machine with {listing(declared)}, and do not ask for the CPU"
    else:
        ways += " or one of these, such as by ACCELERATE_TORCH_DEVICE"
    raise ConfigurationError(
        f"Backend {assembly.selection.record.label} does not run on the device type {kind!r} "
        f"({origin}); it declares devices={listing(declared)}. {ways}."
    )


def _check_supported(assembly: Assembly) -> None:
    """Refuse combinations the backend declares it cannot do, before anything is started."""
    backend, name = assembly.backend, assembly.selection.record.name
    device, cpu = assembly.because["torch_device"], assembly.because["cpu"]
    if device.value is not None:
        check_device(assembly, str(device.value).split(":")[0], device.origin)
    elif cpu.value:
        check_device(assembly, "cpu", cpu.origin)
    precision, chosen = assembly.precision, assembly.precision_record.name
    asked = f"mixed_precision={chosen!r} (from {assembly.because['mixed_precision'].origin})"
    missing = lacking(backend.supports, chosen, precision.needs)
    if missing:
        accepted = backend.supports.get("accepts", ACCEPTED_BY_DEFAULT)
        own = backend.supports.get("precisions") or ()
        raise ConfigurationError(
            f"Backend {name!r} cannot run {asked}, which needs {listing(missing)} ("
            f"{'; '.join(NEEDS[word] for word in missing)}). It accepts {listing(accepted)}"
            f"{f' and brings about {listing(own)} itself' if own else ''}. Choose another precision "
            "or another backend."
        )
    if assembly.dynamo.enabled:
        for label, supports in (
            (f"Backend {name!r}", backend.supports),
            (asked, precision.supports),
        ):
            if not supports.get("compile", True):
                raise ConfigurationError(
                    f"{label} does not support compiled models; leave dynamo_backend out."
                )
    mesh = precision.supports.get("mesh")
    sizes = assembly.parallelism
    active = sizes.active_mesh_dims if sizes is not None else ()
    outside = [dimension for dimension in active if mesh is not None and dimension not in mesh]
    if outside:
        raise ConfigurationError(
            f"{asked} does not run with the mesh dimension {listing(outside)}; it has {listing(mesh)}."
        )
