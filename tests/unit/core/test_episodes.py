"""The episode table, native and in NumPy, against a log that knows every row ever written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato._backend import backend, use_backend
from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.records import Run
from ostinato.errors import CapacityError, CheckpointError, EmptyBufferError, OptionError, SlotError

from ...effort import examples
from .episode_log import Batch, Log, clamp_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

Kind: TypeAlias = Literal["native", "torch"]
KINDS: list[Kind] = ["native", "torch"] if backend.native is not None else ["torch"]
kinds = pytest.mark.parametrize("kind", KINDS)
NEEDS = (1, 2, 3, 7)
TOP = 2**63 - 1


def make(kind: Kind, capacity: int, lanes: int = 1) -> EpisodeTable:
    """A table of the kind asked for."""
    with use_backend(kind):
        return EpisodeTable(capacity, lanes)


def integers(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def randoms_of_ranks(total: int) -> Tensor:
    """For each rank below `total` the smallest number that is scaled to it."""
    return integers([-(-(rank << 63) // total) for rank in range(total)])


@st.composite
def batches(draw: st.DrawFn, capacity: int, lanes: int, *, by_id: bool) -> Batch:
    """A batch of up to two and a half rings: of whole steps of all lanes, or of some trajectories."""
    most = max(1, 5 * capacity // 2)
    rows = draw(
        st.one_of(st.integers(0, min(most, 6)), st.integers(1, most), st.sampled_from([capacity, capacity + 1]))
    )
    rows = rows if by_id else rows // lanes * lanes
    share = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    random = draw(st.randoms(use_true_random=False))
    ends = [random.random() < share for _ in range(rows)] if draw(st.booleans()) else None
    ids, names = None, [-(2**63), 0, 1, 7, 2**63 - 1][: draw(st.integers(1, 5))]
    if by_id and draw(st.booleans()):
        ids = [names[i % len(names)] for i in range(rows)]
    elif by_id:
        ids = [random.choice(names) for _ in range(rows)]
    masked = draw(st.sampled_from([0.0, 0.1, 0.9]))
    mask = [random.random() >= masked for _ in range(rows)] if masked else None
    return Batch(rows, ends, ids, mask)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, list[Batch | None]]:
    """Capacity, lanes, first slot, and what is written; None: the table is cleared."""
    lanes = draw(st.sampled_from([1, 1, 2, 3]))
    capacity = lanes * draw(st.integers(1, 30 // lanes))
    style = draw(st.sampled_from(["lanes", "ids", "both"]))
    written: list[Batch | None] = []
    for _ in range(draw(st.integers(1, 8))):
        by_id = style == "ids" or (style == "both" and draw(st.booleans()))
        written.append(draw(batches(capacity, lanes, by_id=by_id)))
        if draw(st.integers(0, 15)) == 0:
            written.append(None)
    return capacity, lanes, draw(st.integers(0, capacity // lanes - 1)) * lanes, written


def check_rows(table: EpisodeTable, log: Log) -> None:
    """Every answer about every slot."""
    slots = torch.arange(log.capacity)
    ahead, behind, windows = [], [], []
    for slot in range(log.capacity):
        others, at = log.of(slot)
        ahead.append(len(others) - 1 - at if others else -1)
        behind.append(at)
        windows.append((others or [slot], max(at, 0)))
    assert table.ahead(slots).tolist() == ahead
    assert table.behind(slots).tolist() == behind
    assert table.ended(slots).tolist() == [log.ended(slot) for slot in range(log.capacity)]
    for before, after, dilation in ((0, 0, 1), (1, 2, 1), (0, 4, 3), (5, 0, 2), (2, 2, 2**31 - 1)):
        found, valid = table.window(slots.repeat_interleave(2)[::2], before, after, dilation)
        offsets = [k * dilation for k in range(-before, after + 1)]
        expected = [clamp_window(others, at, offsets) for others, at in windows]
        assert list(zip(found.tolist(), valid.tolist(), strict=True)) == expected
    check_windows(table, log, windows)
    for step in (0, 1, -1, 4, -(2**63), 2**63 - 1):
        expected_slots = [clamp_window(others, at, [step])[0][0] for others, at in windows]
        assert table.shift(slots, step).tolist() == expected_slots


def check_windows(table: EpisodeTable, log: Log, windows: list[tuple[list[int], int]]) -> None:
    """Slices, the windows of n-step transitions and stacks of frames from or up to every slot."""
    slots = torch.arange(log.capacity)
    for width, dtype in ((1, torch.float32), (3, torch.float64), (5, torch.float32)):
        expected = [clamp_window(others, at, list(range(width))) for others, at in windows]
        rows, valid = (torch.tensor([pair[k] for pair in expected]) for k in range(2))
        powers = 0.9 ** torch.arange(width + 1, dtype=dtype)
        found = table.steps(slots, powers)
        assert torch.equal(table.slices(slots, width).view(-1, width), rows)
        assert torch.equal(found.rows, rows)
        assert torch.equal(found.weights, valid * powers[:width])
        assert torch.equal(found.steps, valid.sum(1))
        assert torch.equal(found.discounts, powers[valid.sum(1)].float())
        assert torch.equal(found.last, rows[:, -1])
    for k, then in ((1, False), (2, True), (4, False), (4, True)):
        expected = [clamp_window(others, at, [min(i + then, 0) for i in range(1 - k, 1)]) for others, at in windows]
        found_rows, marks = table.stack(slots, k, then=then, marked=True)
        assert found_rows.view(-1, k).tolist() == [rows for rows, _ in expected]
        assert marks is not None
        assert marks.tolist() == [inside for _, inside in expected]
        assert table.stack(slots, k, then=then)[1] is None


def check_counts(table: EpisodeTable, log: Log) -> None:
    """Counts, spans, and that every start is drawn by exactly its share of the random numbers."""
    spans = log.spans()
    assert [tuple(x) for x in zip(*(x.tolist() for x in table.episodes()), strict=True)] == spans
    assert table.count == len(spans)
    assert table.rows == sum(rows for _, rows, _, _ in spans)
    assert table.masked == len(log.row_at) - table.rows
    for need in NEEDS:
        starts, expected = table.starts(need), log.starts(need)
        every = sorted(slot for slots in expected.values() for slot in slots)
        assert (starts.rows, starts.episodes) == (len(every), len(expected))
        assert torch.nonzero(starts.allowed(torch.arange(log.capacity))).flatten().tolist() == every
        if not every:
            with pytest.raises(EmptyBufferError):
                starts.draw(integers([0]))
            continue
        assert sorted(starts.draw(randoms_of_ranks(len(every))).tolist()) == every
        episodes = randoms_of_ranks(len(expected))
        low = starts.draw_episodes(torch.cat([episodes, torch.zeros_like(episodes)])).tolist()
        high = starts.draw_episodes(torch.cat([episodes, torch.full_like(episodes, TOP)])).tolist()
        assert sorted(low) == sorted(slots[0] for slots in expected.values())
        assert sorted(high) == sorted(slots[-1] for slots in expected.values())


@examples(1)
@given(history=histories(), seed=st.integers(0, 2**32))
def test_tables_know_what_a_log_of_all_rows_knows(history: tuple[int, int, int, list[Batch | None]], seed: int) -> None:
    """Tables of both kinds, and halfway copies of each in both; equal random numbers draw the same rows from all."""
    capacity, lanes, start, written = history
    tables, log = [make(kind, capacity, lanes) for kind in KINDS], Log(capacity, lanes)
    log.cursor = start  # the first run may begin anywhere
    for table in tables:
        table.starts(2)  # one need is known from the beginning, the others from the first check on
    for number, batch in enumerate(written):
        if number == len(written) // 2:
            tables = [copied(source, kind) for source in tables for kind in KINDS]
        run = None if batch is None else log.write(batch)
        for table in tables:
            if run is None or batch is None:
                table.clear()
            else:
                table.record(run, *batch.tensors())
        if batch is None:
            log.forget()
        for table in tables[:: max(1, len(tables) - 1)]:
            check_rows(table, log)
            check_counts(table, log)
        drawn = [(repr(table), draws(table, torch.Generator().manual_seed(seed))) for table in tables]
        assert drawn == drawn[:1] * len(tables)
        states = [plain_state(table) for table in tables]
        assert states == states[:1] * len(states)


def draws(table: EpisodeTable, generator: torch.Generator) -> list[list[int]]:
    """Random draws of starts, of rows alike and of episodes alike."""
    out = []
    for need in NEEDS:
        starts = table.starts(need)
        if starts.rows:
            randoms = torch.randint(-(2**63), TOP, (50,), generator=generator)
            out += [starts.draw(randoms).tolist(), starts.draw_episodes(randoms).tolist()]
    return out


def copied(source: EpisodeTable, kind: Kind) -> EpisodeTable:
    """A table that was in use before it takes over the state of another."""
    table = make(kind, source.capacity, source.num_envs)
    table.starts(3)
    table.record(Run(0, source.num_envs, source.capacity), None)
    table.load_state_dict(source.state_dict())
    return table


def plain_state(table: EpisodeTable) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in table.state_dict().items()}


@kinds
@pytest.mark.parametrize("step", [7, 1000])
def test_an_endless_episode_outlives_the_ring(kind: Kind, step: int) -> None:
    """One episode, many wraps: it keeps its number, the newest `capacity` rows, and never memory of more."""
    table, cursor, sizes = make(kind, 64), 0, set()
    for turn in range(1, 41):
        skip = max(0, step - 64)
        table.record(Run((cursor + skip) % 64, step - skip, 64, skip), torch.zeros(step, dtype=torch.bool))
        cursor, held = (cursor + step) % 64, min(turn * step, 64)
        assert [x.tolist() for x in table.episodes()] == [[(cursor - held) % 64], [held], [False], [1]]
        sizes.add(table.nbytes)
    assert max(sizes) <= 2 * min(sizes)


@kinds
def test_records_and_streams_that_are_over_take_no_memory(kind: Kind) -> None:
    """A thousand ids that never end, 50 at a time in the ring: what is gone is used again."""
    table = make(kind, 100)
    table.starts(2)
    sizes = []
    for i in range(500):
        table.record(Run(4 * i % 100, 4, 100), None, integers([2 * i, 2 * i, 2 * i + 1, 2 * i + 1]))
        sizes.append(table.nbytes)
    assert table.count == 50
    assert sizes[-1] == sizes[100]
    assert table.state_dict()["serials"].numel() <= 52


@kinds
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: Kind) -> None:
    table = make(kind, 8, 2)
    table.record(Run(0, 4, 8), torch.tensor([False, False, True, False]))
    before = plain_state(table)
    flags = torch.zeros(2, dtype=torch.bool)
    for run in (Run(6, 2, 8), Run(4, 2, 9), Run(4, 9, 8), Run(8, 2, 8), Run(5, 2, 8, 1), Run(-4, 2, 8), Run(4, -1, 8)):
        with pytest.raises(OptionError, match=r"a run in a ring of 8|recorded in ring order: slot 4 is next"):
            table.record(run, torch.zeros(max(run.total, 0), dtype=torch.bool))
    for bad in (flags[:1], flags.view(1, 2), flags.int(), flags.to("meta")):
        for place in (0, 2):
            given_ = [None, None, None]
            given_[place] = bad  # type: ignore[call-overload]
            with pytest.raises(OptionError, match=r"must be a torch\.bool tensor \[2\], got"):
                table.record(Run(4, 2, 8), *given_)
    for ids in (torch.zeros(2, dtype=torch.int32), integers([1, 2, 3])):
        with pytest.raises(OptionError, match=r"must be a torch\.int64 tensor \[2\], got"):
            table.record(Run(4, 2, 8), None, ids)
    assert plain_state(table) == before
    for capacity, lanes in ((8, 1), (10, 2)):
        with pytest.raises(CheckpointError, match=rf"capacity 8 and 2 environments, this one {capacity} and {lanes}"):
            make(kind, capacity, lanes).load_state_dict(table.state_dict())
    for size in ((0, 1), (-1, 1), (2**30 + 1, 1), (10, 0), (10, 3), (10, 20)):
        with pytest.raises(CapacityError, match=str(size[0])):
            make(kind, *size)


@kinds
def test_bad_questions_are_refused(kind: Kind) -> None:
    table = make(kind, 8)
    table.record(Run(0, 4, 8), None)
    at, starts = integers([0]), table.starts(5)
    for slot in (-1, 8, 2**40):
        bad = integers([3, slot])
        asks: list[Callable[[Tensor], object]] = [table.ahead, table.behind, table.ended, table.starts(2).allowed]
        for ask in asks:
            with pytest.raises(SlotError, match=rf"^slot {slot} at position 1 is outside \[0, 8\)"):
                ask(bad)
        for ask in (partial(table.window, before=0, after=1), partial(table.shift, steps=1)):
            with pytest.raises(SlotError):
                ask(bad)
    calls: list[tuple[Callable[[], object], str]] = [
        *(
            (partial(table.window, at, *counts), "before and after must be in")
            for counts in ((-1, 0), (0, -1), (0, 0, 0), (2**31, 0), (0, 2**31), (0, 0, 2**31))
        ),
        (lambda: table.ahead(at.int()), r"^slots must be a torch\.int64 tensor \[n\]"),
        (lambda: table.shift(at, integers([1, 2])), r"^steps must be a torch\.int64 tensor \[1\]"),
        (lambda: table.starts(0), "need must be at least 1"),
        (lambda: table.starts(1).draw_episodes(at), "two numbers for each row"),
    ]
    for call, words in calls:
        with pytest.raises(OptionError, match=words):
            call()
    message = r"no episode has the 5 rows of a window: of the 1 episodes present the longest has 4: add rows"
    for draw in (starts.draw, starts.draw_episodes):
        with pytest.raises(EmptyBufferError, match=message):
            draw(integers([0, 0]))
        assert draw(integers([])).tolist() == []


def damages(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """States with one thing wrong: an entry, its shape or dtype, a number."""
    yield {**state, "x": 1}
    for key, x in state.items():
        yield {name: value for name, value in state.items() if name != key}
        yield {**state, key: "1"}
        if isinstance(x, torch.Tensor):
            yield from ({**state, key: changed} for changed in (x[None], x[:-1], x.float()))
    for key, number in (("cursor", -1), ("cursor", 8), ("serial", 3), ("serial", -1)):
        yield {**state, key: number}
    numbers: dict[str, list[tuple[int, int]]] = {
        "episode": [(0, -2), (0, 9), (0, 0), (2, 1)],
        "free": [(0, 1), (0, 9)],
        "serials": [(0, 5), (1, 0), (1, -1), (1, 99), (1, 3)],
        "status": [(1, 3), (0, 1)],
        "kinds": [(1, 2), (2, 1), (0, 1)],
        "keys": [(2, 1), (0, 1), (1, 0), (1, 5)],
    }
    for key, changes in numbers.items():
        for at, number in changes:
            x = state[key].clone()
            x[at] = number
            yield {**state, key: x}


@kinds
def test_a_damaged_state_is_refused_and_changes_nothing(kind: Kind) -> None:
    table = make(kind, 8, 2)
    table.record(Run(0, 2, 8), torch.tensor([True, False]))
    table.record(Run(2, 6, 8), torch.tensor([False, False, True, False, False, False]))
    table.record(Run(0, 4, 8), None)
    whole, before = table.state_dict(), plain_state(table)
    assert {name: before[name] for name in ("episode", "serials", "keys", "status", "free")} == {
        "episode": [2, 1, 3, 1, 3, 1, 3, 1],
        "serials": [0, 2, 3, 4],  # free, of lane 1, ended, of lane 0
        "keys": [0, 1, 0, 0],
        "status": [0, 0, 1, 0],
        "free": [0],
    }
    for damage in damages(whole):
        with pytest.raises(CheckpointError, match="damaged"):
            table.load_state_dict(damage)
        assert plain_state(table) == before
    table.load_state_dict(whole)
    for x in whole.values():
        if isinstance(x, torch.Tensor):
            x.zero_()
    assert plain_state(table) == before, "a state is a copy"
