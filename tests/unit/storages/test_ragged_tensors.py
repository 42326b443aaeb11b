"""Fields of another length in each row in `RaggedTensorStorage`: layouts, rows of any form, edits, memory, state."""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from ostinato import (
    FrameStack,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RaggedTensorStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from ostinato.errors import (
    CheckpointError,
    KeyMissingError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    SlotError,
)
from ostinato.tools.inspect import inspect_checkpoint

from ...effort import examples
from ..background import in_background

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = ("lazy", "nested", "padded")
PATHS: list[Any] = ["tokens", ("next", "cloud")]


def length(i: int) -> int:
    return (7 * i) % 5


def row(i: int) -> dict[str, Any]:
    """Return a row whose values follow from its number: tokens may be empty, the cloud is not."""
    return {
        "id": torch.tensor(i),
        "tokens": torch.arange(length(i)) + 100 * i,
        "next": {"cloud": torch.full((1 + i % 3, 2), float(i)), "reward": torch.tensor(i / 2)},
    }


def rows(ids: range, kind: str) -> Any:
    """Return rows in one of the forms in which they can be written."""
    singles = [row(i) for i in ids]
    dense: dict[str, Any] = {"id": torch.tensor(list(ids)), "next": {"reward": torch.tensor(list(ids)) / 2}}
    tokens, clouds = [r["tokens"] for r in singles], [r["next"]["cloud"] for r in singles]
    if kind == "list of dicts":
        return singles
    if kind == "list of TensorDicts":
        return [TensorDict(r) for r in singles]
    if kind == "lazy stack":
        return lazy_stack([TensorDict(r) for r in singles])
    if kind == "dict of lists":
        return {
            **dense,
            "tokens": [t.tolist() for t in tokens],
            "next": {**dense["next"], "cloud": [c.numpy() for c in clouds]},
        }
    nest = [torch.nested.nested_tensor(values, layout=torch.jagged) for values in (tokens, clouds)]
    whole = {**dense, "tokens": nest[0], "next": {**dense["next"], "cloud": nest[1]}}
    return TensorDict(whole, [len(singles)]) if kind == "TensorDict" else whole


def lists(batch: Any, layout: str) -> list[tuple[int, list[Any], list[Any], float]]:
    """Return the rows of a batch as plain values, whatever its layout."""
    if isinstance(batch, LazyStackedTensorDict):
        return [one(r) for r in batch.unbind(0)]
    out = []
    for n in range(batch["id"].shape[0]):
        tokens, cloud = batch["tokens"], batch["next"]["cloud"]
        if layout == "padded":
            masks = batch["masks"]
            for values, mask in ((tokens, masks["tokens"]), (cloud, masks["next"]["cloud"])):
                assert mask.shape == values.shape[:2]
                assert not values[~mask].any()
            values = [x[n][m[n]].tolist() for x, m in ((tokens, masks["tokens"]), (cloud, masks["next"]["cloud"]))]
        else:
            values = (
                [x[n].tolist() for x in (tokens, cloud)]
                if layout == "lazy"
                else [list(x.unbind(0))[n].tolist() for x in (tokens, cloud)]
            )
        out.append((int(batch["id"][n]), *values, float(batch["next"]["reward"][n])))
    return out


def one(r: Any) -> tuple[int, list[Any], list[Any], float]:
    return int(r["id"]), r["tokens"].tolist(), r["next"]["cloud"].tolist(), float(r["next"]["reward"])


def made(
    capacity: int = 10, layout: Any = "lazy", kind: type[ReplayBuffer] = ReplayBuffer, **options: Any
) -> ReplayBuffer:
    return kind(storage=RaggedTensorStorage(capacity, ragged=PATHS, layout=layout), **{"batch_size": 6, **options})


KINDS = ("list of dicts", "list of TensorDicts", "lazy stack", "dict of lists", "dict", "TensorDict")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensordict_buffer_adds_its_keys(layout: Any) -> None:
    rb = made(layout=layout, kind=TensorDictReplayBuffer, sampler=PrioritizedSampler(10, 0.7, 0.5), prefetch=2)
    rb.extend(rows(range(8), "lazy stack"))
    batch = rb.sample()
    assert [one(row(int(i))) for i in batch["index"]] == lists(batch, layout)
    rb.update_priority(batch["index"], torch.ones(6))


def test_layouts_are_what_they_are_called() -> None:
    lazy, nested, padded = (made(layout=layout) for layout in LAYOUTS)
    for rb in (lazy, nested, padded):
        rb.extend(rows(range(6), "TensorDict"))
    assert isinstance(lazy.sample(), LazyStackedTensorDict)
    batch = nested.sample()
    assert batch["tokens"].layout is torch.jagged
    assert batch["next", "cloud"].shape[2] == 2
    rb = ReplayBuffer(storage=RaggedTensorStorage(8, ragged=["a", "b"], layout="nested"), batch_size=5)
    rb.extend({"a": [torch.ones(n) for n in (1, 3, 2)], "b": [torch.full((n,), 2.0) for n in (1, 3, 2)]})
    batch = rb.sample()
    assert (batch["a"] + batch["b"]).values().eq(3).all(), "fields of equal lengths can be combined"
    batch = padded.sample()
    assert batch["masks", "next", "cloud"].dtype is torch.bool
    assert batch["masks"].batch_size == (6,)
    assert batch["tokens"].shape == batch["masks", "tokens"].shape


class Machine:
    """A buffer and the numbers of its rows by slot; each operation changes both."""

    def __init__(self, layout: Any, kind: str) -> None:
        self.layout, self.kind = layout, kind
        self.rb, self.slots, self.cursor = made(7, layout), dict[int, int](), 0

    def note(self, ids: range) -> None:
        for i in ids:
            self.slots[self.cursor] = i
            self.cursor = (self.cursor + 1) % 7

    def extend(self, fresh: int, n: int) -> None:
        ids = range(fresh, fresh + n)
        if n:
            self.rb.extend(rows(ids, self.kind))
        self.note(ids)

    def add(self, fresh: int, _n: int) -> None:
        self.rb.add(row(fresh))
        self.note(range(fresh, fresh + 1))

    def edit(self, fresh: int, n: int) -> None:
        if self.slots:
            slot = n % len(self.slots)
            self.rb[slot] = row(fresh)
            self.slots[slot] = fresh

    def edit_many(self, fresh: int, _n: int) -> None:
        last = len(self.slots) - 1
        if last > 0:
            self.rb[torch.tensor([last, 0, last])] = rows(range(fresh, fresh + 3), self.kind)
            self.slots |= {0: fresh + 1, last: fresh + 2}

    def field(self, _fresh: int, _n: int) -> None:
        if self.slots:
            self.rb["tokens"] = [row(self.slots[slot])["tokens"] for slot in range(len(self.slots))]

    def state(self, _fresh: int, _n: int) -> None:
        state, self.rb = self.rb.state_dict(), made(7, self.layout)
        self.rb.load_state_dict(state)

    def pickle(self, _fresh: int, _n: int) -> None:
        self.rb = pickle.loads(pickle.dumps(self.rb))

    def clear(self, _fresh: int, _n: int) -> None:
        self.rb.empty()
        self.slots, self.cursor = {}, 0


@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["extend", "add", "edit", "edit_many", "field", "state", "pickle", "clear"]),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=25,
    ),
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(KINDS),
)
@examples(0.6)
def test_random_operations_follow_a_plain_model(operations: list[tuple[str, int]], layout: Any, kind: str) -> None:
    machine = Machine(layout, kind)
    for turn, (name, n) in enumerate(operations):
        getattr(machine, name)(10 * turn, n)
        assert len(machine.rb) == len(machine.slots)
        if machine.slots:
            wanted = [one(row(machine.slots[slot])) for slot in range(len(machine.slots))]
            assert lists(machine.rb[:], layout) == wanted
            assert one(machine.rb[n % len(wanted)]) == wanted[n % len(wanted)]
            batch, info = machine.rb.sample(return_info=True)
            assert lists(batch, layout) == [wanted[slot] for slot in info["index"]]


