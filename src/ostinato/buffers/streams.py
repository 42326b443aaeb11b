"""CUDA streams of the prefetch thread: the caller's, or one beside it, so that copies overlap with learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from ostinato.core.kinds import is_tensor_collection
from ostinato.core.rows import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["CopyStream", "on_stream_of_caller"]

T = TypeVar("T")


def on_stream_of_caller(work: Callable[[T], Any]) -> Callable[[T], Any]:
    """Return `work` for another thread, to be queued on the CUDA stream that is current here.

    Streams are current in one thread only. Elsewhere the work would be queued on the default stream, and could read
    rows and slots before the caller's stream has written them.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    stream = torch.cuda.current_stream()

    def on_stream(task: T) -> Any:
        with torch.cuda.stream(stream):
            return work(task)

    return on_stream


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
