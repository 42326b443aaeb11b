"""Buffers of groups: wrong calls, waits, the log and its compaction."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ostinato import GroupBuffer, GroupLogger
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    KindError,
    OptionError,
    SchemaError,
    StorageMemoryError,
)
from ostinato.groups.log import Log

from ...tags import same_state
from ..buffers.refusals import refuses

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = {"tokens": [1, 2, 3]}


def filled(path: Path | None = None, groups: int = 2, **options: Any) -> GroupBuffer:
    """A buffer of groups of one response, all of them ready."""
    buffer = GroupBuffer(path, **{"size": 1, "sync": "never", **options})
    for name in buffer.admit([f"prompt {number}" for number in range(groups)]):
        buffer.append(name, {**TOKENS, "version": 3}, id="r")
    return buffer


def test_a_wrong_call_raises_and_changes_nothing():
    """Calls at the wrong time: `test_model.py`. Choices: `tests/contracts/test_options.py`."""
    b = filled(ahead=4)
    b.admit(["prompt 2"])
    b.append("2", TOKENS, id="begun", done=False)
    before = json.dumps(b._ledger.to_json())
    refuses(
        {
            OptionError: {
                "no group 'x'": lambda: b.append("x", TOKENS, id="r"),
                "must be text": lambda: b.append("2", TOKENS, id=""),
                "another prompt": lambda: b.admit(["other"], ids=["0"]),
                "occurs twice": lambda: b.admit(["a", "a"], ids=["x", "x"]),
                "2 ids for 1": lambda: b.admit(["a"], ids=["x", "y"]),
                "cursor": lambda: b.admit(["a"], cursor=object()),
                "more than the 4": lambda: b.admit(["a"] * 5),
                "no lease": (
                    lambda: b.ack("x", step=1),
                    lambda: b.renew("x"),
                ),
                "at least 0": lambda: b.ack("x", step=-1),
                "no group": lambda: b.drop("x", "reason"),
                "must be one of": lambda: b.ids("new"),
            },
            SchemaError: {
                "needs the field 'tokens'": lambda: b.append("2", {"reward": 1.0}, id="r"),
                r"'mask' must have shape \[3\]": lambda: b.append("2", {**TOKENS, "mask": [1, 0]}, id="r"),
                r"'reward' must have": lambda: b.append("2", {**TOKENS, "reward": np.ones(2)}, id="r"),
                "'reward style'": lambda: b.append("2", {**TOKENS, "reward": {"style": [1.0]}}, id="r"),
                r"shape \[tokens\]": lambda: b.append("2", {"tokens": torch.ones(2, 2).int()}, id="r"),
                "has the tensors": lambda: b.append("2", {**TOKENS, "mask": [1, 1, 1]}, id="begun", part=1),
            },
            KindError: {
                "integers": lambda: b.append("2", {"tokens": [0.5]}, id="r"),
                "holds numbers": lambda: b.append("2", {"tokens": ["a"]}, id="r"),
                "'version'": lambda: b.append("2", {**TOKENS, "version": "new"}, id="r"),
                "dict": lambda: b.append("2", [1, 2], id="r"),  # type: ignore[arg-type]
            },
            CheckpointError: {
                r"response\['more'\] is a": lambda: b.append("2", {**TOKENS, "more": object()}, id="r"),
            },
        }
    )
    assert json.dumps(b._ledger.to_json()) == before


@pytest.mark.parametrize(
    "options",
    [{"size": 0}, {"ahead": 0}, {"minimum": 1}, {"fail": True}, {"timeout_s": -1.0}, {"sync": "no"}],
)
def test_options_are_checked(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        GroupBuffer(**options)


def test_values_come_back_as_they_were_given(tmp_path):
    prompt: dict[str, Any] = {
        "text": "ü",
        "image": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "more": [1, None, float("inf")],
    }
    response: dict[str, Any] = {
        "tokens": torch.arange(3),
        "mask": [True, False, True],
        "logprobs": np.array([0.5, 1, 2], np.float32),
        "reward": {"right": 1.0, "short": [0.0, 1.0, 2.0]},
        "version": [4, 5, 6],
        "routing": torch.ones(3, 2, 2, dtype=torch.bfloat16),
        "metadata": {"tool": "calculator"},
        "empty": torch.empty(0, 5),
    }
    with GroupBuffer(tmp_path / "g", size=1) as buffer:
        (name,) = buffer.admit([prompt])
        buffer.append(name, response, id="r")
        before = response["tokens"].clone()
        response["tokens"].zero_()  # of the caller, as all that a lease returned: neither reaches the buffer
        groups = buffer.lease(id="lease").groups
    response["tokens"] = before
    with GroupBuffer.open(tmp_path / "g") as buffer:
        groups += buffer.lease(id="lease").groups
    response |= {"mask": torch.tensor(response["mask"]), "logprobs": torch.from_numpy(response["logprobs"])}
    response |= {
        "reward": {"right": 1.0, "short": torch.arange(3.0).double()},
        "version": torch.tensor(response["version"]),
    }
    for group in groups:  # from memory, and from the log
        same_state(group.prompt, prompt)
        same_state(group.responses[0].fields, response)


def test_parts_are_joined():
    buffer = GroupBuffer(size=1)
    (name,) = buffer.admit(["p"])
    buffer.append(name, {"tokens": [1], "version": 1, "reward": 0.0}, id="r", done=False)
    assert not buffer.group(name).responses[0].done
    buffer.append(name, {"tokens": [2, 3], "version": 2, "reward": 1.0}, id="r", part=1)
    fields = buffer.lease().groups[0].responses[0].fields
    assert (fields["tokens"].tolist(), fields["version"].tolist(), fields["reward"]) == ([1, 2, 3], [1, 2, 2], 1.0)
    buffer.ack(*buffer.leases(), step=3)
    assert buffer.stats().staleness == {2: 1}


def test_a_call_that_waits_goes_on_when_it_can():
    buffer = filled(groups=1, ahead=1)
    admitted = threading.Thread(target=buffer.admit, args=(["next"],))
    admitted.start()
    lease = buffer.lease()
    buffer.ack(lease, step=1)
    admitted.join(10)
    assert buffer.ids("waiting") == ["1"]
    threading.Timer(0.05, buffer.append, ("1", TOKENS), {"id": "r"}).start()
    assert buffer.lease(timeout_s=10).groups[0].id == "1"


def test_numbers_and_their_way_to_tensorboard():
    now = [1000.0]
    buffer = filled(groups=4, lease_s=9.0, clock=lambda: now[0])
    now[0] += 3
    buffer.ack(buffer.lease(2, id="a"), step=5)
    buffer.drop("2", "dull")
    buffer.lease(id="b")
    now[0] += 6
    buffer.renew("b")
    now[0] += 11  # it expires
    written: dict[str, Any] = {}
    writer = type("Writer", (), {"add_scalar": lambda _, name, value, step: written.update({name: (value, step)})})()
    stats = GroupLogger(buffer, writer)()
    assert (stats.staleness, stats.ages, stats.lease_times) == ({2: 2}, {32: 1}, {1: 1, 32: 1})
    assert (stats.dropped, stats.tokens, stats.tokens_per_s) == ({"dull": 1}, 12, 12 / 20)
    assert written["groups/counts/trained"] == (2, 5)
    assert (written["groups/lease_times/mean"], written["groups/lease_times/max"]) == ((16.5, 5), (32, 5))
    now[0] += 60
    assert buffer.stats().tokens_per_s == 0
    with pytest.raises(OptionError, match="add_scalar"):
        GroupLogger(buffer, 3)


def test_damage_before_the_end_is_cut_off_only_if_asked(tmp_path):
    filled(tmp_path / "g", groups=9, segment_bytes=1000).close()
    first, *later = sorted((tmp_path / "g").glob("segment-*"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"{first.name}.*repair=True"):
        GroupBuffer.open(tmp_path / "g")
    with GroupBuffer.open(tmp_path / "g", repair=True) as buffer:
        assert [cut.file for cut in buffer.cuts] == [str(first)]
        assert 0 < len(buffer.ids("ready")) < 9
    assert sorted(tmp_path.glob("g/*.lost")) == [path.with_name(f"{path.name}.lost") for path in later]


def test_a_damaged_value_names_its_group(tmp_path):
    buffer = filled(tmp_path / "g", recent_bytes=0)
    path = tmp_path / "g" / "segment-000000000001.log"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="group '1' cannot be read"):
        buffer.lease(2)
    assert not buffer.leases()
    buffer.drop("1", "damaged")
    assert buffer.lease(1).groups[0].id == "0"
    buffer.close()


def test_tokens_of_others_and_wrong_folders_are_errors(tmp_path):
    with filled(tmp_path / "g") as buffer, filled(tmp_path / "h") as other:
        token, foreign = buffer.position(0), other.position(0)
        with pytest.raises(CheckpointError):
            GroupBuffer(tmp_path / "g")
    for wrong, message in ((foreign, "of the log"), ({**token, "step": 7}, "step 7"), ({}, "what position")):
        with pytest.raises(CheckpointError, match=message):
            GroupBuffer.open(tmp_path / "g", at=wrong)
    with pytest.raises(CheckpointError):
        buffer.position(1)
    with pytest.raises(CheckpointNotFoundError):
        GroupBuffer.open(tmp_path / "none")


def test_a_full_disk_keeps_what_was_acknowledged(tmp_path, monkeypatch):
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with filled(tmp_path / "g") as buffer:
        buffer.admit(["third"])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StorageMemoryError):
                buffer.append("2", TOKENS, id="r")
        assert buffer.ids("waiting") == ["2"]
        assert buffer.append("2", TOKENS, id="r")
    with GroupBuffer.open(tmp_path / "g") as buffer:
        assert (buffer.ids("ready"), buffer.cuts) == (["0", "1", "2"], ())


def test_a_failed_sync_stops_the_buffer(tmp_path, monkeypatch):
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with filled(tmp_path / "g", sync="always") as buffer:
        buffer.admit(["third"])
        monkeypatch.setattr("ostinato.groups.log.sync_fd", fail)
        for _ in range(2):
            with pytest.raises(CheckpointError):
                buffer.append("2", TOKENS, id="r")


def test_threads_share_syncs(tmp_path, monkeypatch):
    syncs: list[int] = []

    def slow(fd: int) -> None:
        syncs.append(fd)
        time.sleep(0.02)

    with GroupBuffer(tmp_path / "g", size=8) as buffer:
        buffer.admit(["p"])
        monkeypatch.setattr("ostinato.groups.log.sync_fd", slow)
        threads = [threading.Thread(target=buffer.append, args=("0", TOKENS), kwargs={"id": str(k)}) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(syncs) < 6
        assert buffer.ids("ready") == ["0"]


def test_compaction_removes_what_was_trained(tmp_path):
    with filled(tmp_path / "g", groups=40, segment_bytes=2000) as buffer:
        before = buffer.stats().disk_bytes
        buffer.ack(buffer.lease(38), step=1)
        deadline = time.monotonic() + 20
        while buffer.stats().disk_bytes > before / 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # it happens by itself
        buffer.compact()
        assert isinstance(buffer._log, Log)
        assert buffer.stats().disk_bytes == sum(path.stat().st_size for path in (tmp_path / "g").glob("*.log"))
        assert [group.prompt for group in buffer.lease(2).groups] == ["prompt 38", "prompt 39"]
        with pytest.raises(OptionError):
            buffer.group("0")
    with GroupBuffer.open(tmp_path / "g") as buffer:
        assert buffer.stats().counts["trained"] == 38
        assert buffer.state("0") == ("trained", 1)
