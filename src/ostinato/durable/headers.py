"""Headers of files of tensors: the position of each tensor, and the values that are not tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ostinato.durable.dtypes import DTYPES, shape_nbytes
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ostinato.durable.trees import TreePath

__all__ = ["Header", "Placed", "Sink"]


class Sink(Protocol):
    """Receives bytes in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all bytes and return their number."""
        ...

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it."""
        ...


class Placed(NamedTuple):
    """One tensor in a file.

    Attributes:
        path: Keys from the root.
        dtype: Name of the dtype.
        shape: Sizes.
        offset: Byte of its first element.
        strides: Bytes from one index to the next in each dimension; None if the elements are contiguous.
    """

    path: TreePath
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return shape_nbytes(self.shape, self.torch_dtype)

    def end(self) -> int:
        """Return the offset after its last byte."""
        if self.strides is None or 0 in self.shape:
            return self.offset + self.nbytes
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + reach + self.torch_dtype.itemsize

    def check(self, file_bytes: int, where: Path) -> None:
        """Check that it lies inside a file of `file_bytes` bytes.

        Raises:
            DamagedFileError: naming the tensor.
        """
        if not 0 <= self.offset <= self.end() <= file_bytes or any(s < 0 for s in self.strides or ()):
            msg = f"{where} is damaged: {'.'.join(self.path)[:80]} ends at byte {self.end()} of {file_bytes}"
            raise DamagedFileError(msg)


class Header(NamedTuple):
    """What a file holds: `tensors` in order, and other values by their paths."""

    nbytes: int
    tensors: tuple[Placed, ...]
    plain: dict[TreePath, Any]
