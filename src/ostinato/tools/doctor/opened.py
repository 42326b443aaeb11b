"""Checks of the rows of a dataset as `open_dataset` reads them: for formats whose files are verified elsewhere."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.datasets.checks import is_picture

if TYPE_CHECKING:
    from ostinato.core.rows import Leaf
    from ostinato.datasets import DatasetStorage
    from ostinato.tools.doctor.examination import Collected

_NUMPY_LACKS = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


def examine_rows(dataset: DatasetStorage, look: Collected) -> None:
    """Examine all rows of an open dataset."""
    look.fps = dataset.fps
    leaves, starts = dataset.schema.leaves, [0, *dataset.episode_lengths.cumsum(0).tolist()]
    pictures = [leaf for leaf in leaves if _is_picture(leaf)]
    every = [leaf for leaf in leaves if not _is_picture(leaf)]
    nexts = [leaf for leaf in every if leaf.path[:2] == ("next", "observation")]
    look.expect(len(starts) - 1)
    for number, (first, stop) in enumerate(itertools.pairwise(starts)):
        found = {leaf: _read(dataset, leaf, range(first, stop)) for leaf in every}
        fields = {_name(leaf): values for leaf, values in found.items() if leaf not in nexts}
        after = {_name(leaf): found[leaf] for leaf in nexts}
        look.episode(number, fields, stop - first, nexts=after)
    for leaf in pictures:
        for number in look.chosen if leaf.path[:1] != ("next",) else ():
            first, stop = starts[number], starts[number + 1]
            look.look(
                _name(leaf),
                lambda row, leaf=leaf, first=first: _read(dataset, leaf, range(first + row, first + row + 1))[0],  # type: ignore[misc]
                number,
                stop - first,
                first,
                None,
            )


def _read(dataset: DatasetStorage, leaf: Leaf, rows: range) -> Any:
    values = dataset.field_at(torch.arange(rows.start, rows.stop, device="cpu"), leaf.path)
    if not isinstance(values, torch.Tensor):
        return np.zeros((len(rows), 0))
    return (values.float() if values.dtype in _NUMPY_LACKS else values).numpy()


def _is_picture(leaf: Leaf) -> bool:
    kind = np.uint8 if leaf.dtype == torch.uint8 else np.float32 if leaf.dtype.is_floating_point else np.int64
    return is_picture((1, *leaf.shape), kind)


def _name(leaf: Leaf) -> str:
    return ".".join(map(str, leaf.path))
