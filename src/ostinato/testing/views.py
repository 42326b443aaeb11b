"""A `View` for the tests of samplers, and a helper of the contract tests."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ostinato.core.ring import Ring
from ostinato.protocols import Run, View

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["make_view", "raises"]


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
