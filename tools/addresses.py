"""The project's public addresses. `site_url` and `repo_url` in mkdocs.yml are the only settings."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")


@dataclass(frozen=True)
class Addresses:
    """Where the site and the repository are published; neither ends with a slash."""

    site: str
    repository: str

    def page(self, name: str) -> str:
        """Return the address of a page of the site, such as `how_to/resume.md#save`."""
        return f"{self.site}/{name.replace('.md', '.html', 1)}"

    def file(self, path: str, *, folder: bool = False) -> str:
        """Return the address of a file or folder of the repository."""
        return f"{self.repository}/{'tree' if folder else 'blob'}/main/{path}"

    def project_urls(self, folder: str) -> dict[str, str]:
        """Return what `[project.urls]` of the distribution in a folder contains."""
        return {
            "Documentation": f"{self.site}/",
            "Source": self.file(folder, folder=True),
            "Changelog": self.file(f"{folder}/CHANGELOG.md"),
            "Issues": f"{self.repository}/issues",
        }

    def absolute(self, text: str, folder: str, root: Path = ROOT) -> str:
        """Return Markdown with absolute links instead of relative ones.

        Args:
            folder: the folder of the Markdown file, relative to the root of the repository.

        Raises:
            SystemExit: A link leads to a file that does not exist.
        """

        def link(match: re.Match[str]) -> str:
            path = posixpath.normpath(posixpath.join(folder, match[2]))
            if not (root / path).exists():
                raise SystemExit(f"{folder}: the link {match[2]} leads to no file")
            in_site = path.startswith("docs/") and path.endswith(".md")
            if in_site:
                address = self.page(path.removeprefix("docs/"))
            else:
                address = self.file(path, folder=(root / path).is_dir())
            return f"{match[1]}{address}{match[3] or ''}{match[4]}"

        return _LINK.sub(link, text)


def addresses(root: Path = ROOT) -> Addresses:
    """Return the addresses in mkdocs.yml.

    Raises:
        SystemExit: A setting is missing.
    """
    text = (root / "mkdocs.yml").read_text(encoding="utf-8")
    found = {}
    for name in ("site_url", "repo_url"):
        line = re.search(rf"^{name}: *(\S+?)/?$", text, re.MULTILINE)
        if line is None:
            raise SystemExit(f"mkdocs.yml needs the setting {name}")
        found[name] = line[1]
    return Addresses(found["site_url"], found["repo_url"])
