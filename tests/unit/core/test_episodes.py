"""The episode table, native and in NumPy, against a list of every row ever written."""

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

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch import Tensor

Kind: TypeAlias = Literal["native", "torch"]
KINDS: list[Kind] = ["native", "torch"] if backend.native is not None else ["torch"]
kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind: Kind, capacity: int, lanes: int = 1) -> EpisodeTable:
    """A table of the kind asked for."""
    with use_backend(kind):
        return EpisodeTable(capacity, lanes)


def integers(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def randoms_of_ranks(total: int) -> Tensor:
    """For each rank below `total` the smallest number that is scaled to it."""
    return integers([-(-(rank << 63) // total) for rank in range(total)])


def plain_state(table: EpisodeTable) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in table.state_dict().items()}


class Model:
    """Every row ever written, by number: its stream, whether it ends an episode, whether it is in one."""

    def __init__(self, capacity: int, lanes: int, start: int) -> None:
        self.capacity, self.lanes, self.start = capacity, lanes, start
        self.rows: list[tuple[Hashable, bool, bool]] = []

    def slot(self, number: int) -> int:
        return (self.start + number) % self.capacity

    def write(self, ends: list[bool], ids: list[int] | None, mask: list[bool]) -> Run:
        first, skip = len(self.rows), max(0, len(ends) - self.capacity)
        for i, (end, valid) in enumerate(zip(ends, mask, strict=True)):
            stream = ("lane", self.slot(first + i) % self.lanes) if ids is None else ("id", ids[i])
            self.rows.append((stream, end, valid))
        return Run(self.slot(first + skip), len(ends) - skip, self.capacity, skip)

    def clear(self) -> None:
        self.start, self.rows = self.slot(len(self.rows)), []

    def episodes(self) -> list[tuple[list[int], bool]]:
        """Slots of the rows present of each episode, by the age of the first, and whether it has ended."""
        found: list[list[int]] = []
        going: dict[Hashable, list[int]] = {}
        for number, (stream, end, valid) in enumerate(self.rows):
            if valid and stream not in going:
                going[stream] = []
                found.append(going[stream])
            if valid:
                going[stream].append(number)
            if end or not valid:
                going.pop(stream, None)
        oldest = len(self.rows) - self.capacity
        present = sorted(kept for line in found if (kept := [number for number in line if number >= oldest]))
        return [([self.slot(number) for number in line], self.rows[line[-1]][1]) for line in present]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, list[Any]]:
    """Capacity, lanes, first slot, and ends, ids and masks of what is written; None: the table is cleared."""
    lanes = draw(st.sampled_from([1, 1, 2, 3]))
    capacity = lanes * draw(st.integers(1, 30 // lanes))
    random, written = draw(st.randoms(use_true_random=False)), list[Any]()
    for _ in range(draw(st.integers(1, 8))):
        by_id, share, masked = (
            draw(st.booleans()),
            draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
            random.choice([0, 0, 0.3]),
        )
        most = draw(st.sampled_from([6, capacity, capacity + 1, 5 * capacity // 2]))
        rows = range(random.randint(0, most) // lanes * lanes)
        names = [-(2**63), 0, 1, 7, 2**63 - 1][: random.randint(1, 5)]
        ids = [random.choice(names) for _ in rows] if by_id else None
        written.append(([random.random() < share for _ in rows], ids, [random.random() >= masked for _ in rows]))
        written += [None] * (random.random() < 0.05)
    return capacity, lanes, draw(st.integers(0, capacity // lanes - 1)) * lanes, written


def check_rows(table: EpisodeTable, model: Model) -> None:
    """Every answer about every slot."""
    slots = torch.arange(model.capacity)
    places = {slot: (line, at) for line, _ in model.episodes() for at, slot in enumerate(line)}
    found = [places.get(slot, ([slot], -1)) for slot in range(model.capacity)]
    assert table.ahead(slots).tolist() == [len(line) - 1 - at if at >= 0 else -1 for line, at in found]
    assert table.behind(slots).tolist() == [at for _, at in found]
    for before, after, dilation in ((1, 2, 2), (2, 2, 2**31 - 1)):
        rows, valid = table.window(slots.repeat_interleave(2)[::2], before, after, dilation)
        for (line, at), row, inside in zip(found, rows.tolist(), valid.tolist(), strict=True):
            wanted = [max(at, 0) + k * dilation for k in range(-before, after + 1)]
            assert inside == [0 <= w < len(line) for w in wanted]
            assert row == [line[min(max(w, 0), len(line) - 1)] for w in wanted]
    assert table.shift(slots, 2**63 - 1).tolist() == [line[-1] for line, _ in found]
    assert table.shift(slots, -(2**63)).tolist() == [line[0] for line, _ in found]


def check_counts(table: EpisodeTable, model: Model) -> None:
    """Counts, spans, and that every start is drawn by exactly its share of the random numbers."""
    lines = model.episodes()
    spans = [(line[0], len(line), ended) for line, ended in lines]
    assert list(zip(*(x.tolist() for x in table.episodes()[:3]), strict=True)) == spans
    assert table.count == len(spans)
    assert table.rows == sum(rows for _, rows, _ in spans)
    assert table.masked == min(len(model.rows), model.capacity) - table.rows
    for need in (1, 2, 7):
        starts, expected = table.starts(need), [line[: len(line) - need + 1] for line, _ in lines if len(line) >= need]
        every = sorted(slot for line in expected for slot in line)
        assert (starts.rows, starts.episodes) == (len(every), len(expected))
        assert torch.nonzero(starts.allowed(torch.arange(model.capacity))).flatten().tolist() == every
        if every:
            assert sorted(starts.at(torch.arange(len(every))).tolist()) == every
            episodes = randoms_of_ranks(len(expected))
            for place, number in ((0, 0), (-1, 2**63 - 1)):
                drawn = starts.draw(torch.cat([episodes, torch.full_like(episodes, number)]), by_episode=True).tolist()
                assert sorted(drawn) == sorted(line[place] for line in expected)


@examples(1)
@given(history=histories())
def test_tables_know_what_a_list_of_all_rows_knows(history):
    """Tables of both kinds, and halfway a copy of each in the other kind; all have one state."""
    capacity, lanes, start, written = history
    tables, model = [make(kind, capacity, lanes) for kind in KINDS], Model(capacity, lanes, start)
    for number, batch in enumerate(written):
        if number == len(written) // 2:
            tables = [copied(source, kind) for source, kind in zip(tables, KINDS[::-1], strict=True)]
        run = None if batch is None else model.write(*batch)
        if run is None:
            model.clear()
        for table in tables:
            if run is None:
                table.clear()
            else:
                dtypes = (torch.bool, torch.int64, torch.bool)
                given_ = zip(batch, dtypes, strict=True)
                table.record(run, *(None if x is None else torch.tensor(x, dtype=dtype) for x, dtype in given_))
            check_rows(table, model)
            check_counts(table, model)
        assert plain_state(tables[0]) == plain_state(tables[-1])


def copied(source: EpisodeTable, kind: Kind) -> EpisodeTable:
    """A table that was in use before it takes over the state of another."""
    table = make(kind, source.capacity, source.num_envs)
    table.starts(3)
    table.record(Run(0, source.num_envs, source.capacity), None)
    table.load_state_dict(source.state_dict())
    return table


@kinds
def test_an_endless_episode_and_streams_that_are_over_take_no_memory(kind):
    """One episode, many wraps; then a thousand ids that never end, 50 at a time in the ring."""
    for step in (7, 1000):
        table, cursor, sizes = make(kind, 64), 0, []
        for turn in range(1, 41):
            skip = max(0, step - 64)
            table.record(Run((cursor + skip) % 64, step - skip, 64, skip), torch.zeros(step, dtype=torch.bool))
            cursor, held = (cursor + step) % 64, min(turn * step, 64)
            assert [x.tolist() for x in table.episodes()] == [[(cursor - held) % 64], [held], [False], [1]]
            sizes.append(table.nbytes)
        assert max(sizes) <= 2 * min(sizes)
    table, sizes = make(kind, 100), []
    for i in range(500):
        table.record(Run(4 * i % 100, 4, 100), None, integers([2 * i, 2 * i, 2 * i + 1, 2 * i + 1]))
        sizes.append(table.nbytes)
    assert table.count == 50
    assert sizes[-1] == sizes[100]


@kinds
def test_what_does_not_fit_is_refused_and_changes_nothing(kind):
    table = make(kind, 8, 2)
    table.record(Run(0, 4, 8), torch.tensor([False, False, True, False]))
    before, flags = plain_state(table), torch.zeros(2, dtype=torch.bool)
    for run in (Run(6, 2, 8), Run(4, 2, 9), Run(4, 9, 8), Run(8, 2, 8), Run(5, 2, 8, 1), Run(-4, 2, 8), Run(4, -1, 8)):
        with pytest.raises(OptionError, match=r"a run in a ring of 8|recorded in ring order: slot 4 is next"):
            table.record(run, torch.zeros(max(run.total, 0), dtype=torch.bool))
    bad: list[list[Any]] = [[x] for x in (flags[:1], flags.view(1, 2), flags.int(), flags.to("meta"))]
    for given_ in [*bad, [None, None, flags.int()], [None, integers([1, 2, 3])], [None, flags.int()]]:
        with pytest.raises(OptionError, match=r"must be a torch\.(bool|int64) tensor \[2\], got"):
            table.record(Run(4, 2, 8), *given_)
    assert plain_state(table) == before
    for capacity, lanes in ((8, 1), (10, 2)):
        with pytest.raises(CheckpointError, match=rf"capacity 8 and 2 environments, this one {capacity} and {lanes}"):
            make(kind, capacity, lanes).load_state_dict(table.state_dict())
    for size in ((0, 1), (-1, 1), (2**30 + 1, 1), (10, 0), (10, 3), (10, 20)):
        with pytest.raises(CapacityError, match=str(size[0])):
            make(kind, *size)


@kinds
def test_bad_questions_are_refused(kind):
    table, at = make(kind, 8), integers([0])
    table.record(Run(0, 4, 8), None)
    starts = table.starts(5)
    asks: list[Any] = [table.ahead, table.behind, table.starts(2).allowed]
    asks += [partial(table.window, before=0, after=1), partial(table.shift, steps=1)]
    for ask in asks:
        for slot in (-1, 8, 2**40):
            with pytest.raises(SlotError, match=rf"^slot {slot} at position 1 is outside \[0, 8\)"):
                ask(integers([3, slot]))
    calls: list[Any] = [
        (lambda: table.ahead(at.int()), r"^slots must be a torch\.int64 tensor \[n\]"),
        (lambda: table.shift(at, integers([1, 2])), r"^steps must be a torch\.int64 tensor \[1\]"),
    ]
    for call, words in calls:
        with pytest.raises(OptionError, match=words):
            call()
    message = r"no row has 5 rows of its episode from itself on: add longer episodes"
    for by_episode in (False, True):
        with pytest.raises(EmptyBufferError, match=message):
            starts.draw(integers([0, 0]), by_episode=by_episode)
        assert starts.draw(integers([]), by_episode=by_episode).tolist() == []


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
    numbers: dict[str, Any] = {
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
def test_a_damaged_state_is_refused_and_changes_nothing(kind):
    table = make(kind, 8, 2)
    table.record(Run(0, 2, 8), torch.tensor([True, False]))
    table.record(Run(2, 6, 8), torch.tensor([False, False, True, False, False, False]))
    table.record(Run(0, 4, 8), None)
    whole, before = table.state_dict(), plain_state(table)
    assert before["serials"] == [0, 2, 3, 4], "free, of lane 1, ended, of lane 0"
    for damage in damages(whole):
        with pytest.raises(CheckpointError, match="damaged"):
            table.load_state_dict(damage)
        assert plain_state(table) == before
    table.load_state_dict(whole)
    for x in whole.values():
        if isinstance(x, torch.Tensor):
            x.zero_()
    assert plain_state(table) == before, "a state is a copy"


@kinds
def test_lists_of_slots_are_no_longer_than_the_ring(kind):
    even, by_row, uneven = make(kind, 400, 4), make(kind, 400, 4), make(kind, 400, 4)
    even.record(Run(0, 400, 400), None)
    random = torch.Generator().manual_seed(0)
    for row in range(2000):
        by_row.record(Run(row % 400, 1, 400), None)
    for i in range(60):
        uneven.record(Run(100 * i % 400, 100, 400), None, torch.randint(0, 4, (100,), generator=random))
    assert by_row.nbytes <= even.nbytes
    assert 400 < uneven.nbytes - even.nbytes < 400 * 32 or kind == "torch"
