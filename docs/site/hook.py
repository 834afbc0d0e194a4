"""What mkdocs does not do by itself: pages from docstrings and changelogs, links out of docs/, diagrams."""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
import tomllib
import zlib
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.structure.files import File, Files
from pymdownx.superfences import SuperFencesException

sys.path.insert(0, str(Path(__file__).parent))
import public

ROOT = public.ROOT
#: The distribution's name, or another, and how its page begins.
TITLES = {"authors": "For authors of plugins", "accelerate-core": "The core"}
_ACCELERATOR = "accelerate_core.accelerator.accelerator.Accelerator"
_KNOWN = "core/src/accelerate_core/plugins/known_packages.json"
#: Lines that part the members of a class, and that begin one.
#: Class from which the Accelerator has members -> the topic of the reference they belong to.
_VERBS = {
    "ProcessVerbs": "Processes",
    "MeshVerbs": "The setup",
    "Shown": "The setup",
    "PreparedVerbs": "Preparing",
    "TrainingVerbs": "The step",
    "CollectiveVerbs": "Collectives",
    "CheckpointVerbs": "Checkpoints",
    "TrackingVerbs": "Tracking",
}
_TOPIC = re.compile(r"    # --- ([\w ]+) -+$")
_MEMBER = re.compile(r"    (?:def )?([a-z]\w*)(?:: .*| )?(?:\(| ?= )")
_LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    fence = {"name": "mermaid", "class": "diagram", "format": diagram}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    nav = {name: pages for one in config.nav for name, pages in one.items()}
    names = [f"api/{page}.md" for page in public.public()]
    nav["Reference"][1:1] = ["api/accelerator.md", {"Names": names}]
    decisions = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    (listed,) = (one["Decisions"] for one in nav["Project"] if "Decisions" in one)
    listed += [f"decisions/{one.name}" for one in decisions]
    config.watch += [str(project) for project in public.PROJECTS]
    return config


