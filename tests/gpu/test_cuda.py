"""What only a GPU can show: real streams, pinned memory and waits. The rest: tests/device. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, ReplayBuffer, ToDevice
from ostinato.compat.objectrl import ReplayBuffer as ObjectBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def rows(count: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    number = torch.arange(count, device=device, dtype=torch.float32)
    return {"obs": number[:, None] * torch.ones(4, device=device), "id": number.long()}


def test_generator_of_another_device_is_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), generator=torch.Generator())
    with pytest.raises(ValueError, match="generator lives on cpu"):
        rb.extend(rows(5))


def test_pinned_batches_reach_the_gpu_whole() -> None:
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


def test_prefetched_batches_are_read_on_the_stream_of_the_caller() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, device="cuda"), batch_size=256, prefetch=2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for step in range(20):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # rows are written late
            data = rows(1000)
            rb.extend({**data, "id": data["id"] + 1000 * step, "obs": data["obs"] + 1000 * step})
            batch = rb.sample()
            assert bool((batch["obs"][:, 0] == batch["id"]).all())


def test_batches_moved_to_the_cpu_are_whole() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000, device="cuda"), batch_size=65_536, transform=ToDevice("cpu"))
    rb.extend(rows(100_000))
    for _ in range(20):
        batch = rb.sample()
        assert batch["obs"].is_cpu
        assert bool((batch["obs"][:, 0] == batch["id"]).all())


def test_rows_of_objectrl_move_with_the_storing_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    buffer = ObjectBuffer(device=cuda, storing_device=cpu, buffer_size=20)
    buffer.add_batch(TensorDict({"id": torch.arange(10)}, [10]))
    buffer.storing_device = cuda
    assert type(buffer._memory.storage) is LazyTensorStorage
    assert buffer._memory.storage.device.type == "cuda"
    assert buffer.sample_all()["id"].tolist() == list(range(10))
    assert buffer.sample_batch(4)["id"].is_cuda
