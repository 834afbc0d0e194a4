"""Draw the project's pictures as SVG: the logo, the social card, and the core with its plugins.

The names of the plugins come from the entry points in the metadata of the packages. `docs/generate.py`
writes the files, and `docs/site/hook.py` renders the social card as PNG when it builds the site.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FONT = "-apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True)
class Palette:
    """The colours of a picture."""

    text: str
    muted: str
    card: str
    border: str
    brand: str
    on_brand: str
    chip: str
    chip_text: str


LIGHT = Palette(
    "#16242b", "#4b5b63", "#ffffff", "#c3d0d6", "#0b6e75", "#ffffff", "#e3f2f2", "#0a4f55"
)
DARK = Palette(
    "#e8eff2", "#a9b7be", "#172127", "#3a4a53", "#2aa5ad", "#06181a", "#13363a", "#a6e3e6"
)

#: Title of a column -> the entry point groups with its plugins.
COLUMNS = {
    "Launchers": ("launchers",),
    "Backends": ("backends",),
    "Precisions": ("precisions",),
    "Trackers": ("trackers",),
    "Extensions": ("checkpointers", "tracking", "extensions"),
}
#: Lines of a script that use accelerate-core, and whether they are new.
SCRIPT = (
    ("accelerator = Accelerator()", True),
    ("model, optimizer, loader = accelerator.prepare(...)", True),
    ("for x, y in loader:", False),
    ("    loss = loss_function(model(x), y)", False),
    ("    accelerator.backward(loss)", True),
    ("    optimizer.step()", False),
)
#: The five bars of the logo: y, width and opacity. One for each line that a script changes.
_BARS = ((4, 14, 1.0), (14, 26, 1.0), (24, 36, 1.0), (34, 26, 1.0), (44, 14, 1.0))


def plugin_names() -> dict[str, list[str]]:
    """Return the title of each column with the names of the plugins in our packages."""
    found: dict[str, list[str]] = {title: [] for title in COLUMNS}
    projects = [ROOT / "core" / "pyproject.toml"]
    for folder in ("backends", "extensions", "trackers"):
        projects += sorted(ROOT.glob(f"{folder}/*/pyproject.toml"))
    for path in projects:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        points = project.get("entry-points", {})
        for title, groups in COLUMNS.items():
            for group in groups:
                found[title] += points.get(f"accelerate_core.{group}", {})
    return found


def bars(size: float, x: float, y: float, colour: str) -> str:
    """Return the logo: five bars of a code block that point to the right."""
    scale = size / 48
    lines = [
        f'<rect x="{x + 2 * scale:g}" y="{y + top * scale:g}" width="{(width + 4) * scale:g}" '
        f'height="{6 * scale:g}" rx="{3 * scale:g}" fill="{colour}" opacity="{opacity:g}"/>'
        for top, width, opacity in _BARS
    ]
    return "\n".join(lines)


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: float,
    colour: str,
    weight: int = 400,
    family: str = FONT,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" fill="{colour}" '
        f'font-family="{family}" text-anchor="{anchor}" xml:space="preserve">{escape(content)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="1.5"/>'
    )


def arrow(x: float, top: float, bottom: float, colour: str) -> str:
    return (
        f'<path d="M{x:g} {top:g} V{bottom - 6:g} M{x - 5:g} {bottom - 9:g} L{x:g} {bottom - 2:g} '
        f'L{x + 5:g} {bottom - 9:g}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )


def architecture(palette: Palette) -> str:
    """Draw a script on top of the core, and the core on top of its plugins by kind."""
    names = plugin_names()
    width, column_top, row = 960, 336, 26
    rows = max(map(len, names.values())) + 1
    height = column_top + 48 + rows * row + 14
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{_described(names)}">',
        box(150, 2, 660, 176, palette.card, palette.border),
        text(170, 30, "train.py: your loop", size=15, colour=palette.muted, weight=600),
    ]
    for number, (line, is_new) in enumerate(SCRIPT):
        y = 56 + 21 * number
        if is_new:
            drawn.append(
                f'<rect x="162" y="{y - 15}" width="636" height="20" rx="3" fill="{palette.chip}"/>'
            )
            drawn.append(text(168, y, "+", size=14, colour=palette.chip_text, family=MONO))
        colour = palette.chip_text if is_new else palette.text
        drawn.append(text(186, y, line, size=14, colour=colour, family=MONO))
    drawn.append(arrow(480, 180, 212, palette.muted))
    drawn.append(box(2, 212, width - 4, 84, palette.brand))
    drawn.append(bars(40, 24, 233, palette.on_brand))
    drawn.append(text(84, 249, "accelerate-core", size=21, colour=palette.on_brand, weight=700))
    summary = (
        "resolves settings, selects plugins, prepares your objects, and calls hooks at each step"
    )
    drawn.append(text(84, 275, summary, size=15, colour=palette.on_brand))
    gap = 12
    column = (width - 4 - gap * (len(names) - 1)) / len(names)
    for number, (title, listed) in enumerate(names.items()):
        x = 2 + number * (column + gap)
        drawn.append(arrow(x + column / 2, 298, column_top - 4, palette.muted))
        drawn.append(
            box(x, column_top, column, height - column_top - 2, palette.card, palette.border)
        )
        drawn.append(text(x + 14, column_top + 27, title, size=15, colour=palette.text, weight=700))
        for line, name in enumerate(listed):
            y = column_top + 42 + row * line
            drawn.append(
                f'<rect x="{x + 10:g}" y="{y:g}" width="{column - 20:g}" height="21" rx="4" '
                f'fill="{palette.chip}"/>'
            )
            drawn.append(text(x + 18, y + 15, name, size=13, colour=palette.chip_text, family=MONO))
        y = column_top + 42 + row * len(listed)
        drawn.append(
            f'<rect x="{x + 10.5:g}" y="{y + 0.5:g}" width="{column - 21:g}" height="20" rx="4" '
            f'fill="none" stroke="{palette.muted}" stroke-dasharray="4 3"/>'
        )
        drawn.append(text(x + 18, y + 15, "yours", size=13, colour=palette.muted))
    return "\n".join([*drawn, "</svg>"])


def _described(names: dict[str, list[str]]) -> str:
    """Return the picture in words."""
    columns = ". ".join(f"{title}: {', '.join(listed)}" for title, listed in names.items())
    return escape(
        "A training script calls accelerate-core, which calls plugins from separate packages. "
        f"{columns}.",
        quote=True,
    )


def logo(colour: str = "#ffffff") -> str:
    """Draw the logo for the site's header."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 48 54" width="48" height="54">\n'
        f"{bars(48, 3, 0, colour)}\n</svg>"
    )


