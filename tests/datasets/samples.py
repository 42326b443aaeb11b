"""What buffers over a dataset must sample: the rows of a model in memory, with every sampler and unit."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ostinato import (
    DatasetStorage,
    FrameStack,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    open_dataset,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .builders import Model

__all__ = ["check_processes", "check_rows", "check_samples", "flat", "nested"]


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the leaves of nested dicts by path."""
    out: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        out |= flat(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return out


def nested(columns: Mapping[Any, Any]) -> dict[str, Any]:
    """Return columns by path as nested dicts."""
    out: dict[str, Any] = {}
    for key, value in columns.items():
        path = (key,) if isinstance(key, str) else key
        level = out
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = value
    return out


def check_rows(dataset: DatasetStorage, columns: Mapping[Any, Any], lengths: list[int]) -> None:
    """All rows, in order and at random, are those of NumPy arrays, dtype and bits."""
    assert dataset.episode_lengths.tolist() == lengths
    generator = np.random.default_rng(0)
    for index in (slice(None), torch.from_numpy(generator.integers(0, sum(lengths), 50))):
        rows = flat(dataset[index])
        for path, expected in flat(nested(columns)).items():
            np.testing.assert_array_equal(rows[path].numpy(), expected[index], err_msg=str(path), strict=True)


def _parts(rows: int, images: str | None) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "uniform": dict,
        "without replacement": lambda: {"sampler": SamplerWithoutReplacement()},
        "prioritized": lambda: {"sampler": PrioritizedSampler(rows, 0.7, 0.5)},
        "slices": lambda: {"sampler": SliceSampler(slice_len=2)},
        "n-step": lambda: {"sample_unit": NStep(3, 0.5)},
        "sequence": lambda: {"sample_unit": SequenceUnit(3)},
        "prefetch": lambda: {"prefetch": 2},
        **({} if images is None else {"frames": lambda: {"sample_unit": FrameStack(3, [images])}}),
    }


def check_samples(
    opened: Callable[[], DatasetStorage], model: Model, tmp_path: Path, *, reward: bool = True, frames: Any = None
) -> None:
    """Buffers over a dataset draw what buffers over the model draw, and resume from a checkpoint."""
    lengths = torch.tensor(model.lengths)
    paths = flat(opened()[:1]).keys()
    columns = {k: v for k, v in model.columns.items() if ((k,) if isinstance(k, str) else k) in paths}
    parts = _parts(sum(model.lengths), frames)
    if not reward:
        del parts["n-step"]
    for name, make in parts.items():
        expected = open_dataset(nested(columns), episode_ends=lengths.cumsum(0))
        buffers = [
            ReplayBuffer(storage=storage, batch_size=8, generator=torch.Generator().manual_seed(1), **make())
            for storage in (opened(), expected)
        ]
        for _ in range(3):
            _same(buffers[0].sample(), buffers[1].sample(), name)
        buffers[0].dumps(tmp_path / name)
        again = ReplayBuffer(storage=opened(), batch_size=8, generator=torch.Generator(), **make())
        again.loads(tmp_path / name)
        for _ in range(2):
            batch = buffers[1].sample()
            _same(buffers[0].sample(), batch, name)
            _same(again.sample(), batch, name)


def _same(got: Any, expected: Any, name: str) -> None:
    found = flat(got)
    for path, value in flat(expected).items():
        assert torch.equal(found[path], value), (name, path)


def check_processes(dataset: DatasetStorage, columns: Mapping[Any, Any], *, spawn: bool = False) -> None:
    """Workers of a DataLoader, forked and spawned, and pickled copies read the same rows, also after a read here."""
    wanted = flat(nested(columns))
    dataset[[0, len(dataset) - 1]]
    check_rows(pickle.loads(pickle.dumps(dataset)), columns, dataset.episode_lengths.tolist())
    for context in ("fork", "spawn") if spawn else ("fork",):
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=5, num_workers=1, multiprocessing_context=context)  # type: ignore[arg-type]
        batches = [flat(batch) for batch in loader]
        for path, values in wanted.items():
            np.testing.assert_array_equal(torch.cat([batch[path] for batch in batches]).numpy(), values)
