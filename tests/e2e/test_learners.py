"""Parts of the examples of windows and hindsight, and what their full runs show (slow)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_needs_a_network_that_remembers_and_a_burn_in() -> None:
    example = load("recurrent_burn_in")
    for name, runs in example.run(example.Settings(), 2).items():
        for _, turns in (run[-1] for run in runs):
            assert turns >= 0.95 if name == "recurrent, burn-in" else turns <= 0.65


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hindsight_learns_where_nothing_else_does() -> None:
    example = load("hindsight_bit_flip")
    with_it, without = example.run(example.Settings(), 1).values()
    assert with_it[0][-1][1] >= 0.95
    assert without[0][-1][1] <= 0.05
