"""SharedStorage: rows in memory that several processes write and read."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ostinato._backend import backend
from ostinato.core.index import is_field, select
from ostinato.core.records import Request
from ostinato.core.rows import Schema, as_bits
from ostinato.core.shared_ring import SharedRing
from ostinato.errors import CheckpointError, OptionError, SlotError, UsageError
from ostinato.storages.base import Storage
from ostinato.storages.lazy import LazyMemmapStorage, LazyTensorStorage
from ostinato.storages.memory import HeapMemory, MappedMemory
from ostinato.storages.table import read_column

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from pathlib import Path

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


_FREE_TRIES = 3
"""Reads without the lock; if writers overwrite a row in each of them, the next read takes the lock."""


@final
class SharedStorage(LazyTensorStorage):
    """Rows in memory that processes share: the storage of `ReplayBuffer(shared=True)`.

    The first rows, of whichever process, define the schema, and the memory is allocated; other processes map it when
    they need it. The storage goes to other processes as an argument of a process that is being started, or by fork. Its
    `ring` records which slots hold rows.

    The rows are in shared memory, or in the files of a `LazyMemmapStorage`; ring and priorities are in shared memory.

    All reads are copies of completely written rows.

    Args:
        inner: an empty `LazyTensorStorage` with the capacity and layout; or a `LazyMemmapStorage`, whose files serve
            this storage from now on. It is closed; the caller lets the ring know of rows in the files.
        ranked: whether there are priorities.

    Raises:
        OptionError: if processes cannot share memory, or the rows of `inner` cannot be shared.
    """

    ring_only = True
    rotates = False
    supports_conditional_update = False
    mappable = False
    checked_hook, keep = Storage.checked_hook, Storage.keep
    """They raise: rows are saved as they are, and each stays in its slot."""

    def __init__(self, inner: Storage, *, ranked: bool) -> None:
        require_sharing()
        given = _checked(inner)
        schema = given.schema if len(given) else None
        self._options, self._ranked = given.in_memory(), ranked
        segment = Segment()  # may raise: `given` then keeps its files
        self._begin(segment, given.hand_over() if isinstance(given, LazyMemmapStorage) else None)
        if schema is not None:
            self.lay_out(schema)

    def _begin(self, segment: Segment, files: MappedMemory | None) -> None:
        """Take the memory, in which there may be rows."""
        vars(self).update(vars(self._options))
        self.ring_only = True
        self._segment, self._files = segment, files
        self._ring: SharedRing | None = None
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
        body = self._segment.layout()
        if body is None:
            return False
        if self._files is not None:
            self._files.must_exist(body["files"])
        self._lay_out(Schema.from_json(body["schema"], known=known), (), self.device)
        self._ring = self._make_ring(create=False)
        return True

    def lay_out(self, schema: Schema) -> None:
        """Allocate memory for rows of a schema, unless there is some."""
        self._lay_out_first(lambda: self._lay_out(schema, (), self.device))

    def _lay_out_first(self, lay_out: Callable[[], Any]) -> Any:
        """Lay the memory out, unless a process has done so; return what `lay_out` returns."""
        with self._segment.alone():
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
        self._find()
        return super()._require()

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

    def number_process(self) -> int:
        """Return a number, from 1, that no other call in any process returns."""
        return self._segment.number_process()

    @property
    def scratch_dir(self) -> Path | None:
        """Directory of the files with the rows; None if they are in memory."""
        return None if self._files is None else self._files.directory

    @property
    def nbytes(self) -> int:
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
    def schema(self) -> Schema | None:
        """Schema of a row; None before the first."""
        return super().schema if self._find() else None

    @property
    def laid_out(self) -> bool:
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

    def snapshot(self, slots: Tensor, cursor: int) -> dict[str, Any]:
        """Return the state of a `LazyTensorStorage` that holds the rows at `slots`, in this order. Copy.

        The caller holds the lock of the ring; the slots hold complete rows.
        """
        schema, columns = self.schema, dict[str, Tensor]()
        if schema is not None:
            leaves = self.fetch([Request(i, slots) for i in range(len(schema.leaves))])
            columns = dict(zip(schema.column_names, leaves, strict=True))
        return {
            **self.state_header(),
            "rows": int(slots.shape[0]),
            "cursor": cursor,
            "capacity": self.capacity,
            "columns": columns,
        }

    def rows_of(self, state: dict[str, Any], order: Tensor) -> Any:
        """Return the rows in a state of a tensor storage, nested, in the given order (int64 `[rows]`); None for none.

        Raises:
            CheckpointError: if their schema differs, or they do not fit.
        """
        if state["form"] != self.form or state["late"]:
            msg = "a shared buffer takes the rows of a LazyTensorStorage, without fields added later"
            raise CheckpointError(msg)
        if state.get("objects"):
            msg = f"processes cannot share Python objects, and the checkpoint holds the fields {list(state['objects'])}"
            raise CheckpointError(msg)
        if state["schema"] is None:
            return None
        schema, _, sources = self.open_state(state)
        leaves = [as_bits(x)[order].view(x.dtype) for x in map(read_column, sources.values())]
        return schema.build(leaves, order.shape, self.device) if order.shape[0] else None

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

    def state_dict(self) -> NoReturn:
        """Raise: the storage is saved with its buffer."""
        raise_state()

    def load_state_dict(self, state: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        """Raise: the storage is saved with its buffer."""
        raise_state()


def raise_edit() -> NoReturn:
    """Raise for edits in place.

    Raises:
        UsageError: always.
    """
    msg = "rows of a shared buffer cannot be edited in place: write new rows with add() or extend()"
    raise UsageError(msg)


def raise_state() -> NoReturn:
    """Raise for saves and loads of a storage without its buffer.

    Raises:
        UsageError: always.
    """
    msg = "the storage of a shared buffer is saved with the buffer: use the buffer's dumps() or state_dict()"
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
    _raise_private(storage, storage.why_private)
    return storage


def _checked(inner: Storage) -> LazyTensorStorage:
    """Return a storage that can be the inner one.

    Raises:
        OptionError: if it cannot; the message says why.
    """
    storage = check_shareable(inner)
    _raise_private(storage, "rows" if storage.laid_out and type(storage) is LazyTensorStorage else None)
    return storage


def _raise_private(storage: Storage, reason: str | None) -> None:
    if reason is not None:
        msg = f"shared=True needs a new {type(storage).__name__}(max_size) on the CPU, got one with {reason}"
        raise OptionError(msg)
