"""TensorDictReplayBuffer: rows are TensorDicts, and samples carry their index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers.replay import ReplayBuffer
from ostinato.core import kinds
from ostinato.errors import KindError
from ostinato.writers import TensorDictRoundRobinWriter, Writer

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.buffers.engine import Ticket

__all__ = ["TensorDictReplayBuffer"]

_OWN_KEYS = ("index", "priority_weight", "index_generation")
"""Keys that the buffer adds to samples; dropped from what is written, so that samples may be written back."""


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for TensorDict rows: samples carry the key `index` (int64 `[B]`; with `ndim=2` `[B, 2]`).

    A subclass of `ReplayBuffer` because TorchRL's is, and users' annotations say so. The index is not stored; the keys
    `index`, `priority_weight` and `index_generation` of written data are dropped.

    Args:
        priority_key: field that holds the priority of a row; used by prioritized samplers.
        **options: see `ReplayBuffer`; the default writer is `TensorDictRoundRobinWriter`.

    Raises:
        KindError: when other data is written.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(4, 3)}, [4]))
        >>> sorted(rb.sample().keys())
        ['index', 'obs']
    """

    def __init__(self, *, priority_key: str = "td_error", **options: Any) -> None:
        super().__init__(**options)
        self.priority_key = priority_key

    @staticmethod
    def _default_writer() -> Writer:
        return TensorDictRoundRobinWriter()

    def _accept(self, data: Any) -> Any:
        if not (
            kinds.is_tensor_collection(data) or (type(data) is list and all(map(kinds.is_tensor_collection, data)))
        ):
            msg = (
                f"TensorDictReplayBuffer takes TensorDicts (or a list of them), got {type(data).__name__}: use "
                "ReplayBuffer for other data"
            )
            raise KindError(msg)
        rows = [_without_own(row) for row in data] if type(data) is list else _without_own(data)
        return self._transform.inv(rows) if self._transform else rows

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        include_info: bool | None = None,  # noqa: ARG002, FBT001
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`. `include_info` has no effect: samples always carry their index."""
        return super().sample(batch_size, return_info)

    def _dress(self, data: Any, ticket: Ticket) -> Any:
        data = super()._dress(data, ticket)
        if kinds.is_tensor_collection(data):
            kinds.put(data, "index", self._flat_index(ticket))
        return data

    def _flat_index(self, ticket: Ticket) -> Tensor:
        import torch

        index = self._index(ticket)
        return torch.stack(index, -1) if isinstance(index, tuple) else index


def _without_own(row: Any) -> Any:
    keys = row.keys()
    own = [key for key in _OWN_KEYS if key in keys]
    return row.exclude(*own) if own else row
