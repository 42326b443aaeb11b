"""Checkpoints that TorchRL 0.14.1 wrote (`tests/parity/_write_torchrl.py`): their import, and errors."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from ostinato import (
    LazyMemmapStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from ostinato.compat.torchrl import convert_checkpoint, is_checkpoint, load_checkpoint
from ostinato.errors import CheckpointError, DamagedFileError, OptionError, OstinatoError

from ...crash.mutations import _changed

DATA = Path(__file__).parents[2] / "data" / "torchrl_0_14"
EXPECTED = json.loads((DATA / "expected.json").read_text())
DIRECTORIES = sorted(name for name in EXPECTED if not name.endswith(".pt"))


def lists(rows: Any) -> Any:
    """Rows as plain values."""
    if isinstance(rows, TensorDict):
        rows = rows.exclude("index", "index_generation", "priority_weight").to_dict()
    if isinstance(rows, dict):
        return {str(key): lists(value) for key, value in rows.items()}
    return rows.tolist()


def load(name: str | Path, **options: Any) -> ReplayBuffer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_checkpoint(DATA / name, **options)


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / name, tmp_path / name))


def edit(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


CLASSES = {"ring": TensorDictReplayBuffer, "mapped": ReplayBuffer}
SHAPES = {"lanes": (5, 2), "lanes_part": (2, 2)}
NOTES = {
    "tree": ["numbers as keys"],
    "tensor": ["prefetch.pkl"],
    "epochs": ["whether SamplerWithoutReplacement shuffles"],
    "uniform": ["alpha=0"],
    "flat": ["TED2Flat"],
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_rows_cursor_draws_and_notes(name, tmp_path):
    want = EXPECTED[name]
    for scratch_dir in (None, tmp_path / "rows"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rb = load_checkpoint(DATA / name, scratch_dir=scratch_dir)
        said = [str(warning.message) for warning in caught]
        assert all(part in text for part, text in zip(NOTES.get(name, ()), said, strict=True))
        assert isinstance(rb.storage, LazyMemmapStorage) == bool(scratch_dir)
        assert type(rb) is CLASSES.get(name, type(rb))
        assert rb.storage.shape == SHAPES.get(name, rb.storage.shape)
        assert len(rb) == want["rows_count"]
        assert lists(rb.storage[:]) == want["rows"]
        assert rb.cursor == want["cursor"] * rb.storage.num_envs
        for sample in want.get("samples", ()):  # the generator goes on where TorchRL's was
            assert lists(rb.sample()) == sample


@pytest.mark.parametrize("name", ["prioritized", "uniform"])
def test_priorities_are_theirs(name):
    want, rb = EXPECTED[name], load(name)
    assert isinstance(rb.sampler, PrioritizedSampler)
    assert rb.sampler.state_dict()["values"].tolist() == want["values"]
    _, info = rb.sample(100, return_info=True)
    theirs = torch.tensor(want["weights"])[info["index"]]
    assert torch.allclose(info["priority_weight"], theirs, rtol=1e-5)
    slot = rb.cursor
    rb.extend(rb.storage[:1])
    assert float(rb.sampler.priorities[slot]) == want["default"]
    before = rb.sampler.state_dict()["values"]
    rb.update_priority(torch.tensor([1]), 3.0)
    after = rb.sampler.state_dict()["values"]
    assert float(after[1]) == pytest.approx((3.0 + 1e-8) ** rb.sampler.alpha)
    assert before[2:].tolist() == after[2:].tolist()


def test_a_pass_goes_on():
    rb = load("epochs")
    assert isinstance(rb.sampler, SamplerWithoutReplacement)
    assert rb.sampler.drop_last
    drawn = [*EXPECTED["epochs"]["drawn"], *rb.sample()["next", "id"].tolist()]
    assert len(set(drawn)) == 6
    assert set(drawn) < set(range(8))


class Bomb:
    """Shouts when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path.cwd() / "executed"),)


def test_what_is_left_out_is_told_and_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = copy_of("mapped", tmp_path)
    (home / "storage" / "old.memmap").write_bytes(b"anything")
    for name, content in {
        "prefetch.pkl": {"queue": [Bomb()]},
        "transform.t": Bomb(),
        "storage/next/x.pickle": Bomb(),
    }.items():
        (home / name).write_bytes(pickle.dumps(content))
    edit(home / "buffer_metadata.json", {"consume_after_n_samples": 3})
    edit(home / "rng_state" / "meta.json", {"device": "cuda:0"})
    edit(home / "writer" / "metadata.json", {"generation_shape": [8]})
    notes = convert_checkpoint(home, tmp_path / "ours").notes
    for part in ("prefetch.pkl", "transform.t", "storage/old.memmap", "consume_after", "cuda:0", "generations"):
        assert any(part in note for note in notes), part
    torch.save({"_storage": {"_storage": [Bomb()]}, "_writer": {"_cursor": 1}}, tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="unpickling runs code"):
        load_checkpoint(tmp_path / "list.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("key", ["../../secret", "/etc/passwd", "..", "a\\b", "", "a\0b", "x" * 300])
def test_paths_outside_the_directory_raise(key, tmp_path):
    (tmp_path / "secret.memmap").write_bytes(b"\0" * 32)
    leaf = {"dtype": "torch.float32", "shape": [8]}
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("mapped", "meta.json", {key: {**leaf, "is_nested": False}}),
        ("ring", "meta.json", {key: {"type": "TensorDict"}}),
        ("tensor", "storage_metadata.json", {"metadata": {key: leaf}}),
    ]
    for name, file, change in changes:
        home = copy_of(name, tmp_path)
        edit(home / "storage" / file, change)
        with pytest.raises(DamagedFileError):
            load_checkpoint(home)


