"""The rows that every library stores: numpy arrays, so that no library is needed to make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

Rows: TypeAlias = "dict[str, NDArray[np.generic]]"

OBS = 17
ACTION = 6
AMP_OBS = 64
FRAME = (84, 84, 4)
POOL = 16
DONE_SHARE = 0.01


def transitions(count: int, seed: int = 0) -> Rows:
    """Return `count` rows of a small control task: 165 bytes a row in five fields."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.standard_normal((count, OBS), dtype=np.float32),
        "action": rng.standard_normal((count, ACTION), dtype=np.float32),
        "reward": rng.standard_normal(count, dtype=np.float32),
        "next_obs": rng.standard_normal((count, OBS), dtype=np.float32),
        "done": rng.random(count) < DONE_SHARE,
    }


def frames(count: int, seed: int = 0) -> Rows:
    """Return `count` rows of two stacks of Atari frames: 56,448 bytes a row."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.integers(0, 256, (count, *FRAME), dtype=np.uint8),
        "next_obs": rng.integers(0, 256, (count, *FRAME), dtype=np.uint8),
    }


def amp(count: int, seed: int = 0) -> Rows:
    """Return `count` rows of AMP observations: 256 bytes a row in one field."""
    return {"amp_obs": np.random.default_rng(seed).standard_normal((count, AMP_OBS), dtype=np.float32)}


def chunks(make: Callable[[int], Rows], rows: int, chunk: int) -> Iterator[Rows]:
    """Yield `rows` rows in chunks to fill a buffer; the values repeat, as they do not change any speed."""
    full = make(min(chunk, rows))
    for start in range(0, rows, chunk):
        size = min(chunk, rows - start)
        yield full if size == chunk else {key: value[:size] for key, value in full.items()}


def pool(make: Callable[[int, int], Rows], count: int) -> list[Rows]:
    """Return different batches of `count` rows to write in turn, as a collector would bring them."""
    return [make(count, seed) for seed in range(1, POOL + 1)]


def step(rows: Rows) -> tuple[Any, Any, float, Any, bool]:
    """Return row 0 as a loop of one environment has it: obs, action, reward, next_obs, done, scalars of Python."""
    return rows["obs"][0], rows["action"][0], float(rows["reward"][0]), rows["next_obs"][0], bool(rows["done"][0])


def first_row(rows: Rows) -> Rows:
    """Return row 0 without its batch dimension; scalars become 0-dimensional arrays."""
    return {key: np.asarray(value[0]) for key, value in rows.items()}
