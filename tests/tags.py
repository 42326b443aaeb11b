"""Tagged rows: each field is a function of the row's id, so that any mixing of rows or fields shows.

Also the storages under test, and poison for slots that were never written.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ostinato import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, Storage
from ostinato.testing.views import bits

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "STORAGES",
    "TENSORS",
    "Maker",
    "at",
    "buffer",
    "fill",
    "poison",
    "priorities",
    "random_bits",
    "read_ids",
    "rows",
    "same_state",
    "snapshot",
    "table",
]

type_of_poison = {torch.bool: True, torch.uint8: 171}


def table(ids: Tensor) -> dict[str, Any]:
    """Return a nested dict of fields for rows `ids` (int64 of any shape): small ones, a wide one, one of size zero."""
    ids = ids.to(torch.int64)
    return {
        "id": ids.clone(),
        "obs": (ids[..., None] * 3 + torch.arange(3)).to(torch.float32) / 2,
        "wide": ((ids[..., None] * 7 + torch.arange(300)) % 251).to(torch.uint8),
        "next": {"obs": (ids[..., None] + torch.tensor([0.25, 0.5])).to(torch.float64), "done": ids % 3 == 0},
        "none": torch.zeros(*ids.shape, 0),
    }


def rows(ids: Tensor | list[int] | range, kind: str = "dict") -> Any:
    """Return rows of a kind: `dict`, `tuple`, `tensor` or `tensordict`; a list of rows with the suffix `s`."""
    if not isinstance(ids, Tensor):
        ids = torch.tensor(list(ids), dtype=torch.int64)
    if kind.endswith("s"):
        return [rows(i, kind[:-1]) for i in ids]
    if kind == "dict":
        return table(ids)
    if kind == "tuple":
        return tuple(table(ids).values())
    if kind == "tensor":
        return (ids[..., None] * 5 + torch.arange(4)).to(torch.float64)
    return TensorDict(table(ids), batch_size=ids.shape)


def read_ids(batch: Any) -> list[int]:
    """Return the ids of a batch of rows, having compared every field with what it must be for its id."""
    if isinstance(batch, Tensor):
        ids = (batch[..., 0] / 5).to(torch.int64)
        assert torch.equal(batch, rows(ids, "tensor")), f"not rows of any ids: {batch}"
        return [int(i) for i in ids.reshape(-1)]
    first = batch[0] if isinstance(batch, (tuple, list)) else batch["id"]
    expected = table(first)
    got = dict(zip(expected, batch, strict=True)) if isinstance(batch, (tuple, list)) else dict(batch.items())
    got.pop("index", None)
    assert set(got) == set(expected), f"fields {sorted(got)}, expected {sorted(expected)}"
    for key, value in expected.items():
        for name, leaf in value.items() if isinstance(value, dict) else [("", value)]:
            found = got[key][name] if name else got[key]
            assert found.dtype is leaf.dtype, f"{key}.{name} is {found.dtype}"
            assert torch.equal(found, leaf), f"{key}.{name} is not that of the rows {first.tolist()}"
    return [int(i) for i in first.reshape(-1)]


def at(batch: Any, index: Any) -> Any:
    """Index every leaf of nested rows."""
    if isinstance(batch, dict):
        return {key: at(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(at(value, index) for value in batch)
    return batch[index]


Maker = "Callable[[int], Storage]"

TENSORS: dict[str, Any] = {
    "packed": LazyTensorStorage,
    "columns": lambda capacity: LazyTensorStorage(capacity, packed=False),
    "mapped": LazyMemmapStorage,
    "mapped-columns": lambda capacity: LazyMemmapStorage(capacity, packed=False),
}
"""Storages that lay out tensors themselves, by name."""

STORAGES: dict[str, Any] = {"list": ListStorage, **TENSORS}
"""All storages that begin empty, by name."""


def poison(storage: Storage) -> None:
    """Fill every slot that holds no row with NaN and garbage, which no sample and no read may ever show."""
    for column in getattr(storage, "columns", {}).values():
        free = column[len(storage) :]
        garbage = type_of_poison.get(column.dtype, float("nan") if column.dtype.is_floating_point else -7777)
        free.fill_(garbage)


def fill(rb: ReplayBuffer, ids: list[int] | range, kind: str = "dict") -> Tensor:
    """Extend a buffer by tagged rows, in the form that its storage takes."""
    return rb.extend(rows(ids, f"{kind}s" if isinstance(rb.storage, ListStorage) else kind))


def buffer(storage: str | Storage, capacity: int = 10, **options: Any) -> ReplayBuffer:
    """Return a buffer over a storage, given or by name."""
    return ReplayBuffer(storage=STORAGES[storage](capacity) if isinstance(storage, str) else storage, **options)


def snapshot(rb: ReplayBuffer) -> Any:
    """Return a deep copy of the whole state."""
    return copy.deepcopy(rb.state_dict())


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits (NaNs of all kinds included)."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def same_state(first: Any, second: Any, path: str = "state") -> None:
    """Assert that two states are equal bit for bit, naming the first entry that is not."""
    if isinstance(first, dict) and isinstance(second, dict):
        assert first.keys() == second.keys(), path
        for key, value in first.items():
            same_state(value, second[key], f"{path}.{key}")
    else:
        assert bits(first) == bits(second), f"{path} differs: {first!r} and {second!r}"


def same_kind(first: Any, second: Any, path: str = "value") -> None:
    """Assert that nested values are equal bit for bit, also in their types, batch sizes and the order of keys."""
    assert type(first) is type(second), path
    if hasattr(first, "batch_size"):
        assert first.batch_size == second.batch_size, path
        first, second = (dict(sorted(value.items())) for value in (first, second))
    if isinstance(first, (dict, list, tuple)):
        keys, others = (list(value if isinstance(value, dict) else range(len(value))) for value in (first, second))
        assert keys == others, path
        for key in keys:
            same_kind(first[key], second[key], f"{path}.{key}")
    else:
        assert bits(first) == bits(second), f"{path} differs: {first!r} and {second!r}"


def priorities(rb: ReplayBuffer) -> list[float]:
    """Return the priorities of the rows present, as they are kept."""
    kept: Tensor = rb.sampler.state_dict()["priorities"]
    return [float(x) for x in kept]
