"""The bare limits in C: tables in preallocated memory and calls that copy rows, nothing else.

One ctypes call (about 1 us) is part of each: less than that no Python library can take.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import weakref
from ctypes import POINTER, c_int, c_int64, c_void_p
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks import data
from benchmarks.adapter import KINDS
from benchmarks.peers._episodes import SLICE, WRITTEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

SOURCE: Final = Path(__file__).resolve().parents[1] / "limits.cpp"
BUILD: Final = SOURCE.parents[1] / "build" / "benchmarks"
FLAGS: Final = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC")
_LINE = 64
_DRAWS = 256
"""Batches of slices drawn in advance: more rows than the cache holds."""


class _Field(ctypes.Structure):
    _fields_ = (
        ("base", c_void_p),
        ("src", c_void_p),
        ("out", c_void_p),
        ("stride", c_int64),
        ("width", c_int64),
    )


@cache
def library() -> ctypes.CDLL:
    """Compile `limits.cpp` unless that was done before, and loads it.

    Raises:
        RuntimeError: There is no compiler.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        msg = "no C++ compiler: set CXX or install g++"
        raise RuntimeError(msg)
    token = hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:12]
    path = BUILD / f"limits-{token}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, "-o", str(fresh), str(SOURCE)], check=True, capture_output=True)
        fresh.replace(path)
    loaded = ctypes.CDLL(str(path))
    fields = POINTER(_Field)
    loaded.limit_gather.argtypes = (fields, c_int, c_void_p, c_int64)
    loaded.limit_sample.argtypes = (fields, c_int, c_int64, c_int64)
    loaded.limit_write.argtypes = (fields, c_int, c_int64, c_void_p, c_int64)
    loaded.limit_tree.argtypes = (c_int64,)
    loaded.limit_tree.restype = c_void_p
    loaded.limit_tree_free.argtypes = (c_void_p,)
    loaded.limit_prioritized.argtypes = (fields, c_int, c_void_p, c_int64)
    for function in (
        loaded.limit_gather,
        loaded.limit_sample,
        loaded.limit_write,
        loaded.limit_tree_free,
        loaded.limit_prioritized,
    ):
        function.restype = None
    return loaded