def test_overwritten_values_are_reclaimed() -> None:
    storage = RaggedTensorStorage(64, ragged="x", layout="nested")
    rb = ReplayBuffer(storage=storage, batch_size=4)
    generator = np.random.default_rng(0)
    most = 0
    for turn in range(120):
        sizes = generator.integers(0, 50, 16)
        rb.extend({"x": [torch.full((int(n),), turn, dtype=torch.int32) for n in sizes], "id": torch.arange(16)})
        present = rb[:]["x"].values().nbytes
        most = max(most, present + 4 * int(sizes.sum()))
        assert storage.nbytes <= 2 * most + 64 * (16 + 8)
    one_row = torch.zeros(20_000, dtype=torch.int32)
    for _ in range(100):  # always the same slot
        rb[5] = {"x": one_row, "id": torch.tensor(1)}
    assert storage.nbytes <= 2 * (most + 2 * one_row.nbytes) + 64 * (16 + 8)


def test_incremental_checkpoints_continue_exactly(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    rb = made(8, "padded", sampler=PrioritizedSampler(8, 0.7, 0.5), generator=torch.Generator().manual_seed(1))
    rb.extend(rows(range(11), "dict"))
    rb.dumps(path)
    rb.extend(rows(range(11, 14), "dict"))
    rb[2] = row(99)
    rb.dumps(path, incremental=True)
    larger = made(20, sampler=PrioritizedSampler(20, 0.7, 0.5))
    larger.loads(path)
    larger.extend(rows(range(5), "dict"))
    assert [found[0] for found in lists(larger[:], "lazy")[:3]] == [6, 7, 8]
    assert len(larger) == 13
    other = made(8, "padded", sampler=PrioritizedSampler(8, 0.7, 0.5), generator=torch.Generator())
    other.extend(rows(range(3), "dict"))
    other.loads(path)
    for _ in range(4):
        assert lists(rb.sample(), "padded") == lists(other.sample(), "padded")
        for buffer in (rb, other):
            buffer.extend(rows(range(20, 23), "dict"))


def test_inspection_shows_ragged_fields_and_a_bare_storage_is_saved(tmp_path: Path) -> None:
    rb = made(8)
    rb.extend(rows(range(4), "TensorDict"))
    rb.dumps(tmp_path / "saved")
    rb.storage.dumps(tmp_path / "rows")
    other = RaggedTensorStorage(8, ragged=PATHS)
    other.loads(tmp_path / "rows")
    assert lists(other[:], "lazy") == [one(row(i)) for i in range(4)]
    found = {field.name: field for field in inspect_checkpoint(tmp_path / "saved", read_data=True).fields}
    tokens = found[f"tokens (ragged, {sum(map(length, range(4)))} values)"]
    assert (tokens.rows, tokens.dtype, tokens.maximum) == (4, "int64", 300)
    assert found["id"].rows == 4


def test_states_of_other_fields_are_refused() -> None:
    rb = made(8)
    rb.extend(rows(range(5), "dict"))
    state = rb.state_dict()
    fewer = ReplayBuffer(storage=RaggedTensorStorage(8, ragged="tokens"), batch_size=2)
    with pytest.raises(CheckpointError, match="ragged columns"):
        fewer.load_state_dict(state)
    with pytest.raises(CheckpointError):
        ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2).load_state_dict(state)
    columns = state["storage"]["state"]["columns"] if "state" in state["storage"] else state["storage"]["columns"]
    name = next(name for name in columns if name.endswith("tokens.ends"))
    columns[name] = columns[name] + 1
    with pytest.raises(CheckpointError, match="do not fit"):
        made(8).load_state_dict(state)


