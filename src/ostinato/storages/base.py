"""What every storage can do: admit rows at the door, set and get them by slot, present them as they came."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ostinato.errors import CapacityError, CheckpointError, KindError, OptionError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from ostinato.core.records import Placement, Request
    from ostinato.core.rows import Path, Schema
    from ostinato.storages.table import RowArray

__all__ = ["Storage", "check_capacity", "check_hook", "check_ndim"]


class Storage(ABC):
    """Base of all storages; a storage of your own subclasses it and implements the abstract methods.

    Data passes in two steps, so that bad rows are refused before anything changes: `admit` checks rows and
    returns a *payload* (whatever the storage likes, opaque to the buffer), `set` writes a payload to slots.
    Reading is the mirror: `get` copies slots into a payload, `present` gives it the form the user put in.

    Slots are flat: with `ndim=2`, slot `s` is step `s // num_envs` of environment `s % num_envs`.

    Not thread-safe: the buffer holds its lock during `set`. `get` may run while another thread writes, even to the same
    slots: the buffer then reads the batch again under its lock, so `get` only has to survive.
    """

    form: str = "own"
    """What kind of state `state_dict` gives; storages of one form load each other's checkpoints."""
    ndim: int = 1
    """Batch dimensions of a row's position: 1, or 2 for time x environments."""
    ring_only: bool = False
    """Whether rows must be written in ring order: writers that pick slots are refused."""
    device: torch.device = torch.device("cpu")
    """Where rows are kept and samples appear."""
    mappable: bool = False
    """Whether `load_state_dict` takes files mapped into memory as its rows (`mapped` in the state)."""
    exposed: bool = False
    """Whether somebody may hold views of rows, and change them unnoticed: incremental saves then write everything."""
    save_hooks: tuple[Callable[..., Any], ...] = ()
    """What converts rows on their way into a checkpoint, in the order of registration."""
    load_hooks: tuple[Callable[..., Any], ...] = ()
    """What converts them back, in the order of registration."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Most rows that fit (cells, with `ndim=2`)."""

    @property
    def max_size(self) -> int:
        """The requested capacity; with `ndim=2`, `capacity` rounds it up to whole steps of all environments."""
        return self.capacity

    @property
    def num_envs(self) -> int:
        """Number of environments: the second batch dimension with `ndim=2`, else 1."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes held for rows, as far as the storage can tell."""
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows present: `(rows,)`, or `(steps, num_envs)` with `ndim=2`."""
        return (len(self),)

    @property
    def cursor(self) -> int:
        """Slot after the newest row; where a writer goes on when a storage comes with rows."""
        return len(self) % self.capacity

    @property
    def default_collate(self) -> Callable[[Any], Any] | None:
        """What makes a batch of presented rows, unless the buffer has a `collate_fn`; None leaves them as they are."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Rows present: the slots `[0, len)`."""

    @abstractmethod
    def admit(self, data: Any, lead: int) -> tuple[Any, int]:
        """Check rows and return `(payload, rows)`; nothing changes if they are refused.

        Args:
            data: one row (`lead=0`) or rows with `lead` leading batch dimensions (or a list of rows).
            lead: 0 from `add`, 1 from `extend`; storages with `ndim=2` take one more.

        Raises:
            SchemaError: rows of another form than those stored.
            KindError: rows of a kind that this storage cannot keep.
        """

    @property
    def laid_out(self) -> bool:
        """Whether the form of the rows is fixed."""
        return True

    def forget_form(self) -> None:  # noqa: B027
        """Drop the form taken from the first rows, which were refused after all (a writer said no)."""

    @abstractmethod
    def set(self, placement: Placement, payload: Any) -> None:
        """Write the payload's rows to the slots of the placement. One copy."""

    @abstractmethod
    def get(self, slots: Tensor, *, pin: bool = False) -> Any:
        """Return a payload with the rows at `slots` (int64 `[B]`, each in `[0, len)`). Copy.

        `pin` asks for page-locked memory; storages of Python objects may leave that to the buffer.
        """

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:  # noqa: ARG002
        """Return one tensor `[n, *leaf.shape]` for each request; n may differ. Copy.

        What units read: other rows for each field. May run while another thread writes, as `get` may.

        Raises:
            IndexError: if a slot is out of range.
            OptionError: if the storage has no fields.
        """
        msg = (
            f"{type(self).__name__} cannot read single fields, which this sample_unit asks for: use a storage of "
            "tensors (LazyTensorStorage), or sample without sample_unit"
        )
        raise OptionError(msg)

    @property
    def schema(self) -> Schema | None:
        """Form of a row; None for storages without fields, and before the first row."""
        return None

    def assemble(
        self,
        leaves: list[Tensor],  # noqa: ARG002
        records: Tensor,  # noqa: ARG002
        elsewhere: Mapping[Path, Tensor] | None = None,  # noqa: ARG002
    ) -> Any:
        """Return the payload of a batch whose leaves were fetched, one record for each of the slots `records`.

        `elsewhere` is given for rows with fields of Python objects alone: the slots of those that are read at others.

        Raises:
            OptionError: if the storage has no fields.
        """
        msg = f"{type(self).__name__} has no fields to make windows of: use LazyTensorStorage or LazyMemmapStorage"
        raise OptionError(msg)

    @abstractmethod
    def present(self, payload: Any, batch: tuple[int, ...]) -> Any:
        """Give a payload from `get` the form in which rows were put in, with leading dimensions `batch`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows, keep the memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state: rows present and what is needed to read them. Tensors are not copied.

        The keys `form` and `capacity` are required. `columns` (name -> tensor `[rows, ...]`) and `items` (a list of
        objects) are written to files of their own; the rest must be plain values and small tensors.
        """

    def row_arrays(self) -> list[RowArray]:
        """Return the memory of the rows, `[capacity, ...]` each, where slots are rows of it; none where they are not.

        A save copies such arrays piece by piece while writers go on; `columns` that are not in them are written while
        writers wait. The memory at a slot changes in `set` and in edits of that slot alone. Views.
        """
        return []

    def check_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Refuse a state that `load_state_dict` would refuse; buffers that load several storages ask all of them first.

        Raises:
            CheckpointError: naming what does not fit.
        """

    def seam(self, state: dict[str, Any]) -> int:
        """Return the slot of the oldest row in a saved ring that `load_state_dict` turns until it is in slot 0.

        That is so where the ring is full and this storage has another capacity: its newest row would lie before the
        oldest one, and the next rows would not replace the oldest. 0 where rows keep their slots. A storage of your own
        that turns them itself overrides this.

        Raises:
            CheckpointError: if rows would have to be turned, and this storage does not.
        """
        rows = state["rows"] if "rows" in state else len(state.get("items", ()))
        seam = find_seam(state, int(rows), self.capacity)
        if seam:
            msg = (
                f"the checkpoint holds a full ring of {state['capacity']} rows, the oldest in slot {seam}, and "
                f"{type(self).__name__} cannot bring it into a ring of {self.capacity}: load with the same max_size"
            )
            raise CheckpointError(msg)
        return 0

    def hold(self, *, replaced: bool) -> Callable[[], None]:  # noqa: ARG002
        """Return what brings the rows of now back, if a load fails after it has changed them.

        Args:
            replaced: the load will put other memory in the place of the rows, so that they need no copy.

        Raises:
            StorageMemoryError: if there is no memory for a copy of the rows.
        """
        if not len(self):
            return self.clear
        state = copied_rows(self.state_dict())
        return lambda: self.load_state_dict(state)

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; a state that does not fit is refused before anything changes.

        Columns may be tensors, or objects with `dtype`, `shape`, `read_into(tensor)` and `read()`.
        """

    def scores(self, payload: Any, path: tuple[Hashable, ...]) -> Tensor | None:  # noqa: ARG002
        """Return the field at `path` of a payload, for writers that rank rows; None where it has none."""
        return None

    def scores_at(self, slots: Tensor, path: tuple[Hashable, ...]) -> Tensor | None:
        """Return the field at `path` of the rows at `slots` (int64 `[n]`); None where some row has none."""
        return self.scores(self.get(slots), path)

    @abstractmethod
    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return presented rows at a user's index: int, slice, tensor, mask or tuple.

        A *view* where the storage can give one, else a copy. `swap` addresses `[num_envs, steps]` with `ndim=2`.

        Raises:
            SlotError: if the index is out of range of the rows present.
        """

    @abstractmethod
    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check `data` (leading dimensions `batch`) for the rows at `slots` (int64 `[n]`), and return what writes it.

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
        """Check one field's value for the rows at `slots`, and return what writes it.

        Raises:
            KindError: if the storage has no fields.
        """
        msg = f"{type(self).__name__} has no fields to write ({path!r}): replace whole rows with rb[index] = rows"
        raise KindError(msg)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:  # noqa: ARG002
        """Convert rows on their way into a checkpoint; storages of tensors do.

        Raises:
            KindError: if the storage has no fields.
        """
        msg = (
            f"{type(self).__name__} has no fields that a hook could convert: use LazyTensorStorage or LazyMemmapStorage"
        )
        raise KindError(msg)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Convert rows back when a checkpoint is loaded; see `register_save_hook`."""
        Storage.register_save_hook(self, hook)

    def __getitem__(self, index: Any) -> Any:
        """Read rows without transforms or collate; see `read`."""
        return self.read(index)


