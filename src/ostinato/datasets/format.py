"""What a format of datasets is: how it is recognized, read, examined and written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.datasets.video import VideoFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ostinato.datasets.cache import BlockCache
    from ostinato.datasets.dataset import Contents, DatasetStorage
    from ostinato.datasets.examination import Examination
    from ostinato.durable.progress import Progress


@dataclass(frozen=True)
class Reading:
    """How the files of a dataset are read."""

    cache: BlockCache
    """Keeps blocks of rows and decoded frames; its `max_bytes` is what all of them may take."""
    num_threads: int
    """Threads that decode video."""
    tolerance_s: float
    """Largest distance between a video frame and the timestamp of its row."""
    filter_key: str | None = None
    """Name of the demonstrations to use."""
    max_episode_steps: int | None = None
    """Steps after which episodes are cut off, where the file does not say."""

    @cached_property
    def videos(self) -> VideoFiles:
        """Open videos and the threads that decode them, of all cameras."""
        return VideoFiles(self.num_threads, self.tolerance_s)


class Writing(NamedTuple):
    """How datasets of a format are written."""

    name: str
    """Value of `format` in `ostinato.export`."""
    options: tuple[str, ...]
    """Names of the options that `export` takes for it."""
    prepare: Callable[[DatasetStorage, Mapping[str, Any]], Callable[[Path, Progress], None]]
    """Make all checks of a dataset and of the options given; return what writes to the new path."""
    is_file: bool = False
    """Whether a dataset is one file; else a folder, which is there and empty when it is written."""


class Format(NamedTuple):
    """A format of datasets on disk.

    Packages add formats as entry points of the group `ostinato.datasets`; see `docs/datasets.md`.
    """

    name: str
    recognizes: Callable[[Any], bool]
    """Whether a path, which exists, has this format; reads as little as possible and does not raise."""
    read: Callable[[Any, Reading], Contents]
    """Read what the dataset holds, but no rows."""
    objects: tuple[str, ...] = ()
    """Classes whose objects are opened, too, by package and name: they are known without importing the package."""
    options: tuple[str, ...] = ()
    """Those of `filter_key` and `max_episode_steps` that apply."""
    examine: Callable[[Path, Examination], str] | None = None
    """Examine the files as far as they can be read; return the format with its version. None: only rows are checked."""
    resembles: Callable[[Path], bool] = lambda _: False
    """Whether a path is a dataset of this format that may be too damaged to be recognized."""
    root: Callable[[Path], Path | None] = lambda path: path
    """The path of the whole dataset, given one that is recognized; None if it is not."""
    write: Writing | None = None

    def find(self, path: Path) -> Path | None:
        """Return the path of the whole dataset, maybe damaged; None if it has another format."""
        if self.recognizes(path):
            return self.root(path)
        return path if self.resembles(path) else None
