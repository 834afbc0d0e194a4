"""Every page of the built site in Chromium: `make site-check`. The site is opened as files, offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="make site-check has an environment with playwright")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

SITE = Path(os.environ.get("SITE", Path(__file__).parents[2] / "build" / "site"))
#: Where screenshots of these pages are left, for eyes: SITE_SHOTS=folder.
SHOTS = os.environ.get("SITE_SHOTS")
PAGES = sorted({path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")} - {"404.html"})
#: Wider than the screen is what cannot be reached without scrolling the page itself.
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
#: What a user asks -> pages of which one is among the first five found.
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
    assert PAGES, f"{SITE} has no page: make site"
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


def opened(browser: Browser, width: int, scheme: Any) -> tuple[Page, list[str]]:
    """Return a page of that width, and the list of what it complains of."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda one: said.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    # Leaving a page breaks off what it still loads, its icon mostly.
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
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_every_page_fits_and_can_be_read(browser: Browser, width: int, scheme: str) -> None:
    page, said = opened(browser, width, scheme)
    axe, wrong = Axe(), []
    for name in PAGES:
        page.goto((SITE / name).as_uri())
        if (wider := page.evaluate(WIDER)) > 0:
            said.append(f"wider than the screen by {wider} px")
        if width == 1440:  # colours are those of the palette, whatever the width
            found = axe.run(page, options=CONTRAST).response["violations"]
            for node in [node for rule in found for node in rule["nodes"]][:3]:
                said.append(f"{node['html'][:200]} {node['any'][0]['message']}")
        wrong += [f"{name}: {one}" for one in said]
        said.clear()
        if SHOTS:
            shot = f"{name.removesuffix('.html').replace('/', '_')}-{width}-{scheme}.png"
            page.screenshot(path=Path(SHOTS, shot))
    assert wrong == []


def test_a_user_finds_the_answers_to_ten_questions(browser: Browser) -> None:
    page, said = opened(browser, 1440, "light")
    page.goto((SITE / "index.html").as_uri())
    page.keyboard.press("/")
    missed = {}
    for question, pages in QUESTIONS.items():
        page.fill(".md-search__input", "")
        page.type(".md-search__input", question)
        page.wait_for_selector(".md-search-result__item", timeout=30000)
        page.wait_for_timeout(1000)  # the answers to what was typed before
        links = page.eval_on_selector_all(
            ".md-search-result__item > a.md-search-result__link", "all => all.map(one => one.href)"
        )
        found = [link.removeprefix(f"{SITE.as_uri()}/").partition(".html")[0] for link in links[:5]]
        if not pages & {*found}:
            missed[question] = found
    assert missed == {}
    assert said == []
