"""What may be put in, and in which form it comes out: kinds, dtypes, layouts in memory, sizes."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import Tensor

from ostinato import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage
from ostinato.errors import KindError, SchemaError

from ...tags import STORAGES, TENSORS, buffer, fill, read_ids, rows, table

pytestmark = pytest.mark.usefixtures("backend")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@tensorclass
class Step:
    obs: Tensor
    reward: Tensor


class Pair(NamedTuple):
    left: Any
    right: Any


def equal(first: Tensor, second: Tensor) -> bool:
    """Compare bits: some dtypes cannot be compared, and NaN differs from itself."""
    one, other = (x.contiguous().resolve_conj().resolve_neg() for x in (first, second))
    same = one.dtype is other.dtype and one.shape == other.shape
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


KINDS: dict[str, Any] = {
    "tensor": torch.arange(12.0).view(4, 3),
    "scalars": torch.arange(4),
    "dict": {"a": torch.arange(4), "b": {"c": torch.zeros(4, 2), 30: torch.ones(4)}},
    "tuple": (torch.arange(4), {"x": torch.zeros(4, 2)}),
    "nested list": {"a": [torch.arange(4), torch.ones(4)], "b": (torch.zeros(4), [torch.zeros(4, 1)])},
    "named tuple": Pair(torch.arange(4), {"x": torch.zeros(4)}),
    "tensordict": TensorDict({"a": torch.arange(4), "n": TensorDict({"b": torch.zeros(4, 2)}, [4])}, [4]),
    "row dimensions": TensorDict({"a": torch.arange(8).view(4, 2)}, [4, 2]),
    "tensorclass": Step(torch.arange(4.0), torch.ones(4), batch_size=[4]),  # type: ignore[call-arg]
    "mixed": {"td": TensorDict({"a": torch.arange(4)}, [4]), "t": torch.zeros(4)},
    "odd keys": {
        "": torch.arange(4),
        "a.b": torch.zeros(4),
        None: torch.ones(4),
        True: torch.ones(4),
        "é/..": torch.ones(4),
    },
}


def same_form(got: Any, expected: Any) -> None:
    """Assert equal kinds, keys in order, and values."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        assert equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same_form(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same_form(one, other)
    else:
        assert got.batch_size == expected.batch_size
        assert set(got.keys()) == set(expected.keys())
        for key in expected.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
            same_form(got.get(key), expected.get(key))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("storage", list(TENSORS))
def test_rows_come_out_in_the_kind_that_was_put_in(kind: str, storage: str) -> None:
    data = KINDS[kind]
    rb = buffer(storage, 10)
    assert rb.extend(data).tolist() == [0, 1, 2, 3]
    same_form(rb[:], data)
    same_form(rb[torch.arange(4)], data)
    batch, info = rb.sample(4, return_info=True)
    same_form(batch, rb[info["index"]])


def test_a_root_list_is_a_stack_of_rows() -> None:
    rb = buffer("packed")
    rb.extend([{"a": torch.tensor(i), "b": float(i)} for i in range(3)])
    assert rb[:]["a"].tolist() == [0, 1, 2]
    assert rb[:]["b"].tolist() == [0.0, 1.0, 2.0]
    stacked = buffer("packed")
    stacked.extend([TensorDict({"a": torch.tensor(i)}) for i in range(3)])
    assert isinstance(stacked[:], TensorDict)


def test_a_root_tuple_is_one_pytree() -> None:
    rb = buffer("packed")
    rb.extend((torch.arange(3), torch.zeros(3, 2)))
    first, second = rb.sample(2)
    assert first.shape == (2,)
    assert second.shape == (2, 2)


def test_a_lazy_stack_is_stored_like_a_tensordict() -> None:
    rb = buffer("packed")
    rb.extend(LazyStackedTensorDict(*[TensorDict({"a": torch.tensor(i)}) for i in range(3)]))
    assert rb[:]["a"].tolist() == [0, 1, 2]


