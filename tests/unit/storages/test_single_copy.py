"""Single copies of observations: what users ask of them, what they cost, what is refused, what is saved."""

from __future__ import annotations

import random
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
)
from ostinato.core.records import Request
from ostinato.core.rows import Leaf, as_bits
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SchemaError
from ostinato.storages.single_copy import TorchExtraRows

from ...tags import same_state
from ..background import in_background
from .test_single_copy_log import Environments, over

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


NEXT_OBS = 2
"""The place of the field among those of `transitions`."""


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


# -- what they cost ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("width", "capacity", "num_envs"), [(250, 1000, 4), (17, 2000, 0)])
def test_bytes_of_a_transition(width, capacity, num_envs):
    """One observation, the scalars and the final observations: 5 % more for rows of 1 KB and above, else 8 bytes."""
    rb = single(capacity, ndim=2 if num_envs else 1)
    envs = max(num_envs, 1)
    for start in range(0, 4 * capacity // 3 // envs, 40):
        steps = torch.arange(start, start + 40)
        grid = steps[:, None] + torch.arange(envs) * 10**6 if num_envs else steps
        rb.extend(transitions(grid, {int(i) for i in grid.view(-1) if int(i) % 100 == 99}, width))
    scalars = 4 + 4 + 1
    finals = (capacity // 100 + 2 * envs) * 4 * width / capacity
    needed = 4 * width + scalars + finals
    found = rb.storage.nbytes / capacity
    assert found <= (1.05 * needed if width == 250 else needed + 8), f"{found} bytes, {needed} needed"
    assert found >= 4 * width + scalars + capacity // 100 * 4 * width / capacity + 4, (
        "4 bytes tell where the next one is"
    )


def test_side_rows_are_given_back():
    """Rows out of line are stored apart; when they are overwritten their room is used again."""
    rb = single(64)
    rb.extend(transitions(range(1, 65), set(range(1, 65, 2))))
    full = rb.storage.nbytes
    for turn in range(20):
        rb.extend(transitions(range(1 + turn, 65 + turn), set(range(1, 65, 2))))
    assert rb.storage.nbytes <= full + 64 * 12


# -- which fields -------------------------------------------------------------------------------------------------


def test_pairs_are_found_by_their_names():
    flag = torch.zeros(4, dtype=torch.bool)
    step = {"reward": torch.zeros(4), "done": flag, "agent": {"pos": torch.zeros(4, 5)}}
    of_others = {"state": torch.zeros(4, 3), "next_state": torch.zeros(4, 4), "next_done": flag}
    of_others["next_next_obs"] = torch.zeros(4, 2)
    rows = {"obs": torch.zeros(4, 2), "next_obs": torch.zeros(4, 2), **of_others, **step, "next": step}
    storage = LazyTensorStorage(4, single_copy=True)
    storage.set(range(4), rows)
    paths = [leaf.path for leaf in storage.schema.leaves]  # type: ignore[union-attr]
    assert {(paths[i], paths[j]) for i, j in storage.state_dict()["single_copy"]} == {
        (("next_obs",), ("obs",)),
        (("next", "agent", "pos"), ("agent", "pos")),
    }


WRONG: list[Any] = [
    (True, OptionError, r"finds no field.*'obs': float32\[2\].*name the pairs"),
    ({"next_obs": "obs"}, OptionError, "names the field 'next_obs', but the fields are 'obs', 'later', 'none'"),
    ({"later": "obs"}, SchemaError, r"one dtype and shape, got 'later': float64\[2\] and 'obs': float32\[2\]"),
    ({"none2": "none"}, OptionError, "take memory"),
    ({}, OptionError, "single_copy must"),
    ("obs", OptionError, "single_copy must"),
    ({"a": "b", "c": "b"}, OptionError, "single_copy must"),
    ({"a": "b", "b": "c"}, OptionError, "single_copy must"),
]


def test_pairs_that_do_not_exist_are_refused():
    none = torch.zeros(3, 0)
    rows = {"obs": torch.zeros(3, 2), "later": torch.zeros(3, 2, dtype=torch.float64), "none": none, "none2": none}
    for option, error, message in WRONG:
        with pytest.raises(error, match=message):  # when it is made, or with the first rows
            LazyTensorStorage(4, single_copy=option).set(range(3), rows)


# -- environments ------------------------------------------------------------------------------------------------


def test_environments_in_turns_stay_right_and_are_warned_of_once():
    rb = single(200)
    numbers = torch.arange(40)[:, None] + torch.tensor([0, 1000, 2000])
    with pytest.warns(UserWarning, match="ndim=2"):
        rb.extend(transitions(numbers.view(-1)))
    assert nexts(rb) == [base + step + 1 for step in range(40) for base in (0, 1000, 2000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(transitions(torch.tensor([41, 1041, 2041])))


# -- what is saved ------------------------------------------------------------------------------------------------


def filled(make: Any, seed: int = 0) -> ReplayBuffer:
    rb = ReplayBuffer(storage=make, batch_size=4)
    rb.extend(Environments(1, random.Random(seed)).line(40))
    return rb


def test_a_flushed_directory_opens_again_unless_it_is_damaged(tmp_path):
    def stored(**options: Any) -> LazyMemmapStorage:
        return LazyMemmapStorage(
            30, scratch_dir=tmp_path / "rows", **{"single_copy": True, "existsok": True, **options}
        )

    rb = filled(stored())
    expected = rb[:]
    for _ in range(2):
        rb.storage.flush()  # type: ignore[attr-defined]
        rb = ReplayBuffer(storage=stored())
        same_state(rb[:], expected)
    with pytest.raises(CheckpointError):
        stored(single_copy=False)
    for name in ("block-part0.bin", "block-part1.bin", "block0.bin"):
        path = tmp_path / "rows" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedFileError):
            stored()
        path.write_bytes(whole)
    rb, row = ReplayBuffer(storage=stored()), Environments(1, random.Random(5)).line(1)
    rb.extend(row)
    same_state(rb[10:11], row)
    same_state(rb[11:], over(expected, lambda field: field[11:]))


def apart(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["columns"].update(apart=change(state["columns"]["apart"]))


DAMAGES: dict[str, Any] = {
    "marks too short": apart(lambda marks: marks[:-1]),
    "marks of numbers": apart(lambda marks: marks.to(torch.int64)),
    "the newest row follows nothing": apart(lambda marks: marks & (torch.arange(len(marks)) < len(marks) - 1)),
    "more marks than rows apart": apart(torch.ones_like),
    "no marks": lambda state: state["columns"].pop("apart"),
    "no rows apart": lambda state: state["columns"].pop("4.next.obs.apart"),
    "rows apart of another form": lambda state: state["columns"].update(
        {"4.next.obs.apart": torch.zeros(2, 3).double()}
    ),
    "pairs beyond the fields": lambda state: state.update(single_copy=[[4, 99]]),
    "pairs of other forms": lambda state: state.update(single_copy=[[4, 1]]),
    "pairs that are none": lambda state: state.update(single_copy=[[4]]),
    "a capacity below the rows": lambda state: state.update(capacity=3),
    "more lanes than rows": lambda state: state.update(lanes=100, capacity=20),
}


@pytest.mark.parametrize("kind", [True, False])
def test_damaged_states_are_refused_and_change_nothing(kind):
    rb = filled(LazyTensorStorage(50, single_copy=True))
    other = filled(LazyTensorStorage(50, single_copy=kind), seed=1)
    before = other[:]
    for damage in DAMAGES.values():
        state = rb.storage.state_dict()
        state["columns"] = {key: value.clone() for key, value in state["columns"].items()}
        damage(state)
        with pytest.raises(CheckpointError):
            other.storage.load_state_dict(state)
        same_state(other[:], before)
    some = LazyTensorStorage(50, single_copy={("next", "obs"): "obs"})
    some.load_state_dict(rb.storage.state_dict())
    same_state(some[:], rb[:])


@pytest.mark.usefixtures("backend")
def test_next_observations_stay_whole_where_the_row_itself_is_not_written():
    """Without any help of the buffer: side rows are freed and filled anew, while others read them without the lock.

    The rows that are read are never written meanwhile, so that no stamp could tell; only those that follow them are.
    """
    rb, newest, ends = single(1 << 16), [2], set(range(0, 1 << 16, 3))
    rb.extend(transitions(range(1, 3), ends, 4000))

    def write() -> None:
        if newest[0] < (1 << 16) - 8:
            rb.extend(transitions(range(newest[0] + 1, newest[0] + 2), ends, 4000))
            newest[0] += 1

    def read() -> None:
        slots = (torch.tensor([-3, -2, -1, -1]) + newest[0]).clamp(0)
        (got,) = rb.storage.fetch([Request(NEXT_OBS, slots)])
        expected = transitions(slots + 1, ends, 4000)["next"]["obs"]
        assert torch.equal(got, expected), f"slots {slots.tolist()}: {got[:, ::999]}"

    with in_background(write, read):
        for _ in range(200):
            read()


def test_a_side_row_is_not_given_to_another_row_while_it_is_read():
    extra: Any = None

    def move() -> None:
        extra.drop(torch.tensor([3]))
        extra.put(torch.tensor([5]), [torch.tensor([9.0])])

    writer = threading.Thread(target=move)

    def reader(slots: Tensor) -> Tensor:
        writer.start()
        writer.join(0.1)  # it waits for the end of this read
        return as_bits(torch.zeros(slots.shape[0], device="cpu", dtype=torch.float32))

    leaves = [Leaf(("obs",), torch.float32, ())]
    extra = TorchExtraRows(leaves, [reader], 8, 1, torch.device("cpu"))
    extra.reset(8)
    extra.reserve(1)
    extra.put(torch.tensor([3]), [torch.tensor([7.0])])
    assert extra.read([0], torch.tensor([2, 3]))[0].tolist() == [0.0, 7.0]
    writer.join()


@pytest.mark.usefixtures("backend")
def test_slots_without_rows_are_no_rows():
    """Native code trusts no number: what holds no row is refused, not read."""
    rb = single(8)
    rb.extend(transitions(range(3)))
    with pytest.raises(IndexError):
        rb.storage.fetch([Request(NEXT_OBS, torch.tensor([5]))])
    rb.empty()
    with pytest.raises(IndexError):
        rb.storage.fetch([Request(NEXT_OBS, torch.tensor([0]))])


def test_rows_in_the_memory_of_the_table_can_be_written():
    rb = ReplayBuffer(storage=LazyTensorStorage(64, single_copy=True, packed=False))
    nexts = torch.randn(64, 3)
    rb.extend({"obs": torch.randn(64, 3), "next_obs": nexts})
    inside: Any = rb.storage._table.dense.columns[0][:16]  # type: ignore[attr-defined]
    given = inside.clone()
    rb.extend({"obs": torch.randn(16, 3), "next_obs": inside})
    assert torch.equal(rb[:16]["next_obs"], given)
