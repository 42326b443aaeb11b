"""How a buffer is sampled: `sample`, iteration, and the batches of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.options import check_size, positive
from ostinato.buffers.out import fill, fill_direct
from ostinato.buffers.pipeline import END, Batch, Pass
from ostinato.buffers.policy_versions import check_age
from ostinato.buffers.rate_limit import Ask, check_min_batch, check_wait
from ostinato.buffers.saving import Saving
from ostinato.buffers.updates import row_names
from ostinato.core.index import as_index
from ostinato.core.kinds import with_fields
from ostinato.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.pipeline import Finish
    from ostinato.core.records import Draw
    from ostinato.core.rows import Schema

_CPU = torch.device("cpu")
_PLAIN = Ask()
INFO = ("index", "priority_weight", "index_generation")
"""Names of what a direct call returns after the batch. A `TensorDictReplayBuffer` adds them to its samples as keys, and
drops them from what is written, so that samples may be written back."""


class Sampling(Saving):
    """The part of `ReplayBuffer` that draws batches."""

    _pass: Pass | None = None

    def _find_direct(self) -> None:
        """Look for direct calls after the parts have changed."""

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
        min_batch: int | None = None,
        out: Any = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: rows; None takes the constructor's. With prefetch it must be the constructor's.
            return_info: return `(batch, info)`; `info["index"]` holds the slots, int64 `[B]` (with `ndim=2` a pair);
                prioritized samplers add `priority_weight` `[B]` and the generations `index_generation`, int64 `[B]`.
            max_age: draw uniformly among the rows whose version (`version_key`) is at least the newest one present less
                this; None takes all rows. Cost: O(B) while versions do not decrease in the order of writing, else
                O(B log runs + runs) for runs of equal versions.
            timeout_s: longest wait for writers, in seconds, where there is a `rate_limiter`; None is its own.
            min_batch: take a smaller batch when the time is up: as many rows as may be drawn then, at least these. So
                where no call waits and draws use rows up, but too few are left. Not with prefetch or `out`.
            out: an earlier batch, or tensors of its form: the rows are written to its tensors, and `out` is returned.
                Uniform and prioritized draws of rows on the CPU then allocate no memory for them. With other samplers,
                units, transforms or prefetch the batch is made first, and copied.

        Returns:
            Rows as they were put in, `[B, *shape]`, transformed. Copy.

        Raises:
            UsageError: if there is no batch size.
            EmptyBufferError: if there are no rows.
            OptionError: if `max_age` is not available with these parts, or no call ever waits.
            WaitTimeoutError: if writers did not come in time, for not even `min_batch` rows; nothing is drawn.
            KindError: if `out` holds other things than tensors.
            SchemaError: if `out` differs from a batch in its fields, or in their dtypes, shapes or devices, or shares
                memory with the storage; nothing is written.
        """
        pipeline, size = self._pipeline, self._batch_size
        if batch_size is not None or size is None:
            size = check_size(batch_size, size, fixed=bool(pipeline.prefetch.depth))
        if max_age is None and timeout_s is None and min_batch is None:
            direct = self._engine.direct
            if direct is not None and return_info and direct.has_more_info:
                direct = None
            plain = out is None or not self._transform.steps
            if direct is not None and plain and not is_dynamo_compiling():
                schema = self._engine.store.source.storage.schema  # before the draw: then it is that of the batch
                found = direct.sample(size) if out is None else self._filled(direct, schema, out, size)
                if found is not None:
                    return self._presented(found, schema if out is None else None, size, return_info=return_info)
            ask = _PLAIN
        else:
            ask = self._asked(size, max_age, timeout_s, min_batch, out)
        finish = self._finish if out is None or pipeline.prefetch.depth else self._finish_in(out)
        batch = pipeline.next(size, finish, ask=ask)
        if out is not None and pipeline.prefetch.depth:
            batch = batch._replace(data=fill(out, batch.data, self._engine.storage))
        if not self._engine.direct_tried:
            self._find_direct()
        return (batch.data, self._info(batch)) if return_info else batch.data

    def _finish_in(self, out: Any) -> Finish:
        """Return what finishes a batch in the tensors of `out`."""
        storage = self._engine.storage
        return lambda data, draw, notes: fill(out, self._finish(data, draw, notes), storage)

    def _filled(self, direct: Direct, schema: Schema | None, out: Any, size: int) -> tuple[Any, ...] | None:
        return None if schema is None else fill_direct(direct, schema, out, size)

    def _presented(self, found: tuple[Any, ...], schema: Schema | None, size: int, *, return_info: bool) -> Any:
        """Return a batch of a direct call as rows of the schema were put in, with its info if that is asked for."""
        batch = found[0]
        if schema is not None and (schema.nested or schema.kind == "tensordict"):
            tensors, stored = list(batch.values()), len(schema.leaves)
            batch = schema.build(tensors[:stored], (size,), _CPU)
            if len(tensors) > stored:  # fields that a unit adds
                names = list(found[0])[stored:]
                with_fields(batch, {(name,): tensors[stored + i] for i, name in enumerate(names)})
        if self._transform.steps:
            try:
                batch = self._transform.forward(batch)
            except BaseException:
                self._engine.counts.drawn -= size  # the batch did not reach the caller
                raise
        return (batch, dict(zip(INFO, found[1:], strict=False))) if return_info else batch

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would return a batch at once: there are rows to draw, and the call would not wait.

        Never waits, and changes nothing. A snapshot: other threads may write and draw before the next call.

        Args:
            batch_size: rows; None takes the constructor's.

        Raises:
            UsageError: if there is no batch size.
        """
        size, pipeline = check_size(batch_size, self._batch_size, fixed=False), self._pipeline
        if pipeline.ended or (pipeline.prefetch.depth and size != self._batch_size):
            return False
        return pipeline.prefetch.filled or self._engine.can_draw(size)

    def can_insert(self, rows: int = 1) -> bool:
        """Whether a write of so many rows would go ahead at once: the rate limiter, or a queue, lets it.

        Always True without one, unless the writer takes no rows at all. The rows themselves are not checked. Never
        waits, and changes nothing. A snapshot: other threads may write and draw before the next call.

        Args:
            rows: rows of one call of `extend`, as its limiter counts them.

        Raises:
            OptionError: if `rows` is below 1.
        """
        return self._engine.can_write(positive("rows", rows))

    def next(self) -> Any:
        """Return the next batch of an iteration, None at its end; the call after that begins another one.

        For callers without a `for` loop. Not thread-safe.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        self._require_batch_size()
        if self._pass is None:
            self._pass = Pass()
        batch = self._pass.next(self)
        if batch is END:
            self._pass = None
            return None
        return batch

    def _asked(self, size: int, max_age: int | None, timeout_s: float | None, min_batch: int | None, out: Any) -> Ask:
        """Check the options of a draw of `size` rows and return them."""
        engine, ahead = self._engine, bool(self._pipeline.prefetch.depth)
        if timeout_s is not None:
            check_wait(timeout_s, waits=bool(engine.limits))
        age = None if max_age is None else check_age(engine.store.versions, engine.sampler, max_age, prefetch=ahead)
        if min_batch is not None:
            whole = None if out is None else "out, which takes whole batches"
            whole = "prefetch, whose batches were drawn before" if ahead else whole
            partial = bool(engine.rules)
            check_min_batch(min_batch, size, partial=partial, whole=whole)
            min_batch = int(min_batch)
        return Ask(timeout_s, age, min_rows=min_batch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches: without end, or over exactly one new epoch for sampling without replacement.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        self._require_batch_size()
        if not self._engine.sampler.epochal:
            while True:
                yield self.sample()
        epoch = Pass()
        while (batch := epoch.next(self)) is not END:
            yield batch

    def _require_batch_size(self) -> None:
        if self._batch_size is None:
            msg = (
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of the replay "
                "buffer: pass it to the constructor, or call sample(batch_size)"
            )
            raise UsageError(msg)

    def _finish(self, data: Any, draw: Draw, notes: dict[Any, Tensor]) -> Any:  # noqa: ARG002
        """Transform; subclasses add keys."""
        return self._transform.forward(data) if self._transform.steps else data

    def _index(self, slots: Tensor) -> Any:
        return as_index(slots, self._engine.storage)

    def _flat_index(self, slots: Tensor) -> Tensor:
        """Return slots as one tensor, int64 `[B]`, with `ndim=2` `[B, 2]`."""
        index = self._index(slots)
        return torch.stack(index, -1) if isinstance(index, tuple) else index

    def _info(self, batch: Batch) -> dict[str, Any]:
        return row_names(self._engine, batch.draw, {**batch.draw.record_info, **batch.notes}, self._index)