class Table:
    """Rows in preallocated memory: one array per field, or all fields of a row side by side in one array."""

    def __init__(self, setup: Setup, make: Callable[[int, int], Rows], *, packed: bool, mapped: bool = False) -> None:
        """Allocate and fills the table, the batch to write and the batch to read into."""
        self.rows, self.batch = setup.rows, setup.batch
        self._lib = library()
        self._source = make(setup.batch, 1)
        self._target = {key: np.empty_like(value) for key, value in self._source.items()}
        self._cursor = c_int64(0)
        self._order = np.random.default_rng(0).permutation(setup.rows) if make is data.amp else np.empty(0, np.int64)
        self._at = 0
        widths = {key: value[0].nbytes for key, value in self._source.items()}
        strides = dict.fromkeys(widths, -(-sum(widths.values()) // _LINE) * _LINE) if packed else widths
        self._memory: list[NDArray[np.uint8]] = []
        starts: dict[str, int] = {}
        for key in widths:
            if not packed or not starts:
                self._memory.append(self._allocate(setup, strides[key], key if mapped else None))
                starts[key] = self._memory[-1].ctypes.data
            else:
                last = list(starts)[-1]
                starts[key] = starts[last] + widths[last]
        self._fields = (_Field * len(widths))(
            *(
                _Field(
                    starts[key],
                    self._source[key].ctypes.data,
                    self._target[key].ctypes.data,
                    strides[key],
                    width,
                )
                for key, width in widths.items()
            )
        )

    def _allocate(self, setup: Setup, stride: int, mapped: str | None) -> NDArray[np.uint8]:
        size = setup.rows * stride
        if mapped is not None:
            memory: NDArray[np.uint8] = np.memmap(setup.directory / f"{mapped}.bin", np.uint8, "w+", shape=(size,))
        else:
            room = np.empty(size + _LINE, np.uint8)
            skip = -room.ctypes.data % _LINE
            memory = room[skip : skip + size]
        memory[:] = 1
        return memory

    def sample(self) -> None:
        """Copy `batch` fresh random rows out."""
        self._lib.limit_sample(self._fields, len(self._fields), self.rows, self.batch)

    def by_priority(self) -> Call:
        """Return a call that draws `batch` rows from a sum tree, copies them out and writes their leaves anew."""
        lib, fields, count, batch = self._lib, self._fields, len(self._fields), self.batch
        tree = lib.limit_tree(self.rows)
        weakref.finalize(self, lib.limit_tree_free, tree)
        return lambda _keep=self: lib.limit_prioritized(fields, count, tree, batch)  # type: ignore[misc]

    def slices(self, length: int) -> Call:
        """Return a call that copies `batch` rows out: slices of `length` rows that follow each other."""
        starts = np.random.default_rng(0).integers(0, self.rows - length, (_DRAWS, self.batch // length, 1))
        index = (starts + np.arange(length)).reshape(_DRAWS, -1)
        addresses = cycle([row.ctypes.data for row in index])
        gather, fields, count, batch = self._lib.limit_gather, self._fields, len(self._fields), self.batch
        return lambda _keep=(self, index): gather(fields, count, next(addresses), batch)  # type: ignore[misc]

    def sample_in_order(self) -> None:
        """Copy the next `batch` rows of a ready permutation out."""
        if self._at + self.batch > self.rows:
            self._at = 0
        address = self._order.ctypes.data + 8 * self._at
        self._lib.limit_gather(self._fields, len(self._fields), address, self.batch)
        self._at += self.batch

    def write(self) -> None:
        """Copy `batch` rows in at the ring's cursor."""
        self._lib.limit_write(self._fields, len(self._fields), self.rows, ctypes.byref(self._cursor), self.batch)


def version() -> str:
    """Return the compiler's name; compiles, so that a machine without compiler is told at once."""
    library()
    return Path(os.environ.get("CXX", "g++")).name


def workloads(*, packed: bool) -> dict[str, Callable[[Setup], Call]]:
    """Return the limits of one layout, under the names of the workloads that they belong to."""

    def both(table: Table) -> Call:
        def call() -> None:
            table.write()
            table.sample()

        return call

    def amp(setup: Setup) -> Call:
        table = Table(setup, data.amp, packed=False)

        def call() -> None:
            table.write()
            table.sample_in_order()

        return call

    def slices(setup: Setup) -> Call:
        return Table(setup, data.transitions, packed=packed).slices(SLICE)

    def slices_writing(setup: Setup) -> Call:
        read, ring = slices(setup), Table(replace(setup, batch=WRITTEN), data.transitions, packed=packed)

        def call() -> None:
            ring.write()
            read()

        return call

    families: dict[str, Callable[[Setup], Call]] = {
        "slices": slices,
        "slices-writing": slices_writing,
        "uniform": lambda setup: Table(setup, data.transitions, packed=packed).sample,
        "prioritized": lambda setup: Table(setup, data.transitions, packed=packed).by_priority(),
        "extend": lambda setup: Table(setup, data.transitions, packed=packed).write,
        "add": lambda setup: Table(setup, data.transitions, packed=packed).write,
        "mmap": lambda setup: both(Table(setup, data.transitions, packed=packed, mapped=True)),
    }
    if not packed:  # one field, or fields so wide that their layout does not matter
        families |= {"images": lambda setup: Table(setup, data.frames, packed=False).sample, "amp": amp}
    table = {f"{family}.{kind}": prepare for family, prepare in families.items() for kind in KINDS}
    table |= {f"slices-rows.{rows}": slices for rows in ("1e5", "1e7")}
    return table | {f"prioritized-rows.{rows}": families["prioritized"] for rows in ("1e4", "1e5", "1e7")}
