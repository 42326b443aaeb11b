"""The plugin of pytest that `make mutants` runs: which tests meet which change, and which tests notice it.

Both runs use one copy of the tree that holds all changes, each behind a switch. The second run collects once and forks
for each change, so that a change costs the time of the tests that meet it and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mutant_switch
import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = Path(os.environ.get("OSTINATO_MUTANTS", "."))
_WORKERS = 2


class _Extension:
    """The switch of the native extension; without effect where the extension was not changed."""

    def __init__(self) -> None:
        installed = importlib.import_module("ostinato._backend").backend.installed
        self.active = ctypes.c_int(-1)
        self.met = (ctypes.c_ubyte * 1024)()
        with contextlib.suppress(ValueError, AttributeError):
            library = ctypes.CDLL(installed.__file__)
            self.active = ctypes.c_int.in_dll(library, "ostinato_mutant")
            self.met = (ctypes.c_ubyte * 1024).in_dll(library, "ostinato_mutants_met")

    def take(self) -> set[int]:
        """Return the numbers that were met since the last call."""
        found = {10_000 + number for number, met in enumerate(bytes(self.met)) if met}
        ctypes.memset(self.met, 0, ctypes.sizeof(self.met))
        return found


def _clear_caches() -> None:
    """Let each test compute what another one may have left in a cache of the library."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "ostinato"]
    for value in itertools.chain.from_iterable(vars(module).values() for module in modules):
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


class Meetings:
    """Records for each test its time and the changes that it met, in a file for each process of pytest."""

    def __init__(self) -> None:
        self.name = os.environ.get("PYTEST_XDIST_WORKER", "all")
        self.others = _FOLDER / f"{self.name}.hits"
        self.others.write_text("")
        self.read = 0
        self.tests: dict[str, dict[str, Any]] = {}
        os.environ["OSTINATO_MUTANT_HITS"] = str(self.others)
        mutant_switch.begin(str(self.others))
        mutant_switch.in_pytest = True
        self.extension = _Extension()
        self.current: set[int] = set()
        self.shared: dict[Any, set[int]] = {}

    def take(self) -> set[int]:
        """Return what was met since the last call, also in processes that tests started."""
        with self.others.open() as file:
            file.seek(self.read)
            text = file.read()
            self.read = file.tell()
        elsewhere = {int(line) for line in text.split() if line.isdigit()}
        met: set[int] = mutant_switch.met | self.extension.take() | elsewhere
        mutant_switch.met.clear()
        return met

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = time.monotonic()
        _clear_caches()
        self.take()
        self.current = set()
        found: dict[str, Any] = {"failed": False}
        self.tests[item.nodeid] = found
        result = yield
        names = getattr(item, "fixturenames", ())
        fixtures = [one for name in names for one in item.session._fixturemanager.getfixturedefs(name, item) or ()]
        met = self.take().union(self.current, *(self.shared.get(one, ()) for one in fixtures))
        found.update(seconds=time.monotonic() - start, met=sorted(met))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What a fixture met that several tests use counts for each of them."""
        self.current |= self.take()
        result = yield
        if fixturedef.scope != "function":
            self.shared[fixturedef] = self.take()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed and report.nodeid in self.tests:
            self.tests[report.nodeid]["failed"] = True

    def pytest_sessionfinish(self) -> None:
        (_FOLDER / f"met-{self.name}.json").write_text(json.dumps(self.tests))


class Trials:
    """Tries each change in a fork of this process, with the tests of the plan, and writes who noticed it."""

    def __init__(self, plan: dict[str, list[str]], seconds: float) -> None:
        self.plan = plan
        self.seconds = seconds
        self.results: dict[str, str] = {}
        self.running: dict[int, tuple[str, float]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for number, names in self.plan.items():
            if len(self.running) >= _WORKERS:
                self.reap(_WORKERS - 1)
            pid = os.fork()
            if pid == 0:
                _try(number, [items[name] for name in names if name in items])
            self.running[pid] = (number, time.monotonic() + self.seconds)
        self.reap(0)
        (_FOLDER / "results.json").write_text(json.dumps(self.results))
        return True

    def reap(self, most: int) -> None:
        """Wait until at most this many forks run."""
        while len(self.running) > most:
            for pid, (number, deadline) in list(self.running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done == 0 and time.monotonic() < deadline:
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                if done == 0:
                    os.waitpid(pid, 0)
                del self.running[pid]
                told = _FOLDER / f"noticed-{number}"
                noticed = told.read_text() if told.exists() else ""
                survived = done and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
                self.results[number] = "" if survived else (noticed or ("died" if done else "hangs"))
                print(f"{number} {self.results[number] or 'SURVIVED'}", flush=True)
            time.sleep(0.01)


def _try(number: str, items: list[pytest.Item]) -> None:
    """Run tests with a change until one fails, in a process of its own that ends here."""
    os.setpgid(0, 0)
    with open(os.devnull, "r+b", buffering=0) as null:  # noqa: PTH123
        for stream in (0, 1, 2):
            os.dup2(null.fileno(), stream)
    os.environ["OSTINATO_MUTANT"] = number
    mutant_switch.active = _Extension().active.value = int(number)
    code = 0
    for item, following in itertools.zip_longest(items, items[1:]):
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
            (_FOLDER / f"noticed-{number}").write_text(item.nodeid)
            code = 1
            break
    os._exit(code)


def pytest_configure(config: pytest.Config) -> None:
    plan = _FOLDER / "plan.json"
    if os.environ.get("OSTINATO_MUTANTS_RUN") == "try":
        given = json.loads(plan.read_text())
        config.pluginmanager.register(Trials(given["tests"], given["seconds"]), "trials")
    elif hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meetings(), "meetings")
