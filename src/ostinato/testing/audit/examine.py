"""`examine` and `audit`: run the experiments, and look for the smallest case of each finding."""

from __future__ import annotations

import pkgutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.testing.audit.adapter import Adapter
from ostinato.testing.audit.adapters import adapter_of, name_of
from ostinato.testing.audit.experiments import ERROR_RATE, EXPERIMENTS, MEMORY, Experiment, memory_ratio
from ostinato.testing.audit.report import KINDS, Finding, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.testing.audit.cases import Case
    from ostinato.testing.audit.rows import Problem

_MOST_MEMORY = 1.5
"""Memory divided by the bytes of the observations: from here on it is a finding."""


def examine(buffer: Any, adapter: type[Adapter] | None = None) -> Report:
    """Feed tagged rows through a replay buffer and report what comes back wrong.

    Takes some seconds. Draws are seeded where the buffer uses the global generators of Python, NumPy or torch, whose
    states are restored.

    Args:
        buffer: The class of a buffer, a callable that takes the same arguments (`functools.partial`), or an adapter.
        adapter: The class of the adapter; None: the one for the class by its name.

    Raises:
        OptionError: There is no adapter for the class.
    """
    start = time.perf_counter()
    used = buffer if isinstance(buffer, Adapter) else (adapter or adapter_of(buffer))(buffer)
    runs = [each for each in EXPERIMENTS if each.needs is None or each.needs in used.features]
    findings = [finding for experiment in runs for finding in _findings(used, experiment)]
    ratio = memory_ratio(used)
    if ratio >= _MOST_MEMORY:
        findings.append(
            _finding("memory", f"a full buffer has {ratio:.1f} times the bytes of its observations", str(MEMORY))
        )
    first = {finding.kind: finding for finding in reversed(findings)}.values()
    return Report(
        buffer=name_of(used.factory or used),
        adapter=type(used).__name__,
        findings=tuple(sorted(first, key=lambda finding: (finding.severity, list(KINDS).index(finding.kind)))),
        examined=(*(each.name for each in runs), "memory"),
        left_out=tuple(each.name for each in EXPERIMENTS if each not in runs),
        memory_ratio=ratio,
        error_rate=ERROR_RATE,
        seconds=time.perf_counter() - start,
    )


def load(name: str) -> Any:
    """Return the object `module:name` or `file.py:name`.

    Raises:
        ImportError: There is no such module.
        AttributeError: It does not have the name.
    """
    place, _, attribute = name.partition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        sys.path.insert(0, str(file.parent))
        name = f"{file.stem}:{attribute}"
    return pkgutil.resolve_name(name)


def audit(buffer: Any, adapter: type[Adapter] | None = None) -> Report:
    """Examine a replay buffer in a test; see `examine`. Notes do not fail.

    Raises:
        AssertionError: There are errors; the message lists all findings.

    Examples:
        >>> from ostinato import ReplayBuffer
        >>> from ostinato.testing.audit import audit
        >>> audit(ReplayBuffer).findings
        ()
    """
    report = examine(buffer, adapter)
    if not report.ok:
        raise AssertionError(str(report))
    return report


def _findings(adapter: Adapter, experiment: Experiment) -> Iterator[Finding]:
    """Yield the first finding of each kind, with its smallest case."""
    found: dict[str, tuple[Case, Problem]] = {}
    for case in experiment.cases:
        if case.num_envs == 1 or "num_envs" in adapter.features:
            for problem in experiment.problems(adapter, case):
                found.setdefault(problem.kind, (case, problem))
    for kind, (case, problem) in found.items():
        if experiment.shrinks and kind != "raises":
            case, problem = _shrunk(adapter, experiment, case, problem)  # noqa: PLW2901
        yield _finding(kind, problem.message, str(case))


def _shrunk(adapter: Adapter, experiment: Experiment, case: Case, problem: Problem) -> tuple[Case, Problem]:
    """Return a case with a problem of the same kind that no smaller number leaves."""
    for smaller in case.smaller():
        for other in experiment.problems(adapter, smaller):
            if other.kind == problem.kind:
                return _shrunk(adapter, experiment, smaller, other)
    return case, problem


def _finding(kind: str, message: str, case: str) -> Finding:
    severity, effect = KINDS[kind]
    return Finding(kind, severity, message, effect, case)
