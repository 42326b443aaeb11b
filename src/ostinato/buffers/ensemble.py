"""One batch from several buffers: `ReplayBufferEnsemble`, and that of a dataset and one's own experience."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Unpack, final

import torch

from ostinato._optional import require
from ostinato.buffers.checkpoint.ensembles import check_mixing, load_mixing, mixing_state
from ostinato.buffers.checkpoint.state import FORMAT, generator_state, read_generator, with_state
from ostinato.buffers.lifecycle import name_methods
from ostinato.buffers.mixing import (
    EnsembleEngine,
    Member,
    OwnDraws,
    adds_names,
    put_names,
    show_names,
    with_source,
    without_names,
)
from ostinato.buffers.options import check_generator, check_prefetch, own, part, positive
from ostinato.buffers.pipeline import Pipeline
from ostinato.buffers.queries import slots_in_order
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.routed import RoutedBuffer, check_route, require_names
from ostinato.buffers.stats import BufferStats, combine
from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.core.index import choose
from ostinato.core.options import check_number
from ostinato.errors import CheckpointError, EmptyBufferError, KindError, OptionError, UsageError
from ostinato.samplers import SamplerEnsemble
from ostinato.storages import LazyTensorStorage, Storage, StorageEnsemble
from ostinato.storages.checkpoint import readable
from ostinato.transforms import Compose
from ostinato.writers import WriterEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from torch import Tensor

    from ostinato.buffers.pipeline import Batch
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.trajectory_view import Trajectory
    from ostinato.core.episodes.tracker import Key
    from ostinato.samplers.ensemble import MixOptions, Rounding, WhenEmpty


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
    for name, given_part in parts.items():
        if not isinstance(given_part, bases[name]):
            msg = (
                f"an ensemble needs buffers, or all of storages=, samplers= and writers=: {name} must be a "
                f"{bases[name].__name__}, got {type(given_part).__name__}"
            )
            raise KindError(msg)
    counts = {name: len(each) for name, each in parts.items()}
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

    `update_priority`, `update_if_present` and `mark_update` take rows by the names that they have here: a sample or its
    info, what `extend` returned, or a dict or TensorDict of `index` and `buffer_ids`. The arguments for all members are
    checked before the first row is changed.

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
        **mix: options of a `SamplerEnsemble`, which describes them: `p`, weights of the members; `sample_from_all`, one
            part from every member; `num_buffer_sampled`, parts of a batch; `when_empty`, "renormalize" (leave members
            without rows to draw out of a batch and warn once), "raise" (EmptyBufferError) or "fill" (no warning);
            `ratio`, share of each member in every batch, of two members also that of the first, or a schedule of them,
            instead of the first three; `rounding`, "carry" or "nearest"; `ratio_steps`, what a schedule counts,
            "batches" or "calls" of `step`; `min_rows`, rows that a member must hold to be drawn from.

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
        source_key: Key | None = None,
        routing_key: Key | None = None,
        routing_dim: int | None = None,
        flatten: bool = False,
        generator: torch.Generator | None = None,
        prefetch: int | None = None,
        shared: bool = False,
        compilable: bool = False,  # noqa: ARG002
        delayed_init: bool = False,  # noqa: ARG002
        **mix: Unpack[MixOptions],
    ) -> None:
        if shared:
            msg = "shared=True is not available for an ensemble: it serves the threads of one process"
            raise OptionError(msg)
        given: Any = {name: value for name, value in mix.items() if value is not None and value is not False}
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
        self._pipeline = Pipeline(engine, check_prefetch(prefetch, self._batch_size))  # type: ignore[arg-type]

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

    def _finish(self, data: Any, draw: Any, notes: dict[Any, Tensor]) -> Any:  # noqa: ARG002
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

    def synchronize(self) -> None:
        """Wait for pending updates and queued batches, of the members too, and raise the first error of one."""
        super().synchronize()
        for member in self._engine.own:
            member.buffer.synchronize()

    def close(self) -> None:
        """End the threads, of the members too."""
        super().close()
        for member in self._engine.own:
            member.buffer.close()

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
        depth = self._pipeline.prefetch.depth or None
        return (
            f"ReplayBufferEnsemble(\n{lines},\n    {self.sampler!r}, batch_size={self._batch_size}, "
            f"prefetch={depth}{flat})"
        )


# -- a dataset and one's own experience --------------------------------------------------------------------------------


@final
class OfflineToOnlineReplayBuffer(ReplayBufferEnsemble):
    """A fixed dataset and a growing buffer, of which every batch holds an exact ratio, as in TorchRL.

    A batch of `B` rows has `round(offline_fraction * B)` rows of the dataset, followed by rows of the online buffer.
    With `rounding="carry"` the fractions of a row that this leaves count for the next batch, so that the ratio of all
    batches is exact. While the online buffer is empty all rows are of the dataset, and none once `anneal` has reached
    0. `extend` writes to the online buffer alone.

    It is a `ReplayBufferEnsemble` of two members with `ratio=offline_fraction` under TorchRL's names; the class itself
    has also schedules, more members, prefetch, and checkpoints of all members. Samples of TensorDicts carry names of
    their rows (`("index", "buffer_ids")`, 0 for the dataset, and `("index", "index")`) and `priority_weight` only if
    one of the two is prioritized.

    Datasets that an ensemble cannot draw from (of another library, shared between processes, or with a `rate_limiter`)
    are sampled by their own `sample(n)`: their rows have no names.

    A checkpoint has the online buffer, and where mixing and draws are, but not the rows of the dataset: give the same
    dataset before `loads`. The sampler and generator of the dataset are saved unless it draws by itself. It is a
    checkpoint of the online buffer with more entries: `ReplayBuffer.loads` reads it, too.

    Safe to use from several threads.

    Args:
        offline_dataset: a `ReplayBuffer`, what `open_dataset` returns, a dataset of TorchRL (any object with
            `sample(n)` and a length), or the name of one, such as `"minari:mujoco/hopper/expert-v0"`, which TorchRL
            loads; it must be installed then.
        online_storage: storage of the online buffer, or else
        online_capacity: rows of a `LazyTensorStorage` for it, or else
        online_buffer: the online buffer, such as one with priorities.
        offline_fraction: share of the dataset, in (0, 1).
        batch_size: rows that `sample()` gives; needed with the name of a dataset.
        transform: for whole batches: a callable, or an object with `forward`.
        rounding: "nearest" rounds each batch on its own, "carry" makes the ratio of all batches exact.
        when_empty: "fill" lets the dataset fill batches while the online buffer has no row to draw; "renormalize" does
            so with a warning, "raise" raises EmptyBufferError.
        source_key: field of batches that gets 0 for rows of the dataset and 1 for the others, int64; transforms see it.
        generator: source of all draws; None lets each of the two use its own.
        **dataset_kwargs: for the constructor of a dataset that is given by its name.

    Raises:
        OptionError: for options out of range, or that exclude each other.
        KindError: if the dataset cannot be sampled.
        MissingExtraError: if the dataset is a name and TorchRL is not installed.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> demos = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> index = demos.extend({"demo": torch.ones(100)})
        >>> rb = OfflineToOnlineReplayBuffer(demos, online_capacity=1000, offline_fraction=0.25, batch_size=8)
        >>> rb.sample()["demo"]
        tensor([1., 1., 1., 1., 1., 1., 1., 1.])
        >>> index = rb.extend({"demo": torch.zeros(10)})
        >>> rb.sample()["demo"]
        tensor([1., 1., 0., 0., 0., 0., 0., 0.])
    """

    def __init__(
        self,
        offline_dataset: Any,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        online_buffer: ReplayBuffer | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        rounding: Rounding = "nearest",
        when_empty: WhenEmpty = "fill",
        source_key: Key | None = None,
        generator: torch.Generator | None = None,
        **dataset_kwargs: Any,
    ) -> None:
        words = "in (0, 1): for one of the two use it alone"
        self._base = check_number("offline_fraction", offline_fraction, words, lambda share: 0 < share < 1, KindError)
        size = None if batch_size is None else positive("batch_size", batch_size)
        self._online = _online(online_storage, online_capacity, online_buffer)
        self._offline = _dataset(offline_dataset, size, dataset_kwargs)
        buffers = self._offline, self._online
        members: list[Member | OwnDraws] = [OwnDraws(buffer) for buffer in buffers]
        if _mixable(self._offline, self._online):
            check_buffers(buffers)
            members = [Member(buffer, None) for buffer in buffers]
        elif generator is not None:
            msg = f"{type(self._offline).__name__} draws by itself, from its own source: leave generator= out"
            raise OptionError(msg)
        sampler = SamplerEnsemble(
            *(member.sampler for member in members), ratio=self._base, rounding=rounding, when_empty=when_empty
        )
        engine = OfflineToOnlineEngine(members, sampler, None, check_generator(generator), flatten=True, named=False)
        self._join(engine, size, transform, source_key, None)

    @property
    def offline_buffer(self) -> Any:
        """The dataset."""
        return self._offline

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The buffer that `extend` writes to."""
        return self._online

    @property
    def offline_fraction(self) -> float:
        """Share of the dataset now; `anneal` changes it."""
        return float(self._engine.sampler.share or 0)

    def add(self, data: Any, *, timeout_s: float | None = None) -> Any:
        """Add one row to the online buffer; see `ReplayBuffer.add`."""
        return self._online.add(data, timeout_s=timeout_s)

    def extend(self, data: Any, *, update_priority: bool | None = None, timeout_s: float | None = None) -> Tensor:
        """Add rows to the online buffer; see `ReplayBuffer.extend`.

        Returns:
            Their slots there, int64 `[B]`.
        """
        return self._online.extend(data, update_priority=update_priority, timeout_s=timeout_s)

    def empty(self, empty_write_count: bool = True) -> None:  # noqa: FBT001, FBT002
        """Forget all rows of the online buffer; those of the dataset stay. See `ReplayBuffer.empty`."""
        self._online.empty(empty_write_count)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
        min_batch: int | None = None,
        out: Any = None,
    ) -> Any:
        """Draw a batch: rows of the dataset, then rows of the online buffer.

        Args:
            batch_size: rows; None takes the constructor's.
            return_info: return `(batch, info)`; the info names the rows, as that of `ReplayBufferEnsemble`.
            max_age: must be None, as must `timeout_s` and `min_batch`: no call waits.
            timeout_s: see `max_age`.
            min_batch: see `max_age`.
            out: an earlier batch, to which the rows are copied; see `ReplayBuffer.sample`.

        Returns:
            The rows, `[B, *shape]`, transformed. Copy.

        Raises:
            OptionError: if there is no batch size.
            EmptyBufferError: if the dataset is empty.
            KindError: if rows of both cannot be put together; names the fields that differ, and how to rename them.
            UsageError: with `return_info` if the dataset draws by itself.
        """
        if batch_size is None and self._batch_size is None:
            msg = "batch_size must be provided either in the constructor or to sample()"
            raise OptionError(msg)
        if len(self._offline) == 0 and self._engine.sampler.share:
            msg = "Cannot sample from an empty storage: the dataset holds no rows"
            raise EmptyBufferError(msg)
        if return_info:
            require_names(self._engine.engines)
        return super().sample(
            batch_size, return_info, max_age=max_age, timeout_s=timeout_s, min_batch=min_batch, out=out
        )

    def anneal(self, step: int, total_steps: int) -> None:
        """Set the share of the dataset to `offline_fraction * (1 - step / total_steps)`, at least 0.

        Args:
            step: of the training, from 0 on.
            total_steps: step at which the share is 0.

        Raises:
            OptionError: if a number is out of range.
        """
        words = "a number of at least 0"
        done = check_number("step of anneal()", step, words, lambda number: number >= 0, KindError)
        end = check_number("total_steps of anneal()", total_steps, "above 0", lambda number: number > 0, KindError)
        self._engine.sampler.share = self._base * max(0.0, 1.0 - done / end)

    def __len__(self) -> int:
        """Rows of the dataset and of the online buffer."""
        return len(self._offline) + len(self._online)

    def __repr__(self) -> str:
        """Dataset, share and sizes."""
        return (
            f"OfflineToOnlineReplayBuffer(offline={type(self._offline).__name__}, offline_size={len(self._offline)}, "
            f"offline_fraction={self.offline_fraction:.3f}, online_size={len(self._online)}, "
            f"batch_size={self._batch_size})"
        )


