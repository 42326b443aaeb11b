"""The choice of the native extension or torch, at import and for a block, and the importer of extras."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from tests.threads import together

from ostinato._backend import backend, load_native, use_backend
from ostinato._optional import require
from ostinato.errors import MissingExtraError, OptionError, OstinatoError
from ostinato.samplers.priorities import make_tree

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the native extension had never been built."""
    monkeypatch.setitem(sys.modules, "ostinato._native", None)


@pytest.mark.usefixtures("missing")
def test_missing_and_not_asked_for_warns_once():
    with pytest.warns(RuntimeWarning, match=r"runs without its native extension.*wheel.*compiler") as caught:
        assert load_native(None) is None
    assert len(caught) == 1
    with pytest.raises(ImportError, match="OSTINATO_NATIVE=1 requires the native extension"):
        load_native("1")


def test_settings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_native("0") is None
    for setting in ("", "2", "off"):
        with pytest.raises(OptionError, match=rf"must be 0 \(off\), 1 \(required\) or unset, got '{setting}'"):
            load_native(setting)
    with pytest.raises(OptionError, match="must be 'native' or 'torch', got 'numpy'"), use_backend("numpy"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_environment_decides_at_import(setting):
    """In a process of its own: no tree, table or copy of the native extension is made where it is switched off."""
    if setting == "1" and backend.installed is None:
        pytest.skip("the native extension is switched off or not installed")
    code = (
        "import sys, torch, ostinato\n"
        "from ostinato._backend import backend\n"
        "storage = ostinato.LazyTensorStorage(8)\n"
        "rb = ostinato.PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=4)\n"
        "rb.extend({'x': torch.arange(12), 'y': torch.zeros(12, 2)})\n"
        "assert sorted(rb[:]['x'].tolist()) == list(range(4, 12)) and int(rb.sample()['x'].min()) >= 4\n"
        "assert (backend.native is None) is ('ostinato._native' not in sys.modules)\n"
        "print(int(backend.native is not None), repr(rb).count('native'))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env={**os.environ, "OSTINATO_NATIVE": setting},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[0] == setting


def chosen() -> ModuleType | None:
    return backend.native


def test_a_block_chooses_what_is_made_inside():
    before = chosen()
    with use_backend("torch"):
        inside = make_tree(8, torch.device("cpu"))
        assert chosen() is None
    assert chosen() is before
    assert inside.native is None
    if before is None:
        with pytest.raises(OptionError, match="not installed, or OSTINATO_NATIVE=0"), use_backend("native"):
            pass
    else:
        with use_backend("torch"), use_backend("native"):
            assert make_tree(8, torch.device("cpu")).native is not None
    with pytest.raises(ZeroDivisionError), use_backend("torch"):
        1 / 0  # noqa: B018
    assert chosen() is before
    inside.set(torch.tensor([3]), torch.ones(1, dtype=torch.float64))
    assert inside.total == 1.0  # what was made in the block works after it


def test_a_block_waits_for_that_of_another_thread():
    begun, ended, seen = threading.Event(), [False], []

    def first() -> None:
        with use_backend("torch"):
            begun.set()
            threading.Event().wait(0.05)  # the other thread may come meanwhile, and must not get in
            ended[0] = True

    def second() -> None:
        assert begun.wait(10)
        with use_backend("torch"):
            seen.append(ended[0])

    together(first, second)
    assert seen == [True]


def test_require_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"pip install 'ostinato\[viz\]'") as caught:
        require("no_such_package.part", "viz")
    assert isinstance(caught.value, OstinatoError)
    assert isinstance(caught.value, ImportError)
    assert str(caught.value).startswith("no_such_package is needed here")
    with pytest.raises(MissingExtraError, match=r"^no_such_package is .*: run pip install no_such_package$"):
        require("no_such_package")
    assert require("json.decoder", "viz") is importlib.import_module("json.decoder")


def test_require_does_not_hide_a_failure_inside_the_package(tmp_path, monkeypatch):
    (tmp_path / "broken_extra.py").write_text("import no_such_dependency\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        require("broken_extra", "viz")
    assert not isinstance(caught.value, MissingExtraError)
