"""Shared buffers within one process: they do what private ones do, or raise, and save the same checkpoints."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
)
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    EmptyBufferError,
    OptionError,
    OstinatoError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...registry import Half, seeded
from ...sharing import AVAILABLE, check_ring, check_rows, ids_of, make, reserve, ring_of, rows
from .refusals import refuses

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("way", ["made", "prefetch", "memory", "files", "load", "load of shared"])
def test_one_process_alone_meets_no_difference(way, ranked, tmp_path, monkeypatch):
    """Sizes of batches around the capacity, more rows than fit, and one row at a time: same slots, rows and draws.

    So it is in a buffer that is shared after it was used, and after loads of private and shared buffers.
    """
    monkeypatch.setattr("ostinato.storages.shared._ROWS_AT_ONCE", 7)  # rows are copied by the block
    late, prefetch = way in {"memory", "files"}, 2 if way == "prefetch" else None
    storage = LazyMemmapStorage if way == "files" else LazyTensorStorage
    private, shared = both = [
        make_saved(shared=one and not late, ranked=ranked, storage=storage(50), capacity=50, prefetch=prefetch)
        for one in (False, True)
    ]
    sources = {"made": (), "prefetch": (), "load": (private,), "load of shared": (shared,)}
    for rb in sources.get(way, both):
        fill(rb, 64 if ranked else 33)
        rb.sample()
    if late:
        shared.share()
    elif way == "load":
        private.dumps(tmp_path / "saved")
        shared.loads(tmp_path / "saved")
    elif way == "load of shared":
        private.load_state_dict(shared.state_dict())
    of_this_life = [] if way in {"made", "prefetch"} else ["index_generation"]
    number = 0
    for size in (30, 1, 7, 50, 3, 120, 1):
        batch = rows(range(number, number + size))
        number += size
        assert torch.equal(private.extend(batch), shared.extend(batch))
        if prefetch and size != 30:
            continue  # batches made ahead may have been read before the rows were written
        for _ in range(3):
            (mine, told), (other, info) = (rb.sample(return_info=True) for rb in both)
            assert torch.equal(mine["id"], other["id"])
            check_rows(other)
            assert told.keys() == info.keys()
            assert all(torch.equal(told[key], info[key]) for key in told if key not in of_this_life)
            if ranked:
                new = torch.rand(8)
                private.update_priority(told, new)
                shared.update_priority(info, new)
                assert torch.equal(private.sampler.priorities, shared.sampler.priorities)  # type: ignore[attr-defined]
    if prefetch:
        assert shared.sample(return_info=True)[1]["stale"].all()
        assert shared.stats().stale_rows == 8
    else:
        same_counts(private, shared, "rows", "capacity", "rows_drawn", "stale_updates", "draws_per_insert")
        assert torch.equal(private[torch.tensor([3, 3, 1])]["wide"], shared[torch.tensor([3, 3, 1])]["wide"])
        assert torch.equal(private["id"], shared["id"])
        assert private.cursor == shared.cursor
    check_ring(shared)
    shared.empty()
    assert (len(shared), shared.write_count) == (0, 0)
    with pytest.raises(EmptyBufferError):
        shared.sample()
    shared.extend(rows(range(10, 12)))
    assert set(shared.sample()["id"].tolist()) == {10, 11}
    check_ring(shared)


def same_counts(one: ReplayBuffer, other: ReplayBuffer, *names: str) -> None:
    for name in ("rows_written", "row_age_mean", *names):
        assert getattr(one.stats(), name) == getattr(other.stats(), name), name


def test_rows_bring_their_priorities_and_late_ones_fall_out():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(20), batch_size=8, shared=True, priority_key="p"
    )
    sampler: Any = rb.sampler
    rb.extend(TensorDict({"id": torch.arange(20), "p": torch.arange(20).float()}, [20]))
    assert sampler.priorities.tolist() == list(range(20))
    batch = rb.sample()
    rb.extend(TensorDict({"id": torch.arange(20, 40), "p": torch.ones(20)}, [20]))
    batch["p"] = torch.full((8,), 50.0)
    rb.update_tensordict_priority(batch)
    assert (sampler.priorities.tolist(), rb.stats().stale_updates) == ([1.0] * 20, 8)
    rb.update_priority([0, 4], [2.0, 3.0])
    assert sampler.priorities.tolist() == [2.0, 1.0, 1.0, 1.0, 3.0] + [1.0] * 15
    check_ring(rb)


def test_reading_waits_for_no_row_and_gives_none_that_is_open():
    rb = make(8, fill=8, ranked=True)
    ring, sampler = ring_of(rb), rb.sampler
    reserve(rb, 4)
    rb.update_priority(torch.arange(8), 3.0)  # a slot without a row takes none
    assert sampler.priorities.tolist() == [0.0] * 4 + [3.0] * 4  # type: ignore[attr-defined]
    assert len(rb) == 4
    with pytest.raises(SlotError, match=r"the slots \[2\] do not hold a complete row"):
        rb.storage[2]
    ring.abandon()
    ring.abandon()  # a second time changes nothing
    assert min(rb.sample()["id"].tolist()) >= 4
    rb.extend(rows(range(100, 103)))
    assert sorted(ids_of(rb)) == [7, 100, 101, 102]
    check_ring(rb)


def test_a_failed_copy_gives_its_slots_back():
    rb = make(8, fill=4)
    storage: Any = rb.storage

    def fail(*_: Any) -> None:
        msg = "no"
        raise ValueError(msg)

    storage.write = fail
    with pytest.raises(ValueError, match="no"):
        rb.extend(rows(range(10, 13)))
    del storage.write
    assert ids_of(rb) == [0, 1, 2, 3]
    rb.extend(rows(range(20, 24)))
    assert ids_of(rb) == [21, 22, 23, 3, 20]
    check_ring(rb)


class Private(Half):
    shareable = False


REFUSED: list[Any] = [
    ("needs storage=LazyTensorStorage", {"storage": ListStorage(8)}),
    ("needs storage=LazyTensorStorage", {"storage": lambda: TensorStorage(torch.zeros(8))}),
    ("got one with ndim=2", {"storage": LazyTensorStorage(8, ndim=2)}),
    ("got one with single_copy", {"storage": LazyTensorStorage(8, single_copy=True)}),
    ("the kind Private, whose shareable is False", {"storage": LazyTensorStorage(8, kinds={"x": Private()})}),
    ("got one with device='meta'", {"storage": LazyTensorStorage(8, device="meta")}),
    ("takes the samplers", {"sampler": SamplerWithoutReplacement()}),
    ("max_priority_within_buffer", {"sampler": PrioritizedSampler(8, 1.0, 1.0, max_priority_within_buffer=True)}),
    ("max_capacity=4", {"sampler": PrioritizedSampler(4, 1.0, 1.0)}),
    ("takes the writer RoundRobinWriter", {"writer": ReservoirWriter()}),
    ("does not track episodes", {"sample_unit": NStep(2, gamma=0.9)}),
    ("does not track episodes", {"episodes": Episodes(end_key="done")}),
]


def test_what_does_not_go_together_is_refused():
    for words, options in REFUSED:
        with pytest.raises(OptionError, match=words):
            ReplayBuffer(**{"storage": LazyTensorStorage(8), "shared": True, **options})


def test_what_it_cannot_do_changes_nothing():
    rb = make(8, fill=3, ranked=True)
    state = rb.sampler.state_dict()
    refuses(
        {
            OstinatoError: {
                "edited in place": (
                    lambda: rb.__setitem__(0, rows([1])),
                    lambda: rb.set_at_("id", torch.tensor(1), 0),
                ),
                "shared=True cannot exchange its": (
                    lambda: rb.set_sampler(RandomSampler()),
                    lambda: rb.set_writer(rb.writer),
                    lambda: rb.set_storage(LazyTensorStorage(3)),
                ),
                "alpha of a shared buffer": lambda: setattr(rb.sampler, "alpha", 0.1),
                "load into the buffer": lambda: rb.sampler.load_state_dict(state),
                "belong to one process": lambda: ReplayBufferEnsemble(rb),
                "out of range": lambda: rb[7],
            },
            SchemaError: {
                "rows must have the keys": lambda: rb.extend({"id": torch.zeros(2)}),
            },
            UsageError: {
                "an argument of multiprocessing": lambda: pickle.dumps(rb),
            },
        }
    )
    assert ids_of(rb) == [0, 1, 2]
    check_ring(rb)


def make_saved(*, shared: bool, ranked: bool, capacity: int = 20, alpha: float = 0.7, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, alpha, 0.5, 1e-3) if ranked else RandomSampler()
    generator = seeded(4)
    options = {"storage": LazyTensorStorage(capacity), "batch_size": 8, "generator": generator, **options}
    return ReplayBuffer(sampler=sampler, shared=shared, **options)


def fill(rb: ReplayBuffer, count: int) -> None:
    for i in range(0, count, 7):
        rb.extend(rows(range(i, min(i + 7, count))))
    if rb.sampler.prioritized:
        rb.update_priority(torch.arange(len(rb)), torch.linspace(0.1, 2.0, len(rb)))


@pytest.mark.parametrize("ranked", [False, True], ids=["uniform", "prioritized"])
def test_rows_that_are_not_whole_are_left_out(ranked):
    old, new, other = (make_saved(shared=shared, ranked=ranked) for shared in (True, True, False))
    fill(old, 26)
    reserve(old, 4)
    state = old.state_dict()
    ring_of(old).abandon()
    for rb in (new, other):
        rb.load_state_dict(state)
        assert rb[:]["id"].tolist() == list(range(10, 26))
    if ranked:
        assert sorted(old.sampler.priorities.tolist())[4:] == sorted(new.sampler.priorities.tolist())  # type: ignore[attr-defined]
    check_ring(new)
    check_rows(other.sample())


def test_rows_replaced_while_they_are_copied_are_copied_again():
    rb = make(8, fill=8, ranked=True)
    storage, copy_rows = rb.storage, rb.storage.gather
    changes: list[Callable[[], Any]] = []

    def gather(slots: torch.Tensor, **options: Any) -> Any:
        found = copy_rows(slots, **options)
        if changes:
            changes.pop(0)()
        return found

    storage.gather = gather  # type: ignore[method-assign]
    changes.append(lambda: rb.extend(rows(range(100, 105))))
    batch, info = rb.sample(return_info=True)
    check_rows(batch)
    assert torch.equal(batch["id"], info["index"] + torch.where(info["index"] < 5, 100, 0))
    changes.append(lambda: reserve(rb, 6))
    _, info = rb.sample(return_info=True)
    assert set(info["index"].tolist()) == {3, 4}  # the slots 5, 6, 7, 0, 1 and 2 hold no whole row
    assert rb.stats().redone_gathers == 2
    ring_of(rb).abandon()


def test_what_does_not_fit_changes_nothing(tmp_path):
    def filled(count: int, **options: Any) -> ReplayBuffer:
        other = make_saved(**{"shared": False, "ranked": True, **options})
        fill(other, count)
        other.sample()
        return other

    rb, fitting, narrow = filled(12, shared=True), filled(20), make_saved(shared=False, ranked=True)
    narrow.extend({"id": torch.arange(3)})
    cases: list[Any] = [
        (filled(30, ranked=False).state_dict(), "sampler is a RandomSampler"),
        (filled(30, capacity=40).state_dict(), "room for 20"),
        (filled(30, alpha=0.5).state_dict(), "alpha=0.5"),
        (filled(30, prefetch=2).state_dict(), "queued draws"),
        (narrow.state_dict(), "load into a buffer with the same schema"),
        ({**fitting.state_dict(), "rows_written": "x"}, "rows_written must be an integer"),
    ]
    for state, words in cases:
        with pytest.raises(CheckpointError, match=words):
            rb.load_state_dict(state)
    reserve(rb, 2)
    with pytest.raises(UsageError):
        rb.load_state_dict(fitting.state_dict())
    ring_of(rb).abandon()
    fitting.dumps(tmp_path / "saved")
    data = next(path for path in sorted((tmp_path / "saved").rglob("*")) if path.suffix == ".bin")
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    with pytest.raises(DamagedFileError):
        rb.loads(tmp_path / "saved")
    assert ids_of(rb) == list(range(12))
    check_ring(rb)
