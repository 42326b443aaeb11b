"""A dataset and a growing buffer: the share of each batch, and buffers filled from a dataset."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    open_dataset,
    prefill_replay_buffer,
)
from ostinato.errors import (
    CheckpointError,
    EmptyBufferError,
    KindError,
    MissingExtraError,
    OptionError,
    UsageError,
)

from ...effort import examples
from ...stats.chi_square import p_value

if TYPE_CHECKING:
    from pathlib import Path


def dataset(rows: int = 20, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(max(rows, 1)), **options)
    if rows:
        rb.extend({"id": torch.arange(rows)})
    return rb


def pair(online: int = 0, rows: int = 20, **options: Any) -> OfflineToOnlineReplayBuffer:
    rb = OfflineToOnlineReplayBuffer(dataset(rows), online_capacity=50, **options)
    if online:
        rb.extend({"id": torch.arange(1000, 1000 + online)})
    return rb


@examples(1)
@given(st.floats(0.001, 0.999), st.integers(1, 200))
def test_the_share_of_every_batch_is_exact(fraction: float, size: int) -> None:
    rb = pair(online=7, offline_fraction=fraction)
    for _ in range(2):
        ids = rb.sample(size)["id"]
        assert ids.shape == (size,)
        offline = round(fraction * size)
        assert (ids[:offline] < 1000).all()
        assert (ids[offline:] >= 1000).all()


def test_rows_of_both_are_uniform() -> None:
    torch.manual_seed(0)
    ids = Counter(pair(online=10, rows=5, offline_fraction=0.25).sample(40_000)["id"].tolist())
    assert sorted(ids) == [*range(5), *range(1000, 1010)]
    assert p_value([ids[i] for i in range(5)]) > 1e-4
    assert p_value([ids[i] for i in range(1000, 1010)]) > 1e-4


def test_the_dataset_alone_while_the_online_buffer_is_empty() -> None:
    rb = pair(batch_size=16)
    assert (rb.sample()["id"] < 1000).all()
    assert rb.add({"id": torch.tensor(1000)}) == 0
    assert (rb.sample()["id"] >= 1000).sum() == 8
    rb.online_buffer.empty()
    assert (rb.sample()["id"] < 1000).all()
    assert len(rb.offline_buffer) == 20


def test_annealing_ends_with_the_online_buffer_alone() -> None:
    rb = pair(online=5, batch_size=100, offline_fraction=0.8)
    for step, count in ((0, 80), (5, 40), (9, 8), (10, 0), (11, 0)):
        rb.anneal(step, 10)
        assert (rb.sample()["id"] < 1000).sum() == count
    rb.anneal(0, 10)
    assert rb.offline_fraction == 0.8
    for step, total in ((-1, 10), (0, 0)):
        with pytest.raises(OptionError, match="anneal"):
            rb.anneal(step, total)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_storages_and_transforms(storage: Any) -> None:
    rb = OfflineToOnlineReplayBuffer(
        dataset(), online_storage=storage(9), batch_size=4, transform=lambda batch: {"twice": batch["id"] * 2}
    )
    rows = TensorDict({"id": torch.arange(1000, 1012)}, [12]).unbind(0)
    index = rb.extend([{"id": row["id"]} for row in rows])
    assert index.shape == (12,)
    assert (len(rb), len(rb.online_buffer), rb.batch_size) == (29, 9, 4)
    assert (rb.sample()["twice"] >= 2000).sum() == 2
    assert [batch["twice"].shape for batch, _ in zip(rb, range(2), strict=False)] == [(4,), (4,)]
    assert len(rb.transform.steps) == 1


def test_samples_carry_no_index() -> None:
    offline = TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    offline.extend(TensorDict({"id": torch.arange(9)}, [9]))
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=9, batch_size=4)
    for _ in range(2):
        batch = rb.sample()
        assert batch.batch_size == (4,)
        assert list(batch.keys()) == ["id"]
        rb.extend(TensorDict({"id": torch.arange(3)}, [3]))


def test_a_field_named_index_stays() -> None:
    offline = ReplayBuffer(storage=LazyTensorStorage(9))
    offline.extend(TensorDict({"index": torch.arange(9)}, [9]))
    assert "index" in OfflineToOnlineReplayBuffer(offline, online_capacity=9).sample(3)


class Foreign:
    """A dataset of another library."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def sample(self, count: int) -> TensorDict:
        return TensorDict({"id": torch.zeros(count), "index": torch.zeros(count)}, [count])

    def __getitem__(self, index: Any) -> TensorDict:
        ids = torch.arange(self.rows)[index]
        return TensorDict({"id": ids, "index": ids}, ids.shape)


