"""Direct calls: they apply where they should, and give what the general way gives, also while buffers change."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from ostinato._backend import backend, use_backend
from ostinato.errors import OstinatoError, SchemaError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not backend.exchange, reason="the native extension or torch's exchange API is missing")
CAPACITY = 37


class General(ReplayBuffer):
    """A buffer without direct calls: an override of what finishes batches and accepts rows ends them."""

    def _accept(self, data: Any) -> Any:
        return super()._accept(data)

    def _finish(self, data: Any, ticket: Any, notes: Any) -> Any:
        return super()._finish(data, ticket, notes)


def rows(rng: np.random.Generator, n: int) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "obs": rng.random((n, 3), dtype=np.float32),
        "action": rng.integers(0, 9, n),
        "reward": rng.random(n, dtype=np.float32),
        "exact": rng.random(n),
        "done": rng.random(n) < 0.3,
        "truncated": rng.random(n) < 0.1,
        "image": rng.integers(0, 256, (n, 4, 100), dtype=np.uint8),
        "next_image": rng.integers(0, 256, (n, 4, 100), dtype=np.uint8),
    }


def as_tensors(data: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    return {key: torch.from_numpy(np.array(value)) for key, value in data.items()}


def make(kind: type[ReplayBuffer], path: Path, form: str = "memory") -> ReplayBuffer:
    mapped = form == "mapped"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=path, existsok=True) if mapped else LazyTensorStorage(CAPACITY)
    sampler = PrioritizedSampler(CAPACITY, 0.6, 0.4) if form == "prioritized" else RandomSampler()
    generator = torch.Generator().manual_seed(3)
    return kind(storage=storage, sampler=sampler, batch_size=5, generator=generator)


def outcome(call: Any, rb: ReplayBuffer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(rb)
        except OstinatoError as error:
            return type(error), str(error)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, TensorDict):
        return a.batch_size == b.batch_size and same(dict(a.items()), dict(b.items()))
    if isinstance(a, dict):
        return list(a) == list(b) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


class Operations:
    """Random operations on a buffer; each is a function of a buffer, and does the same to each one that it is given."""

    def __init__(self, seed: int) -> None:
        self._dice, self._rng = random.Random(seed), np.random.default_rng(seed)
        self.batch = rows(self._rng, 12)

    def next(self) -> Any:
        n = self._dice.choice([0, 1, 3, 8, 20, CAPACITY, CAPACITY + 7])
        self.batch, self.seed = rows(self._rng, n), self._dice.randrange(10**6)
        self.size = 10.0 ** self._dice.choice([0, 30, 60])
        self.one = {key: value[0] for key, value in rows(self._rng, 1).items()}
        return self._dice.choice(self._rare() if self._dice.random() < 0.15 else self._common())

    def _common(self) -> list[Any]:
        batch, one, seed, n = self.batch, self.one, self.seed, len(self.batch["obs"])
        numbers = {**one, "reward": self.size * (seed % 10), "done": bool(seed % 2), "action": seed}
        double = {**batch, "reward": batch["reward"].astype(np.float64) * self.size}
        strided = {key: np.asfortranarray(value) for key, value in batch.items()}
        given = [as_tensors(batch), batch, TensorDict(as_tensors(batch), batch_size=[n]), double, strided]
        return [
            self.learn,
            self.learn,
            *(lambda rb, data=data: rb.extend(data) for data in given),
            *(lambda rb, data=data: rb.add(data) for data in (as_tensors(one), one, numbers)),
            *(lambda rb, size=size: rb.sample(size) for size in (None, seed % 9, 6 + 6 * (seed % 3))),
            lambda rb: rb.sample(4, return_info=True),
            lambda rb: (len(rb), rb.write_count, rb.cursor, rb.stats().rows_drawn, rb.stats().rows_written),
        ]

    def _rare(self) -> list[Any]:
        batch, one, n = self.batch, self.one, len(self.batch["obs"])
        graded = torch.from_numpy(batch["reward"].copy()).requires_grad_()
        refused = [
            {**batch, "other": np.zeros(n)},
            {key: value for key, value in batch.items() if key != "done"},
            {**batch, "obs": batch["obs"][:, :2]},
            {**batch, "done": batch["done"].astype(np.uint8)},
            {**batch, "obs": batch["obs"][: n // 2]},
            {**as_tensors(batch), "reward": graded},
        ]
        samplers = [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, eps=0.0)]
        return [
            *(lambda rb, data=data: rb.extend(data) for data in refused),
            *(lambda rb, make=make: rb.set_sampler(make()) and None for make in samplers),
            lambda rb: rb.extend(rb.storage[:3] if len(rb) else batch),
            lambda rb: rb.add({**one, "obs": [0.0, 1.0, 2.0]}),
            lambda rb: rb.set_rng(torch.Generator().manual_seed(self.seed)),
            lambda rb: rb.empty(empty_write_count=self.seed % 2 == 0),
            lambda rb: rb.load_state_dict(rb.state_dict()),
            self.edit,
            self.spoil,
            self.tune,
            self.zero,
        ]

    def learn(self, rb: ReplayBuffer) -> Any:
        if not rb.sampler.prioritized:
            return None
        first = rb.sample(6, return_info=True)[1]
        if self.seed % 3 == 0:
            rb.extend(as_tensors(self.batch))
        priorities = torch.arange(6.0) + self.seed
        given = priorities.double() if self.seed % 2 else priorities
        rb.update_priority(first["index"], given, first["index_generation"])
        rb.update_priority(first["index"], priorities)
        return rb.sample(3, return_info=True), rb.stats().stale_updates, rb.sampler.priorities  # type: ignore[attr-defined]

    def edit(self, rb: ReplayBuffer) -> None:
        if len(rb):
            (rb.storage if self.seed % 2 else rb)[0] = as_tensors(self.one)
            if isinstance(rb.storage, LazyMemmapStorage):
                rb.storage.flush()

    def spoil(self, rb: ReplayBuffer) -> None:
        if rb.sampler.prioritized and len(rb):
            rb.update_priority(torch.tensor([0, len(rb) + self.seed % 2]), torch.tensor([1.0, -1.0]))

    def tune(self, rb: ReplayBuffer) -> None:
        if isinstance(rb.sampler, PrioritizedSampler):
            rb.sampler.alpha, rb.sampler.beta = self.seed % 7 / 5, self.seed % 3 / 2
        if isinstance(rb.sample_unit, NStep):
            rb.sample_unit.n, rb.sample_unit.gamma = 1 + self.seed % 5, 0.3 + self.seed % 3 / 10

    def zero(self, rb: ReplayBuffer) -> None:
        if rb.sampler.prioritized and len(rb):
            rb.update_priority(torch.arange(len(rb)), torch.zeros(len(rb)))


def agree(operations: Operations, direct: ReplayBuffer, general: ReplayBuffer) -> None:
    """Do the same with both buffers, and compare results, rows and episodes after each operation."""
    used = 0
    for step in range(150):
        work = operations.next() if step else lambda rb: rb.extend(as_tensors(operations.batch))
        if step % 30 == 29:  # an edit in place ends direct calls until the buffer is emptied
            work = ReplayBuffer.empty
        used += direct._engine.direct is not None
        first, second = outcome(work, direct), outcome(work, general)
        assert same(first, second), (step, first, second)
        assert general._engine.direct is None
        if len(direct):
            assert same(direct[:], general[:])
            trackers: list[Any] = [rb._engine.tracker for rb in (direct, general)]
            assert trackers[0] is None or same(
                *(one.table(rb.storage).state_dict() for one, rb in zip(trackers, (direct, general), strict=True))
            )
    assert used > 20


@pytest.mark.parametrize(("form", "seed"), [("memory", 0), ("mapped", 1), ("prioritized", 0), ("prioritized", 1)])
def test_direct_calls_and_the_general_way_agree(form: str, seed: int, tmp_path: Path) -> None:
    direct, general = (make(kind, tmp_path / kind.__name__, form) for kind in (ReplayBuffer, General))
    agree(Operations(seed), direct, general)


def test_common_buffers_have_direct_calls() -> None:
    fields = {"obs": torch.rand(8, 3), "done": torch.zeros(8, dtype=torch.bool)}
    for data in (fields, TensorDict(fields, batch_size=[8]), torch.rand(8, 3)):
        rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        rb.extend(data)
        calls = rb._engine.direct
        assert calls is not None
        assert rb.extend(data).tolist() == list(range(8, 16))
        assert rb.add({key: value[0] for key, value in fields.items()} if data is fields else data[0]) == 16  # type: ignore[index]
        assert type(rb.sample()) is type(data)
        assert rb.write_count == 17
        assert rb._engine.direct is calls


def test_torch_without_the_exchange_gives_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As before torch 2.10."""

    def found() -> tuple[Any, list[Any]]:
        rb = make(ReplayBuffer, tmp_path)
        rb.extend(as_tensors(rows(np.random.default_rng(0), 30)))
        batches = [rb.sample(), rb.sample(return_info=True), rb.sample(out=rb.sample()), rb[3:9]]
        return rb._engine.direct, batches

    calls, expected = found()
    with use_backend("torch"):
        assert found()[0] is None
    monkeypatch.setattr(backend, "_exchange", False)
    without, batches = found()
    assert calls is not None
    assert without is None
    assert same(batches, expected)


