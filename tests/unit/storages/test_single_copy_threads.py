"""Single copies under threads: gathers run without the lock, and no batch holds a torn or foreign next observation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato.core.records import Request

from ..background import in_background

pytestmark = pytest.mark.usefixtures("backend")


def tagged(ids: torch.Tensor, size: int) -> dict[str, Any]:
    """Rows that tell their ids: the next observation is id + 1, or -id where an episode ends (every third row)."""
    following = torch.where(ids % 3 == 0, -ids, ids + 1)
    return {
        "id": ids.clone(),
        "obs": ids[:, None].expand(-1, size).contiguous(),
        "next": {"obs": following[:, None].expand(-1, size).contiguous()},
    }


def test_next_observations_stay_whole_where_the_row_itself_is_not_written() -> None:
    """Without any help of the buffer: side rows are freed and filled anew, while others read them.

    The rows that are read are never written meanwhile, so that no stamp could tell; only those that follow them are.
    """
    size = 4000
    storage = LazyTensorStorage(1 << 16, single_copy=True)
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rb.extend(tagged(torch.arange(1, 3), size))
    newest = [2]

    def write() -> None:
        if newest[0] < (1 << 16) - 8:
            rows = tagged(torch.tensor([newest[0] + 1]), size)
            rb.add({"id": rows["id"][0], "obs": rows["obs"][0], "next": {"obs": rows["next"]["obs"][0]}})
            newest[0] += 1

    def read() -> None:
        last = newest[0]
        slots = torch.tensor([max(0, last - 3), max(0, last - 2), last - 1, last - 1])
        (got,) = storage.fetch([Request(_leaf(storage), slots)])
        expected = torch.where((slots + 1) % 3 == 0, -(slots + 1), slots + 2)
        assert bool((got == expected[:, None]).all()), f"slots {slots.tolist()}: {got[:, ::999]}"

    with in_background(write, read):
        for _ in range(200):
            read()


def _leaf(storage: LazyTensorStorage) -> int:
    assert storage.schema is not None
    return [leaf.path for leaf in storage.schema.leaves].index(("next", "obs"))
