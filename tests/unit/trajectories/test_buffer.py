"""`TrajectoryReplayBuffer`: sampling, window, cache, spilling, counters, stats."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_size": 0}, r"cache_size must be 1 or more \(enable_cache=False keeps none\), got 0"),
        ({"sample_window_size": -1}, "sample_window_size must be 0"),
        ({"trajectory_format": "h5"}, "must be one of pt, pkl, safetensors, got 'h5'"),
        ({"trajectory_format": "pkl"}, "give allow_pickle=True"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"cache_bytes": -1}, "cache_bytes must be"),
        ({"cache_bytes": 5, "enable_cache": False}, "with enable_cache=True"),
        ({"save_queue_size": 0}, "save_queue_size must be 1 or more"),
        ({"max_open_files": 0}, "max_open_files must be 1 or more"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        TrajectoryReplayBuffer(**options)


def test_sampling_an_empty_buffer_raises() -> None:
    with pytest.raises(EmptyBufferError, match="the buffer is empty: add trajectories or load"):
        TrajectoryReplayBuffer().sample(1)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_the_number_of_rows_must_be_positive(count: Any) -> None:
    with pytest.raises(OptionError, match="num_chunks must be a number of 1 or more"):
        filled(1).sample(count)


def test_batches_have_the_requested_size_and_are_uniform_over_transitions() -> None:
    buffer = filled(6, cache_size=2, trajectory_format="safetensors")
    buffer.flush()
    total = buffer.total_samples
    drawn = check_batch(buffer.sample(total * 200))
    counts = Counter(drawn)
    assert len(drawn) == total * 200
    assert len(counts) == total
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < total + 5 * (2 * total) ** 0.5  # deterministic: the seed is fixed


def test_draws_without_replacement_are_uniform_over_ordered_choices() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Trajectory(rewards=serials(0, 4, 2))])
    pairs = Counter(tuple(buffer.sample(2, replace=False)["rewards"].flatten().tolist()) for _ in range(2800))
    assert len(pairs) == 56
    assert all(a != b for a, b in pairs)
    assert sum((count - 50) ** 2 / 50 for count in pairs.values()) < 56 + 5 * 112**0.5


def test_without_replacement_each_is_drawn_once_and_more_raises() -> None:
    buffer = filled(4)
    total = buffer.total_samples
    for count in (1, total // 3, total - 1, total):
        drawn = check_batch(buffer.sample(count, replace=False))
        assert len(set(drawn)) == count
    with pytest.raises(OptionError, match=rf"num_chunks must be in \[1, {total}\] \(the window\)"):
        buffer.sample(total + 1, replace=False)


@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_the_window_holds_the_most_recent_trajectories(window: int) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=window, cache_size=1, trajectory_format="safetensors")
    for number in range(7):
        buffer.add_trajectories([rollout(number, 2)])
        seen = {serial // 1000 for serial in check_batch(buffer.sample(200))}
        assert seen == set(range(max(0, number + 1 - window), number + 1))
    assert buffer.get_stats()["window_samples"] == 4 * min(window, 7)


def test_the_seed_determines_the_draws_and_the_global_generator_is_unused() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = filled(3, seed=5), filled(3, seed=5), filled(3, seed=6)
    draws = [[buffer.sample(40)["rewards"] for _ in range(3)] for buffer in (first, second, other)]
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True))
    assert not torch.equal(draws[0][0], draws[2][0])
    assert torch.equal(torch.get_rng_state(), before)


def test_trajectories_with_different_keys() -> None:
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
    with pytest.raises(OptionError, match="missing must be 'raise' or 'drop'"):
        buffer.sample(4, missing="ignore")  # type: ignore[arg-type]


def test_rows_that_differ_in_shape_or_dtype_raise() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([Trajectory(rewards=torch.zeros(2, 2, 1)), Trajectory(rewards=torch.zeros(2, 2, 3))])
    with pytest.raises(SchemaError, match=r"rewards is float32\[1\] in some .* float32\[3\] in others"):
        buffer.sample(1, missing="drop")


@pytest.mark.usefixtures("backend")  # positioned reads
@pytest.mark.parametrize("form", ["pt", "safetensors", "pkl"])
@pytest.mark.parametrize("auto_save", [False, True])
def test_rows_are_the_same_in_every_format_and_directory(tmp_path: Path, form: str, auto_save: bool) -> None:
    options: dict[str, Any] = {"trajectory_format": form, "allow_pickle": form == "pkl", "cache_size": 2}
    with filled(7, auto_save=auto_save, auto_save_path=tmp_path / "a", **options) as buffer:
        buffer.flush()
        assert buffer.get_stats()["cached_trajectories"] == 2
        drawn = check_batch(buffer.sample(buffer.total_samples, replace=False))
        assert len(set(drawn)) == buffer.total_samples


def test_memory_stays_bounded_without_auto_save(tmp_path: Path) -> None:
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


def test_the_cache_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    one = TrajectoryReplayBuffer()
    one.add_trajectories([rollout(0, 4)])
    nbytes = one.get_stats()["cached_bytes"]
    buffer = TrajectoryReplayBuffer(cache_size=10, cache_bytes=2 * nbytes + 1, auto_save_path=tmp_path)
    for number in range(5):
        buffer.add_trajectories([rollout(number, 4)])
        assert buffer.get_stats()["cached_bytes"] <= 2 * nbytes + 1
    assert buffer.get_stats()["cached_trajectories"] == 2
    tiny = TrajectoryReplayBuffer(cache_bytes=10, auto_save_path=tmp_path)
    tiny.add_trajectories([rollout(0, 4)])
    assert tiny.get_stats()["cached_bytes"] == 0
    check_batch(tiny.sample(20))


def test_a_bounded_number_of_files_is_open(tmp_path: Path) -> None:
    with filled(20, auto_save=True, auto_save_path=tmp_path / "a", max_open_files=3, enable_cache=False) as buffer:
        buffer.flush()
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208
        for _ in range(5):
            check_batch(buffer.sample(100))
            assert buffer.get_stats()["open_files"] <= 3
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 3  # noqa: PTH208


def test_is_ready_with_enough_trajectories() -> None:
    buffer = filled(3)
    assert (len(buffer), buffer.size, buffer.total_samples) == (3, 3, 2 * (3 + 4 + 3))
    assert buffer.is_ready(3)
    assert not buffer.is_ready(4)
    assert asyncio.run(buffer.is_ready_async(3))
    assert not asyncio.run(buffer.is_ready_async(4))


def test_stats_and_names() -> None:
    buffer = filled(3, sample_window_size=2)
    stats = buffer.get_stats()
    expected = {"num_trajectories": 3, "total_samples": 20, "window_samples": 14, "trajectory_counter": 3}
    assert {key: stats[key] for key in expected} == expected
    assert repr(buffer) == "TrajectoryReplayBuffer(3 trajectories, 20 transitions, pt)"
    assert buffer.trajectory_ids == [0, 1, 2]
    assert torch.equal(buffer.sample_chunks(5)["rewards"], filled(3, sample_window_size=2).sample(5)["rewards"])
    with pytest.raises(SlotError, match="no trajectory has the id 7: the ids are"):
        buffer.load_trajectory(7)


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_only_the_rows_drawn_are_read(tmp_path: Path, form: str) -> None:
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


@pytest.mark.parametrize("auto_save", [False, True])
def test_a_dropped_buffer_frees_its_trajectories_without_garbage_collection(auto_save: bool, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        buffer = TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=tmp_path / "a", cache_size=2)
        buffer.add_trajectories([rollout(number) for number in range(4)])
        buffer.sample(8)
        kept = [
            weakref.ref(entry.data.tree["rewards"]) for entry in buffer._trajectories.entries if entry.data is not None
        ]
        assert kept
        del buffer
        assert [held() for held in kept] == [None] * len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_batches_of_trajectories_of_many_lengths_are_right(tmp_path: Path, form: str) -> None:
    buffer = TrajectoryReplayBuffer(enable_cache=False, trajectory_format=form, auto_save_path=tmp_path)
    buffer.add_trajectories(
        [rollout(number, 2 + 2 * number, envs=1 + number % 3, epochs=number % 3) for number in range(12)]
    )
    buffer.flush()
    total = buffer.total_samples
    assert len(set(check_batch(buffer.sample(total, replace=False)))) == total
