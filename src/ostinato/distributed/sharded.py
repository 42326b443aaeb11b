"""`ShardedReplayBuffer`: one replay buffer made of several, each in an actor, on any number of machines."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, final

import torch

from ostinato.buffers import BufferStats, ReplayBuffer, TensorDictReplayBuffer
from ostinato.buffers.options import check_generator, check_prefetch, check_seconds, check_size, positive
from ostinato.buffers.rate_limit import RateLimiter, check_min_batch
from ostinato.buffers.stats import combine
from ostinato.buffers.updates import UpdateQueue
from ostinato.core.options import check_choice, check_type
from ostinato.distributed.actor_names import FLEET, check_free, take_names
from ostinato.distributed.actors import BufferSpec, ShardSpec
from ostinato.distributed.batch_stream import ShardBatches
from ostinato.distributed.checkpoints import (
    ShardReport,
    check_checkpoint_dir,
    load_shards,
    read_fleet,
    report_shards,
    require_all,
    save_shards,
    shard_directories,
)
from ostinato.distributed.deadlines import CALL_TIMEOUT_S, Deadline, check_call_timeout
from ostinato.distributed.fleet import Fleet, attach_fleet, check_placement, reserve_placement, start_fleet
from ostinato.distributed.rate_limits import RateLimitClient
from ostinato.distributed.ray_client import init_ray, pop_service, ray, result_by
from ostinato.distributed.remote import Method, RemoteBuffer, Time, named, remote
from ostinato.distributed.routing import MAX_SHARDS, join_index
from ostinato.distributed.sampling import RowConsumer, ShardSampler
from ostinato.distributed.shard_client import ShardClient
from ostinato.distributed.shard_updates import (
    delete_rows,
    one_shard,
    update_batch_priorities,
    update_priorities,
    update_shards,
)
from ostinato.distributed.snapshot import read_age
from ostinato.distributed.writing import ShardWriter
from ostinato.durable.progress import SHARDS, Progress
from ostinato.errors import NoAnswerError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ostinato.buffers.options import AnyBufferOptions
    from ostinato.distributed.actor_names import ActorNames
    from ostinato.durable.progress import ProgressOption


_ROUTES = ("round_robin", "sticky")
_MAX_SAVE_FAILURES = 3
"""Default of `max_save_failures`."""


def _check_options(
    route: str,
    shard_timeout_s: float,
    checkpoint_dir: Any,
    checkpoint_every_s: float | None,
    max_save_failures: int | None,
    *,
    resume: bool,
) -> None:
    """Raise `OptionError` for options that are invalid or exclude each other."""
    check_choice("route", route, _ROUTES)
    if checkpoint_dir is None and (checkpoint_every_s is not None or resume):
        msg = "checkpoint_every_s and resume need checkpoint_dir: where shards are saved"
        raise OptionError(msg)
    check_seconds("shard_timeout_s", shard_timeout_s)
    if checkpoint_every_s is not None:
        check_seconds("checkpoint_every_s", checkpoint_every_s)
    if max_save_failures is not None:
        positive("max_save_failures", max_save_failures)
        if checkpoint_every_s is None:
            msg = "max_save_failures counts periodic checkpoints: it needs checkpoint_every_s"
            raise OptionError(msg)


def _in_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `function(shards, info, ...)` for a method; see `Method.via`."""

    def call(rb: ShardedReplayBuffer, _: Deadline, *args: Any, **kwargs: Any) -> Any:
        return function(rb._shards, rb._fleet.info, *args, **kwargs)  # noqa: SLF001 (same module)

    return call


# -- the handle -------------------------------------------------------------------------------------------------------


