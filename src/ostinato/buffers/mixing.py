"""The engine of an ensemble: draws from several members as one, and the pipeline that puts their batches together."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from ostinato.buffers.checkpoint.ensembles import (
    ENSEMBLE_FORMAT,
    ensemble_checker,
    ensemble_state,
    load_ensemble_state,
)
from ostinato.buffers.checkpoint.save import Saves, save_buffer
from ostinato.buffers.checkpoint.state import generator_state, load_saved
from ostinato.buffers.options import check_same_device, require_tracking
from ostinato.buffers.rate_limit import Ask, Waiters
from ostinato.buffers.records import CompositeDraw, Draws
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.routed import EnsembleUpdate, read_names, steps_of_all
from ostinato.buffers.sampling import INFO
from ostinato.buffers.updates import in_era, join_results, parse_conditional, row_names, slots_of_rows
from ostinato.buffers.variants import TensorDictReplayBuffer
from ostinato.core import kinds
from ostinato.core.records import Draw, Run
from ostinato.errors import (
    EmptyBufferError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    TooFewRowsError,
    UsageError,
)
from ostinato.samplers import RandomSampler, Sampler
from ostinato.samplers.priorities import read_priorities
from ostinato.storages import StorageEnsemble
from ostinato.writers import WriterEnsemble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.prefetch import Prefetcher
    from ostinato.buffers.reader import Reader
    from ostinato.buffers.records import Rows
    from ostinato.buffers.updates import ConditionalUpdateResult
    from ostinato.samplers import SamplerEnsemble
    from ostinato.samplers.ensemble import Split

_PLAIN = Ask()


def reader_of(buffer: ReplayBuffer) -> Reader:
    """Return the engine of a buffer whose rows are in this process alone.

    Raises:
        OptionError: for a shared buffer, or a view.
    """
    engine = buffer._engine  # noqa: SLF001 (one package)
    if engine.storage.shared:
        msg = "the members of an ensemble belong to one process, got a shared buffer: make it without shared=True"
        raise OptionError(msg)
    if not engine.own:
        msg = "the members of an ensemble are buffers, which it saves and loads, got a view: pass its buffer"
        raise OptionError(msg)
    return engine


@final
class Member:
    """What an ensemble needs of one of its buffers.

    Args:
        buffer: the buffer.
        collate: takes the place of the buffer's own `collate_fn`; None keeps that.
    """

    def __init__(self, buffer: ReplayBuffer, collate: Callable[[Any], Any] | None) -> None:
        self.buffer, self.engine, self.collate = buffer, reader_of(buffer), collate

    def __reduce__(self) -> tuple[type[Member], tuple[Any, ...]]:
        """Pickle the buffer: the engine is that of its copy."""
        return Member, (self.buffer, self.collate)

    def __len__(self) -> int:
        """Rows that are stored."""
        return len(self.engine.storage)

    @property
    def sampler(self) -> Sampler:
        """The sampler of the buffer, which may be exchanged."""
        return self.engine.sampler

    def draw(self, rows: int, generator: torch.Generator | None, *, ranked: bool) -> Draw:
        """Draw slots; where a pass over the rows ends, the next one begins. The caller holds the engine's lock.

        Args:
            rows: how many.
            generator: source of the draws; None is the buffer's own.
            ranked: give rows of samplers without priorities the weight 1, and their generations.

        Raises:
            EmptyBufferError: if there are no rows.
        """
        engine = self.engine
        source = engine.generator if generator is None else generator
        draws = [engine.fresh(rows, source)]
        left = rows - _rows(draws[0])
        while left > 0 and draws[-1].last:
            draws.append(engine.fresh(left, source))
            left -= _rows(draws[-1])
        draw = draws[0] if len(draws) == 1 else _joined(draws)
        if ranked and draw.weights is None:
            weights = torch.ones(draw.slots.shape[0], dtype=torch.float32, device=draw.slots.device)
            draw = draw._replace(weights=weights, generations=engine.ring.generations_of_rows(draw.slots))
        return engine.expand(draw, source)

    def check_draw(self, rows: int, generator: torch.Generator | None) -> None:
        """Raise what `draw` would raise, before any member of a batch has drawn; the caller holds the engine's lock.

        Raises:
            EmptyBufferError: if there is nothing to draw before more rows are written.
            OptionError: if generator and storage are on different devices, or the sampler's passes cannot be cut.
            PriorityError: if no row has a priority above 0.
            UsageError: if the sampler cannot make `rows` rows of whole slices.
        """
        engine = self.engine
        if generator is not None:
            check_same_device(generator, engine.storage)
        if engine.sampler.epochal and engine.sampler.episodes is not None:
            msg = (
                f"{type(engine.sampler).__name__} is not available in an ensemble: a pass that ends in the middle of a "
                "part would cut its slices; use SliceSampler"
            )
            raise OptionError(msg)
        view = engine.view()
        engine.check_drawable(view)
        engine.sampler.check_draw(view, rows)

    def make(self, draw: Draw) -> tuple[Any, Rows, dict[Any, Tensor]] | None:
        """Return the batch of a draw, its rows, and what names each row; None if it cannot be made."""
        buffer = self.buffer
        made = self.engine.make(draw, buffer._finish, self.collate)  # noqa: SLF001 (one package)
        if made is None:
            return None
        data, rows, notes = made
        names: dict[Any, Tensor] = row_names(self.engine, rows.draw, notes, buffer._flat_index)  # noqa: SLF001
        return data, rows, {("index", "index"): names.pop("index"), **names}

    def write(self, rows: Any, *, ranked: bool) -> tuple[Tensor, Tensor]:
        """Write rows that the engine has checked; return the index and the generation of each, int64 `[n]`.

        The caller holds the engine's lock.
        Rows that were replaced by later ones of the same batch have the generations that they had; rows that the writer
        did not keep have index -1 and generation 0.
        """
        engine = self.engine
        placement = engine.store.write(rows, 1, ranked=ranked)
        before = engine.ring.written - placement.total  # rows that leave (`max_bytes`) renumber the others
        slots = placement.positions(engine.storage.device)
        written = slice(None) if isinstance(placement, Run) else placement.rows
        generations = torch.zeros_like(slots)
        numbered = generations[written].shape[0]
        generations[written] = torch.arange(before + 1, before + 1 + numbered, device=slots.device)
        return self.buffer._flat_index(slots), in_era(generations, engine.store.era)  # noqa: SLF001


def _joined(draws: Sequence[Draw]) -> Draw:
    """Put several draws of one sampler together; the info of a whole batch is dropped."""
    names = ("slots", "weights", "generations", "lengths")
    columns = ((name, [getattr(draw, name) for draw in draws]) for name in names)
    joined: dict[str, Any] = {name: None if parts[0] is None else torch.cat(parts) for name, parts in columns}
    return draws[-1]._replace(info=None, **joined)


def _rows(draw: Draw) -> int:
    """Return the records that a draw will become, before units."""
    return draw.slots.shape[0] * (draw.length or 1) if draw.lengths is None else int(draw.lengths.sum())


def adds_names(buffer: Any) -> bool:
    """Return whether samples carry the names of their rows as keys; those of a plain `ReplayBuffer` are its fields."""
    return isinstance(buffer, TensorDictReplayBuffer) or not isinstance(buffer, ReplayBuffer)


@final
class OwnDraws:
    """A member that draws by itself, by `sample(n)`: a dataset of another library, or a buffer of several processes.

    Its rows have no names: the draw of a part has the slot -1 for each row, and is made as its batch is.

    Args:
        buffer: any object with `sample(n)` and a length.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        mine = getattr(buffer, "sampler", None)
        self.sampler: Sampler = mine if isinstance(mine, Sampler) else RandomSampler()

    def __len__(self) -> int:
        """Rows that are stored."""
        return len(self.buffer)

    def draw(self, rows: int, generator: torch.Generator | None, *, ranked: bool) -> Draw:  # noqa: ARG002
        """Return as many rows without a slot."""
        return Draw(torch.full((rows,), -1, dtype=torch.int64, device="cpu"))

    def make(self, draw: Draw) -> tuple[Any, None, dict[Any, Tensor]]:
        """Sample the rows of a part, in several batches where passes end within it; their index is -1."""
        buffer, left = self.buffer, draw.slots.shape[0]
        names: dict[Any, Tensor] = {("index", "index"): draw.slots}
        if not (isinstance(buffer, ReplayBuffer) and buffer.sampler.epochal):
            return buffer.sample(left), None, names
        batches = []
        while left > 0:
            batch, info = buffer.sample(left, return_info=True)
            index = info["index"]
            left -= len(index[0] if isinstance(index, tuple) else index)
            batches.append(batch)
        return join_parts(batches, [0] * len(batches), flatten=True), None, names


