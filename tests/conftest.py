"""What all tests share: the backends that a test runs with, and the profiles of Hypothesis.

Profiles: `quick` by default; `pytest --hypothesis-profile=thorough` (`make test-all`) tries many more examples.
Nothing heavy is imported here: the native tests run where torch is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNTIMED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=40, stateful_step_count=16, suppress_health_check=_UNTIMED
)
settings.register_profile(
    "thorough", deadline=None, max_examples=400, stateful_step_count=50, suppress_health_check=_UNTIMED
)
settings.load_profile("quick")


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with the native extension, and again with torch alone; processes that it starts do the same.

    Modules whose tests depend on the choice say `pytestmark = pytest.mark.usefixtures("backend")`.
    """
    module = importlib.import_module("ostinato._backend")
    if request.param == "native" and module.backend.installed is None:
        pytest.skip("the native extension is switched off or not installed")
    monkeypatch.setenv("OSTINATO_NATIVE", "1" if request.param == "native" else "0")
    with module.use_backend(request.param):
        yield request.param


@pytest.fixture
def needs_native(request: pytest.FixtureRequest) -> None:
    """Skip a test of what torch alone does not do."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend")
    if importlib.import_module("ostinato._backend").backend.native is None:
        pytest.skip("only with the native extension")
