"""The findings of an audit as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ostinato.core.options import number_of

Severity: TypeAlias = Literal["error", "note"]

KINDS: dict[str, tuple[Severity, str]] = {
    "mixed-row": ("error", "The learner is given transitions that no environment made."),
    "old-row": ("error", "Rows that should have been replaced are drawn: data is older than the capacity says."),
    "values": ("error", "The learner is given other numbers than those that were written."),
    "next-at-termination": (
        "note",
        "One-step targets mask this observation; a model or a return that reads it sees another episode.",
    ),
    "next-at-truncation": (
        "error",
        "Targets bootstrap from an observation that does not follow: values before a time limit are biased.",
    ),
    "next-at-ring-end": (
        "error",
        "When the ring is full, the target of one row of each environment bootstraps from an unrelated state.",
    ),
    "end-flag": ("error", "Targets bootstrap after a termination, or do not bootstrap at a time limit."),
    "n-step-sum": ("error", "Targets add rewards of another episode, or leave some out."),
    "n-step-discount": ("error", "The bootstrap value has a wrong weight in the target."),
    "n-step-ring-end": (
        "error",
        "When the ring is full, targets of the newest rows add the oldest rewards of the ring.",
    ),
    "n-step-newest": (
        "error",
        "Until more rows are written, targets of the newest rows count steps that do not exist.",
    ),
    "joined-sequence": ("error", "A recurrent network carries its state over a jump between unrelated rows."),
    "never-drawn": ("error", "These rows have no part in learning."),
    "not-uniform": ("error", "Some rows weigh more in the loss than others."),
    "priority-probability": ("error", "Rows are replayed more or less often than their priorities say."),
    "importance-weight": ("error", "Weights do not undo the bias of prioritized draws."),
    "stale-priority": ("error", "The TD error of a replaced row becomes the priority of a new one."),
    "dtype": ("note", "Memory and bandwidth grow by the ratio of the sizes; the values are the same."),
    "memory": ("note", "Fewer rows fit in the same memory."),
    "state-lost": ("error", "A resumed run learns from other rows than the one that was saved."),
    "draws-changed": ("note", "A resumed run is not the run that was saved, though it has the same rows."),
    "checkpoint-lost": ("note", "An interruption while saving loses the rows of the earlier checkpoint, too."),
    "raises": ("error", "A program stops here."),
}
"""Severity and effect on learning of each kind of finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that comes back wrong."""

    kind: str
    """A key of `KINDS`."""
    severity: Severity
    """`error`: wrong data; `note`: a cost, or wrong only for some uses."""
    message: str
    """What came back, and what is right."""
    effect: str
    """What it does to learning."""
    case: str
    """The smallest case found that shows it."""

    def __str__(self) -> str:
        """Return three lines."""
        return f"{self.severity}: {self.kind}: {self.message}\n    case: {self.case}\n    effect: {self.effect}"


@dataclass(frozen=True)
class Report:
    """The result of `examine`. `print(report)` lists the findings."""

    buffer: str
    """The buffer."""
    adapter: str
    """The class of the adapter."""
    findings: tuple[Finding, ...]
    """Errors first."""
    examined: tuple[str, ...]
    """Names of the experiments."""
    left_out: tuple[str, ...]
    """Names of experiments that need a feature which the adapter does not have."""
    memory_ratio: float
    """Memory of a full buffer, divided by the bytes of its observations, each counted once."""
    error_rate: float
    """Probability that one test of a distribution reports a buffer that draws rightly."""
    seconds: float
    """Time of the audit."""

    @property
    def ok(self) -> bool:
        """Whether there are no errors; notes are allowed."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        """Return the findings, and what was examined."""
        lines = [f"{self.buffer} ({self.adapter})", *map(str, self.findings)]
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> list[str]:
        errors = sum(finding.severity == "error" for finding in self.findings)
        counts = f"{number_of(errors, 'error')}, {number_of(len(self.findings) - errors, 'note')}"
        return [
            f"examined: {', '.join(self.examined)}; left out: {', '.join(self.left_out) or 'nothing'}",
            f"memory: {self.memory_ratio:.2f} times the observations; error rate of a test: {self.error_rate:g}",
            f"{counts if self.findings else 'no findings'} in {self.seconds:.1f} s",
        ]
