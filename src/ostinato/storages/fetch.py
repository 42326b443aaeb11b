"""Reading other rows for each field: what a unit asks for, in one native call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato._backend import native
from ostinato.core.bits import as_bits
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.core.draw import Request

__all__ = ["Fetcher", "Room", "check_alike", "checked_choice", "choose", "register"]

_MOST_FORMS = 64
"""Sets of fields whose registration is kept: a buffer asks for a handful, over and over."""


def register(columns: Sequence[Tensor], others: Sequence[Tensor | None] | None = None) -> Any:
    """Register columns for native copies, each with the rows of another one after its own where `others` names one.

    Returns:
        `native.Fields`, or None: there is no compiled part, or a column is not on the CPU or strided inside its rows.
    """
    if native is None or columns[0].device.type != "cpu":
        return None
    fields = native.Fields()
    for column, other in zip(columns, others or [None] * len(columns), strict=True):
        parts = [column] if other is None else [column, other]
        strides = {_stride(part) for part in parts}
        if len(strides) > 1 or not all(part[:1].is_contiguous() for part in parts):
            return None  # rows of a borrowed tensor may be strided inside; torch copies those
        segments = [(part.data_ptr(), part.shape[0]) for part in parts]
        fields.add(segments, _row_bytes(column), strides.pop())
    return fields


def _row_bytes(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.itemsize


def _stride(column: Tensor) -> int:
    return column.stride(0) * column.itemsize if column.shape[0] > 1 else max(_row_bytes(column), 1)


@final
class Room:
    """Makes the tensors that a batch is copied to: `[rows, *shape]`, contiguous, not initialised.

    Args:
        forms: shape (without rows) and dtype of each.
    """

    def __init__(self, forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self._forms = [(tuple(shape), dtype) for shape, dtype in forms]
        self._templates: tuple[int | list[int], list[Tensor]] = (-1, [])

    def make(self, rows: int, *, pin: bool = False) -> list[Tensor]:
        """Return fresh tensors for `rows` rows, page-locked if `pin`."""
        known, templates = self._templates
        if known == rows and not pin:
            return [torch.empty_like(t) for t in templates]
        return self._make(rows, [rows] * len(self._forms), pin=pin)

    def make_each(self, rows: list[int], *, pin: bool = False) -> list[Tensor]:
        """Return fresh tensors, each for its own number of rows, page-locked if `pin`."""
        known, templates = self._templates
        if known == rows and not pin:
            return [torch.empty_like(t) for t in templates]
        return self._make(rows, rows, pin=pin)

    def _make(self, key: int | list[int], rows: list[int], *, pin: bool) -> list[Tensor]:
        forms = list(zip(rows, self._forms, strict=True))
        if not pin and min(rows, default=0) > 1:  # (a single row made by empty_like may get a stride of 0)
            # empty_like is the cheapest way to a tensor; templates of zero stride take no memory
            templates = [torch.empty((), dtype=dtype, device="cpu").expand(n, *shape) for n, (shape, dtype) in forms]
            self._templates = (key, templates)
        return [torch.empty((n, *shape), dtype=dtype, pin_memory=pin, device="cpu") for n, (shape, dtype) in forms]


@final
class Fetcher:
    """Reads fields of one set of columns, each at rows of its own.

    May be used by several threads at once, and while another one writes: a batch may then hold torn rows.

    Args:
        columns: `[rows, *shape]`, all of one length and device.
    """

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._columns = list(columns)
        self._device = self._columns[0].device
        self._rows = int(self._columns[0].shape[0])
        self._forms: dict[tuple[tuple[int, int | None], ...], tuple[Any, Room]] = {}

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Return a fresh tensor `[n, *shape]` for each request; see `Table.fetch`."""
        if is_dynamo_compiling():  # a graph break: addresses are not for a graph
            return torch.compiler.disable(Fetcher.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        return self._fetch(self._checked(requests), pin=pin) if requests else []

    def _checked(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Bring requests to the form that native code reads; most have it."""
        plain: Tensor | None = None
        for request in requests:
            slots = request.slots
            if request.pick is not None or request.other is not None:
                break
            if slots is not plain:
                if not _is_plain(slots, torch.int64, self._device):
                    break
                plain = slots
        else:
            return requests
        return [self._brought(request) for request in requests]

    def _brought(self, request: Request) -> Request:
        leaf, slots, other, pick = request
        if not _is_plain(slots, torch.int64, self._device):
            slots = slots.to(self._device, torch.int64).contiguous()
        if other is None and pick is None:
            return request if slots is request.slots else request._replace(slots=slots)
        other, pick = checked_choice(request)
        first, second = self._columns[leaf], self._columns[other]
        check_alike(first.dtype, first.shape[1:], second.dtype, second.shape[1:])
        if not _is_plain(pick, torch.bool, self._device):
            pick = pick.to(self._device).contiguous()
        same = slots is request.slots and pick is request.pick
        return request if same else request._replace(slots=slots, pick=pick)

    def _fetch(self, requests: Sequence[Request], *, pin: bool) -> list[Tensor]:
        """Serve requests: one native call, or torch."""
        fields, room = self._form([(request.leaf, request.other) for request in requests])
        if fields is None:
            read = [self._select(request) for request in requests]
            return [tensor.pin_memory() for tensor in read] if pin else read
        chosen: dict[tuple[int, int], Tensor] = {}
        addresses = []
        for _, slots, _, pick in requests:
            if pick is None:
                addresses.append(slots.data_ptr())
                continue
            key = (slots.data_ptr(), pick.data_ptr())
            if key not in chosen:  # equal choices share one array, so that fields of a packed row are read together
                chosen[key] = choose(slots, pick, self._rows)
            addresses.append(chosen[key].data_ptr())
        counts = [request.slots.shape[0] for request in requests]
        out = room.make_each(counts, pin=pin)
        fields.gather_each(addresses, counts, [tensor.data_ptr() for tensor in out])
        return out

    def _form(self, key: list[tuple[int, int | None]]) -> tuple[Any, Room]:
        """Return the registration of some fields, made once, and room for a batch."""
        found = self._forms.get(known := tuple(key))
        if found is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms = {}
            others = [None if other is None else self._columns[other] for _, other in key]
            columns = [self._columns[leaf] for leaf, _ in key]
            found = register(columns, others), Room([(column.shape[1:], column.dtype) for column in columns])
            self._forms[known] = found
        return found

    def _select(self, request: Request) -> Tensor:
        column = self._columns[request.leaf]
        out = as_bits(column).index_select(0, request.slots)
        if request.other is not None and request.pick is not None:
            second = as_bits(self._columns[request.other]).index_select(0, request.slots)
            out = torch.where(request.pick.view(-1, *[1] * (column.ndim - 1)), second, out)
        return out.view(column.dtype)


def checked_choice(request: Request) -> tuple[int, Tensor]:
    """Return `other` and `pick` of a request.

    Raises:
        OptionError: if one of them is missing, or `pick` has another form.
    """
    _, slots, other, pick = request
    if other is None or pick is None or pick.shape != slots.shape or pick.dtype is not torch.bool:
        got = "no pick" if pick is None else f"other={other}, pick {pick.dtype}{list(pick.shape)}"
        msg = f"a request takes other and pick (bool{list(slots.shape)}) together, got {got}"
        raise OptionError(msg)
    return other, pick


def check_alike(dtype: torch.dtype, shape: Sequence[int], other_dtype: torch.dtype, other_shape: Sequence[int]) -> None:
    """Refuse to read two fields as one.

    Raises:
        OptionError: if their dtypes or shapes differ.
    """
    if dtype is not other_dtype or tuple(shape) != tuple(other_shape):
        msg = (
            f"a request reads two fields of one dtype and shape, got {dtype}{list(shape)} and "
            f"{other_dtype}{list(other_shape)}"
        )
        raise OptionError(msg)


def choose(slots: Tensor, pick: Tensor, rows: int) -> Tensor:
    """Return `slots + rows * pick`, int64 `[n]`, having checked that slots lie in `[0, rows)`. Native part only.

    Raises:
        IndexError: if a slot is out of range.
    """
    out = torch.empty_like(slots)
    native.choose_slots(slots.data_ptr(), pick.data_ptr(), slots.shape[0], rows, out.data_ptr())  # type: ignore[union-attr]
    return out


def _is_plain(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.dtype is dtype and tensor.device == device and tensor.is_contiguous()
