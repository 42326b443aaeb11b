"""Counts in messages and reports: "1 row", "1,000 rows"."""

from __future__ import annotations


def plural(noun: str) -> str:
    """Return the plural of a regular English noun, such as `trajectory`, `patch` or `row`."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def number_of(count: int, noun: str) -> str:
    """Return a count and its noun in singular or plural: `number_of(1_000, "row")` is "1,000 rows"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"
