"""Draws of an ensemble: choose members, draw from each, gather, join the parts; priorities of its rows."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.conditional_updates import UpdateQueue
from ostinato.buffers.engine import LocalEngine
from ostinato.buffers.options import leaves_by_path, warn_of_sampler
from ostinato.buffers.pipeline import Prefetcher, Steps
from ostinato.buffers.priority_updates import (
    PAD_MASK,
    as_sampler,
    in_era,
    parse_update,
    priorities_of_batch,
    priority_fields,
    read_integers,
    read_priorities,
    read_slots,
    steps_of,
)
from ostinato.buffers.rate_limit import Waiters
from ostinato.buffers.records import Mix
from ostinato.buffers.tensordict import TensorDictReplayBuffer
from ostinato.buffers.views import ViewEngine
from ostinato.core import kinds
from ostinato.core.records import Run
from ostinato.errors import (
    EmptyBufferError,
    KeyMissingError,
    KindError,
    OptionError,
    OstinatoError,
    SchemaError,
    SlotError,
    TooFewRowsError,
    UsageError,
)
from ostinato.samplers.base import check_not_negative, check_rows
from ostinato.samplers.ratio import Split
from ostinato.samplers.standalone import check_one_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from ostinato.buffers.conditional_updates import ConditionalUpdateResult
    from ostinato.buffers.records import Rows, Ticket
    from ostinato.buffers.replay import ReplayBuffer
    from ostinato.core.records import Draw
    from ostinato.samplers import SamplerEnsemble
    from ostinato.transforms import Compose

__all__ = [
    "Member",
    "Mixer",
    "as_members",
    "join_parts",
    "locked",
    "mark_members",
    "show_names",
    "unpack",
    "update_from_batch",
    "update_members",
    "with_source",
]


@final
class Member:
    """What an ensemble needs of one of its buffers.

    Args:
        buffer: the buffer.
        collate: takes the place of the buffer's own `collate_fn`; None keeps that.
    """

    def __init__(self, buffer: ReplayBuffer, collate: Callable[[Any], Any] | None) -> None:
        # an ensemble draws from its buffers' engines, in the same package
        engine = buffer._engine  # noqa: SLF001
        if not isinstance(engine, LocalEngine):
            msg = "the members of an ensemble belong to one process, got a shared buffer: make it without shared=True"
            raise OptionError(msg)
        if isinstance(engine, ViewEngine):
            msg = "the members of an ensemble are buffers, which it saves and loads, got a view: pass its buffer"
            raise OptionError(msg)
        self.engine = engine
        self._pipeline = buffer._pipeline  # noqa: SLF001
        self._finish = buffer._finish  # noqa: SLF001
        self._slots = buffer._index  # noqa: SLF001
        self.show = buffer._state  # noqa: SLF001
        self.accept = buffer._accept  # noqa: SLF001
        self.buffer = buffer
        self.collate = collate

    def draw(self, rows: int, generator: torch.Generator | None, *, ranked: bool, ahead: bool) -> Ticket:
        """Draw slots; where a pass over the rows ends, the next one begins.

        Args:
            rows: how many.
            generator: source of the draws; None is the buffer's own.
            ranked: give rows of samplers without priorities the weight 1, and their generations.
            ahead: the batch is made later, of the rows as they are now.

        Raises:
            EmptyBufferError: if there are no rows.
        """
        engine = self.engine
        device = engine.storage.device
        with engine.lock:
            source = engine.generator if generator is None else generator
            tickets = [engine.fresh(rows, source)]
            left = rows - _rows(tickets[0])
            while left > 0 and tickets[-1].last:
                tickets.append(engine.fresh(left, source))
                left -= _rows(tickets[-1])
            draw = tickets[0].draw if len(tickets) == 1 else _joined([ticket.draw for ticket in tickets])
            if ranked and draw.weights is None:
                weights = torch.ones(draw.slots.shape[0], dtype=torch.float32, device=device)
                draw = draw._replace(weights=weights, generations=engine.ring.generations_of_rows(draw.slots))
            ticket = engine.expand(tickets[-1]._replace(draw=draw), source)
            return engine.hold(ticket) if ahead else ticket

    def check_draw(self, rows: int, generator: torch.Generator | None) -> None:
        """Raise what `draw` would raise, before any member of a batch has drawn; the caller holds the engine's lock.

        Raises:
            EmptyBufferError: if there is nothing to draw before more rows are written.
            OptionError: if generator and storage are on different devices, or the sampler's passes cannot be cut.
            PriorityError: if no row has a priority above 0.
            UsageError: if the sampler cannot make `rows` rows of whole slices.
        """
        engine = self.engine
        device = engine.storage.device
        if generator is not None and generator.device.type != device.type:
            msg = (
                f"the ensemble's generator lives on {generator.device}, a member's storage on {device}: use one device"
            )
            raise OptionError(msg)
        if engine.sampler.epochal and engine.sampler.episodes is not None:
            msg = (
                f"{type(engine.sampler).__name__} is not available in an ensemble: a pass that ends in the middle of a "
                "part would cut its slices; use SliceSampler"
            )
            raise OptionError(msg)
        view = engine.view()
        engine.check_drawable(view)
        engine.sampler.check_draw(view, rows)

    def make(self, ticket: Ticket) -> tuple[Any, Rows, dict[Any, Tensor]] | None:
        """Return the batch of a draw, its rows, and the fields added to them; None if it cannot be made now."""
        return self._pipeline.make(ticket, self._finish, self.collate)

    def write(self, rows: Any, *, ranked: bool) -> tuple[Tensor, Tensor]:
        """Write rows that the engine has checked; return the index and the generation of each, int64 `[n]`.

        Rows that were replaced by later ones of the same batch have the generations that they had; rows that the writer
        did not keep have index -1 and generation 0.
        """
        engine = self.engine
        with engine.lock:
            placement = engine.write(rows, 1, ranked=ranked)
            before = engine.ring.written - placement.total  # rows that leave (`max_bytes`) renumber the others
            slots = placement.positions(engine.storage.device)
            written = slice(None) if isinstance(placement, Run) else placement.rows
            generations = torch.zeros_like(slots)
            numbered = generations[written].shape[0]
            generations[written] = torch.arange(before + 1, before + 1 + numbered, device=slots.device)
            return self.as_index(slots), in_era(generations, engine.era)

    def index(self, ticket: Ticket) -> Tensor:
        """Return the index of a draw's rows, int64 `[B]`, with `ndim=2` `[B, 2]`."""
        return self.as_index(ticket.records)

    def as_index(self, slots: Tensor) -> Tensor:
        """Return slots as users see them, int64 `[B]`, with `ndim=2` `[B, 2]`."""
        index = self._slots(slots)
        return torch.stack(index, -1) if isinstance(index, tuple) else index

    def ranks(self, ticket: Ticket) -> dict[str, Tensor]:
        """Return weights and generations of the rows of a draw as samples carry them, `[R]` each, if they do."""
        return priority_fields(ticket, self.engine.era, tracked=self.engine.writer.tracks_generations)

    def loaded(self) -> None:
        """Drop batches made ahead: a state was loaded, and their rows are gone."""
        self._pipeline.forget()


