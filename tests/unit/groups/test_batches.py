"""Batches of tokens: every response once, budgets and ranks, all forms beside a plain loop."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato.errors import OptionError, SchemaError
from ostinato.groups import Group, GroupBuffer, Lease, Response, TokenBudget

from ..buffers.refusals import refuses

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTHS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8)


def lease_of(lengths: Sequence[Sequence[int]], **more: Any) -> Lease:
    """A lease of responses of these lengths; token `t` of response `r` of group `g` is `100 g + 10 r + t`."""
    groups = []
    for g, sizes in enumerate(lengths):
        fields = [
            {"tokens": 100 * g + 10 * r + torch.arange(int(n)), "version": g, **more} for r, n in enumerate(sizes)
        ]
        responses = tuple(Response(f"r{r}", each, done=True) for r, each in enumerate(fields))
        groups.append(Group(f"g{g}", None, len(sizes), "leased", responses))
    return Lease("lease", tuple(groups), "", 0.0)


@given(LENGTHS, st.integers(9, 40), st.integers(1, 3), st.sampled_from(["tokens", "attention"]), st.booleans())
def test_each_response_is_in_one_row_that_has_room(lengths, most, ranks, balance, split):
    lease = lease_of(lengths)
    budget = TokenBudget(max_tokens=most, ranks=ranks, balance=balance, split=split)
    items = list(chain.from_iterable(lengths)) if split else [sum(sizes) for sizes in lengths]
    try:
        plan = budget.plan(lease)
    except (
        OptionError
    ):  # a plain rule, each item in the first row with room, must not do with the rows that there could be
        rows: list[int] = []
        for size in sorted(items, reverse=True):
            place = next((row for row, filled in enumerate(rows) if filled + size <= most), len(rows))
            rows[place : place + 1] = [(rows[place] if place < len(rows) else 0) + size]
        assert max(items) > most or -(-len(rows) // ranks) * ranks > np.count_nonzero(items)
        return
    assert plan == budget.plan(lease)
    flat, owners = list(chain.from_iterable(lengths)), [g for g, sizes in enumerate(lengths) for _ in sizes]
    assert sorted(number for rows in plan for row in rows for number in row) == list(range(len(flat)))
    for batch in plan:
        assert len(batch) == ranks
        assert all(0 < sum(flat[number] for number in row) <= most for row in batch)
    if not split:
        homes = [{owners[number] for number in row} for rows in plan for row in rows]
        assert sum(map(len, homes)) == len(lengths)


@pytest.mark.parametrize("balance", ["tokens", "attention"])
@pytest.mark.parametrize("split", [False, True])
def test_rows_are_even(balance, split):
    rng = np.random.default_rng(0)
    for spread in (0.3, 0.7):
        lengths = np.clip(rng.lognormal(6.5, spread, (64, 8)).astype(int), 1, 8192)
        plan = TokenBudget(max_tokens=2**15 if split else 2**16, ranks=8, balance=balance, split=split).plan(
            lease_of(lengths.tolist())
        )
        cost = lengths.reshape(-1).astype(float) ** (1 if balance == "tokens" else 2)
        loads = np.array([[cost[row].sum() for row in batch] for batch in plan])
        assert loads.max(1).sum() <= 1.05 * loads.mean(1).sum()
        assert len(plan) == -(-lengths.sum() // (8 * (2**15 if split else 2**16)))


@given(LENGTHS.filter(lambda lengths: any(map(any, lengths))), st.integers(1, 2))
def test_the_forms_hold_the_same_values(lengths, ranks):
    lease = lease_of(lengths, reward=0.5)
    kinds = ("packed", "left", "right", "nested", "list")
    budgets = {form: TokenBudget(max_tokens=400, ranks=ranks, split=True, form=form, padding=-1) for form in kinds}  # type: ignore[arg-type]
    assume(sum(map(bool, list(chain.from_iterable(lengths)))) >= ranks)
    for rank in range(ranks):
        (packed,), (left,), (right,), (nested,), (listed,) = (each.of_rank(lease, rank) for each in budgets.values())
        sources = [
            lease.groups[g].responses[r].fields["tokens"]
            for g, r in zip(packed["group_index"].tolist(), packed["response_index"].tolist(), strict=True)
        ]
        assert packed["version"].tolist() == packed["group_index"].tolist()
        assert packed["reward"].tolist() == [0.5] * len(sources)
        assert packed["max_seqlen"] == max(map(len, sources))
        ends = packed["cu_seqlens"].tolist()
        for number, source in enumerate(sources):
            here = slice(ends[number], ends[number + 1])
            assert packed["tokens"][here].tolist() == source.tolist() == listed["tokens"][number].tolist()
            assert packed["positions"][here].tolist() == list(range(len(source)))
            assert nested["tokens"][number].tolist() == source.tolist()
            padding = [-1] * (packed["max_seqlen"] - len(source))
            assert right["tokens"][number].tolist() == source.tolist() + padding
            assert left["tokens"][number].tolist() == padding + source.tolist()
            assert left["positions"][number].tolist() == [0] * len(padding) + list(range(len(source)))
            assert right["attention_mask"][number].sum() == left["attention_mask"][number].sum() == len(source)


def test_fields_of_each_kind_follow_their_responses():
    fields = {
        "logprobs": torch.tensor([0.5, 1.5]),
        "reward": {"right": 1.0, "each": torch.tensor([1.0, 2.0])},
        "routing": torch.ones(2, 3, dtype=torch.int8),
        "score": torch.tensor(2.0),
        "text": "a",
    }
    lease = lease_of([[2, 2]], **fields)
    lease.groups[0].responses[1].fields["version"] = torch.tensor([3, 4])
    ((row,),) = TokenBudget(max_tokens=4).batches(lease)
    assert row["version"].tolist() == [0, 0, 3, 4]
    assert (row["logprobs"].tolist(), row["score"].tolist(), row["text"]) == ([0.5, 1.5] * 2, [2.0, 2.0], ["a", "a"])
    assert row["reward"]["right"].tolist() == [1.0, 1.0]
    assert row["reward"]["each"].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert row["routing"].shape == (4, 3)
    row["tokens"].zero_()
    assert lease.groups[0].responses[0].fields["tokens"].tolist() == [0, 1]


@pytest.mark.parametrize("form", ["packed", "nested", "list"])
def test_memory_is_used_again_only_when_nobody_has_it(form):
    budget = TokenBudget(max_tokens=2000, form=form)
    ((row,),) = budget.batches(lease_of([[1000, 900]]))
    address = row["positions"].data_ptr() if form == "packed" else 0
    array = (row["tokens"] if form == "packed" else row["tokens"][0]).numpy()  # of memory that two responses have
    expected = array.tolist()
    del row
    for _ in range(3):
        ((row,),) = budget.batches(lease_of([[950, 900]]))
        assert form != "packed" or address in {row[name].data_ptr() for name in ("tokens", "positions")}
        assert array.tolist() == expected
        del row


def test_what_cannot_be_packed_raises():
    lease = lease_of([[3, 4], [5, 2]])
    del lease.groups[1].responses[0].fields["version"]
    refuses(
        {
            OptionError: {
                "response 'r0' of group 'g1' has 5 tokens": lambda: TokenBudget(max_tokens=4).plan(lease),
                "group 'g0' has 7 tokens in responses of 3, 4": lambda: TokenBudget(max_tokens=6).plan(lease),
                "each of 3 ranks.*split=True": lambda: TokenBudget(max_tokens=9, ranks=3).plan(lease),
                "below ranks, which is 1": lambda: TokenBudget(max_tokens=9).of_rank(lease, 1),
            },
            SchemaError: {
                "response 'r0' of group 'g1' has no 'version'": lambda: TokenBudget(max_tokens=9).batches(lease),
            },
        }
    )


def test_ranks_that_lease_by_the_same_name_share_the_batches():
    buffer = GroupBuffer(size=2)
    for name in buffer.admit(["a", "b", "c", "d"]):
        for number in range(2):
            buffer.append(name, {"tokens": list(range(int(name) + number))}, id=f"{number}")
    budget = TokenBudget(max_tokens=8, ranks=2, form="list")
    rows = [budget.of_rank(buffer.lease(4, id="step 1"), rank) for rank in range(2)]
    held = sorted(tokens.tolist() for rank in rows for row in rank for tokens in row["tokens"])
    assert held == [[], [0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
