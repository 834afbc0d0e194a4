"""Open every page of the built site in Chromium, from files and offline: `make site-check`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="make site-check has an environment with playwright")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

SITE = Path(os.environ.get("SITE", Path(__file__).parents[2] / "build" / "site"))
#: Folder for screenshots of all pages, if it is set.
SHOTS = os.environ.get("SITE_SHOTS")
PAGES = sorted({path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")} - {"404.html"})
#: Pages are tested in this many parts, so that a busy machine reaches no time limit.
PARTS = 4
#: By how many pixels the page is wider than the screen.
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: Headings of tables that are cut off.
CUT_OFF = """[...document.querySelectorAll(".md-content .wide")]
    .filter(table => table.offsetParent && table.scrollWidth > table.clientWidth + 1)
    .map(table => table.innerText.slice(0, 80))"""
CONTRAST = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
#: Search text -> pages; at least one of them must be among the first five results.
QUESTIONS = {
    "resume after preemption": {"how_to/resume", "checkpoints", "launching"},
    "gradient accumulation": {"api/accelerator", "how_to/accumulate_exactly", "data"},
    "shard a model": {"how_to/shard_a_model", "parallelism", "how_to/big_models"},
    "mixed precision bf16": {"concepts/precision", "configuration", "api/accelerator"},
    "srun": {"how_to/slurm", "launching"},
    "log to wandb": {"tracking", "how_to/several_trackers", "api/accelerate-wandb"},
    "MissingPluginError": {"errors"},
    "notebook_launcher": {"api/accelerate-launch", "how_to/notebooks", "launching"},
    "gather_for_metrics": {"api/accelerator", "how_to/evaluate_exactly", "data", "quickstart"},
    "accelerator.save_state": {"api/accelerator"},
    "plugins why": {"selection", "plugins", "commands", "launching"},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "Chromium is not installed; on Debian: apt-get install chromium"
    assert PAGES, f"{SITE} has no pages. Run: make site"
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


def opened(browser: Browser, width: int, scheme: Any) -> tuple[Page, list[str]]:
    """Return an empty page of that width, and the list that will hold its errors and foreign requests."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(120_000)  # a busy machine is slow, not wrong
    said: list[str] = []
    page.on("console", lambda one: said.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    # Leaving a page aborts requests that are still running, usually the one for its icon.
    page.on(
        "requestfailed",
        lambda one: None if "ABORTED" in one.failure else said.append(f"failed: {one.url}"),
    )
    page.on(
        "request",
        lambda one: None if one.url[:5] in ("file:", "data:", "blob:") else said.append(one.url),
    )
    return page, said


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_every_page_fits_and_can_be_read(
    browser: Browser, width: int, scheme: str, part: int
) -> None:
    page, said = opened(browser, width, scheme)
    axe, wrong = Axe(), []
    for name in PAGES[part::PARTS]:
        page.goto((SITE / name).as_uri())
        if (wider := page.evaluate(WIDER)) > 0:
            said.append(f"wider than the screen by {wider} px")
        if width == 390:
            said += [f"table is cut off: {text!r}" for text in page.evaluate(CUT_OFF)]
        if width == 1440:  # colours don't depend on the width
            found = axe.run(page, options=CONTRAST).response["violations"]
            for node in [node for rule in found for node in rule["nodes"]][:3]:
                said.append(f"{node['html'][:200]} {node['any'][0]['message']}")
        wrong += [f"{name}: {one}" for one in said]
        said.clear()
        if SHOTS:
            shot = f"{name.removesuffix('.html').replace('/', '_')}-{width}-{scheme}.png"
            page.screenshot(path=Path(SHOTS, shot))
    assert wrong == []


def test_search_finds_the_page_for_a_question(browser: Browser) -> None:
    page, said = opened(browser, 1440, "light")
    page.goto((SITE / "index.html").as_uri())
    page.keyboard.press("/")
    missed = {}
    for question, pages in QUESTIONS.items():
        page.fill(".md-search__input", "")
        page.type(".md-search__input", question)
        page.wait_for_selector(".md-search-result__item", timeout=30000)
        page.wait_for_timeout(1000)  # until then, results of a shorter text may be shown
        links = page.eval_on_selector_all(
            ".md-search-result__item > a.md-search-result__link", "all => all.map(one => one.href)"
        )
        found = [link.removeprefix(f"{SITE.as_uri()}/").partition(".html")[0] for link in links[:5]]
        if not pages & {*found}:
            missed[question] = found
    assert missed == {}
    assert said == []


def test_every_page_has_a_markdown_version() -> None:
    pages = [(SITE / name).with_suffix(".md") for name in PAGES]
    missing = [
        page for page in pages if not page.exists() and not page.with_name("README.md").exists()
    ]
    assert missing == []
    directives = [
        path.name for path in SITE.rglob("*.md") if re.search(r"^::: ", path.read_text(), re.M)
    ]
    assert directives == []


def test_llms_txt_links_to_the_markdown_of_the_pages_in_the_navigation() -> None:
    text = (SITE / "llms.txt").read_text()
    assert text.startswith("# accelerate-core\n\n> ")
    links = re.findall(r"^- \[.+?\]\((.+?)\)", text, re.M)
    assert [link for link in links if not (SITE / link).exists()] == []
    assert {"index.md", "quickstart.md", "how_to/resume.md", "api/accelerator.md"} <= {*links}


def test_copy_button_copies_the_markdown_of_the_page(browser: Browser) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto((SITE / "how_to/resume.html").as_uri())
    page.click(".copy-page")
    page.wait_for_selector(".copy-page.copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == (SITE / "how_to/resume.md").read_text()
    context.close()


def test_pages_link_to_the_file_to_edit() -> None:
    expected = {
        "how_to/resume.html": "edit/main/docs/how_to/resume.md",
        "repository/CONTRIBUTING.html": "edit/main/CONTRIBUTING.md",
    }
    for name, path in expected.items():
        assert re.search(rf'href="[^"]+/{path}"[^>]*rel="edit"', (SITE / name).read_text()), name
    assert 'rel="edit"' not in (SITE / "commands.html").read_text()  # generated
