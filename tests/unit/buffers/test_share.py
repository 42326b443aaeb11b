"""Buffers that begin to be shared: by `share()`, or when one in files is passed to a process that is being started."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from ostinato.errors import KindError, MissingFileError, OptionError, SchemaError, UsageError
from ostinato.storages import shared as shared_storage

from ...sharing import AVAILABLE, check_ring, check_rows, die, end, ids_of, make, rows, start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato import Storage

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")

KINDS: dict[str, Callable[..., Storage]] = {"memory": LazyTensorStorage, "files": LazyMemmapStorage}
KIND = pytest.mark.parametrize("kind", KINDS)


def is_shared(rb: ReplayBuffer) -> bool:
    return rb.shared


def private(kind: str, capacity: int, *, ranked: bool = False, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, 0.7, 0.5, 1e-3) if ranked else RandomSampler()
    generator = torch.Generator().manual_seed(3)
    options = {"batch_size": 8, "generator": generator, **options}
    return ReplayBuffer(storage=KINDS[kind](capacity), sampler=sampler, **options)


@KIND
@pytest.mark.parametrize("ranked", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("count", [0, 5, 20, 33])
def test_share_keeps_rows_slots_draws_and_priorities(kind: str, ranked: bool, count: int) -> None:
    mine, other = private(kind, 20, ranked=ranked), private(kind, 20, ranked=ranked)
    for rb in (mine, other):
        if count:
            rb.extend(rows(range(count)))
            rb.sample()
        if count and ranked:
            rb.update_priority(torch.arange(5), torch.linspace(0.5, 3, 5))
    assert not is_shared(mine)
    assert mine.share() is mine
    assert is_shared(mine)
    assert mine.share() is mine  # a second call changes nothing
    assert len(mine) == len(other)
    for size in (3, 20, 1):
        assert torch.equal(mine.extend(rows(range(100, 100 + size))), other.extend(rows(range(100, 100 + size))))
        assert (mine.cursor, mine.write_count, len(mine)) == (other.cursor, other.write_count, len(other))
        assert torch.equal(mine[:]["wide"], other[:]["wide"])
        for _ in range(3):
            assert torch.equal(mine.sample()["id"], other.sample()["id"])
        if ranked:
            assert torch.equal(mine.sampler.priorities, other.sampler.priorities)  # type: ignore[attr-defined]
    assert mine.stats().rows_written == other.stats().rows_written
    check_ring(mine)


def test_draws_made_ahead_are_dropped() -> None:
    mine, other = private("files", 20, prefetch=2), private("files", 20)
    for rb in (mine, other):
        rb.extend(rows(range(5)))
        rb.sample()
    mine.share()
    for rb in (mine, other):
        rb.extend(rows(range(5, 15)))
    assert torch.equal(mine.sample()["id"], other.sample()["id"])


def test_more_rows_than_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.buffers.shared._ROWS_AT_ONCE", 7)
    rb = private("memory", 20)
    rb.extend(rows(range(33)))
    before = rb[:]["id"].clone()
    assert torch.equal(rb.share()[:]["id"], before)
    check_rows(rb[:])


@KIND
def test_an_emptied_buffer_takes_the_schema_of_its_next_rows(kind: str) -> None:
    rb = private(kind, 20)
    rb.extend({"example": torch.zeros(1)})
    rb.empty()
    rb.share().extend(rows(range(5)))
    check_rows(rb.sample())


PARTS: list[tuple[str, dict[str, Any]]] = [
    ("takes the samplers", {"sampler": SliceSampler(slice_len=2, end_key="id")}),
    ("takes the samplers", {"sampler": SamplerWithoutReplacement()}),
    ("does not track episodes", {"sample_unit": NStep(2, gamma=0.9)}),
    ("version_key", {"version_key": "id"}),
    ("needs storage=LazyTensorStorage", {"storage": ListStorage(8)}),
    ("needs storage=LazyTensorStorage", {"storage": TensorStorage(rows(range(8)))}),
    ("ndim=2", {"storage": LazyMemmapStorage(8, ndim=2)}),
    ("single_copy", {"storage": LazyTensorStorage(8, single_copy=True)}),
]


@pytest.mark.parametrize(("words", "options"), PARTS, ids=range(len(PARTS)))
def test_what_cannot_be_shared_stays_as_it_is(words: str, options: dict[str, Any]) -> None:
    rb = ReplayBuffer(**{"storage": LazyMemmapStorage(8), **options})
    before = rb.storage
    with pytest.raises(OptionError, match=words):
        rb.share()
    assert rb.storage is before
    assert not is_shared(rb)


def test_objects_late_fields_and_a_moved_cursor_are_not_shared() -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(8))
    rb.extend({"id": torch.arange(4), "text": list("abcd")})
    with pytest.raises(OptionError, match="text or other non-tensor fields"):
        rb.share()
    rb = private("files", 8)
    rb.extend(rows(range(4)))
    rb[:2] = {**rb[:2], "late": torch.ones(2)}
    with pytest.raises(OptionError, match="fields added later"):
        rb.share()
    assert rb[:2]["late"].tolist() == [1, 1]
    rb = private("memory", 8)
    rb.extend(rows(range(4)))
    rb._engine.move_cursor(2)
    with pytest.raises(UsageError, match="the cursor was moved to 2 of 4 rows"):
        rb.share()
    rb = private("files", 8).share()
    with pytest.raises(KindError, match="cannot share Python objects"):
        rb.extend({"id": torch.arange(4), "text": list("abcd")})
    rb.extend(rows(range(3)))  # the rows that were refused define nothing
    assert ids_of(rb) == [0, 1, 2]


def test_a_shared_buffer_stays_shared() -> None:
    assert not private("files", 8).share(False).shared
    with pytest.raises(UsageError, match="stays shared"):
        private("files", 8).share().share(False)


@KIND
def test_shared_init_shares_from_the_start(kind: str) -> None:
    rb = ReplayBuffer(storage=KINDS[kind](8, shared_init=True))
    assert is_shared(rb)
    late = ReplayBuffer(storage=lambda: KINDS[kind](8), delayed_init=True).share()
    assert is_shared(late)
    assert not late.initialized
    late.extend(rows(range(3)))
    assert is_shared(late)


# -- passed to a process -----------------------------------------------------------------------------------------------


def play(rb: ReplayBuffer, pipe: Any) -> None:
    torch.set_num_threads(1)
    rb.extend(rows(range(10, 20)))
    pipe.send(len(rb))
    pipe.recv()
    pipe.send((len(rb), rb.cursor, rb[:]["id"].tolist()))


@pytest.mark.parametrize("given", [False, True], ids=["temporary", "directory"])
def test_a_buffer_in_files_is_shared_with_a_process_that_is_started(given: bool, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(21, scratch_dir=tmp_path / "files" if given else None), batch_size=4)
    rb.extend(rows(range(10)))
    mine, other = multiprocessing.get_context("spawn").Pipe()
    child = start(play, rb, other, method="spawn")
    assert is_shared(rb)
    assert mine.recv() == 20
    assert len(rb) == 20
    assert rb[:]["id"].tolist() == list(range(20))
    assert rb.extend(rows(range(20, 30))).tolist() == [20, *range(9)]
    mine.send("written")
    assert mine.recv() == (21, 9, [*range(21, 30), *range(9, 20), 20])
    end(child)
    check_rows(rb.sample())


def at_a_start(rb: ReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.buffers.lifecycle.get_spawning_popen", object)
    pickle.dumps(rb)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("Cannot share a storage of type ListStorage", {"storage": ListStorage(8)}),
    ("type TensorDictMaxValueWriter cannot be shared between processes", {"writer": TensorDictMaxValueWriter("id")}),
    ("type PrioritizedSampler cannot be shared", {"sampler": PrioritizedSampler(8, 0.7, 0.5)}),
    ("type SliceSampler cannot be shared", {"sampler": SliceSampler(slice_len=2, end_key="id")}),
    ("does not track episodes", {"sample_unit": NStep(1, gamma=0.9), "fill": True}),
    ("it has not been initialized yet", {}),
]


@pytest.mark.parametrize(("words", "options"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_passed_raises_a_runtime_error(
    words: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"storage": LazyMemmapStorage(8), **options}
    fill = options.pop("fill", False)
    rb = ReplayBuffer(**options)
    if fill:
        rb.extend({"reward": torch.ones(4), "done": torch.zeros(4, dtype=torch.bool)})
    with pytest.raises(RuntimeError, match=words):
        at_a_start(rb, monkeypatch)
    assert not is_shared(rb)


def test_rows_in_private_memory_are_copied_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = private("memory", 8)
    rb.extend(rows(range(3)))
    at_a_start(rb, monkeypatch)
    assert not is_shared(rb)


def write_or_say(rb: ReplayBuffer, pipe: Any) -> None:
    try:
        rb.extend(rows(range(5)))
    except UsageError as error:
        pipe.send(str(error))
    else:
        pipe.send("written")


def test_a_forked_child_does_not_write_to_files_that_are_not_shared() -> None:
    rb = private("files", 8)
    rb.extend(rows(range(7)))
    mine, other = multiprocessing.get_context("fork").Pipe()
    end(start(write_or_say, rb, other))
    assert "call rb.share() before the fork" in mine.recv()
    assert rb[:]["id"].tolist() == list(range(7))
    end(start(write_or_say, rb.share(), other))
    assert mine.recv() == "written"
    assert rb[:]["id"].tolist() == [1, 2, 3, 4, 4, 5, 6, 0]


def test_a_pickle_of_a_buffer_in_files_is_a_copy() -> None:
    rb = private("files", 8)
    rb.extend(rows(range(3)))
    other = pickle.loads(pickle.dumps(rb))
    assert not is_shared(rb)
    assert not is_shared(other)
    other.extend(rows(range(3)))
    assert len(rb) == 3


# -- the first rows ----------------------------------------------------------------------------------------------------


def write_first(rb: ReplayBuffer, first: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.recv()
    try:
        rb.extend(rows(range(first, first + 40)))
    except SchemaError as error:
        pipe.send(str(error))
    else:
        pipe.send(rb.sample()["id"].tolist())


@KIND
@pytest.mark.parametrize("ranked", [False, True])
def test_whichever_process_writes_first_defines_the_schema(kind: str, ranked: bool) -> None:
    rb = private(kind, 400, ranked=ranked).share()
    pipes = [multiprocessing.get_context("fork").Pipe() for _ in range(4)]
    children = [start(write_first, rb, 100 * i, other) for i, (_, other) in enumerate(pipes)]
    assert rb.storage.schema is None
    for mine, _ in pipes:
        mine.send("now")
    drawn = [mine.recv() for mine, _ in pipes]
    for child in children:
        end(child)
    assert sorted(ids_of(rb)) == [100 * i + j for i in range(4) for j in range(40)]
    assert len({tuple(ids) for ids in drawn}) == 4  # each process draws with a seed of its own
    check_ring(rb)
    check_rows(rb.sample())
    with pytest.raises(SchemaError):
        rb.extend({"other": torch.zeros(1)})


def die_allocating(rb: ReplayBuffer, how: str, pipe: Any) -> None:
    storage: Any = rb.storage
    if how == "begun":
        shared_storage.Segment.publish = lambda *_: die()  # type: ignore[method-assign]
        rb.extend(rows(range(5), 700))
    with storage._segment.alone():
        pipe.send("alone")
        if how == "dies":
            time.sleep(0.2)
            die()
        os.kill(os.getpid(), signal.SIGSTOP)


@KIND
@pytest.mark.parametrize("how", ["begun", "dies"])
def test_a_process_that_dies_while_it_allocates_blocks_nobody(kind: str, how: str) -> None:
    rb = private(kind, 100).share()
    mine, other = multiprocessing.get_context("fork").Pipe()
    child = start(die_allocating, rb, how, other)
    if how == "dies":
        mine.recv()
    else:
        end(child, -signal.SIGKILL)
    rb.extend(rows(range(5)))
    assert ids_of(rb) == list(range(5))
    check_rows(rb.sample())
    check_ring(rb)
    if how == "dies":
        end(child, -signal.SIGKILL)


def test_a_process_that_stops_while_it_allocates_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "_LAYOUT_WAIT_S", 0.2)
    rb = private("memory", 100).share()
    mine, other = multiprocessing.get_context("fork").Pipe()
    child = start(die_allocating, rb, "stops", other)
    mine.recv()
    with pytest.raises(UsageError, match="another process has been allocating"):
        rb.extend(rows(range(5)))
    os.kill(child.pid, signal.SIGKILL)
    end(child, -signal.SIGKILL)
    rb.extend(rows(range(5)))
    assert ids_of(rb) == list(range(5))


def test_threads_that_see_the_first_rows_of_another_process() -> None:
    rb = private("memory", 400, ranked=True).share()
    mine, other = multiprocessing.get_context("fork").Pipe()
    child = start(write_first, rb, 0, other)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not len(rb):
                pass
            check_rows(rb.sample())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    mine.send("now")
    for thread in threads:
        thread.join()
    end(child)
    assert not failed
    check_ring(rb)


# -- files -------------------------------------------------------------------------------------------------------------


def forget(held: list[Any]) -> None:
    held.clear()
    gc.collect()


def test_temporary_files_are_removed_by_their_owner_alone() -> None:
    rb = make(8, fill=3, mapped=True)
    directory: Any = rb.storage.scratch_dir  # type: ignore[attr-defined]
    held = [rb]
    del rb
    end(start(forget, held))  # a forked child has the same objects
    assert directory.exists()
    check_rows(held[0][:])
    forget(held)
    assert not directory.exists()


def test_temporary_files_of_another_process_are_removed_too() -> None:
    rb = private("files", 100).share()
    directory: Any = rb.storage.scratch_dir  # type: ignore[attr-defined]
    mine, other = multiprocessing.get_context("fork").Pipe()
    child = start(write_first, rb, 0, other)
    mine.send("now")
    end(child)
    assert list(directory.iterdir())
    held = [rb]  # this process has never looked at the rows
    del rb
    forget(held)
    assert not directory.exists()


def test_rows_of_a_directory_are_shared_and_saved(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    storage = LazyMemmapStorage(8, scratch_dir=directory)
    ReplayBuffer(storage=storage).extend(rows(range(11)))
    storage.flush()
    storage.close()
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=directory, existsok=True), shared=True, batch_size=4)
    assert sorted(ids_of(rb)) == list(range(3, 11))
    rb.extend(rows([20]))
    assert not (directory / "manifest.json").exists()  # the files are no longer what was flushed
    assert sorted(ids_of(rb)) == [*range(4, 11), 20]
    rb.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=LazyMemmapStorage(8), batch_size=4)
    other.loads(tmp_path / "saved")
    assert torch.equal(other[:]["id"], rb[:]["id"])
    other.extend(rows([21]))
    other.dumps(tmp_path / "saved")
    rb.loads(tmp_path / "saved")
    assert torch.equal(other[:]["id"], rb[:]["id"])


def test_files_that_are_gone_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "files"), shared=True)
    rb.extend(rows(range(3)))
    for path in (tmp_path / "files").iterdir():
        path.unlink()
    storage: Any = rb.storage
    storage._ring = None  # as in a process that has not mapped them yet
    with pytest.raises(MissingFileError, match="is missing"):
        len(rb)


def test_the_storage_that_gave_its_files_away_is_closed() -> None:
    storage = LazyMemmapStorage(8)
    rb = ReplayBuffer(storage=storage)
    rb.extend(rows(range(3)))
    rb.share()
    with pytest.raises(UsageError, match="closed"):
        storage.admit(rows(range(1)), 1)