@named
@final
class ShardedReplayBuffer(RemoteBuffer):
    """Several replay buffers, each in a Ray actor, that are sampled as one. This is a handle to them.

    A batch has the distribution of a single buffer with all rows: uniform, or in proportion to priorities, with the
    importance weights of the whole. Each shard draws rows and computes its weight at one moment, and the batch is made
    of these draws; so the distribution is exact for the rows that each shard had then, whatever is written meanwhile.
    Each write goes to one shard.

    Handles can be pickled, for workers that write and learners that sample. A shard whose actor dies is left out, with
    a warning, and restarted by Ray: with its last checkpoint if there is a `checkpoint_dir`, else empty.

    An index holds shard and slot in one number; pass it to `update_priority` unchanged.

    Args:
        num_shards: Number of buffers.
        *args: Positional arguments of `replay_buffer_cls`, for each shard.
        replay_buffer_cls: Makes a shard: `ReplayBuffer` or one of its subclasses, with `RandomSampler`,
            `PrioritizedSampler`, `QueueSampler` or `LimitedSampler`, and `ndim=1`. Use `functools.partial` for options
            of a class of your own.
        route: Where a handle writes: "sticky" to one shard, as buffers with units need it to keep the rows of an
            episode together; "round_robin" to one shard after the other.
        checkpoint_dir: Where shards are saved, one directory each. Every machine that may run a shard must see it.
        checkpoint_every_s: Save each shard that was written to at this interval; None saves only in `checkpoint()`.
        max_save_failures: Periodic checkpoints of a shard that may fail in a row, 3 by default. Every handle warns at
            its next call when they begin to fail; after this number, writes to the shard raise `CheckpointError`
            before they store anything, until a checkpoint succeeds.
        resume: Begin with the checkpoints in `checkpoint_dir`; without it there must be none.
        placement: "SPREAD", "STRICT_SPREAD" (one shard per node), "PACK" or "STRICT_PACK"; None leaves it to Ray.
        shard_timeout_s: How long to wait for the draw of a shard before it is left out.
        call_timeout_s: Time of calls without `timeout_s`, in seconds; `math.inf` sets no limit. Half of it is for the
            draw of a shard, if that is less than `shard_timeout_s`.
        snapshot_age_s: For how many seconds batches may be drawn from masses and draws of one moment, so that a batch
            calls only the shards that it has rows of. Changes by this process are seen at once, those by others after
            this time at the latest. 0 asks all shards for every batch. None is 0 for fewer than 16 shards, else 1.
        name: Name by which `attach` returns a handle in other programs of the cluster.
        lifetime: "detached" lets the buffer outlive the process that makes it, until `close` of a handle; it needs a
            `name`. None ends it with that process, or with its last handle there.
        namespace: Namespace of the name; None is "ostinato".
        ray_init_config: Arguments of `ray.init`, if this process is not connected to Ray yet.
        remote_config: Options of the actor of each shard, as for `ray.remote`. The actor of the fleet gets its
            `runtime_env`, `scheduling_strategy` and `label_selector`, and reserves no resources.
        **options: Options of `replay_buffer_cls`, for each shard; capacities are those of one shard. Three of them are
            for all shards together:

            - `generator`: chooses the shards, and their seeds; None is torch's global generator.
            - `prefetch`: batches to keep ready in each handle; needs `batch_size`.
            - `rate_limiter`: when readers and writers wait for each other, over all shards and handles. It counts in
              the actor of the fleet, which every call asks first; checkpoints hold the counts.

    Raises:
        MissingExtraError: Ray is not installed.
        OptionError: Options exclude each other, or a shard cannot be sampled as part of a whole.

    Examples:
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
        max_save_failures: int | None = None,
        resume: bool = False,
        placement: str | None = None,
        shard_timeout_s: float = 30.0,
        call_timeout_s: float = CALL_TIMEOUT_S,
        snapshot_age_s: float | None = None,
        name: str | None = None,
        lifetime: Literal["detached"] | None = None,
        namespace: str | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **options: Unpack[AnyBufferOptions],
    ) -> None:
        number = positive("num_shards", num_shards)
        if number > MAX_SHARDS:
            msg = f"num_shards must be in [1, {MAX_SHARDS}], got {number}"
            raise OptionError(msg)
        call_s = check_call_timeout(call_timeout_s)
        saving = checkpoint_dir, checkpoint_every_s, max_save_failures
        _check_options(route, shard_timeout_s, *saving, resume=resume)
        check_placement(placement)
        age_s = read_age(snapshot_age_s, number)
        pop_service("ShardedReplayBuffer", options)
        directory = None if checkpoint_dir is None else Path(checkpoint_dir).absolute()
        generator = check_generator(options.pop("generator", None))
        prefetch = check_prefetch(options.pop("prefetch", None), options.get("batch_size"))
        rate_limiter = check_type("rate_limiter", options.pop("rate_limiter", None), RateLimiter, "RateLimiter(2, 64)")
        seeds = torch.randint(2**62, (number,), generator=generator, device="cpu").tolist()
        check_checkpoint_dir(directory, number, resume=resume)
        saved = None if directory is None or not resume else read_fleet(directory)
        names, actor_options = take_names("ShardedReplayBuffer", name, lifetime, namespace, remote_config)
        buffer = BufferSpec(replay_buffer_cls, args, dict(options), None)
        buffer.check_names("ShardedReplayBuffer")
        init_ray(ray_init_config)
        check_free("ShardedReplayBuffer", names)
        place = reserve_placement(placement, number, actor_options, detached=names.detached)
        most, where = max_save_failures or _MAX_SAVE_FAILURES, (names.actor(FLEET), names.namespace)
        one = ShardSpec(buffer, None, checkpoint_every_s, resume, 0, number, where, most, rate_limiter is not None)
        specs = [
            one._replace(buffer=buffer._replace(seed=seed), path=path, shard=i)
            for i, (seed, path) in enumerate(zip(seeds, shard_directories(directory, number), strict=True))
        ]
        sticky = route == "sticky"
        fleet = Fleet(names, place, rate_limiter, shard_timeout_s, age_s, prefetch, sticky, directory, call_s)
        self._connect(start_fleet(fleet, specs, actor_options, saved), generator)

    @classmethod
    def _find(cls, names: ActorNames, timeout_s: float) -> dict[str, Any]:
        return attach_fleet(names, timeout_s)._asdict()

    def _connect(self, fleet: Fleet, generator: torch.Generator | None) -> None:
        info = fleet.info
        shards = ShardClient(fleet.shards, fleet.shard_timeout_s, fleet.why_gone, fleet.call_timeout_s)
        shards.record_places(fleet.places)
        limiter = None
        if fleet.rate_limiter is not None:
            limiter = RateLimitClient(
                fleet.actor, fleet.rate_limiter, shards.check_gone, fleet.place, fleet.call_timeout_s
            )
            shards.on_change = limiter.recount
        age_s = fleet.snapshot_age_s
        consumer = RowConsumer(shards, waits=fleet.waits, snapshot_age_s=age_s) if info.counting else None
        self._fleet = fleet
        self._limiter = limiter
        self._shards = shards
        self._updates = UpdateQueue()
        sampler = ShardSampler(shards, generator, limiter, consumer, age_s)
        self._batches = ShardBatches(sampler, fleet.prefetch)
        self._writer = ShardWriter(shards, limiter, waits=info.waits, sticky=fleet.sticky, home=fleet.home)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled handle reaches the same shards; it has a home shard and a random seed of its own."""
        return self._fleet._asdict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect to the shards."""
        generator = torch.Generator()
        generator.seed()
        self._connect(Fleet(**state), generator)

    _another = "with resume=True for its rows"

    @property
    def _call_timeout_s(self) -> float:
        return self._fleet.call_timeout_s

    def _silent(self) -> object:
        return self._shards.name_silent()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _within(self, method: str, time: Time, *, works: bool = False) -> AbstractContextManager[Deadline]:
        """Make the calls in a block end by a deadline: of work, or of a call that the shards answer at once."""
        make = Deadline.of_work if works else Deadline.of_call
        return self._shards.within(method, make(time, self._call_timeout_s))

    def _call(self, method: Method, time: Time, *args: Any, **kwargs: Any) -> Any:
        works = method.kind == "work"
        with self._within(method.name, time, works=works) as deadline:
            if method.drops:
                self._batches.drop()
            if method.via is not None:
                return method.via(self, deadline, *args, **kwargs)
            if works or kwargs:
                found = self._shards.call_all("apply", methodcaller(method.name, *args, **kwargs))
            else:
                found = self._shards.call_all("call", method.name, *args)
            return method.reduce(list(found.values()))

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """Number of shards, missing ones included."""
        return len(self._shards)

    @property
    def actors(self) -> tuple[Any, ...]:
        """Handles of the shards' actors."""
        return tuple(self._shards.actors)

    @property
    def missing(self) -> dict[int, str]:
        """Shards that did not answer the last call of this handle, and why."""
        return dict(self._shards.missing)

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch; None if the constructor got no `batch_size`."""
        return self._fleet.info.batch_size

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The limiter; None if the constructor got none."""
        return self._fleet.rate_limiter

    @property
    def limiter_counts(self) -> tuple[int, int] | None:
        """Rows written and rows drawn, as the rate limiter counts them for its ratio; None without one."""
        return None if self._limiter is None else self._limiter.totals(self._call_timeout_s)

    def pinned(self, shard: int) -> ShardedReplayBuffer:
        """Return a handle that writes to one shard, whatever the route; to the next one while that is missing.

        Raises:
            OptionError: There is no such shard.
        """
        return self._handle(sticky=True, home=self._check_shard(shard))

    def apply(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `function(buffer, *args)` in every present shard, and return the results.

        Example: `rb.apply(lambda rb: setattr(rb.sampler, "beta", 0.7))`.
        """
        with self._within("apply", timeout_s, works=True):
            return list(self._shards.call_all("apply", function, *args).values())

    def report(self, *, timeout_s: float | None = None) -> list[ShardReport]:
        """Return the state of each shard."""
        with self._within("report", timeout_s):
            return report_shards(self._shards)

    def stats(self, *, timeout_s: float | None = None) -> BufferStats:
        """Return counts of rows, draws, ages and waits of the present shards; an age counts rows of the same shard."""
        with self._within("stats", timeout_s):
            return combine(list(self._shards.call_all("call", "stats").values()), self._batches.queue)

    def __repr__(self) -> str:
        """Shards and options; makes no remote call."""
        fleet = self._fleet
        name = f"name={fleet.names.name!r}, " if fleet.names.given else ""
        route = "sticky" if fleet.sticky else "round_robin"
        return (
            f"ShardedReplayBuffer({name}num_shards={self.num_shards}, {route=}, "
            f"missing={sorted(self._shards.missing)}, batch_size={self.batch_size}, prefetch={fleet.prefetch}, "
            f"checkpoint_dir={fleet.directory}, {self.rate_limiter})"
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout_s: float | None = None) -> int | None:
        """Add one row to a shard; see `ReplayBuffer.add`."""
        shard, slot = self._writer.write("add", data, timeout_s)
        return None if slot is None else int(join_index(shard, torch.tensor(slot, dtype=torch.int64, device="cpu")))

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows to one shard, in order; see `ReplayBuffer.extend`.

        When it returns, the shard holds the rows. If a shard dies before it has answered, the rows are written to the
        next shard; the dead one may have saved them, too (at-least-once semantics).

        Raises:
            NoAnswerError: No shard answers in time; the rows may still be written.
            WaitTimeoutError: Readers made no room within `timeout_s` (None is the limiter's); nothing is written.
        """
        shard, slots = self._writer.write("extend", data, timeout_s, update_priority=update_priority)
        return join_index(shard, slots)

    def _synchronize(self, deadline: Deadline) -> None:
        self._settle(deadline)

    update_priority = remote(
        ReplayBuffer.update_priority,
        note="Priorities of rows in a missing shard are dropped; with generations, so are those of rows that a shard "
        "has lost, even if other rows are in their slots now.",
        via=_in_shards(update_priorities),
    )
    update_tensordict_priority = remote(
        TensorDictReplayBuffer.update_tensordict_priority, via=_in_shards(update_batch_priorities)
    )
    delete = remote(
        ReplayBuffer.delete,
        note="Each row is deleted in its shard; those of a missing shard are not. Without generations rows of a shard "
        "that was restarted since are deleted by their slots, whatever rows are there now. Batches prefetched by this "
        "handle are dropped.",
        drops=True,
        via=_in_shards(delete_rows),
    )
    update_if_present = remote(
        ReplayBuffer.update_if_present,
        note="Rows in a missing shard, or lost with one, count as not there. Each shard changes its rows at one "
        "moment, all shards at once; arguments that are wrong raise before any of them has changed a row.",
        via=_in_shards(update_shards),
    )
    synchronize = remote(ReplayBuffer.synchronize, via=_synchronize)

    def empty(self, shard: int | None = None, *, timeout_s: float | None = None) -> None:
        """Remove the rows of all present shards, or of one; their saved checkpoints change with the next one.

        The schema stays, as in a single buffer; see `reset`.

        Args:
            shard: Number of one shard; None empties all.
            timeout_s: When the answer is due; None is `call_timeout_s`.

        Raises:
            OptionError: There is no such shard.
            LostBufferError: This one shard does not answer.
        """
        with self._within("empty", timeout_s) as deadline:
            self._batches.drop()
            if shard is None:
                self._shards.call_all("call", "empty")
            else:
                self._call_shards("call", shard, "empty", what="it keeps its rows")
            self._reset_limiter(deadline, shard)

    def reset(self, shard: int | None = None, *, timeout_s: float | None = None) -> None:
        """Remove all rows and their schema: the next rows may have another one, in all shards.

        With `shard`, remove the rows of one shard: its next rows have the schema that the other shards hold.

        Args:
            shard: Number of one shard; None resets all.
            timeout_s: When the answer is due; None is `call_timeout_s`.

        Raises:
            OptionError: There is no such shard.
            LostBufferError: A shard does not answer; the others are reset, and the schema stays.
        """
        with self._within("reset", timeout_s) as deadline:
            self._batches.drop()
            self._call_shards("reset", shard, what="they keep rows and schema")
            if shard is None and self._free_schema(deadline):
                self._shards.call_all("release")
            self._reset_limiter(deadline, shard)

    def _call_shards(self, method: str, shard: int | None, *arguments: Any, what: str) -> None:
        """Call a method of all shards, or of one; raise `LostBufferError` if a shard does not answer."""
        wanted = range(self.num_shards) if shard is None else [self._check_shard(shard)]
        calls = {i: arguments for i in self._shards.present() if i in wanted}
        require_all(self._shards, wanted, self._shards.call(method, calls), what)

    def _check_shard(self, shard: Any) -> int:
        if type(shard) is not int or not 0 <= shard < self.num_shards:
            msg = f"shard must be an integer in [0, {self.num_shards}), got {shard!r}"
            raise OptionError(msg)
        return shard

    def _free_schema(self, deadline: Deadline) -> bool:
        fleet = self._fleet
        deadline.check_open(fleet.place, "reset")
        return bool(result_by(fleet.actor.free_schema.remote(), fleet.actor, fleet.place, "reset", deadline))

    def _reset_limiter(self, deadline: Deadline, shard: int | None, saved: dict[str, Any] | None = None) -> None:
        """Let the limiter count the rows again, and go on from saved counts, after all rows have changed or a shard."""
        if self._limiter is not None and shard is None:
            self._limiter.begin(deadline, saved)
        elif self._limiter is not None:
            self._limiter.recount()

    # -- reading ------------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
        min_batch: int | None = None,
    ) -> Any:
        """Draw a batch from all shards.

        Transforms and units run in the shards, on their parts of the batch; `batch_size` counts rows drawn.

        Args:
            batch_size: Rows; None takes the constructor's. With prefetch it must be the constructor's.
            return_info: Return `(batch, info)`, as `ReplayBuffer.sample` does; `info["index"]` holds shard and slot.
            max_age: Draw only rows whose version is at least the newest version of all shards minus this. Needs a
                `version_key` and no prefetch; None draws from all rows.
            timeout_s: Longest wait for writers, if there is a `rate_limiter` or a queue; None is the limiter's. The
                answer is due 5 s later. Without these, it is due after `timeout_s`; None is `call_timeout_s`.
            min_batch: Take a smaller batch when the time is up: as many rows as may be drawn then, at least these. Not
                with prefetch.

        Returns:
            Rows `[B, *shape]`; rows of different shards are in random order. A copy.

        Raises:
            UsageError: There is no batch size.
            EmptyBufferError: The present shards have no rows.
            NoAnswerError: No shard answers, or one is silent that `timeout_s` is too short to leave out.
            WaitTimeoutError: Too few rows were written in time.
        """
        fleet = self._fleet
        size = check_size(batch_size, self.batch_size, fixed=bool(fleet.prefetch))
        whole = "prefetch, whose batches were drawn before" if fleet.prefetch else None
        check_min_batch(min_batch, size, partial=fleet.waits or fleet.info.counting, whole=whole)
        batch, info = self._batches.next(size, timeout_s, max_age, min_batch)
        return (batch, info) if return_info else batch

    def _can_sample(self, _: Deadline, batch_size: int | None = None) -> bool:
        return self._batches.can_draw(check_size(batch_size, self.batch_size, fixed=False), self.batch_size)

    def _can_insert(self, _: Deadline, rows: int = 1) -> bool:
        return self._writer.can_write(positive("rows", rows))

    can_sample = remote(
        ReplayBuffer.can_sample, note="A shard has rows, and the rate limiter of all shards allows it.", via=_can_sample
    )
    can_insert = remote(ReplayBuffer.can_insert, via=_can_insert)

    def __getitem__(self, index: Any) -> Any:
        """Read rows by an index that `extend` or `sample` returned: a number, or a tensor of rows of one shard. Copy.

        Raises:
            SlotError: There is no such row.
            NoAnswerError: The shard is missing.
        """
        shard, slots = one_shard(index, self.num_shards)
        with self._within("__getitem__", None):
            found = self._shards.call("call", {shard: ("__getitem__", slots)}, "read")
        if shard not in found:
            msg = f"{self._shards.callee(shard)}, which has these rows, does not answer: {self._shards.missing[shard]}"
            raise NoAnswerError(msg)
        return found[shard]

    # -- state --------------------------------------------------------------------------------------------------------

    def checkpoint(self, *, progress: ProgressOption = None, timeout_s: float | None = None) -> list[int]:
        """Save every present shard to `checkpoint_dir`, each completely or not at all.

        Args:
            progress: The shards saved and their total; see `ProgressOption`.
            timeout_s: When the answer is due; None sets no limit while the shards answer other calls.

        Returns:
            The number of rows written to each shard before its checkpoint, 0 for a missing one. All rows whose write
            returned before this call are included.

        Raises:
            UsageError: The constructor got no `checkpoint_dir`.
        """
        directory = self._fleet.directory
        if directory is None:
            msg = "there is no checkpoint_dir: give one to the constructor, or call dumps(path)"
            raise UsageError(msg)
        with Progress(progress, "save", unit=SHARDS), self._within("checkpoint", timeout_s, works=True) as deadline:
            self._settle(deadline)
            found = save_shards(self._shards, directory)
        return [found.get(i, {"write_count": 0})["write_count"] for i in range(self.num_shards)]

    def dumps(self, path: str | Path, *, progress: ProgressOption = None, timeout_s: float | None = None) -> None:
        """Save all shards to directories under `path`, each as of a moment of its own.

        Args:
            path: Directory.
            progress: The shards saved and their total; see `ProgressOption`.
            timeout_s: When the answer is due; None sets no limit while the shards answer other calls.

        Raises:
            LostBufferError: A shard is missing; the others are saved.
            Exception: The first error of an update that this handle submitted.
        """
        directory = Path(path).absolute()
        with Progress(progress, "save", unit=SHARDS), self._within("dumps", timeout_s, works=True) as deadline:
            self._settle(deadline)
            saved = save_shards(self._shards, directory)
        require_all(self._shards, range(self.num_shards), saved, f"{directory} has no new checkpoint of these")

    def loads(
        self,
        path: str | Path,
        shard: int | None = None,
        *,
        progress: ProgressOption = None,
        timeout_s: float | None = None,
    ) -> None:
        """Restore what `dumps` or `checkpoint` saved, from the same number of shards.

        All checkpoints are checked before the first shard changes: that they exist, fit the shards, and hold rows of
        one schema, that of the fleet if it has one (`reset` removes it). The counts of the rate limiter continue
        as they were saved; saved under other rules, with a warning, and by earlier versions, they begin anew.

        Args:
            path: Directory.
            shard: Number of one shard to load from its part of the checkpoint; None loads all.
            progress: The shards checked and loaded, twice their number in total; see `ProgressOption`.
            timeout_s: When the answer is due; None sets no limit while the shards answer other calls.

        Raises:
            CheckpointError: A checkpoint does not exist, or does not match; nothing has changed. Or the rows of one are
                damaged; other shards may be loaded then.
            LostBufferError: A shard is missing; the others are loaded.
            OptionError: There is no such shard.
        """
        if shard is not None:
            self._check_shard(shard)
        directory = Path(path).absolute()
        with Progress(progress, "load", unit=SHARDS), self._within("loads", timeout_s, works=True) as deadline:
            self._batches.drop()
            saved = load_shards(self._shards, directory, shard)
            self._reset_limiter(deadline, shard, saved)

    save = dump = dumps
    load = loads

    def _end(self, timeout_s: float | None) -> None:
        self._updates.close()
        self._batches.drop()
        if self._fleet.client or self._shards.closed:
            return
        self._shards.closed = True
        if ray().is_initialized():  # else the actors ended with Ray, or are out of reach
            self._fleet.end(timeout_s)
