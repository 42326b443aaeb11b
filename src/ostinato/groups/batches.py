"""`TokenBudget`: leased groups as batches of tokens for data-parallel ranks."""

from __future__ import annotations

import math
import threading
import weakref
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core.options import check_choice, check_integer
from ostinato.errors import OptionError, SchemaError
from ostinato.groups.records import PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.groups.records import Lease

_FORMS = ("packed", "left", "right", "nested", "list")
_EVEN = 0.01
"""Rows are made more even where the largest is above their mean by more than this."""


@final
class TokenBudget:
    """Divides the responses of a lease into micro-batches of one row for each rank, none with too many tokens.

    The rows of a micro-batch have similar cost, so that no rank waits long for another, and none is empty. There are as
    few micro-batches as the largest-first rule reaches. The result depends on the lease and these options alone: ranks
    that lease with the same `id` each take their own rows, and a run that is started again continues with any of them.

    Args:
        max_tokens: Most tokens of a row, padding not counted.
        ranks: Rows of a micro-batch.
        balance: Cost of a response: its `tokens`, or for `attention` their square.
        split: Whether the responses of a group may be in several rows. They are in one otherwise.
        form: How the values that exist for each token are returned, of `S` responses with `N` tokens together:
            `packed`, one behind the other `[N, *]`; `left` or `right`, padded there `[S, longest, *]`; `nested`, a
            jagged tensor `[S, *]`; `list`, a tensor of each response.
        padding: Value of `tokens` in the padding; other fields have 0 there.

    Raises:
        OptionError: An option is out of its range.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        ranks: int = 1,
        balance: Literal["tokens", "attention"] = "tokens",
        split: bool = False,
        form: Literal["packed", "left", "right", "nested", "list"] = "packed",
        padding: int = 0,
    ) -> None:
        self._max_tokens = check_integer("max_tokens", max_tokens, 1)
        self._ranks = check_integer("ranks", ranks, 1)
        self._power = 2 if check_choice("balance", balance, ("tokens", "attention")) == "attention" else 1
        self._split = split
        self._form = check_choice("form", form, _FORMS)
        self._padding = check_integer("padding", padding)
        self._memory = _Memory()

    def plan(self, lease: Lease) -> list[list[list[int]]]:
        """Return the responses in each row: `plan[micro-batch][rank]` numbers them over all groups of the lease.

        Raises:
            OptionError: A response, or a group that may not be split, has more than `max_tokens` tokens; or there are
                too few of them for the ranks.
        """
        return self._plan(_Source(lease))

    def batches(self, lease: Lease) -> list[list[dict[str, Any]]]:
        """Return the rows of all ranks: `batches[micro-batch][rank]`.

        A row is a dict with copies of the fields that the responses have. Those with a value for each token are in the
        form that was asked for; numbers are a tensor `[S]`, and all others a list. The tensors of all rows share
        memory, which a later call uses again when none of them is left. To the fields come

        - `group_index` and `response_index`: int64 `[S]`, the group in the lease and the response in the group;
        - `cu_seqlens`: int32 `[S + 1]`, where each response begins and the last one ends, if packed;
        - `max_seqlen`: tokens of the longest response;
        - `positions`: int64, number of each token in its response, in the form of `tokens`;
        - `attention_mask`: bool `[S, longest]`, False in the padding, if padded.

        Raises:
            OptionError: As `plan`.
            SchemaError: A response lacks a field that another one has.
        """
        source = _Source(lease)
        made = self._made(source, list(chain.from_iterable(self._plan(source))))
        return [made[start : start + self._ranks] for start in range(0, len(made), self._ranks)]

    def of_rank(self, lease: Lease, rank: int) -> list[dict[str, Any]]:
        """Return the rows of one rank, one in each micro-batch; raises as `batches`."""
        if check_integer("rank", rank, 0) >= self._ranks:
            msg = f"rank must be below ranks, which is {self._ranks}, got {rank}"
            raise OptionError(msg)
        source = _Source(lease)
        return self._made(source, [rows[rank] for rows in self._plan(source)])

    def _plan(self, source: _Source) -> list[list[list[int]]]:
        owners = (np.arange(len(source.lengths)) if self._split else source.group_index).tolist()
        members: list[list[int]] = [[] for _ in (owners if self._split else source.lease.groups)]
        for number, owner in enumerate(owners):
            members[owner].append(number)
        lengths = source.lengths.tolist()
        tokens = [sum(lengths[number] for number in each) for each in members]
        cost = [sum(lengths[number] ** self._power for number in each) for each in members]
        self._check(source, members, tokens)
        items = _Items(tokens, cost, self._max_tokens)
        totals = [0] * self._ranks
        plan = []
        for batch in self._batches(items):
            ranks = sorted(
                range(self._ranks), key=totals.__getitem__
            )  # the largest row to the one with the least so far
            placed = dict(zip(ranks, sorted(batch, key=items.load, reverse=True), strict=True))
            totals = [total + items.load(placed[rank]) for rank, total in enumerate(totals)]
            plan.append(
                [sorted(chain.from_iterable(members[each] for each in row)) for _, row in sorted(placed.items())]
            )
        return plan

    def _check(self, source: _Source, members: list[list[int]], tokens: list[int]) -> None:
        """Raise if a response or group does not fit into a row."""
        for number in np.flatnonzero(source.lengths > self._max_tokens).tolist():
            msg = (
                f"response {source.responses[number].id!r} of group {source.group_of(number)!r} has "
                f"{source.lengths[number]} tokens, but max_tokens is {self._max_tokens}: drop the group or raise it"
            )
            raise OptionError(msg)
        for each, total in zip(members, tokens, strict=True):
            if total > self._max_tokens:
                lengths = ", ".join(map(str, source.lengths[each]))
                msg = (
                    f"group {source.group_of(each[0])!r} has {total} tokens in responses of {lengths}, but max_tokens "
                    f"is {self._max_tokens}: give split=True or raise it"
                )
                raise OptionError(msg)

    def _batches(self, items: _Items) -> list[list[list[int]]]:
        """Divide items into the fewest micro-batches of a row for each rank."""
        filled, total = sum(map(bool, items.tokens)), sum(items.tokens)
        for count in range(max(1, -(-total // (self._max_tokens * self._ranks))), filled // self._ranks + 1):
            rows = [items.fill(items.cost, 1, count * self._ranks)]
            if self._power > 1:  # long responses may need others of their kind beside them, or there is little room
                rows += [items.fill(items.cost, count, self._ranks), items.fill(items.tokens, 1, count * self._ranks)]
            plans = [items.batches(each, self._ranks) for each in rows if each]
            if plans:
                return min(plans, key=items.duration)
        kind, more = ("responses", "") if self._split else ("groups", ", or give split=True")
        msg = (
            f"{filled} {kind} with {total} tokens do not fill rows of at most {self._max_tokens} tokens for each of "
            f"{self._ranks} ranks: lease more groups or raise max_tokens{more}"
        )
        raise OptionError(msg)

    def _made(self, source: _Source, rows: list[list[int]]) -> list[dict[str, Any]]:
        """Make the tensors of rows: of all at once, which are then divided."""
        layout = _Layout(self._form, self._padding, source.lengths, rows, self._memory)
        made = {name: source.gather(name, values, layout) for name, values in source.fields().items()}
        made["group_index"] = layout.of_responses(torch.from_numpy(source.group_index[layout.order]))
        made["response_index"] = layout.of_responses(torch.from_numpy(source.response_index[layout.order]))
        made["max_seqlen"] = np.maximum.reduceat(layout.lengths, layout.starts).tolist()
        steps = torch.arange(max(made["max_seqlen"]), dtype=torch.int64, device="cpu")
        until = {length: steps[:length] for length in np.unique(layout.lengths).tolist()}
        made["positions"] = layout.of_tokens([until[length] for length in layout.lengths.tolist()])
        return [
            dict(zip(made, values, strict=True)) | layout.more(n)
            for n, values in enumerate(zip(*made.values(), strict=True))
        ]


@final
class _Source:
    """The responses of a lease, numbered over all groups."""

    def __init__(self, lease: Lease) -> None:
        """Number the responses."""
        self.lease = lease
        self.responses = [response for group in lease.groups for response in group.responses]
        self.lengths = np.array([response.fields["tokens"].numel() for response in self.responses], np.int64)
        sizes = [len(group.responses) for group in lease.groups]
        self.group_index = np.repeat(np.arange(len(sizes)), sizes)
        self.response_index = np.concatenate([np.arange(0), *map(np.arange, sizes)])

    def group_of(self, number: int) -> str:
        """Return the id of the group of a response."""
        return self.lease.groups[int(self.group_index[number])].id

    def fields(self) -> dict[str, list[Any]]:
        """Return the values of all responses, by field.

        Raises:
            SchemaError: A response lacks a field that another one has.
        """
        fields = [response.fields for response in self.responses]
        if any(each.keys() != fields[0].keys() for each in fields):
            names = dict.fromkeys(chain.from_iterable(fields))
            number, name = next((n, name) for n, each in enumerate(fields) for name in names if name not in each)
            response = self.responses[number].id
            msg = f"response {response!r} of group {self.group_of(number)!r} has no {name!r}, others have"
            raise SchemaError(msg)
        return {name: [each[name] for each in fields] for name in fields[0]}

    def gather(self, name: str, values: list[Any], layout: _Layout) -> Sequence[Any]:
        """Return the values of each row, by what a field is in all responses."""
        kinds = set(map(type, values))
        if kinds == {dict} and all(value.keys() == values[0].keys() for value in values):
            made = {key: self.gather(f"{name} {key}", [value[key] for value in values], layout) for key in values[0]}
            return [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
        lengths = self.lengths.tolist()
        if name == "version" and kinds == {int, Tensor}:
            pairs, kinds = zip(values, lengths, strict=True), {Tensor}
            values = [torch.as_tensor(value, dtype=torch.int64, device="cpu").expand(length) for value, length in pairs]
        chosen = [values[number] for number in layout.order.tolist()]
        if kinds == {Tensor}:
            pairs = zip(values, lengths, strict=True)
            if name in PER_TOKEN or all(value.shape[:1] == (length,) for value, length in pairs):
                return layout.of_tokens(chosen, padding=name == "tokens")
            if all(value.shape == values[0].shape for value in values):
                return layout.of_responses(torch.stack(chosen))
        if all(issubclass(kind, int | float | np.number | np.bool_) for kind in kinds):
            numbers = np.array(values)[layout.order]
            return layout.of_responses(
                torch.from_numpy(numbers.astype(np.float32) if numbers.dtype == float else numbers)
            )
        return [chosen[start : start + count] for start, count in zip(layout.starts, layout.counts, strict=True)]


@final
class _Memory:
    """Memory of tensors that are gone, for later ones: the system provides new memory slowly."""

    def __init__(self) -> None:
        """Start without memory."""
        self._lock = threading.Lock()
        self._blocks: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
        """Each with a reference to the part that a tensor has."""

    def joined(self, values: list[Tensor], count: int) -> Tensor:
        """Return tensors that have so many rows together one behind the other."""
        if len({value.dtype for value in values}) > 1:
            return torch.cat(values)
        first = values[0]
        shape = (count, *first.shape[1:])
        part = self._part(math.prod(shape) * first.itemsize)
        return torch.cat(values, out=torch.from_numpy(part).view(first.dtype).view(shape))

    def _part(self, nbytes: int) -> np.ndarray:
        with self._lock:
            free = [block for block, part in self._blocks if part() is None and nbytes <= block.nbytes <= 4 * nbytes]
            block = min(free, key=len) if free else np.empty(nbytes + nbytes // 4, np.uint8)
            self._blocks = [each for each in self._blocks if each[0] is not block and (free or each[1]() is not None)]
            part = block[:nbytes]
            self._blocks.append((block, weakref.ref(part)))
            return part


@final
class _Layout:
    """The responses of rows, one behind the other."""

    def __init__(self, form: str, padding: int, lengths: np.ndarray, rows: list[list[int]], memory: _Memory) -> None:
        """Take the form of values of tokens, the tokens of each response and the responses of each row."""
        self.form, self.padding, self.memory = form, padding, memory
        self.counts = [len(row) for row in rows]
        self.order = np.fromiter(chain.from_iterable(rows), np.int64)
        self.lengths = lengths[self.order]
        self.starts = np.cumsum([0, *self.counts[:-1]])
        self.tokens = np.add.reduceat(self.lengths, self.starts).tolist()
        ends = np.insert(self.lengths, self.starts, 0).cumsum() - np.repeat(
            np.cumsum([0, *self.tokens[:-1]]), np.add(self.counts, 1)
        )
        self.ends = torch.split_with_sizes(
            torch.from_numpy(ends.astype(np.int32)), [count + 1 for count in self.counts]
        )
        """Where the responses of each row begin, and where the last one ends."""
        self.masks = [self._mask(each.diff()) for each in self.ends] if form in {"left", "right"} else []
        """For each row, True where a padded tensor has a token."""

    def _mask(self, lengths: Tensor) -> Tensor:
        steps, ends = torch.arange(int(lengths.max()), dtype=torch.int64, device="cpu"), lengths[:, None]
        return steps >= len(steps) - ends if self.form == "left" else steps < ends

    def of_responses(self, values: Tensor) -> Sequence[Tensor]:
        """Divide values of responses into those of rows."""
        return torch.split_with_sizes(values, self.counts)

    def of_tokens(self, values: list[Tensor], *, padding: bool = False) -> Sequence[Any]:
        """Join values of tokens to those of rows, in the form that was asked for, with `padding` or 0 between them."""
        packed = torch.split_with_sizes(self.memory.joined(values, sum(self.tokens)), self.tokens)
        if self.form == "packed":
            return packed
        return [self._formed(number, each, self.padding if padding else 0) for number, each in enumerate(packed)]

    def _formed(self, number: int, values: Tensor, padding: int) -> Any:
        if self.form == "nested":
            return torch.nested.nested_tensor_from_jagged(values, self.ends[number].long())
        if self.form == "list":
            return list(torch.split_with_sizes(values, self.ends[number].diff().tolist()))
        mask = self.masks[number]
        padded = values.new_full((*mask.shape, *values.shape[1:]), padding)
        padded[mask] = values
        return padded

    def more(self, number: int) -> dict[str, Any]:
        """Return what a row has in this form only."""
        if self.form == "packed":
            return {"cu_seqlens": self.ends[number]}
        return {"attention_mask": self.masks[number]} if self.masks else {}


# -- rows -------------------------------------------------------------------------------------------------------------


class _Items(NamedTuple):
    """What is divided into rows: groups, or responses.

    Libraries that divide numbers into even sums (Karmarkar-Karp) have no bound on another sum, as the tokens of a row
    are when its cost is to be even.

    Attributes:
        tokens: Tokens of each item.
        cost: Cost of each item.
        most: Most tokens of a row.
    """

    tokens: list[int]
    cost: list[int]
    most: int

    def load(self, row: list[int]) -> int:
        """Return the cost of a row."""
        return sum([self.cost[item] for item in row])

    def fill(self, weights: list[int], blocks: int, rows: int) -> list[list[int]] | None:
        """Place items into blocks of rows, the largest first; None if one finds no row, or a row stays empty."""
        left = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
        filled: list[list[int]] = []
        for more in reversed(range(blocks)):
            share = sum(self.tokens[item] for item in left) / (more + 1) if more else math.inf
            members, left = self._place(left, weights, rows, share)
            filled += members
        return None if left or not all(any(self.tokens[item] for item in row) for row in filled) else filled

    def _place(
        self, items: list[int], weights: list[int], rows: int, share: float
    ) -> tuple[list[list[int]], list[int]]:
        """Place each item in the row of least weight that has room until they have a number of tokens."""
        heap = [(0, row) for row in range(rows)]
        members: list[list[int]] = [[] for _ in range(rows)]
        room, left = [self.most] * rows, list[int]()
        for number, item in enumerate(items):
            if share <= 0:
                left += items[number:]
                break
            full = []
            while heap and room[heap[0][1]] < self.tokens[item]:
                full.append(heappop(heap))
            if heap:
                weight, row = heap[0]
                heapreplace(heap, (weight + weights[item], row))
                room[row] -= self.tokens[item]
                share -= self.tokens[item]
                members[row].append(item)
            else:
                left.append(item)
            for each in full:
                heappush(heap, each)
        return members, left

    def batches(self, rows: list[list[int]], ranks: int) -> list[list[list[int]]]:
        """Divide rows into micro-batches of similar ones."""
        rows = sorted(rows, key=self.load, reverse=True)
        batches = [rows[start : start + ranks] for start in range(0, len(rows), ranks)]
        for batch in batches:
            self._make_even(batch)
        return batches

    def duration(self, batches: list[list[list[int]]]) -> int:
        """Return the cost of the largest rows of all micro-batches."""
        return sum(max(map(self.load, batch)) for batch in batches)

    def _make_even(self, rows: list[list[int]]) -> None:
        """Exchange items between the row of greatest cost and another one while that lowers the greater of both."""
        loads = list(map(self.load, rows))
        while max(loads) * len(rows) > (1 + _EVEN) * sum(loads):
            largest = loads.index(max(loads))
            for other in sorted(range(len(rows)), key=loads.__getitem__)[:-1]:
                if other != largest and self._exchange(rows[largest], rows[other]):
                    break
            else:
                return
            loads = list(map(self.load, rows))

    def _exchange(self, a: list[int], b: list[int]) -> bool:
        """Exchange the items of two rows, or move one from `a` to `b`, that make their costs most even."""

        def differences(values: list[int]) -> np.ndarray:
            return np.subtract.outer([values[item] for item in a], [*(values[item] for item in b), 0])

        moved, shifted = differences(self.cost), differences(self.tokens)
        after = np.maximum(self.load(a) - moved, self.load(b) + moved)
        most, least = (self.most - sum(self.tokens[item] for item in row) for row in (b, a))
        after[(shifted > most) | (-shifted > least)] = self.load(a)
        first, second = np.unravel_index(after.argmin(), after.shape)
        if after[first, second] >= self.load(a):
            return False
        given = a.pop(int(first))
        if second < len(b):
            a.append(b.pop(int(second)))
        b.append(given)
        return True
