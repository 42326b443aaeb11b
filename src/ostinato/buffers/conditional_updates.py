"""Conditional updates: fields and priorities of rows that are still the rows that were sampled.

Results that are computed elsewhere from a sampled row (a recurrent state, a latent, an advantage, a priority) arrive
later, when another row may be in the slot. An update names each row by its slot and its generation. What belongs to a
replaced row is left out and counted; the other rows are changed, each of them whole, and keep their generations.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from ostinato.buffers.priority_updates import GENERATIONS_PER_ERA
from ostinato.core import kinds
from ostinato.core.index import read_integers, read_slots
from ostinato.core.kinds import show_field
from ostinato.core.processes import Work, raise_first, whole_in_forks
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import PrioritySampler
from ostinato.samplers.base import check_not_negative
from ostinato.samplers.priorities import one_each, read_priorities

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Future

    from ostinato.core.ring import Ring
    from ostinato.core.rows import Schema
    from ostinato.core.shared_ring import SharedRing
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage

    Path: TypeAlias = tuple[Hashable, ...]


@final
@dataclass(frozen=True)
class ConditionalUpdateResult:
    """What became of each row of `update_if_present`, in the order of its index."""

    updated: Tensor
    """bool, of the shape of the index: rows that were present and were changed."""
    version_rejected: Tensor | None = None
    """bool, of the same shape: rows that were present, and that hold a newer version, or got one in the same call; None
    without `version_key`."""

    @property
    def updated_count(self) -> int:
        """Number of rows that were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of rows that were present and have a newer version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of rows that had been replaced or removed; nothing of them was written."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class Versions(NamedTuple):
    """The versions that come with an update."""

    path: Path
    """The stored field of versions."""
    given: Tensor
    """`[n]`, of the stored dtype."""
    newer: bool
    """Whether a version must be larger than the one stored; else it may be equal."""


class ConditionalUpdate(NamedTuple):
    """An update whose arguments were checked; `n` rows."""

    slots: Tensor
    """int64 `[n]`; any integers: those outside of the buffer name no row."""
    generations: Tensor
    """int64 `[n]`."""
    batch: tuple[int, ...]
    """Shape of the index."""
    fields: dict[Path, Tensor]
    """Values `[n, *shape]` of the stored dtype and shape."""
    versions: Versions | None = None
    priorities: Tensor | None = None
    """`[n]`."""

    def present(self, ring: Ring | SharedRing, era: int) -> Tensor:
        """Return bool `[n]`: which rows are still in their slots."""
        inside = (self.slots >= 0) & (self.slots < ring.capacity)
        generations = (self.generations - era * GENERATIONS_PER_ERA).contiguous()
        return inside & ring.matches(torch.where(inside, self.slots, 0), generations)

    def accepted(self, present: Tensor, read: Callable[[Tensor, Path], Tensor | None]) -> Tensor:
        """Return bool `[n]`: which of the rows present are updated: all of them, or those with a newer version.

        Of rows in one slot only that with the largest version is, of equal versions the last one.
        """
        versions = self.versions
        if versions is None or not bool(present.any()):
            return present
        at = present.nonzero().reshape(-1)
        slots, given = self.slots[at], versions.given[at]
        stored = read(slots, versions.path)
        if stored is None:  # its field was there when the arguments were parsed: the storage was exchanged
            raise KeyMissingError(_no_field(versions.path))
        stored = stored.reshape(-1)
        good = given > stored if versions.newer else given >= stored
        accepted = torch.zeros_like(present)
        accepted[at] = good & _last_of_each(slots, given)
        return accepted

    def result(self, present: Tensor, accepted: Tensor) -> ConditionalUpdateResult:
        """Return what became of the rows."""
        rejected = None if self.versions is None else (present & ~accepted).reshape(self.batch)
        return ConditionalUpdateResult(accepted.reshape(self.batch), rejected)

    def chosen(self, accepted: Tensor) -> Tensor:
        """Return which of the rows are written, int64 `[m]`: of equal slots the last one."""
        at = accepted.nonzero().reshape(-1)
        return at[_last_of_each(self.slots[at])] if at.numel() else at


def _last_of_each(slots: Tensor, rank: Tensor | None = None) -> Tensor:
    """Return bool `[n]`: for each slot, the row with the largest rank, of equal ranks the last one."""
    rows = slots.shape[0]
    order = torch.arange(rows, device=slots.device) if rank is None else torch.argsort(rank, stable=True)
    order = order[torch.argsort(slots[order], stable=True)]
    ordered = slots[order]
    last = torch.ones(rows, dtype=torch.bool, device=slots.device)
    last[:-1] = ordered[1:] != ordered[:-1]
    mask = torch.zeros_like(last)
    mask[order[last]] = True
    return mask


# -- arguments --------------------------------------------------------------------------------------------------------


