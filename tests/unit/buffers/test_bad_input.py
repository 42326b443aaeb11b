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
    "dtype": (lambda: changed(obs=torch.zeros(3, 3) + 0j), SchemaError, r"'obs' must be float32.*got complex64"),
    "missing key": (lambda: without("obs"), KeyMissingError, r"missing \['obs'\]"),
    "unknown key": (lambda: changed(extra=torch.zeros(3)), SchemaError, r"unknown \['extra'\]"),
    "flat for nested": (lambda: changed(next=torch.zeros(3)), SchemaError, r"'next' must be a dict"),
    "nested for flat": (lambda: changed(obs={"x": torch.zeros(3, 3)}), OstinatoError, r"'obs'"),
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
    "no batch dimension": (lambda: table(torch.tensor(3)), SchemaError, r"use add\(\) for one row"),
    "objects of numpy": (lambda: changed(obs=np.array([None, 1, 2])), KindError, "'obs'.*ListStorage"),
    "None": (lambda: changed(obs=None), KindError, "'obs'.*NoneType"),
    "ragged rows": (lambda: [table(torch.tensor(1)), changed(id=1)], OstinatoError, "."),
    "a sparse tensor": (lambda: changed(obs=torch.zeros(3, 3).to_sparse()), KindError, "'obs'.*sparse"),
    "a nested tensor": (
        lambda: changed(obs=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2), torch.zeros(1)])),
        KindError,
        "'obs'.*nested",
    ),
    "a meta tensor": (lambda: changed(obs=torch.zeros(3, 3, device="meta")), OstinatoError, "'obs'"),
    "an iterator": (lambda: iter([1, 2]), OstinatoError, "iterator"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("storage", ["packed", "mapped-columns"])
def test_rows_are_refused_by_name_and_nothing_changes(storage: str) -> None:
    rb = five(storage)
    before = snapshot(rb)
    for make, error, message in ROWS.values():
        with pytest.raises(error, match=message):
            rb.extend(make())
        same_state(snapshot(rb), before)
    assert rb.extend(table(torch.arange(5, 7))).tolist() == [5, 6]
    assert read_ids(rb[:]) == list(range(7))


def test_single_rows_and_assignments_are_refused_by_the_same_rules() -> None:
    rb = five()
    before = snapshot(rb)
    for case in ("shape", "dtype", "missing key", "unknown key", "flat for nested", "another kind"):
        make, error, message = ROWS[case]
        row = make()
        if isinstance(row, dict):
            row = {key: value[0] if isinstance(value, torch.Tensor) else value for key, value in row.items()}
        with pytest.raises(error):
            rb.add(row)
        if case != "unknown key":
            with pytest.raises(OstinatoError, match=message):
                rb[:3] = make()
    for storage in ("packed", "columns", "list"):
        other = five(storage)
        for index in (slice(0, 2), torch.tensor([0, 1])):
            with pytest.raises(SchemaError):  # one row is not repeated
                other[index] = rows([9], "dicts" if storage == "list" else "dict")
        assert read_ids(other[:]) == list(range(5))
    for value in (torch.zeros(5), torch.zeros(5, 3) + 0j, torch.zeros(4, 3), torch.zeros(3), 1.0):
        with pytest.raises(SchemaError):
            rb.set_("obs", value)
    with pytest.raises(SlotError):
        rb.set_at_("obs", torch.zeros(1, 3), [5])
    same_state(snapshot(rb), before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_first_rows_that_are_refused_do_not_fix_the_form() -> None:
    for storage in TENSORS:
        rb = buffer(storage, 8)
        for case in ("objects of numpy", "None", "a sparse tensor", "a nested tensor"):
            with pytest.raises(OstinatoError):
                rb.extend(ROWS[case][0]())
        with pytest.raises(SchemaError, match="no fields"):
            rb.extend({})
        with pytest.raises(SchemaError, match=r"'b' has batch size \[2\], field 'a' has \[3\]"):
            rb.extend({"a": torch.zeros(3), "b": torch.zeros(2)})
        assert len(rb) == 0
        assert rb.extend(torch.zeros(2, 5)).tolist() == [0, 1]


def test_ragged_rows_are_refused_with_the_alternative() -> None:
    rb = buffer("packed", 8)
    for present in (0, 2):
        with pytest.raises(OstinatoError, match=r"ListStorage|pad") as caught:
            rb.extend([torch.zeros(2), torch.zeros(3)])
        assert "[2]" in str(caught.value)
        assert "[3]" in str(caught.value)
        assert len(rb) == present
        rb.extend(torch.zeros(2, 2))


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


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_indices_that_name_no_rows_are_refused_for_reading_and_writing(storage: str) -> None:
    rb = five(storage)
    before = snapshot(rb)
    one = rows([1], "dicts" if storage == "list" else "dict")
    for index in INDICES.values():
        with pytest.raises(SlotError, match=r"out of range for 5 rows|mask \[|indices"):
            rb[index]
        with pytest.raises(SlotError):
            rb[index] = one
    kinds: list[Any] = [torch.tensor([1.0]), np.array([0.5]), ["a"], {1: 2}, slice(None, None, -1), 1.5]
    for wrong in kinds:
        with pytest.raises((KindError, SlotError)):
            rb[wrong]
        with pytest.raises((KindError, SlotError)):
            rb[wrong] = one
    same_state(snapshot(rb), before)


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
    with pytest.raises(KindError, match="has no fields"):
        five("list").set_("obs", torch.zeros(5, 3))


def test_an_immutable_dataset_refuses_every_write() -> None:
    rb = ReplayBuffer(storage=TensorStorage(table(torch.arange(4))), writer=ImmutableDatasetWriter())
    before = snapshot(rb)
    writes: list[Any] = [lambda: rb.extend(table(torch.arange(2))), lambda: rb.add(table(torch.tensor(1))), rb.empty]
    for write in (*writes, lambda: rb.extend(table(torch.arange(0)))):
        with pytest.raises(UsageError, match="ImmutableDatasetWriter"):
            write()
    same_state(snapshot(rb), before)


def test_a_tensordict_buffer_refuses_other_rows() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    for write in (rb.extend, rb.add):
        with pytest.raises(KindError, match="takes TensorDicts"):
            write(torch.zeros(2))
    with pytest.raises(RuntimeError, match="expects data to be a tensor collection"):
        buffer("packed", 5, writer=TensorDictRoundRobinWriter()).extend({"a": torch.zeros(2)})
    rb.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(KindError, match="takes TensorDicts"):
        rb[:1] = {"a": torch.zeros(1)}


def test_rows_without_a_rank_are_refused_and_do_not_fix_the_form() -> None:
    for storage in ("packed", "list"):
        rb = buffer(storage, 5, writer=TensorDictMaxValueWriter("r"))
        with pytest.raises(KeyMissingError, match=r"\('r',\)"):
            rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
        with pytest.raises(SchemaError, match=r"NaN.*rows \[1\]"):
            rb.extend(TensorDict({"r": torch.tensor([1.0, float("nan")])}, [2]))
        assert len(rb) == 0
        assert rb.extend(TensorDict({"r": torch.arange(3.0), "b": torch.zeros(3)}, [3])).tolist() == [0, 1, 2]
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
