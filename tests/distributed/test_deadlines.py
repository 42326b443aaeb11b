"""Deadlines as plain objects: limits, waits and silence."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from ostinato.distributed.deadlines import GRACE_S, Deadline
from ostinato.distributed.ray_client import short_message


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in one element."""
    now = [100.0]
    monkeypatch.setattr("ostinato.distributed.deadlines.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_call_ends_after_its_timeout_or_the_default(clock: list[float]) -> None:
    for timeout_s, limit_s in ((None, 60.0), (2, 2.0), (np.float32(2), 2.0), (np.int64(2), 2.0), (Fraction(2), 2.0)):
        deadline = Deadline.of_call(timeout_s, 60.0)
        assert (deadline.limit_s, deadline.left_s, deadline.answer_left_s) == (limit_s, limit_s, limit_s)
        assert deadline.silence_left_s(clock[0] + 1.0) == limit_s  # whatever else the actor answers
        assert (deadline.works, deadline.waits, deadline.probe_every_s) == (False, False, math.inf)
    clock[0] += 1.5
    assert (deadline.elapsed_s, deadline.left_s) == (1.5, 0.5)
    clock[0] += 1.0
    assert (deadline.left_s, deadline.answer_left_s) == (0.0, 0.0)
    assert Deadline.of_call(math.inf, 60.0).left_s == math.inf


def test_a_wait_ends_a_grace_period_after_its_timeout(clock: list[float]) -> None:
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


def test_work_goes_on_while_its_actor_answers(clock: list[float]) -> None:
    deadline = Deadline.of_work(None, 4.0)
    assert (deadline.works, deadline.left_s, deadline.probe_every_s) == (True, math.inf, 1.0)
    assert deadline.silence_left_s(100.0) == 4.0
    clock[0] += 1000.0
    assert deadline.silence_left_s(clock[0] - 1.0) == 3.0
    assert deadline.silence_left_s(100.0) == 0.0
    limited = Deadline.of_work(10.0, 4.0)
    clock[0] += 9.0
    assert limited.silence_left_s(clock[0]) == 1.0


def test_long_messages_are_short() -> None:
    assert short_message(ValueError("first\n  second\n\n  last ")) == "first ... last"
