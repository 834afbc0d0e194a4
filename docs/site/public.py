"""Find the public names and their documentation with griffe, without importing anything.

The griffe extension `Members` also documents members that a class delegates, and the fields of a
`@settings` class. `python docs/site/public.py` fails if a public name is not documented.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "extensions/*", "backends/*", "trackers/*")
PROJECTS = [one for name in FOLDERS for one in sorted(ROOT.glob(name)) if (one / "src").exists()]
#: Functions that define a member; the second argument is the member it delegates to, or its docstring.
_DELEGATING = {"method", "shared", "attribute", "setting", "_LOADING", "mesh_rank", "staticmethod"}
#: Parameters whose names say enough.
_PLAIN = re.compile(
    "self|cls|args|kwargs|accelerator|model|module|optimizer|scheduler|environ|tensors?|device|name|path|"
    "directory|parameters|state_dict|closure|loss|data|obj|values|step|config|state|request|topology|record|"
    "function|error|size|value|key|dataloader|plan|_.*"
)
_FILLING = {"of", "to", "is", "in", "has", "num"}
_ENTRY = re.compile(r"^ {4}((?:\w+,\s+)+\w+):\s+(.*\n(?: {5,}.*\n)*)", re.M)
_EXAMPLE = re.compile(r"^Example:\n((?: {4}(?!>>>|```).*\n|\n(?= {4}))+)", re.M)
#: Errors that a function raises itself.
_RAISE = re.compile(
    r"^\s+raise (?:\w+\.)*(?!Attribute|NotImplemented|Assertion)(\w+(?:Error|Exception))\b", re.M
)


class Members(griffe.Extension):
    """Add docstrings, signatures and defaults to delegated members and settings."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        for module in _modules(pkg):
            for member in module.members.values():
                _show_comment(member)
                _part_entries(member)
        for cls in _classes(pkg):
            decorators = {one.callable_path.rpartition(".")[2] for one in cls.decorators}
            if "settings" in decorators:
                _show_settings(cls)
            for name, member in list(cls.members.items()):
                _show_comment(member)
                _part_entries(member)
                if member.is_attribute and not member.is_alias:
                    _show_delegated(cls, name, member, loader)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in list(module.members.values()):
        if not member.is_alias and member.is_module:
            yield from _modules(member)


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for one in _modules(module):
        yield from (its for its in one.members.values() if not its.is_alias and its.is_class)


def _text(value: Any) -> str:
    """Return the string that an expression evaluates to, without its non-constant parts."""
    parts = ast.walk(ast.parse(str(value), mode="eval"))
    texts = [part.value for part in parts if isinstance(getattr(part, "value", None), str)]
    return " ".join(" ".join(texts).split())


def _part_entries(member: Any) -> None:
    """Split an entry `a, b: text` under `Args:` into one per name, and make examples code blocks."""

    def parted(match: re.Match[str]) -> str:
        return "".join(f"    {name}: {match[2]}" for name in re.split(r",\s+", match[1]))

    if not member.is_alias and member.docstring is not None:
        text = _ENTRY.sub(parted, member.docstring.value + "\n")
        member.docstring.value = _EXAMPLE.sub(
            r"Example:\n    ```python\n\1    ```\n", text
        ).rstrip()


def _show_comment(member: Any) -> None:
    """Use the `#:` comment above one or more attributes as their docstring."""
    if member.is_alias or not member.is_attribute or member.docstring or not member.lineno:
        return
    above = member.lines_collection[member.filepath][: member.lineno - 1]
    told: list[str] = []
    while above and (line := above.pop().strip()):
        if line.startswith("#:"):
            told.insert(0, line.removeprefix("#:").strip())
        elif told or not re.match(r"\w+(: [^=]+)? = ", line):
            break
    if told:
        member.docstring = griffe.Docstring("\n".join(told), parent=member)


def _show_settings(cls: griffe.Class) -> None:
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for name, member in cls.members.items():
        if not member.is_attribute or not isinstance(member.value, griffe.ExprCall):
            continue
        said = {one.name: one.value for one in member.value.arguments if hasattr(one, "name")}
        default = said.get("default")
        if "default_factory" in said:
            default = f"{said['default_factory']}()"
        member.extra["accelerate"]["help"] = True
        texts = [
            one for one in member.value.arguments if isinstance(one, str)
        ]  # from a helper that creates options
        if text := _text(said.get("help", *texts[:1] or ["''"])):
            member.docstring = griffe.Docstring(text, parent=member)
        member.value = default
        kind = griffe.ParameterKind.keyword_only
        made = griffe.Parameter(name, annotation=member.annotation, kind=kind, default=default)
        parameters.append(made)
    if "__init__" not in cls.members and len(parameters) > 1:
        made = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls)
        cls.set_member("__init__", made)


