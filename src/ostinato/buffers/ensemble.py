"""ReplayBufferEnsemble: one batch from several buffers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ostinato.buffers.batch_parts import put_names, show_names, with_source
from ostinato.buffers.mixing import EnsembleEngine, EnsemblePipeline, Member
from ostinato.buffers.options import check_generator, check_not_shared, check_prefetch, own, positive
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.routed_updates import reset_priorities, update_fields, update_from_batch, update_priorities
from ostinato.buffers.routed_writes import check_route, require_route, write_rows
from ostinato.buffers.stats import BufferStats, combine
from ostinato.buffers.streams import end_streams
from ostinato.core import kinds
from ostinato.core.episodes.keys import as_path
from ostinato.core.index import choose
from ostinato.errors import KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import SamplerEnsemble
from ostinato.storages import StorageEnsemble
from ostinato.transforms import Compose
from ostinato.writers import WriterEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch
    from torch import Tensor

    from ostinato.buffers.conditional_updates import ConditionalUpdateResult
    from ostinato.buffers.pipeline import Batch
    from ostinato.buffers.routed_writes import Route
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.core.episodes.keys import Key
    from ostinato.samplers.ensemble import WhenEmpty
    from ostinato.samplers.ratio import Ratio, RatioSteps, Rounding


def check_buffers(rbs: Sequence[Any]) -> None:
    """Check that the members can be mixed.

    Raises:
        KindError: if one is no buffer.
        OptionError: if one is there twice, counts its draws, or storages differ in `ndim`.
    """
    for i, rb in enumerate(rbs):
        if not isinstance(rb, ReplayBuffer) or isinstance(rb, ReplayBufferEnsemble):
            msg = f"the members of an ensemble are ReplayBuffers, got {type(rb).__name__} at {i}"
            raise KindError(msg)
        if rb.rate_limiter is not None or rb.sampler.counting:
            msg = (
                f"the buffer at {i} holds its readers up or uses its rows up ({rb.rate_limiter}, {rb.sampler!r}), "
                "which an ensemble does not know of: leave rate_limiter out, and use another sampler"
            )
            raise OptionError(msg)
    if len({id(rb) for rb in rbs}) < len(rbs):
        msg = "a buffer can be a member only once: give it a larger weight p instead"
        raise OptionError(msg)
    dims = [rb.storage.ndim for rb in rbs]
    if len(set(dims)) > 1:
        msg = f"members must agree in storage.ndim, got {dims}: rows could not be named by one kind of index"
        raise OptionError(msg)


def check_collates(given: Any, members: int) -> list[Any]:
    """Return what collates the rows of each member, None for its own way.

    Raises:
        KindError: if one cannot be called.
        OptionError: if they are not as many as the members.
    """
    if given is None:
        return [None] * members
    if len(given) != members:
        msg = f"collate_fns must hold one entry for each of the {members} members, got {len(given)}"
        raise OptionError(msg)
    for collate in given:
        if collate is not None and not callable(collate):
            msg = f"collate_fns must hold callables or None, got {type(collate).__name__}"
            raise KindError(msg)
    return list(given)


def put_together(
    storages: Any, samplers: Any, writers: Any, given: dict[str, Any]
) -> tuple[tuple[ReplayBuffer, ...], SamplerEnsemble]:
    """Make buffers of parts, the first storage with the first sampler and writer, and so on.

    Raises:
        KindError: if something is no ensemble of parts.
        OptionError: if one is missing, they are not equally many, or `given` says once more how to mix.
    """
    parts = {"storages": storages, "samplers": samplers, "writers": writers}
    bases: dict[str, type] = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, part in parts.items():
        if part is None:
            msg = f"an ensemble needs buffers, or all of storages=, samplers= and writers=; {name}= is missing"
            raise OptionError(msg)
        if not isinstance(part, bases[name]):
            msg = f"{name} must be a {bases[name].__name__}, got {type(part).__name__}"
            raise KindError(msg)
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        msg = f"storages, samplers and writers must be equally many, got {counts}"
        raise OptionError(msg)
    if given:
        msg = f"with samplers= the SamplerEnsemble says how to mix: give {', '.join(given)} to it"
        raise OptionError(msg)
    rows = zip(storages, samplers, writers, storages.transforms, strict=True)
    rbs = tuple(ReplayBuffer(storage=a, sampler=b, writer=c, transform=d) for a, b, c, d in rows)
    check_buffers(rbs)
    return rbs, samplers


def _of_members(name: str) -> Callable[..., NoReturn]:
    """Return a method of an ensemble that raises, since a buffer does by it what members do by themselves."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001
        """Raise `UsageError`: rows and parts belong to the members, `ensemble[i]`."""
        msg = (
            f"{type(self).__name__} has no rows and parts of its own: call ensemble[i].{name}(...), ensemble[i] is one "
            f"of its {len(self.members)} members"
        )
        raise UsageError(msg)

    return method


