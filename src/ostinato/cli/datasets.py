"""The commands on datasets of other libraries, which `ostinato.open_dataset` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.cli import output as show

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.viz.datasets import DatasetSource

__all__ = ["inspect", "open_source", "plot", "sample"]

DEFAULT_ROWS = 64
"""Rows of a batch of `sample`: few enough for video."""


def inspect(path: Path, *, quick: bool, as_json: bool) -> None:
    """Print what a dataset holds."""
    from ostinato.tools.datasets import inspect_dataset

    with show.progress_bar("read rows") as on_progress:
        report = inspect_dataset(path, read_data=not quick, on_progress=on_progress)
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


def plot(source: DatasetSource, index: int, target: Path) -> Path:
    """Write the figure of a dataset and of one of its episodes; return its path."""
    from ostinato.viz import draw
    from ostinato.viz.dataset_report import dataset_report, size_of

    with show.progress_bar("read actions") as on_progress:
        figure = dataset_report(source, index, on_progress=on_progress)
    return draw(figure, target, size=size_of(figure))
