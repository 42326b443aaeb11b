"""The ways in which checkpoints are saved and loaded here: every test of this folder goes through each of them."""

from __future__ import annotations

from typing import Any

SAVES: dict[str, dict[str, Any]] = {"whole": {}, "incremental": {"incremental": True}}
"""Options of `dumps`."""
LOADS: dict[str, dict[str, Any]] = {"read": {}}
"""Options of `loads`."""
WAYS = [(save, load) for save in SAVES for load in LOADS]
