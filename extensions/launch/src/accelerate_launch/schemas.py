"""Cache the settings of plugins, so that the command line can check them without importing torch.

A separate process imports each plugin once and describes its settings and declarations. The answer
is cached with the plugin's distribution, version and the modification time of its files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import accelerate_core
from accelerate_core import config
from accelerate_core.plugin import (
    PluginRecord,
    SettingField,
    disabled_names,
    installed,
    settings_fields,
)
from accelerate_launch.paths import cache_directory

#: Kinds of plugins that may have a section of a config file, `<name>_config`.
WITH_SETTINGS = (
    "backend",
    "precision",
    "checkpointer",
    "loaders",
    "launcher",
    "extension",
    "tracker",
)
#: Environment variable by which a shell asks the command line for completions.
COMPLETION = "_ACCELERATE_CORE_COMPLETE"
#: Increase this when the cached format changes, to invalidate older entries.
_FORMAT = 7
#: Separates a plugin's target from its folder in a cache key.
_IN = " in "

#: The core's own settings that have a group of options, like a plugin's.
_CORE_CLASSES = {
    "compiler": "accelerate_core.config.handlers:TorchDynamoPlugin",
    "mesh": "accelerate_core.config.parallelism:ParallelismConfig",
}


@dataclass(frozen=True)
class PluginSchema:
    """The settings and declarations of one plugin.

    Attributes:
        section: the config file's section for its fields; "" for the top level.
        switches: environment variables that request it.
        forms: JSON schemas of the fields that take a list, a mapping or several types.
        mesh: the dimensions of a device mesh that it supports.
        problem: why the plugin could not be imported; everything else is then empty.
    """

    kind: str
    name: str
    release: str
    section: str = ""
    switches: tuple[str, ...] = ()
    summary: str = ""
    fields: tuple[SettingField, ...] = ()
    forms: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[str, ...] = ()
    problem: str = ""

    def field_of_key(self, key: str) -> SettingField | None:
        """Return the field that a key of the section sets."""
        return next((one for one in self.fields if key in one.yaml), None)


def plugin_schemas(environ: Mapping[str, str] | None = None) -> tuple[PluginSchema, ...]:
    """Return the schemas of all installed plugins, and of the core's mesh and compiler settings.

    A separate process imports the plugins that are not in the cache, so this one needs no torch.
    """
    environ = os.environ if environ is None else environ
    records = _records(environ)
    file = cache_directory() / "plugins.json"
    kept = _read(file)
    places = {record.target: _place(record) for record in records}
    said = {
        target: kept[place]["said"]
        for target, (place, stamp) in places.items()
        if place in kept and kept[place]["stamp"] == stamp
    }
    if missing := [record for record in records if record.target not in said]:
        answers = _ask(missing, environ)
        said |= answers
        # A plugin that failed isn't cached: what it lacks may be installed next time.
        sound = {target: answer for target, answer in answers.items() if not answer.get("problem")}
        if sound:
            alive = {p: one for p, one in kept.items() if Path(p.partition(_IN)[2]).is_dir()}
            for target, answer in sound.items():
                place, stamp = places[target]
                alive[place] = {"stamp": stamp, "said": answer}
            _write(file, alive)
    return _schemas(records, said)


def imported_schemas() -> tuple[PluginSchema, ...]:
    """Return what `plugin_schemas` does, but import the plugins here and use no cache."""
    records = _records(os.environ)
    return _schemas(records, _descriptions((one.name, one.target) for one in records))


def _records(environ: Mapping[str, str]) -> list[PluginRecord]:
    off = disabled_names(environ)
    owner = ("accelerate-core", accelerate_core.__version__)
    records = [PluginRecord("core", *named, *owner) for named in _CORE_CLASSES.items()]
    records += (
        record
        for record in installed().plugins
        if record.kind in WITH_SETTINGS
        and record.name not in off
        and not record.target.startswith("accelerate_core.")
    )
    return records


def _schemas(records: Sequence[PluginRecord], said: Mapping[str, Any]) -> tuple[PluginSchema, ...]:
    made = []
    for record in records:
        answer = said.get(record.target, {"problem": "it gave no answer"})
        made.append(_schema(record, answer))
        made += [replace(_schema(record, more), switches=()) for more in answer.get("more", ())]
    return tuple(sorted(made, key=lambda one: (one.kind != "core", one.kind, one.name)))


def _schema(record: PluginRecord, said: Mapping[str, Any]) -> PluginSchema:
    made = []
    for raw in said.get("fields", ()):
        read: dict[str, Any] = {
            key: tuple(one) if isinstance(one, list) else one for key, one in raw.items()
        }
        made.append(SettingField(**read))
    return PluginSchema(
        kind=record.kind,
        name=record.name,
        release=f"{record.distribution} {record.version}",
        section=said.get("section", ""),
        switches=tuple(sorted(n for n in record.triggers if n.startswith("ACCELERATE_USE_"))),
        summary=said.get("summary", ""),
        fields=tuple(made),
        forms=said.get("forms", {}),
        mesh=tuple(said.get("mesh", ())),
        problem=said.get("problem", ""),
    )


def _place(record: PluginRecord) -> tuple[str, str]:
    """Return the cache key of a plugin, and a stamp that changes whenever its files change.

    The version alone is not enough, because an editable install keeps it.
    """
    spec = importlib.util.find_spec(record.target.partition(":")[0].partition(".")[0])
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    # The answers also depend on how the core reads settings.
    own = Path(config.__file__).parent.glob("*.py")
    written = [Path(__file__), *own, *(() if record.kind == "core" else folder.rglob("*.py"))]
    newest = max(one.stat().st_mtime_ns for one in written)
    return f"{record.target}{_IN}{folder}", f"{_FORMAT} {record.label} {newest}"


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        return {place: one for place, one in made.items() if one.keys() == {"stamp", "said"}}
    except (OSError, ValueError, AttributeError):  # the file is missing or damaged
        return {}


def _write(file: Path, known: Mapping[str, Any]) -> None:
    # If the cache can't be written, the plugins are imported every time.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False
        ) as out:
            json.dump(known, out)
        Path(out.name).replace(file)


def _ask(records: Sequence[PluginRecord], environ: Mapping[str, str]) -> dict[str, Any]:
    """Import the plugins in a separate process, and return their descriptions by target."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        code = f"import sys; from {__name__} import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, str(file)]
        command += [f"{record.name}={record.target}" for record in records]
        # This may take seconds, because plugins import their libraries. Completion has no line for it.
        if sys.stderr.isatty() and COMPLETION not in os.environ:
            sys.stderr.write("Reading the options of newly installed plugins, once ...\n")
        try:
            subprocess.run(
                command, env=dict(environ), capture_output=True, timeout=120, check=False
            )
            answers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, subprocess.SubprocessError):
            return {}
    return answers


