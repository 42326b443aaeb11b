"""The native extension: batched copies, draws and bookkeeping on CPU memory.

Memory is passed by address (`tensor.data_ptr()`); the name of an argument's type says what is stored
there: `Int64Address` is the address of contiguous int64 elements, `BoolAddress` that of bool or uint8
elements, `FloatAddress` that of float32 or float64 elements (another argument says which), and
`RowsAddress` that of rows of any dtype. Callers check dtype, shape, device and contiguity, and keep
the memory alive.

Every function raises `ValueError` for the address 0, before anything is read or written, unless there
is nothing to read or write or the argument is documented to allow 0. Tensors without memory (meta
tensors, fake tensors) have the address 0.
"""

from typing import Any, Self, TypeAlias

Int64Address: TypeAlias = int
Int32Address: TypeAlias = int
Float64Address: TypeAlias = int
Float32Address: TypeAlias = int
FloatAddress: TypeAlias = int
BoolAddress: TypeAlias = int
RowsAddress: TypeAlias = int
AddressArray: TypeAlias = int

class Fields:
    """The fields of a storage, registered once. Every call copies all of them.

    Threads may call it at the same time. Writes to the same slot are not ordered: that is up to the caller.
    """

    def __init__(self) -> None: ...
    @property
    def count(self) -> int:
        """Number of fields."""

    @property
    def rows(self) -> int:
        """Rows of the shortest field; 0 without fields."""

    def add(self, segments: list[tuple[RowsAddress, int]], row_bytes: int, stride: int) -> int:
        """Register a field and return its position.

        Args:
            segments: `(base_address, rows)` of each base table; end to end they form one virtual table.
            row_bytes: Bytes of the field in one row.
            stride: Bytes from one row to the next. Fields of equal stride whose bases are within one stride of
                each other share rows: they are copied row by row.

        Raises:
            ValueError: Negative sizes, `stride < row_bytes`, or a null address.
        """

    def gather(self, indices: list[Int64Address], n: int, outs: list[RowsAddress]) -> None:
        """Copy rows to batches: `outs[f][i] = field f, row indices[f][i]`.

        Args:
            indices: One address of contiguous int64 `[n]` for all fields, or one for each field.
            n: Rows of the batch.
            outs: Address of contiguous `[n, row_bytes]` for each field.

        Raises:
            IndexError: An index is outside its field; nothing has been written then.
            ValueError: A wrong number of addresses, or a negative `n`.
        """

    def gather_each(self, indices: list[Int64Address], counts: list[int], outs: list[RowsAddress]) -> None:
        """Copy rows as `gather` does, with one number of rows in `counts` for all fields, or one for each field."""

    def write_run(self, start: int, n: int, skip: int, srcs: list[RowsAddress]) -> bool:
        """Write a ring run: row `skip + i` of every source goes to slot `(start + i) % rows`, for `n <= rows`.

        Args:
            start: First slot.
            n: Rows to write.
            skip: Rows at the start of the sources that are not written.
            srcs: Address of contiguous `[skip + n, row_bytes]` for each field.

        Returns:
            False, with nothing written, if rows 0 to `skip + n - 1` of a source overlap the memory of any field
            (from its first row to the end of its last one): copy the sources and call again.

        Raises:
            IndexError: `start` or `n` is outside the rows.
            ValueError: A wrong number of addresses, a null address, a negative `n` or `skip`, or fields of
                unequal length.
        """

    def scatter(self, slots: Int64Address, rows: Int64Address, n: int, srcs: list[RowsAddress]) -> bool:
        """Write batches to rows, in order: of equal slots the last one wins.

        Args:
            slots: Address of contiguous int64 `[n]`.
            rows: Address of contiguous int64 `[n]` that picks rows of the sources, or 0 for rows 0 to n - 1.
            n: Rows to write.
            srcs: Address of contiguous `[*, row_bytes]` for each field.

        Returns:
            False, with nothing written, if a source overlaps the memory of any field, from row 0 to the last row
            that is
            picked: copy the sources and call again.

        Raises:
            IndexError: A slot outside its field, or a negative source row; nothing has been written then.
            ValueError: A wrong number of addresses, a null address, or a negative `n`.
        """

def advise_huge_pages(address: RowsAddress, nbytes: int) -> None:
    """Ask the system to back the whole pages in `[address, address + nbytes)` with huge pages.

    A hint: the result does not say whether the system follows it. Does nothing on systems other than Linux.

    Raises:
        ValueError: `nbytes` is negative.
    """

def choose_slots(slots: Int64Address, pick: BoolAddress, n: int, rows: int, out: Int64Address) -> None:
    """Write the slots of two tables put end to end: `out[i] = slots[i] + (rows if pick[i] else 0)`.

    Args:
        slots: Address of contiguous int64 `[n]`, in [0, rows).
        pick: Address of contiguous bool `[n]`: the second table where it is true.
        n: Number of slots.
        rows: Rows of each table.
        out: Address of contiguous int64 `[n]`.

    Raises:
        IndexError: A slot outside [0, rows); nothing has been written then.
        ValueError: A negative `n`.
    """

def open_exchange(tensor_type: type, capsule: object) -> None:
    """Use the C exchange API of torch, `torch.Tensor.__dlpack_c_exchange_api__`."""

