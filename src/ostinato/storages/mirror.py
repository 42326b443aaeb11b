"""A table that stores next observations once: `single_copy=`. It looks like a `Table`, and copies whatever is read.

A next observation is not stored where it is, bit by bit, the observation of the row `lanes` slots on; else it lies
apart, in a side row. So it needs no knowledge of episodes: the last row of one keeps its true final observation, the
newest row of each lane has its own until the row that follows arrives and agrees. Whatever changes an observation
in place first gives the row before it a side row.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ostinato._backend import native
from ostinato.core.bits import as_bits, same_rows
from ostinato.core.draw import Picks, Request, Run
from ostinato.core.rows import Flat, Schema
from ostinato.errors import OptionError
from ostinato.storages.fetch import check_alike, checked_choice
from ostinato.storages.plain_sides import PlainSides
from ostinato.storages.sides import FOLLOWS, NOTHING, Links, NativeSides, Sides
from ostinato.storages.table import Table, last_of_each, plan_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ostinato.core.draw import Placement
    from ostinato.storages.memory import Memory
    from ostinato.storages.pairs import Pairs
    from ostinato.storages.table import Block

__all__ = ["MirroredTable", "as_run"]

_BLOCK_BYTES = 16 << 20
_FEW = 32


def as_run(placement: Placement) -> Run:
    """Return a placement of a ring.

    Raises:
        OptionError: if it is of another kind: the row that follows would not be the next one.
    """
    if isinstance(placement, Run):
        return placement
    msg = "single_copy takes rows in ring order (Run), got Picks: the row that follows would not be the next one"
    raise OptionError(msg)


def _kept_leaves(schema: Schema, pairs: Pairs) -> list[int]:
    """Return the positions of the leaves that are stored row by row: those that next ones follow from come first."""
    nexts, obs = {pair[0] for pair in pairs}, [pair[1] for pair in pairs]
    return [*obs, *(i for i in range(len(schema.leaves)) if i not in nexts and i not in obs)]


@final
class MirroredTable:
    """Memory for `capacity` rows of a schema, in which some fields are other fields one row later.

    Args:
        schema: form of a row.
        capacity: rows.
        lanes: slots from a row to the one that follows it.
        pairs: which fields; see `find_pairs`.
        memory: where to take memory from.
        packed: see `plan_layout`.
        layout: that of the rows kept, where files have one already.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        lanes: int,
        pairs: Pairs,
        memory: Memory,
        *,
        packed: bool,
        layout: list[Block] | None = None,
    ) -> None:
        self.schema = schema
        self.capacity = capacity
        self.lanes = lanes
        self.pairs = pairs
        self.kept = _kept_leaves(schema, pairs)
        inner = Schema(None, [schema.leaves[i] for i in self.kept])
        self.layout = plan_layout(inner.leaves, packed=packed, align=1) if layout is None else layout
        memory.check(sum(block.stride for block in self.layout) * capacity)
        self.inner = Table.allocate(inner, capacity, memory, self.layout)
        self.device = self.inner.device
        self._native = native is not None and self.device.type == "cpu"
        self.sides: Sides = (
            NativeSides(self.inner, pairs, lanes, memory) if self._native else PlainSides(self.inner, pairs, lanes)
        )
        self._all = tuple(range(len(pairs)))
        places = {position: k for k, position in enumerate([*self.kept, *(pair[0] for pair in pairs)])}
        self._order = [places[i] for i in range(len(schema.leaves))]
        self._pair_of = {pair[0]: k for k, pair in enumerate(pairs)}
        self._rows = 0
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Bytes held: rows, side rows, and what each slot says."""
        return self.inner.nbytes + self.sides.nbytes

    # -- reading ----------------------------------------------------------------------------------------------

    def gather(self, slots: Tensor, *, pin: bool = False) -> list[Tensor]:
        """Copy rows, whole; see `Table.gather`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(MirroredTable.gather)(self, slots, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        found = self.inner.gather(slots, pin=pin)
        found += self.sides.read(self._all, slots, None, pin=pin)
        return [found[i] for i in self._order]

    def fetch(self, requests: Sequence[Request], *, pin: bool = False) -> list[Tensor]:
        """Copy other rows for each field; see `Table.fetch`."""
        if is_dynamo_compiling():
            return torch.compiler.disable(MirroredTable.fetch)(self, requests, pin=pin)  # type: ignore[no-untyped-call, no-any-return]
        out: dict[int, Tensor] = {}
        inner: dict[int, Request] = {}
        sides: dict[tuple[int, int], dict[int, tuple[int, Tensor, Tensor | None]]] = {}
        for i, request in enumerate(requests):
            asked = self._of_sides(request)
            if asked is not None:
                sides.setdefault((id(asked[1]), id(asked[2])), {})[i] = asked
            elif request.leaf in self._pair_of or request.other in self._pair_of:
                out[i] = self._fetch_both(request, pin=pin)
            else:
                other = None if request.other is None else self._order[request.other]
                inner[i] = request._replace(leaf=self._order[request.leaf], other=other)
        out.update(zip(inner, self.inner.fetch(list(inner.values()), pin=pin), strict=True))
        for group in sides.values():
            _, slots, pick = next(iter(group.values()))
            read = self.sides.read([pair for pair, _, _ in group.values()], slots, pick, pin=pin)
            out.update(zip(group, read, strict=True))
        return [out[i] for i in range(len(requests))]

    def _of_sides(self, request: Request) -> tuple[int, Tensor, Tensor | None] | None:
        """Return pair, slots and pick of a request that side rows answer; None if others do."""
        leaf, slots, other, pick = request
        if other is None and pick is None and leaf in self._pair_of:
            return self._pair_of[leaf], self._plain(slots), None
        if other is not None and (other, leaf) in self.pairs:
            return self._pair_of[other], self._plain(slots), self._choice(request)
        return None

    def _plain(self, slots: Tensor) -> Tensor:
        good = slots.dtype is torch.int64 and slots.device == self.device and slots.is_contiguous()
        return slots if good else slots.to(self.device, torch.int64).contiguous()

    def _choice(self, request: Request) -> Tensor:
        _, pick = checked_choice(request)
        return pick if pick.device == self.device and pick.is_contiguous() else pick.to(self.device).contiguous()

    def _fetch_both(self, request: Request, *, pin: bool) -> Tensor:
        """Read both fields of a choice that is not between an observation and its next one."""
        other, _ = checked_choice(request)
        one, two = self.schema.leaves[request.leaf], self.schema.leaves[other]
        check_alike(one.dtype, one.shape, two.dtype, two.shape)
        first, second = self.fetch([Request(request.leaf, request.slots), Request(other, request.slots)])
        choice = self._choice(request).view(-1, *[1] * len(one.shape))
        chosen = torch.where(choice, as_bits(second), as_bits(first)).view(one.dtype)
        return chosen.pin_memory() if pin else chosen

    def view(self, span: slice) -> list[Tensor]:
        """Return copies of the rows of a span: what is edited in them is not edited here."""
        rows = range(*span.indices(self.capacity))
        return self.gather(torch.arange(rows.start, max(rows.start, rows.stop), rows.step, device=self.device))

    def column(self, position: int, rows: int) -> Tensor:
        """Return a copy of one field of the first `rows` rows."""
        (found,) = self.fetch([Request(position, torch.arange(rows, device=self.device))])
        return found

    # -- writing ----------------------------------------------------------------------------------------------

    def prepare(self, flat: Flat, cursor: int) -> tuple[Flat, Links]:
        """Compare rows that are about to be written, and make room for those that must lie apart.

        Args:
            flat: the rows.
            cursor: where they will go, most likely.

        Raises:
            StorageMemoryError: if there is no room; nothing has changed.
        """
        if is_dynamo_compiling():
            return torch.compiler.disable(MirroredTable.prepare)(self, flat, cursor)  # type: ignore[no-untyped-call, no-any-return]
        if not self._native:
            flat = Flat([self.inner.clear_of(x) for x in flat.leaves], flat.batch, None)
        elif flat.addresses is None:
            leaves = [x.cpu().contiguous() for x in flat.leaves]
            leaves = [x if x.data_ptr() or not x.numel() else x.clone() for x in leaves]
            flat = Flat(leaves, flat.batch, [x.data_ptr() for x in leaves])
        rows = math.prod(flat.batch)
        links = self.sides.compare(flat, rows, cursor)
        if links is None:  # they lie in this very table
            leaves = [x.clone() for x in flat.leaves]
            flat = Flat(leaves, flat.batch, [x.data_ptr() for x in leaves])
            links = self.sides.compare(flat, rows, cursor)
        self.sides.reserve(links.need)  # type: ignore[union-attr]  # copies lie elsewhere
        return flat, links  # type: ignore[return-value]

    def write_run(self, run: Run, flat: Flat, lanes: int, links: Links) -> None:
        """Write rows in ring order, as `prepare` returned them."""
        if is_dynamo_compiling():
            torch.compiler.disable(MirroredTable.write_run)(self, run, flat, lanes, links)  # type: ignore[no-untyped-call]
            return
        self.sides.detach_run(run, links)
        self.inner.write(run, self._kept(flat), lanes)
        self.sides.link_run(run, flat, links)
        self._rows = min(max(self._rows, run.start + run.rows), self.capacity)
        if not self._warned:
            self._look_at_size()

    def _kept(self, flat: Flat) -> Flat:
        addresses = None if flat.addresses is None else [flat.addresses[i] for i in self.kept]
        return Flat([flat.leaves[i] for i in self.kept], flat.batch, addresses)

    def _look_at_size(self) -> None:
        used = self.sides.used
        if used - self.lanes <= max(self._rows // 2, _FEW):
            return
        self._warned = True
        msg = (
            f"single_copy saves little: {used} of {self._rows} rows keep a next observation of their own, since it is "
            "not the observation of the row that follows. Rows of several environments in turns need ndim=2 (rows "
            "[time, environments, ...]); for data without order leave single_copy out"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)

    def edit(self, slots: Tensor, flat: Flat) -> None:
        """Replace the rows at `slots` (int64 `[n]`, of rows present); of duplicates the last one wins.

        Raises:
            StorageMemoryError: if there is no room for what must lie apart; nothing has changed.
        """
        if not slots.numel():
            return
        here, rows = last_of_each(slots.cpu(), torch.arange(slots.shape[0], device="cpu"))
        here, order = torch.sort(here)
        leaves = [self.inner.clear_of(x) for x in flat.leaves]
        if not torch.equal(rows[order], torch.arange(slots.shape[0], device="cpu")):
            leaves = [as_bits(x)[rows[order].to(x.device)].view(x.dtype) for x in leaves]
        leaves = [x.to(self.device) for x in leaves]
        obs, nexts = ([leaves[pair[side]] for pair in self.pairs] for side in (1, 0))
        agree = self._agrees(here, nexts, obs)
        before = self._followed_by(here)
        before = before[~torch.isin(before, here)]
        lacking = int((~agree & (self.sides.apart[here] < 0)).sum()) + before.shape[0]
        self.sides.reserve(lacking)
        self._detach(before)
        at = here.to(self.device)
        count = torch.arange(here.shape[0], device=self.device)
        self.inner.write(Picks(at, count, at), Flat([leaves[i] for i in self.kept], (here.shape[0],), None))
        self._relink(here, nexts, agree)

    def write_column(self, position: int, slots: Tensor, value: Tensor) -> None:
        """Write one field, `[n, *leaf.shape]`, at distinct slots.

        Raises:
            StorageMemoryError: if there is no room for what must lie apart; nothing has changed.
        """
        here = slots.cpu()
        if position in self._pair_of:
            nexts = self.sides.read(self._all, slots, None, pin=False)
            nexts[self._pair_of[position]] = value.to(self.device)
            self.relink(here, nexts)
            return
        if self._order[position] < len(self.pairs):
            before = self._followed_by(here)
            self.sides.reserve(before.shape[0])
            self._detach(before)
        self.inner.write_column(self._order[position], slots, value)

    def relink(self, slots: Tensor, nexts: Sequence[Tensor]) -> None:
        """Give rows (int64 `[n]`, on the CPU, distinct) the next observations `nexts`, `[n, *shape]` for each pair."""
        agree = self._agrees(slots, nexts, None)
        self.sides.reserve(int((~agree & (self.sides.apart[slots] < 0)).sum()))
        self._relink(slots, nexts, agree)

    def _followed_by(self, slots: Tensor) -> Tensor:
        """Return the rows whose next observation is the observation in one of the slots, int64 on the CPU."""
        before = (slots - self.lanes) % self.capacity
        return before[self.sides.apart[before] == FOLLOWS]

    def _detach(self, slots: Tensor) -> None:
        for part in self._blocks(slots.shape[0]):
            chosen = slots[part]
            self.sides.put(chosen, self.sides.read(self._all, chosen.to(self.device), None, pin=False))

    def _agrees(self, slots: Tensor, nexts: Sequence[Tensor], obs: Sequence[Tensor] | None) -> Tensor:
        """Return bool `[n]` on the CPU: whether next observations equal the observations that will follow them.

        Args:
            slots: int64 `[n]` on the CPU, sorted if there are observations.
            nexts: `[n, *shape]` for each pair.
            obs: observations that will be written to the slots; None leaves those that are there.
        """
        after = (slots + self.lanes) % self.capacity
        agree = self.sides.apart[after] != NOTHING
        for part in self._blocks(slots.shape[0]):
            at = after[part].to(self.device)
            follow = [as_bits(x).index_select(0, at) for x in self.inner.columns[: len(self.pairs)]]
            if obs is not None:
                found = torch.searchsorted(slots, after[part]).clamp_max(slots.shape[0] - 1)
                fresh = torch.nonzero(slots[found] == after[part]).view(-1)
                for old, new in zip(follow, obs, strict=True):
                    old[fresh.to(self.device)] = as_bits(new)[found[fresh].to(self.device)]
            agree[part] &= same_rows([as_bits(x[part]) for x in nexts], follow).cpu()
        return agree

    def _relink(self, slots: Tensor, nexts: Sequence[Tensor], agree: Tensor) -> None:
        self.sides.drop(slots[agree])
        alone = torch.nonzero(~agree).view(-1)
        for part in self._blocks(alone.shape[0]):
            at = alone[part].to(self.device)
            self.sides.put(slots[alone[part]], [as_bits(x).index_select(0, at).view(x.dtype) for x in nexts])

    def _blocks(self, rows: int) -> Iterator[slice]:
        size = max(1, _BLOCK_BYTES // sum(self.schema.leaves[pair[0]].nbytes for pair in self.pairs))
        return (slice(first, min(first + size, rows)) for first in range(0, rows, size))

    # -- state ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all rows."""
        self.sides.begin(0)
        self._rows = 0

    def apart_rows(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return which of the first `rows` rows keep a next observation apart (bool, on the CPU), and a copy of those.

        The copies, `[n, *shape]` for each pair, are in the order of their slots.
        """
        apart = self.sides.apart[:rows] >= 0
        slots = torch.nonzero(apart).view(-1).to(self.device)
        return apart, self.sides.read(self._all, slots, None, pin=False)

    def begin(self, apart: Tensor, nexts: Sequence[Tensor]) -> None:
        """Take the first rows as they lie in the kept columns for the rows present.

        Args:
            apart: bool `[rows]` on the CPU: rows whose next observation is not the observation that follows.
            nexts: theirs, `[n, *shape]` for each pair, in the order of their slots.
        """
        slots = torch.nonzero(apart).view(-1)
        self.sides.begin(apart.shape[0])
        self.sides.reserve(slots.shape[0])
        self.sides.put(slots, nexts)
        self._rows = apart.shape[0]

    def put_apart(self, slots: Tensor, at: Tensor) -> None:
        """Put the observations in the slots `at` apart, as next ones of the rows at `slots`; int64 on the CPU."""
        self.sides.reserve(slots.shape[0])
        here = at.to(self.device)
        columns = self.inner.columns[: len(self.pairs)]
        self.sides.put(slots, [as_bits(x).index_select(0, here).view(x.dtype) for x in columns])
