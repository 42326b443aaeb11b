"""Checkpoints of an ensemble: the state of each member, and what is the ensemble's own."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ostinato.buffers.checkpoint.load import Target, load_engine_states, with_state
from ostinato.buffers.checkpoint.state import (
    check_queued,
    checker,
    read_generator,
    read_ticket,
    show_ticket,
)
from ostinato.buffers.records import Mix
from ostinato.errors import CheckpointError
from ostinato.storages.checkpoint import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.engine import LocalEngine
    from ostinato.buffers.mixing import EnsembleEngine
    from ostinato.transforms import Compose

ENSEMBLE_FORMAT = "ostinato-ensemble"


def ensemble_state(
    engine: EnsembleEngine, queued: Sequence[Mix], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state of an ensemble, with draws that are queued; nothing is copied.

    The caller holds the locks.
    """
    return {
        "members": [member.buffer._state() for member in engine.own],  # noqa: SLF001 (one package)
        "mixing": engine.sampler.state_dict(),
        "generator": None if engine.generator is None else engine.generator.get_state(),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "pending": [_show(mix, engine.engines) for mix in (*queued, *engine.pending)],
    }


def _show(mix: Mix, engines: Sequence[LocalEngine]) -> dict[str, Any]:
    tickets = [show_ticket(ticket, engines[i]) for i, ticket in zip(mix.members, mix.tickets, strict=True)]
    owed = {} if mix.owed is None else {"owed": [str(rows) for rows in mix.owed]}
    return {"members": mix.members, "tickets": tickets, "rng": mix.rng, **owed}


def ensemble_checker(engine: EnsembleEngine) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the members as they are now; the caller holds the locks."""
    checks, sampler, engines = [checker(member) for member in engine.engines], engine.sampler, engine.engines

    def check(state: dict[str, Any]) -> None:
        sampler.check_state(state["mixing"])
        for check_member, saved in zip(checks, state["members"], strict=True):
            check_member(saved)
        _read_queue(state, engines)

    return check


def load_ensemble_state(
    engine: EnsembleEngine, state: dict[str, Any], transform: Compose, batch_size: int | None
) -> None:
    """Restore a state, by copy; if it does not fit, nothing has changed. The caller holds the locks.

    Raises:
        CheckpointError: naming what differs.
    """
    engines, sampler = engine.engines, engine.sampler
    with readable("an ensemble"):
        members = state["members"]
        if len(members) != len(engines):
            msg = f"the checkpoint holds {len(members)} members, this ensemble {len(engines)}"
            raise CheckpointError(msg)
        sampler.check_state(state["mixing"])
        for mine, saved in zip(engines, members, strict=True):
            check_queued({**state, "unit": saved.get("unit")}, mine, batch_size)
        queue = _read_queue(state, engines)
        device = engines[0].storage.device if engine.generator is None else engine.generator.device
        generator = read_generator(state["generator"], device)
    queues: list[list[Any]] = [[] for _ in engines]
    for mix in queue:
        for i, ticket in zip(mix.members, mix.tickets, strict=True):
            queues[i].append(ticket)
    targets = [Target(member.engine, member.buffer.transform, member.buffer.batch_size) for member in engine.own]
    with readable("an ensemble"):
        own = [(transform, state["transforms"])]
    revived = [iter(found) for found in load_engine_states(targets, members, queues, own)]
    sampler.load_state_dict(state["mixing"])  # it was checked
    engine.pending.clear()
    for mix in queue:
        found = [next(revived[i]) for i in mix.members]
        tickets = [ticket for ticket in found if ticket is not None]
        if len(tickets) == len(found):
            engine.pending.append(mix._replace(tickets=tickets))
        else:  # windows that are not whole
            sampler.drew(mix.owed, -1)
    engine.generator = with_state(engine.generator, generator)


def _read_queue(state: dict[str, Any], parts: Sequence[Any]) -> list[Mix]:
    """Return the draws made ahead in a state of members that have these parts.

    Raises:
        CheckpointError: if one is damaged.
    """
    queue = []
    for mix in state["pending"]:
        chosen, owed = [int(i) for i in mix["members"]], None
        if len(chosen) != len(mix["tickets"]) or any(not 0 <= i < len(parts) for i in chosen):
            msg = f"the checkpoint holds a queued draw from the members {chosen}: it is damaged"
            raise CheckpointError(msg)
        if "owed" in mix:
            owed = tuple(Fraction(rows) for rows in mix["owed"])
            if len(owed) != len(parts):
                msg = f"the checkpoint holds a queued draw that owes rows {mix['owed']!r:.80}: it is damaged"
                raise CheckpointError(msg)
        pairs = zip(chosen, mix["tickets"], strict=True)
        draws = [read_ticket(ticket, state["members"][i], parts[i]) for i, ticket in pairs]
        queue.append(Mix(chosen, draws, mix["rng"], owed))
    return queue