def kept_bytes() -> int:
    """Bytes of dropped batches that are kept for later ones."""

class Batches:
    """Gathers rows of fields into tensors `[n, *shape]`. Thread-safe.

    Args:
        fields: The fields.
        columns: A tensor `[rows, *shape]` for each field, which tells its dtype and shape.

    Raises:
        ValueError: A column is not plain memory on the CPU.
    """

    def __init__(self, fields: Fields, columns: list[Any]) -> None: ...
    def gather(self, slots: Any) -> list[Any]:
        """Copy rows to new contiguous tensors, one for each field.

        Args:
            slots: int64 `[n]`, contiguous.

        Raises:
            IndexError: A slot is outside the fields; nothing was read.
            ValueError: The slots are of another form.
        """

    def gather_each(self, slots: list[Any]) -> list[Any]:
        """Copy rows as `gather` does, with one tensor of slots for each field."""

    def gather_into(self, slots: Any, outs: list[Any]) -> None:
        """Copy rows to the tensors of the caller, in the order of the fields.

        Raises:
            IndexError: A slot is outside the fields; nothing was written.
            ValueError: See `check_outs`; nothing was written.
        """

    def check_outs(self, outs: list[Any], n: int) -> None:
        """Check that tensors can take `n` rows: dtype, shape, contiguity, memory of their own.

        Raises:
            ValueError: `position:reason` for the first that cannot.
        """

class RingCounts:
    """The numbers of a ring; see `ostinato.core.ring`."""

    def __init__(self) -> None: ...
    @property
    def capacity(self) -> int:
        """Slots."""

    @capacity.setter
    def capacity(self, arg: int, /) -> None: ...
    @property
    def rows(self) -> int:
        """Rows present."""

    @rows.setter
    def rows(self, arg: int, /) -> None: ...
    @property
    def cursor(self) -> int:
        """Slot after the newest row."""

    @cursor.setter
    def cursor(self, arg: int, /) -> None: ...
    @property
    def written(self) -> int:
        """Serial number of the last row written."""

    @written.setter
    def written(self, arg: int, /) -> None: ...
    @property
    def base(self) -> int:
        """Largest serial number that no row present has."""

    @base.setter
    def base(self, arg: int, /) -> None: ...
    @property
    def in_order(self) -> bool:
        """Whether generations follow from the cursor."""

    @in_order.setter
    def in_order(self, arg: bool, /) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers."""

class StoredRows:
    """The numbers of a storage; see `ostinato.storages.tensor`."""

    def __init__(self) -> None: ...
    @property
    def rows(self) -> int:
        """Rows present."""

    @rows.setter
    def rows(self, arg: int, /) -> None: ...
    @property
    def cursor(self) -> int:
        """Slot after the newest row."""

    @cursor.setter
    def cursor(self, arg: int, /) -> None: ...
    @property
    def writes(self) -> int:
        """Number of writes."""

    @writes.setter
    def writes(self, arg: int, /) -> None: ...
    @property
    def plain(self) -> bool:
        """Whether a write only changes rows of the table."""

    @plain.setter
    def plain(self, arg: bool, /) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers."""

