"""Ensembles: shapes, names of rows, members, and refusals."""

# ruff: noqa: B023 (a note runs its action at once)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from ._differences import Difference, Fails, check
from ._script import Note, both, rows

if TYPE_CHECKING:
    from pathlib import Path


def _member(lib: Any, base: int, **options: Any) -> Any:
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), **options)
    rb.extend(rows(8, base))
    return rb


def _pair(lib: Any, **options: Any) -> Any:
    return lib.ReplayBufferEnsemble(_member(lib, 0), _member(lib, 100), **options)


def _all(lib: Any, **options: Any) -> Any:
    return _pair(lib, sample_from_all=True, **options)


@both
def test_what_a_batch_holds(lib: Any, note: Note) -> None:
    rb = _all(lib)
    for size in (2, 20):
        batch, info = rb.sample(size, return_info=True)
        note("keys", lambda: sorted(map(str, batch.keys(True, True))))
        note("members", lambda: (batch["index", "buffer_ids"], info["index", "buffer_ids"]))
        note(
            "rows",
            lambda: bool((batch["index", "index"] + 100 * batch["index", "buffer_ids"] == batch["obs"]).all()),
        )


@both
def test_draws_of_the_members_are_the_same(lib: Any, note: Note) -> None:
    rb = _all(lib, batch_size=6)
    note("batches", lambda: [rb.sample()["obs"] for _ in range(3)])
    note("iterated", lambda: [batch["obs"] for batch, _ in zip(rb, range(2), strict=False)])
    seeded = _all(lib, batch_size=6, generator=torch.Generator().manual_seed(3))
    note("with a generator", lambda: [seeded.sample()["obs"] for _ in range(3)])


@both
def test_weights_of_members(lib: Any, note: Note) -> None:
    rb = _pair(lib, p=[1.0, 0.0])
    note("weight 0", lambda: [rb.sample(4)["index", "buffer_ids"].unique() for _ in range(20)])
    rb.sampler.p = [0.0, 2.0]
    note("changed", lambda: [rb.sample(4)["index", "buffer_ids"].unique() for _ in range(20)])
    members = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10)), _member(lib, 100)
    by_rows = lib.ReplayBufferEnsemble(*members, p="sampleable")
    note("weights by what there is", lambda: [by_rows.sample(4)["index", "buffer_ids"] for _ in range(5)])
    note("shapes", lambda: _pair(lib, p=[1, 2], num_buffer_sampled=4).sample(12)["obs"].shape)


@both
def test_members(lib: Any, note: Note) -> None:
    members = [_member(lib, base) for base in (0, 100, 200)]
    rb = lib.ReplayBufferEnsemble(*members, p=[0.5, 0.25, 0.25])
    note("length", lambda: len(rb))
    note("one", lambda: [rb[i] is members[i] for i in (0, 1, 2, -1)])
    note("all", lambda: rb[:] is rb)
    note("some", lambda: [len(rb[index]) for index in (slice(1, None), [0, 2], torch.tensor([1, 2]), range(2))])
    note("their batches", lambda: rb[1:].sample(6)["obs"].shape)
    note("parts", lambda: [len(part) for part in (rb.storage, rb.sampler, rb.writer)])
    note.rows("rows of one", lambda: rb[1, 2:4])
    note.rows("a row of each", lambda: rb[:, 2])
    note.rows("rows of each", lambda: rb[:, 1:3])
    note("beyond", lambda: rb[3])
    note.refusal("a field", lambda: rb["obs"])
    note.refusal("a float", lambda: rb[torch.tensor([0.5])])
    rb.empty()
    note("emptied", lambda: [len(member) for member in members])


@both
def test_refusals(lib: Any, note: Note) -> None:
    rb = _pair(lib)
    note("indivisible", lambda: rb.sample(5))
    note("no size", lambda: rb.sample())
    note("extend", lambda: rb.extend(rows(2)))
    note("add", lambda: rb.add(rows(1)[0]))
    note.refusal("both", lambda: lib.ReplayBufferEnsemble(rb[0], storages=rb.storage))
    note.refusal("p and all", lambda: _pair(lib, p=[0.5, 0.5], sample_from_all=True))
    note.refusal("negative", lambda: _pair(lib, p=[1.0, -1.0]).sample(4))
    note.refusal("no mass", lambda: _pair(lib, p=[0.0, 0.0]).sample(4))
    empty = [lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10)) for _ in range(2)]
    note("empty", lambda: lib.ReplayBufferEnsemble(*empty, sample_from_all=True).sample(4))


