"""Direct calls: they apply where they should, and give what torch alone gives, also while buffers change."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from ostinato._backend import backend, use_backend
from ostinato.errors import EmptyBufferError, SchemaError
from ostinato.testing.views import bits
from ostinato.transforms import Cast, Compose, RewardScale

from ...contracts.test_differential import WAYS, Program
from ...registry import ring, seeded
from ..background import in_background

pytestmark = pytest.mark.skipif(not backend.exchange, reason="the native extension or torch's exchange API is missing")
CAPACITY = 37
BIG = 2.0**90
"""Sums of it have no other roundings in float64 than in float32."""


def rows(rng: np.random.Generator, n: int) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "obs": rng.random((n, 3), dtype=np.float32),
        "action": rng.integers(0, 9, n),
        "reward": rng.integers(0, 9, n).astype(np.float32),
        "exact": rng.integers(0, 9, n) / 2,
        "done": rng.random(n) < 0.3,
        "truncated": rng.random(n) < 0.1,
        "image": rng.integers(0, 256, (n, 4, 100), dtype=np.uint8),
        "next_image": rng.integers(0, 256, (n, 4, 100), dtype=np.uint8),
    }


def as_tensors(data: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    return {key: torch.from_numpy(np.array(value)) for key, value in data.items()}


def nest(data: dict[str, Any]) -> dict[str, Any]:
    """Rows with a level of their own for what comes after the step."""
    after = {key.removeprefix("next_"): value for key, value in data.items() if key.startswith("next_")}
    return {**{key: value for key, value in data.items() if not key.startswith("next_")}, "next": after}


PARTS: dict[str, Any] = {
    "memory": dict,
    "mapped": dict,
    "single copy": dict,
    "single copy, mapped, slices": lambda: {"sampler": SliceSampler(slice_len=3, end_key="done")},
    "slices of one length": lambda: {"sampler": SliceSampler(slice_len=3, end_key="done")},
    "number of slices": lambda: {"sampler": SliceSampler(num_slices=2, end_keys=["done", "truncated"])},
    "n-step": lambda: {"sample_unit": NStep(3, 0.5)},
    "n-step, TensorDicts": lambda: {"sample_unit": NStep(3, 0.5)},
    "slices, TensorDicts": lambda: {"sampler": SliceSampler(slice_len=3, end_key="done")},
    "nested": dict,
    "nested, TensorDicts": lambda: {"sampler": PrioritizedSampler(CAPACITY, 0.7, 0.5)},
    "nested, single copy, TensorDicts": dict,
    "nested, slices, buffer of TensorDicts": lambda: {"sampler": SliceSampler(slice_len=3, end_key="done")},
    "nested, n-step, TensorDicts": lambda: {"sample_unit": NStep(3, 0.5)},
    "n-step, float64": lambda: {"sample_unit": NStep(4, 0.5, reward_key="exact", next_keys=["done"])},
    "frames": lambda: {"sample_unit": FrameStack(3, ["image"], merge=True)},
    "frames without next": lambda: {"sample_unit": FrameStack(2, ["obs"])},
    "episodes alone": lambda: {"episodes": Episodes()},
    "a mask": lambda: {"episodes": Episodes(end_key="truncated", mask_key="done")},
    "numbers of episodes": lambda: {"sampler": SliceSampler(slice_len=2, traj_key="action")},
    "versions": lambda: {"version_key": "action"},
    "rate limiter": lambda: {"rate_limiter": RateLimiter(2, 200, 4, timeout_s=0)},
    "transforms": lambda: {"transform": Compose(RewardScale(2.0), Cast(torch.float32, "image", stored=torch.uint8))},
    "remover": lambda: {"remover": "lifo"},
}
WRITTEN_IN_GENERAL = {"remover"}
"""Draws are direct, writes are not: more follows the rows."""


def make(parts: str) -> ReplayBuffer:
    kind: Any = LazyMemmapStorage if "mapped" in parts else LazyTensorStorage
    pair: Any = {("next", "image") if "nested" in parts else "next_image": "image"}
    storage = kind(CAPACITY, single_copy=pair if "single copy" in parts else False)
    buffer = TensorDictReplayBuffer if "buffer of TensorDicts" in parts else ReplayBuffer
    return buffer(storage=storage, batch_size=6, generator=seeded(3), **PARTS[parts]())


class Forms(Program):
    """Rows in all forms that direct calls take, and in some that are left to the general way or refused."""

    def __init__(self, buffer: ReplayBuffer, seed: str) -> None:
        super().__init__(buffer, seed, 1)
        self.numbers = np.random.default_rng(len(seed))
        self.used = 0
        self.follows = rows(self.numbers, 1)["image"][0] if "single copy" in seed else None
        """The next observation of the last row."""
        self.as_tensordicts = "TensorDicts" in seed
        """Whether the first rows are TensorDicts."""
        self.form = nest if "nested" in seed else dict
        """What makes the levels of the rows."""

    def call(self, name: str) -> None:
        self.used += self.buffer._engine.direct is not None
        super().call(name)

    def rows(self, count: int) -> Any:
        data = rows(self.numbers, count)
        if self.follows is not None:
            data["image"][0] = self.follows
            data["next_image"][:-1] = np.where(
                data["done"][:-1, None, None], data["next_image"][:-1], data["image"][1:]
            )
            self.follows = data["next_image"][-1].copy()
        tensors, data = self.form(as_tensors(data)), self.form(data)
        if not self.buffer.storage.laid_out:
            return TensorDict(tensors, batch_size=[count]) if self.as_tensordicts else tensors
        forms: list[Any] = [
            *(tensors, data, tensors, data),
            TensorDict(tensors, batch_size=[count]),
            {**data, "obs": np.asfortranarray(data["obs"]), "image": np.asfortranarray(data["image"])},
            {**data, "reward": data["reward"].astype(np.float64) * self.random.choice([1.0, BIG, 1e60])},
        ]
        refused: list[Any] = [
            {**data, "other": data["exact"]},
            {key: value for key, value in data.items() if key != "done"},
            {**data, "obs": data["obs"][:, :2]},
            self.buffer[:count],
        ]
        return self.random.choice([*forms, self.random.choice(refused)])

    def add(self) -> Any:
        one = self.form({key: value[0] for key, value in rows(self.numbers, 1).items()})
        tensors = self.form(as_tensors({key: value[0] for key, value in rows(self.numbers, 1).items()}))
        numbers = {**one, "reward": self.random.choice([3, BIG, 1e60]), "done": True, "action": 7}
        return self.buffer.add(
            self.random.choice([tensors, TensorDict(tensors), one, numbers, {**one, "obs": [0.0, 1.0, 2.0]}])
        )

    def edit(self) -> Any:
        """Rows that are edited or deleted end direct calls until the buffer is emptied."""
        return super().edit() if self.random.random() < 0.3 else None

    def delete(self) -> Any:
        few = self.random.random() < 0.3
        return super().delete() if few else self.buffer.empty(empty_write_count=self.random.random() < 0.5)

    def move(self) -> Any:
        """Other parts and options than those that direct calls have looked up."""
        unit = self.buffer.sample_unit
        if isinstance(unit, NStep):
            unit.n, unit.gamma = self.random.randint(1, 5), 0.25
        elif not isinstance(self.buffer.sampler, SliceSampler):
            self.buffer.set_sampler(self.random.choice([RandomSampler, SamplerWithoutReplacement])())
        self.buffer.set_rng(seeded(self.random.randrange(99)))
        return super().move()


@pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")
@pytest.mark.parametrize("parts", PARTS)
def test_direct_calls_give_what_torch_alone_gives(parts):
    found = []
    for way in WAYS:
        with use_backend(way):
            program = Forms(make(parts), parts)
            found.append(program.run(400))
            least = 20 if parts in WRITTEN_IN_GENERAL else 40
            assert program.used > least if way == "native" else not program.used
    for one, other in zip(*found, strict=True):
        assert one == other


def test_common_buffers_have_direct_calls():
    fields = {"obs": torch.rand(8, 3), "done": torch.zeros(8, dtype=torch.bool)}
    for data in (fields, TensorDict(fields, batch_size=[8]), torch.rand(8, 3)):
        rb = ring(100, batch_size=4)
        rb.extend(data)
        calls = rb._engine.direct
        assert calls is not None
        assert rb.extend(data).tolist() == list(range(8, 16))
        assert rb.add({key: value[0] for key, value in fields.items()} if data is fields else data[0]) == 16  # type: ignore[index]
        assert type(rb.sample()) is type(data)
        assert rb.write_count == 17
        assert rb._engine.direct is calls


def test_ordinary_options_have_direct_calls():
    for parts in PARTS.keys() - {"memory", "mapped", *WRITTEN_IN_GENERAL}:
        rb, rng, form = make(parts), np.random.default_rng(0), nest if "nested" in parts else dict
        wrap: Any = TensorDict if "TensorDicts" in parts else lambda data, _: data
        for _ in range(2):
            rb.extend(wrap(form(as_tensors(rows(rng, 30))), [30]))
            rb.sample()
        found = rb._engine.direct
        assert found is not None
        assert found.extend(rb._direct_rows(wrap(form(as_tensors(rows(rng, 3))), [3]), 1, found)) is not None
        one = form(as_tensors({key: value[0] for key, value in rows(rng, 1).items()}))
        assert found.add(rb._direct_rows(wrap(one, []), 0, found)) is not None
        general = parts in {"episodes alone", "rate limiter", "a mask"} or parts == "single copy, mapped, slices"
        assert (found.sample(6) is None) == general


@pytest.mark.parametrize("dim_extend", [0, 1])
@pytest.mark.parametrize("environments", [1, 3])
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")
def test_steps_of_environments_have_direct_calls(dim_extend, environments, *, slices):
    found: list[Any] = []
    for way in WAYS:
        given, rng = list[Any](), np.random.default_rng(environments)
        with use_backend(way):
            sampler = SliceSampler(num_slices=2, end_key="flag") if slices else RandomSampler()
            options: dict[str, Any] = {"sampler": sampler, "batch_size": 4, "generator": seeded(2)}
            rb = ReplayBuffer(storage=LazyTensorStorage(5 * environments, ndim=2), dim_extend=dim_extend, **options)
            for call in range(40):
                steps = int(rng.integers(1, 8))
                shape = (environments, steps) if dim_extend else (steps, environments)
                data = {"obs": rng.random((*shape, 2)), "flag": rng.random(shape) < 0.5}
                calls = rb._engine.direct
                assert (calls is not None) == (way == "native" and call > 0) or slices
                given.append(rb.extend(TensorDict(as_tensors(data), shape) if call % 2 else data).tolist())
                step = {
                    key: np.ascontiguousarray(value[:, 0] if dim_extend else value[0]) for key, value in data.items()
                }
                given += [rb.add(step).tolist(), rb[:]["obs"].tolist(), rb[:]["flag"].tolist(), rb.cursor]
                with contextlib.suppress(EmptyBufferError):
                    given.append(bits(rb.sample()))
                if calls is not None:
                    assert calls is rb._engine.direct
                    assert calls.lead == 2
                    assert calls.has_more_info == slices
                    wrong = {key: np.concatenate([value, value]) for key, value in step.items()}
                    assert calls.add(wrong) is None
        found.append(given)
    assert found[0] == found[1]


@pytest.mark.parametrize("parts", ["a mask", "slices of one length", "memory"])
def test_episodes_of_views_follow_direct_writes(parts):
    found: list[Any] = []
    for way in WAYS:
        given, rng = list[Any](), np.random.default_rng(2)
        with use_backend(way):
            rb = make(parts)
            rb.extend(rows(rng, 30))
            views = [rb.view(sample_unit=NStep(3, 0.5), generator=seeded(4)), rb.view(generator=seeded(5))]
            for handle in (rb, *views) * 8:
                rb.extend(rows(rng, 7))  # a look at the first rows of windows may be due
                direct = rb._engine.direct
                if direct is None or len(given) < 9:
                    handle.extend(rows(rng, 2))
                else:
                    assert direct.extend(rows(rng, 2)) is not None
                given.append(bits(handle.sample(return_info=True)))
            direct = views[0]._engine.direct
            assert (direct is not None and direct.sample(6) is not None) == (way == "native")
        found.append(given)
    assert found[0] == found[1]


ORDERS: dict[str, Any] = {
    "deleted": lambda rb: rb.delete([3, 8]),
    "edited": lambda rb: rb.set_at_("action", torch.tensor([1, 2]), [3, 8]),
    "cursor moved": lambda rb: rb._engine.store.move_cursor(5),
    "lifo": lambda rb: rb,
}


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_are_not_in_ring_order_have_direct_calls(order):
    """After some writes in Python, while free slots and the order of the others are looked up."""
    found: list[Any] = []
    for way in WAYS:
        with use_backend(way):
            sampler = PrioritizedSampler(CAPACITY, 0.6, 0.4)
            options: dict[str, Any] = {"remover": "lifo"} if order == "lifo" else {}
            rb = ring(CAPACITY, sampler=sampler, generator=seeded(1), **options)
            rb.extend(rows(np.random.default_rng(0), CAPACITY + 5))
            rb.sample(4)
            program, used = Forms(rb, order), 0
            ORDERS[order](rb)
            for call in range(60):
                program.call("add" if call % 3 else "extend")
                used += bool(rb._engine.direct)
                program.call("sample")
                program.call("update")
                program.given.append(rb._engine.ring.arrivals(torch.arange(CAPACITY)).tolist())
            assert used > 20 or way == "torch"
            found.append(program.given)
    assert found[0] == found[1]


def test_a_batch_whose_transform_raises_is_not_counted():
    rb = ring(8, batch_size=4)
    rb.extend(torch.arange(8))
    rb.append_transform(lambda batch: batch.no_such_method())
    for _ in range(3):
        with pytest.raises(AttributeError):
            rb.sample()
    assert rb._engine.direct is not None
    assert rb.stats().rows_drawn == 0


def test_torch_without_the_exchange_gives_the_same(monkeypatch):
    """As before torch 2.10."""

    def found() -> tuple[Any, list[Any]]:
        rb = make("memory")
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
    assert bits(batches) == bits(expected)


def test_memory_of_a_batch_is_used_again_only_when_all_views_are_gone():
    rb = ring(64, batch_size=32)
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


@pytest.mark.parametrize("parts", ["slices", "n-step"])
def test_no_window_is_torn_while_rows_are_replaced(parts):
    """Rows say their number in every element, episodes have ten rows."""
    options: dict[str, Any] = {"sampler": SliceSampler(slice_len=4, end_key="done")}
    if parts == "n-step":
        options = {"sample_unit": NStep(4, 1.0, next_keys=["last", "done"])}
    rb = ring(400, batch_size=64, **options)

    def batch(first: int, n: int = 40) -> dict[str, torch.Tensor]:
        number = torch.arange(first, first + n)
        frame = number[:, None].repeat(1, 200)
        done = number % 10 == 9
        return {"number": number, "last": number.clone(), "frame": frame, "reward": torch.ones(n), "done": done}

    rb.extend(batch(0, 400))
    rb.sample()
    firsts = itertools.count(400, 40)
    with in_background(lambda: rb.extend(batch(next(firsts)))):
        for _ in range(150):
            found = rb.sample()
            assert torch.equal(found["frame"], found["number"][:, None].expand(-1, 200))
            if parts == "slices":
                numbers = found["number"].view(-1, 4)
                assert bool((numbers.diff() == 1).all())
                assert bool((numbers[:, 0] // 10 == numbers[:, 3] // 10).all())
            else:
                assert torch.equal(found["last"], found["number"] + found["steps_to_next_obs"] - 1)
                assert torch.equal(found["reward"], found["steps_to_next_obs"].float())
    assert rb._engine.direct is not None


# -- sample(out=) -----------------------------------------------------------------------------------------------------


either_way = pytest.mark.parametrize("sampler", [RandomSampler, lambda: SamplerWithoutReplacement(endless=True)])
"""Batches of the latter are made by the general way."""


def filled(**options: Any) -> ReplayBuffer:
    rb = ring(50, generator=seeded(1), batch_size=8, **options)
    rb.extend(as_tensors(rows(np.random.default_rng(0), 50)))
    rb.sample()
    return rb


@pytest.mark.filterwarnings("ignore::ostinato.errors.EpisodesWarning")
def test_out_is_filled_with_the_batch_that_would_have_been_returned():
    cases: list[Any] = [
        {},
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
            assert bits(found) == bits(expected)


@either_way
def test_out_that_does_not_fit_raises_before_anything_is_written(sampler):
    rb = filled(sampler=sampler())
    out, stored = rb.sample(), {key: value.clone() for key, value in rb[:].items()}
    wrong: list[Any] = [
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
        assert bits(rb[:]) == bits(stored)
    with torch.inference_mode():
        inference = {key: value.clone() for key, value in out.items()}
        assert rb.sample(out=inference) is inference
    with pytest.raises(RuntimeError, match="inference tensor"):
        rb.sample(out=inference)


@either_way
def test_a_loss_notices_that_a_batch_was_filled_again(sampler):
    rb = filled(sampler=sampler())
    out = rb.sample()
    loss = (torch.ones(8, requires_grad=True) * out["reward"]).sum()
    rb.sample(out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_while_the_rows_of_another_are_read():
    """As of a finalizer that the garbage collector runs within a write."""
    rb = ring(20, batch_size=2)
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
