"""The state of a shared buffer: a copy of its whole rows, in the form that private buffers save and load too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.checkpoint import FORMAT, own_tensors, read_generator, saved_rows, with_state
from ostinato.buffers.priorities import as_sampler
from ostinato.buffers.saving import save_state
from ostinato.buffers.soundness import check_counts, readable
from ostinato.errors import CheckpointError, OptionError, UsageError
from ostinato.samplers import PrioritizedSampler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ostinato.buffers.records import Ticket
    from ostinato.buffers.shared import SharedEngine
    from ostinato.transforms import Compose

__all__ = ["load_shared_state", "save_shared", "shared_state"]


def save_shared(path: str | Path, engine: SharedEngine, state: dict[str, Any], *, incremental: bool) -> None:
    """Write the state of a shared buffer.

    Raises:
        CheckpointError: if no load would take the state; an older checkpoint stays.
        OptionError: if only changes are to be written: which rows have changed is known to all processes together.
    """
    if incremental:
        msg = "incremental=True is not for shared buffers: save the whole, or save a private buffer"
        raise OptionError(msg)
    rows = saved_rows(state)
    with readable("a shared replay buffer"):
        check_counts(state, rows)
        engine.sampler.check_state(state["sampler"]["state"], rows)
    save_state(path, state, FORMAT)


def shared_state(
    engine: SharedEngine, queued: Sequence[Ticket], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state, copied at one moment, while nobody reserves or commits.

    Rows that are being written are not part of it. Where there are such, or a writer has died, the rows are saved from
    the oldest to the newest; else slot by slot. Queued draws are forgotten: the generator is saved as before them.
    """
    generator = None if engine.generator is None else engine.generator.get_state()
    drawn = [*queued, *engine.pending]
    state: dict[str, Any] = {
        "generator": generator if not drawn or drawn[0].rng is None else drawn[0].rng,
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "unit": None,
        "pending": [],
    }
    storage = engine.shared_storage
    if not storage.laid_out:
        slots = torch.empty(0, dtype=torch.int64, device="cpu")
        return {**state, **_rows(engine, slots, 0, slots, 0)}
    ring = storage.ring
    with ring.lock:
        written, holes, rows, _ = ring.now()
        slots, cursor = torch.arange(rows, device="cpu"), ring.cursor
        if holes:
            slots = ring.present()
            slots = slots[ring.of(slots).argsort()]
            cursor = slots.shape[0] % ring.capacity
        return {**state, **_rows(engine, slots, cursor, ring.of(slots), written)}


def _rows(engine: SharedEngine, slots: Tensor, cursor: int, stamps: Tensor, written: int) -> dict[str, Any]:
    """Return what a state says of rows, stamps and counts."""
    sampler = engine.sampler.state_dict()
    if engine.sampler.prioritized:
        sampler |= {name: sampler[name][slots] for name in ("priorities", "values")}
    storage = engine.shared_storage.snapshot(slots, cursor)
    return {
        "storage": {"class": "LazyTensorStorage", "state": storage},
        "sampler": {"class": type(engine.sampler).__name__, "state": sampler},
        "writer": {"class": type(engine.writer).__name__, "state": {"cursor": cursor}},
        "stamps": {"written": written, "base": 0, "cursor": cursor, "array": stamps},
        "rows_written": engine.rows_written,
        "rows_since_empty": engine.rows_since_empty,
        "rows_drawn": engine.rows_drawn,
    }


def load_shared_state(engine: SharedEngine, state: dict[str, Any], transform: Compose) -> None:
    """Replace the rows of all processes by those of a state; what does not fit is refused before anything changes.

    Raises:
        CheckpointError: naming what differs.
        UsageError: while another process is writing.
    """
    try:
        data, ranks = _checked(engine, state)
        generator = read_generator(state["generator"], torch.device("cpu"))
        counts = [int(state[name]) for name in ("rows_written", "rows_since_empty", "rows_drawn")]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        msg = f"this is not the state of a replay buffer ({error!r})"
        raise CheckpointError(msg) from error
    before = own_tensors(transform.state_dict())
    try:
        transform.load_state_dict(state["transforms"])
        _replace_rows(engine, state, data, ranks, counts)
    except BaseException:
        transform.load_state_dict(before)
        raise
    engine.pending.clear()
    if generator is not None:
        engine.generator = with_state(engine.generator, generator)


def _replace_rows(
    engine: SharedEngine, state: dict[str, Any], data: Any, ranks: Tensor | None, counts: list[int]
) -> None:
    """Replace the rows of all processes."""
    storage = engine.shared_storage
    if data is None:
        storage.clear()
    else:
        payload, rows = storage.admit(data, 1)
        engine.begin_sharing()
        ring = storage.ring
        with ring.lock:
            if ring.writers:
                msg = f"{ring.writers} writers are at work: load into a shared buffer while nobody writes to it"
                raise UsageError(msg)
            saved = state["storage"]["state"]
            full = rows == ring.capacity == saved["capacity"]
            ring.clear(int(saved["cursor"]) % ring.capacity if full else 0)
            serial, run = ring.reserve(rows)
            storage.set(run, payload)
            if ranks is not None:
                as_sampler(engine.sampler).receive(run, ranks, engine.view())
                ring.largest = float(state["sampler"]["state"]["largest"])
            ring.commit(serial)
            ring.set_counts(*counts)
    if isinstance(engine.sampler, PrioritizedSampler):
        engine.sampler.beta = state["sampler"]["state"]["beta"]


def _checked(engine: SharedEngine, state: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """Return the rows of a state, nested, in the order in which they are to be written, and their priorities."""
    saved, storage = state["storage"]["state"], engine.shared_storage
    for name in ("sampler", "writer"):
        theirs, mine = state[name]["class"], type(getattr(engine, name)).__name__
        if theirs != mine:
            msg = f"the checkpoint's {name} is a {theirs}, this buffer's a {mine}: make the buffer with matching parts"
            raise CheckpointError(msg)
    if state["pending"]:
        msg = "the checkpoint holds queued draws, which a shared buffer cannot take: save it without prefetch"
        raise CheckpointError(msg)
    rows = int(saved["rows"]) if "rows" in saved else 0
    own = state["sampler"]["state"]
    if isinstance(engine.sampler, PrioritizedSampler):
        engine.sampler.check_state(own, rows)
        if (own["alpha"], own["eps"]) != (engine.sampler.alpha, engine.sampler.eps):
            msg = (
                f"the checkpoint has alpha={own['alpha']} and eps={own['eps']}, this shared buffer has "
                f"alpha={engine.sampler.alpha} and eps={engine.sampler.eps}, which all its processes keep: make it "
                "with those of the checkpoint"
            )
            raise CheckpointError(msg)
    full = rows == saved["capacity"]  # else rows lie by age from slot 0 on
    order = (torch.arange(rows, device="cpu") + (int(saved["cursor"]) if full else 0)) % max(rows, 1)
    data = storage.rows_of(saved, order)
    return data, own["priorities"][order] if engine.sampler.prioritized and rows else None
