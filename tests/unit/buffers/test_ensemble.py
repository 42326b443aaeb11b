"""Ensembles of buffers: shapes, names of rows, priorities on their way back, and what is refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    StorageEnsemble,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from ostinato.errors import (
    EmptyBufferError,
    KeyMissingError,
    KindError,
    OptionError,
    PriorityError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...registry import ring, seeded
from ...tags import same_state
from .refusals import raises, refuses


def plain(base: int, count: int = 10, **options: Any) -> ReplayBuffer:
    rb = ring(10, **options)
    if count:
        rb.extend({"id": torch.arange(base, base + count)})
    return rb


def tds(base: int, count: int = 10, *, ranked: bool = False, **options: Any) -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0) if ranked else RandomSampler()
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, **options)
    if count:
        rb.extend(TensorDict({"id": torch.arange(base, base + count)}, [count]))
    return rb


def priorities(member: ReplayBuffer) -> torch.Tensor:
    assert isinstance(member.sampler, PrioritizedSampler)
    return member.sampler.priorities


def pair(**options: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(plain(0), plain(100), **{"generator": seeded(), **options})


def of_member(ids: torch.Tensor) -> torch.Tensor:
    return (ids >= 100).long()


# -- what a batch is -----------------------------------------------------------------------------------------


def test_parts_are_stacked_and_their_rows_named():
    """Parts that are TensorDicts: `tests/parity/test_ensembles.py`."""
    rb = pair()
    for size in (2, 10):
        batch, info = rb.sample(size, return_info=True)
        assert batch["id"].shape == (2, size // 2)
        assert torch.equal(of_member(batch["id"]), info["index"]["buffer_ids"])
        assert torch.equal(batch["id"] % 100, info["index"]["index"])


def test_rows_of_two_dimensions_are_named_by_step_and_environment():
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=1) for _ in range(2)]
    for base, member in enumerate(members):
        member.extend(TensorDict({"id": torch.arange(12).view(3, 4) + 100 * base}, [3, 4]))
    rb = ReplayBufferEnsemble(*members, generator=seeded())
    batch = rb.sample(6)
    step, env = batch["index", "index"].unbind(-1)
    assert torch.equal(env * 4 + step + 100 * batch["index", "buffer_ids"], batch["id"])
    assert rb[:, 1:3, 0]["id"].tolist() == [[4, 8], [104, 108]]


def test_members_of_different_shapes_and_fields():
    wide = ring(10)
    wide.extend({"id": torch.zeros(5, 3)})
    for flatten, words in ((False, "collate_fn"), (True, r"end to end.*collate_fn")):
        with pytest.raises(KindError, match=words):
            ReplayBufferEnsemble(plain(0), wide, sample_from_all=True, flatten=flatten).sample(4)
    aside = tds(0, 0, ranked=True)
    aside.extend(TensorDict({"id": torch.zeros(5, 3), "x": torch.ones(5)}, [5]))
    aside.update_priority(torch.arange(5), torch.arange(1.0, 6.0))
    rb = ReplayBufferEnsemble(tds(0), aside, sample_from_all=True)
    batch = rb.sample(4)  # tensordicts lie side by side
    slots = batch["index", "index"]
    assert batch[1]["id"].shape == (2, 3)
    assert batch["priority_weight"][0].tolist() == [1, 1], "rows of uniform members"
    assert torch.allclose(batch["priority_weight"][1], 1 / (slots[1] + 1.0))
    assert torch.equal(batch["index_generation"], slots + 1)
    batch["td_error"] = torch.full((2, 2), 8.0)
    rb.update_tensordict_priority(batch)
    assert (priorities(aside) == 8).nonzero().flatten().tolist() == slots[1].unique().tolist()


class _Stingy(RandomSampler):
    """Gives one row less than it is asked for, as samplers of whole slices may."""

    def draw(self, view: Any, batch_size: int, generator: torch.Generator | None) -> Any:
        return super().draw(view, batch_size - 1, generator)


def test_batches_of_other_shapes_have_flat_names():
    rb = ReplayBufferEnsemble(tds(0), tds(100), collate_fn=torch.cat, generator=seeded())
    batch = rb.sample(6)
    assert torch.equal(batch["index", "buffer_ids"], of_member(batch["id"]))
    assert torch.equal(batch["index", "index"], batch["id"] % 100)
    members = plain(0), plain(100, sampler=_Stingy())
    parts, info = ReplayBufferEnsemble(*members, sample_from_all=True, collate_fn=list).sample(6, return_info=True)
    assert [part["id"].shape[0] for part in parts] == [3, 2]
    assert info["index"]["buffer_ids"].tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(torch.cat([part["id"] for part in parts]) % 100, info["index"]["index"])


def test_transforms_of_members_come_first():
    for shape in ((4,), (2, 2)):

        def add(batch: Any, shape: Any = shape) -> Any:
            assert batch["id"].shape == shape
            return {"id": batch["id"] + 1}

        members = plain(0, transform=lambda batch: {"id": batch["id"] * 2}), plain(100)
        rb = ReplayBufferEnsemble(*members, sample_from_all=True, transform=add, flatten=len(shape) == 1)
        batch, info = rb.sample(4, return_info=True)
        ids, index = batch["id"].reshape(2, 2), info["index"]["index"].reshape(2, 2)
        assert ids.tolist() == [(index[0] * 2 + 1).tolist(), (index[1] + 101).tolist()]
        assert rb[:1].flatten == rb.flatten == (f"flatten={rb.flatten}" in repr(rb))


# -- which members -------------------------------------------------------------------------------------------


def test_weights_choose_members_and_may_change():
    rb = ReplayBufferEnsemble(plain(0), plain(100, 0), p=[1.0, 0.0], generator=seeded())
    assert all((rb.sample(4)["id"] < 100).all() for _ in range(30)), "a member of weight 0 may be empty"
    rb[1].extend({"id": torch.arange(100, 110)})
    rb.sampler.p = [0, 1]
    assert (rb.sample(4)["id"] >= 100).all()
    rb.sampler.p = "sampleable"
    for weights in ("best", [1.0], [-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(OptionError):
            rb.sampler.p = weights
        assert rb.sampler.p == "sampleable"


SHORT = SequenceUnit(4, "strict", "done")
"""A unit whose windows need four rows of one episode."""
NOTHING = {
    "empty": lambda: ring(10),
    "no window": lambda: windows(3),
    "no slice": lambda: windows(3, sampler=SliceSampler(slice_len=4), sample_unit=None),
    "no slice by priority": lambda: windows(
        3, sampler=PrioritizedSliceSampler(10, 1.0, 1.0, num_slices=1), sample_unit=None
    ),
    "masked": lambda: windows(3, valid=False, sample_unit=None, episodes=Episodes("done", mask_key="valid")),
}
"""Members that hold nothing that can be drawn, yet."""


def windows(count: int, *, valid: bool = True, **options: Any) -> ReplayBuffer:
    rb = ring(10, **{"sample_unit": SHORT, **options})
    more_rows(rb, count, valid=valid)
    return rb


def more_rows(rb: ReplayBuffer, count: int, *, valid: bool = True) -> None:
    base = 100 + rb.write_count
    flags = {"done": torch.zeros(count, dtype=torch.bool), "valid": torch.full((count,), valid)}
    rb.extend({"id": torch.arange(base, base + count), **flags})


@pytest.mark.parametrize("name", NOTHING)
def test_a_member_without_rows_to_draw_is_left_out_until_it_has_some(name):
    online = NOTHING[name]()
    offline = windows(10, sample_unit=online._engine.unit)
    rb = ReplayBufferEnsemble(offline, online, p=[0.25, 0.75], num_buffer_sampled=4, batch_size=16)
    with pytest.warns(UserWarning, match=r"members \[1\].*ratio \[1.0, 0.0\].*when_empty") as record:
        assert not rb.sample(return_info=True)[1]["index"]["buffer_ids"].any()
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not rb.sample(return_info=True)[1]["index"]["buffer_ids"].any()
        more_rows(online, 7)
        for _ in range(5):
            ids = rb.sample(return_info=True)[1]["index"]["buffer_ids"]
            assert sorted(ids[:, 0].tolist()) == [0, 1, 1, 1]


def test_the_others_keep_their_ratio_while_a_member_is_empty():
    rb = ReplayBufferEnsemble(plain(0), plain(100), plain(200, 0), p=[1, 3, 4], num_buffer_sampled=4)
    with pytest.warns(UserWarning, match=r"ratio \[0.25, 0.75, 0.0\]"):
        batches = [rb.sample(8)["id"] for _ in range(10)]
    assert all((batch < 100).sum() == 2 and (batch < 200).all() for batch in batches)


def test_without_rows_an_error_comes_before_anything_is_drawn():
    cases: list[Any] = [
        (0, {}, "Cannot sample"),
        (0, {"p": "sampleable"}, "no member"),
        (0, {"sample_from_all": True}, "Cannot sample"),
        (5, {"p": [1.0, 0.0]}, "Cannot sample"),  # the rows of a member of weight 0 do not count
        (5, {"when_empty": "raise"}, r"members \[0\] of the ensemble have no rows"),
    ]
    for count, options, words in cases:
        generator = seeded()
        rb = ReplayBufferEnsemble(plain(0, 0), plain(100, count), generator=generator, **options)
        before = generator.get_state()
        assert not rb.can_sample(4)
        with pytest.raises(EmptyBufferError, match=words):
            rb.sample(4)
        assert torch.equal(generator.get_state(), before)
    assert rb[:1].sampler.when_empty == "raise"
    assert "when_empty='raise'" in repr(rb)
    rb.sampler.p = "sampleable"
    assert (rb.sample(4)["id"] >= 100).all()


def test_a_member_that_cannot_draw_leaves_the_passes_of_the_others_as_they_were():
    """Rows that one member had drawn for a batch that was never made would be missing from its pass."""
    first = plain(0, sampler=SamplerWithoutReplacement())
    second = tds(100, ranked=True)
    third = plain(200, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=2)
    rb = ReplayBufferEnsemble(first, second, third, sample_from_all=True, collate_fn=list, generator=seeded())
    rb.sample(6)
    second.update_priority(torch.arange(10), torch.zeros(10))
    before = rb.state_dict()
    for size, error in ((6, PriorityError), (36, OptionError)):
        with pytest.raises(error):
            rb.sample(size)
        second.update_priority(torch.arange(10), torch.ones(10))
        after = rb.state_dict()
        for i in (0, 2):
            same_state(after["members"][i]["sampler"], before["members"][i]["sampler"])
        assert torch.equal(before["generator"], after["generator"])


# -- members -------------------------------------------------------------------------------------------------


def test_members_are_chosen_as_from_a_list():
    a, b, c = plain(0), plain(100), plain(200)
    rb = ReplayBufferEnsemble(a, b, c, p=[1, 2, 1], generator=seeded())
    assert (rb[0], rb[-1], rb[torch.tensor(1)], rb[(1,)]) == (a, c, b, b)
    assert rb[:] is rb[...] is rb
    for index in ([0, 2], slice(None, None, 2), torch.tensor([0, 2]), range(0, 3, 2)):
        some = rb[index]
        assert some.members == (a, c)
        assert some.sampler.p.tolist() == [0.5, 0.5]
        assert some.sampler.num_buffer_sampled == 3
    assert [len(part) for part in (rb, rb.storage, rb.sampler, rb.writer)] == [3, 3, 3, 3]
    assert (rb.storage[1], rb.sampler[1], rb.writer[1:].members) == (b.storage, b.sampler, (b.writer, c.writer))
    wrong: list[Any] = [
        (SlotError, [3, -4, [0, 3], slice(3, None), [], ()]),
        (KindError, ["id", True, torch.tensor([True, False, True]), None, torch.zeros(2)]),
        (UsageError, [torch.zeros(2, 2, dtype=torch.int64)]),
    ]
    for error, indices in wrong:
        for index in indices:
            for group in (rb, rb.writer):
                with pytest.raises(error):
                    group[index]
    for part in (rb.sampler, rb.writer):
        with pytest.raises(SlotError, match="Tuple of length greater than 1"):
            part[:, 0]


def test_rows_are_read_by_member_and_index():
    rb = pair(transform=lambda batch: {"id": batch["id"] + 1000})
    assert rb[1, 2]["id"] == 102
    assert rb[0, 1:3]["id"].tolist() == [1, 2]
    assert rb[:, 2]["id"].tolist() == [1002, 1102]
    rb[:, 1:3]["id"].zero_()
    storages = rb.storage
    assert int(storages[1, 2]["id"]) == 102
    assert [part["id"].tolist() for part in storages[:, 1:3]] == [[1, 2], [101, 102]]
    assert [part["id"].tolist() for part in storages[[1, 0], torch.tensor([4])]] == [[104], [4]]
    assert [int(part["id"]) for part in storages[..., 0]] == [0, 100]


def test_an_ensemble_is_written_through_its_members():
    rb = pair()
    row = {"id": torch.zeros(1)}
    for write in (rb.add, rb.extend):
        raises(
            (partial(write, TensorDict(row, [1])), UsageError, r"disabled.*ensemble\[i\]"),
            (partial(write, row), KindError, r"ensemble\[i\]"),
        )
    rb[1].extend({"id": torch.tensor([777])})
    assert 777 in rb[1]["id"]
    writer = rb[1].writer
    rb[1].set_writer(ImmutableDatasetWriter())
    with pytest.raises(UsageError, match="member 1"):
        rb.empty()
    assert [len(member) for member in rb.members] == [10, 10]
    rb[1].set_writer(writer)
    rb.empty()
    assert [len(member) for member in rb.members] == [0, 0]


def test_an_ensemble_of_parts_is_one_of_buffers():
    rb = ReplayBufferEnsemble(
        storages=StorageEnsemble(
            LazyTensorStorage(10), LazyTensorStorage(10), transforms=[None, lambda d: {"id": -d["id"]}]
        ),
        samplers=SamplerEnsemble(RandomSampler(), SamplerWithoutReplacement(), sample_from_all=True),
        writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
        batch_size=4,
    )
    for member in rb.members:
        member.extend({"id": torch.arange(1, 6)})
    ids = rb.sample()["id"]
    assert (ids[0] > 0).all()
    assert (ids[1] < 0).all()
    assert rb[1].sampler.epochal


def test_stats_add_up():
    rb = pair(batch_size=4, prefetch=2)
    rb[0].extend({"id": torch.arange(3)})
    for _ in range(3):
        rb.sample()
    stats = rb.stats()
    assert (stats.rows, stats.capacity, stats.rows_written, stats.rows_drawn) == (20, 20, 23, 12)
    assert (stats.row_age_mean, stats.row_age_max) == (4.5, 9)
    assert (stats["size"], stats["write_count"], stats["capacity"], stats["utilization"]) == (20, 23, 20, 1.0)
    assert (stats["num_buffers"], stats["prefetch_queue_size"], stats["initialized"]) == (2, 2, True)
    rb.empty(empty_write_count=False)
    assert (rb.write_count, rb.stats().rows, rb.initialized) == (23, 0, True)
    rb.empty()
    assert rb.write_count == 0


def test_whether_a_draw_is_possible():
    some, none = plain(0), plain(0, 0)
    full = ReplayBufferEnsemble(some, none, p=[1, 0])
    assert full.can_sample(4)
    assert not full.can_sample(5)
    for options in ({}, {"sample_from_all": True}, {"p": "sampleable"}):
        assert ReplayBufferEnsemble(some, none, **options).can_sample(4)
    strict = ReplayBufferEnsemble(some, none, when_empty="raise", batch_size=4)
    assert not strict.can_sample()
    none.extend({"id": torch.arange(2)})
    assert strict.can_sample()
    assert strict.sample()["id"].shape == (2, 2)
    both = ReplayBufferEnsemble(some, plain(0, sampler=SliceSampler(slice_len=3), episodes=Episodes([])))
    assert not both.can_sample(8)  # 4 rows are no whole slices of 3
    assert both.can_sample(12)


# -- priorities ----------------------------------------------------------------------------------------------


def test_priorities_reach_the_rows_of_their_members():
    rb = ReplayBufferEnsemble(tds(0, ranked=True), tds(100, ranked=True, priority_key="loss"), sample_from_all=True)
    batch, info = rb.sample(8, return_info=True)
    members = {"index": batch["index", "index"], "buffer_ids": batch["index", "buffer_ids"][:, 0]}
    drawn = set(batch["id"].flatten().tolist())
    for turn, form in enumerate((batch, info, batch["index"], members)):
        rb.update_priority(form, (batch["id"] + 5 + turn).double())
        for base, member in zip((0, 100), rb.members, strict=True):
            expected = [base + i + 5 + turn if base + i in drawn else 1 for i in range(10)]
            assert priorities(member).tolist() == expected
    flat = ReplayBufferEnsemble(*rb.members, sample_from_all=True, flatten=True)
    row = flat.sample(8)
    flat.update_priority(row, row["id"] + 20.0)
    for number in row["id"].tolist():
        assert priorities(rb[number // 100])[number % 100] == number + 20
    batch["td_error"], batch["loss"] = torch.full((2, 4), 3.0), torch.full((2, 4), 7.0)
    rb.update_tensordict_priority(batch)
    for member, part, value in zip(rb.members, batch["index", "index"], (3, 7), strict=True):
        assert set(priorities(member)[part].tolist()) == {value}
    with pytest.raises(KeyMissingError, match="loss"):
        rb.update_tensordict_priority(batch.exclude("loss"))


def test_bad_priorities_change_no_member():
    rb = ReplayBufferEnsemble(tds(0, ranked=True), tds(100, ranked=True), sample_from_all=True)
    batch = rb.sample(4)
    bad = torch.tensor([[4, 4], [4, float("nan")]])
    index = {"index": torch.tensor([[0, 1], [2, 50]]), "buffer_ids": torch.tensor([0, 1])}
    wrong: list[Any] = [
        (PriorityError, (batch, bad)),
        (SlotError, (index, bad.new_ones(2, 2))),
        (SlotError, ({**index, "buffer_ids": torch.tensor([0, 2])}, 4.0)),
        (SchemaError, (batch, torch.ones(3))),
        (SchemaError, (batch["index"], torch.ones(2, 2), torch.ones(3, dtype=torch.int64))),
        (KindError, (torch.tensor([0]), torch.ones(1))),
        (UsageError, (batch,)),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            rb.update_priority(*arguments)
        assert all(priorities(member).tolist() == [1] * 10 for member in rb.members)


# -- chance, prefetch, iteration -----------------------------------------------------------------------------


def test_the_next_batch_of_an_iteration():
    rb, other = (pair(batch_size=6, generator=seeded(2)) for _ in range(2))
    assert [rb.next()["id"].tolist() for _ in range(3)] == [other.sample()["id"].tolist() for _ in range(3)]
    assert len([batch for batch, _ in zip(rb, range(30), strict=False)]) == 30
    without = pair()
    for call in (without.next, iter(without).__next__, without.sample, without.can_sample):
        with pytest.raises(UsageError, match=r"[Bb]atch_size"):
            call()


def test_prefetched_rows_that_were_replaced_are_marked():
    rb = ReplayBufferEnsemble(plain(0), plain(100), sample_from_all=True, batch_size=4, prefetch=1)
    rb.sample()
    rb[1].extend({"id": torch.arange(200, 210)})
    batch, info = rb.sample(return_info=True)
    assert info["stale"].tolist() == [[False, False], [True, True]]
    assert (batch["id"][1] < 200).all()
    rb.empty()
    for member in rb.members:
        member.extend({"id": torch.full((5,), 7)})
    assert (rb.sample()["id"] == 7).all(), "rows of emptied members are drawn anew"


# -- refusals ------------------------------------------------------------------------------------------------


def test_refused_constructions():
    one, grid = plain(0), ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    storages, writers = StorageEnsemble(LazyTensorStorage(3)), WriterEnsemble(RoundRobinWriter())
    samplers = SamplerEnsemble(RandomSampler())
    both = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)

    def parts(storages: Any, samplers: Any, **options: Any) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(storages=storages, samplers=samplers, writers=writers, **options)

    refuses(
        {
            KindError: {
                "generator": (
                    lambda: pair(generator=3),
                    lambda: pair().set_rng(3),  # type: ignore[arg-type]
                ),
                "storages must be a StorageEnsemble": ReplayBufferEnsemble,
                "ReplayBuffers, got str at 1": lambda: ReplayBufferEnsemble(one, "b"),  # type: ignore[arg-type]
                "must be a StorageEnsemble": lambda: parts(LazyTensorStorage(3), samplers),
                "Storage, got RandomSampler at 0": lambda: StorageEnsemble(RandomSampler()),  # type: ignore[arg-type]
                "p must be numbers": lambda: pair(p=object()),
                "callables": lambda: pair(collate_fns=[None, 3]),
                "transforms": lambda: StorageEnsemble(LazyTensorStorage(3), transforms=[None, None]),
            },
            OptionError: {
                r"each of the 2 members, got shape \[1\]": lambda: pair(p=[1.0]),
                "when_empty": lambda: pair(when_empty="skip"),
                "positive integer": lambda: pair(num_buffer_sampled=0),
                "leave it out": lambda: pair(num_buffer_sampled=3, sample_from_all=True),
                "divisible by num_buffer_sampled=2, got 5": lambda: pair(batch_size=5),
                "batch-size": lambda: pair(prefetch=2),
                "one entry for each": lambda: pair(collate_fns=[None]),
                "shared": lambda: pair(shared=True),
                "only once": lambda: ReplayBufferEnsemble(one, one),
                "ndim": lambda: ReplayBufferEnsemble(one, grid),
                "equally many": lambda: parts(storages, both),
                "give p to it": lambda: parts(storages, samplers, p=[1.0]),
                "at least one Writer": WriterEnsemble,
                "cannot be set": lambda: setattr(both, "p", [1.0]),
            },
            UsageError: {
                "not of both": lambda: pair(samplers=samplers),
                "Cannot pass both `p` argument and `sample_from_all": lambda: pair(p=[0.5, 0.5], sample_from_all=True),
            },
        }
    )
