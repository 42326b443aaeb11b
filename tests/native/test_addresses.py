"""Every native entry point raises on a null address, before anything is read or written."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from .tables import address

if TYPE_CHECKING:
    from collections.abc import Iterator
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


_KEPT: list[Any] = []


def _keep(made: Any, *memory: Any) -> Any:
    _KEPT.append(memory)  # which the native object reads for as long as it lives
    return made


GENERATIONS = (AT, ROWS, 0, 0, 0, 0)
MAKERS: dict[str, Any] = {
    "Fields": fields,
    "SingleCopy": single_copy,
    "SumTree": tree,
    "Episodes": episodes,
    "SharedRing": ring,
    "WindowReader": windows,
    "": lambda native: native,
}
NUMBERS: dict[str, Any] = {"rows": ROWS, "total": ROWS, "row_bytes": 8, "stride": 8, "nbytes": 8, "limit": 2}
NUMBERS |= dict.fromkeys(("n", "k", "width", "length"), 2) | dict.fromkeys(("before", "after", "dilation", "cells"), 1)
NUMBERS |= {"widths": [1], "counts": [2], "fields": [0], "single": True}
"""Arguments that are no addresses, by name; the others are 0."""
OPTIONAL = {
    "Fields.scatter": {"rows"},
    "WindowReader.add": {"other"},
    "WindowReader.read": {"picks", "weights"},
    "SingleCopy.link_run": {"equals_side"},
    "SingleCopy.gather": {"pick"},
    "SumTree.update": {"expected", "hidden"},
    "Episodes.record_write": {"ends", "ids", "mask"},
    "Episodes.stack": {"valid"},
}
"""Addresses that may be 0, which are left out."""
APART = {"Episodes.save", "Episodes.load"}
UNCALLED = {"advise_huge_pages", "read_ranges", "SingleCopy.add_chunk"}
"""Entry points that need more than zeros."""


def argument(owner: str, name: str, kind: str) -> Any:
    """A good argument for a type of the stub."""
    if "Address" not in kind or name in OPTIONAL.get(owner, ()):
        nothing = {"bool": False, "list": [0]}.get(kind.partition("[")[0], 0)
        return nothing if "Address" in kind else NUMBERS.get(name, nothing)
    if kind.startswith("tuple"):
        return GENERATIONS
    if "tuple" in kind:
        return [(AT, ROWS)]
    return [AT] if kind.startswith("list") else AT


def entry_points() -> Iterator[tuple[str, list[Any]]]:
    """The functions and methods of the stub that take addresses, with good arguments."""
    for node in ast.parse(STUB.read_text()).body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("__"):
                continue
            arguments = [arg for arg in function.args.args if arg.annotation is not None]
            name, kinds = owner + function.name, [ast.unparse(arg.annotation) for arg in arguments if arg.annotation]
            if name not in APART and "Address" in "".join(kinds):
                yield name, [argument(name, arg.arg, kind) for arg, kind in zip(arguments, kinds, strict=True)]


def nulled(arguments: list[Any]) -> Iterator[list[Any]]:
    """The arguments with one address after the other replaced by 0."""
    nulls = {str([(AT, ROWS)]): [(0, ROWS)], str([AT]): [0], str(AT): 0, str(GENERATIONS): (0, *GENERATIONS[1:])}
    for at, value in enumerate(arguments):
        if str(value) in nulls:
            yield [*arguments[:at], nulls[str(value)], *arguments[at + 1 :]]


@pytest.mark.parametrize(("name", "arguments"), [*entry_points()], ids=lambda x: x if type(x) is str else "")
def test_a_null_address_raises(native, name, arguments):
    owner, _, method = name.rpartition(".")
    if not hasattr(MAKERS[owner](native), method):
        pytest.skip(f"{name} is not on this platform")
    calls = list(nulled(arguments))
    assert calls or name in OPTIONAL
    for call in calls:
        MEMORY[:] = 0
        with pytest.raises(ValueError, match=r"address"):
            getattr(MAKERS[owner](native), method)(*call)
        assert not MEMORY.any(), "something was written"
    if name not in UNCALLED:
        getattr(MAKERS[owner](native), method)(*arguments)  # with all addresses it works
    MEMORY[:] = 0


def test_memory_of_objects_needs_an_address(native):
    with pytest.raises(ValueError, match="address"):
        native.SingleCopy(ROWS, 1, ROWS, 0)
    if hasattr(native, "SharedRing"):
        with pytest.raises(ValueError, match="the address of memory aligned"):
            native.SharedRing(0, ROWS, True, True)


def test_nothing_to_do_needs_no_address(native):
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


def test_sources_in_guarded_memory_are_not_compared(native):
    made, source = single_copy(native), np.zeros(2 * ROWS, np.int64)
    call = 0, ROWS, [address(source)], [address(source)], AT, AT
    assert made.compare(*call) >= 0
    made.guard(address(source), source.nbytes)
    assert made.compare(*call) == -1
    MEMORY[:] = 0
