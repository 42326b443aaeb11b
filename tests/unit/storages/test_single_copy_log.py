"""Single copies against a storage that keeps every transition whole: whatever is read is equal, at every moment."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

from ...effort import examples
from .pairs import OBSERVATIONS, OPERATIONS, PARTS, Pair, poison_memory

CODED = partial(LazyTensorStorage, codec={"obs": "zlib"})


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, CODED])
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
    storage: Any, seed: int, operations: list[str], num_envs: int, packed: bool, named: bool, parts: Any
) -> None:
    option: Any = {("next", key): key for key in OBSERVATIONS} if named else True

    def make(capacity: int, plain: bool) -> ReplayBuffer:
        made = storage(capacity, ndim=2 if num_envs else 1, packed=packed, single_copy=False if plain else option)
        generator = torch.Generator().manual_seed(seed)
        return ReplayBuffer(storage=made, batch_size=6, dim_extend=0, generator=generator, **parts())

    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        Pair(seed, make, num_envs).run(operations)
