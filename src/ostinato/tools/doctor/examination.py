"""One examination of a dataset: values of what the checks of its format show are checked, and findings collected."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ostinato.core.options import number_of
from ostinato.datasets.checks import (
    READ_ERRORS,
    Pictures,
    Place,
    check_size,
    first_line,
    is_picture,
    sampled_episodes,
    sampled_frames,
)
from ostinato.tools.doctor.report import Findings, Profile, Report
from ostinato.tools.doctor.rows import CameraChecks, RowChecks, role_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ostinato.core.rows import Leaf
    from ostinato.datasets import DatasetStorage
    from ostinato.datasets.lerobot_stats import Moments
    from ostinato.durable.progress import Progress

Array = np.ndarray[Any, np.dtype[Any]]

_PASS_STEPS = 1000
_BLOCK_BYTES = 64 << 20
"""Rows of this size are read at once where episodes are short."""


@final
class Collected(Findings):
    """An `Examination` that collects findings and the numbers for plots.

    Args:
        full: look at all pictures; else at some of each episode.
        bar: shows the steps done; it grows by 1,000 for each pass.
    """

    def __init__(self, bar: Progress, *, full: bool) -> None:
        super().__init__()
        self.full = full
        self.profile = Profile()
        """The numbers for plots."""
        self.rows = RowChecks(self)
        """The checks of numbers."""
        self.fps: float | None = None
        """Rows per second, where the format knows."""
        self.decoded = ""
        """Which pictures were looked at, in words, where a format says more than their number."""
        self._cameras: dict[str, CameraChecks] = {}
        self._bar = bar
        self.chosen: list[int] = []
        """Episodes whose pictures are looked at."""
        self._episodes = 0
        self._step: Callable[[int, int], None] = lambda _, __: None

    @property
    def total(self) -> int:
        """Rows of the episodes shown so far."""
        return sum(self.rows.lengths.values())

    @property
    def end_flags(self) -> bool:
        """Whether `done`, `terminated` and `truncated` may only be set in the last row of an episode."""
        return self.rows.end_flags

    @end_flags.setter
    def end_flags(self, value: bool) -> None:
        self.rows.end_flags = value

    def steps(self) -> Callable[[int, int], None]:
        """Begin a pass of 1,000 steps; return what is called with the number of its items done and their total."""
        before = self._bar.total
        self._bar.grow(_PASS_STEPS)
        return lambda done, total: self._bar.advance(before + _PASS_STEPS * done // max(total, 1) - self._bar.done)

    # -- what formats show ---------------------------------------------------------------------------------------------

    def expect(self, episodes: int) -> None:
        """Begin a pass over so many episodes."""
        self._step, self._episodes = self.steps(), episodes
        self.chosen = sampled_episodes(episodes, full=self.full)

    def episode(
        self,
        number: int,
        arrays: Mapping[str, Any],
        rows: int,
        file: str | None = None,
        *,
        nexts: Mapping[str, Array] | None = None,
    ) -> dict[str, Any]:
        """Check the numbers of an episode; return its pictures, if they are to be looked at.

        Args:
            number: see `Examination.episode`, as for the next three.
            arrays: all fields.
            rows: its number of rows.
            file: where it lies.
            nexts: next observations that `arrays` do not have, of which nothing else is checked.
        """
        numbers, pictures = _divided(arrays)
        for array in numbers.values():
            check_size(array)
        fields = {name: np.asarray(array[:]) for name, array in numbers.items()}
        self.rows.episode(number, fields, rows, file=file, nexts=nexts)
        self._step(min(len(self.rows.lengths), self._episodes), self._episodes)
        return pictures if number in self.chosen else {}

    def look(
        self, name: str, picture: Callable[[int], Any], number: int, rows: int, start: int, file: str | None
    ) -> None:
        """Check pictures of a camera in one episode."""
        camera = self.camera(name)
        frames = ((row, _gray(picture(row))) for row in sampled_frames(rows, full=self.full))
        try:
            camera.episode(number, rows, start, frames, file)
        except READ_ERRORS as error:
            text = f"a picture cannot be read: {first_line(error)}"
            self.add("file-unreadable", text, Place(file, number, camera=name))

    def whole(self, arrays: Mapping[str, Any], ends: Sequence[int], file: str | None = None) -> None:
        """Check arrays that hold the rows of all episodes."""
        self.expect(len(ends))
        numbers, pictures = _divided(arrays)
        readers = {name: _Reader(array) for name, array in numbers.items()}
        for number, (start, stop) in enumerate(_spans(ends)):
            fields = {}
            for name in list(readers):
                try:
                    fields[name] = readers[name].rows(start, stop)
                except READ_ERRORS as error:  # the array is left out from here on
                    self.add("file-unreadable", first_line(error), Place(file, number, field=name))
                    del readers[name]
            self.episode(number, fields, stop - start, file)
        for name, array in pictures.items():
            for number, (start, stop) in enumerate(_spans(ends)):
                if number in self.chosen:
                    self.look(name, lambda row, a=array, s=start: a[s + row], number, stop - start, start, file)  # type: ignore[misc]

    def camera(self, name: str) -> CameraChecks:
        """Return the checks of a camera."""
        return self._cameras.setdefault(name, CameraChecks(name, self, self.rows, self.fps))

    def moments(self, name: str) -> Moments | None:
        """Return the statistics of a field, None if it was not shown."""
        return self.rows.moments(name)

    def add_jitter(self, milliseconds: float) -> None:
        """Note the largest distance of a step in time from the usual one in an episode, for plots."""
        self.profile.jitter_ms.append(milliseconds)

    def zero_share(self, name: str) -> float:
        """Return the share of rows of a field that are all zeros, of evenly spaced ones."""
        return self.rows.zero_share(name)

    def is_state(self, name: str) -> bool:
        """Whether a field holds observations."""
        return role_of(name) == "state"

    # -- the result ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check what needs the whole dataset."""
        self.rows.finish(self.profile)
        self.profile.cameras = [camera.profile() for camera in self._cameras.values()]
        count = sum(camera.decoded for camera in self._cameras.values())
        self.decoded = self.decoded or (f"{number_of(count, 'picture')} looked at" if count else "")

    def report(self, path: str, name: str, rows: int | None, *, stored: int | None = None, because: str = "") -> Report:
        """Return the report.

        Args:
            path: the dataset.
            name: of its format.
            rows: rows that can be sampled; None if that is not known.
            stored: rows in the files; None for those of the episodes shown.
            because: why other rows cannot be sampled.
        """
        lengths = self.rows.lengths.values()
        shown = any(lengths)
        return Report(
            path=path,
            format=name,
            episodes=len(lengths) if shown else None,
            rows=rows if shown else None,
            stored_rows=(self.total if stored is None else stored) if shown else None,
            left_out_because=because,
            decoded=self.decoded,
            findings=self.listed,
            omitted=self.omitted,
            profile=self.profile,
        )


