"""DeltaTimestamps: offsets in seconds and in rows, clamped to episodes, against a plain NumPy model."""

from __future__ import annotations

import pickle
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from ostinato import (
    DeltaTimestamps,
    FrameStack,
    Hindsight,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    RaggedTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceUnit,
    SliceSampler,
    TensorDictReplayBuffer,
    open_dataset,
)
from ostinato.errors import KeyMissingError, KindError, OptionError, OstinatoError, SchemaError, UsageError

from ...effort import examples
from ...windows import reward_of
from .rings import steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("backend")

STATE, ACTION = "observation.state", "action"


def rows(lengths: Sequence[int]) -> dict[str, Any]:
    """Rows of episodes in LeRobot's vocabulary: flat keys with dots."""
    count = sum(lengths)
    done = torch.zeros(count, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    t = torch.arange(count)
    return {STATE: torch.stack([t, -t], 1).float(), ACTION: t * 10, "done": done, "next": {"reward": t.double()}}


def in_order(unit: Any, lengths: Sequence[int], **options: Any) -> Any:
    """Return all rows, in order, as a unit makes them."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(sum(lengths)),
        sampler=SamplerWithoutReplacement(shuffle=False),
        sample_unit=unit,
        batch_size=sum(lengths),
        **options,
    )
    rb.extend(rows(lengths))
    return rb.sample()


def model(values: np.ndarray[Any, Any], lengths: Sequence[int], offsets: Sequence[int]) -> tuple[Any, Any]:
    """Return what LeRobot reads at offsets from each row: its values `[N, T, *shape]`, and the mask `[N, T]`."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    starts = ends - np.repeat(lengths, lengths)
    wanted = np.arange(len(values))[:, None] + np.array(offsets, dtype=np.int64)
    pad = (wanted < starts[:, None]) | (wanted >= ends[:, None])
    return values[np.clip(wanted, starts[:, None], ends[:, None] - 1)], pad


_OFFSETS = st.lists(st.one_of(st.integers(-4, 4), st.integers(-60, 60)), min_size=1, max_size=6)


@examples(1)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.lists(_OFFSETS, min_size=3, max_size=3))
def test_rows_and_masks_are_those_of_the_model(lengths: list[int], offsets: list[list[int]]) -> None:
    keys: list[Any] = [STATE, ACTION, ("next", "reward")]
    batch = in_order(DeltaTimestamps(steps=dict(zip(keys, offsets, strict=True))), lengths)
    data = rows(lengths)
    for read, pad, values, steps_ in (
        (batch[STATE], batch[f"{STATE}_is_pad"], data[STATE], offsets[0]),
        (batch[ACTION], batch["action_is_pad"], data[ACTION], offsets[1]),
        (batch["next"]["reward"], batch["next"]["reward_is_pad"], data["next"]["reward"], offsets[2]),
    ):
        expected, mask = model(values.numpy(), lengths, steps_)
        assert read.dtype is values.dtype
        assert torch.equal(read, torch.from_numpy(expected))
        assert torch.equal(pad, torch.from_numpy(mask))
    assert torch.equal(batch["done"], data["done"]), "a field that is not listed stays as it is"


@examples(1)
@given(st.sampled_from([10, 15, 29.97, 30, 50, 60, 1000 / 3]), st.lists(st.integers(-300, 300), min_size=1))
def test_seconds_are_rounded_to_rows(fps: float, offsets: list[int]) -> None:
    seconds = [step / fps for step in offsets]
    unit = DeltaTimestamps({STATE: seconds, ACTION: [round(x, 4) for x in seconds]}, fps=fps)
    assert unit.offsets == {(STATE,): tuple(offsets), (ACTION,): tuple(offsets)}


