"""The commands on datasets of other libraries, which `ostinato.open_dataset` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.cli import output as show
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.viz.datasets import DatasetSource

__all__ = ["FORMATS", "convert", "inspect", "kind_or_advice", "open_source", "plot", "require_trajectories", "sample"]

FORMATS = ("lerobot", "minari", "hdf5")
"""Formats of datasets that are written."""

DEFAULT_ROWS = 64
"""Rows of a batch of `sample`: few enough for video."""


def inspect(path: Path, *, quick: bool, as_json: bool) -> None:
    """Print what a dataset holds."""
    from ostinato.tools.datasets import inspect_dataset

    report = inspect_dataset(path, read_data=not quick, progress=not as_json)
    show.answer(report, show.dataset, as_json=as_json)


def sample(path: Path, num_chunks: int | None, *, as_json: bool) -> None:
    """Print one batch of a dataset."""
    from ostinato.tools.datasets import sample_dataset

    show.answer(sample_dataset(path, num_chunks or DEFAULT_ROWS), show.dataset_batch, as_json=as_json)


def open_source(path: Path) -> DatasetSource:
    """Open a dataset for the viewers."""
    from ostinato.datasets import open_dataset
    from ostinato.viz.datasets import DatasetSource

    return DatasetSource(open_dataset(path), path)


def require_trajectories(source: Path) -> None:
    """Check that a path is a directory of trajectories, which can get another format of trajectories.

    Raises:
        CheckpointError: It is something else.
    """
    advice = f"give --format {', '.join(FORMATS)} to write it as a dataset"
    if kind_or_advice(source, advice) == "buffer":
        msg = f"{source} is the checkpoint of a buffer in the current format: nothing to convert; {advice}"
        raise CheckpointError(msg)


def kind_or_advice(path: Path, advice: str) -> str:
    """Return "trajectories" or "buffer", as `tools.kind_of`.

    Raises:
        CheckpointError: It is neither; for a dataset the message ends with the advice.
    """
    from ostinato.datasets.open import format_of
    from ostinato.tools import kind_of

    try:
        return kind_of(path)
    except CheckpointError as error:
        if path.exists() and format_of(path) is not None:
            msg = f"{error}; or {advice}"
            raise type(error)(msg) from error
        raise


def convert(source: Path, save: Path, to: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Write data as a dataset of another library.

    Args:
        source: Whatever `open_dataset` recognizes.
        save: The new directory or file.
        to: One of `FORMATS`.
        options: Those of `ostinato.export` that were given, episodes as text.
        as_json: Print JSON.

    Raises:
        BadParameter: The episodes cannot be parsed.
        OstinatoError: See `ostinato.export`.
    """
    from ostinato import export, open_dataset
    from ostinato.tools.datasets import data_kind

    data_kind(source)  # says what is there instead
    dataset = open_dataset(source, progress=not as_json)
    chosen = options.pop("episodes", None)
    episodes = None if chosen is None else _episodes(chosen, len(dataset.episode_lengths))
    report = export(dataset, save, to, episodes=episodes, progress=not as_json, **options)
    show.answer(report, show.exported, as_json=as_json)


def _episodes(text: str, count: int) -> list[int]:
    """Return the episodes that a text names: numbers with commas, or a range.

    Raises:
        BadParameter: It names none, or others than the first `count`.
    """
    typer = require("typer", "cli")
    first, colon, last = text.partition(":")
    parts = [first, last] if colon else text.split(",")
    if not all(part.strip().isdecimal() or (colon and not part) for part in parts):
        msg = f"--episodes must be numbers from 0 on, such as 0,3,5, or a range, such as 0:50, got {text!r}"
        raise typer.BadParameter(msg)
    numbers = list(range(int(first or 0), int(last or count))) if colon else [int(part) for part in parts]
    if not numbers or max(numbers) >= count:
        msg = f"--episodes must be some of the episodes 0 to {count - 1}, got {text!r}"
        raise typer.BadParameter(msg)
    return numbers


def plot(source: DatasetSource, index: int, target: Path) -> Path:
    """Write the figure of a dataset and of one of its episodes; return its path."""
    from ostinato.viz import draw
    from ostinato.viz.dataset_report import dataset_report, size_of

    figure = dataset_report(source, index)
    return draw(figure, target, size=size_of(figure))
