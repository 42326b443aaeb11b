"""Who owns which memory: no aliasing with the caller, no graph kept alive, no growth."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    Episodes,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    QueueSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
)
from ostinato._backend import backend
from ostinato.core.rows import map_leaves
from ostinato.errors import OptionError, SchemaError

from ...tags import STORAGES, TENSORS, buffer, fill, read_ids, rows, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def overwrite(data: Any) -> None:
    """Zero every tensor and array of nested data in place."""
    if isinstance(data, list):
        for item in data:
            overwrite(item)
    elif isinstance(data, np.ndarray):
        data[...] = 0
    else:
        map_leaves(data, lambda leaf: leaf.zero_())


@pytest.mark.parametrize("kind", ["dict", "tuple", "tensordict", "tensor"])
@pytest.mark.parametrize("storage", list(TENSORS))
def test_the_caller_may_reuse_its_tensors_right_after_writing(kind: str, storage: str) -> None:
    rb = buffer(storage, 8)
    data, row, more = rows(range(3), kind), rows(torch.tensor(3), kind), rows(range(10, 12), kind)
    rb.extend(data)
    overwrite(data)
    rb.add(row)
    overwrite(row)
    rb[0:2] = more
    overwrite(more)
    assert read_ids(rb[:]) == [10, 11, 2, 3]


@pytest.mark.parametrize("kind", ["dict", "tensordict", "tensor"])
def test_the_caller_may_reuse_rows_put_into_a_list(kind: str) -> None:
    rb = buffer("list", 8)
    data, row, one = rows(range(3), f"{kind}s"), rows(torch.tensor(3), kind), rows(torch.tensor(10), kind)
    rb.extend(data)
    overwrite(data)
    rb.add(row)
    overwrite(row)
    rb[0] = one
    overwrite(one)
    assert read_ids(rb[:]) == [10, 1, 2, 3]


@pytest.mark.parametrize("storage", ["packed", "list"])
def test_the_caller_may_reuse_an_observation_array(storage: str) -> None:
    """Simulators hand out the same array again and again: the classic way to a buffer full of one observation."""
    rb = ReplayBuffer(storage=STORAGES[storage](8))
    obs = np.zeros(3, dtype=np.float32)
    for step in range(4):
        obs[:] = step
        rb.add(obs)
        rb.add({"obs": obs}["obs"])
    assert rb[:][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    nested = ReplayBuffer(storage=STORAGES[storage](8))
    for step in range(4):
        obs[:] = step
        nested.add({"obs": obs, "more": [obs]})
    assert nested[:]["obs"][:, 0].tolist() == [0, 1, 2, 3]
    assert nested[:]["more"][0][:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("storage", list(STORAGES))
def test_samples_are_the_callers_own(storage: str) -> None:
    rb = buffer(storage, 8, batch_size=6)
    fill(rb, range(5))
    for _ in range(3):
        batch = rb.sample()
        overwrite(batch)
        overwrite(rb[torch.tensor([0, 1])])
    assert read_ids(rb[:]) == list(range(5))


@pytest.mark.parametrize("storage", list(TENSORS))
def test_fields_of_a_sample_do_not_share_memory(storage: str) -> None:
    """An edit in place of one field changes no other one, although small fields are stored together."""
    rb = buffer(storage, 8, batch_size=6)
    fill(rb, range(5))
    batch = rb.sample()
    untouched = {key: batch[key].clone() for key in ("id", "wide")}
    batch["obs"].fill_(99.0)
    batch["next"]["obs"].fill_(99.0)
    assert all(torch.equal(batch[key], value) for key, value in untouched.items())
    assert all(leaf.is_contiguous() for leaf in (batch["obs"], batch["next"]["obs"], batch["id"]))


def test_the_index_of_a_sample_is_the_callers_own() -> None:
    rb = buffer("packed", 8, batch_size=6, prefetch=2, generator=torch.Generator().manual_seed(0))
    same = buffer("packed", 8, batch_size=6, generator=torch.Generator().manual_seed(0))
    fill(rb, range(8))
    fill(same, range(8))
    for _ in range(4):
        _, info = rb.sample(return_info=True)
        _, expected = same.sample(return_info=True)
        assert torch.equal(info["index"], expected["index"])
        info["index"].fill_(7)


@pytest.mark.parametrize("storage", list(STORAGES))
def test_rows_that_require_gradients_are_detached(storage: str) -> None:
    rb = ReplayBuffer(storage=STORAGES[storage](4), batch_size=2)
    weight = torch.ones(3, requires_grad=True)
    for _ in range(2):
        rb.extend((weight * 2).expand(2, 3) * 1.0)
        rb.extend((weight * 2).expand(2, 3))  # not contiguous: another path
        rb.add(weight * 2)
        rb[0] = weight * 2
    assert not rb.sample().requires_grad
    assert not rb[:].requires_grad
    assert torch.equal(rb[:], torch.full((4, 3), 2.0))


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("nested", [False, True])
def test_no_graph_is_kept_alive_by_stored_rows(storage: str, nested: bool) -> None:
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = held[0]
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Big:
        pass

    held = [Big()]
    alive = weakref.ref(held[0])
    rb = ReplayBuffer(storage=STORAGES[storage](4))
    out = Watched.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
    rb.add({"x": out} if nested else out)
    held.clear()
    del out
    gc.collect()
    assert alive() is None, "the buffer keeps the graph of a stored row"
    assert len(rb) == 1


@pytest.mark.parametrize("storage", list(STORAGES))
def test_overwritten_rows_and_batches_are_let_go(storage: str) -> None:
    """After the first wrap nothing grows, however long the batches are."""
    rb = ReplayBuffer(storage=STORAGES[storage](50), batch_size=10)
    process = psutil.Process()

    def wrap(times: int) -> None:
        for step in range(times):
            rb.extend(torch.zeros(20 + step % 60, 1000))
            rb.sample()

    wrap(20)
    gc.collect()
    before, objects = process.memory_info().rss, len(gc.get_objects())
    wrap(60)
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
    assert process.memory_info().rss - before < 8_000_000  # the batches written since take 12 MB and more
    assert len(rb) == 50


def test_a_list_lets_go_of_the_batch_that_a_row_came_from() -> None:
    """Rows of a tensor are copies: one kept row must not keep a thousand others."""
    rb = ReplayBuffer(storage=ListStorage(1))
    big = torch.zeros(1000, 1000)
    rb.extend(big)
    assert rb[0].untyped_storage().nbytes() == 4000
    rb.extend(TensorDict({"x": big}, [1000]))
    assert rb[0]["x"].untyped_storage().nbytes() == 4000


def test_exactly_one_copy_is_made_from_caller_to_storage() -> None:
    """Counted by the allocator: writing contiguous rows allocates nothing of their size."""
    rb = buffer("columns", 2000)
    data = {"x": torch.zeros(1000, 1000)}
    rb.extend(data)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        rb.extend(data)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < data["x"].nbytes // 4
    copies = [event for event in profile.key_averages() if event.key in {"aten::copy_", "aten::clone", "aten::to"}]
    assert sum(event.count for event in copies) <= 1


def test_samples_allocate_the_batch_and_little_more() -> None:
    rb = buffer("columns", 2000)
    rb.extend({"x": torch.zeros(2000, 1000)})
    rb.sample(500)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        rb.sample(500)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < 1.5 * 500 * 4000


@pytest.mark.parametrize("storage", ["packed", "columns"])
def test_slices_are_views_and_tensor_indices_copies(storage: str) -> None:
    rb = buffer(storage, 8)
    fill(rb, range(5))
    for index in (slice(1, 3), slice(None), ..., slice(None, None, 2), 2):
        view = rb[index]
        view["obs"].add_(1.0)
        assert torch.equal(rb[index]["obs"], view["obs"]), f"rb[{index}] is not a view"
        view["obs"].sub_(1.0)
    assert read_ids(rb[:]) == list(range(5))
    rb["obs"].add_(1.0)
    assert bool((rb[:]["obs"] == table(torch.arange(5))["obs"] + 1.0).all())
    rb["obs"].sub_(1.0)
    for single in (torch.tensor([1, 2]), [1, 2], torch.tensor([True] * 5)):
        rb[single]["obs"].add_(1.0)
        assert read_ids(rb[:]) == list(range(5)), f"rb[{single}] is not a copy"


def test_a_view_shows_later_writes_and_a_copy_does_not() -> None:
    rb = buffer("columns", 4)
    rb.extend(torch.arange(4))
    view, copy = rb[:], rb[torch.arange(4)]
    rb.extend(torch.tensor([100]))
    assert view.tolist() == [100, 1, 2, 3]
    assert copy.tolist() == [0, 1, 2, 3]


def test_views_outlive_the_buffer() -> None:
    for storage in TENSORS:
        rb = buffer(storage, 4)
        rb.extend(torch.arange(4))
        view = rb[:]
        del rb
        gc.collect()
        assert view.tolist() == [0, 1, 2, 3]


def test_never_written_slots_are_never_read() -> None:
    """Memory is poisoned through the storage's own columns before most of it is written."""
    for storage in TENSORS:
        rb = buffer(storage, 64, batch_size=64)
        rb.add(table(torch.tensor(0)))
        for column in rb.storage.columns.values():  # type: ignore[attr-defined]
            column[1:].fill_(float("nan") if column.dtype.is_floating_point else 1)
        for step in range(1, 9):
            rb.add(table(torch.tensor(step)))
            assert set(read_ids(rb.sample())) <= set(range(step + 1))
            assert read_ids(rb[:]) == list(range(step + 1))
            assert read_ids(rb.read_all_in_order()) == list(range(step + 1))


