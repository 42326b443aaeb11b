"""ReplayBufferEnsemble: one batch from several buffers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, final, overload

from ostinato.buffers.checkpoint.load import load_ensemble, quiet_ensemble, restore_ensemble
from ostinato.buffers.checkpoint.save import save_ensemble
from ostinato.buffers.checkpoint.state import ensemble_state, own_ensemble_copy
from ostinato.buffers.mixing import Member, Mixer, locked, mark_members, show_names, update_from_batch, update_members
from ostinato.buffers.options import check_generator, check_not_shared, check_prefetch, check_size, own, positive
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.routed_writes import check_route, require_route, update_rows, write_rows
from ostinato.buffers.stats import BufferStats, combine
from ostinato.buffers.streams import end_streams
from ostinato.core import kinds
from ostinato.core.episodes.keys import as_path
from ostinato.core.group import choose, split_index
from ostinato.durable.progress import BYTES, Progress
from ostinato.errors import KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import SamplerEnsemble
from ostinato.storages import StorageEnsemble
from ostinato.transforms import Compose
from ostinato.writers import WriterEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    import torch
    from torch import Tensor

    from ostinato.buffers.conditional_updates import ConditionalUpdateResult
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.core.episodes.keys import Key
    from ostinato.durable.progress import ProgressOption
    from ostinato.samplers.ensemble import WhenEmpty
    from ostinato.samplers.ratio import Ratio, RatioSteps, Rounding

__all__ = ["ReplayBufferEnsemble", "check_buffers", "check_collates", "check_no_parts", "put_together"]


def check_no_parts(*parts: Any) -> None:
    """Check that no parts are given beside buffers.

    Raises:
        UsageError: if there are any.
    """
    if any(part is not None for part in parts):
        msg = "an ensemble is made of buffers, or else of storages=, samplers= and writers=, not of both: give one"
        raise UsageError(msg)


def check_buffers(rbs: Sequence[Any]) -> None:
    """Check that the members can be mixed.

    Raises:
        KindError: if one is no buffer.
        OptionError: if one is there twice, counts its draws, or storages differ in `ndim`.
    """
    for i, rb in enumerate(rbs):
        if not isinstance(rb, ReplayBuffer):
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
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        msg = f"with samplers= the SamplerEnsemble says how to mix: give {', '.join(twice)} to it"
        raise OptionError(msg)
    rows = zip(storages, samplers, writers, storages.transforms, strict=True)
    rbs = tuple(ReplayBuffer(storage=a, sampler=b, writer=c, transform=d) for a, b, c, d in rows)
    check_buffers(rbs)
    return rbs, samplers


@final
class ReplayBufferEnsemble:
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
        if rbs:
            check_no_parts(storages, samplers, writers)
            check_buffers(rbs)
            given = {name: value for name, value in mix.items() if value is not None}
            sampler = SamplerEnsemble(*(rb.sampler for rb in rbs), **given)
        else:
            rbs, sampler = put_together(storages, samplers, writers, mix)
        collate_fns = check_collates(collate_fns, len(rbs))
        self._batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self._mixer = Mixer(
            [Member(rb, collate) for rb, collate in zip(rbs, collate_fns, strict=True)],
            sampler,
            collate_fn,
            Compose.of(transform),
            check_generator(generator),
            check_prefetch(prefetch, self._batch_size),
            flatten=bool(flatten),
            source=None if source_key is None else as_path(source_key),
        )
        if self._batch_size is not None:
            sampler.part_rows(self._batch_size)
        self._route = check_route(routing_key, routing_dim, self._mixer.members)

    # -- what there is ----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[ReplayBuffer, ...]:
        """The buffers."""
        return tuple(member.buffer for member in self._mixer.members)

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members."""
        return StorageEnsemble(*(rb.storage for rb in self.members), transforms=[rb.transform for rb in self.members])

    @property
    def sampler(self) -> SamplerEnsemble:
        """The sampler of the ensemble, whose `p` may be set at any time, with the samplers of the members."""
        sampler = self._mixer.sampler
        sampler.members = tuple(rb.sampler for rb in self.members)  # a member may have been given another one
        return sampler

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        return WriterEnsemble(*(rb.writer for rb in self.members))

    @property
    def batch_size(self) -> int | None:
        """Rows that `sample()` gives; None if the constructor was given none."""
        return self._batch_size

    @property
    def flatten(self) -> bool:
        """Whether batches are `[batch_size, ...]`, not `[parts, rows, ...]`."""
        return self._mixer.flatten

    @property
    def transform(self) -> Compose:
        """The chain of transforms of whole batches."""
        return self._mixer.transform

    @property
    def initialized(self) -> bool:
        """Whether the parts of all members are made: always, since an ensemble makes them."""
        return True

    @property
    def write_count(self) -> int:
        """Rows written to all members since each was made or emptied."""
        return sum(rb.write_count for rb in self.members)

    def __len__(self) -> int:
        """Number of members, as in TorchRL; `stats().rows` counts rows."""
        return len(self._mixer.members)

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
        if isinstance(index, tuple):
            return self._read(*split_index(index))
        chosen = choose(index, len(self), type(self))
        if isinstance(chosen, int):
            return self.members[chosen]
        return self if chosen == list(range(len(self))) else self._subset(chosen)

    def _read(self, which: Any, rows: tuple[Any, ...]) -> Any:
        if not rows:
            return self[which]
        chosen = choose(which, len(self), type(self))
        index = rows[0] if len(rows) == 1 else rows
        if isinstance(chosen, int):
            return self.members[chosen][index]
        data = self._mixer.join([own(self.members[i][index]) for i in chosen], chosen)
        return self.transform.forward(data) if self.transform else data

    def _subset(self, chosen: list[int]) -> ReplayBufferEnsemble:
        mixer, sampler = self._mixer, self.sampler.subset(chosen)
        size = self._batch_size
        if size is not None and sampler.ratio_step is None and size % sampler.num_buffer_sampled:
            size = None
        return ReplayBufferEnsemble(
            *(self.members[i] for i in chosen),
            transform=self.transform,
            batch_size=size,
            collate_fn=mixer.collate,
            collate_fns=[mixer.members[i].collate for i in chosen],
            source_key=mixer.source,
            flatten=mixer.flatten,
            generator=mixer.generator,
            **sampler.options(),
        )

    # -- writing ----------------------------------------------------------------------------------------------

    @property
    def routing_key(self) -> str | tuple[str, ...] | None:
        """Field that holds the number of the member of each row written; None if there is none."""
        path = None if self._route is None else self._route.path
        return path[0] if path is not None and len(path) == 1 else path

    @property
    def routing_dim(self) -> int | None:
        """Batch dimension of written data whose entries are the members; None if there is none."""
        return None if self._route is None else self._route.dim

    def add(self, data: Any) -> Any:
        """Write one row to the member that its `routing_key` names.

        Args:
            data: TensorDict without batch dimensions.

        Returns:
            TensorDict of `buffer_ids`, `index` and `index_generation`.

        Raises:
            UsageError: if the ensemble has no `routing_key`.
            KindError, SchemaError: as in `extend`.
        """
        if require_route(self._route, data, "add", len(self)).dim is not None:
            msg = "Use extend() for routing_dim writes: one row has no dimension of members"
            raise UsageError(msg)
        if data.batch_size:
            msg = (
                f"add() expects a scalar TensorDict record, got batch_size={list(data.batch_size)}: use extend() for "
                "several rows"
            )
            raise SchemaError(msg)
        return self.extend(data.unsqueeze(0))[0]

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Any:
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
        with self._mixer.lock:
            ranked = update_priority is not False
            return write_rows(self._mixer.members, route, self.transform, data, ranked=ranked)

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
        return update_rows(
            self._mixer.members,
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
        return self._mixer.submit(update)

    def mark_update(self, index: Any) -> None:
        """Give rows the default priority again, as new ones have it; members without priorities are left out.

        Args:
            index: what `extend` returned, a sample or its info, or a dict or TensorDict of `index` and `buffer_ids`.

        Raises:
            KindError: if the index does not name members.
            SlotError: if a row or a member is out of range; nothing is changed.
        """
        mark_members(self._mixer.members, index)

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
        end_streams(self.members, end_key, terminated_key, truncated_key)

    def empty(self, empty_write_count: bool = True) -> None:  # noqa: FBT001, FBT002
        """Forget all rows of all members.

        Args:
            empty_write_count: False lets `write_count` go on.

        Raises:
            UsageError: if a member does not allow it; no member is emptied then.
        """
        for i, rb in enumerate(self.members):
            if not rb.writer.mutable:
                msg = f"member {i} does not allow writing ({type(rb.writer).__name__}): the ensemble cannot be emptied"
                raise UsageError(msg)
        self._mixer.drop()
        for rb in self.members:
            rb.empty(empty_write_count)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from another generator from now on, within members too. Draws made ahead are dropped.

        Args:
            generator: None lets each member draw from its own source, as in the constructor.

        Raises:
            KindError: if it is no generator.
        """
        given = check_generator(generator)
        with self._mixer.lock:
            self._mixer.drop()
            self._mixer.generator = given

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBufferEnsemble:
        """Add a transform of whole batches at the end of the chain. Returns the ensemble.

        With `invert` a callable runs on rows that `add` and `extend` of the ensemble write.
        """
        self.transform.append(transform, invert=invert)
        self._mixer.redo()
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> ReplayBufferEnsemble:
        """Add a transform of whole batches before position `index` of the chain; see `append_transform`.

        Raises:
            OptionError: if the position is out of range.
        """
        self.transform.insert(index, transform, invert=invert)
        self._mixer.redo()
        return self

    def step(self, steps: int = 1) -> None:
        """Go on by some steps in the schedule of the ratio; batches made ahead keep theirs.

        Args:
            steps: how many, at least 0.

        Raises:
            UsageError: unless the ensemble was made with `ratio=` and `ratio_steps="calls"`.
            OptionError: if it is not an integer of at least 0.
        """
        with self._mixer.lock:
            self._mixer.sampler.step(steps)

    # -- the service ------------------------------------------------------------------------------------------

    @property
    def dim_extend(self) -> int:
        """Dimension of the data along which `extend` writes: 0, since routed rows are flat."""
        return 0

    def start(self) -> Self:
        """Return the ensemble, which needs no start.

        Raises:
            UsageError: after `shutdown`.
        """
        if self._mixer.ended:
            msg = "A shut down replay buffer cannot be restarted: make another one, or use close() to end its threads"
            raise UsageError(msg)
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the ensemble can be sampled: until `shutdown`."""
        return not self._mixer.ended

    @property
    def service_backend(self) -> str:
        """Where the ensemble is: "direct", in this process."""
        return "direct"

    @property
    def shared(self) -> bool:
        """Whether several processes may use the ensemble: never, nor its members."""
        return False

    def client(self) -> Self:
        """Return the ensemble itself: in its own process it needs no client."""
        return self

    def synchronize(self) -> None:
        """Wait until pending updates are written and prefetched batches are made, also those of the members.

        Raises:
            Exception: the first error of one of them.
        """
        self._mixer.synchronize()

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Finish pending updates and prefetched batches, end the threads, and sample no more. Idempotent.

        The members can still be sampled, written and saved by themselves.

        Args:
            timeout: no effect: there is no other process to wait for.

        Raises:
            Exception: the first error of a pending update or batch, once the threads have ended.
        """
        if self._mixer.ended:
            return
        self._mixer.ended = True
        try:
            self._mixer.synchronize()
        finally:
            self.close()

    # -- reading ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the prefetch threads of the ensemble and of its members. Idempotent; see `ReplayBuffer.close`."""
        self._mixer.close()
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        """Return the ensemble."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the ensemble; see `close`."""
        self.close()

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> Any: ...  # noqa: FBT002
    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> tuple[Any, dict[Any, Any]]: ...
    @overload
    def sample(self, batch_size: int | None, return_info: Literal[True]) -> tuple[Any, dict[Any, Any]]: ...
    @overload
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any: ...  # noqa: FBT001, FBT002
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Draw a batch.

        Args:
            batch_size: rows, divisible by `num_buffer_sampled`; None takes the constructor's. With prefetch it must be
                the constructor's.
            return_info: return `(batch, info)`. The info names the rows: `info["index"]["buffer_ids"]` and
                `info["index"]["index"]`, int64 `[parts, rows]`, with the keys that prioritized samplers and prefetch
                add, all flat with `flatten`, and where parts differ in length. It is a TensorDict where the batch is
                one, else a dict.

        Returns:
            The rows, `[parts, rows, *shape]`, with `flatten` `[parts * rows, *shape]`, transformed. Copy.

        Raises:
            UsageError: if there is no batch size.
            OptionError: if the batch size is not divisible.
            EmptyBufferError: if no member that may be drawn has rows; with `when_empty="raise"` if one has none.
        """
        fixed = self._mixer.prefetch is not None
        data, names = self._mixer.next(check_size(batch_size, self._batch_size, fixed=fixed))
        return (data, show_names(names, as_tensordict=kinds.is_tensordict(data))) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would return a batch now: the members that may be drawn have rows for it.

        Args:
            batch_size: rows; None takes the constructor's.

        Raises:
            UsageError: if there is no batch size.
        """
        return self._mixer.can_draw(check_size(batch_size, self._batch_size, fixed=False))

    def can_insert(self, rows: int = 1) -> bool:
        """Whether a write of so many rows would go ahead at once: rows have a route, and each member takes them.

        Args:
            rows: rows of one call of `extend`.

        Raises:
            OptionError: if `rows` is below 1.
        """
        able = [rb.can_insert(rows) for rb in self.members]
        return self._route is not None and all(able)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches, without end.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        self._require_size()
        while True:
            yield self.sample()

    def next(self) -> Any:
        """Return the next batch, for callers without a `for` loop.

        Raises:
            UsageError: if the constructor was given no batch size.
        """
        self._require_size()
        return self.sample()

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
        with locked(self._mixer.members):
            found = [rb.query(predicate, trajectory_key=trajectory_key) for rb in self.members]
        return [one for part in found for one in part]

    def _require_size(self) -> None:
        if self._batch_size is None:
            msg = (
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of the "
                "ensemble: pass batch_size to its constructor"
            )
            raise UsageError(msg)

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
        update_members(self._mixer.members, index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that it has under each member's `priority_key`.

        The key is that of the member the row is of, `"td_error"` where it is a plain `ReplayBuffer`.

        Raises:
            KeyMissingError: if a member's key is missing; nothing is changed.
            PriorityError: for priorities that are negative, NaN or infinite; nothing is changed.
        """
        update_from_batch(self._mixer.members, data)

    def stats(self) -> BufferStats:
        """Count rows, draws, ages and waits over all members. Cost: O(rows), for the ages."""
        return combine([rb.stats() for rb in self.members], self._mixer.prefetch)

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: that of every member, the mixing weights, the generator, draws made ahead. Copy.

        Pending updates are written first.
        """
        self._mixer.settle()
        with self._mixer.lock, locked(self._mixer.members):
            return own_ensemble_copy(self._state())

    def _state(self) -> dict[str, Any]:
        return ensemble_state(self._mixer, self._batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copy; sampling goes on exactly where it was.

        Raises:
            CheckpointError: if the state does not fit the members or the options; nothing is changed.
        """
        self._mixer.settle()
        with quiet_ensemble(self._mixer):
            restore_ensemble(self._mixer, state, self._batch_size)

    def dumps(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Save the whole state to the directory `path`, all members in one checkpoint of one moment.

        Options, costs and errors are those of `ReplayBuffer.dumps`.
        """
        with Progress(progress, "save", unit=BYTES):
            self._mixer.settle()
            save_ensemble(path, self._mixer, self._state, incremental=incremental)

    def loads(
        self, path: str | Path, *, verify: bool = True, mmap: bool = False, progress: ProgressOption = None
    ) -> None:
        """Restore what `dumps` saved; options and errors are those of `ReplayBuffer.loads`."""
        with Progress(progress, "load", unit=BYTES):
            load_ensemble(path, self._mixer, self.load_state_dict, verify=verify, mmap=mmap)

    def save(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Do `dumps`."""
        self.dumps(path, incremental=incremental, progress=progress)

    def dump(self, path: str | Path, *, incremental: bool = False, progress: ProgressOption = None) -> None:
        """Do `dumps`."""
        self.dumps(path, incremental=incremental, progress=progress)

    def load(
        self, path: str | Path, *, verify: bool = True, mmap: bool = False, progress: ProgressOption = None
    ) -> None:
        """Do `loads`."""
        self.loads(path, verify=verify, mmap=mmap, progress=progress)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert the rows of each member when `dumps` saves them; see `ReplayBuffer.register_save_hook`.

        Raises:
            KindError: if a member has no fields; no member has the hook then.
        """
        with self._mixer.locked():
            self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Let a hook convert the rows of each member back when `loads` reads them; see `register_save_hook`."""
        with self._mixer.locked():
            self.storage.register_load_hook(hook)

    def __getstate__(self) -> dict[str, Any]:
        """Pickling copies the ensemble with its members and the draws made ahead; locks and threads are new.

        Pending updates are written first.
        """
        mixer = self._mixer
        mixer.settle()
        with mixer.lock, locked(mixer.members):
            return {
                "members": [(member.buffer, member.collate) for member in mixer.members],
                "sampler": mixer.sampler,
                "collate": mixer.collate,
                "transform": mixer.transform,
                "generator": mixer.generator,
                "depth": mixer.prefetch.depth if mixer.prefetch else 0,
                "flatten": mixer.flatten,
                "source": mixer.source,
                "queued": mixer.queued,
                "batch_size": self._batch_size,
                "route": self._route,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without a thread; queued draws come first."""
        self._batch_size, self._route = state["batch_size"], state["route"]
        names = ("sampler", "collate", "transform", "generator", "depth", "flatten", "source")
        options = {name: state[name] for name in names}
        self._mixer = Mixer([Member(rb, collate) for rb, collate in state["members"]], **options)
        self._mixer.pending.extend(self._mixer.hold(mix) for mix in state["queued"])

    def __repr__(self) -> str:
        """Members and options."""
        lines = ",\n".join(f"    {rb!r}" for rb in self.members)
        flat = ", flatten=True" if self.flatten else ""
        depth = self._mixer.prefetch and self._mixer.prefetch.depth
        return (
            f"ReplayBufferEnsemble(\n{lines},\n    {self.sampler!r}, batch_size={self._batch_size}, "
            f"prefetch={depth}{flat})"
        )