def _no_rows(error: OstinatoError) -> bool:
    """Whether a member raised because it has no row to draw; one with too few rows for a full batch is not left out."""
    return isinstance(error, EmptyBufferError) and not isinstance(error, TooFewRowsError)


def _joined(draws: Sequence[Draw]) -> Draw:
    """Put several draws of one sampler together; the info of a whole batch is dropped."""
    columns = [[getattr(draw, name) for draw in draws] for name in ("weights", "generations", "lengths")]
    weights, generations, lengths = (torch.cat(column) if column[0] is not None else None for column in columns)
    slots = torch.cat([draw.slots for draw in draws])
    return draws[0]._replace(slots=slots, weights=weights, info=None, generations=generations, lengths=lengths)


def _rows(ticket: Ticket) -> int:
    """Return the records that a draw will become, before units."""
    draw = ticket.draw
    return draw.slots.shape[0] * (draw.length or 1) if draw.lengths is None else int(draw.lengths.sum())


def locked(members: Sequence[Member]) -> ExitStack:
    """Take the locks of all members, in an order that is the same for every ensemble; the result gives them back."""
    stack = ExitStack()
    for member in sorted(members, key=lambda member: member.engine.waiters.place):
        stack.enter_context(member.engine.lock)
    return stack


_WINDOWS = ("anchor_index", "anchor_generation", "validity_mask", "step_in_sequence")
"""Fields of samples with windows around anchors: their priorities are those of the anchors."""
_NAMES = "an ensemble's rows are named by index and buffer_ids: pass the sample, or its info"


