"""Every native entry point raises on a null address, before anything is read or written."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from .tables import address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

STUB = Path(__file__).parents[2] / "src" / "ostinato" / "_native.pyi"

ROWS = 4
MEMORY = np.zeros(1024, dtype=np.int64)
AT = address(MEMORY)
"""Stands for every address; zeros do for slots, values and flags alike."""


def episodes(native: ModuleType) -> Any:
    table = native.Episodes(ROWS, 1)
    table.record_write(0, ROWS, 0, 0, 0, 0)
    table.add_need(1)
    return table


def fields(native: ModuleType) -> Any:
    made, memory = native.Fields(), np.zeros((ROWS, 8), np.uint8)
    made.add([(address(memory), ROWS)], 8, 8)
    return _keep(made, memory)


def single_copy(native: ModuleType) -> Any:
    side_rows, memory, side = np.zeros(ROWS, np.int32), np.zeros((ROWS, 8), np.uint8), np.zeros((ROWS, 8), np.uint8)
    made = native.SingleCopy(ROWS, 1, ROWS, address(side_rows))
    made.add_group(address(memory), 8, 8)
    made.add_field(0, 0, 8)
    made.add_chunk([address(side)])
    made.clear()
    made.link_run(0, ROWS, 0, [AT], AT, 0)
    return _keep(made, side_rows, memory, side)


def tree(native: ModuleType) -> Any:
    made = native.SumTree(ROWS)
    made.set_run(0, ROWS, 1.0)
    return made


def ring(native: ModuleType) -> Any:
    if not hasattr(native, "SharedRing"):
        pytest.skip("processes share no buffers here")
    memory = np.zeros(1 << 15, np.uint8)
    start = -address(memory) % 4096
    return _keep(native.SharedRing(address(memory) + start, ROWS, True, True), memory)


def windows(native: ModuleType) -> Any:
    made, memory = native.WindowReader(ROWS), np.zeros((ROWS, 8), np.uint8)
    made.add(address(memory), 0, 8, 8, 0, 0)
    return _keep(made, memory)


def module(native: ModuleType) -> Any:
    return native


_KEPT: list[Any] = []


def _keep(made: Any, *memory: Any) -> Any:
    _KEPT.append(memory)  # which the native object reads for as long as it lives
    return made


GENERATIONS = (AT, ROWS, 0, 0, 0, 0)

CALLS: list[tuple[Callable[[ModuleType], Any], str, tuple[Any, ...], set[int]]] = [
    (fields, "add", ([(AT, ROWS)], 8, 8), set()),
    (fields, "gather", ([AT], 2, [AT]), set()),
    (fields, "gather_each", ([AT], [2], [AT]), set()),
    (fields, "write_run", (0, 2, 0, [AT]), set()),
    (fields, "scatter", (AT, AT, 2, [AT]), {1}),
    (module, "advise_huge_pages", (AT, 8), set()),
    (module, "choose_slots", (AT, AT, 2, ROWS, AT), set()),
    (windows, "add", (AT, 0, 8, 8, 0, 0), set()),
    (windows, "read", ([AT], [0], [0], [1], 2, [AT]), set()),
    (module, "weigh_rows", (AT, AT, 2, 1, 1, True, AT), set()),
    (module, "shuffle_draw", (AT, 0, ROWS, 2, AT, AT), set()),
    (module, "read_ranges", (AT, AT, AT, AT, 2, 0), set()),
    (single_copy, "add_group", (AT, 8, 8), set()),
    (single_copy, "add_chunk", ([AT],), set()),
    (single_copy, "guard", (AT, 8), set()),
    (single_copy, "compare", (0, 2, [AT], [AT], AT, AT), set()),
    (single_copy, "link_run", (0, 2, 0, [AT], AT, AT), {5}),
    (single_copy, "set_rows", (AT, 2, [AT]), set()),
    (single_copy, "link_rows", (AT, 2), set()),
    (single_copy, "gather", ([0], AT, AT, 2, [AT]), {2}),
    (tree, "set", (AT, AT, 2), set()),
    (tree, "get", (AT, 2, AT), set()),
    (tree, "draw", (AT, 2, AT, AT), set()),
    (tree, "sample", (AT, 2, 0.5, GENERATIONS, AT, AT, True, AT), set()),
    (tree, "update", (AT, AT, True, 2, AT, GENERATIONS, AT, AT, ROWS, 1e-3, 0.5, False), {4, 7}),
    (tree, "leaves", (AT, 2), set()),
    (tree, "load", (AT, 2), set()),
    (episodes, "ahead", (AT, 2, AT), set()),
    (episodes, "behind", (AT, 2, AT), set()),
    (episodes, "ended", (AT, 2, AT), set()),
    (episodes, "shift", (AT, AT, 2, AT), set()),
    (episodes, "window", (AT, 2, 1, 1, 1, AT, AT), set()),
    (episodes, "slices", (AT, 2, 2, AT), set()),
    (episodes, "steps", (AT, 2, 2, AT, True, AT, AT, AT, AT, AT), set()),
    (episodes, "stack", (AT, 2, 2, False, AT, 0), set()),
    (episodes, "spans", (AT, AT, AT, AT), set()),
    (episodes, "draw", (0, AT, 2, AT), set()),
    (episodes, "draw_episodes", (0, AT, 2, AT), set()),
    (ring, "generations_of", (AT, 2, AT), set()),
    (ring, "changed", (AT, 2, 0, AT), set()),
    (ring, "committed_slots", (AT, 2), set()),
]
"""Object, method, good arguments, and the positions of addresses that may be 0."""

OBJECTS = ("Batches.", "Direct.", "DirectWindows.", "TrackedEpisodes.", "open_exchange", "check_leaves")
"""Entry points that take tensors and other objects: see test_native_batches.py, test_direct.py, test_leaf_check.py."""
BELOW = {"Episodes.save", "Episodes.load", "Episodes.record_write", "SingleCopy.__init__", "SharedRing.__init__"}
NUMBERS = {
    "Episodes": "__init__ add_need clear start_rows start_episodes",
    "SingleCopy": "add_field detach_run",
    "SumTree": "__init__ set_run",
    "WindowReader": "__init__",
    "SharedRing": "bytes_for reserve is_current commit abandon add writers state unchanged_since count clear",
    "": "make_shared_memory kept_bytes",
}
"""Entry points that take numbers alone."""


def nulled(arguments: tuple[Any, ...], optional: set[int]) -> Iterator[tuple[Any, ...]]:
    """The arguments with one address after the other replaced by 0."""
    for at, value in enumerate(arguments):
        put: list[Any] = []
        if at not in optional and type(value) is int and value == AT:
            put = [0]
        elif value == [AT]:
            put = [[0]]
        elif isinstance(value, list) and value == [(AT, ROWS)]:
            put = [[(0, ROWS)]]
        elif value == GENERATIONS:
            put = [(0, *GENERATIONS[1:])]
        for other in put:
            yield (*arguments[:at], other, *arguments[at + 1 :])


@pytest.mark.parametrize(("make", "name", "arguments", "optional"), CALLS, ids=lambda x: x if type(x) is str else "")
def test_a_null_address_raises(
    native: ModuleType, make: Any, name: str, arguments: tuple[Any, ...], optional: set[int]
) -> None:
    if not hasattr(make(native), name):
        pytest.skip(f"{name} is not on this platform")
    calls = list(nulled(arguments, optional))
    assert calls
    for call in calls:
        MEMORY[:] = 0
        with pytest.raises(ValueError, match=r"address"):
            getattr(make(native), name)(*call)
        assert not MEMORY.any(), "something was written"
    if name not in {"advise_huge_pages", "read_ranges", "add_chunk"}:
        getattr(make(native), name)(*arguments)  # with all addresses it works
    MEMORY[:] = 0


@pytest.mark.parametrize("position", range(6))
def test_states_of_episodes_need_addresses(native: ModuleType, position: int) -> None:
    table = episodes(native)
    for count in range(ROWS):  # rows of other episodes leave records free
        table.record_write(table.cursor, 1, 0, 0, AT + 8 * 512 * (count % 2), 0)
    addresses = [AT + 512 * i for i in range(6)]
    table.save(*addresses)
    counts = (table.present, table.records, table.free_count)
    addresses[position] = 0
    if counts[0 if position == 0 else 2 if position == 5 else 1]:
        with pytest.raises(ValueError, match="must be an address"):
            table.save(*addresses)
        with pytest.raises(ValueError, match="must be an address"):
            table.load(table.cursor, table.serial, *counts, *addresses)
    else:
        table.save(*addresses)
    MEMORY[:] = 0


def test_memory_of_objects_needs_an_address(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="address"):
        native.SingleCopy(ROWS, 1, ROWS, 0)
    if hasattr(native, "SharedRing"):
        with pytest.raises(ValueError, match="the address of memory aligned"):
            native.SharedRing(0, ROWS, True, True)


def test_nothing_to_do_needs_no_address(native: ModuleType) -> None:
    """Empty tensors say 0."""
    tree(native).get(0, 0, 0)
    episodes(native).window(0, 0, 1, 1, 1, 0, 0)
    fields(native).gather([0], 0, [0])
    assert fields(native).scatter(0, 0, 0, [0]) is True
    native.weigh_rows(0, 0, 2, 1, 0, True, 0)
    native.choose_slots(0, 0, 0, ROWS, 0)
    native.shuffle_draw(0, 0, 0, 0, 0, 0)
    tree(native).sample(AT, 2, 0.5, (0, 0, 0, 1, 1, 0), AT, AT, True, AT)  # generations in the order of the ring
    MEMORY[:] = 0


CLASSES = {
    "fields": "Fields",
    "single_copy": "SingleCopy",
    "tree": "SumTree",
    "episodes": "Episodes",
    "ring": "SharedRing",
    "windows": "WindowReader",
}


def test_every_entry_point_is_covered() -> None:
    found = set()
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            found |= {f"{node.name}.{m.name}" for m in methods if len(m.args.args) > 1 and "__e" not in m.name}
    covered = {name if make is module else f"{CLASSES[make.__name__]}.{name}" for make, name, _, _ in CALLS}
    assert covered | BELOW <= found
    plain = {f"{owner}.{name}".lstrip(".") for owner, names in NUMBERS.items() for name in names.split()}
    rest = found - covered - BELOW - plain
    assert {name for name in rest if not name.startswith(OBJECTS)} == set()
