"""Types of the compiled part. Addresses are integers (`tensor.data_ptr()`); callers keep the memory alive.

Every function raises `ValueError` for an address of 0, before anything is read or written, unless there is nothing to
read or write there, or the argument says that it may be 0. Tensors without memory (meta tensors, fake tensors) say 0.
"""

from typing import Any

class Fields:
    """The fields of a storage, registered once; every call then copies all of them.

    Calls may run in several threads at once. Nothing here orders two writers of one slot.
    """

    def __init__(self) -> None: ...
    @property
    def count(self) -> int:
        """Number of fields."""

    @property
    def rows(self) -> int:
        """Rows that every field has; 0 without fields."""

    def add(self, segments: list[tuple[int, int]], row_bytes: int, stride: int) -> int:
        """Register a field and return its position.

        Args:
            segments: `(base_address, rows)` of each base table; end to end they form one virtual table.
            row_bytes: Bytes of the field in one row.
            stride: Bytes from one row to the next. Fields of equal stride, whose bases lie within one
                stride of each other, are taken to share rows and are copied row by row.

        Raises:
            ValueError: Negative sizes, `stride < row_bytes`, or a null address.
        """

    def gather(self, indices: list[int], n: int, outs: list[int]) -> None:
        """Copy rows to batches: `outs[f][i] = field f, row indices[f][i]`.

        Args:
            indices: One address of contiguous int64 `[n]` for all fields, or one address for each field.
            n: Rows of the batch.
            outs: Address of contiguous `[n, row_bytes]` for each field.

        Raises:
            IndexError: A row outside its field; nothing has been written then.
            ValueError: A wrong number of addresses, or a negative `n`.
        """

    def gather_each(self, indices: list[int], counts: list[int], outs: list[int]) -> None:
        """As `gather`, with a number of rows for each field, or one for all: `counts` holds as many numbers."""

    def write_run(self, start: int, n: int, skip: int, srcs: list[int]) -> bool:
        """Ring write: row `skip + i` of every source goes to slot `(start + i) % rows`, for `n <= rows`.

        Returns:
            False, with nothing written, if rows 0 to `skip + n - 1` of a source overlap memory of any field
            (from its first row to the end of its last one): copy the sources, and call again.

        Raises:
            IndexError: `start` or `n` outside the rows.
            ValueError: A wrong number of addresses, a null address, negative `n` or `skip`, or fields of
                unequal length.
        """

    def scatter(self, slots: int, rows: int, n: int, srcs: list[int]) -> bool:
        """Copy batches to rows, in order: of equal slots the last one wins.

        Args:
            slots: Address of contiguous int64 `[n]`.
            rows: Address of contiguous int64 `[n]` that picks source rows, or 0 for rows 0 to n - 1.
            n: Rows to write.
            srcs: Address of contiguous `[*, row_bytes]` for each field.

        Returns:
            False, with nothing written, if a source overlaps memory of any field, from row 0 to the last row
            that is picked: copy the sources, and call again.

        Raises:
            IndexError: A slot outside its field, or a negative source row; nothing has been written then.
            ValueError: A wrong number of addresses, a null address, or a negative `n`.
        """

