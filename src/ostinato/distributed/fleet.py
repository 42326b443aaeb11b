"""The actors of a `ShardedReplayBuffer`: where they run, how all of them start, and how they end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

from ostinato._optional import require
from ostinato.buffers.rate_limit import RateLimiter
from ostinato.core.options import check_choice
from ostinato.distributed.actor_names import FLEET, ActorNames, claiming, find, first_answer, shard_part
from ostinato.distributed.actors import ShardActor, ShardSpec
from ostinato.distributed.checkpoints import check_same_schema
from ostinato.distributed.deadlines import Callee
from ostinato.distributed.fleet_schema import FleetSchema
from ostinato.distributed.rate_limits import RateLimits, check_minimum, warn_of_rules
from ostinato.distributed.ray_client import START_TIMEOUT_S, ray, result_of, start_actor, wait_until_ready, where
from ostinato.distributed.save_failures import FailureBroadcast
from ostinato.distributed.serialization import from_arguments, to_arguments
from ostinato.distributed.shard_updates import ShardInfo
from ostinato.errors import LostBufferError, NoAnswerError, OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


_STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_PLACEMENT_TIMEOUT_S = 60.0
_MAX_CALLS = 1 << 16
"""Calls of the `FleetActor` that may wait at once."""
_SHARED_OPTIONS = ("label_selector", "runtime_env", "scheduling_strategy")
"""Options of the shards that the `FleetActor` has, too; it reserves no resources."""
_NAME = "the actor of the fleet"
_RETRY_EVERY_S = 0.25


# -- placement --------------------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Scheduling options of each actor, and the placement group to remove at the end."""

    options: list[dict[str, Any]]
    group: Any = None

    def remove(self) -> None:
        """Remove the placement group."""
        if self.group is not None:
            ray().util.remove_placement_group(self.group)


def check_placement(strategy: Any) -> None:
    """Raise `OptionError` if there is no such strategy."""
    if strategy is not None:
        check_choice("placement", strategy, _STRATEGIES)


def reserve_placement(
    strategy: str | None, shards: int, remote_config: Mapping[str, Any], *, detached: bool = False
) -> Placement:
    """Reserve resources for each shard.

    Args:
        strategy: Strategy of a Ray placement group; None leaves the placement to Ray.
        shards: Number of shards.
        remote_config: Options of each actor, which give its resources: `num_cpus` (1 by default), `num_gpus`,
            `resources`.
        detached: Whether the reservation outlives this process.

    Raises:
        OptionError: The cluster does not have the resources.
    """
    if strategy is None:
        return Placement([{} for _ in range(shards)])
    nodes = [node for node in ray().nodes() if node["Alive"]]
    if strategy == "STRICT_SPREAD" and len(nodes) < shards:
        msg = (
            f"placement='STRICT_SPREAD' needs a node for each of {shards} shards, the cluster has {len(nodes)}: take "
            "fewer shards, or 'SPREAD'"
        )
        raise OptionError(msg)
    scheduling = require("ray.util.scheduling_strategies", "ray")
    given = remote_config
    need = {"CPU": given.get("num_cpus", 1), "GPU": given.get("num_gpus", 0), **given.get("resources", {})}
    bundle = {name: amount for name, amount in need.items() if amount}
    group = _reserve([bundle] * shards, strategy, detached=detached)
    options = [
        {
            "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            "num_cpus": need["CPU"],
        }
        for i in range(shards)
    ]
    return Placement(options, group)


def _reserve(bundles: list[dict[str, Any]], strategy: str, *, detached: bool) -> Any:
    """Make a placement group and wait until it is reserved; remove it if that fails."""
    util = ray().util
    group = util.placement_group(bundles, strategy=strategy, lifetime="detached" if detached else None)
    reserved = False
    try:
        reserved = group.wait(_PLACEMENT_TIMEOUT_S)
    finally:
        if not reserved:
            util.remove_placement_group(group)
    if not reserved:
        free = {name: count for name, count in ray().available_resources().items() if not name.startswith("node:")}
        msg = (
            f"the cluster has no room for {len(bundles)} shards of {bundles[0]} with placement={strategy!r}: it has "
            f"{free}"
        )
        raise OptionError(msg)
    return group


# -- actors -----------------------------------------------------------------------------------------------------------


class Fleet(NamedTuple):
    """The actors, and the options of the constructor that handles need: the state of a handle. May be pickled."""

    names: ActorNames
    placement: Placement
    rate_limiter: RateLimiter | None
    shard_timeout_s: float
    snapshot_age_s: float
    prefetch: int
    sticky: bool
    directory: Path | None
    """Where checkpoints go."""
    call_timeout_s: float
    shards: tuple[Any, ...] = ()
    """The actors of the shards."""
    actor: Any = None
    """The `FleetActor`; None in its own copy."""
    places: tuple[Callee, ...] = ()
    """Where the shards were at the start; empty if that is unknown."""
    place: Callee = Callee(_NAME)
    """Where the `FleetActor` was at the start."""
    described: ShardInfo | None = None
    """Properties of the shards; None in the copy of the `FleetActor`."""
    home: int | None = None
    """Shard that the handle writes to; None takes the one after that of the previous handle."""
    client: bool = False
    """Whether the handle came from `client()`, and must not end the actors."""

    @property
    def info(self) -> ShardInfo:
        """Properties of the shards."""
        return cast("ShardInfo", self.described)

    @property
    def waits(self) -> bool:
        """Whether readers and writers may wait for each other."""
        return self.info.waits or self.rate_limiter is not None

    def why_gone(self) -> str | None:
        """Return why all shards are gone for good; None if one of them lives or is being restarted."""
        return self.names.why_gone([(shard_part(i), shard) for i, shard in enumerate(self.shards)])

    def end(self, timeout_s: float | None = None) -> None:
        """End all actors, remove the reserved resources, and wait until the names are free, at most `timeout_s`."""
        for actor in (self.actor, *self.shards):
            ray().kill(actor)
        self.placement.remove()
        self.names.wait_until_free([FLEET, *map(shard_part, range(len(self.shards)))], timeout_s)


