"""Write the pages that come from docstrings and changelogs: the reference, the errors, the releases."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import links
import public

ROOT = public.ROOT
#: Name of a page in the reference -> its title, if that is not the distribution's name.
TITLES = {"authors": "For plugin authors", "accelerate-core": "The core"}
_ACCELERATOR = "accelerate_core.accelerator.accelerator.Accelerator"
_KNOWN = ROOT / "core/src/accelerate_core/plugins/known_packages.json"
#: Base class of the Accelerator -> heading of its members in the reference.
_VERBS = {
    "ProcessVerbs": "Processes",
    "Ranks": "Processes",
    "SetupAndRanks": "The setup",
    "MeshVerbs": "The setup",
    "Shown": "The setup",
    "PreparedVerbs": "Preparing",
    "TrainingVerbs": "The step",
    "CollectiveVerbs": "Collectives",
    "CheckpointVerbs": "Checkpoints",
    "TrackingVerbs": "Tracking",
}
#: The comment above a group of members, and the first line of a member.
_TOPIC = re.compile(r"    # --- ([\w ]+) -+$")
_MEMBER = re.compile(r"    (?:def )?([a-z]\w*)(?:: .*| )?(?:\(| ?= )")


def pages() -> dict[str, str]:
    """Return all generated pages: path in the site -> Markdown."""
    return {**_reference(), "errors.md": _errors(), "releases.md": _releases()}


def _reference() -> dict[str, str]:
    """Return a page for each distribution with its public names, and one that lists all of them."""
    collection = public.loaded()
    pages = {"api/accelerator.md": _accelerator(collection)}
    homes, rows = {_ACCELERATOR: "accelerator"}, []
    for page, names in public.public().items():
        lines = [f"# {TITLES.get(page, page)}", "", _purpose(page), ""]
        for name, path in sorted(names.items(), key=lambda its: its[0].lower()):
            one = public.resolve(collection, path)
            summary = (
                public.docstring(one).partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            )
            if one.path not in homes:
                homes[one.path] = page
                lines += [f"::: {one.path}", ""]
            elif one.path == _ACCELERATOR:
                lines[4:4] = [
                    "[`Accelerator`](accelerator.md) is documented on a separate page.",
                    "",
                ]
            elif homes[one.path] != page or name != one.name:
                lines += [f"## {name}", "", f"Another name of [`{one.name}`][{one.path}].", ""]
            rows.append((name, one.path, summary))
        pages[f"api/{page}.md"] = "\n".join(lines)
    table = [f"| [`{name}`][{path}] | {text} |" for name, path, text in sorted(rows, key=_by_name)]
    probes = json.loads(_KNOWN.read_text(encoding="utf-8"))["PROBES"].items()
    table += [
        "",
        "## Whether a library is installed",
        "",
        "| function | returns true if this is installed |",
        "|---|---|",
    ]
    table += [f"| `{name}()` | `{library}` |" for name, library in probes]
    intro = [
        "# All public names",
        "",
        "Look up a name here to get to its documentation. [Accelerator](accelerator.md) is the place to "
        "start: a script needs little else.",
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    pages["api/index.md"] = "\n".join([*intro, *table])
    return pages


def _purpose(page: str) -> str:
    """Return the sentence that a page of the reference begins with."""
    if page == "authors":
        return (
            "The names that plugin authors may import. [The contract](../contract.md) says how long each "
            "one stays compatible."
        )
    for project in public.PROJECTS:
        its = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if its["name"] == page:
            return str(its["description"])
    return ""


def _accelerator(collection: Any) -> str:
    """Return the page of the Accelerator: its members by topic, as its source groups them."""
    cls = collection[_ACCELERATOR]
    taken = {parameter.name for parameter in cls.members["__init__"].parameters}
    lines = ["---", "search: {boost: 1.5}", "---", "", f"::: {_ACCELERATOR}"]
    lines += ["    options: {heading_level: 1, members: false, inherited_members: false}", ""]
    lines += ["Installed packages add these arguments:", "", "| argument | package |", "|---|---|"]
    known = json.loads(_KNOWN.read_text(encoding="utf-8"))["ARGUMENTS"]
    for name in sorted(known.keys() - taken):
        lines.append(f"| `{name}` | [accelerate-{known[name]}](accelerate-{known[name]}.md) |")
    groups: dict[str, list[str]] = {topic: [] for topic in _VERBS.values()}
    topic = "Processes"
    for line in cls.module.filepath.read_text(encoding="utf-8").splitlines():
        heading = _TOPIC.match(line)
        if heading is not None:
            topic = heading[1].capitalize()
        member = _MEMBER.match(line)
        if member is not None and public.docstring(cls[member[1]]):
            groups.setdefault(topic, []).append(member[1])
    for name, member in cls.inherited_members.items():
        if not name.startswith("_") and public.docstring(cls[name]):
            groups[_VERBS[member.final_target.parent.name]].append(name)
    for topic in (*list(groups)[2:], *list(groups)[:2]):  # methods that scripts call come first
        lines += ["", f"## {topic}", ""]
        for name in dict.fromkeys(groups[topic]):  # overloads have one name
            lines += [f"::: {_ACCELERATOR}.{name}", "    options: {heading_level: 3}", ""]
    view = collection["accelerate_core.contract.view.AcceleratorView"].members
    lines += ["## Values in use", "", "| attribute | meaning |", "|---|---|"]
    for name, one in cls.members.items():
        if name[0] == "_" or public.docstring(one):
            continue
        text = f"The `{str(one.annotation).partition(' | ')[0]}` that you passed, or None."
        if name in view:
            text = public.docstring(view[name])
        elif one.annotation is None:
            text = f"The resolved value of the argument `{name.replace('uration', '')}`."
        lines.append(f"| `{name}` | {text} |")
    lines += [
        "",
        "## Attributes from plugins",
        "",
        "An attribute exists while its plugin is active.",
        "",
    ]
    lines += ["| attribute | package |", "|---|---|"]
    for page, name in sorted(public.served(collection), key=lambda its: its[1]):
        lines.append(f"| `{name}` | [{page}]({page}.md) |")
    return "\n".join(lines)


def _by_name(row: tuple[str, str, str]) -> str:
    return row[0].lower()


def _errors() -> str:
    """Return the page of the error classes: what each means, where it comes from, what to do."""
    lines = ["# Errors", ""]
    lines += [
        "Look up an error class here to see what causes it and what to do about it.",
        "",
        "Errors about settings, plugins and runs are subclasses of `AccelerateError`. Their messages name "
        "the value, where it came from, what is allowed, and the closest valid name. Calling a function "
        "with wrong arguments raises Python's own `TypeError`, `ValueError` or `KeyError`, as the "
        "reference of that function says.",
        "",
    ]
    collection = public.loaded()
    paths = {path for page in public.public().values() for path in page.values()}
    shown = {public.resolve(collection, path).path for path in paths}
    for one in public.errors(collection):
        bases = ", ".join(f"`{base}`" for base in one.bases)
        lines += [f"## {one.name}" if one.path in shown else f"## {one.name} {{ #{one.path} }}", ""]
        if one.module.path == "accelerate_core.errors":
            how = f"Import it with `from accelerate_core.errors import {one.name}`."
            lines += [f"{how} Base classes: {bases}.", ""]
        else:  # only its own package may import that module
            lines += [f"Raised by `{one.package.name}`. Catch it as {bases}.", ""]
        text = public.docstring(one)
        for word, shown_as in (("Cause", "Cause"), ("Fix", "What to do")):
            text = re.sub(rf"^{word}: ", f"\n**{shown_as}.** ", text, flags=re.M)
        lines += [text, ""]
    return "\n".join(lines)


def _releases() -> str:
    """Return the changelogs of all distributions, one under the other."""
    lines = ["# Releases", ""]
    lines += ["What changed in each version. Every distribution is released separately.", ""]
    for project in public.PROJECTS:
        its = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        path = project / "CHANGELOG.md"
        _, _, text = path.read_text(encoding="utf-8").partition("\n")
        text = links.relinked(text, path, "repository/../releases.md")
        lines += [f"## {its['name']}", "", re.sub(r"^(#+) ", r"#\1 ", text, flags=re.M), ""]
    return "\n".join(lines)
