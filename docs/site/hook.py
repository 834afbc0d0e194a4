"""Extend mkdocs: generated pages, links out of docs/, diagrams, readable tables, and Markdown versions."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import diagrams
import generated
import links
import plain
import public
import social
import tables

ROOT = public.ROOT
log = logging.getLogger("mkdocs.hooks.site")
#: The Markdown of each page, by its path.
_markdown: dict[str, str] = {}
_navigation: list[Any] = []


def on_config(config: Any) -> Any:
    fence = {"name": "mermaid", "class": "diagram", "format": diagrams.render}
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
    for name, text in generated.pages().items():
        files.append(File.generated(config, name, content=text))
    # Files of the repository that pages link to, and the files that those link to.
    waiting = [Path(one.abs_src_path) for one in files.documentation_pages() if one.abs_src_path]
    seen: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for match in links.LINK.finditer(page.read_text(encoding="utf-8")):
            path = links.outside(page, match[2])
            if path is not None and path not in seen:
                seen.add(path)
                name, text = links.repository_page(path)
                files.append(File.generated(config, name, content=text))
                waiting += [path] if path.suffix == ".md" else []
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    _navigation.append(nav)
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith(("decisions/", "repository/", "releases")):
        page.meta["search"] = {"boost": 0.3}  # guides come first in the results
    if page.file.abs_src_path:
        markdown = links.relinked(markdown, Path(page.file.abs_src_path), uri)
    if not uri.startswith("repository/"):
        _check_fences(markdown, uri)
    page.edit_url = _edit_url(page, markdown, config)
    text = plain.without_comments(plain.without_directives(markdown))
    _markdown[uri] = text
    page.meta["markdown"] = text
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    return tables.readable(html)


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    for name, text in _markdown.items():
        (site / name).write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(
        plain.index(_navigation[-1], config, _markdown), encoding="utf-8"
    )
    social.write_card(site)


def _check_fences(markdown: str, uri: str) -> None:
    """Warn, which fails a strict build, of a code block without a language: `bash`, `text`, ..."""
    opening = True
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            if opening and line.strip() == "```":
                log.warning("%s has a code block without a language", uri)
            opening = not opening


def _edit_url(page: Any, markdown: str, config: Any) -> str | None:
    """Return where a page can be edited; a generated page cannot be."""
    uri = page.file.src_uri
    if uri.startswith("repository/"):
        path = uri.removeprefix("repository/")
        path = path if (ROOT / path).exists() else path.removesuffix(".md")
        return f"{config.repo_url.rstrip('/')}/edit/main/{path}"
    if not page.file.abs_src_path or "do not edit" in markdown:
        return None
    return str(page.edit_url)