def _online(storage: Any, capacity: int | None, buffer: Any) -> ReplayBuffer:
    """Return the online buffer.

    Raises:
        OptionError: if it is not given in one way.
        KindError: if something is not of its class.
    """
    if sum(given is not None for given in (storage, capacity, buffer)) != 1:
        msg = (
            "Provide one of online_storage or online_capacity (or online_buffer): online_storage OR online_capacity, "
            "not both, and neither with online_buffer"
        )
        raise OptionError(msg)
    if capacity is not None:
        storage = LazyTensorStorage(positive("online_capacity", capacity))
    made = ReplayBuffer(storage=part("online_storage", storage, Storage)) if buffer is None else buffer
    if not isinstance(made, ReplayBuffer):
        msg = f"online_buffer must be a ReplayBuffer, got {type(made).__name__}"
        raise KindError(msg)
    return made


def _mixable(dataset: Any, online: ReplayBuffer) -> bool:
    """Whether an ensemble can draw from a dataset.

    Raises:
        OptionError: if it cannot, and the dataset has priorities.
    """
    if not isinstance(dataset, ReplayBuffer) or isinstance(dataset, ReplayBufferEnsemble):
        return False
    sampler = dataset.sampler
    able = (
        not dataset.storage.shared
        and dataset.rate_limiter is None
        and not sampler.counting
        and not (sampler.epochal and sampler.episodes is not None)
        and dataset.storage.ndim == online.storage.ndim
    )
    if not able and sampler.prioritized:
        msg = (
            f"the dataset draws by priorities ({type(sampler).__name__}), and its rows cannot be named: it is shared, "
            "has a rate_limiter, or another storage.ndim than the online buffer"
        )
        raise OptionError(msg)
    return able


