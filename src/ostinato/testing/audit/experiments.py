"""The experiments of the audit: each fills a buffer in one way and yields what comes back wrong."""

from __future__ import annotations

import gc
import multiprocessing
import random
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.testing.audit.cases import ALPHA, BETA, Case, Stream
from ostinato.testing.audit.rows import Comparison, Problem, p_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostinato.testing.audit.adapter import Adapter, Feature
    from ostinato.testing.audit.cases import Array, Sample

ERROR_RATE = 1e-6
"""Probability that one test of a distribution reports a buffer that draws rightly."""
_BATCH = 32
_DRAWS_OF_EACH_ROW = 30
"""A row that can be drawn is missed with a probability of e^-30."""
_DRAWS_OF_A_TEST = 400
"""Draws of each row, on average, in a test of a distribution."""
_SAVE_TIMEOUT_S = 30


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, and restore them afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _fill(adapter: Adapter, case: Case) -> tuple[Any, Stream]:
    buffer, stream = adapter.make(case), Stream(case)
    for step in stream.steps(case.steps):
        adapter.add(buffer, step)
    return buffer, stream


def _compare(adapter: Adapter, case: Case, buffer: Any, stream: Stream, draws: int = _DRAWS_OF_EACH_ROW) -> Comparison:
    """Draw each row so often on average."""
    samples: list[Sample] = []
    rows = 0
    while rows < draws * case.capacity * case.num_envs * case.sequence:
        samples.append(adapter.sample(buffer, case, _BATCH))
        rows += samples[-1].rows
    return Comparison(case, stream, samples)


def _rows(adapter: Adapter, case: Case) -> Iterator[Problem]:
    """Whether each drawn row is one that was written, and each one can be drawn."""
    yield from _compare(adapter, case, *_fill(adapter, case)).problems()


def _uneven(found: Comparison, probability: Callable[[tuple[int, int]], float]) -> str:
    """Return how the draws of rows differ from these relative probabilities, in words; empty if they do not."""
    starts, counts = sorted(found.starts()), found.counts
    drawn, weights = [counts.get(start, 0) for start in starts], [probability(start) for start in starts]
    if not any(drawn):
        return f"none of {len(drawn)} rows is drawn"
    p = p_value(drawn, weights)
    rates = sorted(count * sum(weights) / weight / sum(drawn) for count, weight in zip(drawn, weights, strict=True))
    words = f"{len(rates)} rows are drawn {rates[0]:.2f} to {rates[-1]:.2f} times as often as is right (p = {p:.0e})"
    return words if p < ERROR_RATE else ""


def _equal(place: tuple[int, int]) -> float:  # noqa: ARG001
    return 1.0


def _unequal(place: tuple[int, int]) -> float:
    return 1.0 + sum(place) % 4


def _uniform(adapter: Adapter, case: Case) -> Iterator[Problem]:
    """Whether rows have equal probabilities."""
    words = _uneven(_compare(adapter, case, *_fill(adapter, case), _DRAWS_OF_A_TEST), _equal)
    if words:
        yield Problem("not-uniform", words)


def _priorities(adapter: Adapter, case: Case) -> Iterator[Problem]:
    """Whether rows are drawn in proportion to priority ** ALPHA, with weights in proportion to probability ** -BETA."""
    buffer, stream = _fill(adapter, case)
    for _ in range(60):
        sample = adapter.sample(buffer, case, _BATCH)
        adapter.prioritize(buffer, sample, _priorities_of(sample, stream))
    found = _compare(adapter, case, buffer, stream, _DRAWS_OF_A_TEST)
    words = _uneven(found, lambda place: _unequal(place) ** ALPHA)
    if words:
        yield Problem("priority-probability", words)
    sample = adapter.sample(buffer, case, _BATCH)
    constant = np.asarray(sample.weight).reshape(-1) * _priorities_of(sample, stream) ** (ALPHA * BETA)
    if constant.max() > 1.001 * constant.min():
        words = f"weight * probability ** {BETA} is {constant.min():.3g} to {constant.max():.3g} in one batch"
        yield Problem("importance-weight", f"{words}, and equal is right")


def _priorities_of(sample: Sample, stream: Stream) -> Array:
    places = [stream.find(row) or (0, 0) for row in np.asarray(sample.obs).reshape(sample.rows, -1)]
    return np.array([_unequal(place) for place in places], np.float32)


