"""`RemoteTensorDictReplayBuffer`: a buffer on one worker of `torch.distributed.rpc`, used from the others."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from ostinato.buffers import TensorDictReplayBuffer
from ostinato.buffers.options import own
from ostinato.distributed.remote import named
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable


_C = TypeVar("_C", bound=type)


@functools.cache
def _on_owner(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that also accepts a reference to the buffer. RPC pickles it by its name."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            msg = "out= is not available for a remote buffer, whose batches come from another process: leave it out"
            raise OptionError(msg)
        here = _here(self)
        result = method(here, *args, **kwargs)
        return self if result is here else result  # a reference is sent, not the buffer

    return call


def _accept_references(cls: _C) -> _C:
    """Let the methods that a buffer has from its base accept references."""
    for name, method in inspect.getmembers(TensorDictReplayBuffer, inspect.isfunction):
        if name not in vars(cls) and (not name.startswith("_") or name in _SPECIAL):
            setattr(cls, name, _on_owner(method))
    return named(cls)


_SPECIAL = {"__len__", "__setitem__"}


@_accept_references
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

    def __getitem__(self, index: Any) -> Any:
        """Read rows; see `ReplayBuffer.__getitem__`. Always a copy, because views cannot be sent."""
        here = _here(self)
        with here._engine.lock:  # noqa: SLF001 (its own lock; no row may change while it is copied)
            return own(TensorDictReplayBuffer.__getitem__(here, index))


def _here(buffer: Any) -> RemoteTensorDictReplayBuffer:
    """Return the buffer of a reference to it, on its owner."""
    return buffer if isinstance(buffer, RemoteTensorDictReplayBuffer) else buffer.local_value()
