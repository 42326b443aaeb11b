"""The buffer of IsaacGymEnvs: the ring, passes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.compat.isaacgymenvs import ReplayBuffer
from ostinato.errors import (
    EmptyBufferError,
    KeyMissingError,
    KindError,
    OptionError,
    SchemaError,
)

CPU = torch.device("cpu")


def rows(first: int, count: int) -> dict[str, torch.Tensor]:
    """Rows that say which they are, in two fields of different dtypes."""
    number = torch.arange(first, first + count)
    return {"amp_obs": number[:, None] * torch.ones(3), "id": number}


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    assert (batch["amp_obs"] == batch["id"][:, None]).all()
    return batch["id"].tolist()


@given(
    size=st.integers(1, 9),
    script=st.lists(
        st.tuples(st.sampled_from(["store", "sample", "reset"]), st.integers(1, 25)), min_size=1, max_size=12
    ),
)
def test_it_is_a_ring_whose_passes_give_each_slot_once(size: int, script: list[tuple[str, int]]) -> None:
    buffer = ReplayBuffer(size, CPU)
    held: dict[int, int] = {}
    total, drawn = 0, set[int]()
    for verb, count in [("store", 2), *script]:
        if verb == "store":
            buffer.store(rows(total, count))
            held |= {i % size: i for i in range(total, total + count)}
            total += count
        elif verb == "reset":
            buffer.reset()
            total, drawn = 0, set()
            held = {}
        elif held:
            slots = {row: slot for slot, row in held.items()}
            for row in ids(buffer.sample(count)):
                assert slots[row] not in drawn, "a row came twice in a pass"
                drawn = drawn | {slots[row]} if len(drawn) + 1 < len(held) else set()
        assert buffer.get_total_count() == total
        assert buffer.get_buffer_size() == size


def test_memory_takes_the_form_of_the_first_rows_and_stays() -> None:
    buffer = ReplayBuffer(100, "cpu")
    assert buffer._rows.storage.nbytes == 0
    buffer.store({"a": torch.zeros(4, 2, 3, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.uint8)})
    columns = buffer._rows.storage.columns  # type: ignore[attr-defined]
    where = columns[("a",)].data_ptr()
    assert columns[("a",)].shape == (100, 2, 3)
    batch = buffer.sample(7)
    assert (batch["a"].dtype, batch["b"].dtype, batch["a"].shape) == (torch.float64, torch.uint8, (7, 2, 3))
    assert batch["a"].device == CPU
    buffer.reset()
    buffer.store({"a": torch.ones(4, 2, 3, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.uint8)})
    assert buffer._rows.storage.columns[("a",)].data_ptr() == where  # type: ignore[attr-defined]
    assert (buffer.sample(4)["a"] == 1).all()


def test_draws_are_shuffled_copies_that_follow_torchs_generator() -> None:
    orders = []
    for seed in (3, 3, 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            buffer, given = ReplayBuffer(20, CPU), rows(0, 20)
            buffer.store(given)
            given["id"].fill_(-1)
            orders.append(ids(buffer.sample(60)))
            buffer.sample(20)["id"].fill_(-1)
            assert sorted(ids(buffer.sample(10)) + ids(buffer.sample(10))) == list(range(20))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:40]


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ({"amp_obs": torch.zeros(3, 3)}, KeyMissingError, r"missing \['id'\]"),
        ({**rows(0, 3), "extra": torch.zeros(3)}, KeyMissingError, r"unknown \['extra'\]"),
        ({"amp_obs": torch.zeros(3, 3), "id": torch.arange(4)}, SchemaError, "field 'id' must be .*batch size"),
        ({"amp_obs": torch.zeros(3, 4), "id": torch.arange(3)}, SchemaError, "field 'amp_obs' must be float32"),
        ({"amp_obs": torch.zeros(3, 3), "id": torch.tensor(3)}, SchemaError, "field 'id' must hold rows"),
        ({**rows(0, 3), "id": torch.zeros(3).long().to("meta")}, OptionError, "field 'id' is on meta"),
        ({**rows(0, 3), "id": [1, 2, 3]}, KindError, "field 'id' must be a tensor, got list"),
        (torch.zeros(3), KindError, "a dict of named tensors, got Tensor"),
        ({}, KeyMissingError, "must have the keys"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(data: Any, error: type[Exception], says: str) -> None:
    buffer = ReplayBuffer(10, CPU)
    buffer.store(rows(0, 5))
    with pytest.raises(error, match=says):
        buffer.store(data)
    assert buffer.get_total_count() == 5
    assert sorted(ids(buffer.sample(5))) == list(range(5))


def test_first_rows_and_arguments_are_checked() -> None:
    buffer = ReplayBuffer(10, CPU)
    with pytest.raises(EmptyBufferError, match="empty storage: add rows first"):
        buffer.sample(1)
    with pytest.raises(SchemaError, match=r"field 'id' has batch size \[4\], field 'amp_obs' has \[3\]"):
        buffer.store({"amp_obs": torch.zeros(3, 3), "id": torch.arange(4)})
    with pytest.raises(SchemaError, match="no fields"):
        buffer.store({})
    buffer.store({"other": torch.zeros(3)})  # the schema of rows that were refused does not stick
    calls: list[tuple[Any, str]] = [
        (lambda: buffer.sample(0), "n must be"),
        (lambda: buffer.sample(1.5), r"n must be an integer, got 1\.5"),  # type: ignore[arg-type]
        (lambda: ReplayBuffer(0, CPU), "buffer_size"),
        (lambda: ReplayBuffer(10, "auto"), "device must be"),
    ]
    if not torch.cuda.is_available():
        calls.append((lambda: ReplayBuffer(10, torch.device("cuda:0")), "torch sees no CUDA device"))
    for call, says in calls:
        with pytest.raises((OptionError, KindError), match=says):
            call()
    assert repr(buffer) == "ReplayBuffer(buffer_size=10, device=cpu, rows=3, total_count=3)"
    buffer.reset()
    with pytest.raises(EmptyBufferError):
        buffer.sample(1)
