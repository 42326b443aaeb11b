"""What users of replay buffers were bitten by elsewhere, one test each: windows, slices, returns, stacks and goals."""

from __future__ import annotations

import gc
import math
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from ostinato.errors import CapacityError, EmptyBufferError, SchemaError

from ...episodes import Log, Row, batch_of
from ...windows import check_frames, check_hindsight, check_nstep, check_sequence, check_slices, reward_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ENDS = [("next", "terminated"), ("next", "truncated")]


def buffer(capacity: int, size: int = 12, **options: Any) -> ReplayBuffer:
    ndim = options.pop("ndim", 1)
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return ReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim), batch_size=size, **options)


def slices(length: int = 3, **options: Any) -> SliceSampler:
    return SliceSampler(slice_len=length, end_keys=ENDS, **options)


def written(log: Log, rb: ReplayBuffer, *rows: int) -> ReplayBuffer:
    for count in rows:
        log.extend(rb, count)
    return rb


def episode(number: int, steps: int, *, first_id: int = 0, truncated: bool = False) -> list[Row]:
    last = steps - 1
    return [
        Row(0, number, t, first_id + t, terminated=t == last and not truncated, truncated=t == last and truncated)
        for t in range(steps)
    ]


# -- slices and windows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_has_one_episode_and_consecutive_steps(seed: int) -> None:
    log = Log(40, longest=9, seed=seed)
    rb = written(log, buffer(40, sampler=slices()), 35, 30, 17)
    for _ in range(20):
        batch, info = rb.sample(return_info=True)
        check_slices(log, batch, info, length=3)
        assert (batch["episode"].view(-1, 3) == batch["episode"].view(-1, 3)[:, :1]).all()
        assert (batch["t"].view(-1, 3).diff() == 1).all()


def test_the_last_step_of_every_episode_is_drawn() -> None:
    log = Log(60, longest=8, seed=1)
    rb = written(log, buffer(60, 60, sampler=slices(2)), 60)
    seen = {slot for _ in range(60) for slot in rb.sample(return_info=True)[1]["index"].tolist()}
    assert seen == {slot for slots, _ in log.episodes() if len(slots) > 1 for slot in slots}


@pytest.mark.parametrize("fill", [[9], [10], [11], [10, 10, 5], [3] * 11])
@pytest.mark.parametrize("unit", [None, NStep(3, 0.9), SequenceUnit(3, burn_in=1), FrameStack(2, ["obs"])], ids=str)
def test_indices_lie_in_the_rows_present(fill: list[int], unit: Any) -> None:
    log = Log(10, longest=5)
    rb = written(log, buffer(10, 30, sample_unit=unit, sampler=None if unit else slices(2, strict_length=False)), *fill)
    index = rb.sample(return_info=True)[1]["index"]
    assert 0 <= int(index.min()) <= int(index.max()) < len(rb) == min(10, sum(fill))


@pytest.mark.parametrize("by", ["add", "extend"])
def test_sampling_goes_on_when_the_buffer_gets_full_and_after(by: str) -> None:
    log = Log(8, longest=4, seed=3)
    rb = buffer(8, 6, sampler=slices(2, strict_length=False))
    for _ in range(3 * 8):
        if by == "add":
            log.add(rb)
        else:
            log.extend(rb, 1)
        check_slices(log, *rb.sample(return_info=True), length=2, strict=False)


@pytest.mark.parametrize("cursor", range(10))
def test_no_window_holds_the_write_cursor(cursor: int) -> None:
    log = Log(10, longest=1000)  # an episode that never ends
    rb = written(log, buffer(10, 12, sampler=slices(4)), 10 + cursor)
    other = buffer(10, 4, sample_unit=SequenceUnit(3, burn_in=1, bootstrap=1))
    other.extend(batch_of(log.rows))
    for _ in range(5):
        assert (rb.sample()["id"].view(-1, 4).diff() == 1).all()
        check_sequence(log, *other.sample(return_info=True), length=3, burn_in=1, bootstrap=1)


def test_flags_in_slices_are_those_stored() -> None:
    log = Log(50, longest=5, seed=2)
    rb = written(log, buffer(50, sampler=slices(2)), 50)
    present = log.present()
    for _ in range(10):
        batch, info = rb.sample(return_info=True)
        rows = [present[slot] for slot in info["index"].tolist()]
        for flag in ("terminated", "truncated", "done"):
            assert batch["next"][flag].tolist() == [getattr(row, flag) for row in rows]
        assert info["next", "terminated"].tolist() == [row.terminated for row in rows]


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("size", "longest", "period"), [(1, 3, 2), (3, 7, 4), (7, 3, 5), (11, 20, 3), (23, 5, 4)])
def test_overwritten_episodes_are_never_taken_for_whole(
    size: int, longest: int, period: int, prioritized: bool
) -> None:
    log = Log(11, longest=longest, seed=size)
    sampler = PrioritizedSampler(11, 0.7, 0.5) if prioritized else None
    rb = buffer(11, 5, sample_unit=SequenceUnit(period, burn_in=1), sampler=sampler)
    for _ in range(8):
        log.extend(rb, size)
        batch, info = rb.sample(return_info=True)
        check_sequence(log, batch, info, length=period, burn_in=1)
        steps = batch["id"].view(5, -1).diff()
        assert ((steps == 1) | (steps == 0)).all()


