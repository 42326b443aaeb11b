"""Buffers that begin to be shared: by `share()`, or when one in files is passed to a process that is being started."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from ostinato.errors import KindError, OptionError, SchemaError, UsageError
from ostinato.storages import shared as shared_storage

from ...processes import CONTEXT
from ...registry import Half, seeded
from ...sharing import AVAILABLE, check_ring, check_rows, die, end, ids_of, make, pipe, rows, start
from .refusals import raises

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the native extension, on Linux")

KINDS: dict[str, Any] = {
    "memory": partial(LazyTensorStorage, kinds={"wide": Half()}),
    "files": LazyMemmapStorage,
}


def private(kind: str, capacity: int, **options: Any) -> ReplayBuffer:
    generator = seeded(3)
    return ReplayBuffer(storage=KINDS[kind](capacity), batch_size=8, generator=generator, **options)


def test_a_buffer_that_is_shared_leaves_its_files_and_the_batches_made_ahead():
    rb = private("files", 20, prefetch=2)
    rb.extend(rows(range(20)))
    rb.sample()
    storage = rb.storage
    assert rb.share() is rb.share() is rb  # a second call changes nothing
    with pytest.raises(UsageError, match="closed"):
        storage.admit(rows(range(1)), 1)
    rb.extend(rows(range(100, 120)))
    assert min(rb.sample()["id"].tolist()) >= 100
    check_ring(rb)


def test_what_cannot_be_shared_stays_as_it_is():
    made = [
        ("version_key", ReplayBuffer(storage=LazyMemmapStorage(8), version_key="id")),
        ("ndim=2", ReplayBuffer(storage=LazyMemmapStorage(8, ndim=2))),
    ]
    late, moved, objects, shared = (ReplayBuffer(storage=LazyMemmapStorage(8)) for _ in range(4))
    text = {"id": torch.arange(4), "text": list("abcd")}
    objects.extend(text)
    for rb in (late, moved):
        rb.extend(rows(range(4)))
    late[:2] = {**late[:2], "late": torch.ones(2)}
    moved._engine.store.move_cursor(2)
    for words, rb in (*made, ("text or other non-tensor fields", objects), ("fields added later", late)):
        before = rb.storage
        with pytest.raises(OptionError, match=words):
            rb.share()
        assert rb.storage is before
        assert not rb.shared
    shared.extend({"example": torch.zeros(1)})
    shared.empty()
    shared.share()
    raises(
        (moved.share, UsageError, "the cursor was moved to 2 of 4 rows"),
        (lambda: shared.extend(text), KindError, "cannot share Python objects"),
        (lambda: shared.share(False), UsageError, "stays shared"),
    )
    shared.extend(rows(range(3)))  # neither the rows that were refused nor those of an emptied buffer define a schema
    assert ids_of(shared) == [0, 1, 2]
    assert not private("files", 8).share(False).shared


# -- passed to a process -----------------------------------------------------------------------------------------------


def play(in_files: ReplayBuffer, in_memory: ReplayBuffer, pipe: Any) -> None:
    torch.set_num_threads(1)
    in_files.extend(rows(range(10, 20)))
    in_memory.extend(rows(range(10, 20)))
    pipe.send(len(in_files))
    pipe.recv()
    pipe.send((len(in_files), in_files.cursor, in_files[:]["id"].tolist()))


def test_buffers_are_shared_with_a_process_that_is_started():
    rb = ReplayBuffer(storage=LazyMemmapStorage(21), batch_size=4)
    rb.extend(rows(range(10)))
    copied = pickle.loads(pickle.dumps(rb))
    copied.extend(rows(range(10, 13)))
    assert not copied.shared
    in_memory = make(40, ranked=True, fill=10)
    mine, other = CONTEXT.Pipe()
    child = CONTEXT.Process(target=play, args=(rb, in_memory, other), daemon=True)
    child.start()
    assert rb.shared
    assert mine.recv() == 20
    assert rb[:]["id"].tolist() == list(range(20))
    assert rb.extend(rows(range(20, 30))).tolist() == [20, *range(9)]
    mine.send("written")
    assert mine.recv() == (21, 9, [*range(21, 30), *range(9, 20), 20])
    end(child)
    assert sorted(ids_of(in_memory)) == list(range(20))
    check_ring(in_memory)
    check_rows(rb.sample())


REFUSED: list[Any] = [
    ("Cannot share a storage of type ListStorage", {"storage": ListStorage(8)}),
    ("type TensorDictMaxValueWriter cannot be shared between processes", {"writer": TensorDictMaxValueWriter("id")}),
    ("type SliceSampler cannot be shared", {"sampler": SliceSampler(slice_len=2, end_key="id")}),
    ("it has not been initialized yet", {}),
]


def test_what_cannot_be_passed_raises_a_runtime_error(monkeypatch):
    monkeypatch.setattr("ostinato.buffers.lifecycle.get_spawning_popen", object)  # as when a process is started
    for words, options in REFUSED:
        rb = ReplayBuffer(**{"storage": LazyMemmapStorage(8), **options})
        with pytest.raises(RuntimeError, match=words):
            pickle.dumps(rb)
        assert not rb.shared
    in_memory = private("memory", 8)  # is copied to the process
    in_memory.extend(rows(range(3)))
    pickle.dumps(in_memory)
    assert not in_memory.shared


def write_or_say(rb: ReplayBuffer, pipe: Any) -> None:
    try:
        rb.extend(rows(range(5)))
    except UsageError as error:
        pipe.send(str(error))
    else:
        pipe.send("written")


def test_a_forked_child_does_not_write_to_files_that_are_not_shared():
    rb = private("files", 8)
    rb.extend(rows(range(7)))
    mine, other = pipe()
    end(start(write_or_say, rb, other))
    assert "call rb.share() before the fork" in mine.recv()
    assert rb[:]["id"].tolist() == list(range(7))
    end(start(write_or_say, rb.share(), other))
    assert mine.recv() == "written"
    assert rb[:]["id"].tolist() == [1, 2, 3, 4, 4, 5, 6, 0]


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


@pytest.mark.parametrize(("kind", "ranked"), [("memory", True), ("files", False)])
def test_whichever_process_writes_first_defines_the_schema(kind, ranked):
    rb = ReplayBuffer(
        storage=lambda: KINDS[kind](400, shared_init=True),
        sampler=PrioritizedSampler(400, 0.7, 0.5, 1e-3) if ranked else RandomSampler(),
        batch_size=8,
        generator=seeded(3),
        delayed_init=True,
    )
    assert len(rb) == 0
    assert rb.shared
    pipes = [pipe() for _ in range(4)]
    children = [start(write_first, rb, 100 * i, other) for i, (_, other) in enumerate(pipes)]
    assert rb.storage.schema is None
    for mine, _ in pipes:
        mine.send("now")
    drawn = [mine.recv() for mine, _ in pipes]
    for child in children:
        end(child)
    assert sorted(ids_of(rb)) == [100 * i + j for i in range(4) for j in range(40)]
    assert len({tuple(ids) for ids in drawn}) == 4  # each process draws with a seed of its own
    assert rb.stats().rows_drawn == 4 * 8
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


@pytest.mark.parametrize(("kind", "how"), [("memory", "begun"), ("files", "begun"), ("memory", "dies")])
def test_a_process_that_dies_while_it_allocates_blocks_nobody(kind, how):
    rb = private(kind, 100).share()
    mine, other = pipe()
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


def test_a_process_that_stops_while_it_allocates_is_reported(monkeypatch):
    monkeypatch.setattr(shared_storage, "_LAYOUT_WAIT_S", 0.2)
    rb = private("memory", 100).share()
    mine, other = pipe()
    child = start(die_allocating, rb, "stops", other)
    mine.recv()
    with pytest.raises(UsageError):
        rb.extend(rows(range(5)))
    os.kill(child.pid, signal.SIGKILL)
    end(child, -signal.SIGKILL)
    rb.extend(rows(range(5)))
    assert ids_of(rb) == list(range(5))


# -- files -------------------------------------------------------------------------------------------------------------


def forget(held: list[Any]) -> None:
    held.clear()
    gc.collect()


def test_temporary_files_are_removed_by_their_owner_alone():
    rb = make(8, fill=3, mapped=True)
    directory: Any = rb.storage.scratch_dir  # type: ignore[attr-defined]
    held = [rb]
    del rb
    end(start(forget, held))  # a forked child has the same objects
    assert directory.exists()
    check_rows(held[0][:])
    forget(held)
    assert not directory.exists()


def test_rows_of_a_directory_are_shared_and_saved(tmp_path):
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
