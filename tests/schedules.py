"""Deterministic schedules: threads that take turns, with switches drawn from a seed, and waits without end detected.

`Schedule` runs tasks in real threads, of which exactly one runs at any time. A task hands over to another one

- at lines of the files given, with a probability, through `sys.settrace`;
- wherever it waits: in the locks, conditions, futures, queues and executors that the schedule puts in the place of
  those of the standard library, in the modules under test (`explore`).

The same seed gives the same schedule. Time is virtual: it goes on only when no task can run, to the earliest deadline.
If there is none, the tasks wait for each other for ever: `Stuck` names the seed and where each task waits.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType, ModuleType

REAL_LIMIT_S = 60.0
"""Seconds of real time after which a run has failed: a task waits in something that the schedule does not know."""
MOST_SWITCHES = 20_000
"""Switches after which a run has failed: tasks keep each other busy without an end."""


class StuckError(AssertionError):
    """Tasks are left, and none of them can ever go on."""


class _EndedError(BaseException):
    """Raised in tasks that wait when a run is over."""


class Task:
    """A thread of a schedule."""

    def __init__(self, name: str, *, service: bool) -> None:
        self.name = name
        self.service = service
        """Whether it may be left waiting at the end, as a worker without work."""
        self.baton = threading.Semaphore(0)
        self.waits_for: Callable[[], bool] | None = None
        self.until = math.inf
        self.late = False
        self.over = False
        self.thread: threading.Thread | None = None

    def where(self) -> str:
        """Return the line of the package or of a test at which it stands."""
        frame = sys._current_frames().get(self.thread.ident or 0) if self.thread is not None else None
        lines = [] if frame is None else traceback.extract_stack(frame)
        known = [line for line in lines if "schedules.py" not in line.filename and "threading.py" not in line.filename]
        return f"{self.name}: {known[-1].filename}:{known[-1].lineno} {known[-1].line}" if known else self.name


class Schedule:
    """Runs tasks in an order that a seed decides.

    Args:
        seed: decides all switches.
        modules: at their lines tasks may hand over.
        rate: probability of a switch at a line.
    """

    def __init__(self, seed: int, modules: Iterable[ModuleType], rate: float = 0.15) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._modules = list(modules)
        self._files = {module.__file__ for module in self._modules}
        self._rate = rate
        self._tasks: list[Task] = []
        self._running: Task | None = None
        self.switches = 0
        self.now = 1000.0
        self._ended = threading.Event()
        self._over = False
        self._error: BaseException | None = None

    # -- what tests call ----------------------------------------------------------------------------------------------

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Put the schedule's locks, clock, futures and executors into the modules."""
        names = {
            "threading": SimpleNamespace(
                RLock=lambda: Lock(self),
                Lock=lambda: Lock(self),
                Condition=lambda lock=None: Condition(self, lock or Lock(self)),
                Thread=lambda **options: Thread(self, **options),
                current_thread=threading.current_thread,
                TIMEOUT_MAX=threading.TIMEOUT_MAX,
            ),
            "time": SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep),
            "Future": lambda: ScheduledFuture(self),
            "ThreadPoolExecutor": lambda **_: Executor(self),
            "queue": SimpleNamespace(SimpleQueue=lambda: SimpleQueue(self)),
        }
        for module in self._modules:
            for name, value in names.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)

    def run(self, *work: Callable[[], Any]) -> list[Any]:
        """Run functions as tasks until all have returned; return what they returned.

        Raises:
            StuckError: if some can never go on, naming the seed.
        """
        found: list[Any] = [None] * len(work)
        self._tasks, self._over = [], False
        self._ended.clear()

        def keep(i: int, call: Callable[[], Any]) -> None:
            found[i] = call()

        for i, call in enumerate(work):
            self.spawn(f"task {i}", partial(keep, i, call))
        self._pick().baton.release()
        ended = self._ended.wait(REAL_LIMIT_S)
        error, self._over = self._error, True
        self._finish_services()
        if not ended:
            msg = f"seed {self.seed}: a task waits for what the schedule does not know:\n" + self._all_waits()
            raise StuckError(msg)
        if error is not None:
            raise error
        return found

    def sleep(self, seconds: float) -> None:
        """Wait until the clock has gone on."""
        self.wait(lambda: False, seconds)

    # -- what primitives call -----------------------------------------------------------------------------------------

    def spawn(self, name: str, work: Callable[[], Any], *, service: bool = False) -> Task:
        """Add a task; it runs when its turn comes."""
        task = Task(name, service=service)
        task.thread = threading.Thread(target=self._run, args=(task, work), daemon=True)
        self._tasks.append(task)
        task.thread.start()
        return task

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Let others run until `done()` is true; False if the time was up before."""
        task = self._running
        if task is None:  # the test itself, before or after the run
            if not done():
                msg = "the test itself would wait for ever: no task is running"
                raise StuckError(msg)
            return True
        if done():
            return True
        task.waits_for = done
        task.until = math.inf if timeout is None else self.now + timeout
        task.late = False
        self.switch()
        task.waits_for, task.until = None, math.inf
        return not task.late or done()

    def switch(self) -> None:
        """Hand over to a task that can run, perhaps the same."""
        task = self._running
        if task is None:
            return
        chosen = self._pick()
        if chosen is task:
            return
        chosen.baton.release()
        task.baton.acquire()
        if self._over:
            raise _EndedError
        self._running = task

    # -- inside -------------------------------------------------------------------------------------------------------

    def _pick(self) -> Task:
        """Choose a task that can run, or whose time is up first; where there is none, end the run."""
        self.switches += 1
        if self.switches > MOST_SWITCHES:
            self._fail(f"{MOST_SWITCHES} switches and no end")
        can = [task for task in self._tasks if not task.over and (task.waits_for is None or task.waits_for())]
        if can:
            self._running = self._random.choice(can)
            return self._running
        waiting = [task for task in self._tasks if not task.over and task.until < math.inf]
        if not waiting:
            self._fail("all wait for each other")
        first = min(waiting, key=lambda task: task.until)
        self.now = max(self.now, first.until)
        first.late = True
        self._running = first
        return first

    def _fail(self, why: str) -> None:
        msg = f"seed {self.seed}: {why}; Schedule(seed={self.seed}) gives the same run:\n{self._all_waits()}"
        self._error = self._error or StuckError(msg)
        self._end()
        raise _EndedError

    def _all_waits(self) -> str:
        return "\n".join(task.where() for task in self._tasks if not task.over)

    def _end(self) -> None:
        self._over, self._running = True, None
        self._ended.set()

    def _finish_services(self) -> None:
        for task in self._tasks:
            if not task.over and task.thread is not threading.current_thread():
                task.baton.release()
        for task in self._tasks:
            if task.thread is not None:
                task.thread.join(2.0)

    def _run(self, task: Task, work: Callable[[], Any]) -> None:
        task.baton.acquire()
        try:
            if self._over:
                return
            self._running = task
            sys.settrace(self._enter)
            work()
        except _EndedError:
            return
        except BaseException as error:  # raised by `run`
            self._error = self._error or error
        finally:
            sys.settrace(None)
            task.over = True
        if self._over:
            return
        if self._error is not None or all(other.over or other.service for other in self._tasks):
            self._end()
            return
        try:
            self._pick().baton.release()
        except _EndedError:
            return

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self._over and self._random.random() < self._rate:
            self.switch()
        return self._line


def explore(seeds: Iterable[int], modules: Sequence[ModuleType], scenario: Callable[[Schedule], None]) -> None:
    """Run a scenario under the schedule of each seed.

    Args:
        seeds: one run each.
        modules: those under test, see `Schedule`.
        scenario: makes what it needs, calls `Schedule.run`, and checks what comes of it.

    Raises:
        StuckError: if a run has no end, naming its seed.
    """
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            schedule = Schedule(seed, modules)
            schedule.replace(patch)
            try:
                scenario(schedule)
            except StuckError:
                raise
            except BaseException as error:
                error.add_note(f"schedule of seed {seed}")
                raise


class Lock:
    """A lock, reentrant."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._owner: threading.Thread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        me = threading.current_thread()
        if self._owner is not me:
            if not blocking and self._owner is not None:
                return False
            if not self._schedule.wait(lambda: self._owner is None, None if timeout < 0 else timeout):
                return False
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        """Give it back; at the end of a run whoever holds it."""
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = None, 0

    def __enter__(self) -> bool:
        """Take it."""
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        """Give it back."""
        self.release()

    def let_go(self) -> int:
        """Give it back whole; return how often it was taken."""
        depth, self._owner, self._depth = self._depth, None, 0
        return depth

    def take_again(self, depth: int) -> None:
        """Take it so often."""
        self.acquire()
        self._depth = depth