def copied_rows(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a storage with copies of its columns in main memory.

    Raises:
        StorageMemoryError: if there is too little of it.
    """
    columns = state.get("columns") or {}
    needed, free = sum(column.nbytes for column in columns.values()), psutil.virtual_memory().available
    if needed > free:
        msg = (
            f"a load into a buffer that holds rows keeps a copy of them until it is over: {needed} bytes are needed, "
            f"{free} are free: empty() the buffer first, or load into a new one"
        )
        raise StorageMemoryError(msg)
    copies = {
        name: torch.empty(column.shape, dtype=column.dtype, device="cpu").copy_(column)
        for name, column in columns.items()
    }
    items = {"items": list(state["items"])} if "items" in state else {}
    return {**state, **({"columns": copies} if columns else {}), **items}


def find_seam(state: dict[str, Any], rows: int, capacity: int) -> int:
    """Return the slot of the oldest row in a saved full ring, if the capacity is another one now; else 0."""
    saved = int(state["capacity"])
    return int(state.get("cursor", 0)) % saved if 0 < rows == saved != capacity else 0


def check_capacity(max_size: object) -> int:
    """Return a capacity that is a positive integer.

    Raises:
        CapacityError: otherwise.
    """
    if isinstance(max_size, bool) or not hasattr(max_size, "__index__") or max_size.__index__() < 1:
        msg = f"max_size must be an integer of at least 1 (rows), got {max_size!r}"
        raise CapacityError(msg)
    return int(max_size.__index__())


def check_ndim(ndim: object) -> int:
    """Return a number of batch dimensions, 1 or 2.

    Raises:
        OptionError: otherwise.
    """
    if ndim not in (1, 2) or isinstance(ndim, bool):
        msg = f"ndim must be 1 (rows) or 2 (time x environments), got {ndim!r}"
        raise OptionError(msg)
    return int(ndim)


def check_device(device: torch.device | str | int) -> torch.device:
    """Return a device with the index that its tensors have: `cuda` becomes `cuda:0`, so that devices compare equal.

    Raises:
        OptionError: if torch can make no tensor there.
        RuntimeError: if it is the name of no device.
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


def check_hook(hook: object) -> Callable[..., Any]:
    """Return a hook that can be called.

    Raises:
        KindError: otherwise.
    """
    if callable(hook) and not isinstance(hook, type):
        return hook
    msg = f"a hook is a callable, got {hook!r}: pass an object such as TED2Flat(), or a function"
    raise KindError(msg)
