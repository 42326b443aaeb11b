"""Hooks of MkDocs: pages from outside docs, the API reference, formulas, and links to public names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import breaks
import formulas
import front
import outside
import reference
import release
import spread
from keywords import KEYWORDS
from mkdocs.exceptions import PluginError

import ostinato

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_INFO = re.compile(r"^(```python) \w+$", re.MULTILINE)
"""A block whose language names what it needs, such as `python ray`: the tests read that, the site does not."""

_BOOSTS = {
    "reference/": 1.2,
    "reference/buffers": 2.0,
    "samplers/": 1.5,
    "compat/": 0.5,
    "changelog": 0.2,
    "combinations": 0.1,
}
"""Factors of the ranks of search results, by how paths of pages begin. Lists of many names come after explanations."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API reference into the navigation, and the version into the header."""
    config.nav = reference.with_pages(config.nav)
    config.repo_url, config.repo_name = release.link(release.project())
    config.extra["release"] = ostinato.__version__
    config.watch = [*(config.watch or []), "docs/site", "src/ostinato", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs."""
    for file in [*reference.pages(config), *outside.pages(files, config), *spread.pictures(config)]:
        files.append(file)
    sources: dict[str, str] = {}
    for file in files.documentation_pages():
        other = sources.setdefault(file.dest_uri, file.src_uri)
        if other != file.src_uri:
            msg = f"{other} and {file.src_uri} would be the same page of the site: rename one"
            raise PluginError(msg)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Point links that leave docs at the pages of their targets, and add what other files say: reasons, times."""
    for begin, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(begin):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri in KEYWORDS:
        page.meta["tags"] = KEYWORDS[page.file.src_uri]
    if page.file.src_uri == spread.PAGE:
        markdown = spread.with_spread(markdown)
    if page.file.src_uri == front.PAGE:
        markdown = front.with_reasons(markdown)
    return _INFO.sub(r"\1", outside.rewrite(markdown, page.file.src_uri))


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    """Turn formulas into MathML and names in code into links to the reference, and let long names break."""
    html = formulas.to_mathml(html)
    if page.file.src_uri.startswith("source/"):
        return html
    if page.file.src_uri.startswith("reference/"):
        return reference.link_guides(html)
    return breaks.with_breaks(reference.link_names(html))
