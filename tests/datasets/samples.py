"""Compare a dataset with its model: every row, in order and at random, in this process and in others."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ostinato import open_dataset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato import DatasetStorage


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the leaves of nested dicts by path."""
    out: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        out |= flat(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return out


def by_path(columns: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return columns by path, of which a text is the only part."""
    return {(key,) if isinstance(key, str) else key: values for key, values in columns.items()}


def not_opened(source: Any, error: Any, words: str | None, **options: Any) -> None:
    """Opening a dataset raises."""
    with pytest.raises(error, match=words):
        open_dataset(source, **options)


def check_rows(dataset: DatasetStorage, columns: Mapping[Any, Any], lengths: list[int]) -> None:
    """All rows, in order and at random, are those of NumPy arrays, dtype and bits."""
    assert dataset.episode_lengths.tolist() == lengths
    generator = np.random.default_rng(0)
    for index in (slice(None), torch.from_numpy(generator.integers(0, sum(lengths), 50))):
        rows = flat(dataset[index])
        for path, expected in by_path(columns).items():
            np.testing.assert_array_equal(rows[path].numpy(), expected[index], err_msg=str(path), strict=True)


def check_processes(dataset: DatasetStorage, columns: Mapping[Any, Any], *, method: str = "fork") -> None:
    """Copies, and workers of a DataLoader, read the same rows, also after a read here."""
    dataset[[0, len(dataset) - 1]]
    copy = pickle.loads(pickle.dumps(dataset))
    check_rows(copy, columns, dataset.episode_lengths.tolist())
    assert copy.fingerprint == dataset.fingerprint
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=5, num_workers=1, multiprocessing_context=method)  # type: ignore[arg-type]
    batches = [flat(batch) for batch in loader]
    for path, values in by_path(columns).items():
        np.testing.assert_array_equal(torch.cat([batch[path] for batch in batches]).numpy(), values)