class OfflineToOnlineEngine(EnsembleEngine):
    """The engine of a dataset and an online buffer: it saves the latter, and of the dataset what its draws depend on.

    The checkpoint is one of the online buffer with one more entry, so that `ReplayBuffer.loads` reads it, too.
    """

    format_name = FORMAT

    @property
    def online(self) -> ReplayBuffer:
        """The online buffer."""
        buffer: ReplayBuffer = self.members[1].buffer
        return buffer

    @property
    def saved(self) -> list[Reader]:
        """The engine of the online buffer."""
        return self.engines[1:]

    def checker(self) -> Callable[[dict[str, Any]], None]:
        """Return what checks a saved state of the online buffer; the caller holds the locks."""
        return self.engines[1].checker()

    def state(self, queued: Sequence[Any], transform: Compose, batch_size: int | None) -> dict[str, Any]:  # noqa: ARG002
        """Return the state of the online buffer, and that of the mixture; nothing is copied."""
        mixture = {**mixing_state(self), "draws": _draws_of(self.engines[0]) if self.engines else None}
        return {**self.online._state(), "offline": mixture}  # noqa: SLF001 (one package)

    def load_state(self, state: dict[str, Any], transform: Compose, batch_size: int | None) -> None:  # noqa: ARG002
        """Restore a state, by copy; if it does not fit, nothing has changed.

        Raises:
            CheckpointError: naming what differs.
        """
        if "offline" not in state:
            msg = "this is the state of a buffer, without a dataset: load it with online_buffer.loads(path)"
            raise CheckpointError(msg)
        mixture, rest = state["offline"], {key: value for key, value in state.items() if key != "offline"}
        with readable("this mixture"):
            generator = check_mixing(self, mixture, self.online.storage.device)
            draws = mixture["draws"] if self.engines else None
            source = None if draws is None else _check_draws(self.engines[0], draws)
        self.online.load_state_dict(rest)
        load_mixing(self, mixture, generator)
        if draws is not None:
            dataset = self.engines[0]
            dataset.parts_changed()
            dataset.sampler.load_state_dict(draws["sampler"])
            dataset.begin_sampler()
            dataset.generator = with_state(dataset.generator, source)

    def save(self, path: str | Path, state: Callable[[], dict[str, Any]], *, incremental: bool = False) -> None:
        """Save `state()` to a directory; see `ReplayBuffer.dumps`."""
        self.online.synchronize()
        save = super().save if self.engines else self.online._engine.save  # noqa: SLF001 (one package)
        save(path, state, incremental=incremental)

    def load(self, path: str | Path, restore: Callable[[dict[str, Any]], None], *, verify: bool, mmap: bool) -> None:
        """Read a directory and hand its state to `restore`; see `ReplayBuffer.loads`."""
        online = self.online._engine  # noqa: SLF001 (one package)
        with online.saves.lock, online.lock:
            online.load(path, restore, verify=verify, mmap=mmap)