def parse_conditional(
    storage: Storage,
    sampler: Sampler,
    index: Any,
    generation: Any,
    patch: Any,
    *,
    least_index: int,
    steps: int | None,
    version_key: Any = None,
    version: Any = None,
    require_newer: bool = False,
    priority: Any = None,
) -> ConditionalUpdate:
    """Check the arguments of `ReplayBuffer.update_if_present`, which describes them.

    `least_index` is -1 where that marks a row that the writer did not keep, else 0; `steps` is that of
    `steps_of`.

    Raises:
        UsageError: if the storage has no fields, or no rows yet.
        SlotError: for an index below `least_index`.
        OptionError, SchemaError, KindError, KeyMissingError, PriorityError: see there.
    """
    slots, batch = read_slots(index, storage)
    check_not_negative(slots, least=least_index)
    generations = read_integers("generation", generation).to(slots.device, torch.int64).reshape(-1)
    if generations.shape != slots.shape:
        msg = (
            f"index and generation must address the same number of records, got {slots.shape[0]} indices and "
            f"{generations.shape[0]} generations: pass index and index_generation of a sample"
        )
        raise OptionError(msg)
    if (version_key is None) != (version is None):
        msg = "version_key and version must be provided together: the stored field of versions, and the new versions"
        raise OptionError(msg)
    given = _as_fields(patch)
    if not given and version_key is None and storage.schema is None:
        fields, versions = {}, None  # priorities alone need no fields
    else:
        schema = _require_schema(storage)
        fields = {path: _as_column(schema, path, value, batch) for path, value in given.items()}
        versions = _as_versions(schema, version_key, version, batch, newer=require_newer, patched=set(fields))
    if versions is not None:
        fields[versions.path] = versions.given.reshape(_column_shape(storage.schema, versions.path, batch))
    on_device = {path: value.to(storage.device) for path, value in fields.items()}
    if versions is not None:
        versions = versions._replace(given=versions.given.to(storage.device))
    priorities = None if priority is None else _as_priorities(sampler, priority, batch, storage, steps)
    return ConditionalUpdate(slots, generations, batch, on_device, versions, priorities)


def _require_schema(storage: Storage) -> Schema:
    schema = storage.schema
    if schema is None:
        if storage.laid_out:
            msg = (
                f"Conditional updates are not supported by {type(storage).__name__}, which has no fields: use "
                "LazyTensorStorage or LazyMemmapStorage"
            )
        else:
            msg = (
                f"Conditional updates require an initialized storage with fields, got an empty {type(storage).__name__}"
                ": they are not supported before the first row"
            )
        raise UsageError(msg)
    return schema


def _as_fields(patch: Any) -> dict[Path, Any]:
    """Return the values of a patch by their paths."""
    if patch is None:
        return {}
    if kinds.is_tensor_collection(patch):
        return {_as_path(key): value for key, value in patch.items(include_nested=True, leaves_only=True)}
    if not isinstance(patch, Mapping):
        msg = f"patch must be a dict or a TensorDict of stored fields, got {type(patch).__name__}"
        raise KindError(msg)
    found: dict[Path, Any] = {}
    for key, value in patch.items():
        start = _as_path(key)
        nested = isinstance(value, dict) or (kinds.is_tensordict(value) and not kinds.is_non_tensor(value))
        leaves = (
            {(*start, *path): leaf for path, leaf in kinds.leaves_by_path(value).items()} if nested else {start: value}
        )
        if found.keys() & leaves.keys():
            msg = f"patch names {show_field(next(iter(found.keys() & leaves.keys())))} twice: name it once"
            raise OptionError(msg)
        found |= leaves
    return found


def _as_path(key: Any) -> Path:
    return key if isinstance(key, tuple) else (key,)


def _no_field(path: Path) -> str:
    return f"Key {path if len(path) > 1 else path[0]!r} does not exist in the storage: a patch changes stored tensors"


def _column_shape(schema: Schema | None, path: Path, batch: tuple[int, ...]) -> tuple[int, ...]:
    shape = () if schema is None else schema.leaves[schema.find(path)].shape
    return (torch.Size(batch).numel(), *shape)


