"""Rows that are hidden from draws: their priorities stay, their mass is gone, whatever happens to them meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedReplayBuffer
from ostinato.core.records import Run
from ostinato.errors import SlotError
from ostinato.samplers.priorities import Ledger
from ostinato.testing.views import make_view

if TYPE_CHECKING:
    from ostinato.core.records import View

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


def agree(ledger: Ledger, model: Model, view: View) -> None:
    tree = ledger.tree(view)
    priorities, values = ledger.content()
    assert priorities.tolist() == model.priorities
    assert values.tolist() == pytest.approx(model.values(), rel=1e-14, abs=0)
    assert ledger.default == model.default
    drawable = [value for value in values.tolist() if value > 0]
    assert tree.minimum == min(drawable, default=float("inf"))
    assert tree.total == pytest.approx(sum(drawable), rel=1e-14)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_history_leaves_what_plain_python_leaves(seed: int, *, within: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ledger, model, written = Ledger(0.6, 1e-3, within=within), Model(0.6, 1e-3, within=within), 0
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
            ledger.receive(Run(start, rows, CAPACITY), view)
            model.priorities += [0.0] * (view.rows - len(model.priorities))
            for i in range(rows):
                model.put((start + i) % CAPACITY, default, given=False)
        elif step in {1, 2}:
            slots = some(CAPACITY)
            (ledger.hide if step == 1 else ledger.show)(slots, view)
            (model.hidden.update if step == 1 else model.hidden.difference_update)(slots.tolist())
        elif step == 3:
            ledger.alpha = model.alpha = float(torch.rand((), generator=generator))
        else:
            slots = some(view.rows)
            given = torch.randint(0, 4, slots.shape, generator=generator).double() / 3
            stamps = view.stamps.of(slots)
            if step == 4:
                ledger.assign(slots, given, view)
            elif step == 5 or ledger.learn(slots, given, stamps, view) is None:
                ledger._assign_on_device(ledger.tree(view), slots, given, None)
                ledger._largest, ledger._dirty = max(float(ledger._largest), float(given.max())), within
            pairs = dict(zip(slots.tolist(), given.tolist(), strict=True))
            model.most = max(model.most, float(given.max()))
            for slot, priority in pairs.items():
                model.put(slot, priority)
        agree(ledger, model, view)


def hidden_buffer(**options: Any) -> PrioritizedReplayBuffer:
    settings = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "storage": LazyTensorStorage(8), "batch_size": 64, **options}
    rb = PrioritizedReplayBuffer(**settings)
    rb.extend(torch.arange(6))
    rb.update_priority(torch.arange(6), torch.tensor([0.25, 1.0, 2.0, 3.0, 4.0, 5.0]))
    return rb


def hide(rb: PrioritizedReplayBuffer, slots: list[int], *, show: bool = False) -> None:
    sampler: Any = rb.sampler
    (sampler.show if show else sampler.hide)(torch.tensor(slots, dtype=torch.int64), rb._engine.view())


def test_hidden_rows_are_not_drawn_and_weights_leave_them_out() -> None:
    rb = hidden_buffer()
    hide(rb, [0, 5])
    batch, info = rb.sample(return_info=True)
    assert set(batch.tolist()) <= {1, 2, 3, 4}
    assert torch.allclose(info["priority_weight"], 1 / batch.float()), "the smallest of those that can be drawn is 1"
    rb.update_priority([0, 0], [7.0, 9.0])
    assert 0 not in rb.sample().tolist()
    assert rb.sampler.priorities[0] == 9  # type: ignore[attr-defined]
    hide(rb, [1, 2, 3, 4, 5])
    hide(rb, [0], show=True)
    assert set(rb.sample().tolist()) == {0}


def test_a_slot_may_be_hidden_before_it_is_written_and_never_shows_before() -> None:
    rb = hidden_buffer(eps=1.0)
    hide(rb, [6])
    hide(rb, [7], show=True)
    hide(rb, [6, 7], show=True)
    assert max(rb.sample(512).tolist()) == 5
    hide(rb, [6])
    rb.extend(torch.tensor([6, 7]))
    drawn = set(rb.sample(512).tolist())
    assert 6 not in drawn
    assert 7 in drawn
    rb.empty()
    rb.extend(torch.arange(8))
    assert set(rb.sample(512).tolist()) == set(range(8)), "an emptied buffer hides nothing"


@pytest.mark.parametrize("show", [False, True])
@pytest.mark.parametrize("bad", [-1, 8])
def test_slots_beyond_the_buffer_are_refused(bad: int, *, show: bool) -> None:
    rb = hidden_buffer()
    hide(rb, [1])
    before = rb.sampler.state_dict()["values"]
    with pytest.raises(SlotError):
        hide(rb, [2, bad], show=show)
    assert torch.equal(rb.sampler.state_dict()["values"], before)


def test_a_checkpoint_leaves_it_to_the_buffer_which_rows_may_be_drawn(tmp_path: Any) -> None:
    rb = hidden_buffer()
    hide(rb, [0, 5])
    rb.dumps(tmp_path / "saved")
    again = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(20), batch_size=4096)
    again.loads(tmp_path / "saved")
    assert {0, 5} <= set(again.sample().tolist())
