"""Which fields are next observations of which others; what follows from that: `unit/buffers/test_continuity.py`."""

from __future__ import annotations

import pytest
import torch

from ostinato.core.episodes.continuity import contradicts_order, find_mates, looks_next


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
def test_next_observations_are_found_by_their_names(fields, mates):
    paths = [tuple(field.split(".")) for field in fields.split()]
    assert find_mates(paths) == {tuple(a.split(".")): tuple(b.split(".")) for a, b in mates.items()}
    assert looks_next(("nextobs",), [("nextobs",), ("state",)])
    assert not looks_next(("context",), [("context",)])


def test_numbers_of_steps_contradict_the_order_of_dimensions_only_if_they_fit_the_other():
    time, lane = torch.arange(4)[:, None], torch.arange(5)
    for steps, turned in ((time + 0 * lane, False), (0 * time + lane, True), (time + lane, False)):
        found = contradicts_order([], None, [], [steps])
        assert found == ("the number of the step counts up in the other dimension" if turned else None)
