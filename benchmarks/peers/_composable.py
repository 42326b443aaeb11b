"""The workloads in TorchRL's words: the same lines measure TorchRL and Ostinato, only the import differs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from benchmarks import data
from benchmarks.adapter import KINDS
from benchmarks.peers._start import importing, program
from benchmarks.peers._torch import as_item, as_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.adapter import Call, Setup
    from benchmarks.data import Rows

MILLION = 1_000_000
_FIRST_BATCH = """
import torch
from {module} import LazyTensorStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=256)
buffer.extend({{"obs": torch.zeros(1000, 17), "reward": torch.zeros(1000)}})
buffer.sample()
"""


def workloads(module: str) -> dict[str, Callable[[Setup], Call]]:
    """Return the table of an adapter for a module that has TorchRL's names."""
    both = {
        "uniform": uniform,
        "prioritized": prioritized,
        "extend": extend,
        "add": add,
        "images": images,
        "mmap": mmap,
        "amp": amp,
    }
    table: dict[str, Callable[[Setup], Call]] = {
        f"{family}.{kind}": partial(prepare, module) for family, prepare in both.items() for kind in KINDS
    }
    table |= {"extend.numpy": partial(extend_numpy, module), "add.numpy": partial(add_numpy, module)}
    for rows in ("1e4", "1e5", "1e7"):
        table[f"prioritized-rows.{rows}"] = lambda setup: prioritized(module, replace(setup, kind="dict"))
    table["start.import"] = lambda _setup: importing(module, "LazyTensorStorage, ReplayBuffer")
    table["start.first-batch"] = lambda _setup: program(_FIRST_BATCH.format(module=module))
    return table


def _parts(module: str) -> Any:
    # By name, so that type checking does not need the peer.
    return import_module(module)


def filled(module: str, setup: Setup, make: Callable[[int], Rows], *, storage: Any = None, sampler: Any = None) -> Any:
    """Return a full buffer."""
    parts = _parts(module)
    storage = parts.LazyTensorStorage(setup.rows) if storage is None else storage
    made = parts.TensorDictReplayBuffer if setup.kind == "tdbuffer" else parts.ReplayBuffer
    buffer = made(storage=storage, sampler=sampler, batch_size=setup.batch)
    for rows in data.chunks(make, setup.rows, 500 if make is data.frames else 10_000):
        buffer.extend(as_kind(rows, setup.kind))
    return buffer


def _batches(setup: Setup, make: Callable[[int, int], Rows]) -> Iterator[Any]:
    return cycle([as_kind(rows, setup.kind) for rows in data.pool(make, setup.batch)])


def _write_and_read(buffer: Any, batches: Iterator[Any]) -> Call:
    def call() -> None:
        buffer.extend(next(batches))
        buffer.sample()

    return call


def uniform(module: str, setup: Setup) -> Call:
    """Sample transitions uniformly."""
    call: Call = filled(module, setup, data.transitions).sample
    return call


def prioritized(module: str, setup: Setup) -> Call:
    """Sample transitions by priority, and give them new ones.

    Ostinato's updates carry the rows' stamps, so that none can land on a row that was overwritten since.
    """
    sampler = _parts(module).PrioritizedSampler(setup.rows, alpha=0.6, beta=0.4)
    buffer = filled(module, setup, data.transitions, sampler=sampler)
    for start in range(0, setup.rows, MILLION):
        index = torch.arange(start, min(start + MILLION, setup.rows))
        buffer.update_priority(index, torch.rand(index.shape[0]))
    new = cycle(torch.rand(256, setup.batch).unbind(0))
    if setup.kind == "tdbuffer":
        return lambda: _learn(buffer, next(new))
    checked = module == "ostinato"

    def call() -> None:
        _, info = buffer.sample(return_info=True)
        buffer.update_priority(info if checked else info["index"], next(new))

    return call


def _learn(buffer: Any, errors: torch.Tensor) -> None:
    batch = buffer.sample()
    batch["td_error"] = errors
    buffer.update_tensordict_priority(batch)


def images(module: str, setup: Setup) -> Call:
    """Sample frames uniformly."""
    call: Call = filled(module, setup, data.frames).sample
    return call


def extend(module: str, setup: Setup) -> Call:
    """Write batches of transitions."""
    buffer, batches = filled(module, setup, data.transitions), _batches(setup, data.transitions)
    return lambda: buffer.extend(next(batches))


def add(module: str, setup: Setup) -> Call:
    """Write single transitions."""
    buffer = filled(module, setup, data.transitions)
    items = cycle([as_item(rows, setup.kind) for rows in data.pool(data.transitions, 1)])
    return lambda: buffer.add(next(items))


def extend_numpy(module: str, setup: Setup) -> Call:
    """Write batches of arrays: in a dict, or for TorchRL in a TensorDict, which makes tensors of them."""
    buffer = filled(module, _numpy_in(module, setup), data.transitions)
    batches = cycle(data.pool(data.transitions, setup.batch))
    if module == "ostinato":
        return lambda: buffer.extend(next(batches))
    return lambda: buffer.extend(TensorDict(next(batches), [setup.batch]))


def add_numpy(module: str, setup: Setup) -> Call:
    """Write single transitions of arrays and Python scalars; the call also makes the dict or TensorDict."""
    buffer = filled(module, _numpy_in(module, setup), data.transitions)
    steps = cycle([data.step(rows) for rows in data.pool(data.transitions, 1)])
    wrapped = module != "ostinato"

    def call() -> None:
        obs, action, reward, next_obs, done = next(steps)
        row = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "done": done}
        buffer.add(TensorDict(row, []) if wrapped else row)

    return call


def _numpy_in(module: str, setup: Setup) -> Setup:
    return replace(setup, kind="dict" if module == "ostinato" else "tensordict")


def mmap(module: str, setup: Setup) -> Call:
    """Write and samples memory-mapped transitions."""
    storage = _parts(module).LazyMemmapStorage(setup.rows, scratch_dir=str(setup.directory / "rows"))
    return _write_and_read(filled(module, setup, data.transitions, storage=storage), _batches(setup, data.transitions))


def amp(module: str, setup: Setup) -> Call:
    """Write AMP observations and samples without replacement."""
    buffer = filled(module, setup, data.amp, sampler=_parts(module).SamplerWithoutReplacement())
    return _write_and_read(buffer, _batches(setup, data.amp))
