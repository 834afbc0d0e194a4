"""Generate pages, tables in pages, stubs and the core's catalog from code and metadata.

With `--check`, write nothing, and fail if any of these files is out of date.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import pkgutil
import re
import runpy
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import drop_in_clients
import pictures
from packaging.requirements import Requirement

from accelerate_core import Accelerator, plugin
from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.config.core import CORE_SETTINGS, CoreSettings
from accelerate_core.config.schema import settings_fields
from accelerate_core.contract import view
from accelerate_core.contract.capabilities import (
    ACCEPTED_BY_DEFAULT,
    NEEDS,
    REDUCES_GRADIENTS,
    lacking,
)
from accelerate_core.contract.hooks import HOOKS, hooks_of_kind
from accelerate_core.distributed.torch_collectives import TorchCollectives
from accelerate_core.plugins import catalog, discovery
from accelerate_launch import accelerate_options
from accelerate_launch.cli import cli
from accelerate_launch.commands.plugins import print_rows
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import rows as plugin_rows
from accelerate_launch.json_schema import config_schema
from accelerate_launch.schemas import imported_schemas
from accelerate_testing.contract import HOOK_KINDS, contract
from accelerate_testing.scaffold import write_repository
from accelerate_tracking import VERBS, GeneralTracker
from accelerate_tracking.jsonl import JsonlTracker
from accelerate_tracking.tracker import _FLAGS

HERE = Path(__file__).parent
ROOT = HERE.parent


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(header: list[str], rows: list[list[object]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(cell(part) for part in row) + " |" for row in rows] + [""]


def hooks() -> str:
    """Return the reference page of all hooks, grouped by kind and topic."""
    made = contract()
    groups = {kind: [name for name in HOOKS if HOOKS[name] == kind] for kind in HOOK_KINDS}
    lines = [_HOOKS_INTRODUCTION.format(version=".".join(map(str, made["version"])))]
    for kind, meaning in HOOK_KINDS.items():
        lines += [f"## {kind.capitalize()} hooks", "", meaning, ""]
        ordered = [name for name in made["hooks"] if name in groups[kind]]
        topics = _OWNER_TOPICS if kind == "owner" else {"": ordered[0]}
        first_hooks = {name: topic for topic, name in topics.items()}
        for name in ordered:
            if topic := first_hooks.get(name):
                lines += [f"### {topic}", ""]
            hook = made["hooks"][name]
            level = 4 if topics is _OWNER_TOPICS else 3
            lines += _described(name, hook["arguments"], hook["doc"], level=level)
            if hook["since"] != [1, 0]:
                lines += [f"Since version {'.'.join(map(str, hook['since']))}.", ""]
            lines += [
                line for key in hook["deprecated"] for line in (f"`{key}` is deprecated.", "")
            ]
    return "\n".join([*lines, *declarations()])


_HOOKS_INTRODUCTION = """\
# Hooks

This page lists every hook that a backend, precision or extension can implement: when the core calls it, its
arguments, and what the core does by default. To learn how to write a plugin, read [Plugins](plugins.md).

To implement a hook, write a method with its name. This extension prints each optimizer step:

```python
from accelerate_core.plugin import AcceleratorView, PreparedOptimizer


class Steps:
    name = "steps"
    api_version = (1, 0)

    def on_step_end(self, accelerator: AcceleratorView, optimizer: PreparedOptimizer) -> None:
        print(f"rank {{accelerator.process_index}}: step {{optimizer.steps_taken}}")
```

Leave out any arguments that you don't need.

