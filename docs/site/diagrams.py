"""Render mermaid diagrams as SVG."""

from __future__ import annotations

import re
import zlib
from typing import Any

import mmdr
from pymdownx.superfences import SuperFencesException


def render(source: str, *_: Any, **__: Any) -> str:
    """Return a mermaid diagram as two SVGs. CSS shows the one for the current palette."""
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
