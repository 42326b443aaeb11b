"""Codecs: bytes come back, sizes are bounded, wrong arguments raise, and threads keep the order."""

from __future__ import annotations

import bz2
import sys
import threading
import zlib
from typing import TYPE_CHECKING

import pytest
from tests.unit.buffers.refusals import refuses

from ostinato import Codec, ZlibCodec, ZstdCodec
from ostinato.durable import codecs
from ostinato.durable.codecs import find_codec, has_zstd, map_in_threads
from ostinato.errors import DamagedFileError, KindError, MissingExtraError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

BZ2 = Codec("bz2", bz2.compress, bz2.decompress)
ALL = ["zlib", pytest.param("zstd", marks=pytest.mark.skipif(not has_zstd(), reason="needs ostinato[zstd]")), BZ2]


@pytest.mark.parametrize("name", ALL)
def test_bytes_come_back_and_others_are_refused(name):
    codec = find_codec(name)
    for data in (b"", b"a", b"\0" * 100_000, bytes(range(256)) * 40):
        blob = codec.encode(memoryview(bytearray(data)))
        assert isinstance(blob, bytes)
        assert bytes(codec.decode(blob, len(data))) == data
        assert len(data) < 1000 or len(blob) < len(data) / 10
    assert find_codec("zlib", 9).encode(data) == zlib.compress(data, 9)
    for size in (99, 101, 0):
        with pytest.raises(DamagedFileError, match=f"must have {size} bytes"):
            codec.decode(codec.encode(bytes(100)), size)


@pytest.mark.parametrize("name", ALL[:2])
def test_damaged_bytes_raise_and_bombs_are_not_decompressed(name):
    codec = find_codec(name)
    with pytest.raises(DamagedFileError):
        codec.decode(b"no stream of any codec", 100)
    with pytest.raises(DamagedFileError, match=r"must have|cannot be decompressed"):
        codec.decode(codec.encode(bytes(range(250)))[:-9], 250)
    bomb = codec.encode(bytes(50 << 20))
    with pytest.raises(DamagedFileError, match=r"must have 10 bytes, got (11\+|52428800)"):
        codec.decode(bomb, 10)


def test_wrong_options_raise():
    refuses(
        {
            OptionError: {
                "compression_level of zlib must be an integer from 0 to 9, got 10": lambda: ZlibCodec(10),
                "must be 'zstd', 'zlib', 'auto' or a Codec, got 'gzip'": lambda: find_codec("gzip"),
                "needs a name of its own": lambda: Codec("zlib", bz2.compress, bz2.decompress),
            },
            KindError: {
                "a name and two functions": lambda: Codec("own", None, bz2.decompress),  # type: ignore[arg-type]
                "must return bytes, got int": lambda: Codec("own", lambda _: 3, bz2.decompress).encode(b""),  # type: ignore[arg-type,return-value]
            },
        }
    )


def test_zstd_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, codecs._ZSTD_MODULE, None)
    with pytest.raises(MissingExtraError, match=r"ostinato\[zstd\]"):
        ZstdCodec()
    assert find_codec("auto") == ZlibCodec()
    with pytest.raises(OptionError, match=r"install ostinato\[zstd\] for levels up to 22"):
        find_codec("auto", 19)


def test_threads_keep_the_order(monkeypatch):
    monkeypatch.setattr(codecs, "_MOST_THREADS", 3)
    seen: set[int] = set()
    together = threading.Barrier(3, timeout=20)

    def double(part: Sequence[int]) -> list[int]:
        seen.add(threading.get_ident())
        together.wait()
        return [2 * i for i in part]

    assert map_in_threads(double, range(100), 3 << 20) == list(range(0, 200, 2))
    assert len(seen) == 3
    assert map_in_threads(lambda part: [2 * i for i in part], range(7), 3) == list(range(0, 14, 2))
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda part: [1 // (9 - i) for i in part], range(10), 3 << 20)
