"""How many examples a property is tried with, relative to the profile of Hypothesis: see `conftest.py`."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(factor: float) -> settings:
    """This multiple of the profile's examples: more for a cheap property, fewer for a costly one, at least one."""
    profile = settings.default
    assert profile is not None
    return settings(profile, max_examples=max(1, round(factor * profile.max_examples)))
