"""SharedStorage: the rows of a buffer that several processes write and read at once."""

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
from ostinato.core.rows import Schema, as_bits, column_name
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
_MISSING = "this system has no memory that processes could share in the way it needs (it is there on Linux)"


class _Part(NamedTuple):
    """Where a block lies in the file."""

    name: str
    offset: int
    nbytes: int


def require_sharing() -> None:
    """Refuse to share where it cannot be done.

    Raises:
        OptionError: without the native extension, or on another system than Linux.
    """
    native = backend.native
    if getattr(native, "SharedRing", None) is None:
        missing = "the native extension of ostinato is missing or switched off" if native is None else _MISSING
        msg = f"shared=True cannot be had here: {missing}. Leave it out, or keep the buffer in one process"
        raise OptionError(msg)


@final
class Segment:
    """Blocks of memory, zero at first, that a process and those it starts have in common.

    Pickling it while a process is started hands the memory itself on; it is never copied, and cannot be pickled
    otherwise. There is no name that could be left behind, whoever is killed.

    Raises:
        OptionError: where processes cannot share memory.
    """

    device = _CPU

    def __init__(self) -> None:
        require_sharing()
        self._fd: int = backend.native.make_shared_memory()  # type: ignore[union-attr]
        self._parts: list[_Part] = []
        self._blocks: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Hand the memory to a process that is being started.

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
        """Map what the other process has mapped."""
        self._fd = state["fd"].detach()
        self._parts = state["parts"]
        self._blocks = {part.name: self._map(part) for part in self._parts}

    def __del__(self) -> None:
        """Give the file back; mappings that are still in use keep the memory."""
        if "_fd" in self.__dict__:  # not so if memory could not be had
            os.close(self._fd)

    def check(self, nbytes: int) -> None:
        """Compare with the memory that is free.

        Raises:
            StorageMemoryError: naming the bytes needed and the bytes there are.
        """
        HeapMemory(_CPU).check(nbytes)

    def block(self, name: str, nbytes: int) -> Tensor:
        """Return the block of this name, uint8 `[nbytes]`: the one that is there, or a new one of zeros."""
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
"""Reads that writers may spoil before the next one makes them wait."""