def test_memory_of_a_batch_is_used_again_only_when_all_views_are_gone() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=32)
    rb.extend({"image": torch.arange(64, dtype=torch.uint8)[:, None].expand(64, 4096).clone()})
    batch = rb.sample()
    view = batch["image"][3:5]
    kept = view.clone()
    address = batch["image"].data_ptr()
    del batch
    others = [rb.sample()["image"] for _ in range(5)]
    assert torch.equal(view, kept)
    assert address not in [x.data_ptr() for x in others]
    del view
    assert rb.sample()["image"].data_ptr() == address  # the last one that was dropped


# -- sample(out=) -----------------------------------------------------------------------------------------------------


def filled(*, general: bool = False, **options: Any) -> ReplayBuffer:
    rb = (General if general else ReplayBuffer)(
        storage=LazyTensorStorage(50), generator=torch.Generator().manual_seed(1), batch_size=8, **options
    )
    rb.extend(as_tensors(rows(np.random.default_rng(0), 50)))
    rb.sample()
    return rb


@pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")
def test_out_is_filled_with_the_batch_that_would_have_been_returned() -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"general": True},
        {"prefetch": 2},
        {"transform": lambda batch: {**batch, "obs": batch["obs"] + 1}},
        {"collate_fn": lambda batch: {**batch, "twice": batch["obs"] * 2}},
        {"sample_unit": NStep(2, 0.9, next_keys=["obs"])},
        {"sampler": SliceSampler(slice_len=2, end_key="done")},
    ]
    for options in cases:
        with filled(**options) as rb, filled(**options) as other:
            out = other.sample()
            rb.sample()
            addresses = [value.data_ptr() for value in out.values()]
            expected = rb.sample(return_info=True)
            found = other.sample(return_info=True, out=out)
            assert found[0] is out
            assert [value.data_ptr() for value in out.values()] == addresses
            assert same(found, expected)


