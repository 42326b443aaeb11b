"""Who owns which memory: no aliasing with the caller, no graph kept alive, no growth; see also `test_freed.py`."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from ostinato import (
    ListStorage,
    ReplayBuffer,
)
from ostinato.core.rows import map_leaves

from ...tags import buffer, fill, read_ids, rows


def test_a_list_and_its_users_do_not_see_what_the_other_does_to_its_tensors():
    """Of other storages, `StorageContract` says so."""
    rb = buffer("list", 8, batch_size=6)
    given = [rows(range(3), "dicts"), rows(torch.tensor(3)), rows(range(10, 12), "dicts")]
    rb.extend(given[0])
    rb.add(given[1])
    rb[0:2] = given[2]
    for data in (*given, rb.sample(), rb[torch.tensor([0, 1])]):
        map_leaves(data, lambda leaf: leaf.zero_())
    assert read_ids(rb[:]) == [10, 11, 2, 3]


def test_fields_of_a_sample_do_not_share_memory():
    """An edit in place of one field changes no other one, although small fields are stored together."""
    rb = buffer("packed", 8, batch_size=6)
    fill(rb, range(5))
    batch = rb.sample()
    untouched = {key: batch[key].clone() for key in ("id", "wide")}
    batch["obs"].fill_(99.0)
    batch["next"]["obs"].fill_(99.0)
    assert all(torch.equal(batch[key], value) for key, value in untouched.items())
    assert all(leaf.is_contiguous() for leaf in (batch["obs"], batch["next"]["obs"], batch["id"]))


def test_a_list_lets_go_of_the_batch_that_a_row_came_from():
    """Rows of a tensor are copies: one kept row must not keep a thousand others, only small ones beside it."""
    rb = ReplayBuffer(storage=ListStorage(1))
    big = torch.zeros(1000, 1000)
    rb.extend(big)
    assert rb[0].untyped_storage().nbytes() == 4000
    rb.extend(TensorDict({"x": big}, [1000]))
    assert rb[0]["x"].untyped_storage().nbytes() == 4000
    rb.extend(big[:, :4])
    assert rb[0].untyped_storage().nbytes() <= 4096


def test_exactly_one_copy_is_made_into_and_out_of_the_storage():
    """Counted by the allocator: a write allocates nothing of the size of its rows, a sample its batch."""
    rb, data = buffer("columns", 2000), {"x": torch.zeros(1000, 1000)}
    for count, work, allowed in ((2, lambda: rb.extend(data), 1e6), (1, lambda: rb.sample(500), 1.5 * 500 * 4000)):
        for _ in range(count):
            work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            work()
        events = profile.key_averages()
        assert sum(max(0, event.self_cpu_memory_usage) for event in events) < allowed
        copies = [event for event in events if event.key in {"aten::copy_", "aten::clone", "aten::to"}]
        assert sum(event.count for event in copies) <= 1
