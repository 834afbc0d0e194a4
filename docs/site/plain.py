"""Write the site for tools: a Markdown version of each page, and `llms.txt`, which lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
import public

#: A line that mkdocstrings replaces by the documentation of a name, and the options under it.
_DIRECTIVE = re.compile(r"^::: (\S+)\n(?: {4}options: (.*)\n)?", re.M)
#: A fenced code block, or a comment outside of one with the line break after it.
_FENCE_OR_COMMENT = re.compile(
    r"^([ \t]*)(?P<fence>`{3,}|~{3,}).*?^[ \t]*(?P=fence)`*[ \t]*$|<!--.*?-->[ \t]*\n?", re.M | re.S
)
_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)", re.S)
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])(?:\{[^}]*\})?")


def without_directives(markdown: str) -> str:
    """Return a page's Markdown with signatures and docstrings in place of mkdocstrings' directives."""

    def documented(match: re.Match[str]) -> str:
        one = public.resolve(public.loaded(), match[1])
        options = match[2] or ""
        level = int(found[1]) if (found := re.search(r"heading_level: (\d)", options)) else 2
        alone = "members: false" in options
        return "\n".join(_documented(one, match[1].rpartition(".")[2], level, alone))

    return _DIRECTIVE.sub(documented, markdown)


def without_comments(markdown: str) -> str:
    """Return a page's Markdown without HTML comments, such as `<!-- not run: it needs GPUs -->`."""

    def kept(match: re.Match[str]) -> str:
        return match[0] if match["fence"] else ""

    return _FENCE_OR_COMMENT.sub(kept, markdown)


def _documented(one: Any, name: str, level: int, alone: bool) -> Iterator[str]:
    yield from [f"{'#' * level} {name}", ""]
    if signature := _signature(one, name):
        yield from ["```python", signature, "```", ""]
    if text := public.docstring(one):
        yield from [text, ""]
    if one.is_class and not alone:
        for inner, member in one.members.items():
            if not inner.startswith("_") and not member.is_alias and member.docstring is not None:
                yield from _documented(member, inner, level + 1, alone=True)


def _signature(one: Any, name: str) -> str:
    function = one.members.get("__init__") if one.is_class else one
    if not isinstance(function, griffe.Function):
        return ""
    return re.sub(r"\(self(?:, )?", "(", str(function.signature(name=name)), count=1)


def index(navigation: Any, config: Any, pages: dict[str, str]) -> str:
    """Return `llms.txt`: each page of the navigation with a link to its Markdown and its first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += ["Each link leads to the Markdown version of a page.", ""]
    first = [item for item in navigation.items if item.is_page]
    lines += [_entry(page, pages) for page in first] + [""]
    for section in navigation.items:
        if section.is_section:
            lines += [f"## {section.title}", ""]
            lines += [_entry(page, pages) for page in _pages(section)] + [""]
    return "\n".join(lines)


def _pages(section: Any) -> Iterator[Any]:
    for child in section.children:
        if child.is_page:
            yield child
        elif child.is_section:
            yield from _pages(child)


def _entry(page: Any, pages: dict[str, str]) -> str:
    summary = first_sentence(pages[page.file.src_uri])
    return f"- [{page.title}]({page.file.src_uri}){f': {summary}' if summary else ''}"


def first_sentence(markdown: str) -> str:
    """Return the first sentence below a page's title as plain text."""
    for block in markdown.split("\n\n"):
        text = " ".join(block.split())
        if text and text[0] not in "#<|-*!" and not text.startswith(("```", "---")):
            found = _SENTENCE.match(text)
            return _LINK.sub(r"\1", found[1] if found else text).rstrip(":")
    return ""
