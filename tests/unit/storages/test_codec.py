"""codec=: memory and files are compressed, and other codecs refused; `test_single_copy_log.py`: reads stay the same."""

from __future__ import annotations

import bz2
from typing import Any

import pytest
import torch

from ostinato import Codec, LazyTensorStorage, ReplayBuffer
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, SchemaError
from ostinato.tools.inspect import inspect_checkpoint
from ostinato.tools.verify import verify

from ...registry import Half
from ...tags import same_state

BZ2 = Codec("bz2", bz2.compress, bz2.decompress)


def buffer(codec: Any, capacity: int = 24) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity, codec=codec), batch_size=8)


def rows(first: int, count: int) -> dict[str, Any]:
    x = torch.arange(first, first + count)
    return {"obs": x[:, None] * 100 + torch.arange(100), "x": x}


def test_bits_of_any_dtype():
    numbers = torch.arange(4 * 600).view(600, 4).t()
    nan = torch.full((4, 80), float("nan"))
    for values in (
        torch.complex(nan, nan),
        numbers.to(torch.bfloat16),
        numbers > 700,
        numbers.double(),
        numbers[:, :0],
    ):
        rb = buffer({"x": "zlib"}, 4)
        rb.extend({"x": values, "y": torch.arange(4)})
        same_state(rb[:]["x"], values)


def test_bytes_stay_compressed_in_memory_and_files(tmp_path):
    frames = torch.zeros(64, 84, 84, 4, dtype=torch.uint8)
    frames[:, 20:40, 30:50] = torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1)
    rb = buffer("zlib", 64)
    rb.extend({"obs": frames, "reward": torch.arange(64.0)})
    assert rb.storage.nbytes < frames.nbytes / 50
    rb.dumps(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < frames.nbytes / 20
    assert not verify(tmp_path).damage
    fields = inspect_checkpoint(tmp_path).fields
    assert any("zlib" in field.name and field.shape == (84, 84, 4) for field in fields)
    raw = buffer(None, 100)
    raw.loads(tmp_path)
    assert torch.equal(raw["obs"], frames)


def test_full_rings_are_loaded_by_other_codecs(tmp_path):
    """By the same one: `BufferContract`."""
    for saved, loaded in ((None, "zlib"), ("zlib", {"obs": "zlib", "x": BZ2}), ({"obs": BZ2},) * 2):
        rb, bigger = buffer(saved, 8), buffer(loaded, 10)
        rb.extend(rows(0, 11))
        rb.dumps(tmp_path)
        bigger.loads(tmp_path)
        same_state(bigger[:], rows(3, 8))
    with pytest.raises(CheckpointError):
        buffer("zlib").loads(tmp_path)


def test_incremental_saves_continue_and_are_not_mapped(tmp_path):
    rb, again = buffer("zlib"), buffer("zlib")
    for first in (0, 10):
        rb.extend(rows(first, 10))
        rb.dumps(tmp_path, incremental=True)
    again.loads(tmp_path)
    same_state(rb[:], again[:])
    with pytest.raises(CheckpointError):
        buffer(None).loads(tmp_path, mmap=True)
    with pytest.raises(OptionError, match="mmap=True needs"):
        buffer("zlib").loads(tmp_path, mmap=True)


def test_a_damaged_value_raises_when_it_is_read():
    rb = buffer({"obs": "zlib"}, 8)
    rb.extend(rows(0, 4))
    state = rb.storage.state_dict()
    columns = state["columns"]
    blobs, ends = (next(name for name in columns if name.endswith(end)) for end in (".blobs", ".ends"))
    other = LazyTensorStorage(8, codec={"obs": "zlib"})
    other.load_state_dict({**state, "columns": {**columns, blobs: columns[blobs] ^ 255}})
    with pytest.raises(DamagedFileError):
        other[0]
    less = {name: column for name, column in columns.items() if name != ends}
    for wrong in (columns[ends].flip(0), columns[ends][:3], columns[ends].float(), None):
        with pytest.raises(CheckpointError):
            LazyTensorStorage(8).load_state_dict({**state, "columns": less if wrong is None else {**less, ends: wrong}})


WRONG: list[Any] = [
    ({"codec": "gzip"}, 100, "must be 'zstd'"),
    ({"codec": {}}, 100, "names no field"),
    ({"codec": {"obs": "zlib"}, "kinds": {"obs": Half()}}, 100, "named by kinds and by codec"),
    ({"kinds": {"obs": "half"}}, 100, "kinds must be a mapping of fields"),
    ({"codec": {"frame": "zlib"}}, 100, "frame.* is not a tensor field"),
    ({"codec": "zlib"}, 10, "more than 256 bytes per row, and there are none"),
]


def test_wrong_options_and_fields_raise():
    for options, width, message in WRONG:
        with pytest.raises(OptionError, match=message):  # when it is made, or with the first rows
            ReplayBuffer(storage=LazyTensorStorage(8, **options)).extend({"obs": torch.zeros(2, width)})
    rb = buffer("zlib")
    rb.extend({"obs": torch.zeros(2, 100)})
    with pytest.raises(SchemaError):
        rb.extend({"obs": torch.zeros(2, 101)})
    assert len(rb) == 2