def _show_delegated(cls: griffe.Class, name: str, member: Any, loader: Any) -> None:
    value = getattr(member, "value", None)
    if isinstance(value, griffe.ExprName) and value.name in cls.members:  # clear = free_memory
        _copy(cls, name, cls.members[value.name], member)
        return
    if not isinstance(value, griffe.ExprCall) or str(value.function) not in _DELEGATING:
        return
    word, arguments = str(value.function), value.arguments
    if word == "attribute":
        member.docstring = griffe.Docstring(_text(arguments[1]), parent=member)
    elif word == "mesh_rank":
        text = f"Rank in the mesh dimension `{_text(arguments[0])}`, 0 without one."
        member.docstring = griffe.Docstring(text, parent=member)
    elif word == "_LOADING":
        settings = loader.modules_collection[
            "accelerate_core.config.handlers.DataLoaderConfiguration"
        ]
        _copy(cls, name, settings.members[_text(arguments[0])], member)
    elif word == "staticmethod":  # in the class body, the name refers to the member itself
        _copy(cls, name, loader.modules_collection[cls.module.resolve(str(arguments[0]))], member)
    else:
        owner, _, its_name = arguments[-1].canonical_path.rpartition(".")
        if owner.startswith("accelerate_"):
            source = loader.modules_collection[owner]
            _show_delegated(source, its_name, source.members[its_name], loader)
            _copy(cls, name, source.members[its_name], member)
    member.value = None


def _copy(cls: griffe.Class, name: str, source: Any, member: Any) -> None:
    if source.is_attribute:
        member.docstring = source.docstring
        return
    made = copy.copy(source.final_target if source.is_alias else source)
    made.name = name
    made.parent = cls
    made.written = getattr(source, "written", source)  # its lines are in another file
    cls.set_member(name, made)


@cache
def loaded() -> griffe.ModulesCollection:
    """Return all our packages, parsed once."""
    return load()