def update_members(members: Sequence[Member], index: Any, priority: Any, generation: Any) -> None:
    """Give rows new priorities; see `ReplayBufferEnsemble.update_priority`."""
    ranked = _ranked(members)
    if not ranked:
        return
    if priority is None:
        msg = "update_priority() needs the new priorities: update_priority(sample, priority)"
        raise UsageError(msg)
    index, ids, generations = unpack(index, generation)
    envs = 1 if members[0].buffer.storage.ndim > 1 else 0
    lead = index.shape[: index.ndim - envs]
    ids = as_members(ids, lead, len(members))
    index = index.reshape(-1, *index.shape[len(lead) :])
    values = read_priorities(priority, tuple(lead), steps_of_members(members))
    generations = None if generations is None else read_integers("generation", generations).reshape(-1)
    if generations is not None and generations.shape != ids.shape:
        msg = f"generation must hold one integer for each of the {ids.shape[0]} rows, got {generations.shape[0]}"
        raise SchemaError(msg)
    rows = {i: (ids == i).nonzero().flatten() for i in ranked}
    _write(
        members,
        {
            i: (_take(index, at), values if values.ndim == 0 else _take(values, at), _take(generations, at))
            for i, at in rows.items()
        },
    )


def update_from_batch(members: Sequence[Member], batch: Any) -> None:
    """Give rows the priorities in a sample; see `ReplayBufferEnsemble.update_tensordict_priority`."""
    ranked = _ranked(members)
    if not ranked:
        return
    index, ids, generations = unpack(batch, None)
    ndim = members[0].buffer.storage.ndim
    lead = min(2, ids.ndim)
    owner = ids.reshape(-1, ids.shape[lead:].numel())[:, 0]
    changes: dict[int, tuple[Any, Any, Any]] = {}
    for i in ranked:
        member = members[i]
        at = (owner == i).nonzero().flatten()
        if at.shape[0] == 0:
            continue
        key = member.buffer.priority_key if isinstance(member.buffer, TensorDictReplayBuffer) else "td_error"
        found = batch.get(key, None)
        if found is None:
            path = (key,) if isinstance(key, str) else tuple(key)
            msg = f"the batch has no key {kinds.show_path(path)}: write the priorities there, or call update_priority()"
            raise KeyMissingError(msg)
        check_one_each(tuple(found.shape), tuple(ids.shape), steps_of(member.engine))
        part: dict[Any, Any] = {"index": _take(_flat(index, lead), at), "priority": _take(_flat(found, lead), at)}
        if generations is not None:
            part["index_generation"] = _take(_flat(generations, lead), at)
        windows = {name: batch.get(name, None) for name in (*_WINDOWS, PAD_MASK)}
        part |= {name: _take(_flat(value, lead), at) for name, value in windows.items() if value is not None}
        reduce = as_sampler(member.engine.sampler).reduce
        changes[i] = priorities_of_batch(part, "priority", reduce, ndim)
    _write(members, changes)


def steps_of_members(members: Sequence[Member]) -> int | None:
    """Return the steps of an item, see `steps_of`; None if the members differ."""
    found = {steps_of(member.engine) for member in members}
    return found.pop() if len(found) == 1 else None


def mark_members(members: Sequence[Member], index: Any) -> None:
    """Give rows the default priority again; see `ReplayBufferEnsemble.mark_update`."""
    index, ids, _ = unpack(index, None)
    lead = index.shape[: index.ndim - (1 if members[0].buffer.storage.ndim > 1 else 0)]
    ids, index = as_members(ids, lead, len(members)), index.reshape(-1, *index.shape[len(lead) :])
    rows = {i: (ids == i).nonzero().flatten() for i, one in enumerate(members) if one.engine.sampler.prioritized}
    with locked([members[i] for i in rows]):
        for i, at in rows.items():
            slots, _ = read_slots(_take(index, at), members[i].engine.storage)
            check_not_negative(slots, least=members[i].engine.least_index)
            check_rows(slots, members[i].engine.ring.rows)
        for i, at in rows.items():
            members[i].engine.reset_priorities(_take(index, at))


