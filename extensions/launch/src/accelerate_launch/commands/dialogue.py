"""The questions of `accelerate-core config`, with suggested answers for this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from accelerate_core.plugin import (
    ConfigurationError,
    SettingField,
    SourcedValue,
    console,
    did_you_mean,
    disabled_names,
    installed,
    listing,
    read_config,
)
from accelerate_core.plugins import catalog
from accelerate_launch import accelerate_options, devices
from accelerate_launch.cluster import detect_cluster
from accelerate_launch.contributed import check_value
from accelerate_launch.paths import accelerate_config_path
from accelerate_launch.plan import machine_range
from accelerate_launch.schemas import PluginSchema, plugin_schemas

#: The compilers that are suggested.
_COMPILERS = ("no", "inductor", "aot_eager", "eager")
#: The answer for machines on which people start `launch` themselves.
_BY_HAND = "the same command on each"


class Asker:
    """Asks questions: with a menu on a terminal, line by line elsewhere, or not at all."""

    def __init__(self, ask: bool = True) -> None:
        self.ask = ask
        here = sys.stdin.isatty() and sys.stdout.isatty()
        # A dumb terminal can't draw a menu.
        self.keys = ask and here and os.environ.get("TERM") != "dumb"

    def text(self, question: str, default: str, read: Callable[[str], Any] = str) -> Any:
        """Return the answer as parsed by `read`; ask again if `read` refuses it."""
        while True:
            said = self._line(question, default)
            try:
                return read(said)
            except ConfigurationError as error:
                if not self.ask:
                    raise
                click.echo(str(error), err=True)

    def _line(self, question: str, default: str) -> str:
        if not self.ask:
            return default
        if self.keys:
            import questionary

            shown = f"{question} [{default}]" if default else question
            return questionary.text(shown).unsafe_ask().strip() or default
        try:
            return str(click.prompt(question, default=default, show_default=bool(default))).strip()
        except click.Abort:
            raise ConfigurationError(
                f"The input ended at the question {question!r}. Without a terminal, give one answer "
                "per line, or run accelerate-core config --yes to accept all suggested answers."
            ) from None

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """Return one of the options. Without a menu, the user may also type its index from 0."""
        if not self.ask or len(options) == 1:
            return default
        default = default if default in options else options[0]
        if self.keys:
            import questionary

            menu = questionary.select(question, list(options), default)
            return str(menu.unsafe_ask())

        def read(said: str) -> str:
            if said in options:
                return said
            if said.isdigit() and int(said) < len(options):
                return options[int(said)]
            hint = did_you_mean(said, options)
            raise ConfigurationError(f"{said!r} is not one of {listing(options)}.{hint}")

        return str(self.text(f"{question} ({', '.join(options)})", default, read))

    def confirm(self, question: str, default: bool) -> bool:
        """Ask a yes-or-no question."""
        return self.choose(question, ("yes", "no"), "yes" if default else "no") == "yes"

    def number(
        self, question: str, default: int, minimum: int = 1, maximum: int | None = None
    ) -> int:
        """Ask for a whole number from `minimum` to `maximum`."""

        def read(said: str) -> int:
            fits = said.isdigit() and int(said) >= minimum
            if fits and (maximum is None or int(said) <= maximum):
                return int(said)
            upto = "" if maximum is None else f" to {maximum}"
            raise ConfigurationError(f"{said!r} is not a whole number from {minimum}{upto}.")

        return int(self.text(question, str(default), read))


def ask_everything(environ: Mapping[str, str], *, ask: bool) -> dict[str, Any]:
    """Return the values of a config file: the answers, or suggestions if `ask` is false."""
    asker = Asker(ask)
    taken = _offer_import(asker, environ)
    if taken is not None:
        return taken
    around = detect_cluster(environ)
    count = devices.count_accelerators(environ)
    if ask:
        seen = f"{count} accelerator(s)" if count else "no accelerator"
        where = f", inside {around.name}" if around.name else ""
        console(stderr=True).print(f"This machine: {seen}{where}.", style="dim")
    made: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    found = {name: sourced.value for name, sourced in around.values.items()}
    made["use_cpu"] = asker.confirm("Run on the CPU?", False) if count else True
    _machines(asker, made, found, environ)
    per_machine = 1 if made["use_cpu"] else count
    _, machines = machine_range(SourcedValue(made["num_machines"], "this dialogue"))
    if not around.ranks:
        question = "How many processes on all machines together?"
        made["num_processes"] = asker.number(question, per_machine * machines, machines)
    backend = _backend(asker, made)
    precisions = [record.name for record in installed().of_kind("precision")]
    fits = "no" if made["use_cpu"] else "bf16"
    made["mixed_precision"] = asker.choose("Mixed precision?", sorted(precisions), fits)
    made["gradient_accumulation_steps"] = asker.number("Micro-batches per optimizer step?", 1)
    compiler = asker.choose("Compile models with torch.compile?", _COMPILERS, "no")
    if compiler != "no":
        made["dynamo_config"] = {"dynamo_backend": compiler}
    _mpi(asker, made)
    if ask:
        _plugin_questions(asker, made, backend, environ)
    if not count:  # the user didn't choose the CPU, so the file should use accelerators elsewhere
        del made["use_cpu"]
    return made


def _offer_import(asker: Asker, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Offer to import Accelerate's default config file; return its values if the user agrees."""
    theirs = accelerate_config_path(environ)
    if not asker.ask or not theirs.is_file():
        return None
    if not asker.confirm(f"Import the config file of Hugging Face Accelerate, {theirs}?", True):
        return None
    return accelerate_options.effective_values(read_config(theirs))


