"""The contract of buffers, over everything in `tests/registry.py`, with the native extension and without."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch

from ostinato import SamplerWithoutReplacement
from ostinato._backend import backend, use_backend
from ostinato.errors import OstinatoError
from tests.processes import CONTEXT
from tests.registry import BUFFERS, Registered, registered

assert CONTEXT is not None  # its fork server has imported torch before a contract starts a process

for _name in BUFFERS:
    _title = "Test" + "".join(word.title() for word in re.findall(r"\w+", _name))
    globals()[_title] = type(_title, (Registered,), {"name": _name, "__module__": __name__})


@pytest.mark.skipif(backend.installed is None, reason="there is one way without the extension")
def test_what_native_code_saved_goes_on_without_it(tmp_path):
    for number, name in enumerate(BUFFERS):
        contract = registered(name)
        with use_backend("native"):
            buffer = contract.fill()
            buffer.dumps(tmp_path / str(number))
            expected = contract.go_on(buffer)
        with use_backend("torch"):
            loaded = contract.make(contract.capacity)
            loaded.loads(tmp_path / str(number))
            assert contract.go_on(loaded) == expected, name


@pytest.mark.parametrize("left", [0, 1, 5])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_with_few_rows_goes_on(name, left, tmp_path):
    """New, emptied, or without its newest rows where it lets them be deleted."""
    contract = registered(name)
    for number, buffer in enumerate((contract.make(contract.capacity), contract.fill())):
        for member in getattr(buffer, "members", [buffer]):
            member.empty()
        if left:
            contract.extend(buffer, 6, 0)
            with suppress(OstinatoError):
                for member in getattr(buffer, "members", [buffer]):
                    member.delete(torch.arange(left, len(member)))
        loaded = contract.make(contract.capacity)
        buffer.dumps(tmp_path / str(number))
        loaded.loads(tmp_path / str(number))
        assert len(loaded) == len(buffer)
        for each in (loaded, buffer):
            contract.extend(each, 6, 500)
        assert contract.go_on(loaded) == contract.go_on(buffer)


class _LosesItsPlace(SamplerWithoutReplacement):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin a new pass instead."""


class _Broken(Registered):
    """Its state is lost, a wrong call does not raise, and its batches are torn."""

    name = "SamplerWithoutReplacement"

    def make(self, capacity: int) -> Any:
        buffer = super().make(capacity)
        buffer.set_sampler(_LosesItsPlace())
        return buffer

    def wrong_calls(self, buffer: Any) -> Any:
        return {"len": lambda: len(buffer)}

    def check(self, batch: Any) -> None:
        batch["t"] += 1
        super().check(batch)


class _Trusting(Registered):
    """Its loads take damaged files."""

    name = "RandomSampler"

    def make(self, capacity: int) -> Any:
        buffer = super().make(capacity)
        buffer.loads = lambda path: None
        return buffer


LAWS: tuple[str, ...] = ("a_loaded_buffer_continues", "another_process_continues", "a_load_replaces_other_rows")
LAWS += ("an_edited_buffer_continues", "wrong_calls_change_nothing", "threads_see_whole_rows")


@pytest.mark.parametrize(
    ("broken", "test"), [*((_Broken, law) for law in LAWS), (_Trusting, "a_failed_load_changes_nothing")]
)
def test_the_contract_finds_the_bug(broken, test):
    with pytest.raises(AssertionError):
        getattr(broken(), f"test_{test}")()
