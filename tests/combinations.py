"""Which sampler, unit, storage and writer go together: the rules, and the page that is made of them.

`python -m tests.combinations` prints docs/combinations.md. The tests hold every cell to what it says.
"""

from __future__ import annotations

import re
import sys
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ostinato import QueueSampler
from tests.registry import CAPACITY, STORAGES, UNITS, WRITERS, make, rows
from tests.registry import SAMPLERS as ALL_SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Iterable

LANES = 2
SAMPLERS = {name: part for name, part in ALL_SAMPLERS.items() if part.law}
LEAVING = {"ConsumingSampler", "StackSampler, max_times_sampled", "HeapSampler, max_times_sampled"}
"""Samplers whose rows leave the buffer."""
COUNTING = {"LimitedSampler", "QueueSampler", *LEAVING}
"""Samplers that use rows up."""
_STORAGE_KINDS = {
    "ListStorage": "lists",
    "CompressedListStorage": "lists",
    "LazyStackStorage": "lazy stacks",
    "LazyTensorStorage, single_copy": "single_copy",
}
_WRITER_KINDS = {
    "RoundRobinWriter": "ring",
    "TensorDictRoundRobinWriter": "ring",
    "TensorDictMaxValueWriter": "ranked",
    "ReservoirWriter": "random",
    "ImmutableDatasetWriter": "read-only",
}
"""Words for the headings of the page; storages that are not listed are tensors."""
REASONS = {
    "order": "episodes and queues need rows in the order of writing, which this writer does not keep",
    "fields": "a list of objects has no fields that mark the ends of episodes",
    "slices": "slices are windows already",
    "envs": "the writer chooses single slots, and with `ndim=2` a write is a step of all environments",
    "ranks": "rows that the storage already holds have no ranks",
    "stream": "new slices are those of one stream of rows",
    "slots": "rows are written to the slots of rows that have left, in one dimension and by a round-robin writer",
    "counts": "queues, limited draws and rows that leave use up single rows",
    "ring": "a next observation is read from the following row, so rows must stay in ring order",
}


@dataclass(frozen=True)
class Cell:
    """One combination."""

    sampler: str
    unit: str
    storage: str
    writer: str

    @property
    def windows(self) -> bool:
        """Whether episodes play a part."""
        return self.unit not in {"none", "Transition"} or "Slice" in self.sampler

    @property
    def refusal(self) -> str | None:
        """Why it is refused; None if it works."""
        ranked = self.writer in {"TensorDictMaxValueWriter", "ReservoirWriter"}
        if self.sampler in COUNTING and self.windows:
            return "counts"
        if ranked and self.sampler == "QueueSampler":
            return "order"
        if "Slice" in self.sampler and self.unit.startswith("SequenceUnit"):
            return "slices"
        if ranked and self.windows:
            return "order"
        if ranked and "single_copy" in self.storage:
            return "ring"
        if ranked and "ndim=2" in self.storage:
            return "envs"
        if self._fixed_slots:
            return self._fixed_slots
        if self.writer == "TensorDictMaxValueWriter" and self.storage == "TensorStorage":
            return "ranks"
        reads = self.sampler in {"StalenessAwareSampler", "PromptGroupSampler"}
        if "ListStorage" in self.storage or self.storage == "LazyStackStorage":
            return "fields" if self.windows or (reads and self.storage != "LazyStackStorage") else None
        return None

    @property
    def _fixed_slots(self) -> str | None:
        """Why rows cannot be where the sampler needs them; None if they can."""
        if self.sampler == "StreamingSliceSampler":
            return "stream" if "ndim=2" in self.storage else None
        if self.sampler not in LEAVING:
            return None
        free = "RoundRobin" in self.writer and "ndim=2" not in self.storage and "single_copy" not in self.storage
        return None if free else "slots"


CELLS = [Cell(s, u, st, w) for st in STORAGES for w in WRITERS for s in SAMPLERS for u in UNITS]


def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
    """Return the pairs of parts of a cell."""
    return set(combinations(enumerate(astuple(cell)), 2))


def spread(cells: Iterable[Cell], every: int) -> list[Cell]:
    """Return about one in `every` cells, by the sum of the places of their parts, with each pair of parts in one."""
    tables = [list(table) for table in (SAMPLERS, UNITS, STORAGES, WRITERS)]
    chosen: list[Cell] = []
    others: list[Cell] = []
    for cell in cells:
        place = sum(table.index(part) for table, part in zip(tables, astuple(cell), strict=True))
        (others if place % every else chosen).append(cell)
    held = {pair for cell in chosen for pair in pairs(cell)}
    for cell in others:
        if not pairs(cell) <= held:
            chosen.append(cell)
            held |= pairs(cell)
    return chosen


def empty(cell: Cell, **options: Any) -> Any:
    """Make the buffer of a cell; a dataset is filled by another writer before it gets its own."""
    writer = "RoundRobinWriter" if cell.writer == "ImmutableDatasetWriter" else cell.writer
    parts = {"storage": cell.storage, "sampler": cell.sampler, "sample_unit": cell.unit, "writer": writer}
    return make(CAPACITY, **{"batch_size": 12, **parts, **options})


