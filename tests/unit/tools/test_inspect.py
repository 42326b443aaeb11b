"""Reports on checkpoints: contents, damage, bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato.errors import CheckpointError, DamagedFileError
from ostinato.tools import CheckpointReport, inspect_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_everything_that_a_dict_buffer_saves(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
    rb.extend({"obs": torch.arange(12).reshape(6, 2), "next": {"done": torch.tensor([True, False] * 3)}})
    rb.sample()
    rb.dumps(tmp_path / "saved")
    report = inspect_checkpoint(tmp_path / "saved")
    assert (report.rows, report.capacity, report.rows_written, report.rows_drawn) == (6, 10, 6, 3)
    assert (report.storage, report.sampler, report.writer) == (
        "LazyTensorStorage", "SamplerWithoutReplacement", "RoundRobinWriter",
    )  # fmt: skip
    assert report.verified
    assert not report.exact_resume
    assert report.nbytes == sum(
        f.stat().st_size for f in (tmp_path / "saved").iterdir() if f.suffix in {".bin", ".json"}
    )
    obs, done = report.fields
    assert (obs.name, obs.dtype, obs.shape, obs.rows, obs.nbytes) == ("obs", "int64", (2,), 6, 96)
    assert (obs.minimum, obs.maximum, obs.mean, obs.nan_count) == (0, 11, 5.5, 0)
    assert (done.name, done.dtype, done.shape, done.mean) == ("next.done", "bool", (), 0.5)


def test_a_generator_means_exact_resume(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), generator=torch.Generator())
    rb.extend(torch.zeros(2))
    rb.dumps(tmp_path / "saved")
    report = inspect_checkpoint(tmp_path / "saved")
    assert report.exact_resume
    assert [field.name for field in report.fields] == ["(data)"]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_tensordicts_in_memory_and_mapped(storage: type, tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=storage(8), batch_size=2)
    rb.extend(TensorDict({"a": torch.ones(5, 2, dtype=torch.bfloat16), "c": torch.ones(5, dtype=torch.complex64)}, [5]))
    rb.dumps(tmp_path / "saved")
    report = inspect_checkpoint(tmp_path / "saved")
    fields = {field.name: field for field in report.fields}
    assert report.storage == storage.__name__
    assert (fields["a"].dtype, fields["a"].shape, fields["a"].mean) == ("bfloat16", (2,), 1.0)
    assert fields["c"].mean is None, "complex numbers have no order"


def test_objects(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=ListStorage(8))
    rb.extend([{"a": 1}, {"a": 2}, {"b": torch.zeros(3)}])
    rb.dumps(tmp_path / "saved")
    (field,) = inspect_checkpoint(tmp_path / "saved").fields
    assert (field.name, field.dtype, field.rows, field.mean) == ("(objects)", "object", 3, None)


def test_environments(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend({"a": torch.arange(6.0).reshape(2, 3)})
    rb.dumps(tmp_path / "saved")
    report = inspect_checkpoint(tmp_path / "saved")
    assert report.rows == 6
    assert report.fields[0].maximum == 5.0


def test_an_empty_buffer(tmp_path: Path) -> None:
    ReplayBuffer(storage=LazyTensorStorage(5)).dumps(tmp_path / "saved")
    report = inspect_checkpoint(tmp_path / "saved")
    assert (report.rows, report.fields) == (0, ())


def test_a_late_field_counts_only_the_rows_that_have_it(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.zeros(5)})
    rb[:2] = {"a": torch.zeros(2), "late": torch.tensor([[3.0, 4.0], [5.0, float("nan")]])}
    rb.dumps(tmp_path / "saved")
    _, late = inspect_checkpoint(tmp_path / "saved").fields
    assert (late.name, late.shape, late.rows) == ("late", (2,), 2)
    assert (late.minimum, late.maximum, late.mean, late.nan_count) == (3.0, 5.0, 4.0, 1)


def test_quick_looks_at_the_manifest_alone(tmp_path: Path) -> None:
    saved = save(tmp_path)
    full, quick = inspect_checkpoint(saved), inspect_checkpoint(saved, read_data=False)
    assert not quick.verified
    assert quick.fields[0].mean is None
    assert (quick.rows, quick.nbytes, quick.fields[0].name) == (full.rows, full.nbytes, full.fields[0].name)


def save(tmp_path: Path) -> Path:
    """Save a small buffer with a state large enough for a file of its own."""
    rb = ReplayBuffer(storage=LazyTensorStorage(20_000), sampler=SamplerWithoutReplacement(), batch_size=2)
    rb.extend({"a": torch.arange(20_000)})
    rb.sample()
    rb.dumps(tmp_path / "saved")
    return tmp_path / "saved"


def test_damage_in_any_file_is_found(tmp_path: Path) -> None:
    saved = save(tmp_path)
    for file in sorted(saved.glob("*.bin")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DamagedFileError, match=file.name.replace(".", r"\.")):
            inspect_checkpoint(saved)
        file.write_bytes(whole)
    assert isinstance(inspect_checkpoint(saved), CheckpointReport)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        inspect_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("state", [{}, {"storage": 3}, {"storage": {"class": "X", "state": {}}}, [1], None])
def test_a_manifest_with_other_content_raises(state: object, tmp_path: Path) -> None:
    from ostinato.buffers.checkpoint.state import FORMAT
    from ostinato.durable import CheckpointWriter

    with CheckpointWriter(tmp_path / "saved", format_name=FORMAT) as writer:
        writer.commit(state)
    with pytest.raises(CheckpointError, match="does not describe a replay buffer"):
        inspect_checkpoint(tmp_path / "saved")


def test_memory_stays_bounded(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    assert resource
    rb = ReplayBuffer(storage=LazyTensorStorage(1500))
    rb.extend({"pixels": torch.zeros(1500, 100_000, dtype=torch.uint8)})
    rb.dumps(tmp_path / "saved")
    del rb
    code = (
        "import json, resource, sys, torch; from ostinato.tools import inspect_checkpoint as look\n"
        "look(sys.argv[2])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); report = look(sys.argv[1]); print(json.dumps([peak() - before, report.nbytes]))"
    )
    small = save(tmp_path / "small")
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "saved"), str(small)]
    grown, nbytes = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert nbytes > 140e6
    assert grown / 1024 < 64, "MiB of memory more than for a small checkpoint"


def test_single_copies_are_reported(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(20, single_copy=True))
    obs = torch.arange(6.0)[:, None]
    rb.extend({"observation": obs[:5], "next": {"observation": obs[1:], "reward": torch.ones(5)}})
    rb.dumps(tmp_path / "a")
    fields = {field.name: field for field in inspect_checkpoint(tmp_path / "a").fields}
    assert list(fields) == ["observation", "next.reward", "next.observation (kept apart)"]
    assert fields["observation"].maximum == 4
    apart = fields["next.observation (kept apart)"]
    assert (apart.rows, apart.maximum) == (1, 5)
