"""The pages of the built site: links, anchors, pictures, formulas, and every public name in the reference."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import ostinato

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]

ROOT = Path(__file__).parents[2]
HOST = "http://site.test"


class Page(HTMLParser):
    """What a page links to and loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = {"", "__top"}
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag == "link" and values.get("rel") in {"stylesheet", "icon", "preconnect", "manifest"}:
            self.loads.add(values["href"])
        self.loads |= {values["src"] for _ in [0] if "src" in values}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Each page by its address in the site, such as `/saving/`."""
    found = {}
    for path in site.rglob("*.html"):
        name = "/" + path.relative_to(site).as_posix()
        found[name.removesuffix("index.html")] = Page(path.read_text(encoding="utf-8"))
    assert len(found) > 50
    return found


def target_of(link: str, page: str) -> tuple[str, str] | None:
    """Path and anchor that a link of a page means, or None for a link to another host or to a mail address."""
    parts = urlsplit(urljoin(HOST + page, link))
    return (unquote(parts.path), unquote(parts.fragment)) if f"{parts.scheme}://{parts.netloc}" == HOST else None


def test_links_lead_to_pages_and_anchors(pages, site):
    broken = []
    for name, page in pages.items():
        if name == "/404.html":
            continue  # its links begin at the root of a host
        for link in page.links:
            target = target_of(link, name)
            if target is None:
                continue
            path, anchor = target
            there = pages.get(path)
            if not (site / path.lstrip("/")).is_file() and there is None:
                broken.append(f"{name} links to {link}")
            elif there is not None and anchor not in there.anchors:
                broken.append(f"{name} links to {link}, which has no such anchor")
    assert not broken, "\n".join(broken[:50])


def test_pages_load_files_of_the_site_alone(pages, site):
    for name, page in pages.items():
        for link in page.loads - {""}:
            target = target_of(link, name)
            assert target is not None or link.startswith("data:"), f"{name} loads {link}"
            assert target is None or (site / target[0].lstrip("/")).is_file(), f"{name} loads {link}"


def test_every_page_of_docs_and_each_guide_is_in_the_navigation(pages, site):
    docs = ROOT / "docs"
    for source in docs.rglob("*.md"):
        path = source.relative_to(docs).with_suffix("").as_posix()
        path = "/" + ("" if path == "README" else path.removesuffix("/README") + "/")
        assert path in pages
        html = (site / path.lstrip("/") / "index.html").read_text(encoding="utf-8")
        assert re.search(r'class="md-nav__link md-nav__link--active"', html), f"{path} is not in nav of mkdocs.yml"


@cache
def public_names() -> dict[str, object]:
    """Every name of `__all__` of the public modules, by its path."""
    names = {f"ostinato.{name}": getattr(ostinato, name) for name in ostinato.__all__}
    compat = [
        f"ostinato.compat.{m.name}"
        for m in pkgutil.iter_modules(importlib.import_module("ostinato.compat").__path__)
        if m.name != "transferqueue"  # its package is not installed here; docs/recipes/verl.md is its page
    ]
    parts = ("collect", "datasets", "errors", "protocols", "samplers", "storages", "testing", "tools", "trajectories")
    for module in [*compat, *(f"ostinato.{part}" for part in (*parts, "transforms", "units", "viz", "writers"))]:
        loaded = importlib.import_module(module)
        names |= {f"{module}.{name}": getattr(loaded, name) for name in loaded.__all__}
    return names


def test_every_public_name_is_in_the_reference(pages):
    pytest.importorskip("stable_baselines3")
    anchors = {anchor for name, page in pages.items() if name.startswith("/reference/") for anchor in page.anchors}
    shown = {id(value) for path, value in public_names().items() if path in anchors}
    missing = [path for path, value in public_names().items() if path not in anchors and id(value) not in shown]
    assert not missing, f"not on a page of docs/site/reference.py: {missing}"


def test_every_page_shows_the_version_and_links_to_the_repository(site, pages):
    """Without the script of the theme that asks the host of the repository for its stars."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = project.get("urls", {}).get("Repository", f"{HOST}/changelog/")
    for name in pages:
        text = (site / name.lstrip("/") / "index.html" if name.endswith("/") else site / name.lstrip("/")).read_text()
        heads = re.findall(r'<a href="([^"]*)" class="md-source">(.*?)</a>', text, re.DOTALL)
        assert len(heads) == 2, name  # in the header, and in the drawer of a phone
        for link, shown in heads:
            assert name == "/404.html" or urljoin(HOST + name, link) == url
            assert f">{ostinato.__version__}<" in shown
        assert 'data-md-component="source"' not in text
        assert "arithmatex" not in text, f"{name} shows LaTeX"
    assert any("math" in page.tags for page in pages.values())


def test_every_command_is_in_the_reference(pages):
    typer = pytest.importorskip("typer")
    from ostinato.cli.commands import app

    for command in typer.main.get_command(app).commands:
        assert f"ostinato-{command}" in pages["/reference/command-line/"].anchors
