"""The buffer for LeRobot, compared with a log of what was added."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.compat.lerobot import ReplayBuffer, random_shift

CAMERA, PLACE = "observation.images.top", "observation.state"
KINDS = ("on", "on", "on", "done", "late", "left out")
"""What may follow a transition: the next one, the end of the episode, a time limit, or one that is not added."""


def show(serial: int) -> dict[str, torch.Tensor]:
    image = torch.full((1, 3, 4, 4), serial % 256, dtype=torch.uint8, device="cpu")
    return {CAMERA: image, PLACE: torch.tensor([[serial, -serial]], dtype=torch.float64, device="cpu")}


def fill(buffer: Any, kinds: list[str]) -> dict[int, tuple[int, bool, bool]]:
    """Add transitions; return the state after each one, and its flags, by its state."""
    log, now = {}, 0
    for kind in kinds:
        log[now] = now + 1, kind == "done", kind == "late"
        action = torch.tensor([[now]], device="cpu")
        buffer.add(show(now), action, now / 2, show(now + 1), kind == "done", kind == "late", {"cost": now})
        now += 1 if kind == "on" else 2
    return log


def check(batch: Any, log: dict[int, tuple[int, bool, bool]], rows: int) -> None:
    now = batch["state"][PLACE][:, 0].int().tolist()
    assert set(now) <= set(list(log)[-rows:])
    for i, serial in enumerate(now):
        after, done, late = log[serial]
        for name, place in (("state", serial), ("next_state", after)):
            assert all(torch.equal(batch[name][key][i], show(place)[key][0].float()) for key in (CAMERA, PLACE))
        found = [batch[key][i].item() for key in ("action", "reward", "done", "truncated")]
        assert found == [serial, serial / 2, done, late]
        assert batch["complementary_info"]["cost"][i] == serial


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=20))
def test_each_row_has_the_state_that_came_after_it(kinds):
    buffer = ReplayBuffer(6, "cpu", optimize_memory=True)
    log = fill(buffer, kinds)
    assert (len(buffer), buffer.size, buffer.position) == (min(len(kinds), 6),) * 2 + (len(kinds) % 6,)
    check(buffer.sample(64), log, 6)


@pytest.mark.parametrize("ahead", [True, False])
def test_iterators_and_checkpoints_go_on(tmp_path, *, ahead):
    buffer, again = ReplayBuffer(6, "cpu"), ReplayBuffer(6, "cpu")
    log = fill(buffer, [*KINDS] * 2)
    batches = buffer.get_iterator(5, async_prefetch=ahead)
    for _ in range(4):
        check(next(batches), log, 6)
    batches.close()  # type: ignore[attr-defined]
    buffer.dumps(tmp_path / "rows")
    again.loads(tmp_path / "rows")
    check(again.sample(6), log, 6)
    again.add(show(1), torch.ones(1, 1, device="cpu"), 1.0, show(2), done=False, truncated=False)
    assert again._rows["info", "cost"].isnan().sum() == 1


def test_datasets_become_transitions_that_end_with_their_episodes():
    frames = [
        {PLACE: show(i)[PLACE][0].float(), "action": torch.tensor([i], device="cpu"), "episode_index": i // 3,
         "next.reward": torch.tensor([i / 2], device="cpu"), "next.done": torch.tensor([i == 2], device="cpu"),
         "complementary_info.cost": torch.tensor([i], device="cpu")} for i in range(6)
    ]  # fmt: skip
    buffer = ReplayBuffer.from_lerobot_dataset(frames, "cpu", [PLACE])
    batch = buffer.sample(64)
    for now, after, done, late in zip(
        batch["state"][PLACE][:, 0], batch["next_state"][PLACE][:, 0], batch["done"], batch["truncated"], strict=True
    ):
        assert (after - now, done, late) == (now % 3 != 2, now == 2, now == 5)
    for options in ({"state_keys": None}, {"state_keys": [PLACE], "capacity": 5}):
        with pytest.raises(ValueError):
            ReplayBuffer.from_lerobot_dataset(frames, "cpu", **options)


def test_transitions_are_written_to_a_dataset_the_oldest_first(monkeypatch):
    module = MagicMock()
    monkeypatch.setitem(sys.modules, "lerobot.datasets", module)
    buffer = ReplayBuffer(3, "cpu")
    fill(buffer, ["done", "on", "late", "on"])
    written = buffer.to_lerobot_dataset("name")
    calls = [call for call in written.mock_calls if call[0] in {"add_frame", "save_episode"}]
    assert [int(call.args[0][PLACE][0]) if call.args else "end" for call in calls] == [2, 3, "end", 5, "end"]
    frame = calls[0].args[0]
    assert frame[CAMERA].dtype is torch.uint8
    features = module.LeRobotDataset.create.call_args.kwargs["features"]
    assert {key: features[key]["dtype"] for key in (CAMERA, PLACE, "next.reward", "next.done")} == {
        CAMERA: "image", PLACE: "float32", "next.reward": "float32", "next.done": "bool",
    }  # fmt: skip


def test_images_may_be_stored_as_bytes_and_are_shifted():
    values = torch.rand(1, 3, 8, 8, device="cpu").mul(255).round() / 255
    buffer = ReplayBuffer(4, "cpu", use_drq=False, image_dtype=torch.uint8)
    buffer.add({CAMERA: values}, values, 0, {CAMERA: values}, done=True, truncated=False)
    assert buffer._rows["state", CAMERA].dtype is torch.uint8
    assert torch.equal(buffer.sample(1)["next_state"][CAMERA], values)
    shifted = random_shift(values.expand(90, 3, 8, 8), pad=1)
    wanted = {image[0, 4, 4].item() for image in shifted}
    assert wanted == set(values[0, 0, 3:6, 3:6].flatten().tolist())


def test_wrong_calls_raise_what_lerobot_raises():
    buffer, one = ReplayBuffer(4, "cpu"), torch.ones(1, 1, device="cpu")
    for call in (partial(buffer.sample, 1), partial(next, buffer.get_iterator(2))):
        with pytest.raises(RuntimeError):
            call()
    add = partial(buffer.add, {PLACE: one}, one, 0.0, done=False, truncated=False)
    with pytest.raises(KeyError, match="next_state"):
        add(next_state={})
    info: Any = {"x": "text"}
    for wrong in (
        partial(ReplayBuffer, 0), partial(ReplayBuffer, 1, image_dtype=torch.int8),
        partial(buffer.to_lerobot_dataset, "name"), partial(add, next_state={PLACE: one}, complementary_info=info),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            wrong()