def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system for large pages behind `[address, address + nbytes)`, as far as whole pages lie inside.

    A hint: whether it is followed is not told, and other systems than Linux are not asked.

    Raises:
        ValueError: `nbytes` is negative.
    """

def check_leaves(values: list[Any], dtypes: list[Any], shapes: list[Any], tensor_type: type) -> list[int] | None:
    """The quick check of a batch about to be written: are all leaves plain memory of the expected form?

    Plain are exactly `tensor_type` (no subclass), on the CPU, contiguous, without gradient and without a
    negative bit. A conjugate bit is not looked at: complex leaves must not come here.

    Args:
        values: The leaves.
        dtypes: The dtype that each must have.
        shapes: The full shape that each must have; equal `torch.Size` objects compare quickest.
        tensor_type: `torch.Tensor`.

    Returns:
        The addresses of the leaves; None if any is not plain, has another form, has no memory (address 0: empty
        tensors too) or raises when asked. None says nothing about what is wrong.

    Raises:
        ValueError: The lists differ in length.
        AttributeError: `tensor_type` lacks an attribute of tensors.
        TypeError: `tensor_type` is no type, or its attributes are none that tensors have.
    """

def choose_slots(slots: int, pick: int, n: int, rows: int, out: int) -> None:
    """Slots of two tables put end to end: `out[i] = slots[i] + (rows if pick[i] else 0)`.

    Args:
        slots: Address of contiguous int64 `[n]`, in [0, rows).
        pick: Address of contiguous bool `[n]`.
        n: Number of slots.
        rows: Rows of each table.
        out: Address of contiguous int64 `[n]`.

    Raises:
        IndexError: A slot outside [0, rows); nothing has been written then.
        ValueError: A negative `n`.
    """

def discount_steps(
    slots: int,
    valid: int,
    n: int,
    width: int,
    powers: int,
    single: bool,
    weights: int,
    steps: int,
    discounts: int,
    last: int,
) -> None:
    """What windows from rows on say of transitions over several steps.

    Args:
        slots: Address of contiguous int64 `[n, width]`.
        valid: Address of contiguous bool `[n, width]`: the first entries of each window, one at least.
        n: Windows.
        width: Rows of each, at least 1.
        powers: Address of `[width + 1]`: the weight of a row by its place, and the discount by the number of steps.
        single: Whether `powers` and `weights` are float32; else float64.
        weights: Address to write `[n, width]` to: the powers of valid entries, else 0.
        steps: Address to write int64 `[n]` to: valid entries.
        discounts: Address to write float32 `[n]` to: the power of that number.
        last: Address to write int64 `[n]` to: the last slot of each window.

    Raises:
        ValueError: A negative `n`, or a width below 1.
    """

def weigh_rows(rows: int, weights: int, n: int, width: int, cells: int, single: bool, out: int) -> None:
    """Weighted sums, added up in float64: `out[i, c] = sum_k weights[i, k] * rows[i, k, c]`.

    A weight of 0 counts for nothing, whatever its row holds.

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

def shuffle_draw(perm: int, first: int, total: int, k: int, randoms: int, out: int) -> None:
    """`k` steps of a Fisher-Yates shuffle of int64 `perm[first:total]`, given out to int64 `out[k]`.

    Step s swaps `perm[i]`, `i = (first + s) % total`, with `perm[j]`, `j = i + (randoms[s] * (total - i) >> 63)`.

    Args:
        perm: Address of int64 `[total]`.
        first: Where the shuffle stands, in [0, total].
        total: Length of the permutation.
        k: Steps; 0 where `total` is.
        randoms: Address of int64 `[k]`, each uniform in [0, 2**63); the top bit is ignored.
        out: Address of int64 `[k]`.

    Raises:
        ValueError: `first`, `total` and `k` do not fit together.
    """

