"""Single copies under threads: gathers run without the lock, and no batch holds a torn or foreign next observation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato.core.records import Request

from ..background import in_background

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("backend")

CAPACITY = 48


def tagged(ids: torch.Tensor, size: int) -> dict[str, Any]:
    """Rows that tell their ids: the next observation is id + 1, or -id where an episode ends (every third row)."""
    following = torch.where(ids % 3 == 0, -ids, ids + 1)
    return {
        "id": ids.clone(),
        "obs": ids[:, None].expand(-1, size).contiguous(),
        "next": {"obs": following[:, None].expand(-1, size).contiguous()},
    }


def sample(rb: ReplayBuffer) -> None:
    batch = rb.sample()
    rows = tagged(batch["id"], batch["obs"].shape[1])
    assert torch.equal(batch["obs"], rows["obs"]), "a torn row was sampled"
    assert torch.equal(batch["next"]["obs"], rows["next"]["obs"]), "a torn row was sampled"


def writer(rb: ReplayBuffer, size: int, most: int) -> Callable[[], None]:
    number = [CAPACITY]

    def write() -> None:
        count = 1 + number[0] % most
        rb.extend(tagged(torch.arange(number[0], number[0] + count), size))
        number[0] += count

    return write


@pytest.mark.filterwarnings("ignore:single_copy saves little")  # an edit makes rows lie apart, and there are few
def test_batches_are_whole_while_rows_are_edited() -> None:
    """An edit gives side rows to rows whose own stamps do not change: their gathers notice it by themselves."""
    size = 2000
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, single_copy=True), batch_size=64)
    rb.extend(tagged(torch.arange(CAPACITY), size))
    number = [CAPACITY]

    def edit() -> None:
        number[0] += 1
        slots = torch.arange(number[0] % 5, CAPACITY, 5)
        rb[slots] = tagged(slots + CAPACITY * number[0], size)

    with in_background(edit, writer(rb, size, 3), lambda: sample(rb)):
        for _ in range(60):
            sample(rb)


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
