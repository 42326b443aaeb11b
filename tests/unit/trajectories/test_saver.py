"""The saver's thread and those that wait for it, under many schedules; what ends the thread loses nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ostinato.trajectories import saver
from ostinato.trajectories.saver import Promise, Saver

from ...schedules import Schedule, explore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULES = (saver,)


def entries(*ids: int) -> Any:
    return [SimpleNamespace(id=i) for i in ids]


class Shelf:
    """Saves in memory; every third entry fails once."""

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


def together(schedule: Schedule, shelf: Shelf, *work: Callable[[], Any]) -> None:
    """Run all, and after them, while the saver's thread is there still, stop twice: failures are tried again."""
    left = [len(work)]

    def counted(one: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            one()
            left[0] -= 1

        return run

    def last() -> None:
        while left[0]:
            schedule.sleep(1.0)
        shelf.saver.stop()
        shelf.saver.stop()

    schedule.run(*map(counted, work), last)
    assert shelf.saver.pending == 0


def adds_and_stops(schedule: Schedule) -> None:
    shelf = Shelf()

    def add(first: int) -> Callable[[], None]:
        def work() -> None:
            for i in range(first, first + 4):
                shelf.saver.put(entries(i))
                shelf.saver.wait_for_room()

        return work

    together(schedule, shelf, add(0), add(4), shelf.saver.stop, shelf.saver.stop, shelf.saver.flush)
    assert sorted(shelf.saved) == list(range(8))


def cancels(schedule: Schedule) -> None:
    shelf, some = Shelf(), entries(1, 2, 3, 4, 5)
    promise = Promise([1, 2, 3, 4, 5])
    together(
        schedule,
        shelf,
        lambda: shelf.saver.put(some, promise),
        lambda: shelf.saver.cancel(some),
        shelf.saver.flush,
        shelf.saver.stop,
    )


@pytest.mark.parametrize("scenario", [adds_and_stops, cancels])
def test_no_call_waits_for_ever(scenario: Callable[[Schedule], None]) -> None:
    explore(range(100), MODULES, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [adds_and_stops, cancels])
def test_no_call_waits_for_ever_in_thousands_of_schedules(scenario: Callable[[Schedule], None]) -> None:
    explore(range(1000, 4000), MODULES, scenario)


def test_a_callback_that_ends_its_thread_ends_no_saving() -> None:
    """`sys.exit()` in a callback of a future ends no more than the callback."""
    shelf = Shelf(limit=8)
    promise = Promise([1])
    promise.future.add_done_callback(lambda _: sys.exit(1))
    shelf.saver.put(entries(1), promise)
    shelf.saver.put(entries(2), Promise([2]))
    shelf.saver.flush()
    shelf.saver.stop()
    assert shelf.saved == [1, 2]
    assert shelf.saver.pending == 0
