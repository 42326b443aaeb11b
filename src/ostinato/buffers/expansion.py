"""From a draw to a batch: slices and units make a plan of it, the storage reads what the plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers.checks import checked_slots
from ostinato.core.draw import episodes_of
from ostinato.core.plan import Plan, fold, slices
from ostinato.errors import OptionError

if TYPE_CHECKING:
    import torch

    from ostinato.buffers.engine import Engine
    from ostinato.buffers.records import Ticket
    from ostinato.core.draw import View
    from ostinato.storages import Storage

__all__ = ["copy", "expand", "expand_again"]


def expand(engine: Engine, ticket: Ticket, generator: torch.Generator | None) -> Ticket:
    """Let slices and units say what the rows drawn become; the caller holds the engine's lock.

    Raises:
        OptionError: if the storage has no fields.
    """
    unit, draw, dice = engine.unit, ticket.draw, ticket.dice
    each = draw.rows_each
    if (unit is None or unit.plain) and each is None:
        return ticket
    schema, view = engine.storage.schema, engine.view()
    if schema is None:
        msg = f"{type(engine.storage).__name__} has no fields for {unit or engine.sampler!r}: use LazyTensorStorage"
        raise OptionError(msg)
    if each is None:
        plan = Plan(schema, draw.slots, draw.slots)
    else:
        plan = slices(schema, episodes_of(view), draw.slots, each, draw.pad)
    if unit is not None:
        dice = unit.roll(plan.records.shape[0], view, generator) if dice is None else dice
        plan = unit.expand(plan, view, dice)
        records = checked_slots(plan.records, view.device, unit)
        plan = plan if records is plan.records else plan._replace(records=records)
    if draw.stamps is not None and plan.records is not draw.slots:
        plan = plan._replace(stamps=view.stamps.of_present(plan.records))
    return ticket._replace(plan=plan, dice=dice)


def expand_again(engine: Engine, ticket: Ticket, generator: torch.Generator | None = None) -> Ticket | None:
    """Expand a draw as the buffer is now; None if a window no longer fits in its episode, or a row is masked now.

    Chance is that of the first time; `generator` is for draws that have not been expanded yet.
    """
    draw, each = ticket.draw, ticket.draw.rows_each
    if engine.unit is None and each is None:
        return ticket if engine.chronicle is None else _unmasked(ticket, engine.view())
    view = engine.view()
    if ticket.sampler is not engine.sampler:
        return None  # another sampler took over since
    ahead = None if view.episodes is None else view.episodes.ahead(draw.slots)
    need = 1 if view.starts is None else view.starts.need
    if ahead is not None and bool((ahead + 1 < (need if each is None else each)).any()):
        return None
    return expand(engine, ticket, generator)


def _unmasked(ticket: Ticket, view: View) -> Ticket | None:
    """Return a draw of single rows without those that are masked now; None if it is to be made anew.

    A pass without replacement does not draw its rows again: the batch goes without the rows that were replaced.
    """
    draw = ticket.draw
    keep = None if view.episodes is None or not view.episodes.masked else view.episodes.ahead(draw.slots) >= 0
    if keep is None or bool(keep.all()):
        return ticket
    if not ticket.sampler.epochal or not bool(keep.any()):
        return None
    return ticket._replace(draw=draw._replace(slots=draw.slots[keep]))


def copy(storage: Storage, ticket: Ticket, *, pin: bool) -> Any:
    """Read the rows of a ticket, or what its plan made of them."""
    plan = ticket.plan
    if plan is None or not plan.changed:
        return storage.get(ticket.records, pin=pin)
    leaves = fold(plan, storage.fetch(plan.requests(), pin=pin))
    if plan.elsewhere:
        return storage.assemble(leaves, plan.records, plan.elsewhere)
    return storage.assemble(leaves, plan.records)
