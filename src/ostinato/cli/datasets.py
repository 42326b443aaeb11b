"""The commands on datasets of other libraries, which `ostinato.open_dataset` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.cli import output as show
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ostinato.viz.datasets import DatasetSource

__all__ = [
    "FORMATS",
    "check_output",
    "convert",
    "inspect",
    "kind_or_advice",
    "open_source",
    "plot",
    "require_trajectories",
    "sample",
]

FORMATS = ("lerobot", "minari", "hdf5")
"""Formats of datasets that are written."""

DEFAULT_ROWS = 64
"""Rows of a batch of `sample`: few enough for video."""


def inspect(path: Path, *, quick: bool, as_json: bool) -> None:
    """Print what a dataset holds."""
    from ostinato.tools.datasets import inspect_dataset

    report = inspect_dataset(path, read_data=not quick, progress=not as_json)
    show.answer(report, show.dataset, as_json=as_json)


def sample(path: Path, num_samples: int | None, *, as_json: bool) -> None:
    """Print one batch of a dataset."""
    from ostinato.tools.datasets import sample_dataset

    show.answer(sample_dataset(path, num_samples or DEFAULT_ROWS), show.dataset_batch, as_json=as_json)


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
    advice = f"give --format {', '.join(FORMATS)} to write it as a dataset of another format"
    if kind_or_advice(source, advice) == "buffer":
        msg = f"{source} is the checkpoint of a buffer, which has one format: {advice}"
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
        name = format_of(path) if path.exists() else None
        if name is None:
            raise
        saved = name in {"TorchRL", "RLinf"}  # the message says what else can be done with these
        msg = f"{error}; or {advice}" if saved else f"{path} is a dataset of the format {name}: {advice}"
        raise type(error)(msg) from error


def check_output(path: Path, output: Path) -> None:
    """Check that writing, or replacing, the output leaves the source as it is, and that no other files are replaced.

    Raises:
        BadParameter: The output is the source, holds it, or lies in it.
        CheckpointError: The output is a directory of other files.
    """
    source, target = path.resolve(), output.resolve()
    if source == target or target in source.parents or (source in target.parents and output.exists()):
        what = "is the source" if source == target else "holds the source" if target in source.parents else "is part of"
        msg = f"OUTPUT {output} {what} {path}, which stays unchanged: choose another path"
        raise require("typer", "cli").BadParameter(msg)
    if not output.is_dir() or not any(output.iterdir()):
        return
    from ostinato.tools.datasets import data_kind

    try:
        data_kind(output)
    except CheckpointError as error:
        msg = f"{output} is a directory of other files, which --overwrite does not replace: choose another path"
        raise CheckpointError(msg) from error


def convert(source: Path, save: Path, to: str, options: dict[str, Any], *, overwrite: bool, as_json: bool) -> None:
    """Write data as a dataset of another library.

    Args:
        source: Whatever `open_dataset` recognizes.
        save: The new directory or file.
        to: One of `FORMATS`.
        options: Those of `ostinato.export` that were given, fields and episodes as text.
        overwrite: Replace what is there.
        as_json: Print JSON.

    Raises:
        BadParameter: The fields or the episodes cannot be parsed.
        DamagedFileError: A checksum differs.
        OstinatoError: See `ostinato.export`.
    """
    from ostinato import export, open_dataset
    from ostinato.tools.datasets import data_kind

    data_kind(source)  # says what is there instead
    _check_checksums(source, progress=not as_json)
    dataset = open_dataset(source, progress=not as_json)
    chosen, fields = options.pop("episodes", None), options.pop("fields", None)
    how: Any = {
        "episodes": None if chosen is None else _episodes(chosen, len(dataset.episode_lengths)),
        "fields": None if fields is None else _fields(fields, list(dataset.schema.paths)),
        "overwrite": overwrite,
        "progress": not as_json,
    }
    show.answer(export(dataset, save, to, **how, **options), show.exported, as_json=as_json)


def _check_checksums(source: Path, *, progress: bool) -> None:
    """Compare checksums, where the source has some: a damaged row must not become a valid one of the new dataset.

    Raises:
        DamagedFileError: A file is damaged.
    """
    from ostinato.tools import is_store, verify
    from ostinato.tools.datasets import data_kind

    ranks = [path for path in sorted(source.glob("rank_*")) if is_store(path)]
    for root in ranks if data_kind(source) == "dataset" else [source]:
        report = verify(root, progress=progress)
        if report.damage:
            problems = "; ".join(damage.problem for damage in report.damage[:3])
            msg = f"{root} is damaged, nothing was written (ostinato verify lists all damage): {problems}"
            raise DamagedFileError(msg)


def _fields(text: str, paths: list[Any]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the new keys of fields and their keys in the dataset.

    Args:
        text: `NAME` to keep a field or `OLD=NEW` to rename it, with commas between. If all are renamed, the other
            fields stay, and those below `next` are renamed as the ones above.
        paths: The fields of the dataset.

    Raises:
        BadParameter: A field does not exist, or two would have one name.
    """
    typer = require("typer", "cli")
    known = {".".join(path[:end]): tuple(path[:end]) for path in paths for end in range(len(path), 0, -1)}
    pairs = [part.strip().partition("=") for part in text.split(",")]
    chosen: dict[tuple[str, ...], tuple[str, ...]] = {}
    for old, equals, new in pairs:
        key = tuple(new.strip().split(".")) if equals else known.get(old.strip(), ())
        if old.strip() not in known or not all(key):
            names = ", ".join(".".join(path) for path in paths)
            msg = f"--fields must be names of fields, or OLD=NEW to rename one, got {text!r}; the fields are {names}"
            raise typer.BadParameter(msg)
        _add(chosen, key, known[old.strip()])
    if not all(equals for _, equals, _ in pairs):
        return chosen
    renamed = {old: new for new, old in chosen.items()}
    for path in paths:
        if not _longest(renamed, path):
            above = _longest(renamed, path[1:]) if path[0] == "next" else ()
            name = ("next", *renamed[above], *path[1 + len(above) :]) if above else tuple(path)
            _add(chosen, name, tuple(path))
    return chosen


def _longest(keys: Iterable[tuple[str, ...]], path: Any) -> tuple[str, ...]:
    """Return the longest key that is the path, or a nest it lies in; empty if there is none."""
    return max((key for key in keys if tuple(path[: len(key)]) == key), key=len, default=())


def _add(chosen: dict[tuple[str, ...], tuple[str, ...]], new: tuple[str, ...], old: tuple[str, ...]) -> None:
    if new in chosen:
        names = ".".join(chosen[new]), ".".join(old)
        msg = f"--fields gives the name {'.'.join(new)} to {names[0]} and to {names[1]}: choose or rename one of them"
        raise require("typer", "cli").BadParameter(msg)
    chosen[new] = old


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
