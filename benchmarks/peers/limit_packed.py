"""Limit: bare C, all fields of a row side by side in one aligned row."""

from __future__ import annotations

from benchmarks.peers import _limits

LACKS = {
    "prioritized-threads": "Ostinato alone",
    "dataset": "no limit",
    "latency": "no limit: a tail beside a median",
    "priority-update": "Ostinato alone",
    "images": "wide fields: see the limit by field",
    "images-out": "wide fields: see the limit by field",
    "amp": "one field: see the limit by field",
    "trajectories": "see the limit in torch",
    "checkpoint": "see the limit in torch",
    "start": "see the limit in torch",
    **dict.fromkeys(("n-step", "frame-stack", "single-copy", "shared", "threads"), "see the limit by plain samples"),
}
WORKLOADS = _limits.workloads(packed=True)
version = _limits.version
