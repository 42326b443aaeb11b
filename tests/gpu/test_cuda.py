"""What only a GPU can show. Skipped without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
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