def test_a_lazy_stack_is_stored_by_its_common_fields_with_a_warning() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    rows = [TensorDict({"a": torch.tensor(float(i)), "next": {"b": torch.tensor(i)}}) for i in range(3)]
    rows[0]["reward"] = torch.tensor(1.0)
    rows[2]["next", "only"] = torch.tensor(1.0)
    with pytest.warns(UserWarning, match=r"not stored: \['reward'\]"):
        rb.extend(LazyStackedTensorDict(*rows))
    assert set(rb[:].keys(include_nested=True, leaves_only=True)) == {"a", ("next", "b")}
    assert rb[:]["a"].tolist() == [0, 1, 2]


def test_a_lazy_stack_whose_rows_lack_a_stored_field_raises() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"a": torch.zeros(1), "b": torch.zeros(1)}, [1]))
    rows = [TensorDict({"a": torch.zeros(()), "b": torch.zeros(())}), TensorDict({"a": torch.zeros(())})]
    with pytest.warns(UserWarning, match="not stored"), pytest.raises(SchemaError, match="'b'"):
        rb.extend(LazyStackedTensorDict(*rows))
    with pytest.raises(SchemaError, match="no field in common"):
        rb.extend(LazyStackedTensorDict(TensorDict({"a": torch.zeros(())}), TensorDict({"b": torch.zeros(())})))
    assert len(rb) == 1


class Pairs:
    """Gives every row with the one before: none for the first row alone."""

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None

    def forward(self, batch: Any) -> Any:
        return batch

    def inv(self, rows: torch.Tensor) -> torch.Tensor | None:
        known = rows if self.last is None else torch.cat((self.last, rows))
        self.last = known[-1:]
        return torch.stack((known[:-1], known[1:]), -1) if len(known) > 1 else None


def test_a_transform_that_waits_for_more_rows_writes_none() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=Pairs())
    assert rb.extend(torch.tensor([1])).tolist() == []
    assert len(rb) == 0
    assert rb.extend(torch.tensor([2, 3])).tolist() == [0, 1]
    assert rb[:].tolist() == [[1, 2], [2, 3]]
    two = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), transform=Pairs())
    assert two.extend(torch.tensor([1])).shape == (0, 2)


def test_a_callable_that_forgets_its_return_raises() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.append_transform(lambda rows: None, invert=True)
    with pytest.raises(KindError, match="returned None"):
        rb.extend(torch.tensor([1]))
    assert len(rb) == 0


def test_dicts_and_tensordicts_serve_for_each_other_by_name() -> None:
    rb = buffer("packed")
    rb.extend({"a": torch.arange(2), "b": torch.zeros(2)})
    rb.extend(TensorDict({"b": torch.ones(2), "a": torch.arange(2, 4)}, [2]))
    rb.extend({"b": torch.ones(1), "a": torch.tensor([4])})
    assert isinstance(rb[:], dict)
    assert rb[:]["a"].tolist() == [0, 1, 2, 3, 4]
    assert rb[:]["b"].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("kind", ["dict", "tensordict", "tensor"])
def test_add_and_extend_make_the_same_store(storage: str, kind: str) -> None:
    by_add, by_extend = buffer(storage, 4), buffer(storage, 4)
    fill(by_extend, range(6), kind)
    for i in range(6):
        assert by_add.add(rows(torch.tensor(i), kind)) == i % 4
    assert read_ids(by_add[:]) == read_ids(by_extend[:]) == [4, 5, 2, 3]


def test_add_makes_one_row_of_a_sequence_and_extend_many() -> None:
    """The same tensor is one row for `add` and a batch for `extend`: neither guesses."""
    one, many = buffer("packed"), buffer("packed")
    one.add(torch.zeros(5))
    many.extend(torch.zeros(5))
    assert (len(one), len(many)) == (1, 5)
    assert one[0].shape == (5,)


