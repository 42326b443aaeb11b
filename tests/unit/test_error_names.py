"""Errors name what users can import: no private class stands in a message or is the class of an error."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

import ostinato
from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from ostinato._backend import backend
from ostinato._optional import require_installed
from ostinato.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULES = ("", ".errors", ".protocols", ".samplers", ".storages", ".transforms", ".units", ".writers")
PUBLIC = {name for module in MODULES for name in importlib.import_module(f"ostinato{module}").__all__}
ROWS = {
    "obs": torch.zeros(6, 2),
    "done": torch.tensor([False, False, True] * 2),
    "td_error": torch.ones(6),
    "reward": torch.ones(6),
}
WRONG: tuple[Any, ...] = (object(), -1, 2.5, "x", {"x": 1}, [object()], torch.full((2,), -7))


def _tensordicts() -> ReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=PrioritizedSampler(9, 0.5, 0.5), batch_size=2)
    rb.extend(TensorDict(ROWS, [6]))
    return rb


def _dicts(**options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(**{"storage": LazyTensorStorage(9), "batch_size": 2, **options})
    rb.extend(ROWS)
    return rb


def _objects() -> ReplayBuffer:
    rb = ReplayBuffer(storage=ListStorage(9), batch_size=2)
    rb.extend([1, 2, 3])
    return rb


BUFFERS: dict[str, Any] = {
    "tensordicts": _tensordicts,
    "objects": _objects,
    "slices": lambda: _dicts(sampler=SliceSampler(slice_len=2, end_key="done")),
    "ensemble": lambda: ReplayBufferEnsemble(_dicts(), _dicts(), batch_size=2),
    "shared": lambda: _dicts(shared=True),
}
METHODS = (
    "__getitem__",
    "add",
    "append_transform",
    "delete",
    "dumps",
    "extend",
    "insert_transform",
    "load_state_dict",
    "loads",
    "mark_update",
    "query",
    "sample",
    "set_",
    "set_rng",
    "set_sampler",
    "set_storage",
    "set_writer",
    "update_",
    "update_priority",
    "update_tensordict_priority",
    "view",
    "write_all",
)


def _private() -> re.Pattern[str]:
    """Match the names of classes that are not public, as far as they are no words of a sentence."""
    found = {"Lifecycle", "Sampling"}
    for name, module in list(sys.modules.items()):
        if name.startswith("ostinato"):
            found |= {key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == name}
    compound = {name for name in found if name.startswith("_") or re.search("[a-z][A-Z]", name)}
    return re.compile(rf"\b({'|'.join(sorted(compound | {'Lifecycle', 'Sampling'} - PUBLIC))})\b")


def _call(rb: Any, name: str, *args: Any) -> Any:
    return getattr(rb, name)(*args)


def _check(calls: Iterator[Callable[[], Any]]) -> int:
    errors, private = list[Exception](), _private()
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    for found in errors:
        text = str(found)
        for name in PUBLIC:
            text = text.replace(name, "")
        assert not private.search(text), f"{type(found).__name__}: {found}"
        assert not type(found).__name__.startswith("_"), repr(found)
    return len(errors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BUFFERS)
def test_errors_of_buffers(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a name alone is a path to `dumps`
    if kind == "shared" and backend.native is None:
        pytest.skip("processes share buffers through the native extension")
    rb = BUFFERS[kind]()

    def calls() -> Iterator[Callable[[], Any]]:
        for name, _ in inspect.getmembers(type(rb), inspect.isfunction):
            if not name.startswith("_"):
                yield partial(getattr(rb, name), no_such_option=1)
        for name in METHODS:
            for wrong in WRONG:
                yield partial(_call, rb, name, wrong)
                yield partial(_call, rb, name, wrong, wrong)

    assert _check(calls()) > len(METHODS)


@pytest.mark.filterwarnings("ignore")
def test_errors_of_constructors():
    def calls() -> Iterator[Callable[[], Any]]:
        for name in ostinato.__all__:
            cls: Any = getattr(ostinato, name)
            if inspect.isclass(cls) and not issubclass(cls, BaseException) and not re.search("Ray|Sharded", name):
                yield partial(cls, no_such_option=1)  # type: ignore[call-arg]
                yield partial(cls, *[object()] * 3)

    assert _check(calls()) > 50


def test_a_package_that_is_installed_but_not_imported_is_not_asked_for():
    assert "turtledemo" not in sys.modules
    require_installed("turtledemo", "viz", "a plot", "print the numbers")
    with pytest.raises(MissingExtraError, match=r"pip install 'ostinato\[viz\]', or print the numbers"):
        require_installed("no_such_package", "viz", "a plot", "print the numbers")