def _draws_of(engine: Reader) -> dict[str, Any]:
    """Return the state of the draws of a dataset: all but its rows."""
    return {
        "class": type(engine.sampler).__name__,
        "rows": len(engine.storage),
        "fingerprint": getattr(engine.storage, "fingerprint", None),  # of a dataset of files
        "sampler": engine.sampler.state_dict(),
        "generator": generator_state(engine.generator),
    }


def _check_draws(engine: Reader, state: dict[str, Any]) -> torch.Generator | None:
    """Check what `_draws_of` returned, and return the generator in it.

    Raises:
        CheckpointError: if the checkpoint was made with another dataset or sampler.
    """
    now = _draws_of(engine)
    words = {"class": "a sampler of the class", "rows": "a dataset of rows:", "fingerprint": "a dataset"}
    for name, what in words.items():
        if state[name] != now[name]:
            msg = (
                f"the checkpoint was made with {what} {state[name]!r}, this one has {now[name]!r}: give the same "
                "dataset, with the same episodes, fields and sampler"
            )
            raise CheckpointError(msg)
    engine.sampler.check_state(state["sampler"], len(engine.storage))
    return read_generator(state["generator"], engine.storage.device)


def prefill_replay_buffer(
    rb: ReplayBuffer, dataset: Any, n_samples: int | None = None, chunk_size: int = 1000
) -> ReplayBuffer:
    """Copy rows of a dataset into a buffer, each at most once and in the order of the dataset.

    So the episodes of a dataset stay whole if all of it is copied. Transforms of the dataset run, and the inverse ones
    of the buffer. Cost: one copy; `chunk_size` rows are in memory at a time.

    Args:
        rb: the buffer.
        dataset: a `ReplayBuffer`, whose oldest row is copied first, what `open_dataset` returns, a dataset of TorchRL,
            or the name of one; see `OfflineToOnlineReplayBuffer`.
        n_samples: most rows to copy, drawn uniformly without replacement if the dataset has more; None copies all.
        chunk_size: rows that are copied at a time.

    Returns:
        The buffer.

    Raises:
        OptionError: for numbers out of range, a dataset with `storage.ndim=2`, one whose rows leave as they are drawn,
            or one that is the buffer.
        KindError: if the dataset has no rows to read, or `rb` cannot be extended.
        SchemaError: if the rows do not match those of the buffer; rows copied before stay.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, prefill_replay_buffer
        >>> dataset, rb = (ReplayBuffer(storage=LazyTensorStorage(500)) for _ in range(2))
        >>> index = dataset.extend({"obs": torch.arange(500)})
        >>> len(prefill_replay_buffer(rb, dataset, n_samples=200))
        200
    """
    if not callable(getattr(rb, "extend", None)):
        msg = f"rb must be a replay buffer to copy rows into, got {type(rb).__name__}"
        raise KindError(msg)
    chunk = positive("chunk_size", chunk_size)
    wanted = positive("n_samples", n_samples) if n_samples else n_samples
    source = _dataset(dataset, chunk, {})
    if source is rb:
        msg = "the dataset is the buffer itself: give another one"
        raise OptionError(msg)
    if not hasattr(source, "__getitem__") or isinstance(source, ReplayBufferEnsemble):
        msg = f"a dataset must have rows to read, dataset[i:j], got {type(source).__name__}"
        raise KindError(msg)
    if isinstance(source, ReplayBuffer) and source.sampler.leaves:
        msg = f"rows of the dataset leave as they are drawn ({source.sampler!r}): use rb.extend(dataset.sample(n))"
        raise OptionError(msg)
    if getattr(getattr(source, "storage", None), "ndim", 1) > 1:
        msg = "a dataset with storage.ndim=2 has steps of several environments: copy them with rb.extend(dataset[:])"
        raise OptionError(msg)
    rows = len(source)
    part_of = wanted is not None and wanted < rows
    chosen = torch.randperm(rows, device="cpu")[:wanted].sort().values if part_of else torch.arange(rows, device="cpu")
    if isinstance(source, ReplayBuffer) and source.writer.in_order:
        chosen = slots_in_order(source._engine).cpu()[chosen]  # noqa: SLF001 (one package)
    for index in torch.split(chosen, chunk) if rows else ():
        whole = not part_of and int(index[-1]) - int(index[0]) == len(index) - 1
        data = source[slice(int(index[0]), int(index[-1]) + 1) if whole else index]
        rb.extend(without_names(data) if adds_names(source) else data)
    return rb


def _dataset(given: Any, batch_size: int | None, options: dict[str, Any]) -> Any:
    """Return a dataset that can be sampled, loaded if it is a name."""
    if isinstance(given, str):
        if "batch_size" not in options and batch_size is None:
            msg = f"batch_size must be provided when offline_dataset is a string, got {given!r}: it needs one"
            raise OptionError(msg)
        loader: ModuleType = require("torchrl.data.datasets.utils", "datasets")
        given = loader.load_dataset(given, **{"batch_size": batch_size, **options})
    elif options:
        msg = (
            f"dataset_kwargs are only forwarded when offline_dataset is a string, got {sorted(options)}: give them to "
            "the constructor of the dataset"
        )
        raise OptionError(msg)
    from ostinato.datasets import DatasetStorage

    if isinstance(given, DatasetStorage):
        given = ReplayBuffer(storage=given)
    if not (callable(getattr(given, "sample", None)) and hasattr(given, "__len__")):
        msg = (
            "a dataset must be a ReplayBuffer, what open_dataset returns, another object with sample(n) and a length, "
            f"or the name of a dataset of TorchRL, got {type(given).__name__}"
        )
        raise KindError(msg)
    return given


name_methods("ReplayBufferEnsemble", RoutedBuffer)
