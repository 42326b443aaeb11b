"""Reports on datasets of other libraries: what one holds, and what a batch of it looks like."""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ostinato.buffers import ReplayBuffer
from ostinato.core.options import number_of
from ostinato.core.records import Request
from ostinato.datasets import open_dataset
from ostinato.datasets.open import format_of, known_formats
from ostinato.durable.progress import Progress, bar_only
from ostinato.errors import CheckpointError, CheckpointNotFoundError
from ostinato.tools.inspect import FieldReport, RunningStatistics, kind_of

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from ostinato.core.rows import Leaf
    from ostinato.datasets import DatasetStorage
    from ostinato.durable.progress import ProgressOption

_CHUNK_BYTES = 2**24
_CHANNELS = (1, 3, 4)
_SHOWN_ROWS = 3
_SHOWN_NUMBERS = 3
_SHOWN_CHARACTERS = 24
_MAX_TEXTS = 100


@dataclass(frozen=True, slots=True)
class TextReport:
    """One text of a field, such as the description of a task."""

    field: str
    """Name of the field."""
    text: str
    """The text."""
    rows: int
    """Number of rows that have it."""


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """One dataset."""

    path: str
    """The file or directory."""
    format: str
    """Name of the format."""
    rows: int
    """Number of rows that can be sampled."""
    stored_rows: int
    """Number of rows in the files."""
    left_out_because: str
    """Why some stored rows cannot be sampled; empty if all can."""
    episodes: int
    """Number of episodes."""
    shortest: int
    """Rows of the shortest episode."""
    median: float
    """Median of the rows of an episode."""
    longest: int
    """Rows of the longest episode."""
    fps: float | None
    """Rows per second; None if the format does not know."""
    cameras: tuple[str, ...]
    """Fields that hold pictures."""
    nbytes: int
    """Bytes of all rows, decoded."""
    file_bytes: int
    """Bytes of the files."""
    fields: tuple[FieldReport, ...]
    """The fields; without statistics for cameras, or if data was not read."""
    texts: tuple[TextReport, ...]
    """The most frequent texts, at most 100; empty if data was not read."""
    assumptions: tuple[str, ...]
    """What the format does not say, and how it was read."""

    @property
    def extent(self) -> str:
        """The numbers of rows and episodes in words."""
        return rows_and_episodes(self.rows, self.episodes, self.stored_rows, self.left_out_because)


@dataclass(frozen=True, slots=True)
class RowReport:
    """One row of a batch."""

    episode: int
    """Number of its episode in the dataset."""
    step: int
    """Its place in the episode."""
    values: tuple[str, ...]
    """The value of each field, shortened."""


@dataclass(frozen=True, slots=True)
class DatasetSample:
    """One batch of a dataset."""

    path: str
    """The file or directory."""
    format: str
    """Name of the format."""
    rows: int
    """Number of rows of the dataset."""
    episodes: int
    """Number of episodes."""
    num_samples: int
    """Rows of the batch."""
    sample_ms: float
    """Time to draw, read and decode the batch, the first one of this process."""
    fields: tuple[FieldReport, ...]
    """The fields of the batch, with statistics over it."""
    shown: tuple[RowReport, ...]
    """The first rows of the batch."""


def rows_and_episodes(rows: int, episodes: int, stored_rows: int, because: str) -> str:
    """Return the numbers of rows and episodes of a dataset in words, and why stored rows cannot be sampled."""
    text = f"{number_of(rows, 'row')}, {number_of(episodes, 'episode')}"
    if rows == stored_rows:
        return text
    left_out = number_of(stored_rows - rows, "stored row")
    return f"{text} ({stored_rows:,} stored; {left_out} cannot be sampled: {because})"


