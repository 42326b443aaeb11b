"""Every supported combination, filled to a point, saved in one process and gone on with in another.

`python -m tests.crash.cells save FOLDER SAVE` reads `NUMBER:DRAWN ...` and prints a line for each case saved, which
says what came next; `... load FOLDER SAVE LOAD` reads these lines, loads, and prints what comes next there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ostinato import ReplayBufferEnsemble, ReservoirWriter, TensorDictReplayBuffer
from tests.combinations import CAPACITY, CELLS, COUNTING, LANES, SAMPLERS, STORAGES, UNITS, WRITERS, Cell, rows, spread
from tests.crash.kinds import KINDS, extend, fill, fingerprint, go_on, read_all, seeded
from tests.crash.modes import LOADS, SAVES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ostinato import Writer

BATCH = 9
BULK = 480
DRAWN, QUICK, FEWER = 10_000, 240, 100
"""Indices that are compared in each case of the whole product, in each case of `covering`, and in those of the latter
whose batches are small or made ahead."""
MANY = 5
"""Restarts of every `MANY_EVERY`th case; the others are restarted once after the load."""
MANY_EVERY = 23
AHEAD_EVERY = 5


def _writer(name: str) -> Writer:
    """Make a writer; one that draws gets a generator, as the buffer's is not its own."""
    made: Writer = ReservoirWriter(generator=seeded(3)) if name == "ReservoirWriter" else WRITERS[name]()
    return made