class BufferCounts:
    """What a buffer counts; see `ostinato.buffers.engine`."""

    def __init__(self) -> None: ...
    @property
    def written(self) -> int:
        """Rows ever written."""

    @written.setter
    def written(self, arg: int, /) -> None: ...
    @property
    def since_empty(self) -> int:
        """Rows written since the buffer was emptied."""

    @since_empty.setter
    def since_empty(self, arg: int, /) -> None: ...
    @property
    def drawn(self) -> int:
        """Rows delivered."""

    @drawn.setter
    def drawn(self, arg: int, /) -> None: ...
    @property
    def redone(self) -> int:
        """Batches copied twice."""

    @redone.setter
    def redone(self, arg: int, /) -> None: ...
    @property
    def writes_seen(self) -> int:
        """Writes of the storage that the buffer follows."""

    @writes_seen.setter
    def writes_seen(self, arg: int, /) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers."""

class Direct:
    """Writes and draws of a buffer, each in one call that holds its lock; see `ostinato.buffers.direct`.

    Calls return None, with nothing changed, where they do not apply: other kinds of rows, another dtype or shape,
    a part that was exchanged, no rows. The caller then goes the general way, which also raises errors.
    """

    def __init__(
        self,
        lock: Any,
        batches: Batches,
        ring: RingCounts,
        stored: StoredRows,
        counts: BufferCounts,
        seen: BufferCounts,
        keys: tuple[Any, ...] | None,
        torch: Any,
        generator: Any,
        device: Any,
        func_transform: Any,
        is_tracing: Any,
        array_type: type,
        number_type: type,
        priorities: Any,
        wrote: Any,
        double_type: Any,
        first_generation: int,
        writes: bool,
        draws: bool,
        episodes: TrackedEpisodes | None,
        windows: DirectWindows | None,
    ) -> None: ...
    @property
    def is_open(self) -> bool:
        """Whether calls may apply."""

    @property
    def has_more_info(self) -> bool:
        """Whether batches have more info than `sample` returns: slices, and windows of units."""

    def close(self) -> None:
        """Let every call return None from now on: parts of the buffer change."""

    def add(self, rows: Any) -> int | None:
        """Write one row, a dict of its fields, and return its slot; or None."""

    def extend(self, rows: Any) -> Any:
        """Write rows `[n, *shape]`, and return their slots, int64 `[n]`; or None."""

    def sample(self, n: int) -> Any:
        """Draw `n` rows with replacement: uniformly by `torch.randint`, or by priority by `torch.rand`.

        Returns:
            A tuple of the batch, a new dict, and the slots, int64 `[n]`; with priorities also of the weights and the
            generations, int64 `[n]`. A tuple of the batch alone where it `has_more_info`. Or None.
        """

    def sample_into(self, out: Any, n: int) -> Any:
        """As `sample`, into the tensors of a dict of the same keys, which is the batch of the result.

        Raises:
            ValueError: `position:reason` for the first tensor that does not fit; nothing is drawn.
        """

    def update_priority(self, index: Any, priority: Any, generation: Any) -> int | None:
        """Set priorities, float32 or float64 `[n]`, of the rows at `index`, int64 `[n]`.

        With `generation`, int64 `[n]`, rows that have another one by now are left out.

        Returns:
            How many were left out; or None.
        """

class TrackedEpisodes:
    """The episode tracker of a buffer whose rows tell by flags alone where episodes end; for direct calls.

    Args:
        tracker: An object with the attribute `native_table`, the table of now or None.
        ends: Positions of the fields of flags, bool with one value per row.
    """

    def __init__(self, tracker: Any, ends: list[int]) -> None: ...

class DirectWindows:
    """Draws of windows, and their batches; for direct calls. See `ostinato.buffers.direct_windows`.

    Args:
        reader: Reads the fields of a batch.
        templates: A tensor `[1, *shape]` for each field, in the dtype and shape of a batch.
        roles: What each source of the reader is: 0 the rows drawn, 1 the rows of their windows, 2 the last
            rows of the windows, or the rows of the following stacks.
        keys: Keys of a batch, `steps_to_next_obs` and `gamma` included; None takes those of the rows.
        powers: Returns the powers of n-step returns; None for stacks.
        k: Frames of a stack.

    Raises:
        ValueError: Numbers out of range, or templates that are not plain memory on the CPU.
    """

    def __init__(
        self,
        reader: WindowReader,
        templates: list[Any],
        roles: list[int],
        keys: tuple[Any, ...] | None,
        powers: Any,
        k: int,
    ) -> None: ...
    @staticmethod
    def slices(number: int, length: int) -> DirectWindows:
        """Return draws of slices: `number` of them, or of `length` rows each; the other is 0."""

def check_leaves(values: list[Any], dtypes: list[Any], shapes: list[Any], tensor_type: type) -> list[int] | None:
    """Return the addresses of tensors that are plain memory of the expected dtypes and shapes.

    Plain means: exactly `tensor_type` (no subclass), on the CPU, contiguous, without gradient and without a
    negative bit. The conjugate bit is not checked: complex tensors must not be passed.

    Args:
        values: The tensors.
        dtypes: The expected dtype of each.
        shapes: The expected shape of each; identical `torch.Size` objects compare fastest.
        tensor_type: `torch.Tensor`.

    Returns:
        The addresses. None if any value is not plain, has another dtype or shape, has no memory (address 0:
        empty tensors too) or raises; None does not say which.

    Raises:
        ValueError: The lists differ in length.
        AttributeError: `tensor_type` lacks an attribute of tensors.
        TypeError: `tensor_type` is no type, or its attributes are not those of tensors.
    """

def shuffle_draw(perm: Int64Address, first: int, total: int, k: int, randoms: Int64Address, out: Int64Address) -> None:
    """Do `k` steps of a Fisher-Yates shuffle of int64 `perm[first:total]`, and write the drawn elements.

    Step s swaps `perm[i]`, `i = (first + s) % total`, with `perm[j]`, `j = i + (randoms[s] * (total - i) >>
    63)`.

    Args:
        perm: Address of int64 `[total]`.
        first: Position of the first step, in [0, total].
        total: Length of the permutation.
        k: Steps; 0 where `total` is 0.
        randoms: Address of int64 `[k]`, each uniform in [0, 2**63); the top bit is ignored.
        out: Address of int64 `[k]`.

    Raises:
        ValueError: `first`, `total` and `k` do not fit together.
    """

class SumTree:
    """Leaves of the slots [0, capacity): draws in proportion to them, their sum, smallest and largest.

    One writer at a time and no draw meanwhile: the caller's lock orders them. Draws may run at the same time.
    To save and restore a tree, use `leaves` and `load`.
    """

    def __init__(self, capacity: int) -> None: ...
    @property
    def capacity(self) -> int:
        """Number of leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of all levels. Pages that were never written take no memory."""

    @property
    def total(self) -> float:
        """Sum of all leaves: of groups of eight from left to right, then of their sums, and so on."""

    @property
    def minimum(self) -> float:
        """Smallest leaf above zero; infinity if there is none."""

    @property
    def maximum(self) -> float:
        """Largest leaf. O(capacity) in the first call; from then on updates keep it, at some cost."""

    def set(self, slots: Int64Address, values: Float64Address, n: int) -> None:
        """Write leaves, in order: of equal slots the last one wins.

        Args:
            slots: Address of contiguous int64 `[n]`.
            values: Address of contiguous float64 `[n]`, finite and at least 0.
            n: Leaves to write.

        Raises:
            IndexError: A slot outside the leaves; nothing has been written then.
            ValueError: A value that is negative or not finite (nothing has been written then), or a negative `n`.
        """

    def set_run(self, start: int, count: int, value: float) -> None:
        """Write one value to the leaves `(start + i) % capacity`, `i < count <= capacity`.

        Raises:
            IndexError: `start` is outside the leaves.
            ValueError: `count` is too large or negative, or the value is negative or not finite.
        """

    def get(self, slots: Int64Address, n: int, out: Float64Address) -> None:
        """Read the leaves at int64 `[n]` at `slots` into float64 `[n]` at `out`.

        Raises:
            IndexError: A slot outside the leaves.
            ValueError: A negative `n`.
        """

    def draw(self, uniforms: Float64Address, n: int, slots: Int64Address, values: Float64Address) -> None:
        """Draw leaf `i` with probability `leaf[i] / total`, never a leaf of zero.

        Args:
            uniforms: Address of contiguous float64 `[n]` in [0, 1].
            n: Draws.
            slots: Address of contiguous int64 `[n]` for the drawn slots.
            values: Address of contiguous float64 `[n]` for their leaves.

        Raises:
            ValueError: The total is zero or not finite, or `n` is negative.
        """

    def sample(
        self,
        uniforms: Float64Address,
        n: int,
        beta: float,
        generations: tuple[Int64Address, int, int, int, int, int],
        slots: Int64Address,
        weights: FloatAddress,
        single: bool,
        out: Int64Address,
    ) -> None:
        """Draw as `draw` does, with importance weights and generations.

        Args:
            uniforms: Address of contiguous float64 `[n]` in [0, 1].
            n: Draws.
            beta: Exponent of the weights `(leaf / smallest leaf above zero) ** -beta`.
            generations: The generations of all slots: address of int64 `[m]` and `m` (slots from `m` on have
                generation 0); or 0 and 0, followed by a cursor and the numbers to add to a slot before the cursor
                and from it on. The sixth number is for `update`.
            slots: Address of contiguous int64 `[n]` for the drawn slots.
            weights: Address of contiguous float32 or float64 `[n]` for their weights.
            single: Whether the weights are float32.
            out: Address of contiguous int64 `[n]` for their generations.

        Raises:
            ValueError: The total is zero or not finite, `n` is negative, or `generations` has another length.
        """

    def update(
        self,
        slots: Int64Address,
        values: FloatAddress,
        single: bool,
        n: int,
        expected: Int64Address,
        generations: tuple[Int64Address, int, int, int, int, int],
        priorities: Float64Address,
        hidden: BoolAddress,
        rows: int,
        eps: float,
        alpha: float,
        want_largest: bool,
    ) -> tuple[int, float, float, float]:
        """Set the priorities `p` of rows, and their leaves to `(p + eps) ** alpha`.

        Rows are updated in order: of equal slots the last one wins.

        Args:
            slots: Address of contiguous int64 `[n]`.
            values: Address of contiguous float32 or float64 `[n]`: the priorities, finite and at least 0.
            single: Whether they are float32.
            n: Rows to update.
            expected: Address of contiguous int64 `[n]`: rows with another generation, or without a row, are not
                updated. 0 to compare no generations; slots of -1 are left out then.
            generations: The generations of all slots, see `sample`. No row has a generation up to the sixth
                number.
            priorities: Address of contiguous float64 `[capacity]` that keeps the priorities as they were given.
            hidden: Address of contiguous bool `[capacity]` of slots whose leaves stay 0; 0 for none.
            rows: Number of rows present, at most the capacity.
            eps: Added to every priority.
            alpha: Exponent; the leaf is 0 where `p + eps` is 0, also for `alpha = 0`.
            want_largest: Whether to compute the last two numbers of the result.

        Returns:
            The number of rows that were not updated because of their generation, the largest priority given, and,
            with `want_largest`, the largest priority that the updated rows had before and have now.

        Raises:
            IndexError: Without `expected`, a slot below -1 or outside the rows; nothing has been written then.
            ValueError: A priority that is negative, not finite or makes a leaf above 2**960 (nothing has been
                written then), or sizes out of range.
        """

    def clear(self) -> None:
        """Set all leaves to zero."""

    def leaves(self, out: Float64Address, n: int) -> None:
        """Copy the first `n` leaves to float64 `[n]` at `out`.

        Raises:
            ValueError: `n` is above the capacity or negative.
        """

    def load(self, values: Float64Address, n: int) -> None:
        """Set the first `n` leaves to float64 `[n]` at `values`, and all others to zero.

        Raises:
            ValueError: A value that is negative or not finite, or `n` is above the capacity or negative; nothing
                has changed then.
        """

class Episodes:
    """The episode table: which rows of a ring belong to the same episode.

    A slot has the record of its episode; a record has its rows.

    Threads may call reading methods (`ahead` to `save`, draws included) at the same time. Calls that change
    the table are not ordered with any other call: that is up to the caller.
    """

    def __init__(self, capacity: int, num_envs: int) -> None:
        """Create an empty table.

        Raises:
            ValueError: `capacity` is outside `[1, 2**30]`, or not a multiple of `num_envs`.
        """

    @property
    def capacity(self) -> int:
        """Slots of the ring."""

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""

    @property
    def present(self) -> int:
        """Rows present, rows of no episode included."""

    @property
    def rows(self) -> int:
        """Rows of episodes."""

    @property
    def records(self) -> int:
        """Records, free ones included."""

    @property
    def free_count(self) -> int:
        """Records that are not in use."""

    @property
    def serial(self) -> int:
        """Serial number of the newest episode; the first one has 1."""

    @property
    def count(self) -> int:
        """Episodes with rows present."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def record_write(
        self, start: int, rows: int, skip: int, ends: BoolAddress, ids: Int64Address, mask: BoolAddress
    ) -> None:
        """Record a ring write; row `skip + i` of the batch is in slot `(start + i) % capacity`.

        Args:
            start: Slot of the first stored row.
            rows: Stored rows.
            skip: Rows of the batch before them, which were not stored.
            ends: Address of bool `[skip + rows]`: whether a row ends its episode; 0: no row does.
            ids: Address of int64 `[skip + rows]`: the episode id of a row; 0: rows of the environment `slot %
                num_envs` follow each other.
            mask: Address of bool `[skip + rows]`: whether a row belongs to an episode; 0: all rows do.

        Raises:
            IndexError: `start` is outside the ring.
            ValueError: Negative counts, more rows than slots, skipped rows though the ring is not filled, or a
                run that does not continue at the cursor. Nothing has changed then.
        """

    def clear(self) -> None:
        """Remove all rows. Serial numbers go on, and needs stay registered."""

    def ahead(self, slots: Int64Address, n: int, out: Int64Address) -> None:
        """Write to int64 `[n]` at `out` how many rows follow each row in its episode; -1 for rows of no episode.

        Raises:
            IndexError: A slot outside the ring; nothing has been written then. (All calls with slots do.)
            ValueError: A negative `n`. (All calls with `n` do.)
        """

    def behind(self, slots: Int64Address, n: int, out: Int64Address) -> None:
        """Write to int64 `[n]` at `out` how many rows are present before each; -1 for rows of no episode."""

    def ended(self, slots: Int64Address, n: int, out: BoolAddress) -> None:
        """Write to bool `[n]` at `out` whether each row ended its episode."""

    def shift(self, slots: Int64Address, steps: Int64Address, n: int, out: Int64Address) -> None:
        """Write to int64 `[n]` at `out` the slots int64 `[n]` at `steps` rows on, or the episode's first or last."""

    def window(
        self, slots: Int64Address, n: int, before: int, after: int, dilation: int, out: Int64Address, valid: BoolAddress
    ) -> None:
        """Write windows of `T = before + 1 + after` rows: int64 `[n, T]` at `out`, bool `[n, T]` at `valid`.

        Beyond the episode, a window repeats its first or last row, with False in `valid`.

        Raises:
            IndexError: A slot outside the ring.
            ValueError: `before` or `after` is outside `[0, 2**31)`, or `dilation` is below 1.
        """

    def slices(self, slots: Int64Address, n: int, length: int, out: Int64Address) -> None:
        """Write the slots of slices, int64 `[n, length]` at `out`: the rows from each row on, as `window` does.

        Raises:
            IndexError: A slot outside the ring.
            ValueError: `length` is outside `[1, 2**31)`.
        """

    def steps(
        self,
        slots: Int64Address,
        n: int,
        width: int,
        powers: FloatAddress,
        single: bool,
        rows: Int64Address,
        weights: FloatAddress,
        steps: Int64Address,
        discounts: Float32Address,
        last: Int64Address,
    ) -> None:
        """Write the windows of n-step transitions: the `width` rows from each row on, as `window` does.

        Args:
            slots: Address of int64 `[n]`.
            n: Windows.
            width: Rows of each, at least 1.
            powers: Address of `[width + 1]`: the weight of a row by its position, and the discount by the number
                of steps.
            single: Whether `powers` and `weights` are float32; else float64.
            rows: Address of int64 `[n, width]` for the slots of the windows.
            weights: Address of `[n, width]` for the powers of the rows in the episode, 0 for others.
            steps: Address of int64 `[n]` for the number of these rows, at least 1.
            discounts: Address of float32 `[n]` for the power of that number.
            last: Address of int64 `[n]` for the last slot of each window.

        Raises:
            IndexError: A slot outside the ring.
            ValueError: `width` is outside `[1, 2**31)`.
        """

    def stack(self, slots: Int64Address, n: int, k: int, then: bool, out: Int64Address, valid: BoolAddress) -> None:
        """Write the rows of stacks of frames to int64 `[n, k]` at `out`: the `k` rows up to each row.

        Args:
            slots: Address of int64 `[n]`.
            n: Stacks.
            k: Rows of each, at least 1, or 2 with `then`.
            then: Whether they are the `k - 1` rows up to each row, and it once more.
            out: Address of int64 `[n, k]`. Before the episode, its first row.
            valid: Address of bool `[n, k]` for which rows are not before the episode; 0 leaves them out.

        Raises:
            IndexError: A slot outside the ring.
            ValueError: `k` is out of range.
        """

    def spans(self, first: Int64Address, rows: Int64Address, closed: BoolAddress, serial: Int64Address) -> None:
        """Write the episodes, in the order of their first rows, oldest first.

        Args:
            first: Address of int64 `[count]` for their first slots.
            rows: Address of int64 `[count]` for their numbers of rows.
            closed: Address of bool `[count]`: whether the episode ended.
            serial: Address of int64 `[count]` for their serial numbers.
        """

    def add_need(self, need: int) -> int:
        """Count rows with at least `need - 1` rows after them from now on, and return the handle of the count.

        Raises:
            ValueError: `need` is below 1.
        """

    def start_rows(self, handle: int) -> int:
        """Return the number of rows with enough rows after them.

        Raises:
            ValueError: An unknown handle. (All calls with a handle do.)
        """

    def start_episodes(self, handle: int) -> int:
        """Return the number of episodes with such a row."""

    def draw(self, handle: int, randoms: Int64Address, n: int, out: Int64Address) -> None:
        """Draw rows with enough rows after them, with equal probability.

        Args:
            handle: Handle of the count.
            randoms: Address of int64 `[n]`, each uniform in [0, 2**63); the top bit is ignored.
            n: Draws.
            out: Address of int64 `[n]` for the slots of the rows.

        Raises:
            IndexError: There is no such row, and `n` is above 0.
        """

    def draw_episodes(self, handle: int, randoms: Int64Address, n: int, out: Int64Address) -> None:
        """Draw episodes with equal probability, then a row with enough rows after it from each.

        Args:
            handle: Handle of the count.
            randoms: Address of int64 `[2 n]`, each uniform in [0, 2**63); the top bit is ignored.
            n: Draws.
            out: Address of int64 `[n]` for the slots of the rows.

        Raises:
            IndexError: There is no such row, and `n` is above 0.
        """

    def save(
        self,
        episode: Int32Address,
        serials: Int64Address,
        keys: Int64Address,
        kinds: BoolAddress,
        status: BoolAddress,
        free: Int64Address,
    ) -> None:
        """Write the state.

        Args:
            episode: Address of int32 `[present]`: the record of each row, oldest first; -1 for none.
            serials: Address of int64 `[records]`.
            keys: Address of int64 `[records]`: environment or id of an open episode.
            kinds: Address of uint8 `[records]`: 0 if the key is an environment, 1 if it is an id.
            status: Address of uint8 `[records]`: 0 open, 1 ended, 2 cut off.
            free: Address of int64 `[free_count]`: free records, the next one to be used last.
        """

    def load(
        self,
        cursor: int,
        serial: int,
        present: int,
        records: int,
        free_count: int,
        episode: Int32Address,
        serials: Int64Address,
        keys: Int64Address,
        kinds: BoolAddress,
        status: BoolAddress,
        free: Int64Address,
    ) -> None:
        """Restore what `save` wrote. The caller has checked that the state is consistent.

        Raises:
            ValueError: Numbers that lead outside the table; nothing has changed then.
        """

