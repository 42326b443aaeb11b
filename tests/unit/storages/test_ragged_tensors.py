"""Fields of another length in each row in `RaggedTensorStorage`: layouts, rows of any form, edits, memory, state."""

from __future__ import annotations

import itertools
from typing import Any

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
    SchemaError,
    SlotError,
)
from ostinato.tools.inspect import inspect_checkpoint

from ...effort import examples
from ...tags import same_state
from ..background import in_background
from ..buffers.refusals import refuses

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


def apart(values: Any, mask: Any) -> Any:
    """Return the tensors of the rows of a field, whatever its layout; those that are padded with its mask."""
    if mask is None:
        return values.unbind() if isinstance(values, torch.Tensor) else values
    assert mask.shape == values.shape[:2]
    assert not values[~mask].any()
    return [row[kept] for row, kept in zip(values, mask, strict=True)]


def lists(batch: Any, layout: str) -> list[tuple[int, list[Any], list[Any], float]]:
    """Return the rows of a batch as plain values, whatever its layout."""
    if isinstance(batch, LazyStackedTensorDict):
        return [one(r) for r in batch.unbind(0)]
    masks: Any = batch["masks"] if layout == "padded" else {"tokens": None, "next": {"cloud": None}}
    tokens, clouds = apart(batch["tokens"], masks["tokens"]), apart(batch["next"]["cloud"], masks["next"]["cloud"])
    found = zip(batch["id"], tokens, clouds, batch["next"]["reward"], strict=True)
    return [one({"id": i, "tokens": x, "next": {"cloud": y, "reward": gain}}) for i, x, y, gain in found]


def one(r: Any) -> tuple[int, list[Any], list[Any], float]:
    return int(r["id"]), r["tokens"].tolist(), r["next"]["cloud"].tolist(), float(r["next"]["reward"])


def made(
    capacity: int = 10, layout: Any = "lazy", kind: type[ReplayBuffer] = ReplayBuffer, **options: Any
) -> ReplayBuffer:
    return kind(storage=RaggedTensorStorage(capacity, ragged=PATHS, layout=layout), **{"batch_size": 6, **options})


KINDS = ("list of dicts", "list of TensorDicts", "lazy stack", "dict of lists", "dict", "TensorDict")


def test_layouts_are_what_they_are_called():
    lazy, nested, padded = (made(layout=layout, kind=TensorDictReplayBuffer, prefetch=2) for layout in LAYOUTS)
    for rb, layout in zip((lazy, nested, padded), LAYOUTS, strict=True):
        rb.extend(rows(range(8), "lazy stack"))
        batch = rb.sample()
        assert lists(batch, layout) == [one(row(int(i))) for i in batch["index"]], "a TensorDict buffer adds its keys"
    assert isinstance(lazy.sample(), LazyStackedTensorDict)
    batch = nested.sample()
    assert batch["tokens"].layout is torch.jagged
    assert batch["next", "cloud"].shape[2] == 2
    batch = padded.sample()
    assert batch["masks", "next", "cloud"].dtype is torch.bool
    assert batch["masks"].batch_size == (6,)
    rb = ReplayBuffer(storage=RaggedTensorStorage(8, ragged=["a", "b"], layout="nested"), batch_size=5)
    rb.extend({"a": [torch.ones(n) for n in (1, 3, 2)], "b": [torch.full((n,), 2.0) for n in (1, 3, 2)]})
    batch = rb.sample()
    assert (batch["a"] + batch["b"]).values().eq(3).all(), "fields of equal lengths can be combined"


OPERATIONS = ("extend", "add", "edit", "edit_many", "field", "clear")


