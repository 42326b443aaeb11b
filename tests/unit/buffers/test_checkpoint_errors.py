"""Checkpoints that do not fit or are damaged are refused, and nothing changes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    QueueSampler,
    ReplayBuffer,
    ReservoirWriter,
    SamplerWithoutReplacement,
    TensorStorage,
)
from ostinato.errors import CheckpointError, DamagedFileError, OptionError

from ...tags import STORAGES, buffer, fill, same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


from .test_checkpoint import Counter, whole


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("storage", list(STORAGES))
def test_a_smaller_buffer_refuses_a_save_and_stays_as_it_was(storage: str, prefetch: int, tmp_path: Path) -> None:
    transform = None if prefetch else Counter()  # a prefetch thread would go on counting
    rb = whole(storage, sampler="epochs", prefetch=prefetch)
    if transform is not None:
        rb.append_transform(Counter())
    fill(rb, range(7))
    rb.sample()
    rb.dumps(tmp_path / "save")
    small = buffer(
        storage,
        5,
        sampler=SamplerWithoutReplacement(),
        batch_size=3,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(1),
        transform=transform,
    )
    fill(small, range(20, 24))
    small.sample()
    before = snapshot(small)
    with pytest.raises(CheckpointError, match=r"7 rows.*room for 5"):
        small.loads(tmp_path / "save")
    same_state(snapshot(small), before)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_save_of_another_form_is_refused(fresh: bool, tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5), "tuple")
    rb.dumps(tmp_path / "save")
    other = whole("packed")
    if fresh:
        other.loads(tmp_path / "save")
        return
    fill(other, range(3), "dict")
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=r"holds.*the storage"):
        other.loads(tmp_path / "save")
    same_state(snapshot(other), before)


def test_saves_of_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5), "tensordict")
    rb.dumps(tmp_path / "save")
    for other, message in (
        (whole("packed", sampler="epochs"), "sampler is a RandomSampler, this buffer's a SamplerWithoutReplacement"),
        (whole("packed", writer="max value"), "writer is a RoundRobinWriter"),
        (whole("list"), r"storage is a LazyTensorStorage \(tensors\).*ListStorage"),
        (buffer(LazyTensorStorage(10, ndim=2)), "ndim=1.*ndim=2"),
    ):
        before = snapshot(other)
        with pytest.raises(CheckpointError, match=message):
            other.loads(tmp_path / "save")
        same_state(snapshot(other), before)


def test_samplers_of_other_options_are_refused(tmp_path: Path) -> None:
    rb = whole("packed", sampler="epochs")
    fill(rb, range(5))
    rb.dumps(tmp_path / "save")
    with pytest.raises(CheckpointError, match="shuffle=True"):
        whole("packed", sampler="in order").loads(tmp_path / "save")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    rb = whole("packed")
    for wrong in (tmp_path / "missing", tmp_path):
        with pytest.raises((CheckpointError, FileNotFoundError), match=r"missing|checkpoint|manifest"):
            rb.loads(wrong)
    (tmp_path / "notes.txt").write_text("mine")
    fill(rb, range(3))
    with pytest.raises(CheckpointError, match="other files"):
        rb.dumps(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_file_is_refused_and_the_buffer_stays_as_it_was(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5))
    rb.dumps(tmp_path / "save")
    for path in [p for p in (tmp_path / "save").iterdir() if p.suffix == ".bin" and p.stat().st_size]:
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        other = whole("packed")
        fill(other, range(20, 23))
        before = snapshot(other)
        with pytest.raises(DamagedFileError, match=path.name.split(".")[0]):
            other.loads(tmp_path / "save")
        same_state(snapshot(other), before)
        fresh = whole("packed")
        with pytest.raises(DamagedFileError):
            fresh.loads(tmp_path / "save")
        assert len(fresh) == 0
        assert fresh.extend(torch.zeros(2)).tolist() == [0, 1], "half-read rows fixed the form"
        path.write_bytes(good)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    rb = whole("packed")
    fill(rb, range(5))
    rb.dumps(tmp_path / "save")
    path = max((tmp_path / "save").glob("*.bin"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError):
        whole("packed").loads(tmp_path / "save")


CONFIGURATIONS: dict[str, Callable[[], ReplayBuffer]] = {
    "plain": lambda: ReplayBuffer(storage=LazyTensorStorage(32), batch_size=4),
    "not packed": lambda: ReplayBuffer(storage=LazyTensorStorage(32, packed=False), batch_size=4),
    "single copies": lambda: ReplayBuffer(storage=LazyTensorStorage(32, single_copy=True), batch_size=4),
    "another unit": lambda: ReplayBuffer(storage=LazyTensorStorage(32), sample_unit=NStep(2, 0.9), batch_size=4),
    "too small": lambda: ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4),
    "two dimensions": lambda: ReplayBuffer(storage=LazyTensorStorage(32, ndim=2), batch_size=4),
    "a list": lambda: ReplayBuffer(storage=ListStorage(32), batch_size=4),
    "priorities": lambda: PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(32), batch_size=4),
    "a queue": lambda: ReplayBuffer(storage=LazyTensorStorage(32), sampler=QueueSampler(), batch_size=4),
    "a reservoir": lambda: ReplayBuffer(storage=LazyTensorStorage(32), writer=ReservoirWriter(), batch_size=4),
    "other rows": lambda: ReplayBuffer(storage=TensorStorage({"x": torch.zeros(20)}), batch_size=4),
}


@pytest.mark.parametrize("fields", [("obs", "next_obs", "done"), ("obs",)])
@pytest.mark.parametrize("source", ["plain", "not packed", "single copies"])
def test_a_whole_checkpoint_is_never_called_damaged(source: str, fields: tuple[str, ...], tmp_path: Path) -> None:
    place = torch.arange(20.0).view(20, 1)
    rows = {"obs": place, "next_obs": place + 1, "done": torch.zeros(20).bool()}
    saved = CONFIGURATIONS[source if len(fields) > 1 else "plain"]()
    saved.extend({name: rows[name] for name in fields})
    saved.dumps(tmp_path / "c")
    errors: list[Exception | None] = []
    for configuration, mmap in product(CONFIGURATIONS, (False, True)):
        target = CONFIGURATIONS[configuration]()
        try:
            target.loads(tmp_path / "c", mmap=mmap)
            errors.append(None)
        except (CheckpointError, OptionError) as error:
            errors.append(error)
    raised = [error for error in errors if error is not None]
    assert 0 < len(raised) < len(errors)
    assert not [error for error in raised if isinstance(error, DamagedFileError) or "damaged" in str(error)]
