"""The built site: `make site` where its files are older than what they are made from, and a server for the browser."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "site"
SOURCES = (
    "mkdocs.yml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "RELEASING.md",
    "benchmarks",
    "docs",
    "examples",
    "src",
    "tests",
)


def newest(path: Path) -> float:
    """Time of the last change of a file, or of any file in a folder that the site may show."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix not in {".pyc", ""}]
    return max((p.stat().st_mtime for p in files if p.is_file()), default=0.0)


@pytest.fixture(scope="session")
def site() -> Path:
    """Folder of the built site, with MkDocs' strict checks passed."""
    pytest.importorskip("mkdocs", reason="the extra site is not installed")
    begun = BUILT / "sitemap.xml"
    if not begun.exists() or begun.stat().st_mtime < max(newest(ROOT / name) for name in SOURCES):
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--quiet", "--clean"],
            cwd=ROOT,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return BUILT


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Address of a server of the site in a thread, ending with a slash."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
