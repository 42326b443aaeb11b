"""The doctor: looks for faults in a dataset of any format that `open_dataset` reads, and reports them."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.core.options import number_of
from ostinato.datasets import open_dataset
from ostinato.datasets.arrays import examine_mapping
from ostinato.datasets.checks import READ_ERRORS, Place, first_line
from ostinato.datasets.examination import Examination, Finding, Pictures, is_picture
from ostinato.datasets.hdf5 import resembles_hdf5
from ostinato.datasets.open import formats, known_formats
from ostinato.datasets.values import Profile
from ostinato.durable.manifest import holds_checkpoint
from ostinato.durable.progress import Progress
from ostinato.errors import CheckpointNotFoundError, KindError, MissingExtraError, OptionError, OstinatoError
from ostinato.tools.datasets import rows_and_episodes
from ostinato.tools.inspect import is_store
from ostinato.tools.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.core.rows import Leaf
    from ostinato.datasets import DatasetStorage
    from ostinato.datasets.checks import Severity
    from ostinato.datasets.format import Format
    from ostinato.durable.progress import ProgressOption

_OPEN_ERRORS: tuple[type[Exception], ...] = (OstinatoError, *READ_ERRORS)
_ADVICE = re.compile(r": restore (the file|it) from a copy$")
"""Ends messages on damaged files; it is the advice of the finding, too."""
_NUMPY_LACKS = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


@dataclass(frozen=True)
class Report:
    """The result of `examine`. `print(report)` lists the findings."""

    path: str
    """The dataset."""
    format: str
    """Its format, such as "lerobot v3.0"."""
    episodes: int | None
    """Number of episodes found in the data; None if it was not read."""
    rows: int | None
    """Number of rows that can be sampled, as `open_dataset` counts them; None if there are errors."""
    stored_rows: int | None
    """Number of rows found in the files; None if they were not read."""
    left_out_because: str
    """Why some stored rows cannot be sampled; empty if all can."""
    decoded: str
    """Which pictures were decoded, in words; empty if there are none."""
    findings: tuple[Finding, ...]
    """Errors first, then warnings and notes; at most 20 of each check."""
    omitted: dict[str, int]
    """Number of further findings by check."""
    profile: Profile = field(repr=False, compare=False, default_factory=Profile)
    """Numbers for the page of plots."""

    @property
    def counts(self) -> dict[Severity, int]:
        """Number of listed findings by severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {"error": found["error"], "warning": found["warning"], "note": found["note"]}

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings and notes are allowed."""
        return not self.counts["error"]

    def to_json(self) -> str:
        """Return the report as JSON, without the numbers for plots."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, without the numbers for plots."""
        names = ("path", "format", "episodes", "rows", "stored_rows", "left_out_because", "decoded", "omitted")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "ok": self.ok, "counts": self.counts, "findings": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        """Return the findings, one line each with the advice below."""
        lines = [f"{self.path}: {self.format}, {self.extent}"]
        lines += [self.decoded] if self.decoded else []
        for finding in self.findings:
            lines += [str(finding), f"    {finding.advice}"]
        lines += [f"{count:,} more of {check}" for check, count in self.omitted.items()]
        return "\n".join([*lines, self.verdict])

    @property
    def extent(self) -> str:
        """The numbers of rows and episodes in words."""
        if self.stored_rows is None or self.episodes is None:
            return "not read"
        if self.rows is None:
            return f"{number_of(self.stored_rows, 'row')} and {number_of(self.episodes, 'episode')} could be read"
        return rows_and_episodes(self.rows, self.episodes, self.stored_rows, self.left_out_because)

    @property
    def verdict(self) -> str:
        """The counts in words."""
        counts = self.counts
        if not any(counts.values()):
            return "no findings"
        more = sum(self.omitted.values())
        shown = [number_of(counts[name], name) for name in ("error", "warning", "note")]
        return ", ".join(shown) + (f", {more:,} more not listed" if more else "")


