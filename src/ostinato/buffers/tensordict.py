"""`TensorDictReplayBuffer`: a `ReplayBuffer` whose rows are TensorDicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch

from ostinato.buffers.direct import direct_rows
from ostinato.buffers.options import warn_of_info, warn_of_sampler
from ostinato.buffers.priority_updates import parse_update, priorities_of_batch, priority_fields, steps_of
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.sampling import INFO
from ostinato.core import kinds
from ostinato.errors import NoTensorDictError
from ostinato.samplers import PrioritySampler
from ostinato.writers import TensorDictRoundRobinWriter, Writer

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.options import BufferOptions
    from ostinato.buffers.records import Ticket
    from ostinato.core.rows import Schema


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for TensorDict rows: samples carry the key `index` (int64 `[B]`; with `ndim=2` `[B, 2]`).

    With a prioritized sampler they also carry `priority_weight` `[B]` and the generations `index_generation`,
    int64 `[B]`. A subclass of `ReplayBuffer` because TorchRL's is, and users' annotations say so. None of the three is
    stored; they are dropped from written data.

    Args:
        priority_key: field, nested ones as a tuple, that holds the first priority of a row where written data has it,
            and its new one for `update_tensordict_priority`; used with prioritized samplers.
        **options: see `ReplayBuffer`; the default writer is `TensorDictRoundRobinWriter`.

    Raises:
        KindError: when other data is written.
        MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(4, 3)}, [4]))
        >>> sorted(rb.sample().keys())
        ['index', 'obs']
    """

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **options: Unpack[BufferOptions]) -> None:
        kinds.require_tensordict(type(self).__name__, "use ReplayBuffer with rows that are dicts of tensors")
        self.priority_key = priority_key
        super().__init__(**options)

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Field that holds priorities."""
        return self._priority_key

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        self._priority_key = key
        self._priority_path = (key,) if isinstance(key, str) else tuple(key)
        if "_engine" in self.__dict__:  # else it is told when it is made
            with self._engine.lock:
                self._engine.set_priority_path(self._priority_path)

    @staticmethod
    def _default_writer() -> Writer:
        return TensorDictRoundRobinWriter()

    def _accept(self, data: Any) -> Any:
        if not (all(map(kinds.is_tensordict, data)) if type(data) is list else kinds.is_tensordict(data)):
            msg = (
                f"{type(self).__name__} takes TensorDicts: it only accepts TensorDictBase subclasses or lists of them, "
                f"got {type(data).__name__}; use ReplayBuffer for other data"
            )
            raise NoTensorDictError(msg)
        unit = self._engine.unit
        own = INFO if unit is None or not unit.notes else (*INFO, "anchor_generation", *unit.notes)
        rows = [_without_own(row, own) for row in data] if type(data) is list else _without_own(data, own)
        return self._transform.inv(rows) if self._transform else rows

    def _direct_rows(self, data: Any, lead: int) -> Any:
        return direct_rows(data, lead) if kinds.is_tensordict(data) else None

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        include_info: bool | None = None,  # noqa: FBT001
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
        min_batch: int | None = None,
        out: Any = None,
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`.

        `include_info` has no effect but a warning: samples always carry their index.
        """
        if include_info is not None:
            warn_of_info(include_info)
        return super().sample(
            batch_size, return_info, max_age=max_age, timeout_s=timeout_s, min_batch=min_batch, out=out
        )

    def _finish(self, data: Any, ticket: Ticket, notes: dict[Any, Tensor]) -> Any:
        data = super()._finish(data, ticket, notes)
        if kinds.is_tensor_collection(data):
            engine = self._engine
            fields = priority_fields(ticket, engine.store.era, tracked=engine.writer.tracks_generations)
            kinds.put(data, {"index": self._flat_index(ticket.records), **fields, **ticket.info})
            if notes:
                kinds.with_fields(data, {_as_path(key): self._shown(key, value) for key, value in notes.items()})
        return data

    def _presented(self, found: tuple[Any, ...], schema: Schema | None, size: int, *, return_info: bool) -> Any:
        result = super()._presented(found, schema, size, return_info=return_info)
        kinds.put(result[0] if return_info else result, dict(zip(INFO, found[1:], strict=False)))
        return result

    def _filled(
        self,
        direct: Direct,  # noqa: ARG002
        schema: Schema | None,  # noqa: ARG002
        out: Any,  # noqa: ARG002
        size: int,  # noqa: ARG002
    ) -> tuple[Any, ...] | None:
        return None  # batches have fields that are not stored

    def _shown(self, key: Any, value: Tensor) -> Tensor:
        return self._flat_index(value) if key == "anchor_index" else value

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that stand under its `priority_key`.

        Rows that were overwritten since they were drawn are skipped (see `update_priority`), as the sample carries
        their generations. Items that are trajectories, `[B, T]`, get one priority each, reduced as the sampler says.

        Args:
            data: a sampled TensorDict with the keys `index` and `priority_key`.

        Raises:
            KeyMissingError: if one of the keys is missing.
            PriorityError: for priorities that are negative, NaN or infinite, naming the positions; nothing is changed.
        """
        engine = self._engine
        sampler, storage = engine.sampler, engine.store.source.storage
        if not isinstance(sampler, PrioritySampler):
            warn_of_sampler(sampler)
            return
        found = priorities_of_batch(data, self._priority_key, sampler.reduce, storage.ndim)
        stale = None if engine.direct is None else engine.direct.update_priority(*found)
        if stale is None:
            engine.update_priorities(parse_update(*found, storage, sampler.reduce, steps_of(engine)))
        elif stale:
            engine.count_stale(stale)

    def _flat_index(self, slots: Tensor) -> Tensor:
        index = self._index(slots)
        return torch.stack(index, -1) if isinstance(index, tuple) else index


def _as_path(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def _without_own(row: Any, own: tuple[str, ...]) -> Any:
    keys = row.keys()
    found = [key for key in own if key in keys]
    return row.exclude(*found) if found else row
