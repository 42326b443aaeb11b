"""CodecTable: wide fields of a tensor storage as compressed bytes by slot, beside the table of the other fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato.core.kinds import show_path
from ostinato.core.records import Picks, Request
from ostinato.core.rows import Flat, Schema, as_bits
from ostinato.durable.codecs import find_codec, map_in_threads
from ostinato.durable.dtypes import raw_view
from ostinato.errors import CheckpointError, OptionError
from ostinato.storages.blobs import BlobColumn, check_ends, join_blobs, split_blobs
from ostinato.storages.table import Table, check_alike, checked_choice, copy_column, read_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.records import Placement
    from ostinato.core.rows import Leaf, Path
    from ostinato.durable.codecs import AnyCodec
    from ostinato.storages.memory import Memory
    from ostinato.storages.table import Block, RowArray

__all__ = [
    "BlobReader",
    "CodecTable",
    "CodedColumn",
    "Encoded",
    "check_codec",
    "codecs_of",
    "decoded_columns",
    "raise_mapped_codec",
]

_WIDE_BYTES = 256
"""A codec given for all fields compresses those with more bytes per row; smaller fields share a packed row."""
_CHUNK_BYTES = 64 << 20
"""Uncompressed bytes of a field that are in memory at once when saved rows are compressed again."""


class Encoded(NamedTuple):
    """The compressed fields of rows that are about to be written."""

    columns: list[list[bytes]]
    """One value per row for each field."""


def check_codec(codec: object) -> dict[Path, AnyCodec] | AnyCodec | None:
    """Return the option `codec` with codecs in the place of their names.

    Raises:
        OptionError: if it names no codec.
        MissingExtraError: for "zstd" if it is not installed.
    """
    if codec is None:
        return None
    if not isinstance(codec, Mapping):
        return find_codec(codec)
    if not codec:
        msg = "codec={} names no field: leave it out, or name fields, such as codec={'obs': 'zstd'}"
        raise OptionError(msg)
    paths = {key if isinstance(key, tuple) else (key,): value for key, value in codec.items()}
    return {path: find_codec(value) for path, value in paths.items()}


def codecs_of(schema: Schema, option: Mapping[Path, AnyCodec] | AnyCodec) -> dict[int, AnyCodec]:
    """Return the codec of each leaf that is compressed, by its position.

    Raises:
        OptionError: if a field that the option names is not there, or no field is wide.
    """
    fields = "; ".join(map(str, schema.leaves))
    if not isinstance(option, Mapping):
        wide = {i: option for i, leaf in enumerate(schema.leaves) if leaf.nbytes > _WIDE_BYTES}
        if not wide:
            msg = (
                f"codec={option.name!r} compresses fields of more than {_WIDE_BYTES} bytes per row, and there are none "
                f"in [{fields}]: name the fields (codec={{'obs': {option.name!r}}}), or leave codec out"
            )
            raise OptionError(msg)
        return wide
    positions = {leaf.path: i for i, leaf in enumerate(schema.leaves)}
    for path in option:
        if path not in positions:
            msg = f"codec names {show_path(path)}, which is not a tensor field of the rows: they have [{fields}]"
            raise OptionError(msg)
    return {positions[path]: codec for path, codec in option.items()}


@final
class CodecTable:
    """Memory for `capacity` rows of a schema, some fields of which are compressed.

    A compressed field is one byte string per row. Byte strings are never changed in place, so a reader that runs while
    another thread writes decompresses whole values. All reads are copies.

    Args:
        schema: of a row.
        capacity: rows.
        codecs: by position of the leaf.
        memory: allocates the table of the other fields.
        packed: see `plan_layout`.

    Raises:
        OptionError: if the memory is not in the host.
    """

    def __init__(
        self, schema: Schema, capacity: int, codecs: Mapping[int, AnyCodec], memory: Memory, *, packed: bool
    ) -> None:
        if memory.device.type != "cpu":
            msg = f"codec= keeps compressed rows in memory of the host, got device={str(memory.device)!r}: use the CPU"
            raise OptionError(msg)
        self.schema = schema
        self.capacity = capacity
        self.codecs = dict(codecs)
        self.device = memory.device
        self.kept = [i for i in range(len(schema.leaves)) if i not in codecs]
        self._places = {position: place for place, position in enumerate(self.kept)}
        self.inner = Table.allocate_some(schema, self.kept, capacity, memory, packed=packed)
        """The fields that are not compressed; None if all are."""
        self.columns = {i: BlobColumn(capacity) for i in sorted(codecs)}
        """The compressed fields by position of their leaf."""

    @property
    def layout(self) -> list[Block]:
        """Which of the other fields share a block."""
        return [] if self.inner is None else self.inner.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed values, and of the other fields for the whole capacity."""
        return self.blob_bytes + (0 if self.inner is None else self.inner.nbytes)

    @property
    def blob_bytes(self) -> int:
        """Bytes of the compressed values."""
        return sum(column.nbytes for column in self.columns.values())

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy rows; see `Table.gather`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(CodecTable.gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        dense = iter(() if self.inner is None else self.inner.gather(slots, pin=pin))
        at = slots.tolist()
        coded = {i: self._decode(i, column.get(at), pin=pin) for i, column in self.columns.items()}
        return [coded[i] if i in coded else next(dense) for i in range(len(self.schema.leaves))]

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy different rows of each field; see `Table.fetch`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(CodecTable.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        out: dict[int, Tensor] = {}
        dense: dict[int, Request] = {}
        for i, request in enumerate(requests):
            leaf, other = request.leaf, request.other
            if leaf in self.columns or other in self.columns:
                out[i] = self._fetch_coded(request, pin=pin)
            else:
                place = None if other is None else self._places[other]
                dense[i] = request._replace(leaf=self._places[leaf], other=place)
        if self.inner is not None and dense:
            out.update(zip(dense, self.inner.fetch(list(dense.values()), pin=pin), strict=True))
        return [out[i] for i in range(len(requests))]

    def _fetch_coded(self, request: Request, *, pin: bool) -> Tensor:
        leaf, slots, other, pick = request
        if other is None and pick is None:
            return self._decode(leaf, self.columns[leaf].get(slots.tolist()), pin=pin)
        other, pick = checked_choice(request)
        one, two = self.schema.leaves[leaf], self.schema.leaves[other]
        check_alike(one.dtype, one.shape, two.dtype, two.shape)
        chosen, at = pick.cpu(), slots.tolist()
        both = self.columns.get(leaf), self.columns.get(other)
        if both[0] is not None and both[1] is not None and self.codecs[leaf] == self.codecs[other]:
            blobs = [both[second].get((slot,))[0] for slot, second in zip(at, chosen.tolist(), strict=True)]  # type: ignore[union-attr]
            return self._decode(leaf, blobs, pin=pin)
        out = torch.empty((slots.shape[0], *one.shape), dtype=one.dtype, pin_memory=pin, device="cpu")
        for position, rows in ((leaf, ~chosen), (other, chosen)):
            (found,) = self.fetch([Request(position, slots.cpu()[rows])])
            as_bits(out)[rows] = as_bits(found)
        return out

    def view(self, span: slice) -> list[Tensor]:
        """Return copies of the rows of a span: changes to them do not reach the table."""
        return self.gather(torch.arange(self.capacity, device="cpu")[span].contiguous())

    def column(self, position: int, rows: int) -> Tensor:
        """Return a copy of one field of the first `rows` rows."""
        return self.fetch([Request(position, torch.arange(rows, device="cpu"))])[0]

    def _decode(self, position: int, blobs: Sequence[bytes], *, pin: bool = False) -> Tensor:
        """Decompress values into a new tensor `[n, *leaf.shape]`; repeated values are decompressed once."""
        leaf = self.schema.leaves[position]
        out = torch.empty((len(blobs), *leaf.shape), dtype=leaf.dtype, pin_memory=pin, device="cpu")
        decode_into(out, blobs, leaf, self.codecs[position])
        return out

    # -- writing -------------------------------------------------------------------------------------------------------

    def encode(self, flat: Flat) -> Encoded:
        """Compress the fields of rows that will be written. Nothing changes."""
        if is_dynamo_compiling():
            return torch.compiler.disable(CodecTable.encode)(self, flat)  # type: ignore[no-untyped-call, no-any-return]
        rows = math.prod(flat.batch)
        return Encoded([self._encode(i, flat.leaves[i].reshape(rows, -1)) for i in self.columns])

    def _encode(self, position: int, values: Tensor) -> list[bytes]:
        return encode_rows(values, self.codecs[position])

    def write(self, placement: Placement, flat: Flat, num_envs: int = 1, *, encoded: Encoded | None = None) -> None:
        """Write rows; see `Table.write`.

        Args:
            placement: where the rows go.
            flat: the rows.
            num_envs: size of the second batch dimension, if there are two.
            encoded: their compressed fields, as `encode` returned them; None compresses them here.
        """
        if encoded is None:
            encoded = self.encode(flat)
        if self.inner is not None:
            addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
            leaves = [flat.leaves[i] for i in self.kept]
            self.inner.write(placement, Flat(leaves, flat.batch, addresses), num_envs)
        for column, blobs in zip(self.columns.values(), encoded.columns, strict=True):
            column.set(placement, blobs)

    def write_column(self, position: int, slots: Tensor, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]`, at distinct slots."""
        if position not in self.columns:
            self.inner.write_column(self._places[position], slots, value)  # type: ignore[union-attr]
            return
        blobs = self._encode(position, value.reshape(slots.shape[0], -1))
        self.columns[position].put(slots.tolist(), blobs)

    def edit(self, slots: Tensor, flat: Flat) -> None:
        """Replace the rows at `slots` (int64 `[n]`); of duplicates the last one wins."""
        self.write(Picks(slots, torch.arange(slots.shape[0], device=slots.device), slots), flat)

    def clear(self) -> None:
        """Remove all rows."""
        for column in self.columns.values():
            column.clear()

    # -- eviction ------------------------------------------------------------------------------------------------------

    def bytes_of(self, rows: int) -> int:
        """Return the bytes of all compressed values, and of the other fields of `rows` rows. O(1)."""
        return self.blob_bytes + rows * sum(self.schema.leaves[i].nbytes for i in self.kept)

    def row_bytes(self, slots: Tensor) -> np.ndarray[Any, Any]:
        """Return the bytes of the rows at `slots`, int64 `[n]`: compressed values and all other fields."""
        at = slots.tolist()
        total = np.full(len(at), sum(self.schema.leaves[i].nbytes for i in self.kept), dtype=np.int64)
        for column in self.columns.values():
            total += np.asarray(column.sizes(at), dtype=np.int64)
        return total

    def encoded_bytes(self, encoded: Encoded) -> np.ndarray[Any, Any]:
        """Return the bytes of rows that will be written, int64 `[rows]`."""
        sizes = np.asarray([list(map(len, blobs)) for blobs in encoded.columns], dtype=np.int64).sum(0)
        total: np.ndarray[Any, Any] = sizes + sum(self.schema.leaves[i].nbytes for i in self.kept)
        return total

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots`, int64 `[n]`, to the slots `[0, n)`, and remove all others."""
        rows = slots.shape[0]
        if self.inner is not None:
            for array in self.inner.row_arrays():
                bits = as_bits(array.data)
                bits[:rows] = bits[slots]
        for column in self.columns.values():
            kept = column.get(slots.tolist())
            column.clear()
            column.put(range(rows), kept)

    # -- state ---------------------------------------------------------------------------------------------------------

    def row_arrays(self) -> list[RowArray]:
        """Return the memory of the fields that are not compressed; see `Table.row_arrays`."""
        return [] if self.inner is None else self.inner.row_arrays()

    def saved_columns(self, rows: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the columns of the first `rows` rows, and the name of the codec of each compressed one.

        Compressed values are copied, the other columns are views.
        """
        names, columns = self.schema.column_names, dict[str, Tensor]()
        if self.inner is not None:
            columns.update(zip([names[i] for i in self.kept], self.inner.view(slice(rows)), strict=True))
        for i, column in self.columns.items():
            values, ends = join_blobs(column.get(range(rows)))
            columns |= {f"{names[i]}.blobs": values, f"{names[i]}.ends": ends}
        return columns, {names[i]: codec.name for i, codec in self.codecs.items()}

    def fill(self, columns: dict[str, Any], rows: int) -> None:
        """Copy saved columns in; compressed ones of the same codec are not decompressed.

        Raises:
            CheckpointError: if compressed values are damaged.
        """
        names = self.schema.column_names
        read: dict[int, list[bytes]] = {}
        for i, codec in self.codecs.items():
            source = columns[names[i]]
            if isinstance(source, CodedColumn) and source.codec_name == codec.name:
                read[i] = source.blobs()
            else:
                read[i] = self._encode_column(i, source, rows)
        if self.inner is not None:
            self.inner.fill(columns, rows)
        for i, blobs in read.items():
            self.columns[i].clear()
            self.columns[i].put(range(rows), blobs)

    def _encode_column(self, position: int, source: Any, rows: int) -> list[bytes]:
        if isinstance(source, CodedColumn):
            leaf, out = self.schema.leaves[position], list[bytes]()
            blobs, step = source.blobs(), max(1, _CHUNK_BYTES // max(1, leaf.nbytes))
            for start in range(0, rows, step):
                out += self._encode(position, source.decode(blobs[start : start + step]).flatten(1))
            return out
        return self._encode(position, read_column(source).reshape(rows, -1))


def encode_rows(values: Tensor, codec: AnyCodec) -> list[bytes]:
    """Compress each row of a tensor `[rows, elements]`, in several threads if there is enough work."""
    rows = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not rows.numel():
        return [codec.encode(b"") for _ in range(rows.shape[0])]
    data, size = raw_view(rows), rows.nbytes // rows.shape[0]

    def encode(part: Sequence[int]) -> list[bytes]:
        return [codec.encode(data[i * size : (i + 1) * size]) for i in part]

    return map_in_threads(encode, range(rows.shape[0]), rows.nbytes)


def decode_into(out: Tensor, blobs: Sequence[bytes], leaf: Leaf, codec: AnyCodec) -> None:
    """Decompress values into the rows of a contiguous tensor, in several threads if there is enough work.

    Equal objects (rows that are read more than once, as in stacks of frames) are decompressed once.

    Raises:
        DamagedFileError: if a value does not have the size of the field.
    """
    size, first, again = leaf.nbytes, dict[int, int](), list[tuple[int, int]]()
    for i, blob in enumerate(blobs):
        place = first.setdefault(id(blob), i)
        if place != i:
            again.append((i, place))
    if not size:
        return
    rows = np.frombuffer(raw_view(out), dtype=np.uint8).reshape(len(blobs), size)

    def decode(part: Sequence[int]) -> list[None]:
        for i in part:
            rows[i] = np.frombuffer(codec.decode(blobs[i], size), dtype=np.uint8)
        return []

    map_in_threads(decode, list(first.values()), size * len(first))
    for i, place in again:
        rows[i] = rows[place]


# -- saved columns -----------------------------------------------------------------------------------------------------


def decoded_columns(state: dict[str, Any], schema: Schema, mine: Sequence[AnyCodec] = ()) -> dict[str, Any]:
    """Return a state in which each compressed column can be read like any other one; nothing is read yet.

    Args:
        state: of a storage; with columns that are not compressed it is returned as it is.
        schema: of its rows.
        mine: codecs of the storage that reads it, which may be the user's.

    Raises:
        CheckpointError: if a column is missing, or its codec is not known here.
    """
    names, columns = state.get("codec"), dict(state["columns"])
    if not names:
        return state
    by_name = {codec.name: codec for codec in mine}
    leaves = dict(zip(schema.column_names, schema.leaves, strict=True))
    for name, codec_name in names.items() if isinstance(names, dict) else [("", None)]:
        values, ends = (columns.pop(f"{name}.{part}", None) for part in ("blobs", "ends"))
        if name not in leaves or values is None or ends is None or tuple(ends.shape) != (int(state["rows"]),):
            msg = f"the checkpoint's compressed column {name!r} is missing or does not fit its rows: it is damaged"
            raise CheckpointError(msg)
        codec = by_name.get(str(codec_name)) or _known_codec(leaves[name], codec_name)
        columns[name] = CodedColumn(leaves[name], codec, values, ends)
    return {**state, "columns": columns, "codec": None}


def _known_codec(leaf: Leaf, name: object) -> AnyCodec:
    if name in {"zlib", "zstd"}:
        return find_codec(name)
    msg = (
        f"{show_path(leaf.path)} was saved with the codec {name!r}, which is not of this library: load into a storage "
        f"with codec={{{leaf.path[-1] if leaf.path else ''!r}: Codec({name!r}, ...)}}"
    )
    raise CheckpointError(msg)


def raise_mapped_codec(schema: Schema, state: dict[str, Any]) -> NoReturn:
    """Raise for compressed rows that are to be mapped.

    Raises:
        CheckpointError: naming the fields.
    """
    names = dict(zip(schema.column_names, schema.leaves, strict=True))
    shown = ", ".join(
        show_path(names[name].path) for name, column in state["columns"].items() if isinstance(column, CodedColumn)
    )
    msg = f"the checkpoint was saved with codec, {shown} cannot be mapped: load it with mmap=False"
    raise CheckpointError(msg)


@final
class CodedColumn:
    """A compressed column of a state; read like a column of values."""

    def __init__(self, leaf: Leaf, codec: AnyCodec, values: Any, ends: Any, seam: int = 0) -> None:
        self._leaf, self._codec, self._values, self._ends, self._seam = leaf, codec, values, ends, seam
        self.dtype, self.shape = leaf.dtype, (int(ends.shape[0]), *leaf.shape)
        self.codec_name = codec.name

    def turned(self, seam: int) -> CodedColumn:
        """Return the column with its row `seam` first and the rows before it last. Not a copy."""
        return CodedColumn(self._leaf, self._codec, self._values, self._ends, seam)

    def blobs(self) -> list[bytes]:
        """Return the compressed values.

        Raises:
            CheckpointError: if their ends do not fit them.
        """
        values, ends = read_column(self._values), read_column(self._ends)
        check_ends(values, ends)
        blobs = split_blobs(values, ends)
        return blobs[self._seam :] + blobs[: self._seam]

    def decode(self, blobs: Sequence[bytes]) -> Tensor:
        """Return values decompressed, `[n, *leaf.shape]`."""
        out = torch.empty((len(blobs), *self._leaf.shape), dtype=self.dtype, device="cpu")
        decode_into(out, blobs, self._leaf, self._codec)
        return out

    def read_into(self, dest: Tensor) -> None:
        """Decompress all rows into a tensor."""
        blobs, step = self.blobs(), max(1, _CHUNK_BYTES // max(1, self._leaf.nbytes))
        for start in range(0, len(blobs), step):
            copy_column(self.decode(blobs[start : start + step]), dest[start : start + step])

    def read(self) -> Tensor:
        """Return all rows as a new tensor."""
        return self.decode(self.blobs())


@final
class BlobReader:
    """Rows of a compressed column in files, decompressed when they are read.

    Args:
        leaf: the field.
        codec: name of its codec.
        values: compressed values, uint8 `[bytes]`, such as a mapped file.
        ends: where each of them ends, int64 `[rows]`.

    Raises:
        CheckpointError: if the codec is not of this library, or the ends do not fit.
    """

    def __init__(self, leaf: Leaf, codec: object, values: Tensor, ends: Tensor) -> None:
        check_ends(values, ends)
        self._leaf, self._codec, self._values, self._ends = leaf, _known_codec(leaf, codec), values, [0, *ends.tolist()]
        self.shape = (ends.shape[0], *leaf.shape)
        self.nbytes = values.nbytes + ends.nbytes

    def index_select(self, _dim: int, slots: Tensor) -> Tensor:
        """Return the rows at `slots` as a new tensor, as `Tensor.index_select` does."""
        blobs = [self._values[self._ends[i] : self._ends[i + 1]].numpy().tobytes() for i in slots.tolist()]
        out = torch.empty((len(blobs), *self._leaf.shape), dtype=self._leaf.dtype, device="cpu")
        decode_into(out, blobs, self._leaf, self._codec)
        return out
