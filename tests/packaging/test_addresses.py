"""Two settings in mkdocs.yml decide every address in package metadata, READMEs and templates."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import addresses  # noqa: E402
import workspace  # noqa: E402

FOUND = addresses.Addresses("https://docs.test", "https://code.test/here")

PROJECT = """\
[project]
name = "accelerate-invented"
version = "0.1.0"

[project.urls]
Old = "https://old.test"

[project.scripts]
run = "here:main"
"""


def test_addresses_are_read_without_a_slash_at_the_end(tmp_path: Path) -> None:
    text = "site_url: https://docs.test/\nrepo_url: https://code.test/here\n"
    (tmp_path / "mkdocs.yml").write_text(text)
    assert addresses.addresses(tmp_path) == FOUND
    (tmp_path / "mkdocs.yml").write_text("site_url: https://docs.test/\n")
    with pytest.raises(SystemExit, match=r"mkdocs\.yml needs the setting repo_url"):
        addresses.addresses(tmp_path)


def test_links_become_absolute() -> None:
    text = (
        "[page](../../docs/tracking.md#media), [folder](../../examples), [file](../../LICENSE), "
        "[other](https://other.test/x.md), [here](#there)"
    )
    assert FOUND.absolute(text, "trackers/aim") == (
        "[page](https://docs.test/tracking.html#media), [folder](https://code.test/here/tree/main/examples), "
        "[file](https://code.test/here/blob/main/LICENSE), "
        "[other](https://other.test/x.md), [here](#there)"
    )


def test_link_to_a_missing_file_is_an_error() -> None:
    with pytest.raises(
        SystemExit, match=r"trackers/aim: the link \.\./\.\./docs/tracing\.md leads to no file"
    ):
        FOUND.absolute("[page](../../docs/tracing.md)", "trackers/aim")


@pytest.mark.parametrize("member", workspace.member_folders())
def test_every_link_in_a_readme_leads_to_a_file(member: str) -> None:
    text = FOUND.absolute((ROOT / member / "README.md").read_text(encoding="utf-8"), member)
    assert "](../" not in text


def test_table_of_addresses_is_replaced_and_stays_the_same() -> None:
    urls = FOUND.project_urls("trackers/invented")
    text = workspace.with_urls(PROJECT, urls)
    read = tomllib.loads(text)["project"]
    assert read["urls"] == urls
    assert read["scripts"] == {"run": "here:main"}
    assert workspace.with_urls(text, urls) == text
    short = PROJECT.partition("[project.urls]")[0]
    assert tomllib.loads(workspace.with_urls(short, urls))["project"]["urls"] == urls
    assert workspace.with_urls(workspace.with_urls(short, urls), urls) == workspace.with_urls(
        short, urls
    )


def test_example_distributions_have_addresses_that_exist() -> None:
    projects = sorted(ROOT.glob("examples/third_party/*/pyproject.toml"))
    assert len(projects) >= 3
    for path in projects:
        urls = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["urls"]
        folder = path.parent.relative_to(ROOT).as_posix()
        assert urls["Source"].endswith(f"/tree/main/{folder}")
        assert {*urls} == {"Documentation", "Source", "Issues"}
        assert not (path.parent / "CHANGELOG.md").exists()


def test_template_starts_with_the_address_of_its_schema() -> None:
    text = workspace.with_schema("# Two processes.\nnum_processes: 2\n", FOUND)
    assert text.startswith(
        "# yaml-language-server: $schema=https://docs.test/config_schema.json\n# Two"
    )
    assert workspace.with_schema(text, FOUND) == text
