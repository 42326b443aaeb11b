"""Python objects of list storages are saved as plain values; pickles only where both sides ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    ListStorage,
    ReplayBuffer,
)
from ostinato.errors import CheckpointError

from ...tags import same_state

if TYPE_CHECKING:
    from pathlib import Path


PLAIN: list[Any] = [
    1,
    2.5,
    True,
    None,
    "text",
    float("inf"),
    torch.arange(3),
    torch.zeros(2, dtype=torch.bfloat16),
    np.arange(4, dtype=np.int16),
    {"a": torch.ones(2), "b": [1, (2, 3)]},
    TensorDict({"x": torch.arange(2), "n": {"y": torch.zeros(1)}}),
]


def test_plain_objects_are_saved_without_pickle(tmp_path: Path) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(20), collate_fn=lambda items: items)

    rb = make()
    rb.extend(PLAIN)
    rb.dumps(tmp_path / "save")
    other = make()
    other.loads(tmp_path / "save")
    for got, expected in zip(other[:], PLAIN, strict=True):
        assert type(got) is type(expected)
        same_state(
            got.tolist() if isinstance(got, np.ndarray) else got,
            expected.tolist() if isinstance(expected, np.ndarray) else expected,
        )
        assert not isinstance(got, np.ndarray) or got.dtype == expected.dtype


class Thing:
    """An object that only pickle can save."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_other_objects_need_pickle_on_both_sides(tmp_path: Path) -> None:
    def make(*, allow: bool) -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(20, allow_pickle=allow), collate_fn=lambda items: items)

    rb = make(allow=False)
    rb.extend([1, Thing(5)])
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        rb.dumps(tmp_path / "save")
    assert not (tmp_path / "save" / "manifest.json").exists()
    allowed = make(allow=True)
    allowed.extend([1, Thing(5)])
    allowed.dumps(tmp_path / "save")
    strict = make(allow=False)
    with pytest.raises(CheckpointError, match="unpickling runs code"):
        strict.loads(tmp_path / "save")
    assert len(strict) == 0
    other = make(allow=True)
    other.loads(tmp_path / "save")
    assert other[1].value == 5


def test_a_failed_save_keeps_the_one_before(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=ListStorage(20), collate_fn=lambda items: items)
    rb.extend([1, 2])
    rb.dumps(tmp_path / "save")
    rb.add(Thing(1))
    with pytest.raises(CheckpointError):
        rb.dumps(tmp_path / "save")
    other = ReplayBuffer(storage=ListStorage(20), collate_fn=lambda items: items)
    other.loads(tmp_path / "save")
    assert other[:] == [1, 2]