@pytest.mark.parametrize("seed", range(4))
def test_terminations_and_truncations_both_end_windows(seed: int) -> None:
    log = Log(30, longest=4, seed=seed)
    rb = written(log, buffer(30, 30, sample_unit=SequenceUnit(5)), 45)
    batch, info = rb.sample(return_info=True)
    check_sequence(log, batch, info, length=5)
    ends = batch["next"]["done"].view(-1, 5)[:, :-1] & info["validity_mask"].view(-1, 5)[:, 1:]
    assert not ends.any()


# -- returns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 50])
def test_n_step_returns_are_those_of_a_loop_over_the_log_once_full(n: int) -> None:
    log = Log(50, longest=7, seed=n)
    rb = written(log, buffer(50, 40, sample_unit=NStep(n, 0.9)), 49, 2, 33)
    for _ in range(3):
        check_nstep(log, *rb.sample(return_info=True), n=n, gamma=0.9)


def test_returns_stop_at_a_time_limit() -> None:
    rows = [*episode(1, 3, truncated=True), *episode(2, 3, first_id=3)]
    batches = []
    for n in (3, 50):  # short and long windows see the same
        rb = buffer(60, 6, sample_unit=NStep(n, 0.5))
        rb.extend(batch_of(rows))
        batches.append(rb.sample())
    for key in ("id", "gamma", "steps_to_next_obs"):
        assert torch.equal(batches[0][key], batches[1][key])
    for key, value in batches[0]["next"].items():
        assert torch.equal(value, batches[1]["next"][key]), key
    first = batches[0]["episode"] == 1
    assert (batches[0]["next"]["obs"][first][:, 2] == 3).all()  # the true last observation: step 3 of episode 1
    assert not batches[0]["next"]["terminated"][first].any()


def test_an_edit_of_a_returned_field_changes_no_other_field_and_no_row() -> None:
    units: Sequence[Any] = [NStep(2, 0.9), FrameStack(2, ["obs"]), SequenceUnit(2), Hindsight(reward_of)]
    for unit in [*units, None]:
        log = Log(20, seed=5)
        rb = written(log, buffer(20, 6, sample_unit=unit, sampler=None if unit else slices(2)), 20)
        before = batch_of(list(log.present().values()))
        batch, info = rb.sample(return_info=True)
        leaves = [*_leaves(batch), *[value for key, value in info.items() if key not in batch]]
        places = [leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()]
        assert len(set(places)) == len(places), f"{unit}: two fields share memory"
        for leaf in leaves:
            leaf.zero_()
        assert all(torch.equal(a, b) for a, b in zip(_leaves(rb[:]), _leaves(before), strict=True))