def _as_column(schema: Schema, path: Path, value: Any, batch: tuple[int, ...]) -> Tensor:
    """Return the values of a field as they are stored, `[n, *shape]`."""
    leaf = next((leaf for leaf in schema.leaves if leaf.path == path), None)
    if leaf is None:
        raise KeyMissingError(_no_field(path))
    if isinstance(value, Tensor) and value.dtype is not leaf.dtype:
        msg = (
            f"dtype mismatch for patch key {show_field(path)}: got {value.dtype}, the storage holds {leaf.dtype}: "
            f"convert it with .to({leaf.dtype})"
        )
        raise SchemaError(msg)
    values = schema.fit(value, path).detach()
    rows = torch.Size(batch).numel()
    shape = (rows, *leaf.shape)
    allowed = {(*batch, *leaf.shape), shape}
    if tuple(values.shape) not in allowed and not (values.shape[:1] == shape[:1] and values.numel() == _count(shape)):
        msg = (
            f"shape mismatch for patch key {show_field(path)}: got {list(values.shape)}, expected {rows} records with "
            f"feature shape {list(leaf.shape)}"
        )
        raise SchemaError(msg)
    return values.reshape(shape)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _as_versions(
    schema: Schema, key: Any, version: Any, batch: tuple[int, ...], *, newer: bool, patched: set[Path]
) -> Versions | None:
    if key is None:
        return None
    if isinstance(key, str) and "." in key:
        msg = (
            f"Dotted-string version keys are not supported: got {key!r}. Pass the nested key in tuple form, "
            f"{tuple(key.split('.'))!r}"
        )
        raise OptionError(msg)
    path = _as_path(key)
    if path in patched:
        msg = f"version_key {key!r} may not appear in patch: it is written from version="
        raise OptionError(msg)
    leaf = next((leaf for leaf in schema.leaves if leaf.path == path), None)
    if leaf is None:
        raise KeyMissingError(_no_field(path))
    if _count(leaf.shape) != 1:
        msg = (
            f"version_key {key!r} must reference a per-record scalar field; the storage holds feature shape "
            f"{list(leaf.shape)}"
        )
        raise OptionError(msg)
    if isinstance(version, Tensor) and version.dtype is not leaf.dtype:
        msg = f"dtype mismatch for version: got {version.dtype}, the storage holds {leaf.dtype}: convert it"
        raise SchemaError(msg)
    given, rows = schema.fit(version, path).detach(), _count(batch)
    if given.numel() not in {1, rows} or (given.numel() == 1 and given.ndim > 1 and rows != 1):
        msg = f"version must be a scalar or hold one entry per record, got shape {list(given.shape)} for {rows} records"
        raise OptionError(msg)
    return Versions(path, given.reshape(-1).expand(rows).contiguous(), newer)


def _as_priorities(
    sampler: Sampler, priority: Any, batch: tuple[int, ...], storage: Storage, steps: int | None
) -> Tensor:
    """Return priorities float64 `[n]` on the device of the storage, checked."""
    if not isinstance(sampler, PrioritySampler):
        msg = f"{type(sampler).__name__} has no priorities: leave priority= out, or use a PrioritizedSampler"
        raise OptionError(msg)
    values = one_each(read_priorities(priority, batch, steps).to(storage.device), _count(batch), sampler.reduce)
    sampler.check(values)
    return values


def as_stored(storage: Storage, *values: Any) -> list[Any]:
    """Return tensors on the storage's device: those of an accelerator are copied in its stream, without waiting for it.

    A thread that waits for a copy would wait for all the work that was queued before it; an event after the copies
    waits for no more than them. Returns the values and, last, a function that waits for the copies.
    """
    if storage.device.type != "cpu" or not torch.cuda.is_available():
        return [*values, lambda: None]
    devices: set[torch.device] = set()
    found = [_to_host(value, devices) for value in values]
    events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return [*found, lambda: [event.synchronize() for event in events]]


def _to_host(value: Any, devices: set[torch.device]) -> Any:
    """Return a tensor, or nested tensors, on the CPU, once their streams are done; adds their devices."""
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return value
        devices.add(value.device)
        return value.to("cpu", non_blocking=True)
    if kinds.is_tensor_collection(value):
        value = dict(value.items(include_nested=True, leaves_only=True))
    if isinstance(value, Mapping):
        return {key: _to_host(item, devices) for key, item in value.items()}
    return value


# -- updates in a thread ----------------------------------------------------------------------------------------------


@final
class UpdateQueue:
    """Updates that run in a thread, in the order in which they were submitted.

    Thread-safe. A copy of a buffer, and a forked process, start without the updates that are pending here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[Future[ConditionalUpdateResult]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        whole_in_forks(self, self._lock)

    def submit(
        self,
        operation: Callable[[], ConditionalUpdateResult],
        through: Callable[[Callable[[], ConditionalUpdateResult]], Future[ConditionalUpdateResult]] | None,
    ) -> Future[ConditionalUpdateResult]:
        """Queue an update: in a thread of its own, or in that of `through`, which makes the batches in order."""
        with self._lock:
            self._follow_fork()
            if through is not None:
                future = through(operation)
            else:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-updates")
                future = self._executor.submit(Work(operation))
            self._pending.append(future)
            return future

    def _follow_fork(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._executor = None
            self._pending.clear()

    def settle(self) -> None:
        """Wait for the updates that are pending now, and raise the first error of one; once."""
        raise_first(self._take_done())

    def _take_done(self) -> list[Future[Any]]:
        """Wait for the updates that are pending now, remove them, and return them."""
        with self._lock:
            self._follow_fork()
            pending, done = list(self._pending), []
        for future in pending:
            wait_for([future])
            with self._lock:
                if future in self._pending:
                    self._pending.remove(future)
                    done.append(future)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Wait until no update is pending, at most `timeout_s`; return whether none is."""
        with self._lock:
            self._follow_fork()
            pending = list(self._pending)
        return not wait_for(pending, min(timeout_s, threading.TIMEOUT_MAX)).not_done

    def close(self) -> None:
        """End the thread, once it has made the updates that are pending."""
        with self._lock:
            self._follow_fork()
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
