"""Rows whose content follows from their number, threads that write them, and checks of what is stored."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ostinato import ShardedReplayBuffer

WIDTH = 8


def make_rows(first: int, count: int) -> TensorDict:
    """Return rows `first` to `first + count`: number `[n]`, and content `[n, WIDTH]`, which follows from the number."""
    numbers = torch.arange(first, first + count)
    return TensorDict({"number": numbers, "content": content_of(numbers)}, [count])


def content_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the content of rows, float32 `[n, WIDTH]`; exact for numbers below 2**24."""
    return numbers[:, None].float() - torch.arange(WIDTH) * 7.0


def check_rows(batch: Any) -> list[int]:
    """Return the numbers of the rows of a batch; raise if a row is torn."""
    numbers = batch["number"]
    torn = (batch["content"] != content_of(numbers)).any(dim=1)
    if bool(torn.any()):
        msg = f"torn rows: numbers {numbers[torn].tolist()[:5]} with content {batch['content'][torn][:5].tolist()}"
        raise AssertionError(msg)
    return [int(number) for number in numbers]


def _all_rows(buffer: Any) -> Any:
    return buffer[:] if len(buffer) else None


def stored(rb: ShardedReplayBuffer) -> Counter[int]:
    """Return how often each number is stored, after checking every row of every present shard."""
    found: Counter[int] = Counter()
    for part in rb.apply(_all_rows):
        if part is not None:
            found.update(check_rows(part))
    return found


class Calls:
    """Times calls: no call of a handle may take longer than `limit_s`. Thread-safe."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            took_s = time.monotonic() - began
            if took_s > self.limit_s:
                msg = f"{getattr(call, '__name__', call)} took {took_s:.1f} s, allowed are {self.limit_s:g} s"
                raise AssertionError(msg)


class Writer:
    """A thread that writes `count` rows at a time until it is stopped, and records what was acknowledged.

    Args:
        rb: The handle.
        first: The number of its first row.
        calls: Times its calls.
        count: Rows of each write.
        pause_s: Time between writes.
    """

    def __init__(
        self,
        rb: ShardedReplayBuffer,
        first: int,
        calls: Calls,
        *,
        count: int = 16,
        pause_s: float = 0.05,
    ) -> None:
        self.acknowledged: list[int] = []
        self.error: BaseException | None = None
        self._rb, self._next, self._calls = rb, first, calls
        self._count, self._pause_s = count, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def _write(self) -> None:
        try:
            while not self._stop.wait(self._pause_s):
                rows = make_rows(self._next, self._count)
                self._next += self._count
                self._calls(self._rb.extend, rows)
                self.acknowledged += rows["number"].tolist()
        except BaseException as error:
            self.error = error

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current write; raise what the thread has raised."""
        self._stop.set()
        self._thread.join(120)
        if self.error is not None:
            raise self.error
        if self._thread.is_alive():
            msg = "a write does not end"
            raise AssertionError(msg)


@contextmanager
def writing(writers: Iterable[Writer]) -> Iterator[list[Writer]]:
    """Run writers during a block."""
    made = list(writers)
    for writer in made:
        writer.start()
    try:
        yield made
    finally:
        for writer in made:
            writer.stop()
