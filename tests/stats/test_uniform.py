"""The laws of the samplers, by chi-square on fixed seeds: a wrong law fails, a right one never flickers."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from ostinato import ReplayBuffer, SamplerWithoutReplacement
from ostinato.samplers.uniform import _shuffle_draw
from ostinato.testing import make_view

from ..tags import STORAGES, buffer, fill, read_ids
from .chi_square import p_value

pytestmark = pytest.mark.usefixtures("backend")

LOW, HIGH = 1e-4, 1 - 1e-4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counts_of(draws: list[int], outcomes: int) -> list[int]:
    counted = Counter(draws)
    return [counted[i] for i in range(outcomes)]


def test_the_chi_square_tells_even_from_uneven() -> None:
    rng = random.Random(0)
    assert (
        p_value([rng.randrange(6) for _ in range(3)] and counts_of([rng.randrange(6) for _ in range(6000)], 6)) > 0.01
    )
    assert p_value([1000, 1000, 1000, 1000, 1000, 1250]) < 1e-5
    assert p_value([1000, 2000], [1, 2]) > 0.5
    assert p_value([10, 12, 9, 11]) == pytest.approx(0.9142, abs=0.01)  # chi-square 0.476 with three degrees


# -- random sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize(("count", "capacity"), [(7, 10), (10, 10), (23, 10)])
def test_random_draws_are_randint_digit_for_digit(storage: str, count: int, capacity: int) -> None:
    rb = buffer(storage, capacity, generator=seeded(3))
    fill(rb, range(count))
    same = seeded(3)
    for size in (5, 3, 5, 1):
        _, info = rb.sample(size, return_info=True)
        assert info["index"].tolist() == torch.randint(0, min(count, capacity), (size,), generator=same).tolist()


def test_random_sampling_is_uniform_over_the_rows_present() -> None:
    rb = buffer("packed", 64, generator=seeded())
    fill(rb, range(50), "tensor")
    drawn = [i for _ in range(200) for i in read_ids(rb.sample(250))]
    assert LOW < p_value(counts_of(drawn, 50)) < HIGH


def test_successive_draws_are_independent() -> None:
    rb = buffer("packed", 8, generator=seeded(1))
    fill(rb, range(6), "tensor")
    drawn = read_ids(rb.sample(40_000))
    pairs = [6 * a + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    assert LOW < p_value(counts_of(pairs, 36)) < HIGH


def test_every_row_is_reachable_at_every_fill() -> None:
    """At one row, one less than the capacity, full and wrapped: the first and the last row are drawn too."""
    rb = buffer("packed", 6, generator=seeded())
    for step in range(14):
        fill(rb, [step], "tensor")
        drawn = set(read_ids(rb.sample(300)))
        assert drawn == set(range(max(0, step - 5), step + 1))


# -- without replacement -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 10, 11, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_comes_once_per_pass_for_any_batch_size(size: int, shuffle: bool) -> None:
    rb = buffer("packed", 12, sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=size, generator=seeded())
    fill(rb, range(10), "tensor")
    for _ in range(5):
        drawn: list[int] = []
        while len(drawn) < 10:
            batch = read_ids(rb.sample())
            assert len(batch) == min(size, 10 - len(drawn))
            drawn += batch
        assert sorted(drawn) == list(range(10))
        assert shuffle or drawn == list(range(10))


def test_batch_sizes_may_change_within_a_pass() -> None:
    rb = buffer("packed", 12, sampler=SamplerWithoutReplacement(), generator=seeded())
    fill(rb, range(10), "tensor")
    for sizes, expected in (((3, 4, 5), (3, 4, 3)), ((1, 9), (1, 9)), ((6, 2, 2), (6, 2, 2))):
        drawn = [read_ids(rb.sample(size)) for size in sizes]
        assert tuple(map(len, drawn)) == expected
        assert sorted(itertools.chain(*drawn)) == list(range(10))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_orders_of_four_rows_are_equally_likely(size: int) -> None:
    """Pass after pass on one sampler: the order that one pass leaves behind must not colour the next."""
    rb = buffer("packed", 4, sampler=SamplerWithoutReplacement(), batch_size=size, generator=seeded())
    fill(rb, range(4), "tensor")
    orders = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    passes = [orders[tuple(i for batch in rb for i in read_ids(batch))] for _ in range(4800)]
    assert LOW < p_value(counts_of(passes, 24)) < HIGH
    follow = [passes[i] // 6 * 4 + passes[i + 1] // 6 for i in range(0, len(passes), 2)]
    assert LOW < p_value(counts_of(follow, 16)) < HIGH


def test_orders_are_uniform_when_rows_join_in_mid_pass() -> None:
    """Two of four rows are drawn, two more are written: the rest comes in any of the 24 orders of four rows."""
    seen: Counter[tuple[int, ...]] = Counter()
    generator = seeded()
    for _ in range(3000):
        sampler = SamplerWithoutReplacement()
        first = sampler.draw(make_view(4, 8), 2, generator).slots.tolist()
        rest = sampler.draw(make_view(6, 8), 4, generator).slots.tolist()
        assert sorted(first + rest) == list(range(6))
        left = sorted(set(range(6)) - set(first))
        seen[tuple(left.index(i) for i in rest)] += 1
    assert LOW < p_value([seen[order] for order in itertools.permutations(range(4))]) < HIGH


def test_the_first_row_of_a_pass_is_uniform_in_a_large_buffer() -> None:
    generator = seeded()
    sampler = SamplerWithoutReplacement()
    view = make_view(1000, 1000)
    first = []
    for _ in range(5000):
        sampler.restart()
        first.append(int(sampler.draw(view, 1, generator).slots) // 50)
    assert LOW < p_value(counts_of(first, 20)) < HIGH


@pytest.mark.parametrize("total", [1, 2, 5, 64, 1000])
def test_the_compiled_shuffle_and_its_stand_in_agree_step_by_step(total: int) -> None:
    """The fallback is run by itself beside whatever draws here: the same randoms give the same order."""
    sampler, generator, same = SamplerWithoutReplacement(), seeded(7), seeded(7)
    order, at = torch.arange(total), 0
    view = make_view(total, total)
    for size in (1, 3, 7, 40, 1000, 1000, 13, 1000, 1000):
        got = sampler.draw(view, size, generator).slots
        at = 0 if at == total else at
        count = min(size, total - at)
        expected = _shuffle_draw(order, at, total, torch.randint(0, 2**63 - 1, (count,), generator=same))
        at += count
        assert torch.equal(got, expected)
    assert torch.equal(sampler.state_dict()["order"], order)
    assert sorted(order.tolist()) == list(range(total))


def test_rounding_of_the_largest_randoms_stays_inside() -> None:
    order = torch.arange(5)
    drawn = _shuffle_draw(order, 0, 5, torch.full((5,), 2**63 - 1))
    assert sorted(drawn.tolist()) == list(range(5))
    assert _shuffle_draw(torch.arange(5), 0, 5, torch.zeros(5, dtype=torch.int64)).tolist() == list(range(5))


def test_a_pass_saved_in_the_middle_goes_on() -> None:
    def make() -> ReplayBuffer:
        return buffer("packed", 12, sampler=SamplerWithoutReplacement(), batch_size=3, generator=seeded())

    rb = make()
    fill(rb, range(10), "tensor")
    begun = read_ids(rb.sample())
    other = make()
    other.load_state_dict(rb.state_dict())
    rest = [i for _ in range(3) for i in read_ids(other.sample())]
    assert sorted(begun + rest) == list(range(10))
    assert rest == [i for _ in range(3) for i in read_ids(rb.sample())]


# -- while rows are written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_online_collection_keeps_batches_full(drop_last: bool, shuffle: bool) -> None:
    """One row is written before each sample: after the end of a pass the next one begins, over all rows."""
    sampler = SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)
    rb = buffer("packed", 1000, sampler=sampler, batch_size=32, generator=seeded())
    fill(rb, range(100), "tensor")
    sizes = []
    for step in range(40):
        fill(rb, [100 + step], "tensor")
        sizes.append(len(read_ids(rb.sample())))
    assert sizes.count(32) >= 30
    assert not drop_last or set(sizes) == {32}


@pytest.mark.parametrize("per_step", [1, 3])
def test_a_wrapping_ring_is_passed_over_once_per_pass(per_step: int) -> None:
    """Rows that replace others in mid-pass take over the turn of their slot."""
    rb = buffer("packed", 12, sampler=SamplerWithoutReplacement(), batch_size=4, generator=seeded())
    fill(rb, range(12), "tensor")
    written = 12
    for _ in range(5):
        slots: list[int] = []
        for _ in range(3):
            fill(rb, range(written, written + per_step), "tensor")
            written += per_step
            batch, info = rb.sample(return_info=True)
            assert read_ids(batch) == read_ids(rb[info["index"]])
            slots += info["index"].tolist()
        assert sorted(slots) == list(range(12))
