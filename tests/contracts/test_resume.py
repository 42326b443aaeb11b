"""The contract of resuming, over everything in `tests/registry.py`, and over buffers of several parts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ostinato import ReplayBufferEnsemble, SamplerWithoutReplacement
from ostinato.testing import ResumeContract
from tests.combinations import rows
from tests.crash.kinds import seeded
from tests.processes import CONTEXT
from tests.registry import BATCH, STATEFUL

assert CONTEXT is not None  # its fork server has imported torch before a contract starts a process


class _Registered(ResumeContract):
    name = ""

    def make(self, capacity: int) -> Any:
        return STATEFUL[self.name].make(capacity)

    def rows(self, count: int, start: int) -> Any:
        lanes = STATEFUL[self.name].lanes
        return rows(count // lanes, start // lanes, lanes)


for _name in STATEFUL:
    _title = "Test" + "".join(word.title() for word in re.findall(r"\w+", _name))
    globals()[_title] = type(_title, (_Registered,), {"name": _name, "__module__": __name__})


class TestEnsemble(ResumeContract):
    """Members of three kinds, each with a stream of its own."""

    def make(self, capacity: int) -> Any:
        members = [STATEFUL[name].make(capacity) for name in ("prioritized", "passes", "list")]
        return ReplayBufferEnsemble(*members, p=[1, 2, 3], batch_size=BATCH, generator=seeded(1))

    def rows(self, count: int, start: int) -> Any:
        return rows(count, start)

    def extend(self, buffer: Any, count: int, start: int) -> None:
        for number, member in enumerate(buffer.members):
            member.extend(self.rows(count, start + 100 * number))

    def use(self, buffer: Any) -> Any:
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info, (batch["t"] % 5 + 1).double())
        return batch, info


class TestViews(ResumeContract):
    """A prioritized view of a uniform buffer: a checkpoint holds both."""

    def make(self, capacity: int) -> Any:
        buffer = STATEFUL["uniform"].make(capacity)
        buffer.view(sampler=STATEFUL["prioritized"].make(capacity).sampler)
        return buffer

    def rows(self, count: int, start: int) -> Any:
        return rows(count, start)


class _LosesItsPlace(SamplerWithoutReplacement):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin a new pass instead."""


class _Forgetful(_Registered):
    name = "passes"

    def make(self, capacity: int) -> Any:
        buffer = super().make(capacity)
        buffer.set_sampler(_LosesItsPlace())
        return buffer


def test_the_contract_notices_a_state_that_is_lost() -> None:
    with pytest.raises(AssertionError):
        _Forgetful().test_a_loaded_buffer_continues()


class _Trusting(_Registered):
    name = "uniform"

    def make(self, capacity: int) -> Any:
        buffer = super().make(capacity)
        buffer.loads = lambda path: None
        return buffer


def test_the_contract_notices_a_load_that_takes_damaged_files() -> None:
    with pytest.raises(AssertionError):
        _Trusting().test_a_failed_load_changes_nothing()
