"""Files of tensors: what is written comes back, others read it, damage of any byte is refused or harmless."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples
from tests.schedules import Schedule, explore
from tests.tags import same_state

from ostinato.durable import files
from ostinato.durable.arrays import DTYPES
from ostinato.durable.files import OpenFiles, read_pieces
from ostinato.durable.manifest import Journal, read_lines, write_lines
from ostinato.durable.tensorfile import flatten, read_header, read_tree, write_tree
from ostinato.errors import CheckpointError, DamagedFileError, KindError, OptionError, OstinatoError

NOT_IN_SAFETENSORS = {"complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}


def example() -> dict[str, Any]:
    return {
        "a": torch.arange(24.0).reshape(2, 3, 4),
        "deep": {"b": torch.tensor([[True, False]]), "text": ["x", "ü"], "none": {"c": torch.zeros(0, 3)}},
        "wide": torch.arange(2 * 2 * 5000).reshape(2, 2, 5000),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "number": 3,
        "nan": float("inf"),
    }


@pytest.mark.parametrize("form", ["pt", "safetensors", "pkl"])
def test_what_is_written_comes_back(tmp_path, form):
    header, _ = write_tree(tmp_path / "f", example(), form, sync=True)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    same_state(read_tree(tmp_path / "f", form, allow_pickle=True), example())
    assert header == read_header(tmp_path / "f", form, allow_pickle=True)
    assert header.nbytes == (tmp_path / "f").stat().st_size
    for placed in header.tensors:
        if form != "pkl" and placed.nbytes:
            raw = (tmp_path / "f").read_bytes()[placed.offset : placed.end()]
            value = flatten(example(), where="")[placed.path]
            assert raw == bytes(value.reshape(-1).view(torch.uint8).numpy())
    if form == "safetensors":
        wide = next(placed for placed in header.tensors if placed.path == ("wide",))
        assert wide.offset % 4096 == 0


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_dtypes(tmp_path, form):
    for name, dtype in DTYPES.items():
        value = {"x": torch.zeros(3, 2).to(dtype)}
        if form == "safetensors" and name in NOT_IN_SAFETENSORS:
            with pytest.raises(CheckpointError):
                write_tree(tmp_path / name, value, form, sync=False)
            assert not (tmp_path / name).exists()
            continue
        write_tree(tmp_path / name, value, form, sync=False)
        same_state(read_tree(tmp_path / name, form, allow_pickle=False), value)


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    write_tree(tmp_path / "f", example(), "safetensors", sync=True)
    loaded = package.load_file(tmp_path / "f")
    assert torch.equal(loaded["wide"], example()["wide"])
    package.save_file({"x.y": torch.ones(2), "z": torch.zeros(3)}, tmp_path / "g")
    assert set(read_tree(tmp_path / "g", "safetensors", allow_pickle=False)) == {"x.y", "z"}


@examples(0.6)
@given(st.data())
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_damage_raises_our_error_or_changes_values_alone(tmp_path_factory, form, data):
    path = tmp_path_factory.mktemp("d") / "f"
    write_tree(path, example(), form, sync=False)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1), "length")]
    else:
        for _ in range(data.draw(st.integers(1, 4), "changes")):
            # the ends of the file hold what says where things are
            place = data.draw(st.one_of(st.integers(0, 1500), st.integers(-1500, -1)), "place")
            raw[place] = data.draw(st.integers(0, 255), "byte")
    path.write_bytes(raw)
    try:
        header = read_header(path, form, allow_pickle=False)
        read_tree(path, form, allow_pickle=False)
    except OstinatoError:
        return
    assert all(0 <= placed.offset <= placed.end() <= len(raw) for placed in header.tensors)


def test_compressed_and_old_archives_and_other_headers_are_refused(tmp_path):
    for head in (b"[]", b"3", b"null"):
        (tmp_path / "h").write_bytes(len(head).to_bytes(8, "little") + head)
        with pytest.raises(DamagedFileError):
            read_header(tmp_path / "h", "safetensors", allow_pickle=False)
    write_tree(tmp_path / "f", example(), "pt", sync=False)
    with (
        zipfile.ZipFile(tmp_path / "f") as source,
        zipfile.ZipFile(tmp_path / "g", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    with pytest.raises(DamagedFileError):
        read_header(tmp_path / "g", "pt", allow_pickle=False)
    torch.save(example(), tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedFileError, match=r"not a file of torch\.save in its format since 1\.6"):
        read_header(tmp_path / "old", "pt", allow_pickle=False)


def test_formats_and_trees_are_checked(tmp_path):
    forms: list[Any] = [("h5", True), ("pkl", False), (None, True)]
    for name, consent in forms:
        with pytest.raises(OptionError, match="trajectory_format"):
            read_tree(tmp_path / "f", name, allow_pickle=consent)
    deep: dict[str, Any] = {}
    deep["a"] = deep
    for wrong, message in (({"a": {3: 1}}, "must be text"), (deep, "more than 32 deep")):
        with pytest.raises(KindError, match=message):
            flatten(wrong, where="x")


@pytest.mark.usefixtures("backend")
@examples(1)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 300)), min_size=1, max_size=40).map(sorted))
def test_files_give_the_bytes_of_the_file(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("p") / "f"
    data = np.random.default_rng(1).bytes(9300)
    path.write_bytes(data)
    out = np.zeros((len(pieces), 300), dtype=np.uint8)
    targets = out.ctypes.data + 300 * np.arange(len(pieces))
    offsets, widths = np.array(pieces, dtype=np.int64).T.copy()
    with path.open("rb") as file:
        fds = np.full(len(pieces), file.fileno())
        assert read_pieces(fds, offsets, widths, targets) == len(pieces)
        assert [bytes(row[:width]) for row, (_, width) in zip(out, pieces, strict=True)] == [
            data[at : at + width] for at, width in pieces
        ]
        assert read_pieces(fds, offsets + 9299, widths + 1, targets) == 0


def test_files_may_be_closed_while_others_look_them_up(tmp_path):
    (tmp_path / "f").write_bytes(b"x")

    def scenario(schedule: Schedule) -> None:
        files = OpenFiles(2)

        def look_up() -> None:
            for key in (0, 1) * 8:
                assert files.get(key, lambda: tmp_path / "f").fd >= 0

        def close() -> None:
            for _ in range(12):
                files.clear()

        schedule.run(look_up, look_up, close)

    explore(range(30), (files,), scenario)


def test_a_journal_keeps_what_was_appended(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, {"head": 1})
    journal.append([{"n": 1}, {"n": "ü\n"}])
    journal.append([{"n": 3}])
    journal.close()
    nodes: list[Any] = [{"head": 1}, {"n": 1}, {"n": "ü\n"}, {"n": 3}]
    assert list(read_lines(path, whole=True)) == nodes
    raw = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(raw) if byte == 10]
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        kept = sum(end <= cut for end in ends)
        assert list(read_lines(path, whole=False)) == nodes[:kept]
    with pytest.raises(DamagedFileError):
        list(read_lines(path, whole=True))
    write_lines(path, nodes)
    changed = bytearray(path.read_bytes())
    changed[ends[0] + 20] ^= 1
    path.write_bytes(changed)
    with pytest.raises(DamagedFileError, match="damaged in line 2"):
        list(read_lines(path, whole=False))
