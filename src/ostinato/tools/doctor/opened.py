"""Checks of the rows of a dataset as `open_dataset` reads them: for formats whose files are verified elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.tools.doctor.arrays import gray, is_picture
from ostinato.tools.doctor.cameras import CameraChecks, sampled_episodes, sampled_frames
from ostinato.tools.doctor.rows import RowChecks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.rows import Leaf
    from ostinato.datasets import DatasetStorage
    from ostinato.tools.doctor.report import Findings, Profile

__all__ = ["OpenedChecks"]

_NUMPY_LACKS = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


@final
class OpenedChecks:
    """Checks the rows of an open dataset.

    Args:
        dataset: the dataset.
        findings: where findings are added.
        profile: takes the numbers for plots.
        full: look at all pictures; else at some of each episode.
    """

    def __init__(self, dataset: DatasetStorage, findings: Findings, profile: Profile, *, full: bool) -> None:
        self.rows = RowChecks(findings)
        self.decoded = 0
        """Number of pictures looked at."""
        self._dataset = dataset
        self._findings = findings
        self._profile = profile
        self._full = full

    def check(self, progress: Callable[[int, int], None]) -> None:
        """Check all rows."""
        leaves = self._dataset.schema.leaves
        pictures = [leaf for leaf in leaves if _is_picture(leaf)]
        every = [leaf for leaf in leaves if not _is_picture(leaf)]
        numbers = [leaf for leaf in every if leaf.path[:2] != ("next", "observation")]
        others = [leaf for leaf in every if leaf not in numbers]
        lengths, start = self._dataset.episode_lengths.tolist(), 0
        for number, length in enumerate(lengths):
            fields = {_name(leaf): self._read(leaf, range(start, start + length)) for leaf in numbers}
            nexts = {_name(leaf): self._read(leaf, range(start, start + length)) for leaf in others}
            self.rows.episode(number, fields, length, nexts=nexts)
            start += length
            progress(number + 1, len(lengths))
        for leaf in pictures:
            if leaf.path[:1] != ("next",):
                self._look(leaf, lengths)
        self.rows.finish(self._profile)

    def _look(self, leaf: Leaf, lengths: list[int]) -> None:
        camera = CameraChecks(_name(leaf), self._findings, self.rows, self._dataset.fps)
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        for number in sampled_episodes(len(lengths), full=self._full):
            first, rows = starts[number], sampled_frames(lengths[number], full=self._full)
            frames = ((row, gray(self._read(leaf, range(first + row, first + row + 1))[0])) for row in rows)
            camera.episode(number, lengths[number], first, frames, None)
        self.decoded += camera.decoded
        self._profile.cameras.append(camera.profile())

    def _read(self, leaf: Leaf, rows: range) -> Any:
        slots = torch.arange(rows.start, rows.stop, device="cpu")
        values = self._dataset.field_at(slots, leaf.path)
        if not isinstance(values, torch.Tensor):
            return np.zeros((len(rows), 0))
        return (values.float() if values.dtype in _NUMPY_LACKS else values).numpy()


def _is_picture(leaf: Leaf) -> bool:
    kind = np.uint8 if leaf.dtype == torch.uint8 else np.float32 if leaf.dtype.is_floating_point else np.int64
    return is_picture((1, *leaf.shape), kind)


def _name(leaf: Leaf) -> str:
    return ".".join(map(str, leaf.path))