def test_any_sequence_of_numbers_will_do() -> None:
    seconds: dict[str, Any] = {"a": np.array([0.5], np.float32), "b": [Fraction(1, 2)], "c": torch.tensor([0.5, 1])}
    half = DeltaTimestamps(seconds, fps=2)
    assert half.offsets == {("a",): (1,), ("b",): (1,), ("c",): (1, 2)}
    rows_ = DeltaTimestamps(steps={"a": range(-1, 2), ("next", "a"): torch.arange(2), "b": np.arange(2), "c": (1,)})
    assert rows_.offsets == {("a",): (-1, 0, 1), ("next", "a"): (0, 1), ("b",): (0, 1), ("c",): (1,)}
    assert repr(rows_) == "DeltaTimestamps(steps={'a': [-1, 0, 1], ('next', 'a'): [0, 1], 'b': [0, 1], 'c': [1]})"


def test_offsets_far_beyond_every_episode_are_padding() -> None:
    batch = in_order(DeltaTimestamps(steps={ACTION: [-(10**30), 2**63, 0]}), [3, 4])
    assert batch[ACTION].tolist() == [[0, 20, t * 10] for t in range(3)] + [[30, 60, t * 10] for t in range(3, 7)]
    assert batch["action_is_pad"].tolist() == [[True, True, False]] * 7


BAD: list[tuple[Callable[[], object], str]] = [
    (DeltaTimestamps, "give either delta_timestamps.*got neither"),
    (lambda: DeltaTimestamps({"a": [0]}, fps=3, steps={"a": [0]}), "got both"),
    (lambda: DeltaTimestamps({"a": range(16)}), r"first argument, .* in seconds, .* fps=.* in rows, give steps="),
    (lambda: DeltaTimestamps({"a": [0.0]}, fps=0), "fps must be a positive number.*got 0"),
    (lambda: DeltaTimestamps({"a": [0.0]}, fps=float("nan")), "fps must be a positive number.*got nan"),
    (lambda: DeltaTimestamps({"a": [0.0]}, fps=float("inf")), "fps must be a positive number.*got inf"),
    (lambda: DeltaTimestamps({"a": [0.0]}, fps=True), "fps must be a positive number.*got True"),
    (lambda: DeltaTimestamps({"a": [0.0]}, fps=3, tolerance_s=-1), "tolerance_s must be"),
    (lambda: DeltaTimestamps(steps={"a": [0]}, fps=3), "steps are rows: leave out fps"),
    (lambda: DeltaTimestamps(steps={"a": [0]}, tolerance_s=0.1), "steps are rows: leave out fps and tolerance_s"),
    (lambda: DeltaTimestamps({}, fps=3), "delta_timestamps must name at least one field"),
    (lambda: DeltaTimestamps([0.0], fps=3), "delta_timestamps must name at least one field"),  # type: ignore[arg-type]
    (lambda: DeltaTimestamps({"a": []}, fps=3), "delta_timestamps of 'a' is empty"),
    (lambda: DeltaTimestamps(steps={"a": range(0)}), "steps of 'a' is empty"),
    (lambda: DeltaTimestamps(steps={"a": 3}), "steps of 'a' must be a list of numbers, got 3"),  # type: ignore[dict-item]
    (lambda: DeltaTimestamps(steps={"a": "12"}), "steps of 'a' must be a list of numbers"),  # type: ignore[dict-item]
    (lambda: DeltaTimestamps({"a": ["0"]}, fps=3), "'a' must be finite numbers of seconds"),  # type: ignore[list-item]
    (lambda: DeltaTimestamps({"a": [Decimal(0)]}, fps=3), "finite numbers"),  # type: ignore[list-item]
    (lambda: DeltaTimestamps({"a": [True]}, fps=3), "finite numbers of seconds, got True"),
    (lambda: DeltaTimestamps({"a": [np.True_]}, fps=3), "finite numbers of seconds"),  # type: ignore[list-item]
    (lambda: DeltaTimestamps({"a": [0.0, float("nan")]}, fps=3), "'a' must be finite numbers of seconds, got nan"),
    (lambda: DeltaTimestamps({"a": [float("-inf")]}, fps=3), "finite numbers of seconds, got -inf"),
    (lambda: DeltaTimestamps({"a": [1e308]}, fps=1000), "finite numbers of seconds, got 1e"),
    (lambda: DeltaTimestamps({"a": [10**400]}, fps=1000), "finite numbers of seconds"),
    (lambda: DeltaTimestamps({"a": torch.zeros(1, 2)}, fps=3), "finite numbers of seconds"),
    (lambda: DeltaTimestamps({"a": [0.05]}, fps=10), "'a': 0.05 s is no multiple of 1/fps = 0.1 s; the closest"),
    (lambda: DeltaTimestamps({"a": [0.3002]}, fps=10), "closest one is 0.3 s. Change it, or raise tolerance_s=0.0001"),
    (lambda: DeltaTimestamps(steps={"a": [0.5]}), "whole numbers of rows, got 0.5"),  # type: ignore[list-item]
    (lambda: DeltaTimestamps(steps={"a": [True]}), "whole numbers of rows, got True"),
    (lambda: DeltaTimestamps(steps={"a": [torch.tensor(1.0)]}), "whole numbers of rows"),  # type: ignore[list-item]
    (lambda: DeltaTimestamps(steps={"a": [0], ("a",): [1]}), "steps names 'a' twice"),
    (lambda: DeltaTimestamps(steps={3: [0]}), "a key is a string"),
]


