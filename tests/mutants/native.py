"""Faults of the native extension: a table, since no library that we know changes C++ behind a switch.

Each row names a file, a text that occurs once in it, the expression in this text that is replaced, and its replacement.
An empty replacement drops a statement.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.mutants.changes import Change, Key

__all__ = ["FIRST", "build", "native_changes", "switched"]

ROOT = Path(__file__).parents[2]
FIRST = 10_000
"""Number of the first fault of the table."""

SWITCH = """\
#pragma once
#include <cstdlib>
// Which fault is on, and which ones were met since Python set these bytes to 0.
extern "C" {
__attribute__((visibility("default"), used)) inline int ostinato_mutant =
    std::getenv("OSTINATO_MUTANT") != nullptr ? std::atoi(std::getenv("OSTINATO_MUTANT")) : -1;
__attribute__((visibility("default"), used)) inline unsigned char ostinato_mutants_met[1024] = {};
}
inline bool mutant_on(int number) {
    ostinato_mutants_met[number] = 1;
    return number + 10000 == ostinato_mutant;
}
"""

TABLE = (
    ("sum_tree.hpp", "if (wrapped > 0) update_range", "wrapped > 0", "wrapped > 1"),
    ("sum_tree.hpp", "        update_range(start, end);", "update_range(start, end);", ""),
    ("sum_tree.hpp", "std::exchange(leaves_[slots[i]], values[i] + 0.0)", "values[i] + 0.0", "values[i]"),
    ("sum_tree.hpp", "sort_nodes(changed, count, nodes_[level])", "nodes_[level]", "nodes_[level] - 64"),
    ("sum_tree.hpp", "list[i] / 64)] |=", "list[i] / 64", "list[i] / 65"),
    ("sum_tree.hpp", "else if (old == before) {", "old == before", "old > before"),
    ("sum_tree.hpp", "child += before[c] <= at ? 1 : 0;", "before[c] <= at", "before[c] < at"),
    ("sum_tree.hpp", "rest[i] = below(at - before[child], line[child]);", "at - before[child]", "at"),
    ("sum_tree.hpp", "return at < end ? at :", "at < end", "at <= end"),
    ("sum_tree.hpp", "return smallest > 0 ? smallest", "smallest > 0", "smallest >= 0"),
    ("sum_tree.hpp", "        require_values(values, n);\n        clear();", "clear();", ""),
    ("count_tree.hpp", "if (change == 0) return;", "change == 0", "change <= 0"),
    ("count_tree.hpp", "        total_ += change;", "total_ += change;", ""),
    ("count_tree.hpp", "passed = before <= rank ? before : passed;", "before <= rank", "before < rank"),
    ("prioritized.hpp", "slot < cursor ? before_cursor", "slot < cursor", "slot <= cursor"),
    ("prioritized.hpp", "pow_in_place(leaves.data(), k, -beta);", "-beta", "beta"),
    ("prioritized.hpp", "p[i] += eps;", "p[i] += eps;", ""),
    ("prioritized.hpp", "[](double sum) { return sum > 0 ?", "sum > 0", "sum >= 0"),
    ("prioritized.hpp", "expected[i] > generations.none_up_to", "expected[i] > generations.none_up_to", "true"),
    ("prioritized.hpp", "generations.of(slot) == expected[i]", "generations.of(slot) == expected[i]", "true"),
    ("prioritized.hpp", "result_.stale = n_ - count;", "n_ - count", "count"),
    (
        "prioritized.hpp",
        "if (slot < 0 || slot >= priorities_.rows) throw",
        "slot >= priorities_.rows",
        "slot > priorities_.rows",
    ),
    ("prioritized.hpp", "if (priorities_.hidden[slot(i)] != 0)", "priorities_.hidden[slot(i)] != 0", "false"),
    ("episodes.hpp", "if (skip > 0) skip_rows(start, skip, batch);", "skip > 0", "skip > 1"),
    ("episodes.hpp", "present_ = std::min(capacity_, present_ + rows);", "present_ + rows", "present_ + rows - 1"),
    ("episodes.hpp", "record->status == kEnded && record->last == slots[i]", "record->last == slots[i]", "true"),
    (
        "episodes.hpp",
        "count = std::min(length, record->length - at);",
        "record->length - at",
        "record->length - at - 1",
    ),
    ("episodes.hpp", "static_cast<float>(powers[count])", "powers[count]", "powers[count - 1]"),
    ("episodes.hpp", "low = width - std::min(width, at + 1);", "at + 1", "at"),
    ("episodes.hpp", "if (list.removed > list.slots.size() / 2)", "list.removed > list.slots.size() / 2", "false"),
    ("episodes.hpp", "if (ends || masked) close(", "ends || masked", "ends"),
    ("episodes.hpp", "if (step != record.stride || (count > 1 && step != 1))", "count > 1 && step != 1", "false"),
    ("episodes.hpp", "record.status == kOpen) forget_open(record);", "record.status == kOpen", "false"),
    (
        "episodes.hpp",
        "record.length - starts.need + 1);",
        "record.length - starts.need + 1",
        "record.length - starts.need",
    ),
    ("single_copy.hpp", "needed += row == kLinked;", "needed += row == kLinked;", ""),
    ("single_copy.hpp", "equals_side[j] != 0 && side_rows_[row] >= 0 && wrap", "equals_side[j] != 0", "true"),
    ("single_copy.hpp", "if (row >= 0) free_.push_back(row);", "row >= 0", "false"),
    (
        "single_copy.hpp",
        "++versions_[at(row / chunk_rows_)][at(row % chunk_rows_)];",
        "++versions_[at(row / chunk_rows_)][at(row % chunk_rows_)];",
        "",
    ),
    ("single_copy.hpp", "return slot >= num_envs_ ? slot - num_envs_ :", "slot >= num_envs_", "slot > num_envs_"),
    ("slices.hpp", "slots[length_ - 1] - slots[0] == length_ - 1 && is_in_one(slots)", "is_in_one(slots)", "true"),
    ("slices.hpp", "return slots[length_ - 1] < rows;", "slots[length_ - 1] < rows", "slots[length_ - 1] <= rows"),
    ("nstep.hpp", "sum += weight == 0 ? 0.0", "weight == 0", "false"),
    ("windows.hpp", "sum += weights[k] == 0 ? 0.0", "weights[k] == 0", "false"),
    ("windows.hpp", "pick != nullptr && pick[k] != 0 ? group_->other", "pick[k] != 0", "pick[k] == 0"),
    (
        "ring.hpp",
        "return {(cursor + skip) % capacity, n - skip, skip};",
        "(cursor + skip) % capacity",
        "cursor % capacity",
    ),
    (
        "ring.hpp",
        "return {nullptr, 0, cursor, newest, newest - capacity, base};",
        "newest - capacity",
        "newest - capacity + 1",
    ),
    ("shuffle.hpp", "total - i)));", "total - i", "total - i - 1"),
    ("shared_ring.hpp", "generation > 0 ? 1 : 0;", "generation > 0", "generation >= 0"),
    ("shared_ring.hpp", "store(control_->written, newest + 1);", "newest + 1", "newest"),
    (
        "shared_ring.hpp",
        "serial < entry.serial + entry.rows;",
        "serial < entry.serial + entry.rows",
        "serial <= entry.serial + entry.rows",
    ),
    ("positioned_reads.hpp", "if (ranges.offsets[i] > end)", "ranges.offsets[i] > end", "ranges.offsets[i] >= end + 2"),
    ("positioned_reads.hpp", "if (between < 0 || between > gap) break;", "between < 0", "false"),
    ("fields.hpp", "if (!batches_overlap(memory, plan, bits + 1)) return false;", "bits + 1", "bits"),
)
"""Files, unique texts, expressions in them and replacements."""


def _change(file: str, context: str, before: str, after: str) -> Change:
    source = (ROOT / "native" / file).read_text()
    if source.count(context) != 1 or context.count(before) != 1:
        raise LookupError(f"tests/mutants/native.py: native/{file} has not exactly one {context!r} with one {before!r}")
    start = source.index(context) + context.index(before)
    line = source.count("\n", 0, start) + 1
    key = Key(f"native/{file}", " ".join(context.split()), "native", before, after)
    return Change(key, line, line, start, start + len(before), statement=not after)


def native_changes() -> dict[int, Change]:
    """Return the faults of the table by their numbers."""
    return {FIRST + number: _change(*row) for number, row in enumerate(TABLE)}


def switched(source: bytes, changes: dict[int, Change]) -> bytes:
    """Return a header in which the switch turns on each change."""
    for number, change in sorted(changes.items(), key=lambda pair: -pair[1].start):
        before, asks = source[change.start : change.end], f"mutant_on({number - FIRST})"
        if change.statement:
            text = f"if (!{asks}) {{ {before.decode()} }}"
        else:
            text = f"({asks} ? ({change.key.after}) : ({before.decode()}))"
        source = source[: change.start] + text.encode() + source[change.end :]
    return source.replace(b"#pragma once", b'#pragma once\n#include "mutant_switch.hpp"', 1)


def build(copy: Path, folder: Path) -> None:
    """Compile the extension of a copy in a folder, and install it into the copy."""
    (copy / "native" / "mutant_switch.hpp").write_text(SWITCH)
    tools = Path(sys.executable).parent
    configure: list[str | Path] = [
        tools / "cmake",
        "-S",
        copy,
        "-B",
        folder,
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
    ]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([tools / "cmake", "--build", folder], check=True, stdout=subprocess.DEVNULL)
    for extension in folder.glob("_native*.so"):
        (copy / "src" / "ostinato" / extension.name).write_bytes(extension.read_bytes())
