"""The prioritized sampler by itself: options, the rule of the default priority, exponents, state."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import CapacityError, CheckpointError, KindError, OptionError, PriorityError, SlotError
from ostinato.testing.views import make_view

pytestmark = pytest.mark.usefixtures("backend")


def filled(rows: int = 5, capacity: int = 8, **options: Any) -> ReplayBuffer:
    """A buffer of `rows` rows under a prioritized sampler."""
    settings = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, **options}
    sampler = PrioritizedSampler(capacity, **settings)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=sampler,
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(torch.arange(rows))
    return rb


def priorities(rb: ReplayBuffer) -> list[float]:
    """The priorities of the rows present, as they are kept."""
    kept: torch.Tensor = rb.sampler.state_dict()["priorities"]
    return [float(x) for x in kept]


def values(rb: ReplayBuffer) -> list[float]:
    """The values in the tree of the rows present."""
    kept: torch.Tensor = rb.sampler.state_dict()["values"]
    return [float(x) for x in kept]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_capacity": 0}, CapacityError, "max_capacity must be in"),
        ({"max_capacity": 2**60}, CapacityError, "give the storage a max_size"),
        ({"max_capacity": 2.5}, KindError, "max_capacity must be an integer"),
        ({"max_capacity": True}, CapacityError, "max_capacity must be in"),
        ({"alpha": -0.1}, OptionError, r"alpha must be greater or equal than 0, got alpha=-0\.1"),
        ({"alpha": math.nan}, OptionError, "alpha must be"),
        ({"alpha": "much"}, OptionError, "alpha must be"),
        ({"beta": -1.0}, OptionError, "beta must be greater or equal to 0, got beta=-1.0"),
        ({"beta": math.inf}, OptionError, "beta must be"),
        ({"beta": 40}, OptionError, r"beta must be in \[0, 2\], .* got beta=40"),
        ({"alpha": 6.0}, OptionError, r"alpha must be in \[0, 2\]"),
        ({"eps": -1e-9}, OptionError, "eps must be"),
        ({"dtype": torch.int64}, OptionError, "dtype must be a floating dtype"),
        ({"reduction": "sum"}, OptionError, r"reduction must be one of .*got 'sum'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PrioritizedSampler(**{"max_capacity": 10, "alpha": 0.6, "beta": 0.4, **options})


def test_exponents_set_later_are_checked_too() -> None:
    sampler = PrioritizedSampler(10, 0.6, 0.4)
    with pytest.raises(OptionError, match="alpha"):
        sampler.alpha = -1
    for wrong in (math.nan, 40, -0.1):
        with pytest.raises(OptionError, match="beta"):
            sampler.beta = wrong
    assert (sampler.alpha, sampler.beta) == (0.6, 0.4)
    sampler.beta, sampler.alpha = 1.0000001, -5e-17  # a schedule whose last step was rounded
    assert (sampler.alpha, sampler.beta) == (0.0, 1.0000001)


def test_a_sampler_smaller_than_the_storage_takes_the_rows_that_it_has_room_for() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(7), sampler=PrioritizedSampler(4, 0.6, 0.4), batch_size=64)
    rb.extend(torch.arange(3))
    before = rb.stats()
    with pytest.raises(SlotError, match=r"slot 4 is out of range: PrioritizedSampler keeps priorities for max_capac"):
        rb.extend(torch.arange(2))
    assert (len(rb), rb.stats()) == (3, before)
    rb.add(torch.tensor(3))
    assert isinstance(SlotError(), IndexError)
    with pytest.raises(IndexError, match="max_capacity=4 rows: give it the max_size"):
        rb.add(torch.tensor(4))
    assert set(rb.sample().tolist()) == {0, 1, 2, 3}
    rb.empty()
    rb.extend(torch.arange(4))


def test_a_sampler_smaller_than_the_rows_present_is_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(7))
    rb.extend(torch.arange(5))
    with pytest.raises(SlotError, match="max_capacity=4"):
        rb.set_sampler(PrioritizedSampler(4, 0.6, 0.4))
    assert type(rb.sampler).__name__ == "RandomSampler"
    with pytest.raises(SlotError, match="max_capacity=4"):
        ReplayBuffer(storage=rb.storage, sampler=PrioritizedSampler(4, 0.6, 0.4))
    small = ReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 0.6, 0.4))
    with pytest.raises(SlotError, match="max_capacity=4"):
        small.set_storage(rb.storage)


def test_a_ranked_writer_forgets_rows_that_the_sampler_has_no_room_for() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(6),
        sampler=PrioritizedSampler(2, 1.0, 0.4),
        writer=TensorDictMaxValueWriter(rank_key="rank"),
        batch_size=2,
    )
    rb.extend(TensorDict({"rank": torch.tensor([1.0, 2.0])}, [2]))
    written = repr(rb.writer)
    with pytest.raises(SlotError, match="max_capacity=2"):
        rb.extend(TensorDict({"rank": torch.tensor([9.0])}, [1]))
    assert repr(rb.writer) == written
    assert rb[:]["rank"].tolist() == [1.0, 2.0]


def test_a_sampler_larger_than_the_storage_samples_as_one_of_its_size() -> None:
    batches = []
    for room in (5, 5000, 2**30):
        generator = torch.Generator().manual_seed(0)
        sampler = PrioritizedSampler(room, 0.6, 0.4)
        rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=32, generator=generator)
        rb.update_priority(rb.extend(torch.arange(5)), torch.arange(5.0))
        batches.append(rb.sample().tolist())
    assert batches[0] == batches[1] == batches[2]
    assert sampler.max_size == sampler.max_capacity == 2**30
    assert sampler.nbytes < 10_000


def test_rows_of_two_dimensions_round_the_room_up() -> None:
    """With 2 environments and `max_size=5` a storage has 6 slots."""
    rb = ReplayBuffer(storage=LazyTensorStorage(5, ndim=2), sampler=PrioritizedSampler(5, 0.6, 0.4), batch_size=64)
    rb.extend({"x": torch.arange(6).view(2, 3)})
    assert set(rb.sample()["x"].tolist()) == set(range(6))


def test_the_device_is_that_of_the_storage() -> None:
    assert PrioritizedSampler(5, 0.6, 0.4).device == torch.device("cpu")
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=PrioritizedSampler(5, 0.6, 0.4, device="cpu"), batch_size=2)
    rb.extend(torch.arange(3))
    rb.sample()
    other = PrioritizedSampler(5, 0.6, 0.4, device="cuda:1")
    assert other.device == torch.device("cuda:1")
    with pytest.raises(
        OptionError, match="on the device of its storage, cpu, and the sampler was made with device='cu"
    ):
        rb.set_sampler(other)
    late = ReplayBuffer(storage=LazyTensorStorage(5), sampler=other)
    with pytest.raises(OptionError, match="leave device out"):
        late.extend(torch.arange(3))
    assert len(late) == 0


def test_without_replacement_is_no_option() -> None:
    with pytest.raises(TypeError, match="PrioritizedSampler has no without-replacement variant"):
        PrioritizedSampler(10, 0.6, 0.4, replacement=False)
    with pytest.raises(TypeError, match="PrioritizedSliceSampler has no without-replacement variant"):
        PrioritizedSliceSampler(10, 0.6, 0.4, slice_len=2, replacement=False)
    with pytest.raises(TypeError, match="SamplerEnsemble has no without-replacement variant"):
        SamplerEnsemble(RandomSampler(), replacement=False)
    assert PrioritizedSampler(10, 0.6, 0.4, replacement=True).max_capacity == 10


def test_repr_shows_options_and_rows() -> None:
    assert repr(filled(3).sampler) == (
        "PrioritizedSampler(max_capacity=8, alpha=1, beta=1, eps=0, reduction='max', stratified=False, rows=3)"
    )


def test_new_rows_get_the_largest_priority_ever_given_to_the_last_digit() -> None:
    """1 before the first; then the largest given, though it has gone down or its row is no more."""
    rb = filled(2)
    sampler: Any = rb.sampler
    assert sampler.default_priority == 1.0
    assert priorities(rb) == [1.0, 1.0]
    odd = 0.1 + 0.2
    rb.update_priority([0, 1], [odd, 0.1])
    assert sampler.default_priority == odd, "below 1, exactly, neither rounded nor made float32"
    rb.extend(torch.arange(1))
    assert priorities(rb) == [odd, 0.1, odd]
    rb.update_priority([0, 2], [0.05, 0.05])
    rb.add(torch.tensor(7))
    assert priorities(rb) == [0.05, 0.1, 0.05, odd], "the largest ever given, not the largest there"
    rb.update_priority(1, 0.1 + 0.7)
    for _ in range(8):
        rb.add(torch.tensor(1))
    assert priorities(rb) == [0.1 + 0.7] * 8
    rb.empty()
    rb.extend(torch.arange(2))
    assert priorities(rb) == [1.0, 1.0], "an emptied buffer begins anew"


def test_within_the_buffer_the_default_is_the_largest_of_the_rows_present() -> None:
    rb = filled(4, capacity=4, max_priority_within_buffer=True)
    sampler: Any = rb.sampler
    rb.update_priority([0, 1, 2, 3], [0.3, 5.0, 0.2, 0.1])
    assert sampler.default_priority == 5.0
    rb.add(torch.tensor(0))  # slot 0
    assert priorities(rb) == [5.0, 5.0, 0.2, 0.1]
    rb.update_priority([0, 1], [0.25, 0.15])
    assert sampler.default_priority == 0.25, "the largest has gone down"
    rb.add(torch.tensor(0))  # slot 1
    assert priorities(rb) == [0.25, 0.25, 0.2, 0.1]
    rb.update_priority([0, 1, 2, 3], [0.0, 0.0, 0.0, 0.0])
    assert sampler.default_priority == 1.0, "none is above 0"


def test_within_the_buffer_agrees_with_looking_at_all_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    rb = filled(6, capacity=6, max_priority_within_buffer=True)
    sampler: Any = rb.sampler
    for _ in range(300):
        index = torch.randint(0, 6, (2,), generator=generator)
        rb.update_priority(index, torch.randint(0, 4, (2,), generator=generator))
        expected = max(priorities(rb)) or 1.0
        assert sampler.default_priority == expected
        before = priorities(rb)
        slot = rb.add(torch.tensor(0))
        before[slot] = expected
        assert priorities(rb) == before


def test_within_the_buffer_a_priority_that_did_not_last_does_not_count() -> None:
    rb = filled(3, max_priority_within_buffer=True)
    rb.update_priority([0, 1, 2], [0.5, 0.5, 0.5])
    for index, given in ((torch.tensor([1, 1]), torch.tensor([9.0, 0.25])), ([1, 1], [9.0, 0.25])):
        rb.update_priority(index, given)
        assert priorities(rb) == [0.5, 0.25, 0.5]
        assert rb.sampler.default_priority == 0.5
    ever = filled(3)
    ever.update_priority([1, 1], [9.0, 0.25])
    assert ever.sampler.default_priority == 9.0, "ever given"


def test_draws_are_those_of_torchs_random_numbers() -> None:
    """A seed means the same with and without the native extension, and whatever else the sampler computes."""
    rb = filled(8, capacity=8)
    rb.update_priority(torch.arange(8), torch.arange(1, 9))
    assert isinstance(rb._engine.generator, torch.Generator)
    rb._engine.generator.manual_seed(3)
    drawn = torch.cat([rb.sample(5), rb.sample(5)])
    random = torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    bounds = torch.cumsum(torch.arange(1.0, 9.0, dtype=torch.float64), 0)
    assert torch.equal(drawn, torch.searchsorted(bounds, random * 36, right=True))


def test_zero_alone_does_not_make_new_rows_unreachable() -> None:
    rb = filled(2)
    rb.update_priority([0, 1], 0.0)
    rb.add(torch.tensor(5))
    assert priorities(rb) == [0.0, 0.0, 1.0]
    assert rb.sample(3).tolist() == [5, 5, 5]


def test_alpha_zero_is_uniform_but_for_rows_without_mass() -> None:
    rb = filled(4, alpha=0.0)
    rb.update_priority([0, 1, 2, 3], [0.0, 1e-3, 1.0, 1e3])
    assert values(rb) == [0.0, 1.0, 1.0, 1.0]
    _, info = rb.sample(64, return_info=True)
    assert bool((info["priority_weight"] == 1).all())
    assert set(info["index"].tolist()) == {1, 2, 3}


def test_beta_zero_gives_weights_of_one() -> None:
    rb = filled(4, beta=0.0)
    rb.update_priority([0, 1, 2, 3], [0.1, 1.0, 2.0, 5.0])
    assert bool((rb.sample(64, return_info=True)[1]["priority_weight"] == 1).all())


def test_a_schedule_of_alpha_keeps_priorities_exact() -> None:
    rb = filled(4, alpha=0.5)
    given = [0.1, 1.7, 2.3, 1e-4]
    rb.update_priority([0, 1, 2, 3], given)
    for alpha in (0.9, 0.0, 2.0, 0.3, 1.0):
        rb.sampler.alpha = alpha  # type: ignore[attr-defined]
        rb.sample()
        assert priorities(rb) == given
        assert values(rb) == pytest.approx([p**alpha for p in given], rel=1e-14)


def test_a_schedule_of_beta_takes_part_in_the_next_draw() -> None:
    rb = filled(2)
    rb.update_priority([0, 1], [1.0, 4.0])
    for beta in (0.0, 0.5, 1.0):
        rb.sampler.beta = beta  # type: ignore[attr-defined]
        _, info = rb.sample(32, return_info=True)
        expected = torch.where(info["index"] == 0, 1.0, 4.0**-beta)
        assert torch.allclose(info["priority_weight"], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_have_the_dtype_asked_for(dtype: torch.dtype) -> None:
    rb = filled(4, dtype=dtype)
    assert rb.sample(return_info=True)[1]["priority_weight"].dtype is dtype


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", [4.0, 9.0]), ("min", [1.0, 0.0]), ("mean", [2.5, 3.0]), ("median", [2.0, 0.0])],
)
def test_priorities_of_items_with_steps_are_reduced(reduction: str, expected: list[float]) -> None:
    rb = filled(2, reduction=reduction)
    rb.update_priority([0, 1], torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 3.0, 9.0, 0.0]]))
    assert priorities(rb) == expected


def test_too_large_priorities_are_refused_before_sums_overflow() -> None:
    rb = filled(2, alpha=2.0)
    with pytest.raises(PriorityError, match=r"at most 2\*\*960, got 1e\+200 with alpha=2"):
        rb.update_priority(0, 1e200)
    assert priorities(rb) == [1.0, 1.0]
    rb.sampler.alpha = 1.0  # type: ignore[attr-defined]
    rb.update_priority(0, 1e200)
    rb.sampler.alpha = 2.0  # type: ignore[attr-defined]
    with pytest.raises(PriorityError, match="alpha=2"):
        rb.sample()


def test_a_buffer_without_mass_says_so() -> None:
    rb = filled(3)
    rb.update_priority([0, 1, 2], 0.0)
    with pytest.raises(PriorityError, match="none of the 3 rows has a priority above 0 and eps is 0"):
        rb.sample()


def test_stratified_draws_take_one_row_from_each_part_of_the_sum() -> None:
    rb = filled(8, stratified=True)
    for _ in range(20):
        assert rb.sample(8).tolist() == list(range(8)), "equal priorities: one from each slot"
    rb.update_priority(7, 8.0)
    drawn = rb.sample(15)
    assert (drawn == 7).sum() == 8
    assert drawn.tolist() == sorted(drawn.tolist())


def test_state_of_other_options_is_refused_and_changes_nothing() -> None:
    state = filled(3, reduction="mean").state_dict()
    rb = filled(3)
    rb.update_priority([0, 1, 2], [3.0, 2.0, 1.0])
    with pytest.raises(CheckpointError, match=r"reduction='mean', this one has reduction='max'"):
        rb.load_state_dict(state)
    assert priorities(rb) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    "damage",
    [
        {"priorities": torch.ones(2, dtype=torch.float64)},
        {"values": torch.full((3,), math.nan, dtype=torch.float64)},
        {"priorities": -torch.ones(3, dtype=torch.float64)},
        {"priorities": torch.ones(3)},
        {"largest": math.inf},
        {"alpha": -1.0},
        {"beta": -1.0},
        {"values": None},
    ],
)
def test_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    rb = filled(3)
    state = rb.state_dict()
    state["sampler"]["state"] = {**state["sampler"]["state"], **damage}
    rb.update_priority([0, 1, 2], [3.0, 2.0, 1.0])
    with pytest.raises(CheckpointError):
        rb.load_state_dict(state)
    assert priorities(rb) == [3.0, 2.0, 1.0]


def test_a_pickled_buffer_is_a_copy_that_goes_on() -> None:
    rb = filled(5)
    rb.update_priority(torch.arange(5), torch.rand(5))
    copy = pickle.loads(pickle.dumps(rb))
    assert values(copy) == values(rb)
    assert all(torch.equal(rb.sample(), copy.sample()) for _ in range(20))
    copy.update_priority(0, 9.0)
    assert priorities(rb)[0] < 1


def test_boundary_numbers_draw_written_rows_with_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of 0, just below the total, and the total itself: never an unwritten slot, never one of priority 0."""
    rb = filled(6, capacity=20)
    rb.update_priority(torch.arange(6), [0.0, 0.3, 0.0, 0.1, 0.7, 0.0])
    edge = torch.tensor([0.0, math.nextafter(1.0, 0.0), 1.0, 5e-324], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: edge)
    batch, info = rb.sample(4, return_info=True)
    assert batch.tolist() == info["index"].tolist() == [1, 4, 4, 1]
    assert info["priority_weight"].tolist() == pytest.approx([0.1 / 0.3, 0.1 / 0.7, 0.1 / 0.7, 0.1 / 0.3])


