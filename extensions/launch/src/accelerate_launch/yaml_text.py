"""Write YAML as people write it: without anchors, and with multi-line strings as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

#: Long values stay on one line.
_WIDTH = 10_000


def as_yaml(documents: Sequence[Any]) -> str:
    """Return documents as YAML, in the order of their keys; several are separated by `---`.

    Args:
        documents: trees of mappings, lists, strings and numbers.
    """
    import yaml  # only launchers that write a manifest need it

    several = len(documents) > 1
    return yaml.dump_all(
        documents, Dumper=_dumper(), sort_keys=False, explicit_start=several, width=_WIDTH
    )


@cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes lists indented."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

    def write(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write)
    return Dumper
