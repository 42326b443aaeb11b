"""Columns of a dataset: where the rows of one field come from, from tensors in memory to blocks of rows in files."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import numpy as np
import torch

from ostinato.core.rows import as_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.datasets.cache import BlockCache
    from ostinato.datasets.parquet import EpisodeFiles

T = TypeVar("T")


class DatasetColumn(Protocol):
    """One field of a dataset, read by row. Thread-safe; pickled without open files, and usable in forked processes."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the field."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the field in one row."""

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows, int64 `[n]` on the CPU, in any order, repeated ones included.

        Returns:
            A function that waits for the rows and returns them, `[n, *shape]`. Copy.
        """

    def close(self) -> None:
        """Close files; the next read opens them again."""


class BlockSource(Protocol):
    """Reads blocks of consecutive rows of one field from files.

    It may have `read_rows`, too, which takes rows, int64 `[n]` in any order, and returns them, or None if they must be
    read in blocks: files may hold rows at known places, where single rows cost less than blocks.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the field."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the field in one row."""

    @property
    def starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """First row of each block, and the number of rows at the end: int64 `[blocks + 1]`, ascending from 0."""

    def load(self, block: int) -> Tensor:
        """Read one block, `[rows of the block, *shape]`.

        Raises:
            DamagedFileError: naming the file and the episode.
        """

    def close(self) -> None:
        """Close files; the next read opens them again."""


