"""What a dataset keeps: frames within its budget, or every decoded row in memory or on disk; never a wrong one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato import DatasetStorage, open_dataset
from ostinato.datasets import decoded as decoded_files
from ostinato.datasets.cache import RowCache
from ostinato.datasets.video import VideoFiles
from ostinato.durable import files
from ostinato.errors import (
    CheckpointError,
    DamagedFileError,
    DirectoryInUseError,
    OptionError,
    StorageMemoryError,
)

from ..processes import CONTEXT
from .builders import Model, lerobot_v3
from .samples import check_processes, not_opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (17, 12, 21)
ROWS = sum(LENGTHS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A dataset with two cameras; not to be changed."""
    cameras = {TOP: (32, 48), WRIST: (24, 32)}
    folder = tmp_path_factory.mktemp("written") / "data"
    return lerobot_v3(folder, lengths=LENGTHS, cameras=cameras, keyframes=5, b_frames=1)


@pytest.fixture
def model(written: Model, tmp_path: Path) -> Model:
    """A copy of it."""
    return dataclasses.replace(written, path=shutil.copytree(written.path, tmp_path / "data"))


def agrees(dataset: DatasetStorage, model: Model, rows: Any) -> bool:
    """Whether rows equal those of the model."""
    batch = dataset[torch.as_tensor(rows)]
    return all((batch[key].numpy() == model.columns[key][rows]).all() for key in (TOP, WRIST, "observation.state"))


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for every job of a decoder."""
    jobs: list[int] = []
    submit = VideoFiles.submit

    def counted(self: VideoFiles, work: Any) -> Any:
        jobs.append(1)
        return submit(self, work)

    monkeypatch.setattr(VideoFiles, "submit", counted)
    return jobs


# -- the budget --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 12), st.lists(st.lists(st.integers(0, 19), max_size=14), max_size=8))
@example(2, [[0, 0, 1]])
def test_rows_are_kept_within_the_budget(most, reads):
    rows = np.arange(20 * 6, dtype=np.uint8).reshape(20, 2, 3)
    cache = RowCache(20, (2, 3), most * 6 + 3)
    for wanted in reads:
        at = np.array(wanted, np.int64)
        got, found = cache.read(at)
        np.testing.assert_array_equal(got.numpy()[found], rows[at][found])
        missing = at[~found]
        cache.keep(missing, rows, missing)
        assert cache.used <= min(most, 20)
        assert cache.nbytes <= most * 6 + 3
        if len(set(wanted)) <= most:
            assert cache.read(at)[1].all()
    cache.clear()
    assert not cache.read(np.arange(20))[1].any()


def test_the_rows_used_least_recently_leave():
    rows = np.zeros((100, 8), np.uint8)
    cache = RowCache(100, (8,), 10 * 8)
    hot = np.array([1, 2, 3])
    for row in range(100):
        cache.read(hot)
        cache.keep(hot, rows, hot)
        cache.keep(np.array([row]), rows, np.array([row]))
    assert cache.read(hot)[1].all()
    assert cache.read(np.arange(93, 100))[1].all()


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({"max_bytes": 1}, False),
        ({"max_bytes": 60_000}, False),
        ({"max_bytes": 1 << 30}, True),
        ({"max_bytes": 1, "cache": "memory"}, True),
        ({"max_bytes": 1, "cache": "disk"}, True),
    ],
)
def test_frames_are_right_with_any_cache_and_decoded_once_where_all_are_kept(
    written, options, once, monkeypatch, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    jobs = decoded(monkeypatch)
    dataset = open_dataset(written.path, num_threads=2, **options)
    generator = np.random.default_rng(0)
    for size in generator.integers(1, 20, 12):
        assert agrees(dataset, written, generator.integers(0, ROWS, size))
    assert agrees(dataset, written, np.arange(ROWS))
    count = len(jobs)
    assert agrees(dataset, written, np.arange(ROWS)[::-1].copy())
    assert (len(jobs) == count) == once
    dataset.close()
    assert agrees(dataset, written, np.arange(ROWS))
    assert any(tmp_path.iterdir()) == ("disk" in options.values())
    del dataset
    assert not list(tmp_path.iterdir()), "temporary files are removed"


MEMORY = """
import sys, numpy as np, psutil, torch
from pathlib import Path
from tests.datasets.videos import pictures, write_video
from tests.datasets.test_video import following, say
from ostinato.datasets.cache import BlockCache
from ostinato.datasets.format import Reading
from ostinato.datasets.video import VideoColumn
path = Path(sys.argv[1])
write_video(path, pictures(40, 240, 320), fps=30, keyframes=2, codec="mpeg4")
budget = 96 << 20  # of 221 MB of frames
reading = Reading(BlockCache(1), 2, 1e-4)
spans = following(40)
generator = np.random.default_rng(0)
films = [VideoColumn([path], spans, (3, 240, 320), say, reading, 30) for _ in range(24)]
draw = lambda: torch.from_numpy((generator.integers(0, 32, 2)[:, None] + np.arange(8)).ravel())
for film in films * 6:
    film.start(draw())()
