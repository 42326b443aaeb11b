"""Types of the compiled part. Addresses are integers (`tensor.data_ptr()`); callers keep the memory alive."""

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

def shuffle_draw(perm: int, first: int, total: int, k: int, randoms: int, out: int) -> None:
    """`k` steps of a Fisher-Yates shuffle of int64 `perm[first:total]`, given out to int64 `out[k]`.

    Step i swaps `perm[i]` with `perm[j]`, `j = i + (randoms[i - first] * (total - i) >> 63)`.

    Args:
        perm: Address of int64 `[total]`.
        first: Where the shuffle stands, in [0, total].
        total: Length of the permutation.
        k: Steps, `first + k <= total`.
        randoms: Address of int64 `[k]`, each uniform in [0, 2**63); the top bit is ignored.
        out: Address of int64 `[k]`.

    Raises:
        ValueError: `first`, `total` and `k` do not fit together.
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
