"""Views: further samplers over the rows of a buffer, each with a handle of its own; see `ReplayBuffer.view`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers.options import (
    check_drop_last,
    check_episodes,
    check_generator,
    check_prefetch,
    check_same_device,
    check_view_parts,
    part,
    positive,
)
from ostinato.buffers.part_owners import check_free, record_owner
from ostinato.buffers.pipeline import Pipeline
from ostinato.buffers.reader import Reader
from ostinato.errors import OptionError
from ostinato.samplers import RandomSampler, Sampler
from ostinato.transforms import Compose
from ostinato.units import chain_units

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.buffers.store import Store
    from ostinato.core.episodes.tracker import Episodes
    from ostinato.units import SampleUnit


def check_no_views(engine: Reader) -> None:
    """Check that one sampler alone draws from rows that are to be shared between processes.

    Raises:
        OptionError: if there are views.
    """
    if not engine.own or len(engine.store.readers) > 1:
        msg = (
            "a buffer with views cannot be shared between processes, since writes of other processes are not reported "
            "to the samplers of views: drop the views first, or share a buffer of its own"
        )
        raise OptionError(msg)


def make_view(
    buffer: ReplayBuffer,
    sampler: Sampler | Callable[[], Sampler] | None,
    batch_size: int | None,
    sample_unit: SampleUnit | Sequence[SampleUnit] | None,
    episodes: Episodes | None,
    transform: Any,
    prefetch: int | None,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """Return the attributes of a handle for a view, which replace those of its buffer; see `ReplayBuffer.view`.

    Raises:
        OptionError: if parts do not go together, or the buffer is shared between processes.
    """
    own = buffer._engine  # noqa: SLF001 (one package)
    if own.storage.shared:
        msg = (
            "a buffer that processes share has one sampler, since writes of other processes are not reported to "
            "others: make the view in a buffer without shared=True"
        )
        raise OptionError(msg)
    size = buffer.batch_size if batch_size is None else positive("batch_size", batch_size)
    depth = check_prefetch(prefetch, size)
    drawing = part("sampler", sampler, Sampler, RandomSampler)
    check_drop_last(drawing, size)
    chain, generator = Compose.of(transform), check_generator(generator)
    unit, episodes = chain_units(sample_unit), check_episodes(episodes)
    store = own.store
    with store.lock:
        check_view_parts(own.sampler, drawing)
        check_free(drawing)
        _check_generator(store, generator)
        reader = Reader(store, drawing, generator, unit, own.episodes if episodes is None else episodes, own=False)
        reader.transform, reader.batch_size = chain, size
        drawing.move()
        if store.ring.rows:
            reader.begin_sampler()
        store.join(reader)  # last: what raises leaves no reader behind
        record_owner(reader, drawing)
    return {
        "_viewed": buffer,
        "_engine": reader,
        "_pipeline": Pipeline(reader, depth),
        "_transform": chain,
        "_batch_size": size,
        "_pass": None,
    }


def _check_generator(store: Store, generator: torch.Generator | None) -> None:
    """Check that draws of others do not come out of the same generator: it goes back when queued draws are dropped.

    Raises:
        OptionError: if another reader has it, or it is on another device than the rows.
    """
    if generator is None:
        return
    if any(reader.generator is generator for reader in store.readers):
        msg = "the generator belongs to the buffer, or to another view of it: give each view one of its own"
        raise OptionError(msg)
    if store.storage.laid_out:
        check_same_device(generator, store.storage)