def weigh_rows(
    rows: FloatAddress, weights: FloatAddress, n: int, width: int, cells: int, single: bool, out: FloatAddress
) -> None:
    """Write weighted sums, computed in float64: `out[i, c] = sum_k weights[i, k] * rows[i, k, c]`.

    Rows of weight 0 do not count, even if they hold infinities or NaN.

    Args:
        rows: Address of contiguous `[n, width, cells]`.
        weights: Address of contiguous `[n, width]`.
        n: Sums.
        width: Rows of each.
        cells: Numbers of a row.
        single: Whether all are float32; else float64.
        out: Address of contiguous `[n, cells]`.

    Raises:
        ValueError: Negative numbers.
    """

class WindowReader:
    """Reads windows of the fields of one table: rows side by side, or weighted sums of them, all in one pass.

    Threads may read at the same time, also while another one writes rows: a batch may then hold torn rows.
    """

    def __init__(self, rows: int) -> None:
        """Create a reader of a table of `rows` rows."""

    def add(
        self, base: RowsAddress, other: RowsAddress, row_bytes: int, stride: int, source: int, number_bytes: int
    ) -> None:
        """Register a field and return nothing. Fields of one source are read at the same rows.

        Args:
            base: Address of the first row.
            other: Address of the first row of the field that picked rows are read from; 0 if there is none.
            row_bytes: Bytes of the field in one row.
            stride: Bytes from one row to the next.
            source: Position of its slots in the lists of a call.
            number_bytes: 4 or 8 for a field of float32 or float64 whose rows are summed, else 0.

        Raises:
            ValueError: Numbers out of range, or a null address.
        """

    def read(
        self,
        slots: list[Int64Address],
        picks: list[BoolAddress],
        weights: list[RowsAddress],
        widths: list[int],
        n: int,
        outs: list[RowsAddress],
    ) -> None:
        """Fill a batch: `outs[f][i, k]` is row `slots[i, k]` of field f, or `outs[f][i]` the weighted sum over k.

        Sums are computed in float64. Rows of weight 0 do not count, even if they hold infinities or NaN.

        Args:
            slots: Address of contiguous int64 `[n, width]` for each source.
            picks: Address of contiguous bool `[n, width]` for each source: rows that are read from the other
                field; 0 for none.
            weights: Address of contiguous `[n, width]` for each source with fields to sum, in their dtype; else 0.
            widths: Rows of a window for each source, at least 1.
            n: Records.
            outs: Address of contiguous `[n, width, row_bytes]` for each field, `[n, row_bytes]` for a sum.

        Raises:
            IndexError: A slot is outside the table; nothing has been written then.
            ValueError: A wrong number of entries, a null address, or a negative `n`.
        """