@pytest.mark.parametrize("case", BAD, ids=[words for _, words in BAD])
def test_bad_offsets_are_refused_when_given(case: tuple[Callable[[], object], str]) -> None:
    make, words = case
    with pytest.raises(OptionError, match=words):
        make()


def test_the_tolerance_is_that_of_lerobot() -> None:
    assert DeltaTimestamps({"a": [0.30009, 0.29991]}, fps=10).offsets == {("a",): (3, 3)}
    assert DeltaTimestamps({"a": [0.32]}, fps=10, tolerance_s=0.03).offsets == {("a",): (3,)}
    with pytest.raises(OptionError):
        DeltaTimestamps({"a": [0.1 + 1e-9]}, fps=10, tolerance_s=0)


UNFIT: list[tuple[Any, type[OstinatoError], str]] = [
    (DeltaTimestamps(steps={"zip": [0]}), KeyMissingError, "field 'zip' .to be read at offsets. is not present"),
    (DeltaTimestamps(steps={("observation", "state"): [0]}), KeyMissingError, "name an existing field"),
    (DeltaTimestamps(steps={"next": [0]}), KeyMissingError, "field 'next'"),
    (DeltaTimestamps(steps={"task": [0]}), KindError, "'task' .* holds Python objects, such as text"),
    (DeltaTimestamps(steps={"obs": [0]}), SchemaError, "rows have a field 'obs_is_pad', which the unit adds"),
    (DeltaTimestamps(steps={"action": [0]}, done_key="over"), KeyMissingError, "no field 'over'"),
    (
        [NStep(2, 0.9, next_keys=()), DeltaTimestamps(steps={("next", "reward"): [0]})],
        OptionError,
        "computes .*'reward'.*, which",
    ),
    ([FrameStack(2, ["obs"]), DeltaTimestamps(steps={"obs": [0]})], OptionError, "another unit computes 'obs', which"),
    ([Hindsight(reward_of), DeltaTimestamps(steps={"desired_goal": [0]})], OptionError, "computes 'desired_goal'"),
]


@pytest.mark.parametrize("case", UNFIT, ids=[words for _, _, words in UNFIT])
def test_rows_that_do_not_fit_are_refused_in_words(case: tuple[Any, type[OstinatoError], str]) -> None:
    unit, error, words = case
    goals = {name: torch.zeros(12) for name in ("achieved_goal", "desired_goal", "obs")}
    data = {**rows([12]), **goals, "task": ["lift"] * 12}
    if "is_pad" in words:
        data["obs_is_pad"] = torch.zeros(12, dtype=torch.bool)
    rb = ReplayBuffer(storage=LazyTensorStorage(12), sample_unit=unit, batch_size=4)
    with pytest.raises(error, match=words):
        _ = rb.extend(data), rb.sample()


