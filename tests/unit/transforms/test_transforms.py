"""Transforms: what each does, in which direction, and that nothing is edited in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato.errors import KeyMissingError, KindError, OptionError
from ostinato.transforms import Cast, Exclude, Rename, RewardScale, Select, ToDevice

from ...registry import ring
from ...tags import at, buffer, fill

if TYPE_CHECKING:
    from collections.abc import Callable


def batch(kind: str = "dict") -> Any:
    data = {
        "obs": torch.ones(2, 3),
        "reward": torch.tensor([1.0, 2.0]),
        "next": {"obs": torch.zeros(2, 3), "done": torch.zeros(2)},
    }
    return data if kind == "dict" else TensorDict(data, [2])


def names(data: Any) -> set[Any]:
    if isinstance(data, dict):
        return {
            (k, *n) if isinstance(v, dict) else (k,)
            for k, v in data.items()
            for n in (names(v) if isinstance(v, dict) else [()])
        }
    return {(k,) if isinstance(k, str) else k for k in data.keys(include_nested=True, leaves_only=True)}


KINDS = ["dict", "tensordict"]


@pytest.mark.parametrize("kind", KINDS)
def test_fields_and_groups_are_selected_or_left_out(kind):
    assert names(Select("reward", ("next", "obs"))(batch(kind))) == {("reward",), ("next", "obs")}
    assert names(Select("next")(batch(kind))) == {("next", "obs"), ("next", "done")}
    assert type(Select("obs")(batch(kind))) is type(batch(kind))
    assert names(Exclude("obs", ("next", "done"))(batch(kind))) == {("reward",), ("next", "obs")}
    assert names(Exclude("next")(batch(kind))) == {("obs",), ("reward",)}
    lacking: list[Any] = [Select("nope"), Exclude("nope"), Rename({"nope": "x"}), RewardScale(2.0, key="nope")]
    for transform in (*lacking, Cast(torch.float64, "nope")):
        with pytest.raises(KeyMissingError):
            transform(batch(kind))
    with pytest.raises(OptionError):
        Select()
    with pytest.raises(KindError):
        Select("a")(torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_rename_moves_fields_and_groups(kind):
    out = Rename({"obs": "state", ("next", "obs"): ("next", "state")})(batch(kind))
    assert names(out) == {("state",), ("reward",), ("next", "state"), ("next", "done")}
    assert names(Rename({"next": "after"})(batch(kind))) == {("obs",), ("reward",), ("after", "obs"), ("after", "done")}
    moved = {("obs",), ("reward",), ("next_obs",), ("next", "done")}
    assert names(Rename({("next", "obs"): "next_obs"})(batch(kind))) == moved
    out = Rename({"obs": "reward", "reward": "obs"})(batch(kind))
    assert (out["reward"].shape, out["obs"].tolist()) == ((2, 3), [1.0, 2.0]), "names may be exchanged"
    with pytest.raises((OptionError, KeyError, ValueError)):  # two fields cannot have one name
        Rename({"obs": "reward"})(batch(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_are_scaled_when_read_and_stored_as_they_came(kind):
    rb = ring(5, transform=RewardScale(2.0, loc=1.0))
    rb.extend(batch(kind))
    assert rb[:]["reward"].tolist() == [3.0, 5.0]
    assert set(rb.sample(9)["reward"].tolist()) <= {3.0, 5.0}
    assert rb.storage["reward"].tolist() == [1.0, 2.0]
    assert rb[:]["reward"].tolist() == [3.0, 5.0], "scaled in place"


@pytest.mark.parametrize("kind", KINDS)
def test_casts_go_both_ways(kind):
    rb = ring(5, transform=Cast(torch.float32, "obs", stored=torch.uint8))
    rb.extend(batch(kind))
    row = {"obs": torch.full((3,), 200.0), "reward": torch.tensor(3.0), "next": at(batch()["next"], 0)}
    rb.add(row)
    rb[0] = {**row, "obs": torch.full((3,), 7.0)}
    assert rb.storage["obs"].dtype is torch.uint8
    assert rb[:]["obs"].dtype is rb.sample(4)["obs"].dtype is torch.float32
    assert rb[:]["obs"][:, 0].tolist() == [7.0, 1.0, 200.0]
    with pytest.raises(KeyError):
        rb.extend({"nothing": torch.zeros(2)})
    assert len(rb) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_devices_move_every_leaf(kind):
    out = ToDevice("meta")(batch(kind))
    assert out["next"]["obs"].device.type == "meta"
    assert type(out) is type(batch(kind))
    assert ToDevice("cpu")((torch.zeros(2), [torch.zeros(1)]))[1][0].shape == (1,)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_not_edited(kind):
    given, expected = batch(kind), batch(kind)
    transforms: list[Any] = [Select("obs"), Exclude("obs"), Rename({"obs": "x"}), RewardScale(3.0)]
    for transform in (*transforms, Cast(torch.float64, "obs")):
        transform(given)
        transform.inv(given)
        assert names(given) == names(expected)
        for key in ("obs", "reward"):
            assert torch.equal(given[key], expected[key])


# -- chains --------------------------------------------------------------------------------------------------


def test_transforms_are_appended_and_inserted():
    rb = buffer("packed", 5)
    fill(rb, range(3))
    order: list[str] = []

    def step(name: str) -> Callable[[Any], Any]:
        def note(data: Any) -> Any:
            order.append(name)
            return data

        return note

    assert rb.append_transform(step("b")) is rb
    assert rb.insert_transform(0, step("a")) is rb
    rb.insert_transform(2, step("c"))
    rb.insert_transform(-1, step("b2"))
    rb.sample(1)
    assert order == ["a", "b", "b2", "c"]
    assert len(rb.transform) == 4
    for wrong in (5, -5):
        with pytest.raises(OptionError, match=r"\[-4, 4\]"):
            rb.insert_transform(wrong, step("x"))


class Half(torch.nn.Module):
    """A callable with `forward` and no inverse."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data / 2


def test_plain_callables_may_run_at_writing_instead():
    rb = ring(5)
    rb.append_transform(lambda data: data * 2, invert=True)
    rb.extend(torch.arange(3.0))
    rb.add(torch.tensor(3.0))
    assert rb[:].tolist() == [0.0, 2.0, 4.0, 6.0]
    rb[0] = torch.tensor(5.0)
    assert rb[0] == 10.0
    rb.append_transform(Half(), invert=True)
    rb[0] = torch.tensor(5.0)
    assert rb[0] == 5.0
    with pytest.raises(OptionError, match="invert=True"):
        rb.append_transform(RewardScale(1.0), invert=True)


def test_modules_are_put_into_evaluation_mode():
    module = torch.nn.Dropout(0.9)
    rb = ring(5, transform=module)
    rb.extend(torch.ones(5))
    assert not module.training
    assert rb.sample(50).tolist() == [1.0] * 50
