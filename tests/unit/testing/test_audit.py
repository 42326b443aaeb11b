"""The audit: ours has no findings, a plain buffer has none, and each fault put into it is found by its name."""

from __future__ import annotations

import json
import pickle
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ostinato import ReplayBuffer
from ostinato.errors import OptionError
from ostinato.testing.audit import Adapter, Case, Sample, audit, examine
from ostinato.testing.audit.report import KINDS
from tests.command import run_here

if TYPE_CHECKING:
    from pathlib import Path

    from ostinato.testing.audit import Step


class Plain(Adapter):
    """A list of the newest rows of one environment; `factory` is the name of a fault."""

    features = ("n_step", "sequence", "priority", "save")

    def make(self, case: Case) -> Any:
        capacity = case.capacity * (2 if self.factory == "old-row" else 1)
        return {"rows": deque(maxlen=capacity), "priorities": deque(maxlen=capacity), "written": 0}

    def add(self, buffer: Any, step: Step) -> None:
        buffer["rows"].append([field[0].numpy() for field in step])
        buffer["priorities"].append(1.0)
        buffer["written"] += 1

    def sample(self, buffer: Any, case: Case, size: int) -> Sample:
        rows, priorities = list(buffer["rows"]), buffer["priorities"]
        follows = [not any(each[4] or each[5] for each in rows[at : at + case.sequence - 1]) for at in range(len(rows))]
        whole = len(rows) - (0 if self.factory == "joined-sequence" else case.sequence - 1)
        starts = [at for at in range(whole) if follows[at]]
        starts = [at for at in starts if not (self.factory == "never-drawn" and rows[at][5])]
        weights = [priorities[at] ** (1 if self.factory == "priority-probability" else 0.6) for at in starts]
        if self.factory == "not-uniform":
            weights[len(starts) // 2] *= 3
        picks = random.choices(range(len(starts)), weights, k=size)
        windows = [
            self.transition(rows, (starts[pick] + at) % len(rows), case)
            for pick in picks
            for at in range(case.sequence)
        ]
        obs, action, reward, after, terminated, truncated, discount = map(np.array, zip(*windows, strict=True))
        weight = [1.0 if self.factory == "importance-weight" else priorities[starts[pick]] ** -0.24 for pick in picks]
        serials = [starts[pick] + buffer["written"] - len(rows) for pick in picks]
        return Sample(obs, action, reward, after, terminated, truncated, discount, weight, serials)

    def transition(self, rows: list[Any], at: int, case: Case) -> list[Any]:
        window = rows[at : at + case.n_steps]
        ends = [each[4] or each[5] for each in window]
        steps = ends.index(True) + 1 if True in ends else len(window)
        if self.factory == "n-step-ring-end" and len(rows) == case.capacity:
            window = [*window, *rows][: case.n_steps]
            steps = steps if True in ends else case.n_steps
        steps = len(window) if self.factory == "n-step-sum" else steps
        reward = sum(0.5**k * each[2] for k, each in enumerate(window[:steps]))
        last = rows[min(at + steps, len(rows)) - 1]
        row = [*rows[at][:2], reward, *last[3:], 0.5**steps]
        return self.broken(row, rows, at + steps)

    def broken(self, row: list[Any], rows: list[Any], after: int) -> list[Any]:
        fault, (obs, _, _, _, terminated, truncated, discount) = self.factory, row
        following = rows[after % len(rows)][0]
        changes = {
            "mixed-row": (1, row[1] + 1),
            "values": (0, np.clip(obs, -200, 200).astype(obs.dtype)),
            "dtype": (0, obs.astype(np.float64)),
            "end-flag": (4, terminated | truncated),
            "n-step-discount": (6, discount / 2),
            "next-at-truncation": (3, following if truncated else row[3]),
            "next-at-termination": (3, following if terminated else row[3]),
            "next-at-ring-end": (3, following if after == len(rows) and not (terminated or truncated) else row[3]),
        }
        if fault in changes:
            place, value = changes[fault]
            row[place] = value
        return row

    def prioritize(self, buffer: Any, sample: Sample, priorities: Any) -> None:
        length = len(buffer["rows"])
        for serial, priority in zip(sample.index, priorities, strict=True):
            at = serial - buffer["written"] + length
            if at >= 0 or self.factory == "stale-priority":
                buffer["priorities"][at % length] = float(priority)

    def save(self, buffer: Any, path: Path) -> None:
        if self.factory == "state-lost":
            buffer = {**buffer, "rows": deque(list(buffer["rows"])[:-2], buffer["rows"].maxlen)}
        saved = path if self.factory == "checkpoint-lost" else path.with_suffix(".new")
        saved.write_bytes(pickle.dumps(buffer))
        saved.rename(path)

    def load(self, case: Case, path: Path) -> Any:
        loaded = pickle.loads(path.read_bytes())
        loaded["priorities"][0] = 5.0 if self.factory == "draws-changed" else loaded["priorities"][0]
        return loaded


def test_ours_has_no_findings():
    assert audit(ReplayBuffer).findings == ()


FAULTS = sorted(set(KINDS) - {"memory", "raises", "n-step-newest"})


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_each_fault_is_found(fault):
    report = examine(Plain(fault))
    kinds = {finding.kind: finding for finding in report.findings if finding.kind != "memory"}
    assert fault in kinds if fault else not kinds, str(report)


def test_the_smallest_case_shows_the_fault():
    (found,) = [each for each in examine(Plain("next-at-ring-end")).findings if each.kind == "next-at-ring-end"]
    case = eval(found.case, {"Case": Case})
    assert max(case.capacity, case.steps) == 2
    assert found.severity == "error"


def test_a_test_fails_with_the_findings():
    with pytest.raises(AssertionError, match="next-at-truncation: the next observation of environment 0"):
        audit(Plain("next-at-truncation"))
    with pytest.raises(OptionError):
        audit(deque)


def test_the_command_writes_json_and_a_page(tmp_path):
    page = tmp_path / "audit.html"
    done = run_here("audit", "collections:deque", "--adapter", f"{__file__}:Plain", "--json", "--page", page)
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["ok"]
    assert report["left_out"] == []
    assert report["buffer"] in page.read_text()
    assert run_here("audit", "collections:deque").returncode == 2