def data_kind(path: str | os.PathLike[str]) -> Literal["trajectories", "buffer", "groups", "dataset"]:
    """Return the kind of data at a path: trajectories, the checkpoint that `dumps` wrote, groups, or a dataset.

    Raises:
        CheckpointNotFoundError: None of them; the message describes what is there instead.
        CheckpointError: The path is a file of an unknown format.
    """
    root = Path(path)
    try:
        return kind_of(root)
    except (CheckpointError, CheckpointNotFoundError) as error:
        if not root.exists():
            raise
        if format_of(root) is not None:
            return "dataset"
        msg = f"{error}; datasets that can be opened are {', '.join(known_formats())}"
        raise type(error)(msg) from error


def inspect_dataset(
    path: str | os.PathLike[str], *, read_data: bool = True, progress: ProgressOption = None
) -> DatasetReport:
    """Return a report on a dataset.

    Args:
        path: File or directory that `open_dataset` recognizes.
        read_data: Read all numbers for statistics, but no pictures. Otherwise only what describes the dataset is read.
        progress: The rows read and their total; see `ostinato.ProgressOption`.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        KindError: The format is not recognized.
        MissingExtraError: The library for the format is not installed.
        DamagedFileError: A file cannot be read; the message names it.
    """
    dataset = open_dataset(path, progress=bar_only(progress))
    lengths = dataset.episode_lengths
    with Progress(progress, "read rows", len(dataset), unit="rows") as bar:
        fields = (
            _with_statistics(dataset, bar)
            if read_data
            else [_field(leaf, len(dataset)) for leaf in dataset.schema.leaves]
        )
    texts, counts = _texts(dataset) if read_data else ([], {})
    fields += [
        FieldReport(_name(leaf.path), "text", (), len(dataset), counts.get(_name(leaf.path), 0))
        for leaf in dataset.schema.objects
    ]
    return DatasetReport(
        path=str(path),
        format=dataset.format,
        rows=len(dataset),
        stored_rows=len(dataset) + dataset.contents.rows_left_out,
        left_out_because=dataset.contents.left_out_because,
        episodes=len(lengths),
        shortest=int(lengths.min()),
        median=float(np.median(lengths.numpy())),
        longest=int(lengths.max()),
        fps=dataset.fps,
        cameras=tuple(_name(leaf.path) for leaf in dataset.schema.leaves if _is_camera(leaf)),
        nbytes=dataset.nbytes,
        file_bytes=_file_bytes(Path(path)),
        fields=tuple(fields),
        texts=tuple(texts),
        assumptions=tuple(dataset.assumptions),
    )


def sample_dataset(path: str | os.PathLike[str], num_samples: int) -> DatasetSample:
    """Draw one batch of rows, uniformly and with replacement, and return a report on it.

    Args:
        path: File or directory that `open_dataset` recognizes.
        num_samples: Rows of the batch.

    Raises:
        KindError: The format is not recognized.
        MissingExtraError: The library for the format is not installed.
        DamagedFileError: A file cannot be read; the message names it.
    """
    dataset = open_dataset(path)
    buffer = ReplayBuffer(storage=dataset, batch_size=num_samples)
    start = time.perf_counter()
    batch, info = buffer.sample(return_info=True)
    seconds = time.perf_counter() - start
    leaves, objects = dataset.schema.leaves, dataset.schema.objects
    values = [_at(batch, path) for path in [*(leaf.path for leaf in leaves), *(leaf.path for leaf in objects)]]
    fields = [_summarized(leaf, value) for leaf, value in zip(leaves, values, strict=False)]
    fields += [
        FieldReport(_name(leaf.path), "text", (), num_samples, sum(len(str(text).encode()) for text in texts))
        for leaf, texts in zip(objects, values[len(leaves) :], strict=True)
    ]
    ends = dataset.episode_lengths.cumsum(0)
    shown = []
    for place, row in enumerate(info["index"][:_SHOWN_ROWS].tolist()):
        position = int(torch.searchsorted(ends, row, right=True))
        first = int(ends[position] - dataset.episode_lengths[position])
        short = tuple(_short(value[place]) for value in values)
        shown.append(RowReport(int(dataset.episode_numbers[position]), row - first, short))
    return DatasetSample(
        str(path), dataset.format, len(dataset), len(ends), num_samples, seconds * 1000, tuple(fields), tuple(shown)
    )


