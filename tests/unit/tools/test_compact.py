"""Patches are reported, verified and merged; an interrupted merge leaves a complete checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferEnsemble
from ostinato._backend import backend
from ostinato.durable import checkpoint as directory
from ostinato.errors import DamagedFileError
from ostinato.tools import compact, inspect_checkpoint, verify

from ...command import facts, run_here
from ...tags import buffer, fill, same_state, snapshot

if TYPE_CHECKING:
    from pathlib import Path


NAME = "0.id" if backend.native is None else "rows.0"
"""An array with the rows: small fields share one with the native extension only."""


def make() -> ReplayBuffer:
    return PrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(20_000), generator=torch.Generator(), batch_size=4
    )


@pytest.fixture
def chain(tmp_path: Path) -> tuple[ReplayBuffer, Path]:
    rb = make()
    fill(rb, range(15_000))
    for turn in range(4):
        rb.dumps(tmp_path / "chain", incremental=True)
        fill(rb, range(15_000 + 40 * turn, 15_040 + 40 * turn))
        rb.update_priority(torch.tensor([turn]), torch.tensor([5.0]))
    rb.dumps(tmp_path / "chain", incremental=True)
    return rb, tmp_path / "chain"


def test_the_chain_is_shown_and_a_fold_that_fails_leaves_it(chain, monkeypatch):
    rb, path = chain
    report = inspect_checkpoint(path)
    (rows,) = (found for found in report.chains if found.name == NAME)
    assert [(link.kind, link.rows, link.runs) for link in rows.links] == [("base", 15_000, 1)] + [("patch", 40, 1)] * 4
    fields = {field.name: field for field in report.fields}
    assert (fields["id"].minimum, fields["id"].maximum, fields["id"].rows) == (0, 15_159, 15_160)
    assert report.nbytes == sum(file.stat().st_size for file in path.iterdir())
    assert inspect_checkpoint(path, read_data=False).chains == report.chains
    assert "kind base, rows 15,000, runs 1" in run_here("inspect", "--quick", path).stdout
    before = sorted(file.name for file in path.iterdir())

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_manifest", fail)
    with pytest.raises(OSError, match="No space"):
        compact(path)
    monkeypatch.undo()
    assert sorted(file.name for file in path.iterdir()) == before
    other = make()
    other.loads(path)
    same_state(snapshot(other), snapshot(rb))


def test_folding_changes_nothing_but_the_files(chain):
    rb, path = chain
    report = compact(path)
    assert report.patches >= 8
    assert report.bytes_after < report.bytes_before
    assert inspect_checkpoint(path).chains == ()
    other = make()
    other.loads(path)
    same_state(snapshot(other), snapshot(rb))
    fill(rb, range(9))
    rb.dumps(path, incremental=True)
    assert [len(found.links) for found in inspect_checkpoint(path).chains if found.name == NAME] == [2]
    assert [facts(run_here("compact", path))["patches"] == "0" for _ in range(2)] == [False, True]
    assert compact(path).patches == 0
    assert run_here("compact", path / "nowhere").returncode == 1


def test_a_damaged_patch_is_found_by_every_reader(chain):
    _, path = chain
    rows = json.loads((path / "manifest.json").read_text())["body"]["arrays"][NAME]
    file = path / rows["files"][2]["file"]
    whole = file.read_bytes()
    for place in (3, len(whole) // 2, -1):
        data = bytearray(whole)
        data[place] ^= 16
        file.write_bytes(data)
        for read in (compact, inspect_checkpoint, make().loads):
            with pytest.raises(DamagedFileError, match=file.name):
                read(path)
        (found,) = verify(path).damage
        assert file.name in found.problem


def test_ensembles_are_folded_and_verified(tmp_path):
    both = ReplayBufferEnsemble(*(buffer(LazyTensorStorage(100)) for _ in range(2)))
    for turn in range(3):
        fill(both[0], range(60 + turn))
        both.dumps(tmp_path / "save", incremental=True)
        fill(both[0], range(3))
    both.dumps(tmp_path / "save", incremental=True)
    assert not verify(tmp_path / "save").damage
    assert compact(tmp_path / "save").patches > 0
