"""Mutations of every file of a checkpoint: refused by name, or harmless; never anything else."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato.durable import CheckpointReader, CheckpointWriter, files, write_manifest
from ostinato.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 400


def make(path: Path) -> None:
    with CheckpointWriter(path, format_name="example") as writer:
        writer.add_array("obs", torch.arange(3000, dtype=torch.int32).view(1000, 3))
        writer.add_array("done", torch.tensor([True, False]))
        writer.add_array("nothing", torch.zeros(0, 4))
        writer.add_values("items", [{"a": 1.5, "b": torch.ones(2)}, (1, None), "text"])
        writer.commit({"cursor": 3, "keys": {1: b"x"}, "big": torch.arange(10_000), "size": torch.Size([2])})


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def content(path: Path) -> list[Any]:
    """All that a checkpoint holds, in a form that can be compared."""
    reader = CheckpointReader(path, format_name="example")
    arrays = {
        name: (reader.record(name).dtype, reader.record(name).shape, raw(reader.read(name))) for name in reader.names
    }
    return [arrays, repr(reader.state()), repr(list(reader.values("items")))]


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Flip, cut, insert, repeat, or splice in what another file holds."""
    if not data:
        return rng.randbytes(3)
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    kind = rng.randrange(7)
    if kind <= 1:
        k = rng.randrange(len(data))
        return data[:k] + bytes([data[k] ^ (1 << rng.randrange(8))]) + data[k + 1 :]
    if kind == 2:
        return data[:i]
    if kind == 3:
        return data[:i] + rng.randbytes(rng.randrange(1, 9)) + data[i:]
    if kind == 4:
        return data[:i] + data[j:]
    if kind == 5:
        return data[:j] + data[i:]
    other = rng.choice(others)
    return data[:i] + other[: j - i] + data[j:]


def test_mutated_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    make(source)
    expected = content(source)
    originals = {entry.name: entry.read_bytes() for entry in source.iterdir()}
    shutil.copytree(source, copy)
    rng = random.Random(7)
    refused = 0
    for turn in range(ROUNDS):
        names = sorted(originals)
        name = "manifest.json" if turn % 2 else names[turn // 2 % len(names)]
        changed = mutate(originals[name], list(originals.values()), rng)
        (copy / name).write_bytes(changed)
        try:
            found = content(copy)
        except CheckpointError as error:
            refused += 1
            assert name in str(error), (turn, name, error)  # noqa: PT017
        else:
            assert found == expected, (turn, name)
        (copy / name).write_bytes(originals[name])
    assert refused >= 0.9 * ROUNDS
    assert content(copy) == expected


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value inside a piece of JSON."""
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def test_signed_mutations_raise_only_our_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums do not stop an attacker, who can compute them: the checks behind them must."""
    make(tmp_path / "a")
    monkeypatch.setattr(files, "fsync_dir", lambda _: None)
    monkeypatch.setattr(files, "sync_fd", lambda _: None)
    original = (tmp_path / "a" / "manifest.json").read_text()
    ways = places(json.loads(original)["body"])
    rng = random.Random(8)
    hostile: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        2**63,
        10**400,
        0.5,
        "",
        "x",
        "../x",
        "obs",
        [],
        {},
        [[]],
        [2**62, 0],
        {"$int": 1},
    ]
    hostile += [{"$tensor": {"dtype": "float32", "shape": [0], "array": "obs"}}, "0" * 16, "float64", "bool"]
    loaded = 0
    for _ in range(ROUNDS):
        body = json.loads(original)["body"]
        *way, last = rng.choice(ways)
        node = body
        for key in way:
            node = node[key]
        node[last] = rng.choice(hostile)
        write_manifest(tmp_path / "a", body, format_name="example")
        try:
            content(tmp_path / "a")
            loaded += 1
        except CheckpointError as error:
            str(error).encode()
    assert loaded < ROUNDS


def test_files_swapped_among_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with CheckpointWriter(path, format_name="example") as writer:
        first = writer.add_array("a", torch.zeros(100))
        second = writer.add_array("b", torch.ones(100))
        writer.commit(None)
    (path / first.file).rename(path / "other")
    (path / second.file).rename(path / first.file)
    (path / "other").rename(path / second.file)
    with pytest.raises(CheckpointError, match=r"a\.\w+\.bin is damaged in the block at byte 0"):
        CheckpointReader(path, format_name="example").verify()
