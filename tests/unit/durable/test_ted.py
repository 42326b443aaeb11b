"""TED2Flat and Flat2TED: layout, bad input. Beside TorchRL's: `tests/parity/test_ted.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.tags import same_state
from tests.unit.buffers.refusals import refuses

from ostinato import Flat2TED, TED2Flat
from ostinato.errors import CheckpointError, KeyMissingError, OptionError


def episodes(steps: int) -> TensorDict:
    """Rows of episodes of three steps in TED format; at ends `next.obs` is minus the number of the row."""
    number = torch.arange(float(steps))[:, None]
    done = number % 3 == 2
    after = torch.where(done, -number, number + 1)
    after[-1] = number[-1] + 0.5  # what follows the newest step is not stored anywhere else
    flags = {name: torch.zeros_like(done) for name in ("done", "terminated")}
    now = {"obs": number.expand(-1, 2), "pixels": {"small": number.int() * 3}}
    then = {"obs": after.expand(-1, 2), "pixels": {"small": (after * 3).int()}, "reward": after * 7}
    return TensorDict({**now, **flags, "next": {**then, **dict.fromkeys(flags, done)}}, [steps])


def hook(shift: int, *, full: bool) -> TED2Flat:
    made = TED2Flat()
    made.shift, made.is_full = shift, full
    return made


def test_dicts_and_more_than_one_dimension_of_environments_come_back():
    whole = episodes(6)
    assert TED2Flat()(whole)["obs"][:, 0].tolist() == [0, 1, 2, -2, 3, 4, 5, 5.5]
    for rows in (whole, torch.stack([whole] * 6, 1).reshape(6, 2, 3)):
        same_state(Flat2TED()(TED2Flat()(rows)), rows)
    same_state(Flat2TED()(TED2Flat()(whole.to_dict())), whole)


def changed(rows: TensorDict, key: Any, value: Any, step: int | None = None) -> TensorDict:
    """Rows with another value of a field, at one step or all."""
    other = rows.clone()
    if step is None:
        return other.set(key, value)
    other.get(key)[step] = value
    return other


def test_rows_that_would_not_come_back_and_bad_input_are_refused():
    rows = episodes(6)
    broken = changed(rows, ("next", "obs"), -1.0, 1)  # as after n-step sums
    hook(1, full=False)(broken)  # of rows never written nothing is asked
    refuses(
        {
            CheckpointError: {
                r"in 1 rows field \('next', 'obs'\) is not 'obs'": lambda: TED2Flat()(broken),
                "'terminated' at the root": lambda: TED2Flat()(changed(rows, "terminated", True, 2)),
                "'reward' at the root": lambda: TED2Flat()(changed(rows, "reward", torch.zeros(6, 1))),
                "takes a TensorDict": lambda: TED2Flat()(torch.zeros(3)),
                "one flag for each row": lambda: TED2Flat(done_key=("next", "obs"))(rows),
            },
            KeyMissingError: {
                "stores 'reward' and": lambda: TED2Flat()(changed(rows, "reward", torch.zeros(6))),
                "no field 'over'": lambda: TED2Flat(done_key="over")(rows),
                r"'obs' and \('next', 'obs'\)": lambda: TED2Flat()(rows.exclude("obs")),
            },
            OptionError: {
                "shift must be in": (
                    lambda: hook(7, full=True)(rows),
                    lambda: hook(-1, full=True)(rows),
                    lambda: hook(0, full=False)(rows),
                ),
                "done_keys must be a tuple": lambda: TED2Flat(done_keys="done"),
                "a key is text": lambda: Flat2TED(shift_key=3),  # type: ignore[arg-type]
            },
        }
    )


def test_damage_is_refused():
    flat = TED2Flat()(episodes(4))
    damages: list[Any] = [
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
