"""Queries select trajectories as a walk over the rows does, and read only what they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass

from ostinato import (
    Episodes,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RewardScale,
    SliceSampler,
    TrajectoryPredicate,
    filter_trajectories,
    iter_trajectories,
    traj,
)
from ostinato.compat.torchrl import Trajectory
from ostinato.errors import KeyMissingError, KindError, SchemaError, UsageError

from .refusals import raises, refuses

LENGTHS = (3, 1, 4, 2, 5)


def rows(first: int = 0, *, ids: bool = True) -> TensorDict:
    """Trajectories of these lengths; rewards are 1, 2, ... within each."""
    number = torch.cat([torch.full((n,), first + i) for i, n in enumerate(LENGTHS)])
    step = torch.cat([torch.arange(n) for n in LENGTHS])
    ends = torch.cat([torch.arange(n) == n - 1 for n in LENGTHS])
    data: dict[str, Any] = {
        "obs": torch.stack([number, step], 1).float(),
        "next": {"reward": step.unsqueeze(1) + 1.0, "done": ends.unsqueeze(1)},
    }
    return TensorDict(data | ({"collector": {"traj_ids": number}} if ids else {}), [sum(LENGTHS)])


def names(found: list[Trajectory]) -> list[tuple[int, ...]]:
    """Number of the trajectory, first step and length of each."""
    return [(*map(int, one.obs[0]), one.length) for one in found]


def make(storage: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(10) if storage is None else storage, **options)


def test_a_trajectory_has_fields_as_attributes_and_can_be_indexed_and_stacked():
    data = rows()
    data["next", "obs"] = data["obs"] + 1
    one = Trajectory(data[:3])
    assert torch.equal(one.obs, data["obs"][:3]), "of two fields of a name, the one at the root"
    assert torch.equal(one["next", "reward"], one.get("reward"))
    assert (one.length, float(one.total_reward), one.get("unknown", 5)) == (3, 6, 5)
    assert (type(one[1:]), one[1:].length, one[1].batch_size) == (Trajectory, 2, torch.Size([]))
    both: Any = lazy_stack([one, one[1:]])
    assert (both[0].length, both[1].length) == (3, 2)
    raises(
        (lambda: one.unknown, AttributeError, "no entry 'unknown' in its data"),
        (lambda: Trajectory(TensorDict({}, [2, 3])), SchemaError, "single batch dimension"),
    )


# Others, and rings in the order of writing: `parity/test_queries.py`.
SELECTIONS: list[Any] = [
    (traj.length != 3, [1, 2, 3, 4]),
    (traj.reward.sum() == 10, [2]),
    (traj.reward.min() > 1, []),
    (traj[("collector", "traj_ids")].first() == 3, [3]),
    ((traj.reward != 2).all(), [1]),
    (~(traj.length > 3) & ~(traj.length == 1), [0, 3]),
    (lambda one: one.obs[0, 0] > 2, [3, 4]),
    # groups and predicates of functions get whole trajectories
    (TrajectoryPredicate(lambda one: one.get("next")["reward"].sum() > 14, keys=frozenset({"next"})), [4]),
    (TrajectoryPredicate(lambda one: one.reward.sum() > 14, keys=frozenset({"reward"})) & (traj.length > 1), [4]),
]


def test_expressions_select_trajectories_of_batches_and_of_buffers():
    data, rb = rows(), make(LazyTensorStorage(20))
    rb.extend(data)
    for predicate, chosen in SELECTIONS:
        assert [name[0] for name in names(filter_trajectories(data, predicate))] == chosen, predicate
        assert [name[0] for name in names(rb.query(predicate))] == chosen, predicate
    rb.query()[0].obs.zero_()  # a copy
    assert torch.equal(rb[:]["obs"], data["obs"])
    never = TrajectoryPredicate(lambda _: 1 / 0)  # the second of two is evaluated only if needed
    one = Trajectory(data[:3])
    assert not ((traj.length > 5) & never)(one)
    assert ((traj.length < 5) | never)(one)


def test_misuse():
    ambiguous = r"ambiguous as a trajectory filter. Call .any\(\) or .all\(\)"
    batch, without, rb, plain = rows(), TensorDict({"x": torch.zeros(3)}, [3]), make(), make()
    rb.extend(batch)
    plain.extend({"x": torch.zeros(3)})
    of_reward = TrajectoryPredicate(lambda one: one.obs.sum() > 14, keys=frozenset({"reward"}))
    refuses(
        {
            KindError: {
                r"combine predicates with & \| ~": lambda: (traj.length > 1) and (traj.length < 5),
                r"write \(a < x\) & \(x < b\)": lambda: 1 < traj.length < 5,
                ambiguous: lambda: filter_trajectories(batch, traj.reward > 1),
                "a traj expression or a function": lambda: filter_trajectories(batch, 3),  # type: ignore[arg-type]
                "expects a TensorDictBase": lambda: next(iter_trajectories({"episode": torch.zeros(3)})),
            },
            KeyMissingError: {
                "Key 'unknown' not found": lambda: filter_trajectories(batch, traj.unknown.sum() > 1),
                "trajectory_key 'nope' not found": (
                    lambda: next(iter_trajectories(batch, "nope")),
                    lambda: rb.query(trajectory_key="nope"),
                ),
                "Cannot split data into trajectories": (
                    lambda: next(iter_trajectories(without)),
                    plain.query,
                ),
                "Key 'nope' not found in trajectory": lambda: rb.query(traj.nope.sum() > 1),
            },
            AttributeError: {
                "_private": lambda: traj._private,
                "no entry 'obs'": lambda: rb.query(of_reward),
            },
            SchemaError: {
                "single batch dimension": lambda: next(iter_trajectories(TensorDict({}, [2, 3]))),
            },
            UsageError: {
                "a shared buffer cannot be queried": make(shared=True).query,
            },
        }
    )


def test_batches_are_split_by_signals_in_an_order_of_preference():
    data, rb = rows(), make()
    data["other"] = torch.arange(15) // 5
    assert list(iter_trajectories(data[:0])) == []
    assert [one.length for one in iter_trajectories(data)] == list(LENGTHS)
    assert [one.length for one in iter_trajectories(data, "other")] == [5, 5, 5]
    with pytest.warns(UserWarning, match="No trajectory id entry was found; splitting on .* .*next.*done"):
        assert [one.length for one in iter_trajectories(data.exclude("collector"))] == list(LENGTHS)
    root = TensorDict({"terminated": torch.tensor([True, False, False]), "x": torch.zeros(3)}, [3])
    with pytest.warns(UserWarning, match="No trajectory id"):
        assert [one.length for one in iter_trajectories(root)] == [1, 2]
    rb.extend(data[:6])
    assert [one.length for one in rb.query(trajectory_key="other")] == [5, 1]
    assert [one.length for one in rb.query(trajectory_key=("collector", "traj_ids"))] == [3, 1, 2]


def test_environments_follow_one_another():
    rb = make(LazyTensorStorage(8, ndim=2), sampler=SliceSampler(num_slices=2, traj_key="episode", strict_length=False))
    ids = torch.stack([torch.arange(7) // 2, torch.arange(7) // 3 + 10])  # [2 environments, 7 steps]
    rb.extend(TensorDict({"episode": ids, "obs": torch.stack([ids, torch.arange(7).expand(2, 7)], -1)}, [2, 7]))
    for _ in range(2):
        assert names(rb.query()) == [(1, 3, 1), (2, 4, 2), (3, 6, 1), (11, 3, 3), (12, 6, 1)]
        rb.set_sampler(RandomSampler())  # tracks no episodes


def test_ids_count_whatever_else_ends_episodes():
    """Interleaved ids and flags within an id: the trajectories do not depend on what the sampler tracks."""
    data = TensorDict(
        {
            "episode": torch.tensor([0, 0, 0, 1, 0, 1, 1, 1]),
            "obs": torch.stack([torch.zeros(8), torch.arange(8.0)], 1),
            "next": {"done": torch.tensor([0, 1, 0, 0, 0, 0, 1, 0]).bool()},
        },
        [8],
    )
    for sampler in (None, SliceSampler(num_slices=2), SliceSampler(num_slices=2, traj_key="episode")):
        rb = make(sampler=sampler)
        rb.extend(data)
        assert names(rb.query()) == [(0, 0, 3), (0, 3, 1), (0, 4, 1), (0, 5, 3)]
    masked = make(episodes=Episodes(traj_key="episode", mask_key="mask"))
    masked.extend(data[:3].set("mask", torch.tensor([True, False, True])))
    assert names(masked.query()) == [(0, 0, 3)]


class Doubles:
    """Doubles `next.reward`, says so, and counts its calls."""

    in_keys = (("next", "reward"),)
    out_keys = (("next", "reward"),)
    calls = 0

    def __call__(self, data: TensorDict) -> TensorDict:
        self.calls += 1
        return data.set(("next", "reward"), data["next", "reward"] * 2)


class Makes:
    """Writes a field that is not stored."""

    in_keys = ("obs",)
    out_keys = ("number",)

    def __call__(self, data: TensorDict) -> TensorDict:
        return data.set("number", data["obs"][:, 0])


def test_transforms_run_before_predicates():
    rb = make(LazyTensorStorage(20), transform=RewardScale(10.0, key=("next", "reward")))
    rb.extend(rows())
    assert names(rb.query(traj.reward.sum() > 100)) == [(4, 0, 5)]
    doubles = Doubles()
    rb = make(LazyTensorStorage(20), transform=doubles)
    rb.append_transform(Makes())
    rb.extend(rows())
    assert names(rb.query(traj.length > 4)) == [(4, 0, 5)]
    assert doubles.calls == 1  # for the result alone
    assert names(rb.query(traj.reward.sum() > 29)) == [(4, 0, 5)]
    found = rb.query(traj.number.max() == 2)
    assert (names(found), found[0].number.tolist()) == ([(2, 0, 4)], [2.0] * 4)
    assert rb.query()[0].reward.flatten().tolist() == [2.0, 4.0, 6.0]
    assert float(rb.storage[:]["next", "reward"][0]) == 1.0


@tensorclass
class Row:
    obs: torch.Tensor
    episode: torch.Tensor


def test_kinds_of_rows():
    values, ids = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 0, 1])
    make_row: Any = Row
    data = TensorDict({"obs": values, "episode": ids}, [3])
    data["name"] = ["a", "b", "c"]
    for given in ({"obs": values, "episode": ids}, make_row(obs=values, episode=ids, batch_size=[3]), data):
        rb = make()
        rb.extend(given)
        assert [one.obs.tolist() for one in rb.query()] == [values[:2].tolist(), values[2:].tolist()]
    assert rb.query(lambda one: one.length == 2)[0].get("name").tolist() == ["a", "b"]
    assert len(make().query()) == 0
    for storage, rows_given, message in (
        (LazyTensorStorage(10), values, "requires a tensordict-backed storage"),
        (ListStorage(10), [1, 2], "requires a tensordict-backed storage"),
        (ListStorage(10), [data, data], "single-transition"),
    ):
        rb = make(storage)
        rb.extend(rows_given)
        with pytest.raises(KindError, match=message):
            rb.query()
