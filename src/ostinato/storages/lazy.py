"""LazyTensorStorage, LazyMemmapStorage: tensors or mapped files, allocated when the first rows define the schema."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato._backend import backend
from ostinato.core.counts import StoredRows, make_counts
from ostinato.core.kinds import require_tensordict, show_field, show_path
from ostinato.core.rows import Schema
from ostinato.durable import ArrayRecord, read_array, write_array
from ostinato.durable.manifest import read_manifest, write_manifest
from ostinato.durable.progress import BYTES, Progress, begin, finish
from ostinato.errors import CheckpointError, DirectoryInUseError, KindError, OptionError, SchemaError, UsageError
from ostinato.storages.base import check_capacity, check_device, check_ndim
from ostinato.storages.checkpoint import get_rows, put_rows
from ostinato.storages.coded import check_budget, coded_kinds, rows_that_stay
from ostinato.storages.columns import Fields, Saved, choose, dense_positions, named_kinds
from ostinato.storages.memory import HeapMemory, MappedMemory, Memory
from ostinato.storages.single_copy import next_kinds
from ostinato.storages.table import Table, plan_layout
from ostinato.storages.tensor import TensorStorage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.records import Placement
    from ostinato.durable.codecs import AnyCodec
    from ostinato.durable.progress import ProgressOption
    from ostinato.storages.base import Storage
    from ostinato.storages.coded import Evict
    from ostinato.storages.columns import StorageColumn

__all__ = ["LazyMemmapStorage", "LazyTensorStorage"]


class LazyTensorStorage(TensorStorage):
    """Tensors for `max_size` rows, allocated when the first rows define the schema.

    Fields of up to 256 bytes share one packed row on the CPU, which halves the cost of random reads; the tensors
    of such fields are strided (`storage["obs"]` is a view). Rows that were never written are never sampled or read.

    Text and other non-tensor fields are kept as Python objects in memory of the host for any device: with
    `device="cuda"`, reading them waits for the device.

    Args:
        max_size: capacity in rows (with `ndim=2`, of all environments, rounded up to whole steps).
        device: where rows are stored; "auto" takes the device of the first rows.
        ndim: 1 for rows `[B, ...]`; 2 for rows of several environments: `extend` of the buffer takes and its indices
            return `[environments, time, ...]`, with `dim_extend=0` `[time, environments, ...]`. `shape` of the storage
            is (steps, environments) in both cases.
        packed: False gives every field a contiguous tensor.
        single_copy: store a next observation once, as the observation of the following row, if the two are equal bit
            by bit. True pairs `("next", name)` with `name` and `next_name` with `name` (of equal dtype and shape; not
            reward, done, terminated, truncated); a mapping such as `{"next_obs": "obs"}` names the pairs. Rows must be
            written in ring order, those of several environments with `ndim=2`; all reads are copies. On other devices
            than the CPU, each write waits for the device once.
        codec: compress fields without loss: "zstd" (`pip install 'ostinato[zstd]'`), "zlib", "auto"
            (zstd if it is installed, else zlib), a `ZstdCodec`, `ZlibCodec` or `Codec` of your own for all fields of
            more than 256 bytes per row, or a mapping such as `{"obs": "zstd"}` (keys or paths). Batches are the same as
            without, bit for bit; memory and checkpoints hold compressed bytes, and all reads are copies. On the CPU
            only. Rows are compressed when they are written, under the lock of the buffer, and decompressed outside of
            it; large batches in several threads.
        kinds: columns of your own: a mapping of fields (keys or paths) to objects of subclasses of `StorageColumn`.
            All reads are copies. See `docs/extending.md`.
        max_bytes: with `codec`, most bytes of the rows present: compressed values and the other tensor fields. When new
            rows would exceed it, the oldest rows leave before these are written, until a 16th of it is free. `len`,
            samplers, priorities and episodes follow. Rows that stay move to the first slots and get new generations,
            so no index or priority update of an earlier batch reaches another row. `max_size` holds as well; a large
            one costs memory only for the fields without codec. Edits, loads and `set` may exceed it until the buffer
            writes rows again. Needs a round-robin writer, and not `single_copy` or `kinds`.
        evict: "rows", or "episodes": whole finished episodes leave, that with the oldest row first. Only if the
            unfinished episodes alone exceed the budget, these leave too, the newest of them row by row. The buffer must
            know its episodes (`episodes=`, a slice sampler, or a unit).
        allow_pickle: let `dumps` and `loads` pickle objects of non-tensor fields that are not text or plain values.
            Unpickling executes code: set it only for checkpoints that you trust.
        compilable: no effect: the native call is opaque to `torch.compile` in any case.
        shared_init: the buffer with this storage is shared between processes, as with `ReplayBuffer(shared=True)`.
        consolidated: no effect, except that rows must be TensorDicts or tensorclasses: small fields share one block of
            memory in any case.
        cleanup_memmap: no effect: no file is left of the allocation.

    Raises:
        CapacityError: if `max_size` is not a positive integer.
        StorageMemoryError: at the first write, if there is not enough memory; names the bytes needed and free.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
        >>> rb.extend({"obs": torch.zeros(8, 3), "reward": torch.zeros(8)}).shape
        torch.Size([8])
        >>> rb.sample()["obs"].shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | int = "cpu",
        ndim: int = 1,
        packed: bool = True,
        single_copy: bool | Mapping[Any, Any] = False,
        codec: str | AnyCodec | Mapping[Any, str | AnyCodec] | None = None,
        kinds: Mapping[Any, StorageColumn] | None = None,
        max_bytes: int | None = None,
        evict: Evict = "rows",
        allow_pickle: bool = False,
        compilable: bool = False,  # noqa: ARG002
        consolidated: bool = False,
        cleanup_memmap: bool = True,  # noqa: ARG002
        shared_init: bool = False,
    ) -> None:
        if consolidated:
            require_tensordict("consolidated=True", "omit it")
        self.consolidated = consolidated
        self.shared_init = shared_init
        self.ndim = check_ndim(ndim)
        self.allow_pickle = allow_pickle
        self._set_kinds([*named_kinds(kinds), *next_kinds(single_copy), *coded_kinds(codec)])
        self.budget = check_budget(max_bytes, evict, self._kinds, ndim=self.ndim)
        self.max_size = self.capacity = check_capacity(max_size)
        self._auto = device == "auto"
        self.device = torch.device("cpu") if self._auto else check_device(device)
        self.packed = packed
        """Whether small fields share a row."""
        self._given: Memory | None = None
        self._at = make_counts(StoredRows)

    def _set_kinds(self, kinds: Sequence[StorageColumn]) -> None:
        """Give fields their kinds of column; `choose` asks them in this order, and some take only what is left."""
        self._kinds = kinds
        self.ring_only = any(kind.ring_only for kind in kinds)

    def lay_out(self, schema: Schema) -> None:
        """Fix the schema before the first rows; see `Storage.lay_out`.

        Raises:
            UsageError: with `ndim=2`, where the first rows also say how many environments there are.
        """
        if self._table is not None:
            return
        if self.ndim > 1:
            msg = (
                "the schema of a storage with ndim=2 is fixed by its first rows, which say how many environments it has"
            )
            raise UsageError(msg)
        self._lay_out(schema, (), self.device)

    def forget_form(self) -> None:
        """Drop the schema and the memory of rows, so that the next rows may have another."""
        self._table = None
        self._at.plain = False
        self.num_envs = 1
        self.capacity = self.max_size

    def blank(self) -> LazyTensorStorage:
        """Return a storage without rows, in memory of its own; this one if it has memory and no rows."""
        if self._table is not None and not self._at.rows:
            return self
        other = object.__new__(type(self))
        vars(other).update(self._without_rows())
        return other

    def _without_rows(self) -> dict[str, Any]:
        """Return the attributes of a storage with these options and no rows."""
        fresh = {"num_envs": 1, "capacity": self.max_size, "exposed": False}
        return {**vars(self), "_table": None, "_at": make_counts(StoredRows), **fresh}

    def in_memory(self) -> LazyTensorStorage:
        """Return a storage without rows in memory of the process, with these options but for the device."""
        other = LazyTensorStorage(self.max_size, ndim=self.ndim, packed=self.packed, allow_pickle=self.allow_pickle)
        other._set_kinds(self._kinds)
        return other

    def take(self, filled: Storage) -> None:
        """Take over the memory of another storage. No copy; views of rows that were returned are of other memory."""
        filled.writes = self.writes
        vars(self).update(vars(filled))

    def _lay_out(
        self,
        schema: Schema,
        batch: tuple[int, ...],
        device: torch.device,
        mapped: Mapping[int, Any] | None = None,
        *,
        packed: bool | None = None,
    ) -> None:
        """Allocate memory for rows of a schema, or map saved columns as memory; `packed` is that of existing files."""
        num_envs = batch[-1] if self.ndim > 1 else 1
        self._check_first_rows(schema, batch, num_envs)
        if self._auto:
            self.device = device
        capacity, memory = -(-self.max_size // num_envs) * num_envs, self._memory()
        kinds = choose(self._kinds, schema)
        kept = dense_positions(schema, kinds)
        if mapped is not None:
            dense = _mapped(schema, mapped, capacity)
        else:
            # Packed rows are faster with the native gather only; torch gathers contiguous columns faster.
            if packed is None:
                packed = self.packed and backend.native is not None and self.device.type == "cpu"
            leaves = [schema.leaves[i] for i in kept]
            layout = plan_layout(leaves, packed=packed, align=min([8, *(kind.align for kind, _ in kinds)]))
            dense = Table.allocate(schema, kept, capacity, memory, layout)
        self._table = Fields(
            schema, kept, dense, kinds, num_envs=num_envs, memory=memory, allow_pickle=self.allow_pickle
        )
        self.num_envs, self.capacity = num_envs, capacity

    def _check_first_rows(self, schema: Schema, batch: tuple[int, ...], num_envs: int) -> None:
        if self.consolidated and schema.kind not in {"tensordict", "tensorclass"}:
            msg = f"Cannot consolidate non-tensordict storages, got rows of the kind {schema.kind!r}: omit consolidated"
            raise OptionError(msg)
        if num_envs < 1:
            msg = f"rows must have at least one environment, got batch size {list(batch)}"
            raise SchemaError(msg)
        if schema.objects and self._given is not None:
            names = ", ".join(show_path(leaf.path) for leaf in schema.objects)
            msg = (
                f"processes cannot share Python objects, got text or other non-tensor fields: {names}. Leave them out, "
                "encode them as tensors, or make the buffer without shared=True"
            )
            raise KindError(msg)

    @property
    def mappable(self) -> bool:  # type: ignore[override]
        """Whether files can be mapped as its rows."""
        return self.device.type == "cpu" and not self._kinds

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the rows that are present and the options; memory of unwritten rows is not pickled."""
        return {**self._without_rows(), "_given": None, "edits": 0, "rows pickled": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Create the storage again and copy the rows."""
        vars(self).update(state)
        self.load_state_dict(vars(self).pop("rows pickled"))

    def rows_that_stay(self, payload: Any, oldest: int, episodes: EpisodeTable | None) -> Tensor | None:
        """Return the slots that stay when rows have to leave before a payload is written in ring order.

        The buffer then calls `keep` with them.

        Args:
            payload: rows that were admitted.
            oldest: slot of the oldest row present.
            episodes: the episodes of the rows, if the buffer knows them.

        Returns:
            int64 `[n]`, the oldest row first; None if no row has to leave.

        Raises:
            StorageMemoryError: if there is no room for the payload.
        """
        if self.budget is None or self._table is None:
            return None
        return rows_that_stay(self.budget, self._table, payload, self._at.rows, oldest, episodes)

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        self._require().keep(slots)
        self._at.rows, self._at.cursor = slots.shape[0], slots.shape[0] % self.capacity

    def _memory(self) -> Memory:
        return HeapMemory(self.device) if self._given is None else self._given

    @property
    def why_private(self) -> str | None:
        """The option because of which processes cannot share its rows; None if they can."""
        reasons = {
            f"ndim={self.ndim}": self.ndim > 1,
            "device='auto'": self._auto,
            f"device={str(self.device)!r}": self.device.type != "cpu",
            "fields added later": self._table is not None and bool(self._table.late.fields),
        }
        kinds = self._kinds if self._table is None else self._table.kinds
        reasons = {kind.why_private: not kind.shareable for kind in kinds} | reasons
        return next((reason for reason, holds in reasons.items() if holds), None)


def _mapped(schema: Schema, sources: Mapping[int, Any], capacity: int) -> Table:
    """Return a table in the files of saved columns.

    Raises:
        CheckpointError: if some are saved in a form that cannot be mapped.
    """
    for position, source in sources.items():
        if isinstance(source, Saved):
            how = f"{show_field(schema.leaves[position].path)} with single_copy or codec"
            msg = f"the checkpoint holds the {how}, which cannot be mapped: load it with mmap=False"
            raise CheckpointError(msg)
    return Table.map(schema, sources, capacity)


# -- mapped files ------------------------------------------------------------------------------------------------------

_FORMAT = "ostinato-mapped-rows"
_in_files: weakref.WeakSet[LazyMemmapStorage] = weakref.WeakSet()
"""Storages whose files this process has made or opened."""


def _end_direct_writes() -> None:
    """In a forked child: `LazyMemmapStorage.write` raises there, and direct calls do not call it."""
    for storage in _in_files:
        storage.end_direct_writes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_direct_writes)