def _entry(shape: Any, dtype: str = "torch.float32", *, is_nested: bool = False) -> tuple[str, dict[str, Any], str]:
    """Another entry for a field whose file holds float32 `[8, 2]`: nothing is allocated for it."""
    return _field({"dtype": dtype, "shape": shape, "is_nested": is_nested})


def _field(entry: Any) -> tuple[str, dict[str, Any], str]:
    return "storage/meta.json", {"obs": entry}, r"storage/(meta\.json|obs)"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        *(_entry(shape) for shape in ([2**50, 2], [-8, -2], [8, 2.0], "8", [16])),
        _entry([8, 2], "torch.float64"),
        _entry([8, 2], "torch.load"),
        _entry([8, 2], is_nested=True),
        _field({"type": "TensorDict"}),
        _field("text"),
        ("storage/storage_metadata.json", {"len": 9}, "contradict the shape"),
        ("storage/storage_metadata.json", {"len": -1}, "must have the number of rows"),
        ("storage/storage_metadata.json", {"is_pytree": True}, "has no field"),
        ("writer/metadata.json", {"cursor": 8}, "contradict the shape"),
        ("writer/metadata.json", {"cursor": "3"}, "cursor and the write count"),
        ("writer/metadata.json", {"rank_key": "reward"}, "only checkpoints of round-robin writers"),
        ("storage/meta.json", {"_type": "<class 'builtins.eval'>"}, "only TensorDicts are read"),
        ("storage/meta.json", {"shape": [7]}, "in a batch of"),
        ("buffer_metadata.json", {"batch_size": -4}, "batch_size must be positive"),
        ("sampler/sampler_metadata.json", {"_alpha": -1.0}, "must have alpha"),
        ("sampler/sampler_metadata.json", {"_max_capacity": 4.0}, "its capacity is 4"),
        ("sampler/sampler_metadata.json", {"_max_capacity": 1e15}, "sumtree.memmap"),
        ("sampler/sampler_metadata.json", {"_alpha": 1e-9}, "too large for alpha"),
    ],
)
def test_metadata_that_contradict_the_files_raise(file, change, message, tmp_path):
    home = copy_of("prioritized", tmp_path)
    edit(home / file, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_checkpoint(home)
    assert isinstance(raised.value, DamagedFileError) or "obs" not in change


def test_other_samplers_and_directories_raise(tmp_path):
    home = copy_of("ring", tmp_path)
    (home / "sampler").mkdir()
    (home / "sampler" / "consuming_sampler.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="RandomSampler, PrioritizedSampler and"):
        load_checkpoint(home)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        assert not is_checkpoint(path)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
    (home / "storage" / "data_indices.json").write_text("[]")
    with pytest.raises(CheckpointError, match="CompressedListStorage"):
        load_checkpoint(home)
    with pytest.raises(CheckpointError):
        convert_checkpoint(DATA / "ring", home)


def test_list_storage(tmp_path):
    want = EXPECTED["list.pt"]
    rb = load("list.pt")
    assert type(rb) is TensorDictReplayBuffer
    assert [lists(row) for row in rb.storage[:]] == want["items"]
    assert (rb.storage.capacity, rb.cursor) == (3, want["cursor"])
    for sample in want["samples"]:
        assert lists(rb.sample()) == sample
    with pytest.raises(OptionError, match="3 rows in a full storage, got max_size=4"):
        load_checkpoint(DATA / "list.pt", max_size=4)
    with pytest.warns(UserWarning, match="unbounded, unless max_size says"):
        plain = load_checkpoint(DATA / "plain.pt")
    assert plain.storage[0] == "a"
    assert plain.storage[1]["text"] == "b"
    assert load("plain.pt", max_size=9).storage.capacity == 9
    with pytest.raises(OptionError, match="holds 3 rows"):
        load("plain.pt", max_size=2)
    convert_checkpoint(DATA / "list.pt", tmp_path / "ours")
    other = ReplayBuffer(storage=ListStorage(3))
    with pytest.raises(CheckpointError):
        other.loads(tmp_path / "ours")
    again = TensorDictReplayBuffer(storage=ListStorage(3))
    again.loads(tmp_path / "ours")
    assert [lists(row) for row in again.storage[:]] == want["items"]


def _listed(items: Any, cursor: Any = 0, **more: Any) -> dict[str, Any]:
    return {"_storage": {"_storage": items}, "_writer": {"_cursor": cursor}, **more}


def test_list_states(tmp_path):
    path, ones = tmp_path / "list.pt", torch.ones(1)
    wrong = [
        _listed([1], 2),
        _listed([1], None),
        _listed([1], _batch_size="3"),
        _listed([1], _sampler={"_alpha": 1.0}),
        _listed([1], _rng=(torch.zeros(3), "cpu")),
        _listed(torch.zeros(3)),
        _listed([OrderedDict({"a.b": ones, "a": ones})]),
        _listed([OrderedDict({"a": ones, "a.b": ones})]),
        [1, 2],
    ]
    for state in (*wrong, None):
        if state is None:
            path.write_bytes(b"nothing of the sort")
        else:
            torch.save(state, path)
        with pytest.raises(CheckpointError, match=r"list\.pt"):
            load_checkpoint(path)
    torch.save(_listed([]), path)  # no rows: any capacity, and the first row goes to the first slot
    rb = load_checkpoint(path, max_size=5)
    assert (len(rb), rb.storage.capacity, rb.cursor) == (0, 5, 0)
    assert rb.add("a") == 0


@pytest.mark.parametrize("name", ["prioritized", "lanes", "flat"])
def test_damaged_bytes_raise_or_are_harmless(name, tmp_path):
    """Flips, cuts and splices in every file: an error of ours, or a buffer that works."""
    rng = random.Random(name)
    home = copy_of(name, tmp_path)
    files = sorted(path for path in home.rglob("*") if path.is_file())
    refused = 0
    for _ in range(60):
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(_changed(rng.choice(["flip", "cut", "repeat", "splice"]), whole, whole, rng))
        try:
            rb = load(home)
        except OstinatoError:
            refused += 1
        else:
            assert len(rb) <= rb.storage.capacity
            assert len(rb.sample(2) if rb.batch_size is None else rb.sample())
        path.write_bytes(whole)
    assert refused > 15


def test_text_comes_along(tmp_path):
    data = pytest.importorskip("torchrl.data")
    theirs = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(4), batch_size=2)
    rows = {"prompt": ["a", "\u00e4"], "meta": NonTensorData({"k": [1, None]}, batch_size=[2]), "x": torch.arange(2)}
    theirs.extend(TensorDict(rows, [2]))
    theirs.dumps(tmp_path / "there")
    ours = load(tmp_path / "there")
    assert ours["prompt"] == ["a", "\u00e4"]
    assert ours["meta"] == [{"k": [1, None]}] * 2
    ours.dumps(tmp_path / "here")
    edit(tmp_path / "there" / "storage" / "prompt" / "meta.json", {"data": ["a"]})
    with pytest.raises(DamagedFileError):
        load(tmp_path / "there")


def test_links_fifos_missing_files_and_bad_priorities_raise(tmp_path):
    home = copy_of("prioritized", tmp_path)
    for place in ("storage", "storage/next", "storage/obs.memmap", "storage/meta.json", "sampler", "writer"):
        (home / place).rename(tmp_path / "away")
        (home / place).symlink_to(tmp_path / "away")
        with pytest.raises(DamagedFileError, match=r"links are not followed|not a regular file"):
            load_checkpoint(home)
        (home / place).unlink()
        (tmp_path / "away").rename(home / place)
    values = torch.ones(8, dtype=torch.float64)
    for value in (0.0, float("nan"), -1.0, float("inf")):
        values[3] = value
        (home / "sampler" / "sumtree.memmap").write_bytes(values.numpy().tobytes())
        with pytest.raises(DamagedFileError) if value else nullcontext():
            load(home)
    for file in ("sampler/sumtree.memmap", "writer/metadata.json", "storage/meta.json"):
        (home / file).unlink()
        with pytest.raises(DamagedFileError):
            load_checkpoint(home)
        os.mkfifo(home / file)
        with pytest.raises(DamagedFileError, match="not a regular file"):
            load_checkpoint(home)


def test_options(tmp_path):
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("ring", {"ndim": 2}, "holds a storage with ndim=1, got ndim=2"),
        ("lanes", {"ndim": 1}, "ndim=2, got ndim=1"),
        ("ring", {"max_size": 3}, "for files of list storages"),
        ("ring", {"allow_pickle": True}, "for files of list storages"),
        ("list.pt", {"scratch_dir": "x"}, "leave scratch_dir out"),
        ("list.pt", {"ndim": 2}, "which has ndim=1"),
        ("objects.pt", {}, "pass allow_pickle=True"),
    ]
    for name, options, message in wrong:
        with pytest.raises((OptionError, CheckpointError), match=message):
            load_checkpoint(DATA / name, **options)
    home = copy_of("lanes", tmp_path)
    edit(home / "storage" / "storage_metadata.json", {"len": 0})
    edit(home / "writer" / "metadata.json", {"cursor": 0, "write_count": 0})
    with pytest.raises(OptionError, match="ndim=1 or ndim=2"):
        load_checkpoint(home)
    assert (load(home, ndim=1).storage.ndim, load(home, ndim=2).storage.ndim) == (1, 2)
