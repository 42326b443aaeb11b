"""Rows that are left out of draws: what can be drawn, with which probability, after every save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
)
from ostinato.core.records import Run
from ostinato.errors import CheckpointError, EmptyBufferError, SlotError
from ostinato.testing.views import make_view

from ...episodes import Log

if TYPE_CHECKING:
    from ostinato.core.records import View


ALPHA, EPS = 0.6, 1e-3


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
    """An edit of masks shows no row that `hide` was called for, and `show` no masked one."""
    rb = masked(0, 5)
    sampler: Any = rb.sampler
    slots = torch.tensor([1, 5])
    sampler.hide(slots, rb._engine.view())
    rb.set_at_("valid", torch.tensor([True, True]), torch.tensor([0, 1]))
    assert set(rb.sample()["row"].tolist()) == {0, 2, 3, 4, 6, 7}
    sampler.show(slots, rb._engine.view())
    assert set(rb.sample()["row"].tolist()) == {0, 1, 2, 3, 4, 6, 7}
    values = sampler.state_dict()["values"]
    for bad in (-1, 8):
        for change in (sampler.hide, sampler.show):
            with pytest.raises(SlotError):
                change(torch.tensor([2, bad]), rb._engine.view())
    assert torch.equal(sampler.state_dict()["values"], values)


@pytest.mark.parametrize(
    ("sampler", "unit"),
    [
        (RandomSampler, None),
        (RandomSampler, NStep(2, 1.0, next_keys=())),
        (lambda: PrioritizedSampler(8, ALPHA, 0.5, EPS), None),
    ],
)
def test_a_row_that_was_masked_between_draw_and_gather_is_not_delivered(sampler: Any, unit: Any) -> None:
    """Another thread replaces the rows drawn by masked ones: the batch is drawn anew."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=sampler(),
        sample_unit=unit,
        batch_size=20,
        episodes=Episodes("done", mask_key="valid"),
    )

    def write(valid: bool) -> None:
        rows = {"row": torch.arange(4), "reward": torch.ones(4), "done": torch.zeros(4, dtype=torch.bool)}
        rb.extend({**rows, "valid": torch.full((4,), valid)})

    write(valid=True)
    write(valid=True)
    engine: Any = rb._engine
    ticket = engine.draw(20)
    write(valid=False)
    assert engine.gather(ticket) is None
    assert rb.sample()["valid"].all()


def test_a_pass_keeps_the_rest_of_a_batch_whose_rows_were_masked_before_the_gather() -> None:
    rb = masked()
    rb.set_sampler(SamplerWithoutReplacement())
    engine: Any = rb._engine
    ticket = engine.draw(6)
    rb.set_at_("valid", torch.tensor([False]), ticket.draw.slots[2:3])
    rest = engine.gather(ticket).ticket.records.tolist()
    assert rest == [slot for i, slot in enumerate(ticket.draw.slots.tolist()) if i != 2]
    assert sorted(rest + rb.sample(8)["row"].tolist()) == sorted(set(range(8)) - {int(ticket.draw.slots[2])})


@pytest.mark.parametrize(("shuffle", "prefetch"), [(False, 0), (True, 0), (True, 2)])
def test_a_pass_draws_no_row_twice_and_ends_while_masked_rows_replace_others(shuffle: bool, prefetch: int) -> None:
    """One iteration is one pass, whatever is written and edited meanwhile; rows that stay valid come exactly once."""
    for seed in range(30):
        log = Log(3 + seed % 6, longest=100, seed=seed, masked=0.2)
        rb = ReplayBuffer(
            storage=LazyTensorStorage(log.capacity),
            sampler=SamplerWithoutReplacement(shuffle=shuffle),
            batch_size=1 + seed % 4,
            prefetch=prefetch,
            episodes=Episodes([("next", "terminated"), ("next", "truncated")], mask_key="mask"),
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


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, lambda: PrioritizedSampler(8, ALPHA, 0.5, EPS)])
def test_masks_are_followed_by_every_sampler_down_to_the_last_row(sampler: Any) -> None:
    rb = masked(0, 5)
    for _ in range(2):
        assert set(rb.sample()["row"].tolist()) == {1, 2, 3, 4, 6, 7}
        rb.set_sampler(sampler())
    rb.set_at_("valid", torch.zeros(8, dtype=torch.bool), torch.arange(8))
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.set_at_("valid", torch.ones(1, dtype=torch.bool), torch.tensor([6]))
    assert set(rb.sample()["row"].tolist()) == {6}


