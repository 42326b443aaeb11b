"""ShardedReplayBuffer: one replay buffer made of many, each in an actor, on as many machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato._optional import require
from ostinato.buffers import BufferStats, ReplayBuffer
from ostinato.buffers.options import check_generator, check_prefetch, check_seconds, check_size, positive
from ostinato.buffers.rate_limit import check_wait
from ostinato.buffers.stats import combine
from ostinato.distributed.actors import Recipe, ShardHost, ShardRecipe
from ostinato.distributed.batch_stream import Ahead
from ostinato.distributed.checkpoints import (
    ShardReport,
    check_checkpoints,
    checkpoint_folders,
    load_shards,
    report_shards,
    save_shards,
)
from ostinato.distributed.rate_limit_actor import Turnstile
from ostinato.distributed.ray_client import first_answer, ray, spawn, start
from ostinato.distributed.routing import Rota, join_index
from ostinato.distributed.sampling import Counted, Drawer
from ostinato.distributed.serialization import Parcel
from ostinato.distributed.shard_client import Fleet
from ostinato.distributed.writing import About, Sender, one_shard, route, unpack_batch, unpack_shares
from ostinato.errors import LostBufferError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ostinato.buffers.priority_updates import PriorityUpdate
    from ostinato.buffers.rate_limit import RateLimiter

__all__ = ["Placed", "ShardedReplayBuffer", "Way", "check_options", "launch", "place"]

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


_ROUTES = ("round_robin", "sticky")


class Way(NamedTuple):
    """The way to the shards."""

    actors: list[Any]
    about: About
    patience_s: float
    depth: int
    """Batches to keep ready."""
    sticky: bool
    home: int | None
    """Shard to write to; None takes the place after the handle before."""
    turnstile: Turnstile | None
    directory: Path | None
    """Where checkpoints go."""
    placed: Placed

    @property
    def waits(self) -> bool:
        """Whether readers and writers wait for each other."""
        return self.about.waits or self.turnstile is not None

    def fleet(self) -> Fleet:
        """Make what calls the shards."""
        turnstile = self.turnstile
        return Fleet(self.actors, self.patience_s, (lambda: None) if turnstile is None else turnstile.look)

    def batches(self, fleet: Fleet, generator: torch.Generator | None) -> Ahead:
        """Make what draws batches."""
        counted = Counted(fleet, waits=self.waits) if self.about.counting else None
        return Ahead(Drawer(fleet, generator, self.turnstile, counted), self.depth)

    def sender(self, fleet: Fleet) -> Sender:
        """Make what writes."""
        return Sender(fleet, self.turnstile, waits=self.about.waits, sticky=self.sticky, home=self.home)


def check_options(
    route: str, patience_s: float, checkpoint_dir: Any, checkpoint_every_s: float | None, *, resume: bool
) -> None:
    """Refuse options of a sharded buffer that are none, or exclude each other.

    Raises:
        OptionError: naming them.
    """
    if route not in _ROUTES:
        msg = f"route must be one of {list(_ROUTES)}, got {route!r}"
        raise OptionError(msg)
    if checkpoint_dir is None and (checkpoint_every_s is not None or resume):
        msg = "checkpoint_every_s and resume need checkpoint_dir: where shards are saved"
        raise OptionError(msg)
    check_seconds("patience_s", patience_s)
    if checkpoint_every_s is not None:
        check_seconds("checkpoint_every_s", checkpoint_every_s)


def launch(
    plans: Sequence[ShardRecipe], remote_config: Mapping[str, Any] | None, options: Sequence[Mapping[str, Any]]
) -> tuple[list[Any], About]:
    """Start the shards, and wait until all of them stand; errors of their constructors are raised."""
    actors = [
        spawn(ShardHost, remote_config, plan, max_restarts=-1, **mine)
        for plan, mine in zip(plans, options, strict=True)
    ]
    abouts = [first_answer(actor, f"shard {i} of {len(plans)}") for i, actor in enumerate(actors)]
    return actors, About(*(abouts[0][name] for name in About._fields))


@final
class ShardedReplayBuffer:
    """Several replay buffers, each in a Ray actor, that are sampled as one; this is a handle to them.

    A batch is drawn from all rows by the law of one big buffer: uniformly, or in proportion to priorities, with the
    importance weights of the whole. Each shard draws and weighs itself at one moment; a batch is made of these draws,
    so the law is exact for the rows that each shard had then, whatever is written meanwhile. Each write goes to one
    shard.

    Handles can be pickled, for workers that write and learners that sample. A shard that dies is left out, with a
    warning, and restarted by Ray; with `checkpoint_dir` it comes back with its last checkpoint, else empty.

    Rows are named by one number that holds shard and slot: `index` goes back to `update_priority` as it came.

    Args:
        num_shards: how many buffers.
        *args: of `replay_buffer_cls`, for each shard. Capacities are those of one shard.
        replay_buffer_cls: what each shard is: `ReplayBuffer` or one of its subclasses, with `RandomSampler` or
            `PrioritizedSampler`, `QueueSampler` or `LimitedSampler`, and `ndim=1`.
        route: where a handle writes: "sticky" to one shard, as buffers with units need it, where the rows of an episode
            belong together; "round_robin" to one after the other, call by call.
        checkpoint_dir: where shards are saved, one directory each; every machine that may run a shard must see it.
        checkpoint_every_s: save each shard every so many seconds, if it was written to; None leaves it to
            `checkpoint()`.
        resume: begin with the checkpoints that are in `checkpoint_dir`; without it there must be none.
        placement: "SPREAD", "STRICT_SPREAD" (one per node), "PACK" or "STRICT_PACK"; None leaves it to Ray.
        patience_s: how long to wait for the draw of a shard before it is left out.
        ray_init_config: what to call `ray.init` with, where this process is not connected to Ray yet.
        remote_config: options of each actor, as for `ray.remote`.
        generator: source of the choice of shards, and of the shards' seeds; None is torch's global generator.
        prefetch: batches to keep ready in each handle; None or 0 keeps none. Needs `batch_size`.
        rate_limiter: when readers and writers wait for each other, over all shards and handles; None never. It counts
            in an actor of its own, which every call asks first; counts begin anew when rows are loaded.
        **kwargs: of `replay_buffer_cls`, for each shard.

    Raises:
        MissingExtraError: if Ray is not installed.
        OptionError: if options exclude each other, or a shard cannot be part of one law.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from ostinato import LazyTensorStorage, ShardedReplayBuffer
        >>> rb = ShardedReplayBuffer(2, storage=partial(LazyTensorStorage, 1000), batch_size=4)  # doctest: +SKIP
        >>> index = rb.extend({"obs": torch.zeros(8, 3)})  # doctest: +SKIP
        >>> rb.sample()["obs"].shape  # doctest: +SKIP
        torch.Size([4, 3])
    """

    def __init__(
        self,
        num_shards: int,
        *args: Any,
        replay_buffer_cls: Callable[..., Any] = ReplayBuffer,
        route: str = "sticky",
        checkpoint_dir: str | Path | None = None,
        checkpoint_every_s: float | None = None,
        resume: bool = False,
        placement: str | None = None,
        patience_s: float = 30.0,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        generator: torch.Generator | None = None,
        prefetch: int | None = None,
        rate_limiter: RateLimiter | None = None,
        **kwargs: Any,
    ) -> None:
        number = positive("num_shards", num_shards)
        check_options(route, patience_s, checkpoint_dir, checkpoint_every_s, resume=resume)
        Rota(number, 0, sticky=True)  # refuses too many
        directory = None if checkpoint_dir is None else Path(checkpoint_dir).absolute()
        depth = check_prefetch(prefetch, kwargs.get("batch_size"))
        seeds = torch.randint(2**62, (number,), generator=check_generator(generator), device="cpu").tolist()
        check_checkpoints(directory, number, resume=resume)
        start(ray_init_config)
        placed = place(placement, number, remote_config)
        recipe = Recipe(replay_buffer_cls, args, kwargs, None)
        plans = [
            ShardRecipe(recipe._replace(seed=seed), path, checkpoint_every_s, resume)
            for seed, path in zip(seeds, checkpoint_folders(directory, number), strict=True)
        ]
        try:
            actors, about = launch(plans, remote_config, placed.options)
            turnstile = None if rate_limiter is None else Turnstile.make(rate_limiter, actors, about)
        except Exception:
            placed.free()
            raise
        sticky = route == "sticky"
        self._connect(Way(actors, about, patience_s, depth, sticky, None, turnstile, directory, placed), generator)

    def _connect(self, way: Way, generator: torch.Generator | None) -> None:
        self._way = way
        self._fleet = way.fleet()
        self._batches = way.batches(self._fleet, generator)
        self._sender = way.sender(self._fleet)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled handle leads to the same shards; it has a shard of its own to write to, and chance of its own."""
        return {"way": self._way}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect."""
        generator = torch.Generator()
        generator.seed()
        self._connect(state["way"], generator)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """How many shards there are, missing ones included."""
        return len(self._fleet)

    @property
    def actors(self) -> tuple[Any, ...]:
        """Handles of the shards' actors."""
        return tuple(self._fleet.actors)

    @property
    def missing(self) -> dict[int, str]:
        """Shards that did not answer this handle the last time, and why."""
        return dict(self._fleet.missing)

    @property
    def batch_size(self) -> int | None:
        """Rows that `sample()` gives; None if the constructor was given none."""
        return self._way.about.batch_size

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The limiter; None if the constructor was given none."""
        return None if self._way.turnstile is None else self._way.turnstile.limiter

    @property
    def write_count(self) -> int:
        """Rows written since the shards were made or emptied; what a shard lost with its actor is not counted."""
        return sum(int(found) for found in self._each("write_count").values())

    def pinned(self, shard: int) -> ShardedReplayBuffer:
        """Return a handle that writes to one shard, whatever the route; to the next one while that is missing.

        Raises:
            OptionError: if there is no such shard.
        """
        if type(shard) is not int or not 0 <= shard < self.num_shards:
            msg = f"shard must be an integer in [0, {self.num_shards}), got {shard!r}"
            raise OptionError(msg)
        return self._along(sticky=True, home=shard)

    def _along(self, **changes: Any) -> ShardedReplayBuffer:
        handle = object.__new__(ShardedReplayBuffer)
        handle.__setstate__({"way": self._way._replace(**changes)})
        return handle

    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(buffer, *args)` in every shard that is there, and return what each returned.

        A schedule: `rb.apply(lambda rb: setattr(rb.sampler, "beta", 0.7))`.
        """
        calls = dict.fromkeys(self._fleet.present(), (function, *args))
        return list(self._fleet.ask("apply", calls, timeout_s=None).values())

    def _each(self, name: str) -> dict[int, Any]:
        """Call a method of all buffers that are there."""
        return self._fleet.ask("call", dict.fromkeys(self._fleet.present(), (name,)))

    def report(self) -> list[ShardReport]:
        """Return how each shard is."""
        return report_shards(self._fleet)

    def stats(self) -> BufferStats:
        """Count rows, draws, ages and waits over the shards that are there; ages count rows of the same shard."""
        total = combine(list(self._each("stats").values()), None)
        return dataclasses.replace(total, prefetch_ready=self._batches.ready)

    def __len__(self) -> int:
        """Rows present in the shards that are there."""
        return sum(int(rows) for rows in self._each("__len__").values())

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return len(self) > 0

    def __repr__(self) -> str:
        """Shards and options; asks nobody."""
        way, route = self._way, "sticky" if self._way.sticky else "round_robin"
        return (
            f"ShardedReplayBuffer(num_shards={self.num_shards}, {route=}, missing={sorted(self._fleet.missing)}, "
            f"batch_size={self.batch_size}, prefetch={way.depth}, checkpoint_dir={way.directory}, {self.rate_limiter})"
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout_s: float | None = None) -> int | None:
        """Add one row to a shard; see `ReplayBuffer.add`."""
        check_wait(timeout_s, waits=self._way.waits)
        shard, slot = self._sender.put("add", data, timeout_s)
        return None if slot is None else int(join_index(shard, torch.tensor(slot, dtype=torch.int64, device="cpu")))

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows to one shard, in order; see `ReplayBuffer.extend`.

        When it returns, the shard has them. A shard that dies before it has answered may have saved them: they are then
        written to the next shard as well (at least once).

        Raises:
            LostBufferError: if no shard is there.
            WaitTimeoutError: if readers did not come within `timeout_s` (None is the limiter's); nothing is written.
        """
        check_wait(timeout_s, waits=self._way.waits)
        shard, slots = self._sender.put("extend", data, timeout_s, update_priority=update_priority)
        return join_index(shard, slots)

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Give rows new priorities, each in its shard; see `ReplayBuffer.update_priority`.

        Priorities of rows in a missing shard are dropped. So are those of rows that a shard has lost, though others are
        in their slots by now, if stamps come along.

        Raises:
            PriorityError: for priorities that are negative, NaN or infinite, naming the positions; nothing is changed.
            SlotError: if an index names no shard; nothing is changed.
        """
        self._write_priorities(unpack_shares(self._way.about, index, priority, generation))

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that stand under the shards' `priority_key`.

        Raises:
            KeyMissingError: if the index or the priorities are missing.
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
        """
        self._write_priorities(unpack_batch(self._way.about, data))

    def _write_priorities(self, update: PriorityUpdate | None) -> None:
        if update is None:
            return
        parts = route(update, self.num_shards, self._way.about.capacity)
        present = self._fleet.present()
        calls = {i: ("update_priority", *map(Parcel, part)) for i, part in parts.items() if i in present}
        self._fleet.ask("call", calls, "update")

    def empty(self) -> None:
        """Forget all rows of the shards that are there, and what each has saved only with its next checkpoint."""
        self._batches.drop()
        self._each("empty")
        self._begin_counts()

    def _begin_counts(self) -> None:
        if self._way.turnstile is not None:
            self._way.turnstile.begin(self._way.patience_s)

    # -- reading ------------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draw a batch from all shards.

        Transforms and units run in the shards, on their parts of the batch; `batch_size` counts rows drawn.

        Args:
            batch_size: rows; None takes the constructor's. With prefetch it must be the constructor's.
            return_info: return `(batch, info)`, as `ReplayBuffer.sample` does; `info["index"]` names shard and slot.
            max_age: draw only rows whose version is at least the newest one of all shards less this, where there is a
                `version_key` and no prefetch; None takes all.
            timeout_s: longest wait for writers, where there is a `rate_limiter` or a queue; None is the limiter's.

        Returns:
            Rows as they were put in, `[B, *shape]`, those of different shards in random order. A copy.

        Raises:
            UsageError: if there is no batch size.
            EmptyBufferError: if no shard that is there has rows.
            LostBufferError: if no shard is there.
            WaitTimeoutError: if writers did not come in time.
        """
        check_wait(timeout_s, waits=self._way.waits)
        size = check_size(batch_size, self.batch_size, fixed=bool(self._way.depth))
        batch, info = self._batches.next(size, timeout_s, max_age)
        return (batch, info) if return_info else batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches, without end.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        if self.batch_size is None:
            msg = "Cannot iterate over the replay buffer: batch_size was not specified when it was made"
            raise UsageError(msg)
        while True:
            yield self.sample()

    def __getitem__(self, index: Any) -> Any:
        """Read rows by an index as `extend` and `sample` give it, a number or a tensor of one shard's rows. Copy.

        Raises:
            SlotError: if there is no such row.
            LostBufferError: if its shard is missing.
        """
        shard, slots = one_shard(index, self.num_shards)
        found = self._fleet.ask("call", {shard: ("__getitem__", slots)}, "read")
        if shard not in found:
            msg = f"{self._fleet.name(shard)}, which has these rows, does not answer: {self._fleet.missing[shard]}"
            raise LostBufferError(msg)
        return found[shard]

    # -- state --------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> list[int]:
        """Save every shard that is there to `checkpoint_dir`, each whole or not at all.

        Returns:
            How many rows were written to each shard before its checkpoint, 0 for a missing one: what was acknowledged
            before this call is among them.

        Raises:
            UsageError: if the constructor was given no `checkpoint_dir`.
        """
        if self._way.directory is None:
            msg = "there is no checkpoint_dir: give one to the constructor, or call dumps(path)"
            raise UsageError(msg)
        found = save_shards(self._fleet, self._way.directory)
        return [found.get(i, {"write_count": 0})["write_count"] for i in range(self.num_shards)]

    def dumps(self, path: str | Path) -> None:
        """Save all shards to directories under `path`, each whole as of a moment of its own.

        Raises:
            LostBufferError: if a shard is missing; the others are saved.
        """
        directory = Path(path).absolute()
        missing = sorted(set(range(self.num_shards)) - set(save_shards(self._fleet, directory)))
        if missing:
            msg = f"shards {missing} of {self.num_shards} do not answer: {directory} has no new checkpoint of these"
            raise LostBufferError(msg)

    def loads(self, path: str | Path) -> None:
        """Restore what `dumps` or `checkpoint` saved, of as many shards.

        Raises:
            CheckpointError: if a checkpoint is not there, or does not fit; shards before it are loaded then.
            LostBufferError: if a shard is missing; the others are loaded.
        """
        self._batches.drop()
        try:
            load_shards(self._fleet, Path(path).absolute())
        finally:
            self._begin_counts()

    def close(self) -> None:
        """End the actors, and the rows with them, for all handles; checkpoints stay."""
        self._batches.drop()
        for actor in self._fleet.actors:
            ray().kill(actor)
        if self._way.turnstile is not None:
            ray().kill(self._way.turnstile.actor)
        self._way.placed.free()