@final
class FleetActor(RateLimits, FleetSchema, FailureBroadcast):
    """The actor that holds what all handles and shards share. Its calls wait as coroutines of one thread.

    If it dies, Ray restarts it with the same arguments, and the parts rebuild their state from the shards.

    Args:
        *fleet: The `Fleet`, as `to_arguments` returns it.
    """

    def __init__(self, *fleet: bytes) -> None:
        self._fleet: Fleet = from_arguments(fleet)
        shards = self._fleet.shards
        RateLimits.__init__(self, self._fleet.rate_limiter or RateLimiter(), shards)
        FleetSchema.__init__(self, shards)
        FailureBroadcast.__init__(self, shards)

    async def ready(self) -> dict[str, Any]:
        """Return where the actor is: it has started."""
        return where()

    async def fleet(self) -> Fleet:
        """Return the fleet, for a handle that attaches."""
        return self._fleet


def start_fleet(
    fleet: Fleet, specs: Sequence[ShardSpec], remote_config: Mapping[str, Any], saved: Mapping[str, Any] | None = None
) -> Fleet:
    """Start the shards and the `FleetActor`, and wait until all are ready.

    If that fails, all are ended and the reserved resources are removed before the error is raised.

    Args:
        fleet: The fleet without actors.
        specs: How to make the shards.
        remote_config: Options of their actors.
        saved: What the checkpoint that the shards begin with says about all of them; None for nothing.

    Returns:
        The fleet with its actors.

    Raises:
        CheckpointError: Shards begin with rows of different schemas.
        OptionError: The name is taken, a shard cannot be made, or the shards hold too few rows for the limiter.
        OstinatoError: The constructor of a shard raised it.
        UsageError: An actor does not start.
    """
    names, placement = fleet.names, fleet.placement
    shards: list[Any] = []
    actor = None
    try:
        with claiming("ShardedReplayBuffer", names):
            for i, (spec, options) in enumerate(zip(specs, placement.options, strict=True)):
                own = {**options, **names.options(shard_part(i)), "max_restarts": -1}
                shards.append(start_actor(ShardActor, remote_config, spec, **own))
            fleet = fleet._replace(shards=tuple(shards), placement=placement._replace(options=[]))
            actor = start_fleet_actor(fleet, remote_config)
        described = [wait_until_ready(shard, f"shard {i} of {len(shards)}") for i, shard in enumerate(shards)]
        check_same_schema({i: one["schema"] for i, one in enumerate(described)}, "the rows")
        if fleet.rate_limiter is not None:
            check_minimum(fleet.rate_limiter, len(shards), described[0]["capacity"])
        place = Callee(_NAME).at(result_of(actor.ready.remote(), _NAME, START_TIMEOUT_S))
        actor.schema.remote()  # asks the shards while all answer: no first write waits for a stopped one
        if fleet.rate_limiter is not None and saved is not None:
            warn_of_rules(result_of(actor.begin.remote(saved["limiter"]), _NAME, START_TIMEOUT_S))
    except BaseException:
        for started in (*shards, *([] if actor is None else [actor])):
            ray().kill(started)
        placement.remove()
        raise
    places = tuple(Callee(f"shard {i} of {len(shards)}").at(one) for i, one in enumerate(described))
    return fleet._replace(actor=actor, places=places, place=place, described=ShardInfo.of(described[0]))


def start_fleet_actor(fleet: Fleet, remote_config: Mapping[str, Any]) -> Any:
    """Start the `FleetActor`; does not wait until it is ready.

    Args:
        fleet: The fleet, whose shards need not be ready.
        remote_config: Options of the shards; those that concern the machine and the environment are used.
    """
    chosen = {name: remote_config[name] for name in _SHARED_OPTIONS if name in remote_config}
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": _MAX_CALLS}
    merged = {**chosen, **options, **fleet.names.options(FLEET)}
    return ray().remote(**merged)(FleetActor).remote(*to_arguments(fleet, kept=fleet.names.detached))


def attach_fleet(names: ActorNames, timeout_s: float) -> Fleet:
    """Find a fleet by its name.

    Raises:
        LostBufferError: There is none, its shards are gone for good, or none answers within `timeout_s`.
    """
    until = time.monotonic() + timeout_s
    actor = find(names, FLEET)
    name = f"the ShardedReplayBuffer {names.name!r}"
    found: Fleet = first_answer([actor.fleet.remote()], timeout_s, name)
    fleet = found._replace(actor=actor)
    while True:
        gone = fleet.why_gone()
        if gone is not None:
            msg = (
                f"{name} is gone, and its rows with it: {gone}. The actor {names.actor(FLEET)} is left of it: end it "
                "with ray.kill(ray.get_actor(name, namespace))"
            )
            raise LostBufferError(msg)
        try:
            calls = [shard.describe.remote() for shard in fleet.shards]
            return fleet._replace(described=ShardInfo.of(first_answer(calls, until - time.monotonic(), name)))
        except NoAnswerError:
            raise
        except LostBufferError:
            time.sleep(_RETRY_EVERY_S)  # the first shard to answer is being restarted
