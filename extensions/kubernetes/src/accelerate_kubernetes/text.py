"""Write manifests as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

#: Long values stay on one line.
_WIDTH = 10_000


def as_yaml(documents: Sequence[Any]) -> str:
    """Return documents as YAML, in the order of their keys."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=_WIDTH
    )


class _Dumper(yaml.SafeDumper):
    """Writes lists indented, texts of several lines as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
