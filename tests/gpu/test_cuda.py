"""What only a GPU can show. Skipped without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    ToDevice,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Make any wait of the host for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def rows(count: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    number = torch.arange(count, device=device, dtype=torch.float32)
    return {"obs": number[:, None] * torch.ones(4, device=device), "id": number.long()}


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_storage_stays_on_the_device(sampler: type[RandomSampler]) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100, device="cuda"), sampler=sampler(), batch_size=16)
    index = rb.extend(rows(130))
    batch = rb.sample()
    assert index.is_cuda
    assert all(value.is_cuda for value in batch.values())
    assert (batch["obs"][:, 0] == batch["id"]).all()
    assert (batch["id"] >= 30).all()


def test_device_auto_follows_the_first_rows() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device="auto"), batch_size=4)
    rb.extend(rows(5))
    assert rb.storage.device.type == "cuda"
    assert rb.sample()["obs"].is_cuda


def test_writing_and_uniform_sampling_never_wait(no_sync: None) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100, device="cuda"), batch_size=16)
    data = rows(30)
    for _ in range(10):
        rb.extend(data)
        rb.sample()


def test_rows_from_the_host_are_copied_once() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100, device="cuda"), batch_size=16)
    rb.extend(TensorDict(rows(30, "cpu"), [30]))
    batch = rb.sample()
    assert batch.device.type == "cuda"
    assert (batch["obs"][:, 0] == batch["id"]).all()


def test_generator_of_another_device_is_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), generator=torch.Generator())
    with pytest.raises(ValueError, match="generator lives on cpu"):
        rb.extend(rows(5))


@pytest.mark.parametrize("prefetch", [None, 2])
def test_pinned_batches_reach_the_gpu_whole(prefetch: int | None) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10_000),
        batch_size=256,
        pin_memory=True,
        prefetch=prefetch,
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


def test_checkpoint_moves_between_devices(tmp_path: object) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(50, device="cuda"), batch_size=4)
    rb.extend(rows(20))
    rb.dumps(str(tmp_path) + "/saved")
    other = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    other.loads(str(tmp_path) + "/saved")
    assert (other[:]["id"] == torch.arange(20)).all()


def by_priority(count: int = 60, capacity: int = 100, **options: float) -> PrioritizedReplayBuffer:
    settings = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, **options}
    rb = PrioritizedReplayBuffer(storage=LazyTensorStorage(capacity, device="cuda"), batch_size=4096, **settings)  # type: ignore[arg-type]
    rb.extend(rows(count))
    return rb


def test_prioritized_sampling_and_updates_never_wait(no_sync: None) -> None:
    rb = by_priority()
    index = torch.arange(60, device="cuda")
    for _ in range(5):
        rb.update_priority(index, index.double())
        _, info = rb.sample(return_info=True)
        rb.update_priority(info, info["index"].double())
        rb.extend(rows(30))


def test_prioritized_law_and_weights_on_the_device() -> None:
    rb = by_priority()
    index = torch.arange(60, device="cuda")
    rb.update_priority(index, index.double())
    counts = torch.zeros(60, device="cuda")
    for _ in range(100):
        batch, info = rb.sample(return_info=True)
        assert (batch["id"] == info["index"]).all()
        assert torch.allclose(info["priority_weight"].double(), 1 / info["index"].double())
        counts += torch.bincount(info["index"], minlength=60)
    due = index / index.sum() * counts.sum()
    assert counts[0] == 0
    assert float(((counts - due) ** 2 / due)[1:].sum()) < 120


def test_stale_and_bad_priorities_on_the_device_have_no_effect() -> None:
    rb = by_priority(100)
    _, info = rb.sample(return_info=True)
    rb.extend(rows(50))  # slots 0 to 49 hold other rows
    rb.update_priority(info, torch.full((4096,), 0.5, device="cuda"))
    assert isinstance(rb.sampler, PrioritizedSampler)
    assert rb.sampler.priorities.tolist() == [1.0] * 50 + [0.5] * 50
    assert rb.stats().stale_updates == int((info["index"] < 50).sum())
    rb.update_priority(torch.tensor([0, 1], device="cuda"), torch.tensor([float("nan"), 3.0], device="cuda"))
    with pytest.raises(ValueError, match="had no effect"):
        rb.stats()
    assert rb.sampler.priorities.tolist()[:3] == [1.0, 3.0, 1.0]


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
