"""The command `convert`: source, destination and options decide which conversion of the library runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["check_output", "convert", "kind_or_advice"]

_DATASETS = ("lerobot", "minari", "hdf5")
"""Formats of datasets that are written."""
_DATASET_OPTIONS = ("fields", "episodes", "fps", "task", "images", "codec", "layout")


def convert(
    source: Path, target: Path, to: str | None, options: dict[str, Any], *, overwrite: bool, progress: bool
) -> Any:
    """Convert what is at a path, and return the report of the conversion.

    Args:
        source: A checkpoint of TorchRL, a directory of trajectories, or, for a format of datasets, whatever
            `open_dataset` recognizes.
        target: The new directory or file.
        to: The format; None takes that of the target's suffix, `safetensors` for trajectories, and the one that
            checkpoints have.
        options: Of `ostinato.export`, `convert_checkpoint` or `tools.convert`, those that were given.
        overwrite: Replace what is at the target.
        progress: Show a bar.

    Raises:
        BadParameter: The format does not exist, or the options do not apply to the conversion.
        OstinatoError: See these three functions.
    """
    from ostinato import tools
    from ostinato.compat import torchrl
    from ostinato.datasets.open import format_of
    from ostinato.durable.tensorfile import FORMATS

    how: Any = {"overwrite": overwrite, "progress": progress}
    if to is None and target.suffix in {".hdf5", ".h5"}:
        to = "hdf5"
    if to in _DATASETS:
        _check_options(options, _DATASET_OPTIONS, f"--format {to}")
        return _export(source, target, to, options, how)
    if torchrl.is_checkpoint(source) or (source.is_file() and format_of(source) is None):
        given = options if to is None else {"format": to, **options}
        _check_options(
            given, ("ndim", "max_size", "allow_pickle"), f"{source}, which is read as a checkpoint of TorchRL"
        )
        return torchrl.convert_checkpoint(source, target, **options, **how)
    if to is not None and to not in FORMATS:
        msg = f"--format must be one of {', '.join([*FORMATS, *_DATASETS])}, got {to!r}"
        raise require("typer", "cli").BadParameter(msg)
    advice = f"give --format {', '.join(_DATASETS)} to write it as a dataset of another format"
    kind = kind_or_advice(source, advice)
    if kind != "trajectories":
        msg = f"{source} is the checkpoint of a buffer, which has one format: {advice}"
        if kind == "groups":
            msg = f"{source} is a buffer of groups, which has one format: ostinato.GroupBuffer reads it"
        raise CheckpointError(msg)
    _check_options(options, ("allow_pickle",), f"{source}, which is a directory of trajectories")
    return tools.convert(source, target, to or "safetensors", **options, **how)


def _check_options(options: dict[str, Any], allowed: tuple[str, ...], what: str) -> None:
    """Check that the options have an effect.

    Raises:
        BadParameter: Some have none.
    """
    wrong = [f"--{name.replace('_', '-')}" for name in options if name not in allowed]
    if wrong:
        msg = f"{', '.join(wrong)} cannot be used with {what}"
        raise require("typer", "cli").BadParameter(msg)


def _export(source: Path, target: Path, to: str, options: dict[str, Any], how: Any) -> Any:
    """Write data as a dataset of another library, after its checksums were compared.

    Raises:
        BadParameter: The fields or the episodes cannot be parsed.
        DamagedFileError: A checksum differs.
    """
    from ostinato import export, open_dataset
    from ostinato.tools.datasets import data_kind

    data_kind(source)  # says what is there instead
    _check_checksums(source, progress=how["progress"])
    dataset = open_dataset(source, progress=how["progress"])
    if "episodes" in options:
        options["episodes"] = _episodes(options["episodes"], len(dataset.episode_lengths))
    if "fields" in options:
        options["fields"] = _fields(options["fields"], list(dataset.schema.paths))
    return export(dataset, target, to, **options, **how)


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


def kind_or_advice(path: Path, advice: str) -> str:
    """Return "trajectories", "buffer" or "groups", as `tools.kind_of`.

    Raises:
        CheckpointError: It is neither; for a dataset the message ends with the advice.
    """
    from ostinato.datasets.open import format_of
    from ostinato.tools.datasets import data_kind

    kind = data_kind(path)
    if kind == "dataset":
        msg = f"{path} is a dataset of the format {format_of(path)}: {advice}"
        raise CheckpointError(msg)
    return kind
