"""One adapter per library: small functions that set a workload up and return the call to measure."""

from __future__ import annotations
