"""ReplayBufferEnsemble: one batch from several buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ostinato.buffers.mixing import EnsembleEngine, EnsemblePipeline, Member, put_names, show_names, with_source
from ostinato.buffers.options import check_generator, check_prefetch, own, positive
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.routed import RoutedBuffer, check_route
from ostinato.buffers.stats import BufferStats, combine
from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.core.index import choose
from ostinato.errors import KindError, OptionError, UsageError
from ostinato.samplers import SamplerEnsemble
from ostinato.storages import StorageEnsemble
from ostinato.transforms import Compose
from ostinato.writers import WriterEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from ostinato.buffers.pipeline import Batch
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.core.episodes.tracker import Key
    from ostinato.samplers.ensemble import Ratio, RatioSteps, Rounding, WhenEmpty


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
    collates = [None] * members if given is None else list(given)
    if len(collates) != members:
        msg = f"collate_fns must hold one entry for each of the {members} members, got {len(collates)}"
        raise OptionError(msg)
    for collate in collates:
        if collate is not None and not callable(collate):
            msg = f"collate_fns must hold callables or None, got {type(collate).__name__}"
            raise KindError(msg)
    return collates


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
        if not isinstance(part, bases[name]):
            msg = (
                f"an ensemble needs buffers, or all of storages=, samplers= and writers=: {name} must be a "
                f"{bases[name].__name__}, got {type(part).__name__}"
            )
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


class ReplayBufferEnsemble(RoutedBuffer):
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

    _pipeline_class = EnsemblePipeline

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
        if shared:
            msg = "shared=True is not available for an ensemble: it serves the threads of one process"
            raise OptionError(msg)
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