def _counts(lib: Any) -> list[int]:
    rb = _pair(lib, p=[0.75, 0.25], num_buffer_sampled=4)
    return sorted({int((rb.sample(4)["index", "buffer_ids"] == 0).sum()) for _ in range(60)})


def _passes(lib: Any) -> Any:
    members = [_member(lib, base, sampler=lib.SamplerWithoutReplacement()) for base in (0, 100)]
    return lib.ReplayBufferEnsemble(*members, sample_from_all=True).sample(20)["obs"].shape


def _update(lib: Any) -> Any:
    return _pair(lib).update_tensordict_priority(_pair(lib).sample(4))


def _ended(lib: Any) -> Any:
    rb = _pair(lib)
    member = rb[0] if lib.name == "ostinato" else rb._rbs[0]
    rb.shutdown()
    assert not rb.is_alive
    return len(member.sample(3))


def _marked(lib: Any) -> Any:
    rb = _pair(lib)
    return rb.mark_update(torch.tensor([0]))


def _queried(lib: Any) -> Any:
    return len(_pair(lib).query(lambda one: True, trajectory_key="obs"))


DIFFERENCES = [
    Difference("rows are named with their member", _marked, None, Fails("KindError")),
    Difference("queries go through the members", _queried, Fails("TypeError"), 16),
    Difference("members outlive the ensemble", _ended, 3, 3),
    Difference("every batch has its share", _counts, [0, 1, 2, 3, 4], [3]),
    Difference("a part is whole, though a pass ends in it", _passes, torch.Size([2, 8]), torch.Size([2, 10])),
    Difference("priorities of a sample can be updated", _update, Fails("AttributeError"), None),
    Difference(
        "one weight for each member",
        lambda lib: len(_pair(lib, p=[1.0]).sample(4)),
        2,
        Fails("OptionError"),
    ),
    Difference("`...` is all members", lambda lib: len(_pair(lib)[...]), Fails("TypeError"), 2),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.reason)
def test_differences(difference: Difference) -> None:
    check(difference)


def _empty(lib: Any, **options: Any) -> Any:
    members = [lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(4)) for _ in range(2)]
    return lib.ReplayBufferEnsemble(*members, **options)


def _routed(count: int) -> TensorDict:
    tasks = torch.arange(count) % 2
    return TensorDict({"obs": torch.arange(count), "info": {"task": tasks.unsqueeze(-1)}}, [count])


@both
def test_routed_writes(lib: Any, note: Note) -> None:
    rb = _empty(lib, routing_key=("info", "task"))
    for count in (3, 6, 12):
        names = rb.extend(_routed(count))
        note("members", lambda: names["buffer_ids"])
        note("rows", lambda: names["index"])
        note("lengths", lambda: [len(rb[0]), len(rb[1])])
    note("stored", lambda: [rb[i]["obs"] for i in (0, 1)])
    one = rb.add(_routed(2)[1])
    note("one row", lambda: (one.batch_size, one["buffer_ids"], one["index"]))
    for name, data in {"a batch": _routed(2), "numbers": _routed(2).float(), "beyond": _routed(2) + 1}.items():
        note(name, lambda: (rb.add if name == "a batch" else rb.extend)(data))
    note("no TensorDict", lambda: rb.extend(_routed(2).to_dict()))
    for dim in (0, 1):
        wide = _empty(lib, routing_dim=dim)
        names = wide.extend(_routed(6).view([2, 3] if dim == 0 else [3, 2]))
        note("dimension", lambda: (names["buffer_ids"], names["index"], wide[1]["obs"]))
        note("other size", lambda: wide.extend(_routed(9).view(3, 3)))
        note("one row", lambda: wide.add(_routed(1)[0]))
    note("both", lambda: _empty(lib, routing_key="task", routing_dim=0))
    note("no integer", lambda: _empty(lib, routing_dim="task"))


def _hooked(lib: Any, folder: str) -> int:
    called: list[int] = []

    def hook(data: Any, **_: Any) -> Any:
        called.append(len(data))
        return data

    rb = _pair(lib)
    rb.register_save_hook(hook)
    rb.dumps(f"{folder}/{lib.name}")
    return len(called)


def test_hooks_of_an_ensemble_are_called(tmp_path: Path) -> None:
    check(Difference("hooks are called", lambda lib: _hooked(lib, str(tmp_path)), 0, 2))
