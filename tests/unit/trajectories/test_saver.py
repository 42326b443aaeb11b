"""The saver's thread and the threads that wait for it, under many schedules; ending the thread loses nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ostinato.trajectories import saver
from ostinato.trajectories.saver import SaveGroup, Saver

from ...schedules import Schedule, explore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def entries(*ids: int) -> Any:
    return [SimpleNamespace(id=i) for i in ids]


class Store:
    """Saves to a list; every third entry fails once."""

    def __init__(self, limit: int = 2) -> None:
        self.saved: list[int] = []
        self.failed: list[int] = []
        self.saver = Saver(self.save, limit)

    def save(self, several: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in several:
            if entry.id % 3 == 0 and entry.id not in self.failed:
                self.failed.append(entry.id)
                found.append(OSError("not now"))
            else:
                self.saved.append(entry.id)
                found.append(entry.id)
        return found


def together(schedule: Schedule, store: Store, *work: Callable[[], Any]) -> None:
    """Run all functions, then stop the saver twice: failures are retried."""
    left = [len(work)]

    def counted(one: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            one()
            left[0] -= 1

        return run

    def last() -> None:
        while left[0]:
            schedule.sleep(1.0)
        store.saver.stop()
        store.saver.stop()

    schedule.run(*map(counted, work), last)
    assert store.saver.pending == 0


def adds_and_stops(schedule: Schedule) -> None:
    store = Store()

    def add(first: int) -> Callable[[], None]:
        def work() -> None:
            for i in range(first, first + 4):
                store.saver.submit(entries(i))
                store.saver.wait_for_room()

        return work

    together(schedule, store, add(0), add(4), store.saver.stop, store.saver.stop, store.saver.flush)
    assert sorted(store.saved) == list(range(8))


def cancels(schedule: Schedule) -> None:
    store, some = Store(), entries(1, 2, 3, 4, 5)
    group = SaveGroup([1, 2, 3, 4, 5])
    together(
        schedule,
        store,
        lambda: store.saver.submit(some, group),
        lambda: store.saver.cancel(some),
        store.saver.flush,
        store.saver.stop,
    )


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 4000), marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", [adds_and_stops, cancels])
def test_every_call_returns(scenario, seeds):
    explore(seeds, (saver,), scenario)
