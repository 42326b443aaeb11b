"""Sources of any layout in memory are stored as they read: strides, views, overlaps, fields of size zero."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ...tags import TENSORS, buffer, fill, read_ids
from .test_data_kinds import equal


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
