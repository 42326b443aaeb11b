"""Single copies of observations: what users ask of them, what they cost, what is refused, what is saved."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Writer,
)
from ostinato.core.records import Picks, Request
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SchemaError, StorageMemoryError
from ostinato.storages import memory

from .single import Lanes, equal, poison_memory, stack

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring

pytestmark = pytest.mark.usefixtures("backend")


def transitions(ids: range | Tensor, ends: set[int] | None = None, width: int = 3) -> dict[str, Any]:
    """Rows of one environment: observation `i` leads to `i + 1`, or to `-i`, the final one, where an episode ends."""
    numbers = torch.as_tensor(list(ids)) if isinstance(ids, range) else ids
    over = torch.tensor([int(i) in (ends or set()) for i in numbers.view(-1)]).view(numbers.shape)
    after = torch.where(over, -numbers, numbers + 1)
    return {
        "obs": numbers[..., None].expand(*numbers.shape, width).float(),
        "reward": numbers.float(),
        "next": {
            "obs": after[..., None].expand(*numbers.shape, width).float(),
            "reward": numbers.float() / 2,
            "truncated": over,
        },
    }


def single(capacity: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity, single_copy=True, **options), batch_size=4, dim_extend=0)


def nexts(rb: ReplayBuffer) -> list[float]:
    return [float(x) for x in rb[:]["next"]["obs"][..., 0].reshape(-1)]


# -- what peers got wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", range(9))
def test_a_truncated_episode_keeps_its_true_final_observation(end: int) -> None:
    """Not the reset observation of the episode that follows."""
    rb = single(9)
    rb.extend(transitions(range(1, 10), {end + 1}))
    assert nexts(rb) == [-(i + 1) if i == end else i + 2 for i in range(9)]
    for number in range(10, 10 + end):
        rb.extend(transitions(range(number, number + 1)))
    assert float(rb[end]["next"]["obs"][0]) == -(end + 1)


def test_the_newest_row_of_a_full_ring_is_not_paired_with_the_oldest() -> None:
    rb = single(5)
    for step in range(23):
        rb.extend(transitions(range(step, step + 1)))
        newest = step % 5
        assert float(rb[newest]["next"]["obs"][0]) == step + 1
        assert sorted(nexts(rb)) == [i + 1 for i in range(max(0, step - 4), step + 1)]


@pytest.mark.parametrize("packed", [True, False])
def test_the_newest_row_never_reads_memory_that_was_not_written(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch)
    rb = single(50, packed=packed)
    for step in range(49):
        rb.extend(transitions(range(step, step + 1)))
        for batch in (rb[:], rb.sample(64)):
            assert not bool(batch["next"]["obs"].isnan().any()), f"after {step + 1} rows"


# -- what they cost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "capacity"),
    [
        ((250,), torch.float32, 5000),
        ((84, 84, 4), torch.uint8, 600),
        ((17,), torch.float32, 20000),
        ((64,), torch.float64, 5000),
    ],
)
@pytest.mark.parametrize("lanes", [0, 4])
def test_bytes_of_a_transition(shape: tuple[int, ...], dtype: torch.dtype, capacity: int, lanes: int) -> None:
    """One observation, the scalars and the final observations: 5 % more for rows of 1 KB and above, else 8 bytes."""
    count = 4 * (capacity // 3)
    ids = torch.arange(count)
    grid = ids.view(-1, lanes) if lanes else ids
    step = ids.view(-1, lanes)[:, 0] // lanes if lanes else ids
    obs = (ids % 251).view(-1, *[1] * len(shape)).expand(-1, *shape).to(dtype)
    over = (step % 100 == 99)[:, None].expand(-1, max(lanes, 1)).reshape(-1)
    following = obs.roll(-max(lanes, 1), 0).clone()
    following[over] = 7
    rows = {
        "obs": obs.reshape(*grid.shape, *shape),
        "next_obs": following.reshape(*grid.shape, *shape),
        "reward": torch.zeros(grid.shape),
        "done": over.view(grid.shape),
        "terminated": over.view(grid.shape),
        "flags": torch.zeros(*grid.shape, 2, dtype=torch.bool),
    }
    storage = LazyTensorStorage(capacity, single_copy=True, ndim=2 if lanes else 1)
    rb = ReplayBuffer(storage=storage, dim_extend=0)
    for start in range(0, len(grid), 40):
        rb.extend({key: value[start : start + 40] for key, value in rows.items()})
    observation = obs[0].nbytes
    finals = (capacity // 100 + 2 * max(lanes, 1)) * observation
    needed = observation + 8 + finals / capacity
    found = storage.nbytes / capacity
    assert found <= (1.05 * needed if observation >= 1000 else needed + 8), f"{found} bytes, {needed} needed"


def test_side_rows_are_given_back() -> None:
    """Rows out of line are stored apart; when they are overwritten their room is used again."""
    rb = single(64)
    rb.extend(transitions(range(1, 65), set(range(1, 65, 2))))
    full = rb.storage.nbytes
    for turn in range(20):
        rb.extend(transitions(range(1 + turn, 65 + turn), set(range(1, 65, 2))))
    assert rb.storage.nbytes <= full + 64 * 12


# -- which fields -------------------------------------------------------------------------------------------------


def test_pairs_are_found_by_their_names() -> None:
    rows = {
        "obs": torch.zeros(4, 2),
        "next_obs": torch.zeros(4, 2),
        "state": torch.zeros(4, 3),
        "next_state": torch.zeros(4, 4),
        "reward": torch.zeros(4),
        "done": torch.zeros(4, dtype=torch.bool),
        "agent": {"pos": torch.zeros(4, 5)},
        "next": {
            "reward": torch.zeros(4),
            "done": torch.zeros(4, dtype=torch.bool),
            "agent": {"pos": torch.zeros(4, 5)},
        },
        "next_done": torch.zeros(4, dtype=torch.bool),
    }
    storage = LazyTensorStorage(4, single_copy=True)
    ReplayBuffer(storage=storage).extend(rows)
    state = storage.state_dict()
    paths = [leaf.path for leaf in storage.schema.leaves]  # type: ignore[union-attr]
    assert {(paths[i], paths[j]) for i, j in state["single_copy"]} == {
        (("next_obs",), ("obs",)),
        (("next", "agent", "pos"), ("agent", "pos")),
    }


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        (True, OptionError, r"finds no field.*'obs': float32\[2\].*name the pairs"),
        ({"next_obs": "obs"}, OptionError, "names the field 'next_obs', but the fields are 'obs', 'later', 'none'"),
        ({"later": "obs"}, SchemaError, r"one dtype and shape, got 'later': float64\[2\] and 'obs': float32\[2\]"),
        ({"none2": "none"}, OptionError, "take memory"),
    ],
)
def test_pairs_that_do_not_exist_are_refused(option: Any, error: type[Exception], message: str) -> None:
    storage = LazyTensorStorage(4, single_copy=option)
    rb = ReplayBuffer(storage=storage)
    rows = {"obs": torch.zeros(3, 2), "later": torch.zeros(3, 2, dtype=torch.float64), "none": torch.zeros(3, 0)}
    if option == {"none2": "none"}:
        rows["none2"] = torch.zeros(3, 0)
    with pytest.raises(error, match=message):
        rb.extend(rows)
    assert len(rb) == 0
    assert not storage.laid_out


@pytest.mark.parametrize("option", [{}, "obs", 1, {"a": "b", "c": "b"}, {"a": "b", "b": "c"}])
def test_options_that_name_nothing_are_refused(option: Any) -> None:
    with pytest.raises(OptionError, match="single_copy must"):
        LazyTensorStorage(4, single_copy=option)


# -- who may write ------------------------------------------------------------------------------------------------


def test_writers_that_pick_slots_are_refused() -> None:
    with pytest.raises(OptionError, match="TensorDictMaxValueWriter picks slots"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(4, single_copy=True), writer=TensorDictMaxValueWriter("reward")
        )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4, single_copy=True))
    with pytest.raises(OptionError, match="leave single_copy out"):
        rb.set_writer(TensorDictMaxValueWriter("reward"))


def test_a_writer_of_your_own_that_picks_is_refused_before_anything_is_written() -> None:
    class Backwards(RoundRobinWriter):
        def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Placement:  # type: ignore[override]
            super().place(rows, ring, scores)
            slots = torch.arange(rows).flip(0)
            return Picks(slots, torch.arange(rows), slots)

    rb = ReplayBuffer(storage=LazyTensorStorage(4, single_copy=True), writer=Backwards())
    assert isinstance(rb.writer, Writer)
    with pytest.raises(OptionError, match="Backwards picks slots"):
        rb.extend(transitions(range(3)))
    assert len(rb) == 0
    assert rb.write_count == 0


def test_environments_in_turns_stay_right_and_are_warned_of_once() -> None:
    rb = single(200)
    numbers = torch.arange(40)[:, None] + torch.tensor([0, 1000, 2000])
    with pytest.warns(UserWarning, match="ndim=2"):
        rb.extend(transitions(numbers.view(-1)))
    assert nexts(rb) == [base + step + 1 for step in range(40) for base in (0, 1000, 2000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(transitions(torch.tensor([41, 1041, 2041])))


def test_environments_side_by_side_do_not_lie_apart() -> None:
    rb = single(300, ndim=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(150):
            rb.extend(transitions(torch.tensor([[step, 1000 + step, 2000 + step]])))
    assert nexts(rb)[:6] == [101, 1101, 2101, 102, 1102, 2102]
    assert int((rb.storage.state_dict()["columns"]["apart"]).sum()) == 3  # the newest row of each lane


# -- reads are copies, edits stay where they are made --------------------------------------------------------------


def test_an_edited_observation_does_not_change_the_row_before_it() -> None:
    rb = single(6)
    rb.extend(transitions(range(1, 7)))
    rb.set_at_("obs", torch.full((3,), 99.0), 3)
    assert nexts(rb) == [2, 3, 4, 5, 6, 7]
    rb[1:3] = transitions(range(50, 52))
    assert nexts(rb) == [2, 51, 52, 5, 6, 7]
    rb.set_at_(("next", "obs"), torch.full((3,), -1.0), 0)
    assert nexts(rb) == [-1, 51, 52, 5, 6, 7]
    assert [float(x) for x in rb[:]["obs"][:, 0]] == [1, 50, 51, 99, 5, 6]


def test_what_is_read_is_a_copy() -> None:
    rb = single(6)
    rb.extend(transitions(range(1, 7)))
    for read in (rb[:], rb.storage[1:3], rb.storage[2]):
        read["obs"].fill_(-5)
        read["next"]["obs"].fill_(-5)
    rb.storage["obs"].fill_(-5)
    for column in rb.storage.columns.values():  # type: ignore[attr-defined]
        column.fill_(0)
    assert nexts(rb) == [2, 3, 4, 5, 6, 7]
    assert [float(x) for x in rb[:]["obs"][:, 0]] == [1, 2, 3, 4, 5, 6]


def test_rows_taken_from_the_storage_itself_are_written_as_they_were() -> None:
    """The columns of a state are views of the memory that the write goes to."""
    rb = single(4)
    rb.extend(transitions(range(1, 5)))
    obs = next(x for name, x in rb.storage.state_dict()["columns"].items() if name == "0.obs")
    rb.extend({**transitions(range(4)), "next": {**transitions(range(4))["next"], "obs": obs}})
    assert nexts(rb) == [1, 2, 3, 4]


def test_tensordicts_come_back_as_tensordicts() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8, single_copy=True), batch_size=16)
    rb.extend(TensorDict(transitions(range(1, 7), {3}), batch_size=[6]))
    batch = rb.sample()
    assert isinstance(batch, TensorDict)
    expected = torch.where(batch["obs"] == 3, -batch["obs"], batch["obs"] + 1)
    assert torch.equal(batch["next", "obs"], expected)


def test_memory_that_is_not_there_is_asked_for_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = single(600)
    rb.extend(transitions(range(10)))

    def short(self: memory.HeapMemory, nbytes: int) -> None:
        msg = f"{nbytes} bytes are not there"
        raise StorageMemoryError(msg)

    monkeypatch.setattr(memory.HeapMemory, "check", short)
    with pytest.raises(StorageMemoryError):
        rb.extend(transitions(range(10, 30), set(range(10, 30))))
    assert len(rb) == 10
    assert rb.write_count == 10
    with pytest.raises(StorageMemoryError):
        rb[:] = transitions(torch.arange(10) * 2)
    assert nexts(rb) == [i + 1 for i in range(10)]


# -- what is saved ------------------------------------------------------------------------------------------------


def filled(make: Any, seed: int = 0) -> ReplayBuffer:
    env = Lanes(1, random.Random(seed))
    rb = ReplayBuffer(storage=make(), batch_size=4)
    rb.extend(stack([row for _ in range(40) for row in env.step()], (40,)))
    return rb


def same_rows(first: dict[str, Any], second: dict[str, Any]) -> None:
    for key in ("obs", "image", "goal"):
        assert equal(first[key], second[key])
        assert equal(first["next"][key], second["next"][key])


@pytest.mark.parametrize(("saved", "loaded"), [(True, True), (True, False), (False, True)])
def test_checkpoints_go_between_storages_of_either_kind(tmp_path: Path, saved: bool, loaded: bool) -> None:
    rb = filled(lambda: LazyTensorStorage(30, single_copy=saved))
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(30, single_copy=loaded), batch_size=4)
    other.loads(tmp_path)
    same_rows(rb[:], other[:])


def test_a_checkpoint_holds_single_copies_too(tmp_path: Path) -> None:
    plain, once = tmp_path / "plain", tmp_path / "once"
    for path, option in ((plain, False), (once, True)):
        rb = ReplayBuffer(storage=LazyTensorStorage(1000, single_copy=option))
        rb.extend(transitions(range(1000), {500}, width=500))
        rb.dumps(path)
    size = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in (plain, once)}
    assert size[once] < 0.53 * size[plain]


def test_a_flushed_directory_opens_again(tmp_path: Path) -> None:
    rb = filled(lambda: LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True))
    expected = rb[:]
    for _ in range(2):
        rb.storage.flush()  # type: ignore[attr-defined]
        storage = LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True, existsok=True)
        rb = ReplayBuffer(storage=storage, batch_size=4)
        same_rows(rb[:], expected)
    with pytest.raises(CheckpointError, match="with single_copy, got single_copy=False"):
        LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", existsok=True)
    rows = stack(Lanes(1, random.Random(5)).step(), (1,))
    rb.extend(rows)
    assert equal(rb[10]["next"]["obs"], rows["next"]["obs"][0])
    same_rows(rb[11:], {key: _from(value, 11) for key, value in expected.items()})


def _from(value: Any, first: int) -> Any:
    return {key: x[first:] for key, x in value.items()} if isinstance(value, dict) else value[first:]


@pytest.mark.parametrize("file", ["block-apart0.bin", "block-apart1.bin", "block0.bin"])
def test_damaged_files_of_a_flushed_directory_are_refused(tmp_path: Path, file: str) -> None:
    rb = filled(lambda: LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True))
    rb.storage.flush()  # type: ignore[attr-defined]
    path = tmp_path / "rows" / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError):
        LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True, existsok=True)


def damages() -> dict[str, Any]:
    def notes(change: Any) -> Any:
        def apply(state: dict[str, Any]) -> None:
            state["columns"]["apart"] = change(state["columns"]["apart"].clone())

        return apply

    def no_last(apart: Tensor) -> Tensor:
        apart[-1] = False
        return apart

    return {
        "notes too short": notes(lambda apart: apart[:-1]),
        "notes of numbers": notes(lambda apart: apart.to(torch.int64)),
        "the newest row follows nothing": notes(no_last),
        "more notes than rows apart": notes(torch.ones_like),
        "no notes": lambda state: state["columns"].pop("apart"),
        "no rows apart": lambda state: state["columns"].pop("4.next.obs.apart"),
        "rows apart of another form": lambda state: state["columns"].update(
            {"4.next.obs.apart": torch.zeros(2, 3, dtype=torch.float64)}
        ),
        "pairs beyond the fields": lambda state: state.update(single_copy=[[4, 99]]),
        "pairs of other forms": lambda state: state.update(single_copy=[[4, 1]]),
        "pairs that are none": lambda state: state.update(single_copy=[[4]]),
        "other pairs": lambda state: state.update(single_copy=[[4, 0]]),
        "a capacity below the rows": lambda state: state.update(capacity=3),
        "more lanes than rows": lambda state: state.update(lanes=100, capacity=20),
    }


@pytest.mark.parametrize("damage", damages())
@pytest.mark.parametrize("kind", [True, False])
def test_damaged_states_are_refused_and_change_nothing(damage: str, kind: bool) -> None:
    rb = filled(lambda: LazyTensorStorage(50, single_copy=True))
    state = rb.storage.state_dict()
    state["columns"] = {name: value.clone() for name, value in state["columns"].items()}
    assert "4.next.obs.apart" in state["columns"], list(state["columns"])
    damages()[damage](state)
    if damage == "other pairs" and not kind:
        pytest.skip("a storage without pairs takes any")
    other = filled(lambda: LazyTensorStorage(50, single_copy=kind), seed=1)
    before = other[:]
    with pytest.raises(CheckpointError):
        other.storage.load_state_dict(state)
    assert all(equal(other[:]["next"][key], before["next"][key]) for key in ("obs", "image", "goal"))


def test_a_checkpoint_with_other_pairs_is_refused(tmp_path: Path) -> None:
    rb = filled(lambda: LazyTensorStorage(50, single_copy=True))
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(50, single_copy={("next", "obs"): "obs"}))
    with pytest.raises(CheckpointError, match="same single_copy"):
        other.loads(tmp_path)


def test_slots_without_rows_are_no_rows() -> None:
    """Native code trusts no number: what holds no row is refused, not read."""
    rb = single(8)
    rb.extend(transitions(range(3)))
    with pytest.raises(IndexError):
        rb.storage.fetch([Request(2, torch.tensor([5]))])
    rb.empty()
    with pytest.raises(IndexError):
        rb.storage.fetch([Request(2, torch.tensor([0]))])
