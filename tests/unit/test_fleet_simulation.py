"""The simulation of fleets, against queues that can be computed by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from benchmarks.fleet_costs import Costs
from benchmarks.fleet_simulation import Fleet, run

pytestmark = pytest.mark.house

COSTS = Costs(
    submit=[1e-4], wire=[2e-3], call=[1e-3], get=[1e-4], permit=[1e-3], submit_write=[1e-3], write=[2e-3], row_call=0.0,
    row_get=0.0, draw=0.0, part=0.0, row_join=0.0,
)  # fmt: skip


def test_a_batch_of_one_shard_takes_the_sum_of_its_costs():
    """Offers for each batch: two calls, one after the other."""
    found = run(COSTS, Fleet(1, 256, age_s=0.0), 10)
    assert found.latencies_s == pytest.approx([2 * (1e-4 + 2e-3 + 1e-3 + 1e-4)] * 10)
    assert found.calls == 20
    delayed = run(COSTS, Fleet(1, 256, age_s=0.0, network_s=(5e-3, 5e-3)), 10)
    assert delayed.latencies_s == pytest.approx([2 * (1e-4 + 2e-3 + 1e-3 + 1e-4 + 1e-2)] * 10)
    shard = run(COSTS, Fleet(1, 256, learners=50, age_s=0.0), 40)
    assert shard.calls / shard.seconds == pytest.approx(1000, rel=0.1), "a busy shard is the ceiling"
