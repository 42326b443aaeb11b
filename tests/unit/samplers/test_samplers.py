"""What the samplers' options do; their laws are in tests/stats."""

from __future__ import annotations

import pytest
import torch

from ostinato import RandomSampler, SamplerWithoutReplacement, SliceSampler
from ostinato.errors import CheckpointError, KindError, OptionError
from ostinato.testing import make_view

pytestmark = pytest.mark.usefixtures("backend")


def test_the_printed_draws_of_the_documents() -> None:
    """After manual_seed(0), `sample()` of five of ten rows gives these digits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        view = make_view(10, 10)
        drawn = [RandomSampler().draw(view, size, None).slots.tolist() for size in (5, 3, 5)]
    assert drawn == [[4, 9, 3, 0, 3], [9, 7, 3], [7, 3, 1, 6, 6]]


@pytest.mark.parametrize("options", [{"drop_last": True}, {"shuffle": False}, {}])
def test_random_sampling_without_replacement_is_the_other_class(options: dict[str, bool]) -> None:
    made = RandomSampler(replacement=False, **options)
    assert type(made) is SamplerWithoutReplacement
    assert made.drop_last == options.get("drop_last", False)
    assert made.shuffle == options.get("shuffle", True)


@pytest.mark.parametrize("base", [RandomSampler, SliceSampler])
def test_subclasses_have_no_other_variant(base: type[RandomSampler | SliceSampler]) -> None:
    made = type("Mine", (base,), {})
    options = {"num_slices": 2} if base is SliceSampler else {}
    with pytest.raises(KindError, match="Mine has no without-replacement variant"):
        made(replacement=False, **options)
    assert type(made(replacement=True, **options)) is made


def test_options_may_be_given_by_position_as_in_torchrl() -> None:
    made = SamplerWithoutReplacement(True, False)
    assert (made.drop_last, made.shuffle) == (True, False)


def test_a_subclass_of_the_users_own_is_made_as_it_is() -> None:
    class Mine(RandomSampler):
        pass

    assert type(Mine()) is Mine


@pytest.mark.parametrize("drop_last", [False, True])
def test_ran_out_tells_the_last_batch_of_a_pass(drop_last: bool) -> None:
    sampler = SamplerWithoutReplacement(drop_last=drop_last)
    view = make_view(10, 10)
    told = []
    for _ in range(6):
        sampler.draw(view, 4, None)
        told.append(sampler.ran_out)
    assert told == ([False, True] * 3 if drop_last else [False, False, True] * 2)


def test_rows_left_by_drop_last_come_in_the_next_pass() -> None:
    sampler = SamplerWithoutReplacement(drop_last=True)
    view = make_view(5, 5)
    generator = torch.Generator().manual_seed(0)
    seen = {int(s) for _ in range(40) for s in sampler.draw(view, 4, generator).slots}
    assert seen == set(range(5))


def test_restart_begins_a_new_pass() -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    view = make_view(6, 6)
    assert sampler.draw(view, 4, None).slots.tolist() == [0, 1, 2, 3]
    sampler.restart()
    assert sampler.draw(view, 4, None).slots.tolist() == [0, 1, 2, 3]


def test_a_pass_that_is_over_takes_in_no_more_rows() -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    assert sampler.draw(make_view(4, 9), 4, None).slots.tolist() == [0, 1, 2, 3]
    assert sampler.ran_out
    assert sampler.draw(make_view(6, 9), 4, None).slots.tolist() == [0, 1, 2, 3]
    assert sampler.draw(make_view(7, 9), 4, None).slots.tolist() == [4, 5, 6]


def test_fewer_rows_than_before_begin_anew() -> None:
    for shuffle in (True, False):
        sampler = SamplerWithoutReplacement(shuffle=shuffle)
        sampler.draw(make_view(9, 9), 5, None)
        assert sorted(sampler.draw(make_view(3, 9), 5, None).slots.tolist()) == [0, 1, 2]


def test_no_permutation_is_made_before_it_is_needed() -> None:
    """The first draw of a large buffer consumes as much randomness as it draws rows, not as there are rows."""
    generator = torch.Generator().manual_seed(0)
    SamplerWithoutReplacement().draw(make_view(100_000, 100_000), 4, generator)
    same = torch.Generator().manual_seed(0)
    torch.randint(0, 2**63 - 1, (4,), generator=same)
    assert torch.equal(generator.get_state(), same.get_state())


def test_drop_last_with_too_few_rows_says_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"The batch size \(4\) is greater than the storage capacity \(3\).*add rows"):
        SamplerWithoutReplacement(drop_last=True).draw(make_view(3, 9), 4, None)


@pytest.mark.parametrize(
    "change",
    [
        {"order": torch.arange(3)},
        {"order": torch.arange(6).flip(0)[:5].sort().values},
        {"order": torch.zeros(5, dtype=torch.int64)},
        {"order": torch.arange(5, dtype=torch.int32)},
        {"order": torch.arange(5).view(5, 1)},
        {"order": None},
        {"at": 6},
        {"at": -1},
        {"rows": 4},
        {"shuffle": False},
        {"drop_last": True},
    ],
    ids=str,
)
def test_states_that_are_not_permutations_are_refused(change: dict[str, object]) -> None:
    """Compiled code swaps entries of the order without looking: it must be a permutation of the rows."""
    sampler = SamplerWithoutReplacement()
    sampler.draw(make_view(5, 9), 2, None)
    other = SamplerWithoutReplacement()
    with pytest.raises(CheckpointError):
        other.load_state_dict({**sampler.state_dict(), **change})
    assert sorted(other.draw(make_view(3, 9), 3, None).slots.tolist()) == [0, 1, 2]


def test_reprs_tell_the_place_in_the_pass() -> None:
    sampler = SamplerWithoutReplacement()
    sampler.draw(make_view(5, 9), 2, None)
    assert repr(sampler) == "SamplerWithoutReplacement(drop_last=False, shuffle=True, drawn=2 of 5)"
    assert repr(RandomSampler()) == "RandomSampler()"


def test_a_pass_without_memory_for_its_order_raises_each_time() -> None:
    rows = 2**50
    view = make_view(rows, rows)
    sampler = SamplerWithoutReplacement()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="allocate"):
            sampler.draw(view, 4, None)
