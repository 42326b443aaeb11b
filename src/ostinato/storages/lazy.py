"""LazyTensorStorage: tensors allocated when the first rows define the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato._backend import backend
from ostinato.core.counts import StoredRows, make_counts
from ostinato.core.kinds import require_tensordict, show_path
from ostinato.errors import CheckpointError, KindError, OptionError, SchemaError, UsageError
from ostinato.storages.base import check_capacity, check_device, check_ndim
from ostinato.storages.coded import CodedColumn, check_budget, check_codec, codecs_of, rows_that_stay
from ostinato.storages.memory import HeapMemory, Memory
from ostinato.storages.single_copy import NextColumns, check_option, find_pairs
from ostinato.storages.table import Table, plan_layout
from ostinato.storages.tensor import TensorStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.rows import Schema
    from ostinato.durable.codecs import AnyCodec
    from ostinato.storages.base import Storage
    from ostinato.storages.coded import Evict
    from ostinato.storages.columns import Columns

__all__ = ["LazyTensorStorage"]


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
            without, bit for bit; memory and checkpoints hold compressed bytes, and all reads are copies. Not with
            `single_copy`, on the CPU only. Rows are compressed when they are written, under the lock of the buffer, and
            decompressed outside of it; large batches in several threads.
        max_bytes: with `codec`, most bytes of the rows present: compressed values and the other tensor fields. When new
            rows would exceed it, the oldest rows leave before these are written, until a 16th of it is free. `len`,
            samplers, priorities and episodes follow. Rows that stay move to the first slots and get new generations,
            so no index or priority update of an earlier batch reaches another row. `max_size` holds as well; a large
            one costs memory only for the fields without codec. Edits, loads and `set` may exceed it until the buffer
            writes rows again. Needs a round-robin writer.
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
        self._single_copy = check_option(single_copy)
        self.ring_only = bool(self._single_copy)
        self._codec = check_codec(codec)
        if self._codec is not None and self._single_copy:
            msg = "codec and single_copy cannot be used together: leave one of them out"
            raise OptionError(msg)
        self._budget = check_budget(max_bytes, evict, coded=self._codec is not None, ndim=self.ndim)
        self.budget = self._budget is not None
        self.evicts_episodes = self._budget is not None and self._budget.episodes
        self.max_size = self.capacity = check_capacity(max_size)
        self._auto = device == "auto"
        self.device = torch.device("cpu") if self._auto else check_device(device)
        self.packed = packed
        """Whether small fields share a row."""
        self._given: Memory | None = None
        self._at = make_counts(StoredRows)

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
        naming = None if isinstance(self._single_copy, bool) else self._single_copy
        pairs = find_pairs(schema, naming) if self._single_copy else ()
        kinds = self._other_columns(schema, capacity, memory)
        elsewhere = {position for pair in pairs for position in pair}.union(*(kind.positions for kind in kinds))
        kept = [*(mate for _, mate in pairs), *(i for i in range(len(schema.leaves)) if i not in elsewhere)]
        if mapped is not None:
            dense = _mapped(schema, mapped, capacity)
        else:
            # Packed rows are faster with the native gather only; torch gathers contiguous columns faster.
            if packed is None:
                packed = self.packed and backend.native is not None and self.device.type == "cpu"
            leaves = [schema.leaves[i] for i in kept]
            layout = plan_layout(leaves, packed=packed, align=1 if pairs else 8)
            dense = Table.allocate(schema, kept, capacity, memory, layout)
        if pairs:
            kinds.append(NextColumns(schema, pairs, dense, num_envs, memory))
        self._table = self._fields(schema, dense, kinds, kept, num_envs)
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

    def _other_columns(self, schema: Schema, capacity: int, memory: Memory) -> list[Columns]:
        """Return the columns of fields that are not dense, without those of next observations and objects."""
        if self._codec is None:
            return []
        codecs = codecs_of(schema, self._codec)
        return [CodedColumn(schema, i, capacity, codec, memory.device) for i, codec in codecs.items()]

    @property
    def mappable(self) -> bool:  # type: ignore[override]
        """Whether files can be mapped as its rows."""
        return self.device.type == "cpu" and not self._single_copy and self._codec is None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the rows that are present and the options; memory of unwritten rows is not pickled."""
        return {**self._without_rows(), "_given": None, "edits": 0, "rows pickled": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Create the storage again and copy the rows."""
        vars(self).update(state)
        self.load_state_dict(vars(self).pop("rows pickled"))

    def rows_that_stay(self, payload: Any, oldest: int, episodes: EpisodeTable | None) -> Tensor | None:
        """Return the slots that stay when rows leave because of `max_bytes`; see `Storage.rows_that_stay`."""
        if self._budget is None or self._table is None:
            return None
        return rows_that_stay(self._budget, self._table, payload, self._at.rows, oldest, episodes)

    def keep(self, slots: Tensor) -> None:
        """Move the rows at `slots` (int64 `[n]`) to the slots `[0, n)`, and remove all others."""
        if self._budget is None or self._table is None:
            super().keep(slots)
            return
        self._table.keep(slots)
        self._at.rows, self._at.cursor = slots.shape[0], slots.shape[0] % self.capacity

    def _codecs(self) -> list[AnyCodec]:
        codec = self._codec
        if codec is None:
            return []
        return list(codec.values()) if isinstance(codec, dict) else [codec]

    def _memory(self) -> Memory:
        return HeapMemory(self.device) if self._given is None else self._given

    @property
    def why_private(self) -> str | None:
        """The option because of which processes cannot share its rows; None if they can."""
        reasons = {
            "single_copy": bool(self._single_copy),
            "codec": self._codec is not None,
            f"ndim={self.ndim}": self.ndim > 1,
            "device='auto'": self._auto,
            f"device={str(self.device)!r}": self.device.type != "cpu",
            "text or other non-tensor fields": self._table is not None and bool(self._table.schema.objects),
            "fields added later": self._table is not None and bool(self._table.late.fields),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def lay_out_in(self, memory: Memory, schema: Schema | None) -> None:
        """Use memory of the caller, now if the schema is known, else when the first rows are written.

        Args:
            memory: allocates the blocks; rows in them do not count before they are set.
            schema: of a row.
        """
        self._given = memory
        if schema is not None:
            self._lay_out(schema, (), self.device)


def _mapped(schema: Schema, sources: Mapping[int, Any], capacity: int) -> Table:
    """Return a table in the files of saved columns.

    Raises:
        CheckpointError: if some are saved in a form that cannot be mapped.
    """
    for source in sources.values():
        if getattr(source, "how", ""):
            msg = f"the checkpoint was saved with {source.how}, which cannot be mapped: load it with mmap=False"
            raise CheckpointError(msg)
    return Table.map(schema, sources, capacity)
