"""Bad input and bad options are refused by name; input leaves the buffer bit-identical."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from ostinato.errors import (
    CapacityError,
    KeyMissingError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    SlotError,
    StorageMemoryError,
)

from ...tags import buffer, fill, read_ids, rows, same_state, snapshot, table
from .refusals import raises


def five(storage: str = "packed", **options: Any) -> ReplayBuffer:
    rb = buffer(storage, 8, **options)
    fill(rb, range(5))
    return rb


def changed(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**table(torch.arange(3)), **fields}.items() if value is not ...}


ROWS: dict[str, Any] = {
    "shape": ({"obs": torch.zeros(3, 4)}, SchemaError, r"'obs' must be float32\[3, 3\].*got float32\[3, 4\]"),
    "dtype": ({"obs": torch.zeros(3, 3) + 0j}, SchemaError, r"'obs' must be float32.*got complex64"),
    "missing key": ({"obs": ...}, KeyMissingError, r"missing \['obs'\]"),
    "unknown key": ({"extra": torch.zeros(3)}, SchemaError, r"unknown \['extra'\]"),
    "flat for nested": ({"next": torch.zeros(3)}, SchemaError, r"'next' must be a dict"),
    "nested for flat": ({"obs": {"x": torch.zeros(3, 3)}}, OstinatoError, r"'obs'"),
    "nested": (
        {"next": {"obs": torch.zeros(3, 9).double(), "done": torch.zeros(3, dtype=torch.bool)}},
        SchemaError,
        r"\('next', 'obs'\) must be float64\[3, 2\].*got float64\[3, 9\]",
    ),
    "a meta tensor": ({"obs": torch.zeros(3, 3, device="meta")}, OstinatoError, "'obs'"),
    "objects of numpy": ({"obs": np.array([None, 1, 2])}, KindError, "'obs'.*ListStorage"),
    "None": ({"obs": None}, KindError, "'obs'.*NoneType"),
    "a sparse tensor": ({"obs": torch.zeros(3, 3).to_sparse()}, KindError, "'obs'.*sparse"),
}
"""Fields that differ from those of rows that fit (`...` for none), and what is said."""
OTHERS: list[Any] = [
    (lambda: torch.zeros(3), SchemaError, "must be a dict with the keys"),
    (lambda: table(torch.tensor(3)), SchemaError, r"use add\(\) for one row"),
    (lambda: iter([1, 2]), OstinatoError, "iterator"),
    (lambda: [table(torch.tensor(1)), changed({"id": 1})], OstinatoError, ""),
    (lambda: [torch.zeros(2), torch.zeros(3)], OstinatoError, r"\[2\].*\[3\].*(ListStorage|pad)"),
    (
        lambda: changed({"obs": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(1)])}),
        KindError,
        "'obs'.*nested",
    ),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("storage", ["packed", "mapped-columns"])
def test_rows_are_refused_by_name_and_nothing_changes(storage):
    rb = five(storage)
    before = snapshot(rb)
    wrong = [(changed(fields), error, words) for fields, error, words in ROWS.values()]
    for data, error, words in (*wrong, *((make(), error, words) for make, error, words in OTHERS)):
        with pytest.raises(error, match=words or None):
            rb.extend(data)
        same_state(snapshot(rb), before)
    for data, error, words in wrong:
        row = {key: value[0] if isinstance(value, torch.Tensor) else value for key, value in data.items()}
        raises((partial(rb.add, row), error, ""))
        if "extra" not in data:
            raises((partial(rb.__setitem__, slice(3), data), OstinatoError, words))
    for index in (slice(0, 2), torch.tensor([0, 1])):
        raises((partial(rb.__setitem__, index, rows([9])), SchemaError, ""))  # one row is not repeated
    for value in (torch.zeros(5), torch.zeros(5, 3) + 0j, torch.zeros(4, 3), 1.0):
        raises((partial(rb.set_, "obs", value), SchemaError, ""))
    raises((lambda: rb.set_at_("obs", torch.zeros(1, 3), [5]), SlotError, ""))
    same_state(snapshot(rb), before)
    assert rb.extend(table(torch.arange(5, 7))).tolist() == [5, 6]
    assert read_ids(rb[:]) == list(range(7))


INDICES: list[Any] = [
    5,
    12,
    -6,
    torch.tensor([0, 5]),
    torch.tensor([0, -6], dtype=torch.int32),
    [0, 7],
    np.array([7]),
    torch.ones(8, dtype=torch.bool),
    [True, False],
    (0, 0),
]
"""Indices beyond the rows, masks of other sizes, and one of two dimensions."""


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_indices_that_name_no_rows_are_refused_for_reading_and_writing(storage):
    rb = five(storage)
    before = snapshot(rb)
    one = rows([1], "dicts" if storage == "list" else "dict")
    kinds: list[Any] = [torch.tensor([1.0]), np.array([0.5]), ["a"], {1: 2}, slice(None, None, -1), 1.5]
    for index in (*INDICES, *kinds):
        for call in (lambda index=index: rb[index], lambda index=index: rb.__setitem__(index, one)):
            with pytest.raises((KindError, SlotError)) as caught:
                call()
        assert any(index is each for each in kinds) or isinstance(caught.value, SlotError)
    with pytest.raises(SlotError, match="out of range for 5 rows"):
        rb[5]
    same_state(snapshot(rb), before)


def test_fields_that_are_not_there_are_named():
    rb = five()
    raises(
        (lambda: rb["reward"], KeyMissingError, r"no field 'reward'.*'id', 'obs'"),
        (lambda: rb["next", "x"], KeyMissingError, r"no field \('next', 'x'\)"),
        (lambda: rb.set_("reward", torch.zeros(5)), KeyMissingError, "no field 'reward'"),
        (lambda: rb.__setitem__("reward", torch.zeros(5)), KeyMissingError, "no field 'reward'"),
        (lambda: five("list").set_("obs", torch.zeros(5, 3)), KindError, "has no fields"),
        (lambda: TensorStorage(torch.zeros(1, 3).expand(5, 3)), SchemaError, "clone"),
    )


def test_a_tensordict_buffer_refuses_other_rows():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    plain = {"a": torch.zeros(2)}
    rb.extend(TensorDict(plain, [2]))
    raises(
        (lambda: rb.extend(torch.zeros(2)), KindError, "takes TensorDicts"),
        (lambda: rb.add(torch.zeros(2)), KindError, "takes TensorDicts"),
        (lambda: rb.__setitem__(slice(2), plain), KindError, "takes TensorDicts"),
        (
            lambda: buffer("packed", 5, writer=TensorDictRoundRobinWriter()).extend(plain),
            RuntimeError,
            "expects data to be a tensor collection",
        ),
    )


def test_rows_without_a_rank_are_refused_and_do_not_fix_the_form():
    for storage in ("packed", "list"):
        rb = buffer(storage, 5, writer=TensorDictMaxValueWriter("r"))
        with pytest.raises(KeyMissingError, match=r"\('r',\)"):
            rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
        with pytest.raises(SchemaError, match=r"NaN.*rows \[1\]"):
            rb.extend(TensorDict({"r": torch.tensor([1.0, float("nan")])}, [2]))
        assert len(rb) == 0
        assert rb.extend(TensorDict({"r": torch.arange(3.0), "b": torch.zeros(3)}, [3])).tolist() == [0, 1, 2]


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_capacities_are_positive_integers(storage):
    wrong: list[Any] = [0, -1, 2.5, "3", True, *([] if storage is ListStorage else [None])]
    for capacity in wrong:
        with pytest.raises(CapacityError, match=r"integer of at least 1 .*got"):
            storage(capacity)
    assert storage(np.int64(5)).capacity == 5


def test_memory_and_disk_that_are_not_there_are_refused_with_the_numbers():
    for storage, words in ((LazyTensorStorage, r"\(4000.0 TB\).*are free"), (LazyMemmapStorage, "on the disk")):
        rb = ReplayBuffer(storage=storage(10**15))
        with pytest.raises(StorageMemoryError, match=f"needs 4000000000000000 bytes.*{words}"):
            rb.extend(torch.zeros(2))
        assert len(rb) == 0


def test_batch_sizes_are_positive_integers():
    rb = five()
    for size in (0, -1, True, 2**63):
        for call in (rb.sample, lambda size: ReplayBuffer(batch_size=size)):
            with pytest.raises((OptionError, KindError), match="batch_size"):
                call(size)
    assert len(read_ids(rb.sample(np.int64(3)))) == len(read_ids(rb.sample(torch.tensor(3)))) == 3  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to copy to")
def test_pinned_memory_without_an_accelerator_is_refused():
    with pytest.raises(OptionError, match="pin_memory=True needs"):
        buffer("packed", 5, pin_memory=True)


def test_other_options_are_refused_by_name():
    """More of them: `tests/parity/test_sampling.py`, `tests/contracts/test_options.py`."""
    rb = five()
    short = buffer("packed", 5, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4)
    fill(short, range(3))
    parts = ("storage", "sampler", "writer")
    base = "must be an instance of ostinato"
    raises(
        *((lambda name=name: ReplayBuffer(**{name: 5}), KindError, f"{name} {base}") for name in parts),  # type: ignore[arg-type]
        *((lambda name=name: getattr(rb, f"set_{name}")(5), KindError, f"{name} {base}") for name in parts),
        (lambda: ReplayBuffer(transform=5), KindError, "callable"),
        (lambda: rb.append_transform(5), KindError, "callable"),
        (lambda: rb.insert_transform(1, lambda x: x), OptionError, r"\[0, 0\]"),
        (lambda: ReplayBuffer(generator=5), KindError, "torch.Generator"),  # type: ignore[arg-type]
        (lambda: SamplerWithoutReplacement(replacement=True), OptionError, "replacement=True"),
        *((lambda ndim=ndim: LazyTensorStorage(5, ndim=ndim), OptionError, "ndim must be 1") for ndim in (0, 3, True)),
        *((lambda dim=dim: ReplayBuffer(dim_extend=dim), OptionError, "0 or 1") for dim in (2, -1, True)),
        (lambda: TensorStorage(torch.zeros(4), max_size=10), CapacityError, "max_size=10 for 4 rows"),
        (short.sample, OptionError, r"batch size \(4\) is greater than the storage capacity \(3\)"),
    )
