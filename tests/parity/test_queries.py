"""Queries and boundaries: the trajectories that TorchRL finds, in rings before and after they are full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Library

if TYPE_CHECKING:
    from collections.abc import Callable

PREDICATES: list[Callable[[Any], Any]] = [
    lambda t: t.length > 2,
    lambda t: t.reward.sum() > 1,
    lambda t: (t.length >= 2) & ~(t.reward > 0.8).any(),
    lambda t: (t.obs.mean() > 3) | (t["next", "reward"].last() < 0.5),
    lambda t: t.total_reward >= 1.0,
    lambda t: (t.reward.max() != 0.5) & (t.reward.min() < 0.3) & (t.obs >= 0).all(),
]


def episodes(steps: int, seed: int, ids: Any, flags: str) -> TensorDict:
    """Random trajectories with ids or flags."""
    rng = torch.Generator().manual_seed(seed)
    ends = torch.rand(steps, generator=rng) < 0.3
    number = ends.cumsum(0) - ends.long()
    data: dict[Any, Any] = {
        "obs": torch.arange(steps * 2.0).reshape(steps, 2) + 100 * seed,
        "next": {"reward": torch.rand(steps, 1, generator=rng)},
    }
    if ids is not None:
        data |= {ids: number} if isinstance(ids, str) else {ids[0]: {ids[1]: number}}
    if flags == "next":
        data["next"] |= {"terminated": (ends & (number % 2 == 0)).unsqueeze(-1), "truncated": ends.unsqueeze(-1)}
    elif flags == "root":
        data["done"] = ends
    return TensorDict(data, [steps])


def found(lib: Any, storage: str, data: TensorDict, **sampler: Any) -> list[list[Any]]:
    """The trajectories of a buffer for each predicate, as dicts."""
    options = {"sampler": lib.SliceSampler(num_slices=2, **sampler)} if sampler else {}
    rb = lib.ReplayBuffer(storage=getattr(lib, storage)(10), batch_size=4, **options)
    for chunk in data.split(4):
        rb.extend(chunk)
    made = [rb.query(), *(rb.query(make(lib.traj)) for make in PREDICATES)]
    opaque = [rb.query(lambda one, make=make: make(lib.traj)(one)) for make in PREDICATES]
    assert [len(one) for one in opaque] == [len(one) for one in made[1:]]
    assert made[0]
    return [[one.data.contiguous().to_dict() for one in chosen] for chosen in made]


SIGNALS: list[tuple[Any, str]] = [
    ("episode", ""),
    (("collector", "traj_ids"), "next"),
    (None, "next"),
    (None, "root"),
]


@pytest.mark.filterwarnings("ignore:No trajectory id")
@pytest.mark.parametrize(
    ("storage", "steps"),
    [*(("LazyTensorStorage", steps) for steps in (1, 9, 10, 27)), ("LazyMemmapStorage", 13), ("ListStorage", 9)],
)
@pytest.mark.parametrize(("ids", "flags"), SIGNALS)
def test_rings(storage, ids, flags, steps):
    data = episodes(steps, steps, ids, flags)
    keys = {"traj_key": ids} if ids is not None else {"end_key": "done" if flags == "root" else ("next", "truncated")}
    for sampler in ({}, keys)[: 2 if storage == "LazyTensorStorage" else 1]:  # with a table of episodes
        theirs, ours = (found(Library(name), storage, data, **sampler) for name in ("torchrl", "ostinato"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