def icon() -> str:
    """Draw the icon for a browser's tab."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" width="64" height="64">\n'
        f'<rect width="64" height="64" rx="14" fill="{LIGHT.brand}"/>\n'
        f"{bars(42, 10, 8.4, '#ffffff')}\n</svg>"
    )


def card() -> str:
    """Draw the card that is shown for a link to the site, 1200 by 630 pixels."""
    names = plugin_names()
    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 630" width="1200" height="630">',
        '<rect width="1200" height="630" fill="#0b4f56"/>',
        '<rect y="606" width="1200" height="24" fill="#2aa5ad"/>',
        bars(96, 80, 70, "#ffffff"),
        text(200, 142, "accelerate-core", size=66, colour="#ffffff", weight=700),
        text(80, 240, "Run a plain PyTorch training loop on any setup", size=40, colour="#d5eef0"),
        text(80, 294, "by changing five lines.", size=40, colour="#d5eef0"),
        '<rect x="80" y="340" width="1040" height="126" rx="12" fill="#08363b"/>',
    ]
    for number, line in enumerate(line for line, is_new in SCRIPT if is_new):
        shown = f"+ {line.strip()}"
        drawn.append(text(106, 380 + 34 * number, shown, size=25, colour="#a6e3e6", family=MONO))
    backends = ", ".join(name for name in names["Backends"] if name != "single")
    drawn.append(text(80, 520, f"Backends: {backends}", size=28, colour="#ffffff"))
    trackers = f"{len(names['Trackers'])} trackers"
    drawn.append(
        text(80, 564, f"{trackers}. Each one is a plugin. Add your own.", size=28, colour="#ffffff")
    )
    return "\n".join([*drawn, "</svg>"])