class Mirror:
    """Next observations that are stored once: as the observation `lanes` slots on, or in a side row.

    One writer at a time: the caller's lock orders them. `read` may run beside it, in any number of threads, and
    gives whole rows wherever the row's own slot is not written meanwhile.
    """

    def __init__(self, capacity: int, lanes: int, chunk_rows: int, apart: int) -> None:
        """Make one for the slots [0, capacity).

        Args:
            capacity: Slots, below 2**31.
            lanes: Slots from a row to the one that follows it.
            chunk_rows: Side rows that are added at a time.
            apart: Address of int32 `[capacity]`, written here only: for each slot the side row, -1 where the
                observation that follows is the next one, -2 where there is no row.

        Raises:
            ValueError: Numbers out of range, or a null address.
        """

    @property
    def room(self) -> int:
        """Side rows there are."""

    @property
    def used(self) -> int:
        """Side rows in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of versions and the list of free side rows; neither `apart` nor the chunks."""

    def add_group(self, base: int, stride: int, nbytes: int) -> int:
        """Register observations that lie side by side, and return their number.

        Args:
            base: Address of the first of them in slot 0.
            stride: Bytes from one slot to the next.
            nbytes: Bytes of them all, which is the size of a side row.

        Raises:
            ValueError: A null address, or sizes that do not fit.
        """

    def add_leaf(self, group: int, offset: int, nbytes: int) -> int:
        """Register a field of a group, and return its number.

        Raises:
            ValueError: It does not lie in the group.
        """

    def add_chunk(self, bases: list[int]) -> None:
        """Add `chunk_rows` side rows: the address of that many rows for each group. They must never move.

        Raises:
            ValueError: A null address, or more side rows than slots.
        """

    def guard(self, base: int, nbytes: int) -> None:
        """Name memory that next observations to be written must not lie in."""

    def clear(self) -> None:
        """Forget all rows."""

    def compare(self, cursor: int, n: int, obs: list[int], nexts: list[int], agree: int, relink: int) -> int:
        """Compare a batch of `n` rows, about to be written from slot `cursor` on, with itself and what is stored.

        Args:
            cursor: Slot of row 0.
            n: Rows of the batch.
            obs: Address of the observations, `[n, nbytes]`, for each field.
            nexts: Address of the next observations for each field.
            agree: Address of uint8 `[n]`: whether a next observation equals the observation of the row that
                follows in the batch, bit by bit.
            relink: Address of uint8 `[min(lanes, n)]`: whether an observation equals what lies apart for the
                row before.

        Returns:
            How many side rows the write will take; -1, with nothing compared, if a next observation lies in
            guarded memory: copy the sources, and call again.

        Raises:
            IndexError: `cursor` outside the slots.
            ValueError: A wrong number of addresses, a null address, or a negative `n`.
        """

    def detach_run(self, start: int, n: int, spare: int) -> int:
        """Before the slots `(start + i) % capacity` are written: give the rows before them side rows.

        Args:
            start: First slot.
            n: Rows to be written.
            spare: Side rows that must be free afterwards.

        Returns:
            How many side rows lack for that; nothing has changed then: add chunks, and call again.

        Raises:
            IndexError: `start` or `n` outside the slots.
        """

    def link_run(self, start: int, n: int, skip: int, nexts: list[int], agree: int, relink: int) -> None:
        """After row `skip + i` was written to the slot `(start + i) % capacity`: note where its next one is.

        Args:
            start: First slot.
            n: Rows written.
            skip: First row of the batch that was.
            nexts: Address of the next observations of the whole batch for each field.
            agree: What `compare` said.
            relink: What `compare` said; 0 if it was asked of another cursor.

        Raises:
            IndexError: `start` or `n` outside the slots.
            ValueError: A wrong number of addresses, or a null address.
            RuntimeError: No side row is left.
        """

    def put_rows(self, slots: int, n: int, nexts: list[int]) -> None:
        """Give the rows at int64 `slots` `[n]` side rows with the next observations `nexts`, in order.

        Raises:
            IndexError: A slot outside the slots.
            ValueError: A wrong number of addresses, or a null address.
            RuntimeError: No side row is left.
        """

    def drop_rows(self, slots: int, n: int) -> None:
        """Say of the rows at int64 `slots` `[n]` that the observation that follows is their next one.

        Raises:
            IndexError: A slot outside the slots.
        """

    def read(self, leaves: list[int], slots: int, pick: int, n: int, outs: list[int]) -> None:
        """Copy next observations to batches.

        Args:
            leaves: Numbers of the fields.
            slots: Address of contiguous int64 `[n]`.
            pick: Address of bool `[n]`, False where the observation itself is wanted; 0 for next ones throughout.
            n: Rows.
            outs: Address of contiguous `[n, nbytes]` for each of the fields.

        Raises:
            IndexError: A slot out of range, or without a row.
            ValueError: No such field, a wrong number of addresses, or a negative `n`.
        """

