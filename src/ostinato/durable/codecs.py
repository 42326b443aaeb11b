"""Codecs: lossless compression of rows as bytes, by zstd, zlib or functions of the user, in several threads."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

from ostinato._optional import require
from ostinato.core.processes import cores
from ostinato.errors import DamagedFileError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    In = TypeVar("In")
    Out = TypeVar("Out")
    _Bytes = TypeVar("_Bytes", bytes, memoryview)

__all__ = ["AnyCodec", "Codec", "ZlibCodec", "ZstdCodec", "find_codec", "has_zstd", "map_in_threads"]

_ZSTD_MODULE = "zstandard"
_MOST_CONTEXTS = 64
_MOST_THREADS = min(16, cores())
_THREAD_BYTES = 1 << 20
"""Uncompressed bytes for each thread: less work than that costs more to distribute than it saves."""


@dataclass(frozen=True)
class Codec:
    """Lossless compression by two functions, for `codec=` of a storage.

    Both run in several threads at once, outside of the lock of a batch; functions that release the GIL scale. The name
    is saved in checkpoints: give a new name to a codec that cannot read what the old one wrote.

    Args:
        name: of the codec in checkpoints; not "zstd" or "zlib".
        compress: takes the bytes of a value and returns bytes.
        decompress: takes the bytes that `compress` returned and returns the bytes of the value.

    Raises:
        KindError: if a function is not callable, or the name is not text.
        OptionError: if the name is empty or that of a codec of the library.

    Examples:
        >>> import bz2, torch
        >>> from ostinato import Codec, LazyTensorStorage
        >>> storage = LazyTensorStorage(100, codec={"obs": Codec("bz2", bz2.compress, bz2.decompress)})
    """

    name: str
    compress: Callable[[Any], bytes]
    decompress: Callable[[bytes], Any]

    def __post_init__(self) -> None:
        """Check the arguments."""
        given: tuple[Any, Any, Any] = (self.name, self.compress, self.decompress)
        if not isinstance(given[0], str) or not callable(given[1]) or not callable(given[2]):
            msg = (
                "a Codec takes a name and two functions, got "
                f"Codec({self.name!r}, {self.compress!r}, {self.decompress!r})"
            )
            raise KindError(msg)
        if not self.name or self.name in {"zstd", "zlib"}:
            msg = f"a codec of your own needs a name of its own, got {self.name!r}: 'zstd' and 'zlib' are the library's"
            raise OptionError(msg)

    def encode(self, data: bytes | memoryview) -> bytes:
        """Return compressed bytes.

        Raises:
            KindError: if `compress` returns something else.
        """
        blob: Any = self.compress(data)
        if not isinstance(blob, (bytes, bytearray, memoryview)):
            msg = f"compress of the codec {self.name!r} must return bytes, got {type(blob).__name__}"
            raise KindError(msg)
        return bytes(blob)

    def decode(self, blob: bytes, size: int) -> bytes | memoryview:
        """Return the `size` bytes that were compressed.

        Raises:
            DamagedFileError: if there are more or fewer.
        """
        return _sized(memoryview(self.decompress(blob)).cast("B"), size, self.name)


@final
@dataclass(frozen=True)
class ZlibCodec:
    """zlib of the standard library.

    Args:
        level: 0 (no compression) to 9 (smallest); 1 is several times faster than 6.

    Raises:
        OptionError: if the level is out of range.
    """

    level: int = 1
    name = "zlib"

    def __post_init__(self) -> None:
        """Check the level."""
        _check_level(self.name, self.level, 0, 9)

    def encode(self, data: bytes | memoryview) -> bytes:
        """Return compressed bytes. Releases the GIL."""
        return zlib.compress(data, self.level)

    def decode(self, blob: bytes, size: int) -> bytes:
        """Return the `size` bytes that were compressed. Releases the GIL.

        Raises:
            DamagedFileError: if `blob` is not that; no more than `size + 1` bytes are allocated.
        """
        reader = zlib.decompressobj()
        try:
            data = reader.decompress(blob, size + 1)
        except zlib.error as error:
            msg = f"{len(blob)} bytes that should be a zlib stream cannot be decompressed ({error})"
            raise DamagedFileError(msg) from error
        return _sized(data, size, self.name)


@final
@dataclass(frozen=True)
class ZstdCodec:
    """Zstandard, of the package `zstandard` (`pip install 'ostinato[zstd]'`).

    Args:
        level: 1 (fastest) to 22 (smallest).

    Raises:
        MissingExtraError: if the package is missing.
        OptionError: if the level is out of range.
    """

    level: int = 3
    name = "zstd"

    def __post_init__(self) -> None:
        """Check the level, and that the package is there."""
        _check_level(self.name, self.level, 1, 22)
        require(_ZSTD_MODULE, "zstd")

    def encode(self, data: bytes | memoryview) -> bytes:
        """Return compressed bytes. Releases the GIL."""
        blob: bytes = _compressor(os.getpid(), get_ident(), self.level).compress(data)
        return blob

    def decode(self, blob: bytes, size: int) -> bytes:
        """Return the `size` bytes that were compressed. Releases the GIL.

        Raises:
            DamagedFileError: if `blob` is not that; nothing is allocated for a value of another size.
        """
        context, module = _decompressor(os.getpid(), get_ident())
        try:
            held = module.frame_content_size(blob)
            if held != size:
                msg = f"a value compressed with zstd must have {size} bytes, got {held}"
                raise DamagedFileError(msg)
            data: bytes = context.decompress(blob, max_output_size=size)
        except module.ZstdError as error:
            msg = f"{len(blob)} bytes that should be a zstd frame cannot be decompressed ({error})"
            raise DamagedFileError(msg) from error
        return _sized(data, size, self.name)


# Making a context of zstd takes longer than decompressing a frame of a game, and a context serves one thread.
@lru_cache(_MOST_CONTEXTS)
def _compressor(process: int, thread: int, level: int) -> Any:  # noqa: ARG001
    """Return the context that compresses in a thread."""
    return require(_ZSTD_MODULE, "zstd").ZstdCompressor(level=level)


@lru_cache(_MOST_CONTEXTS)
def _decompressor(process: int, thread: int) -> tuple[Any, Any]:  # noqa: ARG001
    """Return the context that decompresses in a thread, and the module of zstd."""
    module = require(_ZSTD_MODULE, "zstd")
    return module.ZstdDecompressor(), module


AnyCodec: TypeAlias = "Codec | ZlibCodec | ZstdCodec"
_CODECS: dict[str, type[ZlibCodec | ZstdCodec]] = {"zlib": ZlibCodec, "zstd": ZstdCodec}


def has_zstd() -> bool:
    """Whether zstd is available in this process."""
    return find_spec(_ZSTD_MODULE) is not None


def find_codec(codec: object, level: int | None = None) -> AnyCodec:
    """Return a codec.

    Args:
        codec: "zstd", "zlib", "auto" (zstd if it is available, else zlib), or a codec.
        level: of a codec that is given by name; None is its default.

    Raises:
        OptionError: for other names, and levels that the codec does not have.
        MissingExtraError: for "zstd" if the package is missing.
    """
    if isinstance(codec, (Codec, ZlibCodec, ZstdCodec)):
        return codec
    name = codec if codec != "auto" else "zstd" if has_zstd() else "zlib"
    if isinstance(name, str) and name in _CODECS:
        return _CODECS[name]() if level is None else _CODECS[name](level)
    msg = f"codec must be 'zstd', 'zlib', 'auto' or a Codec, got {codec!r}"
    raise OptionError(msg)


def _check_level(name: str, level: object, low: int, high: int) -> None:
    if isinstance(level, bool) or not isinstance(level, int) or not low <= level <= high:
        more = ": install ostinato[zstd] for levels up to 22" if name == "zlib" and not has_zstd() else ""
        msg = f"compression_level of {name} must be an integer from {low} to {high}, got {level!r}{more}"
        raise OptionError(msg)


def _sized(data: _Bytes, size: int, name: str) -> _Bytes:
    if len(data) != size:
        msg = f"a value compressed with {name} must have {size} bytes, got {len(data)}{'+' * (len(data) > size)}"
        raise DamagedFileError(msg)
    return data


# -- threads -----------------------------------------------------------------------------------------------------------


@cache
def _executor(process: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the threads of a process: a forked one, which has none of them, makes its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="ostinato-codec")


def map_in_threads(function: Callable[[Sequence[In]], Iterable[Out]], items: Sequence[In], nbytes: int) -> list[Out]:
    """Return what `function` makes of parts of `items`, joined in order.

    The parts are computed in several threads if there is enough work, else here. The order, and with it the result,
    does not depend on the number of threads.

    Args:
        function: takes a part of the items.
        items: all of them.
        nbytes: uncompressed bytes of all items.
    """
    parts = min(_MOST_THREADS, len(items), nbytes // _THREAD_BYTES)
    if parts < 2:
        return list(function(items))
    cuts = [len(items) * i // parts for i in range(parts + 1)]
    executor = _executor(os.getpid(), _MOST_THREADS)
    futures = [executor.submit(lambda part: list(function(part)), items[a:b]) for a, b in pairwise(cuts[1:])]
    out = list(function(items[: cuts[1]]))
    for future in futures:
        out += future.result()
    return out
