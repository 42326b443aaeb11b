"""Trajectories: which rows belong together, which values raise, what is copied, what is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trajectories.rollouts import (
    add,
    check_batch,
    rollout,
    saving,
    serials,
    small,
)

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.errors import (
    KindError,
    OptionError,
    SchemaError,
)


def filled(*trajectories: Any, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    buffer.add_trajectories(list(trajectories))
    return buffer


def test_a_last_bootstrap_row_beside_several_epochs():
    trajectory = rollout(0, 6, 2, epochs=2, prev_values=torch.cat([serials(0, 6, 2), torch.full((1, 2, 1), -1.0)]))
    check_batch(filled(trajectory).sample(50))


WRONG: list[tuple[type[Exception], dict[str, Any]]] = [
    (SchemaError, {"dones": torch.zeros(10, 2, 1).bool()}),
    (SchemaError, {"actions": torch.zeros(7, 2, 3)}),
    (SchemaError, {"curr_obs": {"states": torch.zeros(6)}}),
    (SchemaError, {"prev_logprobs": None, "rewards": None}),
    (SchemaError, {"prev_logprobs": torch.zeros(0, 2)}),
    (KindError, {"actions": [1, 2]}),
    *((KindError, {"curr_obs": bad}) for bad in (torch.zeros(6, 2), {"task": object()}, {1: torch.zeros(6, 2)})),
    (KindError, {"rewards": torch.zeros(6, 2).to_sparse()}),
    (KindError, {"max_episode_length": -1}),
    *((OptionError, {"model_weights_id": bad}) for bad in ("../../out", "x" * 300)),
    (OptionError, {"extra": {"rewards": torch.zeros(6, 2)}}),
]


def test_what_is_no_trajectory_raises_and_nothing_is_added():
    buffer = TrajectoryReplayBuffer()
    for error, change in WRONG:
        with pytest.raises(error, match=list(change)[-1]):
            buffer.add_trajectories([rollout(0), rollout(1, **change)])
    values: list[Any] = [rollout(0), {"rewards": torch.zeros(2, 2)}, 3, [3]]
    for value in values:
        with pytest.raises(KindError):
            buffer.add_trajectories(value)
    assert (len(buffer), buffer.total_samples, buffer.get_stats()["trajectory_counter"]) == (0, 0, 0)


def test_a_missing_weights_id_is_generated_and_others_are_kept():
    buffer = filled(rollout(0), rollout(1, model_weights_id="run:7 · best"), rollout(2, model_weights_id=""))
    ids = [buffer.load_trajectory(number).model_weights_id for number in range(3)]
    assert ids[1] == "run:7 · best"
    for made in (ids[0], ids[2]):
        uuid, _, updates = str(made).rpartition("_")
        assert updates == "0"
        assert [len(part) for part in uuid.split("-")] == [8, 4, 4, 4, 12]
    assert ids[0] != ids[2]


def test_the_buffer_owns_its_rows():
    trajectory = rollout(1)
    buffer = filled(trajectory)
    for value in (trajectory.rewards, trajectory.actions, *trajectory.next_obs.values()):
        assert isinstance(value, torch.Tensor)
        value.fill_(-5)
    trajectory.curr_obs["task"][0] = "changed"
    check_batch(buffer.sample(40))
    loaded = buffer.load_trajectory(0)
    assert loaded.curr_obs["task"] == ["pick", "place"]
    assert loaded.rewards is not None
    loaded.rewards.fill_(-5)
    check_batch(buffer.sample(40))


def test_strided_rows_conjugates_and_arrays_are_stored_as_their_values():
    serial = serials(2, 6, 2)
    wide = torch.stack([serial, -serial], dim=-1)[..., 0]
    assert not wide.is_contiguous()
    spectrum = torch.complex(serial, serial)
    swapped = serial.numpy().astype(">f4")
    swapped.flags.writeable = False
    buffer = filled(
        Trajectory(
            rewards=wide,
            actions=serial.transpose(0, 1).contiguous().transpose(0, 1),
            forward_inputs={"array": swapped, "spectrum": spectrum.conj(), "name": np.array(["a", "b"])},
        ),
        enable_cache=False,
    )
    buffer.flush()
    batch = buffer.sample(30)
    assert torch.equal(batch["rewards"], batch["actions"])
    assert torch.equal(batch["forward_inputs"]["array"], batch["rewards"])
    assert torch.equal(batch["forward_inputs"]["spectrum"].imag, -batch["rewards"])
    assert buffer.load_trajectory(0).forward_inputs["name"] == ["a", "b"]


def test_extra_fields_are_kept_and_sampled_if_they_have_rows():
    serial = serials(0, 6, 2)
    buffer = filled(
        rollout(0, extra={"bonus": serial.clone(), "camera": torch.eye(3), "notes": {"by": "me"}}), enable_cache=False
    )
    buffer.flush()
    batch = buffer.sample(20)
    assert torch.equal(batch["bonus"], batch["rewards"])
    assert not {"camera", "notes", "max_episode_length", "model_weights_id"} & set(batch)
    extra = buffer.load_trajectory(0).extra
    assert torch.equal(extra["camera"], torch.eye(3))
    assert extra["notes"] == {"by": "me"}


def test_dicts_and_other_dataclasses_are_accepted():
    @dataclass
    class Foreign:
        rewards: torch.Tensor
        loss_mask: torch.Tensor
        curr_obs: dict[str, Any]
        actions: torch.Tensor | None = None

    serial = serials(4, 3, 2)
    buffer = filled({"rewards": serial, "loss_mask": serial}, Foreign(serial + 6, serial + 6, {}))
    batch = buffer.sample(50)
    assert set(batch) == {"rewards", "loss_mask"}
    assert torch.equal(batch["rewards"], batch["loss_mask"])
    assert len(batch["rewards"].unique()) == 12


def test_the_defaults_are_those_of_rlinf():
    first, second = Trajectory(), Trajectory()
    first.curr_obs["states"] = torch.zeros(2, 1, 3)
    assert (second.max_episode_length, second.model_weights_id) == (0, "")
    assert [second.forward_inputs, second.curr_obs, second.next_obs, second.extra] == [{}] * 4
    tensors = ("actions", "rewards", "dones", "prev_logprobs", "prev_values", "versions", "intervene_flags")
    assert all(getattr(second, name) is None for name in tensors)
    for given in (second.to_dict(), {"curr_obs": None, "model_weights_id": None}):
        assert Trajectory.from_dict(given).to_dict() == second.to_dict()
    buffer = filled(Trajectory(rewards=serials(0, 3, 2), model_weights_id=None, max_episode_length=np.int64(7)))  # type: ignore[arg-type]
    assert set(buffer.sample(2)) == {"rewards"}
    back = buffer.load_trajectory(0)
    assert (back.actions, back.curr_obs, type(back.max_episode_length)) == (None, {}, int)
    assert set(back.to_dict()) == {"rewards", "max_episode_length", "model_weights_id"}


def test_values_that_cannot_be_saved_raise_before_ids_are_given(tmp_path):
    states = torch.zeros(4, 2)
    cases: list[dict[str, Any]] = [
        {"actions": states.to(torch.complex128)},
        {"extra": {"curr_obs.s": states}, "curr_obs": {"s": states}},
        {"extra": {"__metadata__": states}},
        {"extra": {"a\ud800": states}},
        {"curr_obs": {"text": ["\ud800"]}},
        {"actions": np.zeros((4, 2), dtype=np.longdouble)},
    ]
    with saving(tmp_path / "a", form="safetensors") as buffer:
        for more in cases:
            with pytest.raises(KindError, match="trajectory 1"):
                buffer.add_trajectories([small(), small(**more)])
        assert buffer.get_stats()["trajectory_counter"] == len(buffer) == 0
        assert add(buffer, small()) == [0]