def examine(
    source: str | os.PathLike[str] | Mapping[Any, Any],
    *,
    episode_ends: Any = None,
    full: bool = False,
    progress: ProgressOption = None,
) -> Report:
    """Look for faults in a dataset of any format that `open_dataset` reads, or in a mapping of arrays.

    All tables are read once; of pictures and videos, 12 frames of each episode are decoded, of at most 200 episodes
    for each camera. Nothing is changed. Faults become findings of the report: `docs/doctor.md` describes each check.
    Memory holds one episode, or one table of LeRobot, without its pictures, the table of episodes, and a few numbers
    for each episode.

    Args:
        source: a path, or a mapping of arrays `[rows, ...]`.
        episode_ends: for a mapping: the row after the last one of each episode. None takes `episode_ends`, or
            `meta/episode_ends`, of the mapping.
        full: decode all frames.
        progress: the steps done and their total, which grows by 1,000 for tables, for cameras and for checksums; see
            `ostinato.ProgressOption`.

    Returns:
        What was found; `report.ok` tells whether there are no errors.

    Raises:
        CheckpointNotFoundError: if the path does not exist.
        KindError: if it is not a dataset of a known format.
        MissingExtraError: naming the extra to install for the format.

    Examples:
        >>> import numpy as np
        >>> from ostinato.tools import examine
        >>> values = np.random.default_rng(0).normal(size=(100, 2))
        >>> report = examine({"observation": values, "action": values}, episode_ends=[40, 120])
        >>> report.ok
        False
        >>> report.findings[0].check
        'episode-bounds'
    """
    with Progress(progress, "doctor", 0, unit="steps") as bar:
        return _examine(source, episode_ends, Examination(bar, full=full))


def _examine(source: Any, episode_ends: Any, look: Examination) -> Report:
    if isinstance(source, Mapping):
        name = examine_mapping(source, episode_ends, look)
        look.finish()
        return _report("(mapping)", name, look, look.total)
    if episode_ends is not None:
        msg = f"episode_ends is for a mapping of arrays, got it with {source!r}: the files say where episodes end"
        raise OptionError(msg)
    given: Any = source
    if not isinstance(given, (str, os.PathLike)):
        msg = f"the doctor takes the path of a dataset or a mapping of arrays, got {type(given).__name__}"
        raise KindError(msg)
    path = Path(source).expanduser()
    if not path.exists():
        msg = f"{path} does not exist: give the folder or file of a dataset"
        raise CheckpointNotFoundError(msg)
    kind, root = _recognize(path.absolute())
    if kind is None and not _stores(root):
        msg = f"{path} is not a dataset of a known format: these are {', '.join(known_formats())}"
        raise KindError(msg)
    if kind is None or kind.examine is None:
        return _saved(root, path, look)
    return _files(kind.examine, root, path, look)


def _recognize(path: Path) -> tuple[Format | None, Path]:
    """Return the format of a dataset, maybe damaged, and the path of the whole dataset."""
    for kind in formats():
        root = kind.find(path)
        if root is not None:
            return kind, root
    return None, path


def _files(checks: Callable[[Path, Examination], str], root: Path, path: Path, look: Examination) -> Report:
    """Check the files of a dataset as far as they can be read, and open it if they have no errors."""
    try:
        name = checks(root, look)
    except READ_ERRORS as error:
        if isinstance(error, OstinatoError):
            raise
        look.add("file-unreadable", first_line(error), Place(path.name))
        return _report(path, "hdf5" if resembles_hdf5(root) else "dataset", look)
    look.finish()
    dataset = None if look.has("error") else _open(path, look)  # damaged files may claim any size
    if dataset is None:
        return _report(path, name, look)
    return _report(path, name, look, len(dataset), because=dataset.contents.left_out_because)


def _report(
    path: Any, name: str, look: Examination, rows: int | None = None, *, stored: int | None = None, because: str = ""
) -> Report:
    """Return the report; `rows` that can be sampled, `stored` ones if not those of the episodes shown."""
    lengths = look.rows.lengths.values()
    shown = any(lengths)
    return Report(
        path=str(path),
        format=name,
        episodes=len(lengths) if shown else None,
        rows=rows if shown else None,
        stored_rows=(look.total if stored is None else stored) if shown else None,
        left_out_because=because,
        decoded=look.decoded,
        findings=look.listed,
        omitted=look.omitted,
        profile=look.profile,
    )


