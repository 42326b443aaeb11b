"""Checks of the parts of a buffer, and of what they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ostinato.core.records import Picks, as_slots
from ostinato.errors import OptionError, SlotError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.records import Run
    from ostinato.samplers import Sampler
    from ostinato.storages import Storage
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer


def check_order(writer: Writer) -> None:
    """Check that a writer keeps rows in the order of time.

    Raises:
        OptionError: naming it.
    """
    if not writer.in_order:
        msg = (
            f"{type(writer).__name__} does not keep rows in the order in which they came, so there are no episodes to "
            "draw from: use RoundRobinWriter"
        )
        raise OptionError(msg)


def check_pair(storage: Storage, writer: Writer) -> None:
    """Check that a writer can place rows of the storage's dimensions, in the order that the storage needs.

    Raises:
        OptionError: for a writer of single rows over a storage with `ndim=2`, or over one that needs ring order.
    """
    if storage.ring_only and not writer.in_order:
        raise_for_picks(writer)
    if storage.ndim > 1 and (writer.single_rows or writer.rank_path is not None):
        msg = (
            f"{type(writer).__name__} is not compatible with storages with more than one dimension, since it places "
            f"single rows: got ndim={storage.ndim}, use ndim=1"
        )
        raise OptionError(msg)


def require_tracking(writer: Writer) -> None:
    """Check that samples carry generations by which a row can be recognized later.

    Raises:
        UsageError: if they do not.
    """
    if not writer.tracks_generations:
        msg = (
            "Conditional updates are not supported without generations in samples: the writer must track slot "
            f"generations, got {writer!r}. Use RoundRobinWriter(track_generations=True), or a prioritized sampler"
        )
        raise UsageError(msg)


def raise_for_picks(writer: Writer) -> None:
    """Raise for a writer that picks slots where rows must stay in ring order.

    Raises:
        OptionError: always.
    """
    msg = (
        f"{type(writer).__name__} picks slots, but the storage (single_copy) takes rows in ring order only, where "
        "the row that follows is the next one: use RoundRobinWriter, or leave single_copy out"
    )
    raise OptionError(msg)


def check_budget_parts(storage: Storage, sampler: Sampler, writer: Writer, *, tracked: bool) -> None:
    """Check that the parts of a buffer can follow rows that leave because of a budget of bytes.

    Raises:
        OptionError: naming the part.
    """
    if not writer.in_order:
        msg = f"max_bytes removes the oldest rows, and {type(writer).__name__} keeps no order: use RoundRobinWriter"
        raise OptionError(msg)
    if sampler.counting:
        msg = (
            f"{type(sampler).__name__} counts the draws of each row and cannot be used with max_bytes: use another "
            "sampler, or leave max_bytes out"
        )
        raise OptionError(msg)
    if storage.evicts_episodes and not tracked:
        msg = (
            "evict='episodes' removes whole episodes, and this buffer does not know where they end: give it "
            "episodes=Episodes(...), a slice sampler or a sample_unit, or use evict='rows'"
        )
        raise OptionError(msg)


def raise_for_priorities(sampler: Sampler) -> None:
    """Raise for a sampler whose priorities cannot follow rows to other slots.

    Raises:
        OptionError: always.
    """
    msg = (
        f"{type(sampler).__name__} does not say how its priorities follow rows to other slots (move_state): override "
        "that method, or leave max_bytes out"
    )
    raise OptionError(msg)


def check_single(unit: SampleUnit | None, sampler: Sampler) -> None:
    """Check that a unit that makes windows of single rows has no sampler that draws slices.

    Raises:
        OptionError: naming both.
    """
    if unit is not None and unit.single and sampler.slices:
        msg = (
            f"{unit!r} makes windows of single rows, and {type(sampler).__name__} draws slices already: leave one of "
            "them out"
        )
        raise OptionError(msg)


def check_view_parts(main: Sampler, sampler: Sampler) -> None:
    """Check that rows stay for all samplers: those that use rows up have a buffer of their own.

    Args:
        main: the sampler of the buffer.
        sampler: that of a view of it.

    Raises:
        OptionError: naming the sampler that lets rows leave.
    """
    for which, part in (("buffer", main), ("view", sampler)):
        if part.counting:
            msg = (
                f"{type(part).__name__} as the sampler of the {which} uses rows up, which the other samplers of the "
                "buffer would still draw: give it a buffer of its own, without views"
            )
            raise OptionError(msg)


def checked_run(run: Run, given: int) -> Run:
    """Return a writer's run, having checked that it is of the rows given: native code would read beyond them.

    Raises:
        SlotError: naming both numbers.
    """
    if run.rows < 0 or run.skip < 0 or run.skip + run.rows != given:
        msg = f"a writer must place the {given} rows given, got a run that skips {run.skip} and writes {run.rows}"
        raise SlotError(msg)
    return run


def checked_picks(picks: Picks, rows: int, capacity: int, given: int) -> Picks:
    """Check a writer's picks, and convert them to what native code reads, on the CPU.

    Args:
        picks: what the writer chose.
        rows: rows present.
        capacity: slots.
        given: rows that are to be written.

    Raises:
        KindError: if the picks are on the device meta.
        SlotError: if a slot or row is out of range, slots between the rows present and the new ones stay empty, or
            there is not one row for each slot.
    """
    slots, chosen = (as_slots(part, torch.device("cpu")) for part in (picks.slots, picks.rows))
    if chosen.shape != slots.shape or (chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < given):
        msg = (
            f"a writer must choose one of the {given} rows given, in [0, {given}), for each of its {slots.numel()} "
            f"slots, got the rows {chosen[:8].tolist()} ({chosen.numel()} in all)"
        )
        raise SlotError(msg)
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        fresh = int(torch.unique(slots[slots >= rows]).numel())
        if low < 0 or high >= capacity or fresh != max(0, high + 1 - rows):
            msg = (
                f"a writer must choose slots in [0, {capacity}) without leaving gaps after the {rows} rows present, "
                f"got slots from {low} to {high}"
            )
            raise SlotError(msg)
    return Picks(slots, chosen, picks.kept, picks.cursor)


def checked_slots(slots: Tensor, device: torch.device, source: object) -> Tensor:
    """Convert drawn slots to what native code reads, which gets their address.

    Args:
        slots: what a sampler drew, or the records of a unit's plan.
        device: where the rows are.
        source: the sampler or unit.

    Raises:
        KindError: if they are on the device meta, where tensors have no values.
        OptionError: if they are on another device: a copy for each draw would wait for it.
    """
    if slots.device != device and (slots.device.type != device.type or device.index is not None):
        if slots.is_meta:
            return as_slots(slots, device)
        msg = (
            f"{type(source).__name__} gave slots on {slots.device}, the rows are on {device}: make them with "
            "device=view.device"
        )
        raise OptionError(msg)
    if slots.dtype is not torch.int64 or not slots.is_contiguous():
        return as_slots(slots, slots.device)
    return slots


def require_rows(rows: int) -> None:
    """Raise `UsageError` if there are none."""
    if rows == 0:
        msg = "the buffer holds no rows: write some first"
        raise UsageError(msg)