def test_datasets_of_other_libraries() -> None:
    rb = OfflineToOnlineReplayBuffer(Foreign(10), online_capacity=5)
    rb.extend(TensorDict({"id": torch.ones(3)}, [3]))
    assert rb.sample(4)["id"].tolist() == [0, 0, 1, 1]
    filled = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(20)), Foreign(10), chunk_size=4)
    assert filled["id"].tolist() == list(range(10))
    assert list(filled[:].keys()) == ["id"]


@pytest.mark.parametrize("door", ["pickle", "state_dict"])
def test_sampling_goes_on_where_it_was(door: str) -> None:
    rb = pair(online=9, batch_size=6)
    rb.anneal(1, 4)
    if door == "pickle":
        again = pickle.loads(pickle.dumps(rb))
    else:
        again = pair(batch_size=6)
        again.load_state_dict(rb.state_dict())
    assert again.offline_fraction == rb.offline_fraction == 0.375
    assert again.online_buffer["id"].tolist() == rb.online_buffer["id"].tolist()
    torch.manual_seed(1)
    expected = [rb.sample()["id"].tolist() for _ in range(3)]
    torch.manual_seed(1)
    assert [again.sample()["id"].tolist() for _ in range(3)] == expected


def ranked(rows: int = 20, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0, eps=0.0))
    if rows:
        rb.extend(TensorDict({"id": torch.arange(rows), **options}, [rows]))
    return rb


def priorities(rb: Any) -> torch.Tensor:
    found: torch.Tensor = rb.sampler.priorities
    return found


def test_prioritized_members_get_weights_and_priorities() -> None:
    online = ranked(0)
    rb = OfflineToOnlineReplayBuffer(ranked(), online_buffer=online, offline_fraction=0.25, batch_size=8)
    rb.extend(TensorDict({"id": torch.arange(1000, 1010)}, [10]))
    batch, info = rb.sample(return_info=True)
    assert batch["priority_weight"].shape == (8,)
    assert batch["index", "buffer_ids"].tolist() == [0, 0] + [1] * 6
    rb.update_priority(batch, batch["id"] + 1.0)
    batch["td_error"] = batch["id"] + 3.0
    rb.update_tensordict_priority(batch)
    for row, owner in zip(info["index"]["index"].tolist(), info["index"]["buffer_ids"].tolist(), strict=True):
        member = online if owner else rb.offline_buffer
        assert priorities(member)[row] == row + 1000 * owner + 3
    rb.update_priority(info, torch.zeros(8))
    assert priorities(online).count_nonzero() == 10 - batch["id"][2:].unique().numel()


def test_one_prioritized_member_is_enough_for_names() -> None:
    rb = OfflineToOnlineReplayBuffer(ranked(), online_capacity=9, batch_size=4)
    rb.extend(TensorDict({"id": torch.arange(3)}, [3]))
    assert sorted(map(str, rb.sample().keys())) == ["id", "index", "index_generation", "priority_weight"]
    assert (rb.sample()["priority_weight"][2:] == 1).all()


