"""rlox: ring buffers in Rust; numpy arrays and Python scalars go in, dicts of numpy arrays come out.

Its rows have six columns fixed in advance, 166 bytes a row: `obs`, `next_obs` and `actions` are vectors of float32,
`rewards` float32, `terminated` and `truncated` one byte each. There are no other fields, shapes or dtypes. Batches
hold no indices (prioritized ones do); the caller passes a new seed to each `sample`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as installed
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import data
from benchmarks.peers._episodes import EPISODE, SLICE, WRITTEN, episodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

_OWN_KIND = "one kind of batch only, see dict"
LACKS = dict.fromkeys(("uniform", "extend", "add", "prioritized", "slices", "slices-writing"), _OWN_KIND) | {
    "prioritized-rows": "sizes are compared for Ostinato alone",
    "prioritized-threads": "threads are compared for Ostinato alone",
    "priority-update": "sizes are compared for Ostinato alone",
    "slices-rows": "sizes are compared for Ostinato alone",
    "images": "vectors of float32 only",
    "trajectories": "no rollouts in files",
    "checkpoint": "compared with plain writes and reads",
    "dataset": "no videos",
    "amp": "no sampling without replacement",
    "start": "not timed: its import brings a whole training library",
    **dict.fromkeys(("uniform-out", "images-out"), "no batch that it could fill"),
    **dict.fromkeys(("threads", "latency"), "not documented for threads"),
    **dict.fromkeys(("n-step", "frame-stack", "single-copy", "shared"), "compared with Ostinato's plain samples"),
}


def version() -> str:
    """Return the library's version."""
    import_module("rlox")
    return installed("rlox")


def _buffer(kind: str, setup: Setup, **options: float) -> Any:
    # By name, so that type checking does not need the peer.
    return getattr(import_module("rlox"), kind)(setup.rows, data.OBS, data.ACTION, **options)


def _columns(rows: Rows) -> tuple[Any, ...]:
    """Return a batch as `push_batch` takes it: flat arrays, flags as bytes."""
    flags = rows["done"].view(np.uint8)
    vectors = (rows[key].reshape(-1) for key in ("obs", "next_obs", "action"))
    return (*vectors, rows["reward"], flags, np.zeros_like(flags))


def _full(setup: Setup) -> Any:
    buffer = _buffer("ReplayBuffer", setup)
    for rows in data.chunks(data.transitions, setup.rows, 10_000):
        buffer.push_batch(*_columns(rows))
    return buffer


def uniform(setup: Setup) -> Call:
    """Sample transitions uniformly."""
    buffer, seeds = _full(setup), count()
    return lambda: buffer.sample(setup.batch, next(seeds))


def prioritized(setup: Setup) -> Call:
    """Sample transitions by priority, and give them new ones."""
    rng = np.random.default_rng(0)
    buffer = _buffer("PrioritizedReplayBuffer", setup, alpha=0.6, beta=0.4)
    obs, action, reward, next_obs, done = data.step(data.transitions(1))
    for _ in range(setup.rows):  # it has no `push_batch`
        buffer.push(obs, action, reward, done, False, next_obs)
    buffer.update_priorities(np.arange(setup.rows, dtype=np.uint64), rng.random(setup.rows))
    new, seeds = cycle(list(rng.random((256, setup.batch)))), count()

    def call() -> None:
        batch = buffer.sample(setup.batch, next(seeds))
        buffer.update_priorities(batch["indices"], next(new))

    return call


def extend(setup: Setup) -> Call:
    """Write batches of transitions that have its layout already."""
    buffer = _full(setup)
    batches = cycle([_columns(rows) for rows in data.pool(data.transitions, setup.batch)])
    return lambda: buffer.push_batch(*next(batches))


def extend_numpy(setup: Setup) -> Call:
    """Write batches of transitions as environments return them: the call flattens them."""
    buffer, batches = _full(setup), cycle(data.pool(data.transitions, setup.batch))
    return lambda: buffer.push_batch(*_columns(next(batches)))


def add(setup: Setup) -> Call:
    """Write single transitions."""
    buffer = _full(setup)
    steps = cycle([data.step(rows) for rows in data.pool(data.transitions, 1)])

    def call() -> None:
        obs, action, reward, next_obs, done = next(steps)
        buffer.push(obs, action, reward, done, False, next_obs)

    return call


def _sequences(setup: Setup) -> Any:
    buffer = _buffer("SequenceReplayBuffer", setup)
    obs, action, reward, next_obs, _ = data.step(data.transitions(1))
    for step in range(1, setup.rows + 1):
        buffer.push(obs, next_obs, action, reward, step % EPISODE == 0, False)
    return buffer


def slices(setup: Setup) -> Call:
    """Draw slices of complete episodes."""
    buffer, seeds = _sequences(setup), count()
    return lambda: buffer.sample_sequences(setup.batch // SLICE, SLICE, next(seeds))


def slices_writing(setup: Setup) -> Call:
    """Write rows one at a time, its only way in this buffer, and draw slices."""
    buffer, seeds = _sequences(setup), count()
    batches = cycle([_steps(episodes(WRITTEN, seed)) for seed in range(data.POOL)])

    def call() -> None:
        for step in next(batches):
            buffer.push(*step)
        buffer.sample_sequences(setup.batch // SLICE, SLICE, next(seeds))

    return call


def _steps(rows: Rows) -> list[tuple[Any, ...]]:
    columns = (rows["obs"], rows["next_obs"], rows["action"], rows["reward"].tolist(), rows["done"].tolist())
    return [(*step, False) for step in zip(*columns, strict=True)]


def mmap(setup: Setup) -> Call:
    """Write and sample; the newest rows are in memory, the others in a mapped file."""
    path = str(setup.directory / "rows")
    buffer = import_module("rlox").MmapReplayBuffer(setup.rows // 100, setup.rows, data.OBS, data.ACTION, path)
    for rows in data.chunks(data.transitions, setup.rows, 10_000):
        buffer.push_batch(*_mapped_columns(rows))
    batches = cycle([_mapped_columns(rows) for rows in data.pool(data.transitions, setup.batch)])
    seeds = count()

    def call() -> None:
        buffer.push_batch(*next(batches))
        buffer.sample(setup.batch, next(seeds))

    return call


def _mapped_columns(rows: Rows) -> tuple[Any, ...]:
    """Return a batch as the mapped buffer takes it: flags are float32."""
    *vectors, flags, truncated = _columns(rows)
    return (*vectors, flags.astype(np.float32), truncated.astype(np.float32))


WORKLOADS: dict[str, Callable[[Setup], Call]] = {
    "uniform.dict": uniform,
    "prioritized.dict": prioritized,
    "extend.dict": extend,
    "extend.numpy": extend_numpy,
    "add.dict": add,
    "add.numpy": add,
    "mmap.dict": mmap,
    "slices.dict": slices,
    "slices-writing.dict": slices_writing,
}
