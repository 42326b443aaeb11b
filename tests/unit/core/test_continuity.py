"""Pairs of rows that follow each other: which are continuous, and which fields are next observations."""

from __future__ import annotations

import pytest
import torch

from ostinato.core.episodes.continuity import Continuity, compare, contradicts_order, find_mates, looks_next


def pairs(nexts: torch.Tensor, after: torch.Tensor) -> Continuity:
    return compare([(nexts - 1, nexts, after)])


def test_rounding_and_nan_are_equal_and_a_small_part_of_a_step_is_near() -> None:
    nexts = torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0], dtype=torch.float64)
    after = torch.tensor([1.0, 2.0 + 1e-7, float("nan"), 4.05, 7.0], dtype=torch.float64)
    found = pairs(nexts, after)
    assert found == Continuity(pairs=5, equal=3, near=1, first=4)
    assert found.apart == 1


def test_integers_differ_by_one_and_each_field_counts() -> None:
    counts = torch.arange(10**6, 10**6 + 4)
    same = torch.ones(4, 3)
    assert compare([(counts, counts, counts + 1), (same, same, same)]).apart == 4
    assert compare([(counts, counts, counts), (same, same, same)]).equal == 4
    assert compare([]) == Continuity()


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


def test_numbers_of_steps_contradict_the_order_of_dimensions_only_if_they_fit_the_other() -> None:
    time, lane = torch.arange(4)[:, None], torch.arange(5)
    for steps, turned in ((time + 0 * lane, False), (0 * time + lane, True), (time + lane, False)):
        found = contradicts_order([], None, [], [steps])
        assert found == ("the number of the step counts up in the other dimension" if turned else None)


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