@final
class Locks:
    """Locks that are taken one after the other, and given back together."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        """Take all locks, or none if it is interrupted."""
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            stack.pop_all()

    def __exit__(self, *error: object) -> None:
        """Give all locks back."""
        for lock in reversed(self._locks):
            lock.release()


class MixedRows(NamedTuple):
    """The rows gathered for the parts of a draw, in the place of `Rows`."""

    draw: CompositeDraw
    """The draw; its parts are those of the rows gathered."""
    parts: list[Rows]


class EnsembleEngine(Draws):
    """The engine of an ensemble: members, distribution, generator and lock, in the place of a `Reader`.

    `lock` is the ensemble's own and then those of the members, in an order that is the same for every ensemble, so that
    what is checked of a member holds when it draws.

    Args:
        members: of the ensemble: buffers of this process, or all of them draw by themselves, and are not locked, saved
            and loaded.
        sampler: the distribution over the members.
        collate: makes a batch of the list of parts; None stacks them.
        generator: source of all draws; None lets each member use its own.
        flatten: put parts end to end, not side by side.
        named: whether TensorDict batches carry the names of their rows though no member has priorities.
    """

    versions = None
    pin = False

    def __init__(
        self,
        members: Sequence[Member | OwnDraws],
        sampler: SamplerEnsemble,
        collate: Callable[[list[Any]], Any] | None,
        generator: torch.Generator | None,
        *,
        flatten: bool,
        named: bool,
    ) -> None:
        self.members, self._sampler, self.collate, self.generator = members, sampler, collate, generator
        self.flatten = flatten or sampler.ratio_step is not None
        self._named = named
        self.pending: deque[CompositeDraw] = deque()
        self._begin()

    def _begin(self) -> None:
        """Make the locks; there is no queue yet."""
        self.own = [member for member in self.members if isinstance(member, Member)]
        self.engines = [member.engine for member in self.own]
        self.queue: Prefetcher | None = None
        self.waiters = Waiters(outer=True)
        waiters = sorted((engine.waiters for engine in self.engines), key=lambda one: one.place)
        self.lock = Locks([self.waiters.lock, *(one.lock for one in waiters)])
        self.saves = Saves()
        self.saves.lock = Locks([engine.saves.lock for engine in sorted(self.engines, key=id)])  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but locks and threads."""
        left_out = {"own", "engines", "queue", "waiters", "lock", "saves"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take locks of its own."""
        vars(self).update(state)
        self._begin()

    @property
    def store(self) -> EnsembleEngine:
        """The engine itself: its members have the rows."""
        return self

    @property
    def sampler(self) -> SamplerEnsemble:
        """The sampler of the ensemble, with the samplers that the members have now."""
        self._sampler.members = tuple(member.sampler for member in self.members)
        return self._sampler

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members, without datasets that are no buffers."""
        buffers = [member.buffer for member in self.members if isinstance(member.buffer, ReplayBuffer)]
        return StorageEnsemble(*(rb.storage for rb in buffers), transforms=[rb.transform for rb in buffers])

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        return WriterEnsemble(*(member.buffer.writer for member in self.members))

    @property
    def rows_since_empty(self) -> int:
        """Rows written to the members since each was made or emptied."""
        return sum(engine.rows_since_empty for engine in self.engines)

    @property
    def ranked(self) -> bool:
        """Whether some member keeps priorities; samples then carry weights and generations."""
        return any(engine.sampler.prioritized for engine in self.engines)

    @property
    def named(self) -> bool:
        """Whether TensorDict batches carry the names of their rows."""
        return self._named or self.ranked

    def parts_changed(self) -> None:
        """Do nothing: there are no direct calls."""

    # -- draws ---------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, *, ahead: bool = False, ask: Ask = _PLAIN) -> CompositeDraw:  # noqa: ARG002
        """Draw the parts of a batch; draws that a checkpoint left come first. Without an error, or not at all.

        Args:
            batch_size: rows.
            ahead: the batch is made later, of the rows as they are now.
            ask: of no effect.
        """
        with self.lock:
            if self.pending:
                return self.pending.popleft()
            generator, ranked = self.generator, self.ranked
            rng, parts = generator_state(generator), []
            try:
                split = self._plan(batch_size)
                for i, rows in zip(split.members, split.sizes, strict=True):
                    parts.append((i, self.members[i].draw(rows, generator, ranked=ranked)))
            except Exception:  # a member has too few rows: what the others gave, and the generator, go back
                self.give_back(CompositeDraw(parts))
                if rng is not None and generator is not None:
                    generator.set_state(rng)
                raise
            self._sampler.drew(split.carry)
            draw = CompositeDraw(parts, rng, split.carry)
            return self.hold(draw) if ahead else draw

    def can_draw(self, rows: int) -> bool:
        """Whether a draw of so many rows does not raise, whichever members are chosen."""
        with self.lock:
            if self.pending:
                return True
            try:
                held, refusals = self._held(rows)
                sampler = self._sampler
                if not sampler.ready(held):
                    return False
                if sampler.ratio_step is None:
                    shares = sampler.p if isinstance(sampler.p, Tensor) else [1] * len(held)
                    return not any(shares[i] > 0 for i in refusals)
                self._check(sampler.plan(rows, held, self.generator))
            except OstinatoError:
                return False
            return True

    def can_write(self, rows: int) -> bool:
        """Whether a write of so many rows to any member goes ahead at once."""
        return all(engine.can_write(rows) for engine in self.engines)

    def _held(self, size: int) -> tuple[list[int], dict[int, OstinatoError]]:
        """Return the rows of each member, 0 where none can be drawn, and why some cannot draw their part of a batch.

        Raises:
            OptionError: if a batch of this size cannot be divided.
        """
        held, asked = [len(member) for member in self.members], self.sampler.asked(size)
        refusals: dict[int, OstinatoError] = {}
        for i, (member, rows) in enumerate(zip(self.own, asked, strict=False)):
            try:
                member.check_draw(rows, self.generator)
            except TooFewRowsError as error:  # it has rows, and is not left out
                refusals[i] = error
            except EmptyBufferError:
                held[i] = 0
            except OstinatoError as error:
                refusals[i] = error
        return held, refusals

    def _plan(self, size: int) -> Split:
        """Divide the next batch; its members can draw their rows, else nothing has changed but chance.

        Raises:
            EmptyBufferError: if no member has rows to draw.
            OstinatoError: if a member that was chosen cannot draw for another reason.
        """
        held, refusals = self._held(size)
        split = self._sampler.plan(size, held, self.generator)
        if split.carry is not None:  # of other sizes than those asked for
            self._check(split)
            return split
        for i in split.members:
            if i in refusals:
                raise refusals[i]
        return split

    def _check(self, split: Split) -> None:
        """Raise what a member would raise that is to give its part of a batch."""
        for i, rows in zip(split.members, split.sizes, strict=True) if self.own else ():
            self.own[i].check_draw(rows, self.generator)

    def _parts(self, draw: CompositeDraw) -> list[tuple[Reader, Draw]]:
        """Return the parts of a draw; none if the members draw by themselves."""
        return [(self.engines[i], part) for i, part in draw.parts] if self.engines else []

    def hold(self, draw: CompositeDraw) -> CompositeDraw:
        """Return a draw made ahead, whose members keep its rows as they are now."""
        return draw._replace(parts=[(i, self.engines[i].hold(part)) for i, part in draw.parts])

    def give_back(self, draw: CompositeDraw) -> None:
        """Undo the counts of a draw whose batch was not delivered."""
        with self.lock:
            for engine, part in self._parts(draw):
                engine.give_back(part)
            self._sampler.drew(draw.carry, -1)

    def deliver(self, draw: CompositeDraw) -> None:
        """Count the rows of a batch that reached the caller."""
        for engine, part in self._parts(draw):
            engine.deliver(part)

    def stale(self, draw: CompositeDraw, rows: MixedRows) -> Tensor:
        """Return bool `[parts, rows]`, and count, which rows were replaced since they were gathered."""
        found = zip(self._parts(draw), rows.parts, strict=True)
        return self.together([engine.stale(part, gathered) for (engine, part), gathered in found])

    # -- updates of rows -----------------------------------------------------------------------------------------------

    def parse_conditional(
        self, index: Any, generation: Any, patch: Any, *, version: Any = None, priority: Any = None, **options: Any
    ) -> EnsembleUpdate:
        """Check the arguments of `update_if_present` for all members, before the first row is changed.

        Rows are named by what `extend` returned, by a sample or its info, or by a dict or TensorDict of `index` and
        `buffer_ids`; a sample brings its generations along. Values are `[*B, *shape]`, `B` the shape of `buffer_ids`.
        """
        engines = self.engines
        rows = read_names(engines, index, generation)
        if rows.generations is None:
            msg = "update_if_present() needs generations: pass index_generation as well, or a sample"
            raise OptionError(msg)
        if priority is not None:
            priority = read_priorities(priority, tuple(rows.lead), steps_of_all(engines))
        parts = {}
        for i, given in rows.parts(version=version, patch=patch, priority=priority):
            parts[i] = parse_conditional(engines[i], **given, **options)
            if not engines[i].sampler.prioritized:
                require_tracking(engines[i].writer)
        return EnsembleUpdate(rows, parts)

    def update_present(self, update: EnsembleUpdate) -> ConditionalUpdateResult:
        """Change the rows of an update that are still there, each in its member; see `Reader.update_present`."""
        rows, parts = update
        found = {i: self.engines[i].update_present(part) for i, part in parts.items()}
        versions = any(part.versions is not None for part in parts.values())
        return join_results(tuple(rows.lead), rows.members, found, versions=versions)

    def reset_priorities(self, index: Any) -> None:
        """Give rows the default priority, each in its member; members without priorities are left out.

        Raises:
            KindError: if the index does not name members.
            SlotError: if a row or a member is out of range; nothing is changed.
        """
        with self.lock:
            parts = [(self.engines[i], given["index"]) for i, given in read_names(self.engines, index).parts()]
            parts = [(engine, mine) for engine, mine in parts if engine.sampler.prioritized]
            for engine, mine in parts:
                slots_of_rows(engine, mine)
            for engine, mine in parts:
                engine.reset_priorities(mine)

    def clear(self, *, keep_count: bool = False) -> None:
        """Remove all rows of all members.

        Raises:
            UsageError: if a member does not allow it; no member is emptied then.
        """
        for i, member in enumerate(self.members):
            writer = member.buffer.writer
            if not writer.mutable:
                msg = f"member {i} does not allow writing ({type(writer).__name__}): the ensemble cannot be emptied"
                raise UsageError(msg)
        for member in self.members:
            member.buffer.empty(not keep_count)

    # -- batches -------------------------------------------------------------------------------------------------------

    def join(self, parts: list[Any], members: Sequence[int], *, flatten: bool = False) -> Any:
        """Collate the parts of a batch, of these members: stack them, or put them end to end.

        Raises:
            KindError: if they cannot be put together, and there is no `collate_fn`; names the fields that differ.
        """
        if self.collate is not None:
            return self.collate(parts)
        return parts[0] if flatten and len(parts) == 1 else join_parts(parts, members, flatten=flatten)

    def together(self, parts: list[Tensor]) -> Tensor:
        """Stack parts, `[parts, rows]`; joined with `flatten` or if lengths differ. On the CPU if devices differ."""
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        return torch.cat(parts) if self.flatten or len({part.shape for part in parts}) > 1 else torch.stack(parts)

    def make(self, draw: CompositeDraw, finish: Callable[..., Any], collate: Any = None) -> Any:  # noqa: ARG002
        """Make the batch of a draw; None if a member was emptied since. Runs in the prefetch thread if there is one."""
        parts, rows, named = [], [], []
        for i, part in draw.parts:
            member: Any = self.members[i]
            made = member.make(part)
            if made is None:
                return None
            data, gathered, names = made
            index = names["index", "index"]
            # repeat_interleave would open a region of threads for it, whatever its size
            names["index", "buffer_ids"] = torch.full(index.shape[:1], i, dtype=torch.int64, device=index.device)
            parts.append(without_names(data) if self.named or adds_names(member.buffer) else data)
            rows.append(gathered)
            named.append(names)
        members = [i for i, _ in draw.parts]
        if self.engines:
            draw = draw._replace(parts=[(i, gathered.draw) for i, gathered in zip(members, rows, strict=True)])
        common = [key for key in named[0] if all(key in part for part in named)]
        names = {key: self.together([part[key] for part in named]) for key in common}
        batch = finish(self.join(parts, members, flatten=self.flatten), draw, names)
        return batch, MixedRows(draw, rows), names

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    format_name = ENSEMBLE_FORMAT
    checker = ensemble_checker
    state, load_state = ensemble_state, load_ensemble_state
    save, load = save_buffer, load_saved

    @property
    def saved(self) -> list[Reader]:
        """The engines whose rows a save writes."""
        return self.engines


# -- the parts of a batch ----------------------------------------------------------------------------------------------


def with_source(batch: Any, path: tuple[str, ...], ids: Tensor) -> Any:
    """Return a batch with the member of each row in a field of its own.

    Raises:
        KindError: if the batch has no fields, or other rows than its parts.
        SchemaError: if it has this field already.
    """
    if not kinds.is_mapping(batch):
        msg = f"source_key={kinds.show_path(path)} needs batches with fields, got {type(batch).__name__}: leave it out"
        raise KindError(msg)
    if kinds.find_field(batch, path) is not None:
        msg = f"rows have the field {kinds.show_path(path)} already: give another source_key"
        raise SchemaError(msg)
    if isinstance(batch, dict):
        return kinds.with_fields(batch, {path: ids})
    if batch.batch_size[: ids.ndim] != ids.shape:  # the caller's collate_fn has put the parts end to end
        ids = ids.reshape(-1)
    kinds.put(batch, {path if len(path) > 1 else path[0]: ids}, ids.ndim)
    return batch


def join_parts(parts: Sequence[Any], members: Sequence[int], *, flatten: bool) -> Any:
    """Put the parts of a batch, of these members, end to end with `flatten`, else side by side.

    Raises:
        KindError: if they do not fit together; names the fields that differ, and says how to rename them.
    """
    try:
        return kinds.concatenate(parts) if flatten else kinds.stack_parts(parts)
    except (KindError, SchemaError) as error:
        how = "concatenated end to end" if flatten else "stacked"
        reason = _differences(parts, members) or f"they are of type {type(parts[0]).__name__} ({error})"
        msg = f"the parts of a batch cannot be {how}: {reason}, or give the ensemble a collate_fn, such as list"
        raise KindError(msg) from error


def _differences(parts: Sequence[Any], members: Sequence[int]) -> str:
    """Return how parts differ in kind, fields or shapes, and what to do about it; empty if they do not."""
    named = [isinstance(part, dict) or kinds.is_tensordict(part) for part in parts]
    types = {i: type(part).__name__ for i, part in zip(members, parts, strict=True)}
    if any(named) and len({isinstance(part, dict) for part in parts}) > 1:
        said = ", ".join(f"member {i} gives rows as {name}" for i, name in types.items())
        return f"{said}: make them alike, datasets with open_dataset(path, tensordict=True)"
    if not all(named):
        return ""
    fields = {i: kinds.leaves_by_path(part) for i, part in zip(members, parts, strict=True)}
    every = set.intersection(*(set(mine) for mine in fields.values()))
    extra = {i: sorted(set(fields[i]) - every, key=str) for i in sorted(fields) if set(fields[i]) - every}
    if extra:
        said = "; ".join(f"member {i} has also {', '.join(map(kinds.show_path, more))}" for i, more in extra.items())
        return (
            f"their fields differ: {said}. Give them the same names with {_renaming(extra)}, or for a dataset "
            "open_dataset(path, fields={new: old, ...}); or select the fields that all members have with SelectFields "
            "or fields=, write the other fields as well"
        )
    for path in sorted(every, key=str):
        shapes = {i: list(getattr(mine[path], "shape", ())[1:]) for i, mine in fields.items()}
        if len({str(shape) for shape in shapes.values()}) > 1:
            said = ", ".join(f"{shape} in member {i}" for i, shape in shapes.items())
            return f"rows of {kinds.show_path(path)} are {said}. Give them one shape with a transform of the member"
    return ""


def _renaming(extra: dict[int, list[tuple[Any, ...]]]) -> str:
    """Return the transform that renames fields of a member as a later one calls them, if they end in the same key."""
    for i, j in combinations(extra, 2):
        mine, theirs = ({path[-1]: path for path in extra[member]} for member in (i, j))
        names = {path: theirs[key] for key, path in mine.items() if key in theirs}
        if names:
            said = ", ".join(f"{kinds.show_path(old)}: {kinds.show_path(new)}" for old, new in names.items())
            return f"transform=RenameFields({{{said}}}) in member {i}"
    return "transform=RenameFields({old: new}) in a member"


def without_names(data: Any) -> Any:
    """Return the rows of a member without the keys that buffers of TensorDicts add: they name no rows of the batch."""
    found = [key for key in INFO if key in data.keys()] if kinds.is_tensordict(data) else []  # noqa: SIM118 (rows)
    return data.exclude(*found) if found else data


def put_names(batch: Any, names: dict[Any, Tensor]) -> None:
    """Put the keys that name rows into a TensorDict, unless a `collate_fn` has made something else of the rows."""
    ids = names["index", "buffer_ids"]
    lead = ids.shape if batch.batch_size[: ids.ndim] == ids.shape else torch.Size([ids.numel()])
    if batch.batch_size[: len(lead)] == lead:
        shaped = {key: value.reshape(*lead, *value.shape[ids.ndim :]) for key, value in names.items()}
        plain = {key: value for key, value in shaped.items() if isinstance(key, str) or key[0] == "index"}
        kinds.put(batch, plain, len(lead))


def show_names(names: dict[Any, Tensor], *, as_tensordict: bool) -> Any:
    """Nest the keys that name rows: `{"index": {"index", "buffer_ids"}, ...}`."""
    index, ids = ("index", "index"), ("index", "buffer_ids")
    if as_tensordict:
        lead = names[ids].shape
        empty = kinds.make(kinds.Node("tensordict", ()), (), tuple(lead), names[ids].device)
        for key, value in names.items():
            empty.set(key, value)
        return empty
    rest = {key: value for key, value in names.items() if key not in (index, ids)}
    return {"index": {"index": names[index], "buffer_ids": names[ids]}, **rest}
