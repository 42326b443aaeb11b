"""Reports on checkpoints: what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.buffers.checkpoint.state import FORMAT
from ostinato.durable import CheckpointWriter
from ostinato.errors import CheckpointError
from ostinato.tools import CheckpointReport, inspect_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def reported(rb: ReplayBuffer, rows: Any, path: Path) -> tuple[CheckpointReport, dict[str, Any]]:
    """The report on a buffer with some rows, and its fields by name."""
    if rows is not None:
        rb.extend(rows)
    rb.dumps(path)
    report = inspect_checkpoint(path)
    return report, {field.name: field for field in report.fields}


def test_every_kind_of_storage(tmp_path):
    columns = {"a": torch.ones(5, 2, dtype=torch.bfloat16), "c": torch.ones(5, dtype=torch.complex64)}
    rows: Any = TensorDict(columns, [5])
    rb: ReplayBuffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(8), batch_size=2)
    report, fields = reported(rb, rows, tmp_path / "mapped")
    assert report.storage == "LazyMemmapStorage"
    assert (fields["a"].dtype, fields["a"].shape, fields["a"].mean) == ("bfloat16", (2,), 1.0)
    assert fields["c"].mean is None, "complex numbers have no order"
    rows = [{"a": 1}, {"a": 2}, {"b": torch.zeros(3)}]
    _, fields = reported(ReplayBuffer(storage=ListStorage(8)), rows, tmp_path / "objects")
    assert [(f.name, f.dtype, f.rows, f.mean) for f in fields.values()] == [("(objects)", "object", 3, None)]
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    report, fields = reported(rb, {"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "environments")
    assert (report.rows, fields["a"].maximum) == (6, 5)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), generator=torch.Generator())
    report, fields = reported(rb, None, tmp_path / "empty")
    assert (report.rows, fields) == (0, {})
    report, fields = reported(rb, torch.zeros(2), tmp_path / "tensors")
    assert (report.exact_resume, list(fields)) == (True, ["(data)"])
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.zeros(5)})
    rb[:2] = {"a": torch.zeros(2), "late": torch.tensor([[3.0, 4.0], [5.0, float("nan")]])}
    late = reported(rb, None, tmp_path / "late")[1]["late"]
    assert (late.shape, late.rows) == ((2,), 2), "rows that have it"
    assert (late.minimum, late.maximum, late.mean, late.nan_count) == (3.0, 5.0, 4.0, 1)
    rb, obs = ReplayBuffer(storage=LazyTensorStorage(20, single_copy=True)), torch.arange(6.0)[:, None]
    rows = {"observation": obs[:5], "next": {"observation": obs[1:], "reward": torch.ones(5)}}
    _, fields = reported(rb, rows, tmp_path / "single")
    assert list(fields) == ["observation", "next.reward", "next.observation (kept apart)"]
    apart = fields["next.observation (kept apart)"]
    assert (fields["observation"].maximum, apart.rows, apart.maximum) == (4, 1, 5)


def test_what_is_no_buffer_is_named(tmp_path):
    for number, state in enumerate(({}, {"storage": 3}, {"storage": {"class": "X", "state": {}}}, [1], None)):
        with CheckpointWriter(tmp_path / str(number), format_name=FORMAT) as writer:
            writer.commit(state)
        with pytest.raises(CheckpointError):
            inspect_checkpoint(tmp_path / str(number))
