"""Casts to stored dtypes: the documented table, each pair of dtypes at each entrance, and exactness by values."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from ostinato.core.casts import DTYPES, Rule, cast, rule
from ostinato.errors import CastWarning, SchemaError

from ...registry import ring

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).parents[3] / "docs" / "casts.md"
CLASSES: dict[str, Rule] = {"=": "exact", "~": "usual", "w": "rounds", "c": "checked", "x": "never"}
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
KINDS = ["tensor", "array", "scalar", "number"]


@functools.cache
def documented() -> dict[tuple[torch.dtype, torch.dtype], Rule]:
    """Read the table of the documentation."""
    lines = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if re.match(r"\| `\w+` \|", line)]
    lines = [line for line in lines if len(line) == len(DTYPES) + 1]
    order = [getattr(torch, line[0].strip("` ")) for line in lines]
    return {
        (source, stored): CLASSES[x.strip()]
        for source, line in zip(order, lines, strict=True)
        for stored, x in zip(order, line[1:], strict=True)
    }


def outcome(value: Any, stored: torch.dtype) -> str:
    """Tell by Python's exact arithmetic what a dtype makes of a number: `kept`, `rounded` or `lost`."""
    if isinstance(value, complex):
        return outcome(value.real, REAL[stored]) if stored in REAL else "lost"  # all of them have an imaginary part 0
    if stored is torch.bool:
        return "kept" if value in (0, 1) else "lost"
    if not stored.is_floating_point and not stored.is_complex:
        info = torch.iinfo(stored)
        whole = value == value and abs(value) != float("inf") and int(value) == value
        return "kept" if whole and info.min <= value <= info.max else "lost"
    if value != value or abs(value) == float("inf"):
        return "kept"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "lost"  # no dtype has such integers
    wide = torch.float64 if isinstance(value, float) else torch.uint64 if value >= 2**63 else torch.int64
    found = torch.tensor(value, dtype=wide).to(REAL.get(stored, stored)).item()
    return "lost" if abs(found) == float("inf") else "kept" if found == value else "rounded"


def expected(value: Any, source: torch.dtype, stored: torch.dtype) -> str:
    """Tell what a write does, by the documented class: `silent`, `warns` or `raises`."""
    found, result = documented()[source, stored], outcome(value, stored)
    if found == "exact":
        assert result == "kept"
        return "silent"
    if found == "never" or result == "lost" or (found == "checked" and result != "kept"):
        return "raises"
    return "warns" if found == "rounds" and result == "rounded" else "silent"


