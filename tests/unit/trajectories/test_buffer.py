"""`TrajectoryReplayBuffer`: sampling, window, cache, spilling, counters, stats."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trajectories.rollouts import (
    check_batch,
    files,
    rollout,
    serials,
)

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.errors import (
    EmptyBufferError,
    KeyMissingError,
    OptionError,
    SchemaError,
    SlotError,
)


def filled(count: int, steps: int = 3, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    buffer.add_trajectories([rollout(number, steps + number % 2) for number in range(count)])
    return buffer


WRONG: list[dict[str, Any]] = [
    *({name: 0} for name in ("cache_size", "save_queue_size", "max_open_files")),
    {"sample_window_size": -1},
    {"trajectory_format": "pkl"},
    {"cache_bytes": -1},
    {"cache_bytes": 5, "enable_cache": False},
]


def test_options_and_counts_out_of_range_raise():
    for options in WRONG:
        with pytest.raises(OptionError, match=next(iter(options))):
            TrajectoryReplayBuffer(**options)
    with pytest.raises(EmptyBufferError):
        TrajectoryReplayBuffer().sample(1)
    buffer = filled(1)
    counts: list[Any] = [0, -1, 1.5, True, 10**12, 10**30, np.int64(0)]
    for count in counts:
        with pytest.raises(OptionError, match="num_chunks must be"):
            buffer.sample(count)
    assert len(check_batch(buffer.sample(np.int64(3)))) == 3
    with pytest.raises(OptionError, match=r"num_chunks must be in \[1, 6\] \(the window\)"):
        buffer.sample(7, replace=False)


def test_batches_have_the_requested_size_and_are_uniform_over_transitions():
    buffer = filled(6, cache_size=2, trajectory_format="safetensors")
    buffer.flush()
    total = buffer.total_samples
    drawn = check_batch(buffer.sample(total * 200))
    counts = Counter(drawn)
    assert len(drawn) == total * 200
    assert len(counts) == total
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < total + 5 * (2 * total) ** 0.5  # deterministic: the seed is fixed


def test_more_trajectories_than_the_list_began_with():
    buffer = TrajectoryReplayBuffer()
    for numbers in (range(1000), range(1000, 1030)):
        buffer.add_trajectories([Trajectory(rewards=serials(n, 1, 1), model_weights_id="w") for n in numbers])
    assert (len(buffer), buffer.total_samples) == (1030, 1030)
    assert len(set(buffer.sample(1030, replace=False)["rewards"].flatten().tolist())) == 1030


def test_draws_without_replacement_are_uniform_over_ordered_choices():
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Trajectory(rewards=serials(0, 4, 2))])
    pairs = Counter(tuple(buffer.sample(2, replace=False)["rewards"].flatten().tolist()) for _ in range(1400))
    assert len(pairs) == 56
    assert all(a != b for a, b in pairs)
    assert sum((count - 25) ** 2 / 25 for count in pairs.values()) < 56 + 5 * 112**0.5


def test_the_seed_determines_the_draws_and_the_global_generator_is_unused():
    before = torch.get_rng_state()
    draws = []
    for seed in (5, 5, 6):
        buffer = filled(3, seed=seed)
        draws.append(torch.cat([buffer.sample(40)["rewards"] for _ in range(3)]))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_trajectories_with_different_keys():
    buffer = TrajectoryReplayBuffer(sample_window_size=2)
    full, bare = (
        rollout(0, 2),
        Trajectory(rewards=serials(1, 2, 2), curr_obs={"states": serials(1, 2, 2).repeat(1, 1, 2)}),
    )
    buffer.add_trajectories([full, bare])
    with pytest.raises(KeyMissingError, match=r"lack actions, curr_obs.main_images, .*missing='drop'"):
        buffer.sample(4)
    batch = buffer.sample(40, missing="drop")
    assert set(batch) == {"rewards", "curr_obs"}
    assert set(batch["curr_obs"]) == {"states"}
    assert torch.equal(batch["curr_obs"]["states"], batch["rewards"].repeat(1, 2))
    buffer.add_trajectories([bare])  # the full trajectory has left the window
    assert set(buffer.sample(4)) == {"rewards", "curr_obs"}
    with pytest.raises(OptionError, match="missing must be one of 'raise', 'drop'"):
        buffer.sample(4, missing="ignore")  # type: ignore[arg-type]


def test_rows_that_differ_in_shape_or_dtype_raise():
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Trajectory(rewards=torch.zeros(2, 2, 1)), Trajectory(rewards=torch.zeros(2, 2, 3))])
    with pytest.raises(SchemaError, match=r"rewards is float32\[1\] in some .* float32\[3\] in others"):
        buffer.sample(1, missing="drop")


def test_memory_stays_bounded_without_auto_save(tmp_path):
    """Trajectories that leave the cache are in files; none is lost."""
    buffer = filled(30, cache_size=3, save_queue_size=2, auto_save_path=tmp_path, trajectory_format="safetensors")
    assert buffer.get_stats()["pending_saves"] <= 2 + 2
    buffer.flush()
    assert buffer.get_stats()["cached_trajectories"] == 3
    (spill,) = tmp_path.iterdir()
    assert len(files(spill)) == 27
    check_batch(buffer.sample(300))
    buffer.save_checkpoint(tmp_path / "saved")
    assert len(files(tmp_path / "saved")) == 30
    del buffer
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_cache_is_bounded_in_bytes_too(tmp_path):
    one = filled(1, 4)
    nbytes = one.get_stats()["cached_bytes"]
    for most, kept in ((2 * nbytes + 1, 2), (10, 0)):
        buffer = TrajectoryReplayBuffer(cache_size=10, cache_bytes=most, auto_save_path=tmp_path)
        for number in range(4):
            buffer.add_trajectories([rollout(number, 4)])
            assert buffer.get_stats()["cached_bytes"] <= most
        assert buffer.get_stats()["cached_trajectories"] == kept
        check_batch(buffer.sample(20))


def test_stats_and_names():
    buffer = filled(3, sample_window_size=2)
    stats = buffer.get_stats()
    expected = {"num_trajectories": 3, "total_samples": 20, "window_samples": 14, "trajectory_counter": 3}
    assert {key: stats[key] for key in expected} == expected
    assert repr(buffer) == "TrajectoryReplayBuffer(3 trajectories, 20 transitions, pt)"
    assert buffer.trajectory_ids == [0, 1, 2]
    assert torch.equal(buffer.sample_chunks(5)["rewards"], filled(3, sample_window_size=2).sample(5)["rewards"])
    with pytest.raises(SlotError):
        buffer.load_trajectory(7)
    for count, ready in ((3, True), (4, False)):
        assert buffer.is_ready(count) is asyncio.run(buffer.is_ready_async(count)) is ready


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_only_the_rows_drawn_are_read(tmp_path, form):
    """At most three times the bytes of the batch, as the operating system counts with an empty file cache."""
    pictures = torch.randint(0, 256, (25, 4, 64, 64, 3), dtype=torch.uint8)
    one = Trajectory(rewards=torch.rand(25, 4, 1), actions=torch.rand(25, 4, 7), curr_obs={"main_images": pictures})
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a", trajectory_format=form) as buffer:
        buffer.add_trajectories([one] * 30)
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(tmp_path / "a")
    for name in files(tmp_path / "a"):
        fd = os.open(tmp_path / "a" / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    before = bytes_read()
    batch = again.sample(128)
    read = bytes_read() - before
    if read == 0:
        pytest.skip("this system does not count reads, or files lie in memory")
    wanted = sum(tensor.nbytes for tensor in (batch["rewards"], batch["actions"], batch["curr_obs"]["main_images"]))
    assert wanted / 2 < read <= 3 * wanted


def bytes_read() -> int:
    """Bytes that this process has read from disk."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        pytest.skip("this system does not count reads")
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
