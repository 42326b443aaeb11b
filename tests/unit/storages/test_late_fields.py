"""Late fields: keys that `write_all` and assignments bring after the first rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import ReplayBuffer, SamplerWithoutReplacement
from ostinato.errors import KeyMissingError, KindError, SchemaError

from ...tags import TENSORS, buffer, fill, same_state, snapshot, table


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
    nbytes, data = rb.stats().nbytes, with_late([0, 1, 2, 3, 4])
    rb.write_all(data)
    assert rb.stats().nbytes >= nbytes + 8 * 8
    data["late"].zero_()  # the caller's tensor may be reused
    for batch in (rb[:], rb.sample(20), rb[torch.tensor([3, 1])], rb[1:3]):
        assert torch.equal(batch["late"], batch["id"] * 10)
    assert rb["late"].tolist() == [0, 10, 20, 30, 40]
    assert rb[2]["late"].tolist() == 20
    rb.set_at_("late", torch.tensor([70, 80]), [2, 3])
    assert rb["late"].tolist() == [0, 10, 70, 80, 40]
    rb[:] = {**table(torch.arange(5)), "float": torch.ones(5, requires_grad=True) * 2}
    assert not rb.sample(3)["float"].requires_grad


def test_rows_that_differ_raise_with_field_and_count() -> None:
    rb = rb_of_five(sampler=SamplerWithoutReplacement(shuffle=False))
    rb.write_all(with_late([0, 1, 2]), end=3)
    assert rb[:3]["late"].tolist() == [0, 10, 20]
    assert "late" not in rb[3:]
    reads: list[tuple[Any, str]] = [
        (lambda: rb.sample(5), r"2 of the 5 rows sampled lack (the )?field 'late'"),
        (lambda: rb[:], r"2 of the 5 rows read lack (the )?field 'late'"),
        (lambda: rb["late"], "late"),
        (lambda: rb[torch.tensor([2, 3])], "1 of the 2"),
    ]
    for read, message in reads:
        with pytest.raises(KeyMissingError, match=message):
            read()
    rb.write_all(with_late([0, 1, 2, 3, 4]))
    assert torch.equal(rb.sample(5)["late"], torch.arange(5) * 10)


def test_an_edit_of_some_rows_brings_no_new_field() -> None:
    """It would make every later sample fail; one that all rows have by then may be written to any of them."""
    indices: list[Any] = [0, -1, [0, 1], slice(1, 3), torch.tensor([True] + [False] * 4)]
    for index in indices:
        rb, ids = rb_of_five(), torch.arange(5)[index]
        rows = table(ids)
        for edited in (rb, rb.storage):
            with pytest.raises(SchemaError, match=rf"field 'late' would be missing in {5 - ids.numel()} of the 5 rows"):
                edited[index] = {**rows, "late": rows["id"] * 10}
        assert "late" not in rb.sample(20)
        rb[:] = with_late([0, 1, 2, 3, 4])
        rb[index] = {**rows, "late": rows["id"] * 20}
        assert rb["late"][index].tolist() == (ids * 20).tolist()
        rb[torch.tensor([4, 3, 2, 1, 0])] = {**table(torch.arange(5)), "other": torch.ones(5)}
        assert rb["other"].tolist() == [1.0] * 5


def test_a_misspelt_key_is_named_as_it_was_given() -> None:
    rb, given = rb_of_five(), {"idd": torch.arange(5)}
    writes: list[Any] = [lambda: rb.__setitem__(0, {"idd": 0}), lambda: rb.write_all(given), lambda: rb.extend(given)]
    for write in writes:
        with pytest.raises(KeyMissingError, match=r"got \['idd'\] \(missing .*, unknown \['idd'\]\)"):
            write()


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
    rb.extend(with_late(list(range(8, 40))))  # a batch longer than the buffer
    assert torch.equal(rb["late"], rb["id"] * 10)
    fill(rb, [40])  # replaces row 0
    with pytest.raises(KeyMissingError, match="1 of the 8"):
        rb[:]
    assert torch.equal(rb[1:]["late"], rb[1:]["id"] * 10)


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
    with pytest.raises(KindError, match=r"'other'.*nested"):
        rb.write_all({**table(torch.arange(5)), "other": {"a": torch.zeros(5)}})
    with pytest.raises(SchemaError, match="other"):  # a misspelt key in the loop that collects makes no field
        rb.extend({**with_late([5]), "other": torch.zeros(1)})
    same_state(snapshot(rb), before)
