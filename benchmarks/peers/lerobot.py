"""LeRobot: its dataset behind PyTorch's `DataLoader`, with as many workers as are fastest for each workload."""

from __future__ import annotations

import importlib.util
import os
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.adapter import Seconds
from benchmarks.recordings import offsets, recording
from benchmarks.workloads import WORKLOADS as WORKLOADS_OF_ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.adapter import Call, Setup

LACKS = {load.family: "datasets in files only" for load in WORKLOADS_OF_ALL if load.family != "dataset"}
_BATCHES = 4
"""Batches that are timed at once, after those that the workers had ready."""
_QUEUED = 2
"""Batches that a worker prepares ahead (PyTorch's default)."""
_KEPT: list[Any] = []


def _lerobot() -> Any:
    """Return LeRobot's module of datasets, which imports torchvision: its operators, unused here, need not load."""
    torch: Any = import_module("torch")
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or []) if spec and not _KEPT else []:
        for compiled in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(compiled)
                _KEPT.append(compiled)
            except OSError:
                library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _KEPT.append(library)
    return import_module("lerobot.datasets.lerobot_dataset")


def version() -> str:
    """Return the library's version."""
    _lerobot()
    return f"{import_module('lerobot').__version__} (torchcodec {import_module('torchcodec').__version__})"


def _batches(setup: Setup, workers: int) -> Iterator[Any]:
    """Batches without end of rows drawn at random."""
    data: Any = import_module("torch.utils.data")
    os.environ["HF_HOME"] = str(setup.directory)
    dataset = _lerobot().LeRobotDataset(
        "benchmarks/recording", root=recording(setup.kind, setup.rows), delta_timestamps=offsets(setup.kind)
    )
    sampler = data.RandomSampler(dataset, replacement=True, num_samples=10**9)
    return iter(data.DataLoader(dataset, batch_size=setup.batch, sampler=sampler, num_workers=workers))


class _Loader:
    """A loader that is measured when it works without pause: batches prepared between rounds do not count."""

    def __init__(self, setup: Setup, workers: int) -> None:
        """Start the workers."""
        self._batches = _batches(setup, workers)
        self._ready = workers * _QUEUED

    def __call__(self) -> Seconds:
        """Return seconds a batch; in the end wait until the workers, which prepare the next ones, are idle."""
        for _ in range(max(self._ready, 1)):
            next(self._batches)
        before = time.perf_counter()
        for _ in range(_BATCHES):
            next(self._batches)
        taken = Seconds((time.perf_counter() - before) / _BATCHES)
        time.sleep(1.5 * self._ready * taken)
        return taken


def windows(setup: Setup) -> Call:
    """Draw windows with 0, 1 or 2 workers, whichever is fastest.

    Decoders do not survive a fork: workers start before this process decodes for the first time.
    """
    import_module("lerobot.datasets.video_utils")._default_decoder_cache.clear()  # noqa: SLF001
    fastest: tuple[float, _Loader] | None = None
    for workers in (2, 1, 0):
        loader = _Loader(setup, workers)
        taken = loader()
        if fastest is None or taken < fastest[0]:
            fastest = taken, loader
    if fastest is None:
        message = "no loader was tried"
        raise RuntimeError(message)
    return fastest[1]


def first(setup: Setup) -> Call:
    """Open the dataset and draw one batch; Hugging Face's copy of the table is there from an earlier time."""
    next(_batches(setup, 0))

    def call() -> Seconds:
        before = time.perf_counter()
        batch = next(_batches(setup, 0))
        taken = Seconds(time.perf_counter() - before)
        del batch
        return taken

    return call


WORKLOADS = {
    **{f"dataset.{kind}": windows for kind in ("96", "480", "96-cached", "480-cached")},
    "dataset.open": first,
}
