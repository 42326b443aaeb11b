"""Deadlines as plain objects: limits, waits and silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ostinato.distributed.deadlines import GRACE_S, Deadline
from ostinato.distributed.ray_client import short_message


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in one element."""
    now = [100.0]
    monkeypatch.setattr("ostinato.distributed.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_wait_ends_a_grace_period_after_its_timeout(clock):
    deadline = Deadline.of_wait(2.0, 60.0, 30.0)
    assert (deadline.waits, deadline.wait_left_s, deadline.answer_left_s) == (True, 2.0, 2.0 + GRACE_S)
    clock[0] += 2.0
    assert (deadline.wait_left_s, deadline.silence_left_s(100.0)) == (0.0, GRACE_S)
    assert deadline.silence_left_s(101.0) == GRACE_S
    clock[0] += 5.0
    assert deadline.silence_left_s(100.0) == 0.0
    assert deadline.silence_left_s(clock[0]) == GRACE_S  # the actor answers other calls
    clock[0] = 132.0
    assert deadline.silence_left_s(clock[0]) == deadline.left_s == 0.0


def test_long_messages_are_short():
    assert short_message(ValueError("first\n  second\n\n  last ")) == "first ... last"
