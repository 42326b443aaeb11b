"""`RayReplayBuffer`: a replay buffer in an actor, used from any process of a Ray cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack, final

import torch

from ostinato.buffers import ReplayBuffer, TensorDictReplayBuffer
from ostinato.buffers.options import check_generator, check_prefetch, check_size
from ostinato.buffers.out import fill
from ostinato.buffers.rate_limit import RateLimiter, check_min_batch, replayable
from ostinato.buffers.updates import UpdateQueue
from ostinato.core.episodes.tracker import Episodes
from ostinato.distributed.actor_names import (
    BUFFER,
    ActorNames,
    check_free,
    claiming,
    find,
    first_answer,
    take_names,
)
from ostinato.distributed.actors import BufferActor, BufferSpec
from ostinato.distributed.batch_stream import ActorBatches
from ostinato.distributed.buffer_client import BufferClient
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, check_call_timeout
from ostinato.distributed.ray_client import (
    ITSELF,
    finishes,
    init_ray,
    pop_service,
    ray,
    start_actor,
    wait_until_ready,
)
from ostinato.distributed.remote import (
    Method,
    RemoteBuffer,
    RemoteProperty,
    Time,
    in_actor,
    named,
    remote,
    unavailable,
)
from ostinato.durable.progress import SHARDS, Progress, bar_only
from ostinato.errors import OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ostinato.buffers.options import AnyBufferOptions
    from ostinato.distributed.deadlines import Deadline


_CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits until the actor knows that it is closed."""


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


# -- what is checked and changed before a call is sent ----------------------------------------------------------------


def _consume(_: RayReplayBuffer, given: dict[str, Any]) -> None:
    """Consume iterators in this process."""
    given["data"] = replayable(given["data"])


def _check_generator(_: RayReplayBuffer, given: dict[str, Any]) -> None:
    check_generator(given["generator"])


def _full_path(name: str, _: RayReplayBuffer, given: dict[str, Any]) -> None:
    """Make a path independent of the directory of this process."""
    if isinstance(given[name], (str, Path)):
        given[name] = str(Path(given[name]).absolute())


def _check_tensordicts(what: str, rb: RayReplayBuffer, _: object = None) -> None:
    """Raise `UsageError` unless the actor holds a `TensorDictReplayBuffer`."""
    info = rb._client.info  # noqa: SLF001 (same module)
    if not info["tensordicts"]:
        msg = (
            f"{what} is of a TensorDictReplayBuffer, and the actor holds a {info['kind']}: leave it out, or give "
            "replay_buffer_cls=TensorDictReplayBuffer"
        )
        raise UsageError(msg)


def _counted(title: str, given: dict[str, Any]) -> Progress:
    """Count the actor: (0, 1), and (1, 1) at the end."""
    return Progress(given.pop("progress", None), title, 1, unit=SHARDS)


def _shown(title: str, given: dict[str, Any]) -> Progress:
    """Show a bar while the call works; a function `progress` is called in the actor."""
    return Progress(bar_only(given.get("progress")), title, 0, unit=SHARDS)


