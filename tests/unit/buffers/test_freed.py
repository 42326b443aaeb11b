"""A buffer that is dropped is freed at once and leaves no garbage: memory, files, segments and descriptors."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import (
    FrameStack,
    LazyMemmapStorage,
    LazyTensorStorage,
    QueueSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from ostinato._backend import backend as used_backend
from ostinato.errors import OstinatoError

from ...registry import BUFFERS
from ...registry import rows as combined

SIZE = 2000
"""Rows of a buffer: their memory and that of the priorities is big."""


def plain(**options: Any) -> ReplayBuffer:
    return TensorDictReplayBuffer(**{"storage": LazyTensorStorage(SIZE), "batch_size": 4, **options})


def ensemble(**options: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(plain(), BUFFERS["PrioritizedSampler"](SIZE), **options)


def view(capacity: int) -> ReplayBuffer:
    return plain().view(sampler=BUFFERS["PrioritizedSampler"](capacity).sampler, prefetch=2)


REGISTERED = ["storage ListStorage", "PrioritizedSampler", "prefetch, PrioritizedSampler"]
REGISTERED += ["SamplerWithoutReplacement", "SliceSampler", "QueueSampler", "HeapSampler, max_times_sampled", "remover"]
REGISTERED += ["unit NStep", "unit FrameStack"]
REGISTERED += [f"storage LazyTensorStorage, {option}" for option in ("single_copy", "ndim=2", "codec")]
REGISTERED += ["storage LazyMemmapStorage"]
MADE: dict[str, Any] = {
    **{name: BUFFERS[name] for name in REGISTERED},
    "transform ahead": lambda n: plain(prefetch=2, transform=lambda data: data),
    "windows ahead": lambda n: plain(sample_unit=FrameStack(2, ["obs"]), prefetch=1),
    "files ahead": lambda n: plain(storage=LazyMemmapStorage(n), prefetch=2),
    "queue ahead": lambda n: plain(sampler=QueueSampler(), prefetch=2, rate_limiter=RateLimiter(timeout_s=0.0)),
    "delayed": lambda n: plain(transform_factory=lambda: lambda data: data),
    "view ahead": view,
    "ensemble": lambda n: ensemble(batch_size=4),
    "ensemble ahead": lambda n: ensemble(batch_size=4, prefetch=2),
    "shared": lambda n: plain(shared=True),
    "shared ahead": lambda n: plain(shared=True, prefetch=2),
    "shared prioritized": lambda n: plain(shared=True, sampler=BUFFERS["PrioritizedSampler"](n).sampler),
}
"""Makers of empty buffers of a capacity; `ahead` in a name: a thread makes batches."""


def rows(rb: Any) -> Any:
    return combined(12 // rb.storage.ndim, 0, rb.storage.ndim)


def write(rb: Any, _: Path) -> None:
    for member in [rb[0], rb[1]] if isinstance(rb, ReplayBufferEnsemble) else [rb]:
        member.extend(rows(member))


def draw(rb: Any, path: Path) -> None:
    write(rb, path)
    for _ in range(3):
        _, info = rb.sample(return_info=True)
    if not isinstance(rb, ReplayBufferEnsemble) and rb.sampler.prioritized:
        rb.update_priority(info["index"], 1.0)
    rb.stats()


def iterate(rb: Any, path: Path) -> None:
    write(rb, path)
    next(iter(rb))
    write(rb, path)
    rb.next()


def save(rb: Any, path: Path) -> None:
    draw(rb, path)
    rb.dumps(path / "saved")
    rb.loads(path / "saved")


def fail(rb: Any, path: Path) -> None:
    """Errors of calls, and of batches and updates that are made in a thread."""
    draw(rb, path)
    with pytest.raises((OstinatoError, TypeError, KeyError, ValueError)):
        rb.extend("no rows")
    rb.append_transform(raise_error)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="of the transform"):
            rb.sample()
    if not isinstance(rb, ReplayBufferEnsemble):
        rb.submit_update_if_present(index=torch.zeros(1, dtype=torch.int64), generation=torch.ones(3), patch={"x": 1})
        with pytest.raises((OstinatoError, RuntimeError)):
            rb.synchronize()


def raise_error(_: Any) -> Any:
    raise RuntimeError("of the transform")


def share(rb: Any, path: Path) -> None:
    draw(rb, path)
    rb.share()
    rb.sample()


def close(rb: Any, path: Path) -> None:
    with rb:
        draw(rb, path)
    rb.empty()
    rb.shutdown()


def held() -> tuple[int, int]:
    """Return open descriptors, and mapped files and segments."""
    if sys.platform != "linux":
        return 0, 0
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("ostinato" in line or "memfd" in line for line in lines)


def big_memory() -> set[int]:
    """Return the addresses of all memory of 15 kB or more that tensors hold."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.is_cpu]
    memory = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    return {one.data_ptr() for one in memory if one.nbytes() >= 15_000}


def parts_of(rb: Any) -> list[weakref.ref[Any]]:
    buffers = [rb, rb[0], rb[1]] if isinstance(rb, ReplayBufferEnsemble) else [rb, *filter(None, [rb._viewed])]
    parts = []
    for found in buffers:
        parts += [found._engine, found._pipeline, found.storage, found.sampler, found.writer]
    return [weakref.ref(part) for part in (*buffers, *parts)]


def gone(refs: list[weakref.ref[Any]], before: tuple[int, int], *, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while True:
        left = [ref for ref in refs if ref() is not None]
        if not left and held() <= before:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.01)


@pytest.mark.parametrize("name", MADE)
def test_a_dropped_buffer_is_freed_at_once(name, tmp_path):
    if name.startswith("shared") and used_backend.native is None:
        pytest.skip("sharing needs the native extension")
    ahead = "ahead" in name or "prefetch" in name
    gc.collect()
    memory = big_memory()
    gc.disable()
    try:
        for use in (draw, iterate, save, fail, share, close):
            before = held()
            rb = MADE[name](SIZE)
            refs = parts_of(rb)
            try:
                use(rb, tmp_path / use.__name__)
            except OstinatoError:  # these parts do not do this: they are freed after the error as well
                pass
            except AttributeError:
                assert use is share
            folder = getattr(rb.storage, "scratch_dir", None)
            del rb
            # batches that the thread is making hold the buffer until they are made
            assert gone(refs, before, within_s=60.0 if ahead else 0.0), (use, [ref() for ref in refs])
            assert folder is None or not Path(folder).exists()
        assert not big_memory() - memory
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [one for one in gc.garbage if type(one).__module__.startswith("ostinato")]
        # threads of other tests may end now
        assert not [one for one in left if not type(one).__module__.startswith("ostinato.distributed")]
        assert not [one.shape for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_errors_of_the_thread_say_where_they_come_from():
    rb = plain(prefetch=2)
    rb.extend(rows(rb))
    rb.append_transform(raise_error)
    with pytest.raises(RuntimeError, match="of the transform") as raised:
        rb.sample()
    names = [entry.name for entry in raised.traceback]
    assert names[-1] == "raise_error"
    assert "make_batch" in names
    assert raised.traceback[-1].frame.f_locals.keys() == {"_"}  # only frames of the package are cleared
