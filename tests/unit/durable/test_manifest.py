"""The manifest: golden bytes, versions, strict JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from ostinato.durable import FORMAT_VERSION, manifest, read_manifest, write_manifest
from ostinato.durable.manifest import MAX_MANIFEST_BYTES
from ostinato.errors import CheckpointError, DamagedFileError

if TYPE_CHECKING:
    from pathlib import Path

BODY = {"rows": 3, "names": ["b", "a"], "text": "é", "nothing": None, "half": 0.5}
GOLDEN = (
    b'{"format":"example","version":[1,4],"checksum":"700903b50a06bd2e",'
    b'"body":{"rows":3,"names":["b","a"],"text":"\\u00e9","nothing":null,"half":0.5}}\n'
)


def write_text(folder: Path, text: str | bytes) -> None:
    (folder / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def signed(node: dict[str, Any]) -> str:
    """The text of a manifest whose checksum fits."""
    covered = json.dumps([node["format"], node["version"], node["body"]], separators=(",", ":")).encode()
    head = {"format": node["format"], "version": node["version"], "checksum": xxhash.xxh3_64_hexdigest(covered)}
    return json.dumps({**head, "body": node["body"]}, separators=(",", ":"))


def test_golden_bytes(tmp_path):
    write_manifest(tmp_path, BODY, format_name="example")
    assert (tmp_path / "manifest.json").read_bytes() == GOLDEN
    assert FORMAT_VERSION == (1, 4)
    found = read_manifest(tmp_path, format_name="example")
    assert (found.format_name, found.version, found.body) == ("example", (1, 4), BODY)
    assert list(found.body) == list(BODY)
    write_text(tmp_path, GOLDEN[:-1])
    assert read_manifest(tmp_path, format_name="example").body == BODY, "the last line feed does not matter"
    with pytest.raises(CheckpointError, match="is of the format 'example', 'other' expected"):
        read_manifest(tmp_path, format_name="other")


def test_what_is_not_json_is_refused_and_the_old_manifest_stays(tmp_path):
    write_manifest(tmp_path, BODY, format_name="example")
    loop: dict[str, Any] = {}
    loop["self"] = loop
    for value in (float("nan"), float("inf"), object(), b"x", loop):
        with pytest.raises(CheckpointError):
            write_manifest(tmp_path, {"a": value}, format_name="example")
    for name in ("", "Example", "a b", "\u00e4", "x" * 65):
        with pytest.raises(CheckpointError, match="format_name"):
            write_manifest(tmp_path, {}, format_name=name)
    assert read_manifest(tmp_path, format_name="example").body == BODY


def test_size_limits(tmp_path, monkeypatch):
    assert MAX_MANIFEST_BYTES == 64 * 2**20
    write_manifest(tmp_path, {"a": "x" * 1000}, format_name="example")
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(CheckpointError, match=r"would take \d+ bytes, 500 are allowed"):
        write_manifest(tmp_path, {"a": "x" * 1000}, format_name="example")
    with pytest.raises(DamagedFileError, match="at most 500 are allowed"):
        read_manifest(tmp_path, format_name="example")


def test_versions(tmp_path):
    node: dict[str, Any] = {"format": "example", "version": [1, 7], "body": {}}
    write_text(tmp_path, signed(node))
    assert read_manifest(tmp_path, format_name="example").version == (1, 7)
    for version in ([0, 0], [1, 3], [2, 0], [10**30, 0]):
        write_text(tmp_path, signed({**node, "version": version}))
        with pytest.raises(CheckpointError, match=r"format version \d+\.\d; this release reads version 1\.4"):
            read_manifest(tmp_path, format_name="example")
    # The checksum of a later version may be another one: its number is looked at first.
    write_text(tmp_path, json.dumps({"format": "example", "version": [2, 0], "content": 1}))
    with pytest.raises(CheckpointError, match=r"this release reads version 1\.4"):
        read_manifest(tmp_path, format_name="example")


DAMAGED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe",
    b'{"format":"example","version":[1,4],"checksum":"0","body":{}}',
    b'{"format":"example","version":[1,4],"checksum":"0","body":[]}',
    b'{"format":"example","version":[1,4],"body":{}}',
    b'{"format":"example","version":[1,4],"checksum":"0","body":{"a":NaN}}',
    b'{"format":"example","version":[1,4],"checksum":"0","body":{"a":-Infinity}}',
    b'{"format":"example","version":[1,4],"checksum":"0","body":{"a":1e999}}',
    b'{"format":"example","version":[1,4],"checksum":"0","body":' + b"[" * 100_000,
    b'{"format":"example","version":[1,4],"checksum":"0","body":{"a":' + b"9" * 5000 + b"}}",
    GOLDEN.replace(b'"rows":3', b'"rows":4'),
    GOLDEN.replace(b"[1,4]", b"[1,5]"),
    GOLDEN.replace(b'"body"', b'"more":1,"body"'),
]


VERSIONS: list[Any] = [None, 1, "1.0", [1], [1, 0, 0], [1.0, 0], [True, 0], [1, -1]]


def test_damaged_text(tmp_path):
    node = {"format": "example", "checksum": "", "body": {}}
    versions = [json.dumps({**node, "version": version}).encode() for version in VERSIONS]
    for text in DAMAGED + versions:
        write_text(tmp_path, text)
        with pytest.raises(DamagedFileError):
            read_manifest(tmp_path, format_name="example")