def _stale_priorities(adapter: Adapter, case: Case) -> Iterator[Problem]:
    """Whether a priority reaches a row that was written after the draw."""
    buffer, stream = _fill(adapter, case)
    sample = adapter.sample(buffer, case, case.capacity // 2)
    for step in stream.steps(case.capacity):
        adapter.add(buffer, step)
    adapter.prioritize(buffer, sample, np.full(sample.rows, 100.0, np.float32))
    words = _uneven(_compare(adapter, case, buffer, stream, _DRAWS_OF_A_TEST), _equal)
    if words:
        yield Problem("stale-priority", f"after an update for rows that were replaced since, {words}")


def _saving(adapter: Adapter, case: Case) -> Iterator[Problem]:
    """Whether a loaded buffer draws and continues as the saved one, and a save that fails leaves the earlier one."""
    with tempfile.TemporaryDirectory(prefix="ostinato-audit-") as folder:
        path = Path(folder) / "saved"
        buffer, stream = _fill(adapter, case)
        adapter.save(buffer, path)
        error = _load_error(adapter, case, path)
        if error:
            yield Problem("state-lost", f"a loaded buffer raises {error}")
            return
        yield from _continued(adapter, case, buffer, stream, adapter.load(case, path))
        if "fork" not in multiprocessing.get_all_start_methods():  # no file-size limits either
            return
        largest = max(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
        process = multiprocessing.get_context("fork").Process(
            target=_save_in_part, args=(adapter, case, path, largest // 2)
        )
        process.start()
        process.join(_SAVE_TIMEOUT_S)
        process.kill()
        process.join()
        error = _load_error(adapter, case, path)
        if error:
            yield Problem("checkpoint-lost", f"after a later save that failed for lack of space, a load raises {error}")


def _load_error(adapter: Adapter, case: Case, path: Path) -> str:
    """Return the error of a load and a draw, in words; empty if there is none."""
    try:
        adapter.sample(adapter.load(case, path), case, _BATCH)
    except Exception as error:  # noqa: BLE001 (of a library that is not known)
        return _line(error)
    return ""


def _continued(adapter: Adapter, case: Case, saved: Any, stream: Stream, loaded: Any) -> Iterator[Problem]:
    """Yield the first problem that only the loaded buffer has: at once, or after more rows were written to both."""
    with seeded(1):
        expected = np.asarray(adapter.sample(saved, case, _BATCH).reward)
    with seeded(1):
        same = np.array_equal(np.asarray(adapter.sample(loaded, case, _BATCH).reward), expected)
    for count in (0, case.capacity - 1):
        for step in stream.steps(count):
            adapter.add(saved, step)
            adapter.add(loaded, step)
        usual = {problem.kind for problem in _compare(adapter, case, saved, stream).problems()}
        for problem in _compare(adapter, case, loaded, stream).problems():
            if problem.kind not in usual:
                yield Problem("state-lost", f"after a load, {problem.message}")
                return
    if not same:
        yield Problem("draws-changed", "with the same seed, a loaded buffer draws other rows")


def _save_in_part(adapter: Adapter, case: Case, path: Path, limit: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    buffer, _ = _fill(adapter, replace(case, steps=case.steps + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with suppress(Exception):
        adapter.save(buffer, path)


def memory_ratio(adapter: Adapter) -> float:
    """Return the memory of a full buffer of pictures, divided by the bytes of its observations, each counted once."""
    return _held_bytes(_fill(adapter, MEMORY)[0]) / (MEMORY.capacity * int(np.prod(MEMORY.shape)))


def _held_bytes(root: Any) -> int:
    """Return the size of all arrays, tensors and bytes that an object refers to."""
    sizes: dict[int, int] = {}
    seen, queue = set(), [root]
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, np.ndarray) and isinstance(each.base, np.ndarray):
            queue.append(each.base)
        elif isinstance(each, bytes):
            sizes[id(each)] = len(each)
        elif isinstance(getattr(each, "nbytes", None), int):  # NumPy's and JAX's arrays
            sizes[id(each)] = each.nbytes
        else:
            queue += gc.get_referents(each)
    return sum(sizes.values())


@dataclass(frozen=True)
class Experiment:
    """One way to fill a buffer, with the cases that are tried."""

    name: str
    run: Callable[[Adapter, Case], Iterator[Problem]]
    cases: tuple[Case, ...]
    needs: Feature | None = None
    """The feature of adapters without which it is left out."""
    shrinks: bool = False
    """Whether a smaller case is looked for."""

    def problems(self, adapter: Adapter, case: Case) -> list[Problem]:
        """Return what comes back wrong; an error that the buffer raises is one problem."""
        try:
            with seeded(0):
                return list(self.run(adapter, case))
        except Exception as error:  # noqa: BLE001 (of a library that is not known)
            return [Problem("raises", f"raises {_line(error)}")]


def _line(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 120)


MEMORY = Case(capacity=256, steps=256, episode=64, shape=(3, 64, 64), dtype="uint8")
"""The case in which memory is measured."""
_FULL = Case(capacity=10, steps=33, num_envs=2)
_ALONE = Case(capacity=20, steps=53, prioritized=True)
"""One environment: prioritized buffers may not know several."""


def _cases(case: Case) -> tuple[Case, ...]:
    """Return cases in which a ring of 7 is not full, just full, and wrapped in the middle and at ends of episodes."""
    return tuple(replace(case, steps=steps, num_envs=envs) for steps in (5, 7, 16, 17, 18) for envs in (1, 2))


EXPERIMENTS = (
    Experiment("transitions", _rows, _cases(Case()) + _cases(Case(dtype="uint8")), shrinks=True),
    Experiment("n-step", _rows, _cases(Case(n_steps=3, episode=4)), "n_step", shrinks=True),
    Experiment("sequences", _rows, _cases(Case(sequence=3, episode=4)), "sequence", shrinks=True),
    Experiment("uniform", _uniform, (replace(_ALONE, prioritized=False), _FULL)),
    Experiment("priorities", _priorities, (_ALONE, replace(_FULL, prioritized=True)), "priority"),
    Experiment("stale priorities", _stale_priorities, (_ALONE,), "priority"),
    Experiment("saving", _saving, (Case(capacity=4, steps=6, episode=2),), "save"),
)
