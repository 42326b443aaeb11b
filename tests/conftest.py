"""What all tests share: the backends that a test runs with, the profiles of Hypothesis, and a budget of time.

Profiles: `quick` by default; `pytest --hypothesis-profile=thorough` (`make test-all`) tries many more examples.
`pytest --budget=600` skips the tests that would begin later than 600 s after the first one.
Nothing heavy is imported here: the native tests run where torch is missing.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import time
from multiprocessing import forkserver
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import tests.processes  # noqa: F401 (what the fork server imports)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

# Without it a call of Ray's would start a cluster: that of a thread which outlives its test, too.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("LAZY_LEGACY_OP", "False")  # tensordict would leave "None" there, which a new process cannot read

_UNTIMED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=40, stateful_step_count=16, suppress_health_check=_UNTIMED
)
settings.register_profile(
    "thorough", deadline=None, max_examples=400, stateful_step_count=50, suppress_health_check=_UNTIMED
)
settings.load_profile("quick")

_BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="SECONDS", help="skip tests that would begin later than this")


def pytest_collection_finish() -> None:
    """Leave modules and collected tests, a million objects, out of the collections of garbage to come."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    budget: float | None = item.config.getoption("budget", None)
    if budget is not None and time.monotonic() > item.config.stash.setdefault(_BEGUN, time.monotonic()) + budget:
        pytest.skip(f"the budget of {budget:g} s is used up")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a module, which are skipped where it is not installed.

    Not for the whole run: while Playwright is open its event loop counts as running, and `asyncio.run` raises.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("OSTINATO_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here: install it (apt-get install chromium) or name it in OSTINATO_CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with the native extension, and again with torch alone; new interpreters that it starts do the same.

    The fork server serves all tests, so it begins before the environment is that of one test.

    Modules whose tests depend on the choice say `pytestmark = pytest.mark.usefixtures("backend")`.
    """
    module = importlib.import_module("ostinato._backend")
    if request.param == "native" and module.backend.installed is None:
        pytest.skip("the native extension is switched off or not installed")
    forkserver.ensure_running()
    monkeypatch.setenv("OSTINATO_NATIVE", "1" if request.param == "native" else "0")
    with module.use_backend(request.param):
        yield request.param


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the functions of `progress=` at each step, however short."""
    monkeypatch.setattr("ostinato.durable.progress._STEP_S", 0.0)


@pytest.fixture
def needs_native(request: pytest.FixtureRequest) -> None:
    """Skip a test of what torch alone does not do."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend")
    if importlib.import_module("ostinato._backend").backend.native is None:
        pytest.skip("only with the native extension")
