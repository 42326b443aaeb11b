"""Saving and loading shared buffers: the same checkpoints as those of private ones, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer
from ostinato.errors import CheckpointError, DamagedFileError, UsageError

from ...sharing import AVAILABLE, check_ring, check_rows, ids_of, ring_of, rows

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the compiled part, on Linux")
RANKED = pytest.mark.parametrize("ranked", [False, True], ids=["uniform", "prioritized"])


def make(*, shared: bool, ranked: bool, capacity: int = 20, alpha: float = 0.7, **options: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, alpha, 0.5, 1e-3) if ranked else RandomSampler()
    generator = torch.Generator().manual_seed(4)
    storage = LazyTensorStorage(capacity)
    options = {"batch_size": 8, "generator": generator, **options}
    return ReplayBuffer(storage=storage, sampler=sampler, shared=shared, **options)


def fill(rb: ReplayBuffer, count: int) -> None:
    for i in range(0, count, 7):
        rb.extend(rows(range(i, min(i + 7, count))))
    if rb.sampler.prioritized:
        rb.update_priority(torch.arange(len(rb)), torch.rand(len(rb)) + 0.1)


@RANKED
@pytest.mark.parametrize("count", [0, 5, 20, 33])
@pytest.mark.parametrize("way", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("files", [True, False])
def test_sampling_goes_on_bit_for_bit(
    tmp_path: Path, way: tuple[bool, bool], count: int, ranked: bool, files: bool
) -> None:
    old, new = (make(shared=shared, ranked=ranked) for shared in way)
    if count:
        fill(old, count)
        old.sample()
    if files:
        old.dumps(tmp_path / "saved")
        new.loads(tmp_path / "saved")
    else:
        new.load_state_dict(old.state_dict())
    assert len(new) == len(old) == min(count, 20)
    if not count:
        return
    for name in ("rows_written", "rows_drawn", "row_age_mean"):
        assert getattr(new.stats(), name) == getattr(old.stats(), name)
    for i in range(6):
        one, two = old.sample(), new.sample()
        check_rows(two)
        assert torch.equal(one["id"], two["id"])
        for rb in (old, new):
            rb.extend(rows(range(100 + 3 * i, 103 + 3 * i)))
    assert torch.equal(old[:]["id"], new[:]["id"])


@RANKED
def test_rows_that_are_not_whole_are_left_out(ranked: bool) -> None:
    old, new, other = (make(shared=shared, ranked=ranked) for shared in (True, True, False))
    fill(old, 26)
    serial, _ = ring_of(old).reserve(4)
    state = old.state_dict()
    ring_of(old).abandon(serial)
    for rb in (new, other):
        rb.load_state_dict(state)
        assert rb[:]["id"].tolist() == list(range(10, 26))
    if ranked:
        assert sorted(old.sampler.priorities.tolist())[4:] == sorted(new.sampler.priorities.tolist())  # type: ignore[attr-defined]
    check_ring(new)
    check_rows(other.sample())


def test_queued_draws_are_as_if_never_made() -> None:
    old, new, plain = (make(shared=True, ranked=False, prefetch=depth) for depth in (3, None, None))
    for rb in (old, plain):
        fill(rb, 20)
        rb.sample()
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.sample()["id"], plain.sample()["id"])


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    rb = make(shared=True, ranked=True)
    fill(rb, 12)
    cases: list[tuple[ReplayBuffer, str]] = [
        (make(shared=False, ranked=False), "sampler is a RandomSampler"),
        (make(shared=False, ranked=True, capacity=40), "room for 20"),
        (make(shared=False, ranked=True, alpha=0.5), "alpha=0.5"),
        (make(shared=False, ranked=True, prefetch=2), "queued draws"),
    ]
    for other, words in cases:
        fill(other, 30)
        other.sample()
        with pytest.raises(CheckpointError, match=words):
            rb.load_state_dict(other.state_dict())
    other = make(shared=False, ranked=True)
    other.extend({"id": torch.arange(3)})
    with pytest.raises(CheckpointError, match="load into a buffer of that form"):
        rb.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="not the state of a replay buffer"):
        rb.load_state_dict({"storage": {}})
    assert ids_of(rb) == list(range(12))
    fill(other := make(shared=False, ranked=True), 20)
    serial, _ = ring_of(rb).reserve(2)
    with pytest.raises(UsageError, match="while nobody writes"):
        rb.load_state_dict(other.state_dict())
    ring_of(rb).abandon(serial)
    assert ids_of(rb) == list(range(12))
    other.dumps(tmp_path / "saved")
    data = next(path for path in sorted((tmp_path / "saved").rglob("*")) if path.suffix == ".bin")
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    with pytest.raises(DamagedFileError):
        rb.loads(tmp_path / "saved")
    assert ids_of(rb) == list(range(12))
    check_ring(rb)
