"""LazyMemmapStorage: tensors in memory-mapped files, for buffers larger than RAM."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato._backend import backend
from ostinato.core.rows import Schema
from ostinato.durable.arrays import ArrayRecord, read_array
from ostinato.durable.manifest import read_manifest, write_manifest
from ostinato.durable.progress import BYTES, Progress, begin, finish
from ostinato.durable.row_files import write_array
from ostinato.errors import CheckpointError, DirectoryInUseError, OptionError, UsageError
from ostinato.storages.late_fields import LateFields
from ostinato.storages.lazy import LazyTensorStorage
from ostinato.storages.memory import MappedMemory, Memory
from ostinato.storages.object_columns import check_objects, pack_column, unpack_column
from ostinato.storages.single_copy import SingleCopyTable, checked_apart, find_pairs
from ostinato.storages.table import Block, Table, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ostinato.core.counts import StoredRows
    from ostinato.core.records import Placement
    from ostinato.durable.progress import ProgressOption

__all__ = ["LazyMemmapStorage"]

_FORMAT = "ostinato-mapped-storage"
_in_files: weakref.WeakSet[LazyMemmapStorage] = weakref.WeakSet()
"""Storages whose files this process has made or opened."""


def _end_direct_writes() -> None:
    """In a forked child: `LazyMemmapStorage.write` raises there, and direct calls do not call it."""
    for storage in _in_files:
        storage.end_direct_writes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_direct_writes)


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
        scratch_dir: directory of the files; None creates a temporary one, which is removed with the storage.
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

    def dumps(self, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Save the rows; see `Storage.dumps`. To its own `scratch_dir`: `flush`, which copies nothing."""
        if self._directory is not None and Path(path).absolute() == self._directory.absolute():
            with Progress(progress, "save", unit=BYTES):
                self.flush()
        else:
            super().dumps(path, progress=progress)

    def loads(self, path: str | Path, *, progress: ProgressOption = None) -> None:
        """Load rows; see `Storage.loads`. From its own `scratch_dir`: open what `flush` has written there.

        Raises:
            UsageError: if the storage has written to its `scratch_dir` since `flush`.
        """
        if self._directory is None or Path(path).absolute() != self._directory.absolute():
            super().loads(path, progress=progress)
        elif self._table is None:
            self._reopen(self._directory)
        elif not self._flushed:
            msg = f"rows were written since the last flush() to {path}, and have replaced those that were saved there"
            raise UsageError(msg)

    def flush(self) -> None:
        """Write all rows to the disk, and a manifest with which `existsok=True` opens them again.

        Cost: the dirty pages. The next write removes the manifest: call `flush` again after writing.

        Raises:
            UsageError: if nothing was written yet, or the directory is temporary.
            CheckpointError: if a non-tensor field contains objects that are not text or plain values.
        """
        if self._table is None or self._mapped is None or self._mapped.temporary:
            msg = "flush() needs rows in a scratch_dir of your choice: this storage is " + (
                "empty" if self._table is None else "temporary; pass scratch_dir, or save with dumps()"
            )
            raise UsageError(msg)
        if self._late.columns:
            msg = f"flush() cannot keep fields added later ({list(self._late.columns)}): save with dumps()"
            raise UsageError(msg)
        objects = self._write_objects(self._mapped.directory)
        single = None
        if isinstance(self._table, SingleCopyTable):
            single = _write_next_rows(self._mapped.directory, self._table, self._at.rows)
        begin(sum(self._mapped.sizes().values()))
        self._mapped.sync()
        finish()
        write_manifest(
            self._mapped.directory,
            {
                "rows": self._at.rows,
                "cursor": self._at.cursor,
                "lanes": self.num_envs,  # its name in the checkpoint format
                "max_size": self.max_size,
                "capacity": self._table.capacity,
                "ndim": self.ndim,
                "schema": self._table.schema.to_json(),
                "single_copy": single,
                **({} if objects is None else {"objects": objects}),
                "layout": [[block.stride, [list(member) for member in block.members]] for block in self._table.layout],
            },
            format_name=_FORMAT,
        )
        self._flushed = True
        self._at.plain = False  # the next write removes the manifest

    def _write_objects(self, directory: Path) -> dict[str, Any] | None:
        """Write the fields of objects to files; return their records."""
        if self._objects is None:
            return None
        columns = self._objects.state(self._at.rows, allow_pickle=False)["objects"]
        packed = {name: pack_column(name, values, allow_pickle=False) for name, values in columns.items()}
        records = {}
        for number, (name, (form, *arrays)) in enumerate(packed.items()):
            files = []
            for part, array in zip(("text", "ends"), arrays, strict=True):
                (directory / f"block-{part}{number}.bin").unlink(missing_ok=True)
                files.append(write_array(directory, f"block-{part}{number}.bin", array).to_json())
            records[name] = {"form": form, "files": files}
        return records

    def _read_objects(self, directory: Path, body: dict[str, Any]) -> None:
        """Read the fields of objects of a directory."""
        schema = self._require().schema
        self._objects = self._object_columns(schema, body["capacity"])
        if self._objects is None:
            return
        found = {}
        for name, node in body.get("objects", {}).items():
            text, ends = (read_array(directory, ArrayRecord.from_json(record)) for record in node["files"])
            found[name] = unpack_column(name, node["form"], text, ends, allow_pickle=False)
        state = {"rows": self._at.rows, "objects": found}
        check_objects(schema, state)
        self._objects.load(state)

    def _end_flush(self) -> None:
        """Remove the manifest of an earlier `flush` before rows change: a crash must not mix old with new rows."""
        if self._flushed and self._mapped is not None:
            (self._mapped.directory / "manifest.json").unlink(missing_ok=True)
        self._flushed = False
        self.plain_table()

    def close(self) -> None:
        """Release the files; the files of a temporary directory are removed. Views of rows keep their memory mapped.

        Rows that were written after the last `flush` cannot be opened again.
        """
        self._closed = True
        super().forget_form()
        self._at.rows = self._at.cursor = 0
        self._late.clear()
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
            packed = self.packed and backend.native is not None
            if list(self._table.layout) != plan_layout(self._table.schema.leaves, packed=packed):
                msg = (
                    f"the files in {mapped.directory} were written with another layout: load the rows from a checkpoint"
                )
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

    def plain_table(self) -> tuple[Table, StoredRows] | None:
        """Return table and counts; see `TensorStorage.plain_table`. None in a forked child, which must not write."""
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
        schema = Schema.from_json(body["schema"])
        layout = [
            Block(stride, tuple((int(i), int(offset)) for i, offset in members)) for stride, members in body["layout"]
        ]
        single = body.get("single_copy")
        if bool(single) != bool(self._single_copy):
            msg = (
                f"the directory {directory} holds a storage {'with' if single else 'without'} single_copy, got "
                f"single_copy={self._single_copy!r}: open it with the same option, or choose another scratch_dir"
            )
            raise CheckpointError(msg)
        self._mapped = MappedMemory(directory, remove=self.auto_cleanup)
        self._mapped.must_exist({f"block{n}.bin": b.stride * body["capacity"] for n, b in enumerate(layout)})
        if single:
            self._table = self._reopen_single(schema, layout, body)
        else:
            self._table = Table.allocate(schema, body["capacity"], self._mapped, layout)
        self._at.rows, self._at.cursor, self.num_envs = body["rows"], body["cursor"], body["lanes"]
        self.capacity = body["capacity"]
        self._read_objects(directory, body)
        self._late = LateFields(self._table.capacity, self.device)
        self._flushed = True
        _in_files.add(self)

    def _reopen_single(self, schema: Schema, layout: list[Block], body: dict[str, Any]) -> SingleCopyTable:
        rows, num_envs, capacity = int(body["rows"]), int(body["lanes"]), int(body["capacity"])
        mapped, naming = self._mapped, None if isinstance(self._single_copy, bool) else self._single_copy
        pairs = find_pairs(schema, naming)
        records = [ArrayRecord.from_json(node) for node in body["single_copy"]]
        apart, *nexts = [read_array(mapped.directory, record) for record in records]  # type: ignore[union-attr]
        apart = checked_apart(apart, rows, num_envs, capacity)
        wanted = [(schema.leaves[i].dtype, (int(apart.sum()), *schema.leaves[i].shape)) for i, _ in pairs]
        if [(value.dtype, tuple(value.shape)) for value in nexts] != wanted or num_envs < 1:
            msg = f"the directory {self._directory} was made with another single_copy, or is damaged"
            raise CheckpointError(msg)
        table = SingleCopyTable(schema, capacity, num_envs, pairs, mapped, packed=self.packed, layout=layout)  # type: ignore[arg-type]
        table.begin(apart, nexts)
        return table

    def _lay_out(self, schema: Schema, batch: tuple[int, ...], device: torch.device) -> None:
        for path in self._foreign():
            # left by a process that did not flush: it is not known which of the bytes are rows
            path.unlink()
        super()._lay_out(schema, batch, device)

    def _options(self) -> dict[str, Any]:
        """Return the options of a copy, which has temporary files of its own."""
        return {
            "ndim": self.ndim,
            "packed": self.packed,
            "single_copy": self._single_copy,
            "allow_pickle": self.allow_pickle,
        }


def _write_next_rows(directory: Path, table: SingleCopyTable, rows: int) -> list[dict[str, Any]]:
    """Write which rows have a next observation of their own, and these, to files; return the records."""
    apart, nexts = table.apart_rows(rows)
    records = []
    for number, value in enumerate([apart, *nexts]):
        (directory / f"block-apart{number}.bin").unlink(missing_ok=True)
        records.append(write_array(directory, f"block-apart{number}.bin", value).to_json())
    return records
