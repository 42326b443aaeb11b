"""`ReplayBuffer`, with TorchRL's interface."""

from __future__ import annotations

import warnings
from functools import partial, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.direct import defined_together, direct_rows, find_direct
from ostinato.buffers.lifecycle import Lifecycle, name_methods
from ostinato.buffers.observer import Observer
from ostinato.buffers.options import (
    BufferOptions,
    check_prefetch,
    check_service,
    own,
    positive,
    swap_dims,
    warn_of_sampler,
)
from ostinato.buffers.queries import run_query
from ostinato.buffers.rate_limit import check_wait, replayable
from ostinato.buffers.reader import Reader
from ostinato.buffers.sampling import Sampling
from ostinato.buffers.saving import Saving
from ostinato.buffers.stats import BufferStats, measure
from ostinato.buffers.updates import as_sampler, as_stored, parse_update, rows_of_sample, steps_of, unpack_sample
from ostinato.buffers.views import make_view
from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.core.index import is_field
from ostinato.core.kinds import require_eager
from ostinato.core.records import Placement, Run
from ostinato.errors import KindError, UsageError
from ostinato.samplers import PrioritySampler, Sampler
from ostinato.storages import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.remover import RemoverName
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.buffers.updates import ConditionalUpdateResult
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.datasets import DatasetStorage
    from ostinato.datasets.dataset import Fields
    from ostinato.datasets.export import ExportOptions, ExportReport
    from ostinato.durable.progress import ProgressOption
    from ostinato.storages.base import Checkpointer
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

_CPU = torch.device("cpu")


