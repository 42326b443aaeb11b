"""ObjectRL's memory with its rows on a GPU. Skipped without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage
from ostinato.compat.objectrl import ReplayBuffer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def rows(count: int, device: torch.device) -> TensorDict:
    return TensorDict({"id": torch.arange(count, device=device)}, [count])


@pytest.mark.parametrize("storing", [CPU, CUDA])
@pytest.mark.parametrize("training", [CPU, CUDA])
@pytest.mark.parametrize("source", [CPU, CUDA])
def test_samples_arrive_on_the_training_device(
    tmp_path: Path, storing: torch.device, training: torch.device, source: torch.device
) -> None:
    buffer = ReplayBuffer(device=training, storing_device=storing, buffer_size=20)
    buffer.add_batch(rows(25, source))
    assert (type(buffer._memory.storage) is LazyTensorStorage) == (storing == CUDA)
    for batch in (
        buffer.sample_batch(8),
        buffer.sample_by_index([0, -1]),
        buffer.sample_by_index(torch.tensor([0, 3], device=source)),
        *buffer.create_epoch_iterator(6),
    ):
        assert batch["id"].device.type == training.type
    column = buffer.sample_by_index_fields(range(20), ["id"])
    assert isinstance(column, torch.Tensor)
    assert column.device.type == training.type
    assert column.tolist() == [*range(20, 25), *range(5, 20)]
    buffer.save(str(tmp_path / "buffer"))
    other = ReplayBuffer(device=CPU, storing_device=CPU, buffer_size=1)
    assert other.load(str(tmp_path / "buffer")).rows == 20
    assert other.sample_all()["id"].tolist() == column.tolist()


def test_rows_move_with_the_storing_device() -> None:
    buffer = ReplayBuffer(device=CPU, storing_device=CPU, buffer_size=20)
    buffer.add_batch(rows(10, CPU))
    buffer.storing_device = CUDA
    assert buffer._memory.storage.device.type == "cuda"
    assert buffer.sample_all()["id"].tolist() == list(range(10))
