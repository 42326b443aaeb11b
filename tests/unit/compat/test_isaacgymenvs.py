"""The buffer of IsaacGymEnvs: the ring, passes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.compat.isaacgymenvs import ReplayBuffer
from ostinato.errors import EmptyBufferError, KeyMissingError, KindError, OptionError, SchemaError

from ..buffers.refusals import raises

CPU = torch.device("cpu")


def rows(first: int, count: int) -> dict[str, torch.Tensor]:
    """Rows that say which they are, in two fields of different dtypes and shapes."""
    number = torch.arange(first, first + count)
    return {"amp_obs": number.double()[:, None, None] * torch.ones(2, 3, dtype=torch.float64), "id": number}


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    assert (batch["amp_obs"].dtype, batch["amp_obs"].shape[1:], batch["id"].dtype) == (
        torch.float64,
        (2, 3),
        torch.int64,
    )
    assert (batch["amp_obs"] == batch["id"][:, None, None]).all()
    return batch["id"].tolist()


@given(
    size=st.integers(1, 9),
    script=st.lists(
        st.tuples(st.sampled_from(["store", "sample", "reset"]), st.integers(1, 25)), min_size=1, max_size=12
    ),
)
def test_it_is_a_ring_whose_passes_give_each_slot_once(size, script):
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


def test_draws_are_shuffled_copies_that_follow_torchs_generator():
    orders = []
    for seed in (3, 3, 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            buffer, given = ReplayBuffer(20, "cpu"), rows(0, 20)
            buffer.store(given)
            given["id"].fill_(-1)
            orders.append(ids(buffer.sample(60)))
            buffer.sample(20)["id"].fill_(-1)
            assert sorted(ids(buffer.sample(20))) == list(range(20))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:40]


def test_errors_change_nothing():
    buffer, empty = ReplayBuffer(10, CPU), ReplayBuffer(10, CPU)
    good = rows(0, 3)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"amp_obs": good["amp_obs"]}, KeyMissingError, r"missing \['id'\]"),
        ({**good, "id": torch.arange(4)}, SchemaError, "field 'id' must be .*batch size"),
        ({**good, "id": good["id"].to("meta")}, OptionError, "field 'id' is on meta"),
        ({**good, "id": [1, 2, 3]}, KindError, "field 'id' must be a tensor, got list"),
        (torch.zeros(3), KindError, "a dict of named tensors, got Tensor"),
    ]
    first = {**good, "id": torch.arange(4)}
    buffer.store(rows(0, 5))
    raises(
        *((lambda data=data: buffer.store(data), error, says) for data, error, says in wrong),
        (lambda: empty.sample(1), EmptyBufferError, "empty storage: add rows first"),
        (lambda: empty.store(first), SchemaError, r"field 'id' has batch size \[4\], field 'amp_obs' has \[3\]"),
        (lambda: buffer.sample(0), OptionError, "n must be"),
        (lambda: buffer.sample(1.5), KindError, r"n must be a positive integer, got 1\.5"),  # type: ignore[arg-type]
        (lambda: ReplayBuffer(0, CPU), OptionError, "buffer_size"),
        (lambda: ReplayBuffer(10, "auto"), OptionError, "device must be"),
    )
    if not torch.cuda.is_available():
        raises((lambda: ReplayBuffer(10, "cuda:0"), OptionError, "torch sees no CUDA device"))
    assert buffer.get_total_count() == 5
    assert sorted(ids(buffer.sample(5))) == list(range(5))
    empty.store({"other": torch.zeros(3)})  # the schema of rows that were refused does not stick
    assert repr(empty) == "ReplayBuffer(buffer_size=10, device=cpu, rows=3, total_count=3)"
    empty.reset()
    with pytest.raises(EmptyBufferError):
        empty.sample(1)
