"""The classes that run in actors, without a cluster: a write does what it does in the buffer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

from ostinato import LazyTensorStorage, RateLimiter, ReplayBuffer
from ostinato.distributed.actors import BufferActor, BufferSpec
from ostinato.distributed.serialization import decode, encode
from ostinato.distributed.writing import count_rows
from ostinato.errors import CastWarning, SchemaError


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


def test_no_rows_change_nothing() -> None:
    """Not even a limiter is asked."""
    nothing: list[Any] = [{"x": torch.zeros(0, 3)}, []]
    for options in ({}, {"rate_limiter": RateLimiter(1.0, 1.0, timeout_s=0.01)}):
        actor = host(**options)
        for none in nothing:
            index = call(actor, "extend", none)
            assert (index.dtype, index.shape) == (torch.int64, (0,))
        assert call(actor, "write_count") == 0
    nothing += [torch.zeros(0, 3), {"a": {"b": np.zeros((0, 2))}}, TensorDict({"x": torch.zeros(0)}, [0])]
    for none in nothing:
        assert count_rows(none) == 0
