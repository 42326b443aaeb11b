"""Rows that are left out of draws: what can be drawn, with which probability, after every save."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    Episodes,
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.core.records import Run
from ostinato.errors import CheckpointError, EmptyBufferError, OstinatoError, SlotError
from ostinato.testing.views import make_view

from ...effort import examples
from ...episodes import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ostinato.core.records import View

pytestmark = pytest.mark.usefixtures("backend")


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
    "windows": Kind(plain().sampler, lambda: SequenceUnit(3, "strict"), lambda line: line[: max(0, len(line) - 2)]),
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
    return sampler._tree_for(rb._engine.view()).leaves(len(rb))  # type: ignore[no-any-return]


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

    @examples(0.25)
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


@pytest.mark.parametrize("unit", [None, NStep(2, 1.0, next_keys=())], ids=str)
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(8, ALPHA, 0.5, EPS)])
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


def test_another_sampler_takes_masks_over() -> None:
    rb = masked(0, 5)
    rb.set_sampler(PrioritizedSampler(8, ALPHA, 0.5, EPS))
    assert set(rb.sample()["row"].tolist()) == {1, 2, 3, 4, 6, 7}


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


MASKED_AT = 4


def cut(batch_size: int = 400, **options: Any) -> ReplayBuffer:
    """One episode of ten rows whose fifth is masked."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20),
        batch_size=batch_size,
        episodes=Episodes("terminated", mask_key="valid"),
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    t = torch.arange(10)
    goals = {"achieved_goal": t + 0.0, "next_achieved_goal": t + 1.0, "desired_goal": torch.full((10,), 99.0)}
    flags = {"terminated": t == 9, "valid": t != MASKED_AT}
    rb.extend({"obs": t, "next_obs": t + 1, "reward": torch.ones(10), **flags, **goals})
    return rb


def test_returns_stop_before_a_masked_row() -> None:
    batch = cut(sample_unit=NStep(3, 1.0)).sample()
    names = ("obs", "steps_to_next_obs", "next_obs", "reward", "terminated")
    found = set(zip(*(batch[name].tolist() for name in names), strict=True))
    steps = {0: 3, 1: 3, 2: 2, 3: 1, 5: 3, 6: 3, 7: 3, 8: 2, 9: 1}
    assert found == {(t, k, t + k, float(k), t + k == 10) for t, k in steps.items()}


@pytest.mark.parametrize("boundary", ["pad", "stop", "strict", "include_reset"])
def test_windows_do_not_reach_across_a_masked_row(boundary: Any) -> None:
    batch, info = cut(sample_unit=SequenceUnit(3, boundary)).sample(return_info=True)
    rows = torch.where(info["validity_mask"], batch["obs"], -1).view(-1, 3)
    whole = {(0, 1, 2), (1, 2, 3), (5, 6, 7), (6, 7, 8), (7, 8, 9)}
    late = {
        "pad": {(2, 3, -1), (3, -1, -1), (8, 9, -1), (9, -1, -1)},
        "include_reset": {(2, 3, -1), (3, -1, 5), (8, 9, -1), (9, -1, -1)},
    }
    assert set(map(tuple, rows.tolist())) == whole | late.get(boundary, set())


def test_stacks_begin_anew_after_a_masked_row() -> None:
    stacks = set(map(tuple, cut(sample_unit=FrameStack(3, ["obs"])).sample()["obs"].tolist()))
    first = {0: 0, 1: 0, 2: 0, 3: 0, 5: 5, 6: 5, 7: 5, 8: 5, 9: 5}
    assert stacks == {(max(t - 2, s), max(t - 1, s), t) for t, s in first.items()}


def test_goals_come_from_the_same_side_of_a_masked_row() -> None:
    unit = Hindsight(lambda batch: (batch["next_achieved_goal"] == batch["desired_goal"]).float(), her_ratio=1.0)
    batch = cut(sample_unit=unit, batch_size=2000).sample()
    for side in (range(MASKED_AT), range(MASKED_AT + 1, 10)):
        pairs = {
            (t, g) for t, g in zip(batch["obs"].tolist(), batch["desired_goal"].tolist(), strict=True) if t in side
        }
        assert pairs == {(t, u + 1.0) for t in side for u in side if u >= t}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["uniform", "pass", "priority"])
def test_slices_lie_on_one_side_of_a_masked_row(name: str, strict: bool) -> None:
    options: dict[str, Any] = {"slice_len": 5, "strict_length": strict}
    samplers: dict[str, Callable[[], Any]] = {
        "uniform": lambda: SliceSampler(**options),
        "pass": lambda: SliceSamplerWithoutReplacement(**options),
        "priority": lambda: PrioritizedSliceSampler(20, 1.0, 1.0, **options),
    }
    rb = cut(5, sampler=samplers[name]())
    drawn = {tuple(rb.sample()["obs"].tolist()) for _ in range(60)}
    assert drawn == {(5, 6, 7, 8, 9)} | (set() if strict else {(0, 1, 2, 3)})


@pytest.mark.parametrize(
    "sampler", [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(20, 1.0, 1.0)]
)
def test_a_buffer_of_masked_rows_alone_has_none_to_draw(sampler: Any) -> None:
    rb = cut(sampler=sampler())
    rb.set_at_("valid", torch.zeros(10, dtype=torch.bool), torch.arange(10))
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.set_at_("valid", torch.ones(1, dtype=torch.bool), torch.tensor([6]))
    assert set(rb.sample()["obs"].tolist()) == {6}


def test_weights_leave_masked_rows_out() -> None:
    """The smallest value, which weights are divided by, is that of a row that can be drawn."""
    rb = cut(sampler=PrioritizedSampler(20, 1.0, 1.0, eps=0.0))
    rb.update_priority(torch.arange(10), torch.arange(10.0) + 2.0)
    rb.update_priority(torch.tensor([MASKED_AT]), 0.5)
    batch, info = rb.sample(return_info=True)
    assert torch.allclose(info["priority_weight"], 2.0 / (batch["obs"] + 2.0))
    rb.set_at_("valid", torch.tensor([True]), torch.tensor([MASKED_AT]))
    _, info = rb.sample(5_000, return_info=True)
    assert torch.allclose(info["priority_weight"][info["index"] == 0], torch.tensor(0.25)), "it has kept its priority"


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


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("seed", range(6))
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
                sampler._set_on_device(sampler._tree_for(view), slots, given, None, view.rows)
                sampler._largest = max(float(sampler._largest), float(given.max()))
                sampler._largest_outdated = within
            else:
                assert sampler.update(slots, given, generations, view) == 0
            pairs = dict(zip(slots.tolist(), given.tolist(), strict=True))
            model.most = max(model.most, float(given.max()))
            for slot, priority in pairs.items():
                model.put(slot, priority)
        agree_with_model(sampler, model, view)


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
