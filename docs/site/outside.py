"""Files outside docs that pages link to: Markdown files become pages, other files pages with their source."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RELEASING.md": "releasing.md",
    "benchmarks/README.md": "benchmarks/method.md",
    "examples/README.md": "examples/README.md",
}
"""Markdown files outside docs that have a page, and its path in the site."""
LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".hpp": "cpp",
    ".toml": "toml",
    ".yml": "yaml",
    ".sh": "sh",
    ".txt": "text",
}

_FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def pages(files: Files, config: MkDocsConfig) -> Iterator[File]:
    """Yield the Markdown files of `PAGES`, and a page for everything outside docs that a page links to."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for path, uri in PAGES.items():
        texts[uri] = (ROOT / path).read_text(encoding="utf-8")
        yield File.generated(config, uri, content=texts[uri])
    linked = {target for uri, text in texts.items() for target in _targets(text, uri)}
    folders = {path for path in linked if (ROOT / path).is_dir()}
    linked |= {path for folder in folders for path in _listed(folder)}
    for path in sorted(linked):
        yield from _page(path, config)


def rewrite(text: str, uri: str) -> str:
    """Return Markdown whose links lead to pages of the site.

    Args:
        text: Markdown of a page, with links that work in the repository.
        uri: path of the page in the site.
    """

    def moved(found: re.Match[str]) -> str:
        target = _repository_path(found[2], uri)
        if target is None or not (_outside(target) or _outside(_origin(uri))):
            return found[0]
        there = posixpath.relpath(_site_path(target), posixpath.dirname(uri) or ".")
        return f"{found[1]}{there}{found[3] or ''}{found[4]}"

    if uri.startswith("source/"):
        return text
    return "".join(part if part.lstrip().startswith("```") else _LINK.sub(moved, part) for part in _FENCE.split(text))


def _targets(text: str, uri: str) -> Iterable[str]:
    for part in _FENCE.split(text):
        if not part.lstrip().startswith("```"):
            for found in _LINK.finditer(part):
                target = _repository_path(found[2], uri)
                if target is not None and _outside(target) and target not in {*PAGES, "README.md"}:
                    yield target


def _origin(uri: str) -> str:
    """Path in the repository of a page of the site."""
    return next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")


def _repository_path(link: str, uri: str) -> str | None:
    """Path in the repository that a relative link of a page means, or None for another kind of link."""
    if re.match(r"[a-z][a-z+.-]*:|/", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(_origin(uri)), link))


def _outside(path: str) -> bool:
    return not path.startswith("docs/")


def _site_path(path: str) -> str:
    """Path in the site of a file of the repository."""
    if not _outside(path):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    if path == "README.md" or Path(path).suffix in {".png", ".svg"}:
        return path
    if (ROOT / path / "README.md").exists():
        return f"{path}/README.md"
    return f"source/{path}.md"


def _listed(folder: str) -> list[str]:
    return sorted(f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py")


def _page(path: str, config: MkDocsConfig) -> Iterator[File]:
    here = ROOT / path
    if here.suffix in {".png", ".svg"}:
        yield File.generated(config, path, abs_src_path=str(here))
    elif here.is_dir():
        if not (here / "README.md").exists():
            yield File.generated(config, _site_path(path), content=_folder_page(path))
    else:
        yield File.generated(config, _site_path(path), content=_source_page(path))


def _folder_page(folder: str) -> str:
    names = [path.rpartition("/")[2] for path in _listed(folder)]
    lines = [f"- [{name}]({folder.rpartition('/')[2]}/{name}.md)" for name in names]
    return "\n".join([_head(folder), "", *lines, ""])


def _source_page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    lead = (ast.get_docstring(ast.parse(text)) or "") if language == "python" else ""
    first = lead.partition("\n\n")[0]
    return f"{_head(path)}\n\n{first}\n\n````{language}\n{text}````\n"


def _head(path: str) -> str:
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}"
