"""Bad input is refused by name, and leaves the buffer bit-identical."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from ostinato.errors import (
    KeyMissingError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    SlotError,
    UsageError,
)

from ...tags import TENSORS, buffer, fill, read_ids, rows, same_state, snapshot, table

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("backend")


def five(storage: str = "packed", **options: Any) -> ReplayBuffer:
    rb = buffer(storage, 8, **options)
    fill(rb, range(5))
    return rb


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in table(torch.arange(3)).items() if k != key}


def changed(**fields: Any) -> dict[str, Any]:
    return {**table(torch.arange(3)), **fields}


ROWS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (
        lambda: changed(obs=torch.zeros(3, 4)),
        SchemaError,
        r"'obs' must be float32\[3, 3\].*got float32\[3, 4\]",
    ),
    "fewer dimensions": (lambda: changed(obs=torch.zeros(3)), SchemaError, r"'obs' must be float32\[3, 3\]"),
    "no broadcasting": (lambda: changed(obs=torch.zeros(3, 1)), SchemaError, r"'obs'.*got float32\[3, 1\]"),
    "dtype": (lambda: changed(obs=torch.zeros(3, 3) + 0j), SchemaError, r"'obs' must be float32.*got complex64"),
    "a fraction": (
        lambda: changed(id=torch.tensor([1, 2, 2.5])),
        SchemaError,
        r"'id' must be int64.*value 2.5 at \[2\]",
    ),
    "out of range": (
        lambda: changed(wide=torch.full((3, 300), 256)),
        SchemaError,
        r"'wide' must be uint8.*value 256 at",
    ),
    "overflow": (
        lambda: changed(obs=np.full((3, 3), 1e300)),
        SchemaError,
        r"float32, got float64 with the value 1e\+300",
    ),
    "missing key": (lambda: without("obs"), KeyMissingError, r"missing \['obs'\]"),
    "unknown key": (lambda: changed(extra=torch.zeros(3)), SchemaError, r"unknown \['extra'\]"),
    "flat for nested": (lambda: changed(next=torch.zeros(3)), SchemaError, r"'next' must be a dict"),
    "nested for flat": (lambda: changed(obs={"x": torch.zeros(3, 3)}), OstinatoError, r"'obs'"),
    "nested for the first": (lambda: changed(id={"x": torch.zeros(3, 3)}), OstinatoError, r"'id'"),
    "missing nested key": (
        lambda: changed(next={"obs": torch.zeros(3, 2, dtype=torch.float64)}),
        KeyMissingError,
        r"missing \['done'\]",
    ),
    "nested shape": (
        lambda: changed(next={"obs": torch.zeros(3, 9).double(), "done": torch.zeros(3, dtype=torch.bool)}),
        SchemaError,
        r"\('next', 'obs'\) must be float64\[3, 2\].*got float64\[3, 9\]",
    ),
    "another kind": (lambda: torch.zeros(3), SchemaError, "must be a dict with the keys"),
    "a tuple": (lambda: tuple(table(torch.arange(3)).values()), SchemaError, "must be a dict.*got tuple"),
    "batch sizes": (
        lambda: changed(obs=torch.zeros(2, 3)),
        SchemaError,
        r"'obs' must be float32\[3, 3\] \(batch size \[3\]\)",
    ),
    "no batch dimension": (lambda: table(torch.tensor(3)), SchemaError, r"use add\(\) for one row"),
    "text": (lambda: changed(obs=["a", "b", "c"]), OstinatoError, "'obs' must be one tensor, got list"),
    "text in the first field": (lambda: changed(id="abc"), OstinatoError, "'id'.*ListStorage"),
    "text of numpy": (lambda: changed(obs=np.array(["a", "b", "c"])), KindError, "'obs'.*ListStorage"),
    "objects of numpy": (lambda: changed(obs=np.array([None, 1, 2])), KindError, "'obs'.*ListStorage"),
    "None": (lambda: changed(obs=None), KindError, "'obs'.*NoneType"),
    "None as rows": (lambda: None, OstinatoError, "NoneType"),
    "ragged rows": (lambda: [table(torch.tensor(1)), changed(id=1)], OstinatoError, "."),
    "a sparse tensor": (lambda: changed(obs=torch.zeros(3, 3).to_sparse()), KindError, "'obs'.*sparse"),
    "a nested tensor": (
        lambda: changed(obs=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2), torch.zeros(1)])),
        KindError,
        "'obs'.*nested",
    ),
    "a meta tensor": (lambda: changed(obs=torch.zeros(3, 3, device="meta")), OstinatoError, "'obs'"),
    "rows of a list that differ": (
        lambda: [table(torch.tensor(1)), {"id": torch.tensor(1)}],
        OstinatoError,
        "the same keys|missing",
    ),
    "text as rows": (lambda: "abc", OstinatoError, "str"),
    "an iterator": (lambda: iter([1, 2]), OstinatoError, "iterator"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", list(ROWS))
@pytest.mark.parametrize("storage", ["packed", "mapped-columns"])
def test_rows_are_refused_by_name_and_nothing_changes(case: str, storage: str) -> None:
    make, error, message = ROWS[case]
    rb = five(storage)
    before = snapshot(rb)
    with pytest.raises(error, match=message):
        rb.extend(make())
    same_state(snapshot(rb), before)
    assert rb.extend(table(torch.arange(5, 7))).tolist() == [5, 6]
    assert read_ids(rb[:]) == list(range(7))


@pytest.mark.parametrize("case", ["shape", "dtype", "missing key", "unknown key", "flat for nested", "another kind"])
def test_a_single_row_is_refused_by_the_same_rules(case: str) -> None:
    make, error, _ = ROWS[case]
    rb = five()
    before = snapshot(rb)
    row = make()
    with pytest.raises(error):
        rb.add(
            {k: v[0] if isinstance(v, torch.Tensor) else v for k, v in row.items()} if isinstance(row, dict) else row
        )
    same_state(snapshot(rb), before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", ["objects of numpy", "None", "a sparse tensor", "a nested tensor"])
@pytest.mark.parametrize("storage", list(TENSORS))
def test_first_rows_that_are_refused_do_not_fix_the_form(case: str, storage: str) -> None:
    rb = buffer(storage, 8)
    with pytest.raises(OstinatoError):
        rb.extend(ROWS[case][0]())
    assert len(rb) == 0
    assert rb.extend(torch.zeros(2, 5)).tolist() == [0, 1]


@pytest.mark.parametrize("first", [True, False])
def test_ragged_rows_are_refused_with_the_alternative(first: bool) -> None:
    rb = buffer("packed", 8)
    if not first:
        rb.extend(torch.zeros(2, 2))
    with pytest.raises(OstinatoError, match=r"ListStorage|pad") as caught:
        rb.extend([torch.zeros(2), torch.zeros(3)])
    assert "[2]" in str(caught.value)
    assert "[3]" in str(caught.value)
    assert len(rb) == (0 if first else 2)


def test_an_empty_dict_is_refused() -> None:
    with pytest.raises(SchemaError, match="no fields"):
        buffer("packed", 8).extend({})


@pytest.mark.parametrize("storage", list(TENSORS))
def test_fields_that_disagree_in_the_first_batch_are_refused(storage: str) -> None:
    rb = buffer(storage, 8)
    with pytest.raises(SchemaError, match=r"'b' has batch size \[2\], field 'a' has \[3\]"):
        rb.extend({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert rb.extend({"a": torch.zeros(3), "b": torch.zeros(3)}).tolist() == [0, 1, 2]


INDICES: dict[str, Any] = {
    "beyond the rows": 5,
    "beyond the capacity": 12,
    "too negative": -6,
    "in a tensor": torch.tensor([0, 5]),
    "negative in a tensor": torch.tensor([0, -6], dtype=torch.int32),
    "in a list": [0, 7],
    "in an array": np.array([7]),
    "a mask of the capacity": torch.ones(8, dtype=torch.bool),
    "a short mask": [True, False],
    "two dimensions": (0, 0),
}


@pytest.mark.parametrize("case", list(INDICES))
@pytest.mark.parametrize("storage", ["packed", "list"])
def test_indices_out_of_range_are_refused_for_reading_and_writing(case: str, storage: str) -> None:
    rb = five(storage)
    before = snapshot(rb)
    with pytest.raises(SlotError, match=r"out of range for 5 rows|mask \[|indices"):
        rb[INDICES[case]]
    with pytest.raises(SlotError):
        rb[INDICES[case]] = rows([1], "dicts" if storage == "list" else "dict")
    same_state(snapshot(rb), before)


@pytest.mark.parametrize("wrong", [torch.tensor([1.0]), np.array([0.5]), ["a"], {1: 2}, slice(None, None, -1), 1.5])
def test_indices_of_other_kinds_are_refused(wrong: Any) -> None:
    rb = five()
    with pytest.raises((KindError, SlotError)):
        rb[wrong]
    with pytest.raises((KindError, SlotError)):
        rb[wrong] = table(torch.arange(1))


def test_fields_that_are_not_there_are_named() -> None:
    rb = five()
    with pytest.raises(KeyMissingError, match=r"no field 'reward'.*'id', 'obs'"):
        rb["reward"]
    with pytest.raises(KeyMissingError, match=r"no field \('next', 'x'\)"):
        rb["next", "x"]
    with pytest.raises(KeyMissingError, match="no field 'reward'"):
        rb.set_("reward", torch.zeros(5))
    with pytest.raises(KeyMissingError, match="no field 'reward'"):
        rb["reward"] = torch.zeros(5)


def test_an_empty_buffer_cannot_be_indexed() -> None:
    for storage in ("packed", "list"):
        rb = buffer(storage, 5)
        with pytest.raises((UsageError, SlotError)):
            rb[0]
        with pytest.raises((UsageError, SlotError)):
            rb[0] = rows(torch.tensor(1))


@pytest.mark.parametrize(
    "index", [slice(0, 2), torch.tensor([0, 1]), [0, 1], torch.tensor([True, True, False, False, False])]
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("storage", ["packed", "columns", "list"])
def test_assignments_need_one_row_for_each_slot(index: Any, count: int, storage: str) -> None:
    rb = five(storage)
    before = snapshot(rb)
    with pytest.raises(SchemaError):
        rb[index] = rows(range(count), "dicts" if storage == "list" else "dict")
    same_state(snapshot(rb), before)


@pytest.mark.parametrize("case", ["shape", "dtype", "missing key", "flat for nested", "another kind", "text"])
def test_assignments_follow_the_rules_of_writing(case: str) -> None:
    make, _, message = ROWS[case]
    rb = five()
    before = snapshot(rb)
    with pytest.raises(OstinatoError, match=message):
        rb[:3] = make()
    same_state(snapshot(rb), before)


def test_a_field_is_written_only_in_its_form() -> None:
    rb = five()
    before = snapshot(rb)
    for value in (torch.zeros(5), torch.zeros(5, 3) + 0j, torch.zeros(4, 3), torch.zeros(3), 1.0):
        with pytest.raises(SchemaError):
            rb.set_("obs", value)
    with pytest.raises(SlotError):
        rb.set_at_("obs", torch.zeros(1, 3), [5])
    same_state(snapshot(rb), before)


def test_a_list_storage_has_no_fields_to_write() -> None:
    with pytest.raises(KindError, match="has no fields"):
        five("list").set_("obs", torch.zeros(5, 3))


def test_an_immutable_dataset_refuses_every_write() -> None:
    rb = ReplayBuffer(storage=TensorStorage(table(torch.arange(4))), writer=ImmutableDatasetWriter())
    before = snapshot(rb)
    with pytest.raises(UsageError, match="ImmutableDatasetWriter"):
        rb.extend(table(torch.arange(2)))
    with pytest.raises(UsageError, match="ImmutableDatasetWriter"):
        rb.add(table(torch.tensor(1)))
    with pytest.raises(UsageError, match="ImmutableDatasetWriter"):
        rb.empty()
    same_state(snapshot(rb), before)


def test_collections_only_writers_refuse_other_rows() -> None:
    for writer in (TensorDictRoundRobinWriter(), TensorDictMaxValueWriter("r")):
        rb = buffer("packed", 5, writer=writer)
        with pytest.raises(RuntimeError, match="expects data to be a tensor collection"):
            rb.extend({"r": torch.zeros(2)})
        assert len(rb) == 0
        assert rb.extend(TensorDict({"r": torch.zeros(2)}, [2])).tolist() == [0, 1]


def test_a_tensordict_buffer_refuses_other_rows() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    for write in (rb.extend, rb.add):
        with pytest.raises(KindError, match="takes TensorDicts"):
            write(torch.zeros(2))
    rb.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(KindError, match="takes TensorDicts"):
        rb[:1] = {"a": torch.zeros(1)}


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_rows_without_a_rank_are_refused_and_do_not_fix_the_form(storage: str) -> None:
    rb = buffer(storage, 5, writer=TensorDictMaxValueWriter("r"))
    with pytest.raises(KeyMissingError, match=r"\('r',\)"):
        rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError, match=r"NaN.*rows \[1\]"):
        rb.extend(TensorDict({"r": torch.tensor([1.0, float("nan")])}, [2]))
    assert len(rb) == 0
    assert rb.extend(TensorDict({"r": torch.arange(3.0), "b": torch.zeros(3)}, [3])).tolist() == [0, 1, 2]


def test_a_ranking_writer_refuses_environments() -> None:
    with pytest.raises(OptionError, match="ndim=2"):
        ReplayBuffer(storage=LazyTensorStorage(5, ndim=2), writer=TensorDictMaxValueWriter())


def test_the_number_of_environments_must_stay_the_same() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend(torch.zeros(3, 2))
    before = snapshot(rb)
    with pytest.raises(SchemaError, match="3 environments"):
        rb.extend(torch.zeros(2, 2))
    with pytest.raises(SchemaError, match="dimension"):
        rb.extend(torch.zeros(3))
    with pytest.raises(SchemaError):
        rb.add(torch.zeros(2))
    same_state(snapshot(rb), before)


def test_rows_that_share_memory_are_refused_as_a_storage() -> None:
    with pytest.raises(SchemaError, match="clone"):
        TensorStorage(torch.zeros(1, 3).expand(5, 3))


def test_a_state_of_something_else_is_refused() -> None:
    rb = five()
    before = snapshot(rb)
    states: list[dict[str, Any]] = [{}, {"storage": {}}, {"storage": {"class": "X", "state": {}}}]
    for state in states:
        with pytest.raises(ValueError):
            rb.load_state_dict(state)
    same_state(snapshot(rb), before)
