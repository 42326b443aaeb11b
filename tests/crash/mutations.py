"""What damages a checkpoint: bytes flipped, cut, moved and mixed, and manifests edited and signed anew."""

from __future__ import annotations

import base64
import copy
import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

__all__ = ["Damage", "damage", "edit", "sign"]

Files = dict[str, bytes]
MANIFEST = "manifest.json"
KINDS = ("flip", "flip", "cut", "insert", "drop", "repeat", "splice", "zeros", "swap", "foreign", "remove")


class Damage(NamedTuple):
    """What was done, and the files that are changed by it (None: removed)."""

    what: str
    files: dict[str, bytes | None]


def damage(files: Files, others: list[Files], rng: random.Random) -> Damage:
    """Return one random mutation of a checkpoint's files."""
    name = MANIFEST if rng.random() < 0.3 else rng.choice(sorted(files))
    data = files[name]
    kind = rng.choice(KINDS)
    if kind == "remove":
        return Damage(f"{kind} {name}", {name: None})
    if kind == "swap":
        other = rng.choice([each for each in sorted(files) if each != name])
        return Damage(f"{kind} {name} {other}", {name: files[other], other: data})
    if kind == "foreign":
        theirs = rng.choice(others)
        return Damage(f"{kind} {name}", {name: theirs[rng.choice(sorted(theirs))]})
    changed = _changed(kind, data, rng.choice(list(rng.choice(others).values())), rng)
    return Damage(f"{kind} {name}", {name: changed})


def _changed(kind: str, data: bytes, other: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(3)
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == "flip":
        k = rng.randrange(len(data))
        return data[:k] + bytes([data[k] ^ (1 << rng.randrange(8))]) + data[k + 1 :]
    if kind == "cut":
        return data[:i]
    if kind == "insert":
        return data[:i] + rng.randbytes(rng.randrange(1, 9)) + data[i:]
    if kind == "drop":
        return data[:i] + data[j:]
    if kind == "repeat":
        return data[:j] + data[i:]
    if kind == "zeros":
        return data[:i] + bytes(j - i) + data[j:]
    return data[:i] + other[: j - i] + data[j:]


def sign(body: dict[str, Any], format_name: str, version: tuple[int, int] = (1, 4)) -> bytes:
    """Return a manifest whose checksum fits its body, as anyone can make it from docs."""
    text = _canonical([format_name, list(version), body])
    head = {"format": format_name, "version": list(version), "checksum": xxhash.xxh3_64_hexdigest(text)}
    return _canonical({**head, "body": body})


def _canonical(node: Any) -> bytes:
    return json.dumps(node, separators=(",", ":")).encode()


def _tensor(dtype: str, shape: list[int], data: bytes, kind: str = "$tensor") -> dict[str, Any]:
    return {kind: {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}}


HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 23, 24, 25, 2**31, 2**62, 2**63, -(2**63), 10**30),
    *("", "x", "../x", "/etc/passwd", "all"),
    *([], {}, [[]], [0], [2**62, 2**62], [-1], {"$int": "0x1"}, {"$float": "nan"}, {"$float": "inf"}, {"$tuple": []}),
    *({"$float": "-0x1.8000000000000p+0"}, {"$dtype": "float64"}, {"$device": "cuda:7"}, {"$bytes": {"data": ""}}),
    *(_tensor("float32", [0], b""), _tensor("int64", [2**40], b""), _tensor("int64", [], bytes(8))),
    *(_tensor("int64", [1], b"\xff" * 8), _tensor("bool", [24], bytes(24)), _tensor("int64", [24], b"\x7f" * 192)),
    *(
        _tensor("float64", [24], b"\x7f" * 192),
        _tensor("<i8", [24], bytes(192), "$numpy"),
        _tensor("|O", [1], b"", "$numpy"),
    ),
]
"""What anyone may put in the place of any value."""


def edit(files: Files, format_name: str, rng: random.Random) -> Damage:
    """Return an edit of the manifest's body, or of a file, with checksums that fit."""
    body = json.loads(files[MANIFEST])["body"]
    if rng.random() < 0.15:
        whole = [key for key, node in body["arrays"].items() if "files" in node and node["files"][0]["nbytes"]]
        name = rng.choice(whole)
        record = body["arrays"][name]["files"][0]
        data = _changed(rng.choice(("flip", "zeros", "splice")), files[record["file"]], b"\xff" * 64, rng)
        record["checksums"] = [xxhash.xxh3_64_hexdigest(data)]  # small files are one block
        return Damage(f"rewrite {name}", {record["file"]: data, MANIFEST: sign(body, format_name)})
    what = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        part = "arrays" if rng.random() < 0.2 else "state"
        way = rng.choice([way for way in _ways(body[part]) if way])
        what.append(f"{part}{''.join(f'[{step!r}]' for step in way)}: {_replace(body[part], way, rng)}")
    return Damage("; ".join(what), {MANIFEST: sign(body, format_name)})


def _ways(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the ways to every value inside a piece of JSON."""
    yield way
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _ways(value, (*way, key))


def _replace(body: Any, way: tuple[Any, ...], rng: random.Random) -> str:
    """Change the value at the end of a way; return what it is now."""
    *before, last = way
    node = body
    for key in before:
        node = node[key]
    old = node[last]
    kind = rng.random()
    if kind < 0.1:
        del node[last]
        return "gone"
    if kind < 0.2 and isinstance(node, list):
        node.insert(last, copy.deepcopy(old))
        return "twice"
    if kind < 0.25 and isinstance(node, dict):
        node["more"] = 1
        return "with another key beside it"
    if kind < 0.6 and isinstance(old, int) and not isinstance(old, bool):
        node[last] = rng.choice((old + 1, old - 1, -old, old * 2, old + 2**32))
    elif kind < 0.8 and isinstance(old, str) and last == "data":
        node[last] = base64.b64encode(_tweaked(bytearray(base64.b64decode(old)), rng)).decode()
        return "other numbers"
    else:
        node[last] = copy.deepcopy(rng.choice(HOSTILE))
    return repr(node[last])[:80]


def _tweaked(raw: bytearray, rng: random.Random) -> bytes:
    """Put a hostile number in the place of an element, whatever its dtype."""
    if len(raw) >= 8 and rng.random() < 0.7:
        at = rng.randrange(len(raw) // 8) * 8
        number = rng.choice((-1, 0, 1, 23, 24, 25, 2**31, 2**62, -(2**63)))
        raw[at : at + 8] = struct.pack("<d", float("nan")) if rng.random() < 0.2 else struct.pack("<q", number)
    elif raw:
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 2, 127, 255))
    return bytes(raw)
