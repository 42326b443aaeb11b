"""The episode table, native and in NumPy: memory and bad input. What it answers: `tests/unit/units`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest
import torch

from ostinato._backend import backend, use_backend
from ostinato.core.episodes.table import EpisodeTable
from ostinato.core.records import Run
from ostinato.errors import CapacityError, CheckpointError, EmptyBufferError, OptionError, SlotError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def plain_state(table: EpisodeTable) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in table.state_dict().items()}


@kinds
def test_an_endless_episode_and_streams_that_are_over_take_no_memory(kind: Kind) -> None:
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
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: Kind) -> None:
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
def test_bad_questions_are_refused(kind: Kind) -> None:
    table, at = make(kind, 8), integers([0])
    table.record(Run(0, 4, 8), None)
    starts = table.starts(5)
    asks: list[Callable[[Tensor], object]] = [table.ahead, table.behind, table.ended, table.starts(2).allowed]
    asks += [partial(table.window, before=0, after=1), partial(table.shift, steps=1)]
    for ask in asks:
        for slot in (-1, 8, 2**40):
            with pytest.raises(SlotError, match=rf"^slot {slot} at position 1 is outside \[0, 8\)"):
                ask(integers([3, slot]))
    calls: list[tuple[Callable[[], object], str]] = [
        *((partial(table.window, at, *counts), "before and after") for counts in ((-1, 0), (0, 0, 0), (0, 2**31))),
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