def test_the_memory_of_an_emptied_buffer_is_kept() -> None:
    rb = buffer("packed", 64)
    fill(rb, range(5))
    address = rb["obs"].data_ptr()
    rb.empty()
    fill(rb, range(3))
    assert rb["obs"].data_ptr() == address


def test_bytes_are_reported_for_the_whole_capacity() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, packed=False))
    assert rb.stats().nbytes == 0
    rb.extend({"x": torch.zeros(1, 100), "y": torch.zeros(1, dtype=torch.int64)})
    assert rb.stats().nbytes == 1000 * 408
    assert "bytes=408.0 kB" in repr(rb.storage)


# -- dropped buffers --------------------------------------------------------------------------------------------------


def big_memory() -> set[int]:
    """Return the addresses of all memory of 100 kB or more that tensors hold."""
    found = set()
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.is_cpu and thing.layout is torch.strided and not thing.is_nested:
            memory = thing.untyped_storage()
            if memory.nbytes() >= 100_000:
                found.add(memory.data_ptr())
    return found


def transitions(count: int = 20) -> dict[str, Any]:
    done = torch.arange(count) % 5 == 4
    return {"obs": torch.randn(count, 3), "reward": torch.randn(count), "done": done}


def lazy(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(50_000, **options)


def members() -> ReplayBufferEnsemble:
    rbs = [ReplayBuffer(storage=lazy()) for _ in range(2)]
    for rb in rbs:
        rb.extend(transitions())
    return ReplayBufferEnsemble(*rbs, batch_size=4, prefetch=2)


DROPPED: dict[str, Callable[[], Any]] = {
    "private": lambda: ReplayBuffer(storage=lazy(), batch_size=4),
    "unpacked": lambda: ReplayBuffer(storage=lazy(packed=False), batch_size=4),
    "memmap": lambda: ReplayBuffer(storage=LazyMemmapStorage(50_000), batch_size=4),
    "prefetch": lambda: ReplayBuffer(storage=lazy(), batch_size=4, prefetch=3),
    "rate limiter": lambda: ReplayBuffer(storage=lazy(), batch_size=4, prefetch=1, rate_limiter=RateLimiter()),
    "queue": lambda: ReplayBuffer(storage=lazy(), sampler=QueueSampler(), batch_size=4),
    "prioritized": lambda: PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=lazy(), batch_size=4, prefetch=1),
    "units": lambda: ReplayBuffer(
        storage=lazy(), batch_size=4, sample_unit=NStep(2, 0.9, next_keys=["done"]), episodes=Episodes(end_key="done")
    ),
    "slices": lambda: ReplayBuffer(storage=lazy(), sampler=SliceSampler(num_slices=2, end_key="done"), batch_size=4),
    "without replacement": lambda: ReplayBuffer(storage=lazy(), sampler=SamplerWithoutReplacement(), batch_size=4),
    "single copy": lambda: ReplayBuffer(storage=lazy(single_copy={"next": "obs"}), batch_size=4),
    "ensemble": members,
    "shared": lambda: ReplayBuffer(storage=lazy(), batch_size=4, shared=True, prefetch=1),
    "shared prioritized": lambda: ReplayBuffer(
        storage=lazy(), sampler=PrioritizedSampler(50_000, 0.6, 0.4), batch_size=4, shared=True
    ),
}


