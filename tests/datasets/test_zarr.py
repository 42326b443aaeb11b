"""Zarr replay buffers are read chunk by chunk, as NumPy has them; damage is named, and objects are never loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zarr")

import numcodecs
import zarr

from ostinato import open_dataset
from ostinato.errors import DamagedFileError, EpisodesError, KindError, OptionError, SchemaError

from .builders import diffusion_zarr, last_rows
from .samples import check_processes, check_rows, flat, not_opened


@pytest.mark.parametrize(
    ("version", "suffix", "chunk", "dtype"),
    [
        (2, ".zarr", 1, "uint8"),
        (2, ".zarr.zip", 5, "float32"),
        (3, ".zarr", 5, "uint8"),
        (3, ".zarr.zip", 100, "uint8"),
    ],
)
def test_every_number_is_that_of_the_arrays(tmp_path, version, suffix, chunk, dtype):
    model = diffusion_zarr(tmp_path / f"a{suffix}", zarr_format=version, chunk_rows=chunk, picture_dtype=dtype)
    dataset = open_dataset(model.path)
    columns = {**model.columns, "done": last_rows(model.lengths)}
    check_rows(dataset, columns, model.lengths)
    assert flat(dataset[:]).keys() == {("action",), ("state",), ("img",), ("done",)}
    assert [text for text in dataset.assumptions if "not stored" not in text] == [dataset.assumptions[-1]]
    check_processes(open_dataset(model.path, max_bytes=100), columns)


@pytest.mark.parametrize("version", [2, 3])
def test_groups_are_opened(tmp_path, version):
    model = diffusion_zarr(tmp_path / "a.zarr", zarr_format=version)
    check_rows(open_dataset(zarr.open_group(str(model.path), mode="r")), model.columns, model.lengths)
    memory: dict[str, Any] = {}
    group = zarr.open_group(memory, mode="w", zarr_format=version)
    for name, values in model.columns.items():
        group.create_array(f"data/{name}", data=values)
    group.create_array("meta/episode_ends", data=np.array(model.ends))
    group.create_array("meta/seed", data=np.array([3, 4]))
    dataset = open_dataset(group)
    check_rows(dataset, model.columns, model.lengths)
    assert dataset.metadata == {"seed": [3, 4]}
    outer = zarr.open_group(str(tmp_path / "b.zarr"), mode="w", zarr_format=version)
    outer.create_group("in")
    shutil.copytree(model.path, tmp_path / "b.zarr" / "in" / "ner")
    check_rows(open_dataset(outer["in/ner"]), model.columns, model.lengths)
    not_opened(tmp_path / "b.zarr", DamagedFileError, r"b.zarr has no meta/episode_ends")


def test_wrong_ends_of_episodes_and_arrays_that_disagree_are_named(tmp_path):
    model = diffusion_zarr(tmp_path / "a.zarr")
    group = zarr.open_group(str(model.path), mode="a")
    ends: Any
    for ends, message in (
        ([6, 6, 18], r"episode 1 would be the rows \[6, 6\)"),
        ([[6], [18]], "must be integers"),
        ([], "must be integers"),
    ):
        group.create_array("meta/episode_ends", data=np.array(ends), overwrite=True)
        not_opened(model.path, EpisodesError, rf"a.zarr: meta/episode_ends .*{message}")
    group.create_array("data/force", data=np.zeros(17))
    not_opened(model.path, DamagedFileError, r"data/force has 17 rows, data/action has 18")
    group.create_array("data/force", data=np.array(3.0), overwrite=True)
    not_opened(model.path, DamagedFileError, "data/force is one value")
    shutil.rmtree(model.path / "data")
    not_opened(model.path, DamagedFileError, "no array in data")
    not_opened(model.path, OptionError, "filter_key", filter_key="train")


class Hostile:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/ostinato-was-here",))


@pytest.mark.parametrize(("suffix", "where"), [(".zarr", "object_codec"), (".zarr.zip", "filter")])
def test_pickled_objects_are_never_loaded(tmp_path, suffix, where):
    model = diffusion_zarr(tmp_path / "a.zarr", zarr_format=2)
    folder = model.path / "data" / "action"
    description = json.loads((folder / ".zarray").read_text())
    description["filters"] = [numcodecs.Pickle().get_config()]
    if where == "object_codec":
        description |= {"dtype": "|O", "fill_value": None}
    (folder / ".zarray").write_text(json.dumps(description))
    for file in folder.glob("[0-9]*"):
        file.write_bytes(pickle.dumps(Hostile()))
    path = model.path
    if suffix.endswith("zip"):
        path = tmp_path / "b.zarr.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(model.path.rglob("*")):
                archive.write(file, file.relative_to(model.path))
    not_opened(path, SchemaError, "data/action holds pickled Python objects, which are never loaded")
    if suffix == ".zarr":
        store = zarr.storage.MemoryStore()
        group = zarr.open_group(store, mode="w", zarr_format=2)
        group.create_array("data/text", data=np.array(["a", "b"], dtype="U1"))
        group.create_array("meta/episode_ends", data=np.array([2]))
        not_opened(group, SchemaError, "data/text does not hold numbers")


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_files_are_named(tmp_path, version):
    model = diffusion_zarr(tmp_path / "a.zarr", zarr_format=version)
    chunk = model.path / "data" / "state" / ("1.0" if version == 2 else "c/1/0")
    content = chunk.read_bytes()
    for damaged in (content[:-1], b"", b"\x00" * len(content)):
        chunk.write_bytes(damaged)
        dataset = open_dataset(model.path)
        assert dataset[:5]["state"].shape == (5, 5)
        with pytest.raises(DamagedFileError, match=r"data/state cannot be read, rows \[5, 10\) of episodes 0 to 1"):
            dataset[5]
    chunk.unlink()
    dataset = open_dataset(model.path)
    assert dataset.assumptions[0] == "1 of 4 chunks of data/state are not stored; Zarr reads their rows as 0.0."
    path = model.path / "data" / "state" / (".zarray" if version == 2 else "zarr.json")
    text = path.read_text()
    path.write_text(text[:20])
    not_opened(model.path, DamagedFileError, r"a.zarr: data/state: its description is not JSON")
    path.write_text(text.replace('"blosc"', '"unheard of"').replace('"zstd"', '"unheard of"'))
    not_opened(model.path, DamagedFileError, r"data/state cannot be opened: .*unheard of")
    archive = diffusion_zarr(tmp_path / "b.zarr.zip").path
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    not_opened(archive, DamagedFileError, r"b.zarr.zip is not a whole zip archive")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as other:
        other.writestr("readme", "text")
    not_opened(tmp_path / "c.zip", KindError, "not recognized")
