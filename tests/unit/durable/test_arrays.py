"""Raw arrays: every dtype and layout comes back bit for bit; damage is named; records are not believed."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples
from tests.tags import random_bits
from torch import Tensor

from ostinato.durable import (
    ArrayRecord,
    arrays,
    checkpoint,
    open_mapped,
    read_array,
    read_arrays,
    verify_array,
    write_array,
)
from ostinato.durable.arrays import DTYPES, check_runs, place
from ostinato.errors import CheckpointError, DamagedFileError

SMALL_BLOCK = 4096
GOLDEN_FILE = {"file": "golden.bin", "runs": 0, "nbytes": 16, "checksums": ["febeac32762ee68d"]}
GOLDEN_RECORD = {"dtype": "float32", "shape": [2, 2], "files": [GOLDEN_FILE]}


def raw(tensor: Tensor) -> bytes:
    """The elements in row-major order, as bytes."""
    plain = tensor.resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def layouts(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """A tensor of that shape whose memory is laid out in one of several ways."""
    if layout == "strided rows" and shape:
        wide = random_bits((shape[0], 3 * max(1, torch.Size(shape[1:]).numel()) + 5), dtype, seed)
        return wide.as_strided(shape, (wide.stride(0), *random_bits(shape, dtype, 0).stride()[1:]), 1)
    if layout == "transposed" and len(shape) >= 2:
        return random_bits((shape[1], shape[0], *shape[2:]), dtype, seed).transpose(0, 1)
    if layout == "every other" and shape:
        return random_bits((2 * shape[0], *shape[1:]), dtype, seed)[::2]
    if layout == "expanded" and shape:
        return random_bits((1, *shape[1:]), dtype, seed).expand(shape)
    return random_bits(shape, dtype, seed)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(
    name=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    layout=st.sampled_from(["contiguous", "strided rows", "transposed", "every other", "expanded"]),
    staging=st.sampled_from([16, 64, 2**20]),
    seed=st.integers(0, 100),
)
@examples(1.5)
def test_round_trip(name, shape, layout, staging, seed):
    source = layouts(shape, DTYPES[name], layout, seed)
    dest = layouts(shape, DTYPES[name], "contiguous" if layout == "expanded" else layout, seed + 1)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_STAGING_BYTES", staging)
        patch.setattr(checkpoint, "PIECE_BYTES", staging)
        patch.setattr(checkpoint, "sync_file", lambda _: None)  # the disk is not what is tested here
        record = write_array(Path(folder), "a.bin", source)
        assert ArrayRecord.from_json(record.to_json()) == record
        assert (Path(folder) / "a.bin").read_bytes() == raw(source)
        read_arrays(Path(folder), [(record, dest)])
        assert raw(dest) == raw(source)
        assert raw(read_array(Path(folder), record)) == raw(source)
        mapped = open_mapped(Path(folder), record)
        assert (mapped.shape, mapped.dtype) == (source.shape, source.dtype)
        assert raw(mapped) == raw(source)
        verify_array(Path(folder), record)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_what_cannot_be_saved_or_read_raises_and_leaves_files_alone(tmp_path):
    tensors = (
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    )
    for tensor in tensors:
        with pytest.raises(CheckpointError, match="cannot"):
            write_array(tmp_path, "a.bin", tensor)
    assert list(tmp_path.iterdir()) == []
    record = write_array(tmp_path, "a.bin", torch.ones(3, 2))
    with pytest.raises(FileExistsError):
        write_array(tmp_path, "a.bin", torch.zeros(3, 2))
    assert read_array(tmp_path, record).eq(1).all()
    for dest in (torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2, dtype=torch.int32)):
        with pytest.raises(CheckpointError, match=r"holds float32\[3, 2\]"):
            read_arrays(tmp_path, [(record, dest)])


def test_damage_is_named_by_file_and_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", SMALL_BLOCK)
    record = write_array(tmp_path, "a.bin", torch.zeros(3 * SMALL_BLOCK, dtype=torch.uint8))
    strided = torch.zeros(2, 3 * SMALL_BLOCK, dtype=torch.uint8).t()[:, 0]
    for position in (0, 4095, 4096, 12287):
        data = bytearray(3 * SMALL_BLOCK)
        data[position] ^= 1
        (tmp_path / "a.bin").write_bytes(data)
        message = rf"a\.bin is damaged in the block at byte {position // SMALL_BLOCK * SMALL_BLOCK}:"
        for read in (read_array, lambda root, record: read_arrays(root, [(record, strided)]), verify_array):
            with pytest.raises(DamagedFileError, match=message):
                read(tmp_path, record)
        assert read_array(tmp_path, record, verify=False).sum() == 1


def test_what_is_no_file_of_the_recorded_size_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    record = write_array(tmp_path, "a.bin", torch.zeros(100, dtype=torch.uint8))
    mapped = open_mapped(tmp_path, record)
    mapped += 1
    assert mapped.sum() == 100
    assert read_array(tmp_path, record).sum() == 0, "writes to mapped memory stay in memory"
    absurd = ArrayRecord.whole("float32", (2**50,), (record.files[0]._replace(nbytes=2**52),))
    for read in (read_array, open_mapped, verify_array):
        for size in (0, 99, 101, 5000):
            os.truncate(path, size)
            with pytest.raises(DamagedFileError, match=rf"{size} bytes, 100 expected"):
                read(tmp_path, record)
        with pytest.raises(DamagedFileError, match="5000 bytes, 4503599627370496 expected"):
            read(tmp_path, absurd)
    path.unlink()
    with pytest.raises(DamagedFileError):
        read_array(tmp_path, record)
    path.mkdir()
    with pytest.raises(DamagedFileError):
        read_array(tmp_path, record)
    path.rmdir()
    os.mkfifo(path)  # must not hang
    with pytest.raises(DamagedFileError):
        read_array(tmp_path, record)


WRONG: list[Any] = [
    ({"dtype": "object"}, "unknown dtype"),
    ({"shape": [2.0, 2]}, "implausible shape"),
    ({"shape": [True, 4]}, "implausible shape"),
    ({"shape": [0, 2**62, 2**62]}, "implausible shape"),
    ({"shape": [1] * 65}, "implausible shape"),
    ({"shape": [2, 3]}, "shape and dtype make 24"),
    ({"files": []}, "files must be a list"),
    ({"files": [GOLDEN_FILE, GOLDEN_FILE]}, "shape and dtype make 16"),
    ({"more": 1}, "exactly the keys"),
    ({"file": 3}, "file must be a string"),
    ({"nbytes": 16.0}, "0 runs do not fit"),
    ({"runs": 2}, "2 runs do not fit"),
    ({"checksums": []}, "need 1 checksums"),
    ({"checksums": ["0" * 15 + "G"]}, "16 hexadecimal"),
]


def test_records_are_checked_field_by_field():
    for change, message in WRONG:
        changed = {"files": [{**GOLDEN_FILE, **change}]} if change.keys() <= GOLDEN_FILE.keys() else change
        with pytest.raises(DamagedFileError, match=rf"obs.*{message}"):
            ArrayRecord.from_json({**GOLDEN_RECORD, **changed}, where="obs")
    nodes: list[Any] = [None, {}]
    for node in nodes:
        with pytest.raises(DamagedFileError):
            ArrayRecord.from_json(node)
    rows = {"rows": ArrayRecord.whole("uint8", (3, 12), ())}
    column = {"dtype": "int32", "shape": [3], "of": "rows", "offset": 4}
    assert ArrayRecord.from_json(column, arrays=rows).offset == 4
    wrong: list[Any] = [{"of": "x"}, {"shape": []}, {"shape": [4]}, {"dtype": "int64", "offset": 0}]
    for changes in (*wrong, *({"offset": at} for at in (4.0, -4, 12, 2))):  # no int64 is aligned in rows of 12 bytes
        with pytest.raises(DamagedFileError, match="obs"):
            ArrayRecord.from_json({**column, **changes}, where="obs", arrays=rows)


def test_fingerprints_find_every_changed_row_and_few_others():
    for before, after in ((1000, 1000), (1000, 3000), (3000, 1000)):
        old, new = (torch.arange(rows * 100).view(rows, 100) for rows in (before, after))
        edited = {0, 500, min(before, after) - 1}
        new[list(edited)] += 1
        runs = checkpoint.changed_rows(checkpoint.print_of(old), checkpoint.print_of(new), 800)
        found = {row for first, count in runs.tolist() for row in range(first, first + count)}
        assert edited | set(range(before, after)) <= found <= set(range(after))
        assert len(found) < 600 + max(0, after - before)


def test_a_table_of_rows_must_fit_its_file(tmp_path):
    runs = np.array([[0, 1], [2, 1]], dtype=np.int64)
    nbytes = place(runs, 8).nbytes
    assert check_runs(runs, tmp_path, rows=3, row_bytes=8, nbytes=nbytes).nbytes == nbytes
    overlap, beyond, none = ([[0, 3], [2, 1]], [[0, 1], [2, 2]], [[0, 1], [2, 0]])
    wrong = [(runs, nbytes - 1), (runs, nbytes + 1)]
    wrong += [
        (np.array(table), place(np.array(table), 8).nbytes) for table in (overlap, beyond, none, [[-1, 1], [2, 1]])
    ]
    for table, size in wrong:
        with pytest.raises(DamagedFileError):
            check_runs(table, tmp_path, rows=3, row_bytes=8, nbytes=size)
