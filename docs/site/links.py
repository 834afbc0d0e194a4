"""Resolve links from pages to files outside docs/. Such a file gets a page under `repository/`."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")


def outside(page: Path, link: str) -> Path | None:
    """Return the file outside docs/ that a link leads to, or None."""
    path = Path(os.path.normpath(page.parent / link))
    if not path.exists() or path.is_relative_to(ROOT / "docs"):
        return None
    return path / "README.md" if (path / "README.md").exists() else path


def page_uri(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def relinked(text: str, page: Path, uri: str) -> str:
    """Rewrite a page's links to files outside docs/, and from there back into docs/, for the site."""

    def there(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[2]))
        if (path := outside(page, match[2])) is not None:
            target = Path(page_uri(path))
        elif uri.startswith("repository/") and target.exists():
            target = target.relative_to(ROOT / "docs")
        else:
            return match[0]
        link = posixpath.relpath(target.as_posix(), posixpath.dirname(uri) or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return LINK.sub(there, text)


def repository_page(path: Path) -> tuple[str, str]:
    """Return the path and the text of the page that shows a file."""
    uri = page_uri(path)
    if path.suffix == ".md":
        return uri, relinked(path.read_text(encoding="utf-8"), path, uri)
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    lines = [f"# {path.relative_to(ROOT).as_posix()}", ""]
    for one in files:
        lines += [f"## {one.name}", ""] if one != path else []
        lines += [f"```{one.suffix[1:]}", one.read_text(encoding="utf-8").rstrip(), "```", ""]
    return uri, "\n".join(lines)
