"""What the audit says of published buffers: the versions of docs/audit.md, or newer ones with the same faults."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest

from ostinato.testing.audit import examine

SB3 = "stable_baselines3.common.buffers"
KNOWN: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("ostinato.compat.sb3", "ReplayBuffer", {}, set()),
    (SB3, "ReplayBuffer", {}, {"memory"}),
    (SB3, "NStepReplayBuffer", {}, {"memory"}),
    (
        SB3,
        "ReplayBuffer",
        {"optimize_memory_usage": True, "handle_timeout_termination": False},
        {"next-at-truncation", "end-flag", "next-at-termination"},
    ),
    ("torchrl.data", "ReplayBuffer", {}, {"memory"}),
    ("cpprb", "ReplayBuffer", {}, {"next-at-truncation", "end-flag", "state-lost", "next-at-termination", "memory"}),
    ("flashbax", "make_flat_buffer", {}, {"next-at-truncation", "next-at-termination"}),
    ("skrl.memories.torch", "RandomMemory", {}, {"joined-sequence", "never-drawn", "state-lost", "memory"}),
    (
        "holosoma.agents.fast_sac.fast_sac_utils",
        "SimpleReplayBuffer",
        {},
        {"n-step-ring-end", "n-step-newest", "dtype", "memory"},
    ),
    (
        "lerobot.rl.buffer",
        "ReplayBuffer",
        {},
        {"next-at-truncation", "next-at-ring-end", "state-lost", "dtype", "memory", "next-at-termination"},
    ),
]


@pytest.mark.parametrize(
    ("module", "name", "options", "kinds"), KNOWN, ids=lambda each: each if isinstance(each, str) else ""
)
def test_findings(module, name, options, kinds):
    pytest.importorskip(module)
    report = examine(partial(getattr(importlib.import_module(module), name), **options))
    unavailable = {"raises"} if module == "torchrl.data" else set()  # priorities need its compiled extension
    assert {finding.kind for finding in report.findings} - unavailable - {"checkpoint-lost"} == kinds, str(report)