def test_ragged_fields_are_refused() -> None:
    storage = RaggedTensorStorage(4, ragged="tokens")
    rb = ReplayBuffer(storage=storage, sample_unit=DeltaTimestamps(steps={"tokens": [0, 1]}), batch_size=2)
    rb.extend({"tokens": [torch.zeros(2), torch.zeros(3)], "done": torch.tensor([False, True])})
    with pytest.raises(OstinatoError, match="tokens"):
        rb.sample()


def test_texts_and_other_fields_are_those_of_the_row_drawn() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sample_unit=DeltaTimestamps(steps={ACTION: [1]}), batch_size=30)
    rb.extend({**rows([5]), "task": [f"task {i}" for i in range(5)]})
    batch, info = rb.sample(return_info=True)
    assert batch["task"] == [f"task {i}" for i in info["index"].tolist()]
    assert torch.equal(batch[STATE][:, 0].long(), info["index"])
    assert torch.equal(batch[ACTION][:, 0], (info["index"] + 1).clamp(max=4) * 10)


def test_windows_and_slices_read_beyond_themselves_but_not_beyond_the_episode() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=SliceSampler(slice_len=2),
        sample_unit=DeltaTimestamps(steps={"t": [-1, 0, 2]}),
        batch_size=32,
    )
    rb.extend({"t": torch.arange(20), "done": torch.arange(20) % 5 == 4})
    t = rb.sample()["t"]
    assert torch.equal(t[1::2, 1], t[::2, 1] + 1)
    first = t[:, 1] // 5 * 5
    assert torch.equal(t[:, 0], torch.maximum(t[:, 1] - 1, first))
    assert torch.equal(t[:, 2], torch.minimum(t[:, 1] + 2, first + 4))
    windows = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sample_unit=[DeltaTimestamps(steps={"t": [-1, 0, 2]}), SequenceUnit(3)],
        batch_size=8,
    )
    windows.extend({"t": torch.arange(20), "done": torch.arange(20) % 5 == 4})
    t = windows.sample()["t"]
    assert t.shape == (24, 3)
    assert torch.equal(t[:, 2], torch.minimum(t[:, 1] + 2, t[:, 1] // 5 * 5 + 4))


def test_after_n_steps_offsets_count_from_the_row_that_they_end_at() -> None:
    unit = [NStep(2, 1.0), DeltaTimestamps(steps={("next", "obs"): [-1, 0, 1], "obs": [-1, 0]})]
    rb = ReplayBuffer(storage=LazyTensorStorage(6), sample_unit=unit, batch_size=40)
    t = torch.arange(6)
    rb.extend({"obs": t, "next": {"obs": t + 1, "reward": t.float(), "done": t == 5}})
    batch = rb.sample()
    now = batch["obs"][:, 1]
    last = (now + 1).clamp(max=5)
    assert torch.equal(batch["obs"][:, 0], (now - 1).clamp(min=0))
    expected = torch.stack([(last + step).clamp(0, 5) + 1 for step in (-1, 0, 1)], 1)
    assert torch.equal(batch["next"]["obs"], expected)


def test_priorities_and_weights_are_those_of_the_row_drawn() -> None:
    rb = PrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyTensorStorage(40),
        sample_unit=DeltaTimestamps(steps={"t": [-1, 0, 1]}),
        batch_size=8,
    )
    rb.extend(steps())
    batch, info = rb.sample(return_info=True)
    assert torch.equal(batch["t"][:, 1], info["index"])
    assert info["priority_weight"].shape == (8,)
    priorities = torch.arange(8.0) + 2
    rb.update_priority(info["index"], priorities, info["index_generation"])
    got = rb.sampler.priorities  # type: ignore[attr-defined]
    untouched = torch.ones(40, dtype=torch.bool).index_fill(0, info["index"], False)
    assert (got[untouched] == 1.0).all()
    assert (got[info["index"]] > 1.0).all()
    assert rb.stats().stale_updates == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_tensordicts_have_the_masks_where_the_fields_are(prefetch: int) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12),
        sample_unit=DeltaTimestamps({STATE: [-0.1, 0.0], ("next", "reward"): [0.1]}, fps=10),
        batch_size=6,
        prefetch=prefetch,
    )
    rb.extend(TensorDict(rows([5, 7]), [12]))
    batch, info = rb.sample(return_info=True)
    assert batch.batch_size == (6,)
    assert batch[STATE].shape == (6, 2, 2)
    assert batch[f"{STATE}_is_pad"].shape == (6, 2)
    assert batch["next", "reward"].shape == batch["next", "reward_is_pad"].shape == (6, 1)
    ends = torch.isin(batch["index"], torch.tensor([4, 11]))
    assert torch.equal(batch["next", "reward_is_pad"][:, 0], ends)
    assert torch.equal(info["next", "reward_is_pad"], batch["next", "reward_is_pad"])


