"""Exchanging parts, classes and their ancestry, state, pickling."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from ._script import Note, both, rows

CLASSES = (
    "ReplayBuffer",
    "TensorDictReplayBuffer",
    "Storage",
    "ListStorage",
    "TensorStorage",
    "LazyTensorStorage",
    "LazyMemmapStorage",
    "Sampler",
    "RandomSampler",
    "SamplerWithoutReplacement",
    "Writer",
    "RoundRobinWriter",
    "TensorDictRoundRobinWriter",
    "ImmutableDatasetWriter",
    "TensorDictMaxValueWriter",
)


@both
def test_ancestry(lib: Any, note: Note) -> None:
    for name in CLASSES:
        cls = getattr(lib, name)
        # of the public names: inner base classes are each library's own business
        others = [other for other in CLASSES if (name, other) != ("SamplerWithoutReplacement", "RandomSampler")]
        note(name, lambda: [other for other in others if issubclass(cls, getattr(lib, other))])


@both
def test_setters_return_the_previous_part(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), batch_size=2)
    rb.extend(rows(3))
    old = rb.storage, rb.sampler, rb.writer
    note("sampler", lambda: rb.set_sampler(lib.SamplerWithoutReplacement()) is old[1])
    note("writer", lambda: rb.set_writer(lib.TensorDictRoundRobinWriter()) is old[2])
    note("storage", lambda: rb.set_storage(lib.ListStorage(7)) is old[0])
    note("new parts", lambda: [type(part).__name__ for part in (rb.storage, rb.sampler, rb.writer)])
    for name in ("storage", "sampler", "writer"):
        note(f"no setter for {name}", lambda: setattr(rb, name, None))


@both
def test_made_from_classes_and_options(lib: Any, note: Note) -> None:
    rb = lib.ReplayBuffer(storage=lambda: lib.ListStorage(3), sampler=lib.RandomSampler, writer=lib.RoundRobinWriter)
    note("parts", lambda: [type(part).__name__ for part in (rb.storage, rb.sampler, rb.writer)])
    note("capacity", lambda: rb.storage.max_size)
    for sampler in (lib.RandomSampler(replacement=False, drop_last=True), lib.SamplerWithoutReplacement(True, False)):
        note("class", lambda: isinstance(sampler, lib.SamplerWithoutReplacement))
        note("options", lambda: (sampler.drop_last, sampler.shuffle))
    note("with replacement", lambda: type(lib.RandomSampler(replacement=True)).__name__)
    for name in ("storage", "sampler", "writer"):
        note(f"wrong {name}", lambda: lib.ReplayBuffer(**{name: "x"}))
    note("sampler as storage", lambda: lib.ReplayBuffer(storage=lib.RandomSampler()))
    note.refusal("number as transform", lambda: lib.ReplayBuffer(transform=5))


@pytest.mark.parametrize(
    ("buffer", "storage"), [("ReplayBuffer", "LazyTensorStorage"), ("TensorDictReplayBuffer", "ListStorage")]
)
@both
def test_state_dict(lib: Any, note: Note, buffer: str, storage: str) -> None:
    def fresh() -> Any:
        return getattr(lib, buffer)(storage=getattr(lib, storage)(5), batch_size=2)

    rb, other = fresh(), fresh()
    rb.extend(rows(7))
    state = copy.deepcopy(rb.state_dict())
    other.extend(rows(1, 60))
    note("load", lambda: other.load_state_dict(state))
    note.rows("rows", lambda: (len(other), other[:]))
    note("goes on at the cursor", lambda: other.extend(rows(2, 80)))
    note.rows("rows", lambda: other[:])


@pytest.mark.parametrize(
    ("storage", "sampler", "when"),
    [
        ("LazyTensorStorage", "RandomSampler", "prefetching"),
        ("ListStorage", "SamplerWithoutReplacement", "sampled"),
        ("LazyTensorStorage", "SamplerWithoutReplacement", "unused"),
    ],
)
@both
def test_copies(lib: Any, note: Note, storage: str, sampler: str, when: str) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = {"storage": getattr(lib, storage)(8), "sampler": getattr(lib, sampler)(), "generator": generator}
    rb = lib.TensorDictReplayBuffer(**parts, batch_size=2, prefetch=2 if when == "prefetching" else None)
    if when != "unused":
        rb.extend(rows(4))
        rb.sample()
    for copied in (pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb)):
        note("class", lambda: (type(copied).__name__, len(copied)))
        note("writing the copy", lambda: copied.extend(rows(1, 9)))
        note.rows("rows of the copy", lambda: copied[:])
        note("the original", lambda: len(rb))
        note("sample", lambda: tuple(copied.sample().batch_size))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@both
def test_dumps_and_loads(lib: Any, note: Note, storage: str, tmp_path: Any) -> None:
    def fresh() -> Any:
        return lib.ReplayBuffer(storage=getattr(lib, storage)(5), batch_size=2)

    data = {"tensordict": rows(7), "tensor": torch.arange(7), "dict": {"a": torch.arange(7), "b": (torch.zeros(7, 2),)}}
    for kind, made in data.items():
        rb, other, path = fresh(), fresh(), tmp_path / f"{lib.name} {kind}"
        rb.extend(made)
        note("dumps", lambda: (rb.dumps(path), rb.dumps(str(path))))
        other.extend(made)
        note("loads", lambda: other.loads(path))
        note.rows("rows", lambda: other[:])
        note("goes on at the cursor", lambda: other.extend(made))
        small = lib.ReplayBuffer(storage=getattr(lib, storage)(2))
        note.refusal("too small", lambda: small.loads(path))
    note.refusal("nothing there", lambda: fresh().loads(tmp_path / "nothing"))