@final
class TensorColumn:
    """A field that is a tensor in memory, or one mapped from a file.

    Args:
        tensor: `[rows, *shape]` on the CPU. Not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the field."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the field in one row."""
        return tuple(self.tensor.shape[1:])

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Return a function that copies rows; see `DatasetColumn`."""
        return lambda: self.tensor.index_select(0, rows)

    def close(self) -> None:
        """Do nothing: there is no open file."""


@final
class MovedColumn:
    """Another column, read at other rows (the observation after a step), or whether one of two flags is set.

    Args:
        column: the column that is read.
        move: takes rows, int64 `[n]`, and returns those of `column`, int64 `[n]`. Must be picklable. None: the same.
        other: another column of flags with the same rows; the result is bool then. None for the values of `column`.
    """

    def __init__(
        self,
        column: DatasetColumn,
        move: Callable[[Tensor], Tensor] | None = None,
        other: DatasetColumn | None = None,
    ) -> None:
        self.columns = (column,) if other is None else (column, other)
        """The columns that are read."""
        self._move = move

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the field."""
        return torch.bool if len(self.columns) > 1 else self.columns[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the field in one row."""
        return self.columns[0].shape

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows; see `DatasetColumn`."""
        moved = rows if self._move is None else self._move(rows)
        reads = [column.start(moved) for column in self.columns]
        return reads[0] if len(reads) == 1 else lambda: reads[0]().bool() | reads[1]().bool()

    def on(self, columns: Sequence[DatasetColumn]) -> MovedColumn:
        """Return this column as it reads others in the place of `columns`."""
        return MovedColumn(columns[0], self._move, *columns[1:])

    def close(self) -> None:
        """Close files."""
        for column in self.columns:
            column.close()


@final
class BlockColumn:
    """A field whose rows lie in blocks of files, such as row groups of a table; blocks are kept in a cache.

    Cost of a read: one load for each block that is not in the cache, and one copy.

    Args:
        source: reads blocks.
        cache: keeps the blocks read last, of all columns of a dataset.
        together: the files whose columns are read with this one, when all of them are started first; None for none.
    """

    def __init__(self, source: BlockSource, cache: BlockCache, together: EpisodeFiles | None = None) -> None:
        self.source, self._together = source, together
        self._cache = cache
        self.name = cache.register()
        """Of the blocks in the cache: their keys are `(name, block)`."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the field."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the field in one row."""
        return self.source.shape

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Return a function that reads rows; see `DatasetColumn`."""
        return self.started(partial(self._read, rows))

    def started(self, read: Callable[[], T]) -> Callable[[], T]:
        """Return `read`, which will read blocks of this column: until then it may be read together with others."""
        if self._together is None:
            return read
        announced = self._together.announce(self.name)

        def finish() -> T:
            try:
                return read()
            finally:
                announced.settle()

        return finish

    def take(self, block: int) -> Tensor:
        """Return a block, which the cache does not keep."""
        found = self._cache.take((self.name, block))
        return self.source.load(block) if found is None else found

    def _read(self, rows: Tensor) -> Tensor:
        read_rows = getattr(self.source, "read_rows", None)
        found: Tensor | None = None if read_rows is None else read_rows(rows)
        return self._read_blocks(rows) if found is None else found

    def _read_blocks(self, rows: Tensor) -> Tensor:
        starts = self.source.starts
        at = rows.numpy()
        blocks = np.searchsorted(starts, at, side="right") - 1
        out = torch.empty((at.shape[0], *self.shape), dtype=self.dtype, device="cpu")
        bits = as_bits(out).numpy()  # NumPy copies a few rows faster, since it starts no threads
        order = np.argsort(blocks, kind="stable")
        ordered = blocks[order]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        for part in np.split(order, cuts) if at.shape[0] else []:
            block = int(blocks[part[0]])
            found = self._cache.get((self.name, block), lambda block=block: self.source.load(block))  # type: ignore[misc]
            bits[part] = as_bits(found).numpy()[at[part] - starts[block]]
        return out

    def close(self) -> None:
        """Close files."""
        self.source.close()


class RowMemory(Protocol):
    """Where rows are kept after they were read."""

    def open(self, name: str, rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return memory for rows `[rows, *shape]`, and which of them it holds, bool `[rows]`."""

    def kept(self, nbytes: int) -> None:
        """Note that rows of so many bytes were added."""

    def flush(self) -> None:
        """Save rows, if they persist."""


@final
class DenseColumn:
    """A column whose rows are kept after the first read, in memory or in a mapped file: each row is decoded once.

    Safe to use from several threads and processes: two that need the same row at once may both decode it, to the same
    bytes.

    Args:
        column: the column that is read.
        rows: number of rows of the dataset.
        memory: where rows are kept. A pickled copy of the column opens it again.
        name: of the column in the memory.

    Raises:
        StorageMemoryError: if there is too little memory or disk.
    """

    def __init__(self, column: DatasetColumn, rows: int, memory: RowMemory, name: str) -> None:
        self.column = column
        self._rows, self._memory, self._name = rows, memory, name
        self._begin()

    def _begin(self) -> None:
        self.tensor, self.filled = self._memory.open(self._name, self._rows, self.dtype, self.shape)

    def __getstate__(self) -> dict[str, Any]:
        """The column and where its rows are kept."""
        return {name: value for name, value in self.__dict__.items() if name not in ("tensor", "filled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the memory."""
        self.__dict__.update(state)
        self._begin()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the field."""
        return self.column.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the field in one row."""
        return self.column.shape

    def fill(self, rows: Tensor) -> Callable[[], None] | None:
        """Begin to read those of `rows` (int64 `[n]`) that are not kept yet; None if all are.

        Returns:
            A function that waits until they are in `tensor`.
        """
        at = rows.numpy()  # NumPy throughout: torch's threads hang in a process that was forked by hand
        filled = self.filled.numpy()
        missing = np.unique(at[~filled[at]])
        if not missing.shape[0]:
            return None
        wanted = torch.from_numpy(missing)
        if isinstance(self.column, BlockColumn):
            return self.column.started(partial(self._fill_blocks, self.column, wanted))
        read = self.column.start(wanted)

        def finish() -> None:
            _bytes_of(self.tensor)[missing] = _bytes_of(read())
            filled[missing] = True  # after the rows: another thread may read them from now on
            self._memory.kept(missing.shape[0] * _bytes_of(self.tensor).shape[1])

        return finish

    def _fill_blocks(self, column: BlockColumn, rows: Tensor) -> None:
        """Read the blocks that hold `rows`, and keep all of their rows: reading a part costs as much."""
        starts = column.source.starts
        for block in np.unique(np.searchsorted(starts, rows.numpy(), side="right") - 1).tolist():
            span = slice(int(starts[block]), int(starts[block + 1]))
            found = column.take(block)
            _bytes_of(self.tensor)[span] = _bytes_of(found)
            self.filled.numpy()[span] = True  # after the rows: another thread may read them from now on
            self._memory.kept(found.nbytes)

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows; see `DatasetColumn`."""
        finish = self.fill(rows)

        def read() -> Tensor:
            if finish is not None:
                finish()
            return self.tensor.index_select(0, rows)

        return read

    def close(self) -> None:
        """Close files, and save rows if they persist."""
        self.column.close()
        self._memory.flush()


def _bytes_of(rows: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """View rows as their bytes, `[rows, bytes]`."""
    flat = rows.contiguous().view(rows.shape[0], math.prod(rows.shape[1:]))
    return flat.view(torch.uint8).numpy()


@final
class TextColumn:
    """A field of text that takes few values, such as the task of an episode.

    Args:
        values: the different texts.
        codes: column of one integer per row: the position of its text in `values`.
    """

    def __init__(self, values: list[str], codes: DatasetColumn) -> None:
        self.values = np.array([*values, ""], dtype=object)[: len(values)]
        self.codes = codes

    def read(self, rows: Tensor) -> np.ndarray[Any, Any]:
        """Return the texts of rows, an object array `[n]`."""
        found: np.ndarray[Any, Any] = self.values[self.codes.start(rows)().reshape(-1).numpy()]
        return found
