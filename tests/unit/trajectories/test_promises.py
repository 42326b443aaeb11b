"""What the store promises where something fails: full disks, vanished directories, interrupts, threads, forks."""

from __future__ import annotations

import enum
import gc
import json
import os
import resource
import shutil
import signal
import threading
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pytest
import torch
from tests.unit.trajectories._kills import run_and_kill
from tests.unit.trajectories._rollouts import check_batch, rollout

from ostinato import Trajectory, TrajectoryReplayBuffer
from ostinato.durable.journal import write_lines
from ostinato.durable.tensorfile import read_header
from ostinato.errors import CapacityError, CheckpointError, DamagedFileError, KindError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def small(**more: Any) -> Trajectory:
    return Trajectory(rewards=torch.rand(4, 2, 1), **more)


def saving(path: Path, form: str = "pt", **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=form, **options)


def add(buffer: TrajectoryReplayBuffer, *trajectories: Trajectory) -> list[int]:
    future = buffer.add_trajectories(list(trajectories))
    assert future is not None
    return future.result(20)


def ids_on_disk(path: Path) -> list[int]:
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(path)
    return buffer.trajectory_ids


@needs_fork
def test_after_a_failed_checkpoint_what_is_reported_saved_survives_a_kill(tmp_path: Path) -> None:
    def work(report: Callable[[bytes], None]) -> None:
        buffer = saving(tmp_path / "a", save_queue_size=60)
        add(buffer, *(small() for _ in range(60)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (15000, resource.RLIM_INFINITY))
        with pytest.raises(MemoryError):
            buffer.save_checkpoint(tmp_path / "a")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        report(b"%d" % add(buffer, small())[0])
        os.kill(os.getpid(), signal.SIGKILL)

    killed, said = run_and_kill(work, 10**9)
    assert (killed, said) == (True, b"60")
    assert ids_on_disk(tmp_path / "a") == list(range(61))


def test_a_journal_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a")
    add(buffer, small())
    (tmp_path / "a" / "ostinato_journal.jsonl").unlink()
    add(buffer, small())
    shutil.copytree(tmp_path / "a", tmp_path / "crashed")
    assert ids_on_disk(tmp_path / "crashed") == [0, 1]
    buffer.close()


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    PICK = "pick"


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_subclasses_of_plain_values_are_saved_as_the_values(tmp_path: Path, form: str) -> None:
    values = {np.str_("text"): list(np.array(["pick", "place"])), "n": [np.float64(1.5), Number.ONE, Word.PICK, True]}
    with saving(tmp_path / "a", form) as buffer:
        add(buffer, small(curr_obs=values))
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "a")
    assert buffer.load_trajectory(0).curr_obs == {"text": ["pick", "place"], "n": [1.5, 1, "pick", True]}