| kind | which plugins are called | what the core does with results |
|---|---|---|
| [owner](#owner-hooks) | the active backend | uses the result, even if it is `None` |
| [stage](#stage-hooks) | every active plugin, by stage and name | passes the model to the next plugin |
| [broadcast](#broadcast-hooks) | every active plugin | ignores them |
| [registration](#registration-hooks) | every active plugin | combines them |

`accelerate-core plugins hooks` prints the same list in a terminal. `accelerate-core plugins hooks --trace`
shows [which hooks a script calls](plugins.md#see-which-hooks-run).

This is version {version} of the contract ([what a version promises](contract.md)). Hooks without a version
exist since 1.0. The page is generated from docstrings; do not edit it.
"""

#: Topic of owner hooks -> the first hook that belongs to it.
_OWNER_TOPICS = {
    "Start": "init_process_group",
    "Data": "data_shard",
    "Prepare": "init_model_context",
    "Checkpoints": "model_state",
    "Training step": "autocast",
    "Gradients in checkpoints": "pending_gradients",
    "Collectives": "gather",
}


def _described(
    name: str, arguments: list[str] | None, doc: str, anchor: str = "", *, level: int = 3
) -> list[str]:
    """Return a hook or method with its docstring."""
    signature = name if arguments is None else f"{name}({', '.join(arguments)})"
    paragraphs = doc.replace("\nDefault:", "\n**Default:**")
    return [f"{'#' * level} `{signature}` {{ #{anchor or name} }}", "", paragraphs, ""]


def declarations() -> list[str]:
    """Return the words that backends and precisions declare, and the methods of a precision."""
    lines = ["## What a precision needs and a backend accepts", ""]
    lines += [
        "A precision lists these words in `needs`, a backend in `supports['accepts']`. Without this key, "
        "a backend accepts "
        + ", ".join(f"`{word}`" for word in ACCEPTED_BY_DEFAULT)
        + ". The [compatibility matrix](compatibility.md) shows what each plugin declares.",
        "",
    ]
    lines += table(["word", "meaning"], [[f"`{word}`", text] for word, text in NEEDS.items()])
    lines += ["## When gradients are reduced", ""]
    lines += [
        "A backend declares in `reduces_gradients` when the gradients of all ranks have been combined.",
        "",
    ]
    words = [[f"`{word}`", text] for word, text in REDUCES_GRADIENTS.items()]
    lines += table(["word", "gradients are combined"], words)
    lines += ["## Methods of a precision", "", inspect.getdoc(Precision) or "", ""]
    for name, value in vars(Precision).items():
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function) and not name.startswith("_"):
            arguments = list(inspect.signature(function).parameters)[1:]
            lines += _described(
                name,
                None if isinstance(value, property) else arguments,
                inspect.getdoc(function) or "",
                f"precision-{name}",
            )
    return lines


def compatibility() -> str:
    """Return the page that shows which backend works with which precision."""
    backends, precisions = _declared("backend"), _declared("precision")
    written = {name: _written(name, kind) for name, kind in _WRITTEN.items()}
    backends |= {**_examples(), "level": written["level"]}
    precisions["grid"] = written["grid"]
    examples = " and ".join(f"`{name}`" for name in _examples())
    *others, last = (f"`{name}`" for name in _WRITTEN)
    scaffolds = f"{', '.join(others)} and {last}"
    lines = ["# Compatibility matrix", ""]
    lines += [
        "This page shows which backends run with which precisions, and what each plugin declares.",
        "",
        "A precision declares what it needs, and a backend declares what it accepts "
        "([all words](hooks.md#what-a-precision-needs-and-a-backend-accepts)). If they don't match, "
        "constructing the Accelerator raises an error; `accelerate-core plugins` shows it before you "
        "start.",
        "",
        f"{examples} are the example third-party backends in this repository. {scaffolds} are the "
        "plugins that `accelerate-core plugins new` writes.",
        "",
        "This page is generated from the declarations of the plugins; do not edit it.",
        "",
    ]
    rows: list[list[object]] = [
        ["needs", *(", ".join(sorted(one.needs)) for one in precisions.values())]
    ]
    for name, backend in backends.items():
        lack = [lacking(backend.supports, its, one.needs) for its, one in precisions.items()]
        rows.append(
            [f"`{name}`", *(f"no: {', '.join(words)}" if words else "yes" for words in lack)]
        )
    lines += table(["backend", *(f"`{name}`" for name in precisions)], rows)
    lines += ["## Declarations of backends", ""]
    rows = [
        [
            f"`{name}`",
            _accepted(backend.supports),
            backend.reduces_gradients,
            ", ".join(backend.supports.get("mesh") or ()),
            ", ".join(backend.supports.get("devices") or ["any"]),
            backend.compile_at,
            *("yes" if backend.supports.get(key, key in _BY_DEFAULT) else "" for key in _ABILITIES),
            "yes" if backend.needs_group else "",
            ", ".join(sorted(backend.owns)),
        ]
        for name, backend in backends.items()
    ]
    header = ["accepts", "reduces_gradients", "mesh", "devices", "compile_at"]
    header += [*_ABILITIES, "needs_group", "owns"]
    lines += table(["backend", *(f"`{key}`" for key in header)], rows)
    lines += ["## Declarations of precisions", ""]
    lines += [
        "`fp8` is listed as it is with torchao, the default library. [fp8](fp8.md) compares the other "
        "libraries.",
        "",
    ]
    rows = [
        [
            f"`{name}`",
            "yes" if one.supports.get("compile", True) else "",
            ", ".join(one.supports.get("mesh", ["any"])) or "none",
        ]
        for name, one in precisions.items()
    ]
    lines += table(["precision", "`compile`", "`mesh`"], rows)
    lines += ["## Declarations of trackers", ""]
    lines += [
        "Every tracker works with every backend and precision, because it runs in a thread of the main "
        "process. [Tracking](tracking.md#what-each-tracker-supports) shows what you can log to each tracker, "
        "and [write a tracker](write_a_tracker.md) explains these declarations.",
        "",
    ]
    trackers = [*tracker_classes(), written["diary"]]
    flags = [flag for flag in _FLAGS if flag not in ("resumes", "groups")]
    rows = [
        [f"`{cls.name}`", *("yes" if getattr(cls, flag) else "" for flag in flags)]
        for cls in sorted(trackers, key=lambda cls: str(cls.name))
    ]
    lines += table(["tracker", *(f"`{flag}`" for flag in flags)], rows)
    return "\n".join(lines)


_WORDS = "no_sync join compile several_models exact gradients own_mesh"
_ABILITIES = tuple(_WORDS.split())
_BY_DEFAULT = ("compile", "several_models", "exact", "gradients")
#: Name -> kind of the plugins that represent those written with the kit.
_WRITTEN = {"level": "backend", "grid": "precision", "diary": "tracker"}


def _accepted(supports: Mapping[str, Any]) -> str:
    """Return a short description of what a backend accepts."""
    accepted = supports.get("accepts", ACCEPTED_BY_DEFAULT)
    without = [word for word in NEEDS if word not in accepted]
    if len(without) < 2:
        return " but ".join(["all", *without])
    own = [f"its own {name}" for name in supports.get("precisions") or ()]
    return ", ".join([*(word for word in NEEDS if word in accepted), *own])


def _declared(kind: str) -> dict[str, Any]:
    """Return our own plugins of a kind, by name."""
    projects = [ROOT / "core/pyproject.toml", *ROOT.glob("backends/*/pyproject.toml")]
    ours = {tomllib.loads(path.read_text())["project"]["name"] for path in projects}
    records = discovery.installed().of_kind(kind)
    return {one.name: one.load() for one in records if one.distribution in ours}


@cache
def _examples() -> dict[str, Any]:
    """Return the example backends by name. They are not installed."""
    found = {}
    for path in sorted(ROOT.glob("examples/**/pyproject.toml")):
        points = tomllib.loads(path.read_text())["project"]["entry-points"]
        sys.path.append(str(path.parent / "src"))
        for name, target in points.get("accelerate_core.backends", {}).items():
            found[name] = pkgutil.resolve_name(target)
    return found


@cache
def _written(name: str, kind: str) -> Any:
    """Return the class that `plugins new` writes for a kind."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(name, kind, Path(folder, name))
        sys.path.append(str(Path(folder, name, "src")))
        project = tomllib.loads(Path(folder, name, "pyproject.toml").read_text())["project"]
        return pkgutil.resolve_name(project["entry-points"][f"accelerate_core.{kind}s"][name])


#: Environment variables that are not fields of a settings class.
VARIABLES = {
    "ACCELERATE_BYPASS_DEVICE_MAP": "allow several processes to train a model that a device map splits",
    "ACCELERATE_CONFIG_FILE": "config file that a process reads; `launch` sets it",
    "ACCELERATE_CONFIG_HOME": "folder of the config file that `launch` reads by default",
    "ACCELERATE_CPU_AFFINITY": "bind each process to the CPU cores nearest to its device",
    "ACCELERATE_DEBUG_HOOKS": "1 logs every hook call to stderr, with rank, plugin and duration",
    "ACCELERATE_DISABLED_PLUGINS": "comma-separated names of plugins to disable",
    "ACCELERATE_IN_TPU_POD": "set on each machine of a TPU pod by the command that starts it",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "`init_empty_weights` also puts buffers on the meta device",
    "ACCELERATE_LOG_LEVEL": "level of the loggers that `get_logger` returns",
    "ACCELERATE_OBJECT_STORE_URL": "keep checkpoints below this URL, such as s3://bucket/run",
    "ACCELERATE_PLUGINS": "comma-separated names of extensions to activate",
    "ACCELERATE_TESTING_FAKE_DEVICES": "how many fake devices each process has, 2 by default",
    "ACCELERATE_TESTING_FAKE_MEMORY": "bytes of memory of each fake device; no limit by default",
    "ACCELERATE_USE_DEEPSPEED": "select the backend `deepspeed`",
    "ACCELERATE_USE_FSDP": "select the backend `fsdp2`",
    "ACCELERATE_USE_MEGATRON_LM": "select the backend `megatron`",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "use a device mesh with the sizes in `PARALLELISM_CONFIG_…`",
    "ACCELERATE_USE_RAY": "start the ranks on a Ray cluster",
    "ACCELERATE_USE_TPU": "start the processes of a TPU machine",
    "ACCELERATE_XLA_SPMD": "select the backend `xla`: one process with a mesh of its devices",
}
#: Environment variables that only our own processes set.
INTERNAL = {
    "ACCELERATE_AGENT_PID",
    "ACCELERATE_ELASTIC_MACHINES",
    "ACCELERATE_ELASTIC_POLICY",
    "ACCELERATE_ELASTIC_PROCESSES",
    "ACCELERATE_ELASTIC_RESTARTED",
    "ACCELERATE_PROVENANCE",
    "ACCELERATE_TESTING_RESULTS",
    "ACCELERATE_TORCHFT_JOINED",
}
SOURCES = ("core", "extensions/*", "backends/*", "trackers/*")


def _sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the syntax tree of each of our modules."""
    for folder in SOURCES:
        for path in sorted(ROOT.glob(f"{folder}/src/**/*.py")):
            if "served" not in path.parts:  # modules copied for Accelerate's tests
                parts = path.with_suffix("").parts
                name = ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def _settings_classes() -> Iterator[Any]:
    """Yield the settings classes of all packages, without the options of `launch`."""
    for module, tree in _sources():
        for node in tree.body:
            calls = [getattr(one, "func", one) for one in getattr(node, "decorator_list", ())]
            if isinstance(node, ast.ClassDef) and "settings" in map(ast.unparse, calls):
                cls = pkgutil.resolve_name(f"{module}:{node.name}")
                if cls is not CoreSettings and cls.__settings_names__[0] is not None:
                    yield cls


def _variables() -> set[str]:
    """Return the environment variables named in our sources."""
    texts = (node for _, tree in _sources() for node in ast.walk(tree) if hasattr(node, "value"))
    found = [str(node.value) for node in texts if isinstance(node, ast.Constant)]
    return {name for one in found for name in re.findall(r"\bACCELERATE_[A-Z0-9_]*[A-Z0-9]\b", one)}


def configuration() -> str:
    lines = ["# Configuration", ""]
    lines += [
        "This page lists every setting with its environment variable and its default, and the keys of the "
        "core's settings in the config file. "
        "[Launching](launching.md) lists the options of `accelerate-core launch`.",
        "",
        "If several sources set the same value, the first in this list wins: constructor argument, command "
        "line, environment variable, config file, detection, default. `print(accelerator.explain())` "
        "shows the value in use and its source for every setting.",
        "",
        "Lists and dictionaries in environment variables are JSON unless the table says otherwise, as in "
        '`ACCELERATE_KUBERNETES_RESOURCES=\'["cpu=16", "memory=64Gi"]\'`.',
        "",
        "This page is generated from the settings classes; do not edit it.",
        "",
        "## The core",
        "",
        "Pass these to `Accelerator`, or set them as shown:",
        "",
    ]
    rows: list[list[object]] = [
        [f"`{s.name}`", f"`{s.env[0]}`", f"`{s.yaml[0]}`", s.default, s.help] for s in CORE_SETTINGS
    ]
    lines += table(["setting", "environment", "YAML key", "default", "meaning"], rows)
    for cls in _settings_classes():
        prefix = cls.__settings_names__[0]
        lines += [f"## {cls.__name__}", "", (inspect.getdoc(cls) or "").split("\n\n")[0], ""]
        rows = [
            [f"`{f.name}`", f"`{f.env[0]}`" if prefix and f.env else "", f.default, f.help]
            for f in settings_fields(cls)
        ]
        lines += table(["field", "environment", "default", "meaning"], rows)
    lines += ["## Other environment variables", ""]
    lines += ["These are not fields of a settings class:", ""]
    rows = [[f"`{name}`", meaning] for name, meaning in sorted(VARIABLES.items())]
    lines += table(["environment", "meaning"], rows)
    undocumented = _variables() - {*re.findall(r"`(\w+)`", "\n".join(lines))} - INTERNAL
    if undocumented:
        sys.exit(f"Add to VARIABLES in docs/generate.py: {', '.join(sorted(undocumented))}")
    return "\n".join(lines)


def commands() -> str:
    """Return the page of all commands of our packages, with their arguments and options."""
    lines = ["# Commands", ""]
    lines += [
        "This page lists all commands of `accelerate-core`, with their arguments and options. "
        "`accelerate-core COMMAND --help` prints the same for the packages that are installed on your "
        "machine.",
        "",
        "Options of `launch` that set a value also have a key in [config files](launching.md). Settings "
        "of the training processes also have an [environment variable](configuration.md).",
        "",
        "On a terminal, tables are wrapped to its width, and work that takes more than two seconds shows "
        "a progress bar. In a pipe, lines are not wrapped, and there are no colours or progress bars. "
        "Setting `NO_COLOR` turns off colours everywhere.",
        "",
        "This page is generated from the commands; do not edit it.",
        "",
    ]
    return "\n".join([*lines, *_command(cli, "accelerate-core", 2)])


def _command(command: click.Command, name: str, level: int) -> Iterator[str]:
    """Yield the lines about a command and its subcommands."""
    context = click.Context(command, info_name=name)
    inside = command.list_commands(context) if isinstance(command, click.Group) else []
    if command is not cli:
        yield from ["#" * level + f" {name.removeprefix('accelerate-core ')}", ""]
        yield from ["```text", " ".join([name, *command.collect_usage_pieces(context)]), "```", ""]
        yield from [inspect.cleandoc(command.help or "").replace("\b\n", ""), ""]
    rows: list[list[object]] = []
    for one in command.get_params(context):
        record = one.get_help_record(context) if isinstance(one, click.Option) else None
        if record is not None and "--help" not in one.opts:
            rows.append([f"`{record[0]}`", record[1]])
    if rows and command is not cli:
        yield from table(["option", "meaning"], rows)
    for inner in inside:
        if (found := command.get_command(context, inner)) is not None:  # type: ignore[attr-defined]
            yield from _command(found, f"{name} {inner}", level + (command is not cli))


def tracker_classes() -> list[type[GeneralTracker]]:
    """Return our own trackers."""
    classes: list[type[GeneralTracker]] = [JsonlTracker]
    for project in sorted(HERE.parent.glob("trackers/*/pyproject.toml")):
        sys.path.append(str(project.parent / "src"))  # in case it is not installed
        points = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
        classes += [
            pkgutil.resolve_name(target) for target in points["accelerate_core.trackers"].values()
        ]
    return classes


def tracking() -> str:
    """Return tracking.md with the table of what each tracker supports."""
    rows: list[list[object]] = [
        [
            f"`{cls.name}`",
            f"`{cls.__name__}`",
            f"`{cls.library}`" if cls.library else "",
            *("yes" if verb in cls.supports else "" for verb in VERBS),
            "yes" if cls.resumes else "",
            "yes" if cls.groups else "",
            cls.failed_word,
        ]
        for cls in sorted(tracker_classes(), key=lambda cls: str(cls.name))
    ]
    header = ["tracker", "class", "library", *VERBS, "resumes", "groups", "failed"]
    return _filled("tracking.md", "supports", "\n".join(table(header, rows)))


def launching() -> str:
    """Return launching.md with the table of the keys of a config file."""
    from accelerate_launch.options import LAUNCH_OPTIONS

    rows: list[list[object]] = []
    for option in LAUNCH_OPTIONS:
        keys = list(option.yaml)
        if keys:
            rows.append([", ".join(f"`{key}`" for key in keys), f"`--{option.name}`", option.help])
    rows += [
        ["`distributed_type`", "", "the backend; with `MULTI_*`, the number of processes decides"],
        [
            "`compute_environment`",
            "",
            "`LOCAL_MACHINE`; " + accelerate_options.REFUSED_OPTIONS["aws_access_key_id"],
        ],
        ["`parallelism_config`", "`--parallelism_config_*`", "sizes of a device mesh"],
    ]
    for section, extra in catalog.SECTIONS.items():
        rows.append([f"`{section}`", "", f"settings of the plugin `{extra}`"])
    rows.append(["`BACKEND_config`", "`--BACKEND_*`", "settings of any other backend"])
    for extra in sorted({*catalog.KEYS.values()}):
        keys = [f"`{key}`" for key, its in catalog.KEYS.items() if its == extra]
        rows.append([", ".join(keys), "", f"read only by the plugin `{extra}`"])
    for table_of, word in (
        (accelerate_options.IGNORED_KEYS, "ignored"),
        (accelerate_options.OBSOLETE_KEYS, "obsolete"),
    ):
        rows += [[f"`{key}`", "", f"{word}: {why}"] for key, why in table_of.items()]
    return _filled("launching.md", "keys", "\n".join(table(["key", "option", "meaning"], rows)))


def drop_in() -> str:
    """Return the table of Accelerate's names: where each is available, or why it is missing."""
    from accelerate_drop_in import absent, assignment, serving

    extras = _exports_by_extra()
    lines = [
        "# Names of Hugging Face Accelerate 1.15",
        "",
        "Look up here whether a name that your code imports from `accelerate` works with the drop-in. "
        "[Its README](../extensions/drop_in/README.md) explains how to use it, and "
        "[migration](migration.md) lists what behaves differently.",
        "",
        "Every module in this table has all public names of Accelerate's module. The last column lists the "
        "names that need something more:",
        "",
        "* *exported by*: the package of that extra defines the name. You can import it without the "
        "package; using it then raises an error that says what to install.",
        "* *refuses*: you can import the name, but using it raises an error "
        "([why](#names-that-raise-when-used)).",
        "* *left out*: importing it raises an error ([why](#left-out)).",
        "",
        "`docs/generate.py` writes this page from the drop-in's tables; do not edit it.",
        "",
    ]
    rows: list[list[object]] = []
    for module, known in sorted(serving.names().items()):
        groups: dict[str, list[str]] = {}
        for name in known:
            groups.setdefault(_state_of(module, name, extras), []).append(f"`{name}`")
        here = groups.pop("", [])
        others = [f"{state}: {', '.join(names)}" for state, names in sorted(groups.items())]
        rows.append(
            [f"`accelerate{'.' * bool(module)}{module}`", len(known), len(here), "; ".join(others)]
        )
    lines += table(["module", "names", "always available", "other names"], rows)
    lines += [
        "## Left out",
        "",
        "Importing one of these names raises an error with the reason:",
        "",
    ]
    lines += table(["name", "why"], [[f"`{n}`", why] for n, why in sorted(absent.LEFT_OUT.items())])
    lines += ["These modules of Accelerate do not exist here:", ""]
    rows = [[f"`accelerate.{name}`", why] for name, why in sorted(absent.MODULES.items())]
    lines += table(["module", "why"], rows)
    lines += ["## Names that raise when used", ""]
    lines += table(["name", "why"], [[f"`{n}`", why] for n, why in sorted(absent.REFUSED.items())])
    lines += [
        "## Different signatures",
        "",
        "All other functions, classes and methods take the same arguments as Accelerate's, in the same "
        "order and with the same defaults. A test compares them with a recording of Accelerate's "
        "signatures.",
        "",
    ]
    lines += table(
        ["name", "why"], [[f"`{n}`", why] for n, why in sorted(absent.DIFFERENT.items())]
    )
    lines += [
        "## Installed in place of huggingface-accelerate",
        "",
        "The wheel that `make drop-in` builds is a distribution named `accelerate` with modules from "
        "accelerate-core, not from Hugging Face. It exists because libraries check for the distribution by "
        "name and version. sentence-transformers also reads the metadata, and starts only if the header "
        "`Home-page` contains `huggingface`. In this wheel the header is the address of this section, whose "
        "title names what the wheel replaces. `pip show accelerate` prints it.",
        "",
        "## Assigned after construction",
        "",
        "In Accelerate, the attributes of an Accelerator and of its state are plain, and libraries assign "
        "to them after construction: the Trainer of Transformers 4 sets `accelerator.ddp_handler`, "
        "sentence-transformers `accelerator.even_batches`, TRL "
        "`accelerator.dataloader_config.dispatch_batches`. Here, such an assignment has one of three "
        "effects:",
        "",
        "* *honoured*: the new value is used.",
        "* *refused*: the assignment raises an error that says what to do instead.",
        "* *no effect*: a warning is logged; Accelerate does not use the value either.",
        "",
        "Assigning a value that equals the current one always works. Names that are not listed are "
        "ordinary attributes. All states of a process share the attributes of a state.",
        "",
    ]
    rows = [
        [f"`{owner}.{name}`", rule.effect, rule.advice]
        for owner, rules in (("accelerator", assignment.ACCELERATOR), ("state", assignment.STATE))
        for name, rule in sorted(rules.items())
    ]
    rows.append(
        [
            "`gradient_state.plugin_kwargs`",
            "honoured",
            "from the next micro-batch on; also with `update(...)` or by key",
        ]
    )
    lines += table(["attribute", "effect", "when it applies, or what to do instead"], rows)
    lines += ["## Replaced by clients", "", *drop_in_clients.INTRODUCTION.splitlines(), ""]
    lines += table(
        ["client", "what it does", "here"], [list(row) for row in drop_in_clients.CLIENTS]
    )
    lines += ["## Accelerate's own tests", "", *drop_in_clients.TESTS.splitlines(), ""]
    rows = [[f"`{name}`", why] for name, why in sorted(_original_tests().items())]
    lines += table(["tests whose names begin with", "why"], rows)
    return "\n".join(lines)


def _original_tests() -> dict[str, str]:
    """Return the tests of Accelerate that are expected to fail, with the reasons."""
    path = ROOT / "tests" / "drop_in" / "original_tests.py"
    expected: dict[str, str] = runpy.run_path(str(path))["EXPECTED"]
    return expected


def _exports_by_extra() -> dict[str, str]:
    """Return name -> extra for names that need more than the packages of the drop-in."""
    made = json.loads(known_packages())["EXPORTS"]
    own = {"drop-in", "big-model", "checkpoint", "launch", "tracking"}
    return {name: extra for name, extra in made.items() if extra not in own}


def _state_of(module: str, name: str, extras: Mapping[str, str]) -> str:
    """Return what is special about a name, or "" if it is always available."""
    from accelerate_drop_in import absent

    if name in absent.LEFT_OUT:
        return "left out"
    if module.startswith("test_utils"):
        return ""
    if absent.refused(module, name):
        return "refuses"
    extra = extras.get(name)
    return f"exported by `{extra}`" if extra else ""


def _filled(page: str, what: str, generated: str) -> str:
    """Return a page with the text between its two marks replaced."""
    text = (HERE / page).read_text(encoding="utf-8")
    before, rest = text.split(f"<!-- generated: {what} -->\n")
    after = rest.split("<!-- end -->\n", 1)[1]
    return f"{before}<!-- generated: {what} -->\n{generated}<!-- end -->\n{after}"


#: Plugins whose rows the site's first page shows.
_SHOWN = ("ddp", "single", "directory", "simple", "torchrun", "bf16", "no", "jsonl")


def landing() -> str:
    """Return the site's first page with the output of `accelerate-core plugins --all`."""
    run = planned_run({})
    shown = [row for row in plugin_rows(run, ask_trackers=True) if row["name"] in _SHOWN]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_rows(shown)
    table = "\n".join(line.rstrip() for line in printed.getvalue().strip("\n ").splitlines())
    return _filled("index.md", "plugins", f"```text\n {table}\n```\n")


STANDARD = "accelerate-core[standard]"
#: Triggers that are arguments, although their names end like sections of the config file.
_ARGUMENTS = ("parallelism_config",)
_RESERVED = ("always", "multi_process")


def known_packages() -> str:
    """Return the catalog of what each of our packages provides, as JSON.

    It is read from their metadata and settings. `plugins/catalog.py` explains the tables, and
    `planned.toml` adds entries that no package declares.
    """
    kinds = {group.rpartition(".")[2]: kind for group, kind in discovery.GROUPS.items()}
    names: dict[str, dict[str, str]] = {kind: {} for kind in kinds.values()}
    summaries: dict[str, str] = {}
    asked = ("ARGUMENTS", "VARIABLES", "SECTIONS", "KEYS", "SWITCHES", "OPTIONS", "PREFIXES")
    tables = (*asked, "EXPORTS", "PROBES", "DISTRIBUTED_TYPES", "METHODS")
    found: dict[str, dict[str, Any]] = {name: {} for name in tables}
    extras = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    extra_of = {
        packages[-1]: extra
        for extra, packages in extras["optional-dependencies"].items()
        if packages[-1].startswith("accelerate-") and packages[:-1] in ([], [STANDARD])
    }
    members: dict[str, tuple[str, list[str]]] = {}
    for path in sorted(ROOT.glob("*/*/pyproject.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if project := content.get("project"):
            folder = path.parent.relative_to(ROOT).as_posix()
            members[project["name"]] = folder, project.get("dependencies", [])
        extra = extra_of.get(content.get("project", {}).get("name", ""))
        if extra is None:
            continue
        sys.path.append(str(path.parent / "src"))  # in case it is not installed
        points = {
            group.rpartition(".")[2]: its
            for group, its in content["project"].get("entry-points", {}).items()
        }
        for group in kinds.keys() & points:
            names[kinds[group]] |= dict.fromkeys(points[group], extra)
        own = content.get("tool", {}).get("accelerate-core", {})
        exported = [*points.get("exports", ()), *own.get("not-offered-yet", ())]
        found["EXPORTS"] |= dict.fromkeys(exported, extra)
        for name, target in points.get("commands", {}).items():
            summaries[name] = pkgutil.resolve_name(target).get_short_help_str(200)
        for name, target in points.get("trackers", {}).items():
            if library := re.match(r"\w*", pkgutil.resolve_name(target).library)[0]:
                found["PROBES"][f"is_{name}_available"] = library
        for group in ("backends", "precisions"):
            for name, target in points.get(group, {}).items():
                for table, entry in _options(pkgutil.resolve_name(target), name):
                    found[table][entry] = extra
        launchers = points.get("launchers", {})
        for name, target in launchers.items():
            for table, entry in _options_of_launcher(pkgutil.resolve_name(target), name):
                found[table][entry] = extra
        extensions = points.get("extensions", {}).values()
        of_the_core = {variable for setting in CORE_SETTINGS for variable in setting.env}
        for name, target in points.get("triggers", {}).items():
            if name.startswith("ACCELERATE_USE_"):
                found["VARIABLES"].setdefault(name, extra)  # several backends may use a mesh
                use = "ACCELERATE_USE_" if target in launchers.values() else "ACCELERATE_"
                found["SWITCHES"].setdefault(name.removeprefix(use).lower(), extra)
            elif target in extensions and name.isupper() and name not in of_the_core:
                found["VARIABLES"][name] = extra
            elif name.endswith("_config") and name not in _ARGUMENTS:
                found["SECTIONS"][name] = extra
            elif target in points.get("checkpointers", {}).values():
                continue  # asked because of the core's own arguments
            elif name.isidentifier() and name.islower() and name not in _RESERVED:
                found["ARGUMENTS"].setdefault(name, extra)
    added = tomllib.loads((ROOT / "docs" / "planned.toml").read_text(encoding="utf-8"))
    absent = added.pop("absent")
    found["ABSENT_ATTRIBUTES"] = {
        **dict.fromkeys(absent["none"]),
        **dict.fromkeys(absent["false"], False),
    }
    libraries = added.pop("probes")["libraries"]
    found["PROBES"] |= {f"is_{name}_available": name for name in libraries}
    for kind, others in added.pop("NAMES").items():
        names[kind] |= others
    for table, entries in added.items():
        found[table] |= entries
    folders = {}
    for extra in extras["optional-dependencies"]:
        with contextlib.suppress(KeyError):  # a package of this extra does not exist yet
            folders[extra] = _folders(f"accelerate-core[{extra}]", extras, members)
    folders = {extra: its for extra, its in folders.items() if its}
    made = {"NAMES": names, "SUMMARIES": summaries, "FOLDERS": folders, **found}
    return json.dumps(made, indent=2, sort_keys=True)


def contributed() -> str:
    """Return a stub of the arguments, attributes and names that our plugins add to the core."""
    tables = json.loads(known_packages())
    arguments = {name: _argument_class(name) for name in tables["ARGUMENTS"]}
    targets = _entry_points("exports")
    for cls, _ in filter(None, arguments.values()):
        targets.setdefault(cls.__name__, f"{cls.__module__}:{cls.__name__}")
    imports, renamed = [], []
    for name, target in sorted(targets.items(), key=lambda one: (one[1], one[0])):
        module, _, attribute = target.partition(":")
        if name == attribute:
            imports.append(f"from {module} import {name} as {name}")
        else:  # an import under another name would not be re-exported
            imports.append(f"from {module} import {attribute} as _{name}")
            renamed.append(f"{name} = _{name}")
    probes = sorted(tables["PROBES"].keys() - targets.keys())
    absent = tables["ABSENT_ATTRIBUTES"]
    attributes = {*absent, *tables["METHODS"], *_served_attributes()}
    core = inspect.signature(Accelerator.__init__).parameters
    lines = [
        '"""Names that our plugins add to the core, for type checkers. Generated by `make docs`."""',
        "",
        "from collections.abc import Callable, Mapping",
        "from typing import Any, TypedDict",
        "",
        *imports,
        "",
        *renamed,
        *(f"{name}: Callable[..., bool]" for name in probes),
        "",
        "class PluginArguments(TypedDict, total=False):",
    ]
    for name, found in sorted(arguments.items()):
        if name not in core:
            cls, several = found or (None, False)
            one = cls.__name__ if cls is not None else "Any"
            lines.append(f"    {name}: {one}{f' | Mapping[str, {one}]' if several else ''} | None")
    lines += ["", "class PluginAttributes:"]
    for name in sorted(attributes):
        lines.append(f"    {name}: {'bool' if absent.get(name) is False else 'Any'}")
    return "\n".join(lines)


def owner_hooks() -> str:
    """Return a stub of the owner hooks as bound to one Accelerator, without that argument."""
    lines = [
        '"""The owner hooks, bound to one Accelerator, for type checkers. Generated by `make docs`."""',
        "",
        "from collections.abc import Callable, Collection, Iterator, Mapping, Sequence",
        "from contextlib import AbstractContextManager",
        "from pathlib import Path",
        "from typing import Any, Protocol",
        "",
        "import torch",
        "import torch.distributed as dist",
        "from torch.distributed.device_mesh import DeviceMesh",
        "from torch.optim import Optimizer",
        "",
        "from accelerate_core.config.handlers import AutocastKwargs",
        "from accelerate_core.contract.members import GradientReducer, PreparePlanView, Scheduler",
        "from accelerate_core.contract.schedule import ScheduleResult, ScheduleStep",
        "from accelerate_core.contract.topology import Process, Topology",
        "from accelerate_core.contract.trainable import TrainableChange",
        "from accelerate_core.contract.members import ReduceOp, Scope",
    ]
    collectives = [name for name in vars(TorchCollectives) if HOOKS.get(name) == "owner"]
    for cls, base, names in (
        ("CollectiveHooks", "Protocol", collectives),
        ("OwnerHooks", "CollectiveHooks, Protocol", hooks_of_kind("owner")),
    ):
        lines += ["", f"class {cls}({base}):"]
        for name in names:
            if base == "Protocol" or name not in collectives:
                lines += _bound_signature(name)
    return "\n".join(lines)


def plugin_module() -> str:
    """Return the page of the names for plugin authors."""
    groups: dict[str, list[list[object]]] = {}
    for name, home in sorted(plugin._HOMES.items(), key=lambda one: one[0].lower()):
        value = getattr(plugin, name)
        function = inspect.unwrap(value) if callable(value) else value
        documented = inspect.isclass(value) or inspect.isfunction(function)
        doc = (inspect.getdoc(value) or "").splitlines()[0] if documented else _comment(home, name)
        title = next(title for title, prefixes in _GROUPS if home.startswith(prefixes))
        groups.setdefault(title, []).append([f"`{name}`", doc])
    lines = [
        "# The module for plugin authors",
        "",
        "Everything that a plugin needs from the core is in one module. Look up here what it exports:",
        "",
        "```python",
        "from accelerate_core.plugin import AcceleratorView, Backend, ConfigurationError",
        "```",
        "",
        "These names and their meanings are part of [the contract](contract.md). Importing the module "
        "doesn't import torch.",
        "",
        "This page is generated from `accelerate_core/plugin.pyi`; do not edit it.",
        "",
    ]
    for title, _ in _GROUPS:
        lines += [f"## {title}", "", *table(["name", "what it is"], groups[title])]
    return "\n".join([*lines, *_members_of_views()])


def _members_of_views() -> list[str]:
    """List what hooks may read from their first argument."""
    lines = [
        "## Members of the first argument of a hook",
        "",
        "`setup` has the members of `SetupView`, `runtime` also those of `RuntimeView`, and `accelerator` "
        "all of them.",
        "",
    ]
    for cls in (view.SetupView, view.RuntimeView, view.AcceleratorView):
        rows: list[list[object]] = []
        for name, member in vars(cls).items():
            function = member.fget if isinstance(member, property) else member
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            names = [one for one in inspect.signature(function).parameters if one != "self"]
            call = "" if isinstance(member, property) else f"({', '.join(names)})"
            rows.append([f"`{name}{call}`", (inspect.getdoc(function) or "").splitlines()[0]])
        lines += [
            f"### {cls.__name__} {{ #{cls.__name__.lower()} }}",
            "",
            *table(["member", "what it is"], rows),
        ]
    return lines


#: Headings of the page, and the modules whose names they list. The last one lists the rest.
_GROUPS = (
    (
        "Base classes, and what they receive and return",
        (
            "accelerate_core.backend",
            "accelerate_core.plugins.selection",
            "accelerate_core.contract.hooks",
            "accelerate_core.contract.capabilities",
            "accelerate_core.contract.checkpointer",
            "accelerate_core.contract.parts",
        ),
    ),
    (
        "Types of hook arguments",
        (
            "accelerate_core.contract.view",
            "accelerate_core.contract.members",
            "accelerate_core.contract.schedule",
            "accelerate_core.contract.topology",
            "accelerate_core.contract.trainable",
            "accelerate_core.accelerator",
            "accelerate_core.state",
        ),
    ),
    ("Settings", ("accelerate_core.config", "accelerate_core.booleans")),
    ("Errors and warnings", ("accelerate_core.errors", "accelerate_core.failures")),
    ("Content that others wrote", ("accelerate_core.untrusted",)),
    ("Processes and collectives", ("accelerate_core.distributed",)),
    ("Data and training", ("accelerate_core.data", "accelerate_core.training")),
    ("Installed plugins, and helpers", ("accelerate_core.plugins.", "accelerate_core.builtin")),
)


def _comment(home: str, name: str) -> str:
    """Return the `#:` comment above an assignment."""
    source = Path(inspect.getfile(importlib.import_module(home))).read_text(encoding="utf-8")
    found = re.search(
        rf"^from ([\w.]+) import .*\b{name}\b|^from ([\w.]+) import \([^)]*\b{name}\b", source, re.M
    )
    if found is not None:
        return _comment(found[1] or found[2], name)
    lines = source.splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(rf"{name}\b.*=", line))
    comment: list[str] = []
    while lines[at - 1].startswith("#:"):
        at -= 1
        comment.insert(0, lines[at].removeprefix("#:").strip())
    return " ".join(comment)


def _bound_signature(name: str) -> list[str]:
    signature = inspect.signature(getattr(Backend, name))
    parameters = list(signature.parameters.values())
    del parameters[1]  # the Accelerator, or its setup
    bound = signature.replace(parameters=parameters)
    summary = inspect.getdoc(getattr(Backend, name)).splitlines()[0]
    # Annotations are strings, which `str` would put in quotes.
    text = str(bound).replace("'", "")
    return [f"    def {name}{text}:", f'        """{summary}"""']


def _entry_points(group: str) -> dict[str, str]:
    """Return the names and targets of our entry points in a group."""
    found = {}
    for folder in SOURCES[1:]:
        for path in sorted(ROOT.glob(f"{folder}/pyproject.toml")):
            project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
            found |= project.get("entry-points", {}).get(f"accelerate_core.{group}", {})
    return found


def _argument_class(name: str) -> tuple[type[Any], bool] | None:
    """Return the settings class of an argument, and whether it also accepts a dict of several."""
    for target in _entry_points("backends").values():
        plugin = pkgutil.resolve_name(target)
        cls = getattr(plugin, "Settings", None)
        if name in getattr(cls, "__settings_arguments__", ()):
            return cls, bool(getattr(plugin, "several_settings", False))
    return None


def _served_attributes() -> Iterator[str]:
    """Yield the names that our plugins return from `state_attributes`."""
    for _, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "state_attributes":
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Dict):
                        keys = (
                            key.value for key in inner.value.keys if isinstance(key, ast.Constant)
                        )
                        yield from map(str, keys)


def _folders(
    requirement: str, core: dict[str, Any], members: dict[str, tuple[str, list[str]]]
) -> dict[str, str]:
    """Return the folders of our packages that a requirement installs.

    Raises:
        KeyError: one of them does not exist.
    """
    wanted = Requirement(requirement)
    if wanted.name == "accelerate-core":
        found: dict[str, str] = {}
        needs = [need for extra in wanted.extras for need in core["optional-dependencies"][extra]]
    elif wanted.name.startswith("accelerate-"):
        folder, needs = members[wanted.name]
        found = {wanted.name: folder}
    else:
        return {}
    for need in needs:
        found |= _folders(need, core, members)
    return found


def _options(plugin: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the prefix of a plugin's options, options without it, and a precision's section."""
    package = plugin.__module__.partition(".")[0]
    if plugin.Settings and plugin.Settings.__module__.partition(".")[0] != package:
        return  # inherited from the plugin of another package, which has these options
    prefix = getattr(plugin.Settings, "__yaml_prefix__", "") or f"{name}_"
    yield "PREFIXES", prefix
    if issubclass(plugin, Precision):  # a backend declares its section as a trigger
        yield "SECTIONS", f"{name}_config"
    for cls in filter(None, (plugin.Settings, *plugin.more_settings)):
        for field in settings_fields(cls, owner=name):
            yield from (("OPTIONS", one) for one in field.cli if not one.startswith(prefix))


def _options_of_launcher(launcher: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a launcher, and its section or its top-level keys in a config file."""
    cls = getattr(launcher, "Settings", None)
    if cls is None:
        return
    _, section, _ = cls.__settings_names__
    if section is not None:
        yield "SECTIONS", section or f"{name}_config"
        yield "PREFIXES", cls.__yaml_prefix__ or f"{name}_"
        return
    prefix = cls.__yaml_prefix__
    yield from (("PREFIXES", prefix) for _ in prefix[:1])
    for field in settings_fields(cls, owner=name):
        yield from (
            ("OPTIONS", one) for one in field.cli if not prefix or not one.startswith(prefix)
        )
        yield from (
            ("KEYS", one) for one in field.yaml if one not in accelerate_options.IGNORED_KEYS
        )


def json_schema() -> str:
    """Return the JSON schema of config files with the settings of all our plugins, for the site."""
    ours = {"accelerate-core", *catalog.distributions()}
    schemas = imported_schemas()
    if broken := [one.name for one in schemas if one.problem]:
        raise SystemExit(f"These plugins cannot be imported: {', '.join(broken)}")
    return json.dumps(config_schema(distributions=ours, schemas=schemas), indent=1)


def check_installed() -> None:
    """Stop if a distribution is missing, because the pages would lose its settings and options."""
    missing = []
    for project in sorted(ROOT.glob("*/*/pyproject.toml")):
        name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
        if name in catalog.distributions():
            try:
                metadata.distribution(name)
            except metadata.PackageNotFoundError:
                missing.append(f"-e {project.parent.relative_to(ROOT)}")
    if missing:
        install = "pip install --no-build-isolation --no-deps"
        raise SystemExit(f"Not installed here. Run: {install} {' '.join(missing)}")


def main() -> None:
    check_installed()
    stale = []
    pages = {
        "../core/src/accelerate_core/plugins/known_packages.json": known_packages,
        "../core/src/accelerate_core/plugins/contributed.pyi": contributed,
        "../core/src/accelerate_core/contract/owner_hooks.pyi": owner_hooks,
        "hooks.md": hooks,
        "plugin_module.md": plugin_module,
        "compatibility.md": compatibility,
        "configuration.md": configuration,
        "commands.md": commands,
        "tracking.md": tracking,
        "drop_in.md": drop_in,
        "launching.md": launching,
        "index.md": landing,
        "images/architecture-light.svg": lambda: pictures.architecture(pictures.LIGHT),
        "images/architecture-dark.svg": lambda: pictures.architecture(pictures.DARK),
        "images/card.svg": pictures.card,
        "images/icon.svg": pictures.icon,
        "images/logo.svg": pictures.logo,
        "config_schema.json": json_schema,
    }
    for name, make in pages.items():
        path = HERE / name
        text = make().rstrip() + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(f"Out of date: {', '.join(stale)}. Run: make docs")


if __name__ == "__main__":
    main()
