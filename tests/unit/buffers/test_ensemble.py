"""Ensembles of buffers: shapes, names of rows, priorities on their way back, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    Episodes,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
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

from ...effort import examples
from ...tags import rows


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(base: int, count: int = 10, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), **options)
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


def test_parts_are_stacked_and_their_rows_named() -> None:
    rb = pair()
    assert rb.initialized
    for size in (2, 10):
        batch, info = rb.sample(size, return_info=True)
        assert batch["id"].shape == (2, size // 2)
        assert torch.equal(of_member(batch["id"]), info["index"]["buffer_ids"])
        assert torch.equal(batch["id"] % 100, info["index"]["index"])
    with pytest.raises(OptionError, match="divisible"):
        rb.sample(5)
    with pytest.raises(UsageError, match="batch_size not specified"):
        rb.sample()
    batch, info = ReplayBufferEnsemble(tds(0), tds(100), generator=seeded()).sample(6, return_info=True)
    assert batch.batch_size == (2, 3)
    assert torch.equal(batch["index", "buffer_ids"], of_member(batch["id"]))
    assert torch.equal(batch["index", "index"], batch["id"] % 100)
    assert torch.equal(info["index", "buffer_ids"], batch["index", "buffer_ids"])
    assert set(batch.keys()) == {"id", "index"}


def test_rows_of_two_dimensions_are_named_by_step_and_environment() -> None:
    members = [ReplayBuffer(storage=LazyTensorStorage(12, ndim=2)) for _ in range(2)]
    for base, member in enumerate(members):
        member.extend({"id": torch.arange(12).view(3, 4) + 100 * base})
    rb = ReplayBufferEnsemble(*members, generator=seeded())
    batch, info = rb.sample(6, return_info=True)
    index = info["index"]["index"]
    assert index.shape == (2, 3, 2)
    assert torch.equal(index[..., 1] * 4 + index[..., 0] + 100 * info["index"]["buffer_ids"], batch["id"])
    assert int(rb[1, 2, 0]["id"]) == 108
    assert rb[:, 1:3, 0]["id"].tolist() == [[4, 8], [104, 108]]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor", "tensordict"])
def test_every_kind_of_data_stacked_and_flat(kind: str, storage: Any) -> None:
    def draw(**options: Any) -> Any:
        members = [ReplayBuffer(storage=storage(10)) for _ in range(2)]
        for base, member in enumerate(members):
            ids = range(100 * base, 100 * base + 5)
            member.extend(rows(ids, f"{kind}s" if storage is ListStorage else kind))
        mix = ReplayBufferEnsemble(*members, p=[1, 3], num_buffer_sampled=4, generator=seeded(), **options)
        batch, info = mix.sample(8, return_info=True)
        first = batch[..., 0] / 5 if kind == "tensor" else batch[0] if kind == "tuple" else batch["id"]
        return type(batch), first, info["index"]

    cls, first, index = draw()
    flat_cls, flat, names = draw(flatten=True)
    assert first.shape == (4, 2)
    assert (first >= 100).sum(0).tolist() == [3, 3]
    assert flat_cls is cls
    assert torch.equal(flat, first.flatten())
    for key in ("index", "buffer_ids"):
        assert torch.equal(names[key], index[key].flatten())


def test_members_of_different_shapes_and_fields() -> None:
    wide, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    wide.extend({"id": torch.zeros(5, 3)})
    other.extend({"name": torch.zeros(5)})
    for member in (wide, other):
        for flatten, words in ((False, "collate_fn"), (True, r"end to end.*collate_fn")):
            with pytest.raises(KindError, match=words):
                ReplayBufferEnsemble(plain(0), member, sample_from_all=True, flatten=flatten).sample(4)
    listed = ReplayBufferEnsemble(plain(0), wide, sample_from_all=True, collate_fn=list)
    parts, info = listed.sample(4, return_info=True)
    assert [tuple(part["id"].shape) for part in parts] == [(2,), (2, 3)]
    assert info["index"]["buffer_ids"].tolist() == [[0, 0], [1, 1]]
    aside = tds(0, 0, ranked=True)
    aside.extend(TensorDict({"id": torch.zeros(5, 3), "x": torch.ones(5)}, [5]))
    rb = ReplayBufferEnsemble(tds(0), aside, sample_from_all=True)
    rb[1].update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    batch = rb.sample(4)  # tensordicts lie side by side
    assert batch[1]["id"].shape == (2, 3)
    assert batch["index", "buffer_ids"].tolist() == [[0, 0], [1, 1]]
    slots = batch["index", "index"]
    assert batch["priority_weight"][0].tolist() == [1, 1], "rows of uniform members"
    assert torch.allclose(batch["priority_weight"][1], 1 / (slots[1] + 1.0))
    assert torch.equal(batch["index_generation"], slots + 1)
    batch["td_error"] = torch.full((2, 2), 8.0)
    rb.update_tensordict_priority(batch)
    assert (priorities(aside) == 8).sum() == len(slots[1].unique())


class _Stingy(RandomSampler):
    """Gives one row less than it is asked for, as samplers of whole slices may."""

    def draw(self, view: Any, batch_size: int, generator: torch.Generator | None) -> Any:
        return super().draw(view, batch_size - 1, generator)


def test_batches_of_other_shapes_have_flat_names() -> None:
    rb = ReplayBufferEnsemble(tds(0), tds(100), collate_fn=torch.cat, generator=seeded())
    batch = rb.sample(6)
    assert batch.batch_size == (6,)
    assert torch.equal(batch["index", "buffer_ids"], of_member(batch["id"]))
    assert torch.equal(batch["index", "index"], batch["id"] % 100)
    members = plain(0), plain(100, sampler=_Stingy())
    parts, info = ReplayBufferEnsemble(*members, sample_from_all=True, collate_fn=list).sample(6, return_info=True)
    assert [part["id"].shape[0] for part in parts] == [3, 2]
    assert info["index"]["buffer_ids"].tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(torch.cat([part["id"] for part in parts]) % 100, info["index"]["index"])


def test_transforms_of_members_come_first() -> None:
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


def test_weights_choose_members_and_may_change() -> None:
    rb = ReplayBufferEnsemble(plain(0), plain(100, 0), p=[1.0, 0.0], generator=seeded())
    assert all((rb.sample(4)["id"] < 100).all() for _ in range(30)), "a member of weight 0 may be empty"
    rb[1].extend({"id": torch.arange(100, 110)})
    rb.sampler.p = [0, 1]
    assert (rb.sample(4)["id"] >= 100).all()
    rb.sampler.p = "sampleable"
    wrong: list[Any] = ["best", [1.0], [-1.0, 2.0]]
    for weights in wrong:
        with pytest.raises(OptionError):
            rb.sampler.p = weights
        assert rb.sampler.p == "sampleable"
    exact = pair(p=[0.75, 0.25], num_buffer_sampled=4)
    assert all((exact.sample(16)["id"] >= 100).sum() == 4 for _ in range(20))


SHORT = SequenceUnit(4, "strict", "done")
"""A unit whose windows need four rows of one episode."""
NOTHING = {
    "empty": lambda: ReplayBuffer(storage=LazyTensorStorage(10)),
    "no window": lambda: windows(3),
    "no slice": lambda: windows(3, sampler=SliceSampler(slice_len=4), sample_unit=None),
    "no slice by priority": lambda: windows(
        3, sampler=PrioritizedSliceSampler(10, 1.0, 1.0, num_slices=1), sample_unit=None
    ),
    "masked": lambda: windows(3, valid=False, sample_unit=None, episodes=Episodes("done", mask_key="valid")),
}
"""Members that hold nothing that can be drawn, yet."""


def windows(count: int, *, valid: bool = True, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), **{"sample_unit": SHORT, **options})
    more_rows(rb, count, valid=valid)
    return rb


def more_rows(rb: ReplayBuffer, count: int, *, valid: bool = True) -> None:
    base = 100 + rb.write_count
    flags = {"done": torch.zeros(count, dtype=torch.bool), "valid": torch.full((count,), valid)}
    rb.extend({"id": torch.arange(base, base + count), **flags})


@pytest.mark.parametrize("name", NOTHING)
def test_a_member_without_rows_to_draw_is_left_out_until_it_has_some(name: str) -> None:
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


def test_the_others_keep_their_ratio_while_a_member_is_empty() -> None:
    rb = ReplayBufferEnsemble(plain(0), plain(100), plain(200, 0), p=[1, 3, 4], num_buffer_sampled=4)
    with pytest.warns(UserWarning, match=r"ratio \[0.25, 0.75, 0.0\]"):
        batches = [rb.sample(8)["id"] for _ in range(10)]
    assert all((batch < 100).sum() == 2 and (batch < 200).all() for batch in batches)
    equal = ReplayBufferEnsemble(plain(0), plain(100, 0), plain(200), sample_from_all=True)
    with pytest.warns(UserWarning, match=r"members \[1\]"):
        assert {int(part[0]) // 100 for _ in range(20) for part in equal.sample(6)["id"]} == {0, 2}
    equal[1].extend({"id": torch.arange(100, 110)})
    assert (equal.sample(6)["id"][:, 0] // 100).tolist() == [0, 1, 2]


def test_empty_members_raise_before_anything_is_drawn_if_asked_to() -> None:
    generator = seeded()
    rb = ReplayBufferEnsemble(plain(0), plain(100, 0), generator=generator, when_empty="raise")
    before = generator.get_state()
    with pytest.raises(EmptyBufferError, match=r"members \[1\] of the ensemble have no rows"):
        rb.sample(4)
    assert torch.equal(generator.get_state(), before)
    rb.sampler.p = "sampleable"
    assert (rb.sample(4)["id"] < 100).all()
    assert rb[:1].sampler.when_empty == "raise"
    assert "when_empty='raise'" in repr(rb)


def test_without_a_row_in_any_member_nothing_is_drawn() -> None:
    cases: list[dict[str, Any]] = [{}, {"p": "sampleable"}, {"sample_from_all": True}, {"p": [1.0, 0.0]}]
    for options in cases:
        generator = seeded()
        count = 5 if options.get("p") == [1.0, 0.0] else 0  # the rows of a member of weight 0 do not count
        rb = ReplayBufferEnsemble(plain(0, 0), plain(100, count), generator=generator, **options)
        before = generator.get_state()
        with pytest.raises(EmptyBufferError, match="Cannot sample"):
            rb.sample(4)
        assert torch.equal(generator.get_state(), before)


def test_a_member_that_cannot_draw_leaves_the_passes_of_the_others_as_they_were() -> None:
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
            for key in ("order", "at", "rows"):
                was, now = (state["members"][i]["sampler"]["state"][key] for state in (before, after))
                assert torch.equal(torch.as_tensor(was), torch.as_tensor(now))
        assert torch.equal(before["generator"], after["generator"])


# -- flat batches --------------------------------------------------------------------------------------------


# -- members -------------------------------------------------------------------------------------------------


def test_members_are_chosen_as_from_a_list() -> None:
    a, b, c = plain(0), plain(100), plain(200)
    rb = ReplayBufferEnsemble(a, b, c, p=[1, 2, 1], generator=seeded())
    assert len(rb) == 3
    assert (rb[0], rb[-1], rb[torch.tensor(1)]) == (a, c, b)
    assert rb[:] is rb[...] is rb
    for index in ([0, 2], slice(None, None, 2), torch.tensor([0, 2]), range(0, 3, 2)):
        some = rb[index]
        assert some.members == (a, c)
        assert some.sampler.p.tolist() == [0.5, 0.5]
        assert some.sampler.num_buffer_sampled == 3
    assert [len(part) for part in (rb.storage, rb.sampler, rb.writer)] == [3, 3, 3]
    assert (rb.storage[1], rb.sampler[1], rb.writer[1:].members) == (b.storage, b.sampler, (b.writer, c.writer))
    wrong: list[tuple[type[Exception], list[Any]]] = [
        (SlotError, [3, -4, [0, 3], slice(3, None), []]),
        (KindError, ["id", 1.0, True, torch.tensor([True, False, True]), None]),
    ]
    for error, indices in wrong:
        for index in indices:
            with pytest.raises(error):
                rb[index]


def test_rows_are_read_by_member_and_index() -> None:
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


def test_members_are_no_tables() -> None:
    rb = pair()
    for group in (rb, rb.storage, rb.sampler, rb.writer):
        with pytest.raises(UsageError, match="tensor indices that have more than one dimension"):
            group[torch.zeros(2, 2, dtype=torch.int64)]
        with pytest.raises(KindError, match="A floating point index was received"):
            group[torch.zeros(2)]
        with pytest.raises(SlotError):
            group[()]
        assert group[(1,)] is group[1]
    for part in (rb.sampler, rb.writer):
        with pytest.raises(SlotError, match="Tuple of length greater than 1"):
            part[:, 0]


def test_an_ensemble_is_written_through_its_members() -> None:
    rb = pair()
    for write in (rb.add, rb.extend):
        with pytest.raises(UsageError, match=r"writes are disabled.*ensemble\[i\]"):
            write(TensorDict({"id": torch.zeros(1)}, [1]))
        with pytest.raises(KindError, match=r"ensemble\[i\]"):
            write({"id": torch.zeros(1)})
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


def test_an_ensemble_of_parts_is_one_of_buffers() -> None:
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


def test_stats_add_up() -> None:
    rb = pair(batch_size=4, prefetch=2)
    for _ in range(3):
        rb.sample()
    stats = rb.stats()
    assert (stats.rows, stats.capacity, stats.rows_written, stats.rows_drawn) == (20, 20, 20, 12)
    assert (stats.row_age_mean, stats.row_age_max) == (4.5, 9)
    assert (stats["size"], stats["write_count"], stats["capacity"], stats["utilization"]) == (20, 20, 20, 1.0)
    assert (stats["num_buffers"], stats["prefetch_queue_size"], stats["initialized"]) == (2, 2, True)
    rb.empty()
    assert rb.write_count == 0
    rb[0].extend({"id": torch.arange(3)})
    rb.empty(empty_write_count=False)
    assert (rb.write_count, rb.stats().rows) == (3, 0)


def test_whether_a_draw_is_possible() -> None:
    some, none = plain(0), plain(0, 0)
    full = ReplayBufferEnsemble(some, none, p=[1, 0])
    assert full.can_sample(4)
    assert not full.can_sample(5)
    assert not ReplayBufferEnsemble(some, none, p=[0, 1]).can_sample(4)
    for options in ({}, {"sample_from_all": True}, {"p": "sampleable"}):
        assert ReplayBufferEnsemble(some, none, **options).can_sample(4)
    strict = ReplayBufferEnsemble(some, none, when_empty="raise", batch_size=4)
    assert not strict.can_sample()
    none.extend({"id": torch.arange(2)})
    assert strict.can_sample()
    assert strict.sample()["id"].shape == (2, 2)
    with pytest.raises(UsageError, match="batch_size"):
        full.can_sample()
    both = ReplayBufferEnsemble(some, plain(0, sampler=SliceSampler(slice_len=3), episodes=Episodes([])))
    assert not both.can_sample(8)  # 4 rows are no whole slices of 3
    assert both.can_sample(12)


# -- priorities ----------------------------------------------------------------------------------------------


def test_priorities_reach_the_rows_of_their_members() -> None:
    rb = ReplayBufferEnsemble(tds(0, ranked=True), tds(100, ranked=True), generator=seeded())
    batch, info = rb.sample(8, return_info=True)
    members = {"index": batch["index", "index"], "buffer_ids": batch["index", "buffer_ids"][:, 0]}
    drawn = set(batch["id"].flatten().tolist())
    for turn, form in enumerate((batch, info, batch["index"], members)):
        rb.update_priority(form, (batch["id"] + 5 + turn).double())
        for base, member in zip((0, 100), rb.members, strict=True):
            expected = [base + i + 5 + turn if base + i in drawn else 1 for i in range(10)]
            assert priorities(member).tolist() == expected


def test_tensordict_priorities_use_each_members_key() -> None:
    rb = ReplayBufferEnsemble(tds(0, ranked=True), tds(100, ranked=True, priority_key="loss"), sample_from_all=True)
    batch = rb.sample(8)
    batch["td_error"], batch["loss"] = torch.full((2, 4), 3.0), torch.full((2, 4), 7.0)
    rb.update_tensordict_priority(batch)
    for member, part, value in zip(rb.members, batch["index", "index"], (3, 7), strict=True):
        assert set(priorities(member)[part].tolist()) == {value}
    with pytest.raises(KeyMissingError, match="loss"):
        rb.update_tensordict_priority(batch.exclude("loss"))


def test_bad_priorities_change_no_member() -> None:
    rb = ReplayBufferEnsemble(tds(0, ranked=True), tds(100, ranked=True), sample_from_all=True)
    batch = rb.sample(4)
    bad = torch.ones(2, 2) * 4
    bad[1, 1] = float("nan")
    with pytest.raises(PriorityError):
        rb.update_priority(batch, bad)
    index = {"index": torch.tensor([[0, 1], [2, 50]]), "buffer_ids": torch.tensor([0, 1])}
    with pytest.raises(SlotError):
        rb.update_priority(index, torch.ones(2, 2) * 4)
    with pytest.raises(SlotError):
        rb.update_priority({**index, "buffer_ids": torch.tensor([0, 2])}, 4.0)
    with pytest.raises(SchemaError):
        rb.update_priority(batch, torch.ones(3))
    with pytest.raises(SchemaError):
        rb.update_priority(batch["index"], torch.ones(2, 2), torch.ones(3, dtype=torch.int64))
    with pytest.raises(KindError, match="buffer_ids"):
        rb.update_priority(torch.tensor([0]), torch.ones(1))
    with pytest.raises(UsageError):
        rb.update_priority(batch)
    assert all(priorities(member).max() == 1 for member in rb.members)


_NAMES: tuple[Any, ...] = (("index", "buffer_ids"), ("index", "index"), "id")


class Model:
    """Plain members: slot -> [row, priority], ring cursors, and the largest priority ever given to each."""

    def __init__(self, count: int) -> None:
        self.rows: list[dict[int, list[float]]] = [{} for _ in range(count)]
        self.cursor = [0] * count
        self.top = [0.0] * count
        self.serial = 0

    def write(self, i: int, n: int) -> range:
        new = range(self.serial, self.serial + n)
        for row in new:
            self.rows[i][self.cursor[i]] = [row, self.top[i] or 1.0]
            self.cursor[i] = (self.cursor[i] + 1) % 10
        self.serial += n
        return new

    def update(self, batch: Any, new: torch.Tensor) -> None:
        names = [batch[key].flatten().tolist() for key in _NAMES]
        for i, slot, row, value in zip(*names, new.flatten().tolist(), strict=True):
            if self.rows[i][slot][0] == row:
                self.rows[i][slot][1] = value
                self.top[i] = max(self.top[i], value)


@examples(0.5)
@given(st.data())
def test_priorities_follow_a_plain_model(data: st.DataObject) -> None:
    """Writes, draws and late updates in any order."""
    count = data.draw(st.integers(1, 3))
    members = [tds(0, 0, ranked=True) for _ in range(count)]
    model = Model(count)
    rb = ReplayBufferEnsemble(*members, p="sampleable", generator=seeded(data.draw(st.integers(0, 99))))
    drawn: list[Any] = []
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["write", "draw", "update"]))
        if step == "write":
            i = data.draw(st.integers(0, count - 1))
            new = model.write(i, data.draw(st.integers(1, 12)))
            members[i].extend(TensorDict({"id": torch.tensor(list(new))}, [len(new)]))
        elif step == "draw" and any(model.rows):
            drawn.append(rb.sample(count * data.draw(st.integers(1, 5))))
            for i, slot, row in zip(*(drawn[-1][key].flatten().tolist() for key in _NAMES), strict=True):
                assert model.rows[i][slot][0] == row
        elif step == "update" and drawn:
            batch = drawn.pop(data.draw(st.integers(0, len(drawn) - 1)))
            values = torch.rand(batch.batch_size, dtype=torch.float64)
            rb.update_priority(batch, values)
            model.update(batch, values)
    for member, rows_ in zip(members, model.rows, strict=True):
        assert not rows_ or priorities(member).tolist() == [rows_[slot][1] for slot in range(len(rows_))]


# -- chance, prefetch, iteration -----------------------------------------------------------------------------


def test_the_next_batch_of_an_iteration() -> None:
    rb, other = (pair(batch_size=6, generator=seeded(2)) for _ in range(2))
    assert [rb.next()["id"].tolist() for _ in range(3)] == [other.sample()["id"].tolist() for _ in range(3)]
    assert len([batch for batch, _ in zip(rb, range(30), strict=False)]) == 30
    for without in (pair().next, iter(pair()).__next__):
        with pytest.raises(UsageError, match=r"Cannot iterate over the replay buffer\. Batch_size was not specified"):
            without()


def test_another_generator() -> None:
    rb, other = (pair(batch_size=6, generator=seeded(seed), prefetch=2) for seed in (0, 5))
    rb.sample()
    rb.set_rng(seeded(5))
    assert [rb.sample()["id"].tolist() for _ in range(4)] == [other.sample()["id"].tolist() for _ in range(4)]
    with pytest.raises(KindError, match="generator"):
        rb.set_rng(3)  # type: ignore[arg-type]
    batches = []
    for _ in range(2):
        rb.set_rng(None)
        torch.manual_seed(3)
        batches.append(rb.sample()["id"].tolist())
    assert batches[0] == batches[1]


def test_prefetched_rows_that_were_replaced_are_marked() -> None:
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


def test_refused_constructions() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"samplers": SamplerEnsemble(RandomSampler())}, UsageError, "not of both"),
        ({"p": [0.5, 0.5], "sample_from_all": True}, UsageError, "Cannot pass both `p` argument and `sample_from_all"),
        ({"p": [1.0]}, OptionError, r"each of the 2 members, got shape \[1\]"),
        ({"p": [1.0, -1.0]}, OptionError, "at least 0"),
        ({"p": [0.0, 0.0]}, OptionError, "not all 0"),
        ({"p": [float("nan"), 1.0]}, OptionError, "finite"),
        ({"p": "best"}, OptionError, "sampleable"),
        ({"p": object()}, KindError, "p must be numbers"),
        ({"when_empty": "skip"}, OptionError, "renormalize"),
        ({"num_buffer_sampled": 0}, OptionError, "at least 1"),
        ({"num_buffer_sampled": 1.5}, KindError, "integer"),
        ({"num_buffer_sampled": 3, "sample_from_all": True}, OptionError, "leave it out"),
        ({"batch_size": 5}, OptionError, "divisible by num_buffer_sampled=2, got 5"),
        ({"prefetch": 2}, OptionError, "batch-size"),
        ({"generator": 3}, KindError, "generator"),
        ({"collate_fns": [None]}, OptionError, "one entry for each"),
        ({"collate_fns": [None, 3]}, KindError, "callables"),
        ({"shared": True}, OptionError, "shared"),
    ]
    for options, error, words in wrong:
        with pytest.raises(error, match=words):
            pair(**options)
    one, grid = plain(0), ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    members: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((), OptionError, "storages= is missing"),
        ((one, "b"), KindError, "ReplayBuffers, got str at 1"),
        ((one, one), OptionError, "only once"),
        ((one, grid), OptionError, "ndim"),
    ]
    for buffers, error, words in members:
        with pytest.raises(error, match=words):
            ReplayBufferEnsemble(*buffers)


def test_refused_parts() -> None:
    storages, writers = StorageEnsemble(LazyTensorStorage(3)), WriterEnsemble(RoundRobinWriter())
    both = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"storages": LazyTensorStorage(3), "samplers": 1, "writers": 1}, KindError, "must be a StorageEnsemble"),
        ({"storages": storages, "samplers": both, "writers": writers}, OptionError, "equally many"),
        (
            {"storages": storages, "samplers": SamplerEnsemble(RandomSampler()), "writers": writers, "p": [1.0]},
            OptionError,
            "give p to it",
        ),
    ]
    for options, error, words in wrong:
        with pytest.raises(error, match=words):
            ReplayBufferEnsemble(**options)
    with pytest.raises(KindError, match="Storage, got RandomSampler at 0"):
        StorageEnsemble(RandomSampler())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="at least one Writer"):
        WriterEnsemble()
    with pytest.raises(KindError, match="transforms must have the same length as the storages provided"):
        StorageEnsemble(LazyTensorStorage(3), transforms=[None, None])
    with pytest.raises(OptionError, match="cannot be set"):
        both.p = [1.0]
