"""SharedStorage: rows in memory that several processes write and read."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import time
from contextlib import contextmanager, nullcontext
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core.index import is_field, select
from ostinato.core.processes import whole_in_forks
from ostinato.core.records import Request, Run
from ostinato.core.rows import Schema
from ostinato.core.shared_ring import SharedCounts, SharedRing
from ostinato.errors import OptionError, SlotError, UsageError
from ostinato.storages.base import Sharing, Storage
from ostinato.storages.lazy import LazyMemmapStorage, LazyTensorStorage
from ostinato.storages.memory import HeapMemory, MappedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from pathlib import Path

    from ostinato.core.counts import BufferCounts
    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring
    from ostinato.storages.columns import Fields

_CPU = torch.device("cpu")
_PAGE = mmap.ALLOCATIONGRANULARITY
_LAYOUT, _PROCESSES = struct.Struct("<qq"), struct.Struct("<q")
"""Words at the start of a segment: offset and bytes of its layout (0 bytes: none yet); processes that were numbered."""
_LAYOUT_WAIT_S = 30
_MISSING = "this system has no suitable shared memory (Linux has)"


class _Part(NamedTuple):
    """Position of a block in the file."""

    name: str
    offset: int
    nbytes: int


def require_sharing() -> None:
    """Check that processes can share memory.

    Raises:
        OptionError: without the native extension, or on another system than Linux.
    """
    native = backend.native
    if getattr(native, "SharedRing", None) is None:
        missing = "the native extension of ostinato is missing or switched off" if native is None else _MISSING
        msg = f"shared=True is not possible here: {missing}. Omit it, and use the buffer in one process"
        raise OptionError(msg)


@final
class Segment:
    """Blocks of shared memory, initialized to zero, for a process and the processes that it starts.

    Pickling a segment while a process is started passes the memory to that process; it is never copied, and cannot be
    pickled otherwise. The memory has no name in the file system, so nothing remains if a process is killed.

    Raises:
        OptionError: if processes cannot share memory.
    """

    device = _CPU
    _fd: int = -1

    def __init__(self) -> None:
        require_sharing()
        self._fd = backend.native.make_shared_memory()  # type: ignore[union-attr]
        os.ftruncate(self._fd, _PAGE)
        self._parts: list[_Part] = []
        self._blocks: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pass the memory to a process that is being started.

        Raises:
            UsageError: at any other time.
        """
        if get_spawning_popen() is None:
            msg = (
                "a shared buffer goes to another process as an argument of multiprocessing.Process, when that process "
                "is started; it cannot be pickled or copied otherwise: copy its rows with dumps() or state_dict()"
            )
            raise UsageError(msg)
        return {"fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the memory of the other process."""
        self._fd = state["fd"].detach()
        self._parts = []
        self._blocks = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from laying the memory out; the system ends this when the process dies.

        Raises:
            UsageError: if another process does so for 30 s.
        """
        until = time.monotonic() + _LAYOUT_WAIT_S
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > until:
                    msg = (
                        f"another process has been allocating the shared buffer for {_LAYOUT_WAIT_S} s: is it stopped?"
                    )
                    raise UsageError(msg) from error
                time.sleep(0.002)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def layout(self) -> dict[str, Any] | None:
        """Return what was published, by whichever process, and know the blocks from then on; None if nothing was."""
        offset, nbytes = _LAYOUT.unpack(os.pread(self._fd, _LAYOUT.size, 0))
        if not nbytes:
            return None
        body: dict[str, Any] = json.loads(os.pread(self._fd, nbytes, offset))
        self._parts = [_Part(*part) for part in body["parts"]]
        return body

    def begin_layout(self) -> None:
        """Drop all blocks, those of a process that died before it published its layout too."""
        self._parts, self._blocks = [], {}
        os.ftruncate(self._fd, _PAGE)

    def publish(self, layout: dict[str, Any]) -> None:
        """Let all processes find a layout, and the blocks there are now."""
        body = json.dumps({**layout, "parts": self._parts}).encode()
        offset = self._end()
        os.pwrite(self._fd, body, offset)
        os.pwrite(self._fd, _LAYOUT.pack(offset, 0), 0)
        os.pwrite(self._fd, _LAYOUT.pack(offset, len(body)), 0)

    def number_process(self) -> int:
        """Return 1, 2, ...: another number in each call of any process."""
        with self.alone():
            (count,) = _PROCESSES.unpack(os.pread(self._fd, _PROCESSES.size, _LAYOUT.size))
            os.pwrite(self._fd, _PROCESSES.pack(count + 1), _LAYOUT.size)
            return int(count) + 1

    def close(self) -> None:
        """Close the file; mappings that are still in use keep the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Close the file."""
        self.close()

    def check(self, nbytes: int) -> None:
        """Compare with the free memory.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes free.
        """
        HeapMemory(_CPU).check(nbytes)

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return the block of this name, uint8 `[nbytes]`; a new one contains zeros."""
        if name not in self._blocks:
            part = next((part for part in self._parts if part.name == name), None)
            if part is None:
                part = _Part(name, self._end(), nbytes)
                os.ftruncate(self._fd, part.offset + nbytes)
                self._parts.append(part)
            self._blocks[name] = self._map(part)
        return self._blocks[name]

    def _end(self) -> int:
        """Return the first page after the last block."""
        end = self._parts[-1] if self._parts else _Part("", 0, _PAGE)
        return -(-(end.offset + end.nbytes) // _PAGE) * _PAGE

    def _map(self, part: _Part) -> Tensor:
        if part.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with torch.inference_mode(mode=False):
            block = torch.frombuffer(mmap.mmap(self._fd, part.nbytes, offset=part.offset), dtype=torch.uint8)
        backend.installed.advise_huge_pages(block.data_ptr(), part.nbytes)  # type: ignore[union-attr]
        return block


_LAST = 1 << 62
"""Place of a lock in the order of locks: after those of all buffers."""
_ROWS_AT_ONCE = 1 << 16
"""Rows that are copied together to shared memory."""
_FREE_TRIES = 3
"""Reads without the lock; if writers overwrite a row in each of them, the next read takes the lock."""


@final
class SharedMemory(Sharing):
    """What the processes of a `SharedStorage` share beside the rows: the ring and the counts in its memory."""

    def follow_ring(self, storage: Any, ring: Ring) -> Ring:
        """Return the ring in shared memory, as soon as there is one."""
        return storage.find_ring() or ring

    def follow_counts(self, storage: Any, counts: Any) -> Any:
        """Return the counts of all processes."""
        return counts if isinstance(counts, SharedCounts) else SharedCounts(storage.find_ring, counts)

    def load_counts(self, counts: Any, loaded: BufferCounts) -> BufferCounts:
        """Return the counts of all processes, which are those that were loaded from now on."""
        counts.load(loaded)
        return counts  # type: ignore[no-any-return]

    @contextmanager
    def taking(self, storage: Any, filled: Storage) -> Iterator[None]:
        """Return a context in which no other process writes, and there is memory for the rows.

        Raises:
            UsageError: while another process is writing.
        """
        if filled.schema is not None:
            storage.lay_out(filled.schema)
        ring = storage.find_ring()
        with nullcontext() if ring is None else ring.lock:
            if ring is not None and ring.writers:
                msg = f"{ring.writers} writers are at work: load into a shared buffer while no process writes to it"
                raise UsageError(msg)
            yield


@final
class SharedStorage(LazyTensorStorage):
    """Rows in memory that processes share: the storage of `ReplayBuffer(shared=True)`.

    The first rows, of whichever process, define the schema, and the memory is allocated; other processes map it when
    they need it. The storage goes to other processes as an argument of a process that is being started, or by fork. Its
    `ring` records which slots hold rows.

    The rows are in shared memory, or in the files of a `LazyMemmapStorage`; ring and priorities are in shared memory.

    All reads are copies of completely written rows.

    Args:
        inner: a `LazyTensorStorage` with the capacity and layout, whose rows are copied; or a `LazyMemmapStorage`,
            whose files serve this storage from now on. It is closed.
        ranked: whether there are priorities.

    Raises:
        OptionError: if processes cannot share memory, or the rows of `inner` cannot be shared.
    """

    ring_only = shared = True
    rotates = False
    supports_conditional_update = False
    mappable = False
    dense = None
    """Writes of other processes are not reported to a save."""
    writes = 0
    sharing = SharedMemory()
    no_hooks = Storage.no_hooks

    def __init__(self, inner: Storage, *, ranked: bool) -> None:
        require_sharing()
        given, mapped = check_shareable(inner), isinstance(inner, LazyMemmapStorage)
        rows, cursor, schema = len(given), given.cursor, given.schema if len(given) else None
        self._options, self._ranked = given.in_memory(), ranked
        segment = Segment()  # may raise: `given` then keeps its files
        self._begin(segment, given.hand_over() if isinstance(given, LazyMemmapStorage) else None)
        if schema is not None:
            self.lay_out(schema)
        if rows and mapped:
            self.ring.take_over(rows, cursor)
        elif rows:
            self.take(given)

    def _begin(self, segment: Segment, files: MappedMemory | None) -> None:
        """Take the memory, in which there may be rows."""
        vars(self).update(vars(self._options))
        self.ring_only = True
        self._segment, self._files = segment, files
        self._ring: SharedRing | None = None
        self._finding = threading.RLock()
        """Taken by threads that look for the memory, or lay it out; after the lock of a buffer."""
        whole_in_forks(self, self._finding, place=_LAST)
        self._given = segment if files is None else files

    def __getstate__(self) -> dict[str, Any]:
        """Pass the memory to a process that is being started. No copy.

        Raises:
            UsageError: at any other time.
        """
        segment = self._segment.__getstate__()  # raises if no process is being started
        directory = None if self._files is None else self._files.directory
        state = {"segment": segment, "options": self._options, "ranked": self._ranked, "directory": directory}
        return {**state, "schema": self.schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the memory."""
        segment = Segment.__new__(Segment)
        segment.__setstate__(state["segment"])
        self._options, self._ranked = state["options"], state["ranked"]
        self._begin(segment, None if state["directory"] is None else MappedMemory(state["directory"]))
        self._find(state["schema"])

    def _find(self, known: Schema | None = None) -> bool:
        """Map what a process has laid out meanwhile; return whether there is a layout."""
        if self._ring is not None:
            return True
        with self._finding:
            body = self._segment.layout() if self._ring is None else None  # type: ignore[redundant-expr]
            if body is not None:
                if self._files is not None:
                    self._files.must_exist(body["files"])
                self._lay_out(Schema.from_json(body["schema"], known=known), (), self.device)
                self._ring = self._make_ring(create=False)
            return self._ring is not None

    def lay_out(self, schema: Schema) -> None:
        """Allocate memory for rows of a schema, unless there is some."""
        self._lay_out_first(lambda: self._lay_out(schema, (), self.device))

    def _lay_out_first(self, lay_out: Callable[[], Any]) -> Any:
        """Lay the memory out, unless a process has done so; return what `lay_out` returns."""
        with self._finding, self._segment.alone():
            if self._find():
                return None
            self._segment.begin_layout()
            self._table = None
            found = lay_out()
            schema = super().schema
            if schema is not None:  # else there were no rows
                ring = self._make_ring(create=True)
                files = {} if self._files is None else self._files.sizes()
                self._segment.publish({"schema": schema.to_json(), "files": files})
                self._ring = ring
            return found

    def forget_form(self) -> None:
        """Drop the schema of rows that could not be laid out; one that was published stays."""
        if self._ring is None:
            super().forget_form()

    def _make_ring(self, *, create: bool) -> SharedRing:
        nbytes = SharedRing.bytes_for(self.capacity, prioritized=self._ranked)
        return SharedRing(self._segment.block("ring", nbytes), self.capacity, prioritized=self._ranked, create=create)

    def _require(self) -> Fields:
        table = self._table
        if table is None or self._ring is None:
            self._find()
            return super()._require()
        return table

    @property
    def ring(self) -> SharedRing:
        """The record of which slots hold rows.

        Raises:
            UsageError: before the first row.
        """
        if self._ring is None:
            self._find()
        if self._ring is None:
            msg = "the storage holds no rows yet: write some first"
            raise UsageError(msg)
        return self._ring

    def find_ring(self) -> SharedRing | None:
        """Return the record of which slots hold rows; None before the first row."""
        return self._ring if self._find() else None

    def number_process(self) -> int:
        """Return a number, from 1, that no other call in any process returns."""
        return self._segment.number_process()

    @property
    def scratch_dir(self) -> Path | None:
        """Directory of the files with the rows; None if they are in memory."""
        return None if self._files is None else self._files.directory

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes shared, those of the ring and its priorities included; 0 before the first row."""
        return super().nbytes + self.ring.nbytes if self._find() else 0

    @property
    def cursor(self) -> int:
        """Slot after the newest row reserved."""
        return self.ring.cursor if self._find() else 0

    @property
    def shape(self) -> torch.Size:
        """`(slots,)`: the slots that an index can address; some may not hold a complete row at the moment."""
        return torch.Size((self.ring.rows if self._find() else 0,))

    @property
    def schema(self) -> Schema | None:  # type: ignore[override]
        """Schema of a row; None before the first."""
        return super().schema if self._find() else None

    @property
    def laid_out(self) -> bool:  # type: ignore[override]
        """Whether the schema is known."""
        return self._ring is not None or self._find()

    def __len__(self) -> int:
        """Number of complete rows."""
        return self.ring.committed if self._find() else 0

    def __repr__(self) -> str:
        """Number of rows and fields."""
        fields = "not laid out yet" if self.schema is None else "; ".join(map(str, self.schema.leaves))
        return f"SharedStorage(rows={len(self)}, capacity={self.capacity}, fields=[{fields}])"

    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        """Check rows against the schema; the first rows define it, and memory is allocated."""
        admit = super().admit
        found = None if self._ring is not None or self._find() else self._lay_out_first(lambda: admit(data, lead))
        return admit(data, lead) if found is None else found

    def write(self, placement: Placement, payload: Any) -> None:
        """Write rows to slots. One copy."""
        self._require().write(placement, payload)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return the rows at an index, or a field of all of them by its key. Copy.

        Raises:
            SlotError: if the index is out of range, or a slot does not hold a complete row.
        """
        if is_field(index):
            data = self.read(slice(None))
            for key in (index,) if isinstance(index, str) else index:
                data = data[key]
            return data
        picked = select(index, self.shape, self.device, swap=swap)
        slots = picked.slots if picked.span is None else torch.arange(self.shape[0], device="cpu")[picked.span]
        return self.present(self.read_whole(slots.contiguous()), picked.batch)

    def read_whole(self, slots: Tensor) -> Any:
        """Return the payload of the rows at `slots` (int64 `[n]`).

        Raises:
            SlotError: if a slot does not hold a complete row.
        """
        for _ in range(_FREE_TRIES):
            payload = self._try_whole(slots)
            if payload is not None:
                return payload
        with self.ring.lock:  # no writer can reserve slots
            return self._try_whole(slots)

    def _try_whole(self, slots: Tensor) -> Any:
        """Return the payload of rows; None if one was replaced meanwhile."""
        before = self.ring.generations(slots)
        if bool((before <= 0).any()):
            bad = slots[before <= 0][:8].tolist()
            msg = (
                f"the slots {bad} do not hold a complete row: a process is writing to them, or died while writing; "
                "read other slots, or wait until they are written again"
            )
            raise SlotError(msg)
        payload = self.gather(slots)
        return payload if bool((self.ring.generations(slots) == before).all()) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a `LazyTensorStorage` with the complete rows, while no process writes. Copy."""
        state, schema = self.state_header(), self.schema
        if schema is None:
            return {**state, "columns": {}}
        with self.ring.lock:
            saved, slots = self.ring.state_dict(), self.ring.saved_slots()
            leaves = self.fetch([Request(i, slots) for i in range(len(schema.leaves))])
        columns = dict(zip(schema.column_names, leaves, strict=True))
        return {**state, "rows": int(slots.shape[0]), "cursor": saved["cursor"], "columns": columns}

    def blank(self) -> LazyTensorStorage:
        """Return a storage without rows in memory of this process."""
        return self._options.in_memory()

    def take(self, filled: Storage) -> None:
        """Copy rows to the shared memory, in place of those there."""
        rows = len(filled)
        if not self._find():
            return
        ring = self.ring
        with ring.lock:
            ring.clear(filled.cursor if rows == self.capacity else 0)
            if not rows:
                return
            slots = ring.record(Run(0, rows, self.capacity)).slots(_CPU)
            for part in slots.split(_ROWS_AT_ONCE):  # type: ignore[no-untyped-call]
                self.write(Run(int(part[0]), part.shape[0], self.capacity), filled.gather(part))
            ring.commit()

    def clear(self) -> None:
        """Remove all rows; keep schema and memory."""
        if self._find():
            self.ring.clear()

    def close(self) -> None:
        """Close the shared file; the storage can then no longer be passed to other processes."""
        self._find()  # what is mapped stays
        self._segment.close()

    @property
    def columns(self) -> NoReturn:
        """Raise: views would let rows of a shared buffer be edited in place."""
        raise_edit()

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> NoReturn:  # noqa: ARG002
        """Raise: rows of a shared buffer are written by `add` and `extend` only."""
        raise_edit()

    def prepare_field(
        self,
        path: tuple[Hashable, ...],  # noqa: ARG002
        slots: Tensor,  # noqa: ARG002
        value: Any,  # noqa: ARG002
        batch: tuple[int, ...],  # noqa: ARG002
    ) -> NoReturn:
        """Raise: rows of a shared buffer are written by `add` and `extend` only."""
        raise_edit()

    def load_state_dict(self, state: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        """Raise: rows and their priorities are loaded together."""
        msg = (
            "rows are loaded into a shared buffer with their priorities: use load_state_dict() or loads() of the buffer"
        )
        raise UsageError(msg)


def raise_edit() -> NoReturn:
    """Raise for edits in place.

    Raises:
        UsageError: always.
    """
    msg = "rows of a shared buffer cannot be edited in place: write new rows with add() or extend()"
    raise UsageError(msg)


def check_shareable(storage: Storage) -> LazyTensorStorage:
    """Return a storage whose rows processes can share, or that can be copied to where they share them.

    Raises:
        OptionError: if they cannot; the message says why.
    """
    if not isinstance(storage, LazyTensorStorage) or type(storage) not in {LazyTensorStorage, LazyMemmapStorage}:
        msg = (
            "shared=True needs storage=LazyTensorStorage(max_size) or LazyMemmapStorage(max_size), got "
            f"{type(storage).__name__}"
        )
        raise OptionError(msg)
    reason = storage.why_private
    if reason is not None:
        msg = f"shared=True needs a new {type(storage).__name__}(max_size) on the CPU, got one with {reason}"
        raise OptionError(msg)
    return storage
