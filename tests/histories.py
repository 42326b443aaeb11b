"""Histories of a buffer: what is done to it, drawn by hypothesis, with every batch held against the slow log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st

from ostinato import Episodes, LazyTensorStorage, ReplayBuffer
from ostinato._backend import backend, use_backend
from ostinato.errors import EmptyBufferError

from .episodes import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS: list[Literal["native", "torch"]] = ["native", "torch"] if backend.native is not None else ["torch"]
__all__ = ["Case", "buffer_for", "check_samples", "histories", "replay"]


class Case(NamedTuple):
    """A unit or a sampler, and what its batches must be."""

    make: Callable[[], Any]
    check: Callable[[Log, Any, dict[Any, Any]], Any]
    size: int = 6
    form: dict[str, bool] = {}  # noqa: RUF012


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a log, what happens to its buffer, and with which implementation."""
    layout = draw(st.sampled_from(["line", "lanes", "lanes", "mixed"]))
    envs = 1 if layout == "line" else draw(st.integers(1, 4))
    lanes = envs if layout == "lanes" else 1
    steps = draw(st.integers(6, 14))
    sizes = st.one_of(st.integers(1, 2 * steps), st.sampled_from([steps - 1, steps, steps + 1]))
    does = st.one_of(
        st.tuples(st.just("extend"), sizes),
        st.tuples(st.just("add"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["edit", "flags", "masks", "empty", "reload"]), st.just(0)),
        st.tuples(st.just("resize"), st.integers(0, 5)),
    )
    log = {
        "capacity": steps * lanes,
        "layout": layout,
        "envs": envs,
        "seed": draw(st.integers(0, 2**20)),
        "masked": draw(st.sampled_from([0.0, 0.0, 0.2])),
    }
    return {
        "log": log,
        "deeds": [("extend", draw(sizes)), *draw(st.lists(does, max_size=8))],
        "kind": draw(st.sampled_from(KINDS)),
    }


def buffer_for(log: Log, case: Case, *, sampler: Any = None, unit: Any = None, seed: int = 0) -> ReplayBuffer:
    """A buffer that knows the episodes of a log."""
    flags: list[Any] = ["terminated", "truncated"]
    ends = flags if case.form.get("flat") else [("next", flag) for flag in flags]
    plain = log.layout != "mixed" and not log.masked and sampler is None
    return ReplayBuffer(
        storage=LazyTensorStorage(log.capacity, ndim=2 if log.layout == "lanes" else 1),
        sampler=sampler,
        sample_unit=unit,
        batch_size=case.size,
        generator=torch.Generator().manual_seed(seed),
        episodes=None
        if plain
        else Episodes(ends, "env" if log.layout == "mixed" else None, "mask" if log.masked else None),
    )


def check_samples(rb: ReplayBuffer, log: Log, case: Case, *, need: int = 1, learn: bool = True) -> None:
    """Sample, and hold every batch against the log; without a row to draw there is an error."""
    for _ in range(2):
        try:
            batch, info = rb.sample(return_info=True)
        except EmptyBufferError:
            assert all(len(slots) < need for slots, _ in log.episodes())
            return
        case.check(log, batch, info)
        if rb.sampler.prioritized:
            random = torch.Generator().manual_seed(len(log.rows))
            rows = case.size if learn else len(log.slots_of(info["index"]))
            rb.update_priority(info, torch.rand(rows, generator=random) + 0.1)


def replay(
    history: dict[str, Any],
    case: Case,
    make: Callable[[Log], ReplayBuffer],
    path: Path,
    need: int = 1,
    *,
    learn: bool = True,
) -> None:
    """Do all that a history says, and check samples after each deed."""
    with use_backend(history["kind"]):
        _replay(history["deeds"], case, make, path, need, learn=learn, log=Log(**history["log"]))


def _replay(
    deeds: list[tuple[str, int]],
    case: Case,
    make: Callable[[Log], ReplayBuffer],
    path: Path,
    need: int,
    *,
    learn: bool,
    log: Log,
) -> None:
    rb = make(log)
    for number, (deed, rows) in enumerate(deeds):
        if deed == "extend":
            log.extend(rb, rows, **case.form)
        elif deed == "add":
            for _ in range(rows):
                log.add(rb, **case.form)
        elif deed == "empty":
            log.empty(rb)
            continue
        elif deed == "reload":
            rb.dumps(path)
            rb = make(log)
            rb.loads(path)
        elif deed == "resize":  # into a larger ring, or for 0 into the smallest one that holds the rows
            rb.dumps(path)
            log.resize(rows)
            rb = make(log)
            rb.loads(path)
        elif log.rows:
            log.edit(rb, flags=deed == "flags", masks=deed == "masks" and log.masked > 0, **case.form)
        if log.rows:
            check_samples(rb, log, case, need=need, learn=learn)
        assert len(rb) == len(log.present()), number
