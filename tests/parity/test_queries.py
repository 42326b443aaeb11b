"""Queries and boundaries: the trajectories that TorchRL finds, in rings before and after they are full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torchrl.data as theirs
from tensordict import TensorDict
from torchrl.data.replay_buffers.query import traj as their_traj

import ostinato

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


def found(lib: Any, t: Any, storage: Any, data: TensorDict, sampler: Any, dim: int) -> list[list[Any]]:
    """The trajectories of a buffer for each predicate, as dicts."""
    rb = lib.ReplayBuffer(storage=storage(lib), batch_size=4, **({} if sampler is None else {"sampler": sampler(lib)}))
    for chunk in data.split(4, dim=dim):
        rb.extend(chunk)
    made = [rb.query(), *(rb.query(make(t)) for make in PREDICATES)]
    opaque = [rb.query(lambda one, make=make: make(t)(one)) for make in PREDICATES]
    assert [len(one) for one in opaque] == [len(one) for one in made[1:]]
    return [[one.data.contiguous().to_dict() for one in chosen] for chosen in made]


def check(storage: Any, data: TensorDict, sampler: Any = None, dim: int = 0) -> None:
    expected = found(theirs, their_traj, storage, data, sampler, dim)
    torch.testing.assert_close(found(ostinato, ostinato.traj, storage, data, sampler, dim), expected, rtol=0, atol=0)
    assert expected[0]


SIGNALS: list[tuple[Any, str]] = [
    ("episode", ""),
    ("traj_ids", "next"),
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
def test_rings(storage: str, ids: Any, flags: str, steps: int) -> None:
    data = episodes(steps, steps, ids, flags)
    check(lambda lib: getattr(lib, storage)(10), data)
    if storage == "LazyTensorStorage":  # with a table of episodes
        keys = (
            {"traj_key": ids} if ids is not None else {"end_key": "done" if flags == "root" else ("next", "truncated")}
        )
        check(lambda lib: lib.LazyTensorStorage(10), data, lambda lib: lib.SliceSampler(num_slices=2, **keys))


@pytest.mark.filterwarnings("ignore:No trajectory id")
def test_difference_a_full_list_storage() -> None:
    """TorchRL takes the oldest rows for the continuation of the newest trajectory; see docs/compat/torchrl.md."""
    data = TensorDict({"n": torch.arange(14), "done": torch.arange(14) % 4 == 3}, [14])
    got = []
    for lib in (theirs, ostinato):
        rb = lib.ReplayBuffer(storage=lib.ListStorage(10))
        rb.extend(data[:10])
        rb.extend(data[10:])
        got.append([one.n.tolist() for one in rb.query()])
    assert [12, 13, 4, 5, 6, 7] in got[0]
    assert got[1] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