# --- in the process that imports the plugins ------------------------------------------------------


def describe(plugin: Any, owner: str) -> dict[str, Any]:
    """Return the settings and declarations of a plugin, ready for JSON."""
    cls = plugin if hasattr(plugin, "__settings_names__") else getattr(plugin, "Settings", None)
    said: dict[str, Any] = {}
    text = (inspect.getdoc(plugin) or "").split("\n\n")[0]
    supports = getattr(plugin, "supports", None)  # of a tracker it is a set of words
    said["mesh"] = list(supports.get("mesh") or ()) if isinstance(supports, Mapping) else []
    said["summary"] = text.replace("\n", " ")
    said["more"] = [_described(one, owner) for one in getattr(plugin, "more_settings", ()) or ()]
    if cls is not None:
        said |= _described(cls, "" if cls is plugin else owner)
    return said


#: Attributes that can't be written to JSON.
_UNSAID = ("annotation", "read")


def _described(cls: Any, owner: str) -> dict[str, Any]:
    """Return the section and the fields of a settings class. Classes of the core have no owner."""
    _, section, _ = cls.__settings_names__
    made = []
    forms = {}
    for one in settings_fields(cls, owner=owner):
        if one.kind == "text" and one.choices is None and (form := _form(one.annotation)):
            forms[one.name] = form
        raw = {part.name: getattr(one, part.name) for part in fields(one)}
        if not isinstance(one.default, str | int | float | bool | None):
            raw["default"] = None
        if one.annotation in (list[str], list[str] | None):
            raw["kind"] = "list"
        made.append({key: value for key, value in raw.items() if key not in _UNSAID})
    place = f"{owner}_config" if section == "" else section or ""
    return {"section": place, "fields": made, "forms": forms}


def _form(annotation: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; {} if a file cannot express it, or if it may be anything."""
    import pydantic

    config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    try:
        return pydantic.TypeAdapter(annotation, config=config).json_schema()
    except pydantic.errors.PydanticUserError:  # a function, or a class of torch
        return {}


def _descriptions(targets: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Import plugins and describe them: from names and targets to descriptions by target."""
    answers = {}
    for name, target in targets:
        try:
            answers[target] = describe(pkgutil.resolve_name(target), name)
        except (Exception, SystemExit) as error:
            answers[target] = {"problem": f"{type(error).__name__}: {error}"}
    made: dict[str, Any] = json.loads(json.dumps(answers))
    return made


def main(arguments: Sequence[str]) -> None:
    """Write the descriptions of `name=package.module:attribute` targets to a file."""
    file, *targets = arguments
    pairs = (named.partition("=")[::2] for named in targets)
    Path(file).write_text(json.dumps(_descriptions(pairs)), encoding="utf-8")