def test_windows_over_resets_do_not_reach_across_a_masked_row() -> None:
    rb = masked(4)
    rb.set_sampler(RandomSampler())
    batch, info = rb.view(sample_unit=SequenceUnit(3, "include_reset")).sample(400, return_info=True)
    rows = torch.where(info["validity_mask"], batch["row"], -1).view(-1, 3)
    whole = {(0, 1, 2), (1, 2, 3), (5, 6, 7)}
    assert set(map(tuple, rows.tolist())) == {*whole, (2, 3, -1), (3, -1, 5), (6, 7, -1), (7, -1, -1)}


CAPACITY = 12


class Model:
    """Priorities, masks and the default priority in plain Python."""

    def __init__(self, alpha: float, eps: float, *, within: bool) -> None:
        self.alpha, self.eps, self.within = alpha, eps, within
        self.priorities: list[float] = []
        self.hidden: set[int] = set()
        self.most = 0.0

    @property
    def default(self) -> float:
        largest = max(self.priorities, default=0.0) if self.within else self.most
        return largest or 1.0

    def put(self, slot: int, priority: float, *, given: bool = True) -> None:
        self.priorities[slot] = priority
        if given:
            self.most = max(self.most, priority)

    def values(self) -> list[float]:
        return [
            0.0 if slot in self.hidden or p + self.eps == 0 else (p + self.eps) ** self.alpha
            for slot, p in enumerate(self.priorities)
        ]


def agree_with_model(sampler: PrioritizedSampler, model: Model, view: View) -> None:
    tree = sampler._tree_for(view)
    priorities, values = sampler._contents()
    assert priorities.tolist() == model.priorities
    assert values.tolist() == pytest.approx(model.values(), rel=1e-14, abs=0)
    assert sampler.default_priority == model.default
    drawable = [value for value in values.tolist() if value > 0]
    assert tree.minimum == min(drawable, default=float("inf"))
    assert tree.total == pytest.approx(sum(drawable), rel=1e-14)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_any_history_leaves_what_plain_python_leaves(seed: int, *, within: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampler = PrioritizedSampler(CAPACITY, 0.6, 0.4, 1e-3, max_priority_within_buffer=within)
    model, written = Model(0.6, 1e-3, within=within), 0
    view = make_view(0, CAPACITY)

    def some(below: int, most: int = 6) -> torch.Tensor:
        count = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(0, below, (count,), generator=generator)

    for _ in range(250):
        step = int(torch.randint(0, 8, (), generator=generator))
        if step == 0 or not model.priorities:
            rows, default, start = int(some(5)[0]) + 1, model.default, written % CAPACITY
            written += rows
            view = make_view(written, CAPACITY)
            sampler.record_rows(Run(start, rows, CAPACITY), None, view)
            model.priorities += [0.0] * (view.rows - len(model.priorities))
            for i in range(rows):
                model.put((start + i) % CAPACITY, default, given=False)
        elif step in {1, 2}:
            slots = some(CAPACITY)
            (sampler.hide if step == 1 else sampler.show)(slots, view)
            (model.hidden.update if step == 1 else model.hidden.difference_update)(slots.tolist())
        elif step == 3:
            sampler.alpha = model.alpha = float(torch.rand((), generator=generator))
        else:
            slots = some(view.rows)
            given = torch.randint(0, 4, slots.shape, generator=generator).double() / 3
            generations = view.ring.generations(slots)
            if step == 4:
                sampler.set_priorities(slots, given, view)
            elif step == 5:
                keep = torch.rand(slots.shape, generator=generator) < 0.7
                sampler._set_on_device(sampler._tree_for(view), slots, given, keep, view.rows)
                sampler._largest_outdated = within
                slots, given = slots[keep], given[keep]
            else:
                assert sampler.update(slots, given, generations, view) == 0
            pairs = dict(zip(slots.tolist(), given.tolist(), strict=True))
            model.most = max(model.most, *given.tolist(), 0.0)
            for slot, priority in pairs.items():
                model.put(slot, priority)
        agree_with_model(sampler, model, view)