@pytest.mark.parametrize("door", ["dumps", "incremental", "state_dict", "pickle"])
@pytest.mark.parametrize("kind", ["prioritized", "pass", "foreign"])
def test_it_goes_on_at_every_point_with_its_own_generators(kind: str, door: str, tmp_path: Path) -> None:
    def make() -> OfflineToOnlineReplayBuffer:
        torch.manual_seed(0)
        generator = None if kind == "foreign" else torch.Generator().manual_seed(3)
        data = {"prioritized": ranked, "pass": lambda: dataset(sampler=SamplerWithoutReplacement())}.get(kind)
        return OfflineToOnlineReplayBuffer(
            Foreign(10) if data is None else data(),
            online_storage=LazyTensorStorage(30),
            offline_fraction=0.3,
            batch_size=5,
            rounding="carry",
            generator=generator,
        )

    def step(rb: OfflineToOnlineReplayBuffer, number: int) -> tuple[list[int], int]:
        row = {"id": torch.tensor([1000 + number])}
        rb.extend(row if kind == "pass" else TensorDict(row, [1]))
        ids = rb.sample()["id"].long()
        if kind == "prioritized":
            rb.offline_buffer.update_priority([number % 20], 5.0)
        return ids.tolist() if kind != "foreign" else [], int((ids < 1000).sum())

    reference = make()
    expected = [step(reference, number) for number in range(10)]
    assert [count for _, count in expected] == [2, 1, 2, 1, 2, 1, 2, 1, 2, 1]
    rb = make()
    for point in range(10):
        other = make()
        if kind == "prioritized":
            other.offline_buffer.update_priority(range(20), 2.0)  # is replaced by what was saved
        if door == "pickle":
            other = pickle.loads(pickle.dumps(rb))
        elif door == "state_dict":
            other.load_state_dict(rb.state_dict())
        else:
            rb.dumps(tmp_path / "saved", incremental=door == "incremental")
            other.loads(tmp_path / "saved")
        assert [step(other, number) for number in range(point, 10)] == expected[point:]
        assert step(rb, point) == expected[point]


def test_a_checkpoint_is_one_of_the_online_buffer_with_more(tmp_path: Path) -> None:
    rb = pair(online=5, batch_size=4)
    rb.anneal(1, 2)
    rb.dumps(tmp_path / "saved")
    alone = ReplayBuffer(storage=LazyTensorStorage(50))
    alone.loads(tmp_path / "saved")
    assert alone["id"].tolist() == list(range(1000, 1005))
    again = pair(batch_size=4)
    again.loads(tmp_path / "saved")
    assert (again.offline_fraction, len(again)) == (0.25, 25)
    alone.dumps(tmp_path / "alone")
    smaller = pair(rows=7, online=2)
    for other, name, words in ((again, "alone", "online_buffer.loads"), (smaller, "saved", "20, this one has 7")):
        before = other.online_buffer["id"].tolist()
        with pytest.raises(CheckpointError, match=words):
            other.loads(tmp_path / name)
        assert other.online_buffer["id"].tolist() == before


def test_another_dataset_is_told_by_its_episodes() -> None:
    def make(length: int) -> OfflineToOnlineReplayBuffer:
        data = {"id": torch.arange(20)}
        storage = open_dataset(data, episode_ends=list(range(length, 21, length)))
        return OfflineToOnlineReplayBuffer(storage, online_capacity=5, batch_size=4)

    make(5).load_state_dict(make(5).state_dict())
    with pytest.raises(CheckpointError, match="give the same dataset"):
        make(5).load_state_dict(make(10).state_dict())
    assert (make(5).sample()["id"] < 20).all()


def test_states_of_versions_that_kept_the_share_alone_load() -> None:
    rb, state = pair(), pair(online=3).state_dict()
    rb.load_state_dict({"online": state["online"], "offline_fraction": 0.125})
    assert (len(rb.online_buffer), rb.offline_fraction) == (3, 0.125)


def test_rounding_may_carry_what_is_left() -> None:
    rb = pair(online=5, offline_fraction=0.3, batch_size=5, rounding="carry", source_key="source")
    batches = [rb.sample() for _ in range(8)]
    assert [int((batch["source"] == 0).sum()) for batch in batches] == [2, 1] * 4
    assert all(torch.equal(batch["source"], (batch["id"] >= 1000).long()) for batch in batches)


def test_datasets_that_draw_by_themselves() -> None:
    rb = OfflineToOnlineReplayBuffer(Foreign(10), online_capacity=5, source_key="source", rounding="carry")
    rb.extend(TensorDict({"id": torch.ones(3)}, [3]))
    assert rb.sample(4)["source"].tolist() == [0, 0, 1, 1]
    for call in (lambda: rb.sample(4, return_info=True), lambda: rb.update_priority([0], 1.0)):
        with pytest.raises(UsageError, match="draws by itself"):
            call()
    with pytest.raises(OptionError, match="generator"):
        OfflineToOnlineReplayBuffer(Foreign(10), online_capacity=5, generator=torch.Generator())
    shared = ReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0), shared=True)
    with pytest.raises(OptionError, match="shared"):
        OfflineToOnlineReplayBuffer(shared, online_capacity=5)
    limited = dataset(5, consume_after_n_samples=10)
    assert (OfflineToOnlineReplayBuffer(limited, online_capacity=5).sample(4)["id"] < 5).all()