def _machines(
    asker: Asker, made: dict[str, Any], found: Mapping[str, Any], environ: Mapping[str, str]
) -> None:
    """Ask about machines, unless a scheduler's allocation already says how many there are."""
    if "num_machines" in found:
        made["num_machines"] = found["num_machines"]
        return
    machines = asker.number("How many machines?", 1)
    made["num_machines"] = machines
    if machines > 1:
        clusters = _cluster_launchers(plugin_schemas(environ)) if asker.ask else []
        if clusters:
            way = asker.choose("What starts the machines?", (_BY_HAND, *clusters), _BY_HAND)
            if way != _BY_HAND:
                made["launcher"] = way
                return
        made["machine_rank"] = asker.number("Number of this machine, from 0?", 0, 0, machines - 1)
        made["main_process_ip"] = asker.text("Address of machine 0?", "", _not_empty)
        made["main_process_port"] = asker.number("Port on machine 0?", 29500)
        made["rdzv_backend"] = asker.choose(
            "How do they find each other?", ("static", "c10d"), "static"
        )


def _cluster_launchers(schemas: Sequence[PluginSchema]) -> list[str]:
    """Return the launchers that ask questions themselves and don't belong to a backend."""
    backends = {one.release for one in schemas if one.kind == "backend"}
    return [
        one.name
        for one in schemas
        if one.kind == "launcher"
        and one.release not in backends
        and any(field.ask for field in one.fields)
    ]


def _not_empty(said: str) -> str:
    if not said:
        raise ConfigurationError(
            "The address cannot be empty: the other machines connect to machine 0 there."
        )
    return said


def _backend(asker: Asker, made: dict[str, Any]) -> str:
    """Ask which of the installed backends to use."""
    off = disabled_names()
    here = [one.name for one in installed().of_kind("backend") if one.name not in off]
    several = made.get("num_processes", 2) > 1
    usual = catalog.SEVERAL_PROCESSES
    if several and usual in here:
        fits = usual
    else:
        fits = "single" if "single" in here else here[0]
    options = [name for name in here if name != "single" or not several]
    chosen = asker.choose("Which backend?", options or here, fits)
    # The defaults aren't written, so that the file works for one process and for several.
    if chosen not in ("single", usual):
        made["backend"] = chosen
    return chosen


