"""Shared buffers within one process: they do what private ones do, or raise, and save the same checkpoints."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
)
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    EmptyBufferError,
    OptionError,
    OstinatoError,
    PriorityError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...sharing import AVAILABLE, check_ring, check_rows, ids_of, make, ring_of, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")


def pair(capacity: int, *, ranked: bool, **options: Any) -> list[ReplayBuffer]:
    """A private buffer and a shared one, of the same seed."""
    return [
        ReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=PrioritizedSampler(capacity, 0.7, 0.5, 1e-3) if ranked else RandomSampler(),
            generator=torch.Generator().manual_seed(3),
            batch_size=16,
            shared=shared,
            **options,
        )
        for shared in (False, True)
    ]


@pytest.mark.parametrize("ranked", [False, True])
def test_prefetch_keeps_the_sequence(ranked: bool) -> None:
    private, shared = pair(50, ranked=ranked, prefetch=2)
    for rb in (private, shared):
        rb.extend(rows(range(70)))
    for _ in range(6):
        (mine, _), (other, info) = (rb.sample(return_info=True) for rb in (private, shared))
        assert torch.equal(mine["id"], other["id"])
    assert not info["stale"].any()
    until = time.monotonic() + 60
    while shared.stats().prefetch_ready < 2 and time.monotonic() < until:
        time.sleep(0.001)
    shared.extend(rows(range(100, 150)))
    info = shared.sample(return_info=True)[1]
    assert info["stale"].all()
    assert shared.stats().stale_rows == 16
    shared.empty()
    with pytest.raises(EmptyBufferError):
        shared.sample()


@pytest.mark.parametrize("ranked", [False, True])
def test_one_process_alone_meets_no_difference(ranked: bool) -> None:
    """Sizes of batches around the capacity, more rows than fit, and one row at a time: same slots, rows and draws."""
    private, shared = pair(50, ranked=ranked)
    number = 0
    for size in (1, 7, 30, 12, 50, 3, 120, 49, 1):
        batch = rows(range(number, number + size))
        number += size
        assert torch.equal(private.extend(batch), shared.extend(batch))
        assert len(private) == len(shared)
        for _ in range(3):
            (mine, told), (other, info) = (rb.sample(return_info=True) for rb in (private, shared))
            assert torch.equal(mine["id"], other["id"])
            check_rows(other)
            assert told.keys() == info.keys()
            assert all(torch.equal(told[key], info[key]) for key in told)
            if ranked:
                new = torch.rand(16)
                for rb, has in ((private, told), (shared, info)):
                    rb.update_priority(has["index"], new, has["index_generation"])
                assert torch.equal(private.sampler.priorities, shared.sampler.priorities)  # type: ignore[attr-defined]
    one_row = {key: value[0] for key, value in rows([9]).items()}
    assert private.add(one_row) == shared.add(one_row)
    one, two = private.stats(), shared.stats()
    for name in ("rows", "capacity", "rows_written", "rows_drawn", "row_age_mean", "stale_updates", "draws_per_insert"):
        assert getattr(one, name) == getattr(two, name), name
    assert torch.equal(private[:]["id"], shared[:]["id"])
    assert torch.equal(private[torch.tensor([3, 3, 1])]["wide"], shared[torch.tensor([3, 3, 1])]["wide"])
    assert torch.equal(private["id"], shared["id"])
    assert private.cursor == shared.cursor
    check_ring(shared)


def test_rows_bring_their_priorities_and_late_ones_fall_out() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(20), batch_size=8, shared=True, priority_key="p"
    )
    rb.extend(TensorDict({"id": torch.arange(20), "p": torch.arange(20).float()}, [20]))
    assert rb.sampler.priorities.tolist() == list(range(20))  # type: ignore[attr-defined]
    batch = rb.sample()
    rb.extend(TensorDict({"id": torch.arange(20, 40), "p": torch.ones(20)}, [20]))
    batch["p"] = torch.full((8,), 50.0)
    rb.update_tensordict_priority(batch)
    assert rb.sampler.priorities.tolist() == [1.0] * 20  # type: ignore[attr-defined]
    assert rb.stats().stale_updates == 8
    with pytest.raises(PriorityError, match="at the positions"):
        rb.update_priority(torch.arange(3), torch.tensor([1.0, -1.0, float("nan")]))
    with pytest.raises(SlotError, match="index 20 is out of range"):
        rb.update_priority(torch.tensor([0, 20]), 2.0)
    with pytest.raises(SlotError, match="index -1 is out of range"):
        rb.update_priority(torch.tensor([0, -1, 4]), torch.tensor([2.0, 9.0, 3.0]))
    rb.update_priority(torch.tensor([0, 4]), torch.tensor([2.0, 3.0]))
    assert rb.sampler.priorities.tolist() == [2.0, 1.0, 1.0, 1.0, 3.0] + [1.0] * 15  # type: ignore[attr-defined]
    check_ring(rb)


def test_a_slot_without_a_row_takes_no_priority() -> None:
    rb = make(8, ranked=True, fill=8)
    ring = ring_of(rb)
    serial, _ = ring.reserve(4)
    rb.update_priority(torch.arange(8), 3.0)
    assert rb.sampler.priorities.tolist() == [0.0] * 4 + [3.0] * 4  # type: ignore[attr-defined]
    ring.abandon(serial)
    check_ring(rb)
    assert min(rb.sample()["id"].tolist()) >= 4


def test_reading_waits_for_no_row_and_gives_none_that_is_open() -> None:
    rb = make(8, fill=8)
    ring = ring_of(rb)
    serial, _ = ring.reserve(8)
    assert len(rb) == 0
    with pytest.raises(EmptyBufferError):
        rb.sample()
    with pytest.raises(SlotError, match=r"the slots \[2\] do not hold a complete row"):
        rb.storage[2]
    ring.abandon(serial)
    ring.abandon(serial)  # a second time changes nothing
    rb.extend(rows(range(100, 103)))
    assert set(rb.sample()["id"].tolist()) == {100, 101, 102}
    check_ring(rb)


def test_a_failed_copy_gives_its_slots_back() -> None:
    rb = make(8, fill=4)
    storage: Any = rb.storage

    def fail(*_: Any) -> None:
        msg = "no"
        raise ValueError(msg)

    storage._inner.write = fail
    with pytest.raises(ValueError, match="no"):
        rb.extend(rows(range(10, 13)))
    del storage._inner.write
    assert ids_of(rb) == [0, 1, 2, 3]
    rb.extend(rows(range(20, 24)))
    assert ids_of(rb) == [21, 22, 23, 3, 20]
    check_ring(rb)


def test_threads_write_and_sample_it_too() -> None:
    rb = make(200, ranked=True, fill=200, width=400)
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(write: bool, first: int) -> None:
        try:
            while not stop.is_set():
                if write:
                    rb.extend(rows(range(first, first + 40), 400))
                    continue
                batch, info = rb.sample(return_info=True)
                check_rows(batch)
                rb.update_priority(info["index"], torch.rand(32) + 0.1, info["index_generation"])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i < 2, 1000 * i)) for i in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(0.7)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failed
    check_ring(rb)


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy])
def test_it_is_never_copied_by_accident(way: Callable[[Any], Any]) -> None:
    rb = make(8, fill=3)
    with pytest.raises(UsageError, match="an argument of multiprocessing"):
        way(rb)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("needs storage=LazyTensorStorage", {"storage": ListStorage(8)}),
    ("needs storage=LazyTensorStorage", {"storage": lambda: TensorStorage(torch.zeros(8))}),
    ("got one with ndim=2", {"storage": LazyMemmapStorage(8, ndim=2)}),
    ("needs storage=LazyTensorStorage", {"storage": None}),
    ("got one with ndim=2", {"storage": LazyTensorStorage(8, ndim=2)}),
    ("got one with single_copy", {"storage": LazyTensorStorage(8, single_copy=True)}),
    ("got one with device='auto'", {"storage": LazyTensorStorage(8, device="auto")}),
    ("got one with device='meta'", {"storage": LazyTensorStorage(8, device="meta")}),
    ("takes the samplers", {"sampler": SamplerWithoutReplacement()}),
    ("takes the samplers", {"sampler": SliceSampler(slice_len=2)}),
    ("max_priority_within_buffer", {"sampler": PrioritizedSampler(8, 1.0, 1.0, max_priority_within_buffer=True)}),
    ("max_capacity=4", {"sampler": PrioritizedSampler(4, 1.0, 1.0)}),
    ("takes the writer RoundRobinWriter", {"writer": ReservoirWriter()}),
    ("does not track episodes", {"sample_unit": NStep(2, gamma=0.9)}),
    ("does not track episodes", {"sample_unit": FrameStack(2, ["obs"])}),
    ("does not track episodes", {"episodes": Episodes(end_key="done")}),
]


@pytest.mark.parametrize(("words", "options"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_what_does_not_go_together_is_refused(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=words):
        ReplayBuffer(**{"storage": LazyTensorStorage(8), "shared": True, **options})


CALLS: dict[str, tuple[Callable[[ReplayBuffer], Any], str]] = {
    "edit": (lambda rb: rb.__setitem__(0, rows([1])), "edited in place"),
    "set_at_": (lambda rb: rb.set_at_("id", torch.tensor(1), 0), "edited in place"),
    "update_": (lambda rb: rb.update_({"id": torch.zeros(3)}), "edited in place"),
    "set_sampler": (lambda rb: rb.set_sampler(RandomSampler()), "other processes have them too"),
    "set_writer": (lambda rb: rb.set_writer(rb.writer), "other processes have them too"),
    "set_storage": (lambda rb: rb.set_storage(LazyTensorStorage(3)), "other processes have them too"),
    "storage state": (lambda rb: rb.storage.state_dict(), "saved with the buffer"),
    "storage edit": (lambda rb: rb.storage.prepare_edit(torch.tensor([0]), rows([1]), (1,)), "edited in place"),
    "alpha": (lambda rb: setattr(rb.sampler, "alpha", 0.1), "alpha of a shared buffer"),
    "sampler state": (lambda rb: rb.sampler.load_state_dict(rb.sampler.state_dict()), "load into the buffer"),
    "ensemble": (lambda rb: ReplayBufferEnsemble(rb), "belong to one process"),
    "schema": (lambda rb: rb.extend({"id": torch.zeros(2)}), "rows must have the keys"),
    "index": (lambda rb: rb[7], "out of range"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_it_cannot_do_changes_nothing(name: str) -> None:
    rb = make(8, fill=3, ranked=True)
    call, words = CALLS[name]
    with pytest.raises((OstinatoError, SchemaError), match=words):
        call(rb)
    assert ids_of(rb) == [0, 1, 2]
    check_ring(rb)


def test_beta_is_each_process_its_own_and_empty_keeps_the_form() -> None:
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), batch_size=4, shared=True)
    rb.extend(rows(range(4)))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rb.sampler.beta = 0.0  # type: ignore[attr-defined]
    assert rb.sample(return_info=True)[1]["priority_weight"].tolist() == [1.0] * 4
    rb.empty()
    assert (len(rb), rb.write_count) == (0, 0)
    assert rb.sampler.default_priority == 1.0
    with pytest.raises(EmptyBufferError):
        rb.sample()
    with pytest.raises(SchemaError):
        rb.extend({"other": torch.zeros(3)})
    rb.extend(rows(range(10, 12)))
    assert set(rb.sample()["id"].tolist()) <= {10, 11}
    check_ring(rb)


RANKED = pytest.mark.parametrize("ranked", [False, True], ids=["uniform", "prioritized"])


def make_saved(*, shared: bool, ranked: bool, capacity: int = 20, alpha: float = 0.7, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, alpha, 0.5, 1e-3) if ranked else RandomSampler()
    generator = torch.Generator().manual_seed(4)
    storage = LazyTensorStorage(capacity)
    options = {"batch_size": 8, "generator": generator, **options}
    return ReplayBuffer(storage=storage, sampler=sampler, shared=shared, **options)


def fill(rb: ReplayBuffer, count: int) -> None:
    for i in range(0, count, 7):
        rb.extend(rows(range(i, min(i + 7, count))))
    if rb.sampler.prioritized:
        rb.update_priority(torch.arange(len(rb)), torch.rand(len(rb)) + 0.1)


@RANKED
@pytest.mark.parametrize("count", [0, 5, 20, 33])
@pytest.mark.parametrize("way", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("files", [True, False])
def test_sampling_goes_on_bit_for_bit(
    tmp_path: Path, way: tuple[bool, bool], count: int, ranked: bool, files: bool
) -> None:
    old, new = (make_saved(shared=shared, ranked=ranked) for shared in way)
    if count:
        fill(old, count)
        old.sample()
    if files:
        old.dumps(tmp_path / "saved")
        new.loads(tmp_path / "saved")
    else:
        new.load_state_dict(old.state_dict())
    assert len(new) == len(old) == min(count, 20)
    if not count:
        return
    for name in ("rows_written", "rows_drawn", "row_age_mean"):
        assert getattr(new.stats(), name) == getattr(old.stats(), name)
    for i in range(6):
        one, two = old.sample(), new.sample()
        check_rows(two)
        assert torch.equal(one["id"], two["id"])
        for rb in (old, new):
            rb.extend(rows(range(100 + 3 * i, 103 + 3 * i)))
    assert torch.equal(old[:]["id"], new[:]["id"])


@RANKED
def test_rows_that_are_not_whole_are_left_out(ranked: bool) -> None:
    old, new, other = (make_saved(shared=shared, ranked=ranked) for shared in (True, True, False))
    fill(old, 26)
    serial, _ = ring_of(old).reserve(4)
    state = old.state_dict()
    ring_of(old).abandon(serial)
    for rb in (new, other):
        rb.load_state_dict(state)
        assert rb[:]["id"].tolist() == list(range(10, 26))
    if ranked:
        assert sorted(old.sampler.priorities.tolist())[4:] == sorted(new.sampler.priorities.tolist())  # type: ignore[attr-defined]
    check_ring(new)
    check_rows(other.sample())


def test_queued_draws_are_as_if_never_made() -> None:
    old, new, plain = (make_saved(shared=True, ranked=False, prefetch=depth) for depth in (3, None, None))
    for rb in (old, plain):
        fill(rb, 20)
        rb.sample()
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.sample()["id"], plain.sample()["id"])


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    rb = make_saved(shared=True, ranked=True)
    fill(rb, 12)
    cases: list[tuple[ReplayBuffer, str]] = [
        (make_saved(shared=False, ranked=False), "sampler is a RandomSampler"),
        (make_saved(shared=False, ranked=True, capacity=40), "room for 20"),
        (make_saved(shared=False, ranked=True, alpha=0.5), "alpha=0.5"),
        (make_saved(shared=False, ranked=True, prefetch=2), "queued draws"),
    ]
    for other, words in cases:
        fill(other, 30)
        other.sample()
        with pytest.raises(CheckpointError, match=words):
            rb.load_state_dict(other.state_dict())
    other = make_saved(shared=False, ranked=True)
    other.extend({"id": torch.arange(3)})
    with pytest.raises(CheckpointError, match="load into a buffer with the same schema"):
        rb.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="not the state of a replay buffer"):
        rb.load_state_dict({"storage": {}})
    assert ids_of(rb) == list(range(12))
    fill(other := make_saved(shared=False, ranked=True), 20)
    serial, _ = ring_of(rb).reserve(2)
    with pytest.raises(UsageError, match="while no process writes"):
        rb.load_state_dict(other.state_dict())
    ring_of(rb).abandon(serial)
    assert ids_of(rb) == list(range(12))
    other.dumps(tmp_path / "saved")
    data = next(path for path in sorted((tmp_path / "saved").rglob("*")) if path.suffix == ".bin")
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    with pytest.raises(DamagedFileError):
        rb.loads(tmp_path / "saved")
    assert ids_of(rb) == list(range(12))
    check_ring(rb)