@given(
    operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), min_size=1, max_size=15),
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(KINDS),
)
@examples(0.4)
def test_random_operations_follow_a_plain_model(operations, layout, kind):
    rb, ids, cursor = made(7, layout), dict[int, int](), 0  # the number of the row in each slot
    for turn, (name, n) in enumerate(operations):
        fresh, last = 10 * turn + 1, len(ids) - 1  # row 0 has no tokens, and lists without numbers have no dtype
        if name in {"extend", "add"}:
            more = range(fresh, fresh + (n + 1 if name == "extend" else 1))
            rb.extend(rows(more, kind)) if name == "extend" else rb.add(row(fresh))
            for number in more:
                ids[cursor] = number
                cursor = (cursor + 1) % 7
        elif name == "edit" and ids:
            rb[n % len(ids)] = row(fresh)
            ids[n % len(ids)] = fresh
        elif name == "edit_many" and ids:
            rb[torch.tensor([last, 0, last])] = rows(range(fresh, fresh + 3), kind)
            ids |= {0: fresh + 1, last: fresh + 2}
        elif name == "field" and ids:
            rb["tokens"] = [row(ids[slot])["tokens"] for slot in range(len(ids))]
        elif name == "clear":
            rb.empty()
            ids, cursor = {}, 0
        assert len(rb) == len(ids)
        if ids:
            wanted = [one(row(ids[slot])) for slot in range(len(ids))]
            assert lists(rb[:], layout) == wanted
            assert one(rb[n % len(wanted)]) == wanted[n % len(wanted)]
            batch, info = rb.sample(return_info=True)
            assert lists(batch, layout) == [wanted[slot] for slot in info["index"]]


def test_overwritten_values_are_reclaimed():
    storage = RaggedTensorStorage(64, ragged="x", layout="nested")
    rb = ReplayBuffer(storage=storage, batch_size=4)
    generator = np.random.default_rng(0)
    most = 0
    for turn in range(40):
        sizes = generator.integers(0, 50, 16)
        rb.extend({"x": [torch.full((int(n),), turn, dtype=torch.int32) for n in sizes], "id": torch.arange(16)})
        present = rb[:]["x"].values().nbytes
        most = max(most, present + 4 * int(sizes.sum()))
        assert storage.nbytes <= 2 * most + 64 * (16 + 8)
    one_row = torch.zeros(20_000, dtype=torch.int32)
    for _ in range(30):  # always the same slot
        rb[5] = {"x": one_row, "id": torch.tensor(1)}
    assert storage.nbytes <= 2 * (most + 2 * one_row.nbytes) + 64 * (16 + 8)


def test_checkpoints_are_loaded_into_larger_rings_and_inspected(tmp_path):
    rb, larger, other = made(8, "padded"), made(20), RaggedTensorStorage(8, ragged=PATHS)
    rb.extend(rows(range(11), "TensorDict"))
    rb.dumps(tmp_path / "saved")
    rb.extend(rows(range(11, 14), "dict"))
    rb[2] = row(99)
    rb.dumps(tmp_path / "saved", incremental=True)
    larger.loads(tmp_path / "saved")
    larger.extend(rows(range(5), "dict"))
    assert lists(larger[:], "lazy") == [one(row(i)) for i in (6, 7, 8, 9, 99, 11, 12, 13, *range(5))]
    rb.storage.dumps(tmp_path / "rows")
    other.loads(tmp_path / "rows")
    assert lists(other[:], "lazy") == lists(rb[:], "padded")
    found = {field.name: field for field in inspect_checkpoint(tmp_path / "saved", read_data=True).fields}
    tokens = found[f"tokens (ragged, {sum(map(length, (6, 7, 8, 9, 99, 11, 12, 13)))} values)"]
    assert (tokens.rows, tokens.dtype, tokens.maximum) == (8, "int64", 9902)
    assert found["id"].rows == 8


def test_states_of_other_fields_are_refused():
    rb = made(8)
    rb.extend(rows(range(5), "dict"))
    state = rb.storage.state_dict()
    with pytest.raises(CheckpointError):
        RaggedTensorStorage(8, ragged="tokens").load_state_dict(state)
    with pytest.raises(CheckpointError):
        LazyTensorStorage(8).load_state_dict(state)
    name = next(name for name in state["columns"] if name.endswith("tokens.ends"))
    state["columns"][name] = state["columns"][name] + 1
    with pytest.raises(CheckpointError):
        RaggedTensorStorage(8, ragged=PATHS).load_state_dict(state)