def _ranked(members: Sequence[Member]) -> list[int]:
    """Return the members that keep priorities; warn where there are none."""
    found = [i for i, member in enumerate(members) if member.engine.sampler.prioritized]
    if not found:
        warn_of_sampler(members[0].engine.sampler)
    return found


def _write(members: Sequence[Member], changes: dict[int, tuple[Any, Any, Any]]) -> None:
    """Check the updates of all members, then make them."""
    with locked([members[i] for i in changes]):
        updates = []
        for i, change in changes.items():
            engine = members[i].engine
            sampler = as_sampler(engine.sampler)
            update = parse_update(*change, engine.storage, sampler.reduce, steps_of(engine))
            update.check(sampler, engine.ring.rows, least_index=engine.least_index)
            updates.append((engine, update))
        for engine, update in updates:
            engine.update_priorities(update)


def unpack(sample: Any, given: Any) -> tuple[Tensor, Tensor, Any]:
    """Return index, members and generations of a sample, of its info, or of the `index` in one of them."""
    found = sample
    if _has(found, "index") and _is_tree(found["index"]):
        given = found.get("index_generation", None) if given is None else given
        found = found["index"]
    if not (_has(found, "index") and _has(found, "buffer_ids")):
        keys = f" with the keys {sorted(map(str, sample.keys()))}" if _is_tree(sample) else ""
        msg = f"{_NAMES}; got {type(sample).__name__}{keys}"
        raise KindError(msg)
    return read_integers("index", found["index"]), read_integers("buffer_ids", found["buffer_ids"]), given


def _is_tree(data: Any) -> bool:
    return isinstance(data, dict) or kinds.is_tensordict(data)


def _has(data: Any, key: str) -> bool:
    return _is_tree(data) and key in data.keys()  # noqa: SIM118 (a TensorDict iterates over rows)


def as_members(ids: Tensor, lead: torch.Size, count: int) -> Tensor:
    """Return one member for each row, `[rows]`; one for each part of the batch, `[parts]`, will do."""
    if ids.shape != lead[: ids.ndim]:
        msg = f"buffer_ids must have the shape {list(lead)} of the index, or {list(lead[:1])}, got {list(ids.shape)}"
        raise SchemaError(msg)
    ids = ids.reshape(*ids.shape, *[1] * (len(lead) - ids.ndim)).expand(lead).reshape(-1)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        msg = f"buffer_ids must be in [0, {count}), got {int(ids.min())} to {int(ids.max())}"
        raise SlotError(msg)
    return ids


def _flat(values: Tensor, lead: int) -> Tensor:
    return values.reshape(-1, *values.shape[lead:])


def _take(values: Any, at: Tensor) -> Any:
    return None if values is None else values.index_select(0, at.to(values.device))


_OWN_KEYS = ("index", "priority_weight", "index_generation")
"""Keys that members add to their samples; the ensemble adds its own in their place."""


class Made(NamedTuple):
    """A finished batch, what it was made of, and the keys that name its rows."""

    data: Any
    tickets: list[Ticket]
    rows: list[Rows]
    names: dict[Any, Tensor]