@named
@final
class RayReplayBuffer(RemoteBuffer):
    """A `ReplayBuffer` in a Ray actor. This is a handle to it.

    Handles can be pickled: pass one to the actors and tasks that write, and sample in another; threads may share one.
    The methods are those of `ReplayBuffer`. They wait for the result, which is a copy, and raise what the buffer
    raised; those that return the buffer return the handle. Parts, observers and hooks are copied to the actor,
    functions run there, and paths are of its machine. Batches that the handle has requested ahead are dropped by calls
    that remove rows, load them, or change parts of the buffer.

    Each call ends by its deadline, with `NoAnswerError` (a `LostBufferError` and a `TimeoutError`) if the actor is
    stopped, overloaded, or cannot be reached; the call may still take effect. `timeout_s` sets the time of one call,
    `call_timeout_s` that of the others. `sample`, `add` and `extend` may wait for `timeout_s` if there is a limiter or
    a queue, and the answer is due 5 s later. `apply`, `query`, `dumps`, `loads`, `load_dataset`, `export` and others
    that may work for long have no limit without `timeout_s`: they end if the actor answers nothing else for
    `call_timeout_s`, either.

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
    def _find(cls, names: ActorNames, timeout_s: float) -> dict[str, Any]:
        actor = find(names, BUFFER)
        return _state(
            actor, first_answer([actor.describe.remote()], timeout_s, f"the RayReplayBuffer {names.name!r}"), names
        )

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
        self._names, self._is_client, self._prefetch = state["names"], state["client"], state["prefetch"]
        self._client = BufferClient(state["actor"], state["info"], state["call_timeout_s"])
        self._batches = ActorBatches(self._client, self._prefetch)
        self._updates = UpdateQueue()

    _another = "and load a checkpoint into it"

    @property
    def _call_timeout_s(self) -> float:
        return self._client.call_timeout_s

    def _silent(self) -> object:
        return self._client.callee

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, method: Method, time: Time, *args: Any, **kwargs: Any) -> Any:
        client = self._client
        with method.progress(kwargs):
            if method.kind == "write":
                return client.poll("write", time, method.name, *args, **kwargs)
            deadline = client.working(time) if method.kind == "work" else client.deadline(time)
            if method.settles:
                self._settle(deadline)
            if method.drops:
                self._drop(deadline)
            if method.via is not None:
                return method.via(self, deadline, *args, **kwargs)
            found = client.call(method.kind, deadline, method.name, *args, **kwargs)
            return self if found is ITSELF else found

    def _drop(self, deadline: Deadline | None = None) -> None:
        """Discard batches requested ahead; when this returns, no more are drawn."""
        closing = self._batches.drop()
        if closing is not None:
            self._client.result(closing, "close_stream", self._client.deadline(deadline))

    def apply(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Call `function(buffer, *args)` in the actor and return the result.

        Example: `rb.apply(lambda rb: setattr(rb.sampler, "beta", 0.7))`.
        """
        return self._client.apply(timeout_s, function, *args)

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def actor(self) -> Any:
        """The actor's handle."""
        return self._client.actor

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch; None if the constructor got no `batch_size`."""
        found: int | None = self._client.info["batch_size"]
        return found

    storage = in_actor(ReplayBuffer.storage)
    sampler = in_actor(ReplayBuffer.sampler)
    writer = in_actor(ReplayBuffer.writer)
    transform = in_actor(ReplayBuffer.transform)
    sample_unit = in_actor(ReplayBuffer.sample_unit)
    cursor = RemoteProperty[int](ReplayBuffer.cursor)
    dim_extend = RemoteProperty[int](ReplayBuffer.dim_extend)
    episodes = RemoteProperty[Episodes | None](ReplayBuffer.episodes)
    initialized = RemoteProperty[bool](ReplayBuffer.initialized)
    rate_limiter = RemoteProperty[RateLimiter | None](ReplayBuffer.rate_limiter)

    priority_key = RemoteProperty[str | tuple[str, ...]](
        TensorDictReplayBuffer.priority_key, prepare=partial(_check_tensordicts, "priority_key")
    )

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Never:  # noqa: ARG003
        """Raise: the constructor makes the actor.

        Raises:
            UsageError: always.
        """
        msg = "RayReplayBuffer.as_remote() is not available: RayReplayBuffer(remote_config=...) makes its actor itself"
        raise UsageError(msg)

    view = unavailable(
        ReplayBuffer.view,
        "RayReplayBuffer.view() is not available: a view is in the process that holds the rows. Make a second "
        "RayReplayBuffer for another sampler, or draw in the actor with rb.apply(function)",
    )

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

    def __repr__(self) -> str:
        """The buffer's parts and options."""
        return f"RayReplayBuffer({self._client.call('answer', None, '__repr__')}, prefetch={self._prefetch})"

    can_sample = remote(ReplayBuffer.can_sample)
    can_insert = remote(ReplayBuffer.can_insert)
    stats = remote(ReplayBuffer.stats)

    # -- writing ------------------------------------------------------------------------------------------------------

    add = remote(ReplayBuffer.add, "write")
    extend = remote(ReplayBuffer.extend, "write", "Iterators are consumed in this process.", prepare=_consume)
    delete = remote(ReplayBuffer.delete, drops=True)
    update_priority = remote(ReplayBuffer.update_priority)
    update_tensordict_priority = remote(
        TensorDictReplayBuffer.update_tensordict_priority,
        prepare=partial(_check_tensordicts, "update_tensordict_priority()"),
    )
    update_if_present = remote(ReplayBuffer.update_if_present)
    synchronize = remote(ReplayBuffer.synchronize, settles=True)
    mark_update = remote(ReplayBuffer.mark_update)
    empty = remote(ReplayBuffer.empty, drops=True)
    set_at_ = remote(ReplayBuffer.set_at_)
    set_ = remote(ReplayBuffer.set_)
    update_ = remote(ReplayBuffer.update_)
    write_all = remote(ReplayBuffer.write_all)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows that are present; see `ReplayBuffer`."""
        self._client.call("answer", None, "__setitem__", index, data)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _set_sampler(self, deadline: Deadline, sampler: Any) -> Any:
        found = self._client.call("answer", deadline, "set_sampler", sampler)
        self._client.describe(deadline)  # a queue waits, other samplers may not
        return found

    set_sampler = remote(ReplayBuffer.set_sampler, drops=True, via=_set_sampler)
    set_storage = remote(ReplayBuffer.set_storage, "work", drops=True)
    set_writer = remote(ReplayBuffer.set_writer)
    append_transform = remote(ReplayBuffer.append_transform, drops=True)
    insert_transform = remote(ReplayBuffer.insert_transform, drops=True)
    observe = remote(ReplayBuffer.observe, drops=True)
    set_rng = remote(
        ReplayBuffer.set_rng, note="None is the global generator of the actor.", drops=True, prepare=_check_generator
    )
    read_episodes = remote(ReplayBuffer.read_episodes, "work", drops=True)
    register_save_hook = remote(ReplayBuffer.register_save_hook)
    register_load_hook = remote(ReplayBuffer.register_load_hook)

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
            _check_tensordicts("sample(include_info=...)", self)
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
        batch, info = next(self._batches)
        batch = batch if out is None else fill(out, batch)
        return (batch, info) if return_info else batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches: without end, or over exactly one new epoch for sampling without replacement.

        With prefetch up to `k` batches are requested ahead, in the order of their draws; an error is raised after the
        batches that were drawn before it. Batches of an epoch are discarded if the iteration is left early; others are
        kept for the next call.

        Raises:
            UsageError: The constructor got no `batch_size`.
        """
        self._check_iterable()
        if not self._client.describe()["epochal"]:
            while True:
                yield self.sample()
        epoch = ActorBatches(self._client, self._prefetch, epoch=True)
        try:
            yield from epoch
        finally:
            epoch.drop()

    read_all_in_order = remote(ReplayBuffer.read_all_in_order)

    def __getitem__(self, index: Any) -> Any:
        """Read rows that are present; see `ReplayBuffer`. Always a copy."""
        return self._client.call("answer", None, "__getitem__", index)

    # -- state --------------------------------------------------------------------------------------------------------

    state_dict = remote(ReplayBuffer.state_dict, "work", settles=True)
    load_state_dict = remote(ReplayBuffer.load_state_dict, "work", drops=True)
    dumps = remote(
        ReplayBuffer.dumps,
        "work",
        "In an actor `progress` counts the actor: (0, 1), and (1, 1) once it has saved.",
        settles=True,
        prepare=partial(_full_path, "path"),
        progress=partial(_counted, "save"),
    )
    save = dump = dumps
    loads = remote(
        ReplayBuffer.loads,
        "work",
        "In an actor `progress` counts the actor: (0, 1), and (1, 1) once it has loaded.",
        drops=True,
        prepare=partial(_full_path, "path"),
        progress=partial(_counted, "load"),
    )
    load = loads
    load_dataset = remote(
        ReplayBuffer.load_dataset,
        "work",
        "Datasets and buffers are sent to the actor as copies. A function `progress` is called there; else a bar shows "
        "that the call works.",
        prepare=partial(_full_path, "source"),
        progress=partial(_shown, "load dataset"),
    )
    export = remote(
        ReplayBuffer.export,
        "work",
        "A function `progress` is called in the actor; else a bar shows that the call works.",
        settles=True,
        prepare=partial(_full_path, "path"),
        progress=partial(_shown, "export"),
    )

    def _end(self, timeout_s: float | None) -> None:
        module = ray()
        if self._is_client or not module.is_initialized():  # without Ray the actor has ended, or is out of reach
            self._batches.drop()
        else:
            deadline = self._client.deadline(_CLOSE_TIMEOUT_S)
            self._updates.wait(deadline.left_s)
            finishes(self.actor.close.options(concurrency_group="update").remote(), deadline.left_s)
            module.kill(self.actor)
            self._names.wait_until_free([BUFFER], timeout_s)
        self._updates.close()