@pytest.mark.parametrize("general", [False, True])
def test_out_that_does_not_fit_raises_before_anything_is_written(general: bool) -> None:
    rb = filled(general=general)
    out, stored = rb.sample(), {key: value.clone() for key, value in rb[:].items()}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"obs": out["obs"].double()}, "'obs' of out has another dtype"),
        ({"obs": out["obs"][:4]}, "'obs' of out has another dtype"),
        ({"obs": torch.zeros(3, 8).t()}, "'obs' of out is not contiguous"),
        ({"image": rb.storage["image"][:8]}, "'image' of out shares memory with the storage"),
        ({"done": out["image"].view(-1)[:8].view(torch.bool)}, "another field of the batch"),
        ({"obs": out["obs"].to("meta")}, "'obs' of out"),
        ({"reward": out["reward"].clone().requires_grad_()}, "requires gradients"),
        ({"reward": {"nested": out["reward"]}}, "must have the fields"),
    ]
    for change, message in wrong:
        given = {**out, **change}
        before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
        with pytest.raises(SchemaError, match=message):
            rb.sample(out=given)
        assert all(value.is_meta or torch.equal(given[key], value) for key, value in before.items())
        assert same(rb[:], stored)
    with torch.inference_mode():
        inference = {key: value.clone() for key, value in out.items()}
        assert rb.sample(out=inference) is inference
    with pytest.raises(RuntimeError, match="inference tensor"):
        rb.sample(out=inference)


@pytest.mark.parametrize("general", [False, True])
def test_tensors_of_out_are_written_as_torch_would(general: bool) -> None:
    rb, twin = filled(general=general), filled(general=general)
    out = rb.sample()
    loss = (torch.ones(8, requires_grad=True) * out["reward"]).sum()
    rb.sample(out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    odd = {"reward": torch._neg_view(out["reward"]), "action": torch.nn.Parameter(out["action"], False)}
    rb.sample(out={**out, **odd})
    expected = [twin.sample() for _ in range(3)][-1]
    assert all(torch.equal(value, {**out, **odd}[key]) for key, value in expected.items())


# -- odd callers ------------------------------------------------------------------------------------------------------


def test_a_write_while_the_rows_of_another_are_read() -> None:
    """As of a finalizer that the garbage collector runs within a write."""
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=2)
    first = {"x": np.zeros(3), "y": np.zeros(3)}

    class Key(str):
        __slots__ = ()
        written = False

        def __hash__(self) -> int:
            return str.__hash__(self)

        def __eq__(self, other: object) -> bool:
            if len(rb) == 3 and not Key.written:
                Key.written = True
                rb.extend({"x": np.full(2, 7.0), "y": np.full(2, 8.0)})
            return str.__eq__(self, other)

    rb.extend(first)
    rb.sample()
    assert rb._engine.direct is not None
    rb.extend({"x": np.full(4, 1.0), Key("y"): np.full(4, 2.0)})
    assert Key.written
    assert rb[:]["x"].tolist() == [0.0] * 3 + [7.0] * 2 + [1.0] * 4
    assert rb[:]["y"].tolist() == [0.0] * 3 + [8.0] * 2 + [2.0] * 4