def test_units_read_ragged_fields_of_other_rows() -> None:
    def buffer(unit: Any) -> ReplayBuffer:
        storage = RaggedTensorStorage(32, ragged=["obs", ("next", "obs")])
        rb = ReplayBuffer(storage=storage, batch_size=8, sample_unit=unit)
        obs = [torch.full((1 + i % 3,), float(i)) for i in range(13)]
        following = {"obs": obs[1:], "reward": torch.ones(12), "done": torch.arange(12) == 11}
        rb.extend({"obs": obs[:12], "action": torch.zeros(12, 1), "next": following})
        return rb

    batch = buffer(NStep(3, 0.5)).sample()
    for obs, after, reward in zip(batch["obs"], batch["next"]["obs"], batch["next"]["reward"], strict=True):
        ahead = {1.75: 3, 1.5: 2, 1.0: 1}[float(reward)]
        assert after.tolist() == [float(obs[0]) + ahead] * (1 + int(obs[0] + ahead) % 3)
    with pytest.raises(OptionError, match="cannot be stacked"):
        buffer(FrameStack(2, ["obs"])).sample()


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (row(1) | {"tokens": torch.zeros(3, 2, dtype=torch.int64)}, SchemaError, "tokens"),
    (row(1) | {"tokens": torch.tensor(3)}, SchemaError, "tokens"),
    (row(1) | {"tokens": torch.tensor([0.5])}, SchemaError, "."),
    ({key: value for key, value in row(1).items() if key != "tokens"}, KeyMissingError, "tokens"),
    ((torch.zeros(3), torch.zeros(2)), KindError, "."),
]


