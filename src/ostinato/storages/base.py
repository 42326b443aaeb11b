"""Storage: the base class of all storages, which keep rows by slot."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import plain_index, read_integers, select
from ostinato.core.kinds import require_eager, show_path
from ostinato.core.records import Picks, Run
from ostinato.core.ring import Ring
from ostinato.core.rows import Flat
from ostinato.durable.progress import BYTES, Progress
from ostinato.errors import (
    CapacityError,
    KeyMissingError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    SlotError,
    UsageError,
)
from ostinato.storages.checkpoint import RowHooks, StorageCheckpointerBase
from ostinato.storages.columns import owned, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path as FilePath

    from ostinato.core.counts import BufferCounts
    from ostinato.core.records import Placement, Plan, Request
    from ostinato.core.rows import Path, Schema
    from ostinato.durable.progress import ProgressOption
    from ostinato.storages.coded import Budget
    from ostinato.storages.table import Table

__all__ = ["Checkpointer", "Storage", "check_capacity", "check_ndim"]

_MOST = 2**40
_DIRECTORIES = StorageCheckpointerBase()
"""The checkpointer of storages without one of their own."""


class Checkpointer(Protocol):
    """Saves and loads a storage; see `Storage.checkpointer`."""

    def dumps(self, storage: Any, path: Any) -> None:
        """Save a storage."""

    def loads(self, storage: Any, path: Any) -> None:
        """Load a storage."""


class Sharing:
    """What the processes that have the rows of a storage share beside them. Here, one process has the rows."""

    def follow_ring(self, storage: Storage, ring: Ring) -> Ring:
        """Return the ring of a buffer: the one that it has, or a new one for another capacity or device."""
        if (ring.capacity, ring.device) == (storage.capacity, storage.device):
            return ring
        return Ring(storage.capacity, storage.device, after=ring.written)

    def follow_counts(self, storage: Storage, counts: BufferCounts) -> BufferCounts:  # noqa: ARG002
        """Return what a buffer counts: the counts that it has, or others that go on from them."""
        return counts

    def load_counts(self, counts: BufferCounts, loaded: BufferCounts) -> BufferCounts:  # noqa: ARG002
        """Return what a buffer counts after a load: the counts that were loaded."""
        return loaded

    def taking(self, storage: Storage, filled: Storage) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which `storage.take(filled)` cannot fail."""
        return nullcontext()


