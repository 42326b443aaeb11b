"""Rows that `mask_key` leaves out, with priorities: which rows can be drawn, by what share, and after every save."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import (
    Episodes,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Sequence,
)
from ostinato.errors import CheckpointError, EmptyBufferError, OstinatoError

from ...episodes import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALPHA, EPS = 0.6, 1e-3
ENDS: list[Any] = [("next", "terminated"), ("next", "truncated")]


class Kind(NamedTuple):
    """A prioritized sampler with its unit, and the rows that it may draw."""

    sampler: Callable[[int], PrioritizedSampler]
    unit: Callable[[], Any]
    allowed: Callable[[list[int]], list[int]]
    """Of the slots of one episode, those that may be drawn."""
    size: int = 6


def plain(**options: Any) -> Kind:
    return Kind(lambda n: PrioritizedSampler(n, ALPHA, 0.5, EPS, **options), lambda: None, list)


def slices(allowed: Callable[[list[int]], list[int]], **options: Any) -> Kind:
    return Kind(lambda n: PrioritizedSliceSampler(n, ALPHA, 0.5, EPS, **options), lambda: None, allowed)


KINDS = {
    "rows": plain(),
    "stratified": plain(stratified=True),
    "largest-within": plain(max_priority_within_buffer=True),
    "windows": Kind(plain().sampler, lambda: Sequence(3, "strict"), lambda line: line[: max(0, len(line) - 2)]),
    "slices": slices(lambda line: line[: max(0, len(line) - 2)], slice_len=3),
    "slices-span": slices(lambda line: line[: max(0, len(line) - 1)], slice_len=3, span=(False, 1)),
    "slices-short": slices(lambda line: line[: max(1, len(line) - 2)], slice_len=3, strict_length=False),
    "slices-short-span": slices(
        lambda line: line[: max(1, len(line) - 1)], slice_len=3, strict_length=False, span=(False, 1)
    ),
    "slices-number": slices(lambda line: line[: max(1, len(line) - 2)], num_slices=2, strict_length=False),
}


class Twins:
    """Buffers that get the same rows: one that was never interrupted, and others that came out of its checkpoints."""

    def __init__(self, *members: ReplayBuffer) -> None:
        self.members = list(members)

    def extend(self, rows: Any) -> None:
        for rb in self.members:
            rb.extend(rows)

    def add(self, row: Any) -> None:
        for rb in self.members:
            rb.add(row)

    def empty(self) -> None:
        for rb in self.members:
            rb.empty()

    def __setitem__(self, index: Any, rows: Any) -> None:
        for rb in self.members:
            rb[index] = rows


def buffer(kind: Kind, log: Log) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(log.capacity, ndim=2 if log.layout == "lanes" else 1),
        sampler=kind.sampler(log.capacity),
        sample_unit=kind.unit(),
        batch_size=kind.size,
        generator=torch.Generator().manual_seed(3),
        episodes=Episodes(ENDS, "env" if log.layout == "mixed" else None, "mask"),
    )


def restored(how: str, rb: ReplayBuffer, kind: Kind, log: Log, path: Path) -> ReplayBuffer:
    if how == "pickle":
        copy: ReplayBuffer = pickle.loads(pickle.dumps(rb))
        return copy
    other = buffer(kind, log)
    if how == "used":
        other_log = Log(log.capacity, log.layout, log.envs, masked=0.5, seed=9)
        other_log.extend(other, log.capacity // log.lanes)
    if how in {"state", "used"}:
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(path)
        other.loads(path, mmap=how == "mapped")
    return other


def leaves(rb: ReplayBuffer) -> torch.Tensor:
    """What each row weighs in draws."""
    sampler: Any = rb.sampler
    return sampler._ledger.tree(rb._engine.view()).leaves(len(rb))  # type: ignore[no-any-return]


def agree(kind: Kind, twins: Twins, log: Log) -> None:
    """Every row that may be drawn has the value of its priority, others have none, and all twins draw the same."""
    allowed = [slot for line, _ in log.episodes() for slot in kind.allowed(line)]
    first: Any = None
    for rb in twins.members:
        sampler: Any = rb.sampler
        drawn: Any = None
        if allowed:
            drawn = rb.sample(return_info=True)[1]  # first: the length of slices may be that of the last draw
        else:
            with pytest.raises(EmptyBufferError):
                rb.sample()
        due = torch.zeros(len(rb), dtype=torch.float64)
        due[allowed] = (sampler.priorities[allowed] + EPS) ** ALPHA
        assert torch.allclose(leaves(rb), due, rtol=1e-14, atol=0.0)
        if drawn is None:
            continue
        slots = torch.tensor(log.slots_of(drawn["index"]))
        assert set(slots.tolist()) <= {slot for line, _ in log.episodes() for slot in line}
        same = [slots, drawn["priority_weight"], drawn["index_generation"] - rb._engine.era * 2**44]
        first = first or same
        assert all(map(torch.equal, same, first))
        rb.update_priority(drawn, 0.1 + slots.double() / 7)


DEEDS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 16), st.sampled_from([0.0, 0.0, 0.3, 1.0])),
    st.tuples(st.just("add"), st.integers(1, 3), st.sampled_from([0.0, 0.0, 0.3])),
    st.tuples(st.sampled_from(["flags", "masks", "rows"]), st.just(0), st.just(0.0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0.0)),
    st.tuples(st.just("resume"), st.sampled_from(["state", "used", "saved", "mapped", "pickle"]), st.just(0.0)),
)


@pytest.mark.parametrize("name", KINDS)
def test_every_row_in_an_episode_can_be_drawn_and_no_masked_one(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]

    @settings(max_examples=12, deadline=None)
    @given(
        st.sampled_from(["line", "lanes", "mixed"]), st.integers(4, 9), st.integers(0, 99), st.lists(DEEDS, max_size=9)
    )
    def run(layout: str, steps: int, seed: int, deeds: list[tuple[str, Any, float]]) -> None:
        envs = 1 if layout == "line" else 2
        log = Log(steps * (envs if layout == "lanes" else 1), layout, envs, longest=5, seed=seed, masked=0.3)
        twins = Twins(buffer(kind, log))
        log.extend(twins, steps)  # type: ignore[arg-type]
        for deed, rows, masked in deeds:
            log.masked = masked
            if deed == "extend":
                log.extend(twins, rows)  # type: ignore[arg-type]
            elif deed == "add":
                for _ in range(rows):
                    log.add(twins)  # type: ignore[arg-type]
            elif deed == "empty":
                log.empty(twins)  # type: ignore[arg-type]
            elif deed == "resume":
                twins.members = [*twins.members[:2], restored(rows, twins.members[0], kind, log, tmp_path)]
            elif log.rows:
                log.edit(twins, flags=deed == "flags", masks=deed == "masks")  # type: ignore[arg-type]
            if log.rows:
                agree(kind, twins, log)

    run()


def masked(*rows: int, **more: torch.Tensor) -> ReplayBuffer:
    """Eight rows, some of them masked, with priorities."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(8, ALPHA, 0.5, EPS),
        batch_size=400,
        generator=torch.Generator().manual_seed(0),
        episodes=Episodes("done", mask_key="valid"),
    )
    row = torch.arange(8)
    valid = torch.tensor([i not in rows for i in range(8)])
    rb.extend({"row": row, "done": torch.zeros(8, dtype=torch.bool), "valid": valid, **more})
    return rb


