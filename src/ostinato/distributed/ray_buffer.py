"""`RayReplayBuffer`: a replay buffer in an actor, used from any process of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack, final, overload

import torch

from ostinato.buffers import ReplayBuffer
from ostinato.buffers.options import check_generator, check_prefetch, check_seconds, check_size, positive
from ostinato.buffers.out import fill
from ostinato.buffers.rate_limit import check_min_batch, replayable
from ostinato.buffers.updates import UpdateQueue
from ostinato.distributed.actor_names import (
    BUFFER,
    ActorNames,
    check_free,
    claiming,
    connect,
    find,
    first_answer,
    names_of,
    take_names,
)
from ostinato.distributed.actors import BufferActor, BufferSpec
from ostinato.distributed.batch_stream import BatchStream, StreamHolder
from ostinato.distributed.buffer_client import BufferClient
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, Deadline, check_call_timeout
from ostinato.distributed.ray_client import finishes, init_ray, pop_service, ray, start_actor, wait_until_ready
from ostinato.durable.progress import SHARDS, Progress, bar_only
from ostinato.errors import LostBufferError, NoAnswerError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from torch import Tensor

    from ostinato.buffers import BufferStats, ConditionalUpdateResult
    from ostinato.buffers.observer import Observer
    from ostinato.buffers.options import AnyBufferOptions
    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.datasets import DatasetStorage
    from ostinato.datasets.dataset import Fields
    from ostinato.datasets.export import ExportOptions, ExportReport
    from ostinato.durable.progress import ProgressOption

__all__ = ["RayReplayBuffer"]

_CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits until the actor knows that it is closed."""


@final
class _ActorPart:
    """A part of the buffer that is only accessible in the actor; reading it from a handle raises `UsageError`."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the name of the part."""
        self._name = name

    @overload
    def __get__(self, handle: None, owner: type) -> Self: ...

    @overload
    def __get__(self, handle: object, owner: type) -> Never: ...

    def __get__(self, handle: Any, owner: type) -> Any:
        """Raise, unless the attribute is read from the class."""
        if handle is None:
            return self
        name = self._name
        msg = (
            f"the buffer's {name} is in its actor, and a copy of it here would change nothing there: call "
            f"rb.apply(lambda rb: ... rb.{name} ...)"
        )
        raise UsageError(msg)


def _check_restarts(options: Mapping[str, Any] | None) -> None:
    """Raise `OptionError` if Ray shall restart the actor, whose rows would be lost silently."""
    if options and options.get("max_restarts"):
        msg = (
            f"remote_config must not hold max_restarts={options['max_restarts']}: a restarted buffer is empty; "
            "ShardedReplayBuffer(num_shards=1, checkpoint_dir=...) comes back with its last checkpoint"
        )
        raise OptionError(msg)


def _start(names: ActorNames, options: Mapping[str, Any], spec: BufferSpec) -> tuple[Any, dict[str, Any]]:
    """Start the actor and wait until it is ready; if that fails, end it. Return it and its description."""
    with claiming("RayReplayBuffer", names):
        actor = start_actor(BufferActor, options, spec, **names.options(BUFFER))
    try:
        return actor, wait_until_ready(actor, "the actor of the replay buffer")
    except BaseException:
        ray().kill(actor)
        raise


def _state(actor: Any, info: dict[str, Any], names: ActorNames) -> dict[str, Any]:
    """Return the state of a handle to an actor that was described by `info`."""
    given = {name: info[name] for name in ("prefetch", "call_timeout_s")}
    return {"actor": actor, "info": info, "names": names, "client": False, **given}