def _leaves(data: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for value in data.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


def test_returns_of_many_environments_do_not_mix() -> None:
    log = Log(64, "mixed", envs=8, longest=9, seed=0)
    rb = written(log, buffer(64, 40, sample_unit=NStep(4, 0.9), episodes=Episodes(ENDS, "env")), 50, 64, 30)
    for _ in range(3):
        check_nstep(log, *rb.sample(return_info=True), n=4, gamma=0.9)


# -- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["repeat", "zeros"])
def test_stacks_take_no_frame_of_an_episode_that_was_truncated(padding: str) -> None:
    rb = buffer(20, 60, sample_unit=FrameStack(4, ["obs"], padding=padding))
    rb.extend(batch_of([*episode(1, 5, truncated=True), *episode(2, 5, first_id=5)]))
    batch = rb.sample()
    first = batch["obs"][(batch["episode"] == 2) & (batch["t"] == 0)]
    assert first.numel()
    assert first[:, -1].unique(dim=0).tolist() == [[0, 2, 0]]
    expected = [0, 2, 0] if padding == "repeat" else [0, 0, 0]
    assert (first[:, :-1] == torch.tensor(expected)).all()


# -- rings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 15))
def test_batches_of_any_size_leave_the_newest_rows(size: int) -> None:
    log = Log(7, longest=4, seed=size)
    rb = buffer(7, 8, sample_unit=NStep(2, 0.9))
    for _ in range(5):
        log.extend(rb, size)
        assert sorted(rb[:]["id"].tolist()) == sorted(row.id for row in log.present().values())
        check_nstep(log, *rb.sample(return_info=True), n=2, gamma=0.9)


@pytest.mark.parametrize("size", [10, 11, 20, 35])
@pytest.mark.parametrize("layout", ["line", "lanes"])
def test_a_batch_as_long_as_the_ring_or_longer(size: int, layout: str) -> None:
    envs = 3 if layout == "lanes" else 1
    log = Log(10 * envs, layout, envs=envs, longest=6)
    rb = buffer(10 * envs, 12, ndim=2 if layout == "lanes" else 1, sampler=slices(2, strict_length=False))
    for _ in range(3):
        written(log, rb, size)
        check_slices(log, *rb.sample(return_info=True), length=2, strict=False)


def test_longer_episodes_take_no_more_room() -> None:
    rb, log = buffer(50, sampler=slices(2)), Log(50)
    for longest in (2, 10, 60, 200):
        log.longest = longest
        for _ in range(4):
            log.extend(rb, longest)
            assert len(rb) <= 50
    table = rb._engine.chronicle
    assert table is not None
    assert table.table(rb.storage).rows <= 50
    assert sum(len(slots) for slots, _ in log.episodes()) <= 50


@pytest.mark.parametrize("count", [1, 2, 16, 64])
def test_many_episodes_in_a_call_come_and_go(count: int) -> None:
    log = Log(40, longest=3, seed=count)
    rb = buffer(40, 10, sampler=slices(2, strict_length=False))
    for _ in range(6):
        log.extend(rb, 2 * count)
        check_slices(log, *rb.sample(return_info=True), length=2, strict=False)
        chronicle = rb._engine.chronicle
        assert chronicle is not None
        assert chronicle.table(rb.storage).count == len(log.episodes())


def test_batches_are_not_kept() -> None:
    log = Log(40)
    rb = written(log, buffer(40, sample_unit=[NStep(2, 0.9), FrameStack(2, ["obs"])]), 40)
    found = [weakref.ref(leaf) for leaf in _leaves(rb.sample())]
    gc.collect()
    assert not [ref for ref in found if ref() is not None]


# -- goals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written_rows", [29, 30, 31, 45, 63])
def test_future_goals_come_later_in_the_same_episode_at_the_seam_too(written_rows: int) -> None:
    log = Log(30, longest=12, seed=written_rows)
    rb = written(log, buffer(30, 40, sample_unit=Hindsight(reward_of, her_ratio=1.0)), written_rows)
    batch, info = rb.sample(return_info=True)
    check_hindsight(log, batch, info, strategy="future", ratio=1.0, late=False)
    got = batch["desired_goal"].to(torch.int64)
    assert (got // 1024 == batch["episode"]).all()
    assert (got % 1024 > batch["t"]).all()


# -- doors and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [NStep(3, 0.5), SequenceUnit(3), [NStep(2, 0.5), FrameStack(2, ["obs"])]], ids=str)
@pytest.mark.parametrize("layout", ["line", "lanes"])
def test_add_and_extend_make_the_same_buffer(unit: Any, layout: str) -> None:
    envs = 2 if layout == "lanes" else 1
    samples = []
    for one_by_one in (False, True):
        log = Log(20 * envs, layout, envs=envs)
        rb = buffer(20 * envs, ndim=2 if layout == "lanes" else 1, sample_unit=unit)
        if one_by_one:
            for _ in range(33):
                log.add(rb)
        else:
            log.extend(rb, 33)
        samples.append(_leaves(rb.sample()))
    assert all(torch.equal(a, b) for a, b in zip(*samples, strict=True))


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({"sample_unit": NStep(9, 0.9)}, 9),
        ({"sample_unit": SequenceUnit(3, burn_in=2, bootstrap=1, dilation=2)}, 11),
        ({"sample_unit": FrameStack(9, ["obs"])}, 9),
        ({"sample_unit": [NStep(5, 0.9), FrameStack(5, ["obs"])]}, 9),
        ({"sampler": SliceSampler(slice_len=9, end_keys=ENDS)}, 9),
    ],
    ids=str,
)
def test_a_ring_without_room_for_a_window_of_each_environment_is_refused(options: dict[str, Any], window: int) -> None:
    with pytest.raises(CapacityError, match=rf"8 steps of each of 1 .* takes {window}: use max_size >= {window}"):
        buffer(8, **options)
    rb = buffer(8 * 4, ndim=2, **options)  # how many environments there are shows with the first rows
    with pytest.raises(CapacityError, match=rf"of each of 4 .* takes {window}: use max_size >= {4 * window}"):
        Log(8 * 4, "lanes", envs=4).extend(rb, 2)
    assert len(rb) == 0
    written(Log(64, "lanes", envs=2), rb, 2)  # the refused rows left no trace: another number of them is fine


