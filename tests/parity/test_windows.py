"""Sequences, slices and hindsight beside TorchRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ._script import both, raw
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
def test_sequences_are_the_same_digit_for_digit(lib, note, options):
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
def test_slices_have_the_same_rows_keys_flags_and_shapes(lib, note, case):
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
def test_hindsight_batches_are_the_same_without_chance(lib, note, ratio, flag):
    rb = hindsight_buffer(lib, strategy="final", her_ratio=ratio, batch_size=10)
    for number, count in enumerate((4, 1, 5)):
        rb.extend(hindsight_episode(number, count, flag))
    rb.extend(hindsight_episode(3, 6, flag, ends=False))
    for size in (None, None, 7, None, None):
        batch = raw(rb).sample(size)
        note([batch[key] for key in ("achieved_goal", "desired_goal", ("next", "desired_goal"), ("next", "reward"))])