def test_units_read_ragged_fields_of_other_rows():
    def sample(unit: Any) -> Any:
        rb = ReplayBuffer(
            storage=RaggedTensorStorage(32, ragged=["obs", ("next", "obs")]), batch_size=8, sample_unit=unit
        )
        obs = [torch.full((1 + i % 3,), float(i)) for i in range(13)]
        following = {"obs": obs[1:], "reward": torch.ones(12), "done": torch.arange(12) == 11}
        rb.extend({"obs": obs[:12], "action": torch.zeros(12, 1), "next": following})
        return rb.sample()

    batch = sample(NStep(3, 0.5))
    for obs, after, reward in zip(batch["obs"], batch["next"]["obs"], batch["next"]["reward"], strict=True):
        ahead = {1.75: 3, 1.5: 2, 1.0: 1}[float(reward)]
        assert after.tolist() == [float(obs[0]) + ahead] * (1 + int(obs[0] + ahead) % 3)
    with pytest.raises(OptionError):
        sample(FrameStack(2, ["obs"]))


HOLLOW = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 2, 4]))


def test_what_does_not_fit_is_refused_and_changes_nothing():
    rb = made(8)
    rb.extend(rows(range(3), "dict"))
    refuses(
        {
            SchemaError: {
                "tokens": (
                    lambda: rb.add(row(1) | {"tokens": torch.zeros(3, 2, dtype=torch.int64)}),
                    lambda: rb.add(row(1) | {"tokens": torch.tensor(3)}),
                    lambda: rb.extend(rows(range(3), "dict") | {"tokens": [torch.arange(2)]}),
                    lambda: rb.__setitem__(0, row(1) | {"tokens": torch.tensor(3)}),
                ),
                "do not add up": lambda: ReplayBuffer(storage=RaggedTensorStorage(8, ragged="x")).extend({"x": HOLLOW}),
                "masks": lambda: made(8, "padded").add(row(1) | {"masks": torch.ones(1)}),
            },
            KeyMissingError: {
                "tokens": lambda: rb.add({"id": torch.tensor(1), "next": row(1)["next"]}),
            },
            KindError: {
                "": lambda: rb.add((torch.zeros(3), torch.zeros(2))),
                "length": lambda: made(8, writer=TensorDictMaxValueWriter("tokens")).extend(
                    rows(range(3), "TensorDict")
                ),
            },
            SlotError: {
                "one dimension": lambda: rb[torch.tensor([[0, 1], [1, 2]])],
            },
            OptionError: {
                "hooks": lambda: rb.storage.register_save_hook(print),
                "layout": lambda: RaggedTensorStorage(8, ragged="x", layout="dense"),  # type: ignore[arg-type]
                "ragged": (
                    lambda: RaggedTensorStorage(8, ragged=[]),
                    lambda: RaggedTensorStorage(8, ragged=[3]),
                ),
            },
        }
    )
    rb.add(row(3))
    assert lists(rb[:], "lazy") == [one(row(i)) for i in range(4)]


def test_values_are_cast_as_those_of_dense_fields_and_kept_bit_for_bit():
    rb = ReplayBuffer(storage=RaggedTensorStorage(8, ragged="x"))
    for values in (torch.arange(3, dtype=torch.float32), [1, 2], np.array([4], dtype=np.int64)):
        rb.add({"x": values})
    found = rb[:]["x"]
    assert {x.dtype for x in found} == {torch.float32}
    assert [x.tolist() for x in found] == [[0, 1, 2], [1, 2], [4]]
    for dtype in (torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        rb = ReplayBuffer(storage=RaggedTensorStorage(4, ragged="x", layout="nested"))
        parts = [torch.ones(n).to(dtype) for n in (1, 2, 3)]
        rb.extend({"x": parts})
        same_state(rb[:]["x"].values(), torch.cat(parts))


def test_readers_beside_writers_get_whole_rows():
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
