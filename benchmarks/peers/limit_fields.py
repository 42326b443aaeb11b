"""Limit: bare C, one array per field."""

from __future__ import annotations

from benchmarks.peers import _limits

LACKS = {
    "start": "see the limit in torch",
    "trajectories": "see the limit in torch",
    "checkpoint": "see the limit in torch",
    "prioritized-threads": "Ostinato alone",
    "dataset": "no limit",
    "latency": "no limit: a tail beside a median",
    "priority-update": "Ostinato alone",
    **dict.fromkeys(("n-step", "frame-stack", "single-copy", "shared", "threads"), "see the limit by plain samples"),
}
WORKLOADS = _limits.workloads(packed=False)
version = _limits.version
