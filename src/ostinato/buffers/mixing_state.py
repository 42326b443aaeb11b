"""The state of an ensemble: that of its members, and what is its own. The caller holds all locks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato.buffers import checkpoint, opening, saving
from ostinato.buffers.checkpoint import (
    check_saved,
    parts_of,
    read_generator,
    read_ticket,
    revive,
    saved_rows,
    show_ticket,
    turn_ticket,
    unit_name,
    with_state,
)
from ostinato.buffers.members import locked
from ostinato.buffers.records import Mix
from ostinato.buffers.soundness import readable
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch
    from torch import Tensor

    from ostinato.buffers.mixing import Mixer
    from ostinato.buffers.records import Ticket

__all__ = ["FORMAT", "collect", "load", "own_copy", "quiet", "restore", "save"]

FORMAT = "ostinato-ensemble"


def collect(mixer: Mixer, batch_size: int | None) -> dict[str, Any]:
    """Return the whole state as nested dicts of plain values and tensors; nothing is copied."""
    return {
        "members": [member.show() for member in mixer.members],
        "mixing": mixer.law.state_dict(),
        "generator": None if mixer.generator is None else mixer.generator.get_state(),
        "transforms": mixer.transform.state_dict(),
        "batch_size": batch_size,
        "pending": [
            {
                "members": mix.members,
                "tickets": [
                    show_ticket(ticket, mixer.members[i].engine)
                    for i, ticket in zip(mix.members, mix.tickets, strict=True)
                ],
                "rng": mix.rng,
            }
            for mix in mixer.queued
        ],
    }


def save(path: str | Path, mixer: Mixer, state: Callable[[], dict[str, Any]], *, incremental: bool) -> None:
    """Save all members and what is the ensemble's own, as they are at one moment."""
    engines = [member.engine for member in mixer.members]
    parts = saving.Saving(engines, state, lambda: _locked(mixer), lambda: _checker(mixer), FORMAT)
    saving.save(path, parts, incremental=incremental)


def _checker(mixer: Mixer) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the members as they are now; the caller holds the locks."""
    parts, law = [parts_of(member.engine) for member in mixer.members], mixer.law

    def check(state: dict[str, Any]) -> None:
        law.check_state(state["mixing"])
        for mine, saved in zip(parts, state["members"], strict=True):
            check_saved(mine, saved)
        for mix in state["pending"]:
            for i, ticket in zip(mix["members"], mix["tickets"], strict=True):
                saved = state["members"][i]
                read_ticket(ticket, saved_rows(saved), parts[i], saved["storage"]["state"].get("schema"))

    return check


def load(
    path: str | Path, mixer: Mixer, restore: Callable[[dict[str, Any]], None], *, verify: bool, mmap: bool
) -> None:
    """Read a directory and hand its state to `restore`, with all members locked."""
    with quiet(mixer):
        engines = [member.engine for member in mixer.members]
        opening.load(path, restore, engines, opening.Reading(FORMAT, verify=verify, mmap=mmap))


@contextmanager
def quiet(mixer: Mixer) -> Iterator[None]:
    """Wait for saves of the members to end, and take all locks."""
    with saving.one_at_a_time([member.engine for member in mixer.members]), _locked(mixer):
        yield


@contextmanager
def _locked(mixer: Mixer) -> Iterator[None]:
    with mixer.lock, locked(mixer.members):
        yield


def own_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state, so that later draws and writes do not change it."""
    rest = {key: value for key, value in state.items() if key != "members"}
    return {"members": [checkpoint.own_copy(mine) for mine in state["members"]], **checkpoint.own_tensors(rest)}


def restore(mixer: Mixer, state: dict[str, Any], batch_size: int | None) -> None:
    """Restore a state, by copy; what does not fit is refused before anything changes.

    Raises:
        CheckpointError: naming what differs.
    """
    with readable("an ensemble"):
        queue, generator = _check(mixer, state, batch_size)
    before, law = checkpoint.own_tensors(mixer.transform.state_dict()), mixer.law.state_dict()
    revived: list[Mix] = []

    def then() -> None:
        mixer.law.load_state_dict(state["mixing"])
        revived.extend(mix for mix in (_revive(mixer, *mix) for mix in queue) if mix is not None)

    try:
        with readable("these transforms"):
            mixer.transform.load_state_dict(state["transforms"])
        checkpoint.load_engine_states([member.target for member in mixer.members], state["members"], then)
    except BaseException:
        mixer.transform.load_state_dict(before)
        mixer.law.load_state_dict(law)
        raise
    for member in mixer.members:
        member.loaded()
    if mixer.prefetch is not None:
        mixer.prefetch.clear()
    mixer.pending.clear()
    mixer.pending.extend(revived)
    if generator is not None:
        mixer.generator = with_state(mixer.generator, generator)


def _check(
    mixer: Mixer, state: dict[str, Any], batch_size: int | None
) -> tuple[list[tuple[list[int], list[Ticket], Tensor | None]], torch.Generator | None]:
    """Check what is the ensemble's own; return draws made ahead, and a generator in the saved state."""
    members = mixer.members
    if len(state["members"]) != len(members):
        msg = f"the checkpoint holds {len(state['members'])} members, this ensemble {len(members)}"
        raise CheckpointError(msg)
    mixer.law.check_state(state["mixing"])
    if state["pending"] and state["batch_size"] != batch_size:
        msg = (
            f"the checkpoint holds queued draws of batch_size={state['batch_size']}, this ensemble has "
            f"batch_size={batch_size}: load it with the same batch_size"
        )
        raise CheckpointError(msg)
    for member, mine in zip(members, state["members"], strict=True):
        if state["pending"] and mine.get("unit") != unit_name(member.engine):
            msg = (
                f"the checkpoint holds queued draws of the unit {mine.get('unit')}, the member has "
                f"{unit_name(member.engine)}: load it with the same sample_unit"
            )
            raise CheckpointError(msg)
    rows = [saved_rows(mine) for mine in state["members"]]
    schemas = [mine["storage"]["state"].get("schema") for mine in state["members"]]
    seams = [
        member.engine.storage.seam(mine["storage"]["state"])
        for member, mine in zip(members, state["members"], strict=True)
    ]
    devices = [member.engine.storage.device for member in members]
    queue = []
    for mix in state["pending"]:
        chosen = [int(i) for i in mix["members"]]
        if len(chosen) != len(mix["tickets"]) or any(not 0 <= i < len(members) for i in chosen):
            msg = f"the checkpoint holds a queued draw from the members {chosen}: it is damaged"
            raise CheckpointError(msg)
        pairs = zip(chosen, mix["tickets"], strict=True)
        draws = [
            read_ticket(turn_ticket(ticket, seams[i], rows[i]), rows[i], members[i].engine, schemas[i])
            for i, ticket in pairs
        ]
        queue.append((chosen, draws, mix["rng"]))
    device = devices[0] if mixer.generator is None else mixer.generator.device
    return queue, read_generator(state["generator"], device)


def _revive(mixer: Mixer, chosen: list[int], draws: list[Ticket], rng: Tensor | None) -> Mix | None:
    engines = [mixer.members[i].engine for i in chosen]
    tickets = [revive(engine, ticket) for engine, ticket in zip(engines, draws, strict=True)]
    whole = [ticket for ticket in tickets if ticket is not None]
    return Mix(chosen, whole, rng) if len(whole) == len(tickets) else None
