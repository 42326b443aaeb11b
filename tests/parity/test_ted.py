"""The flat layout of episodes: shapes, values and round trips of TorchRL's hooks and of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchrl.data.replay_buffers.utils as theirs
from tensordict import TensorDict

import ostinato

from ._script import Note, both

if TYPE_CHECKING:
    from pathlib import Path


def episodes(steps: int, lanes: int, written: int, seed: int = 0) -> TensorDict:
    """Rows as a ring `[steps, lanes]` holds them after `written` steps of random episodes in each lane."""
    rng = torch.Generator().manual_seed(seed)
    ends = torch.rand(written, lanes, generator=rng) < 0.3
    number = torch.arange(written).unsqueeze(1) + 100.0 * torch.arange(lanes)
    after = torch.where(ends, -number, number + 1)
    rows = TensorDict(
        {
            "obs": number.unsqueeze(-1).repeat(1, 1, 3),
            "info": {"id": number.long()},
            "next": {
                "obs": after.unsqueeze(-1).repeat(1, 1, 3),
                "reward": number.unsqueeze(-1) / 2,
                **{
                    name: (ends & (number % 2 == i)).unsqueeze(-1) for i, name in enumerate(("terminated", "truncated"))
                },
                "done": ends.unsqueeze(-1),
            },
            **{name: torch.zeros(written, lanes, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")},
        },
        [written, lanes],
    )
    held = torch.zeros_like(rows[:1]).expand(steps, lanes).clone()
    for step in range(written):
        held[step % steps] = rows[step]
    return held


SIZES = [(1, 1, 1), (6, 1, 6), (6, 1, 13), (5, 3, 2), (5, 3, 12)]


@pytest.mark.parametrize(("steps", "lanes", "written"), SIZES)
@both
def test_layout_and_back(lib: Any, note: Note, steps: int, lanes: int, written: int) -> None:
    one_dim = lanes == 1
    rows = episodes(steps, lanes, written)
    rows = rows[:, 0] if one_dim else rows
    full = written >= steps
    shift = (written % steps or steps) if full else written

    hook = lib.TED2Flat()
    hook.shift, hook.is_full = shift, full
    flat = hook(rows.clone())
    note("flat", lambda: {str(key): flat.get(key) for key in sorted(flat.keys(True, True), key=str)})
    note("batch", lambda: flat.batch_size)
    note("shift", lambda: flat.get_non_tensor("shift"))
    note("is_full", lambda: flat.get_non_tensor("is_full"))
    note("shape", lambda: tuple(flat.get_non_tensor("_storage_shape")))
    present = slice(None) if full else slice(shift)
    at_the_end = full and shift == steps  # TorchRL cannot write into rows then: it copies an empty part
    if one_dim or not at_the_end:
        note("back", lambda: lib.Flat2TED()(flat)[present].to_dict())
    out = torch.zeros_like(rows)
    if not at_the_end:
        note("back into", lambda: lib.Flat2TED()(flat, out=out)[present].to_dict())


@pytest.mark.parametrize(("steps", "lanes", "written"), SIZES)
def test_nested_layout(steps: int, lanes: int, written: int, tmp_path: Path) -> None:
    """The items of nested tensors are those of TorchRL, and the rows come back."""
    rows = episodes(steps, lanes, written)
    rows = rows[:, 0] if lanes == 1 else rows
    full = written >= steps
    shift = (written % steps or steps) if full else written
    found = []
    for lib in (theirs, ostinato):
        hook = lib.TED2Nested()
        hook.shift, hook.is_full = shift, full
        nested = hook(rows.clone(), path=tmp_path / lib.__name__ if lanes > 1 else None)
        items = {
            key: [item.clone() for item in value.unbind(0)]
            for key, value in nested.items(True, True)
            if value.is_nested
        }
        found.append((nested.batch_size, items))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    present = slice(None) if full else slice(shift)
    for made in (nested, ostinato.H5Combine()(ostinato.H5Split()(nested))):
        assert (ostinato.Nested2TED()(made)[present] == rows[present]).all()


@pytest.mark.parametrize(
    ("storage", "ndim", "steps"),
    [
        ("LazyTensorStorage", 1, 8),
        ("LazyTensorStorage", 1, 19),
        ("LazyMemmapStorage", 1, 4),
        ("LazyMemmapStorage", 2, 9),
        ("LazyTensorStorage", 2, 4),
    ],
)
@both
def test_through_a_checkpoint(lib: Any, note: Note, storage: str, ndim: int, steps: int, tmp_path: Path) -> None:
    lanes = 1 if ndim == 1 else 2
    rows = episodes(steps, lanes, steps)

    def make() -> Any:
        kept = getattr(lib, storage)(8 * lanes, ndim=ndim)
        rb = lib.ReplayBuffer(storage=kept, dim_extend=0, batch_size=2)
        kept.register_save_hook(lib.TED2Flat())
        rb.register_load_hook(lib.Flat2TED())
        return rb

    rb, other = make(), make()
    for start in range(0, steps, 3):
        part = rows[start : start + 3]
        rb.extend(part[:, 0] if ndim == 1 else part)
    (tmp_path / lib.name).mkdir()
    rb.dumps(tmp_path / lib.name / "saved")
    other.loads(tmp_path / lib.name / "saved")
    note("length", lambda: len(other))
    note("rows as they were", lambda: (rb[:] == other[:]).all())
    if steps >= 8:  # of a part-filled storage TorchRL loads the rows never written too
        note("rows", lambda: other[:].to_dict())