class SingleCopy:
    """Next observations that are stored once: as the observation `num_envs` slots on, or in a side row.

    One writer at a time: the caller's lock orders them. Any number of threads may call `gather` meanwhile; it
    returns complete rows wherever the row's own slot is not written at the same time.
    """

    def __init__(self, capacity: int, num_envs: int, chunk_rows: int, side_rows: Int32Address) -> None:
        """Create one for the slots [0, capacity).

        Args:
            capacity: Slots, below 2**31.
            num_envs: Slots from a row to the row that follows it.
            chunk_rows: Side rows that are added at a time.
            side_rows: Address of int32 `[capacity]`, written only by this object: for each slot its side row, -1
                where the observation that follows is the next one, -2 where there is no row.

        Raises:
            ValueError: Numbers out of range, or a null address.
        """

    @property
    def allocated(self) -> int:
        """Number of side rows."""

    @property
    def used(self) -> int:
        """Number of side rows in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of versions and of the list of free side rows, without `side_rows` and chunks."""

    def add_group(self, base: RowsAddress, stride: int, nbytes: int) -> int:
        """Register observation fields that share rows, and return the number of the group.

        Args:
            base: Address of the first field in slot 0.
            stride: Bytes from one slot to the next.
            nbytes: Bytes of all fields: the size of a side row.

        Raises:
            ValueError: A null address, or sizes that do not fit together.
        """

    def add_field(self, group: int, offset: int, nbytes: int) -> int:
        """Register a field of a group, and return its number.

        Raises:
            ValueError: The field is not inside the group.
        """

    def add_chunk(self, bases: list[RowsAddress]) -> None:
        """Add `chunk_rows` side rows: the address of that many rows for each group. They must never move.

        Raises:
            ValueError: A null address, or more side rows than slots.
        """

    def guard(self, base: RowsAddress, nbytes: int) -> None:
        """Register memory that next observations to be written must not overlap."""

    def clear(self) -> None:
        """Remove all rows."""

    def compare(
        self,
        cursor: int,
        n: int,
        obs: list[RowsAddress],
        nexts: list[RowsAddress],
        equals_next: BoolAddress,
        equals_side: BoolAddress,
    ) -> int:
        """Compare a batch of `n` rows, about to be written from slot `cursor` on, with itself and with stored rows.

        Args:
            cursor: Slot of row 0.
            n: Rows of the batch.
            obs: Address of the observations, `[n, nbytes]`, for each field.
            nexts: Address of the next observations for each field.
            equals_next: Address of uint8 `[n]` to write: whether a next observation equals the observation of the
                row that follows in the batch, bit by bit.
            equals_side: Address of uint8 `[min(num_envs, n)]` to write: whether an observation equals the side
                row of the row before it.

        Returns:
            The number of side rows that the write will take; -1, with nothing compared, if a next observation
            overlaps guarded memory: copy the sources and call again.

        Raises:
            IndexError: `cursor` is outside the slots.
            ValueError: A wrong number of addresses, a null address, or a negative `n`.
        """

    def detach_run(self, start: int, n: int, spare: int) -> int:
        """Before the slots `(start + i) % capacity` are written: give the rows before them side rows.

        Args:
            start: First slot.
            n: Rows to be written.
            spare: Side rows that must be free afterwards.

        Returns:
            The number of side rows that are missing for that; nothing has changed then: add chunks and call
            again.

        Raises:
            IndexError: `start` or `n` is outside the slots.
        """

    def link_run(
        self,
        start: int,
        n: int,
        skip: int,
        nexts: list[RowsAddress],
        equals_next: BoolAddress,
        equals_side: BoolAddress,
    ) -> None:
        """After row `skip + i` was written to the slot `(start + i) % capacity`: store its next observation.

        Args:
            start: First slot.
            n: Rows written.
            skip: Rows at the start of the batch that were not written.
            nexts: Address of the next observations of the whole batch for each field.
            equals_next: As `compare` wrote it.
            equals_side: As `compare` wrote it; 0 if `compare` was called with another cursor.

        Raises:
            IndexError: `start` or `n` is outside the slots.
            ValueError: A wrong number of addresses, or a null address.
            RuntimeError: No side row is left.
        """

    def set_rows(self, slots: Int64Address, n: int, nexts: list[RowsAddress]) -> None:
        """Store the next observations `nexts` of the rows at int64 `slots` `[n]` in side rows, in order.

        Raises:
            IndexError: A slot out of range.
            ValueError: A wrong number of addresses, or a null address.
            RuntimeError: No side row is left.
        """

    def link_rows(self, slots: Int64Address, n: int) -> None:
        """Make the observation that follows the next observation of the rows at int64 `slots` `[n]`.

        Raises:
            IndexError: A slot out of range.
        """

    def gather(
        self, fields: list[int], slots: Int64Address, pick: BoolAddress, n: int, outs: list[RowsAddress]
    ) -> None:
        """Copy next observations to batches.

        Args:
            fields: Numbers of the fields.
            slots: Address of contiguous int64 `[n]`.
            pick: Address of bool `[n]`, False where the observation itself is wanted; 0 for next observations
                only.
            n: Rows.
            outs: Address of contiguous `[n, nbytes]` for each of the fields.

        Raises:
            IndexError: A slot out of range, or without a row.
            ValueError: No such field, a wrong number of addresses, or a negative `n`.
        """

