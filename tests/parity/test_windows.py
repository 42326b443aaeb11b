"""Sequence, SliceSampler and SliceSamplerWithoutReplacement beside TorchRL's: contents, infos, flags and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ._differences import Difference, Fails, check
from ._script import Note, both


def episodes(*lengths: int, shape: tuple[int, ...] = (1,), **fields: Any) -> TensorDict:
    """Rows of episodes of these lengths, ended by `("next", "done")`."""
    count = sum(lengths)
    done = torch.zeros(count, *shape, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    steps = torch.arange(count, dtype=torch.float32)
    then = {"obs": steps + 1, "done": done, "terminated": done.clone()}
    return TensorDict({"obs": steps, "next": then, **fields}, [count])


def filled(lib: Any, data: Any, size: int, buffer: str = "ReplayBuffer", capacity: int = 20, **options: Any) -> Any:
    rb = getattr(lib, buffer)(storage=lib.LazyTensorStorage(capacity), batch_size=size, **options)
    rb.extend(data)
    return rb


def plain(info: dict[Any, Any]) -> dict[Any, Any]:
    """An info whose index is a tensor in both: TorchRL's slices give a tuple of one."""
    index = info["index"]
    return {**info, "index": index[0] if isinstance(index, tuple) else index}


def _same(value: Any) -> Any:
    return value


# -- sequences --------------------------------------------------------------------------------------------------------

WINDOWS: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("options", WINDOWS, ids=str)
@both
def test_windows_are_the_same_digit_for_digit(lib: Any, note: Note, options: dict[str, Any]) -> None:
    for buffer, rows in (
        ("ReplayBuffer", [5, 2, 1, 4]),
        ("TensorDictReplayBuffer", [1, 2] * 8),
        ("ReplayBuffer", [9, 30]),
    ):
        rb = filled(lib, episodes(*rows), 6, buffer, sample_unit=lib.Sequence(**options))
        note(f"{buffer} sample", partial(rb.sample, return_info=True))
        rb.extend(episodes(3, 4))
        note(f"{buffer} later", partial(rb.sample, return_info=True))


# -- slices: where there is only one to draw --------------------------------------------------------------------------

SLICES: list[tuple[str, list[int], int, dict[str, Any]]] = [
    ("strict", [4], 8, {"slice_len": 4}),
    ("number", [4], 12, {"num_slices": 3}),
    ("short ones left out", [4, 1, 2], 8, {"slice_len": 4}),
    ("end_keys", [4], 4, {"slice_len": 4, "end_keys": [("next", "done"), ("next", "zip")]}),
    ("no flags", [4], 4, {"slice_len": 4, "truncated_key": None}),
    ("whole episode", [4], 8, {"num_slices": 1, "strict_length": False}),
    ("padded twice", [2], 12, {"num_slices": 2, "strict_length": False, "pad_output": True}),
]


@pytest.mark.parametrize("case", SLICES, ids=[case[0] for case in SLICES])
@both
def test_slices_have_the_same_rows_keys_flags_and_shapes(lib: Any, note: Note, case: Any) -> None:
    _, rows, size, options = case

    extras: dict[str, dict[str, Any]] = {
        "ReplayBuffer": {},
        "TensorDictReplayBuffer": {"is_init": torch.zeros(sum(rows), 1, dtype=torch.bool)},
    }
    for buffer, extra in extras.items():
        data = episodes(*rows, **extra)
        rb = filled(lib, data, size, buffer, sampler=lib.SliceSampler(**options))
        batch, info = rb.sample(return_info=True)
        note.rows("batch", partial(_same, batch))
        note("info", partial(plain, info))


# -- without replacement ----------------------------------------------------------------------------------------------


# -- deliberate differences -------------------------------------------------------------------------------------------


def _only_truncated(lib: Any) -> list[tuple[float, ...]]:
    data = episodes(2, 2)
    data["next", "truncated"] = data["next", "done"].clone()
    data["next", "done"] = torch.zeros_like(data["next", "done"])
    rb = filled(lib, data, 2, sampler=lib.SliceSampler(slice_len=2))
    return sorted({tuple(rb.sample()["obs"].tolist()) for _ in range(60)})


def _reused_ids(lib: Any) -> list[int]:
    data = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 0, 0]), "obs": torch.arange(6)}, [6])
    rb = filled(lib, data, 4, sampler=lib.SliceSampler(slice_len=4, traj_key="episode"))
    found: list[int] = rb.sample()["obs"].tolist()
    return found


