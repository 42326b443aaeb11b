"""The HDF5 file of a Minari dataset: a group for each episode, a dataset for each field."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ostinato._optional import require
from ostinato.datasets.hdf5 import Hdf5File, Hdf5Source, describe
from ostinato.datasets.stored import decode_jpegs
from ostinato.errors import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ostinato.core.rows import Path as Key

_JPEG_ROWS = 8
"""Pictures that are decoded together."""
_NUMBERS = ("rewards", "terminations", "truncations")


@final
class Hdf5Episodes:
    """The episodes of `main_data.hdf5`.

    Args:
        path: the file.
        numbers: episodes that are used.
        count: episodes of the whole dataset, as its metadata says.
        fields: observations and actions that each episode must have.

    Raises:
        DamagedFileError: if an episode is missing, or lacks a field.
    """

    def __init__(self, path: Path, numbers: Sequence[int], count: int, fields: Sequence[Key]) -> None:
        if not path.is_file():
            msg = f"{path} is missing: metadata.json says that the dataset is in HDF5"
            raise DamagedFileError(msg)
        self._file = Hdf5File(path)
        self._groups = [f"episode_{number}" for number in numbers]
        self._names: dict[str, set[str]] = {group: set() for group in self._groups}
        self.others = 0
        """Episodes in the file beyond the number in the metadata."""
        for name in self._file.names():
            group, _, rest = name.partition("/")
            self.others += not rest and group.startswith("episode_") and group[8:].isdigit() and int(group[8:]) >= count
            if group in self._names:
                self._names[group].add(rest)
        required = {*_NUMBERS, *(_name(parts) for parts in fields)}
        for group, names in self._names.items():
            missing = sorted(required - names)
            if missing:
                msg = f"{path}: {group} has no {', '.join(missing)}: copy or download the file again"
                raise DamagedFileError(msg)
        self.lengths = self._file.row_counts([f"{group}/rewards" for group in self._groups])
        """Steps of each episode, int64 `[episodes]`."""
        wrong = np.flatnonzero(self.lengths < 1)
        if wrong.shape[0]:
            msg = f"{path}: {self._groups[wrong[0]]} has no steps: its dataset rewards must have one row or more"
            raise DamagedFileError(msg)

    def source(self, parts: Key, extra: int, space: Any = None) -> Hdf5Source:
        """Return a field, whose parts are keys of dicts (text) and positions in tuples (int)."""
        name, lengths = _name(parts), self.lengths + extra
        if space is not None and getattr(space, "dtype", None) == np.uint8 and len(space.shape) > 1:
            stored = describe(self._file, f"{self._groups[0]}/{name}")
            if stored.dtype.hasobject or (stored.shape[1:] != space.shape and len(stored.shape) == 2):
                shape, size = tuple(space.shape), int(np.prod(space.shape))
                return Hdf5Source(
                    self._file,
                    self._groups,
                    name,
                    lengths,
                    decode=partial(decode_jpegs, shape=shape),
                    form=(np.dtype(np.uint8), shape),
                    block_bytes=_JPEG_ROWS * size,
                )
        return Hdf5Source(self._file, self._groups, name, lengths)

    def texts(self, parts: Key, extra: int) -> list[str]:
        """Read all rows of a field of text.

        Raises:
            DamagedFileError: if an episode has no text there, or other rows.
        """
        h5py = require("h5py", "minari")
        out: list[str] = []
        for group, length in zip(self._groups, self.lengths, strict=True):
            name = f"{group}/{_name(parts)}"
            found = self._file.use(partial(_read_texts, h5py, name))
            if found is None or len(found) != length + extra:
                had = "no texts" if found is None else f"{len(found)} texts"
                msg = f"{self._file}, {name} must be {length + extra} texts, there are {had}"
                raise DamagedFileError(msg)
            out += found
        return out

    def infos(self) -> tuple[dict[Key, int], list[str]]:
        """Return the infos that are arrays, with their extra rows, and a sentence for each of the others."""
        counts = Counter(name for names in self._names.values() for name in names if name.startswith("infos/"))
        groups = {name.rpartition("/")[0] for name in counts}
        first = self._names[self._groups[0]]
        found: dict[Key, int] = {}
        said: list[str] = []
        for name in sorted(counts.keys() - groups):
            if counts[name] != len(self._groups):
                said.append(f"{name} is in {counts[name]} of {len(self._groups)} episodes, and is left out.")
            elif name in first:
                reason = self._is_left_out(name, found)
                said += [] if reason is None else [f"{name} {reason}, and is left out."]
        return found, said

    def _is_left_out(self, name: str, found: dict[Key, int]) -> str | None:
        """Add a field of infos to `found`, or return the reason why it cannot be read by rows."""
        place = f"{self._groups[0]}/{name}"
        rows = int(self._file.row_counts([place])[0])
        if rows not in {self.lengths[0], self.lengths[0] + 1}:
            return "does not have one row per step"
        kind = describe(self._file, place).dtype
        if kind.kind not in "biuf":
            return f"does not hold numbers ({kind})"
        parts = tuple(int(p[7:]) if _is_position(p) else p for p in name.split("/")[1:])
        found[parts] = rows - int(self.lengths[0])
        return None


def _is_position(part: str) -> bool:
    return part.startswith("_index_") and part[7:].isdigit()


def _name(parts: Key) -> str:
    return "/".join(f"_index_{part}" if isinstance(part, int) else str(part) for part in parts)


def _read_texts(h5py: Any, name: str, group: Any) -> list[str] | None:
    found = group[name]
    if not isinstance(found, h5py.Dataset) or h5py.check_string_dtype(found.dtype) is None:
        return None
    try:
        return list(found.asstr()[()])
    except (OSError, UnicodeDecodeError):
        return None
