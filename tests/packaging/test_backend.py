"""The switch OSTINATO_NATIVE, and the importer of extras."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

from ostinato import _backend
from ostinato._optional import require
from ostinato.errors import MissingExtraError, OptionError, OstinatoError

if TYPE_CHECKING:
    from pathlib import Path

# Nothing here belongs on the way to `import ostinato`: each of these costs 0.05 to 3 s.
HEAVY = ("tensordict", "torchrl", "typer", "rich", "matplotlib", "gymnasium", "ray", "pandas", "scipy")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the compiled part had never been built."""
    monkeypatch.setitem(sys.modules, "ostinato._native", None)


def test_zero_switches_it_off_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _backend.load_native("0") is None


@pytest.mark.usefixtures("missing")
def test_missing_and_not_asked_for_warns_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"runs without its compiled part.*wheel.*compiler") as caught:
        assert _backend.load_native(None) is None
    assert len(caught) == 1


@pytest.mark.usefixtures("missing")
def test_missing_but_required_is_an_error() -> None:
    with pytest.raises(ImportError, match="OSTINATO_NATIVE=1 requires the compiled part"):
        _backend.load_native("1")


@pytest.mark.parametrize("setting", ["", "2", "yes", "off", "true"])
def test_other_values_are_refused(setting: str) -> None:
    with pytest.raises(OptionError, match=rf"must be 0 \(off\), 1 \(required\) or unset, got '{setting}'"):
        _backend.load_native(setting)


def test_the_environment_decides_at_import() -> None:
    expected = os.environ.get("OSTINATO_NATIVE")
    if expected == "0":
        assert _backend.native is None
    elif expected == "1":
        assert _backend.native is importlib.import_module("ostinato._native")


def test_import_leaves_heavy_packages_alone() -> None:
    code = f"import sys, json, ostinato; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_require_gives_the_module() -> None:
    assert require("json.decoder", "viz") is importlib.import_module("json.decoder")


def test_require_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'ostinato\[viz\]'") as caught:
        require("no_such_package.part", "viz")
    assert isinstance(caught.value, OstinatoError)
    assert isinstance(caught.value, ImportError)
    assert "no_such_package.part is needed here" in str(caught.value)


def test_require_does_not_hide_a_failure_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_extra.py").write_text("import no_such_dependency\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        require("broken_extra", "viz")
    assert not isinstance(caught.value, MissingExtraError)
