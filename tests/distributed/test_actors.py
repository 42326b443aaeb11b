"""The classes that run in actors, without a cluster: a write does what it does in the buffer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

from ostinato import LazyTensorStorage, ListStorage, RateLimiter, ReplayBuffer, TensorDictReplayBuffer
from ostinato.distributed.actors import BufferActor, BufferSpec
from ostinato.distributed.sampling import Part, join_parts
from ostinato.distributed.serialization import decode, encode
from ostinato.distributed.writing import count_rows
from ostinato.errors import CastWarning, KindError, SchemaError


def host(storage: Any = None, **options: Any) -> BufferActor:
    storage = LazyTensorStorage(8) if storage is None else storage
    return BufferActor(BufferSpec(ReplayBuffer, (), {"storage": storage, "batch_size": 4, **options}, None))


def call(actor: BufferActor, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method as a handle does, with pickled arguments and results."""
    request = pickle.loads(pickle.dumps(encode((name, args, kwargs))))
    return decode(pickle.loads(pickle.dumps(actor.call_polling(0.0, request))))


def test_values_are_cast_by_the_buffer() -> None:
    actor = host()
    call(actor, "extend", {"x": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int32), "h": torch.zeros(2).half()})
    call(actor, "add", {"x": np.float64(0.1), "n": 3, "h": 0.5})
    call(actor, "extend", {"x": np.array([1, 2]), "n": np.array([1.0, 2.0]), "h": np.ones(2)})
    rows = call(actor, "__getitem__", slice(None))
    assert rows["x"].tolist() == torch.tensor([0, 0, 0.1, 1, 2]).tolist()
    assert rows["n"].dtype is torch.int32
    with pytest.raises(SchemaError, match=r"'n' must be int32, got float64 with the value 0\.5"):
        call(actor, "add", {"x": 1, "n": 0.5, "h": 0})
    with pytest.warns(CastWarning):
        call(actor, "add", {"x": 1, "n": 1, "h": 0.1})


@pytest.mark.parametrize("limited", [False, True])
def test_no_rows_change_nothing(limited: bool) -> None:
    limiter = {"rate_limiter": RateLimiter(1.0, 1.0, timeout_s=0.01)} if limited else {}
    actor = host(**limiter)
    nothing: list[Any] = [{"x": torch.zeros(0, 3)}, []]
    for _ in range(2):
        for none in nothing:
            index = call(actor, "extend", none)
            assert (index.dtype, index.shape) == (torch.int64, (0,))
        if limited:
            break
        call(actor, "extend", {"x": torch.zeros(1, 3)})
    assert call(actor, "write_count") == (0 if limited else 2)


def test_no_rows_count_as_none() -> None:
    nested = {"a": {"b": np.zeros((0, 2))}}
    nothing: list[Any] = [[], torch.zeros(0, 3), nested, TensorDict({"x": torch.zeros(0)}, [0])]
    for none in nothing:
        assert count_rows(none) == 0


def test_ragged_rows_are_sent_as_lazy_stacks_and_are_not_joined() -> None:
    rows = [TensorDict({"x": torch.arange(n + 1)}) for n in range(3)]
    actor = BufferActor(BufferSpec(TensorDictReplayBuffer, (), {"storage": ListStorage(8), "batch_size": 4}, None))
    call(actor, "extend", rows)
    batch = call(actor, "sample")
    assert [one["x"].tolist() for one in batch.unbind(0)] == [list(range(n + 1)) for n in batch["index"].tolist()]
    ragged = call(actor, "__getitem__", slice(0, 3))
    part = Part(0, ragged, {"index": torch.arange(3)}, torch.arange(3))
    with pytest.raises(KindError, match="tensors of one shape"):
        join_parts([part])


def test_parts_of_different_shapes_are_not_joined_and_dtypes_are_promoted() -> None:
    spots = (torch.tensor([0, 1]), torch.tensor([2, 3]))

    def parts(*values: torch.Tensor) -> list[Part]:
        return [Part(i, {"x": value}, {"index": torch.arange(2)}, spots[i]) for i, value in enumerate(values)]

    found, _ = join_parts(parts(torch.zeros(2), torch.ones(2, dtype=torch.float64)))
    assert torch.equal(found["x"], torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    with pytest.raises(SchemaError, match="shards 0 and 1 hold rows of different schemas"):
        join_parts(parts(torch.zeros(2), torch.zeros(2, 3)))
