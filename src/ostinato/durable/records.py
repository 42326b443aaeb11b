"""The record of one array on disk: its file, dtype, shape and the checksums of its blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from ostinato.durable.dtypes import DTYPES, check_shape, shape_nbytes
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_BYTES", "MAX_BLOCK_BYTES", "MIN_BLOCK_BYTES", "ArrayRecord"]

BLOCK_BYTES = 4 * 2**20
MIN_BLOCK_BYTES = 4 * 2**10
MAX_BLOCK_BYTES = 16 * 2**20
_KEYS = ("file", "dtype", "shape", "nbytes", "block_bytes", "checksums")
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """What a manifest says of one array: row-major, little-endian, nothing else in the file.

    Attributes:
        file: Name of the file inside the checkpoint directory.
        dtype: Name of the dtype, for example `float32`.
        shape: Sizes; `nbytes` is their product times the bytes of an element.
        nbytes: Exact size of the file.
        block_bytes: Bytes covered by each checksum; the last block may be shorter.
        checksums: XXH3-64 (seed 0) of each block as 16 hexadecimal digits.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {
            "file": self.file,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "block_bytes": self.block_bytes,
            "checksums": list(self.checksums),
        }

    @classmethod
    def from_json(cls, node: object, *, where: str = "array") -> ArrayRecord:
        """Read a record that a file gave; every field and how they fit together is checked.

        Args:
            node: Parsed JSON.
            where: Name of the array, for messages.

        Raises:
            DamagedFileError: A field is missing, unknown, of a wrong type, or does not fit the others.
        """
        if not isinstance(node, dict) or set(node) != set(_KEYS):
            found = sorted(map(str, node))[:10] if isinstance(node, dict) else type(node).__name__
            msg = f"{where}: an array record must have exactly the keys {list(_KEYS)}, got {found}"
            raise DamagedFileError(msg)
        shape = check_shape(node["shape"])
        problem = _problem(node, shape)
        if problem or shape is None:
            msg = f"{where}: damaged array record: {problem}"
            raise DamagedFileError(msg)
        return cls(**{**node, "shape": shape, "checksums": tuple(node["checksums"])})


def _problem(node: dict[str, Any], shape: tuple[int, ...] | None) -> str:
    """Say what is wrong with the fields of a record, or return an empty string."""
    if not isinstance(node["file"], str):
        return "file must be a string"
    if not isinstance(node["dtype"], str) or node["dtype"] not in DTYPES:
        return f"unknown dtype {str(node['dtype'])[:50]!r} (known here: {', '.join(DTYPES)})"
    if shape is None:
        return f"implausible shape {str(node['shape'])[:80]}"
    expected = shape_nbytes(shape, DTYPES[node["dtype"]])
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
