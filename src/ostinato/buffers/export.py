"""`export`: buffers, datasets and episodes as files of other tools."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, final

import numpy as np
import torch

from ostinato.buffers.as_dataset import buffer_as_dataset
from ostinato.buffers.replay import ReplayBuffer
from ostinato.core import kinds
from ostinato.core.kinds import show_path
from ostinato.core.rows import describe
from ostinato.datasets import DatasetStorage, open_dataset
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.columns import BlockColumn, TensorColumn, TextColumn
from ostinato.datasets.dataset import Contents
from ostinato.datasets.export import ExportOptions, ExportReport, write_dataset
from ostinato.durable.progress import bar_only
from ostinato.errors import KindError, SchemaError
from ostinato.trajectories.buffer import TrajectoryReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.rows import Path as FieldPath
    from ostinato.core.rows import Schema
    from ostinato.datasets.columns import DatasetColumn
    from ostinato.datasets.dataset import Fields
    from ostinato.durable.progress import ProgressOption


def export(
    source: Any,
    path: str | Path,
    format: str = "lerobot",  # noqa: A002 (the word of the command line)
    *,
    episodes: Sequence[int] | slice | Tensor | None = None,
    fields: Fields = None,
    overwrite: bool = False,
    progress: ProgressOption = None,
    **options: Unpack[ExportOptions],
) -> ExportReport:
    """Write a buffer, a dataset or episodes in the format of another tool.

    The episodes of a buffer are written in the order of time, that with the oldest row first; one whose first rows
    were overwritten begins with the first row that is left, and an unfinished one ends with the newest row. A buffer is
    locked meanwhile. Rows are those of the storage: no transform runs.

    Whether the source fits the format is checked before anything is written. The files are written beside `path` and
    renamed when they are complete: after an error or a kill there is nothing at the path, or what was there before.
    Memory: the numbers of one episode, and a few images.

    Args:
        source: a `ReplayBuffer`, a `TrajectoryReplayBuffer`, what `open_dataset` returns or takes, or a list of
            episodes, each a dict or TensorDict of rows `[steps, ...]`.
        path: the new folder, or file.
        format: "lerobot" (v3), "minari" or "hdf5".
        episodes: positions of the episodes to write, in this order; None for all.
        fields: keys to keep, or a mapping of new keys to keys of the source; None for all.
        overwrite: replace what is at the path.
        progress: the rows done and their total; see `ProgressOption`.
        **options: of the format, see `ExportOptions`.

    Returns:
        What was written.

    Raises:
        CheckpointError: if there is something at the path.
        SchemaError: if the format cannot hold the rows.
        OptionError: if an option is not one of the format, or out of its range.
        KindError: if the source is none of these, or an encoder is missing.
        MissingExtraError: naming the extra to install.

    Examples:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from ostinato import export, open_dataset
        >>> episodes = [{"observation": torch.zeros(5, 3), "action": torch.zeros(5, 2)} for _ in range(2)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export(episodes, Path(folder) / "data", fps=10, task="reach")
        >>> report.episodes, report.rows
        (2, 10)
    """
    with ExitStack() as stack:
        dataset = _as_dataset(source, fields, stack, bar_only(progress))
        if isinstance(source, ReplayBuffer):
            fields = None  # they are chosen
        if episodes is not None or fields is not None:
            dataset = dataset.select(episodes=episodes, fields=fields)
        return write_dataset(dataset, path, format, options, overwrite=overwrite, progress=progress)


def _as_dataset(source: Any, fields: Fields, stack: ExitStack, progress: ProgressOption) -> DatasetStorage:
    """Return a source as a dataset, which is valid until the stack is closed; of a buffer, some fields alone."""
    if isinstance(source, DatasetStorage):
        return source
    if isinstance(source, ReplayBuffer):
        stack.enter_context(source._engine.lock)  # noqa: SLF001 (one package)
        return buffer_as_dataset(source, fields)
    if isinstance(source, TrajectoryReplayBuffer):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trajectories"
        source.save_checkpoint(str(folder), progress=progress)
        return stack.enter_context(open_dataset(folder, progress=progress))
    if isinstance(source, (list, tuple)):
        return _of_episodes(source)
    return stack.enter_context(open_dataset(source, progress=progress))


def _of_episodes(episodes: Sequence[Any]) -> DatasetStorage:
    """Return a list of episodes as a dataset. Tensors are not copied."""
    if not episodes:
        msg = "the list of episodes is empty: there is nothing to write"
        raise SchemaError(msg)
    schema: Schema | None = None
    leaves: list[list[Tensor]] = []
    texts: list[list[Any]] = []
    lengths: list[int] = []
    for number, rows in enumerate(episodes):
        if not kinds.is_mapping(rows):
            msg = f"episode {number} is {type(rows).__name__}: give dicts or TensorDicts of rows [steps, ...]"
            raise KindError(msg)
        schema = describe(rows, 1) if schema is None else schema
        try:
            flat = schema.flatten(rows, None, 1)
        except SchemaError as error:
            error.add_note(f"in episode {number}; all episodes have the fields of the first one")
            raise
        if not flat.batch[0]:
            msg = f"episode {number} has no rows: leave it out"
            raise SchemaError(msg)
        lengths.append(flat.batch[0])
        leaves.append([leaf.detach().cpu() for leaf in flat.leaves])
        texts.append([list(values) for values in flat.objects])
    return _joined(schema, leaves, texts, torch.tensor(lengths, dtype=torch.int64, device="cpu"))


def _joined(schema: Any, leaves: list[list[Tensor]], texts: list[list[Any]], lengths: Tensor) -> DatasetStorage:
    cache = BlockCache(1)
    columns: dict[FieldPath, DatasetColumn] = {
        leaf.path: BlockColumn(_Episodes([values[i] for values in leaves]), cache)
        for i, leaf in enumerate(schema.leaves)
    }
    written: dict[FieldPath, TextColumn] = {}
    for i, leaf in enumerate(schema.objects):
        values = [text for episode in texts for text in episode[i]]
        if not all(isinstance(value, str) for value in values):
            msg = f"{show_path(leaf.path)} holds Python objects: leave it out with fields="
            raise SchemaError(msg)
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        codes = torch.tensor([numbers[value] for value in values], dtype=torch.int64, device="cpu")
        written[leaf.path] = TextColumn(list(numbers), TensorColumn(codes))
    return DatasetStorage(Contents("episodes", columns, lengths, written))


@final
class _Episodes:
    """One field of a list of episodes, an episode a block."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values
        self.dtype: torch.dtype = values[0].dtype
        """Dtype of the field."""
        self.shape: tuple[int, ...] = tuple(values[0].shape[1:])
        """Shape of the field in one row."""
        self.starts = np.cumsum([0, *(len(value) for value in values)])
        """First row of each episode, and the number of rows, int64 `[episodes + 1]`."""

    def load(self, block: int) -> Tensor:
        """Return the rows of an episode."""
        return self._values[block]

    def close(self) -> None:
        """Do nothing: there is no file."""
