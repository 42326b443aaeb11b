"""A buffer on one worker of `torch.distributed.rpc`, driven from the others through its remote reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers import TensorDictReplayBuffer
from ostinato.buffers.options import own
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["RemoteTensorDictReplayBuffer"]


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose methods also take its remote reference where others take the buffer itself.

    Made on one worker, `rref = rpc.remote(owner, RemoteTensorDictReplayBuffer, kwargs={...})`, and driven from any in
    both ways that TorchRL's class has: `rref.rpc_sync().extend(rows)`, or
    `rpc.rpc_sync(owner, RemoteTensorDictReplayBuffer.extend, args=(rref, rows))`. A call runs on the owner, in one of
    its RPC threads; those that write and those that sample may meet, as threads of one process do. Rows travel
    by RPC's own serialization, as dense tensors; errors arrive as RPC gives them, as a built-in one with the name and
    the text of ours. A subclass of `TensorDictReplayBuffer` because TorchRL's is, and its users subclass it in turn.

    A call that waits (`rate_limiter`) occupies an RPC thread of the owner: give the backend more threads than there are
    callers, and keep `timeout_s` below the timeout of RPC, which else ends the call without saying who waited for what.

    Args:
        *args: none; named alone so that positional ones are refused in words.
        **kwargs: see `TensorDictReplayBuffer`; parts that do not pickle can be made on the owner: `storage=` and others
            may be callables.

    Raises:
        OptionError: for positional arguments.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage
        >>> from ostinato.distributed.rpc import RemoteTensorDictReplayBuffer
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
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`."""
        return TensorDictReplayBuffer.sample(
            _here(self), batch_size, return_info, include_info, max_age=max_age, timeout_s=timeout_s
        )

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Give rows new priorities; see `ReplayBuffer.update_priority`."""
        TensorDictReplayBuffer.update_priority(_here(self), index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample their new priorities; see `TensorDictReplayBuffer.update_tensordict_priority`."""
        TensorDictReplayBuffer.update_tensordict_priority(_here(self), data)

    def empty(self) -> None:
        """Forget all rows; see `ReplayBuffer.empty`."""
        TensorDictReplayBuffer.empty(_here(self))

    def __len__(self) -> int:
        """Rows present."""
        return TensorDictReplayBuffer.__len__(_here(self))

    def __getitem__(self, index: Any) -> Any:
        """Read rows; see `ReplayBuffer.__getitem__`. Always a copy: a view of the storage does not travel."""
        here = _here(self)
        with here._engine.lock:  # noqa: SLF001 (its own; no writer may change rows while they are copied)
            return own(TensorDictReplayBuffer.__getitem__(here, index))

    def dumps(self, path: str | Path, *, incremental: bool = False) -> None:
        """Save to a directory of the owner; see `ReplayBuffer.dumps`."""
        TensorDictReplayBuffer.dumps(_here(self), path, incremental=incremental)

    def loads(self, path: str | Path, *, verify: bool = True, mmap: bool = False) -> None:
        """Restore what `dumps` saved; see `ReplayBuffer.loads`."""
        TensorDictReplayBuffer.loads(_here(self), path, verify=verify, mmap=mmap)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, by copy; see `ReplayBuffer.state_dict`."""
        return TensorDictReplayBuffer.state_dict(_here(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `ReplayBuffer.load_state_dict`."""
        TensorDictReplayBuffer.load_state_dict(_here(self), state)


def _here(buffer: Any) -> RemoteTensorDictReplayBuffer:
    """Return the buffer itself where its owner was handed a reference to it."""
    return buffer if isinstance(buffer, RemoteTensorDictReplayBuffer) else buffer.local_value()
