"""Units by themselves: options, refusals, chains, units of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import (
    Episodes,
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SequenceUnit,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from ostinato.errors import (
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
    UsageError,
)

from ...episodes import Log, batch_of
from ...windows import reward_of
from ..buffers.refusals import refuses
from .rings import slices

if TYPE_CHECKING:
    from collections.abc import Callable


def filled(unit: Any = None, rows: int = 20, size: int = 4, change: Any = None, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sample_unit=unit, batch_size=size, **options)
    data = batch_of(Log(40, longest=6).play(rows))
    rb.extend(data if change is None else change(data))
    return rb


def test_bad_options_are_refused_when_given():
    refuses(
        {
            OptionError: {
                "n must be a positive integer, got 0": lambda: NStep(0, 0.9),
                r"gamma must be in \[0, 1\], got 1.1": lambda: NStep(2, 1.1),
                "k must be a positive integer": lambda: FrameStack(0, ["obs"]),
                "keys must name at least one field": lambda: FrameStack(2, []),
                "padding must be one of": lambda: FrameStack(2, ["obs"], padding="mirror"),
                "a key is a string, or a tuple of strings": lambda: FrameStack(2, [3]),  # type: ignore[list-item]
                "episode_boundary must be one of": lambda: SequenceUnit(2, "never"),
                "dilation must be a positive integer": lambda: SequenceUnit(2, dilation=0),
                r"her_ratio must be in \[0, 1\]": lambda: Hindsight(reward_of, her_ratio=1.5),
                "strategy must be one of": lambda: Hindsight(reward_of, strategy="past"),
                "empty list": lambda: ReplayBuffer(sample_unit=[]),
                "two units of one kind": lambda: ReplayBuffer(sample_unit=[NStep(2, 0.9), NStep(3, 0.9)]),
                "cannot be combined": lambda: ReplayBuffer(sample_unit=[NStep(2, 0.9), Hindsight(reward_of)]),
                "leave one of": lambda: filled([SequenceUnit(2), NStep(2, 0.9)], sampler=slices(2)),
                "mutually exclusive": lambda: Episodes("done", ends=torch.zeros(3)),
                "strictly lower than the sequence length 2": lambda: SliceSampler(slice_len=2, span=2),
                "span is True, False": lambda: SliceSampler(slice_len=2, span=(True, -1)),
                "incompatible with strict_length=True": lambda: SliceSampler(slice_len=4, pad_output=True),
            },
            KindError: {
                "reward_fn must be a function from a batch": lambda: Hindsight(3),  # type: ignore[arg-type]
                "SampleUnit instance or a list of them, got int": lambda: ReplayBuffer(sample_unit=[3]),  # type: ignore[list-item]
            },
            UsageError: {
                "make another unit": (
                    lambda: setattr(SequenceUnit(2, "strict"), "length", 6),
                    lambda: setattr(Hindsight(reward_of), "her_ratio", 7.0),
                ),
            },
        }
    )


def without(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def kept(data: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key not in keys}

    return lambda data: {**kept(data), "next": kept(data["next"])}


def with_next(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: {
        **data,
        **dict.fromkeys(fields.pop("also", ()), torch.zeros(20)),
        "next": {**data["next"], **fields},
    }


UNFIT: list[Any] = [
    (NStep(2, 0.9), without("done", "terminated", "truncated"), KeyMissingError, "no field done, terminated"),
    (NStep(2, 0.9), without("reward"), KeyMissingError, "'reward'.*name an existing field"),
    (NStep(2, 0.9, next_keys=["zip"]), None, KeyMissingError, "'zip'"),
    (NStep(2, 0.9), with_next(reward=torch.zeros(20, dtype=torch.int32)), SchemaError, "must be float16"),
    (NStep(2, 0.9), with_next(done=torch.zeros(20, 2, dtype=torch.bool)), SchemaError, "one value per row"),
    (NStep(2, 0.9), with_next(also=["gamma"]), SchemaError, "a field 'gamma', which the unit adds"),
    (Hindsight(reward_of), with_next(also=["relabelled"]), SchemaError, "which the unit adds"),
    (Hindsight(reward_of, goal_key="zip"), None, KeyMissingError, "'zip' .goal_key."),
    (Hindsight(reward_of, goal_key="obs"), None, SchemaError, "one dtype and shape"),
    (Hindsight(lambda batch: torch.zeros(3)), None, SchemaError, "one reward per row"),
    (FrameStack(2, ["zip"]), None, KeyMissingError, "'zip' .frames to stack."),
    (FrameStack(2, ["t"], merge=True), None, SchemaError, "merge=True needs frames with a first dimension"),
    (FrameStack(2, ["obs"]), with_next(obs=torch.zeros(20, 3).double()), SchemaError, "one dtype and shape"),
    ([NStep(2, 0.9), FrameStack(2, [("next", "reward")])], None, OptionError, "another unit computes"),
]


def test_rows_that_do_not_fit_a_unit_are_refused_in_words():
    for unit, change, error, words in UNFIT:
        with pytest.raises(error, match=words):
            filled(unit, change=change).sample()


def test_buffers_that_lose_their_order_or_have_two_kinds_of_episodes_are_refused():
    rb = filled(NStep(2, 0.9))
    with pytest.raises(OptionError):
        rb.set_writer(TensorDictMaxValueWriter())
    rb.sample()
    with pytest.raises(OptionError):
        filled(NStep(2, 0.9, done_key="a"), episodes=Episodes(end_key="b"))
    sampler = SliceSampler(slice_len=2, end_keys=[("next", "done"), ("next", "truncated")])
    filled(sampler=sampler, episodes=Episodes(end_key=[("next", "truncated"), ("next", "done")])).sample()


def test_rows_that_stay_as_they_are_cannot_be_written():
    ends = torch.zeros(20, dtype=torch.bool)
    ends[9] = True
    rb = filled()
    rb.set_sampler(SliceSampler(slice_len=4, ends=ends, cache_values=True))
    assert {tuple(s) for s in rb.sample(40)["id"].view(-1, 4).tolist()} <= {
        tuple(range(first, first + 4)) for first in [*range(7), *range(10, 17)]
    }
    with pytest.raises(UsageError):
        rb.extend(batch_of(Log(40).play(1)))
    assert len(rb) == 20
    rb.set_sampler(SliceSampler(slice_len=4, ends=ends[:5], cache_values=True))
    with pytest.raises(SchemaError, match=r"one value per row .20 rows."):
        rb.sample()


def test_ids_that_are_no_integers_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2, traj_key="episode"))
    for bad in (0.5, float("nan"), float("inf")):
        with pytest.raises(SchemaError):
            rb.extend({"episode": torch.tensor([0.0, bad])})
    rb.extend({"episode": torch.tensor([0.0, 0.0])})
    assert rb.sample(2)["episode"].tolist() == [0.0, 0.0]


def test_n_and_gamma_hold_from_the_next_draw_on():
    unit = NStep(1, 0.5)
    rb = filled(unit, size=64)
    assert (rb.sample()["steps_to_next_obs"] == 1).all()
    unit.n, unit.gamma = 3, 0.25
    batch = rb.sample()
    assert int(batch["steps_to_next_obs"].max()) == 3
    assert torch.equal(batch["gamma"], 0.25 ** batch["steps_to_next_obs"].float())
    with pytest.raises(OptionError):
        unit.n = 0
    with pytest.raises(OptionError):
        unit.gamma = -0.1
    assert (unit.n, unit.gamma) == (3, 0.25)


def test_named_next_fields_alone_belong_to_the_end():
    rb = filled(NStep(3, 0.9, next_keys=[("next", "obs")]), size=64)
    batch = rb.sample()
    several = batch["steps_to_next_obs"] > 1
    assert several.any()
    assert not batch["next"]["done"][several].any()  # that of the first step, as it was asked for
    assert torch.equal(batch["next"]["obs"][:, 2], (batch["t"] + batch["steps_to_next_obs"]).float())
