"""Contract tests for whole buffers: what is saved and loaded continues as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import tempfile
from abc import ABC, abstractmethod
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import OstinatoError
from ostinato.testing.views import raises

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ResumeContract"]

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
        found = [_bits(self.use(buffer)) for _ in range(3)]
        self.extend(buffer, 6, 1000)
        found += [_bits(self.use(buffer)) for _ in range(3)]
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
            assert pool.submit(_load_and_go_on, type(self), path).result() == self.go_on(buffer)

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


def _load_and_go_on(contract: type[ResumeContract], path: Path) -> list[Any]:
    made = contract()
    buffer = made.make(made.capacity)
    buffer.loads(path)
    return made.go_on(buffer)


@contextmanager
def _saved(buffer: Any) -> Iterator[Path]:
    """Save a buffer to a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ostinato-"))
    try:
        buffer.dumps(folder / "saved")
        yield folder / "saved"
    finally:
        shutil.rmtree(folder)


def _bits(value: Any) -> Any:
    """Return nested tuples that are equal where types, shapes and all bits are."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, torch.Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if key not in _OF_THIS_LIFE}
        return tuple((key, _bits(item)) for key, item in sorted(kept.items()))
    if isinstance(value, list | tuple):
        return tuple(_bits(item) for item in value)
    return repr(value)
