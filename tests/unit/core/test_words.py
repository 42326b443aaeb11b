"""Counts in words."""

from __future__ import annotations

from ostinato.core.words import number_of, plural


def test_counts_in_words() -> None:
    nouns = ["row", "trajectory", "day", "patch", "pass"]
    assert [plural(noun) for noun in nouns] == ["rows", "trajectories", "days", "patches", "passes"]
    assert [number_of(count, "row") for count in (0, 1, 1_000)] == ["0 rows", "1 row", "1,000 rows"]
