"""LateFields: columns that were added after the first rows, for example by `write_all`, and which rows have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ostinato.core.casts import cast, read
from ostinato.core.kinds import as_tensor, is_non_tensor, is_tensordict, is_text, show_field, show_path
from ostinato.core.rows import as_bits, column_name
from ostinato.errors import KeyMissingError, KindError, SchemaError

if TYPE_CHECKING:
    from ostinato.core.rows import Path

__all__ = ["LateFields"]


@final
class LateFields:
    """Fields that were added after the first rows, each with a mask of the rows that have it."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._device = device
        self.columns: dict[Path, Tensor] = {}
        """Path -> `[capacity, *shape]`. Empty in nearly all storages; callers check it before they call a method."""
        self.has: dict[Path, Tensor] = {}
        """Path -> bool `[capacity]`."""
        self._warned: set[Path] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of columns and masks."""
        return sum(t.nbytes for t in (*self.columns.values(), *self.has.values()))

    def split(self, data: Any, known: set[Path], batch: tuple[int, ...] | None) -> tuple[Any, dict[Path, Tensor]]:
        """Separate the top-level keys of `data` that are not in the schema; they become late fields.

        Args:
            data: rows; only dicts and TensorDicts can have new keys.
            known: paths of the schema.
            batch: leading dimensions, which are checked and flattened; None leaves both to `rows`.

        Raises:
            KindError: if a new value is not a tensor, array or number.
            SchemaError: if its leading dimensions, or those of a row, differ.
        """
        if not (isinstance(data, dict) or is_tensordict(data)):
            return data, {}
        fresh = self._fresh(data, known)
        if not fresh:
            return data, {}
        given = set(data.keys())
        if any((key,) not in self.columns for key in fresh) and any(path[0] not in given for path in known if path):
            return data, {}  # a field is missing, perhaps misspelt: the error of the schema names all keys given
        late: dict[Path, Tensor] = {}
        for key in fresh:
            value = data.get(key)
            if is_non_tensor(value) or isinstance(value, (str, bytes)) or is_text(value, 1):
                msg = (
                    f"the new {show_field((key,))} is text or another non-tensor value: only tensors can be added to "
                    "stored rows; give such fields with the first rows"
                )
                raise KindError(msg)
            if isinstance(value, (dict, list, tuple)) or is_tensordict(value):
                msg = f"the new {show_field((key,))} is nested: write each of its leaves as a field"
                raise KindError(msg)
            column = self.columns.get((key,))
            late[(key,)] = as_tensor(value, (key,)) if column is None else read(value, column.dtype, (key,))
        rest = data.exclude(*fresh) if is_tensordict(data) else {k: v for k, v in data.items() if k not in fresh}
        return rest, late if batch is None else self.rows(late, batch)

    def _fresh(self, data: Any, known: set[Path]) -> list[Any]:
        roots = {path[0] for path in known if path}
        return [key for key in data.keys() if key not in roots]  # noqa: SIM118 (a TensorDict iterates over rows)

    def require_cover(self, data: Any, known: set[Path], slots: Tensor, rows: int) -> None:
        """Check that a new field of an edit is one of all rows: rows that lack it could not be sampled.

        Args:
            data: rows, or a list of them, that match the schema.
            known: paths of the schema.
            slots: where they are written, int64 `[n]`.
            rows: rows present.

        Raises:
            SchemaError: naming the field and how many rows would lack it.
        """
        first = data[0] if type(data) is list and data else data
        if not (isinstance(first, dict) or is_tensordict(first)):
            return
        fresh = [key for key in self._fresh(first, known) if (key,) not in self.columns]
        lacking = rows - int(torch.unique(slots).numel()) if fresh else 0
        if lacking:
            msg = (
                f"the new {show_field((fresh[0],))} would be missing in {lacking} of the {rows} rows, which could then "
                "not be sampled: write it to all rows first (write_all, rb[:] = rows), or leave it out"
            )
            raise SchemaError(msg)

    def require_known(self, late: dict[Path, Tensor]) -> None:
        """Check that all fields were added before.

        Raises:
            SchemaError: naming the field and the methods that can add it.
        """
        for path in late:
            if path not in self.columns:
                msg = (
                    f"unknown {show_field(path)}: extend() takes the stored fields; write_all() and rb[...] = "
                    "can add one"
                )
                raise SchemaError(msg)

    def rows(self, late: dict[Path, Tensor], batch: tuple[int, ...]) -> dict[Path, Tensor]:
        """Check late fields against leading dimensions `batch` and stored columns; flatten them to `[rows, *shape]`.

        Raises:
            SchemaError: naming the field, what was expected and what was given.
        """
        out: dict[Path, Tensor] = {}
        for path, value in late.items():
            if tuple(value.shape[: len(batch)]) != tuple(batch):
                msg = f"{show_field(path)} must have the batch size {list(batch)}, got shape {list(value.shape)}"
                raise SchemaError(msg)
            shape = tuple(value.shape[len(batch) :])
            column = self.columns.get(path)
            if column is not None and tuple(column.shape[1:]) != shape:
                msg = (
                    f"{show_field(path)} must be {column.dtype}{list(column.shape[1:])} per row, got "
                    f"{value.dtype}{list(shape)}"
                )
                raise SchemaError(msg)
            fitted = value if column is None else cast(value, column.dtype, path, self._warned)
            out[path] = fitted.reshape((math.prod(batch), *shape))
        return out

    def set(self, slots: Tensor, values: dict[Path, Tensor], rows: Tensor | None = None) -> None:
        """Write late fields at `slots`, and mark all other late fields of these rows as missing.

        Args:
            slots: int64 `[n]`.
            values: path -> `[total, *shape]`.
            rows: which of the `total` rows go to the slots; None means all in order.
        """
        for mask in self.has.values():
            mask[slots] = False
        for path in [path for path, mask in self.has.items() if path not in values and not bool(mask.any())]:
            # no row has the field any more
            self.has = {key: mask for key, mask in self.has.items() if key != path}
            self.columns = {key: column for key, column in self.columns.items() if key != path}
        for path, value in values.items():
            self.put(path, slots, value if rows is None else value[rows.to(value.device)])

    def put(self, path: Path, slots: Tensor, value: Tensor) -> None:
        """Write one field at `slots`; the others are unchanged."""
        if path not in self.columns:
            shape = (self._capacity, *value.shape[1:])
            # new dicts, since readers may iterate over the old ones
            with torch.inference_mode(mode=False):
                has = torch.zeros(self._capacity, dtype=torch.bool, device=self._device)
                column = torch.zeros(shape, dtype=value.dtype, device=self._device)
            self.has = {**self.has, path: has}
            self.columns = {**self.columns, path: column}
        as_bits(self.columns[path])[slots] = as_bits(value.to(self._device))
        self.has[path][slots] = True

    def get(self, slots: Tensor) -> dict[Path, Tensor]:
        """Return the late fields of the rows at `slots`. Copy.

        Fields that none of these rows has are omitted.

        Raises:
            KeyMissingError: if some of the rows lack a field; names it and their number.
        """
        out: dict[Path, Tensor] = {}
        for path, column in self.columns.items():
            has = self.has[path][slots]
            lacking = int((~has).sum())
            if lacking == has.shape[0]:
                continue
            if lacking:
                msg = (
                    f"{lacking} of the {has.shape[0]} rows read lack the field {show_path(path)}, which "
                    "was added to other rows: write it to all rows (write_all), or read rows that have it"
                )
                raise KeyMissingError(msg)
            out[path] = as_bits(column)[slots].view(column.dtype)
        return out

    def require_all(self, slots: Tensor) -> None:
        """Check that rows have all late fields, before they are sampled.

        Raises:
            KeyMissingError: if any of them lacks a late field.
        """
        for path, mask in self.has.items():
            lacking = int((~mask[slots]).sum())
            if lacking:
                msg = (
                    f"{lacking} of the {slots.shape[0]} rows sampled lack the field {show_path(path)}: it "
                    "was added to other rows by write_all; write it to all rows before sampling"
                )
                raise KeyMissingError(msg)

    def view(self, span: slice, rows: int) -> dict[Path, Tensor]:
        """Return views of the fields that all rows in a span of `[0, rows)` have; see `get`."""
        if not self.columns:
            return {}
        held = self.get(torch.arange(rows, device=self._device)[span])
        return {path: self.columns[path][span] for path in held}

    def add_columns(self, columns: dict[str, Tensor], position: int, rows: int) -> list[list[Any]]:
        """Add the first `rows` rows of fields and masks to the columns of a state, numbered from `position`. Views.

        Returns:
            `[path, name, name of the mask]` of each field.
        """
        found: list[list[Any]] = []
        for i, (path, column) in enumerate(self.columns.items(), position):
            name = column_name(path, i)
            found.append([list(path), name, f"{name}.has"])
            columns[name], columns[f"{name}.has"] = column[:rows], self.has[path][:rows]
        return found

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        rows = slots.shape[0]
        for path, column in self.columns.items():
            bits, has = as_bits(column), self.has[path]
            bits[:rows] = bits[slots]
            has[:rows] = has[slots]
            has[rows:] = False

    def clear(self) -> None:
        """Remove all late fields."""
        self.columns, self.has = {}, {}
