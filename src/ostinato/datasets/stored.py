"""Rows as files store them: one array per episode, observations that have one row more, flags made of two others."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from ostinato._optional import require
from ostinato.core.options import number_of
from ostinato.datasets.checks import WrongValueError
from ostinato.datasets.columns import MovedColumn, TensorColumn
from ostinato.errors import DamagedFileError, SchemaError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.rows import Path as Key
    from ostinato.datasets.columns import DatasetColumn

BLOCK_BYTES = 1 << 18
"""Bytes of a block where the file has no chunks: reading it costs about as much as finding it."""


def torch_dtype(dtype: Any, field: str) -> torch.dtype:
    """Return the dtype of tensors with these numbers.

    Raises:
        SchemaError: if torch has no such dtype, as for text, objects and records.
    """
    try:
        return torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype
    except TypeError:
        msg = f"{field} has the dtype {dtype}, which tensors cannot have: store numbers or flags"
        raise SchemaError(msg) from None


def as_block(array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array that was just read as a tensor. No copy if its bytes are in the order of this machine."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def name_rows(first: int, stop: int, stops: np.ndarray[Any, Any]) -> str:
    """Return rows `[first, stop)` as a text, with their episodes.

    Args:
        first: first row.
        stop: row after the last one.
        stops: row after the last one of each episode, int64 `[episodes]`.
    """
    episodes = np.searchsorted(stops, [first, stop - 1], side="right").tolist()
    which = f"episode {episodes[0]}" if episodes[0] == episodes[1] else f"episodes {episodes[0]} to {episodes[1]}"
    return f"rows [{first}, {stop}) of {which}"


@final
class Pieces:
    """Blocks of a field that is stored in pieces, one array for each episode.

    A block never reaches over two pieces. It ends at a chunk of the array, if chunks are known.

    Args:
        lengths: rows of each piece, int64 `[pieces]`.
        row_bytes: bytes of one row.
        chunk_rows: rows of the chunks of an array; None if it has none.
        block_bytes: smallest number of bytes of a block within a piece.
    """

    def __init__(
        self,
        lengths: np.ndarray[Any, Any],
        row_bytes: int,
        chunk_rows: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        unit = max(1, chunk_rows or 1)
        rows = unit * max(1, math.ceil(block_bytes / max(1, row_bytes * unit)))
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        """First row of each piece, and the number of rows at the end: int64 `[pieces + 1]`."""
        counts = -(-np.asarray(lengths, dtype=np.int64) // rows)
        first = np.cumsum(counts) - counts
        within = (np.arange(counts.sum()) - np.repeat(first, counts)) * rows
        self.starts = np.concatenate([np.repeat(self.offsets[:-1], counts) + within, self.offsets[-1:]])
        """First row of each block, and the number of rows at the end: int64 `[blocks + 1]`."""

    def locate(self, block: int) -> tuple[int, int, int]:
        """Return the piece of a block, and its rows within the piece as a half-open range."""
        start, stop = int(self.starts[block]), int(self.starts[block + 1])
        piece = int(np.searchsorted(self.offsets, start, side="right")) - 1
        offset = int(self.offsets[piece])
        return piece, start - offset, stop - offset


@final
@dataclass(frozen=True, eq=False)
class StoredRows:
    """Takes rows of a dataset to those of an array with other rows between the episodes. A `move` of `MovedColumn`."""

    ends: Tensor
    """The row of the dataset after the last one of each episode, int64 `[episodes]`."""
    shifts: Tensor
    """How many rows further on each episode is stored, int64 `[episodes]`."""
    step: int = 0
    """1 for the observation after the step, which is the next row."""
    last: Tensor | None = None
    """Last stored row of each episode, beyond which no row is read, int64 `[episodes]`; None if all rows are there."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the stored rows, int64 `[n]`."""
        episodes = torch.searchsorted(self.ends, rows, right=True)
        stored = rows + self.shifts[episodes] + self.step
        return stored if self.last is None else torch.minimum(stored, self.last[episodes])