def test_sums_do_not_drift_over_many_updates() -> None:
    rows = 20_000
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(rows))
    rb.extend(torch.zeros(rows))
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        index = torch.randint(0, rows, (2_000,), generator=generator)
        rb.update_priority(index, torch.rand(2_000, generator=generator) * 10)
    tree: Any = rb.sampler._tree  # type: ignore[attr-defined]
    exact = math.fsum(values(rb))
    assert abs(float(tree.total) - exact) / exact < 1e-12


def test_the_way_without_waiting_for_a_device_does_the_same() -> None:
    """Devices get masks where the CPU filters; run on the CPU, both leave the same priorities and values."""
    rows, generator = 50, torch.Generator().manual_seed(9)
    view = make_view(rows, rows)
    samplers = [PrioritizedSampler(rows, 0.7, 0.4, 1e-3) for _ in range(2)]
    for _ in range(60):
        slots = torch.randint(0, rows, (40,), generator=generator)
        given = torch.rand(40, dtype=torch.float64, generator=generator) * 5
        keep = torch.rand(40, generator=generator) < 0.7
        samplers[0].set_priorities(slots[keep], given[keep], view)
        samplers[1]._set_on_device(samplers[1]._tree_for(view), slots, given, keep, rows)
        for one, other in zip(samplers[0]._contents(), samplers[1]._contents(), strict=True):
            assert torch.allclose(one, other, rtol=1e-14)
        assert torch.equal(*(sampler._contents()[0] for sampler in samplers))
        assert samplers[0].default_priority == samplers[1].default_priority
    samplers[1].raise_deferred()


@pytest.mark.parametrize("bad", [(0, -1.0), (0, math.nan), (0, math.inf), (99, 1.0), (-5, 1.0)])
def test_bad_values_on_a_device_have_no_effect_and_are_told_later(bad: tuple[int, float]) -> None:
    sampler, view = PrioritizedSampler(8, 1.0, 0.4, 0.0), make_view(4, 8)
    tree = sampler._tree_for(view)
    slots, given = torch.tensor([bad[0], 2]), torch.tensor([bad[1], 0.5], dtype=torch.float64)
    sampler._set_on_device(tree, slots, given, torch.tensor([False, True]), 4)
    sampler.raise_deferred()
    sampler._set_on_device(tree, slots, given, None, 4)
    assert sampler._contents()[0].tolist() == [1.0, 1.0, 0.5, 1.0]
    assert sampler.default_priority == 0.5
    with pytest.raises(PriorityError, match="had no effect"):
        sampler.raise_deferred()
    sampler.raise_deferred()