def test_an_empty_online_buffer_may_raise() -> None:
    rb = pair(when_empty="raise", batch_size=4)
    with pytest.raises(EmptyBufferError, match=r"members \[1\]"):
        rb.sample()
    rb.extend({"id": torch.tensor([1000])})
    assert (rb.sample()["id"] == 1000).sum() == 2


def test_states_that_do_not_fit_change_nothing() -> None:
    rb, good = pair(online=3), pair(online=5).state_dict()
    other = pair(rounding="carry").state_dict()
    torn = {**good, "draws": {**good["draws"], "rows": 3}}
    for state in (
        {},
        {**good, "offline_fraction": 1.5},
        {"offline_fraction": 0.5},
        {**good, "online": {}},
        other,
        torn,
    ):
        with pytest.raises(CheckpointError):
            rb.load_state_dict(state)
    assert (len(rb.online_buffer), rb.offline_fraction) == (3, 0.5)


def test_it_shows_what_it_mixes() -> None:
    assert repr(pair(online=3, batch_size=8)) == (
        "OfflineToOnlineReplayBuffer(offline=ReplayBuffer, offline_size=20, offline_fraction=0.500, online_size=3, "
        "batch_size=8)"
    )


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: OfflineToOnlineReplayBuffer(dataset()), OptionError, "Provide one of online_storage or online_capacity"),
    (
        lambda: OfflineToOnlineReplayBuffer(dataset(), online_capacity=3, online_storage=LazyTensorStorage(3)),
        OptionError,
        "OR online_capacity, not both",
    ),
    (lambda: pair(online_buffer=dataset()), OptionError, "neither with online_buffer"),
    (
        lambda: OfflineToOnlineReplayBuffer(dataset(), online_buffer=Foreign(3)),  # type: ignore[arg-type]
        KindError,
        "got Foreign",
    ),
    (lambda: pair(rounding="up"), OptionError, "rounding must be one of"),
    (lambda: pair(offline_fraction=0.0), OptionError, r"offline_fraction must be in \(0, 1\)"),
    (lambda: pair(offline_fraction=1.0), OptionError, r"offline_fraction must be in \(0, 1\)"),
    (lambda: pair(batch_size=0), OptionError, "at least 1"),
    (lambda: pair(online_storage="ram"), OptionError, "not both"),
    (lambda: OfflineToOnlineReplayBuffer([1, 2], online_capacity=3), KindError, "got list"),
    (lambda: OfflineToOnlineReplayBuffer("minari:x", online_capacity=3), OptionError, "batch_size must be provided"),
    (lambda: pair(split=True), OptionError, r"only forwarded when offline_dataset is a string, got \['split'\]"),
    (lambda: pair().sample(), OptionError, "batch_size must be provided"),
    (lambda: next(iter(pair())), UsageError, "batch_size was not specified"),
    (lambda: pair(rows=0).sample(3), EmptyBufferError, "empty"),
    (lambda: prefill_replay_buffer(dataset(), dataset(), chunk_size=0), OptionError, "chunk_size"),
    (lambda: prefill_replay_buffer(dataset(), dataset(), n_samples=-1), OptionError, "n_samples"),
    (lambda: prefill_replay_buffer(dataset(), object()), KindError, "got object"),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED)
def test_refused_options(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("foreign", [False, True], ids=["a ReplayBuffer", "draws by itself"])
def test_rows_of_other_fields_are_named_with_how_to_rename_them(foreign: bool) -> None:
    offline = ReplayBuffer(storage=LazyTensorStorage(5), rate_limiter=RateLimiter() if foreign else None)
    offline.extend({"reward": torch.zeros(3)})
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=5)
    rb.extend({"next": {"reward": torch.zeros(3)}})
    words = r"member 0 has also 'reward'; .*RenameFields\(\{'reward': \('next', 'reward'\)\}\) in member 0.*fields="
    with pytest.raises(KindError, match=words):
        rb.sample(4)


def test_names_of_datasets_need_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchrl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrl", None)
    with pytest.raises(MissingExtraError, match=r"ostinato\[datasets\]"):
        OfflineToOnlineReplayBuffer("minari:x", online_capacity=3, batch_size=4)