class Ends(NamedTuple):
    """The rows of a dataset whose episodes end with flags, and where they are stored."""

    lengths: Tensor
    """Rows of each episode, int64 `[episodes]`."""
    flags: dict[Key, DatasetColumn]
    """`terminated`, `truncated` and `done` under `next`."""
    now: StoredRows | None
    """Where the rows are stored; None if the rows of the dataset are all that are stored."""
    after: StoredRows
    """Where the observations after the steps are stored, if that is the next row."""
    left_out: int
    """Stored rows that are not in the dataset."""
    own_last: bool
    """Whether last rows of terminated episodes have their own observation as the next one."""

    def reason(self, name: str) -> str:
        """Return why rows are not in the dataset, if some are.

        Args:
            name: what the file would need to have for them to be there.
        """
        if not self.left_out:
            return ""
        return f"the file has no {name}, and what follows the last row of an episode that was cut off is unknown"

    def assumed(self, name: str) -> list[str]:
        """Return sentences on what was assumed of the last rows of episodes, where the file has no such `name`."""
        said = []
        if self.left_out:
            said.append(
                f"The file has no {name}: the last row of each episode that was cut off is left out "
                f"({number_of(self.left_out, 'row')}), since the observation after it is unknown; the row before it is "
                "truncated."
            )
        if self.own_last:
            said.append(f"The file has no {name}: the next observation of a terminated row is its own observation.")
        return said

    @classmethod
    def of(
        cls,
        lengths: np.ndarray[Any, Any],
        terminated: np.ndarray[Any, Any],
        truncated: np.ndarray[Any, Any],
        *,
        drop: bool,
    ) -> Ends:
        """Return the rows of stored episodes. The last row of an episode without a flag is truncated.

        Args:
            lengths: stored rows of each episode, int64 `[episodes]`, at least 1.
            terminated: bool `[stored rows]`.
            truncated: bool `[stored rows]`.
            drop: leave out the last row of each episode that is not terminated: the file does not have the observation
                after it. The row before, whose next observation is that of the row left out, is truncated instead.
        """
        stops = np.cumsum(lengths)
        cut = ~terminated[stops - 1]
        flags = truncated.copy()
        flags[stops[cut] - 1] = True
        keep = np.ones(flags.shape[0], bool)
        if drop:
            keep[stops[cut] - 1] = False
            flags[stops[cut & (lengths > 1)] - 2] = True
        counts = lengths - (cut & drop)
        left, stops, starts = counts[counts > 0], stops[counts > 0], (stops - lengths)[counts > 0]
        ends = np.cumsum(left)
        shifts = torch.from_numpy(starts - (ends - left))
        rows, last = torch.from_numpy(ends), torch.from_numpy(stops - 1)
        found = {"terminated": terminated[keep], "truncated": flags[keep], "done": (terminated | flags)[keep]}
        return cls(
            torch.from_numpy(left),
            {("next", name): TensorColumn(torch.from_numpy(value)) for name, value in found.items()},
            None if bool(keep.all()) else StoredRows(rows, shifts),
            StoredRows(rows, shifts, 1, last),
            int((~keep).sum()),
            drop and not cut.all(),
        )

    def place(self, column: DatasetColumn) -> DatasetColumn:
        """Return a stored column at the rows of the dataset."""
        return column if self.now is None else MovedColumn(column, self.now)


def as_flags(values: np.ndarray[Any, Any], place: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return flags, bool `[rows]`, that may be stored as numbers `[rows]` or `[rows, 1]`.

    Raises:
        DamagedFileError: if one is neither 0 nor 1, or there are several for a row.
    """
    flat = values.reshape(values.shape[0], -1)
    if flat.shape[1:] != (1,) or values.dtype.kind not in "biuf":
        msg = f"{place} must be one flag per row, got {values.dtype}{list(values.shape[1:])}"
        raise DamagedFileError(msg)
    wrong = np.flatnonzero((flat != 0) & (flat != 1))
    if wrong.shape[0]:
        msg = f"{place}, row {wrong[0]}: a flag must be 0 or 1, got {flat[wrong[0], 0]}"
        raise DamagedFileError(msg)
    return flat[:, 0].astype(np.bool_)


def last_rows(lengths: Tensor) -> TensorColumn:
    """Return whether a row is the last one of its episode, from the rows of each episode, int64 `[episodes]`."""
    ends = torch.zeros(int(lengths.sum()), dtype=torch.bool, device="cpu")
    ends[lengths.cumsum(0) - 1] = True
    return TensorColumn(ends)


def decode_picture(data: bytes, extra: str, **options: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a picture of a file of PNG, JPEG or another format, `[H, W, C]` or `[H, W]`.

    Args:
        data: the bytes of the file.
        extra: what to install if Pillow is missing.
        **options: those of `PIL.Image.open`.

    Raises:
        WrongValueError: if it cannot be decoded.
    """
    image = require("PIL.Image", extra)
    try:
        with image.open(io.BytesIO(data), **options) as opened:
            return np.asarray(opened)
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise WrongValueError(0, f"the picture cannot be decoded: {error}", "file-unreadable") from error


def decode_jpegs(rows: Any, place: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode pictures.

    Args:
        rows: the bytes of each one, as arrays uint8 or `bytes`.
        place: file, field and first row, for errors.
        shape: shape of a picture, `(height, width)` or `(height, width, channels)`.

    Returns:
        uint8 `[rows, *shape]`.

    Raises:
        DamagedFileError: if a picture cannot be decoded, or has another shape.
    """
    out = np.empty((len(rows), *shape), np.uint8)
    for position, row in enumerate(rows):
        content = row if isinstance(row, bytes) else np.asarray(row).tobytes()
        try:
            picture = decode_picture(content, "minari", formats=("JPEG",))
        except WrongValueError as error:
            msg = f"{place}, picture {position}: {error}"
            raise DamagedFileError(msg) from error
        if picture.shape != shape:
            msg = f"{place}: picture {position} has the shape {list(picture.shape)}, the space says {list(shape)}"
            raise DamagedFileError(msg)
        out[position] = picture
    return out
