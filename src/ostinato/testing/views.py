"""A `View` for the tests of samplers, and helpers of the contract tests."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ostinato.core.ring import Ring
from ostinato.protocols import Run, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["bits", "make_view", "raises"]


def make_view(rows: int, capacity: int, device: torch.device | str = "cpu") -> View:
    """Return the view of a ring of `capacity` slots to which `rows` rows were written in order.

    Args:
        rows: Number of rows ever written; more than `capacity` wrap around.
        capacity: Number of slots.
        device: Device of the slots.
    """
    place = torch.device(device)
    ring = Ring(capacity, place)
    if rows:
        skip = max(0, rows - capacity)
        ring.record(Run(skip % capacity, rows - skip, capacity, skip))
    return ring.view()


@contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[None]:
    """Fail unless the block raises one of `kinds`; like `pytest.raises`, but without pytest."""
    try:
        yield
    except kinds:
        return
    names = " or ".join(kind.__name__ for kind in kinds)
    msg = f"{names} was expected, nothing was raised"
    raise AssertionError(msg)


def bits(value: Any, without: Sequence[str] = ()) -> Any:
    """Return nested tuples that are equal where types, shapes and all bits are; keys in `without` are left out."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, torch.Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if key not in without}
        return tuple((key, bits(item, without)) for key, item in sorted(kept.items()))
    if isinstance(value, list | tuple):
        return tuple(bits(item, without) for item in value)
    return repr(value)
