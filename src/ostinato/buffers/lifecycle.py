"""The parts of a buffer in this process: made, exchanged, shut down and pickled; the names of TorchRL's services."""

from __future__ import annotations

from functools import cached_property
from multiprocessing.context import get_spawning_popen
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ostinato.buffers.options import (
    check_drop_last,
    check_episodes,
    check_generator,
    check_pin,
    check_same_device,
    part,
)
from ostinato.buffers.part_owners import check_free, forget_rows, record_owner
from ostinato.buffers.pipeline import Pipeline
from ostinato.buffers.reader import Reader, make_reader
from ostinato.buffers.records import Source
from ostinato.buffers.sharing import draw_apart, goes_shared, share, share_storage
from ostinato.buffers.views import check_no_views
from ostinato.errors import OptionError, UsageError
from ostinato.samplers import RandomSampler, Sampler
from ostinato.samplers.consuming import with_limit
from ostinato.storages import ListStorage, Storage
from ostinato.transforms import Compose
from ostinato.units import chain_units
from ostinato.writers import RoundRobinWriter, Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch

    from ostinato.buffers.options import BufferOptions
    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.units import SampleUnit


_FIRST_USE = RLock()
"""Held while the parts of a buffer are made: two threads that use it first make them once."""


def _at_first_use(name: str) -> Any:
    """Return an attribute whose first read makes the parts of a buffer."""

    def read(buffer: Lifecycle) -> Any:
        buffer._make_parts()  # noqa: SLF001 (its own)
        return vars(buffer)[name]

    return cached_property(read)


