"""The flat layout of episodes: shapes, values and round trips of TorchRL's hooks and of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ostinato

from ..unit.storages.test_checkpointers import steps as rows_of
from ._script import Library, both, raw

if TYPE_CHECKING:
    from tensordict import TensorDict


def episodes(steps: int, lanes: int, written: int) -> TensorDict:
    """Rows as a ring `[steps, lanes]` holds them after `written` steps of episodes in each lane."""
    rows = rows_of(0, written, lanes)
    rows["next", "reward"] = rows["next", "reward"].real  # TorchRL maps no complex numbers
    for flags in (rows, rows["next"]):
        flags["terminated"] = flags["done"].clone()
    held = torch.zeros_like(rows[:1]).expand(steps, lanes).clone()
    for step in range(written):
        held[step % steps] = rows[step]
    return held


def hooked(lib: Any, name: str, steps: int, written: int) -> tuple[Any, slice]:
    """A hook that knows how far the ring is written, and the rows present."""
    full = written >= steps
    hook = getattr(raw(lib), name)()
    hook.shift, hook.is_full = (written % steps or steps) if full else written, full
    return hook, slice(None) if full else slice(written)


SIZES = pytest.mark.parametrize(
    ("steps", "lanes", "written"), [(1, 1, 1), (6, 1, 6), (6, 1, 13), (5, 3, 2), (5, 3, 12)]
)


@SIZES
@both
def test_layout_and_back(lib, note, steps, lanes, written):
    rows = episodes(steps, lanes, written)
    rows = rows[:, 0] if lanes == 1 else rows
    hook, present = hooked(lib, "TED2Flat", steps, written)
    flat = hook(rows.clone())
    note([flat.batch_size, {str(key): flat.get(key) for key in sorted(flat.keys(True, True), key=str)}])
    note([tuple(flat.get_non_tensor("_storage_shape")), *map(flat.get_non_tensor, ("shift", "is_full"))])
    at_the_end = hook.is_full and hook.shift == steps  # TorchRL cannot write into rows then: it copies an empty part
    back = raw(lib).Flat2TED
    if lanes == 1 or not at_the_end:
        note(back()(flat)[present])
    if not at_the_end:
        note(back()(flat, out=torch.zeros_like(rows))[present])


@SIZES
def test_nested_layout(steps, lanes, written, tmp_path):
    """The items of nested tensors are those of TorchRL, and the rows come back."""
    rows = episodes(steps, lanes, written)
    rows = rows[:, 0] if lanes == 1 else rows
    found = []
    for name in ("torchrl", "ostinato"):
        hook, present = hooked(Library(name), "TED2Nested", steps, written)
        nested = hook(rows.clone(), path=tmp_path / name if lanes > 1 else None)
        leaves = {key: value.unbind(0) for key, value in nested.items(True, True) if value.is_nested}
        found.append((nested.batch_size, {key: [item.clone() for item in items] for key, items in leaves.items()}))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    for made in (nested, ostinato.H5Combine()(ostinato.H5Split()(nested))):
        assert (ostinato.Nested2TED()(made)[present] == rows[present]).all()
