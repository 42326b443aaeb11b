"""How a buffer is made: delayed parts, factories, and the options of TorchRL that are refused with a reason."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ostinato import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ostinato.errors import KindError, OptionError

from ...threads import together
from .refusals import raises


def _storage() -> LazyTensorStorage:
    return LazyTensorStorage(10)


def test_options_without_counterpart_name_the_reason():
    wrong: list[Any] = [
        ({"service_backend": "ray"}, OptionError, "RayReplayBuffer"),
        ({"service_backend_options": {"remote_config": {}}}, OptionError, "only valid for a remote ReplayBuffer"),
        ({"transport": "distributed"}, OptionError, "transport='auto' or 'direct'"),
        ({"transport_options": {"backend": "gloo"}}, OptionError, "transport_options"),
        ({"transform": _identity, "transform_factory": _identity}, KindError, "mutually exclusive"),
        ({"transform_factory": 3}, KindError, "must be a callable"),
    ]
    for cls in (ReplayBuffer, TensorDictReplayBuffer):
        raises(*((lambda cls=cls, options=options: cls(**options), error, words) for options, error, words in wrong))
    for transport in ("auto", "direct"):
        direct: dict[str, Any] = {"service_backend": "direct", "service_backend_options": {}, "transport": transport}
        assert ReplayBuffer(storage=_storage(), **direct).extend(torch.arange(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("cls", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_priorities_are_on_the_device_of_the_storage(cls):
    for device in (None, "cpu", torch.device("cpu")):
        assert cls(alpha=1.0, beta=1.0, sampler_device=device).sampler.alpha == 1.0
    with pytest.raises(OptionError, match=r"sampler_device='meta' is not available.*storage, cpu"):
        cls(alpha=1.0, beta=1.0, sampler_device="meta")


def test_factory_makes_the_transform_at_the_first_use():
    made = []

    def factory() -> Any:
        made.append(1)
        return lambda batch: batch * 2

    rb = ReplayBuffer(storage=_storage, transform_factory=factory, batch_size=3)
    assert (rb.initialized, made) == (False, [])
    rb.extend(torch.ones(4))
    assert (rb.initialized, made) == (True, [1])
    assert rb.sample().tolist() == [2.0, 2.0, 2.0]
    early = ReplayBuffer(storage=_storage, transform_factory=factory, delayed_init=False)
    assert (early.initialized, made) == (True, [1, 1])


def test_delayed_buffer_is_pickled_before_its_first_use():
    rb = TensorDictReplayBuffer(
        storage=_storage, sampler=_ranked, transform_factory=_identity, batch_size=50, priority_key="p"
    )
    again = pickle.loads(pickle.dumps(rb))
    assert (rb.initialized, again.initialized) == (False, False)
    assert "initialized=False" in repr(again)
    again.extend(TensorDict({"p": torch.tensor([0.0, 1.0])}, [2]))
    assert set(again.sample()["index"].tolist()) == {1}, "the priority key is read"
    assert (len(again), rb.initialized, again.priority_key) == (2, False, "p")
    assert len(pickle.loads(pickle.dumps(again))) == 2


def _identity() -> Any:
    return torch.nn.Identity()


def _ranked() -> PrioritizedSampler:
    return PrioritizedSampler(10, 1.0, 1.0)


def test_errors_of_delayed_parts_are_raised_at_every_use():
    rb = ReplayBuffer(sampler=lambda: SamplerWithoutReplacement(drop_last=True), delayed_init=True)
    for _ in range(2):
        raises((lambda: rb.add(1), OptionError, "predictable batch-size"))
        assert not rb.initialized


def test_first_use_by_several_threads_makes_the_parts_once():
    made: list[int] = []

    def storage() -> LazyTensorStorage:
        made.append(1)
        return LazyTensorStorage(1000)

    rb = ReplayBuffer(storage=storage, delayed_init=True)
    together(*(partial(rb.add, torch.tensor(i)) for i in range(8)))
    assert made == [1]
    assert sorted(rb[:].tolist()) == list(range(8))