class _Parts:
    """What `flush` writes beside the mapped blocks: arrays in files of their own.

    Args:
        directory: of the files.
        records: of the arrays that are there, by name.
    """

    def __init__(self, directory: Path, records: dict[str, ArrayRecord] | None = None) -> None:
        self.records = {} if records is None else records
        self.record = self.records.__getitem__
        self._directory = directory

    def add_array(self, name: str, tensor: Tensor, *, compare: bool) -> None:  # noqa: ARG002
        """Write an array."""
        file = f"block-part{len(self.records)}.bin"
        (self._directory / file).unlink(missing_ok=True)
        self.records[name] = write_array(self._directory, file, tensor)

    def read(self, name: str) -> Tensor:
        """Read an array."""
        return read_array(self._directory, self.records[name])


class LazyMemmapStorage(LazyTensorStorage):
    """Rows in memory-mapped files: the operating system caches the rows in use, the disk holds all of them.

    The files are scratch space, not a checkpoint: rows reach the disk when the system writes them back. `flush()` makes
    them durable and writes a manifest, with which a later process can open the directory again; the next write removes
    the manifest, so that a directory opens only as it was flushed. `dumps` saves a copy. A directory serves one storage
    at a time. `close()`, or a `with` block, releases the files.

    Text and other non-tensor fields are kept as Python objects in memory; `flush` writes them to files as UTF-8 or
    JSON.

    Args:
        max_size: capacity in rows (with `ndim=2`, of all environments). Disk space for all of them is reserved at the
            first write.
        scratch_dir: directory of the files; None creates a temporary one, which is removed with the storage. `dumps`
            to it is `flush`, which copies nothing, and `loads` from it opens what `flush` has written.
        device: "cpu" or "auto"; accepted for compatibility with TorchRL.
        ndim: 1 for rows `[B, ...]`; 2 for rows of several environments: `extend` of the buffer takes and its indices
            return `[environments, time, ...]`, with `dim_extend=0` `[time, environments, ...]`. `shape` of the storage
            is (steps, environments) in both cases.
        existsok: allow `scratch_dir` to contain the files of another storage. If `flush` left its manifest, the
            storage opens with its rows; otherwise, the files are replaced at the first write.
        auto_cleanup: remove the files when the storage is closed or dropped, or at the end of the process; None
            removes temporary ones alone. No signal handlers are installed: a process that SIGTERM ends leaves them.
        packed: see `LazyTensorStorage`.
        single_copy: see `LazyTensorStorage`; next observations that are stored separately have files of their own.
        kinds: see `LazyTensorStorage`.
        allow_pickle: see `LazyTensorStorage`; `flush` never pickles.
        compilable: no effect, see `LazyTensorStorage`.
        shared_init: see `LazyTensorStorage`; the rows are in the files.

    Raises:
        OptionError: for another device.
        DirectoryInUseError: at the first write, if the directory contains files of a storage and `existsok` is false.
        CheckpointError: if the directory was created with another capacity or `ndim`.
        StorageMemoryError: at the first write, if the disk is too small; names the bytes needed and free.

    Examples:
        >>> import torch
        >>> from ostinato import LazyMemmapStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(1000), batch_size=4)
        >>> rb.extend({"obs": torch.zeros(8, 3)}).shape
        torch.Size([8])
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | Path | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        packed: bool = True,
        single_copy: bool | Mapping[Any, Any] = False,
        kinds: Mapping[Any, StorageColumn] | None = None,
        allow_pickle: bool = False,
        compilable: bool = False,
        auto_cleanup: bool | None = None,
        shared_init: bool = False,
    ) -> None:
        if device != "auto" and torch.device(device).type != "cpu":
            msg = (
                "Memory map device other than CPU isn't supported: mapped files are on the CPU, got "
                f"device={device!r}: use LazyTensorStorage, or move batches with a transform"
            )
            raise OptionError(msg)
        super().__init__(
            max_size,
            device="cpu",
            ndim=ndim,
            packed=packed,
            single_copy=single_copy,
            kinds=kinds,
            allow_pickle=allow_pickle,
            compilable=compilable,
            shared_init=shared_init,
        )
        self._directory = None if scratch_dir is None else Path(scratch_dir)
        self.existsok = existsok
        """Whether the directory may contain files of another storage."""
        self.auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        """Whether the files are removed with the storage."""
        self._mapped: MappedMemory | None = None
        self._process = os.getpid()
        self._flushed = False
        if existsok and self._directory is not None and (self._directory / "manifest.json").exists():
            self._reopen(self._directory)

    @property
    def mappable(self) -> bool:  # type: ignore[override]
        """False: its rows are in files of its own."""
        return False

    @property
    def scratch_dir(self) -> Path | None:
        """Directory of the files; None for a temporary one before the first row."""
        return self._mapped.directory if self._mapped is not None else self._directory

    def _foreign(self) -> list[Path]:
        """Return the files of another storage in the directory.

        Raises:
            DirectoryInUseError: if there are some, and `existsok` is false.
        """
        directory = self._directory
        if directory is None or not directory.exists():
            return []
        found = [*directory.glob("block*.bin"), *directory.glob("manifest.json")] if directory.is_dir() else [directory]
        if found and not self.existsok:
            msg = (
                f"the directory {directory} holds the files of another storage: pass existsok=True to use it, or "
                "choose another scratch_dir"
            )
            raise DirectoryInUseError(msg)
        return found

    def cleanup(self) -> bool:
        """Remove the files from the disk; the directory too, if it is empty then.

        The rows stay readable and writable in this process, until it ends or drops the storage.

        Returns:
            Whether files were removed: False before the first write, and at the second call.
        """
        if self._mapped is None:
            return False
        self._flushed = False
        return self._mapped.remove()

    def _owns(self, path: str | Path) -> bool:
        return self._directory is not None and Path(path).absolute() == self._directory.absolute()

    def dumps(self, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Save the rows; see `Storage.dumps`. To its own `scratch_dir`: `flush`, which copies nothing."""
        if not self._owns(path):
            super().dumps(path, progress=progress)
            return
        with Progress(progress, "save", unit=BYTES):
            self.flush()

    def loads(self, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Load rows; see `Storage.loads`. From its own `scratch_dir`: open what `flush` has written there.

        Raises:
            UsageError: if the storage has written to its `scratch_dir` since `flush`.
        """
        if not self._owns(path):
            super().loads(path, progress=progress)
        elif self._table is None:
            with Progress(progress, "load", unit=BYTES):
                self._reopen(Path(path))
        elif not self._flushed:
            msg = f"rows were written since the last flush() to {path}, and have replaced those that were saved there"
            raise UsageError(msg)

    dump = save = dumps
    load = loads

    def flush(self) -> None:
        """Write all rows to the disk, and a manifest with which `existsok=True` opens them again.

        Cost: the dirty pages, and copies of fields that are not dense, those of `kinds` too. The next write removes the
        manifest: call `flush` again after writing.

        Raises:
            UsageError: if nothing was written yet, or the directory is temporary.
            CheckpointError: if a non-tensor field contains objects that are not text or plain values.
        """
        if self._table is None or self._mapped is None or self._mapped.temporary:
            msg = "flush() needs rows in a scratch_dir of your choice: this storage is " + (
                "empty" if self._table is None else "temporary; pass scratch_dir, or save with dumps()"
            )
            raise UsageError(msg)
        parts, table = _Parts(self._mapped.directory), self._table
        dense = {table.schema.column_names[i] for i in table.kept}
        state = put_rows(parts, {**self.state_dict(), "allow_pickle": False}, "", done=dense)
        begin(sum(self._mapped.sizes().values()))
        self._mapped.sync()
        finish()
        write_manifest(
            self._mapped.directory,
            {
                **state,
                "columns": {name: record.to_json() for name, record in parts.records.items()},
                "max_size": self.max_size,
                "packed": table.dense.packed,
                "kinds": self._kind_names(table.schema),
                "files": self._mapped.sizes(),
            },
            format_name=_FORMAT,
        )
        self._flushed = True
        self._at.plain = False  # the next write removes the manifest

    def _kind_names(self, schema: Schema) -> dict[str, str]:
        """Return the classes of the columns of the fields that are not dense."""
        chosen = choose(self._kinds, schema)
        return {schema.column_names[i]: type(kind).__name__ for kind, positions in chosen for i in positions}

    def _end_flush(self) -> None:
        """Remove the manifest of an earlier `flush` before rows change: a crash must not mix old with new rows."""
        if self._flushed and self._mapped is not None:
            (self._mapped.directory / "manifest.json").unlink(missing_ok=True)
        self._flushed = False
        self.plain_table()

    def blank(self) -> LazyTensorStorage:
        """Return a storage without rows, in memory if the files hold rows."""
        if not self._at.rows:
            return super().blank()
        return self.in_memory()

    def take(self, filled: Storage) -> None:
        """Take over files, or copy the rows of a storage in memory to those of this one."""
        if isinstance(filled, LazyMemmapStorage):
            super().take(filled)
            _in_files.add(self)
        else:
            self.load_state_dict(filled.state_dict())

    def close(self) -> None:
        """Release the files; the files of a temporary directory are removed. Views of rows keep their memory mapped.

        Rows that were written after the last `flush` cannot be opened again.
        """
        self._closed = True
        super().forget_form()
        self._at.rows = self._at.cursor = 0
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def forget_form(self) -> None:
        """Drop the schema and the files of rows, so that the next rows may have another."""
        self._end_flush()
        super().forget_form()
        if self._mapped is not None:
            self._mapped.remove()
            self._mapped = None

    def hand_over(self) -> MappedMemory:
        """Close this storage and return its files, with their rows, to an owner that several processes have.

        Raises:
            OptionError: if the rows in the files are laid out as only this storage knows.
        """
        mapped = self._mapped or MappedMemory(self._directory, remove=self.auto_cleanup)
        if self._at.rows and self._table is not None:
            dense = self._table.dense
            if dense.layout != plan_layout(dense.schema.leaves, packed=self.packed and backend.native is not None):
                msg = f"the files in {mapped.directory} have another layout: load the rows from a checkpoint"
                raise OptionError(msg)
        else:
            for path in self._foreign() if self._mapped is None else mapped.directory.glob("block*.bin"):
                path.unlink()  # see `_lay_out`
        self._end_flush()
        self._mapped = None
        self.close()
        return mapped

    def _memory(self) -> Memory:
        if self._closed:
            msg = "the storage is closed: create a new one"
            raise UsageError(msg)
        self._mapped = MappedMemory(self._directory, remove=self.auto_cleanup)
        self._process = os.getpid()
        _in_files.add(self)
        return self._mapped

    def plain_table(self) -> tuple[Fields, StoredRows] | None:
        """Return fields and counts; see `TensorStorage.plain_table`. None in a forked child, which must not write."""
        return super().plain_table() if os.getpid() == self._process else None

    def end_direct_writes(self) -> None:
        """Let native calls write no more: this process was forked from the one that made the files."""
        self._at.plain = False

    def write(self, placement: Placement, payload: Any) -> None:
        """Write rows to slots; see `TensorStorage.write`.

        Raises:
            UsageError: in a forked child of the process that made the files: both would write to the same slots.
        """
        if os.getpid() != self._process:
            msg = (
                "this process was forked from the one whose rows are in these files, which does not know what it "
                "writes: call rb.share() before the fork, or pass the buffer to a process that is spawned"
            )
            raise UsageError(msg)
        super().write(placement, payload)

    def _reopen(self, directory: Path) -> None:
        body = read_manifest(directory, format_name=_FORMAT).body
        if (body["max_size"], body["ndim"]) != (self.max_size, self.ndim):
            msg = (
                f"the directory {directory} holds a storage with max_size={body['max_size']}, ndim={body['ndim']}, "
                f"got max_size={self.max_size}, ndim={self.ndim}: open it with those, or choose another scratch_dir"
            )
            raise CheckpointError(msg)
        if "kinds" not in body:
            msg = f"the directory {directory} was flushed by an older version of ostinato: choose another scratch_dir"
            raise CheckpointError(msg)
        schema = Schema.from_json(body["schema"])
        kinds = self._kind_names(schema)
        if body["kinds"] != kinds:
            msg = (
                f"the directory {directory} holds a storage with columns of the kinds {body['kinds']}, those of this "
                f"one are {kinds}: open it with the same single_copy and kinds, or choose another scratch_dir"
            )
            raise CheckpointError(msg)
        MappedMemory(directory, remove=False).must_exist(body["files"])
        super()._lay_out(schema, (body["lanes"],), self.device, packed=body["packed"])
        table = self._require()
        parts = _Parts(directory, {name: ArrayRecord.from_json(node) for name, node in body["columns"].items()})
        state = get_rows(parts, body, self, "")
        for position, column in zip(table.kept, table.dense.view(slice(body["rows"])), strict=True):
            state["columns"][schema.column_names[position]] = column
        self.load_state_dict(state)
        self._flushed = True

    def _lay_out(self, *args: Any, **options: Any) -> None:
        for path in self._foreign():
            # left by a process that did not flush: it is not known which of the bytes are rows
            path.unlink()
        super()._lay_out(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle rows and options of a copy, which has temporary files of its own."""
        fresh = {"_directory": None, "existsok": False, "auto_cleanup": True, "_mapped": None}
        return {**super().__getstate__(), **fresh, "_flushed": False, "_closed": False}
