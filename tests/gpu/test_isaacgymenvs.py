"""The AMP ring on a GPU: its draws can be replayed. That it never waits: tests/device. Skipped without one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ostinato.compat.isaacgymenvs import ReplayBuffer
from ostinato.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def rows(first: int, count: int) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + count, device="cuda")
    return {"amp_obs": number[:, None] * torch.ones(8, device="cuda"), "id": number}


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    assert (batch["amp_obs"] == batch["id"][:, None]).all()
    return batch["id"].tolist()


def captured(buffer: ReplayBuffer, n: int) -> tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor]]:
    """Capture `sample(n)`, after the first draw that it needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        buffer.sample(n)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = buffer.sample(n)
    return graph, batch


def test_replays_draw_on() -> None:
    """Sixteen rows were drawn before the capture, none by it: the replays end that pass and make two more."""
    buffer = ReplayBuffer(64, torch.device("cuda"))
    buffer.store(rows(0, 64))
    graph, batch = captured(buffer, 16)  # capturing draws nothing, warming up did
    drawn: list[int] = []
    for _ in range(11):
        graph.replay()
        drawn += ids(batch)
    assert len(set(drawn[:48])) == 48  # the rest of the first pass
    assert Counter(drawn[48:]) == dict.fromkeys(range(64), 2)
    assert len(set(ids(buffer.sample(64)))) == 64


def test_replays_meet_rows_stored_since_the_capture() -> None:
    buffer = ReplayBuffer(100, torch.device("cuda"))
    buffer.store(rows(0, 10))
    graph, batch = captured(buffer, 10)
    buffer.store(rows(10, 90))
    seen: set[int] = set()
    for _ in range(20):
        graph.replay()
        seen |= set(ids(batch))
    assert seen == set(range(100))
    buffer.store(rows(100, 100))  # all replaced
    graph.replay()
    assert min(ids(batch)) >= 100


def test_a_capture_needs_a_draw_before_it_and_stores_none() -> None:
    buffer = ReplayBuffer(100, torch.device("cuda"))
    data = rows(0, 10)
    buffer.store(data)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UsageError, match="sample once before the capture"), torch.cuda.graph(graph):
        buffer.sample(4)
    buffer.sample(4)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UsageError, match="store\\(\\) cannot be captured"), torch.cuda.graph(graph):
        buffer.store(data)
