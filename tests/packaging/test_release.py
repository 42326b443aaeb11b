"""The papers of a release: the version is the same in all of them, and they have the forms that tools read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ostinato

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_newest_version_of_the_changelog_is_that_of_the_package():
    unreleased, newest, *_ = re.findall(r"^## (.*)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert unreleased == "[Unreleased]"
    found = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d{2}-\d{2})", newest)
    assert found, newest
    assert found[1] == ostinato.__version__


def test_the_citation_has_the_version_and_the_date_of_the_changelog():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == ostinato.__version__
    assert citation["authors"] == [{"name": "Ostinato authors"}]
    assert {"message", "title", "license"} <= set(citation)
    [date] = re.findall(rf"^## \[{re.escape(ostinato.__version__)}\] - (.*)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert str(citation.get("date-released", "unreleased")) == date