def load() -> griffe.ModulesCollection:
    """Return all our packages, parsed."""
    sources = [project / "src" for project in PROJECTS]
    loader = griffe.GriffeLoader(
        search_paths=sources,
        docstring_parser=griffe.Parser.google,
        extensions=griffe.load_extensions(Members),
    )
    for source in sources:
        for package in sorted(source.glob("*/__init__.py")):
            loader.load(package.parent.name)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def _exported(module: Path) -> list[str]:
    """Return the public names of a module: `__all__`, or its imports of the form `X as X`."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for line in tree.body:
        if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") == "__all__":
            try:
                return list(ast.literal_eval(line.value))
            except ValueError:
                break
    stub = module.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else module).read_text(encoding="utf-8"))
    imports = (line for line in ast.walk(tree) if isinstance(line, ast.ImportFrom))
    return [one.name for line in imports for one in line.names if one.name == one.asname]


def public() -> dict[str, dict[str, str]]:
    """Return page -> public name -> its path in griffe."""
    pages: dict[str, dict[str, str]] = {}
    for project in PROJECTS:
        its = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        page = pages.setdefault(its["name"], {})
        for package in sorted((project / "src").glob("*/__init__.py")):
            inside = package.parent.name
            page |= {name: f"{inside}.{name}" for name in _exported(package)}
        points = its.get("entry-points", {})
        for group in ("exports", "backends", "trackers", "precisions", "loaders", "checkpointers"):
            targets = points.get(f"accelerate_core.{group}", {})
            for name, target in targets.items():
                path = target.replace(":", ".")
                page.setdefault(name if group == "exports" else path.rpartition(".")[2], path)
    # docs/contract.md lists what else plugin authors may import.
    policy = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    authors = pages["authors"] = {}
    whole = policy.partition("`__all__` of")[2].partition("in the table below")[0]
    for module in re.findall(r"`(accelerate_core\.[\w.]+)`", whole):
        file = ROOT / "core/src" / f"{module.replace('.', '/')}.py"
        names = _exported(file)
        if module == "accelerate_core.errors":  # the classes are on the page errors.md
            names = [name for name in names if name.islower()]
        authors |= {name: f"{module}.{name}" for name in names}
    for module, names in re.findall(r"^\| `(accelerate_[\w.]+)` \| (`.*?`) \|", policy, re.M):
        authors |= {name: f"{module}.{name}" for name in re.findall(r"`(\w+)`", names)}
    return pages


def resolve(collection: griffe.ModulesCollection, path: str) -> Any:
    """Return the object at a path, following aliases."""
    found = collection[path]
    return found.final_target if found.is_alias else found


def served(collection: griffe.ModulesCollection) -> Iterator[tuple[str, str]]:
    """Yield distribution and name of each attribute that one of our plugins adds to the Accelerator."""
    for project in PROJECTS:
        its = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for package in sorted((project / "src").glob("*/__init__.py")):
            for cls in _classes(collection[package.parent.name]):
                hook = cls.members.get("state_attributes")
                if hook is None or hook.is_alias or its["name"] == "accelerate-core":
                    continue
                tree = ast.parse(textwrap.dedent("\n".join(hook.lines)))
                dicts = [one for one in ast.walk(tree) if isinstance(one, ast.Return)]
                for one in dicts:
                    for key in getattr(one.value, "keys", ()):
                        if isinstance(key, ast.Constant):
                            yield its["name"], str(key.value)


def errors(collection: griffe.ModulesCollection) -> list[griffe.Class]:
    """Return the error classes of all packages, the core first."""
    found = [one for package in collection.members.values() for one in _classes(package)]
    base = "accelerate_core.errors.AccelerateError"
    ours = [one for one in found if any(parent.path == base for parent in [one, *one.mro()])]
    return sorted(ours, key=lambda one: not one.path.startswith("accelerate_core."))


def undocumented(collection: griffe.ModulesCollection) -> Iterator[str]:
    """Yield a line for everything that the docstrings of public names leave out."""
    paths = {path for page in public().values() for path in page.values()}
    for one in {(found := resolve(collection, path)).path: found for path in paths}.values():
        where = f"{one.filepath.relative_to(ROOT)}:{one.lineno}: {one.path}"
        text = docstring(one)
        yield from (f"{where}{lack}" for lack in _lacking(one, text, ""))
        # The Accelerator inherits its methods from one class per topic.
        verbs = one.inherited_members if one.name == "Accelerator" else {}
        for name, member in {**verbs, **one.members}.items() if one.is_class else ():
            member = member.final_target if name in verbs else member
            if not name.startswith("_") and not member.is_alias:
                where = f"{member.filepath.relative_to(ROOT)}:{member.lineno}: {one.path}.{name}"
                yield from (f"{where}{lack}" for lack in _lacking(member, docstring(member), text))
                if "help" in member.extra["accelerate"] and not docstring(member):
                    yield f"{where} has no help text"


def _untold(collection: griffe.ModulesCollection) -> Iterator[str]:
    for one in errors(collection):
        if not all(re.search(rf"^{word}: \S", docstring(one), re.M) for word in ("Cause", "Fix")):
            yield f"{one.path} has no `Cause:` or no `Fix:`"


def _lacking(one: Any, text: str, around: str) -> Iterator[str]:
    """Yield what the docstring `text` of `one` and the docstring of its class leave out."""
    if one.is_attribute and one.parent.is_class and "property" not in one.labels:
        return  # the reference shows only documented attributes
    if not text:
        yield " has no docstring"
        return
    if "property" in one.labels:
        yield from _unsaid_errors(one, text)
    function = one.members.get("__init__") if one.is_class else one
    if function is None or function.is_alias or not function.is_function or not function.lineno:
        return  # the fields of a dataclass have docstrings
    inherited = _overrides(function)  # the docstring of the overridden method applies
    if one.is_class:
        around = docstring(function)
    for parameter in () if inherited else function.parameters:
        name = parameter.name.lstrip("*")
        if (
            not _PLAIN.fullmatch(name)
            and "for the arguments" not in text
            and not _says(f"{text} {around}", name)
        ):
            yield f" does not say what `{name}` is"
    if not one.is_class and not inherited:
        yield from _unsaid_errors(getattr(one, "written", one), text)


def _unsaid_errors(one: Any, text: str) -> Iterator[str]:
    raised = _RAISE.findall("\n".join(one.lines))
    if raised and "Raises:" not in text:
        yield f" does not say that it raises {', '.join(sorted({*raised}))}"


def _says(text: str, name: str) -> bool:
    """Return whether a text contains a name, or each of its words."""
    words = [word.rstrip("s") for word in name.lower().split("_") if word not in _FILLING]
    return all(word in text.lower() for word in words)


def _overrides(one: Any) -> bool:
    """Return whether a base class declares it, or is from another library and may declare it."""
    if one.parent is None or not one.parent.is_class:
        return False
    known = one.parent.mro()
    names = {str(base).rpartition(".")[2].partition("[")[0] for base in one.parent.bases}
    foreign = names - {base.name for base in known} - {"Protocol", "Generic"}
    return bool(foreign) or any(one.name in base.members for base in known)


def docstring(one: Any) -> str:
    """Return the docstring, or the docstring of the overridden member."""
    if one.docstring is not None:
        return str(one.docstring.value)
    for base in one.parent.mro() if one.parent is not None and one.parent.is_class else ():
        if one.name in base.members and base.members[one.name].docstring is not None:
            return str(base.members[one.name].docstring.value)
        if base.docstring is not None and f"{one.name}(" in base.docstring.value:
            return str(base.docstring.value)  # it lists the optional members
    return ""


if __name__ == "__main__":
    names = load()
    found = [*undocumented(names), *_untold(names)]
    print("\n".join(found))
    sys.exit(bool(found))
