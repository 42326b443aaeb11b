"""One pass over a buffer, batch by batch, for those who cannot wait in the middle of an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ostinato.buffers.gate import Ask
from ostinato.errors import EpochEndError

if TYPE_CHECKING:
    from ostinato.buffers.replay import ReplayBuffer

__all__ = ["END", "Pass"]

END = object()
"""What comes after the last batch."""


@final
class Pass:
    """The batches of one iteration over a buffer: one new epoch, without end for sampling with replacement.

    A generator is over once it has raised; here a call that waited in vain can be made again. Not thread-safe.

    Args:
        buffer: the buffer; it needs a batch size.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._begun = self._over = False

    def next(self, timeout_s: float | None = None) -> Any:
        """Return the next batch, `END` after the last one.

        Raises:
            WaitTimeoutError: if writers did not come in time; nothing is drawn.
        """
        buffer = self._buffer
        if self._over:
            return END
        if not buffer.sampler.epochal:
            return buffer.sample(timeout_s=timeout_s)
        feed, size = buffer._feed, buffer.batch_size  # noqa: SLF001 (one room)
        if not self._begun:
            feed.restart()
            self._begun = True
        elif feed.over:
            self._over = True
            return END
        dress = buffer._dress  # noqa: SLF001
        try:
            batch = feed.next(size or 0, dress, within_epoch=True, ask=Ask(timeout_s))
        except EpochEndError:
            self._over = True
            return END
        self._over = batch.ticket.last
        return batch.data