def _name(path: Any) -> str:
    return ".".join(map(str, path))


def _field(leaf: Leaf, rows: int) -> FieldReport:
    shape = tuple(leaf.shape)
    nbytes = rows * leaf.dtype.itemsize * math.prod(shape)
    return FieldReport(_name(leaf.path), str(leaf.dtype).removeprefix("torch."), shape, rows, nbytes)


def _is_camera(leaf: Leaf) -> bool:
    shape = tuple(leaf.shape)
    channels = len(shape) >= 3 and (shape[-1] in _CHANNELS or shape[-3] in _CHANNELS)
    return leaf.dtype is torch.uint8 and channels and min(sorted(shape[-3:])[1:]) >= 4


def _has_numbers(leaf: Leaf) -> bool:
    return not _is_camera(leaf) and not leaf.dtype.is_complex


def _with_statistics(dataset: DatasetStorage, bar: Progress) -> list[FieldReport]:
    """Return the fields, with statistics over all rows for those that hold no pictures."""
    found = {i: RunningStatistics() for i, leaf in enumerate(dataset.schema.leaves) if _has_numbers(leaf)}
    leaves, rows = dataset.schema.leaves, len(dataset)
    row_bytes = sum(leaves[i].dtype.itemsize * math.prod(leaves[i].shape) for i in found)
    for part in torch.split(torch.arange(rows, device="cpu"), max(1, _CHUNK_BYTES // max(1, row_bytes))):
        for i, values in zip(found, dataset.fetch([Request(i, part) for i in found]), strict=True):
            found[i].update(values.reshape(-1))
        bar.advance(len(part))
    fields = [_field(leaf, rows) for leaf in leaves]
    return [found[i].describe(field) if i in found else field for i, field in enumerate(fields)]


def _summarized(leaf: Leaf, values: Tensor) -> FieldReport:
    """Return the field of a batch with its statistics, pictures included."""
    field, numbers = _field(leaf, values.shape[0]), RunningStatistics()
    if leaf.dtype.is_complex:
        return field
    numbers.update(values.reshape(-1))
    return numbers.describe(field)


def _texts(dataset: DatasetStorage) -> tuple[list[TextReport], dict[str, int]]:
    """Return the texts and how many rows have them, and the bytes of each field of text."""
    found: list[TextReport] = []
    nbytes: dict[str, int] = {}
    every = torch.arange(len(dataset), device="cpu")
    for leaf in dataset.schema.objects:
        counts = Counter(map(str, dataset.field_at(every, leaf.path)))
        name = _name(leaf.path)
        nbytes[name] = sum(len(text.encode()) * rows for text, rows in counts.items())
        found += [TextReport(name, text, rows) for text, rows in counts.most_common(_MAX_TEXTS)]
    return found, nbytes


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _at(batch: Any, path: Any) -> Any:
    for key in path:
        batch = batch[key]
    return batch


def _short(value: Any) -> str:
    """Return a value of one row in a few characters."""
    if not isinstance(value, torch.Tensor):
        text = str(value)
        shown = textwrap.shorten(text, _SHOWN_CHARACTERS, placeholder=" \N{HORIZONTAL ELLIPSIS}")
        return shown if len(shown) > 1 else f"{text[: _SHOWN_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
    if value.ndim > 1:
        return f"mean {value.double().mean():.4g}"
    numbers = [
        str(n) if isinstance(n, (bool, int)) else f"{n:.4g}" for n in value.reshape(-1)[:_SHOWN_NUMBERS].tolist()
    ]
    if value.ndim == 0:
        return numbers[0]
    return f"[{', '.join(numbers)}{', ...' if value.numel() > _SHOWN_NUMBERS else ''}]"
