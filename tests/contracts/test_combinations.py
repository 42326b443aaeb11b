"""Every combination of sampler, unit, storage and writer keeps its law and resumes, or is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato.errors import OstinatoError
from ostinato.testing.views import bits
from tests.combinations import CELLS, COUNTING, LANES, Cell, build, empty, page, spread
from tests.registry import CAPACITY, LENGTH, STORAGES, WRITERS, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY = 5
"""One in so many combinations is tried, with each pair of parts; `make test-all` tries all of them."""

_TEACHES = {
    "order": "order in which they came|picks slots",
    "stream": "one-dimensional",
    "slots": "1-dimensional|ring order|requires a writer",
    "fields": "no fields|cannot read single fields",
    "slices": "leave one of them out",
    "envs": "ndim=2",
    "ranks": "cannot rank",
    "counts": "leave out sample_unit",
    "ring": "ring order",
}


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", STORAGES)
def test_every_combination_keeps_its_law_and_resumes_or_is_refused(storage, every, tmp_path):
    for number, cell in enumerate(spread([cell for cell in CELLS if cell.storage == storage], every)):
        if cell.refusal is None:
            _holds(cell)
            if number % 2 == 0:
                ahead = number % 6 == 0 and cell.sampler not in {*COUNTING, "StackSampler", "HeapSampler"}
                _resumes(cell, 2 if ahead else None, tmp_path / str(number))
        else:
            with pytest.raises(OstinatoError, match=_TEACHES[cell.refusal]):
                build(cell).sample()


def _resumes(cell: Cell, ahead: int | None, path: Path) -> None:
    """Check that a buffer that loads a checkpoint draws what the saved one draws, also after more rows."""
    buffer, other = build(cell, prefetch=ahead, batch_size=6), empty(cell, prefetch=ahead, batch_size=6)
    buffer.sample()
    buffer.dumps(path)
    if not buffer.writer.mutable:
        other.set_writer(WRITERS[cell.writer](CAPACITY))
    other.loads(path)
    assert list(_goes_on(other, cell)) == list(_goes_on(buffer, cell)), cell


def _goes_on(buffer: Any, cell: Cell) -> Iterator[Any]:
    for start in (100, 102):
        batch, info = buffer.sample(return_info=True)
        if buffer.sampler.prioritized:
            buffer.update_priority(info, (batch["t"] % 5 + 1).double())
        yield bits(dict(batch.items()), ("index_generation", "anchor_generation"))
        if buffer.writer.mutable:
            buffer.extend(rows(2, start, LANES if "ndim=2" in cell.storage else 1))
    yield len(buffer)


def _holds(cell: Cell) -> None:
    """Check batches: rows present alone, windows of one episode each, next observations that belong to them."""
    buffer = build(cell)
    present = set(buffer[:]["t"].reshape(-1).tolist())
    for _ in range(2):
        batch = buffer.sample()
        t, obs = batch["t"], batch["obs"]
        assert set(t.tolist()) <= present, cell
        tokens = batch["tokens"].values() if batch["tokens"].is_nested else batch["tokens"]
        assert torch.equal(tokens.reshape(-1, 2), t.reshape(-1, 1).expand(-1, 2)), cell
        frames = obs[:, -1] if cell.unit.endswith(("FrameStack", "DeltaTimestamps")) else obs
        assert torch.equal(frames.reshape(-1), t.float()), cell
        _check_next(cell, batch, 2 if "ndim=2" in cell.storage else 1)
        if "Slice" in cell.sampler or cell.unit == "Sequence, strict":
            _check_windows(batch["step"].view(-1, 3), cell)


def _check_next(cell: Cell, batch: object, lanes: int) -> None:
    t, after = batch["t"], batch["next", "obs"]  # type: ignore[index]
    newest = after[:, -1] if cell.unit.endswith("FrameStack") else after
    steps = batch["steps_to_next_obs"] if "NStep" in cell.unit else torch.ones_like(t)  # type: ignore[index]
    assert torch.equal(newest.reshape(-1), (t + steps * lanes).float()), cell


def _check_windows(steps: torch.Tensor, cell: Cell) -> None:
    assert bool((steps.diff(dim=1) == 1).all()), cell
    assert bool((steps[:, 0] // LENGTH == steps[:, -1] // LENGTH).all()), cell


def test_the_page_says_what_the_rules_say():
    found = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text()
    assert found == page(), "run: python -m tests.combinations > docs/combinations.md"
    headings = [line for line in found.splitlines() if line.startswith("#")]
    assert max(map(len, headings)) < 60, "a table of contents needs short headings"
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"all [{len(CELLS):,} combinations](docs/combinations.md)" in readme
