"""What plugins let users set, known without importing them.

Each plugin is asked once, in a process of its own, what its settings, commands and declarations
are; the answer is kept in the cache directory with its distribution, version and the time its
files were written. So the command line shows and checks options of backends without torch.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import accelerate_core
from accelerate_core import config
from accelerate_core.config.schema import SettingField, settings_fields
from accelerate_core.plugins.discovery import (
    PluginRecord,
    disabled_names,
    installed,
)
from accelerate_launch.paths import cache_directory

#: Kinds of plugins that may have a section of a config file, `<name>_config`.
WITH_SETTINGS = ("backend", "precision", "checkpointer", "loaders", "extension", "tracker")
#: Raised with what is kept: older entries are then asked for anew.
_FORMAT = 6
#: Between a plugin's target and its folder, in what is kept.
_IN = " in "

#: The core's own settings that have a group of options, like a plugin's.
_CORE_CLASSES = {
    "compiler": "accelerate_core.config.handlers:TorchDynamoPlugin",
    "mesh": "accelerate_core.config.parallelism:ParallelismConfig",
}


@dataclass(frozen=True)
class PluginSchema:
    """What one plugin says about itself.

    Attributes:
        section: key of the config file its fields stand under; "" for its top.
        switches: environment variables by which it is asked for.
        mesh: dimensions of a device mesh that it takes.
        problem: why the plugin could not be asked; everything else is then empty.
    """

    kind: str
    name: str
    release: str
    section: str = ""
    switches: tuple[str, ...] = ()
    summary: str = ""
    fields: tuple[SettingField, ...] = ()
    mesh: tuple[str, ...] = ()
    problem: str = ""

    def field_of_key(self, key: str) -> SettingField | None:
        """Return the field a key of the section sets."""
        return next((one for one in self.fields if key in one.yaml), None)


def plugin_schemas(environ: Mapping[str, str] | None = None) -> tuple[PluginSchema, ...]:
    """Return the schemas of the core's mesh and of all installed plugins with settings.

    What the cache does not know is asked for in one process; torch is not imported by this one.
    """
    environ = os.environ if environ is None else environ
    off = disabled_names(environ)
    owner = ("accelerate-core", accelerate_core.__version__)
    records = [PluginRecord("core", *named, *owner) for named in _CORE_CLASSES.items()]
    records += (
        record
        for record in installed().plugins
        if record.kind in (*WITH_SETTINGS, "launcher")
        and record.name not in off
        and not record.target.startswith("accelerate_core.")
    )
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
        # A plugin that failed is asked again next time: what it lacks may be installed by then.
        sound = {target: answer for target, answer in answers.items() if not answer.get("problem")}
        if sound:
            alive = {p: one for p, one in kept.items() if Path(p.partition(_IN)[2]).is_dir()}
            for target, answer in sound.items():
                place, stamp = places[target]
                alive[place] = {"stamp": stamp, "said": answer}
            _write(file, alive)
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
        mesh=tuple(said.get("mesh", ())),
        problem=said.get("problem", ""),
    )


def _place(record: PluginRecord) -> tuple[str, str]:
    """Return where a plugin is, and what changes when it does: an editable install keeps its version."""
    spec = importlib.util.find_spec(record.target.partition(":")[0].partition(".")[0])
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    # What is said depends on how the core reads settings, too.
    own = Path(config.__file__).parent.glob("*.py")
    written = [Path(__file__), *own, *(() if record.kind == "core" else folder.rglob("*.py"))]
    newest = max(one.stat().st_mtime_ns for one in written)
    return f"{record.target}{_IN}{folder}", f"{_FORMAT} {record.label} {newest}"


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        return {place: one for place, one in made.items() if one.keys() == {"stamp", "said"}}
    except (OSError, ValueError, AttributeError):  # it is not there, or damaged
        return {}


def _write(file: Path, known: Mapping[str, Any]) -> None:
    # Without a place to keep them the answers are asked for every time.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False
        ) as out:
            json.dump(known, out)
        Path(out.name).replace(file)


def _ask(records: Sequence[PluginRecord], environ: Mapping[str, str]) -> dict[str, Any]:
    """Import the plugins in a process of its own and return what they say, by target."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        code = f"import sys; from {__name__} import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, str(file)]
        command += [f"{record.name}={record.target}" for record in records]
        if sys.stderr.isatty():  # it may take seconds: plugins import their libraries
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
    """Return what a plugin says about itself, ready for JSON."""
    cls = plugin if hasattr(plugin, "__settings_names__") else getattr(plugin, "Settings", None)
    said: dict[str, Any] = {}
    text = (inspect.getdoc(plugin) or "").split("\n\n")[0]
    said["mesh"] = list((getattr(plugin, "supports", None) or {}).get("mesh") or ())
    said["summary"] = text.replace("\n", " ")
    said["more"] = [_described(one, owner) for one in getattr(plugin, "more_settings", ()) or ()]
    if cls is not None:
        said |= _described(cls, "" if cls is plugin else owner)
    return said


#: What a file of answers cannot hold.
_UNSAID = ("annotation", "read")


def _described(cls: Any, owner: str) -> dict[str, Any]:
    """Return section and fields of one settings class; the core's own have no owner."""
    _, section, _ = cls.__settings_names__
    made = []
    for one in settings_fields(cls, owner=owner):
        raw = {part.name: getattr(one, part.name) for part in fields(one)}
        if not isinstance(one.default, str | int | float | bool | None):
            raw["default"] = None
        if one.annotation in (list[str], list[str] | None):
            raw["kind"] = "list"
        made.append({key: value for key, value in raw.items() if key not in _UNSAID})
    return {"section": f"{owner}_config" if section == "" else section or "", "fields": made}


def main(arguments: Sequence[str]) -> None:
    """Write the answers of `name=package.module:attribute` targets into a file."""
    file, *targets = arguments
    answers = {}
    for named in targets:
        name, _, target = named.partition("=")
        try:
            answers[target] = describe(pkgutil.resolve_name(target), name)
        except (Exception, SystemExit) as error:
            answers[target] = {"problem": f"{type(error).__name__}: {error}"}
    Path(file).write_text(json.dumps(answers), encoding="utf-8")