def _flat_flags(lib: Any) -> tuple[int, ...]:
    rb = filled(lib, episodes(4, shape=()), 4, sampler=lib.SliceSampler(slice_len=4))
    return tuple(rb.sample(return_info=True)[1]["next", "done"].shape)


def _around_the_corner(lib: Any) -> list[tuple[int, ...]]:
    ends = torch.tensor([False, True, False, True, False, False])
    sampler = lib.SliceSampler(slice_len=2, ends=ends, cache_values=True)
    storage = lib.TensorStorage(TensorDict({"obs": torch.arange(6)}, [6]))
    rb = lib.ReplayBuffer(storage=storage, sampler=sampler, batch_size=2, writer=lib.ImmutableDatasetWriter())
    return sorted({tuple(rb.sample()["obs"].tolist()) for _ in range(80)})


def _span(lib: Any) -> list[list[int]]:
    found = []
    for length, right in ((3, 2), (4, 1)):
        rb = filled(lib, episodes(5), length, sampler=lib.SliceSampler(slice_len=length, span=(False, right)))
        found.append(sorted({len(rb.sample()["obs"]) for _ in range(200)}))
    return found


def _passes(lib: Any) -> list[int]:
    sampler = lib.SliceSamplerWithoutReplacement(slice_len=2, shuffle=False)
    return [len(batch["obs"]) for batch in filled(lib, episodes(1, 2, 2), 4, sampler=sampler)]


def _missing_id(lib: Any) -> tuple[int, ...]:
    return tuple(
        filled(lib, episodes(4), 4, sampler=lib.SliceSampler(slice_len=4, traj_key="zip")).sample()["obs"].shape
    )


def _index(lib: Any) -> tuple[int, ...]:
    sampler = lib.SliceSampler(slice_len=4)
    return tuple(filled(lib, episodes(4), 4, "TensorDictReplayBuffer", sampler=sampler).sample()["index"].shape)


def _small(lib: Any) -> int:
    return len(filled(lib, episodes(3), 1, capacity=3, sample_unit=lib.Sequence(5)).sample()["obs"])


def _fragments(lib: Any, steps: list[int]) -> list[tuple[int, ...]]:
    """Every pair of rows that slices of one trajectory, written with these steps, consist of."""
    data = TensorDict({"traj": torch.zeros(len(steps), dtype=torch.int64), "step": torch.tensor(steps)}, [len(steps)])
    sampler = lib.SliceSampler(slice_len=2, traj_key="traj", step_key="step", fragmented=True)
    found = filled(lib, data, 200, sampler=sampler).sample()["step"].view(-1, 2).tolist()
    return sorted({tuple(pair) for pair in found})


DIFFERENCES = [
    Difference(
        "steps are in the order of writing",
        lambda lib: _fragments(lib, [0, 1, 4, 3, 2]),
        [(0, 1), (1, 2), (2, 3), (3, 4)],
        [(0, 1)],
    ),
    Difference(
        "a step that comes again begins a new episode",
        lambda lib: _fragments(lib, [0, 1, 0, 1]),
        Fails("RuntimeError"),
        [(0, 1)],
    ),
    Difference(
        "an option that contradicts the class is refused",
        lambda lib: lib.SamplerWithoutReplacement(replacement=True).drop_last,
        False,
        Fails("OptionError"),
    ),
    Difference(
        "an episode that was only truncated ends",
        _only_truncated,
        [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)],
        [(0.0, 1.0), (2.0, 3.0)],
    ),
    Difference("rows of one id are one episode", _reused_ids, Fails("RuntimeError"), [0, 1, 4, 5]),
    Difference("flags keep their shape", _flat_flags, (4, 4), (4,)),
    Difference(
        "the last row is not followed by the first",
        _around_the_corner,
        [(0, 1), (2, 3), (4, 5), (5, 0)],
        [(0, 1), (2, 3), (4, 5)],
    ),
    Difference(
        "a span of i rows on the right leaves slice_len - i rows or more",
        _span,
        [[3], [2, 3, 4]],
        [[1, 2, 3], [3, 4]],
    ),
    Difference("batches are full until the pass ends", _passes, [2, 2], [4]),
    Difference("a field that was named must be there", _missing_id, (4,), Fails("KeyMissingError")),
    Difference("the index of a slice is one number a row", _index, (4, 1), (4,)),
    Difference("a ring has room for a window", _small, 5, Fails("CapacityError")),
    Difference(
        "a slice has rows",
        lambda lib: isinstance(lib.SliceSampler(slice_len=0), object),
        True,
        Fails("OptionError"),
    ),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=[difference.reason for difference in DIFFERENCES])
def test_deliberate_difference(difference: Difference) -> None:
    check(difference)
