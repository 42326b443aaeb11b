"""Late fields: keys that `write_all` and assignments bring after the first rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.errors import KeyMissingError, KindError, SchemaError

from ...tags import buffer, fill, same_state, snapshot, table
from ..buffers.refusals import raises


def rb_of_five() -> Any:
    rb = buffer("packed", 8)
    fill(rb, range(5))
    return rb


def with_late(ids: list[int], factor: int = 10) -> dict[str, Any]:
    rows = table(torch.tensor(ids))
    return {**rows, "late": rows["id"] * factor}


def test_rows_that_differ_raise_with_field_and_count():
    """`stateful/test_buffer_machine.py` has every order of calls."""
    rb = rb_of_five()
    rb.write_all(with_late([0, 1, 2]), end=3)
    assert "late" not in rb[3:]
    raises(
        (lambda: rb.sample(5), KeyMissingError, "of the 5 rows sampled lack (the )?field 'late'"),
        (lambda: rb[:], KeyMissingError, r"2 of the 5 rows read lack (the )?field 'late'"),
        (lambda: rb["late"], KeyMissingError, "late"),
    )


def test_an_edit_of_some_rows_brings_no_new_field():
    """It would make every later sample fail; one that all rows have by then may be written to any of them."""
    indices: list[Any] = [0, -1, [0, 1], slice(1, 3), torch.tensor([True] + [False] * 4)]
    for index in indices:
        rb, ids = rb_of_five(), torch.arange(5)[index]
        for edited in (rb, rb.storage):
            with pytest.raises(SchemaError, match=rf"field 'late' would be missing in {5 - ids.numel()} of the 5 rows"):
                edited[index] = {**table(ids), "late": ids * 10}
        assert "late" not in rb.sample(20)
        rb[:] = with_late([0, 1, 2, 3, 4])
        rb[index] = {**table(ids), "late": ids * 20}
        assert rb["late"][index].tolist() == (ids * 20).tolist()
    rb[torch.tensor([4, 3, 2, 1, 0])] = {**table(torch.arange(5)), "other": torch.arange(5)}
    assert rb["other"].tolist() == [4, 3, 2, 1, 0]


def test_the_field_keeps_its_form():
    rb, data = rb_of_five(), with_late([0, 1, 2, 3, 4])
    nbytes = rb.storage.nbytes
    rb.write_all(data)
    assert rb.storage.nbytes >= nbytes + 8 * 8
    data["late"].zero_()  # the caller's tensor may be reused
    assert rb["late"].tolist() == [0, 10, 20, 30, 40]
    before, ids = snapshot(rb), table(torch.arange(5))
    wrong = [torch.full((5,), 0.5), torch.zeros(5, 2).long(), torch.zeros(4).long(), torch.tensor(1)]
    raises(
        *((lambda late=late: rb.write_all({**ids, "late": late}), SchemaError, "'late'") for late in wrong),
        *((lambda late=late: rb.set_("late", late), SchemaError, "'late'") for late in wrong),
        (lambda: rb.write_all({**ids, "other": {"a": torch.zeros(5)}}), KindError, r"'other'.*nested"),
        # a misspelt key in the loop that collects makes no field
        (lambda: rb.extend({**with_late([5]), "other": torch.zeros(1)}), SchemaError, "other"),
    )
    same_state(snapshot(rb), before)
