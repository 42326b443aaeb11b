"""The built site in Chromium: navigation, search, dark mode, the width of a phone; no errors, no other hosts."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

KINDS = (
    "",
    "tutorial/1-collect/",
    "sampling/",
    "samplers/prioritized/",
    "compat/torchrl/",
    "examples/",
    "reference/buffers/",
    "reference/command-line/",
    "benchmarks/",
)
"""One page of each kind."""

CUT_OFF = """() => [...document.querySelectorAll('article *')].filter(element => {
  const box = element.getBoundingClientRect();
  if (box.right <= innerWidth + 1 || box.width === 0 || getComputedStyle(element).position === 'absolute') return false;
  for (let above = element; above.tagName !== 'ARTICLE'; above = above.parentElement) {
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(above).overflowX)) return false;
  }
  return true;
}).map(element => element.outerHTML.slice(0, 120))"""
"""Elements that reach beyond the window and are not in something that scrolls."""


@contextmanager
def opened(browser: Browser, address: str, path: str = "", *, width: int = 1280) -> Iterator[Page]:
    """A page in a fresh context; at the end it must have had no errors and asked no other host."""
    context = browser.new_context(viewport={"width": width, "height": 844})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type in {"error", "warning"} else None)
    page.on(
        "response", lambda answer: problems.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
    )

    def guard(route: Route) -> None:
        url = route.request.url
        if url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            problems.append(f"asked another host: {url}")
            route.abort()

    page.route("**/*", guard)
    page.goto(address + path)
    try:
        yield page
        assert problems == []
    finally:
        context.close()


def test_a_reader_goes_from_the_start_page_through_the_tutorial(browser, address):
    with opened(browser, address) as page:
        page.locator('article a[href*="tutorial/1-collect"]').first.click()
        for step in ("1-collect", "2-sample", "3-prioritize", "4-sequences", "5-save-and-look"):
            page.wait_for_url(f"**/{step}/")
            page.locator(".md-footer__link--next").click()
        page.wait_for_load_state()
        assert "5-save-and-look" not in page.url


@pytest.mark.parametrize(
    ("words", "guides"),
    [
        ("prioritized", {"samplers/prioritized"}),
        ("n-step", {"samplers/nstep"}),
        ("hindsight", {"samplers/hindsight"}),
        ("save", {"saving"}),
        ("GPU", {"choosing", "recipes/isaac"}),
        ("stable baselines", {"recipes/sb3"}),
        ("lerobot", {"datasets", "recipes/robot-datasets"}),
        ("sequence", {"samplers/sequences", "samplers/slices"}),
    ],
)
def test_search_finds_the_guide_first(browser, address, words, guides):
    with opened(browser, address, f"saving/?q={words}") as page:
        results = page.locator(".md-search-result__item")
        results.first.wait_for(timeout=30_000)
        found = [str(item.locator("a").first.get_attribute("href")) for item in results.all()[: len(guides)]]
        assert {urlsplit(urljoin(page.url, link)).path.strip("/") for link in found} == guides


@pytest.mark.parametrize("path", KINDS, ids=lambda path: path.strip("/") or "start")
def test_a_phone_shows_the_whole_page(browser, address, path):
    with opened(browser, address, path, width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(CUT_OFF) == []
