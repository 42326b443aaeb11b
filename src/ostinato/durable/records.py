"""The records of arrays on disk: files, dtype, shape and the checksums of their blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from ostinato.durable.dtypes import DTYPES, check_shape, shape_nbytes
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_BYTES", "MAX_BLOCK_BYTES", "MIN_BLOCK_BYTES", "ArrayRecord", "ColumnRecord", "FileRecord"]

BLOCK_BYTES = 4 * 2**20
MIN_BLOCK_BYTES = 4 * 2**10
MAX_BLOCK_BYTES = 16 * 2**20
MAX_PATCHES = 1024
TABLE_ENTRY_BYTES = 16
_PATCH_KEYS = {"file", "runs", "nbytes", "block_bytes", "checksums"}
_KEYS = ("file", "dtype", "shape", "nbytes", "block_bytes", "checksums")
_COLUMN_KEYS = ("of", "offset", "dtype", "shape")
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file of an array.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
        runs: Of a patch: how many runs of rows it holds, 0 for a base.
    """

    file: str
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    runs: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the record of a patch as a JSON object."""
        return {
            "file": self.file,
            "runs": self.runs,
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "checksums": list(self.checksums),
        }

    @classmethod
    def from_json(cls, node: object, *, where: str) -> FileRecord:
        """Read the record of a patch, checked.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit the others.
        """
        if not isinstance(node, dict) or set(node) != _PATCH_KEYS:
            _damaged(where, f"a patch must have exactly the keys {sorted(_PATCH_KEYS)}")
        runs, nbytes = node["runs"], node["nbytes"]
        if type(nbytes) is not int or type(runs) is not int or not 0 < runs * TABLE_ENTRY_BYTES < nbytes:
            _damaged(where, f"{str(runs)[:40]} runs do not fit into {str(nbytes)[:40]} bytes")
        problem = _file_problem(node, nbytes)
        if problem:
            _damaged(where, problem)
        return cls(**{**node, "checksums": tuple(node["checksums"])})


@final
@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """What a manifest says of one array: row-major, little-endian, nothing else in the file of its base.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        dtype: Name of the dtype, for example `float32`.
        shape: Sizes. Without patches the file holds exactly this; with patches it may hold fewer rows.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
        patches: Files with rows that take the place of earlier ones, in their order.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    patches: tuple[FileRecord, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def base(self) -> FileRecord:
        """The file of the base alone."""
        return FileRecord(self.file, self.nbytes, self.block_bytes, self.checksums)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The base and its patches."""
        return (self.base, *self.patches)

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return shape_nbytes(self.shape[1:], self.torch_dtype)

    @property
    def base_rows(self) -> int:
        """Rows that the base holds."""
        return self.nbytes // self.row_bytes if self.patches else self.shape[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.nbytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        node = {
            "file": self.file,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "checksums": list(self.checksums),
        }
        return {**node, "patches": [patch.to_json() for patch in self.patches]} if self.patches else node

    @classmethod
    def from_json(cls, node: object, *, where: str = "array") -> ArrayRecord:
        """Read a record that a file gave; every field and how they fit together is checked.

        Args:
            node: Parsed JSON.
            where: Name of the array, for messages.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit the others.
        """
        if not isinstance(node, dict) or set(node) - {"patches"} != set(_KEYS):
            found = sorted(map(str, node))[:10] if isinstance(node, dict) else type(node).__name__
            msg = f"{where}: an array record must have exactly the keys {list(_KEYS)}, got {found}"
            raise DamagedFileError(msg)
        shape = check_shape(node["shape"])
        problem = _problem(node, shape)
        if problem or shape is None:
            _damaged(where, problem)
        listed = node.get("patches", [])
        patches = tuple(FileRecord.from_json(one, where=f"{where} patch {i}") for i, one in enumerate(listed))
        return cls(**{**node, "shape": shape, "checksums": tuple(node["checksums"]), "patches": patches})


@final
@dataclass(frozen=True, slots=True)
class ColumnRecord:
    """What a manifest says of an array that lies in the rows of another one.

    Attributes:
        of: Name of the other array, `uint8[rows, width]`.
        offset: Where the column begins in each row, in bytes.
        dtype: Name of its dtype.
        shape: Its sizes, `[rows, ...]`.
    """

    of: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the column."""
        return shape_nbytes(self.shape[1:], self.torch_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the column."""
        return shape_nbytes(self.shape, self.torch_dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {"of": self.of, "offset": self.offset, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, node: dict[str, Any], arrays: dict[str, ArrayRecord], *, where: str) -> ColumnRecord:
        """Read a record that a file gave, and compare it with the array that it lies in.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit.
        """
        if set(node) != set(_COLUMN_KEYS):
            _damaged(where, f"a column must have exactly the keys {list(_COLUMN_KEYS)}")
        shape, rows = check_shape(node["shape"]), arrays.get(node["of"]) if isinstance(node["of"], str) else None
        known = isinstance(node["dtype"], str) and node["dtype"] in DTYPES
        if rows is None or shape is None or not shape or not known or type(node["offset"]) is not int:
            _damaged(where, "a column needs the rows it lies in, an offset, a dtype and a shape")
        column = cls(node["of"], node["offset"], node["dtype"], shape)
        fits = rows.dtype == "uint8" and len(rows.shape) == 2 and rows.shape[0] == shape[0]
        item = column.torch_dtype.itemsize
        if not fits or not 0 <= column.offset <= rows.shape[1] - column.row_bytes:
            _damaged(where, f"it does not lie in the rows {rows.dtype}{list(rows.shape)} of {node['of'][:80]!r}")
        if column.offset % item or rows.shape[1] % item:
            _damaged(where, f"its elements of {item} bytes are not aligned")
        return column


def _damaged(where: str, problem: str) -> NoReturn:
    msg = f"{where}: damaged array record: {problem}"
    raise DamagedFileError(msg)


def _problem(node: dict[str, Any], shape: tuple[int, ...] | None) -> str:
    """Say what is wrong with the fields of a record, or return an empty string."""
    if not isinstance(node["dtype"], str) or node["dtype"] not in DTYPES:
        return f"unknown dtype {str(node['dtype'])[:50]!r} (known here: {', '.join(DTYPES)})"
    if shape is None:
        return f"implausible shape {str(node['shape'])[:80]}"
    expected = shape_nbytes(shape, DTYPES[node["dtype"]])
    if "patches" in node:
        return _chain_problem(node, shape, expected) or _file_problem(node, node["nbytes"])
    return _file_problem(node, expected)


def _chain_problem(node: dict[str, Any], shape: tuple[int, ...], expected: int) -> str:
    patches, nbytes = node["patches"], node["nbytes"]
    if not isinstance(patches, list) or not 0 < len(patches) <= MAX_PATCHES:
        return f"patches must be a list of 1 to {MAX_PATCHES}"
    row = expected // shape[0] if shape and shape[0] else 0
    if not row or type(nbytes) is not int or not 0 <= nbytes <= expected or nbytes % row:
        return f"nbytes is {str(nbytes)[:40]}, which are no rows of shape {list(shape)}"
    return ""


def _file_problem(node: dict[str, Any], expected: int) -> str:
    if not isinstance(node["file"], str):
        return "file must be a string"
    if type(node["nbytes"]) is not int or node["nbytes"] != expected:
        return f"nbytes is {str(node['nbytes'])[:40]}, shape and dtype make {expected}"
    block = node["block_bytes"]
    if type(block) is not int or not MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES:
        return f"block_bytes must be in [{MIN_BLOCK_BYTES}, {MAX_BLOCK_BYTES}], got {str(block)[:40]}"
    checksums = node["checksums"]
    if not isinstance(checksums, list) or len(checksums) != -(-expected // block):
        return f"{expected} bytes need {-(-expected // block)} checksums"
    if not all(isinstance(text, str) and _CHECKSUM.fullmatch(text) for text in checksums):
        return "checksums must be strings of 16 hexadecimal digits"
    return ""