@pytest.mark.parametrize(
    "more",
    [
        {"actions": torch.zeros(4, 2, dtype=torch.complex128)},
        {"actions": torch.zeros(4, 2, dtype=torch.float8_e4m3fnuz)},
        {"extra": {"curr_obs.s": torch.zeros(4, 2)}, "curr_obs": {"s": torch.zeros(4, 2)}},
        {"extra": {"__metadata__": torch.zeros(4, 2)}},
        {"extra": {"a\ud800": torch.zeros(4, 2)}},
        {"curr_obs": {"text": ["\ud800"]}},
        {"actions": np.zeros((4, 2), dtype=np.longdouble)},
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_counted(tmp_path: Path, more: dict[str, Any]) -> None:
    with saving(tmp_path / "a", "safetensors") as buffer:
        with pytest.raises(KindError, match="trajectory 1"):
            buffer.add_trajectories([small(), small(**more)])
        assert buffer.get_stats()["trajectory_counter"] == len(buffer) == 0
        assert add(buffer, small()) == [0]


@pytest.mark.filterwarnings("error")
def test_numpy_arrays_of_any_byte_order_and_read_only_ones_are_taken() -> None:
    array = np.arange(8, dtype=">f4").reshape(4, 2)
    array.flags.writeable = False
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([small(actions=array)])
    actions = buffer.load_trajectory(0).actions
    assert actions is not None
    assert torch.equal(actions, torch.arange(8.0).reshape(4, 2))


def test_what_a_failed_close_left_is_saved_by_the_next(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a")
    add(buffer, small())
    (tmp_path / "a").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        add(buffer, small())
    with pytest.raises(CheckpointError, match=r"1 trajectories could not be saved \(ids 1\)"):
        buffer.close()
    (tmp_path / "away").rename(tmp_path / "a")
    buffer.close()
    assert buffer.get_stats()["pending_saves"] == 0
    assert ids_on_disk(tmp_path / "a") == [0, 1]


def test_clear_forgets_failures_too(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a")
    add(buffer, small())
    (tmp_path / "a").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        add(buffer, small())
    (tmp_path / "away").rename(tmp_path / "a")
    buffer.clear()
    assert add(buffer, small()) == [2]
    buffer.close()
    assert ids_on_disk(tmp_path / "a") == [2]


def test_clear_after_close_takes_them_off_the_list(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a")
    add(buffer, small(), small())
    buffer.close()
    buffer.clear()
    assert add(buffer, small()) == [2]
    buffer.close()
    assert ids_on_disk(tmp_path / "a") == [2]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_an_interrupted_add_loses_nothing(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StopError

    buffer = saving(tmp_path / "a", save_queue_size=1)
    add(buffer, small())
    big = Trajectory(rewards=torch.zeros(1000, 1000, 2))

    def add_for_ever() -> None:
        while True:
            buffer.add_trajectories([big, small(), small()])

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        with pytest.raises(StopError):
            add_for_ever()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    buffer.close()
    assert ids_on_disk(tmp_path / "a") == buffer.trajectory_ids


def test_an_index_of_the_older_spelling_is_taken_in(tmp_path: Path) -> None:
    with saving(tmp_path / "a") as buffer:
        add(buffer, small(), small())
    (tmp_path / "a" / "trajectory_index.json").rename(tmp_path / "a" / "trajector_index.json")
    (tmp_path / "a" / "ostinato_store.jsonl").unlink()
    with pytest.raises(OptionError, match="holds trajectories as pt"):
        saving(tmp_path / "a", "safetensors")
    with saving(tmp_path / "a") as buffer:
        assert add(buffer, small()) == [2]
    assert ids_on_disk(tmp_path / "a") == [0, 1, 2]


def test_no_id_is_given_twice_while_others_clear(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a", cache_size=2)
    given: list[int] = []
    failed: list[BaseException] = []
    end = time.monotonic() + 0.6

    def adding() -> None:
        while time.monotonic() < end:
            future = buffer.add_trajectories([small(model_weights_id="w")])
            assert future is not None
            try:
                given.extend(future.result(20))
            except BaseException as error:
                if not future.cancelled():
                    failed.append(error)

    threads = [threading.Thread(target=adding) for _ in range(2)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        buffer.clear()
    for thread in threads:
        thread.join()
    assert not failed
    assert given
    assert len(set(given)) == len(given)
    buffer.close()
    assert sorted(ids_on_disk(tmp_path / "a")) == sorted(buffer.trajectory_ids)


def test_adding_does_not_wait_while_the_saver_writes(tmp_path: Path) -> None:
    """The store's own lock is held here, as it is while a batch is written."""
    buffer = saving(tmp_path / "a")
    add(buffer, small())
    added = threading.Event()

    def adding() -> None:
        buffer.add_trajectories([small()])
        added.set()

    with buffer._store._directory_lock:
        thread = threading.Thread(target=adding)
        thread.start()
        assert added.wait(10)
    thread.join()
    buffer.close()
    assert ids_on_disk(tmp_path / "a") == [0, 1]


def test_the_future_of_no_trajectories_is_done(tmp_path: Path) -> None:
    with saving(tmp_path / "a") as buffer:
        assert add(buffer) == []


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_batches_of_trajectories_of_many_lengths_are_right(tmp_path: Path, form: str) -> None:
    buffer = TrajectoryReplayBuffer(enable_cache=False, trajectory_format=form, auto_save_path=tmp_path)
    buffer.add_trajectories(
        [rollout(number, 2 + 2 * number, envs=1 + number % 3, epochs=number % 3) for number in range(12)]
    )
    buffer.flush()
    total = buffer.total_samples
    assert len(set(check_batch(buffer.sample(total, replace=False)))) == total


@needs_fork
def test_a_fork_neither_saves_nor_removes_what_the_parent_has(tmp_path: Path) -> None:
    buffer = saving(tmp_path / "a")
    add(buffer, small())
    spilling = TrajectoryReplayBuffer(cache_size=1, auto_save_path=tmp_path / "spill")
    spilling.add_trajectories([rollout(0), rollout(1)])
    spilling.flush()

    def work(report: Callable[[bytes], None]) -> None:
        with pytest.raises(UsageError, match="another process"):
            buffer.add_trajectories([small()])
        with pytest.raises(UsageError, match="another process"):
            buffer.flush()
        with pytest.raises(UsageError, match="another process"):
            buffer.clear()
        check_batch(spilling.sample(50))
        buffer.close()
        spilling._finalizer()
        buffer._finalizer()
        report(b"done")

    assert run_and_kill(work, 10**9) == (False, b"done")
    check_batch(spilling.sample(50))
    add(buffer, small())
    shutil.copytree(tmp_path / "a", tmp_path / "crashed")
    assert ids_on_disk(tmp_path / "crashed") == [0, 1]
    buffer.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_low_limit_of_open_files_is_named(tmp_path: Path) -> None:
    with saving(tmp_path / "a", "safetensors") as buffer:
        add(buffer, *(small() for _ in range(60)))
    gc.collect()

    def work(report: Callable[[bytes], None]) -> None:
        loaded = TrajectoryReplayBuffer()
        loaded.load_checkpoint(tmp_path / "a")
        resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 10, 4096))
        with pytest.raises(CapacityError, match="lower max_open_files"):
            loaded.sample(400)
        careful = TrajectoryReplayBuffer(max_open_files=4)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        careful.load_checkpoint(tmp_path / "a")
        resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 10, 4096))
        careful.sample(400)
        report(b"done")

    assert run_and_kill(work, 10**9) == (False, b"done")


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_loading_a_whole_trajectory_finds_flipped_bytes(tmp_path: Path, form: str) -> None:
    with saving(tmp_path / "a", form) as buffer:
        add(buffer, small(actions=torch.full((4, 2, 100), 7, dtype=torch.uint8)))
    path = next((tmp_path / "a").glob("trajectory_0_*"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\7" * 50, b"\7" * 49 + b"\6", 1))
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "a")
    with pytest.raises(DamagedFileError, match="its checksum differs"):
        buffer.load_trajectory(0)


def test_compressed_records_and_conflicting_paths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"rewards": torch.zeros(4, 2)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(DamagedFileError, match="compressed"):
        read_header(tmp_path / "b.pt", "pt", allow_pickle=False)
    entry = {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}
    own = json.dumps({"paths": [["a"], ["a", "b"]], "plain": {}})
    node = {"__metadata__": {"ostinato": own}, "a": entry, "a.b": entry | {"data_offsets": [1, 2]}}
    head = json.dumps(node).encode()
    (tmp_path / "c.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"12")
    with pytest.raises(DamagedFileError, match="both a value and a dict"):
        read_header(tmp_path / "c.safetensors", "safetensors", allow_pickle=False)


def test_absurd_numbers_of_steps_are_refused_without_memory(tmp_path: Path) -> None:
    with saving(tmp_path / "a", "safetensors") as buffer:
        add(buffer, small(model_weights_id="w"))
    index = json.loads((tmp_path / "a" / "trajectory_index.json").read_text())
    index["trajectory_index"]["0"] |= {"shape": [2**41, 1, 0], "num_samples": 2**41}
    (tmp_path / "a" / "trajectory_index.json").write_text(json.dumps(index))
    (tmp_path / "a" / "ostinato_store.jsonl").unlink()
    head = json.dumps({"rewards": {"dtype": "F32", "shape": [2**41, 1, 0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a" / "trajectory_0_w.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(DamagedFileError, match="at most 1099511627776 transitions"):
        ids_on_disk(tmp_path / "a")


@pytest.mark.parametrize("key", ["trajectory_counter", "seed"])
def test_counters_and_seeds_of_metadata_are_bounded(tmp_path: Path, key: str) -> None:
    with saving(tmp_path / "a") as buffer:
        add(buffer, small())
    meta = json.loads((tmp_path / "a" / "metadata.json").read_text()) | {key: 10**30}
    (tmp_path / "a" / "metadata.json").write_text(json.dumps(meta))
    with pytest.raises(DamagedFileError, match=r"metadata\.json is damaged"):
        ids_on_disk(tmp_path / "a")


@pytest.mark.parametrize("line", [{"drop": 5}, {"form": [1], "fields": []}, {"id": 0, "facts": 5}, {"drop": [[1]]}])
def test_strange_lines_with_fitting_checksums_are_damage(tmp_path: Path, line: dict[str, Any]) -> None:
    with saving(tmp_path / "a") as buffer:
        add(buffer, small())
    head = {"format": "ostinato-trajectories", "version": [1, 0], "trajectory_format": "pt", "counter": 1, "seed": 1}
    write_lines(tmp_path / "a" / "ostinato_journal.jsonl", [head | {"generator": None}, line])
    with pytest.raises(DamagedFileError, match=r"ostinato_journal\.jsonl is damaged"):
        ids_on_disk(tmp_path / "a")


def test_skipping_a_damaged_list_warns(tmp_path: Path) -> None:
    with saving(tmp_path / "a") as buffer:
        add(buffer, small())
    (tmp_path / "a" / "ostinato_store.jsonl").write_bytes(b"junk\n")
    buffer = TrajectoryReplayBuffer()
    with pytest.warns(RuntimeWarning, match="file of field positions is damaged"):
        buffer.load_checkpoint(tmp_path / "a", on_damage="skip")
    assert buffer.trajectory_ids == [0]


def test_the_counter_of_the_directory_counts(tmp_path: Path) -> None:
    with saving(tmp_path / "a") as buffer:
        add(buffer, small(), small())
        buffer.clear()
    for path in (tmp_path / "a").glob("trajectory_?_*"):
        path.unlink()
    with saving(tmp_path / "a") as buffer:
        assert add(buffer, small()) == [2]


def test_counts_of_numpy_are_taken_and_absurd_ones_refused() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([small()])
    assert buffer.sample(np.int64(3))["rewards"].shape == (3, 1)
    absurd: list[SupportsIndex] = [10**12, 10**30, True, np.int64(0)]
    for count in absurd:
        with pytest.raises(OptionError, match="num_chunks must be"):
            buffer.sample(count)