class Lifecycle:
    """Base of `ReplayBuffer`: its parts, from the first use to the end.

    Args:
        given: what the parts are made of.
        delayed: make them at the first use, not now.
    """

    _priority_path: tuple[str, ...] | None = None
    """Path of the field that holds priorities, where rows are TensorDicts."""

    _writer_class: type[Writer] = RoundRobinWriter
    """The default writer."""

    _engine: Reader = _at_first_use("_engine")
    _pipeline: Pipeline = _at_first_use("_pipeline")
    _transform: Compose = _at_first_use("_transform")
    _dim_extend: int = _at_first_use("_dim_extend")

    def __init__(self, given: BufferOptions, *, delayed: bool) -> None:
        self._given: BufferOptions | None = given
        self._batch_size = given["batch_size"]
        self._dim_given = given["dim_extend"] is not None
        if not delayed:
            self._make_parts()

    def _make_parts(self) -> None:
        """Make the parts; a delayed buffer does so at its first use, and again if that raised."""
        with _FIRST_USE:
            given = self._given
            if given is None:
                return  # another thread made them
            made = part("storage", given["storage"], Storage, lambda: ListStorage(1000))
            sampler = part("sampler", given["sampler"], Sampler, RandomSampler)
            sampler = with_limit(sampler, given["consume_after_n_samples"], given["prefetch"])
            writer = part("writer", given["writer"], Writer, self._writer_class)
            for each in (sampler, writer):
                check_free(each)
            for each in (sampler, writer):
                forget_rows(each)
            if given["checkpointer"] is not None:
                made.checkpointer = given["checkpointer"]
            collate, dim = given["collate_fn"], given["dim_extend"]
            generator, unit = check_generator(given["generator"]), chain_units(given["sample_unit"])
            limiter, key, remover = given["rate_limiter"], given["version_key"], given["remover"]
            episodes = check_episodes(given["episodes"])
            if given["shared"] or made.shared_init:
                made = share_storage(made, sampler, writer, limiter, key, unit, episodes, remover)
            source = Source(made, made.default_collate if collate is None else collate)
            engine = make_reader(source, sampler, writer, generator, unit, episodes, limiter, key, remover)
            factory = given["transform_factory"]
            transform = Compose.of(given["transform"] if factory is None else factory())
            dim = made.ndim - 1 if dim is None else dim
            if dim not in (0, 1) or isinstance(dim, bool):  # with ndim=1 also 1: data [num_envs, rows]
                msg = f"dim_extend must be a positive value or 0: 0 or 1 (storage.ndim is {made.ndim}), got {dim!r}"
                raise OptionError(msg)
            engine.store.pin = check_pin(given["pin_memory"], made)
            engine.set_priority_path(self._priority_path)
            check_drop_last(engine.sampler, given["batch_size"])
            self._transform, self._dim_extend, self._engine = transform, dim, engine
            self._pipeline = Pipeline(engine, given["prefetch"] or 0)
            record_owner(engine, sampler, writer)
            draw_apart(engine)
            self._given = None

    @property
    def initialized(self) -> bool:
        """Whether the parts are made: from the start, or with `delayed_init` since the first use."""
        return self._given is None

    # -- the parts -----------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """The storage."""
        return self._engine.storage

    @property
    def sampler(self) -> Sampler:
        """The sampler."""
        return self._engine.sampler

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self._engine.writer

    @property
    def batch_size(self) -> int | None:
        """Rows that `sample()` gives; None if the constructor was given none."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which `extend` grows the buffer."""
        return self._dim_extend

    @dim_extend.setter
    def dim_extend(self, dim: int) -> None:
        if dim != self._dim_extend:
            msg = f"dim_extend cannot be reset, from {self._dim_extend} to {dim!r}: make a new replay buffer"
            raise UsageError(msg)

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The rules by which readers and writers wait for each other; None if they never wait."""
        return next((limit.flow.limiter for limit in self._engine.limits), None)

    @property
    def transform(self) -> Compose:
        """The chain of transforms."""
        return self._transform

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Exchange the sampler and return the previous one; prefetched batches are dropped.

        Raises:
            OptionError: if the sampler does not go with the other parts, or keeps a state of rows and serves another
                buffer; nothing has changed then.
        """
        check_drop_last(part("sampler", sampler, Sampler, None), self._batch_size)
        with_limit(sampler, None, self._pipeline.prefetch.depth)
        with self._engine.lock:  # no draw of the old one may come in between
            self._pipeline.drop()
            return self._engine.set_sampler(sampler)

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Exchange the storage and return the previous one.

        The collate function becomes `collate_fn`, or the new storage's default.
        """
        part("storage", storage, Storage, None)
        check_pin(self._engine.store.pin, storage)
        source = Source(storage, storage.default_collate if collate_fn is None else collate_fn)
        with self._engine.lock:
            store = self._engine.own_store(f"exchange the storage for {type(storage).__name__}")
            store.require_private("exchange its storage")
            self._pipeline.drop()
            old = store.set_source(source)
        if not self._dim_given:
            self._dim_extend = storage.ndim - 1
        return old

    def set_writer(self, writer: Writer) -> Writer:
        """Exchange the writer and return the previous one; writing goes on after the newest row."""
        writer = part("writer", writer, Writer, None)
        return self._engine.own_store(f"exchange the writer for {type(writer).__name__}").set_writer(writer)

    @property
    def _storage(self) -> Storage:
        """The storage, under the name by which collectors of TorchRL look for it."""
        return self.storage

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end of the chain; `invert` makes a callable run at writing. Returns the buffer."""
        self._transform.append(transform, invert=invert)
        self._pipeline.redo()  # after it, or another thread would queue batches without it in between
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform before position `index` of the chain. Returns the buffer.

        Raises:
            OptionError: if the position is out of range.
        """
        self._transform.insert(index, transform, invert=invert)
        self._pipeline.redo()
        return self

    @property
    def sample_unit(self) -> SampleUnit | None:
        """What a drawn row becomes; None if it stays a row."""
        return self._engine.unit

    @property
    def episodes(self) -> Episodes | None:
        """Where episodes end, as buffer, unit and sampler say together; None if episodes are not tracked."""
        tracker = self._engine.tracker
        return None if tracker is None else tracker.wanted

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from another generator from now on; None is torch's global one. Batches made ahead are dropped.

        Raises:
            KindError: if it is no generator.
            OptionError: if it is on another device than the rows.
        """
        engine = self._engine
        with engine.lock:
            storage = engine.storage
            if check_generator(generator) is not None and generator is not None and storage.laid_out:
                check_same_device(generator, storage)
            self._pipeline.drop()
            engine.parts_changed()
            engine.generator = generator

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the prefetch thread. Idempotent; rows and draws made ahead stay.

        A buffer without `prefetch` owns no thread. Sampling continues as if the buffer had not been closed, with a new
        thread.
        """
        if self.initialized:
            self._pipeline.close()

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the buffer; see `close`."""
        self.close()

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Finish pending updates and prefetched batches, end the threads, and sample no more. Idempotent.

        Rows stay and can be read, written and saved; `close` ends the threads as well, and lets sampling go on.

        Args:
            timeout: no effect: there is no other process to wait for.

        Raises:
            Exception: the first error of a pending update or batch, once the threads have ended.
        """
        pipeline = self._pipeline
        if pipeline.ended:
            return
        with self._engine.lock:
            self._engine.parts_changed()
            pipeline.ended = True
        try:
            self.synchronize()
        finally:
            self.close()

    def synchronize(self) -> None:
        """Wait until pending updates are written and prefetched batches are made; these stay queued.

        Raises:
            Exception: the first error of one of them.
        """
        if self.initialized:
            self._pipeline.synchronize()

    # -- the service --------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Return the buffer, which needs no start.

        Raises:
            UsageError: after `shutdown`.
        """
        if not self.is_alive:
            msg = "A shut down replay buffer cannot be restarted: make another one, or use close() to end its threads"
            raise UsageError(msg)
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the buffer can be sampled: until `shutdown`."""
        return not (self.initialized and self._pipeline.ended)

    @property
    def service_backend(self) -> str:
        """Where the buffer is: "direct", in this process."""
        return "direct"

    def client(self) -> Self:
        """Return the buffer itself: in its own process it needs no client."""
        return self

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> NoReturn:  # noqa: ARG003
        """Raise: a buffer in a Ray actor is a `RayReplayBuffer`.

        Raises:
            UsageError: always.
        """
        msg = (
            f"{cls.__name__}.as_remote() is not available: use ostinato.RayReplayBuffer, which makes a buffer in a Ray "
            "actor and has its methods"
        )
        raise UsageError(msg)

    @property
    def shared(self) -> bool:
        """Whether several processes may write and sample the same rows; see `share`."""
        return self._engine.storage.shared if self._given is None else self._given["shared"]

    def share(self, shared: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Let processes write and sample the same rows from now on, as if the buffer was made with `shared=True`.

        Rows in the files of a `LazyMemmapStorage` stay there, those of a `LazyTensorStorage` are copied to shared
        memory once. `storage` is another object afterwards, and views of rows that were handed out before show no
        later writes. Call it before the processes are started, while no other thread uses the buffer.

        Args:
            shared: True; False leaves a private buffer as it is.

        Returns:
            The buffer.

        Raises:
            OptionError: if the parts do not go together with sharing, or the buffer has views; nothing is changed.
            UsageError: with False, if the buffer is shared.
        """
        if self.shared or not shared:
            if not shared and self.shared:
                msg = "a shared buffer stays shared, since other processes may have it: load its rows into another one"
                raise UsageError(msg)
            return self
        if self._given is not None:
            self._given["shared"] = True
            return self
        self._pipeline.settle()
        with self._engine.lock:
            check_no_views(self._engine)
            share(self._engine, self._pipeline.drop)
        return self

    def _begin_process(self) -> None:
        """Get ready to be passed to a process that is being started; see `__getstate__`."""
        if self._given is not None and self._given["shared"]:
            self._make_parts()
        if self._given is None and not self.shared and goes_shared(self._engine):
            self.share()

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Pickling copies the buffer with its state and queued draws; locks and threads are new.

        A shared buffer can only be passed to a process that is being started, where it has the same rows and its own
        draws. A buffer whose rows are in the files of a `LazyMemmapStorage` is shared by that; see `share`. Pending
        updates are written first.

        A copy has no views. A view is copied with the buffer that it is a view of.

        Raises:
            UsageError: for a shared buffer at any other time; if a process is being started, for a buffer with a
                `ListStorage`, and for one in files that cannot be shared.
        """
        if get_spawning_popen() is not None:
            self._begin_process()
        if not self.initialized:
            return dict(self.__dict__)
        self._pipeline.settle()
        with self._engine.lock:
            if isinstance(self._engine, Reader):
                self._engine.store.follow_storage()  # first: it may drop queued draws
            queued = [] if self.shared else self._pipeline.draws  # a process that is started makes its own draws
            return {**self.__dict__, "_pipeline": (self._pipeline.prefetch.depth, queued), "_pass": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without a thread; queued draws come first."""
        self.__dict__.update(state)
        if not self.initialized:
            return
        depth, queued = state["_pipeline"]
        engine = self._engine
        draw_apart(engine, copied=True)
        drawn = [engine.hold(draw) for draw in (*queued, *engine.pending)]
        engine.pending.clear()
        engine.pending.extend(drawn)
        self._pipeline = Pipeline(self._engine, depth)


def name_methods(public: str, *bases: type) -> None:
    """Let Python's errors about arguments name a public class, as `ReplayBuffer.sample`, not its private bases."""
    for base in bases:
        for name, given in vars(base).items():
            method = getattr(given, "__func__", given)  # of a class method
            if isinstance(method, FunctionType):
                method.__qualname__ = f"{public}.{name}"
