"""A CUDA stream for prefetched batches, so that their copies to the device overlap with the learner's work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.kinds import is_tensor_collection
from ostinato.core.rows import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["CopyStream"]


@final
class CopyStream:
    """Runs work on a stream of its own, and hands the result over to the stream of whoever takes it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], Any]) -> tuple[Any, torch.cuda.Event]:
        """Return what `work` makes, and the event after its last copy."""
        with torch.cuda.stream(self._stream):
            made = work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return made, event

    def take(self, batch: Any, event: torch.cuda.Event) -> None:
        """Let the caller's stream wait for the copies; keep the batch's memory until that stream is done."""
        current = torch.cuda.current_stream()
        current.wait_event(event)

        def keep(leaf: Any) -> Any:
            tensors = leaf.values(True, True) if is_tensor_collection(leaf) else [leaf]  # noqa: FBT003
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(current)
            return leaf

        map_leaves(batch, keep)
