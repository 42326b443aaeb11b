"""DatasetStorage: the rows of a dataset on disk as a read-only storage, read when they are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import xxhash
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.index import is_field, select
from ostinato.core.kinds import show_path
from ostinato.core.records import Request
from ostinato.core.rows import Flat, Schema, describe
from ostinato.datasets.columns import DenseColumn, TensorColumn, TextColumn
from ostinato.datasets.parquet import TextBlocks
from ostinato.errors import (
    CheckpointError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    SlotError,
    UsageError,
)
from ostinato.storages import Storage
from ostinato.storages.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.records import Placement, Plan
    from ostinato.core.rows import Path
    from ostinato.datasets.columns import DatasetColumn

Fields = Mapping[Any, Any] | Sequence[Any] | None
"""Fields of a dataset to keep: keys, or new keys and those of the dataset; None for all."""


@dataclass(frozen=True)
class Contents:
    """What a dataset holds, as the module of its format reads it. No row has been read yet."""

    format: str
    """Name of the format, such as "lerobot v3.0"."""
    columns: dict[Path, DatasetColumn]
    """Fields by path."""
    lengths: Tensor
    """Rows of each episode, int64 `[episodes]`, all at least 1; the rows of episodes follow each other."""
    texts: Mapping[Path, TextColumn | TextBlocks] = field(default_factory=dict)
    """Fields of text by path."""
    fps: float | None = None
    """Rows per second, where the format knows."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else the format knows of the dataset, as plain values."""
    assumptions: tuple[str, ...] = ()
    """What the format does not say, and how it was read; one sentence each."""
    rows_left_out: int = 0
    """Rows that the files hold and that are no rows of the dataset."""
    left_out_because: str = ""
    """Why they are left out."""
    selection: str = ""
    """What distinguishes the rows from others of the same files, such as a filter that was chosen; empty for all."""


