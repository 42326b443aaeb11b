"""Rows on their way between a storage of tensors and a batch, and the form in which checkpoints hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostinato.core.rows import Flat
from ostinato.errors import CheckpointError
from ostinato.storages.object_columns import pack, unpack
from ostinato.storages.ragged_table import RaggedTable, offsets_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ostinato.core.rows import Leaf, Path, Schema
    from ostinato.storages.codec_table import Encoded
    from ostinato.storages.single_copy import Comparison

__all__ = ["Payload"]


class Payload(NamedTuple):
    """Rows without their nesting, and late fields `[rows, *shape]`."""

    flat: Flat
    late: dict[Path, Tensor]
    found: Comparison | Encoded | None = None
    """What a single-copy table found when it compared the rows; the fields that a codec compressed."""

    def show(self) -> dict[str, Any]:
        """Return the rows as plain values and tensors; nothing is copied. Ragged leaves are values and lengths.

        Raises:
            CheckpointError: if a field holds Python objects that a checkpoint cannot hold.
        """
        leaves = [[x.values(), offsets_of(x).diff()] if x.is_nested else x for x in self.flat.leaves]
        objects = [[pack(value, allow_pickle=False) for value in x.reshape(-1).tolist()] for x in self.flat.objects]
        return {"leaves": leaves, "objects": objects, "late": [[list(path), x] for path, x in self.late.items()]}

    @classmethod
    def read(cls, saved: dict[str, Any], schema: Schema, rows: int, device: torch.device) -> Payload:
        """Return what `show` returned, by copy.

        Args:
            saved: what `show` returned.
            schema: of the rows. Units may have put dimensions between that of the rows and those of a field.
            rows: their number.
            device: where they are to be.

        Raises:
            CheckpointError: if they are not rows of the schema.
        """
        given = [_parts(x, device) for x in saved["leaves"]]
        fits = [_fits(x, leaf, rows) for x, leaf in zip(given, schema.leaves, strict=True)]
        objects = [
            _objects(values, leaf.shape, rows) for values, leaf in zip(saved["objects"], schema.objects, strict=True)
        ]
        late = {tuple(path): x.to(device).clone() for path, x in saved["late"]}
        if not all(fits) or any(x.shape[:1] != (rows,) for x in late.values()):
            msg = f"the rows of a queued draw are not {rows} rows of the buffer's fields: the checkpoint is damaged"
            raise CheckpointError(msg)
        ragged = iter(RaggedTable.nest([(x[0], x[1]) for x in given if len(x) > 1], pin=False))
        leaves = [next(ragged) if len(x) > 1 else x[0] for x in given]
        return cls(Flat(leaves, (rows,), None, objects), late)


def _parts(saved: Any, device: torch.device) -> list[Tensor]:
    """Return copies of the values and lengths of a ragged leaf, or of the tensor of another one."""
    return [x.to(device).clone() for x in (saved if isinstance(saved, list) else [saved])]


def _fits(parts: list[Tensor], leaf: Leaf, rows: int) -> bool:
    """Whether tensors are rows of a leaf."""
    values, lengths = parts[0], parts[-1]
    if values.dtype is not leaf.dtype or values.shape[values.ndim - len(leaf.shape) :] != leaf.shape:
        return False
    if len(parts) == 1:
        return values.shape[:1] == (rows,)
    sound = lengths.shape == (rows,) and not lengths.is_floating_point() and bool((lengths >= 0).all())
    return sound and int(lengths.sum()) == values.shape[0]


def _objects(packed: list[Any], shape: tuple[int, ...], rows: int) -> np.ndarray[Any, Any]:
    """Return an object array `[rows, *shape]`."""
    values = [unpack(value, allow_pickle=False) for value in packed]
    if len(values) != rows * math.prod(shape):
        msg = f"a queued draw holds {len(values)} objects for {rows} rows: the checkpoint is damaged"
        raise CheckpointError(msg)
    return np.fromiter(values, dtype=object, count=len(values)).reshape(rows, *shape)