def use(rb: Any, name: str, path: Path) -> None:
    """Write, sample, save and load."""
    if name != "ensemble":
        rows = transitions()
        rb.extend({**rows, "next": rows["obs"].roll(-1, 0)} if name == "single copy" else rows)
    rb.sample()
    rb.load_state_dict(rb.state_dict())
    rb.dumps(path / "saved")
    rb.loads(path / "saved")
    rb.append_transform(lambda batch: batch)
    rb.sample()
    with contextlib.suppress(OptionError, SchemaError, TypeError):
        (rb[0] if name == "ensemble" else rb).extend({"other": 1})


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_buffer_lets_its_memory_go_without_the_garbage_collector(name: str, tmp_path: Path) -> None:
    if name.startswith("shared") and (backend.native is None or sys.platform != "linux"):
        pytest.skip("shared buffers need the compiled extension and Linux")
    gc.collect()
    before = big_memory()
    gc.disable()
    try:
        rb = DROPPED[name]()
        use(rb, name, tmp_path)
        parts = [weakref.ref(rb), weakref.ref(rb.storage[0] if name == "ensemble" else rb.storage)]
        assert big_memory() - before or name == "memmap"
        del rb
        until = time.monotonic() + 10
        while any(part() is not None for part in parts) and time.monotonic() < until:
            time.sleep(0.005)  # the prefetch thread may be making a batch still
        assert [part() for part in parts] == [None, None]
        assert not big_memory() - before
    finally:
        gc.enable()