def _spans(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1]], ends, strict=True)


def _divided(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of numbers, and those of pictures."""
    pictures = {n: a for n, a in arrays.items() if isinstance(a, Pictures) or is_picture(a.shape, a.dtype)}
    numbers = {n: a for n, a in arrays.items() if n not in pictures and np.dtype(a.dtype).kind in "biuf"}
    return numbers, pictures


def _gray(picture: Any) -> NDArray[np.uint8]:
    """Return a picture `[H, W, C]` or `[C, H, W]` as gray `[H, W]`; numbers from 0 to 1 are scaled to 255."""
    values = np.asarray(picture)
    if values.ndim == 3:
        values = values.astype(np.float32).mean(int(np.argmin(values.shape)))
    if np.asarray(picture).dtype.kind == "f" and values.size and float(values.max()) <= 1.0:
        values = values * 255
    result: NDArray[np.uint8] = np.clip(np.nan_to_num(values), 0, 255).astype(np.uint8)
    return result


class _Reader:
    """Reads ranges of rows of an array one after the other, in large blocks."""

    def __init__(self, array: Any) -> None:
        self._array = array
        row = max(1, int(np.prod(array.shape[1:], dtype=np.int64)) * np.dtype(array.dtype).itemsize)
        self._rows = max(1, _BLOCK_BYTES // row // 8)
        self._first = 0
        self._block = np.zeros((0, *array.shape[1:]), array.dtype)

    def rows(self, start: int, stop: int) -> Array:
        """Return rows `[start, stop)`."""
        if not self._block.shape[0]:
            check_size(self._array)
        if start < self._first or stop > self._first + self._block.shape[0]:
            self._first, self._block = start, self._read(start, stop)
        return self._block[start - self._first : stop - self._first]

    def _read(self, start: int, stop: int) -> Array:
        try:
            return np.asarray(self._array[start : max(stop, start + self._rows)])
        except READ_ERRORS:
            return np.asarray(self._array[start:stop])  # the fault may lie behind these rows


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
