"""Tools read the folder of a buffer of groups without changing it: reports, pictures, damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ostinato import GroupBuffer
from ostinato.errors import CheckpointError
from ostinato.tools import inspect_groups, kind_of, verify
from ostinato.viz.datasets import open_source
from ostinato.viz.frames import Position, read_frame
from tests.command import run_here as ostinato

if TYPE_CHECKING:
    from pathlib import Path


def made(path: Path) -> dict[str, bytes]:
    """A trained group, a leased one and one that waits; return the files."""
    with GroupBuffer(path, size=2, sync="never", segment_bytes=1000) as buffer:
        buffer.position(0)
        buffer.admit([{"text": f"prompt {number}"} for number in range(3)])
        for name in ("0", "1"):
            first: dict[str, Any] = {"tokens": [5, 6], "logprobs": [-1.0, -2.0], "version": 1}
            buffer.append(name, first, id="a", done=False)
            buffer.append(name, {**first, "version": 2, "reward": {"x": 1.0, "y": [0.5, 0.0]}}, id="a", part=1)
            buffer.append(name, {"tokens": [7], "text": "seven"}, id="b")
        buffer.ack(buffer.lease(1), step=4)
        buffer.lease(1, consumer="rank 1", id="mine")
    return contents(path)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_reports_say_what_is_there(tmp_path):
    before = made(tmp_path / "g")
    report = inspect_groups(tmp_path / "g")
    assert (kind_of(tmp_path / "g"), report.positions, report.staleness) == (
        "groups",
        ("step 0",),
        ("3 steps: 1 group",),
    )
    assert (report.counts["leased"], report.leases[0].consumer, report.leases[0].groups) == (1, "rank 1", ("1",))
    states = [(group.id, group.state, group.detail, group.responses) for group in report.groups]
    assert states == [
        ("0", "trained", "step 4", "2 of 2"), ("1", "leased", "mine", "2 of 2"), ("2", "waiting", "", "0 of 2")
    ]  # fmt: skip
    assert (report.groups[0].rewards[0], np.isnan(report.groups[0].rewards[1])) == (1.5, True)
    assert (report.groups[0].versions, report.groups[0].tokens) == (("1 to 2", "-"), 5)
    frame = read_frame(open_source(tmp_path / "g"), Position(1, 3))
    assert [trace.name for trace in (*frame.current.traces, *frame.following.traces)] == [
        "a: reward 1.5, version 1 to 2, 4 tokens", "b: no reward, 1 token"
    ]  # fmt: skip
    assert {("state", "leased"), ("prompt", "prompt 1"), ("tokens", "6"), ("b", "seven")} <= {*frame.facts}
    for command in ("inspect", "verify"):
        done = ostinato(command, tmp_path / "g")
        assert (done.returncode, done.stderr) == (0, "")
    assert "ostinato.GroupBuffer" in ostinato("convert", tmp_path / "g", tmp_path / "h").stderr
    assert contents(tmp_path / "g") == before


def test_damage_is_reported_and_not_repaired(tmp_path):
    made(tmp_path / "g")
    last = max((tmp_path / "g").glob("segment-*"))
    last.write_bytes(last.read_bytes()[:-3])
    before = contents(tmp_path / "g")
    report = verify(tmp_path / "g")
    assert (report.ok, [damage.file for damage in report.damage]) == (False, [last.name])
    assert report.damage[0].problem.endswith("are no whole record")
    assert len(inspect_groups(tmp_path / "g").cuts) == 1
    assert contents(tmp_path / "g") == before
    GroupBuffer.open(tmp_path / "g").close()
    assert verify(tmp_path / "g").ok
    GroupBuffer(tmp_path / "empty").close()
    with pytest.raises(CheckpointError):
        open_source(tmp_path / "empty")
