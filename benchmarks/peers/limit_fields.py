"""Limit: bare C, one array per field."""

from __future__ import annotations

from benchmarks.peers import _limits

LACKS = dict.fromkeys(("start", "trajectories"), "see the limit in torch")
WORKLOADS = _limits.workloads(packed=False)
version = _limits.version