@final
class SharedStorage(Storage):
    """Rows in memory that processes share; what `ReplayBuffer(shared=True)` makes of a `LazyTensorStorage`.

    The first rows show their form, and the memory is taken. From then on the storage can go to other processes: as an
    argument of a process that is being started, or by fork. It holds the `ring` that says which slots hold rows.

    What is read is always a copy, of rows that are whole.

    Args:
        inner: says how many rows there may be, and how they are laid out; it must be empty.
        ranked: whether there are priorities.

    Raises:
        OptionError: where processes cannot share memory, or for a storage whose rows cannot be shared.
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
        """Travel to a process that is being started: the memory is handed on, nothing is copied.

        Raises:
            UsageError: at any other time, or if no row has shown its form.
        """
        segment = self._segment.__getstate__()  # says so if nothing is being started
        if self._ring is None:
            msg = (
                "a shared buffer must know the form of its rows before other processes get it: write a row first (and "
                "empty() the buffer, if it was only an example)"
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
        """Which slots hold rows.

        Raises:
            UsageError: before the first row.
        """
        if self._ring is None:
            msg = "the storage holds no rows yet: write some first"
            raise UsageError(msg)
        return self._ring

    def number_process(self) -> int:
        """Return another number in each process that asks, from 1; 0 before the first row."""
        return 0 if self._ring is None else self._ring.number_process()

    @property
    def capacity(self) -> int:
        """Most rows that fit."""
        return self._inner.max_size

    @property
    def nbytes(self) -> int:
        """Bytes shared, those of the ring and its priorities included; 0 before the first row."""
        return self._inner.nbytes + (0 if self._ring is None else self._ring.nbytes)

    @property
    def cursor(self) -> int:
        """Slot after the newest row reserved."""
        return 0 if self._ring is None else self._ring.cursor

    @property
    def shape(self) -> tuple[int, ...]:
        """`(slots,)`: those that an index may name; some may hold no whole row at the moment."""
        return (0 if self._ring is None else self._ring.rows,)

    @property
    def default_collate(self) -> Callable[[Any], Any] | None:
        """None: rows are presented as they were put in."""
        return self._inner.default_collate

    @property
    def schema(self) -> Schema | None:
        """Form of a row; None before the first."""
        return self._inner.schema

    @property
    def laid_out(self) -> bool:
        """Whether rows have shown their form."""
        return self._ring is not None

    def __len__(self) -> int:
        """Rows that are whole."""
        return 0 if self._ring is None else self._ring.committed

    def __repr__(self) -> str:
        """Fill and form."""
        fields = "not laid out yet" if self.schema is None else "; ".join(map(str, self.schema.leaves))
        return f"SharedStorage(rows={len(self)}, capacity={self.capacity}, fields=[{fields}])"

    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        """Check rows against the schema; the first ones set it, and the memory is taken.

        Raises:
            UsageError: if another process was forked before the first row: it could not see it.
        """
        if self._ring is not None:
            return self._inner.admit(data, lead)
        if os.getpid() != self._process:
            msg = (
                "this process was forked before the buffer knew the form of its rows, so that it shares nothing: write "
                "a row before processes are started (and empty() the buffer, if it was only an example)"
            )
            raise UsageError(msg)
        self._inner.lay_out_in(self._segment, None)
        admitted = self._inner.admit(data, lead)
        if admitted[1] == 0:
            return admitted  # no rows lay nothing out
        self._ring = self._make_ring(create=True)
        return admitted

    def set(self, placement: Placement, payload: Any) -> None:
        """Copy rows to slots that were reserved for them."""
        self._inner.set(placement, payload)

    def get(self, slots: Tensor, *, pin: bool = False) -> Any:
        """Copy rows as they are; who asks compares stamps."""
        return self._inner.get(slots, pin=pin)

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy rows for each field as they are; who asks compares stamps."""
        return self._inner.fetch(requests, pin=pin)

    def present(self, payload: Any, batch: tuple[int, ...]) -> Any:
        """Nest rows as they were put in. No copy."""
        return self._inner.present(payload, batch)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return the rows at an index, or a field of all of them by its key. Copy.

        Raises:
            SlotError: if the index is out of range, or a slot holds no whole row.
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
        """Return the payload of rows that are whole, int64 `[n]`.

        Raises:
            SlotError: if a slot holds no whole row.
        """
        for _ in range(_FREE_TRIES):
            payload = self._try_whole(slots)
            if payload is not None:
                return payload
        with self.ring.lock:  # now nobody reserves
            return self._try_whole(slots)

    def _try_whole(self, slots: Tensor) -> Any:
        """Return rows, or None if one was replaced meanwhile."""
        before = self.ring.generations(slots)
        if bool((before <= 0).any()):
            bad = slots[before <= 0][:8].tolist()
            msg = (
                f"the slots {bad} hold no whole row: somebody is writing there, or died doing so; read others, or wait "
                "until the ring has come round"
            )
            raise SlotError(msg)
        payload = self.get(slots)
        return payload if bool((self.ring.generations(slots) == before).all()) else None

    def snapshot(self, slots: Tensor, cursor: int) -> dict[str, Any]:
        """Return the state of a `LazyTensorStorage` that holds the rows at `slots`, in this order. Copy.

        The caller holds the ring's lock; the slots hold whole rows.
        """
        schema, columns = self.schema, {}
        if schema is not None:
            leaves = self._inner.fetch([Request(i, slots) for i in range(len(schema.leaves))])
            columns = {column_name(leaf.path, i): leaves[i] for i, leaf in enumerate(schema.leaves)}
        return {
            **self._inner.state_dict(),
            "rows": int(slots.shape[0]),
            "cursor": cursor,
            "capacity": self.capacity,
            "columns": columns,
        }

    def rows_of(self, state: dict[str, Any], order: Tensor) -> Any:
        """Return the rows of a tensor storage's state, nested, in the order given (int64 `[rows]`); None for no rows.

        Raises:
            CheckpointError: if they are of another form, or more than fit.
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
        found = [columns[column_name(leaf.path, i)] for i, leaf in enumerate(schema.leaves)]
        leaves = [as_bits(x)[order].view(x.dtype) for x in (y if isinstance(y, Tensor) else y.read() for y in found)]
        data = schema.build(leaves, (rows,), self.device)
        schema.flatten(data, (rows,), 1, exact=True)  # says what does not fit
        return data

    def clear(self) -> None:
        """Forget all rows, keep form and memory."""
        if self._ring is not None:
            self._ring.clear()

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> NoReturn:  # noqa: ARG002
        """Refuse: rows of a shared buffer are written by `add` and `extend` alone."""
        refuse_edit()

    def state_dict(self) -> NoReturn:
        """Refuse: the rows alone are no state."""
        refuse_state()

    def load_state_dict(self, state: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        """Refuse: the rows alone are no state."""
        refuse_state()


def refuse_edit() -> NoReturn:
    """Refuse to write to rows in place.

    Raises:
        UsageError: always.
    """
    msg = "rows of a shared buffer cannot be edited in place: write them anew with add() or extend()"
    raise UsageError(msg)


def refuse_state() -> NoReturn:
    """Refuse to save a storage without its buffer.

    Raises:
        UsageError: always.
    """
    msg = "the storage of a shared buffer is saved with the buffer: use the buffer's dumps() or state_dict()"
    raise UsageError(msg)


def _checked(inner: Storage) -> LazyTensorStorage:
    """Return a storage whose rows can be shared.

    Raises:
        OptionError: otherwise, saying why.
    """
    if type(inner) is not LazyTensorStorage:
        msg = f"shared=True needs storage=LazyTensorStorage(max_size), got {type(inner).__name__}"
        raise OptionError(msg)
    reason = inner.why_private
    if reason is not None:
        msg = f"shared=True needs a new LazyTensorStorage(max_size) on the CPU, got one with {reason}"
        raise OptionError(msg)
    return inner