def test_a_load_that_fails_leaves_masked_rows_masked() -> None:
    rb, other = masked(0, 5), masked(3, more=torch.zeros(8, 2))
    with pytest.raises(CheckpointError):
        rb.load_state_dict(other.state_dict())
    assert set(rb.sample()["row"].tolist()) == {1, 2, 3, 4, 6, 7}


def test_rows_hidden_by_a_caller_stay_hidden_beside_a_mask() -> None:
    """Writes and edits of masks show no row that `hide` was called for, and `show` no masked one."""
    rb = masked(0, 5)
    sampler: Any = rb.sampler
    slots = torch.tensor([1, 5])
    sampler.hide(slots, rb._engine.view())
    assert set(rb.sample()["row"].tolist()) == {2, 3, 4, 6, 7}
    rb.set_at_("valid", torch.tensor([True]), torch.tensor([0]))
    assert set(rb.sample()["row"].tolist()) == {0, 2, 3, 4, 6, 7}
    rb.extend({name: torch.tensor([value]) for name, value in {"row": 8, "done": False, "valid": False}.items()})
    sampler.show(slots, rb._engine.view())
    assert set(rb.sample()["row"].tolist()) == {1, 2, 3, 4, 6, 7}
    rb.set_at_("valid", torch.tensor([True, True]), torch.tensor([0, 5]))
    assert set(rb.sample()["row"].tolist()) == set(range(1, 9))


@pytest.mark.parametrize("name", ["rows", "stratified", "largest-within"])
def test_a_slot_is_drawn_again_once_its_masked_row_was_replaced(name: str) -> None:
    """The last masked row of a buffer is overwritten: its slot holds an ordinary row from then on."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(3),
        sampler=KINDS[name].sampler(3),
        batch_size=300,
        generator=torch.Generator().manual_seed(0),
        episodes=Episodes("done", mask_key="valid"),
    )
    for row in range(13):
        rb.extend(
            {"row": torch.tensor([row]), "done": torch.tensor([False]), "valid": torch.tensor([row not in {0, 5}])}
        )
        want = {r for r in range(max(0, row - 2), row + 1) if r not in {0, 5}}
        if want:
            assert set(rb.sample()["row"].tolist()) == want
        else:
            with pytest.raises(OstinatoError):
                rb.sample()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_draws_no_row_twice_and_ends_while_masked_rows_replace_others(shuffle: bool, prefetch: int) -> None:
    """One iteration is one pass, whatever is written and edited meanwhile; rows that stay valid come exactly once."""
    for seed in range(60):
        log = Log(3 + seed % 6, longest=100, seed=seed, masked=0.2)
        rb = ReplayBuffer(
            storage=LazyTensorStorage(log.capacity),
            sampler=SamplerWithoutReplacement(shuffle=shuffle),
            batch_size=1 + seed % 4,
            prefetch=prefetch,
            episodes=Episodes(ENDS, mask_key="mask"),
            generator=torch.Generator().manual_seed(seed),
        )
        log.extend(rb, log.capacity)
        if not log.episodes():
            continue
        start = {row.id for row in log.present().values() if row.mask}
        seen: list[int] = []
        for number, batch in enumerate(rb):
            seen += batch["id"].tolist()
            log.masked = 0.7
            if (seed + number) % 3 == 0:
                log.extend(rb, 1 + seed % 2)
            elif (seed + number) % 3 == 1:
                log.edit(rb, flags=False, masks=True)
            if not log.episodes():
                break  # no row is left in any pass
        else:
            kept = start & {row.id for row in log.present().values() if row.mask}
            assert kept <= set(seen)
        assert len(seen) == len(set(seen)), seed