def _open(path: Path, look: Examination) -> DatasetStorage | None:
    """Open a dataset as users do; what prevents it becomes a finding."""
    try:
        dataset = open_dataset(path, progress=False)
        dataset.read(len(dataset) - 1)
    except MissingExtraError:
        raise
    except _OPEN_ERRORS as error:
        look.add("not-opened", first_line(error), Place(path.name))
        return None
    return dataset


# -- formats without checks of their own: what Ostinato, RLinf and TorchRL saved ---------------------------------------


def _stores(path: Path) -> list[Path]:
    """Return the directories of trajectories at a path: itself, or one for each rank."""
    return [path] if is_store(path) else sorted(one for one in path.glob("rank_*") if is_store(one))


def _saved(root: Path, path: Path, look: Examination) -> Report:
    """Verify the files, then check the rows that `open_dataset` reads."""
    stores = _stores(root)
    notes = [_verify(stores or ([root] if holds_checkpoint(root) else []), root, look)]
    dataset = None if look.has("error") else _open(root, look)
    if dataset is None:
        look.decoded = notes[0]
        return _report(path, "trajectories" if stores else "checkpoint", look)
    examine_rows(dataset, look)
    look.finish()
    look.decoded = "; ".join(filter(None, [*notes, look.decoded]))
    contents, rows = dataset.contents, None if look.has("error") else len(dataset)
    stored = len(dataset) + contents.rows_left_out
    return _report(path, dataset.format, look, rows, stored=stored, because=contents.left_out_because)


def _verify(roots: list[Path], path: Path, look: Examination) -> str:
    """Verify the files of directories; return how many are intact, in words, empty if there are none to verify."""
    files = checksums = unchecked = 0
    for root in roots:
        inside = "" if root == path else f"{root.name}/"
        try:
            report = verify(root, progress=look.steps())
        except _OPEN_ERRORS as error:
            look.add("saved-damaged", first_line(error), Place(root.name))
            continue
        for damage in report.damage:
            problem = _ADVICE.sub("", damage.problem.removeprefix(f"{root / damage.file} "))
            look.add("saved-damaged", problem, Place(f"{inside}{damage.file}", damage.trajectory_id))
        for name in report.unlisted:
            look.add("file-unlisted", "it is not in the index", Place(f"{inside}{name}"))
        files, checksums = files + report.files, checksums + report.checksums
        unchecked += len(report.unchecked)
    more = f", {number_of(unchecked, 'file')} not checked" if unchecked else ""
    return f"{number_of(files, 'file')} intact, {number_of(checksums, 'checksum')} verified{more}" if roots else ""


# -- rows ------------------------------------------------------------------------------------------------------------


def examine_rows(dataset: DatasetStorage, look: Examination) -> None:
    """Examine all rows of an open dataset."""
    look.fps = dataset.fps
    starts = [0, *dataset.episode_lengths.cumsum(0).tolist()]
    look.expect(len(starts) - 1)
    for number, (first, stop) in enumerate(itertools.pairwise(starts)):
        fields: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for leaf in dataset.schema.leaves:
            name = ".".join(map(str, leaf.path))
            if _is_picture(leaf):
                fields[name] = Pictures(range(first, stop), lambda row, leaf=leaf: _read(dataset, leaf, [row])[0])  # type: ignore[misc]
            else:
                kept = after if leaf.path[:2] == ("next", "observation") else fields
                kept[name] = _read(dataset, leaf, range(first, stop))
        look.episode(number, fields, stop - first, nexts=after)
    look.pictures()


def _read(dataset: DatasetStorage, leaf: Leaf, rows: Sequence[int]) -> Any:
    values = dataset.field_at(torch.tensor(rows, dtype=torch.int64, device="cpu"), leaf.path)
    if not isinstance(values, torch.Tensor):
        return np.zeros((len(rows), 0))
    return (values.float() if values.dtype in _NUMPY_LACKS else values).numpy()


def _is_picture(leaf: Leaf) -> bool:
    kind = np.uint8 if leaf.dtype == torch.uint8 else np.float32 if leaf.dtype.is_floating_point else np.int64
    return is_picture((1, *leaf.shape), kind)