class Case(NamedTuple):
    """A combination, or a kind of buffer by name, at one fill, with or without batches made ahead."""

    cell: Cell | str
    offset: int
    """Steps written beyond what there is room for: -1, 0 or 1."""
    ahead: int
    """Batches made ahead."""

    def make(self) -> Any:
        """Make the empty buffer."""
        cell = self.cell
        if isinstance(cell, str):
            return KINDS[cell]()
        return TensorDictReplayBuffer(
            storage=STORAGES[cell.storage](),
            sampler=SAMPLERS[cell.sampler](),
            writer=_writer(cell.writer),
            sample_unit=UNITS[cell.unit](),
            batch_size=BATCH,
            prefetch=self.ahead or None,
            dim_extend=0,
            generator=seeded(),
        )

    def filled(self) -> Any:
        """Make the buffer, fill it, and sample until it is in the middle of things."""
        if isinstance(self.cell, str):
            return fill(self.make())
        fixed = self.cell.writer == "ImmutableDatasetWriter"
        rb = (self._replace(cell=Cell(**{**vars(self.cell), "writer": "RoundRobinWriter"})) if fixed else self).make()
        steps = CAPACITY // self._lanes + self.offset
        for start in range(0, steps, 8):
            rb.extend(rows(min(8, steps - start), start, self._lanes))
        if fixed:
            rb.set_writer(_writer(self.cell.writer))
        self._learn(rb, 3)
        return rb

    @property
    def _lanes(self) -> int:
        return LANES if isinstance(self.cell, Cell) and "ndim=2" in self.cell.storage else 1

    @property
    def slow(self) -> bool:
        """Whether ten thousand draws take long: passes give small batches, lists are stacked row by row."""
        cell = self.cell
        if isinstance(cell, str):
            return "ahead" in cell or cell == "ensemble"
        return bool(self.ahead) or "Without" in cell.sampler or cell.storage == "ListStorage"

    def next(self, rb: Any, drawn: int) -> dict[str, Any]:
        """Go on and say what came: indices, weights, and all rows, where no batch was made ahead of a write."""
        if isinstance(self.cell, str):
            seen, count = self._kind(rb, drawn), drawn
        else:
            seen = self._learn(rb, 4)
            if not self.ahead and rb.writer.mutable:
                rb.extend(rows(5, 100, self._lanes))
                seen += self._learn(rb, 4)
            count = sum(item[0].shape[0] for item in seen)
            while count < drawn:
                seen.append(self._drawn(rb, None if self.ahead else BULK))
                count += seen[-1][0].shape[0]
        return {"next": fingerprint(seen), "drawn": count}

    def _kind(self, rb: Any, drawn: int) -> list[Any]:
        ahead = "ahead" in str(self.cell)
        size, alone = rb.batch_size, isinstance(rb, ReplayBufferEnsemble) or ahead
        seen = go_on(rb, 5)
        if not ahead:
            extend(rb, 200, 6)
            seen += go_on(rb, 5)
        return seen + [rb.sample(None if alone else BULK) for _ in range(drawn // (size if alone else BULK) + 1)]

    def _learn(self, rb: Any, draws: int) -> list[Any]:
        seen = []
        for _ in range(draws):
            seen.append(self._drawn(rb, None))
            if rb.sampler.prioritized:
                index = seen[-1][0]
                rb.update_priority(index, (index.reshape(index.shape[0], -1)[:, 0] % 5 + 1).double())
        return seen

    def _drawn(self, rb: Any, size: int | None) -> tuple[Any, ...]:
        batch, info = rb.sample(size, return_info=True)
        index = info["index"]
        index = torch.stack(index, 1) if isinstance(index, tuple) else index
        for key in ("index_generation", "anchor_generation"):
            batch.pop(key, None)  # a load into rows begins a new era, which these contain
        return index, info.get("priority_weight"), None if self.ahead else batch


BOUNDED = {*COUNTING, "StackSampler", "HeapSampler"}
"""Samplers that use rows up or draw no row twice in a batch, so that ten thousand cannot be drawn at once:
`test_rate_limit.py` and `test_ranked.py` have theirs."""
SUPPORTED = [cell for cell in CELLS if cell.refusal is None and cell.sampler not in BOUNDED]
CASES = [
    *(Case(cell, offset, ahead) for cell in SUPPORTED for offset in (-1, 0, 1) for ahead in (0, 2)),
    *(Case(kind, 1, 0) for kind in KINDS),
]


def covering(every: int = 1) -> list[tuple[int, int]]:
    """Return cases, and indices to draw, that hold one in `every` combinations, at fills in turn, some made ahead.

    All pairs of parts are still there.
    """
    kept = set(spread(SUPPORTED, every))
    cells = [number for number, cell in enumerate(SUPPORTED) if cell in kept]
    chosen = [6 * number + 2 * (i % 3) + (i % AHEAD_EVERY == 0) for i, number in enumerate(cells)]
    chosen += range(6 * len(SUPPORTED), len(CASES))
    return [(number, FEWER if CASES[number].slow else QUICK) for number in chosen]


def content(rb: Any) -> dict[str, Any]:
    """Say what a buffer holds."""
    held = read_all(rb)
    return {"rows": fingerprint(held), "len": sum(map(len, getattr(rb, "members", [rb])))}


def place(rb: Any) -> float:
    """Return how much of its pass a sampler without replacement has drawn; 0 for others."""
    state = {} if isinstance(rb, ReplayBufferEnsemble) else rb.sampler.state_dict()
    return state["at"] / max(1, state["rows"]) if "at" in state else 0.0


def save_all(folder: Path, save: str, chosen: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Save each case and go on."""
    for each in chosen:
        number, drawn = map(int, each.split(":"))
        case = CASES[number]
        rb = case.filled()
        said = {"number": number, "wanted": drawn, "place": place(rb), **_held(case, rb)}
        rb.dumps(folder / str(number), **SAVES[save])
        yield {**said, **case.next(rb, drawn)}


def load_all(folder: Path, save: str, load: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Load each case, restart it some times, and go on."""
    for line in lines:
        said = json.loads(line)
        case, path = CASES[said["number"]], folder / str(said["number"])
        rb = case.make()
        rb.loads(path, **LOADS[load])
        found = _held(case, rb)
        for restart in range(MANY if said["number"] % MANY_EVERY == 0 else 1):
            older, path = path, folder / f"{said['number']}-{restart}"
            rb.dumps(path, **SAVES[save])
            shutil.rmtree(older)
            rb = case.make()
            rb.loads(path, **LOADS[load])
            again = _held(case, rb)
            found = {
                key: value if again[key] == value else f"lost in restart {restart}" for key, value in found.items()
            }
        shutil.rmtree(path)
        yield {**said, "found": {**found, **case.next(rb, said["wanted"])}}


def _held(case: Case, rb: Any) -> dict[str, Any]:
    """Say what a buffer holds, and what its whole state is, which a thread at work would change."""
    return content(rb) if case.ahead else {**content(rb), "state": fingerprint(rb.state_dict())}


def main() -> None:
    """Run one side."""
    torch.set_num_threads(1)
    side, folder, save, *more = sys.argv[1:]
    if side == "save":
        said = save_all(Path(folder), save, sys.stdin.read().split())
    else:
        said = load_all(Path(folder), save, more[0], sys.stdin)
    for each in said:
        sys.stdout.write(json.dumps(each) + "\n")
        sys.stdout.flush()
    os._exit(0)  # threads that make batches ahead need no goodbye


if __name__ == "__main__":
    main()
