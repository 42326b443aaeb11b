"""Generators, iteration, and writing back."""

from __future__ import annotations

import itertools

import torch

from ostinato import (
    SamplerWithoutReplacement,
)

from ...tags import buffer, fill, read_ids, table


def test_with_a_generator_draws_do_not_touch_the_global_one() -> None:
    rb = buffer("packed", 10, batch_size=4, generator=torch.Generator().manual_seed(0))
    fill(rb, range(10))
    before = torch.get_rng_state()
    first = [read_ids(rb.sample()) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    again = buffer("packed", 10, batch_size=4, generator=torch.Generator().manual_seed(0))
    fill(again, range(10))
    torch.rand(3)
    assert [read_ids(again.sample()) for _ in range(3)] == first


def test_without_a_generator_manual_seed_governs() -> None:
    rb = buffer("packed", 10, batch_size=4)
    fill(rb, range(10))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = [read_ids(rb.sample()) for _ in range(3)]
        torch.manual_seed(3)
        assert [read_ids(rb.sample()) for _ in range(3)] == first
        torch.manual_seed(3)
        assert first == [torch.randint(0, 10, (4,)).tolist() for _ in range(3)]


def test_writing_and_reading_use_no_randomness() -> None:
    before = torch.get_rng_state()
    rb = buffer("packed", 10, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
    fill(rb, range(10))
    rb[:]
    rb.sample()
    rb.stats()
    assert torch.equal(torch.get_rng_state(), before)


def test_random_sampling_iterates_without_end() -> None:
    rb = buffer("packed", 10, batch_size=4)
    fill(rb, range(10))
    assert [len(read_ids(batch)) for batch in itertools.islice(rb, 50)] == [4] * 50


def test_rows_written_while_iterating_join_the_epoch() -> None:
    rb = buffer("packed", 20, sampler=SamplerWithoutReplacement(), batch_size=4)
    fill(rb, range(10))
    seen = []
    for number, batch in enumerate(rb):
        seen += read_ids(batch)
        if number == 0:
            fill(rb, range(10, 14))
    assert sorted(seen) == list(range(14))


def test_a_batch_larger_than_the_buffer_is_the_whole_buffer() -> None:
    rb = buffer("packed", 20, sampler=SamplerWithoutReplacement(), batch_size=50)
    fill(rb, range(10))
    assert [sorted(read_ids(batch)) for batch in rb] == [list(range(10))]


def test_iterating_a_storage_gives_its_rows() -> None:
    for storage in ("packed", "list"):
        rb = buffer(storage, 20)
        fill(rb, range(4))
        assert [read_ids(row) for row in rb.storage] == [[0], [1], [2], [3]]  # type: ignore[attr-defined]


def test_read_all_and_write_all_follow_the_order_of_slots() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(7))
    assert read_ids(rb.read_all_in_order()) == [5, 6, 2, 3, 4]
    assert read_ids(rb.read_all_in_order(end=2)) == [5, 6]
    rb.write_all(table(torch.arange(10, 15)))
    rb.write_all(table(torch.arange(20, 22)), end=2)
    assert read_ids(rb[:]) == [20, 21, 12, 13, 14]
    rb[:] = rb[:]
    assert read_ids(rb[:]) == [20, 21, 12, 13, 14]


def test_fields_are_written_in_place() -> None:
    rb = buffer("packed", 5)
    fill(rb, range(4))
    assert rb.set_("obs", torch.full((4, 3), 7.0)) is rb
    assert rb.set_at_(("next", "done"), torch.tensor([True]), [2]) is rb
    rb["id"] = torch.tensor([9, 8, 7, 6])
    got = rb[:]
    assert bool((got["obs"] == 7.0).all())
    assert got["next"]["done"].tolist() == [True, False, True, True]
    assert got["id"].tolist() == [9, 8, 7, 6]