class ReplayBuffer(Sampling):
    """A replay buffer composed of a storage, a sampler and a writer.

    Safe to use from several threads. What is sampled is a copy; what `rb[a:b]` reads from tensor storages is a view.
    A sampler or writer that keeps a state of rows (`keeps_rows`) serves one buffer at a time, and forgets the rows of
    an earlier one; others may be shared.

    Args:
        storage: where rows are kept, or a callable that makes it; None is `ListStorage(1000)`.
        sampler: which rows come next; None is `RandomSampler()`.
        writer: where new rows go; None is `RoundRobinWriter()`.
        collate_fn: makes a batch of what the storage presents; None is the storage's own way.
        pin_memory: gather samples into page-locked memory, so that copies to an accelerator need not wait.
        prefetch: batches to keep ready; None or 0 keeps none. Needs `batch_size`. A batch is that of `prefetch` calls
            of `sample` earlier, with the rows of that moment, whatever was written since.
        transform: a callable, an object with `forward` and `inv`, or a `Compose`.
        transform_factory: a callable that makes the transform, where it cannot be pickled; not beside `transform`.
        batch_size: rows that `sample()` and iteration give.
        dim_extend: dimension of the data along which `extend` grows the buffer; None is `storage.ndim - 1`. So with
            `ndim=2` data is `[environments, time, *shape]`; with `dim_extend=0` `[time, environments, *shape]`.
        generator: source of all draws; None is torch's global generator. The buffer owns it: it goes back when draws
            made ahead are dropped, so do not draw from it elsewhere.
        shared: let other processes write and sample the same rows; see `share` and docs/scaling.md. Needs Linux, the
            native extension, a `LazyTensorStorage` or `LazyMemmapStorage` and a `RandomSampler` or
            `PrioritizedSampler`; the buffer is handed to a process as it is started.
        compilable: no effect: the native calls are opaque to `torch.compile` in any case.
        delayed_init: make the parts at the first use, so that callables given for them can be pickled before; errors of
            parts are then raised there. None is True with a `transform_factory`, else False.
        sample_unit: what a drawn row becomes (`NStep`, `SequenceUnit`, `FrameStack`, `DeltaTimestamps`,
            `Hindsight`), or a list of units
            that change it one after the other; None leaves it a row.
        episodes: how rows tell where episodes end; None takes what unit and sampler say.
        rate_limiter: when readers and writers wait for each other; None is never (a `QueueSampler` brings
            `RateLimiter()` along).
        version_key: field that holds the version of the policy that made a row, one integer, nested ones as a tuple;
            `sample(max_age=...)` needs it.
        checkpointer: becomes that of the storage: the layout in which `dumps` saves the rows.
        consume_after_n_samples: rows leave the buffer after so many draws: the sampler is `ConsumingSampler(n)`.
        remover: which row a new one replaces when the buffer is full: the oldest ("fifo"), the newest ("lifo"), that of
            the "lowest_priority" in a prioritized sampler, or of the "oldest_version" (`version_key`), of equal ones
            the oldest; None is up to the writer. See docs/samplers/keeping.md.
        service_backend: "direct"; "ray" raises, use `RayReplayBuffer`.
        service_backend_options: raises if there are any.
        transport: "auto" or "direct": the buffer is in the process that made it.
        transport_options: raises if there are any.

    Raises:
        KindError: if a part is not of its base class.
        OptionError: if options exclude each other, or a sampler or writer with a state of rows serves another buffer.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
        >>> indices = rb.extend({"obs": torch.zeros(8, 3), "reward": torch.ones(8)})
        >>> rb.sample()["reward"]
        tensor([1., 1., 1., 1.])
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,  # noqa: ARG002
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | Sequence[SampleUnit] | None = None,
        episodes: Episodes | None = None,
        rate_limiter: RateLimiter | None = None,
        version_key: str | tuple[str, ...] | None = None,
        checkpointer: Checkpointer | None = None,
        consume_after_n_samples: int | None = None,
        remover: RemoverName | None = None,
        service_backend: Literal["direct", "ray"] = "direct",
        service_backend_options: dict[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray", "distributed"] = "auto",
        transport_options: dict[str, Any] | None = None,
    ) -> None:
        check_service(service_backend, service_backend_options, transport, transport_options)
        if transform_factory is not None and (transform is not None or not callable(transform_factory)):
            msg = (
                "transform and transform_factory are mutually exclusive, and the latter must be a callable without "
                f"arguments that makes a transform, got {transform!r} and {transform_factory!r}: give one of them"
            )
            raise KindError(msg)
        size = None if batch_size is None else positive("batch_size", batch_size)
        given = BufferOptions(
            storage=storage,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=check_prefetch(prefetch, size),
            transform=transform,
            transform_factory=transform_factory,
            batch_size=size,
            dim_extend=dim_extend,
            generator=generator,
            shared=shared,
            sample_unit=sample_unit,
            episodes=episodes,
            rate_limiter=rate_limiter,
            version_key=version_key,
            consume_after_n_samples=consume_after_n_samples,
            checkpointer=checkpointer,
            remover=remover,
        )
        super().__init__(given, delayed=transform_factory is not None if delayed_init is None else bool(delayed_init))

    _viewed: ReplayBuffer | None = None
    """The buffer that this one is a view of; rows are written there."""

    @property
    def _whole(self) -> ReplayBuffer:
        """The buffer that rows are written to: itself, or the one that it is a view of."""
        return self if self._viewed is None else self._viewed

    @property
    def write_count(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return self._engine.rows_since_empty

    @property
    def cursor(self) -> int:
        """Slot after the newest row: with a round-robin writer the slot of the next row."""
        return self._engine.ring.cursor

    def view(
        self,
        *,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        batch_size: int | None = None,
        sample_unit: SampleUnit | Sequence[SampleUnit] | None = None,
        episodes: Episodes | None = None,
        transform: Any = None,
        prefetch: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return a view: another sampler over the same rows, without copies.

        A view has the methods of a buffer. Sampling, priorities, iteration, prefetch, transforms and `rows_drawn` of
        its `stats` are its own; rows, writer, lock and `len` are the buffer's. What is written through the buffer or
        through a view is one write, transformed by the buffer, that all samplers are told of: a row starts with the
        default priority in each of them. An `index_generation` is valid for all of them.

        The buffer saves and loads its views with itself, and `empty` and `set_storage` drop their queued batches; calls
        that concern the buffer as a whole (`dumps`, `loads`, `state_dict`, `set_storage`, `set_writer`, `share`) raise
        on a view. A `rate_limiter` counts draws of the buffer, not those of views. A view lives as long as this handle,
        which keeps the buffer alive. Thread-safe, as the buffer is.

        Args:
            sampler: of the view alone; None is `RandomSampler()`.
            batch_size: rows that `sample()` and iteration give; None is the buffer's.
            sample_unit: what a drawn row becomes; None leaves it a row.
            episodes: how rows tell where episodes end; None takes the buffer's, and what unit and sampler say.
            transform: transforms of what is sampled from the view; None is none, whatever the buffer has.
            prefetch: batches to keep ready; None or 0 keeps none.
            generator: source of the view's draws, which no other view has; None is torch's global generator.

        Raises:
            OptionError: if parts do not go together: one of the samplers uses rows up (`ConsumingSampler`,
                `QueueSampler`), or the buffer is shared between processes.

        Examples:
            >>> import torch
            >>> from ostinato import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
            >>> prioritized = rb.view(sampler=PrioritizedSampler(100, alpha=0.6, beta=0.4, eps=0.0))
            >>> index = rb.extend(torch.arange(5))
            >>> prioritized.update_priority(index, [0.0, 0.0, 0.0, 0.0, 2.0])
            >>> prioritized.sample()
            tensor([4, 4, 4, 4])
        """
        parts = (sampler, batch_size, sample_unit, episodes, transform, prefetch, generator)
        attributes = make_view(self._whole, *parts)  # first: it makes the parts of a buffer with `delayed_init`
        made = object.__new__(type(self))
        made.__dict__.update({**self.__dict__, **attributes})
        return made

    def add(self, data: Any, *, timeout_s: float | None = None) -> Any:
        """Add one row.

        Args:
            data: a row: tensors `[*shape]`, numbers, a tree of them; with `ndim=2` one step `[num_envs, *shape]`.
            timeout_s: longest wait for readers, in seconds, where there is a `rate_limiter`; None is its own.

        Returns:
            Its slot (int), None if the writer did not keep it; with `ndim=2` int64 `[num_envs, 2]`. An empty index if
            a transform returned None: it keeps the row until it has enough of them.

        Raises:
            SchemaError: if the row does not match the rows stored; nothing is changed. Dtypes are cast, see
                `docs/casts.md`.
            WaitTimeoutError: if readers did not come in time; nothing is changed.
        """
        if is_dynamo_compiling():  # a graph break: locks and addresses are not for a graph
            add = torch.compiler.disable(ReplayBuffer.add)  # type: ignore[no-untyped-call]
            return add(self, data, timeout_s=timeout_s)
        if self._viewed is not None:
            return self._viewed.add(data, timeout_s=timeout_s)
        if timeout_s is not None:
            check_wait(timeout_s, waits=self.rate_limiter is not None)
        direct, steps = self._engine.direct, self._transform.steps
        if direct is not None and not steps and (slot := direct.add(self._direct_rows(data, 0, direct))) is not None:
            return slot
        given, data = data, self._accept(data)
        if data is None and given is not None:
            return None
        if direct is not None and steps and (slot := direct.add(self._direct_rows(data, 0, direct))) is not None:
            return slot
        if type(data) is not dict:
            self._warn_of_batch(data)
        placement = self._engine.store.write(data, 0, timeout_s=timeout_s)
        self._find_direct()
        if self.storage.ndim > 1:
            return self._positions(placement)
        slot = placement.start if isinstance(placement, Run) else int(placement.positions()[0])
        return None if slot < 0 else slot

    def _warn_of_batch(self, data: Any) -> None:
        if kinds.is_tensor_collection(data) and data.batch_dims >= self.storage.ndim:
            warnings.warn(
                f"Using `add()` with a TensorDict that has batch_size={list(data.batch_size)}, which is stored as one "
                "row: use extend() to add its rows",
                UserWarning,
                stacklevel=3,
            )

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows, in order.

        Args:
            data: rows `[B, *shape]`: TensorDict, tensorclass, tensor, numpy array, or dict/tuple pytree of these;
                a list is a stack of rows, and within a dict a list of text is a field. With `ndim=2` rows
                `[environments, time, *shape]`, or `[time, environments, *shape]` with `dim_extend=0`.
            update_priority: False gives the rows the default priority, though they hold a `priority_key`; of no effect
                where there are no priorities, or no such key.
            timeout_s: longest wait for readers, in seconds, where there is a `rate_limiter`; None is its own.

        Returns:
            The slot of each row, int64 `[B]` (-1 where the writer did not keep it); with `ndim=2` int64 `[B, 2]`.
            Of a batch longer than the capacity the last rows stay. Of no rows an empty index: their fields are
            checked against the rows stored, and nothing is changed. So if a transform returned None, as
            `MultiStepTransform` does until it has enough rows.

        Raises:
            SchemaError: if the rows do not match the rows stored, or with `ndim=2` are of another number of
                environments; nothing is changed. Dtypes are cast, see `docs/casts.md`.
            WaitTimeoutError: if readers did not come in time; nothing is changed.

        Warns:
            EpisodesWarning: if the first rows with `ndim=2` seem to have the other order. In buffers with windows also
                if the first rows do not follow each other; see docs/environments.md.
        """
        if is_dynamo_compiling():
            extend = torch.compiler.disable(ReplayBuffer.extend)  # type: ignore[no-untyped-call]
            return extend(self, data, update_priority=update_priority, timeout_s=timeout_s)  # type: ignore[no-any-return]
        if self._viewed is not None:
            return self._viewed.extend(data, update_priority=update_priority, timeout_s=timeout_s)
        if timeout_s is not None:
            check_wait(timeout_s, waits=self.rate_limiter is not None)
        engine, steps = self._engine, self._transform.steps
        direct = engine.direct
        if (
            direct is not None
            and not steps
            and (index := direct.extend(self._direct_rows(data, 1, direct))) is not None
        ):
            return index  # type: ignore[no-any-return]
        if engine.limits:
            data = replayable(data)
        given, data = data, self._accept(data)
        if data is None and given is not None:
            return self._positions(Run(0, 0, self.storage.capacity))
        if direct is not None and steps:
            index = direct.extend(self._direct_rows(data, 1, direct))
            if index is not None:
                return index  # type: ignore[no-any-return]
        if self._dim_extend:
            data = swap_dims(data, self._dim_extend)
        ranked = update_priority is not False
        placement = engine.store.write(data, 1, ranked=ranked, timeout_s=timeout_s)
        self._find_direct()
        return self._positions(placement)

    def load_dataset(
        self,
        source: str | Path | Mapping[Any, Any] | DatasetStorage | ReplayBuffer,
        *,
        episodes: Sequence[int] | slice | Tensor | None = None,
        rows: Sequence[int] | slice | Tensor | None = None,
        fields: Fields = None,
        batch_rows: int | None = None,
        overwrite: bool = False,
        progress: ProgressOption = None,
    ) -> int:
        """Copy a dataset, or a selection of it, into this buffer: its episodes in order, in chunks of rows.

        Every copied episode ends. Where no flag of the dataset marks the last row of an episode, or the selection cuts
        it, `done` and `truncated` of that row are set to True, as far as rows have them; where rows have no flag that
        episodes of this buffer can end at, a bool field `done` (or `truncated`, if rows have `terminated` alone) is
        added. The order of rows, and what counts as an episode, are those of the dataset. Rows are written as `extend`
        writes them: inverse transforms run, and dtypes are cast. Memory: one chunk, and what the dataset keeps.

        No other thread may write to the buffer meanwhile. Schema, room and episodes are checked before the first row is
        written; if reading or writing fails later, the error says how many rows were written.

        Args:
            source: the path of a dataset, a mapping of arrays, a dataset that `open_dataset` returned, or another
                buffer, which is locked meanwhile.
            episodes: positions of the episodes to copy, in this order; None for all.
            rows: rows to copy, of those of the chosen episodes: a slice, a mask or ascending positions; None for all.
            fields: keys to keep, or a mapping of new keys to keys of the dataset; None for all.
            batch_rows: rows of a chunk; None is as many as take 64 MiB, 1024 at most.
            overwrite: let the last rows replace the oldest where there is too little room.
            progress: the rows done and their total; see `ProgressOption`. Rows written before an exception of the
                function stay in the buffer.

        Returns:
            The number of rows written.

        Raises:
            CapacityError: if there is too little room and `overwrite` is False.
            UsageError: if the buffer cannot be written or has `ndim=2`, if its newest episode has not ended, or if
                another thread writes to it.
            SchemaError: if rows do not match those stored, or no field can mark the end of an episode.
            OptionError: if an episode, a row or an option does not exist.

        Examples:
            >>> import torch
            >>> from ostinato import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
            >>> data = {"observation": torch.zeros(6, 3), "action": torch.zeros(6, 2), "episode_ends": [4, 6]}
            >>> rb.load_dataset(data)
            6
            >>> rb["done"].tolist()
            [False, False, False, True, False, True]
        """
        from ostinato.buffers.datasets import load_dataset

        return load_dataset(
            self._whole, source, rows, batch_rows, progress, overwrite=overwrite, episodes=episodes, fields=fields
        )

    def export(
        self,
        path: str | Path,
        format: str = "lerobot",  # noqa: A002 (the word of the command line)
        *,
        fields: Fields = None,
        overwrite: bool = False,
        progress: ProgressOption = None,
        **options: Unpack[ExportOptions],
    ) -> ExportReport:
        """Write the episodes of this buffer in the format of another tool; see `ostinato.export`."""
        from ostinato.buffers.datasets import export

        return export(self, path, format, fields=fields, overwrite=overwrite, progress=progress, **options)

    def _find_direct(self) -> None:
        """Look for direct calls, once after the parts have changed; see `ostinato.buffers.direct`."""
        engine = self._engine
        if engine.direct_tried or not isinstance(engine, Reader):
            return
        with engine.lock:
            draws = self._pipeline.plain and defined_together(type(self), "_finish", "_presented")
            if defined_together(type(self), "_accept", "_direct_rows"):
                bare = type(self)._finish is ReplayBuffer._finish  # noqa: SLF001
                engine.direct = find_direct(engine, draws=draws, bare=bare, env_first=self._swapped)
            engine.direct_tried = engine.storage.laid_out and not engine.pending

    def _direct_rows(self, data: Any, lead: int, direct: Direct) -> Any:
        """Return rows as direct calls read them, unchanged by transforms, if `_accept` would accept them; else None."""
        if type(data) is not dict:
            return direct_rows(data, direct.lead - 1 + lead, by_path=direct.by_path)
        if self._engine.store.writer.collections_only:
            return None
        return kinds.fields_by_path(data) if direct.by_path else data

    def _accept(self, data: Any) -> Any:
        """Apply the inverse transforms, and check that the writer takes such data; subclasses check more.

        None if a transform waits for more rows before it gives some.
        """
        if self._transform.steps:
            given, data = data, self._transform.inv(data)
            if data is None and given is not None:
                return None
        if self._engine.writer.collections_only and not kinds.holds_collections(data):
            msg = (
                f"{type(self._engine.writer).__name__} expects data to be a tensor collection (TensorDict or "
                f"tensorclass, or a list of these), got {type(data).__name__}"
            )
            raise UsageError(msg)
        return data

    def _positions(self, placement: Placement) -> Tensor:
        """Return the slots of rows, int64 `[rows]`; with `ndim=2` their steps and environments, int64 `[rows, 2]`."""
        storage = self._engine.store.source.storage
        index = placement.positions(None if storage.device == _CPU else storage.device)
        if storage.ndim == 1:
            return index
        if index.is_cpu:  # NumPy takes a quarter of torch's time for a few rows
            return torch.from_numpy(np.stack(np.divmod(index.numpy(), storage.num_envs), -1))
        return torch.stack((index // storage.num_envs, index % storage.num_envs), -1)

    def observe(self, observer: Observer) -> None:
        """Report to an observer of your own what happens to the rows, from now on and first of the rows present.

        Its state is saved and loaded with the buffer: add the same observers, in the same order, before a load. Writes
        are then made in Python, not by the extension alone, unless its `direct` says otherwise.

        Args:
            observer: overrides the events that it follows; see `ostinato.Observer`.

        Raises:
            KindError: if it is no `Observer`.
            UsageError: for a view, an ensemble, and a buffer that processes share.
        """
        given: Any = observer
        if not isinstance(given, Observer):
            msg = f"observe() takes an ostinato.Observer, got {type(observer).__name__}: subclass it"
            raise KindError(msg)
        engine: Any = self._engine
        if not isinstance(engine, Reader):
            msg = f"the rows of this {type(self).__name__} are not all written here: observe a private buffer"
            raise UsageError(msg)
        engine.own_store("take an observer").observe(observer)

    def empty(self, empty_write_count: bool = True) -> None:  # noqa: FBT001, FBT002
        """Forget all rows and start at slot 0 again; memory is kept.

        Args:
            empty_write_count: False lets `write_count` go on.
        """
        with self._engine.lock:  # no draw may come in between
            self._pipeline.drop()
            self._engine.store.clear(keep_count=not empty_write_count)

    def delete(self, index: Any, generation: Any = None) -> Tensor:
        """Delete rows: they are drawn no more, do not count in `len`, and their slots are written next.

        Rows replaced, edited or deleted since their generation was read are left as they are. Priorities that a learner
        sends later for a deleted row are dropped. Batches prefetched before are dropped, and drawn again. The bytes of
        a deleted row stay until its slot is written, and `rb[index]` still reads them; new rows take free slots first,
        and then replace the oldest rows. Cost: O(rows of the index); the first call allocates 24 bytes for each slot,
        and later writes to a full buffer 26.

        Args:
            index: slots, as `extend` returns them, int64 `[B]` or any shape; or a sample, or the info of one, which
                bring their generations along. -1 is left out only where a row may not be kept: see `update_priority`.
            generation: generations of the same rows: `index_generation` of a sample (of prioritized samplers, or with
                `RoundRobinWriter(track_generations=True)`), or `writer.generations_of(index)`; None deletes whatever
                rows are there now.

        Returns:
            Which rows were there, and are deleted: bool of the shape of the index, on the device of the storage.

        Raises:
            SlotError: if an index is negative or beyond the capacity; nothing is changed.
            OptionError: if single rows cannot leave: windows or episodes, `ndim=2`, `single_copy`, `max_bytes`, a
                writer that chooses slots itself, a sampler with `drop_last` or `endless`; nothing is changed.

        Examples:
            >>> import torch
            >>> from ostinato import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
            >>> index = rb.extend(torch.arange(4))
            >>> rb.delete([1, 2]), len(rb), rb.extend(torch.tensor([4, 5, 6]))
            (tensor([True, True]), 2, tensor([1, 2, 0]))
        """
        index, generation = rows_of_sample(index, generation)
        return self._engine.store.delete(index, generation)

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Give rows new priorities; with a sampler that has none it warns and does nothing.

        A bare update (index and priority alone) cannot be checked: it lands on whatever row is in the slot now. Updates
        that carry generations, in `generation` or within a sample, skip rows that were overwritten,
        edited or emptied since they were drawn; `stats().stale_updates` counts these.

        Args:
            index: integers of any dtype, device and strides, `[B]` or any shape; with `ndim=2` a pair of them or
                `[B, 2]`; or a sampled TensorDict, or the info of a sample, which bring their generation along.
                Negative indices do not count from the end: they raise, except -1 where a row may not be kept
                (`TensorDictMaxValueWriter`, `ReservoirWriter`, a `remover`, own writers), which is left out.
            priority: finite numbers of at least 0: one for all, one for each index, or `[B, *shape]`, reduced per row
                as the sampler says. `[B, B]` raises, unless the rows are trajectories of `B` steps, or the samples
                windows: it comes from errors of shape `[B]` less `[B, 1]`. Of equal indices the last one wins.
            generation: the sample's `index_generation`.

        Raises:
            PriorityError: for priorities that are negative, NaN or infinite, naming the positions; nothing is changed.
            PriorityShapeError: for priorities of another shape; nothing is changed.
            SlotError: if an index is negative or beyond the rows present; nothing is changed.
        """
        engine = self._engine
        if engine.direct is not None and priority is not None:
            if type(index) is dict and engine.sampler.prioritized:  # the info of a sample
                index, priority, generation = unpack_sample(index, priority, generation)
            stale = engine.direct.update_priority(index, priority, generation)
            if stale:
                engine.count_stale(stale)
            if stale is not None:
                return
        sampler, storage = engine.sampler, engine.store.source.storage
        if not isinstance(sampler, PrioritySampler):
            warn_of_sampler(sampler)
            return
        env_first = storage.ndim > 1 and self._dim_extend == 1
        engine.update_priorities(
            parse_update(
                index, priority, generation, storage, sampler.reduce, partial(steps_of, engine), env_first=env_first
            )
        )

    def __len__(self) -> int:
        """Rows present (cells with `ndim=2`), without those that have left it (`ConsumingSampler`, `delete`)."""
        return self._engine.rows_present

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return len(self) > 0

    def __getitem__(self, index: Any) -> Any:
        """Read rows that are present, collated and transformed, by int, slice, tensor, mask or tuple, or one field.

        With `ndim=2` the index addresses the dimensions in the order of the data given to `extend`.

        Returns:
            A view for ints and slices of tensor storages without transforms, else a copy.

        Raises:
            SlotError: if the index is out of range of the rows present.
        """
        self._require_rows()
        require_eager("reading rows")
        if is_field(index):
            if not self._transform:
                return self.storage.read(index, swap=self._swapped)
            return reduce(getitem, as_path(index), self[:])
        with self._engine.lock:
            data = self.storage.read(index, swap=self._swapped)
            collate = self._engine.source.collate
        first = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        one_row = hasattr(first, "__index__") and not isinstance(first, bool) and getattr(first, "ndim", 0) == 0
        if collate is not None and not one_row:
            data = collate(data)
        return self._transform.forward(own(data)) if self._transform else data

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows that are present, after the inverse transforms; a field's name as index is `set_`.

        A new key becomes a new field: of all rows, or of the first ones by a slice (`rb[:n] = rows`). Rows that lack it
        cannot be sampled until they are given it, so an edit of other rows alone raises.

        Rows keep their place in every order (queues, stacks, removers) and the draws that they had. They get the
        priorities of new rows, and new generations, so that late priorities of their former values are dropped.

        Raises:
            SlotError: if the index is out of range of the rows present.
            SchemaError: if the data does not match the rows stored, or has a new key for some rows alone.
        """
        self._require_rows()
        if self._viewed is not None:
            self._viewed[index] = data
        elif is_field(index):
            self.set_(index, data)
        else:
            self._engine.store.edit_rows(index, self._accept(data), swap=self._swapped)

    def _require_rows(self) -> None:
        if not len(self.storage):
            msg = "the buffer holds no rows: write some first"
            raise UsageError(msg)

    @property
    def _swapped(self) -> bool:
        """Whether an index addresses environments before steps, in the order of the data given to `extend`."""
        return self.storage.ndim > 1 and self._dim_extend == 1

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> ReplayBuffer:
        """Write one stored field at an index, in place; no transform runs. Returns the buffer.

        Rows keep their place in every order, their priorities and the draws that they had. They get new generations,
        so that late priorities of their former values are dropped.

        Raises:
            KeyMissingError: if there is no such field.
            SlotError: if the index is out of range of the rows present.
            SchemaError: if the shape differs, or values do not fit the dtype; a value is not broadcast.
        """
        self._require_rows()
        self._engine.store.edit_fields({as_path(key): value}, index, swap=self._swapped)
        return self

    def set_(self, key: str | tuple[str, ...], value: Any) -> ReplayBuffer:
        """Write one stored field of all rows present, in place; see `set_at_`."""
        return self.set_at_(key, value, slice(None))

    def update_(
        self,
        data: Any,
        clone: bool = False,  # noqa: ARG002, FBT001, FBT002
        *,
        keys_to_update: Sequence[str | tuple[str, ...]] | None = None,
    ) -> ReplayBuffer:
        """Write the stored fields that `data` (a dict or TensorDict) has, for all rows present; see `set_at_`.

        Args:
            data: the values.
            clone: no effect: values are copied in any case.
            keys_to_update: the fields to write, nested ones as a tuple, or groups of them; None writes all.
        """
        self._require_rows()
        if not (isinstance(data, dict) or kinds.is_tensordict(data)):
            msg = f"update_() takes a dict or a TensorDict of stored fields, got {type(data).__name__}"
            raise KindError(msg)
        values = kinds.leaves_by_path(data)
        if keys_to_update is not None:
            wanted = [as_path(key) for key in keys_to_update]
            values = {path: value for path, value in values.items() if any(path[: len(key)] == key for key in wanted)}
        self._engine.store.edit_fields(values, slice(None), swap=self._swapped)
        return self

    # -- updates of rows that are still there -------------------------------------------------------------------------

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any = None,
        patch: Mapping[Any, Any] | Any = None,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
        priority: Any = None,
    ) -> ConditionalUpdateResult:
        """Write fields of rows that are still the rows that were sampled; leave out those that were replaced.

        For results that arrive later than the next write: recurrent states, latents, priorities computed elsewhere.
        All arguments are checked before the first value is written. A row is changed as a whole: no batch has a part
        of its patch, and the rest as it was. Rows keep their generations, so the same index and generation can be used
        again. No transform runs. Cost: O(rows of the update); the first update allocates 16 bytes per slot.

        Args:
            index: slots, as `extend` returns them or samples have them under `index`: int64 `[B]` or any shape; with
                `ndim=2` `[B, 2]` or a pair. Negative ones: see `update_priority`. Or a sample, or its info.
            generation: generations of the same rows: `index_generation` of a sample (of prioritized samplers, or with
                `RoundRobinWriter(track_generations=True)`), or `writer.generations_of(index)`. None takes those of the
                sample.
            patch: values of stored fields by name, nested ones as a tuple, `[B, *shape]`: a dict or a TensorDict.
                Tensors must have the stored dtype, other numbers are cast to it. None changes no field.
            version_key: stored field of one number for each row. A row is changed only if `version` is not smaller;
                `version` is then written to it.
            version: one number, or one for each row. Of entries for one slot only that with the largest version is
                written, of equal ones the last.
            require_newer: change a row only if `version` is larger.
            priority: also set the priorities of the rows that are changed; see `update_priority`.

        Returns:
            Which rows were changed, and how many were not.

        Raises:
            UsageError: if the storage has no fields, if samples carry no generations, or if the processes that share
                the rows could read half a row.
            KeyMissingError: if there is no such field.
            SchemaError: if shapes or dtypes differ.
            SlotError: if an index is negative.
            OptionError: if arguments do not go together.
            PriorityError: for priorities that are negative, NaN or infinite.
        """
        engine = self._engine
        with engine.lock:
            update = engine.parse_conditional(
                index,
                generation,
                patch,
                version_key=version_key,
                version=version,
                require_newer=require_newer,
                priority=priority,
            )
            return engine.update_present(update)

    def submit_update_if_present(
        self,
        *,
        index: Any,
        generation: Any = None,
        patch: Mapping[Any, Any] | Any = None,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
        priority: Any = None,
    ) -> Future[ConditionalUpdateResult]:
        """Do `update_if_present` in a thread, in the order of submission.

        Batches that were drawn before stay as they are; the next draw waits for the update. Writes do not: if they
        replace a row meanwhile, the update may or may not have found it. Arguments are kept by reference until it is
        done: do not change them before. Those on an accelerator are copied in its current stream, and the thread waits
        for these copies alone. `synchronize` waits for all updates.

        Returns:
            The future result. An error is also raised by the next `sample`, `synchronize` or save, once.

        Raises:
            UsageError: after `shutdown`, or without generations.
        """
        options = {
            "index": index,
            "generation": generation,
            "patch": patch,
            "version_key": version_key,
            "version": version,
            "require_newer": require_newer,
            "priority": priority,
        }
        given, wait = self._as_stored(options)
        update = partial(self.update_if_present, **given)
        return self._pipeline.submit(partial(_update_after, wait, update))

    def _as_stored(self, options: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
        """Return the arguments of an update on the device of the rows, and what waits for their copies."""
        if options["generation"] is None:
            msg = "submit_update_if_present() needs the generations of the rows: pass the sample's index_generation"
            raise UsageError(msg)
        return as_stored(self.storage, options)

    def mark_update(self, index: Any) -> None:
        """Treat rows as just written: they get the default priority, and return if they have left (`ConsumingSampler`).

        With other samplers this does nothing.

        Args:
            index: slots, as `extend` returns them.

        Raises:
            SlotError: if an index is negative or beyond the rows present.
        """
        self._engine.reset_priorities(index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return `rb[:end]`: the rows in storage order."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Do `rb[:end] = data`: replace the rows in storage order; a new key becomes a new field.

        Args:
            data: the rows.
            end: rows to replace; None replaces all, or as many as a TensorDict, tensor or list has.
        """
        if end is None and self.storage.ndim == 1 and (type(data) is list or hasattr(data, "shape")):
            end = min(len(data), len(self.storage)) or None
        self[:end] = data

    def check(self) -> None:
        """Wait for the storage's device, and raise what it has found wrong with priorities since the last call.

        On the CPU mistakes raise at once; on other devices, where to look would mean to wait, they have no effect until
        this call, `stats()` or a save raises them.

        Raises:
            PriorityError: if priorities or their slots on a device were out of range; they had no effect.
        """
        with self._engine.lock:
            if self.sampler.prioritized:
                as_sampler(self.sampler).raise_deferred()

    def read_episodes(self) -> None:
        """Read where episodes end off the stored rows once more: after edits through views. Cost: O(rows), later.

        Raises:
            UsageError: if nothing in this buffer asks for episodes.
        """
        with self._engine.lock:
            if self._engine.tracker is None:
                msg = "this buffer does not track episodes: no sample_unit, slice sampler or episodes= asks for them"
                raise UsageError(msg)
            self._pipeline.drop()
            self._engine.store.reread()

    def query(
        self,
        predicate: Callable[[Trajectory], Any] | None = None,
        *,
        trajectory_key: str | tuple[str, ...] | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories in the buffer for which a predicate holds; see docs/sampling.md.

        The oldest comes first; with `ndim=2`, environments follow one another. The buffer is locked meanwhile. Fields
        that a `traj` expression does not use are read only of the trajectories returned, if there are no transforms.
        Rows are transformed, as those of a sample are.

        Args:
            predicate: a `traj` expression, or a function of a `Trajectory`; None selects all.
            trajectory_key: field of trajectory ids; None takes usual ids or flags, see `iter_trajectories`.

        Returns:
            `ostinato.compat.torchrl.Trajectory` objects: copies.

        Raises:
            KindError: if the rows have no named fields, or the predicate compares single rows (also a `TypeError`).
            KeyMissingError: if rows have neither ids nor flags (also a `KeyError`).
            UsageError: for a shared buffer.
            MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

        Examples:
            >>> import torch
            >>> from ostinato import LazyTensorStorage, ReplayBuffer, traj
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> _ = rb.extend({"episode": torch.tensor([0, 0, 1, 1, 1]), "reward": torch.arange(5.0)})
            >>> [found.length for found in rb.query(traj.reward.sum() > 5)]
            [3]
        """
        return run_query(self._engine, self._transform, predicate, trajectory_key)

    def stats(self) -> BufferStats:
        """Count rows, draws, ages and waits; a dict of numbers too, for loggers and JSON. Cost: O(rows), for the ages.

        A buffer with `delayed_init` is not made by this call.
        """
        if self._given is not None:
            storage = self._given["storage"]
            capacity = storage.capacity if isinstance(storage, Storage) else 0
            return BufferStats(capacity=capacity, initialized=False)
        return measure(self._engine, self._pipeline.prefetch)

    def __repr__(self) -> str:
        """Parts and options."""
        if not self.initialized:
            return f"{type(self).__name__}(initialized=False, batch_size={self._batch_size})"
        return (
            f"{type(self).__name__}(\n    storage={self.storage!r},\n    sampler={self.sampler!r},\n    "
            f"writer={self.writer!r},\n"
            f"    transform={self._transform!r},\n    batch_size={self._batch_size}, "
            f"prefetch={self._pipeline.prefetch.depth or None})"
        )


def _update_after(wait: Callable[[], Any], update: Callable[[], ConditionalUpdateResult]) -> ConditionalUpdateResult:
    wait()
    return update()


name_methods("ReplayBuffer", Sampling, Saving, Lifecycle)