@final
class RayReplayBuffer:
    """A `ReplayBuffer` in a Ray actor. This is a handle to it.

    Handles can be pickled: pass one to the actors and tasks that write, and sample in another; threads may share one.
    The methods are those of `ReplayBuffer`; they wait for the result, and raise what the buffer raised. Each ends by
    its deadline, with `NoAnswerError` (a `LostBufferError` and a `TimeoutError`) if the actor is stopped, overloaded,
    or cannot be reached; the call may still take effect. `timeout_s` sets the time of one call, `call_timeout_s` that
    of the others. `sample`, `add` and `extend` may wait for `timeout_s` if there is a limiter or a queue, and the
    answer is due 5 s later. `apply`, `query`, `dumps`, `loads`, `load_dataset`, `export` and others that may work for
    long have no limit without `timeout_s`: they end if the actor answers nothing else for `call_timeout_s`, either.

    Rows and batches are copied into Ray's object store once; batches are read from there without another copy (tensors
    of less than 64 KiB are copied, which is faster), and may be modified. Data of up to 90 kB is sent within the call.

    The buffer's parts stay in the actor: `rb.apply(function)` calls a function there with the buffer. Up to 32 calls
    that write and 32 that read run at once, so that readers that wait never block writers. The actor, and with it the
    rows, ends with `close` or with the last handle; `dumps` saves the rows on the actor's machine.

    Args:
        *args: Positional arguments of `replay_buffer_cls`.
        replay_buffer_cls: What to make: `ReplayBuffer` or a subclass, or a callable that returns one; no ensemble. Use
            `functools.partial` for options of a class of your own.
        call_timeout_s: Time of calls without `timeout_s`, in seconds; `math.inf` sets no limit.
        name: Name by which `attach` returns a handle in other programs of the cluster.
        lifetime: "detached" lets the buffer outlive the process that makes it, until `close` of a handle; it needs a
            `name`. None ends it with that process, or with its last handle there.
        namespace: Namespace of the name; None is "ostinato".
        ray_init_config: Arguments of `ray.init`, if this process is not connected to Ray yet.
        remote_config: Options of the actor, as for `ray.remote`: `num_cpus`, `num_gpus`, `memory`, `resources`, ...
        **options: Options of `replay_buffer_cls`. Parts are copied to the actor; callables are called there. With
            `prefetch=k` each handle has up to `k` batches requested ahead, in iteration and `sample`, half of them, at
            most 8, in one call. Large batches of one call share their memory. Batches that were requested by a handle
            that is dropped, or whose process dies, are lost: with `QueueSampler` their rows reach no reader. Without
            `generator` the buffer gets one, seeded from torch's global generator in this process. `transport` must be
            "auto" or "ray", and `delayed_init` has no effect: the constructor waits for the parts, so that it raises
            their errors.

    Raises:
        MissingExtraError: Ray is not installed.
        KindError: `replay_buffer_cls` has no option of a name; Ray is not started.
        OptionError: Options exclude each other, or `replay_buffer_cls` makes no `ReplayBuffer`.

    Examples:
        >>> import torch
        >>> from functools import partial
        >>> from ostinato import LazyTensorStorage, RayReplayBuffer
        >>> rb = RayReplayBuffer(storage=partial(LazyTensorStorage, 1000), batch_size=4)  # doctest: +SKIP
        >>> index = rb.extend({"obs": torch.zeros(8, 3), "reward": torch.ones(8)})  # doctest: +SKIP
        >>> rb.sample()["reward"]  # doctest: +SKIP
        tensor([1., 1., 1., 1.])
    """

    def __init__(
        self,
        *args: Any,
        replay_buffer_cls: Callable[..., Any] = ReplayBuffer,
        call_timeout_s: float = CALL_TIMEOUT_S,
        name: str | None = None,
        lifetime: Literal["detached"] | None = None,
        namespace: str | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **options: Unpack[AnyBufferOptions],
    ) -> None:
        _check_restarts(remote_config)
        pop_service("RayReplayBuffer", options)
        timeout_s = check_call_timeout(call_timeout_s)
        prefetch = check_prefetch(options.pop("prefetch", None), options.get("batch_size"))
        generator = check_generator(options.get("generator"))
        seed = int(torch.randint(2**62, (), device="cpu")) if generator is None else None
        spec = BufferSpec(replay_buffer_cls, args, dict(options), seed)
        spec.check_names("RayReplayBuffer")
        names, actor_options = take_names("RayReplayBuffer", name, lifetime, namespace, remote_config)
        init_ray(ray_init_config)
        check_free("RayReplayBuffer", names)
        spec = spec._replace(prefetch=prefetch, call_timeout_s=timeout_s)
        actor, info = _start(names, actor_options, spec)
        self.__setstate__(_state(actor, info, names))

    @classmethod
    def attach(
        cls,
        name: str,
        namespace: str | None = None,
        *,
        timeout_s: float = 60.0,
        ray_init_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a handle to the buffer that was made with `name`; see `ShardedReplayBuffer.attach`.

        Raises:
            LostBufferError: There is no such buffer.
            NoAnswerError: Its actor does not answer in time.
            OptionError: The name is invalid.
        """
        check_seconds("timeout_s", timeout_s)
        names = names_of("RayReplayBuffer", name, namespace)
        connect(ray_init_config)
        actor = find(names, BUFFER)
        info = first_answer([actor.describe.remote()], timeout_s, f"the RayReplayBuffer {name!r}")
        handle = object.__new__(cls)
        handle.__setstate__(_state(actor, info, names))
        return handle

    def _connect(self, client: BufferClient, prefetch: int) -> None:
        self._client = client
        self._actor = client.actor
        self._prefetch = prefetch
        self._stream = StreamHolder()
        self._updates = UpdateQueue()
        self._iteration: Iterator[Any] | None = None  # of `next`

    def _open_stream(self, deadline: Deadline, *, epoch: bool = False) -> BatchStream:
        return BatchStream(self._client, self._prefetch, deadline, epoch=epoch)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled handle reaches the same buffer; batches requested ahead stay with this one."""
        client = self._client
        return {
            "actor": client.actor,
            "prefetch": self._prefetch,
            "info": client.info,
            "names": self._names,
            "client": self._is_client,
            "call_timeout_s": client.call_timeout_s,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect to the actor."""
        self._names, self._is_client = state["names"], state["client"]
        self._connect(BufferClient(state["actor"], state["info"], state["call_timeout_s"]), state["prefetch"])

    def __enter__(self) -> Self:
        """Return the handle; the end of the block calls `close`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the buffer, for all handles."""
        self.close()

    def _require_tensordicts(self, what: str) -> None:
        """Raise `UsageError` unless the actor holds a `TensorDictReplayBuffer`."""
        if not self._client.info["tensordicts"]:
            msg = (
                f"{what} is of a TensorDictReplayBuffer, and the actor holds a {self._client.info['kind']}: leave it "
                "out, or give replay_buffer_cls=TensorDictReplayBuffer"
            )
            raise UsageError(msg)

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def actor(self) -> Any:
        """The actor's handle."""
        return self._actor

    def apply(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Call `function(buffer, *args)` in the actor and return the result.

        Example: `rb.apply(lambda rb: setattr(rb.sampler, "beta", 0.7))`.
        """
        return self._client.apply(timeout_s, function, *args)

    storage = _ActorPart()
    sampler = _ActorPart()
    writer = _ActorPart()
    transform = _ActorPart()
    sample_unit = _ActorPart()

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch; None if the constructor got no `batch_size`."""
        found: int | None = self._client.info["batch_size"]
        return found

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """A copy of the limiter; None if the constructor got none."""
        found: RateLimiter | None = self._client.call(None, "rate_limiter")
        return found

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Field that holds priorities; see `TensorDictReplayBuffer`. Can be set.

        Raises:
            UsageError: The buffer is not a `TensorDictReplayBuffer`.
        """
        self._require_tensordicts("priority_key")
        found: str | tuple[str, ...] = self._client.call(None, "priority_key")
        return found

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        self._require_tensordicts("priority_key")
        self.apply(lambda buffer: setattr(buffer, "priority_key", key))

    @property
    def write_count(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return int(self._client.call(None, "write_count"))

    @property
    def cursor(self) -> int:
        """Slot that the next row takes; see `ReplayBuffer.cursor`."""
        return int(self._client.call(None, "cursor"))

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which `extend` grows the buffer."""
        return int(self._client.call(None, "dim_extend"))

    @dim_extend.setter
    def dim_extend(self, dim: int) -> None:
        self.apply(lambda buffer: setattr(buffer, "dim_extend", dim))

    @property
    def episodes(self) -> Episodes | None:
        """Which fields tell where episodes end; see `ReplayBuffer.episodes`."""
        found: Episodes | None = self._client.call(None, "episodes")
        return found

    @property
    def initialized(self) -> bool:
        """Whether the parts of the buffer are made; see `ReplayBuffer.initialized`."""
        return bool(self._client.call(None, "initialized"))

    @property
    def service_backend(self) -> str:
        """Where the buffer is: "ray", in an actor."""
        return "ray"

    def start(self) -> Self:
        """Return the handle: the actor is started by the constructor.

        Raises:
            NoAnswerError: The actor does not answer.
            UsageError: after `close`.
        """
        if not self._is_open():
            msg = "A closed RayReplayBuffer cannot be restarted: make another one, and load a checkpoint into it"
            raise UsageError(msg)
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the actor answers."""
        try:
            return self._is_open()
        except NoAnswerError:
            return False

    def _is_open(self) -> bool:
        """Return whether the buffer was not closed; raise `NoAnswerError` if its actor does not answer."""
        try:
            return ray().is_initialized() and bool(self._client.call(None, "is_alive"))
        except NoAnswerError:
            raise
        except LostBufferError:
            return False

    @property
    def transport_kind(self) -> str:
        """What carries rows and batches: "ray", the object store of Ray."""
        return "ray"

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Never:  # noqa: ARG003
        """Raise: the constructor makes the actor.

        Raises:
            UsageError: always.
        """
        msg = "RayReplayBuffer.as_remote() is not available: RayReplayBuffer(remote_config=...) makes its actor itself"
        raise UsageError(msg)

    def view(
        self,
        *,
        sampler: Any = None,  # noqa: ARG002
        batch_size: int | None = None,  # noqa: ARG002
        sample_unit: Any = None,  # noqa: ARG002
        episodes: Episodes | None = None,  # noqa: ARG002
        transform: Any = None,  # noqa: ARG002
        prefetch: int | None = None,  # noqa: ARG002
        generator: torch.Generator | None = None,  # noqa: ARG002
    ) -> Never:
        """Raise: views are of buffers in this process.

        Raises:
            UsageError: always.
        """
        msg = (
            "RayReplayBuffer.view() is not available: a view is in the process that holds the rows. Make a second "
            "RayReplayBuffer for another sampler, or draw in the actor with rb.apply(function)"
        )
        raise UsageError(msg)

    def client(self) -> RayReplayBuffer:
        """Return a handle that cannot end the buffer: its `close` and `shutdown` drop what that handle holds only.

        It may be pickled. It has its own batches requested ahead.

        Raises:
            NoAnswerError: The actor does not answer.
            UsageError: after `close`.
        """
        return self.clients(1)[0]

    def clients(self, num_clients: int) -> list[RayReplayBuffer]:
        """Return handles for as many readers, each like that of `client()`.

        Raises:
            KindError: The number is not an integer.
            NoAnswerError: The actor does not answer.
            OptionError: It is below 1.
            UsageError: after `close`.
        """
        made = [object.__new__(RayReplayBuffer) for _ in range(positive("num_clients", num_clients))]
        if not self._is_open():
            msg = "RayReplayBuffer is closed: make another one, and load a checkpoint into it"
            raise UsageError(msg)
        for handle in made:
            handle.__setstate__({**self.__getstate__(), "client": True})
        return made

    @property
    def shared(self) -> bool:
        """Whether several processes may use the same rows: always."""
        return True

    def share(self, shared: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Return the handle: processes that get a copy of it use the same rows already.

        Raises:
            UsageError: with False: handles cannot be made private.
        """
        if not shared:
            msg = "share(False) is not available: all handles use the rows of one actor. Copy them to another buffer"
            raise UsageError(msg)
        return self

    def can_sample(self, batch_size: int | None = None, *, timeout_s: float | None = None) -> bool:
        """Whether `sample` would return a batch at once; see `ReplayBuffer.can_sample`."""
        return bool(self._client.call(timeout_s, "can_sample", batch_size))

    def can_insert(self, rows: int = 1, *, timeout_s: float | None = None) -> bool:
        """Whether a write of so many rows would go ahead at once; see `ReplayBuffer.can_insert`."""
        return bool(self._client.call(timeout_s, "can_insert", rows))

    def stats(self, *, timeout_s: float | None = None) -> BufferStats:
        """Return counts of rows, draws, ages and waits. Cost: O(rows), for the ages."""
        found: BufferStats = self._client.call(timeout_s, "stats")
        return found

    def check(self, *, timeout_s: float | None = None) -> None:
        """Raise errors that the storage's device has recorded; see `ReplayBuffer.check`."""
        self._client.call(timeout_s, "check")

    def __len__(self) -> int:
        """Number of rows present."""
        return int(self._client.call(None, "__len__"))

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return len(self) > 0

    def __repr__(self) -> str:
        """The buffer's parts and options."""
        return f"RayReplayBuffer({self._client.call(None, '__repr__')}, prefetch={self._prefetch})"

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout_s: float | None = None) -> Any:
        """Add one row; see `ReplayBuffer.add`."""
        return self._client.poll("write", timeout_s, "add", data)

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows, in order; see `ReplayBuffer.extend`. Iterators are consumed in this process."""
        rows = replayable(data)
        index: Tensor = self._client.poll("write", timeout_s, "extend", rows, update_priority=update_priority)
        return index

    def delete(self, index: Any, generation: Any = None, *, timeout_s: float | None = None) -> Tensor:
        """Delete rows; see `ReplayBuffer.delete`. Batches that this handle has prefetched are dropped."""
        found: Tensor = self._client.update(self._drop(timeout_s), "delete", index, generation)
        return found

    def update_priority(
        self, index: Any, priority: Any = None, generation: Any = None, *, timeout_s: float | None = None
    ) -> None:
        """Set priorities of rows; see `ReplayBuffer.update_priority`."""
        self._client.update(timeout_s, "update_priority", index, priority, generation)

    def update_tensordict_priority(self, data: Any, *, timeout_s: float | None = None) -> None:
        """Set the priorities of the rows of a sample to those it holds; see `TensorDictReplayBuffer`.

        Raises:
            UsageError: The buffer is not a `TensorDictReplayBuffer`.
        """
        self._require_tensordicts("update_tensordict_priority()")
        self._client.update(timeout_s, "update_tensordict_priority", data)

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Mapping[Any, Any] | Any = None,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
        priority: Any = None,
        timeout_s: float | None = None,
    ) -> ConditionalUpdateResult:
        """Change rows that are still there; see `ReplayBuffer.update_if_present`."""
        found: ConditionalUpdateResult = self._client.update(
            timeout_s,
            "update_if_present",
            index=index,
            generation=generation,
            patch=patch,
            version_key=version_key,
            version=version,
            require_newer=require_newer,
            priority=priority,
        )
        return found

    def submit_update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Mapping[Any, Any] | Any = None,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
        priority: Any = None,
        timeout_s: float | None = None,
    ) -> Future[ConditionalUpdateResult]:
        """Do `update_if_present` in a thread of this process, in the order of submission.

        Arguments are kept by reference until it is done: do not change them before.

        Returns:
            The future result. An error is also raised by the next `synchronize`, `shutdown` or save, once.
        """
        deadline = self._client.deadline(timeout_s)

        def update() -> ConditionalUpdateResult:
            found: ConditionalUpdateResult = self._client.update(
                deadline,
                "update_if_present",
                index=index,
                generation=generation,
                patch=patch,
                version_key=version_key,
                version=version,
                require_newer=require_newer,
                priority=priority,
            )
            return found

        return self._updates.submit(update, None)

    def _settle(self, deadline: Deadline) -> None:
        """Wait for updates that this handle submitted, and raise the first error of one of them."""
        if not self._updates.wait(deadline.left_s):
            raise deadline.error(self._client.callee, "update_if_present")
        self._updates.settle()

    def synchronize(self, *, timeout_s: float | None = None) -> None:
        """Wait until updates that this handle submitted are written.

        Raises:
            Exception: the first error of one of them.
        """
        deadline = self._client.deadline(timeout_s)
        self._settle(deadline)
        self._client.call(deadline, "synchronize")

    def mark_update(self, index: Any, *, timeout_s: float | None = None) -> None:
        """Give rows the default priority; see `ReplayBuffer.mark_update`."""
        self._client.update(timeout_s, "mark_update", index)

    def empty(
        self,
        empty_write_count: bool = True,  # noqa: FBT001, FBT002
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove all rows and begin at slot 0 again; memory is kept. With False, `write_count` goes on."""
        self._client.update(self._drop(timeout_s), "empty", empty_write_count)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows that are present; see `ReplayBuffer`."""
        self._client.update(None, "__setitem__", index, data)

    def set_at_(
        self, key: str | tuple[str, ...], value: Any, index: Any, *, timeout_s: float | None = None
    ) -> RayReplayBuffer:
        """Write one stored field at an index, in place. Returns the handle."""
        self._client.update(timeout_s, "set_at_", key, value, index)
        return self

    def set_(self, key: str | tuple[str, ...], value: Any, *, timeout_s: float | None = None) -> RayReplayBuffer:
        """Write one stored field of all rows present, in place. Returns the handle."""
        self._client.update(timeout_s, "set_", key, value)
        return self

    def update_(
        self,
        data: Any,
        clone: bool = False,  # noqa: FBT001, FBT002
        *,
        keys_to_update: Sequence[str | tuple[str, ...]] | None = None,
        timeout_s: float | None = None,
    ) -> RayReplayBuffer:
        """Write the fields that `data` has, for all rows present; see `ReplayBuffer.update_`. Returns the handle."""
        self._client.update(timeout_s, "update_", data, clone, keys_to_update=keys_to_update)
        return self

    def write_all(self, data: Any, end: int | None = None, *, timeout_s: float | None = None) -> None:
        """Write `rb[:end] = data`."""
        self._client.update(timeout_s, "write_all", data, end)

    def set_sampler(self, sampler: Any, *, timeout_s: float | None = None) -> Any:
        """Replace the sampler; return a copy of the previous one."""
        deadline = self._drop(timeout_s)
        found = self._client.call(deadline, "set_sampler", sampler)
        self._client.describe(deadline)  # a queue waits, other samplers may not
        return found

    def set_storage(
        self, storage: Any, collate_fn: Callable[[Any], Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Replace the storage; return a copy of the previous one, with its rows."""
        return self._client.work(self._drop(timeout_s, works=True), "set_storage", storage, collate_fn)

    def set_writer(self, writer: Any, *, timeout_s: float | None = None) -> Any:
        """Replace the writer; return a copy of the previous one."""
        return self._client.call(timeout_s, "set_writer", writer)

    def append_transform(
        self, transform: Any, *, invert: bool = False, timeout_s: float | None = None
    ) -> RayReplayBuffer:
        """Add a transform at the end of the chain, in the actor. Returns the handle."""
        self._client.call(self._drop(timeout_s), "append_transform", transform, invert=invert)
        return self

    def insert_transform(
        self, index: int, transform: Any, *, invert: bool = False, timeout_s: float | None = None
    ) -> RayReplayBuffer:
        """Add a transform before position `index` of the chain, in the actor. Returns the handle."""
        self._client.call(self._drop(timeout_s), "insert_transform", index, transform, invert=invert)
        return self

    def observe(self, observer: Observer, *, timeout_s: float | None = None) -> None:
        """Report to a copy of an observer what happens to the rows, in the actor; see `ReplayBuffer.observe`."""
        self._client.call(self._drop(timeout_s), "observe", observer)

    def set_rng(self, generator: torch.Generator | None, *, timeout_s: float | None = None) -> None:
        """Draw with a copy of a generator from now on, None: the actor's global one; see `ReplayBuffer.set_rng`."""
        check_generator(generator)
        self._client.call(self._drop(timeout_s), "set_rng", generator)

    def read_episodes(self, *, timeout_s: float | None = None) -> None:
        """Find the ends of episodes in the stored rows again."""
        self._client.work(self._drop(timeout_s, works=True), "read_episodes")

    # -- reading ------------------------------------------------------------------------------------------------------

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

        With prefetch a batch was drawn up to `k` batches ago, in order. Its info has no key `stale`; generations
        prevent that priorities reach rows that were replaced since. Waits for writers are limited by the limiter's
        timeout; threads that share the handle get batches in turn. `include_info` has no effect. `out` gets a copy of
        the batch that has arrived.

        Raises:
            UsageError: `max_age` or `timeout_s` with prefetch, because batches were requested earlier; or
                `include_info` for a buffer that is not a `TensorDictReplayBuffer`.
            OptionError: `min_batch` with prefetch, or with `out`.
        """
        if include_info is not None:
            self._require_tensordicts("sample(include_info=...)")
        size = check_size(batch_size, self.batch_size, fixed=bool(self._prefetch))
        if not self._prefetch:
            whole = None if out is None else "out, which takes whole batches"
            check_min_batch(min_batch, size, partial=True, whole=whole)
            options = {"max_age": max_age, "min_batch": min_batch}
            given = {name: value for name, value in options.items() if value is not None}
            found = self._client.poll("read", timeout_s, "sample", size, return_info, **given)
            if out is None:
                return found
            return (fill(out, found[0]), found[1]) if return_info else fill(out, found)
        check_min_batch(min_batch, size, partial=True, whole="prefetch, whose batches were requested before")
        if max_age is not None or timeout_s is not None:
            msg = "max_age and timeout_s do not apply to batches that were requested earlier: leave prefetch out"
            raise UsageError(msg)
        batch, info = self._stream.next(self._client, self._open_stream)
        batch = batch if out is None else fill(out, batch)
        return (batch, info) if return_info else batch

    def _drop(self, timeout_s: float | None = None, *, works: bool = False) -> Deadline:
        """Discard batches requested ahead; when this returns, no more are drawn.

        Args:
            timeout_s: Time of the call that this is a part of.
            works: Whether that call may work for long.

        Returns:
            The deadline of that call.
        """
        deadline = self._client.working(timeout_s) if works else self._client.deadline(timeout_s)
        closing = self._stream.drop()
        if closing is not None:
            self._client.result(closing, "close_stream", deadline)
        return deadline

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches: without end, or over exactly one new epoch for sampling without replacement.

        With prefetch up to `k` batches are requested ahead, in the order of their draws; an error is raised after the
        batches that were drawn before it. Batches of an epoch are discarded if the iteration is left early; others are
        kept for the next call.

        Raises:
            UsageError: The constructor got no `batch_size`.
        """
        if self.batch_size is None:
            msg = "Cannot iterate over the replay buffer. Batch_size was not specified when it was made"
            raise UsageError(msg)
        if not self._client.describe()["epochal"]:
            while True:
                yield self.sample()
        stream = self._open_stream(self._client.deadline(), epoch=True)
        try:
            yield from stream
        finally:
            stream.close()

    def next(self) -> Any:
        """Return the next batch of an iteration, None at its end; the call after that begins another one.

        So does the call after an error. Not thread-safe.

        Raises:
            UsageError: The constructor got no `batch_size`.
        """
        if self._iteration is None:
            self._iteration = iter(self)
        try:
            return next(self._iteration)
        except StopIteration:
            self._iteration = None
            return None
        except BaseException:
            self._iteration = None
            raise

    def query(
        self,
        predicate: Callable[[Trajectory], Any] | None = None,
        *,
        trajectory_key: str | tuple[str, ...] | None = None,
        timeout_s: float | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories for which a predicate holds, which runs in the actor; see `ReplayBuffer.query`."""
        found: list[Trajectory] = self._client.work(timeout_s, "query", predicate, trajectory_key=trajectory_key)
        return found

    def __getitem__(self, index: Any) -> Any:
        """Read rows that are present; see `ReplayBuffer`. Always a copy."""
        return self._client.update(None, "__getitem__", index)

    def read_all_in_order(self, end: int | None = None, *, timeout_s: float | None = None) -> Any:
        """Return `rb[:end]`: the rows in storage order. Copy."""
        return self._client.update(timeout_s, "__getitem__", slice(end))

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the whole state; see `ReplayBuffer.state_dict`."""
        deadline = self._client.working(timeout_s)
        self._settle(deadline)
        found: dict[str, Any] = self._client.work(deadline, "state_dict")
        return found

    def load_state_dict(self, state: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Restore what `state_dict` returned, of this or of a local buffer."""
        self._client.work(self._drop(timeout_s, works=True), "load_state_dict", state)

    def dumps(
        self,
        path: str | Path,
        *,
        incremental: bool = False,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
    ) -> None:
        """Save the whole state to a directory of the actor's machine; a local buffer can load it, too.

        `progress` counts the actor: (0, 1), and (1, 1) once it has saved.
        """
        deadline = self._client.working(timeout_s)
        with Progress(progress, "save", unit=SHARDS) as bar:
            self._settle(deadline)
            bar.begin(1)
            self._client.work(deadline, "dumps", str(Path(path).absolute()), incremental=incremental)

    def loads(
        self,
        path: str | Path,
        *,
        verify: bool = True,
        mmap: bool = False,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
    ) -> None:
        """Restore what `dumps` saved, from a directory of the actor's machine; `progress` counts the actor."""
        with Progress(progress, "load", unit=SHARDS) as bar:
            deadline = self._drop(timeout_s, works=True)
            bar.begin(1)
            self._client.work(deadline, "loads", str(Path(path).absolute()), verify=verify, mmap=mmap)

    def save(
        self,
        path: str | Path,
        *,
        incremental: bool = False,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
    ) -> None:
        """Do `dumps`."""
        self.dumps(path, incremental=incremental, progress=progress, timeout_s=timeout_s)

    def dump(
        self,
        path: str | Path,
        *,
        incremental: bool = False,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
    ) -> None:
        """Do `dumps`."""
        self.dumps(path, incremental=incremental, progress=progress, timeout_s=timeout_s)

    def load(
        self,
        path: str | Path,
        *,
        verify: bool = True,
        mmap: bool = False,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
    ) -> None:
        """Do `loads`."""
        self.loads(path, verify=verify, mmap=mmap, progress=progress, timeout_s=timeout_s)

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
        timeout_s: float | None = None,
    ) -> int:
        """Copy a dataset into the buffer; see `ReplayBuffer.load_dataset`. A path is one of the actor's machine.

        Datasets and buffers are sent to the actor as copies. A function `progress` is called in the actor; else a bar
        shows that the call works.
        """
        source = str(Path(source).absolute()) if isinstance(source, (str, Path)) else source
        options = {"episodes": episodes, "rows": rows, "fields": fields, "batch_rows": batch_rows}
        rest = {"overwrite": overwrite, "progress": progress}
        with Progress(bar_only(progress), "load dataset", 0, unit=SHARDS):
            written: int = self._client.work(timeout_s, "load_dataset", source, **options, **rest)
        return written

    def export(
        self,
        path: str | Path,
        format: str = "lerobot",  # noqa: A002 (the word of the command line)
        *,
        fields: Fields = None,
        overwrite: bool = False,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
        **options: Unpack[ExportOptions],
    ) -> ExportReport:
        """Write the episodes in the format of another tool, to a path of the actor's machine; see `ostinato.export`.

        A function `progress` is called in the actor; else a bar shows that the call works.
        """
        deadline = self._client.working(timeout_s)
        self._settle(deadline)
        given = {"fields": fields, "overwrite": overwrite, "progress": progress, **options}
        with Progress(bar_only(progress), f"export {format}", 0, unit=SHARDS):
            report: ExportReport = self._client.work(deadline, "export", str(Path(path).absolute()), format, **given)
        return report

    def register_save_hook(self, hook: Callable[..., Any], *, timeout_s: float | None = None) -> None:
        """Register a function that converts the rows that `dumps` saves, in the actor."""
        self._client.call(timeout_s, "register_save_hook", hook)

    def register_load_hook(self, hook: Callable[..., Any], *, timeout_s: float | None = None) -> None:
        """Register a function that converts rows that `loads` reads, in the actor."""
        self._client.call(timeout_s, "register_load_hook", hook)

    def shutdown(self, timeout: float | None = None) -> None:
        """Finish the updates submitted by this handle, then `close`, which does not wait for other handles.

        Args:
            timeout: Longest wait for these updates, by default `call_timeout_s`, and for Ray to end the actor, by
                default 10 s. It ends in any case.

        Raises:
            Exception: the first error of an update, after the actor has ended.
        """
        deadline = self._client.deadline(timeout)
        try:
            self._settle(deadline)
        finally:
            self._end(timeout)

    def close(self) -> None:
        """End the actor, and with it the rows, for all handles: later calls raise `LostBufferError`.

        May be called again. On a handle of `client()` it drops what that handle holds, and no more. Waits for an actor
        that does not answer at most 5 s before it ends it.
        """
        self._end(None)

    def _end(self, timeout_s: float | None) -> None:
        module = ray()
        if self._is_client or not module.is_initialized():  # without Ray the actor has ended, or is out of reach
            self._stream.drop()
        else:
            deadline = self._client.deadline(_CLOSE_TIMEOUT_S)
            self._updates.wait(deadline.left_s)
            finishes(self._actor.close.options(concurrency_group="update").remote(), deadline.left_s)
            module.kill(self._actor)
            self._names.wait_until_free([BUFFER], timeout_s)
        self._updates.close()