before = psutil.Process().memory_info().rss
for film in films:
    film.keep_frames(40, budget // 24)
peak = 0
for film in films * 6:
    film.start(draw())()
    peak = max(peak, psutil.Process().memory_info().rss - before)
print(peak / budget, sum(film.kept.nbytes for film in films) / budget)
"""


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "a.mp4")], capture_output=True, text=True, check=True, timeout=120
    )
    resident, kept = map(float, run.stdout.split())
    assert kept > 0.9
    assert resident < 1.1 + 20 / 96  # batches and decoders take memory of their own, too


def in_a_fork(work: Callable[[], bool]) -> bool:
    """Whether work in a forked process returns true."""
    process = os.fork()
    if not process:
        done = False
        try:
            done = work()
        finally:
            os._exit(0 if done else 1)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_copies_and_other_processes_share_the_rows(written, kind):
    names = (TOP, "observation.state")
    check_processes(
        open_dataset(written.path, cache=kind, fields=list(names)), {name: written.columns[name] for name in names}
    )
    dataset = open_dataset(written.path, cache=kind)
    assert in_a_fork(lambda: agrees(dataset, written, np.arange(5, 30)))
    column: Any = dataset.contents.columns[TOP,]
    assert column.filled.nonzero().flatten().tolist() == list(range(5, 30))
    assert agrees(dataset, written, np.arange(ROWS))


def test_rows_on_disk_persist_for_one_process(model, tmp_path, monkeypatch):
    def opened(**options: Any) -> DatasetStorage:
        return open_dataset(model.path, cache="disk", cache_dir=tmp_path / "cache", **options)

    def is_refused() -> bool:
        with pytest.raises(DirectoryInUseError):
            opened()
        return True

    dataset = opened()
    assert agrees(dataset, model, np.arange(0, 30))
    dataset.close()
    del dataset
    jobs = decoded(monkeypatch)
    dataset = opened()
    assert agrees(dataset, model, np.arange(0, 30))
    assert not jobs
    assert agrees(dataset, model, np.arange(ROWS))
    assert jobs
    for again in (opened(fields=[WRIST]), opened(fields=[WRIST])):  # in the same process
        np.testing.assert_array_equal(again[:][WRIST].numpy(), model.columns[WRIST])
    del again
    assert in_a_fork(is_refused), "one of three datasets is still open"


def read_forever(path: Path, folder: Path, told: Any) -> None:
    """Decode rows in another process, which tells of each batch."""
    decoded_files._FLUSH_BYTES = 20_000
    dataset = open_dataset(path, cache="disk", cache_dir=folder)
    generator = np.random.default_rng(0)
    while True:
        told.send(None)
        dataset[torch.from_numpy(generator.integers(0, len(dataset), 3))]


def test_a_killed_process_leaves_no_wrong_row(model, tmp_path):
    folder = tmp_path / "cache"
    heard, told = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=read_forever, args=(model.path, folder, told))
    process.start()
    for _ in range(30):
        assert heard.recv() is None
    process.kill()
    process.join()
    dataset = open_dataset(model.path, cache="disk", cache_dir=folder)
    column: Any = dataset.contents.columns[TOP,]
    rows = column.filled.nonzero().flatten().numpy()
    assert len(rows) > 0
    np.testing.assert_array_equal(column.tensor.numpy()[rows], model.columns[TOP][rows])
    assert agrees(dataset, model, np.arange(ROWS))


def test_a_changed_dataset_and_other_directories_are_refused(model, tmp_path):
    video = next(model.path.rglob("*.mp4"))
    status = video.stat()
    for path in (model.path, model.path / "meta", model.path / "meta" / "info.json"):
        folder = tmp_path / f"cache of {path.name}"
        open_dataset(path, cache="disk", cache_dir=folder)
        os.utime(video, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        not_opened(path, CheckpointError, "have changed since", cache="disk", cache_dir=folder)
        os.utime(video, ns=(status.st_atime_ns, status.st_mtime_ns))
        open_dataset(path, cache="disk", cache_dir=folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("important")
    not_opened(model.path, OptionError, r"thesis\.txt", cache="disk", cache_dir=tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


def test_damaged_files_of_the_cache(model, tmp_path, monkeypatch):
    folder = tmp_path / "cache"

    def fill() -> None:
        dataset = open_dataset(model.path, cache="disk", cache_dir=folder)
        assert agrees(dataset, model, np.arange(ROWS))
        dataset.close()

    fill()
    rows = next(folder.glob("observation_images_top*.bin"))
    marks = rows.with_name(f"{rows.name}.rows")
    rows.write_bytes(rows.read_bytes()[:-100])  # cut short: its rows are decoded again
    short, sizes = rows.stat().st_size, list[int]()
    monkeypatch.setattr(files, "fsync_dir", lambda _: sizes.append(0 if marks.exists() else rows.stat().st_size))
    fill()
    assert short in sizes, "the disk knows that no row is kept before the file is made anew"
    monkeypatch.undo()
    rows.unlink()
    fill()
    marks.write_bytes(marks.read_bytes()[:-1] + b"\x00")
    with pytest.raises(DamagedFileError, match=r"\.rows is damaged: remove"):
        fill()
    marks.unlink()
    fill()
    (folder / "ostinato-decoded.json").write_text("{")
    with pytest.raises(DamagedFileError, match="is damaged: remove"):
        fill()


def test_too_little_memory_and_disk_are_said_at_once(written, tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    not_opened(written.path, StorageMemoryError, r'cache="memory" needs \d+ bytes .* 1000 bytes', cache="memory")
    open_dataset(written.path, cache="memory", episodes=[0], fields=["timestamp"])
    need = ROWS * 3 * (32 * 48 + 24 * 32)
    for free in (need - 1, need):
        monkeypatch.setattr(files, "free_bytes", lambda _, free=free: free)
        if free < need:
            not_opened(
                written.path,
                StorageMemoryError,
                rf'cache="disk" needs {need} bytes .* {free} bytes',
                cache="disk",
                cache_dir=tmp_path / "cache",
                fields=[TOP, WRIST],
            )
        else:
            open_dataset(written.path, cache="disk", cache_dir=tmp_path / "cache", fields=[TOP, WRIST])
    for options, message in (
        ({"cache": "gpu"}, 'cache must be "memory", "disk" or None'),
        ({"cache": "memory", "cache_dir": tmp_path}, 'cache_dir is for cache="disk"'),
        ({"cache_dir": tmp_path}, 'cache_dir is for cache="disk"'),
        ({"tolerance_s": "0.1"}, "tolerance_s"),
    ):
        not_opened(written.path, OptionError, message, **options)
    not_opened({"x": np.zeros(3)}, OptionError, "is in memory already", cache="memory", episode_ends=[3])
