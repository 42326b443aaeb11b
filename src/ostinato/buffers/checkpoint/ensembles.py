"""The state of an ensemble: those of its members, and what is the ensemble's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.buffers.checkpoint.save import checker
from ostinato.buffers.checkpoint.state import (
    check_queued,
    generator_state,
    load_engine_states,
    read_draw,
    read_generator,
    show_draw,
    with_state,
)
from ostinato.buffers.records import CompositeDraw
from ostinato.errors import CheckpointError
from ostinato.storages.checkpoint import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ostinato.buffers.mixing import EnsembleEngine
    from ostinato.buffers.reader import Reader
    from ostinato.transforms import Compose

ENSEMBLE_FORMAT = "ostinato-ensemble"


def mixing_state(engine: EnsembleEngine) -> dict[str, Any]:
    """Return the state of how an ensemble draws from its members; nothing is copied."""
    return {"mixing": engine.sampler.state_dict(), "generator": generator_state(engine.generator)}


def check_mixing(engine: EnsembleEngine, state: dict[str, Any], device: torch.device) -> torch.Generator | None:
    """Check what `mixing_state` returned, and return the generator in it.

    Raises:
        CheckpointError: naming what differs.
    """
    engine.sampler.check_state(state["mixing"])
    return read_generator(state["generator"], device)


def load_mixing(engine: EnsembleEngine, state: dict[str, Any], generator: torch.Generator | None) -> None:
    """Restore what was checked by `check_mixing`, which returned the generator."""
    engine.sampler.load_state_dict(state["mixing"])
    engine.generator = with_state(engine.generator, generator)


def ensemble_state(
    engine: EnsembleEngine, queued: Sequence[CompositeDraw], transform: Compose, batch_size: int | None
) -> dict[str, Any]:
    """Return the whole state of an ensemble, with draws that are queued; nothing is copied.

    The caller holds the locks.
    """
    return {
        "members": [member.buffer._state() for member in engine.own],  # noqa: SLF001 (one package)
        **mixing_state(engine),
        "transforms": transform.state_dict(),
        "batch_size": batch_size,
        "pending": [_show_composite(draw, engine.engines) for draw in (*queued, *engine.pending)],
    }


def _show_composite(draw: CompositeDraw, engines: Sequence[Reader]) -> dict[str, Any]:
    parts = [[i, show_draw(part, engines[i])] for i, part in draw.parts]
    return {"parts": parts, "rng": draw.rng, **({} if draw.carry is None else {"carry": draw.carry})}


def read_queue(state: dict[str, Any], engines: Sequence[Reader]) -> list[CompositeDraw]:
    """Return the draws made ahead in a state of members that have these engines.

    Raises:
        CheckpointError: if one is damaged.
    """
    queue = []
    for saved in state["pending"]:
        chosen, carry = [int(i) for i, _ in saved["parts"]], saved.get("carry")
        carry = None if carry is None else list(map(float, carry))
        if (
            not chosen
            or not all(0 <= i < len(engines) for i in chosen)
            or (carry is not None and len(carry) != len(engines))
        ):
            msg = f"the checkpoint holds a queued draw from the members {chosen}, with the carry {carry}: it is damaged"
            raise CheckpointError(msg)
        parts = [(int(i), read_draw(part, state["members"][i], engines[i])) for i, part in saved["parts"]]
        queue.append(CompositeDraw(parts, saved["rng"], carry))
    return queue


def load_ensemble_state(
    engine: EnsembleEngine, state: dict[str, Any], transform: Compose, batch_size: int | None
) -> None:
    """Restore a state, by copy; if it does not fit, nothing has changed. The caller holds the locks.

    Raises:
        CheckpointError: naming what differs.
    """
    engines = engine.engines
    with readable("an ensemble"):
        members, own = state["members"], [(transform, state["transforms"])]
        if len(members) != len(engines):
            msg = f"the checkpoint holds {len(members)} members, this ensemble {len(engines)}"
            raise CheckpointError(msg)
        device = engines[0].storage.device if engine.generator is None else engine.generator.device
        generator = check_mixing(engine, state, device)
        for mine, saved in zip(engines, members, strict=True):
            check_queued({**state, "unit": saved.get("unit")}, mine, batch_size)
        queue = read_queue(state, engines)
    targets = [(member.engine, member.buffer.transform, member.buffer.batch_size) for member in engine.own]
    loaded = iter(load_engine_states(targets, members, [part for draw in queue for part in draw.parts], own))
    load_mixing(engine, state, generator)
    engine.pending.clear()
    for draw in queue:
        parts = [(i, part) for (i, _), part in zip(draw.parts, loaded, strict=False) if part is not None]
        if len(parts) == len(draw.parts):
            engine.pending.append(draw._replace(parts=parts))
        else:  # windows that are not whole
            engine.sampler.drew(draw.carry, -1)


def ensemble_checker(engine: EnsembleEngine) -> Callable[[dict[str, Any]], None]:
    """Return what checks a saved state against the members as they are now; the caller holds the locks."""
    checks, sampler, engines = [checker(member) for member in engine.engines], engine.sampler, engine.engines

    def check(state: dict[str, Any]) -> None:
        sampler.check_state(state["mixing"])
        for check_member, saved in zip(checks, state["members"], strict=True):
            check_member(saved)
        read_queue(state, engines)

    return check
