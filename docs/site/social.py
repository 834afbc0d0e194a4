"""Render the social card, which other sites show for a link to this one."""

from __future__ import annotations

import logging
from pathlib import Path

import novasvg
from novasvg import fonts

CARD = Path(__file__).parents[1] / "images" / "card.svg"
log = logging.getLogger("mkdocs.hooks.social")


def write_card(site: Path) -> None:
    """Write `images/card.png`; it needs a font of the machine."""
    if not fonts.get_font_face("DejaVu Sans", bold=False, italic=False):
        log.info("The social card is left out: the font DejaVu Sans is not installed.")
        return
    novasvg.svg2png(CARD, site / "images" / "card.png", width=1200, height=630)
