"""Single copies under threads: gathers run without the lock, and no batch holds a torn or foreign next observation."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, ReplayBuffer
from ostinato.core.records import Request

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


def is_whole(ids: torch.Tensor, obs: torch.Tensor, following: torch.Tensor) -> bool:
    expected = torch.where(ids % 3 == 0, -ids, ids + 1)
    return bool((obs == ids[:, None]).all()) and bool((following == expected[:, None]).all())


def run_together(jobs: list[Callable[[], None]], seconds: float) -> None:
    """Run jobs over and over, a thread each, changing threads as often as can be; raise their first error."""
    errors: list[BaseException] = []
    stop = time.monotonic() + seconds

    def work(job: Callable[[], None]) -> None:
        try:
            job()
            while not errors and time.monotonic() < stop:
                job()
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def writer(rb: ReplayBuffer, size: int, most: int) -> Callable[[], None]:
    number = [CAPACITY]

    def write() -> None:
        count = 1 + number[0] % most
        rb.extend(tagged(torch.arange(number[0], number[0] + count), size))
        number[0] += count

    return write


@pytest.mark.parametrize(("size", "most"), [(8, 2 * CAPACITY), (3000, 1)])
def test_batches_are_whole_while_rows_are_written(size: int, most: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, single_copy=True), batch_size=64)
    rb.extend(tagged(torch.arange(CAPACITY), size))

    def sample() -> None:
        batch = rb.sample()
        assert is_whole(batch["id"], batch["obs"], batch["next"]["obs"]), "a torn row was sampled"

    run_together([writer(rb, size, most), sample, sample], 0.3)


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

    def sample() -> None:
        batch = rb.sample()
        assert is_whole(batch["id"], batch["obs"], batch["next"]["obs"]), "a torn row was sampled"

    run_together([edit, writer(rb, size, 3), sample, sample], 0.3)


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

    run_together([write, read, read], 0.3)


def _leaf(storage: LazyTensorStorage) -> int:
    assert storage.schema is not None
    return [leaf.path for leaf in storage.schema.leaves].index(("next", "obs"))