class ReplayBufferEnsemble(ReplayBuffer):
    """Draws batches from several buffers at once.

    Rows are written through the members, `ensemble[i].extend(rows)`, or with `routing_key` or `routing_dim` through the
    ensemble.

    A batch has `num_buffer_sampled` parts of equal size, each from one member: `[parts, batch_size // parts, *shape]`,
    with `flatten` `[batch_size, *shape]`. `SamplerEnsemble` says which members they come from; a member that has no
    rows yet is left out, and joins as soon as it has some (see `when_empty`). Where batches are TensorDicts they carry
    the keys `("index", "buffer_ids")`, the member of each row, and `("index", "index")`, its index there; if some
    member is prioritized also `priority_weight` (1 for rows of other members; weights compare rows within one member)
    and `index_generation`; the latter also if the writers of all members have `track_generations`.

    With `ratio` a batch is divided by an exact ratio, row by row, and is flat, `[batch_size, *shape]`: the rows of the
    first member first. Where shares of a batch are not integers, its counts are rounded up or down so that the ratio of
    all batches is exact; see `SamplerEnsemble` and `docs/mixing.md`.

    Safe to use from several threads, beside direct use of the members. Without `generator=` each member draws from its
    own source of chance, and the members of a batch are chosen by torch's global generator.

    Args:
        *rbs: the buffers, or else give their parts:
        storages: a `StorageEnsemble`, with `samplers=` and `writers=` of the same length.
        samplers: a `SamplerEnsemble`, which then says how to mix.
        writers: a `WriterEnsemble`.
        transform: for whole batches, after those of the members.
        batch_size: rows that `sample()` and iteration give; without `ratio` divisible by `num_buffer_sampled`.
        collate_fn: makes a batch of the list of parts; None stacks them. Parts whose fields or shapes differ are
            stacked lazily where they are TensorDicts, and need a `collate_fn` where they are not.
        collate_fns: for each member what takes the place of its `collate_fn`, or None.
        p: weights of the members; see `SamplerEnsemble`, also for the next two.
        sample_from_all: one part from every member.
        num_buffer_sampled: parts of a batch.
        when_empty: "renormalize", the default, leaves members without rows to draw out of a batch and warns once,
            "raise" raises EmptyBufferError for them, "fill" leaves them out without a warning; see `SamplerEnsemble`.
        ratio: share of each member in every batch, of two members also that of the first, or a schedule of them;
            excludes `p`, `sample_from_all` and `num_buffer_sampled`. See `SamplerEnsemble`, also for the next three.
        rounding: "carry", the default, or "nearest".
        ratio_steps: what a schedule counts: "batches", the default, or "calls" of `step`.
        min_rows: rows that a member must hold to be drawn from; 1 by default.
        source_key: field of batches, nested ones as a tuple, that gets the number of the member of each row, int64;
            transforms of the ensemble see it. For batches of dicts and TensorDicts.
        routing_key: field, nested ones as a tuple, that holds the number of the member of each row: with it `add` and
            `extend` of the ensemble write each row to its member.
        routing_dim: batch dimension of the data whose entries are the members, for the same; excludes `routing_key`.
        flatten: put the parts of a batch end to end, not side by side: batches, and all that names their rows, are
            `[batch_size, ...]`, as a loss of single rows takes them; with `ratio` always. A `collate_fn` has to do so
            itself.
        generator: source of all draws through the ensemble, those within members included.
        prefetch: batches to keep ready; None or 0 keeps none. Needs `batch_size`.
        shared: must be False: an ensemble serves one process.
        compilable: no effect, see `ReplayBuffer`.
        delayed_init: no effect, see `ReplayBuffer`.

    Raises:
        KindError: if something is not of its class.
        OptionError: if options exclude each other, or buffers cannot be mixed.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> demos, online = (ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
        >>> index = demos.extend({"obs": torch.zeros(10)}), online.extend({"obs": torch.ones(50)})
        >>> both = ReplayBufferEnsemble(demos, online, sample_from_all=True, batch_size=6)
        >>> both.sample()["obs"]
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
    """

    _engine: EnsembleEngine  # type: ignore[assignment]
    _pipeline_class = EnsemblePipeline
    _route: Route | None = None

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Sequence[float] | Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        when_empty: WhenEmpty | None = None,
        ratio: Ratio | None = None,
        rounding: Rounding | None = None,
        ratio_steps: RatioSteps | None = None,
        min_rows: int | Sequence[int] | None = None,
        source_key: Key | None = None,
        routing_key: Key | None = None,
        routing_dim: int | None = None,
        flatten: bool = False,
        generator: torch.Generator | None = None,
        prefetch: int | None = None,
        shared: bool = False,
        compilable: bool = False,  # noqa: ARG002
        delayed_init: bool = False,  # noqa: ARG002
    ) -> None:
        check_not_shared(shared=shared)
        mix: dict[str, Any] = {
            "p": p,
            "sample_from_all": sample_from_all or None,
            "num_buffer_sampled": num_buffer_sampled,
            "when_empty": when_empty,
            "ratio": ratio,
            "rounding": rounding,
            "ratio_steps": ratio_steps,
            "min_rows": min_rows,
        }
        given = {name: value for name, value in mix.items() if value is not None}
        if rbs:
            if any(parts is not None for parts in (storages, samplers, writers)):
                msg = "an ensemble is made of buffers, or else of storages=, samplers= and writers=, not of both"
                raise UsageError(msg)
            check_buffers(rbs)
            sampler = SamplerEnsemble(*(rb.sampler for rb in rbs), **given)
        else:
            rbs, sampler = put_together(storages, samplers, writers, given)
        members = [Member(rb, mine) for rb, mine in zip(rbs, check_collates(collate_fns, len(rbs)), strict=True)]
        engine = EnsembleEngine(
            members, sampler, collate_fn, check_generator(generator), flatten=bool(flatten), named=True
        )
        self._join(engine, batch_size, transform, source_key, prefetch)
        if self._batch_size is not None:
            sampler.part_rows(self._batch_size)
        self._route = check_route(routing_key, routing_dim, members)

    def _join(
        self, engine: EnsembleEngine, batch_size: int | None, transform: Any, source_key: Key | None, prefetch: Any
    ) -> None:
        """Take the engine, and what is done with its batches."""
        self._given, self._dim_given, self._dim_extend = None, False, 0
        self._batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self._source = None if source_key is None else as_path(source_key)
        self._transform = Compose.of(transform)
        self._engine = engine
        self._pipeline = EnsemblePipeline(engine, check_prefetch(prefetch, self._batch_size))  # type: ignore[arg-type]

    # -- what there is ----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[ReplayBuffer, ...]:
        """The buffers."""
        return tuple(member.buffer for member in self._engine.members)

    @property
    def storage(self) -> StorageEnsemble:  # type: ignore[override]
        """The storages of the members."""
        return self._engine.storage

    @property
    def sampler(self) -> SamplerEnsemble:  # type: ignore[override]
        """The sampler of the ensemble, whose `p` may be set at any time, with the samplers of the members."""
        return self._engine.sampler

    @property
    def writer(self) -> WriterEnsemble:  # type: ignore[override]
        """The writers of the members."""
        return self._engine.writer

    @property
    def flatten(self) -> bool:
        """Whether batches are `[batch_size, ...]`, not `[parts, rows, ...]`."""
        return self._engine.flatten

    def __len__(self) -> int:
        """Number of members, as in TorchRL; `stats().rows` counts rows."""
        return len(self._engine.members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of some members, or rows of them.

        Args:
            index: an integer gives the member itself; a slice, list, array or tensor of integers an ensemble of these
                members that shares transform, generator and the ratio of `p`; all of them give the ensemble itself.
                A pair `i, rows` reads `ensemble[i][rows]`; where `i` chooses several, their rows are collated and
                transformed as a batch is.

        Raises:
            SlotError: if a number is out of range.
            UsageError: for a tensor of more than one dimension.
            KindError: for other indices.
        """
        chosen, rows = choose(index, len(self.members), type(self))
        if isinstance(chosen, int):
            return self.members[chosen] if rows is None else self.members[chosen][rows]
        if rows is None:
            return self if chosen == list(range(len(self.members))) else self._subset(chosen)
        data = self._engine.join([own(self.members[i][rows]) for i in chosen], chosen)
        return self.transform.forward(data) if self.transform else data

    def _subset(self, chosen: list[int]) -> ReplayBufferEnsemble:
        engine, size, sampler = self._engine, self._batch_size, self.sampler.subset(chosen)
        if size is not None and sampler.ratio_step is None and size % sampler.num_buffer_sampled:
            size = None
        members = [engine.members[i] for i in chosen]
        some = EnsembleEngine(
            members, sampler, engine.collate, engine.generator, flatten=engine.flatten, named=engine.named
        )
        made = object.__new__(ReplayBufferEnsemble)
        made._join(some, size, self._transform, self._source, None)
        return made

    # -- writing ----------------------------------------------------------------------------------------------

    @property
    def routing_key(self) -> str | tuple[str, ...] | None:
        """Field that holds the number of the member of each row written; None if there is none."""
        route = self._route
        return None if not isinstance(route, tuple) else route[0] if len(route) == 1 else route

    @property
    def routing_dim(self) -> int | None:
        """Batch dimension of written data whose entries are the members; None if there is none."""
        return self._route if isinstance(self._route, int) else None

    def add(self, data: Any) -> Any:  # type: ignore[override]
        """Write one row to the member that its `routing_key` names.

        Args:
            data: TensorDict without batch dimensions.

        Returns:
            TensorDict of `buffer_ids`, `index` and `index_generation`.

        Raises:
            UsageError: if the ensemble has no `routing_key`.
            KindError, SchemaError: as in `extend`.
        """
        if isinstance(require_route(self._route, data, "add", len(self)), int):
            msg = "Use extend() for routing_dim writes: one row has no dimension of members"
            raise UsageError(msg)
        if data.batch_size:
            msg = (
                f"add() expects a scalar TensorDict record, got batch_size={list(data.batch_size)}: use extend() for "
                "several rows"
            )
            raise SchemaError(msg)
        return self.extend(data.unsqueeze(0))[0]

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Any:  # type: ignore[override]
        """Write each row to its member; the rows of one member keep their order.

        The rows of all members are checked before the first one is written. If a write fails after that (too little
        memory, a rank that is not a number), members of lower numbers have their rows.

        Args:
            data: TensorDict `[*B]`; each entry is a row. With `routing_dim`, that dimension has one entry for each
                member.
            update_priority: False gives the rows the default priority, as in `ReplayBuffer.extend`.

        Returns:
            TensorDict `[rows]` of int64 tensors in the order of `data.reshape(-1)`: `buffer_ids`, the member of each
            row, its `index` there, and its `index_generation`. The index is -1 and the generation 0 where the writer
            did not keep the row, or an inverse transform of the member changed the number of rows; a transform of the
            ensemble that holds rows back gives no names.

        Raises:
            UsageError: if the ensemble has neither `routing_key` nor `routing_dim`.
            KindError: if the data is not a TensorDict, or numbers of members are not integers.
            SchemaError: if rows do not match those of their member, a number is no member, or there is not one number
                for each row; nothing is changed.
        """
        route = require_route(self._route, data, "extend", len(self))
        with self._engine.lock:
            return write_rows(self._engine.own, route, self.transform, data, ranked=update_priority is not False)

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any = None,
        patch: Any = None,
        version_key: Key | None = None,
        version: Any = None,
        require_newer: bool = False,
        priority: Any = None,
    ) -> ConditionalUpdateResult:
        """Write fields of rows that are still the rows that were sampled or written, each in its member.

        The arguments for all members are checked before the first row is changed; see `ReplayBuffer.update_if_present`
        for them, and for the errors.

        Args:
            index: what `extend` returned, a sample or its info, or a dict or TensorDict of `index` and `buffer_ids`.
            generation: `index_generation` of the same rows; None takes that of a sample.
            patch: values `[*B, *shape]` of stored fields by name, `B` the shape of `buffer_ids`.
            version_key: stored field of one number for each row, which is compared with `version`.
            version: one number, or one for each row, `[*B]`.
            require_newer: change a row only if `version` is larger.
            priority: also set the priorities of the rows that are changed.

        Returns:
            Which rows were changed, `[*B]`, and how many were not.
        """
        with self._engine.lock:
            return update_fields(
                self._engine.engines,
                index,
                generation,
                {} if patch is None else patch,
                version=version,
                priority=priority,
                version_key=version_key,
                require_newer=require_newer,
            )

    def submit_update_if_present(
        self,
        *,
        index: Any,
        generation: Any = None,
        patch: Any = None,
        version_key: Key | None = None,
        version: Any = None,
        require_newer: bool = False,
        priority: Any = None,
    ) -> Future[ConditionalUpdateResult]:
        """Do `update_if_present` in a thread, in the order of submission.

        Batches that were prefetched before stay as they are. Arguments are kept by reference until it is done: do not
        change them before. `synchronize` waits for all updates.

        Returns:
            The future result. An error is also raised by the next `sample`, `synchronize` or save, once.

        Raises:
            UsageError: after `shutdown`.
        """
        update = partial(
            self.update_if_present,
            index=index,
            generation=generation,
            patch=patch,
            version_key=version_key,
            version=version,
            require_newer=require_newer,
            priority=priority,
        )
        return self._pipeline.submit(update)

    def mark_update(self, index: Any) -> None:
        """Give rows the default priority again, as new ones have it; members without priorities are left out.

        Args:
            index: what `extend` returned, a sample or its info, or a dict or TensorDict of `index` and `buffer_ids`.

        Raises:
            KindError: if the index does not name members.
            SlotError: if a row or a member is out of range; nothing is changed.
        """
        with self._engine.lock:
            reset_priorities(self._engine.engines, index)

    def end_streams(
        self,
        *,
        end_key: Key = ("next", "done"),
        terminated_key: Key | None = ("next", "terminated"),
        truncated_key: Key | None = ("next", "truncated"),
    ) -> None:
        """Make the newest row of each member the last one of its episode, before collectors start anew.

        Members without rows stay as they are. Write to none of them meanwhile.

        Args:
            end_key: bool field that ends episodes for the members' slice samplers; becomes True.
            terminated_key: bool field that is read only.
            truncated_key: bool field that becomes True, if rows have it, unless the row ended its episode before; None
                changes no such field.

        Raises:
            UsageError: if a member holds more than one stream, or has no slice sampler of this `end_key`; nothing is
                changed.
            OptionError: if keys are equal.
            KindError: if the end flag is not bool; nothing is changed.
        """
        with self._engine.lock:
            end_streams(self.members, end_key, terminated_key, truncated_key)

    def step(self, steps: int = 1) -> None:
        """Go on by some steps in the schedule of the ratio; batches made ahead keep theirs.

        Args:
            steps: how many, at least 0.

        Raises:
            UsageError: unless the ensemble was made with `ratio=` and `ratio_steps="calls"`.
            OptionError: if it is not an integer of at least 0.
        """
        with self._engine.lock:
            self._engine.sampler.step(steps)

    # -- batches ----------------------------------------------------------------------------------------------

    def _finish(self, data: Any, ticket: Any, notes: dict[Any, Tensor]) -> Any:  # noqa: ARG002
        """Add the member of each row, transform, and add the keys that name rows."""
        if self._source is not None:
            data = with_source(data, self._source, notes["index", "buffer_ids"])
        if self._transform.steps:
            data = self._transform.forward(data)
        if self._engine.named and kinds.is_tensordict(data):
            put_names(data, notes)
        return data

    def _info(self, batch: Batch) -> Any:
        return show_names(batch.notes, as_tensordict=kinds.is_tensordict(batch.data))

    def _begin_process(self) -> None:
        """Do nothing: each member gets ready to be passed to a process by itself."""

    def can_insert(self, rows: int = 1) -> bool:
        """Whether a write of so many rows would go ahead at once: rows have a route, and each member takes them.

        Args:
            rows: rows of one call of `extend`.

        Raises:
            OptionError: if `rows` is below 1.
        """
        able = super().can_insert(rows)
        return able and self._route is not None

    def query(
        self, predicate: Callable[[Trajectory], Any] | None = None, *, trajectory_key: Key | None = None
    ) -> list[Trajectory]:
        """Return the trajectories of all members for which a predicate holds; see `ReplayBuffer.query`.

        Those of the first member come first. All members are locked meanwhile. The transforms of the members run, those
        of the ensemble do not: they are of whole batches.

        Args:
            predicate: a `traj` expression, or a function of a `Trajectory`; None selects all.
            trajectory_key: field of trajectory ids; None takes usual ids or flags.

        Raises:
            KindError, KeyMissingError, UsageError: as `ReplayBuffer.query` raises them.
        """
        with self._engine.lock:
            found = [rb.query(predicate, trajectory_key=trajectory_key) for rb in self.members]
        return [one for part in found for one in part]

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Give rows new priorities, each in its member; rows of members without priorities are left out.

        Indices, priorities and generations are checked as in `ReplayBuffer.update_priority`; if one check fails, no
        member is changed.

        Args:
            index: a sampled TensorDict, the info of a sample, or the `index` in it, a dict or TensorDict of `index` and
                `buffer_ids`; the first two bring their generation along.
            priority: one for all, or in the shape of the index, `[parts, rows]` or flat; further dimensions are reduced
                per row.
            generation: the sample's `index_generation`.

        Raises:
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
            SlotError: if a row or a member is out of range; nothing is changed.
        """
        with self._engine.lock:
            update_priorities(self._engine.engines, index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that it has under each member's `priority_key`.

        The key is that of the member the row is of, `"td_error"` where it is a plain `ReplayBuffer`.

        Raises:
            KeyMissingError: if a member's key is missing; nothing is changed.
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
        """
        with self._engine.lock:
            update_from_batch(self._engine.engines, data)

    def stats(self) -> BufferStats:
        """Count rows, draws, ages and waits over all members. Cost: O(rows), for the ages."""
        return combine([rb.stats() for rb in self.members], self._pipeline.prefetch)

    set_sampler, set_storage, set_writer = map(_of_members, ("set_sampler", "set_storage", "set_writer"))
    set_, set_at_, update_ = map(_of_members, ("set_", "set_at_", "update_"))
    read_all_in_order, write_all = map(_of_members, ("read_all_in_order", "write_all"))
    delete, view, share, check = map(_of_members, ("delete", "view", "share", "check"))
    load_dataset, export, read_episodes = map(_of_members, ("load_dataset", "export", "read_episodes"))
    __setitem__ = _of_members("__setitem__")

    def __repr__(self) -> str:
        """Members and options."""
        lines = ",\n".join(f"    {rb!r}" for rb in self.members)
        flat = ", flatten=True" if self.flatten else ""
        depth = self._pipeline.prefetch and self._pipeline.prefetch.depth
        return (
            f"ReplayBufferEnsemble(\n{lines},\n    {self.sampler!r}, batch_size={self._batch_size}, "
            f"prefetch={depth}{flat})"
        )
