"""RayReplayBuffer: a replay buffer in an actor, used from any process of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, final, overload

import torch

from ostinato.buffers import ReplayBuffer
from ostinato.buffers.options import check_generator, check_prefetch, check_size
from ostinato.buffers.rate_limit import replayable
from ostinato.distributed.actors import Host, Recipe
from ostinato.distributed.batch_stream import Stream, Supply
from ostinato.distributed.ray_client import answer, exchange, exchange_in_turns, first_answer, ray, spawn, start
from ostinato.distributed.serialization import Parcel
from ostinato.errors import OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self

    from torch import Tensor

    from ostinato.buffers import BufferStats
    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.core.episodes.keys import Episodes

__all__ = ["Kept", "RayReplayBuffer", "need_tensordicts", "refuse_restarts"]


@final
class Kept:
    """An attribute of a handle that refuses to be read: a copy of the part would be of no use.

    Raises:
        UsageError: whenever it is read off a handle.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn which part it is."""
        self._name = name

    @overload
    def __get__(self, handle: None, owner: type) -> Self: ...

    @overload
    def __get__(self, handle: object, owner: type) -> Never: ...

    def __get__(self, handle: Any, owner: type) -> Any:
        """Refuse; the class itself has the attribute."""
        if handle is None:
            return self
        name = self._name
        msg = (
            f"the buffer's {name} is in its actor, and a copy of it here would change nothing there: call "
            f"rb.apply(lambda rb: ... rb.{name} ...)"
        )
        raise UsageError(msg)


def need_tensordicts(about: Mapping[str, Any], what: str) -> None:
    """Refuse what only a `TensorDictReplayBuffer` has, unless the actor holds one.

    Raises:
        UsageError: naming what it holds.
    """
    if not about["tensordicts"]:
        msg = (
            f"{what} is of a TensorDictReplayBuffer, and the actor holds a {about['kind']}: leave it out, or give "
            "replay_buffer_cls=TensorDictReplayBuffer"
        )
        raise UsageError(msg)


def refuse_restarts(options: Mapping[str, Any] | None) -> None:
    """Refuse that Ray restarts an actor whose rows do not come back.

    Raises:
        OptionError: naming the option.
    """
    if options and options.get("max_restarts"):
        msg = (
            f"remote_config must not hold max_restarts={options['max_restarts']}: a restarted buffer is empty; "
            "ShardedReplayBuffer(num_shards=1, checkpoint_dir=...) comes back with its last checkpoint"
        )
        raise OptionError(msg)


_WHAT = "the actor of the replay buffer"
_END_S = 5.0
"""How long `close` waits for the actor to take note."""


@final
class RayReplayBuffer:
    """A `ReplayBuffer` that lives in a Ray actor; this is a handle to it.

    Handles can be pickled: pass one to the actors and tasks that write, and sample in another; threads may share one.
    Methods are those of `ReplayBuffer` and do the same; they wait for the answer, and raise what the buffer raised. A
    call that may wait for others (`timeout_s`, or the limiter's) and has no answer 30 s after its time is up raises
    `LostBufferError`: the actor is stopped, or cannot be reached. What it asked for may still happen.

    Rows and batches are copied into Ray's object store once each; batches are read from there without another copy
    (tensors of less than 64 KiB are copied, which is faster), and may be changed like any other. Those of up to 90 kB
    travel within the call.

    The buffer's parts stay in the actor: `rb.apply(function)` runs a function there, and gives it the buffer. Up to 32
    calls that write and 32 that read run at once, so readers that wait never keep writers out. Rows end with the actor,
    at the latest with the last handle: `dumps` saves them, on the actor's machine.

    Args:
        *args: of `replay_buffer_cls`. Parts are copied to the actor; callables that make them, are called there.
        replay_buffer_cls: what to make: `ReplayBuffer` or a subclass, or what makes one; no ensemble.
        ray_init_config: what to call `ray.init` with, where this process is not connected to Ray yet.
        remote_config: options of the actor, as for `ray.remote`: `num_cpus`, `num_gpus`, `memory`, `resources`, ...
        **kwargs: of `replay_buffer_cls`. With `prefetch=k` each handle has up to `k` batches on their way while the
            last one is learned from, in iteration and `sample`: it asks for half of them, at most 8, in one call. Large
            batches of one call share their memory. What is on its way to a handle that is dropped, or whose process
            dies, was drawn and is lost: with `QueueSampler` these rows reach nobody. Without `generator=` the buffer
            gets one, with a seed from torch's global generator here.

    Raises:
        MissingExtraError: if Ray is not installed.
        OptionError: if options exclude each other, or no `ReplayBuffer` is made.

    Example:
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
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_restarts(remote_config)
        depth = check_prefetch(kwargs.pop("prefetch", None), kwargs.get("batch_size"))
        seed = int(torch.randint(2**62, (), device="cpu")) if check_generator(kwargs.get("generator")) is None else None
        start(ray_init_config)
        self._connect(spawn(Host, remote_config, Recipe(replay_buffer_cls, args, kwargs, seed)))
        self._depth = depth
        self._about = first_answer(self._actor, _WHAT)

    def _connect(self, actor: Any) -> None:
        self._actor = actor
        self._write = actor.wait.options(concurrency_group="write")
        self._read = actor.wait.options(concurrency_group="read")
        self._update = actor.call.options(concurrency_group="update")
        self._supply = Supply()

    def _begin(self, *, epoch: bool = False) -> Stream:
        return Stream(self._actor, self._depth, epoch=epoch, what=_WHAT, limit_s=self._about["limit_s"])

    def __getstate__(self) -> dict[str, Any]:
        """A pickled handle leads to the same buffer; batches on their way stay with this one."""
        return {"actor": self._actor, "depth": self._depth, "about": self._about}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect."""
        self._depth, self._about = state["depth"], state["about"]
        self._connect(state["actor"])

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the buffer that neither writes nor samples."""
        return exchange(self._actor.call, _WHAT, name, *args, **kwargs)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def actor(self) -> Any:
        """The actor's handle."""
        return self._actor

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(buffer, *args)` in the actor and return what it returns.

        This reaches all that stays there: `rb.apply(lambda rb: setattr(rb.sampler, "beta", 0.7))`.
        """
        return answer(self._actor.apply.remote(function, *map(Parcel, args)), _WHAT)

    storage, sampler, writer, transform, sample_unit = Kept(), Kept(), Kept(), Kept(), Kept()
    """Parts stay in the actor, see `apply`: to read one here raises `UsageError`."""

    @property
    def batch_size(self) -> int | None:
        """Rows that `sample()` gives; None if the constructor was given none."""
        found: int | None = self._about["batch_size"]
        return found

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The limiter; None if the constructor was given none. Its waits are in the actor."""
        found: RateLimiter | None = self._ask("rate_limiter")
        return found

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Field that holds priorities; see `TensorDictReplayBuffer`. To set it, sets it in the actor.

        Raises:
            UsageError: if the buffer is no `TensorDictReplayBuffer`.
        """
        need_tensordicts(self._about, "priority_key")
        found: str | tuple[str, ...] = self._ask("priority_key")
        return found

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        need_tensordicts(self._about, "priority_key")
        self.apply(lambda buffer: setattr(buffer, "priority_key", key))

    @property
    def write_count(self) -> int:
        """Rows written since the buffer was made or emptied."""
        return int(self._ask("write_count"))

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which `extend` grows the buffer."""
        return int(self._ask("dim_extend"))

    @property
    def episodes(self) -> Episodes | None:
        """Where episodes end; see `ReplayBuffer.episodes`."""
        found: Episodes | None = self._ask("episodes")
        return found

    def stats(self) -> BufferStats:
        """Count rows, draws, ages and waits. Cost: O(rows), for the ages."""
        found: BufferStats = self._ask("stats")
        return found

    def check(self) -> None:
        """Raise what the storage's device has found wrong; see `ReplayBuffer.check`."""
        self._ask("check")

    def __len__(self) -> int:
        """Rows present."""
        return int(self._ask("__len__"))

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return len(self) > 0

    def __repr__(self) -> str:
        """The buffer's parts and options."""
        return f"RayReplayBuffer({self._ask('__repr__')}, prefetch={self._depth})"

    # -- writing ------------------------------------------------------------------------------------------------------

    def _put(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Write rows, which may wait for readers."""
        return exchange_in_turns(self._write, _WHAT, self._about["limit_s"], name, *args, **kwargs)

    def _edit(self, name: str, *args: Any) -> Any:
        """Call a method that never waits for readers or writers."""
        return exchange(self._update, _WHAT, name, *args)

    def add(self, data: Any, *, timeout_s: float | None = None) -> Any:
        """Add one row; see `ReplayBuffer.add`."""
        return self._put("add", data, timeout_s=timeout_s)

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows, in order; see `ReplayBuffer.extend`. When it returns, they are there. Iterators are read here."""
        index: Tensor = self._put("extend", replayable(data), update_priority=update_priority, timeout_s=timeout_s)
        return index

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Give rows new priorities; see `ReplayBuffer.update_priority`."""
        self._edit("update_priority", index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that it has; see `TensorDictReplayBuffer`.

        Raises:
            UsageError: if the buffer is no `TensorDictReplayBuffer`.
        """
        need_tensordicts(self._about, "update_tensordict_priority()")
        self._edit("update_tensordict_priority", data)

    def empty(self) -> None:
        """Forget all rows and start at slot 0 again; memory is kept."""
        self._drop()
        self._edit("empty")

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows that are present; see `ReplayBuffer`."""
        self._edit("__setitem__", index, data)

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> RayReplayBuffer:
        """Write one stored field at an index, in place. Returns the handle."""
        self._edit("set_at_", key, value, index)
        return self

    def set_(self, key: str | tuple[str, ...], value: Any) -> RayReplayBuffer:
        """Write one stored field of all rows present, in place. Returns the handle."""
        self._edit("set_", key, value)
        return self

    def update_(self, data: Any) -> RayReplayBuffer:
        """Write the stored fields that `data` has, for all rows present. Returns the handle."""
        self._edit("update_", data)
        return self

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Do `rb[:end] = data`."""
        self._edit("write_all", data, end)

    def set_sampler(self, sampler: Any) -> Any:
        """Exchange the sampler; return a copy of the previous one."""
        self._drop()
        found = self._ask("set_sampler", sampler)
        self._about = answer(self._actor.about.remote(), _WHAT)  # a queue waits, others may not
        return found

    def set_storage(self, storage: Any, collate_fn: Callable[[Any], Any] | None = None) -> Any:
        """Exchange the storage; return a copy of the previous one, with its rows."""
        self._drop()
        return self._ask("set_storage", storage, collate_fn)

    def set_writer(self, writer: Any) -> Any:
        """Exchange the writer; return a copy of the previous one."""
        return self._ask("set_writer", writer)

    def append_transform(self, transform: Any, *, invert: bool = False) -> RayReplayBuffer:
        """Add a transform at the end of the chain, in the actor. Returns the handle."""
        self._drop()
        self._ask("append_transform", transform, invert=invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> RayReplayBuffer:
        """Add a transform before position `index` of the chain, in the actor. Returns the handle."""
        self._drop()
        self._ask("insert_transform", index, transform, invert=invert)
        return self

    def read_episodes(self) -> None:
        """Read where episodes end off the stored rows once more."""
        self._drop()
        self._ask("read_episodes")

    # -- reading ------------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        include_info: bool | None = None,  # noqa: FBT001
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`.

        With prefetch a batch was drawn up to `k` batches ago, in order. The info has no key `stale` then: rows that
        were replaced since keep new priorities off by their stamps. Waits for writers then last as the limiter says;
        threads that share the handle take turns. `include_info` has no effect on a `TensorDictReplayBuffer`.

        Raises:
            UsageError: for `max_age` or `timeout_s` with prefetch: batches on their way were asked for without; for
                `include_info` if the buffer is no `TensorDictReplayBuffer`.
        """
        if include_info is not None:
            need_tensordicts(self._about, "sample(include_info=...)")
        size = check_size(batch_size, self.batch_size, fixed=bool(self._depth))
        if not self._depth:
            asked = {name: x for name, x in (("max_age", max_age), ("timeout_s", timeout_s)) if x is not None}
            return exchange_in_turns(self._read, _WHAT, self._about["limit_s"], "sample", size, return_info, **asked)
        if max_age is not None or timeout_s is not None:
            msg = "max_age and timeout_s do not reach batches that were asked for earlier: leave prefetch out"
            raise UsageError(msg)
        batch, info = self._supply.next(self._begin)
        return (batch, info) if return_info else batch

    def _drop(self) -> None:
        """Forget batches on their way; when this returns, no more are drawn for them."""
        leaving = self._supply.drop()
        if leaving is not None:
            answer(leaving, _WHAT)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches: without end, or over exactly one new epoch for sampling without replacement.

        With prefetch up to `k` batches are on their way while one is learned from, in the order of their draws; an
        error comes after the batches that were drawn before it. Those of a pass are dropped when it is left early;
        others are kept for the next call.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        if self.batch_size is None:
            msg = "Cannot iterate over the replay buffer: batch_size was not specified when it was made"
            raise UsageError(msg)
        if not answer(self._actor.about.remote(), _WHAT)["epochal"]:
            while True:
                yield self.sample()
        stream = self._begin(epoch=True)
        try:
            yield from stream
        finally:
            stream.close()

    def __getitem__(self, index: Any) -> Any:
        """Read rows that are present; see `ReplayBuffer`. Always a copy: edits go through the handle."""
        return self._edit("__getitem__", index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return `rb[:end]`: the rows in storage order. Copy."""
        return self[:end]

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; see `ReplayBuffer.state_dict`."""
        found: dict[str, Any] = self._ask("state_dict")
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, of this or of a local buffer."""
        self._drop()
        self._ask("load_state_dict", state)

    def dumps(self, path: str | Path, *, incremental: bool = False) -> None:
        """Save the whole state to a directory of the actor's machine; a local buffer can load it as well."""
        self._ask("dumps", str(Path(path).absolute()), incremental=incremental)

    def loads(self, path: str | Path, *, verify: bool = True, mmap: bool = False) -> None:
        """Restore what `dumps` saved, from a directory of the actor's machine."""
        self._drop()
        self._ask("loads", str(Path(path).absolute()), verify=verify, mmap=mmap)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert the rows when `dumps` saves them, in the actor."""
        self._ask("register_save_hook", hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert rows back when `loads` reads them, in the actor."""
        self._ask("register_load_hook", hook)

    def close(self) -> None:
        """End the actor, and the rows with it, for all handles: their calls raise `LostBufferError` from now on."""
        module = ray()
        if not module.is_initialized():
            return  # all actors are gone
        module.wait([self._actor.end.options(concurrency_group="update").remote()], timeout=_END_S)
        module.kill(self._actor)