def read_ranges(
    fds: Int64Address, offsets: Int64Address, sizes: Int64Address, targets: AddressArray, n: int, gap: int
) -> tuple[int, int]:
    """Read byte ranges of files, each straight to its memory, without the interpreter lock. Not on Windows.

    Args:
        fds: Address of int64 `[n]`: the open file of each range.
        offsets: Address of int64 `[n]`: the first byte of each range, ascending within a file.
        sizes: Address of int64 `[n]`: the bytes of each range.
        targets: Address of int64 `[n]`: the address to read each range to.
        n: Number of ranges.
        gap: Ranges of one file that are at most this many bytes apart are read in one call.

    Returns:
        The first range that could not be read in full, or `n`; and errno, 0 where its file ended before.

    Raises:
        ValueError: A negative `n` or `gap`.
    """

def make_shared_memory() -> int:
    """Create anonymous shared memory of size 0, and return its file descriptor. Linux only.

    The memory is freed when the last process that has it ends.

    Raises:
        OSError: The system call failed.
    """

class SharedRing:
    """The slots of a ring that processes share, in memory that all of them map. Linux only.

    As a context manager it holds the lock between processes, which a thread may take several times. Every
    wait handles signals, and ends after `timeout_ms` milliseconds with `ostinato.errors.UsageError`. A
    process that takes the lock after its owner died repairs the ring first.
    """

    def __init__(self, address: RowsAddress, capacity: int, prioritized: bool, create: bool) -> None:
        """Create a ring in memory of zeros (`create`), or attach to an existing one.

        Raises:
            ValueError: The memory holds no ring of this capacity and kind, or is not aligned to 64 bytes.
        """

    @staticmethod
    def bytes_for(capacity: int, prioritized: bool) -> int:
        """Return the bytes of memory that a ring needs."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...
    @property
    def timeout_ms(self) -> int:
        """Milliseconds that this process waits."""

    @timeout_ms.setter
    def timeout_ms(self, arg: int, /) -> None: ...
    @property
    def max_priority(self) -> float:
        """Largest priority ever set."""

    @max_priority.setter
    def max_priority(self, arg: float, /) -> None: ...
    @property
    def capacity(self) -> int:
        """Slots."""

    @property
    def cursor(self) -> int:
        """Slot of the next reservation."""

    @property
    def generations(self) -> Int64Address:
        """Address of int64 `[capacity]`."""

    @property
    def priorities(self) -> Float64Address:
        """Address of float64 `[capacity]`; 0 without priorities."""

    @property
    def tree(self) -> SumTree | None:
        """The tree of leaves; None without priorities."""

    def reserve(self, rows: int, total: int) -> tuple[int, int]:
        """Reserve slots for the last `rows` rows of a batch of `total`.

        Returns:
            The serial number of the first of them, and its slot.
        """

    def is_current(self, serial: int) -> bool:
        """Return whether the ring was not cleared since this serial number was reserved. Needs the lock."""

    def commit(self, serial: int) -> None:
        """Make the rows that were reserved from this serial number on readable.

        Raises:
            IndexError: Nothing is reserved from this number.
        """

    def abandon(self, serial: int) -> None:
        """Give up a reservation from this serial number on, if it was not committed."""

    def clear(self, cursor: int) -> None:
        """Remove all rows and continue at a slot. Needs the lock."""

    def writers(self) -> int:
        """Count living writers between reserve and commit. Needs the lock."""

    def state(self) -> tuple[int, int, int, int]:
        """Return the last serial number, holes, slots ever reserved, and complete rows."""

    def unchanged_since(self, written: int) -> bool:
        """Return whether nothing was reserved since this serial number. For a reader, after its copy."""

    def generations_of(self, slots: Int64Address, n: int, out: Int64Address) -> None:
        """Write the generations of int64 `[n]` at `slots` to int64 `[n]` at `out`.

        Raises:
            IndexError: A slot out of range.
        """

    def changed(self, slots: Int64Address, n: int, written: int, out: BoolAddress) -> int:
        """Mark slots that hold no complete row now, or a row newer than `written`, and return their number.

        Args:
            slots: Address of int64 `[n]`.
            n: Number of slots.
            written: A serial number.
            out: Address of bool `[n]` to write.

        Raises:
            IndexError: A slot out of range.
        """

    def committed_slots(self, out: Int64Address, limit: int) -> int:
        """Write the slots below `limit` that hold complete rows to int64 `[limit]` at `out`; return their number."""

    def add(self, which: int, n: int) -> int:
        """Add to a count of all processes; return its old value."""

    def count(self, which: int) -> int:
        """Return a count of all processes."""
