"""Pairs of rows that follow each other: which are continuous, and which fields are next observations."""

from __future__ import annotations

import pytest

from ostinato.core.episodes.continuity import Continuity, find_mates, looks_next


@pytest.mark.parametrize(
    ("equal", "near", "apart", "joined"),
    [
        (100, 0, 0, False),
        (99, 0, 1, True),  # one end without a flag
        (0, 0, 100, True),  # environments in turn
        (5, 60, 35, False),  # noise hides breaks
        (20, 0, 11, False),  # too few
    ],
)
def test_what_counts_as_rows_of_several_episodes(equal: int, near: int, apart: int, *, joined: bool) -> None:
    assert Continuity(equal + near + apart, equal, near, 0 if apart else -1).joined is joined


@pytest.mark.parametrize(
    ("fields", "mates"),
    [
        ("obs next_obs action next_action reward", {"next_obs": "obs"}),
        ("obs obs_next done", {"obs_next": "obs"}),
        ("obs obs2 rew", {"obs2": "obs"}),
        ("obs.image next_obs.image", {"next_obs.image": "obs.image"}),
        ("observation next.observation next.done done next.value value", {"next.observation": "observation"}),
        ("image image2 obs obs2 next_obs", {"next_obs": "obs"}),
    ],
)
def test_next_observations_are_found_by_their_names(fields: str, mates: dict[str, str]) -> None:
    paths = [tuple(field.split(".")) for field in fields.split()]
    assert find_mates(paths) == {tuple(a.split(".")): tuple(b.split(".")) for a, b in mates.items()}
    assert looks_next(("nextobs",), [("nextobs",), ("state",)])
    assert not looks_next(("context",), [("context",)])
