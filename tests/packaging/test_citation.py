"""CITATION.cff, and the page that shows the same entry as BibTeX."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return found


def test_required_fields_of_the_format_are_present(citation: dict[str, Any]) -> None:
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["type"] == "software"


def test_entry_agrees_with_the_metadata_of_the_core(citation: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert citation["authors"] == project["authors"]
    assert citation["license"] == project["license"]
    assert project["urls"]["Source"].startswith(citation["repository-code"])
    assert project["urls"]["Documentation"] == citation["url"]


def test_page_shows_the_same_entry(citation: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "citation.md").read_text(encoding="utf-8")
    entry = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,?$", page, re.M))
    assert entry["author"] == citation["authors"][0]["name"]
    assert entry["title"] == citation["title"]
    assert entry["url"] == citation["repository-code"]
    assert entry["license"] == citation["license"]
    assert entry["note"] == f"Version {citation['version']}"