@final
class DatasetStorage(Storage):
    """The rows of a dataset, in the order of its episodes. Read-only: `open_dataset` makes it.

    A buffer samples it as any storage: `ReplayBuffer(storage=dataset, sampler=..., sample_unit=...)`. A row is read,
    and its video frames are decoded, when it is sampled. The episodes are those of the dataset: samplers and units use
    them where no other fields are named. Writing raises `UsageError`; `rb.load_dataset(dataset)` copies rows to a
    buffer that can be written. A checkpoint of a buffer holds no rows of a dataset, only what identifies them; it is
    loaded into a buffer over the same dataset.

    It is also a map-style dataset of `torch.utils.data.DataLoader`: `len(dataset)`, `dataset[i]`. Thread-safe;
    processes that are forked, and those that get a pickled copy, open files of their own.

    Args:
        contents: fields and episodes.
        episodes: positions of the episodes to use, in this order; None for all.
        fields: the fields to use; see `open_dataset`.
        tensordict: rows are TensorDicts; else dicts.

    Raises:
        OptionError: if an episode or a field is chosen that does not exist.
        SchemaError: if the dataset has no rows.
    """

    form = "dataset"

    def __init__(
        self,
        contents: Contents,
        *,
        episodes: Sequence[int] | slice | Tensor | None = None,
        fields: Fields = None,
        tensordict: bool = False,
    ) -> None:
        if not contents.lengths.shape[0]:
            msg = f"the dataset ({contents.format}) has no rows: there is nothing to sample"
            raise SchemaError(msg)
        self.contents = contents
        """Fields and episodes of the whole dataset."""
        self._picked: Tensor | None = None
        self.episode_lengths: Tensor = contents.lengths
        """Rows of each episode, int64 `[episodes]`."""
        self.episode_numbers: Tensor = torch.arange(contents.lengths.shape[0], device="cpu")
        """Position of each episode in the dataset, int64 `[episodes]`."""
        if episodes is not None:
            self._pick(episodes)
        columns = chosen_fields({**contents.columns, **contents.texts}, fields)
        self._schema = _schema(columns, tensordict=tensordict)
        self._columns: list[DatasetColumn] = [columns[leaf.path] for leaf in self._schema.leaves]
        self._texts: list[TextColumn | TextBlocks] = [columns[leaf.path] for leaf in self._schema.objects]
        self._rows = int(self.episode_lengths.sum())
        self.episode_ends = torch.zeros(self._rows, dtype=torch.bool, device="cpu")
        self.episode_ends[self.episode_lengths.cumsum(0) - 1] = True
        self._begin()

    def _begin(self) -> None:
        """Collect the columns that are tensors in a table, whose rows are read in one native call."""
        dense = [(i, c.tensor) for i, c in enumerate(self._columns) if isinstance(c, (TensorColumn, DenseColumn))]
        self._places = {position: place for place, (position, _) in enumerate(dense)}
        leaves = [self._schema.leaves[position] for position, _ in dense]
        self._table = Table.adopt(Schema(None, leaves), [tensor for _, tensor in dense]) if dense else None

    def __getstate__(self) -> dict[str, Any]:
        """All but the table, whose tensors belong to the columns."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_table", "_places")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Collect the tensors of the columns again."""
        self.__dict__.update(state)
        self._begin()

    def _pick(self, episodes: Sequence[int] | slice | Tensor) -> None:
        """Use some episodes, in the order given."""
        lengths = self.contents.lengths
        numbers = _episode_numbers(episodes, lengths.shape[0])
        starts = lengths.cumsum(0) - lengths
        counts = lengths[numbers]
        first = torch.repeat_interleave(starts[numbers] - (counts.cumsum(0) - counts), counts)
        self._picked = first + torch.arange(int(counts.sum()), device="cpu")
        self.episode_lengths, self.episode_numbers = counts, numbers

    def select(
        self, *, episodes: Sequence[int] | slice | Tensor | None = None, fields: Fields = None, tensordict: bool = False
    ) -> DatasetStorage:
        """Return a dataset of some episodes (their positions in this one) and fields of this one. No row is read."""
        columns = {leaf.path: column for leaf, column in zip(self._schema.leaves, self._columns, strict=True)}
        texts = {leaf.path: text for leaf, text in zip(self._schema.objects, self._texts, strict=True)}
        numbers = self.episode_numbers
        if episodes is not None:
            numbers = numbers[_episode_numbers(episodes, numbers.shape[0])]
        whole = numbers.shape[0] == self.contents.lengths.shape[0] and self._picked is None and episodes is None
        return DatasetStorage(
            replace(self.contents, columns=columns, texts=texts),
            episodes=None if whole else numbers,
            fields=fields,
            tensordict=tensordict or self._schema.kind == "tensordict",
        )

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """Name of the format, such as "lerobot v3.0"."""
        return self.contents.format

    @property
    def fps(self) -> float | None:
        """Rows per second, where the format knows; else None."""
        return self.contents.fps

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What else the format knows of the dataset, as plain values."""
        return self.contents.metadata

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the format does not say, and how it was read."""
        return self.contents.assumptions

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return self._rows

    @property
    def schema(self) -> Schema:  # type: ignore[override]
        """Fields of a row."""
        return self._schema

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all rows, decoded."""
        return self._schema.nbytes * self._rows

    def __len__(self) -> int:
        """Number of rows."""
        return self._rows

    def __repr__(self) -> str:
        """Format, rows, episodes and fields."""
        names = ", ".join(show_path(path) for path in self._schema.paths)
        return (
            f"DatasetStorage({self.format}, rows={self._rows}, episodes={len(self.episode_lengths)}, fields=[{names}])"
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> Flat:
        """Read the rows at `slots`, int64 `[B]`."""
        leaves = self.fetch([Request(i, slots) for i in range(len(self._columns))], pin=pin)
        return self._with_texts(leaves, slots, {})

    def read_plan(self, plan: Plan, *, pin: bool = False) -> Flat:
        """Return the payload of a plan's batch; text is that of its records, unless the plan reads it elsewhere."""
        return self._with_texts(plan.fold(self.fetch(plan.requests(), pin=pin)), plan.records, plan.elsewhere)

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Read different rows of each field: one tensor `[n, *shape]` for each request. Copy.

        Raises:
            DamagedFileError: naming file, episode and frame, if a file cannot be read.
        """
        moved: dict[int, Tensor] = {}
        requests = [request._replace(slots=self._rows_at(request.slots, moved)) for request in requests]
        dense = [i for i, request in enumerate(requests) if request.leaf in self._places]
        filling = [self._fill(requests[i].leaf, requests[i].slots) for i in dense]
        others = {i: self._columns[at].start(rows) for i, (at, rows) in enumerate(requests) if at not in self._places}
        out = {i: read() for i, read in others.items()}
        for finish in filling:
            if finish is not None:
                finish()
        if self._table is not None and dense:
            asked = [Request(self._places[requests[i].leaf], requests[i].slots) for i in dense]
            found = self._table.fetch(asked, pin=pin)
            out.update(zip(dense, found, strict=True))
        pinned = pin and torch.cuda.is_available()
        return [out[i].pin_memory() if pinned and i in others else out[i] for i in range(len(requests))]

    def _rows_at(self, slots: Tensor, moved: dict[int, Tensor]) -> Tensor:
        """Return rows of the dataset; requests that share slots share them afterwards, too."""
        if self._picked is None:
            return slots
        if id(slots) not in moved:
            moved[id(slots)] = self._picked[slots]
        return moved[id(slots)]

    def _fill(self, position: int, rows: Tensor) -> Callable[[], None] | None:
        column = self._columns[position]
        return column.fill(rows) if isinstance(column, DenseColumn) else None

    def _with_texts(self, leaves: list[Tensor], records: Tensor, elsewhere: Mapping[Path, Tensor]) -> Flat:
        """Return the payload of a batch whose leaves were fetched; text is that of the rows `records`."""
        slots = [elsewhere.get(leaf.path, records) for leaf in self._schema.objects]
        texts = [text.read(self._rows_at(at, {})) for text, at in zip(self._texts, slots, strict=True)]
        return Flat(leaves, (records.shape[0],), None, texts)

    def present(self, payload: Flat, batch: tuple[int, ...]) -> Any:
        """Nest leaves into a dict or TensorDict with the leading dimensions `batch`. No copy."""
        leaves, objects = payload.leaves, list(payload.objects)
        if len(batch) != 1:
            leaves = [x.reshape((*batch, *leaf.shape)) for x, leaf in zip(leaves, self._schema.leaves, strict=True)]
            objects = [texts.reshape(batch) for texts in objects]
        return self._schema.build(leaves, batch, self.device, objects)

    def read(self, index: Any, *, swap: bool = False) -> Any:  # noqa: ARG002 (one dimension)
        """Return the rows at an index, or a whole field by its key. Copy.

        Args:
            index: int, slice, tensor, mask, list; a str or tuple of str is the path of a field.
            swap: no effect: rows have one dimension.

        Raises:
            SlotError: if the index is out of range.
            KeyMissingError: if there is no such field.
        """
        every = torch.arange(self._rows, device="cpu")
        if is_field(index):
            return self.field_at(every, (index,) if isinstance(index, str) else index)
        picked = select(index, (self._rows,), self.device)
        slots = picked.slots if picked.span is None else every[picked.span]
        return self.present(self.gather(slots), picked.batch)

    def scores_at(self, slots: Tensor, path: tuple[Any, ...]) -> Tensor | None:
        """Return the field at `path` of some rows; other fields are not read. Copy."""
        paths = [leaf.path for leaf in self._schema.leaves]
        return self.fetch([Request(paths.index(path), slots)])[0] if path in paths else None

    def field_at(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return one field of the rows at `slots` (int64 `[n]`): `[n, *shape]`, or a list of texts. Copy.

        Raises:
            KeyMissingError: if rows lack the field.
        """
        for leaf, text in zip(self._schema.objects, self._texts, strict=True):
            if leaf.path == path:
                return list(text.read(self._rows_at(slots, {})))
        return super().field_at(slots, path)

    def close(self) -> None:
        """Close all files. They are opened again when rows are read."""
        for column in self._columns:
            column.close()

    # -- writing: raises -----------------------------------------------------------------------------------------------

    def admit(self, data: Any, lead: int) -> NoReturn:  # noqa: ARG002
        """Raise: a dataset is read-only.

        Raises:
            UsageError: always.
        """
        self._raise_read_only("write rows")

    def write(self, placement: Placement, payload: Any) -> NoReturn:  # noqa: ARG002
        """Raise `UsageError`: a dataset is read-only."""
        self._raise_read_only("write rows")

    def clear(self) -> NoReturn:
        """Raise `UsageError`: a dataset is read-only."""
        self._raise_read_only("remove its rows")

    def prepare_edit(self, slots: Tensor, data: Any, batch: tuple[int, ...]) -> NoReturn:  # noqa: ARG002
        """Raise `UsageError`: a dataset is read-only."""
        self._raise_read_only("change rows")

    def prepare_field(self, path: tuple[Any, ...], slots: Tensor, value: Any, batch: tuple[int, ...]) -> NoReturn:  # noqa: ARG002
        """Raise `UsageError`: a dataset is read-only."""
        self._raise_read_only("change rows")

    def _raise_read_only(self, what: str) -> NoReturn:
        msg = (
            f"cannot {what}: the storage is a dataset ({self.format}), which is read-only. Copy it with "
            "rb.load_dataset(dataset) to a buffer with another storage, or mix both with ReplayBufferEnsemble"
        )
        raise UsageError(msg)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what identifies the rows; they stay in the dataset."""
        return {
            "form": self.form,
            "rows": self._rows,
            "cursor": 0,
            "lanes": 1,
            "ndim": 1,
            "capacity": self._rows,
            "schema": self._schema.to_json(),
            "columns": {},
            "knows_episodes": True,
            "fingerprint": self.fingerprint,
        }

    @property
    def fingerprint(self) -> str:
        """Hash of format, episodes and fields: of what a checkpoint of a buffer compares."""
        digest = xxhash.xxh3_128()
        digest.update(f"{self.format}{self.contents.selection}".encode())
        for numbers in (self.episode_lengths, self.episode_numbers):
            digest.update(numbers.contiguous().numpy().tobytes())
        digest.update(repr(self._schema).encode())
        return digest.hexdigest()

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint is of a buffer over the same rows.

        Raises:
            CheckpointError: if it is not.
        """
        if state.get("fingerprint") != self.fingerprint:
            msg = (
                f"the checkpoint is of a buffer over another dataset: {state.get('rows')} rows, this is {self!r}: open "
                "the same dataset, with the same episodes and fields"
            )
            raise CheckpointError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the rows are the same; there is nothing to load.

        Raises:
            CheckpointError: if they are not.
        """
        self.check_state(state)


def _episode_numbers(episodes: Sequence[int] | slice | Tensor, count: int) -> Tensor:
    """Return the positions of the episodes that were chosen, int64 `[n]`."""
    listed = list(episodes) if isinstance(episodes, range) else episodes
    try:
        chosen = select(listed, (count,), torch.device("cpu"))
    except (SlotError, KindError) as error:
        msg = f"episodes={episodes!r} does not choose from the {count} episodes of the dataset: {error}"
        raise type(error)(msg) from None
    numbers = chosen.slots if chosen.span is None else torch.arange(count, device="cpu")[chosen.span]
    if not numbers.shape[0] or chosen.batch == ():
        msg = f"episodes must be a list or slice of one or more of {count} episodes, got {episodes!r}"
        raise OptionError(msg)
    return numbers


def _as_key(key: Any) -> Path:
    parts = (key,) if isinstance(key, str) else key
    if not isinstance(parts, (tuple, list)) or not parts or not all(isinstance(part, str) for part in parts):
        msg = f"keys in fields are texts or tuples of texts, got {key!r}"
        raise OptionError(msg)
    return tuple(parts)


def chosen_fields(columns: Mapping[Path, Any], fields: Fields) -> dict[Path, Any]:
    """Return the columns that were chosen, by their new paths.

    Raises:
        OptionError: if `fields` is neither a list of keys nor a mapping, or a new key is both a field and a nest.
        KeyMissingError: if there is no such field.
    """
    if fields is None:
        return dict(columns)
    if isinstance(fields, str) or not isinstance(fields, (Mapping, Sequence)):
        msg = f"fields must be a list of keys, or a mapping of new keys to keys of the dataset, got {fields!r}"
        raise OptionError(msg)
    pairs = fields.items() if isinstance(fields, Mapping) else [(key, key) for key in fields]
    out: dict[Path, Any] = {}
    for new, old in pairs:
        path, name = _as_key(old), _as_key(new)
        found = {(*name, *other[len(path) :]): value for other, value in columns.items() if other[: len(path)] == path}
        if not found:
            known = ", ".join(show_path(other) for other in columns)
            msg = f"the dataset has no field {show_path(path)}: it has {known}; choose one of these"
            raise KeyMissingError(msg)
        out |= found
    for path in out:
        inside = [path[:end] for end in range(1, len(path)) if path[:end] in out]
        if inside:
            msg = f"fields= gives the key {show_path(inside[0])} to a field, and {show_path(path)} to another within it"
            raise OptionError(msg)
    return out


def _schema(columns: dict[Path, Any], *, tensordict: bool) -> Schema:
    """Return the schema of rows of nested dicts or TensorDicts."""
    if tensordict:
        kinds.require_tensordict(
            "a dataset with rows that are TensorDicts", "omit tensordict=True for rows that are dicts"
        )
    row: dict[str, Any] = {}
    for path, column in columns.items():
        level = row
        for key in path[:-1]:
            level = level.setdefault(str(key), {})
        level[str(path[-1])] = (
            [""]
            if isinstance(column, (TextColumn, TextBlocks))
            else torch.empty((1, *column.shape), dtype=column.dtype, device="cpu")
        )
    return describe(kinds.as_tensordict(row, 1) if tensordict else row, 1)
