"""States in memory and pickles: copies of their moment; damaged ones are refused and reach no memory."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from ostinato.errors import CheckpointError

from ...tags import buffer, fill, read_ids, same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable


def whole(storage: str = "packed", **options: Any) -> ReplayBuffer:
    """A buffer that has passes over 7 rows."""
    generator = torch.Generator().manual_seed(0)
    return buffer(storage, 7, sampler=SamplerWithoutReplacement(), generator=generator, batch_size=3, **options)


@pytest.mark.parametrize("storage", ["list", "packed", "mapped"])
def test_states_and_pickles_are_copies_of_their_moment(storage: str) -> None:
    rb, other = whole(storage, prefetch=2), whole(storage, prefetch=2)
    fill(rb, range(5))
    rb.sample()
    state = rb.state_dict()
    copies = [other, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))]
    expected = [read_ids(rb.sample()) for _ in range(6)]
    if storage != "list":  # whose state holds the rows themselves
        for row in [rb[i] for i in range(5)]:
            row["obs"].zero_()
    fill(rb, range(50, 57))
    other.load_state_dict(state)
    for one in copies:
        assert [read_ids(one.sample()) for _ in range(6)] == expected
        assert read_ids(one[:]) == list(range(5))
    rb.load_state_dict(state)  # it may go back to its own state
    assert [read_ids(rb.sample()) for _ in range(6)] == expected


def test_small_fields_that_share_memory_are_pickled_once() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    rb.extend({name: torch.arange(10) for name in "abcdefgh"})
    pickled = pickle.dumps(rb)
    assert len(pickled) < 1.1 * rb.stats().nbytes + 10_000
    other = pickle.loads(pickled)
    other["a"].fill_(-1)  # compiled reads and torch's views agree
    assert (other.sample(3)["a"] == -1).all()
    assert other.stats().nbytes == rb.stats().nbytes


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more rows than columns hold": lambda s: s["storage"]["state"].update(rows=8),
    "cursor beyond": lambda s: s["writer"]["state"].update(cursor=10**9),
    "negative cursor": lambda s: s["writer"]["state"].update(cursor=-3),
    "a missing column": lambda s: s["storage"]["state"]["columns"].popitem(),
    "columns of another dtype": lambda s: s["storage"]["state"].update(
        columns={k: v.to(torch.float16) for k, v in s["storage"]["state"]["columns"].items()}
    ),
    "queued slots beyond": lambda s: s.update(
        pending=[{"slots": torch.tensor([50]), "weights": None, "last": False, "rng": None}], batch_size=3
    ),
    "a generator of three bytes": lambda s: s.update(generator=torch.zeros(3, dtype=torch.uint8)),
    "no stamps": lambda s: s.pop("stamps"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_damaged_state_is_refused_and_reaches_no_memory(case: str) -> None:
    """Refused with a CheckpointError and no change, or harmless: native code never sees it unchecked."""
    rb = whole()
    fill(rb, range(7))
    rb.sample()
    state = snapshot(rb)
    HOSTILE[case](state)
    other = whole()
    fill(other, range(20, 24))
    before = snapshot(other)
    try:
        other.load_state_dict(state)
    except CheckpointError:
        same_state(snapshot(other), before)
        return
    assert case in {"cursor beyond", "negative cursor"}, f"{case} was accepted"
    fill(other, range(30, 33))
    assert len(read_ids(other[:])) == 7
