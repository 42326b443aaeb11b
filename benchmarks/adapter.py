"""What an adapter in `peers/` is made of: the words between the worker and one library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

# The kinds that Ostinato and TorchRL have in common; other workloads have kinds of their own.
KINDS = ("dict", "tensordict", "tdbuffer")
Call: TypeAlias = Callable[[], object]


class Seconds(float):
    """What a call returns that has timed itself: the clock around it does not count."""


@dataclass(frozen=True)
class Loaded:
    """A call to measure while another thread does some work without pause, in rounds only."""

    call: Call
    work: Call

    def __call__(self) -> object:
        """Do what is measured."""
        return self.call()


@dataclass(frozen=True)
class Setup:
    """What a library is asked to prepare.

    Attributes:
        kind: `dict`: dicts of tensors, or the library's own kind where it has no choice; `tensordict`:
            TensorDicts; `tdbuffer`: TensorDicts in a `TensorDictReplayBuffer`; `numpy`: arrays and, in single rows,
            Python scalars go in.
        rows: Capacity of the buffer in rows; it must be full when the setup returns.
        batch: Rows per call.
        directory: An empty directory for files, removed after the workload.
    """

    kind: str
    rows: int
    batch: int
    directory: Path


class Adapter(Protocol):
    """A module in `peers/`: plain functions and two tables."""

    WORKLOADS: dict[str, Callable[[Setup], Call]]
    """From a workload's name to a function that fills a buffer and returns the call to measure."""
    LACKS: dict[str, str]
    """From a workload's family or name to the reason why the library cannot do it."""

    @staticmethod
    def version() -> str:
        """Return the library's version; imports the library, so ImportError says that it is missing."""
        ...
