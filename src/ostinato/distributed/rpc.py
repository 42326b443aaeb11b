"""`RemoteTensorDictReplayBuffer`: a buffer on one worker of `torch.distributed.rpc`, used from the others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ostinato.buffers import TensorDictReplayBuffer
from ostinato.buffers.options import own
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["RemoteTensorDictReplayBuffer"]

P = ParamSpec("P")
R = TypeVar("R")


def _on_owner(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of `TensorDictReplayBuffer` that accepts a reference to the buffer.

    RPC pickles it by its name, as a method of `RemoteTensorDictReplayBuffer`.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        here = _here(self)
        result = method(here, *args, **kwargs)
        return self if result is here else result  # a reference is sent, not the buffer

    call.__module__, call.__qualname__ = __name__, f"RemoteTensorDictReplayBuffer.{method.__name__}"
    return call


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose methods also accept a remote reference in place of `self`.

    Create it on one worker with `rref = rpc.remote(owner, RemoteTensorDictReplayBuffer, kwargs={...})` and use it from
    any worker, in both ways that TorchRL's class supports: `rref.rpc_sync().extend(rows)`, or
    `rpc.rpc_sync(owner, RemoteTensorDictReplayBuffer.extend, args=(rref, rows))`. A call runs on the owner, in one of
    its RPC threads, so that calls may run concurrently. Rows are sent as dense tensors. RPC raises errors as built-in
    exceptions whose text holds the name and the message of the original one.

    A call that waits (`rate_limiter`) occupies an RPC thread of the owner: give the backend more threads than there are
    callers, and keep `timeout_s` below the timeout of RPC, which otherwise ends the call without a useful message.

    Args:
        *args: Not supported; TorchRL's class takes keyword arguments only, too.
        **kwargs: See `TensorDictReplayBuffer`. Parts that cannot be pickled can be made on the owner: `storage` and
            other parts may be callables.

    Raises:
        OptionError: There are positional arguments.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, RemoteTensorDictReplayBuffer
        >>> rb = RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> rb.extend(TensorDict({"obs": torch.zeros(4, 3)}, [4]))
        tensor([0, 1, 2, 3])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args:
            msg = f"RemoteTensorDictReplayBuffer takes named arguments alone, got {len(args)} positional one(s)"
            raise OptionError(msg)
        super().__init__(**kwargs)

    def add(self, data: Any, *, timeout_s: float | None = None) -> Any:
        """Add one row; see `ReplayBuffer.add`."""
        return TensorDictReplayBuffer.add(_here(self), data, timeout_s=timeout_s)

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows; see `ReplayBuffer.extend`."""
        return TensorDictReplayBuffer.extend(_here(self), data, update_priority=update_priority, timeout_s=timeout_s)

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

        Raises:
            OptionError: if `out` is given: batches come from another process.
        """
        if out is not None:
            msg = "out= is not available for a remote buffer, whose batches come from another process: leave it out"
            raise OptionError(msg)
        return TensorDictReplayBuffer.sample(
            _here(self),
            batch_size,
            return_info,
            include_info,
            max_age=max_age,
            timeout_s=timeout_s,
            min_batch=min_batch,
        )

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Set priorities of rows; see `ReplayBuffer.update_priority`."""
        TensorDictReplayBuffer.update_priority(_here(self), index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of the rows of a sample; see `TensorDictReplayBuffer.update_tensordict_priority`."""
        TensorDictReplayBuffer.update_tensordict_priority(_here(self), data)

    def empty(self, empty_write_count: bool = True) -> None:  # noqa: FBT001, FBT002
        """Remove all rows; see `ReplayBuffer.empty`."""
        TensorDictReplayBuffer.empty(_here(self), empty_write_count)

    def __len__(self) -> int:
        """Number of rows present."""
        return TensorDictReplayBuffer.__len__(_here(self))

    def __getitem__(self, index: Any) -> Any:
        """Read rows; see `ReplayBuffer.__getitem__`. Always a copy, because views cannot be sent."""
        here = _here(self)
        with here._engine.lock:  # noqa: SLF001 (its own lock; no row may change while it is copied)
            return own(TensorDictReplayBuffer.__getitem__(here, index))

    __setitem__ = _on_owner(TensorDictReplayBuffer.__setitem__)
    append_transform = _on_owner(TensorDictReplayBuffer.append_transform)
    can_insert = _on_owner(TensorDictReplayBuffer.can_insert)
    can_sample = _on_owner(TensorDictReplayBuffer.can_sample)
    check = _on_owner(TensorDictReplayBuffer.check)
    close = _on_owner(TensorDictReplayBuffer.close)
    dump = dumps = save = _on_owner(TensorDictReplayBuffer.dumps)
    insert_transform = _on_owner(TensorDictReplayBuffer.insert_transform)
    load_state_dict = _on_owner(TensorDictReplayBuffer.load_state_dict)
    load = loads = _on_owner(TensorDictReplayBuffer.loads)
    mark_update = _on_owner(TensorDictReplayBuffer.mark_update)
    observe = _on_owner(TensorDictReplayBuffer.observe)
    next = _on_owner(TensorDictReplayBuffer.next)
    query = _on_owner(TensorDictReplayBuffer.query)
    register_load_hook = _on_owner(TensorDictReplayBuffer.register_load_hook)
    register_save_hook = _on_owner(TensorDictReplayBuffer.register_save_hook)
    set_ = _on_owner(TensorDictReplayBuffer.set_)
    set_at_ = _on_owner(TensorDictReplayBuffer.set_at_)
    set_rng = _on_owner(TensorDictReplayBuffer.set_rng)
    shutdown = _on_owner(TensorDictReplayBuffer.shutdown)
    state_dict = _on_owner(TensorDictReplayBuffer.state_dict)
    stats = _on_owner(TensorDictReplayBuffer.stats)
    synchronize = _on_owner(TensorDictReplayBuffer.synchronize)
    update_ = _on_owner(TensorDictReplayBuffer.update_)
    update_if_present = _on_owner(TensorDictReplayBuffer.update_if_present)
    write_all = _on_owner(TensorDictReplayBuffer.write_all)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return `rb[:end]`: the rows in storage order. Copy."""
        return _here(self)[:end]


def _here(buffer: Any) -> RemoteTensorDictReplayBuffer:
    """Return the buffer of a reference to it, on its owner."""
    return buffer if isinstance(buffer, RemoteTensorDictReplayBuffer) else buffer.local_value()