# -- filling a buffer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 20, 1000])
def test_a_dataset_is_copied_whole_and_in_order(chunk: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(50))
    assert prefill_replay_buffer(rb, dataset(), chunk_size=chunk) is rb
    assert rb["id"].tolist() == list(range(20))
    rb.set_at_("id", torch.tensor([-1]), [0])
    assert dataset()["id"][0] == 0


def test_some_rows_are_drawn_uniformly_and_each_once() -> None:
    torch.manual_seed(0)
    counts: Counter[int] = Counter()
    for _ in range(400):
        rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(50)), dataset(), n_samples=5, chunk_size=3)
        ids = rb["id"].tolist()
        assert ids == sorted(set(ids))
        assert len(ids) == 5
        counts.update(ids)
    assert p_value([counts[i] for i in range(20)]) > 1e-4
    assert len(prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(50)), dataset(), n_samples=99)) == 20
    assert len(prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(50)), dataset(), n_samples=0)) == 0


def test_episodes_stay_whole() -> None:
    source = ReplayBuffer(storage=LazyTensorStorage(30))
    steps = torch.arange(30)
    source.extend({"t": steps, "done": steps % 6 == 5})
    rb = ReplayBuffer(storage=LazyTensorStorage(30), sampler=SliceSampler(slice_len=6, end_key="done"), batch_size=24)
    prefill_replay_buffer(rb, source, chunk_size=7)
    assert (rb.sample()["t"].view(4, 6) % 6 == torch.arange(6)).all()


def test_transforms_of_both_run() -> None:
    source = dataset(transform=lambda batch: {"id": batch["id"] + 100})
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    rb.append_transform(lambda batch: {"id": batch["id"] * 2}, invert=True)
    prefill_replay_buffer(rb, source)
    assert rb.storage[:]["id"].tolist() == [2 * (row + 100) for row in range(20)]


def test_a_dataset_of_files_is_copied_in_order() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    prefill_replay_buffer(rb, open_dataset({"id": torch.arange(20)}, episode_ends=[8, 20]), chunk_size=7)
    assert rb["id"].tolist() == list(range(20))


def test_lists_and_empty_datasets() -> None:
    source, rb = (ReplayBuffer(storage=ListStorage(9), collate_fn=list) for _ in range(2))
    source.extend(["a", "b", "c"])
    assert prefill_replay_buffer(rb, source, chunk_size=2)[:] == ["a", "b", "c"]
    assert len(prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(9)), dataset(0))) == 0


def test_a_buffer_is_not_copied_into_itself_nor_from_several_environments() -> None:
    rb = dataset()
    with pytest.raises(OptionError, match="the buffer itself"):
        prefill_replay_buffer(rb, rb)
    with pytest.raises(OptionError, match="ndim=2"):
        prefill_replay_buffer(rb, ReplayBuffer(storage=LazyTensorStorage(4, ndim=2)))
    assert rb.write_count == 20


def test_a_pass_that_ends_within_a_batch_leaves_it_full() -> None:
    rb = OfflineToOnlineReplayBuffer(dataset(5, sampler=SamplerWithoutReplacement()), online_capacity=9, batch_size=12)
    ids = torch.cat([rb.sample()["id"] for _ in range(5)])
    assert ids.shape == (60,)
    assert set(torch.bincount(ids).tolist()) == {12}


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_a_full_ring_is_copied_from_its_oldest_row_on(chunk: int) -> None:
    source = dataset(10)
    source.extend({"id": torch.arange(10, 14)})
    rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(50)), source, chunk_size=chunk)
    assert rb["id"].tolist() == list(range(4, 14))
    some = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(50)), source, 6, chunk_size=chunk)[
        "id"
    ].tolist()
    assert some == sorted(some)
    assert len(set(some)) == 6


def test_bad_arguments_are_named() -> None:
    with pytest.raises(KindError, match="rb must be a replay buffer"):
        prefill_replay_buffer(3, dataset())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="leave as they are drawn"):
        prefill_replay_buffer(dataset(0), dataset(5, consume_after_n_samples=1))
    with pytest.raises(KindError, match="offline_fraction must be a number"):
        pair(offline_fraction="half")
    for step in (float("nan"), "1"):
        with pytest.raises((OptionError, KindError), match="step"):
            pair().anneal(step, 10)  # type: ignore[arg-type]