@pytest.mark.parametrize("flatten", [False, True])
def test_ensembles_put_fields_and_masks_together(flatten: bool) -> None:
    members = []
    for _ in range(2):
        members.append(
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(12), sample_unit=DeltaTimestamps(steps={ACTION: [0, 1], STATE: [3]})
            )
        )
        members[-1].extend(TensorDict(rows([5, 7]), [12]))
    ensemble = ReplayBufferEnsemble(*members, batch_size=8, flatten=flatten)
    batch = ensemble.sample()
    assert batch[ACTION].shape == batch["action_is_pad"].shape == ((8, 2) if flatten else (2, 4, 2))
    now = batch[ACTION][..., 0] // 10
    assert torch.equal(batch["action_is_pad"][..., 1], (now == 4) | (now == 11))


def test_masks_of_two_fields_share_no_memory() -> None:
    batch = in_order(DeltaTimestamps(steps={STATE: [0, 1], ACTION: [0, 1]}), [3])
    batch["action_is_pad"].fill_(True)
    assert not batch[f"{STATE}_is_pad"].all()


def test_a_batch_can_be_written_to_an_earlier_one() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12), sample_unit=DeltaTimestamps(steps={ACTION: [0, 1]}), batch_size=6)
    rb.extend(rows([12]))
    first = rb.sample()
    kept = first[ACTION]
    again = rb.sample(out=first)
    assert again[ACTION] is kept
    assert torch.equal(again["action_is_pad"][:, 1], again[ACTION][:, 0] == 110)


def test_units_pickle_and_are_fixed() -> None:
    unit = DeltaTimestamps({STATE: [-0.1, 0.0]}, fps=10, done_key="lap")
    again = pickle.loads(pickle.dumps(unit))
    assert (again.offsets, again.episodes) == (unit.offsets, unit.episodes)
    with pytest.raises(UsageError, match="fixed when it is made"):
        unit.offsets = {}
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sample_unit=DeltaTimestamps(steps={"t": [6]}, done_key="lap"))
    rb.extend(steps())
    last = rb.sample(64)["t"][:, 0]
    assert ((last % 7 == 6) | (last == 39)).all()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_episodes_of_a_dataset_are_those_of_the_offsets(prefetch: int) -> None:
    lengths = [3, 1, 4]
    row = np.arange(8)
    dataset = open_dataset({STATE: np.stack([row, -row], 1), ACTION: row}, episode_ends=np.cumsum(lengths))
    rb = ReplayBuffer(
        storage=dataset,
        sampler=SamplerWithoutReplacement(shuffle=False),
        sample_unit=DeltaTimestamps(steps={STATE: [-1, 0], ACTION: range(3)}),
        batch_size=8,
        prefetch=prefetch,
    )
    batch = rb.sample()
    for key, values, offsets in ((STATE, np.stack([row, -row], 1), [-1, 0]), (ACTION, row, [0, 1, 2])):
        expected, pad = model(values, lengths, offsets)
        assert torch.equal(batch[key], torch.from_numpy(expected))
        assert torch.equal(batch[f"{key}_is_pad"], torch.from_numpy(pad))