def _mpi(asker: Asker, made: dict[str, Any]) -> None:
    several = made.get("num_processes", 1) > 1
    asked = asker.ask and several and "launcher" not in made
    if not (asked and made["use_cpu"] and shutil.which("mpirun")):
        return
    if asker.confirm("Start the processes with mpirun?", False):
        file = asker.text("File with one host per line (empty: this machine)?", "")
        made.update(
            {"mpirun_config": {"mpirun_hostfile": file}} if file else {"launcher": "mpirun"}
        )


def _plugin_questions(
    asker: Asker, made: dict[str, Any], backend: str, environ: Mapping[str, str]
) -> None:
    """Ask the questions of the chosen backend, precision and launchers, and about a device mesh."""
    schemas = plugin_schemas(environ)
    # The answers for each chosen plugin, whose settings may be spread over several classes.
    known = {"mixed_precision": made["mixed_precision"]}
    chosen: dict[tuple[str, str], dict[str, str]] = {
        ("backend", backend): dict(known),
        ("precision", made["mixed_precision"]): {},
    }
    if "launcher" in made:
        chosen["launcher", made["launcher"]] = dict(known)
    chosen |= {("launcher", one): dict(known) for one in _launchers(asker, made, backend, schemas)}
    for schema in schemas:
        if (schema.kind, schema.name) not in chosen:
            continue
        _section(asker, made, schema, chosen[schema.kind, schema.name])
        extra = [one for one in schema.mesh if one != "dp_shard"]
        if extra and asker.confirm(f"Set sizes of a device mesh ({', '.join(extra)})?", False):
            mesh = next(one for one in schemas if one.section == "parallelism_config")
            sizes = {}
            for dimension in schema.mesh:
                field = mesh.field_of_key(f"{dimension}_size")
                if field is not None:
                    asked = f"Size of {dimension}: {field.help}?"
                    sizes[field.yaml[0]] = asker.number(asked, 1)
            made["parallelism_config"] = sizes


def _launchers(
    asker: Asker, made: dict[str, Any], backend: str, schemas: Sequence[PluginSchema]
) -> list[str]:
    """Return the launchers in the backend's package, if the user wants them."""
    release = next((one.release for one in schemas if one.name == backend), "")
    theirs = [one for one in schemas if one.kind == "launcher" and one.release == release]
    switched = next((one for one in theirs if one.switches), None)
    kind = backend.upper()
    if switched is None or catalog.DISTRIBUTED_TYPES.get(kind) != backend:
        return []
    if not asker.confirm(f"{switched.summary.rstrip('.')}?", True):
        return []
    del made["backend"]  # a file's type asks for both
    made["distributed_type"] = kind
    return [one.name for one in theirs]


def _section(
    asker: Asker, made: dict[str, Any], schema: PluginSchema, by_name: dict[str, str]
) -> None:
    answers: dict[str, Any] = {}
    for field in schema.fields:
        name, _, wanted = field.ask_if.partition("=")
        if not field.ask or (field.ask_if and by_name.get(name, "").lower() != wanted.lower()):
            continue
        value = _field(asker, field)
        by_name[field.name] = str(value)
        if value not in ("", None):
            answers[field.yaml[0]] = value
    if answers:  # settings without a section go to the top of the file
        section = made.setdefault(schema.section, {}) if schema.section else made
        section.update(answers)


def _field(asker: Asker, field: SettingField) -> Any:
    default = "" if field.default is None else str(field.default)
    if field.kind == "bool" or field.choices == ("true", "false"):
        return asker.confirm(field.ask, field.default is True)
    if field.choices:
        wanted = default if default in field.choices else field.choices[0]
        said = asker.choose(field.ask, field.choices, wanted)
        return int(said) if field.kind == "int" else said

    def read(said: str) -> Any:
        if field.kind == "list":
            return [one for one in map(str.strip, said.split(",")) if one] or None
        check_value(field, said, repr(said))
        return {"int": int, "float": float}.get(field.kind, str)(said) if said else None

    question = f"{field.ask} (separate several by commas)" if field.kind == "list" else field.ask
    return asker.text(question, default, read)
