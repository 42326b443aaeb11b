"""What only a GPU can show: real streams, pinned memory and waits. The rest: tests/device. Skipped without one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, ReplayBuffer, ToDevice
from ostinato.compat.isaacgymenvs import ReplayBuffer as AmpBuffer
from ostinato.compat.objectrl import ReplayBuffer as ObjectBuffer
from ostinato.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def rows(count: int, device: str = "cuda", first: int = 0) -> dict[str, torch.Tensor]:
    number = torch.arange(first, first + count, device=device)
    return {"obs": number[:, None] * torch.ones(4, device=device), "id": number}


def test_generator_of_another_device_is_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), generator=torch.Generator())
    with pytest.raises(ValueError, match="generator lives on cpu"):
        rb.extend(rows(5))


def test_pinned_batches_reach_the_gpu_whole():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10_000),
        batch_size=256,
        pin_memory=True,
        prefetch=2,
        transform=ToDevice("cuda"),
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(rows(10_000, "cpu"))
    seen = torch.zeros((), device="cuda")
    for _ in range(200):
        batch = rb.sample()
        assert batch["obs"].is_cuda
        seen += (batch["obs"] != batch["id"][:, None]).sum()
    assert seen.item() == 0


def test_prefetched_batches_are_read_on_the_stream_of_the_caller():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, device="cuda"), batch_size=256, prefetch=2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for step in range(20):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # rows are written late
            data = rows(1000)
            rb.extend({**data, "id": data["id"] + 1000 * step, "obs": data["obs"] + 1000 * step})
            batch = rb.sample()
            assert bool((batch["obs"][:, 0] == batch["id"]).all())


def test_batches_moved_to_the_cpu_are_whole():
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000, device="cuda"), batch_size=65_536, transform=ToDevice("cpu"))
    rb.extend(rows(100_000))
    for _ in range(20):
        batch = rb.sample()
        assert batch["obs"].is_cpu
        assert bool((batch["obs"][:, 0] == batch["id"]).all())


def test_rows_of_objectrl_move_with_the_storing_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    buffer = ObjectBuffer(device=cuda, storing_device=cpu, buffer_size=20)
    buffer.add_batch(TensorDict({"id": torch.arange(10)}, [10]))
    buffer.storing_device = cuda
    assert type(buffer._memory.storage) is LazyTensorStorage
    assert buffer._memory.storage.device.type == "cuda"
    assert buffer.sample_all()["id"].tolist() == list(range(10))
    assert buffer.sample_batch(4)["id"].is_cuda


# -- the AMP ring: its draws can be replayed -----------------------------------------------------------------------


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    assert (batch["obs"] == batch["id"][:, None]).all()
    return batch["id"].tolist()


def captured(buffer: AmpBuffer, n: int) -> tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor]]:
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


def test_replays_draw_on():
    """Sixteen rows were drawn before the capture, none by it: the replays end that pass and make two more."""
    buffer = AmpBuffer(64, torch.device("cuda"))
    buffer.store(rows(64))
    graph, batch = captured(buffer, 16)  # capturing draws nothing, warming up did
    drawn: list[int] = []
    for _ in range(11):
        graph.replay()
        drawn += ids(batch)
    assert len(set(drawn[:48])) == 48  # the rest of the first pass
    assert Counter(drawn[48:]) == dict.fromkeys(range(64), 2)
    assert len(set(ids(buffer.sample(64)))) == 64


def test_replays_meet_rows_stored_since_the_capture():
    buffer = AmpBuffer(100, torch.device("cuda"))
    buffer.store(rows(10))
    graph, batch = captured(buffer, 10)
    buffer.store(rows(90, first=10))
    seen: set[int] = set()
    for _ in range(20):
        graph.replay()
        seen |= set(ids(batch))
    assert seen == set(range(100))
    buffer.store(rows(100, first=100))  # all replaced
    graph.replay()
    assert min(ids(batch)) >= 100


def test_a_capture_needs_a_draw_before_it_and_stores_none():
    buffer = AmpBuffer(100, torch.device("cuda"))
    data = rows(10)
    buffer.store(data)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UsageError, match="sample once before the capture"), torch.cuda.graph(graph):
        buffer.sample(4)
    buffer.sample(4)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UsageError, match="store\\(\\) cannot be captured"), torch.cuda.graph(graph):
        buffer.store(data)
