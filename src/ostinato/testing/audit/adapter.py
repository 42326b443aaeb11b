"""`Adapter`: the six methods by which the audit uses a replay buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ostinato.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.testing.audit.cases import Array, Case, Sample, Step

Feature: TypeAlias = Literal["num_envs", "n_step", "sequence", "priority", "save"]


class Adapter(ABC):
    """How the audit makes, fills, samples and saves a replay buffer.

    Three methods are needed. What `features` does not name is not examined: "num_envs" (several environments),
    "n_step", "sequence", "priority" (`prioritize`), "save" (`save` and `load`).

    Args:
        factory: The class of the buffer, or a callable that makes it: what `make` calls.
    """

    features: tuple[Feature, ...] = ()

    def __init__(self, factory: Any = None) -> None:
        self.factory = factory

    @abstractmethod
    def make(self, case: Case) -> Any:
        """Return an empty buffer with the options of a case."""

    @abstractmethod
    def add(self, buffer: Any, step: Step) -> None:
        """Write one step of all environments."""

    @abstractmethod
    def sample(self, buffer: Any, case: Case, size: int) -> Sample:
        """Draw about `size` transitions, or sequences of `case.sequence` rows."""

    def prioritize(self, buffer: Any, sample: Sample, priorities: Array) -> None:  # noqa: ARG002
        """Set the priorities `[B]` of the rows of a sample."""
        raise UsageError(_missing(self, "priority"))

    def save(self, buffer: Any, path: Path) -> None:  # noqa: ARG002
        """Save to a file or folder, which an earlier call may have written."""
        raise UsageError(_missing(self, "save"))

    def load(self, case: Case, path: Path) -> Any:  # noqa: ARG002
        """Return another buffer with what was saved."""
        raise UsageError(_missing(self, "save"))


def _missing(adapter: Adapter, feature: Feature) -> str:
    return f"{type(adapter).__name__} names the feature {feature!r} but does not override its methods"
