"""Sequences, slices, hindsight, groups, staleness and conditional updates beside TorchRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._script import Note, both, raw
from .episodes import hindsight_buffer, hindsight_episode, steps


def _buffer(lib: Any, data: Any, size: int, buffer: str = "TensorDictReplayBuffer", **options: Any) -> Any:
    rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(options.pop("capacity", 20)), batch_size=size, **options)
    rb.extend(data)
    return rb


SEQUENCES: list[dict[str, Any]] = [
    {"length": 3},
    {"length": 3, "burn_in": 2},
    {"length": 2, "bootstrap": 2},
    {"length": 3, "dilation": 2, "burn_in": 1},
    {"length": 3, "episode_boundary": "stop"},
    {"length": 2, "episode_boundary": "stop", "burn_in": 1, "bootstrap": 1, "dilation": 2},
    {"length": 4, "episode_boundary": "include_reset"},
    {"length": 2, "episode_boundary": "include_reset", "burn_in": 3, "dilation": 2},
    {"length": 3, "done_key": None, "burn_in": 1},
    {"length": 3, "done_key": ("next", "terminated")},
]


@pytest.mark.parametrize("options", SEQUENCES, ids=str)
@both
def test_sequences_are_the_same_digit_for_digit(lib: Any, note: Note, options: dict[str, Any]) -> None:
    for buffer, lengths in (("ReplayBuffer", [5, 2, 1, 4]), ("TensorDictReplayBuffer", [1, 2] * 8)):
        rb = _buffer(lib, steps(*lengths), 6, buffer, sample_unit=lib.Sequence(**options))
        for more in ([3, 4], [9, 30]):
            rb.sample(return_info=True)
            rb.extend(steps(*more))
        rb.sample(return_info=True)


SLICES: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "strict": ([4], 8, {"slice_len": 4}),
    "number": ([4], 12, {"num_slices": 3}),
    "short ones left out": ([4, 1, 2], 8, {"slice_len": 4}),
    "end_keys": ([4], 4, {"slice_len": 4, "end_keys": [("next", "done"), ("next", "zip")]}),
    "no flags": ([4], 4, {"slice_len": 4, "truncated_key": None}),
    "whole episode": ([4], 8, {"num_slices": 1, "strict_length": False}),
    "padded twice": ([2], 12, {"num_slices": 2, "strict_length": False, "pad_output": True}),
}


@pytest.mark.parametrize("case", SLICES)
@both
def test_slices_have_the_same_rows_keys_flags_and_shapes(lib: Any, note: Note, case: str) -> None:
    """Where there is only one slice to draw."""
    lengths, size, options = SLICES[case]
    first = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    extras: dict[str, dict[str, Any]] = {"ReplayBuffer": {}, "TensorDictReplayBuffer": {"is_init": first}}
    for buffer, extra in extras.items():
        rb = _buffer(lib, steps(*lengths, **extra), size, buffer, sampler=lib.SliceSampler(**options))
        batch, info = raw(rb).sample(return_info=True)
        index = info.pop("index")  # a tuple of one in TorchRL
        note([batch.exclude("index"), info, index[0] if isinstance(index, tuple) else index])


# -- hindsight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "flag"), [(0.0, "done"), (0.3, "terminated"), (1.0, "done")])
@both
def test_hindsight_batches_are_the_same_without_chance(lib: Any, note: Note, ratio: float, flag: str) -> None:
    rb = hindsight_buffer(lib, strategy="final", her_ratio=ratio, batch_size=10)
    for number, count in enumerate((4, 1, 5)):
        rb.extend(hindsight_episode(number, count, flag))
    rb.extend(hindsight_episode(3, 6, flag, ends=False))
    for size in (None, None, 7, None, None):
        batch = raw(rb).sample(size)
        note([batch[key] for key in ("achieved_goal", "desired_goal", ("next", "desired_goal"), ("next", "reward"))])


# -- groups, staleness ------------------------------------------------------------------------------------------------


@both
def test_prompt_groups_and_staleness(lib: Any, note: Note) -> None:
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(1))
    data = TensorDict({"query": torch.arange(24) // 6, ("next", "reward"): rewards}, [24])
    for strategy in ("recency", "reward", "variance"):
        sampler = lib.PromptGroupSampler(samples_per_group=3, strategy=strategy)
        batch = raw(_buffer(lib, data[:], 12, capacity=24, sampler=sampler)).sample()
        groups = batch["query"].view(4, 3)
        assert (groups == groups[:, :1]).all()
        note(sorted(batch["index"].tolist()))
    sampler = lib.StalenessAwareSampler(max_staleness=2)
    rows = TensorDict({"policy_version": torch.arange(8), "row": torch.arange(8)}, [8])
    rb = _buffer(lib, rows, 3, sampler=sampler)
    sampler.consumer_version = 7
    batch, info = raw(rb).sample(return_info=True)
    assert torch.equal(batch["staleness"], 7.0 - batch["row"])
    note([sorted(batch["row"].tolist()), info["staleness"].dtype == torch.float32, dict(raw(sampler).state_dict())])
    rb.empty()
    note(sampler.consumer_version)


# -- conditional updates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"version": 3},
        {"version": torch.tensor([1, 2, 3, 4, 5, 6, 7])},
        {"version": torch.tensor([5, 5, 5, 2, 9, 9, 9]), "require_newer": True},
    ],
)
@both
def test_conditional_updates_change_the_same_rows(lib: Any, note: Note, case: dict[str, Any]) -> None:
    writer = lib.TensorDictRoundRobinWriter(track_generations=True)
    rb = raw(lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(6), writer=writer))
    index = rb.extend(TensorDict({"x": torch.zeros(6), "v": torch.full((6, 1), 3)}, [6]))
    generation = rb.writer.generations_of(index)
    rb.extend(TensorDict({"x": torch.full((2,), -1.0), "v": torch.full((2, 1), 3)}, [2]))
    chosen = torch.tensor([0, 2, 3, 3, 5, 3, 1])
    more = {**case, "version_key": "v"} if case else {}
    result = rb.update_if_present(
        index=index[chosen], generation=generation[chosen], patch={"x": torch.arange(1.0, 8.0)}, **more
    )
    note([result.updated, result.version_rejected, result.updated_count])
    note([result.stale_count, result.version_rejected_count, rb.writer.generations_of(index) != generation, rb[:]["v"]])
    note(rb.update_if_present(index=index, generation=generation, patch={"x": torch.ones(6)}).updated)
    note(rb.writer.generations_of(torch.tensor([-1])))