def test_rows_that_do_not_fit_are_refused_and_change_nothing() -> None:
    rb = made(8)
    rb.extend(rows(range(3), "dict"))
    before = lists(rb[:], "lazy")
    for wrong, error, message in REFUSED:
        with pytest.raises(error, match=message):
            rb.add(wrong)
    with pytest.raises(SchemaError):
        rb.extend(rows(range(3), "dict") | {"tokens": [torch.arange(2)]})
    with pytest.raises(OstinatoError):
        rb[0] = REFUSED[0][0]
    with pytest.raises(SlotError, match="one dimension"):
        rb[torch.tensor([[0, 1], [1, 2]])]
    assert lists(rb[:], "lazy") == before
    rb.add(row(3))
    assert lists(rb[:], "lazy") == [*before, one(row(3))]


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="layout"):
        RaggedTensorStorage(8, ragged="x", layout="dense")  # type: ignore[arg-type]
    for wrong in ([], [()], [3], [("a", 1)]):
        with pytest.raises(OptionError, match="ragged"):
            RaggedTensorStorage(8, ragged=wrong)
    rb = ReplayBuffer(storage=RaggedTensorStorage(8, ragged="x", layout="padded"), batch_size=2)
    with pytest.raises(SchemaError, match="masks"):
        rb.add({"x": torch.arange(2), "masks": torch.ones(1)})
    with pytest.raises(OptionError, match="hooks"):
        rb.storage.register_save_hook(lambda data, path: data)
    ranked = made(8, writer=TensorDictMaxValueWriter(rank_key="tokens"), kind=TensorDictReplayBuffer)
    with pytest.raises(KindError, match="length"):
        ranked.extend(rows(range(3), "TensorDict"))


def test_values_are_cast_as_those_of_dense_fields_and_kept_bit_for_bit() -> None:
    rb = ReplayBuffer(storage=RaggedTensorStorage(8, ragged="x"), batch_size=2)
    rb.add({"x": torch.arange(3, dtype=torch.float32)})
    rb.add({"x": [1, 2]})
    rb.add({"x": np.array([4], dtype=np.int64)})
    found = rb[:]["x"]
    assert {x.dtype for x in found} == {torch.float32}
    assert [x.tolist() for x in found] == [[0, 1, 2], [1, 2], [4]]
    for dtype in (torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        rb = ReplayBuffer(storage=RaggedTensorStorage(4, ragged="x", layout="nested"), batch_size=2)
        parts = [torch.ones(n).to(dtype) for n in (1, 2, 3)]
        rb.extend({"x": parts})
        values = rb[:]["x"].values()
        assert values.dtype is dtype
        assert torch.equal(values.view(torch.uint8), torch.cat([x.view(torch.uint8) for x in parts]))


def test_text_beside_ragged_fields_and_fields_added_later() -> None:
    rb = made(8, "lazy")
    rb.extend([row(i) | {"text": f"row {i}"} for i in range(4)])
    assert rb[torch.tensor([2, 0])]["text"] == ["row 2", "row 0"]
    td = TensorDictReplayBuffer(storage=RaggedTensorStorage(8, ragged="x"), batch_size=3)
    td.extend([TensorDict({"x": torch.arange(i), "text": f"row {i}"}) for i in range(4)])
    for found in td.sample().unbind(0):
        assert found["text"] == f"row {len(found['x'])}"


def test_readers_beside_writers_get_whole_rows() -> None:
    rb = ReplayBuffer(storage=RaggedTensorStorage(16, ragged="x", layout="nested"), batch_size=8)
    turns = itertools.count(0, 100)

    def length_of(number: int) -> int:
        return 1 + (number // 100 + number % 100) % 40

    def write() -> None:
        numbers = range(turn := next(turns), turn + 8)
        rb.extend({"x": [torch.full((length_of(i),), i) for i in numbers], "id": torch.tensor(numbers)})

    write()
    with in_background(write):
        for _ in range(200):
            found = rb.sample()
            for values, number in zip(found["x"].unbind(0), found["id"].tolist(), strict=True):
                assert values.tolist() == [number] * length_of(number)
