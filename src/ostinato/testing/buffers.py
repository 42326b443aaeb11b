"""Contract tests for whole buffers: what is saved and loaded continues as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import tempfile
from abc import ABC, abstractmethod
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import EmptyBufferError, OstinatoError
from ostinato.testing.views import bits, raises

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BufferContract", "ResumeContract"]

_OF_THIS_LIFE = ("index_generation", "anchor_generation")
"""Keys that count the writes of one buffer object: a load into a buffer with rows counts on."""


class ResumeContract(ABC):
    """Requirements on everything with a state: saved and loaded, it draws and stores what it would have without that.

    A buffer of `capacity` rows is filled beyond its capacity, used, saved, and loaded: in this process, in another one,
    after a load that failed, over other rows, and into a larger ring. Another process unpickles the class, which must
    be importable.
    """

    capacity: int = 24

    @abstractmethod
    def make(self, capacity: int) -> Any:
        """Return a new, empty buffer with a generator of its own and a batch size."""

    @abstractmethod
    def rows(self, count: int, start: int) -> Any:
        """Return the rows `start` to `start + count` of a stream, as `extend` takes them."""

    def extend(self, buffer: Any, count: int, start: int) -> None:
        """Write rows of the stream. Override it where rows arrive by another way."""
        buffer.extend(self.rows(count, start))

    def use(self, buffer: Any) -> Any:
        """Sample once, and learn from the batch where that changes the state; return what must be equal later."""
        batch, info = buffer.sample(return_info=True)
        if getattr(buffer.sampler, "prioritized", False):
            index = info["index"]
            slots = index[0] if isinstance(index, tuple) else index
            buffer.update_priority(info, (slots % 5 + 1).double())
        return batch, info

    def fill(self) -> Any:
        """Return a buffer that was filled beyond its capacity and used in between."""
        buffer = self.make(self.capacity)
        for start in range(0, self.capacity + 6, 6):
            self.extend(buffer, 6, start)
            self.use(buffer)
        return buffer

    def go_on(self, buffer: Any) -> list[Any]:
        """Use a buffer, write to it and use it again; return the bits of all that it gave."""
        found = [bits(self.use(buffer), _OF_THIS_LIFE) for _ in range(3)]
        self.extend(buffer, 6, 1000)
        found += [bits(self.use(buffer), _OF_THIS_LIFE) for _ in range(3)]
        return [*found, len(buffer)]

    # -- tests -----------------------------------------------------------------------------------------------

    def test_a_loaded_buffer_continues(self) -> None:
        """Saving changes nothing, and a load has everything: a checkpoint, a state dict and a pickle alike."""
        twin, buffer = self.fill(), self.fill()
        with _saved(buffer) as path:
            loaded, given = self.make(self.capacity), self.make(self.capacity)
            loaded.loads(path)
            given.load_state_dict(buffer.state_dict())
            copied = pickle.loads(pickle.dumps(buffer))  # noqa: S301 (pickled here)
            expected = self.go_on(twin)
            assert self.go_on(buffer) == expected
            assert self.go_on(loaded) == expected
            assert self.go_on(given) == expected
            assert self.go_on(copied) == expected

    def test_another_process_continues(self) -> None:
        """A process that only has the checkpoint continues alike."""
        buffer = self.fill()
        with _saved(buffer) as path, ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
            assert pool.submit(_load_and_go_on, self, path).result() == self.go_on(buffer)

    def test_a_failed_load_changes_nothing(self) -> None:
        """A damaged checkpoint raises, and the buffer continues with what it had."""
        twin, buffer = self.fill(), self.fill()
        other = self.make(self.capacity)
        self.extend(other, 6, 500)
        with _saved(other) as path:
            largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
            content = bytearray(largest.read_bytes())
            content[len(content) // 2] ^= 1
            largest.write_bytes(content)
            with raises(OstinatoError):
                buffer.loads(path)
        assert self.go_on(buffer) == self.go_on(twin)

    def test_a_load_replaces_other_rows(self) -> None:
        """Nothing of what a buffer held before a load is left."""
        buffer, used = self.fill(), self.make(self.capacity)
        self.extend(used, 10, 300)
        self.use(used)
        with _saved(buffer) as path:
            used.loads(path)
        assert self.go_on(used) == self.go_on(buffer)

    def test_a_larger_ring_continues(self) -> None:
        """Loads into a larger ring agree with each other, also after they were saved once more."""
        buffer = self.fill()
        larger = [self.make(2 * self.capacity) for _ in range(3)]
        with _saved(buffer) as path:
            for each in larger[:2]:
                each.loads(path)
        assert len(larger[0]) == len(buffer)
        with _saved(larger[0]) as path:
            larger[2].loads(path)
        expected = self.go_on(larger[0])
        assert self.go_on(larger[1]) == expected
        assert self.go_on(larger[2]) == expected


class BufferContract(ResumeContract):
    """Requirements on buffers besides `ResumeContract`: edits, wrong calls that change nothing, whole rows."""

    def wrong_rows(self) -> Any:
        """Return rows that `extend` must not take; None where it takes all rows."""
        return None

    def check(self, batch: Any) -> None:
        """Fail if fields of different rows are mixed. Override it where a field follows from another one."""

    def wrong_calls(self, buffer: Any) -> dict[str, Any]:
        """Return calls by name, each of which must raise an `OstinatoError`."""
        calls: dict[str, Any] = {f"sample({size!r})": partial(buffer.sample, size) for size in (0, -1, 2.5, "4")}
        rows = self.wrong_rows()
        if rows is not None:
            calls["extend"] = lambda: buffer.extend(rows)
        if getattr(buffer.sampler, "prioritized", False):
            calls["a priority of NaN"] = lambda: buffer.update_priority([0, 1], [1.0, float("nan")])
            calls["two priorities of three rows"] = lambda: buffer.update_priority([0, 1, 2], [1.0, 2.0])
        return calls

    def edit(self, buffer: Any) -> None:
        """Replace two rows, and delete one, as far as the buffer allows that."""
        for member in getattr(buffer, "members", [buffer]):
            with suppress(OstinatoError):
                member[torch.tensor([1, 0], device="cpu")] = self.rows(2, 700)
            with suppress(OstinatoError):
                member.delete(torch.tensor([2], device="cpu"))

    def test_an_edited_buffer_continues(self) -> None:
        """A checkpoint of a buffer with replaced and deleted rows has everything."""
        buffer, loaded = self.fill(), self.make(self.capacity)
        self.edit(buffer)
        with _saved(buffer) as path:
            loaded.loads(path)
        assert self.go_on(loaded) == self.go_on(buffer)

    def test_wrong_calls_change_nothing(self) -> None:
        """Each raises an error of Ostinato, and the buffer continues as one that was not called."""
        twin, buffer = self.fill(), self.fill()
        for name, call in self.wrong_calls(buffer).items():
            try:
                with raises(OstinatoError):
                    call()
            except AssertionError as error:
                error.args = (f"{name}: {error}",)
                raise
        assert self.go_on(buffer) == self.go_on(twin)

    def test_threads_see_whole_rows(self) -> None:
        """Two threads write, sample and learn at the same time; `check` holds for every batch."""
        buffer = self.make(self.capacity)
        self.extend(buffer, 6, 0)

        def work(first: int) -> None:
            for start in range(first, first + 48, 6):
                self.extend(buffer, 6, start)
                for _ in range(3):
                    try:
                        self.check(self.use(buffer)[0])
                    except EmptyBufferError:  # the other thread has drawn the rows for the last time
                        break

        with ThreadPoolExecutor(2) as pool:
            for each in [pool.submit(work, first) for first in (1000, 2000)]:
                each.result(60)
        assert len(buffer) <= self.capacity * len(getattr(buffer, "members", [buffer]))


def _load_and_go_on(contract: ResumeContract, path: Path) -> list[Any]:
    buffer = contract.make(contract.capacity)
    buffer.loads(path)
    return contract.go_on(buffer)


@contextmanager
def _saved(buffer: Any) -> Iterator[Path]:
    """Save a buffer to a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ostinato-"))
    try:
        buffer.dumps(folder / "saved")
        yield folder / "saved"
    finally:
        shutil.rmtree(folder)
