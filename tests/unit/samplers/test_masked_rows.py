"""Rows that are left out of draws: what can be drawn, with which probability, after every save."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import (
    Episodes,
    NStep,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceUnit,
)

from ...episodes import Log
from ...registry import ring, seeded


def masked(*rows: int, **options: Any) -> ReplayBuffer:
    """Eight rows, some of them masked."""
    episodes = Episodes("done", mask_key="valid")
    rb = ring(8, generator=seeded(), episodes=episodes, **options)
    row = torch.arange(8)
    valid = torch.tensor([i not in rows for i in range(8)])
    rb.extend({"row": row, "done": torch.zeros(8, dtype=torch.bool), "valid": valid})
    return rb


@pytest.mark.parametrize("unit", [None, NStep(2, 1.0, next_keys=())])
def test_a_row_that_was_masked_between_draw_and_gather_is_not_delivered(unit):
    """Another thread replaces the rows drawn by masked ones: the batch is drawn anew."""
    rb = ring(8, sample_unit=unit, batch_size=20, episodes=Episodes("done", mask_key="valid"))

    def write(valid: bool) -> None:
        rows = {"row": torch.arange(4), "reward": torch.ones(4), "done": torch.zeros(4, dtype=torch.bool)}
        rb.extend({**rows, "valid": torch.full((4,), valid)})

    write(valid=True)
    write(valid=True)
    engine: Any = rb._engine
    draw = engine.draw(20)
    write(valid=False)
    assert engine.gather(draw) is None
    assert rb.sample()["valid"].all()


def test_a_pass_keeps_the_rest_of_a_batch_whose_rows_were_masked_before_the_gather():
    rb = masked(sampler=SamplerWithoutReplacement())
    engine: Any = rb._engine
    draw = engine.draw(6)
    rb.set_at_("valid", torch.tensor([False]), draw.slots[2:3])
    rest = engine.gather(draw).draw.records.tolist()
    assert rest == [slot for i, slot in enumerate(draw.slots.tolist()) if i != 2]
    assert sorted(rest + rb.sample(8)["row"].tolist()) == sorted(set(range(8)) - {int(draw.slots[2])})


@pytest.mark.parametrize(("shuffle", "prefetch"), [(False, 0), (True, 2)])
def test_a_pass_draws_no_row_twice_and_ends_while_masked_rows_replace_others(shuffle, prefetch):
    """One iteration is one pass, whatever is written and edited meanwhile; rows that stay valid come exactly once."""
    for seed in range(30):
        log = Log(3 + seed % 6, longest=100, seed=seed, masked=0.2)
        rb = ring(
            log.capacity,
            sampler=SamplerWithoutReplacement(shuffle=shuffle),
            batch_size=1 + seed % 4,
            prefetch=prefetch,
            episodes=Episodes([("next", "terminated"), ("next", "truncated")], mask_key="mask"),
            generator=seeded(seed),
        )
        log.extend(rb, log.capacity)
        if not log.episodes():
            continue
        start = {row.id for row in log.present().values() if row.mask}
        seen: list[int] = []
        for number, batch in enumerate(rb):
            seen += batch["id"].tolist()
            log.masked = 0.7
            if (seed + number) % 3 == 0:
                log.extend(rb, 1 + seed % 2)
            elif (seed + number) % 3 == 1:
                log.edit(rb, flags=False, masks=True)
            if not log.episodes():
                break  # no row is left in any pass
        else:
            kept = start & {row.id for row in log.present().values() if row.mask}
            assert kept <= set(seen)
        assert len(seen) == len(set(seen)), seed


def test_windows_over_resets_do_not_reach_across_a_masked_row():
    rb = masked(4, sample_unit=SequenceUnit(3, "include_reset"))
    batch, info = rb.sample(400, return_info=True)
    rows = torch.where(info["validity_mask"], batch["row"], -1).view(-1, 3)
    whole = {(0, 1, 2), (1, 2, 3), (5, 6, 7)}
    assert set(map(tuple, rows.tolist())) == {*whole, (2, 3, -1), (3, -1, 5), (6, 7, -1), (7, -1, -1)}
