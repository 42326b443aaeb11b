"""SharedStorage: rows in memory that several processes write and read."""

from __future__ import annotations

import mmap
import os
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
from ostinato.storages.lazy import LazyTensorStorage
from ostinato.storages.memory import HeapMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.core.records import Placement

__all__ = ["Segment", "SharedStorage", "require_sharing"]

_CPU = torch.device("cpu")
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
        return {"fd": DupFd(self._fd), "parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the memory of the other process."""
        self._fd = state["fd"].detach()
        self._parts = state["parts"]
        self._blocks = {part.name: self._map(part) for part in self._parts}

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
            end = self._parts[-1] if self._parts else _Part("", 0, 0)
            page = mmap.ALLOCATIONGRANULARITY
            part = _Part(name, -(-(end.offset + end.nbytes) // page) * page, nbytes)
            os.ftruncate(self._fd, part.offset + nbytes)
            self._blocks[name] = self._map(part)
            self._parts.append(part)
        return self._blocks[name]

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
class SharedStorage(Storage):
    """Rows in memory that processes share: the storage of `ReplayBuffer(shared=True)`.

    The first rows define the schema, and the memory is allocated. From then on the storage can be passed to other
    processes: as an argument of a process that is being started, or by fork. Its `ring` records which slots hold rows.

    All reads are copies of completely written rows.

    Args:
        inner: an empty storage with the capacity and layout.
        ranked: whether there are priorities.

    Raises:
        OptionError: if processes cannot share memory, or the rows of `inner` cannot be shared.
    """

    form = "tensors"
    ring_only = True

    def __init__(self, inner: Storage, *, ranked: bool) -> None:
        require_sharing()
        self._inner = _checked(inner)
        self._ranked = ranked
        self._segment = Segment()
        self._ring: SharedRing | None = None
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Pass the memory to a process that is being started. No copy.

        Raises:
            UsageError: at any other time, or before the first row.
        """
        segment = self._segment.__getstate__()  # raises if no process is being started
        if self._ring is None:
            msg = (
                "a shared buffer must know the schema of its rows before it is passed to other processes: write a row "
                "first (and empty() the buffer, if it was only an example)"
            )
            raise UsageError(msg)
        options = (self._inner.max_size, self._inner.packed)
        return {"segment": segment, "options": options, "ranked": self._ranked, "schema": self._inner.schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the memory."""
        self._segment = Segment.__new__(Segment)
        self._segment.__setstate__(state["segment"])
        max_size, packed = state["options"]
        self._inner = LazyTensorStorage(max_size, packed=packed)
        self._inner.lay_out_in(self._segment, state["schema"])
        self._ranked = state["ranked"]
        self._ring = self._make_ring(create=False)
        self._process = os.getpid()

    def _make_ring(self, *, create: bool) -> SharedRing:
        nbytes = SharedRing.bytes_for(self.capacity, prioritized=self._ranked)
        return SharedRing(self._segment.block("ring", nbytes), self.capacity, prioritized=self._ranked, create=create)

    @property
    def ring(self) -> SharedRing:
        """The record of which slots hold rows.

        Raises:
            UsageError: before the first row.
        """
        if self._ring is None:
            msg = "the storage holds no rows yet: write some first"
            raise UsageError(msg)
        return self._ring

    def number_process(self) -> int:
        """Return a number, from 1, that no other call in any process returns; 0 before the first row."""
        return 0 if self._ring is None else self._ring.number_process()

    @property
    def capacity(self) -> int:
        """Maximum number of rows."""
        return self._inner.max_size

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, those of the ring and its priorities included; 0 before the first row."""
        return self._inner.nbytes + (0 if self._ring is None else self._ring.nbytes)

    @property
    def cursor(self) -> int:
        """Slot after the newest row reserved."""
        return 0 if self._ring is None else self._ring.cursor

    @property
    def shape(self) -> tuple[int, ...]:
        """`(slots,)`: the slots that an index can address; some may not hold a complete row at the moment."""
        return (0 if self._ring is None else self._ring.rows,)

    @property
    def default_collate(self) -> Callable[[Any], Any] | None:
        """None: rows are presented as they were written."""
        return self._inner.default_collate

    @property
    def schema(self) -> Schema | None:
        """Schema of a row; None before the first."""
        return self._inner.schema

    @property
    def laid_out(self) -> bool:
        """Whether the schema is known."""
        return self._ring is not None

    def __len__(self) -> int:
        """Number of complete rows."""
        return 0 if self._ring is None else self._ring.committed

    def __repr__(self) -> str:
        """Number of rows and fields."""
        fields = "not laid out yet" if self.schema is None else "; ".join(map(str, self.schema.leaves))
        return f"SharedStorage(rows={len(self)}, capacity={self.capacity}, fields=[{fields}])"

    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        """Check rows against the schema; the first rows define it, and memory is allocated.

        Raises:
            UsageError: if this process was forked before the first row, which it could not see.
        """
        if self._ring is not None:
            return self._inner.admit(data, lead)
        if os.getpid() != self._process:
            msg = (
                "this process was forked before the buffer knew the schema of its rows, so that it shares nothing: "
                "write a row before processes are started (and empty() the buffer, if it was only an example)"
            )
            raise UsageError(msg)
        self._inner.lay_out_in(self._segment, None)
        admitted = self._inner.admit(data, lead)
        if admitted[1] == 0:
            return admitted  # nothing was allocated
        self._ring = self._make_ring(create=True)
        return admitted

    def write(self, placement: Placement, payload: Any) -> None:
        """Copy rows to slots that were reserved for them."""
        self._inner.write(placement, payload)

    def gather(self, slots: Tensor, *, pin: bool = False) -> Any:
        """Copy rows; the caller compares generations."""
        return self._inner.gather(slots, pin=pin)

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy rows of each field; the caller compares generations."""
        return self._inner.fetch(requests, pin=pin)

    def present(self, payload: Any, batch: tuple[int, ...]) -> Any:
        """Nest rows as they were written. No copy."""
        return self._inner.present(payload, batch)

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
            leaves = self._inner.fetch([Request(i, slots) for i in range(len(schema.leaves))])
            columns = dict(zip(schema.column_names, leaves, strict=True))
        return {
            **self._inner.state_dict(),
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
        if state["form"] != self.form or state["single_copy"] or state["late"]:
            msg = "a shared buffer takes the rows of a LazyTensorStorage, without single_copy and fields added later"
            raise CheckpointError(msg)
        if state.get("objects"):
            msg = f"processes cannot share Python objects, and the checkpoint holds the fields {list(state['objects'])}"
            raise CheckpointError(msg)
        self._inner.check_state(state)
        rows = int(state["rows"])
        if state["schema"] is None or not rows:
            return None
        schema, columns = Schema.from_json(state["schema"]), dict(state["columns"])
        found = [columns[name] for name in schema.column_names]
        leaves = [as_bits(x)[order].view(x.dtype) for x in (y if isinstance(y, Tensor) else y.read() for y in found)]
        data = schema.build(leaves, (rows,), self.device)
        schema.flatten(data, (rows,), 1, exact=True)  # raises if something does not fit
        return data

    def clear(self) -> None:
        """Remove all rows; keep schema and memory."""
        if self._ring is not None:
            self._ring.clear()

    def close(self) -> None:
        """Close the shared file; the storage can then no longer be passed to other processes."""
        self._segment.close()

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> NoReturn:  # noqa: ARG002
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


def _checked(inner: Storage) -> LazyTensorStorage:
    """Return a storage whose rows can be shared.

    Raises:
        OptionError: if they cannot; the message says why.
    """
    if type(inner) is not LazyTensorStorage:
        msg = f"shared=True needs storage=LazyTensorStorage(max_size), got {type(inner).__name__}"
        raise OptionError(msg)
    reason = inner.why_private
    if reason is not None:
        msg = f"shared=True needs a new LazyTensorStorage(max_size) on the CPU, got one with {reason}"
        raise OptionError(msg)
    return inner