def on_files(files: Files, config: Any) -> Files:
    pages = {**_reference(), "errors.md": _errors(), "releases.md": _releases()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    # Files of the repository that pages link to, and those that they link to.
    waiting = [Path(one.abs_src_path) for one in files.documentation_pages() if one.abs_src_path]
    seen: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            path = _outside(page, match[2])
            if path is not None and path not in seen:
                seen.add(path)
                name, text = _of_the_repository(path)
                files.append(File.generated(config, name, content=text))
                waiting += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith(("decisions/", "repository/", "releases")):
        page.meta["search"] = {"boost": 0.3}  # who asks wants the guide first
    source = page.file.abs_src_path
    return _relinked(markdown, Path(source), page.file.src_uri) if source else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Let a wide table scroll by itself, and by the keyboard."""
    return html.replace("<table>", '<div class="wide" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )


def _outside(page: Path, link: str) -> Path | None:
    """Return the file of the repository, out of docs/, that a link of a page leads to."""
    path = Path(os.path.normpath(page.parent / link))
    if not path.exists() or path.is_relative_to(ROOT / "docs"):
        return None
    return path / "README.md" if (path / "README.md").exists() else path


def _uri(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def _relinked(text: str, page: Path, uri: str) -> str:
    """Turn the links of a page to files out of docs/, and back into it, to pages of the site."""

    def there(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[2]))
        if (path := _outside(page, match[2])) is not None:
            target = Path(_uri(path))
        elif uri.startswith("repository/") and target.exists():
            target = target.relative_to(ROOT / "docs")
        else:
            return match[0]
        link = posixpath.relpath(target.as_posix(), posixpath.dirname(uri) or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return _LINK.sub(there, text)


def _of_the_repository(path: Path) -> tuple[str, str]:
    """Return the page of a file of the repository: its uri and its text."""
    uri = _uri(path)
    if path.suffix == ".md":
        return uri, _relinked(path.read_text(encoding="utf-8"), path, uri)
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    lines = [f"# {path.relative_to(ROOT).as_posix()}", ""]
    for one in files:
        lines += [f"## {one.name}", ""] if one != path else []
        lines += [f"```{one.suffix[1:]}", one.read_text(encoding="utf-8").rstrip(), "```", ""]
    return uri, "\n".join(lines)


def _reference() -> dict[str, str]:
    """Return a page for each distribution with its public names, and one that lists all of them."""
    collection = public.load()
    pages = {"api/accelerator.md": _accelerator(collection)}
    homes, rows = {_ACCELERATOR: "accelerator"}, []
    for page, names in public.public().items():
        lines = [f"# {TITLES.get(page, page)}", ""]
        for name, path in sorted(names.items(), key=lambda its: its[0].lower()):
            one = public.resolve(collection, path)
            summary = (
                public.docstring(one).partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            )
            if one.path not in homes:
                homes[one.path] = page
                lines += [f"::: {one.path}", ""]
            elif one.path == _ACCELERATOR:
                lines[2:2] = ["[`Accelerator`](accelerator.md) has a page of its own.", ""]
            elif homes[one.path] != page or name != one.name:
                lines += [f"## {name}", "", f"It is [`{one.name}`][{one.path}].", ""]
            rows.append((name, one.path, summary))
        pages[f"api/{page}.md"] = "\n".join(lines)
    table = [f"| [`{name}`][{path}] | {text} |" for name, path, text in sorted(rows, key=_by_name)]
    known = ROOT / "core/src/accelerate_core/plugins/known_packages.json"
    probes = json.loads(known.read_text(encoding="utf-8"))["PROBES"].items()
    table += [
        "",
        "## Whether a library is installed",
        "",
        "| name | true if there is |",
        "|---|---|",
    ]
    table += [f"| `{name}()` | `{library}` |" for name, library in probes]
    pages["api/index.md"] = "\n".join(
        ["# Every public name", "", "| name | |", "|---|---|", *table]
    )
    return pages


def _accelerator(collection: Any) -> str:
    """Return the page of the Accelerator: its members by topic, as its source groups them."""
    cls = collection[_ACCELERATOR]
    taken = {parameter.name for parameter in cls.members["__init__"].parameters}
    lines = ["---", "search: {boost: 1.5}", "---", "", f"::: {_ACCELERATOR}"]
    lines += ["    options: {heading_level: 1, members: false, inherited_members: false}", ""]
    lines += ["Packages take arguments of their own:", "", "| argument | package |", "|---|---|"]
    known = json.loads((ROOT / _KNOWN).read_text(encoding="utf-8"))["ARGUMENTS"]
    for name in sorted(known.keys() - taken):
        lines.append(f"| `{name}` | [accelerate-{known[name]}](accelerate-{known[name]}.md) |")
    groups: dict[str, list[str]] = {topic: [] for topic in _VERBS.values()}
    topic = "Processes"
    for line in cls.module.filepath.read_text(encoding="utf-8").splitlines():
        if found := _TOPIC.match(line):
            topic = found[1].capitalize()
        elif (found := _MEMBER.match(line)) and public.docstring(cls[found[1]]):
            groups.setdefault(topic, []).append(found[1])
    for name, member in cls.inherited_members.items():
        if not name.startswith("_") and public.docstring(cls[name]):
            groups[_VERBS[member.final_target.parent.name]].append(name)
    for topic in (*list(groups)[2:], *list(groups)[:2]):  # what one calls before what one asks
        lines += ["", f"## {topic}", ""]
        for name in dict.fromkeys(groups[topic]):  # overloads have one name
            lines += [f"::: {_ACCELERATOR}.{name}", "    options: {heading_level: 3}", ""]
    view = collection["accelerate_core.contract.view.AcceleratorView"].members
    lines += ["## Values in force", "", "| attribute | what it is |", "|---|---|"]
    for name, one in cls.members.items():
        if name[0] == "_" or public.docstring(one):
            continue
        text = f"The `{str(one.annotation).partition(' | ')[0]}` that was given, or None."
        if name in view:
            text = public.docstring(view[name])
        elif one.annotation is None:
            text = f"What the argument `{name.replace('uration', '')}` has become."
        lines.append(f"| `{name}` | {text} |")
    lines += ["", "## What plugins add", "", "Each is there while its plugin is active.", ""]
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
        "The errors that tell of a request, a plugin or a run are an `AccelerateError`. Its text says "
        "what was wrong, where the value came from, what is allowed, and the nearest right name. A "
        "function that is called in a wrong way raises Python's own `TypeError`, `ValueError` or "
        "`KeyError`, as its reference says.",
        "",
    ]
    collection = public.load()
    paths = {path for page in public.public().values() for path in page.values()}
    shown = {public.resolve(collection, path).path for path in paths}
    for one in public.errors(collection):
        bases = ", ".join(f"`{base}`" for base in one.bases)
        lines += [f"## {one.name}" if one.path in shown else f"## {one.name} {{ #{one.path} }}", ""]
        if one.module.path == "accelerate_core.errors":
            lines += [f"`from accelerate_core.errors import {one.name}`; its bases: {bases}.", ""]
        else:  # a module that only its own package may import
            lines += [f"Of `{one.package.name}`; catch it as {bases}.", ""]
        text = public.docstring(one)
        for word, shown_as in (("Cause", "Cause"), ("Mend", "What to do")):
            text = re.sub(rf"^{word}: ", f"\n**{shown_as}.** ", text, flags=re.M)
        lines += [text, ""]
    return "\n".join(lines)


def _releases() -> str:
    """Return the changelogs of all distributions, one under the other."""
    lines = ["# Releases", "", "Each distribution has a version and a changelog of its own.", ""]
    for project in public.PROJECTS:
        its = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        path = project / "CHANGELOG.md"
        _, _, text = path.read_text(encoding="utf-8").partition("\n")
        text = _relinked(text, path, "repository/../releases.md")
        lines += [f"## {its['name']}", "", re.sub(r"^(#+) ", r"#\1 ", text, flags=re.M), ""]
    return "\n".join(lines)


def diagram(source: str, *_: Any, **__: Any) -> str:
    """Return a mermaid diagram as two SVGs; CSS shows the one that fits the palette."""
    made = []
    for scheme, theme in (("light", "neutral"), ("dark", "dark")):
        try:
            svg = mmdr.render(f'%%{{init: {{"theme": "{theme}"}}}}%%\n{source}').svg()
        except ValueError as error:  # any other class would show the source, and no warning
            raise SuperFencesException(f"{error} in this diagram:\n{source}") from error
        name = f"d{zlib.crc32(source.encode())}-{scheme}"  # the ids of a page have to differ
        width = re.search(r"max-width:\s*([\d.]+)px", svg)
        svg = svg.replace("merman", name).replace(
            'width="100%"', f'width="{width[1]}"' if width else ""
        )
        made.append(f'<div class="diagram diagram-{scheme}" tabindex="0">{svg}</div>')
    return "".join(made)
