"""Batches of tokens beside the batcher and collator of TRL 1.16.0, on the same samples: rows, tensors and time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.groups import Group, Lease, Response, TokenBudget

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("OSTINATO_TRL", ROOT / "build" / "trl"))
"""`pip install --no-deps --target build/trl trl==1.16.0`, and in the same way what it imports."""
RANKS, MOST = 4, 8192


def lease_of(rng: np.random.Generator) -> Lease:
    """A lease of 32 groups of 8 responses; no two begin with the same token, so TRL finds no prefix to share."""
    groups = []
    for g in range(32):
        responses = []
        for r, length in enumerate(np.clip(rng.lognormal(6, 0.6, 8).astype(int), 2, MOST // 4)):
            tokens = torch.from_numpy(rng.integers(1000, 50_000, length))
            tokens[0] = 8 * g + r
            mask, logprobs = (
                torch.from_numpy(rng.random(length) < 0.8),
                torch.from_numpy(rng.random(length, np.float32)),
            )
            fields = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "reward": float(rng.random())}
            responses.append(Response(f"{r}", fields, done=True))
        groups.append(Group(f"{g}", None, 8, "leased", tuple(responses)))
    return Lease("lease", tuple(groups), "", 0.0)


def of_trl(lease: Lease, plan: list[list[list[int]]], folder: Path) -> dict[str, Any]:
    """What TRL makes of a lease, and of the rows of a plan."""
    samples = [
        {
            "input_ids": response.fields["tokens"],
            "completion_mask": response.fields["mask"].long(),
            "old_log_probs": response.fields["logprobs"],
            "advantage": response.fields["reward"],
            "group_id": group.id,
            "metrics": {},
        }
        for group in lease.groups
        for response in group.responses
    ]
    given, written = folder / "given.pt", folder / "written.pt"
    torch.save({"samples": samples, "ranks": RANKS, "max_tokens": MOST, "plan": plan}, given)
    path = os.pathsep.join([str(ROOT), str(FOLDER)])
    subprocess.run(
        [sys.executable, "-m", "tests.parity._trl", given, written],
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"},
        stdout=subprocess.DEVNULL,
    )
    result: dict[str, Any] = torch.load(written)
    return result


@pytest.mark.skipif(not (FOLDER / "trl").exists(), reason=f"TRL is not in {FOLDER}")
@pytest.mark.parametrize(("balance", "split"), [("tokens", False), ("attention", True)])
def test_rows_are_those_of_trl_or_fewer(tmp_path, balance, split):
    lease = lease_of(np.random.default_rng(3))
    budget = TokenBudget(max_tokens=MOST, ranks=RANKS, balance=balance, split=split)
    batches = budget.batches(lease)
    begun = time.perf_counter()
    batches = budget.batches(lease)
    seconds = time.perf_counter() - begun
    plan = budget.plan(lease)
    theirs = of_trl(lease, plan, tmp_path)
    assert sorted(number for rows in plan for row in rows for number in row) == list(range(256))
    assert len(batches) <= theirs["batches"] + 1  # TRL keeps its last rows open for the next samples
    assert 5 * seconds < theirs["seconds"]
    for batch, collated in zip(batches, theirs["collated"], strict=True):
        for rank, row in enumerate(batch):
            count = len(row["tokens"])
            assert count <= MOST
            assert torch.equal(row["tokens"], collated["input_ids"][rank][:count])
            assert torch.equal(row["positions"], collated["position_ids"][rank][:count])
            ends = collated["tree_cu_seqlens_q"][rank]
            assert torch.equal(row["cu_seqlens"], ends[ends >= 0])
            trained = row["mask"] & (row["positions"] > 0)
            terms = int(trained.sum())
            assert torch.equal(row["logprobs"][trained], collated["old_log_probs"][rank][:terms])
            sizes = row["cu_seqlens"].diff()
            assert torch.equal(row["reward"].repeat_interleave(sizes)[trained], collated["advantages"][rank][:terms])