def test_every_option_of_a_slice_changes_something_or_raises() -> None:
    log = Log(40, longest=4, seed=9)
    rows = batch_of([*log.play(40)])
    rows["is_init"] = rows["t"] == 0

    def sample(**options: Any) -> tuple[Any, ...]:
        rb = buffer(40, sampler=SliceSampler(**{"slice_len": 3, "end_keys": ENDS, **options}))
        rb.extend(rows)
        batch, info = rb.sample(return_info=True)
        return batch["id"].tolist(), sorted(map(str, info)), [value.tolist() for value in info.values()]

    plain = sample()
    changes: list[dict[str, Any]] = [
        {"slice_len": 2},
        {"slice_len": None, "num_slices": 3},
        {"end_keys": None, "end_key": ("next", "terminated")},
        {"end_keys": None, "traj_key": "id", "strict_length": False},
        {"truncated_key": None},
        {"truncated_key": "truncated"},
        {"init_key": None},
        {"strict_length": False},
        {"strict_length": False, "pad_output": True},
        {"span": True},
        {"span": (False, 1)},
        {"replacement": False},
    ]
    for change in changes:
        assert sample(**change) != plain, change
    for refused in ({"compile": True}, {"use_gpu": True}, {"end_key": "done"}, {"ends": torch.zeros(40)}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            SliceSampler(slice_len=3, end_keys=ENDS, **refused)


def test_passes_over_episodes_stay_whole_with_prefetch() -> None:
    log = Log(60, longest=6, seed=4)
    log.play(60)
    for prefetch in range(5):
        sampler = SliceSamplerWithoutReplacement(slice_len=2, end_keys=ENDS)
        rb = buffer(60, 6, sampler=sampler, prefetch=prefetch)
        rb.extend(batch_of(log.rows))
        want = sorted(log.rows[slots[0]].episode for slots, _ in log.episodes() if len(slots) > 1)
        for _ in range(2):
            drawn = [number for batch in rb for number in batch["episode"].view(-1, 2)[:, 0].tolist()]
            assert sorted(drawn) == want


# -- what a draft was caught at ---------------------------------------------------------------------------------------


def test_a_refused_first_write_leaves_no_trace() -> None:
    rb = buffer(20, 4, sample_unit=NStep(2, 0.9))
    bad = batch_of(episode(1, 4))
    bad["next"]["done"] = torch.zeros(4, 2, dtype=torch.bool)
    with pytest.raises(SchemaError, match="one value per row"):
        rb.extend(bad)
    good = batch_of(episode(1, 4))
    del good["next"]["done"]
    rb.extend(good)
    assert int(rb.sample()["steps_to_next_obs"].max()) <= 2


def test_float64_rewards_are_added_up_in_float64() -> None:
    rb = buffer(20, 1, sample_unit=NStep(10, 0.99))
    rows = batch_of(episode(1, 20))
    rows["next"]["reward"] = torch.full((20,), 1 / 3, dtype=torch.float64)
    rb.extend(rows)
    batch = rb.sample()
    steps = int(batch["steps_to_next_obs"])
    assert math.isclose(float(batch["next"]["reward"]), sum(0.99**k / 3 for k in range(steps)), rel_tol=1e-14)


def test_a_stack_of_obs_and_next_obs_is_one_stack() -> None:
    rb = buffer(20, 4, sample_unit=FrameStack(3, ["obs", ("next", "obs")]))
    log = Log(20, longest=3)
    written(log, rb, 15)
    check_frames(log, *rb.sample(return_info=True), k=3)


def test_another_slice_length_begins_another_pass() -> None:
    log = Log(60, longest=6, seed=2)
    rb = written(log, buffer(60, 4, sampler=SliceSamplerWithoutReplacement(num_slices=2, end_keys=ENDS)), 60)
    check_slices(log, *rb.sample(4, return_info=True), length=2)
    check_slices(log, *rb.sample(10, return_info=True), length=5)
    with pytest.raises(EmptyBufferError, match="has the 9 rows of a slice"):
        rb.sample(18)


def test_rows_of_no_episode_are_in_no_window() -> None:
    log = Log(40, masked=0.3, seed=1)
    rb = buffer(40, 30, sample_unit=SequenceUnit(3, "include_reset"), episodes=Episodes(ENDS, mask_key="mask"))
    written(log, rb, 60)
    batch, info = rb.sample(return_info=True)
    assert batch["mask"].all()
    assert not info["validity_mask"].all()