def done(write: Callable[[], Any]) -> str:
    """Tell what a write did."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            write()
        except SchemaError:
            return "raises"
    assert all(warning.category is CastWarning for warning in caught), [str(w.message) for w in caught]
    return "warns" if caught else "silent"


def tempting(source: torch.dtype, stored: torch.dtype) -> list[Any]:
    """Return numbers of a dtype that another one may not hold."""
    if source is torch.bool:
        return [False, True]
    found: list[Any] = [0, 1, 2, 3]
    for real in {REAL.get(dtype, dtype) for dtype in (source, stored)} - {torch.bool}:
        if real.is_floating_point:
            info = torch.finfo(real)
            digits = 2 ** (1 - int(np.log2(info.eps)))
            found += [digits, digits + 1, digits * 4, info.max, info.max * 0.75, info.tiny, 1 + info.eps, 0.5, -1.5]
            found += [float("inf"), float("-inf"), float("nan")]
        else:
            low, high = torch.iinfo(real).min, torch.iinfo(real).max
            found += [low, low - 1, high, high + 1, high // 3, -1]
    kept = [x for x in found if outcome(x, source) == "kept"]
    number = complex if source.is_complex else float if source.is_floating_point else int
    return [number(x) for x in kept]


def given_as(kind: str, value: Any, source: torch.dtype) -> Any:
    """Return a number of a dtype in a kind of data; as a tensor if it has no such kind."""
    tensor = torch.tensor(value, dtype=source)
    if kind == "number" and source in {torch.bool, torch.int64, torch.float64, torch.complex128}:
        return value
    if kind in {"tensor", "number"} or source is torch.bfloat16:
        return tensor
    return tensor.numpy() if kind == "array" else tensor.numpy()[()]


def buffer(stored: torch.dtype, rows: int = 1) -> ReplayBuffer:
    rb = ring(64, batch_size=2)
    rb.extend({"x": torch.zeros(rows, dtype=stored)})
    return rb


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_each_pair_of_dtypes_does_what_is_documented(source):
    """Each value in one kind of data, and those that do the same as a batch; where none is read, dtypes decide."""
    assert {pair: rule(*pair) for pair in documented()} == documented()
    for stored in set(DTYPES) - {source}:
        groups: dict[str, list[Any]] = {}
        for number, value in enumerate(tempting(source, stored)):
            rb, wanted = buffer(stored), expected(value, source, stored)
            groups.setdefault(wanted, []).append(value)
            assert done(functools.partial(rb.add, {"x": given_as(KINDS[number % 4], value, source)})) == wanted
            assert len(rb) == (1 if wanted == "raises" else 2), (stored, value)
        for wanted, values in groups.items():
            rb, batch = buffer(stored), torch.tensor(values, dtype=source)
            assert done(functools.partial(rb.extend, {"x": batch})) == wanted
            held = rb[1:]["x"]
            assert held.dtype is stored
            if wanted != "raises":
                assert torch.equal(held.nan_to_num(7), batch.to(stored).nan_to_num(7))
        by_dtype = {"rounds": "warns", "checked": "raises", "never": "raises"}.get(rule(source, stored), "silent")
        meta = functools.partial(cast, torch.empty(3, dtype=source, device="meta"), stored, ("x",), set())
        assert done(meta) == by_dtype


def spread(value: Any) -> list[dict[str, Any]]:
    return [{"x": one} for one in value]


def tensordicts(value: Any) -> TensorDict:
    return TensorDict({"x": torch.as_tensor(value)}, [2])


ENTRANCES: dict[str, Any] = {
    "extend": lambda rb, value: rb.extend({"x": value}),
    "extend a list": lambda rb, value: rb.extend(spread(value)),
    "extend a TensorDict": lambda rb, value: rb.extend(tensordicts(value)),
    "extend a list of TensorDicts": lambda rb, value: rb.extend(list(tensordicts(value))),
    "items": lambda rb, value: rb.__setitem__(slice(0, 2), {"x": value}),
    "items of a list": lambda rb, value: rb.__setitem__(slice(0, 2), spread(value)),
    "write_all": lambda rb, value: rb.write_all({"x": value}),
    "a field": lambda rb, value: rb.__setitem__("x", value),
    "set_at_": lambda rb, value: rb.set_at_("x", value, slice(0, 2)),
    "update_": lambda rb, value: rb.update_({"x": value}),
}
CASES: dict[str, Any] = {
    "float64": (torch.float32, np.array([0.1, 0.2]), "silent"),
    "integers in range": (torch.int8, np.array([1, -128]), "silent"),
    "half precision": (torch.float16, np.array([0.1, 0.2]), "warns"),
    "a fraction": (torch.int64, np.array([1.0, 0.5]), "raises"),
    "out of range": (torch.uint8, np.array([1, 256]), "raises"),
    "overflow": (torch.float32, np.array([1.0, 1e300]), "raises"),
    "complex": (torch.float32, np.array([1j, 2j]), "raises"),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_each_entrance_casts_by_the_table(entrance):
    for stored, value, wanted in CASES.values():
        rb, write = buffer(stored, 2), ENTRANCES[entrance]
        before = (rb[:]["x"].clone(), rb.write_count)
        assert done(functools.partial(write, rb, value)) == wanted
        if wanted == "raises":
            assert torch.equal(rb[:]["x"], before[0])
            assert rb.write_count == before[1]
        else:
            assert torch.equal(rb[-2:]["x"], torch.from_numpy(value).to(stored))
        assert rb[:]["x"].dtype is stored
        assert done(functools.partial(write, rb, value)) == ("silent" if wanted == "warns" else wanted), "warned once"


def test_rows_of_a_list_may_mix_kinds_and_dtypes():
    rb = ring(20, batch_size=2)
    rb.extend({"r": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)})
    rows: list[Any] = [
        {"r": 1, "n": np.int8(1)},
        {"r": np.float64(0.25), "n": 2**60 + 1},
        {"r": torch.tensor(2), "n": torch.tensor(3.0)},
        {"r": np.array(True), "n": True},
    ]
    rb.extend(rows)
    rb.extend([TensorDict({"r": 1.0, "n": torch.tensor(2**60 + 1)}), TensorDict({"r": 1, "n": torch.tensor(5.0)})])
    assert rb[1:]["r"].tolist() == [1.0, 0.25, 2.0, 1.0, 1.0, 1.0]
    assert rb[1:]["n"].tolist() == [1, 2**60 + 1, 3, 1, 2**60 + 1, 5], "torch would stack the last two as float32"
    wide = ring(8, batch_size=2)
    wide.add({"x": np.float64(0.0), "n": np.uint64(0)})
    wide.add({"x": 0.1, "n": 2**64 - 1})
    wide.extend([{"x": 0.1, "n": 2**64 - 1}])
    assert wide[1:]["x"].tolist() == [0.1, 0.1], "Python's numbers are not rounded on the way"
    assert wide[1:]["n"].tolist() == [2**64 - 1] * 2


def test_numbers_that_no_stored_dtype_has_raise_with_what_was_given_and_what_to_do():
    for stored in (torch.int64, torch.int8, torch.bool, torch.float32):
        for value in (2**63, 10**400):
            with pytest.raises(SchemaError, match=r"field 'x' must be \w+, got a Python int of \d+ bits"):
                buffer(stored).add({"x": value})
    with pytest.raises(TypeError, match=r"field 'x' holds the number 1e\+300"):
        ring(8, batch_size=2).add({"x": 1e300})
    with pytest.raises(SchemaError):
        buffer(torch.float8_e4m3fn).add({"x": torch.zeros(())})
    rb = ring(8, batch_size=2)
    rb.extend({"action": torch.zeros(2, 2, dtype=torch.int32)})
    with pytest.raises(SchemaError) as caught:
        rb.extend({"action": np.array([[0, 1], [2, 2.5]])})
    assert str(caught.value) == (
        "field 'action' must be int32, got float64 with the value 2.5 at [1, 1], which int32 cannot hold: a storage "
        "keeps the dtypes of its first rows; convert the values before writing, or write first rows of a dtype that "
        "holds all of them"
    )


def test_the_warning_names_field_dtypes_and_the_line_that_wrote():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    half = torch.zeros(2, dtype=torch.float16)
    rb.extend(TensorDict({"n": {"x": half}, "y": half}, [2]))
    with pytest.warns(CastWarning) as caught:
        rb.extend(TensorDict({"n": {"x": torch.full((2,), 0.1)}, "y": torch.full((2,), 0.1)}, [2]))
    assert [str(w.message).split(":")[0] for w in caught] == [
        "field ('n', 'x') is stored as float16, to which the float32 values written are rounded",
        "field 'y' is stored as float16, to which the float32 values written are rounded",
    ]
    assert {w.filename for w in caught} == {__file__}
    assert "filterwarnings" in str(caught[0].message)
    other = buffer(torch.float16)  # which has warned of nothing yet
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(CastWarning):
                other.add({"x": 0.1})
    assert len(other) == other.write_count == 1