def build(cell: Cell, **options: Any) -> Any:
    """Make the buffer of a cell, and fill it beyond its capacity."""
    buffer, lanes = empty(cell, **options), LANES if "ndim=2" in cell.storage else 1
    for start in range(0, 40, 8):
        if isinstance(buffer.sampler, QueueSampler) and buffer.sampler.rows_left + 8 * lanes > CAPACITY:
            buffer.sample(buffer.sampler.rows_left + 8 * lanes - CAPACITY)
        buffer.extend(rows(8, start, lanes))
    if cell.writer == "ImmutableDatasetWriter":
        buffer.set_writer(WRITERS[cell.writer](CAPACITY))
    return buffer


def page() -> str:
    """Return docs/combinations.md."""
    sections = _sections()
    lines = [
        "# Combinations",
        "",
        "Samplers, units, storages and writers are chosen apart, and most go together. A few cannot: a window needs",
        "rows in their order, and a writer that puts rows into random slots does not keep it. Such a combination",
        "raises when the buffer is made or its first rows are written, and the error says what to change.",
        "",
        f"This page has all {len(CELLS):,} combinations. Follow the link of your storage and writer, then take the row",
        "of the [sampler](sampling.md#choose-a-sampler) and the column of the",
        "[unit](sampling.md#what-does-each-drawn-row-become): the cell says *yes*, or the reason why it raises.",
        "`make test-all` runs all of them. The page is generated from these rules (`python -m tests.combinations`).",
        "",
        "## Choose a storage and a writer",
        "",
        *_choices(sections),
        "",
        "## Why a combination raises",
        "",
        "| raises | why |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in REASONS.items()),
        "",
        "## What is drawn",
        "",
        "A strict `SequenceUnit` leaves only the rows that begin a whole window.",
        "",
        "| sampler | draws |",
        "|---|---|",
        *(f"| {name} | {part.law} |" for name, part in SAMPLERS.items()),
        "",
    ]
    for title, pairs in sections.items():
        lines += [f"## {title}", "", _table(*pairs[0]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections() -> dict[str, list[tuple[str, str]]]:
    """Return the storages and writers of each table sampler x unit, by its title."""
    found: dict[str, list[tuple[str, str]]] = {}
    for storage in STORAGES:
        for writer in WRITERS:
            found.setdefault(_table(storage, writer), []).append((storage, writer))
    sections = {_title(pairs): pairs for pairs in found.values()}
    if len(sections) < len(found):
        msg = f"two tables have the same title: {', '.join(_title(pairs) for pairs in found.values())}"
        raise ValueError(msg)
    return sections


def _title(pairs: list[tuple[str, str]]) -> str:
    """Name a table after its storages and writers; the table of choices says which of them go together."""
    storages = list(dict.fromkeys(storage for storage, _ in pairs))
    kinds = storages if len(storages) == 1 else dict.fromkeys(_STORAGE_KINDS.get(name, "tensors") for name in storages)
    title = f"{', '.join(kinds)}: {' or '.join(dict.fromkeys(_WRITER_KINDS[writer] for _, writer in pairs))}"
    return title[0].upper() + title[1:]


def _choices(sections: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return the kinds of writers, and a table of storages and these kinds with links to the sections."""
    titles = {pair: title for title, pairs in sections.items() for pair in pairs}
    anchors = {title: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in sections}
    columns: dict[tuple[str, ...], list[str]] = {}
    for writer in WRITERS:
        column = (_WRITER_KINDS[writer], *(titles[storage, writer] for storage in STORAGES))
        columns.setdefault(column, []).append(writer)
    lines = ["| heading | writers |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'`{name}`' for name in names)} |" for (kind, *_), names in columns.items()]
    lines += ["", f"| storage | {' | '.join(kind for kind, *_ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for storage in STORAGES:
        name, _, option = storage.partition(", ")
        shown = f"`{name}`" + (f" with `{option}`" if option else "")
        links = (titles[storage, writers[0]] for writers in columns.values())
        lines.append(f"| {shown} | {' | '.join(f'[{title}](#{anchors[title]})' for title in links)} |")
    return lines


def _table(storage: str, writer: str) -> str:
    """Return the table of a storage and a writer: samplers with equal cells share a row."""
    rows: dict[str, list[str]] = {}
    for sampler in SAMPLERS:
        cells = [Cell(sampler, unit, storage, writer) for unit in UNITS]
        rows.setdefault(" | ".join(f"`{c.refusal}`" if c.refusal else "yes" for c in cells), []).append(sampler)
    lines = [f"| | {' | '.join(UNITS)} |", "|---" * (len(UNITS) + 1) + "|"]
    lines += [f"| {'; '.join(samplers)} | {cells} |" for cells, samplers in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
