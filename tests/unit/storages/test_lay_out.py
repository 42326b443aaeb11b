"""A storage gets its schema before its first rows, and gives it up again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from ostinato.errors import SchemaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato import Storage

OBS, NEXT = torch.rand(4, 100), torch.rand(4, 100)
ROWS = {"obs": OBS, "next": {"obs": NEXT}}
MAKERS = {
    "packed": LazyTensorStorage,
    "mapped": LazyMemmapStorage,
    "codec": partial(LazyTensorStorage, codec={"obs": "zlib"}),
    "single copy": partial(LazyTensorStorage, single_copy={"obs": ("next", "obs")}),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_rows_are_cast_to_a_schema_that_is_given_before_them(make: Callable[[int], Storage]) -> None:
    first, second = (ReplayBuffer(storage=make(10)) for _ in range(2))
    first.extend(ROWS)
    schema = first.storage.schema
    assert schema is not None
    second.storage.lay_out(schema)
    assert second.storage.laid_out
    assert len(second) == 0
    with pytest.raises(SchemaError, match="obs"):
        second.extend({"obs": torch.rand(4, 99), "next": {"obs": torch.rand(4, 99)}})
    second.extend({"obs": OBS.double(), "next": {"obs": NEXT.double()}})
    assert second.storage.schema == schema
    assert torch.equal(second[:]["obs"], first[:]["obs"])
    second.storage.lay_out(schema)  # does nothing
    assert len(second) == 4
    second.empty()
    second.storage.forget_form()
    assert not second.storage.laid_out


def test_files_in_a_directory_are_replaced_when_the_schema_goes(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "rows")
    storage.set(range(4), {"obs": torch.rand(4)})
    storage.flush()
    storage.clear()
    storage.forget_form()
    assert not list(tmp_path.glob("rows/*"))
    storage.set(range(2), {"other": torch.rand(2, 3)})
    assert storage[:]["other"].shape == (2, 3)


def _schema_of(rows: Any) -> Any:
    storage = LazyTensorStorage(10)
    storage.set(range(4), rows)
    return storage.schema


def test_environments_are_counted_by_the_first_rows() -> None:
    with pytest.raises(UsageError, match="ndim=2"):
        LazyTensorStorage(10, ndim=2).lay_out(_schema_of(ROWS))