@pytest.mark.parametrize("storage", list(TENSORS))
def test_numbers_and_arrays_are_taken_at_the_door(storage: str) -> None:
    rb = buffer(storage)
    rb.add({"f": 1.5, "i": 3, "b": True, "np": np.float32(2.5), "a": np.arange(3)})
    rb.add({"f": 2, "i": np.int64(4), "b": np.bool_(False), "np": 3.5, "a": torch.arange(3)})
    got = rb[:]
    assert got["f"].tolist() == [1.5, 2.0]
    assert got["i"].tolist() == [3, 4]
    assert got["b"].tolist() == [True, False]
    assert got["np"].tolist() == [2.5, 3.5]
    assert got["a"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert (got["f"].dtype, got["i"].dtype, got["b"].dtype) == (torch.float32, torch.int64, torch.bool)
    rb.extend(
        {
            "f": np.ones(2, np.float32),
            "i": np.ones(2, np.int64),
            "b": np.ones(2, bool),
            "np": np.ones(2, np.float32),
            "a": np.ones((2, 3), np.int64),
        }
    )
    assert rb[2:]["a"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_numbers_take_the_stored_dtype_in_both_verbs() -> None:
    rb = buffer("packed")
    rb.extend([1.5, 2.5])
    rb.add(3)
    rb.extend([4, 5])
    assert rb[:].tolist() == [1.5, 2.5, 3.0, 4.0, 5.0]


def test_a_number_that_would_lose_its_fraction_is_refused() -> None:
    rb = buffer("packed")
    rb.add({"i": 1})
    with pytest.raises(ValueError, match="int64"):
        rb.add({"i": 1.5})
    rb.add({"i": True})
    assert rb[:]["i"].tolist() == [1, 1]


@pytest.mark.parametrize("value", [-1, 256, 2**70])
def test_numbers_beyond_the_stored_dtype_are_refused(value: int) -> None:
    rb = buffer("packed")
    rb.add({"a": torch.tensor(3, dtype=torch.uint8)})
    with pytest.raises((ValueError, TypeError), match="'a'"):
        rb.add({"a": value})
    assert len(rb) == 1


@pytest.mark.parametrize("value", [2**70, 10**400])
def test_numbers_that_fit_no_dtype_are_refused(value: int) -> None:
    with pytest.raises((ValueError, TypeError), match="'a'"):
        buffer("packed").add({"a": value})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", ["packed", "columns", "mapped"])
def test_every_dtype_keeps_its_bits_on_every_path(dtype: torch.dtype, storage: str) -> None:
    bits = torch.arange(16 * dtype.itemsize, dtype=torch.uint8).view(16, -1)
    values = (bits % 2 == 1)[:, 0] if dtype is torch.bool else bits.view(dtype)[:, 0]
    rb = buffer(storage, 8)
    rb.extend({"x": values[:6].clone(), "id": torch.arange(6)})
    rb.extend({"x": values[6:12:2], "id": torch.arange(6, 12, 2)})  # strided, and wraps: slots 6, 7, 0
    rb.add({"x": values[11], "id": 11})
    expected = torch.stack([values[i] for i in (10, 11, 2, 3, 4, 5, 6, 8)])
    assert equal(rb[:]["x"], expected)
    assert equal(rb[torch.tensor([7, 0])]["x"], torch.stack([values[8], values[10]]))
    batch = rb.sample(20)
    assert equal(batch["x"], torch.stack([values[i] for i in batch["id"].tolist()]))
    rb[torch.tensor([1, 2])] = {"x": torch.stack([values[14], values[15]]), "id": torch.tensor([14, 15])}
    rb.set_at_("x", torch.stack([values[13]]), [3])
    assert equal(rb[1:4]["x"], torch.stack([values[14], values[15], values[13]]))


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_batches_of_every_length_follow_a_deque(storage: str, capacity: int) -> None:
    """One row to three times the capacity, from every position of the cursor."""
    for start in range(capacity + 1):
        for count in range(1, 3 * capacity + 1):
            rb = buffer(storage, capacity)
            model: list[int] = [-1] * capacity
            if start:
                fill(rb, range(start), "tensor")
            slots = fill(rb, range(100, 100 + count), "tensor")
            for i in range(start):
                model[i] = i
            for i in range(count):
                model[(start + i) % capacity] = 100 + i
            present = min(start + count, capacity)
            assert slots.tolist() == [(start + i) % capacity for i in range(count)]
            assert len(rb) == present
            assert read_ids(rb[:]) == model[:present]
            assert rb.cursor == (start + count) % capacity


def test_a_list_storage_takes_any_objects() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items, batch_size=3)
    things: list[Any] = ["a", 1, None, {"x": [1, 2]}, object()]
    assert rb.extend(things).tolist() == [0, 1, 2, 3, 4]
    assert rb[:] == things
    assert all(item in things for item in rb.sample())
    assert rb[-1] is things[-1]


def test_a_list_storage_takes_rows_of_different_sizes() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
    rb.extend([torch.zeros(2), torch.zeros(5)])
    assert [len(row) for row in rb[:]] == [2, 5]


def test_numbers_in_a_list_storage_are_collated_to_tensors() -> None:
    rb = ReplayBuffer(storage=ListStorage(10), batch_size=5, generator=torch.Generator().manual_seed(0))
    rb.extend(range(10))
    assert rb.sample().tolist() == torch.randint(0, 10, (5,), generator=torch.Generator().manual_seed(0)).tolist()


def test_one_dict_given_to_extend_is_ambiguous_for_a_list_storage() -> None:
    for wrong in ({"a": 1}, "text", b"bytes"):
        with pytest.raises(TypeError, match=r"use add\(\)"):
            ReplayBuffer(storage=ListStorage(10)).extend(wrong)


def test_rows_that_cannot_be_stacked_name_the_way_out() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(["a", None])
    with pytest.raises(TypeError, match="collate_fn"):
        rb[:]


def test_a_tensordict_buffer_round_trips_its_samples() -> None:
    """The keys that samples carry are dropped when they are written back."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    fill(rb, range(5), "tensordict")
    batch = rb.sample()
    assert batch["index"].tolist() == read_ids(batch)
    rb.extend(batch)
    assert "index" not in rb[:].keys()  # noqa: SIM118 (a TensorDict iterates over rows)
    assert read_ids(rb[5:9]) == batch["index"].tolist()


def test_a_tensor_storage_shares_the_callers_memory() -> None:
    """It is the one storage that adopts data; its docstring says so."""
    data = table(torch.arange(4))
    rb = buffer(TensorStorage(data))
    assert read_ids(rb[:]) == [0, 1, 2, 3]
    rb.extend(table(torch.arange(100, 101)))
    assert data["id"].tolist() == [100, 1, 2, 3]


def as_laid_out(values: Tensor, layout: str) -> Any:
    """Return the same values `[6, 4]` in another layout in memory."""
    if layout == "every other row":
        wide = torch.full((12, 4), -1.0)
        wide[::2] = values
        return wide[::2]
    if layout == "every other column":
        wide = torch.full((6, 8), -1.0)
        wide[:, 1::2] = values
        return wide[:, 1::2]
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "offset":
        return torch.cat((torch.full((3, 4), -1.0), values))[3:]
    if layout == "negative strides of numpy":
        return values.flip(0).numpy()[::-1]
    if layout == "columns of numpy":
        return np.asfortranarray(values.numpy())
    if layout == "read-only numpy":
        array = values.numpy().copy()
        array.flags.writeable = False
        return array
    if layout == "foreign byte order":
        return values.numpy().astype(">f4")
    if layout == "record of numpy":
        record = np.zeros(6, dtype=[("pad", "i1"), ("x", "f4", 4)])
        record["x"] = values.numpy()
        return record["x"]
    return values.clone()


LAYOUTS = [
    "contiguous",
    "every other row",
    "every other column",
    "transposed",
    "offset",
    "negative strides of numpy",
    "columns of numpy",
    "read-only numpy",
    "foreign byte order",
    "record of numpy",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("storage", list(TENSORS))
def test_sources_of_any_layout_are_stored_right(layout: str, storage: str) -> None:
    values = torch.arange(24.0).view(6, 4)
    rb = buffer(storage, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend({"x": torch.zeros(4, 4), "id": torch.zeros(4, dtype=torch.int64)})
        rb.extend({"x": as_laid_out(values, layout), "id": torch.arange(6)})  # wraps after four rows
        assert equal(rb[torch.tensor([4, 5, 6, 7, 0, 1])]["x"], values)
        rb.add({"x": as_laid_out(values, layout)[2], "id": 2})
        assert equal(rb[2]["x"], values[2])
        rb[2:8] = {"x": as_laid_out(values, layout), "id": torch.arange(6)}
        assert equal(rb[2:8]["x"], values)


@pytest.mark.parametrize("storage", list(TENSORS))
def test_expanded_sources_are_stored_right(storage: str) -> None:
    rb = buffer(storage, 6)
    rb.extend({"x": torch.tensor([[1.0, 2.0]]).expand(4, 2), "y": torch.tensor(7.0).expand(4)})
    assert rb[:]["x"].tolist() == [[1.0, 2.0]] * 4
    assert rb[:]["y"].tolist() == [7.0] * 4


@pytest.mark.parametrize("storage", list(TENSORS))
def test_conjugated_and_negated_views_are_stored_as_they_read(storage: str) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j, 5j])
    rb = buffer(storage)
    for _ in range(2):  # the first rows, and later ones
        rb.extend({"c": values.conj(), "n": values.conj().imag})
    rb.add({"c": values.conj()[0], "n": values.conj().imag[0]})
    expected = values.conj().resolve_conj()
    assert equal(rb[:]["c"], torch.cat((expected, expected, expected[:1])))
    assert rb[:]["n"].tolist() == [-2.0, 4.0, -5.0, -2.0, 4.0, -5.0, -2.0]


@pytest.mark.parametrize("storage", list(TENSORS))
def test_rows_may_be_moved_within_the_buffer(storage: str) -> None:
    """A source that is a view of the rows it replaces is read before it is overwritten, in both directions."""
    for index, source in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
        rb = buffer(storage, 6)
        fill(rb, range(6))
        expected = list(range(6))
        expected[index] = expected[source]
        rb[index] = rb[source]
        assert read_ids(rb[:]) == expected


@pytest.mark.parametrize("storage", list(TENSORS))
def test_rows_of_the_buffer_may_be_written_again(storage: str) -> None:
    rb = buffer(storage, 6)
    fill(rb, range(7))
    rb.extend(rb[0:4])  # slots 1 to 4 take the rows of slots 0 to 3
    assert read_ids(rb[:]) == [6, 6, 1, 2, 3, 5]


@pytest.mark.parametrize("storage", list(TENSORS))
def test_fields_of_size_zero_go_through_every_path(storage: str) -> None:
    rb = buffer(storage, 4)
    rb.extend({"z": torch.zeros(3, 0, 2), "id": torch.arange(3)})
    rb.extend({"z": torch.zeros(3, 0, 2), "id": torch.arange(3, 6)})
    rb.add({"z": torch.zeros(0, 2), "id": 6})
    assert rb[:]["z"].shape == (4, 0, 2)
    assert rb.sample(3)["z"].shape == (3, 0, 2)
    assert rb[0]["z"].shape == (0, 2)
    rb[torch.tensor([0, 1])] = {"z": torch.zeros(2, 0, 2), "id": torch.arange(2)}
    rb[0:2] = {"z": torch.zeros(2, 0, 2), "id": torch.arange(2)}
    rb.set_("z", torch.zeros(4, 0, 2))
    assert rb[:]["id"].tolist() == [0, 1, 6, 3]


@pytest.mark.parametrize("storage", list(TENSORS))
def test_rows_of_nothing_but_size_zero_are_counted(storage: str) -> None:
    rb = buffer(storage, 4)
    rb.extend(torch.zeros(3, 0))
    assert len(rb) == 3
    assert rb.sample(5).shape == (5, 0)
