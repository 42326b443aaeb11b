"""Where Ray puts the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato._optional import require
from ostinato.distributed.cluster import ray
from ostinato.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Placed", "place"]

_STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_WAIT_S = 60.0


class Placed(NamedTuple):
    """Options that put each actor in its place, and what to give back at the end."""

    options: list[dict[str, Any]]
    group: Any = None

    def free(self) -> None:
        """Give the places back."""
        if self.group is not None:
            ray().util.remove_placement_group(self.group)


def place(strategy: str | None, shards: int, remote_config: Mapping[str, Any] | None) -> Placed:
    """Reserve a place for each shard.

    Args:
        strategy: of a Ray placement group; None leaves it to Ray.
        shards: how many.
        remote_config: options of each actor, which say what a place must offer: `num_cpus` (1 by default), `num_gpus`,
            `resources`.

    Raises:
        OptionError: if there is no such strategy, or the cluster has no such places.
    """
    if strategy is None:
        return Placed([{} for _ in range(shards)])
    if strategy not in _STRATEGIES:
        msg = f"placement must be None or one of {list(_STRATEGIES)}, got {strategy!r}"
        raise OptionError(msg)
    given = remote_config or {}
    nodes = [node for node in ray().nodes() if node["Alive"]]
    if strategy == "STRICT_SPREAD" and len(nodes) < shards:
        msg = (
            f"placement='STRICT_SPREAD' needs a node for each of {shards} shards, the cluster has {len(nodes)}: take "
            "fewer shards, or 'SPREAD'"
        )
        raise OptionError(msg)
    ways = require("ray.util.scheduling_strategies", "ray")
    need = {"CPU": given.get("num_cpus", 1), "GPU": given.get("num_gpus", 0), **given.get("resources", {})}
    bundle = {name: amount for name, amount in need.items() if amount}
    group = ray().util.placement_group([bundle] * shards, strategy=strategy)
    if not group.wait(_WAIT_S):
        ray().util.remove_placement_group(group)
        msg = f"the cluster has no place for {shards} shards of {bundle} with placement={strategy!r}: it has {_free()}"
        raise OptionError(msg)
    chosen = [ways.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(shards)]
    return Placed([{"scheduling_strategy": way, "num_cpus": need["CPU"]} for way in chosen], group)


def _free() -> dict[str, float]:
    return {name: count for name, count in ray().available_resources().items() if not name.startswith("node:")}
