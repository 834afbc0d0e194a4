"""Make tables readable on every screen.

A wide table scrolls by itself. On a narrow screen, `site.css` shows each row of a table with three or more
columns as a block of lines, which needs the heading of a column next to each of its cells. Long names in
code may break after an underscore, so that they leave room for the column that explains them.
"""

from __future__ import annotations

import re
from html import escape, unescape

_TABLE = re.compile(r"<table>.*?</table>", re.S)
_HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.S)
_ROW = re.compile(r"<tr>.*?</tr>", re.S)
_TAG = re.compile(r"<[^>]+>")
_LONG_NAME = re.compile(r"<code>\w{20,}</code>")


def readable(html: str) -> str:
    """Return a page's HTML with each table in an element that scrolls, by the keyboard, too."""
    return _TABLE.sub(_table, html)


def _table(match: re.Match[str]) -> str:
    table = _LONG_NAME.sub(lambda name: name[0].replace("_", "_<wbr>"), match[0])
    headings = [unescape(_TAG.sub("", text)).strip() for text in _HEADING.findall(table)]
    if len(headings) < 3:
        return f'<div class="wide" tabindex="0">{table}</div>'
    body = _ROW.sub(lambda row: _labelled(row[0], headings), table)
    return f'<div class="wide stacks" tabindex="0">{body}</div>'


def _labelled(row: str, headings: list[str]) -> str:
    waiting = iter(headings)

    def cell(match: re.Match[str]) -> str:
        return f'<td data-label="{escape(next(waiting, ""), quote=True)}"{match[1]}>'

    return re.sub(r"<td([^>]*)>", cell, row)
