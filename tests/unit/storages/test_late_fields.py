"""Late fields: keys that `write_all` and assignments bring after the first rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import ReplayBuffer, SamplerWithoutReplacement
from ostinato.errors import KeyMissingError, KindError, SchemaError

from ...tags import TENSORS, buffer, fill, read_ids, same_state, snapshot, table

pytestmark = pytest.mark.usefixtures("backend")


def rb_of_five(storage: str = "packed", **options: Any) -> ReplayBuffer:
    rb = buffer(storage, 8, **options)
    fill(rb, range(5))
    return rb


def with_late(ids: list[int], factor: int = 10) -> dict[str, Any]:
    rows = table(torch.tensor(ids))
    return {**rows, "late": rows["id"] * factor}


@pytest.mark.parametrize("storage", list(TENSORS))
def test_a_new_key_becomes_a_field(storage: str) -> None:
    rb = rb_of_five(storage)
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    for batch in (rb[:], rb.sample(20), rb[torch.tensor([3, 1])], rb[1:3]):
        assert torch.equal(batch["late"], batch["id"] * 10)
    assert rb["late"].tolist() == [0, 10, 20, 30, 40]
    assert rb[2]["late"].tolist() == 20


def test_a_new_key_of_a_tensordict_becomes_a_field() -> None:
    rb = buffer("packed", 8)
    fill(rb, range(5), "tensordict")
    rb[:] = TensorDict(with_late([0, 1, 2, 3, 4]), [5])
    batch = rb.sample(10)
    assert isinstance(batch, TensorDict)
    assert torch.equal(batch["late"], batch["id"] * 10)


def test_sampling_a_row_without_the_field_names_field_and_count() -> None:
    rb = rb_of_five(sampler=SamplerWithoutReplacement(shuffle=False))
    rb.write_all(with_late([0, 1, 2]), end=3)
    with pytest.raises(KeyMissingError, match=r"2 of the 5 rows sampled lack (the )?field 'late'"):
        rb.sample(5)
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    assert torch.equal(rb.sample(5)["late"], torch.arange(5) * 10)


def test_reading_rows_that_differ_names_field_and_count() -> None:
    rb = rb_of_five()
    rb.write_all(with_late([0, 1, 2]), end=3)
    assert rb[:3]["late"].tolist() == [0, 10, 20]
    assert "late" not in rb[3:]
    with pytest.raises(KeyMissingError, match=r"2 of the 5 rows read lack (the )?field 'late'"):
        rb[:]
    with pytest.raises(KeyMissingError, match="late"):
        rb["late"]
    with pytest.raises(KeyMissingError, match="1 of the 2"):
        rb[torch.tensor([2, 3])]


@pytest.mark.parametrize("index", [0, -1, [0, 1], slice(1, 3), torch.tensor([True] + [False] * 4)], ids=str)
def test_an_edit_of_some_rows_brings_no_new_field(index: Any) -> None:
    """It would make every later sample fail; one that all rows have by then may be written to any of them."""
    rb, ids = rb_of_five(), torch.arange(5)[index]
    rows = table(ids)
    with pytest.raises(SchemaError, match=rf"new field 'late' would be missing in {5 - ids.numel()} of the 5 rows"):
        rb[index] = {**rows, "late": rows["id"] * 10}
    with pytest.raises(SchemaError, match="new field 'late'"):
        rb.storage[index] = {**rows, "late": rows["id"] * 10}
    assert "late" not in rb.sample(20)
    rb[:] = with_late([0, 1, 2, 3, 4])
    rb[index] = {**rows, "late": rows["id"] * 20}
    assert rb["late"][index].tolist() == (ids * 20).tolist()
    rb[torch.tensor([4, 3, 2, 1, 0])] = {**table(torch.arange(5)), "other": torch.ones(5)}
    assert rb["other"].tolist() == [1.0] * 5


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
def test_a_misspelt_key_is_named_as_it_was_given(kind: str) -> None:
    rb = buffer("packed", 8)
    fill(rb, range(5), kind)
    words = r"got \['idd'\] \(missing .*, unknown \['idd'\]\)"
    given = {"idd": torch.arange(5)}
    data: Any = given if kind == "dict" else TensorDict(given, [5])
    with pytest.raises(KeyMissingError, match=words):
        rb[0] = data[0] if isinstance(data, TensorDict) else {"idd": 0}
    with pytest.raises(KeyMissingError, match=words):
        rb.write_all(data)
    with pytest.raises(KeyMissingError, match=words):
        rb.extend(data)


@pytest.mark.parametrize("storage", list(TENSORS))
def test_new_rows_lack_the_field_and_may_bring_it(storage: str) -> None:
    rb = rb_of_five(storage)
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    rb.extend(with_late([5, 6]))
    rb.add(
        {
            key: value[0] if not isinstance(value, dict) else {k: v[0] for k, v in value.items()}
            for key, value in with_late([7]).items()
        }
    )
    assert rb[:]["late"].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    fill(rb, [8])  # replaces row 0
    with pytest.raises(KeyMissingError, match="1 of the 8"):
        rb[:]
    assert rb[1:]["late"].tolist() == [10, 20, 30, 40, 50, 60, 70]


def test_a_row_replaced_without_the_field_lacks_it() -> None:
    """It must not keep that of the row before: fields of two rows would be mixed."""
    rb = rb_of_five()
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    rb[0] = table(torch.tensor(100))
    rb[torch.tensor([3])] = table(torch.tensor([103]))
    assert "late" not in rb[0]
    assert "late" not in rb[torch.tensor([0, 3])]
    assert rb[1:3]["late"].tolist() == [10, 20]


def test_a_field_that_no_row_has_any_more_is_gone() -> None:
    rb = rb_of_five()
    rb.write_all(with_late([0, 1]), end=2)
    fill(rb, range(5, 12))
    assert "late" not in rb.sample(20)
    assert "late" not in rb[:]
    assert read_ids(rb[:]) == [8, 9, 10, 11, 4, 5, 6, 7]


def test_emptying_forgets_late_fields() -> None:
    rb = rb_of_five()
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    rb.empty()
    fill(rb, range(3))
    assert "late" not in rb.sample(5)
    with pytest.raises(SchemaError, match="unknown"):
        rb.extend(with_late([9]))


def test_the_field_keeps_its_form() -> None:
    rb = rb_of_five()
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    before = snapshot(rb)
    for wrong in (
        torch.full((5,), 0.5),
        torch.zeros(5, 2, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
        torch.tensor(1),
    ):
        with pytest.raises(SchemaError, match="'late'"):
            rb.write_all({**table(torch.arange(5)), "late": wrong})
        with pytest.raises(SchemaError, match="'late'"):
            rb.set_("late", wrong)
    same_state(snapshot(rb), before)


def test_a_nested_new_key_is_refused() -> None:
    rb = rb_of_five()
    before = snapshot(rb)
    with pytest.raises(KindError, match=r"'late'.*nested"):
        rb.write_all({**table(torch.arange(5)), "late": {"a": torch.zeros(5)}})
    same_state(snapshot(rb), before)


def test_extend_does_not_bring_new_keys() -> None:
    """A misspelt key in the loop that collects must not make a field of its own."""
    rb = rb_of_five()
    before = snapshot(rb)
    for data in (with_late([5]), {**with_late([5]), "later": torch.zeros(1)}):
        with pytest.raises(SchemaError, match="late"):
            rb.extend(data)
    same_state(snapshot(rb), before)


def test_the_field_is_written_in_place() -> None:
    rb = rb_of_five()
    rb.write_all(with_late([0, 1]), end=2)
    rb.set_at_("late", torch.tensor([70, 80]), [2, 3])
    assert rb[:4]["late"].tolist() == [0, 10, 70, 80]


@pytest.mark.parametrize("storage", list(TENSORS))
def test_the_callers_tensor_may_be_reused(storage: str) -> None:
    rb = rb_of_five(storage)
    data = with_late([0, 1, 2, 3, 4])
    rb.write_all(data)
    data["late"].zero_()
    assert rb["late"].tolist() == [0, 10, 20, 30, 40]
    more = with_late([5])
    rb.extend(more)
    more["late"].zero_()
    assert rb["late"].tolist() == [0, 10, 20, 30, 40, 50]


def test_the_field_is_detached() -> None:
    rb = rb_of_five()
    rb.write_all({**table(torch.arange(5)), "late": torch.ones(5, requires_grad=True) * 2})
    assert not rb[:]["late"].requires_grad
    assert not rb.sample(3)["late"].requires_grad


def test_late_fields_of_long_batches_wrap_like_the_others() -> None:
    rb = rb_of_five()
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    rb.extend(with_late(list(range(5, 30))))
    batch = rb[:]
    assert torch.equal(batch["late"], batch["id"] * 10)
    assert len(rb) == 8


def test_late_fields_count_as_memory() -> None:
    rb = rb_of_five()
    before = rb.stats().nbytes
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    assert rb.stats().nbytes >= before + 8 * 8