class Condition:
    """A condition over a `Lock`; only those are woken that wait already."""

    def __init__(self, schedule: Schedule, lock: Lock) -> None:
        self._schedule = schedule
        self._lock = lock
        self._waiting: list[list[bool]] = []

    def __enter__(self) -> bool:
        """Take the lock."""
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Give the lock back."""
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be woken."""
        woken = [False]
        self._waiting.append(woken)
        depth = self._lock.let_go()
        try:
            return self._schedule.wait(lambda: woken[0], timeout)
        finally:
            self._waiting = [one for one in self._waiting if one is not woken]
            self._lock.take_again(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until it is true; woken ones alone look."""
        until = math.inf if timeout is None else self._schedule.now + timeout
        while not (found := predicate()):
            left = until - self._schedule.now
            if left <= 0:
                break
            self.wait(None if left == math.inf else left)
        return found

    def notify_all(self) -> None:
        """Wake all that wait now."""
        for woken in self._waiting:
            woken[0] = True
        self._waiting = []

    def notify(self, n: int = 1) -> None:
        """Wake some."""
        for woken in self._waiting[:n]:
            woken[0] = True
        self._waiting = self._waiting[n:]


class ScheduledFuture(Future[Any]):
    """A future whose result is waited for within the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result."""
        self._schedule.wait(self.done, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end."""
        self._schedule.wait(self.done, timeout)
        return super().exception(0)


class Executor:
    """One worker that does what is handed in, in order."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._work: deque[tuple[ScheduledFuture, Callable[[], Any]]] = deque()
        self._worker: Task | None = None

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Hand in a call."""
        future = ScheduledFuture(self._schedule)
        self._work.append((future, lambda: work(*args)))
        if self._worker is None:
            self._worker = self._schedule.spawn("worker", self._serve, service=True)
        return future

    def _serve(self) -> None:
        while True:
            self._schedule.wait(lambda: bool(self._work))
            future, work = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)


class SimpleQueue:
    """A queue without a bound."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)

    def get(self) -> Any:
        """Wait for an item."""
        self._schedule.wait(lambda: bool(self._items))
        return self._items.popleft()


class Thread:
    """A thread of the code under test, as a task that may be left waiting."""

    def __init__(
        self,
        schedule: Schedule,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self._schedule = schedule
        self._name = name
        self._work = partial(target, *args, **(kwargs or {}))
        self._task: Task | None = None

    def start(self) -> None:
        """Add the task."""
        self._task = self._schedule.spawn(self._name, self._work, service=True)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        task = self._task
        if task is not None:
            self._schedule.wait(lambda: task.over, timeout)
