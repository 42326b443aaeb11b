"""A save reads back what it is about to commit: a state that no load would take never replaces a good checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    QueueSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReservoirWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from ostinato.core.records import Run
from ostinato.errors import CheckpointError

from ...sharing import AVAILABLE
from ...tags import same_state, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make(**options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=LazyTensorStorage(16), **{"batch_size": 4, "generator": generator, **options})


def rows(count: int = 16) -> dict[str, torch.Tensor]:
    x = torch.arange(count)
    return {"x": x, "done": x % 4 == 3}


def spoil_order(rb: ReplayBuffer) -> None:
    rb.sampler._order[:2] = 0  # type: ignore[attr-defined]


def spoil_episodes(rb: ReplayBuffer) -> None:
    rb.sampler._firsts = torch.zeros(0, dtype=torch.int64)  # type: ignore[attr-defined]


def spoil_priorities(rb: ReplayBuffer) -> None:
    rb.sampler._ledger._raw[3] = -1.0  # type: ignore[attr-defined]


def spoil_queue(rb: ReplayBuffer) -> None:
    rb.sampler._waiting = 40  # type: ignore[attr-defined]


def spoil_cursor(rb: ReplayBuffer) -> None:
    rb.writer._cursor = 99  # type: ignore[attr-defined]


def spoil_counts(rb: ReplayBuffer) -> None:
    rb._engine.rows_drawn = -1  # type: ignore[misc]


def spoil_reservoir(rb: ReplayBuffer) -> None:
    rb.writer._offered = -5  # type: ignore[attr-defined]


def spoil_form(rb: ReplayBuffer) -> None:
    table = rb._engine.chronicle._table  # type: ignore[union-attr]
    assert table is not None
    table.note(Run(0, 1, 16), None)


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[ReplayBuffer], None]]] = {
    "order": (lambda: {"sampler": SamplerWithoutReplacement()}, spoil_order),
    "episodes of the pass": (lambda: {"sampler": SliceSamplerWithoutReplacement(slice_len=4)}, spoil_episodes),
    "priorities": (lambda: {"sampler": PrioritizedSampler(16, 0.6, 0.4)}, spoil_priorities),
    "queue": (lambda: {"sampler": QueueSampler()}, spoil_queue),
    "cursor": (dict, spoil_cursor),
    "counts": (dict, spoil_counts),
    "reservoir": (lambda: {"writer": ReservoirWriter()}, spoil_reservoir),
    "episodes": (lambda: {"sampler": SliceSampler(slice_len=4)}, spoil_form),
}


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_a_state_that_no_load_takes_is_not_committed(case: str, incremental: bool, tmp_path: Path) -> None:
    (options, spoil), path = CASES[case], tmp_path / "save"
    rb = make(**options())
    rb.extend(rows())
    rb.sample()
    rb.dumps(path, incremental=incremental)
    good = snapshot(rb)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    spoil(rb)
    with pytest.raises(CheckpointError, match="cannot be saved"):
        rb.dumps(path, incremental=incremental)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    other = make(**options())
    other.loads(path)
    same_state(snapshot(other), good)


def test_members_of_ensembles_are_checked(tmp_path: Path) -> None:
    both = ReplayBufferEnsemble(make(), make(sampler=SamplerWithoutReplacement()), batch_size=4)
    for rb in both.members:
        rb.extend(rows())
    both.sample()
    both.dumps(tmp_path / "save")
    spoil_order(both.members[1])
    with pytest.raises(CheckpointError, match="cannot be saved"):
        both.dumps(tmp_path / "save")
    other = ReplayBufferEnsemble(make(), make(sampler=SamplerWithoutReplacement()), batch_size=4)
    other.loads(tmp_path / "save")
    assert [len(rb) for rb in other.members] == [16, 16]


@pytest.mark.skipif(not AVAILABLE, reason="processes share buffers with the compiled part, on Linux")
def test_shared_buffers_are_checked(tmp_path: Path) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(16), sampler=PrioritizedSampler(16, 0.6, 0.4), batch_size=4, shared=True
    )
    rb.extend(rows())
    rb.dumps(tmp_path / "save")
    rb.sampler._ledger._raw[3] = -1.0  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "save")
    other = ReplayBuffer(storage=LazyTensorStorage(16), sampler=PrioritizedSampler(16, 0.6, 0.4), batch_size=4)
    other.loads(tmp_path / "save")
    assert len(other) == 16


def test_objects_and_ranks_are_saved_as_before(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    rb.extend(["a", 1, None, 2.5, "b"])
    rb.dumps(tmp_path / "objects")
    other = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    other.loads(tmp_path / "objects")
    assert other[:] == rb[:]
    ranked = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("x"), batch_size=2)
    ranked.extend(TensorDict({"x": torch.arange(9.0)}, [9]))
    ranked.dumps(tmp_path / "ranked")
    again = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("x"), batch_size=2)
    again.loads(tmp_path / "ranked")
    assert torch.equal(again[:]["x"].sort().values, torch.arange(5.0, 9.0))
