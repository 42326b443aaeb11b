"""Single copies of observations: what users ask of them, what they cost, what is refused, what is saved."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.core.records import Picks, Request
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SchemaError, StorageMemoryError
from ostinato.storages import memory

from .pairs import Environments, over, same

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ostinato.core.records import Placement
    from ostinato.core.ring import Ring


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


def test_a_truncated_episode_keeps_its_true_final_observation() -> None:
    """Not the reset observation of the episode that follows."""
    for end in range(9):
        rb = single(9)
        rb.extend(transitions(range(1, 10), {end + 1}))
        assert nexts(rb) == [-(i + 1) if i == end else i + 2 for i in range(9)]
        for number in range(10, 10 + end):
            rb.extend(transitions(range(number, number + 1)))
        assert float(rb[end]["next"]["obs"][0]) == -(end + 1)


# -- what they cost ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("width", "capacity", "num_envs"), [(250, 2000, 4), (17, 4000, 0)])
def test_bytes_of_a_transition(width: int, capacity: int, num_envs: int) -> None:
    """One observation, the scalars and the final observations: 5 % more for rows of 1 KB and above, else 8 bytes."""
    rb = single(capacity, ndim=2 if num_envs else 1)
    envs = max(num_envs, 1)
    for start in range(0, 4 * capacity // 3 // envs, 40):
        steps = torch.arange(start, start + 40)
        grid = steps[:, None] + torch.arange(envs) * 10**6 if num_envs else steps
        rb.extend(transitions(grid, {int(i) for i in grid.view(-1) if int(i) % 100 == 99}, width))
    finals = (capacity // 100 + 2 * envs) * 4 * width / capacity
    needed = 4 * width + 4 + 4 + 1 + finals
    found = rb.storage.nbytes / capacity
    assert found <= (1.05 * needed if width == 250 else needed + 8), f"{found} bytes, {needed} needed"


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


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (True, OptionError, r"finds no field.*'obs': float32\[2\].*name the pairs"),
    (
        {"next_obs": "obs"},
        OptionError,
        "names the field 'next_obs', but the fields are 'obs', 'later', 'none'",
    ),
    ({"later": "obs"}, SchemaError, r"one dtype and shape, got 'later': float64\[2\] and 'obs': float32\[2\]"),
    ({"none2": "none"}, OptionError, "take memory"),
]


def test_pairs_that_do_not_exist_are_refused() -> None:
    none = torch.zeros(3, 0)
    rows = {"obs": torch.zeros(3, 2), "later": torch.zeros(3, 2, dtype=torch.float64), "none": none, "none2": none}
    for option, error, message in REFUSED:
        rb = ReplayBuffer(storage=LazyTensorStorage(4, single_copy=option))
        with pytest.raises(error, match=message):
            rb.extend(rows)
        assert len(rb) == 0
        assert not rb.storage.laid_out
    options: list[Any] = [{}, "obs", 1, {"a": "b", "c": "b"}, {"a": "b", "b": "c"}]
    for wrong in options:
        with pytest.raises(OptionError, match="single_copy must"):
            LazyTensorStorage(4, single_copy=wrong)


# -- who may write ------------------------------------------------------------------------------------------------


def test_writers_that_pick_slots_are_refused() -> None:
    with pytest.raises(OptionError, match="TensorDictMaxValueWriter picks slots"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(4, single_copy=True), writer=TensorDictMaxValueWriter("reward")
        )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4, single_copy=True))
    with pytest.raises(OptionError, match="leave single_copy out"):
        rb.set_writer(TensorDictMaxValueWriter("reward"))

    class Backwards(RoundRobinWriter):
        def place(self, rows: int, ring: Ring, scores: Tensor | None) -> Placement:  # type: ignore[override]
            super().place(rows, ring, scores)
            slots = torch.arange(rows).flip(0)
            return Picks(slots, torch.arange(rows), slots)

    own = ReplayBuffer(storage=LazyTensorStorage(4, single_copy=True), writer=Backwards())
    with pytest.raises(OptionError, match="Backwards picks slots"):
        own.extend(transitions(range(3)))
    assert (len(own), own.write_count) == (0, 0)


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
    rb, first = single(300, ndim=2), torch.arange(20) * 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            rb.extend(transitions((first + step)[None]))
    assert nexts(rb)[:20] == (first + 16).tolist()
    assert int((rb.storage.state_dict()["columns"]["apart"]).sum()) == 20  # the newest row of each environment


# -- reads are copies, edits stay where they are made --------------------------------------------------------------


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


@pytest.mark.usefixtures("backend")
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


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    rows: dict[str, Any] = over(Environments(1, random.Random(seed)).steps(count), lambda field: field[:, 0])
    return rows


def filled(make: Any, seed: int = 0) -> ReplayBuffer:
    rb = ReplayBuffer(storage=make(), batch_size=4)
    rb.extend(steps(40, seed))
    return rb


def test_a_flushed_directory_opens_again(tmp_path: Path) -> None:
    rb = filled(lambda: LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True))
    expected = rb[:]
    for _ in range(2):
        rb.storage.flush()  # type: ignore[attr-defined]
        storage = LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True, existsok=True)
        rb = ReplayBuffer(storage=storage, batch_size=4)
        same(rb[:], expected)
    with pytest.raises(CheckpointError, match="with single_copy, got single_copy=False"):
        LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", existsok=True)
    rows = steps(1, seed=5)
    rb.extend(rows)
    same(rb[10:11], rows)
    same(rb[11:], over(expected, lambda field: field[11:]))


def test_damaged_files_of_a_flushed_directory_are_refused(tmp_path: Path) -> None:
    rb = filled(lambda: LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True))
    rb.storage.flush()  # type: ignore[attr-defined]
    for name in ("block-apart0.bin", "block-apart1.bin", "block0.bin"):
        path = tmp_path / "rows" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedFileError):
            LazyMemmapStorage(30, scratch_dir=tmp_path / "rows", single_copy=True, existsok=True)
        path.write_bytes(whole)


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


@pytest.mark.parametrize("kind", [True, False])
def test_damaged_states_are_refused_and_change_nothing(kind: bool) -> None:
    rb = filled(lambda: LazyTensorStorage(50, single_copy=True))
    other = filled(lambda: LazyTensorStorage(50, single_copy=kind), seed=1)
    before = other[:]
    for name, damage in damages().items():
        if name == "other pairs" and not kind:
            continue  # a storage without pairs takes any
        state = rb.storage.state_dict()
        state["columns"] = {key: value.clone() for key, value in state["columns"].items()}
        damage(state)
        with pytest.raises(CheckpointError):
            other.storage.load_state_dict(state)
        same(other[:], before)
    some = ReplayBuffer(storage=LazyTensorStorage(50, single_copy={("next", "obs"): "obs"}))
    with pytest.raises(CheckpointError, match="same single_copy"):
        some.load_state_dict(rb.state_dict())


@pytest.mark.usefixtures("backend")
def test_slots_without_rows_are_no_rows() -> None:
    """Native code trusts no number: what holds no row is refused, not read."""
    rb = single(8)
    rb.extend(transitions(range(3)))
    with pytest.raises(IndexError):
        rb.storage.fetch([Request(2, torch.tensor([5]))])
    rb.empty()
    with pytest.raises(IndexError):
        rb.storage.fetch([Request(2, torch.tensor([0]))])
