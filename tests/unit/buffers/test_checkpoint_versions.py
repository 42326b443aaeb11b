"""Checkpoints that earlier versions of the format wrote load as they did, and sampling goes on as it did then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from ostinato import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from ostinato.durable import read_manifest
from ostinato.durable.manifest import FORMAT_VERSION
from ostinato.errors import CheckpointError
from ostinato.tools import inspect_checkpoint, verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "format-1.0"
EXPECTED = {
    "packed": [[6, 1, 1, 3], [5, 4, 0, 6], [4, 2, 3, 2]],
    "prioritized": [[3, 6, 5, 5], [6, 4, 3, 3], [6, 2, 1, 3]],
    "slices": [[5, 6, 2, 3], [4, 5, 2, 3], [6, 0, 2, 3]],
    "epochs": [[4, 6], [0, 1], [2]],
    "single-copy": [[6, 1, 1, 3], [5, 4, 0, 6], [4, 2, 3, 2]],
    "objects": [[6, 1, 1, 3], [5, 4, 0, 6], [4, 2, 3, 2]],
}
"""What the release that wrote them drew next."""


def make(name: str) -> ReplayBuffer:
    options: dict[str, Any] = {"batch_size": 4, "generator": torch.Generator()}
    if name == "objects":
        return ReplayBuffer(storage=ListStorage(7), collate_fn=list, **options)
    if name == "single-copy":
        return ReplayBuffer(storage=LazyTensorStorage(7, single_copy=True), **options)
    storage = LazyTensorStorage(7)
    if name == "prioritized":
        return PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, **options)
    if name == "slices":
        return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2, end_key="done"), **options)
    if name == "epochs":
        options |= {"batch_size": 2, "prefetch": 2}
        return ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), **options)
    return ReplayBuffer(storage=storage, **options)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_version_1_0_loads_and_goes_on(name: str) -> None:
    rb = make(name)
    rb.loads(FIXTURES / name)
    assert read_manifest(FIXTURES / name, format_name="ostinato-buffer").version == (1, 0)
    for expected in EXPECTED[name]:
        batch, info = rb.sample(return_info=True)
        index = info["index"]
        assert index.tolist() == expected
        ids = [row["id"] for row in batch] if name == "objects" else batch["action"].tolist()
        by_slot = [7, 8, 2, 50 if name == "packed" else 3, 4, 5, 6]
        assert ids == [by_slot[slot] for slot in expected]


@pytest.mark.parametrize("name", ["packed", "prioritized", "slices", "epochs"])
def test_version_1_0_can_be_mapped(name: str) -> None:
    one, two = make(name), make(name)
    one.loads(FIXTURES / name, mmap=True)
    two.loads(FIXTURES / name)
    for _ in range(3):
        assert torch.equal(one.sample()["obs"], two.sample()["obs"])


@pytest.mark.parametrize("name", list(EXPECTED))
def test_tools_read_version_1_0(name: str) -> None:
    assert inspect_checkpoint(FIXTURES / name).rows == 7
    assert not verify(FIXTURES / name).damage


def test_an_incremental_save_over_version_1_0_writes_everything_anew(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "packed", tmp_path / "save")
    rb = make("packed")
    rb.loads(tmp_path / "save")
    rb.dumps(tmp_path / "save", incremental=True)
    assert read_manifest(tmp_path / "save", format_name="ostinato-buffer").version == FORMAT_VERSION
    other = make("packed")
    other.loads(tmp_path / "save")
    assert torch.equal(other[:]["obs"], rb[:]["obs"])


def test_an_unknown_major_version_is_refused_in_words(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "packed", tmp_path / "save")
    node = json.loads((tmp_path / "save" / "manifest.json").read_text())
    node["version"] = [2, 0]
    covered = json.dumps([node["format"], node["version"], node["body"]], separators=(",", ":")).encode()
    node["checksum"] = xxhash.xxh3_64_hexdigest(covered)
    (tmp_path / "save" / "manifest.json").write_text(json.dumps(node))
    with pytest.raises(CheckpointError, match=r"has format version 2\.0; this release reads version 1: use"):
        make("packed").loads(tmp_path / "save")