class SumTree:
    """Priorities of the slots [0, capacity): draws in proportion to them, their sum, smallest and largest.

    One writer at a time, and no draw beside it: the caller's lock orders them. Draws may run side by side.
    Pickling is the caller's: `leaves` and `load`.
    """

    def __init__(self, capacity: int) -> None: ...
    @property
    def capacity(self) -> int:
        """Number of leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of all levels; pages never written take none from the system."""

    @property
    def total(self) -> float:
        """Sum of all leaves: of eights from left to right, then of their sums, and so on."""

    @property
    def minimum(self) -> float:
        """Smallest leaf above zero; infinity if there is none."""

    @property
    def maximum(self) -> float:
        """Largest leaf. Asked for the first time: O(capacity); from then on updates keep it, at some cost to them."""

    def set(self, slots: int, values: int, n: int) -> None:
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
            IndexError: `start` outside the leaves.
            ValueError: `count` too large or negative, or a bad value.
        """

    def get(self, slots: int, n: int, out: int) -> None:
        """Read leaves: int64 `[n]` at `slots`, float64 `[n]` to `out`.

        Raises:
            IndexError: A slot outside the leaves.
            ValueError: A negative `n`.
        """

    def draw(self, uniforms: int, n: int, slots: int, values: int) -> None:
        """Draw leaf `i` with probability `leaf[i] / total`, never one that is zero.

        Args:
            uniforms: Address of contiguous float64 `[n]` in [0, 1].
            n: Draws.
            slots: Address of contiguous int64 `[n]` for the slots drawn.
            values: Address of contiguous float64 `[n]` for their leaves.

        Raises:
            ValueError: The total is zero or not finite, or `n` negative.
        """

    def sample(
        self,
        uniforms: int,
        n: int,
        beta: float,
        stamps: tuple[int, int, int, int, int, int],
        slots: int,
        weights: int,
        single: bool,
        out: int,
    ) -> None:
        """Draw as `draw` does, with importance weights and stamps.

        Args:
            uniforms: Address of contiguous float64 `[n]` in [0, 1].
            n: Draws.
            beta: Weights are `(leaf / smallest leaf above zero) ** -beta`.
            stamps: Where stamps come from: address of int64 `[m]`, one for each slot (0 where the slot is beyond),
                and `m`; or 0 and 0, then a cursor and what to add to a slot before it and from it on. The sixth is
                for `learn`.
            slots: Address of contiguous int64 `[n]` for the slots drawn.
            weights: Address of contiguous float32 or float64 `[n]` for their weights.
            single: Whether weights are float32.
            out: Address of contiguous int64 `[n]` for their stamps.

        Raises:
            ValueError: The total is zero or not finite, or `n` negative, or `stamps` has another length.
        """

    def learn(
        self,
        slots: int,
        values: int,
        single: bool,
        n: int,
        given: int,
        stamps: tuple[int, int, int, int, int, int],
        priorities: int,
        hidden: int,
        rows: int,
        eps: float,
        alpha: float,
        within: bool,
    ) -> tuple[int, float, float, float]:
        """Give rows priorities `p`, and leaves `(p + eps) ** alpha`, in order: of equal slots the last one wins.

        Args:
            slots: Address of contiguous int64 `[n]`.
            values: Address of contiguous float32 or float64 `[n]`: the priorities, finite and at least 0.
            single: Whether they are float32.
            n: Rows to update.
            given: Address of contiguous int64 `[n]`: rows that have another stamp, or are not there, are left alone;
                0 to ask for none, then slots of -1 are left out.
            stamps: Where stamps come from, see `sample`; no row has a stamp up to the sixth.
            priorities: Address of contiguous float64 `[capacity]` that keeps them as they were given.
            hidden: Address of contiguous bool `[capacity]`, whose leaves stay 0; 0 for none.
            rows: Rows that are there, at most the capacity.
            eps: Added to every priority.
            alpha: Exponent; the leaf is 0 where `p + eps` is, also for `alpha = 0`.
            within: Whether to find the last two numbers of the answer.

        Returns:
            How many rows were left alone for their stamp, the largest priority given, and, with `within`, the largest
            that these rows had before, and have now.

        Raises:
            IndexError: Without `given`, a slot below -1 or beyond the rows; nothing has been written then.
            ValueError: A priority that is negative, not finite or makes a leaf above 2**960 (nothing has been written
                then), or sizes that cannot be.
        """

    def clear(self) -> None:
        """Make all leaves zero."""

    def leaves(self, out: int, n: int) -> None:
        """Copy the first `n` leaves to float64 `[n]` at `out`.

        Raises:
            ValueError: `n` is above the capacity or negative.
        """

    def load(self, values: int, n: int) -> None:
        """Make the first `n` leaves those of float64 `[n]` at `values`, and all others zero.

        Raises:
            ValueError: A bad value, or `n` above the capacity or negative; nothing has changed then.
        """

class Episodes:
    """Which rows of a ring belong together: a slot knows its episode's record, a record knows its rows.

    Reading calls (`ahead` to `save`, draws included) may run in several threads at once. Nothing here orders a call
    that changes the table and any other.
    """

    def __init__(self, capacity: int, lanes: int) -> None:
        """Make an empty table.

        Raises:
            ValueError: `capacity` outside `[1, 2**30]`, or not a multiple of `lanes`.
        """

    @property
    def capacity(self) -> int:
        """Slots of the ring."""

    @property
    def cursor(self) -> int:
        """Slot after the newest row."""

    @property
    def present(self) -> int:
        """Rows present, those of no episode included."""

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
        """Episodes that ever began."""

    @property
    def count(self) -> int:
        """Episodes with rows present."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def note(self, start: int, rows: int, skip: int, ends: int, ids: int, mask: int) -> None:
        """Note a ring write; row `skip + i` of the batch is in slot `(start + i) % capacity`.

        Args:
            start: Slot of the first row stored.
            rows: Rows stored.
            skip: Rows of the batch before them, which were not.
            ends: Address of bool `[skip + rows]`, or 0: no row ends an episode.
            ids: Address of int64 `[skip + rows]`, or 0: the stream of a row is `slot % lanes`.
            mask: Address of bool `[skip + rows]`, or 0: all rows belong to an episode.

        Raises:
            IndexError: `start` outside the ring.
            ValueError: Negative counts, more rows than slots, rows skipped though the ring is not filled, or a run
                that does not go on at the cursor. Nothing has changed then.
        """

    def clear(self) -> None:
        """Forget all rows; serial numbers go on, and needs stay registered."""

    def ahead(self, slots: int, n: int, out: int) -> None:
        """Write to int64 `[n]` at `out` how many rows follow in the episode of each slot; -1 for none.

        Raises:
            IndexError: A slot outside the ring; nothing has been written then. (All calls with slots do.)
            ValueError: A negative `n`. (All calls with `n` do.)
        """

    def behind(self, slots: int, n: int, out: int) -> None:
        """Write to int64 `[n]` at `out` how many rows are present before each; -1 for rows of no episode."""

    def ended(self, slots: int, n: int, out: int) -> None:
        """Write to bool `[n]` at `out` whether each row ended its episode."""

    def shift(self, slots: int, steps: int, n: int, out: int) -> None:
        """Write to int64 `[n]` at `out` the slots that lie int64 `[n]` at `steps` on, or the first or last."""

    def window(self, slots: int, n: int, before: int, after: int, dilation: int, out: int, valid: int) -> None:
        """Write windows of `T = before + 1 + after` rows: int64 `[n, T]` at `out`, bool `[n, T]` at `valid`.

        Raises:
            IndexError: A slot outside the ring.
            ValueError: `before` or `after` outside `[0, 2**31)`, or `dilation` below 1.
        """

    def spans(self, first: int, rows: int, closed: int, serial: int) -> None:
        """Write first slot, rows, whether ended (bool), serial number of each episode to `[count]`, by age."""

    def add_need(self, need: int) -> int:
        """Count rows that have `need - 1` after them from now on, and return the handle of that count.

        Raises:
            ValueError: `need` below 1.
        """

    def start_rows(self, handle: int) -> int:
        """Rows that have so many after them.

        Raises:
            ValueError: An unknown handle. (All calls with a handle do.)
        """

    def start_episodes(self, handle: int) -> int:
        """Episodes with such a row."""

    def draw(self, handle: int, randoms: int, n: int, out: int) -> None:
        """Write the slots of such rows to int64 `[n]` at `out`, by int64 `[n]` at `randoms`.

        Raises:
            IndexError: There is no such row, and `n` is above 0.
        """

    def draw_episodes(self, handle: int, randoms: int, n: int, out: int) -> None:
        """Write such rows of random episodes to int64 `[n]` at `out`, by int64 `[2 n]` at `randoms`.

        Raises:
            IndexError: There is no such row, and `n` is above 0.
        """

    def save(self, episode: int, serials: int, keys: int, kinds: int, status: int, free: int) -> None:
        """Write the state.

        Args:
            episode: Address of int32 `[present]`: the record of each row, oldest first; -1 for none.
            serials: Address of int64 `[records]`.
            keys: Address of int64 `[records]`: lane or id of an open episode.
            kinds: Address of uint8 `[records]`: 0 for a lane, 1 for an id.
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
        episode: int,
        serials: int,
        keys: int,
        kinds: int,
        status: int,
        free: int,
    ) -> None:
        """Take over what `save` wrote; the caller has checked that it is whole.

        Raises:
            ValueError: Numbers that point outside the table; nothing has changed then.
        """

def read_pieces(fds: int, offsets: int, widths: int, targets: int, n: int, gap: int) -> tuple[int, int]:
    """Read pieces of files, each straight to its place, with the interpreter lock released. Not on Windows.

    Args:
        fds: Address of int64 `[n]`: the open file of each piece.
        offsets: Address of int64 `[n]`: where it lies, ascending within a file.
        widths: Address of int64 `[n]`: its bytes.
        targets: Address of int64 `[n]`: the address to read it to.
        n: Number of pieces.
        gap: Pieces of one file that are at most so many bytes apart are read in one call.

    Returns:
        The first piece that could not be read in full, or `n`; and errno, 0 where its file ended before.

    Raises:
        ValueError: A negative `n` or `gap`.
    """

def make_shared_memory() -> int:
    """Make memory without a name, empty, and return its file descriptor. Linux only.

    Raises:
        OSError: The system refuses.
    """

class SharedRing:
    """The slots of a ring that processes share, in memory that all of them map; Linux only.

    It is a context manager: the lock between processes, which one thread may take several times. Every wait hears
    signals, and ends after `patience` milliseconds with `ostinato.errors.UsageError`. Whoever takes the lock after its
    owner died brings everything in order first.
    """

    patience: int
    largest: float

    def __init__(self, address: int, capacity: int, ranked: bool, fresh: bool) -> None:
        """Begin a ring in memory of zeros (`fresh`), or take part in the one that is there.

        Raises:
            ValueError: Memory that holds no ring of this form, or does not begin at a multiple of 64.
        """

    @staticmethod
    def bytes_for(capacity: int, ranked: bool) -> int:
        """Return the bytes that a ring takes."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def reserve(self, rows: int, total: int) -> tuple[int, int]:
        """Open slots for the last `rows` rows of a batch of `total`.

        Returns:
            The serial number of the first of them, and its slot.
        """

    def holds(self, serial: int) -> bool:
        """Whether what was reserved from this number on is still wanted. Under the lock."""

    def commit(self, serial: int) -> None:
        """Let what was reserved from this number on be read.

        Raises:
            IndexError: Nothing is.
        """

    def abandon(self, serial: int) -> None:
        """Give back what was reserved from this number on, if it was not committed."""

    def clear(self, cursor: int) -> None:
        """Forget all rows and go on at a slot. Under the lock."""

    def writers(self) -> int:
        """Count living writers between reserve and commit. Under the lock."""

    def now(self) -> tuple[int, int, int, int]:
        """Return the last serial number given out, holes, slots ever reserved, and whole rows."""

    def untouched(self, written: int) -> bool:
        """Whether nothing was reserved since this serial number. To be asked after a copy."""

    def stamps_of(self, slots: int, n: int, out: int) -> None:
        """Write the stamps of int64 `[n]` at `slots` to int64 `[n]` at `out`.

        Raises:
            IndexError: A slot out of range.
        """

    def changed(self, slots: int, n: int, written: int, out: int) -> int:
        """Mark in bool `[n]` at `out` which slots hold no whole row now, or one newer than `written`; return how many.

        Raises:
            IndexError: A slot out of range.
        """

    def present(self, out: int, room: int) -> int:
        """Write the slots below `room` that hold whole rows to int64 `[room]` at `out`; return how many."""

    def add(self, which: int, n: int) -> int:
        """Add to a count of all processes, and return what it was."""

    def count(self, which: int) -> int:
        """Return a count of all processes."""

    @property
    def capacity(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def stamps(self) -> int:
        """Address of int64 `[capacity]`."""

    @property
    def priorities(self) -> int:
        """Address of float64 `[capacity]`; 0 without priorities."""

    @property
    def tree(self) -> SumTree | None:
        """The tree of values; None without priorities."""
