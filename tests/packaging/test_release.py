"""The papers of a release: the version is the same in all of them, and they have the forms that tools read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ostinato

ROOT = Path(__file__).parents[2]
CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    unreleased, newest, *_ = re.findall(r"^## (.*)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert unreleased == "[Unreleased]"
    found = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d{2}-\d{2})", newest)
    assert found, newest
    assert found[1] == ostinato.__version__


def test_the_changelog_has_the_headings_of_keep_a_changelog() -> None:
    text = read("CHANGELOG.md")
    assert "https://keepachangelog.com/en/1.1.0/" in text
    assert "https://semver.org/" in text
    kinds = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    assert kinds
    assert set(kinds) <= set(CHANGES)
    for version in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        headings = re.findall(r"^### (.*)$", version, flags=re.MULTILINE)
        assert headings == sorted(set(headings), key=CHANGES.index), version[:20]


def test_the_citation_has_the_version_and_the_date_of_the_changelog() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == ostinato.__version__
    assert citation["authors"] == [{"name": "Ostinato authors"}]
    assert {"message", "title", "license"} <= set(citation)
    [date] = re.findall(rf"^## \[{re.escape(ostinato.__version__)}\] - (.*)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert str(citation.get("date-released", "unreleased")) == date
