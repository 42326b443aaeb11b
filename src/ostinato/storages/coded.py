"""Compressed fields of a tensor storage (`codec=`); which rows leave for `max_bytes=`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core.kinds import show_path
from ostinato.core.options import check_choice
from ostinato.core.records import ring_range
from ostinato.durable.arrays import host_view, raw_view
from ostinato.durable.codecs import find_codec, map_in_threads
from ostinato.errors import CapacityError, CheckpointError, OptionError, StorageMemoryError
from ostinato.storages.columns import Saved, StorageColumn, join_blobs, named_kinds, split_blobs
from ostinato.storages.table import copy_column, read_column

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.rows import Flat, Leaf, Schema
    from ostinato.durable.codecs import AnyCodec
    from ostinato.storages.columns import Fields

_WIDE_BYTES = 256
"""A codec given for all fields compresses those with more bytes per row; smaller fields share a packed row."""
_CHUNK_BYTES = 64 << 20
"""Uncompressed bytes of a field that are in memory at once when saved rows are compressed again."""


def coded_kinds(codec: object) -> Sequence[StorageColumn]:
    """Return the kinds of column of the option `codec`.

    Raises:
        OptionError: if it names no codec.
        MissingExtraError: for "zstd" if it is not installed.
    """
    if codec is None:
        return []
    if not isinstance(codec, Mapping):
        return [CodedColumn(find_codec(codec))]
    if not codec:
        msg = "codec={} names no field: leave it out, or name fields, such as codec={'obs': 'zstd'}"
        raise OptionError(msg)
    return named_kinds({key: CodedColumn(find_codec(value)) for key, value in codec.items()}, "codec")


@final
class CodedColumn(StorageColumn):
    """A compressed field: a byte string for each slot, each in memory of its own on the host.

    A byte string is never changed in place: a reader that runs while another thread writes gets the old or the new one,
    never a part of each.

    Args:
        codec: of the field. Without a field, the kind is that of all wide ones.
    """

    option = "codec"
    shareable = False

    def __init__(self, codec: AnyCodec) -> None:
        self.codec = codec

    def find(self, schema: Schema, taken: Mapping[int, StorageColumn]) -> list[Sequence[int]]:
        """Return the position of the field that was named, else those of all wide ones.

        Raises:
            OptionError: if a field that was named is not there, or no field is wide.
        """
        if self.path is not None:
            return super().find(schema, taken)
        wide = [i for i, leaf in enumerate(schema.leaves) if leaf.nbytes > _WIDE_BYTES]
        if not wide:
            name = self.codec.name
            msg = (
                f"codec={name!r} compresses fields of more than {_WIDE_BYTES} bytes per row, and there are none in "
                f"[{'; '.join(map(str, schema.leaves))}]: name the fields (codec={{'obs': {name!r}}}), or leave codec "
                "out"
            )
            raise OptionError(msg)
        return [(i,) for i in wide if i not in taken]

    def allocate(self) -> None:
        """Begin without values.

        Raises:
            OptionError: if the device is not the CPU.
        """
        if self.device.type != "cpu":
            msg = f"codec= keeps compressed rows in memory of the host, got device={str(self.device)!r}: use the CPU"
            raise OptionError(msg)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed values."""
        return self._nbytes

    def convert(self, values: Tensor, rows: int) -> np.ndarray[Any, Any]:
        """Compress the values of rows."""
        return _as_array(encode_rows(values.reshape(rows, -1), self.codec))

    def set(self, slots: Tensor, values: Any) -> None:
        """Keep compressed values."""
        at = slots.numpy()
        self._nbytes += sum(map(len, values)) - sum(map(len, filter(None, self._values[at])))
        self._values[at] = values

    def get(self, slots: Tensor) -> Tensor:
        """Decompress the values at slots into a new tensor."""
        return decoded(self.blobs(slots), self.leaf, self.codec)

    def _held(self, slots: Tensor) -> Any:
        return self._values[slots.numpy()]

    def blobs(self, slots: Tensor) -> list[bytes]:
        """Return the compressed values at slots.

        Raises:
            IndexError: if a slot is out of range, or holds no value.
        """
        found = self._held(slots).tolist()
        if None in found:
            msg = f"slot {slots[found.index(None)]} holds no row"
            raise IndexError(msg)
        return found  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Remove all rows."""
        # new, since a reader may still use the old array
        self._values: np.ndarray[Any, Any] = np.full(self.capacity, None, dtype=object)
        self._nbytes = 0

    def add_state(self, state: dict[str, Any], rows: int) -> None:
        """Add compressed values to the columns of a state, and the name of the codec to its `codec`. Copy."""
        state.setdefault("codec", {})[self.name] = self.codec.name
        values, ends = join_blobs(self.blobs(torch.arange(rows, device="cpu")))
        state["columns"] |= {f"{self.name}.blobs": values, f"{self.name}.ends": ends}

    def load(self, state: dict[str, Any], sources: Mapping[int, Any]) -> None:
        """Keep saved values, compressed ones of the same codec as they are; see `StorageColumn.load`."""
        source = sources[self.position]
        if not isinstance(source, SavedCoded):
            super().load(state, sources)
            return
        if source.codec.name == self.codec.name:
            blobs = source.blobs()
        else:
            blobs = [blob for part in source.parts() for blob in self.convert(part, part.shape[0])]
        self.clear()
        self.set(torch.arange(len(blobs), device="cpu"), _as_array(blobs))


def _as_array(blobs: Sequence[bytes]) -> np.ndarray[Any, Any]:
    return np.fromiter(blobs, dtype=object, count=len(blobs))


def _sizes(columns: Sequence[Iterable[bytes]]) -> np.ndarray[Any, Any]:
    """Return the bytes of the values of each row in all columns, int64 `[rows]`."""
    sizes: np.ndarray[Any, Any] = np.asarray([list(map(len, blobs)) for blobs in columns], dtype=np.int64).sum(0)
    return sizes


def encode_rows(values: Tensor, codec: AnyCodec) -> list[bytes]:
    """Compress each row of a tensor `[rows, elements]`, in several threads if there is enough work."""
    if not values.numel():
        return [codec.encode(b"") for _ in range(values.shape[0])]
    data, size = host_view(values), values.nbytes // values.shape[0]

    def encode(part: Sequence[int]) -> list[bytes]:
        return [codec.encode(data[i * size : (i + 1) * size]) for i in part]

    return map_in_threads(encode, range(values.shape[0]), values.nbytes)


def decoded(blobs: Sequence[bytes], leaf: Leaf, codec: AnyCodec) -> Tensor:
    """Decompress values into a new tensor `[n, *leaf.shape]`, in several threads if there is enough work.

    Equal objects (rows that are read more than once, as in stacks of frames) are decompressed once.

    Raises:
        DamagedFileError: if a value does not have the size of the field.
    """
    out = torch.empty((len(blobs), *leaf.shape), dtype=leaf.dtype, device="cpu")
    size, first, again = leaf.nbytes, dict[int, int](), list[tuple[int, int]]()
    for i, blob in enumerate(blobs):
        place = first.setdefault(id(blob), i)
        if place != i:
            again.append((i, place))
    if not size:
        return out
    rows = np.frombuffer(raw_view(out), dtype=np.uint8).reshape(len(blobs), size)

    def decode(part: Sequence[int]) -> list[None]:
        for i in part:
            rows[i] = np.frombuffer(codec.decode(blobs[i], size), dtype=np.uint8)
        return []

    map_in_threads(decode, list(first.values()), size * len(first))
    for i, place in again:
        rows[i] = rows[place]
    return out


# -- in checkpoints ----------------------------------------------------------------------------------------------------


def find_coded(state: dict[str, Any], schema: Schema, mine: Sequence[StorageColumn]) -> dict[str, SavedCoded]:
    """Return the compressed columns of a state, which are taken out of its other ones; nothing is read yet.

    Args:
        state: of a storage.
        schema: of its rows.
        mine: kinds of column of the storage that reads it, whose codecs may be the user's.

    Raises:
        CheckpointError: if its codec is not known here.
        KeyError: if a column is missing.
    """
    by_name = {kind.codec.name: kind.codec for kind in mine if isinstance(kind, CodedColumn)}
    leaves, columns, found = dict(zip(schema.column_names, schema.leaves, strict=True)), state["columns"], {}
    for name, codec_name in (state.get("codec") or {}).items():
        codec = by_name.get(codec_name) or known_codec(leaves[name], codec_name)
        values, ends = columns.pop(f"{name}.blobs"), columns.pop(f"{name}.ends")
        found[name] = SavedCoded(leaves[name], codec, values, ends)
    return found


def known_codec(leaf: Leaf, name: object) -> AnyCodec:
    """Return the codec of the library that a checkpoint names.

    Raises:
        CheckpointError: if it is another one.
    """
    if name in {"zlib", "zstd"}:
        return find_codec(name)
    msg = (
        f"{show_path(leaf.path)} was saved with the codec {name!r}, which is not of this library: load into a storage "
        f"with codec={{{leaf.path[-1] if leaf.path else ''!r}: Codec({name!r}, ...)}}"
    )
    raise CheckpointError(msg)


@final
class SavedCoded(Saved):
    """A compressed column of a state."""

    def __init__(self, leaf: Leaf, codec: AnyCodec, values: Any, ends: Any) -> None:
        self._leaf, self._values, self._ends = leaf, values, ends
        self.codec = codec
        self.dtype, self.shape = leaf.dtype, (int(ends.shape[0]), *leaf.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed values in their file."""
        return int(self._values.nbytes) + int(self._ends.nbytes)

    def blobs(self) -> list[bytes]:
        """Return the compressed values.

        Raises:
            CheckpointError: if their ends do not fit them.
        """
        return split_blobs(read_column(self._values), read_column(self._ends))

    def parts(self) -> Iterator[Tensor]:
        """Yield the values in parts, each decompressed when it is taken."""
        blobs, step = self.blobs(), max(1, _CHUNK_BYTES // max(1, self._leaf.nbytes))
        for first in range(0, len(blobs), step):
            yield decoded(blobs[first : first + step], self._leaf, self.codec)

    def index_select(self, _dim: int, slots: Tensor) -> Tensor:
        """Decompress the rows at `slots`, as `Tensor.index_select` does, where values and ends are tensors."""
        ends = self._ends
        spans = [(int(ends[i - 1]) if i else 0, int(ends[i])) for i in slots.tolist()]
        return decoded([self._values[a:b].numpy().tobytes() for a, b in spans], self._leaf, self.codec)

    def read_into(self, dest: Tensor) -> None:
        """Decompress all rows into a tensor."""
        first = 0
        for part in self.parts():
            copy_column(part, dest[first : first + part.shape[0]])
            first += part.shape[0]


# -- max_bytes: which rows leave ---------------------------------------------------------------------------------------

Evict: TypeAlias = Literal["rows", "episodes"]

_SLACK = 16
"""A removal leaves room for a 16th of the budget: moving the rows that stay then costs little per row written."""


class Budget(NamedTuple):
    """The options `max_bytes` and `evict`."""

    max_bytes: int
    episodes: bool
    """Whether whole episodes leave."""


def check_budget(max_bytes: object, evict: Evict, kinds: Sequence[StorageColumn], *, ndim: int) -> Budget | None:
    """Return the budget of a storage; None without one.

    Raises:
        CapacityError: if `max_bytes` is not a positive integer.
        OptionError: for another `evict`, a budget without codec or with other kinds of column, or episodes with
            `ndim=2`.
    """
    check_choice("evict", evict, ("rows", "episodes"))
    if max_bytes is None:
        if evict != "rows":
            msg = "evict says which rows leave when max_bytes is reached: give max_bytes, or leave evict out"
            raise OptionError(msg)
        return None
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        msg = f"max_bytes must be a positive integer or None, got {max_bytes!r}"
        raise CapacityError(msg)
    coded = [kind for kind in kinds if isinstance(kind, CodedColumn)]
    if not coded:
        msg = "max_bytes needs codec: without it all rows have the same bytes, so that max_size sets the memory"
        raise OptionError(msg)
    other = next((kind.option for kind in kinds if kind not in coded), None)
    if other is not None:
        msg = f"max_bytes counts compressed and dense fields, not those of {other}: leave max_bytes or {other} out"
        raise OptionError(msg)
    if evict == "episodes" and ndim > 1:
        msg = "evict='episodes' needs ndim=1, since with ndim=2 a step of all environments leaves: use evict='rows'"
        raise OptionError(msg)
    return Budget(max_bytes, evict == "episodes")


def rows_that_stay(
    budget: Budget, table: Fields, payload: Flat, rows: int, oldest: int, episodes: EpisodeTable | None
) -> Tensor | None:
    """Return the slots of the rows that stay when others have to leave; None if all may stay.

    The rows that the new ones replace in a full ring leave in any case.

    Args:
        budget: the limits.
        table: the fields of the rows.
        payload: rows about to be written in ring order.
        rows: rows present.
        oldest: slot of the oldest.
        episodes: of the rows, for a budget of whole episodes.

    Returns:
        int64 `[n]`, the oldest row first.

    Raises:
        StorageMemoryError: if the new rows alone exceed the budget.
    """
    pairs = zip(table.kinds, payload.prepared, strict=True)
    coded = {kind: blobs for kind, blobs in pairs if isinstance(kind, CodedColumn)}
    dense = sum(table.schema.leaves[i].nbytes for i in table.kept)
    coming = (_sizes(list(coded.values())) + dense)[-table.capacity :]
    needed = int(coming.sum())
    if needed > budget.max_bytes:
        msg = (
            f"{coming.shape[0]} row(s) take {needed} bytes compressed, max_bytes={budget.max_bytes}: write fewer rows "
            "at once, or raise max_bytes"
        )
        raise StorageMemoryError(msg)
    if needed + sum(kind.nbytes for kind in coded) + rows * dense <= budget.max_bytes:
        return None
    order = ring_range(oldest, rows, table.capacity)
    sizes = _sizes([kind.blobs(order) for kind in coded]) + dense
    replaced = max(0, rows + coming.shape[0] - table.capacity)
    most = budget.max_bytes - needed
    if int(sizes[replaced:].sum()) <= most:
        return None
    wanted = max(0, most - budget.max_bytes // _SLACK)
    leaving = np.zeros(rows, dtype=np.bool_)
    if budget.episodes and episodes is not None:
        _mark_episodes(leaving, episodes, order, sizes, (wanted, most))
        if int(sizes[~leaving].sum()) > most:
            _mark_rows(leaving, sizes, most, 1)
    else:
        _mark_rows(leaving, sizes, wanted, table.num_envs)
    return order[torch.from_numpy(~leaving)]


def _mark_rows(leaving: npt.NDArray[np.bool_], sizes: npt.NDArray[np.int64], most: int, step: int) -> None:
    """Mark the oldest rows, a multiple of `step`, until the others take at most `most` bytes."""
    left = np.where(leaving, 0, sizes)
    after = int(left.sum()) - np.cumsum(left)  # bytes without the rows up to each
    count = int(np.argmax(after <= most)) + 1
    leaving[: -(-count // step) * step] = True


def _mark_episodes(
    leaving: npt.NDArray[np.bool_],
    episodes: EpisodeTable,
    order: Tensor,
    sizes: npt.NDArray[np.int64],
    limits: tuple[int, int],
) -> None:
    """Mark the rows of the oldest episodes, and rows of no episode that are older than these.

    Args:
        leaving: by age.
        episodes: of the rows.
        order: the slots by age.
        sizes: bytes by age.
        limits: finished episodes leave until the others take the first number of bytes; unfinished ones, but for the
            newest, until they take the second.
    """
    age = torch.empty(episodes.capacity, dtype=torch.int64, device="cpu")
    age[order] = torch.arange(order.shape[0], device="cpu")
    outside = (episodes.ahead(order) < 0).numpy()
    spans = episodes.episodes()
    rank = range(spans.first.shape[0])
    closed = spans.closed.tolist()
    finished, others = [i for i in rank if closed[i]], [i for i in rank if not closed[i]]
    left = int(sizes.sum())
    for chosen, limit in ((finished, limits[0]), (others[:-1], limits[1])):
        for i in chosen:
            if left <= limit:
                break
            rows = int(spans.rows[i])
            slots = episodes.shift(spans.first[i].repeat(rows), torch.arange(rows, device="cpu"))
            leaving[age[slots].numpy()] = True
            newest = int(age[slots].max())
            leaving[:newest] |= outside[:newest]
            left = int(sizes[~leaving].sum())