class Storage(RowHooks, ABC):
    """Base class of all storages. A storage of your own subclasses it and implements the abstract methods.

    Rows are written in two steps, so that bad rows raise before anything changes: `admit` checks rows and returns a
    *payload* (an object that only the storage understands), `write` writes a payload to slots. For reading, `gather`
    copies slots into a payload, and `present` gives the rows the structure in which they were written.

    Slots are flat: with `ndim=2`, slot `s` is step `s // num_envs` of environment `s % num_envs`.

    Not thread-safe: the buffer holds its lock during `write`. `gather` may run while another thread writes, even to
    the same slots: the buffer then reads the batch again under its lock, so `gather` only must not crash.

    A storage that owns files is closed with `close()`, or by a `with` block.

    `set`, `get`, `dumps` and the other methods for rows by index use a storage without a buffer. A storage that a
    buffer owns may be used so while no other thread uses the buffer, which takes over new rows at its next call, and
    reads rows that were edited again.

    Args:
        max_size: capacity in rows, for subclasses that do not define `capacity`.
        checkpointer: saves and loads the storage in `dumps` and `loads`: an object with the methods
            `dumps(storage, path)` and `loads(storage, path)`; None for a checkpoint directory of this library.
        compilable: no effect: reads and writes work around a compiled step in any case.

    Raises:
        CapacityError: if `max_size` is not a positive integer.
        KindError: if the checkpointer does not have these methods.
    """

    form: str = "own"
    """Kind of state that `state_dict` returns; storages with equal `form` load each other's checkpoints."""
    ndim: int = 1
    """Number of batch dimensions: 1 for rows, 2 for time x environments."""
    ring_only: bool = False
    """Whether rows must be written in ring order; writers that choose slots then raise an error."""
    supports_conditional_update: bool = False
    """Whether rows have fields that `update_if_present` can write, whatever was written so far."""
    budget: Budget | None = None
    """When rows leave because they exceed a number of bytes (`max_bytes`); rows must then be in ring order."""
    schema: Schema | None = None
    """Schema of a row; None for storages without fields, and before the first row."""
    dense: Table | None = None
    """Memory of fields, in which row `i` is slot `i`; None if there is none.

    A save copies it piece by piece while writers continue; other `columns` are written while writers wait. The memory
    of a slot may change only in `write` and in edits of that slot.
    """
    laid_out: bool = True
    """Whether the schema of the rows is fixed."""
    nbytes: int = 0
    """Bytes of the rows, as far as known."""
    default_collate: Callable[[Any], Any] | None = None
    """Function that makes a batch of presented rows, unless the buffer has a `collate_fn`; None for none."""
    num_envs: int = 1
    """Number of environments: the second batch dimension with `ndim=2`, else 1."""
    device: torch.device = torch.device("cpu")
    """Device of rows and samples."""
    mappable: bool = False
    """Whether `load_state_dict` takes files mapped into memory as its rows (`mapped` in the state)."""
    shared_init: bool = False
    """Whether the buffer of this storage is shared between processes from the start."""
    shared: bool = False
    """Whether other processes write and read the rows; see `ReplayBuffer.share`."""
    sharing: Sharing = Sharing()
    """What these processes share beside the rows."""
    rotates: bool = False
    """Whether `load_state_dict` moves the rows of a full ring to another capacity; see `seam`."""
    exposed: bool = False
    """Whether views of rows were returned. Rows can change through them, so incremental saves write all rows."""
    episode_ends: Tensor | None = None
    """bool `[rows]`: the last rows of episodes, of a storage that knows them without its fields; None for others."""
    writes: int = 0
    """Number of writes by buffers, and by `set` and `loads`: a buffer takes over rows that it has not written."""
    edits: int = 0
    """How many of these changed rows present alone: a buffer reads their values again, and keeps their order."""
    no_hooks: tuple[type[OstinatoError], str] | None = (
        KindError,
        "no fields that a hook could convert: use LazyTensorStorage or LazyMemmapStorage",
    )

    _size_given: int | None = None
    _checkpointer: Checkpointer | None = None

    def __init__(
        self,
        max_size: int,
        checkpointer: Checkpointer | None = None,
        compilable: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        self._size_given = check_capacity(max_size)
        self.checkpointer = checkpointer

    @property
    def capacity(self) -> int:
        """Maximum number of rows (of all environments, with `ndim=2`)."""
        if self._size_given is None:
            msg = f"{type(self).__name__} has no capacity: call super().__init__(max_size), or define the property"
            raise UsageError(msg)
        return self._size_given

    @property
    def max_size(self) -> int:
        """The requested capacity; with `ndim=2`, `capacity` rounds it up to whole steps of all environments."""
        return self.capacity

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What saves and loads this storage in `dumps` and `loads`; None for checkpoint directories of this library.

        `dumps` of a buffer saves the rows of its storage without it.
        """
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Checkpointer | None) -> None:
        if value is not None and not (
            callable(getattr(value, "dumps", None)) and callable(getattr(value, "loads", None))
        ):
            msg = f"a checkpointer has the methods dumps(storage, path) and loads(storage, path), got {value!r}"
            raise KindError(msg)
        self._checkpointer = value

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows present: `(rows,)`, or `(steps, num_envs)` with `ndim=2`."""
        return torch.Size((len(self),) if self.ndim == 1 else (len(self) // self.num_envs, self.num_envs))

    @property
    def cursor(self) -> int:
        """Slot after the newest row, where a buffer continues if the storage already has rows."""
        return len(self) % self.capacity

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with stored rows, as views of them do. False where rows are not in tensors."""
        return self.dense is not None and self.dense.shares_memory(tensor)

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows present: the slots `[0, len)`."""

    @abstractmethod
    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        """Check rows and return `(payload, number of rows)`; nothing changes if this raises.

        Args:
            data: one row (`lead=0`) or rows with `lead` leading batch dimensions (or a list of rows).
            lead: 0 from `add`, 1 from `extend`; storages with `ndim=2` take one more.

        Raises:
            SchemaError: if the rows do not match those stored.
            KindError: if the storage cannot keep rows of this kind.
        """

    def lay_out(self, schema: Schema) -> None:
        """Fix the schema before the first rows, and allocate the memory; does nothing if it is fixed already.

        Storages without fields have no schema, and any rows may follow.

        Raises:
            StorageMemoryError: if there is too little memory; nothing has changed.
        """

    def forget_form(self) -> None:
        """Drop the schema of the first rows, which the writer did not accept."""

    @abstractmethod
    def write(self, placement: Placement, payload: Any) -> None:
        """Write the rows of a payload to the slots of a placement. One copy."""

    @abstractmethod
    def gather(self, slots: Tensor, *, pin: bool = False) -> Any:
        """Return a payload with the rows at `slots` (int64 `[B]`, each in `[0, len)`). Copy.

        `pin` requests page-locked memory; storages of Python objects may leave that to the buffer.
        """

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:  # noqa: ARG002
        """Return one tensor `[n, *leaf.shape]` for each request; n may differ. Copy.

        Sampling units read different rows of each field with it. May run while another thread writes, like `gather`.

        Raises:
            IndexError: if a slot is out of range.
            OptionError: if the storage has no fields.
        """
        msg = (
            f"{type(self).__name__} cannot read single fields, which this sample_unit asks for: use a storage of "
            "tensors (LazyTensorStorage), or sample without sample_unit"
        )
        raise OptionError(msg)

    def read_plan(self, plan: Plan, *, pin: bool = False) -> Any:
        """Return the payload of a plan's batch: the rows of its requests, and the arithmetic that follows. Copy.

        For storages with fields it is a `Flat`.

        Raises:
            IndexError: if a slot is out of range.
            OptionError: if the storage has no fields.
        """
        return Flat(plan.fold(self.fetch(plan.requests(), pin=pin)), (plan.records.shape[0],))

    @abstractmethod
    def present(self, payload: Any, batch: tuple[int, ...]) -> Any:
        """Return the rows of a payload with their original structure and the leading dimensions `batch`."""

    def show_payload(self, payload: Any) -> Any:
        """Return gathered rows as plain values and tensors, for a checkpoint with draws that were made ahead.

        Raises:
            CheckpointError: if a checkpoint cannot hold them.
        """
        return pack(payload, allow_pickle=False)

    def read_payload(self, saved: Any, schema: Schema | None, rows: int) -> Any:  # noqa: ARG002
        """Return what `show_payload` returned, by copy.

        Args:
            saved: what it returned.
            schema: of the rows, for storages with fields.
            rows: their number.

        Raises:
            CheckpointError: if it is not the payload of so many rows.
        """
        return owned(unpack(saved, allow_pickle=False))

    @abstractmethod
    def clear(self) -> None:
        """Remove all rows; keep the memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the rows present and what is needed to read them. Tensors are not copied.

        The keys `form` and `capacity` are required. `columns` (name -> tensor `[rows, ...]`) and `items` (a list of
        objects) are written to files of their own; everything else must be plain values and small tensors.
        """

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that `load_state_dict` accepts a state. Buffers call it before a save replaces an older one.

        Raises:
            CheckpointError: naming what does not fit.
        """

    def blank(self) -> Storage:
        """Return another storage with the same options, which a load fills while this one keeps its rows.

        The default is a deep copy. A storage that does not need one overrides this and `take`.
        """
        return copy.deepcopy(self)

    def take(self, filled: Storage) -> None:
        """Take over the rows of a storage that `blank` returned, and that a load has filled; it is not used afterwards.

        The default copies them into the memory of this storage, which others may refer to.
        """
        self.load_state_dict(filled.state_dict())

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Copy. A state that does not fit raises before anything changes.

        Columns may be tensors, or objects with `dtype`, `shape`, `read_into(tensor)` and `read()`.
        """

    def scores(self, payload: Any, path: tuple[Hashable, ...]) -> Tensor | None:  # noqa: ARG002
        """Return the field at `path` of a payload, for writers that rank rows; None if it has no such field."""
        return None

    def scores_at(self, slots: Tensor, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of the rows at `slots` (int64 `[n]`); None if a row has no such field."""
        return self.scores(self.gather(slots), path)

    def field_at(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return one field of the rows at `slots` (int64 `[n]`): `[n, *shape]`, or a list of Python objects. Copy.

        Fields of Python objects are read with their whole rows.

        Raises:
            KeyMissingError: if rows lack the field.
            KindError: if the storage has no fields.
        """
        if self.schema is None:
            msg = (
                f"the sampler reads {show_path(path)}, and the rows have no fields: it needs a storage whose slices "
                f"return a tensor collection, such as LazyTensorStorage. Plain {type(self).__name__} is not supported"
            )
            raise KindError(msg)
        found: Any = self.scores_at(slots, path)
        if found is None:  # a field of Python objects, or one that was added later
            found = kinds.find_field(self.present(self.gather(slots), (slots.shape[0],)), path)
        if found is None:
            known = ", ".join(map(show_path, self.schema.paths))
            msg = (
                f"Could not find key {show_path(path)} in the replay buffer: rows have {known}; write the field, or "
                "name another"
            )
            raise KeyMissingError(msg)
        return found if isinstance(found, Tensor) else list(found.tolist() if hasattr(found, "tolist") else found)

    @abstractmethod
    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return presented rows at an index: int, slice, tensor, mask or tuple.

        A *view* if the storage can return one, else a copy. `swap` addresses `[num_envs, steps]` with `ndim=2`.

        Raises:
            SlotError: if the index is out of range of the rows present.
        """

    def check_new_fields(self, index: Any, slots: Tensor, data: Any) -> None:
        """Check that an edit brings no field that other rows would lack; rows of some storages may have any fields.

        Args:
            index: what the user has chosen the rows by.
            slots: int64 `[n]`.
            data: as for `prepare_edit`, which has checked it.

        Raises:
            SchemaError: naming the field.
        """

    @abstractmethod
    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check `data` (leading dimensions `batch`) for the rows at `slots` (int64 `[n]`); return what writes it.

        Raises:
            SchemaError: if it does not match the rows stored.
        """

    def prepare_field(
        self,
        path: tuple[Hashable, ...],
        slots: Tensor,  # noqa: ARG002
        value: Any,  # noqa: ARG002
        batch: tuple[int, ...],  # noqa: ARG002
    ) -> Callable[[], None]:
        """Check the values of one field for the rows at `slots`; return a function that writes them.

        Raises:
            KindError: if the storage has no fields.
        """
        msg = f"{type(self).__name__} has no fields to write ({path!r}): replace whole rows with rb[index] = rows"
        raise KindError(msg)

    # -- without a buffer ----------------------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at positions of the first dimension (with `ndim=2`: steps of all environments). One copy.

        Args:
            cursor: an int for one row (or step); a slice, list, range, array or tensor `[n]` for n of them, of which
                the last wins if positions repeat.
            data: the rows, as `add` (int) and `extend` of a buffer take them. If all positions hold rows already, a new
                key becomes a field of these rows.
            set_cursor: count rows at new positions as present. False replaces rows present only.

        Raises:
            SchemaError: if the rows do not match those stored, or there is not one for each position.
            SlotError: if a position is beyond the capacity, or would leave an empty slot before it; without
                `set_cursor`, if it holds no row.
        """
        require_eager("writing rows")
        if not set_cursor:
            _edit(self, list(cursor) if isinstance(cursor, tuple) and self.ndim == 1 else cursor, data)
            return
        steps = self.shape[0]
        positions = _positions(cursor, steps, self)
        if steps and positions.numel() and int(positions.max()) < steps:
            _edit(self, int(positions) if positions.ndim == 0 else positions, data)
            return
        known = self.laid_out
        payload, rows = self.admit(data, 0 if positions.ndim == 0 else 1)
        try:
            self.write(_placement(self, positions.reshape(-1), rows), payload)
        except BaseException:
            if not known:
                self.forget_form()
            raise
        self.writes += 1
        self.exposed = True

    def get(self, index: Any) -> Any:
        """Return rows at an index as they were written, without transforms and collation; see `read`."""
        return self.read(index)

    __getitem__ = get

    def contains(self, item: Any) -> bool | Tensor:
        """Return whether positions of the first dimension hold rows; negative ones count from the last row.

        Args:
            item: an int, or a tensor of integers. With `ndim=2` the last dimension of a tensor `[..., 2]` is
                (step, environment).

        Returns:
            A bool for an int; for a tensor a bool tensor of its shape, `[...]` for pairs.

        Raises:
            KindError: for other items.
        """
        if isinstance(item, (int, np.integer)) and not isinstance(item, (bool, np.bool_)):
            return -self.shape[0] <= int(item) < self.shape[0]
        if isinstance(item, Tensor) and not (item.is_floating_point() or item.is_complex() or item.dtype is torch.bool):
            pairs = self.ndim > 1 and item.ndim > 1 and item.shape[-1] == self.ndim
            sizes = torch.tensor(self.shape, dtype=torch.int64, device=item.device) if pairs else self.shape[0]
            inside: Tensor = (item >= -sizes) & (item < sizes)
            return inside.all(-1) if pairs else inside
        msg = f"contains() takes an int or a tensor of integers, type {type(item)} is not supported yet"
        raise KindError(msg)

    def flatten(self) -> Storage:
        """Return a storage of the rows present with `ndim=1`: this storage, or with `ndim=2` one on the same memory.

        Raises:
            UsageError: if there are no rows, or the storage cannot share its memory.
        """
        if self.ndim > 1:
            msg = f"{type(self).__name__} with ndim={self.ndim} cannot be flattened: read its rows with storage[:]"
            raise UsageError(msg)
        return self

    def attach(self, buffer: Any) -> None:
        """Do nothing: a buffer sees what its storage holds without being told. For compatibility with TorchRL."""

    def dumps(self, path: str | FilePath, *, progress: ProgressOption = None) -> None:
        """Write the rows present to a checkpoint directory; an older checkpoint there is replaced when it is complete.

        The directory is for `loads` of a storage. To continue training, save the buffer: `rb.dumps`.

        Args:
            path: a directory that is empty, does not exist, or holds such a checkpoint.
            progress: the bytes done and their total; see `ProgressOption`.

        Raises:
            UsageError: if no row was ever written.
            CheckpointError: if something cannot be saved, or the path holds other things.
            StorageMemoryError: if the disk is too small.
        """
        with Progress(progress, "save", unit=BYTES):
            (_DIRECTORIES if self._checkpointer is None else self._checkpointer).dumps(self, path)

    def loads(self, path: str | FilePath, *, progress: ProgressOption = None) -> None:
        """Replace the rows by those that `dumps` wrote. Copy. If they do not fit, nothing is changed.

        Args:
            path: the directory.
            progress: the bytes done and their total; see `ProgressOption`.

        Raises:
            CheckpointNotFoundError: if there is no checkpoint.
            CheckpointError: if it does not fit this storage.
            UsageError: if rows that are no TensorDicts are loaded before the first rows were written.
            DamagedFileError: naming the damaged file.
        """
        with Progress(progress, "load", unit=BYTES):
            (_DIRECTORIES if self._checkpointer is None else self._checkpointer).loads(self, path)

    dump = save = dumps
    load = loads

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows present: `set(index, data, set_cursor=False)`."""
        self.set(index, data, set_cursor=False)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows present (with `ndim=2`: steps), each as `storage[i]` returns it."""
        for i in range(self.shape[0]):
            yield self.read(i)

    def __contains__(self, item: Any) -> bool:
        """Whether positions hold rows: `contains(item)`, for all of a tensor."""
        found = self.contains(item)
        return bool(found.all()) if isinstance(found, Tensor) else found

    def close(self) -> None:
        """Release the files of the storage, which cannot be used afterwards; does nothing if it has none."""

    def __enter__(self) -> Self:
        """Return the storage; the end of the `with` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the storage."""
        self.close()


def _edit(storage: Storage, index: Any, data: Any) -> None:
    """Replace rows present."""
    picked = select(index, storage.shape, storage.device)
    slots = picked.slots
    if picked.span is not None:
        slots = torch.arange(len(storage), device=storage.device)[picked.span].contiguous()
    change = storage.prepare_edit(slots, data, picked.batch)
    storage.check_new_fields(index, slots, data)
    change()
    storage.writes += 1
    storage.edits += 1
    storage.exposed = True  # a buffer does not know of these rows, so an incremental save writes all


def _positions(cursor: Any, steps: int, storage: Storage) -> Tensor:
    """Return positions in the first dimension, int64 `[n]`, or `[]` for one.

    Raises:
        KindError: if the cursor is not an integer, slice, list, range, array or tensor.
        SlotError: if a position is negative and no row has it.
    """
    if isinstance(cursor, slice):
        span = range(*cursor.indices(storage.capacity // storage.num_envs))
        if len(span) > _MOST:
            msg = f"{cursor!r} of an unbounded storage selects {len(span)} positions: give the slice a stop"
            raise SlotError(msg)
        return torch.arange(span.start, max(span.start, span.stop), span.step, device="cpu")
    given = plain_index(list(cursor) if isinstance(cursor, tuple) else cursor)
    if isinstance(given, Tensor) and given.dtype is torch.bool:
        given = given.nonzero().reshape(-1)
    positions = read_integers("a cursor", given).cpu().to(torch.int64)
    if positions.ndim > 1:
        msg = f"a cursor is an integer or has one dimension, got positions of the shape {list(positions.shape)}"
        raise KindError(msg)
    positions = torch.where(positions < 0, positions + steps, positions)
    if positions.numel() and int(positions.min()) < 0:
        msg = f"position {int(positions.min()) - steps} is out of range for {steps} rows"
        raise SlotError(msg)
    return positions


def _placement(storage: Storage, positions: Tensor, rows: int) -> Placement:
    """Return the slots of rows that go to positions of the first dimension.

    Raises:
        SchemaError: if there is not one row for each position.
        SlotError: if a position is beyond the capacity, or a slot before it would stay empty.
        OptionError: if the storage needs the order of a ring, and this is another.
    """
    envs, capacity, present = storage.num_envs, storage.capacity, len(storage)
    if len(positions) * envs != rows:
        msg = f"{len(positions) * envs} slots are chosen, {rows} rows were given: give one for each"
        raise SchemaError(msg)
    steps = capacity // envs
    if len(positions) and int(positions.max()) >= steps:
        msg = (
            "Cannot append data to the storage: "
            f"maximum capacity is {steps}, the index of an item to be set is {int(positions.max())}"
        )
        raise SlotError(msg)
    slots = (positions[:, None] * envs + torch.arange(envs, device="cpu")).reshape(-1)
    fresh = torch.unique(slots[slots >= present])
    if not torch.equal(fresh, torch.arange(present, present + len(fresh), device="cpu")):
        msg = (
            "Cannot append data located more than one item away from the storage size: the storage size is "
            f"{present // envs}, and of the positions from there on {fresh[::envs].tolist()[:5]} were given, which "
            "would leave others empty"
        )
        raise SlotError(msg)
    start = int(slots[0]) if rows else present % capacity
    in_order = rows <= capacity and torch.equal(slots, (torch.arange(rows, device="cpu") + start) % capacity)
    if storage.ring_only and not (in_order and start == storage.cursor):
        msg = f"rows of this storage are written in ring order from slot {storage.cursor} on, got {positions.tolist()}"
        raise OptionError(msg)
    if in_order:
        return Run(start, rows, capacity)
    slots = slots.to(storage.device)
    return Picks(slots, torch.arange(rows, device=storage.device), slots)


def check_capacity(max_size: object) -> int:
    """Return a capacity.

    Raises:
        CapacityError: if it is not a positive integer.
    """
    if isinstance(max_size, bool) or not hasattr(max_size, "__index__") or max_size.__index__() < 1:
        msg = f"max_size must be an integer of at least 1 (rows), got {max_size!r}"
        raise CapacityError(msg)
    return int(max_size.__index__())


def check_ndim(ndim: object) -> int:
    """Return a number of batch dimensions.

    Raises:
        OptionError: if it is neither 1 nor 2.
    """
    if ndim not in (1, 2) or isinstance(ndim, bool):
        msg = (
            f"ndim must be 1 (rows) or 2 (environments and time), got {ndim!r}: episodes run along time within one "
            "environment, so flatten further batch dimensions into that of environments"
        )
        raise OptionError(msg)
    return int(ndim)


def check_device(device: torch.device | str | int) -> torch.device:
    """Return a device with the index that its tensors have: `cuda` becomes `cuda:0`, so that devices compare equal.

    Raises:
        OptionError: if torch cannot create a tensor there.
        RuntimeError: if there is no device of this name.
    """
    wanted = torch.device(device)
    try:
        return torch.empty(0, dtype=torch.uint8, device=wanted).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        reason = str(error).partition(". ")[0]
        msg = (
            f"device={str(wanted)!r} was asked for, but torch sees no {wanted.type.upper()} device here ({reason}): "
            "use device='cpu' or 'auto'"
        )
        raise OptionError(msg) from error
