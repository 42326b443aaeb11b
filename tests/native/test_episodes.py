"""The compiled episode table by itself: random numbers of any size. What it answers: tests/unit/core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .tables import address

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray


def test_any_number_draws_a_row(native: ModuleType) -> None:
    """Callers promise 63 bits; a broken promise must not read foreign memory."""
    table, ends = native.Episodes(100, 1), np.arange(100) % 7 == 6
    table.record_write(0, 100, 0, address(ends), 0, 0)
    handle = table.add_need(4)
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 2000)
    for drawn in (draws(table, "draw", handle, numbers), draws(table, "draw_episodes", handle, numbers)):
        assert set(drawn) == {slot for slot in range(98) if slot % 7 < 4}


def draws(table: Any, name: str, handle: int, numbers: NDArray[np.int64]) -> list[int]:
    n = len(numbers) if name == "draw" else len(numbers) // 2
    out = np.full(n, -7, dtype=np.int64)
    getattr(table, name)(handle, address(numbers), n, address(out))
    return [int(x) for x in out]
