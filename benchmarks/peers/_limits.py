"""The bare limits in C: tables in preallocated memory and calls that copy rows, nothing else.

One ctypes call (0.15 us) is part of each: about what a call of a compiled function takes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import weakref
from ctypes import POINTER, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

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
CALLS: Final = (
    "limit_sample",
    "limit_prioritized",
    "limit_indexed",
    "limit_write",
    "limit_write_sample",
    "limit_write_indexed",
)
_LINE = 64
_DRAWS = 256
_MAX_READS = 1 << 16


class _Field(ctypes.Structure):
    """`Field` of limits.cpp."""

    _fields_ = (
        ("base", c_void_p),
        ("src", c_void_p),
        ("out", c_void_p),
        ("stride", c_int64),
        ("width", c_int64),
    )


class _Table(ctypes.Structure):
    """`Table` of limits.cpp; `memory` is what its pointers need."""

    _fields_ = (
        ("fields", POINTER(_Field)),
        *((name, c_int64) for name in ("count", "rows", "reads", "writes", "pool", "turn", "cursor")),
        ("tree", c_void_p),
        ("index", c_void_p),
        ("indices", c_int64),
        ("at", c_int64),
    )
    memory: tuple[object, ...]


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
    # PyDLL and one pointer: the cheapest call that ctypes has, as nothing is converted and the GIL is kept.
    loaded = ctypes.PyDLL(str(path))
    loaded.limit_tree.argtypes = (c_int64,)
    loaded.limit_tree.restype = c_void_p
    loaded.limit_tree_free.argtypes = (c_void_p,)
    for name in CALLS:
        loaded[name].restype = None
    return loaded


class Table:
    """Rows in preallocated memory: one array per field, or all fields of a row side by side in one array."""

    def __init__(
        self,
        setup: Setup,
        make: Callable[[int, int], Rows],
        *,
        packed: bool,
        reads: int = 0,
        writes: int = 0,
        mapped: bool = False,
    ) -> None:
        """Allocate and fills the table, the batches to write in turn and the batch to read into."""
        if reads > _MAX_READS:
            msg = f"limits read at most {_MAX_READS} rows at a time, got {reads}"
            raise ValueError(msg)
        one = make(1, 0)
        self._lib = library()
        source = {key: _aligned(value) for key, value in (_joined(data.pool(make, writes)) if writes else one).items()}
        self.target = {key: _aligned(np.repeat(value, max(reads, 1), axis=0)) for key, value in one.items()}
        widths = {key: value.nbytes for key, value in one.items()}
        strides = dict.fromkeys(widths, -(-sum(widths.values()) // _LINE) * _LINE) if packed else widths
        memory: list[NDArray[np.uint8]] = []
        starts: dict[str, int] = {}
        for key in widths:
            if not packed or not starts:
                memory.append(_allocate(setup, strides[key], key if mapped else None))
                starts[key] = memory[-1].ctypes.data
            else:
                last = list(starts)[-1]
                starts[key] = starts[last] + widths[last]
        fields = (_Field * len(widths))(
            *(
                _Field(starts[key], source[key].ctypes.data, self.target[key].ctypes.data, strides[key], width)
                for key, width in widths.items()
            )
        )
        self._table = _Table(fields, len(widths), setup.rows, reads, writes, data.POOL)
        self._table.memory = (fields, memory, source, self.target)

    def call(self, name: str) -> Call:
        """Return a call of one of `CALLS`."""
        return partial(self._lib[name], ctypes.byref(self._table))  # which keeps the table alive

    def by_priority(self) -> Call:
        """Return a call that draws rows from a sum tree, copies them out and writes their leaves anew."""
        self._table.tree = self._lib.limit_tree(self._table.rows)
        weakref.finalize(self._table, self._lib.limit_tree_free, self._table.tree)
        return self.call("limit_prioritized")

    def along(self, index: NDArray[np.int64]) -> Self:
        """Take the rows to read from an index, in turn."""
        self._table.index, self._table.indices = index.ctypes.data, index.size
        self._table.memory = (*self._table.memory, index)
        return self


def _joined(batches: list[Rows]) -> Rows:
    return {key: np.concatenate([rows[key] for rows in batches]) for key in batches[0]}


def _aligned(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return a copy that begins at a cache line, as the tensors of torch do."""
    copy = _lines(values.nbytes).view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _lines(size: int) -> NDArray[np.uint8]:
    """Return memory that begins at a cache line."""
    room = np.empty(size + _LINE, np.uint8)
    skip = -room.ctypes.data % _LINE
    return room[skip : skip + size]


