"""Counts in words."""

from __future__ import annotations

import pytest

from ostinato.core.words import number_of, plural


@pytest.mark.parametrize(
    ("noun", "several"),
    [("row", "rows"), ("trajectory", "trajectories"), ("day", "days"), ("patch", "patches"), ("pass", "passes")],
)
def test_plural(noun: str, several: str) -> None:
    assert plural(noun) == several


def test_number_of() -> None:
    assert [number_of(count, "row") for count in (0, 1, 1_000)] == ["0 rows", "1 row", "1,000 rows"]
