"""TED2Flat and Flat2TED: layout, files, bad input. Beside TorchRL's: `tests/parity/test_ted.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from tests.tags import same_state

from ostinato import Flat2TED, TED2Flat
from ostinato.errors import CheckpointError, KeyMissingError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def ring(steps: int, lanes: int, written: int, lengths: list[int]) -> TensorDict:
    """Rows in TED format `[steps, lanes]` as a ring holds them after `written` steps of each lane.

    `obs` is 1000 * lane + step written; at ends `next.obs` is minus that. Lanes end out of step with each other.
    """
    obs = torch.zeros(steps, lanes, 2)
    after = torch.zeros(steps, lanes, 2)
    done = torch.zeros(steps, lanes, 1, dtype=torch.bool)
    for lane in range(lanes):
        left, turn = lengths[lane % len(lengths)], lane
        for step in range(written):
            left -= 1
            row, number = step % steps, float(1000 * lane + step)
            obs[row, lane] = number
            after[row, lane] = -number if left == 0 else number + 1
            done[row, lane] = left == 0
            if left == 0:
                turn += 1
                left = lengths[turn % len(lengths)]
    newest = (written - 1) % steps
    after[newest] = obs[newest] + 0.5  # what follows the newest step is not stored anywhere else
    data: dict[str, Any] = {
        "obs": obs,
        "pixels": {"small": (obs[..., :1] * 3).to(torch.int32)},
        "action": obs[..., :1] * 2,
        "next": {
            "obs": after,
            "pixels": {"small": (after[..., :1] * 3).to(torch.int32)},
            "reward": after[..., :1] * 7,
            "done": done,
            "terminated": done & (after[..., :1] < -5),
        },
    }
    data |= {name: torch.zeros_like(done) for name in ("done", "terminated")}
    return TensorDict(data, [steps, lanes])


def hook(shift: int, *, full: bool) -> TED2Flat:
    made = TED2Flat()
    made.shift, made.is_full = shift, full
    return made


def test_more_than_one_dimension_of_environments_and_files(tmp_path: Path) -> None:
    rows = ring(5, 6, 9, [2, 3])
    flat = hook(4, full=True)(rows.reshape(5, 2, 3), path=tmp_path / "flat")
    same_state(flat["obs"], hook(4, full=True)(rows)["obs"])
    for found in (flat, TensorDict.load_memmap(tmp_path / "flat")):
        same_state(Flat2TED()(found).reshape(5, 6), rows)
    whole = ring(6, 1, 6, [4])[:, 0]  # without marks all rows are there
    assert TED2Flat()(whole)["obs"][:, 0].tolist() == [0, 1, 2, 3, -3, 4, 5, 5.5]
    for form in (whole, whole.to_dict()):
        same_state(Flat2TED()(TED2Flat()(form)), whole)


def changed(rows: TensorDict, key: Any, value: Any, step: int | None = None) -> TensorDict:
    """Rows with another value of a field, at one step or all."""
    other = rows.clone()
    if step is None:
        return other.set(key, value)
    other.get(key)[step] = value
    return other


def test_rows_that_would_not_come_back_and_bad_input_are_refused() -> None:
    rows = ring(6, 1, 6, [3])[:, 0]
    broken = changed(rows, ("next", "obs"), -1.0, 1)  # as after n-step sums
    hook(1, full=False)(broken)  # of rows never written nothing is asked
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: TED2Flat()(broken), CheckpointError, r"in 1 rows field \('next', 'obs'\) is not 'obs'"),
        (
            lambda: TED2Flat()(changed(rows, "terminated", True, 2)),
            CheckpointError,
            "'terminated' at the root",
        ),
        (lambda: TED2Flat()(changed(rows, "reward", torch.zeros(6))), KeyMissingError, "stores 'reward' and"),
        (
            lambda: TED2Flat()(changed(rows, "reward", torch.zeros(6, 1))),
            CheckpointError,
            "'reward' at the root",
        ),
        (lambda: TED2Flat(done_key="over")(rows), KeyMissingError, "no field 'over'"),
        (lambda: TED2Flat()(rows.exclude("obs")), KeyMissingError, r"'obs' and \('next', 'obs'\)"),
        (lambda: TED2Flat()(torch.zeros(3)), CheckpointError, "takes a TensorDict"),
        (lambda: hook(7, full=True)(rows), OptionError, "shift must be in"),
        (lambda: hook(-1, full=True)(rows), OptionError, "shift must be in"),
        (lambda: hook(0, full=False)(rows), OptionError, "shift must be in"),
        (lambda: TED2Flat(done_keys="done"), OptionError, "done_keys must be a tuple"),
        (lambda: Flat2TED(shift_key=3), OptionError, "a key is text"),  # type: ignore[arg-type]
        (lambda: TED2Flat(done_key=("next", "obs"))(rows), CheckpointError, "one flag for each row"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_damage_is_refused() -> None:
    flat = TED2Flat()(ring(4, 1, 4, [3])[:, 0])
    damages: list[tuple[Any, str]] = [
        ({"done": torch.zeros(4)}, "takes the TensorDict"),
        (changed(flat, "obs", flat["obs"][:-1].clone()), r"field 'obs' must hold 4 or 6 values, got shape \[5, 2\]"),
        (flat.clone().set_non_tensor("_storage_shape", (7,)), r"must have 7 flags 'done', got shape \[4, 1\]"),
    ]
    for key, value in (
        ("shift", 9),
        ("shift", "x"),
        ("is_full", None),
        ("_storage_shape", (0,)),
        ("_storage_shape", 2.5),
    ):
        damages.append((flat.clone().set_non_tensor(key, value), "must contain the order of its rows"))
    for damaged, message in damages:
        with pytest.raises(CheckpointError, match=message):
            Flat2TED()(damaged)
