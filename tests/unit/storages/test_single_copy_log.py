"""Single copies and codecs against a storage that keeps every transition as it is: whatever is read is equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, ZlibCodec

from ...effort import examples
from ...registry import seeded
from .pairs import OBSERVATIONS, OPERATIONS, PARTS, Pair, poison_memory

STORAGES: dict[str, tuple[type[LazyTensorStorage], dict[str, Any]]] = {
    "packed": (LazyTensorStorage, {}),
    "mapped": (LazyMemmapStorage, {}),
    "coded": (LazyTensorStorage, {"codec": {"obs": "zlib"}}),
    "only coded": (
        LazyTensorStorage,
        {"codec": {"image": "zlib", ("next", "image"): "auto", "action": ZlibCodec(9)}, "single_copy": False},
    ),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("storage", STORAGES)
@given(
    seed=st.integers(0, 2**32),
    operations=OPERATIONS,
    num_envs=st.integers(0, 3),
    packed=st.booleans(),
    named=st.booleans(),
    parts=st.sampled_from(PARTS),
)
@examples(0.25)
def test_every_read_is_that_of_a_storage_with_both_copies(
    storage: str, seed: int, operations: list[str], num_envs: int, packed: bool, named: bool, parts: Any
) -> None:
    kind, more = STORAGES[storage]
    pairs: Any = {("next", key): key for key in OBSERVATIONS} if named else True

    def make(capacity: int, plain: bool) -> ReplayBuffer:
        options = {} if plain else {"single_copy": pairs, **more}
        made = kind(capacity, ndim=2 if num_envs else 1, packed=packed, **options)
        return ReplayBuffer(storage=made, batch_size=6, dim_extend=0, generator=seeded(seed), **parts())

    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        Pair(seed, make, num_envs).run(operations)
