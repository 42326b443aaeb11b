"""open_dataset: recognizes the format of a dataset and opens it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ostinato.core.options import check_integer, check_number
from ostinato.core.processes import cores
from ostinato.datasets import checkpoints, d4rl, lerobot, minari, rlinf, robomimic, zarr
from ostinato.datasets.arrays import read_arrays
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.columns import DenseColumn
from ostinato.datasets.dataset import DatasetStorage, chosen_fields
from ostinato.datasets.decoded import HeapRows, decode_once, tables_of, with_columns
from ostinato.datasets.format import Format, Reading
from ostinato.datasets.parquet import PictureColumn
from ostinato.datasets.video import VideoColumn
from ostinato.durable.progress import PARTS, Progress
from ostinato.errors import CheckpointNotFoundError, KindError, OptionError

if TYPE_CHECKING:
    import torch

    from ostinato.core.rows import Path as FieldPath
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.dataset import Contents, Fields
    from ostinato.durable.progress import ProgressOption

DEFAULT_BYTES = 1 << 30
_DENSE_SHARE = 4
"""Tables of at most this part of the budget are kept as tensors after the first read; larger ones block by block."""


FORMATS: tuple[Format, ...] = (
    lerobot.FORMAT,
    checkpoints.OSTINATO,
    checkpoints.TORCHRL,
    rlinf.FORMAT,
    minari.FORMAT,
    robomimic.FORMAT,
    d4rl.FORMAT,
    zarr.FORMAT,
)
"""The formats of this library, in the order in which they are tried."""

_GROUP = "ostinato.datasets"
"""Entry points of other packages, each a `Format`."""


def formats() -> Iterator[Format]:
    """Yield all formats: those of this library, then those of other packages, which are imported only then."""
    yield from FORMATS
    yield from registered()


@cache
def registered() -> tuple[Format, ...]:
    """Return the formats of other packages.

    Raises:
        KindError: if an entry point is no `Format`.
    """
    found = [(point, point.load()) for point in entry_points(group=_GROUP)]
    for point, kind in found:
        if not isinstance(kind, Format):
            msg = f"the entry point {point.name} = {point.value} of {_GROUP} must be a Format, got {kind!r}"
            raise KindError(msg)
    return tuple(kind for _, kind in found)


def format_of(path: Path) -> str | None:
    """Return the name of the format of a path, which exists; None if it is not recognized."""
    return next((kind.name for kind in formats() if kind.recognizes(path)), None)


def known_formats() -> tuple[str, ...]:
    """Return the names of all formats of datasets on disk."""
    return tuple(kind.name for kind in formats())


def open_dataset(
    source: str | Path | Mapping[Any, Any] | Any,
    *,
    episodes: Sequence[int] | slice | torch.Tensor | None = None,
    fields: Fields = None,
    episode_ends: Any = None,
    filter_key: str | None = None,
    max_episode_steps: int | None = None,
    max_bytes: int = DEFAULT_BYTES,
    num_threads: int | None = None,
    tolerance_s: float = 1e-4,
    cache: Literal["memory", "disk"] | None = None,
    cache_dir: str | Path | None = None,
    tensordict: bool = False,
    progress: ProgressOption = None,
) -> DatasetStorage:
    """Open a dataset as the read-only storage of a replay buffer. Rows are read when they are sampled.

    Args:
        source: a path, a mapping of arrays `[rows, ...]` with the ends of the episodes, a `minari.MinariDataset`, an
            `h5py.File` or `h5py.Group`, or a `zarr.Group`.
        episodes: positions of the episodes to use, in this order; None for all.
        fields: keys to keep, or a mapping of new keys to keys of the dataset; a nested key is a tuple (`{"obs":
            "observation", ("next", "reward"): "reward"}`), and a key of a nest stands for all fields below it. Fields
            that are not named are not read. None for all.
        episode_ends: for a mapping of arrays: the row after the last one of each episode, integers `[episodes]`. None
            takes them from the mapping, or from its flags `done`, `terminated` and `truncated`.
        filter_key: for robomimic: the name in `mask` of the demonstrations to use; None for all.
        max_episode_steps: for D4RL files without `timeouts`: the time limit of the environment, at which episodes were
            cut off.
        max_bytes: budget for rows and decoded frames that are kept in memory.
        num_threads: threads that decode video; None is one for each core of this process.
        tolerance_s: largest distance in seconds between a video frame and the timestamp of its row; a frame that is
            further away raises an error, so that no frame is ever shifted.
        cache: "memory" keeps every row that was read, decoded, in memory that processes forked later share; "disk" in
            files that are mapped. Each row is then decoded once. None keeps what fits in `max_bytes`.
        cache_dir: for `cache="disk"`: a directory where decoded rows persist for the next run, in one process at a
            time. Changed files of the dataset raise an error. None for temporary files.
        tensordict: rows are TensorDicts, as `TensorDictReplayBuffer` needs them; else dicts.
        progress: the files and episodes looked at, of which the total is not known before (0); see `ProgressOption`.

    Returns:
        The rows of the chosen episodes, one after the other.

    Raises:
        CheckpointNotFoundError: if the path does not exist.
        KindError: if the format is not recognized.
        MissingExtraError: naming the extra to install for the format.
        DamagedFileError: if a file cannot be read; the message names it.
        StorageMemoryError: if there is too little memory or disk for `cache`.
        DirectoryInUseError: if another process uses `cache_dir`.
        CheckpointError: if `cache_dir` holds rows of another dataset, or the dataset has changed.
        OptionError: if an option does not apply to the format, or is out of its range.

    Examples:
        >>> import torch
        >>> from ostinato import ReplayBuffer, SliceSampler, open_dataset
        >>> data = {"observation": torch.zeros(100, 4), "action": torch.zeros(100, 2)}
        >>> dataset = open_dataset(data, episode_ends=[40, 100])
        >>> rb = ReplayBuffer(storage=dataset, sampler=SliceSampler(slice_len=8), batch_size=32)
        >>> rb.sample()["action"].shape
        torch.Size([32, 2])
    """
    _check_budget(max_bytes, num_threads, tolerance_s, max_episode_steps)
    _check_cache(source, cache, cache_dir)
    options = {"filter_key": filter_key, "max_episode_steps": max_episode_steps}
    if isinstance(source, Mapping) and not _formats_of(source):
        _check_options("a mapping of arrays", (), options)
        with Progress(progress, "open dataset", 0, unit=PARTS):
            contents = read_arrays(source, episode_ends)
        return DatasetStorage(contents, episodes=episodes, fields=fields, tensordict=tensordict)
    if episode_ends is not None:
        msg = f"episode_ends is for a mapping of arrays, got it with {source!r}: the files say where episodes end"
        raise OptionError(msg)
    blocks = BlockCache(max_bytes)
    threads = cores() if num_threads is None else num_threads
    found, kind = _recognize(source)
    _check_options(kind.name, kind.options, options)
    with Progress(progress, "open dataset", 0, unit=PARTS):
        contents = kind.read(found, Reading(blocks, threads, tolerance_s, filter_key, max_episode_steps))
    used = _used(contents, fields)
    if cache is None:
        contents = _share(contents, used, blocks)
    else:
        rows = len(DatasetStorage(contents, episodes=episodes))
        root = (kind.root(found) if isinstance(found, Path) else None) or found
        contents = decode_once(contents, used, rows, cache, root, cache_dir)
    return DatasetStorage(contents, episodes=episodes, fields=fields, tensordict=tensordict)


def _recognize(source: Any) -> tuple[Any, Format]:
    """Return the path or object of a dataset, and its format."""
    known = _formats_of(source)
    if not known and not isinstance(source, (str, os.PathLike)):
        kinds = ", ".join(dict.fromkeys(name for kind in formats() for name in kind.objects))
        msg = f"a dataset is a path, a mapping of arrays, or one of {kinds}, got {type(source).__name__}"
        raise KindError(msg)
    path = source if known else Path(source).expanduser().absolute()  # files are opened later, maybe from elsewhere
    if not known and not path.exists():
        msg = f"{path} does not exist: give the folder or file of a dataset"
        raise CheckpointNotFoundError(msg)
    for kind in known or formats():
        if kind.recognizes(path):
            return path, kind
    names = ", ".join(known_formats())
    msg = f"the format of {path} is not recognized: known formats are {names}, and a mapping of arrays"
    raise KindError(msg)


def _check_options(name: str, applicable: tuple[str, ...], options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None and option not in applicable:
            kinds = ", ".join(kind.name for kind in formats() if option in kind.options)
            msg = f"{option} is for {kinds}, got {option}={value!r} with a dataset of the format {name}"
            raise OptionError(msg)


def _formats_of(source: Any) -> list[Format]:
    """Return the formats that open objects of this class."""
    if type(source) in {str, dict} or isinstance(source, os.PathLike):
        return []
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(source).__mro__}
    return [kind for kind in formats() if not names.isdisjoint(kind.objects)]


def _used(contents: Contents, fields: Fields) -> set[FieldPath]:
    """Return the paths in the dataset of the fields that were chosen."""
    chosen = {id(column) for column in chosen_fields({**contents.columns, **contents.texts}, fields).values()}
    return {path for path, column in contents.columns.items() if id(column) in chosen}


def _share(contents: Contents, used: set[FieldPath], cache: BlockCache) -> Contents:
    """Divide the budget: small tables are kept whole, frames and larger tables share the rest in proportion.

    Tables that are kept become tensors, which are filled block by block when their rows are first read.
    """
    rows = int(contents.lengths.sum())
    columns = {path: contents.columns[path] for path in contents.columns if path in used}
    tables = {id(table): table for column in columns.values() for table in tables_of(column)}
    sizes = {i: int(table.source.starts[-1]) for i, table in tables.items()}
    nbytes = sum(sizes[i] * t.dtype.itemsize * math.prod(t.shape) for i, t in tables.items())
    if nbytes * _DENSE_SHARE <= cache.max_bytes:
        memory = HeapRows()
        kept: dict[int, DatasetColumn] = {i: DenseColumn(t, sizes[i], memory, str(i)) for i, t in tables.items()}
        cache.max_bytes -= nbytes
        contents, nbytes = with_columns(contents, columns, kept), 0
    videos = [column for column in columns.values() if isinstance(column, VideoColumn)]
    frames = [column for column in columns.values() if isinstance(column, (VideoColumn, PictureColumn))]
    whole = nbytes + sum(rows * math.prod(column.shape) for column in frames)
    budget = cache.max_bytes
    for column in videos:
        size = rows * math.prod(column.shape)
        share = min(size, budget * size // whole)
        column.keep_frames(rows, share)
        cache.max_bytes -= share
    return contents


def _check_budget(max_bytes: int, num_threads: int | None, tolerance_s: Any, max_steps: int | None) -> None:
    for name, value in (("max_bytes", max_bytes), ("num_threads", num_threads), ("max_episode_steps", max_steps)):
        if value is not None:
            check_integer(name, value, 1, OptionError)
    check_number("tolerance_s", tolerance_s, "a positive number of seconds", lambda seconds: 0 < seconds < math.inf)


def _check_cache(source: Any, cache: str | None, cache_dir: str | Path | None) -> None:
    if cache not in (None, "memory", "disk"):
        msg = f'cache must be "memory", "disk" or None, got {cache!r}'
        raise OptionError(msg)
    if cache is not None and isinstance(source, Mapping) and not _formats_of(source):
        msg = f"cache={cache!r} is for datasets in files: a mapping of arrays is in memory already, leave it out"
        raise OptionError(msg)
    if cache_dir is not None and cache != "disk":
        msg = f'cache_dir is for cache="disk", got {cache_dir!r} with cache={cache!r}'
        raise OptionError(msg)
