"""How a buffer in this process is made, shut down and pickled, and the names by which TorchRL's services do so."""

from __future__ import annotations

from functools import cached_property
from multiprocessing.context import get_spawning_popen
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ostinato.buffers.options import check_drop_last, check_episodes, check_generator, check_pin, part
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
    from types import TracebackType

    from ostinato.buffers.options import BufferOptions


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
            depth = self._pipeline.prefetch.depth if self._pipeline.prefetch else 0
            queued = [] if self.shared else self._pipeline.draws  # a process that is started makes its own draws
            return {**self.__dict__, "_pipeline": (depth, queued), "_pass": None}

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