def _allocate(setup: Setup, stride: int, mapped: str | None) -> NDArray[np.uint8]:
    """Return memory for all rows, touched, or a mapped file."""
    size = setup.rows * stride
    memory = (
        _lines(size) if mapped is None else np.memmap(setup.directory / f"{mapped}.bin", np.uint8, "w+", shape=(size,))
    )
    memory[:] = 1
    return memory


def _slices(setup: Setup) -> NDArray[np.int64]:
    """Return the rows of many batches of slices, drawn in advance: more rows than the cache holds."""
    starts = np.random.default_rng(0).integers(0, setup.rows - SLICE, (_DRAWS, setup.batch // SLICE, 1))
    return (starts + np.arange(SLICE)).reshape(-1)


def version() -> str:
    """Return the compiler's name; compiles, so that a machine without compiler is told at once."""
    library()
    return Path(os.environ.get("CXX", "g++")).name


def workloads(*, packed: bool) -> dict[str, Callable[[Setup], Call]]:
    """Return the limits of one layout, under the names of the workloads that they belong to."""

    def rows_of(setup: Setup, reads: int = 0, writes: int = 0) -> Table:
        return Table(setup, data.transitions, packed=packed, reads=reads, writes=writes)

    def mmap(setup: Setup) -> Call:
        table = Table(setup, data.transitions, packed=packed, reads=setup.batch, writes=setup.batch, mapped=True)
        return table.call("limit_write_sample")

    def slices(setup: Setup) -> Call:
        return rows_of(setup, reads=setup.batch).along(_slices(setup)).call("limit_indexed")

    def slices_writing(setup: Setup) -> Call:
        table = rows_of(setup, reads=setup.batch, writes=WRITTEN).along(_slices(setup))
        return table.call("limit_write_indexed")

    def sample(setup: Setup) -> Call:
        return rows_of(setup, reads=setup.batch).call("limit_sample")

    def write(setup: Setup) -> Call:
        return rows_of(setup, writes=setup.batch).call("limit_write")

    def prioritized(setup: Setup) -> Call:
        return rows_of(setup, reads=setup.batch).by_priority()

    families: dict[str, Callable[[Setup], Call]] = {
        "slices": slices,
        "slices-writing": slices_writing,
        "uniform": sample,
        "prioritized": prioritized,
        "extend": write,
        "add": write,
        "mmap": mmap,
    }
    if not packed:  # one field, or fields so wide that their layout does not matter
        families |= {"images": _images, "amp": _amp}
    table = {f"{family}.{kind}": prepare for family, prepare in families.items() for kind in KINDS}
    table |= {"extend.numpy": write, "add.numpy": write, "uniform-out.dict": sample}
    table |= {} if packed else {"images-out.dict": _images}
    table |= {f"slices-rows.{rows}": slices for rows in ("1e5", "1e7")}
    return table | {f"prioritized-rows.{rows}": prioritized for rows in ("1e4", "1e5", "1e7")}


def _images(setup: Setup) -> Call:
    return Table(setup, data.frames, packed=False, reads=setup.batch).call("limit_sample")


def _amp(setup: Setup) -> Call:
    table = Table(setup, data.amp, packed=False, reads=setup.batch, writes=setup.batch)
    return table.along(np.random.default_rng(0).permutation(setup.rows)).call("limit_write_indexed")