@final
class Mixer:
    """Draws batches of an ensemble; owns its sampler, generator and queue.

    Lock order: an ensemble's own lock, then those of its members.
    """

    def __init__(
        self,
        members: Sequence[Member],
        sampler: SamplerEnsemble,
        collate: Callable[[list[Any]], Any] | None,
        transform: Compose,
        generator: torch.Generator | None,
        depth: int,
        *,
        flatten: bool,
        source: tuple[str, ...] | None = None,
        named: bool = True,
    ) -> None:
        self.members = members
        self.flatten = flatten or sampler.ratio_step is not None
        self.sampler = sampler
        self.source = source
        """Field of batches that has the member of each row."""
        self.named = named
        """Whether TensorDict batches carry the names of their rows though no member has priorities."""
        self.collate = collate
        self.transform = transform
        self.generator = generator
        self._waiters = Waiters(outer=True)
        self.lock = self._waiters.lock
        self.pending: deque[Mix] = deque()
        self.prefetch: Prefetcher[Mix] | None = Prefetcher(depth, self._waiters) if depth else None
        self._updates = UpdateQueue()
        self.ended = False
        """Whether the ensemble was shut down."""

    @property
    def ranked(self) -> bool:
        """Whether some member keeps priorities; samples then carry weights and generations."""
        return any(member.engine.sampler.prioritized for member in self.members)

    @property
    def queued(self) -> list[Mix]:
        """Draws that were made ahead, oldest first."""
        return [*([] if self.prefetch is None else self.prefetch.tickets), *self.pending]

    def next(self, size: int) -> tuple[Any, dict[Any, Tensor]]:
        """Return the next batch of `size` rows, and the keys that name its rows."""
        if is_dynamo_compiling():  # a graph break: locks and addresses are not for a graph
            eager = torch.compiler.disable(Mixer.next)  # type: ignore[no-untyped-call]
            return eager(self, size)  # type: ignore[no-any-return]
        kinds.require_eager("sampling")
        if self.ended:
            msg = "A shut down replay buffer cannot be sampled: make another one, or use close() to end its threads"
            raise UsageError(msg)
        self._updates.settle()
        while True:
            if self.prefetch is None:
                mix = self._draw(size, ahead=False)
                made = self._make(mix)
            else:
                mix, made = self.prefetch.next(Steps(lambda: self._draw(size, ahead=True), self._make))
            if made is None:  # a member was emptied in between: draw again, or learn that it is empty
                with self.lock:
                    self.sampler.undrew(mix.owed)
                continue
            names = made.names
            members = [self.members[i] for i in mix.members]
            for member, ticket in zip(members, made.tickets, strict=True):
                member.engine.deliver(ticket)
            if self.prefetch is not None:
                parts = zip(members, made.tickets, made.rows, strict=True)
                stale = [member.engine.stale(ticket, rows) for member, ticket, rows in parts]
                names = {**names, "stale": self._together(stale)}
            return made.data, names

    def _draw(self, size: int, *, ahead: bool) -> Mix:
        with self.lock, locked(self.members):  # one moment: what is checked of a member holds when it draws
            if self.pending:
                return self.pending.popleft()
            rng = None if self.generator is None else self.generator.get_state()
            tickets: list[Ticket] = []
            split = Split([], [])
            try:
                split = self._plan(size)
                for i, rows in zip(split.members, split.sizes, strict=True):
                    tickets.append(self.members[i].draw(rows, self.generator, ranked=self.ranked, ahead=ahead))
            except Exception:  # a member has too few rows: what the others gave, and the generator, go back
                for i, ticket in zip(split.members, tickets, strict=False):
                    self.members[i].engine.give_back(ticket)
                if rng is not None and self.generator is not None:
                    self.generator.set_state(rng)
                raise
            self.sampler.drew(split.owed)
            return Mix(split.members, tickets, rng if ahead else None, split.owed)

    def hold(self, mix: Mix) -> Mix:
        """Return a draw made ahead, whose members keep its rows as they are now."""
        pairs = zip(mix.members, mix.tickets, strict=True)
        return mix._replace(tickets=[self.members[i].engine.hold(ticket) for i, ticket in pairs])

    def can_draw(self, size: int) -> bool:
        """Whether a draw of `size` rows does not raise, whichever members are chosen."""
        sampler = self.sampler
        with self.lock, locked(self.members):
            if self.pending:
                return True
            try:
                held, refusals = self._held(size)
            except OptionError:
                return False
            if sampler.ratio_step is None:
                shares = sampler.p if isinstance(sampler.p, Tensor) else [1] * len(held)
                return sampler.ready(held) and not any(shares[i] > 0 for i in refusals)
            if not sampler.ready(held):
                return False
            try:
                self._check(sampler.plan(size, held, self.generator))
            except OstinatoError:
                return False
            return True

    def _held(self, size: int) -> tuple[list[int], dict[int, OstinatoError]]:
        """Return the rows of each member, 0 where none can be drawn, and why some cannot draw their part of a batch.

        Raises:
            OptionError: if a batch of this size cannot be divided.
        """
        self.sampler.members = tuple(member.engine.sampler for member in self.members)  # some may be exchanged
        held: list[int] = []
        refusals: dict[int, OstinatoError] = {}
        for i, (member, rows) in enumerate(zip(self.members, self.sampler.asked(size), strict=True)):
            held.append(len(member.engine.storage))
            try:
                member.check_draw(rows, self.generator)
            except OstinatoError as error:
                if _no_rows(error):
                    held[i] = 0
                else:
                    refusals[i] = error
        return held, refusals

    def _plan(self, size: int) -> Split:
        """Divide the next batch; its members can draw their rows, else nothing has changed but chance.

        Raises:
            EmptyBufferError: if no member has rows to draw.
            OstinatoError: if a member that was chosen cannot draw for another reason.
        """
        held, refusals = self._held(size)
        split = self.sampler.plan(size, held, self.generator)
        if split.owed is not None:  # of other sizes than those asked for
            self._check(split)
            return split
        for i in split.members:
            if i in refusals:
                raise refusals[i]
        return split

    def _check(self, split: Split) -> None:
        """Raise what a member would raise that is to give its part of a batch."""
        for i, rows in zip(split.members, split.sizes, strict=True):
            self.members[i].check_draw(rows, self.generator)

    def _make(self, mix: Mix) -> Made | None:
        """Make the batch of a draw; None if a member was emptied since. Runs in the prefetch thread if there is one."""
        parts, rows, notes = [], [], []
        named = self.named or self.ranked
        for i, ticket in zip(mix.members, mix.tickets, strict=True):
            made = self.members[i].make(ticket)
            if made is None:
                return None
            data, source, said = made
            if kinds.is_tensordict(data) and (named or isinstance(self.members[i].buffer, TensorDictReplayBuffer)):
                own = [key for key in _OWN_KEYS if key in data.keys()]  # noqa: SIM118 (a TensorDict iterates over rows)
                data = data.exclude(*own) if own else data
            parts.append(data)
            rows.append(source)
            notes.append(said)
        batch = self.join(parts, mix.members, flatten=self.flatten)
        tickets = [source.ticket for source in rows]
        names = {**self._names(mix.members, tickets), **self._notes(mix.members, notes)}
        if self.source is not None:
            batch = with_source(batch, self.source, names["index", "buffer_ids"])
        if self.transform:
            batch = self.transform.forward(batch)
        if named and kinds.is_tensordict(batch):
            lead = names["index", "buffer_ids"].shape
            if batch.batch_size[: len(lead)] != lead:
                lead = torch.Size([lead.numel()])
            if batch.batch_size[: len(lead)] == lead:  # else the caller's collate_fn made something else of the rows
                shaped = {key: value.reshape(*lead, *_row_shape(value, names)) for key, value in names.items()}
                plain = {key: value for key, value in shaped.items() if isinstance(key, str) or key[0] == "index"}
                kinds.put(batch, plain, len(lead))
        return Made(batch, tickets, rows, names)

    def join(self, parts: list[Any], members: Sequence[int], *, flatten: bool = False) -> Any:
        """Collate the parts of a batch, of these members: stack them, or put them end to end.

        Raises:
            KindError: if they cannot be put together, and there is no `collate_fn`; names the fields that differ.
        """
        if self.collate is not None:
            return self.collate(parts)
        return parts[0] if flatten and len(parts) == 1 else join_parts(parts, members, flatten=flatten)

    def _names(self, chosen: list[int], tickets: list[Ticket]) -> dict[Any, Tensor]:
        """Return what names the rows of a batch, `[parts, rows]`; flat with `flatten`, or if parts differ in length."""
        pairs = [(self.members[i], ticket) for i, ticket in zip(chosen, tickets, strict=True)]
        index = self._together([member.index(ticket) for member, ticket in pairs])
        # repeat_interleave would open a region of threads for it, whatever its size
        ids = self._together(
            [
                torch.full((t.records.shape[0],), i, dtype=torch.int64, device=index.device)
                for i, (_, t) in zip(chosen, pairs, strict=True)
            ]
        )
        names: dict[Any, Tensor] = {("index", "index"): index, ("index", "buffer_ids"): ids}
        if not self.ranked or all(ticket.draw.weights is not None for ticket in tickets):
            names |= self._common([member.ranks(ticket) for member, ticket in pairs])
        return names

    def _notes(self, chosen: list[int], notes: list[dict[Any, Tensor]]) -> dict[Any, Tensor]:
        """Return what the members' slices and units say of each record, as far as all of them say it."""
        said = [
            {key: self.members[i].as_index(value) if key == "anchor_index" else value for key, value in mine.items()}
            for i, mine in zip(chosen, notes, strict=True)
        ]
        return self._common(said)

    def _together(self, parts: list[Tensor]) -> Tensor:
        """Stack parts, `[parts, rows]`; joined with `flatten` or if lengths differ. On the CPU if devices differ."""
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        return torch.cat(parts) if self.flatten or len({part.shape for part in parts}) > 1 else torch.stack(parts)

    def _common(self, parts: list[dict[Any, Tensor]]) -> dict[Any, Tensor]:
        """Put together what all parts have."""
        keys = [key for key in parts[0] if all(key in part for part in parts)]
        return {key: self._together([part[key] for part in parts]) for key in keys}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Take the lock of the ensemble, then those of its members."""
        with self.lock, locked(self.members):
            yield

    def drop(self) -> None:
        """Forget draws made ahead; the generator goes back to before them."""
        with self.lock:
            dropped = [*([] if self.prefetch is None else self.prefetch.clear()), *self.pending]
            self.pending.clear()
            for mix in dropped:
                self.sampler.undrew(mix.owed)
            if dropped and dropped[0].rng is not None and self.generator is not None:
                self.generator.set_state(dropped[0].rng)

    def submit(self, update: Callable[[], ConditionalUpdateResult]) -> Future[ConditionalUpdateResult]:
        """Run an update in a thread: after the batches that are queued now, before those that are queued later."""
        if self.ended:
            msg = "A shut down replay buffer cannot accept updates: make another one"
            raise UsageError(msg)
        return self._updates.submit(update, None if self.prefetch is None else self.prefetch.worker())

    def settle(self) -> None:
        """Wait for pending updates, and raise the first error of one; the caller does not hold a lock."""
        self._updates.settle()

    def synchronize(self) -> None:
        """Wait for pending updates and queued batches, of the members too, and raise the first error of one."""
        self.settle()
        if self.prefetch is not None:
            self.prefetch.synchronize()
        for member in self.members:
            member.buffer.synchronize()

    def close(self) -> None:
        """End the threads. Batches made ahead are dropped, their draws are kept and delivered first."""
        self._updates.close()
        self.redo()
        if self.prefetch is not None:
            self.prefetch.close()

    def redo(self) -> None:
        """Forget batches made ahead but keep their draws, to be made again (after the transforms have changed)."""
        with self.lock:
            if self.prefetch is not None:
                self.pending.extendleft(reversed(self.prefetch.clear()))


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
    fields = {i: leaves_by_path(part) for i, part in zip(members, parts, strict=True)}
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


def _row_shape(value: Tensor, names: dict[Any, Tensor]) -> tuple[int, ...]:
    """Return what an index has beyond one number for each row: the coordinates of storages with `ndim=2`."""
    return tuple(value.shape[names["index", "buffer_ids"].ndim :])


def show_names(names: dict[Any, Tensor], *, as_tensordict: bool) -> Any:
    """Nest the keys that name rows: `{"index": {"index", "buffer_ids"}, ...}`."""
    ids = names["index", "buffer_ids"]
    kind = "tensordict" if as_tensordict else "dict"

    def nest(values: dict[str, Any]) -> Any:
        return kinds.make(kinds.Node(kind, tuple(values)), list(values.values()), tuple(ids.shape), ids.device)

    inner = nest({"index": names["index", "index"], "buffer_ids": ids})
    whole = nest({"index": inner, **{key: value for key, value in names.items() if isinstance(key, str)}})
    nested = {key: value for key, value in names.items() if isinstance(key, tuple) and key[0] != "index"}
    return kinds.with_fields(whole, nested) if as_tensordict else {**whole, **nested}
