"""The read path of an ensemble: choose members, draw from each, gather, put the parts together."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch.compiler import is_dynamo_compiling

from ostinato.buffers.gate import Waiters, give_back
from ostinato.buffers.members import locked
from ostinato.buffers.prefetch import Prefetcher, Steps
from ostinato.buffers.records import Mix
from ostinato.core import kinds
from ostinato.errors import EmptyBufferError, KindError, OptionError, OstinatoError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ostinato.buffers.members import Member
    from ostinato.buffers.records import Rows, Ticket
    from ostinato.samplers import SamplerEnsemble
    from ostinato.transforms import Compose

__all__ = ["Mixer", "show_names"]

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
    """Owner of the mixing law, the generator and the queue of an ensemble.

    Lock order: an ensemble's own lock, then those of its members.
    """

    def __init__(
        self,
        members: Sequence[Member],
        law: SamplerEnsemble,
        collate: Callable[[list[Any]], Any] | None,
        transform: Compose,
        generator: torch.Generator | None,
        depth: int,
        *,
        flatten: bool,
    ) -> None:
        self.members = members
        self.flatten = flatten
        self.law = law
        self.collate = collate
        self.transform = transform
        self.generator = generator
        self._waiters = Waiters(outer=True)
        self.lock = self._waiters.lock
        self.pending: deque[Mix] = deque()
        self.prefetch: Prefetcher[Mix] | None = Prefetcher(depth, self._waiters) if depth else None

    @property
    def ranked(self) -> bool:
        """Whether some member keeps priorities; samples then carry weights and stamps."""
        return any(member.engine.sampler.prioritized for member in self.members)

    def part_rows(self, batch_size: int) -> int:
        """Return the rows of each part of a batch.

        Raises:
            OptionError: if the parts cannot be of equal size.
        """
        parts = self.law.num_buffer_sampled
        if batch_size % parts:
            msg = f"batch_size must be divisible by num_buffer_sampled={parts}, got {batch_size}"
            raise OptionError(msg)
        return batch_size // parts

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
        while True:
            if self.prefetch is None:
                mix = self._draw(size, ahead=False)
                made = self._make(mix)
            else:
                mix, made = self.prefetch.next(Steps(lambda: self._draw(size, ahead=True), self._make))
            if made is None:
                continue  # a member was emptied in between: draw again, or learn that it is empty
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
            rows = self.part_rows(size)
            rng = None if self.generator is None else self.generator.get_state()
            tickets: list[Ticket] = []
            chosen: list[int] = []
            try:
                chosen = self._choose(rows)
                for i in chosen:
                    tickets.append(self.members[i].draw(rows, self.generator, ranked=self.ranked))  # noqa: PERF401
            except Exception:  # a member has too few rows: what the others gave, and the generator, go back
                for i, ticket in zip(chosen, tickets, strict=False):
                    give_back(self.members[i].engine, ticket)
                if rng is not None and self.generator is not None:
                    self.generator.set_state(rng)
                raise
            return Mix(chosen, tickets, rng if ahead else None)

    def _choose(self, rows: int) -> list[int]:
        """Choose the members of the next batch; all of them can draw `rows` rows, else nothing has changed but chance.

        Raises:
            EmptyBufferError: if no member has rows to draw.
            OstinatoError: if a member that was chosen cannot draw for another reason.
        """
        held: list[int] = []
        refusals: dict[int, OstinatoError] = {}
        for i, member in enumerate(self.members):
            held.append(len(member.engine.storage))
            try:
                member.check_draw(rows, self.generator)
            except EmptyBufferError:
                held[i] = 0
            except OstinatoError as error:
                refusals[i] = error
        chosen = self.law.choose(held, self.generator)
        for i in chosen:
            if i in refusals:
                raise refusals[i]
        return chosen

    def _make(self, mix: Mix) -> Made | None:
        """Make the batch of a draw; None if a member was emptied since. Runs in the prefetch thread if there is one."""
        parts, rows, notes = [], [], []
        for i, ticket in zip(mix.members, mix.tickets, strict=True):
            made = self.members[i].make(ticket)
            if made is None:
                return None
            data, source, said = made
            if kinds.is_tensordict(data):
                own = [key for key in _OWN_KEYS if key in data.keys()]  # noqa: SIM118 (a TensorDict iterates over rows)
                data = data.exclude(*own) if own else data
            parts.append(data)
            rows.append(source)
            notes.append(said)
        batch = self.join(parts, flatten=self.flatten)
        if self.transform:
            batch = self.transform.forward(batch)
        tickets = [source.ticket for source in rows]
        names = {**self._names(mix.members, tickets), **self._notes(mix.members, notes)}
        if kinds.is_tensordict(batch):
            lead = names["index", "buffer_ids"].shape
            if batch.batch_size[: len(lead)] != lead:
                lead = torch.Size([lead.numel()])
            if batch.batch_size[: len(lead)] == lead:  # else the caller's collate_fn made something else of the rows
                shaped = {key: value.reshape(*lead, *_row_shape(value, names)) for key, value in names.items()}
                plain = {key: value for key, value in shaped.items() if isinstance(key, str) or key[0] == "index"}
                kinds.put(batch, plain, len(lead))
        return Made(batch, tickets, rows, names)

    def join(self, parts: list[Any], *, flatten: bool = False) -> Any:
        """Collate the parts of a batch: stack them, or put them end to end.

        Raises:
            KindError: if they cannot be put together, and there is no `collate_fn`.
        """
        if self.collate is not None:
            return self.collate(parts)
        try:
            return kinds.concatenate(parts) if flatten else kinds.stack_parts(parts)
        except (KindError, SchemaError) as error:
            msg = (
                f"the parts of a batch, of type {type(parts[0]).__name__}, cannot be "
                f"{'put end to end' if flatten else 'stacked'} ({error}): give the ensemble a collate_fn, such as list"
            )
            raise KindError(msg) from error

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
        if self.ranked and all(ticket.draw.weights is not None for ticket in tickets):
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

    def drop(self) -> None:
        """Forget draws made ahead; the generator goes back to before them."""
        with self.lock:
            dropped = [*([] if self.prefetch is None else self.prefetch.clear()), *self.pending]
            self.pending.clear()
            if dropped and dropped[0].rng is not None and self.generator is not None:
                self.generator.set_state(dropped[0].rng)

    def redo(self) -> None:
        """Forget batches made ahead but keep their draws, to be made again (after the transforms have changed)."""
        with self.lock:
            if self.prefetch is not None:
                self.pending.extendleft(reversed(self.prefetch.clear()))


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
