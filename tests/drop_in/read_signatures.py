"""Write `signatures.json`. Run it in an environment with Hugging Face Accelerate.

The file has the parameters of each public function, class and method: names, kinds and defaults, by the
module that defines it. Defaults are written as their `repr`, or as `...` if that depends on the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = HERE.parents[1] / "extensions/drop_in/src/accelerate_drop_in/names.json"
#: The members of these classes are not listed for their subclasses.
_BUILTIN = (str, dict, int, Exception)


def parameters(value: Any) -> list[str] | None:
    """Return the parameters of a callable as strings, None if they are unknown."""
    try:
        found = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):
        return None
    return [_text(one) for one in found if one.name not in ("self", "cls")]


def _text(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**", one.KEYWORD_ONLY: "*, "}
    text = stars.get(one.kind, "") + one.name
    if one.default is one.empty:
        return text
    default = getattr(one.default, "value", one.default)
    shown = repr(default)
    if hasattr(default, "__fspath__"):
        shown = "..."
    return f"{text}={'...' if re.search('<|/', shown) else shown}"


def members(cls: type) -> dict[str, Any]:
    """Return the parameters of a class's constructor and public methods; None for other members."""
    found: dict[str, Any] = {"()": parameters(cls)}
    plain = {name for kind in _BUILTIN if issubclass(cls, kind) for name in dir(kind)}
    for name in sorted({*dir(cls), *getattr(cls, "__dataclass_fields__", ())} - plain):
        if not name.startswith("_"):
            value = getattr(cls, name, None)
            method = inspect.isroutine(value)
            found[name] = parameters(value) if method else None
    return found


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for module, names in json.loads(NAMES.read_text(encoding="utf-8")).items():
        if module.startswith("test_utils"):
            continue
        full = f"accelerate.{module}".rstrip(".")
        try:
            made = importlib.import_module(full)
        except ImportError:
            continue  # it needs a library that is not installed
        for name in names:
            value = getattr(made, name, None)
            if getattr(value, "__module__", None) != full:
                continue
            if inspect.isclass(value):
                found[f"{module}.{name}"] = members(value)
            elif inspect.isroutine(value):
                found[f"{module}.{name}"] = parameters(value)
    text = json.dumps(found, indent=1, sort_keys=True)
    (HERE / "signatures.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.pop(0)
    main()
