"""What may be put in, and in which form it comes out: kinds, dtypes, layouts in memory, sizes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch import Tensor

from ostinato import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from ostinato.errors import KindError, SchemaError

from ...tags import buffer, same_kind


@tensorclass
class Step:
    obs: Tensor
    reward: Tensor


# Other kinds: `unit/core/test_rows.py` and `stateful/test_buffer_machine.py`.
KINDS: dict[str, Any] = {
    "rows of no bytes": torch.zeros(4, 0),
    "tensorclass": Step(torch.arange(4.0), torch.ones(4), batch_size=[4]),  # type: ignore[call-arg]
    "odd keys": {
        "": torch.arange(4),
        "a.b": torch.zeros(4),
        None: torch.ones(4),
        True: torch.ones(4),
        "é/..": torch.ones(4),
    },
}


@pytest.mark.parametrize("storage", ["packed", "mapped-columns"])
def test_rows_come_out_in_the_kind_that_was_put_in(storage):
    for data in KINDS.values():
        rb = buffer(storage, 10)
        assert rb.extend(data).tolist() == [0, 1, 2, 3]
        same_kind(rb[:], data)
        same_kind(rb[torch.arange(4)], data)
        batch, info = rb.sample(4, return_info=True)
        same_kind(batch, rb[info["index"]])


def test_a_lazy_stack_is_stored_by_its_common_fields_with_a_warning():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    rows = [TensorDict({"a": torch.tensor(float(i)), "next": {"b": torch.tensor(i)}}) for i in range(3)]
    rows[0]["reward"] = torch.tensor(1.0)
    with pytest.warns(UserWarning, match=r"not stored: \['reward'\]"):
        rb.extend(LazyStackedTensorDict(*rows))
    alone = TensorDict({"a": torch.zeros(())})
    with pytest.warns(UserWarning, match="not stored"), pytest.raises(SchemaError, match="'next'"):
        rb.extend(LazyStackedTensorDict(rows[1], alone))
    with pytest.raises(SchemaError):
        rb.extend(LazyStackedTensorDict(alone, TensorDict({"b": torch.zeros(())})))
    expected = TensorDict({"a": torch.arange(3.0), "next": TensorDict({"b": torch.arange(3)}, [3])}, [3])
    same_kind(rb[:], expected)


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


def test_a_transform_that_waits_for_more_rows_writes_none():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=Pairs())
    assert rb.extend(torch.tensor([1])).tolist() == []
    assert len(rb) == 0
    assert rb.extend(torch.tensor([2, 3])).tolist() == [0, 1]
    assert rb[:].tolist() == [[1, 2], [2, 3]]
    two = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), transform=Pairs())
    assert two.extend(torch.tensor([1])).shape == (0, 2)
    forgets = ReplayBuffer(storage=LazyTensorStorage(8))
    forgets.append_transform(lambda rows: None, invert=True)
    with pytest.raises(KindError):
        forgets.extend(torch.tensor([1]))
    assert len(forgets) == 0


def test_dicts_and_tensordicts_serve_for_each_other_by_name():
    rb = buffer("packed")
    rb.extend({"a": torch.arange(2), "b": torch.zeros(2)})
    rb.extend(TensorDict({"b": torch.ones(2), "a": torch.arange(2, 4)}, [2]))
    rb.extend({"b": torch.ones(1), "a": torch.tensor([4])})
    same_kind(rb[:], {"a": torch.arange(5), "b": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])})


def test_numbers_and_arrays_are_taken_at_the_door():
    rb, plain = buffer("packed"), buffer("packed")
    rb.add({"f": 1.5, "i": 3, "b": True, "np": np.float32(2.5), "a": np.arange(2)})
    rb.add({"f": 2, "i": np.int64(4), "b": np.bool_(False), "np": 3.5, "a": torch.arange(2)})
    expected = {"f": [1.5, 2.0], "i": [3, 4], "b": [True, False], "np": [2.5, 3.5], "a": [[0, 1], [0, 1]]}
    assert {key: value.tolist() for key, value in rb[:].items()} == expected
    assert [rb[:][key].dtype for key in ("f", "i", "b")] == [torch.float32, torch.int64, torch.bool]
    plain.extend([1.5, 2.5])
    plain.add(3)
    plain.extend([4, 5])
    assert plain[:].tolist() == [1.5, 2.5, 3.0, 4.0, 5.0]
    with pytest.raises((ValueError, TypeError), match="'a'"):
        buffer("packed").add({"a": 10**400})  # which fits no dtype


def laid_out(values: Tensor) -> dict[str, Any]:
    """Return the same values `[6, 4]` in other layouts in memory."""
    wide = torch.full((12, 8), -1.0)
    wide[::2, 1::2] = values
    frozen = values.numpy().copy()
    frozen.flags.writeable = False
    record = np.zeros(6, dtype=[("pad", "i1"), ("x", "f4", 4)])
    record["x"] = values.numpy()
    return {
        "every other element": wide[::2, 1::2],
        "other order of dimensions": values.t().contiguous().t(),
        "negative strides of numpy": values.flip(0).numpy()[::-1],
        "read-only numpy": frozen,
        "foreign byte order": values.numpy().astype(">f4"),
        "record of numpy": record["x"],
    }


@pytest.mark.parametrize("storage", ["packed", "columns"])
def test_sources_of_any_layout_are_stored_right(storage):
    values, ids = torch.arange(24.0).view(6, 4), torch.arange(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout, source in laid_out(values).items():
            rb = buffer(storage, 8)
            rb.extend({"x": torch.zeros(4, 4), "id": ids[:4]})
            rb.extend({"x": source, "id": ids})  # wraps after four rows
            same_kind(rb[torch.tensor([4, 5, 6, 7, 0, 1])]["x"], values, layout)
            rb.add({"x": source[2], "id": 2})
            same_kind(rb[2]["x"], values[2], layout)
            rb[2:8] = {"x": source, "id": ids}
            same_kind(rb[2:8]["x"], values, layout)
