"""FrameStack: stacks of the last frames, made from single frames when they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, final

import torch

from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import show_path
from ostinato.core.options import check_choice, check_integer
from ostinato.core.records import Column, Request, flags_at, next_path
from ostinato.errors import OptionError, SchemaError
from ostinato.units.base import SampleUnit, episodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import Plan, View

_Seen: TypeAlias = "dict[tuple[int, bool], tuple[Tensor, Tensor]]"


@final
class FrameStack(SampleUnit):
    """Turns each observation drawn into a stack of `k` frames: the frames before it, oldest first, and itself.

    Rows hold single frames, so frames are stored once. The field becomes `[B, k, *shape]`. If rows have its `next`
    field, that becomes the stack that ends with the next frame. No stack contains frames of two episodes: before the
    first row of an episode the first frame is repeated, or the stack is filled with zeros. If rows of the episode were
    overwritten, the same applies to its first row present.

    Args:
        k: frames, at least 1.
        keys: fields to stack, each with its `next` field (`("next", *key)`, or `next_` before its last name) if rows
            have it.
        padding: "repeat" or "zeros".
        merge: merge the frames with the first dimension of a frame: `[B, k * C, H, W]` for frames `[C, H, W]`.
        done_key: field that ends episodes; None: the buffer's `episodes`, or the usual flags.

    Raises:
        OptionError: for another padding, no keys, or `k` below 1; in a sample, for a field that another unit computes.

    Examples:
        >>> import torch
        >>> from ostinato import FrameStack, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=FrameStack(4, ["obs"]), batch_size=2)
        >>> done = torch.tensor([False] * 5)
        >>> _ = rb.extend({"obs": torch.zeros(5, 8, 8), "next_obs": torch.zeros(5, 8, 8), "done": done})
        >>> batch = rb.sample()
        >>> batch["obs"].shape, batch["next_obs"].shape
        (torch.Size([2, 4, 8, 8]), torch.Size([2, 4, 8, 8]))
    """

    options = ("k", "keys", "padding", "merge")
    rank = 3

    def __init__(
        self,
        k: int,
        keys: Sequence[Key],
        *,
        padding: str = "repeat",
        merge: bool = False,
        done_key: Key | None = None,
    ) -> None:
        self.k = check_integer("k", k, 1, OptionError)
        self.keys = tuple(as_path(key) for key in ([keys] if isinstance(keys, str) else keys))
        if not self.keys:
            msg = "keys must name at least one field to stack, got none"
            raise OptionError(msg)
        self.padding = check_choice("padding", padding, ("repeat", "zeros"))
        self.merge = bool(merge)
        self.episodes = episodes_of(done_key)

    def __repr__(self) -> str:
        """Options."""
        keys = [key[0] if len(key) == 1 else key for key in self.keys]
        return f"FrameStack(k={self.k}, keys={keys}, padding={self.padding!r}, merge={self.merge})"

    @property
    def joins(self) -> bool:
        """Whether a window has several rows."""
        return self.span > 1

    @property
    def span(self) -> int:
        """Rows of a stack."""
        return self.k

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Read the frames before each frame as well."""
        table, columns = view.require_episodes(), dict(plan.changed)
        seen: _Seen = {}
        for frame, after in self._fields(plan):
            plan.require_read(frame, after)
            columns[frame] = self._stack(plan, frame, table, seen)
            if after is not None:
                columns[after] = self._stack_next(plan, frame, after, table, seen)
        return plan._replace(changed=columns)

    def _find(self, plan: Plan) -> list[tuple[int, int | None]]:
        """Return the positions of the fields to stack, each with that of its `next` field, for the rows' schema."""
        leaves = plan.schema.leaves
        known = {leaf.path for leaf in leaves}
        afters = {path: next_path(path, known) for path in self.keys}
        found = []
        for path in self.keys:
            if path in afters.values():
                continue  # it is the `next` field of another one
            frame = plan.require(path, "frames to stack")
            after = plan.find(afters[path])
            if self.merge and not leaves[frame].shape:
                msg = f"merge=True needs frames with a first dimension, {show_path(path)} has none: leave merge out"
                raise SchemaError(msg)
            if after is not None:
                plan.require_alike(frame, after)
            found.append((frame, after))
        return found

    def _stack(self, plan: Plan, frame: int, table: EpisodeTable, seen: _Seen) -> Column:
        rows, valid = self._rows_of(plan.slots_of(frame), table, seen, then=False)
        return self._column(Request(frame, rows), valid)

    def _stack_next(self, plan: Plan, frame: int, after: int, table: EpisodeTable, seen: _Seen) -> Column:
        """Return the stack that ends with the next frame: `k - 1` frames up to the row, and the frame after it."""
        ends = plan.slots_of(after)
        if self.k == 1:
            return self._column(Request(after, ends), torch.ones_like(ends, dtype=torch.bool)[:, None])
        rows, valid = self._rows_of(ends, table, seen, then=True)
        last = flags_at(self.k - 1, self.k, rows.shape[0], rows.device)
        return self._column(Request(frame, rows), valid)._replace(other=after, pick=last)

    def _rows_of(self, slots: Tensor, table: EpisodeTable, seen: _Seen, *, then: bool) -> tuple[Tensor, Tensor]:
        """Return the rows of stacks; fields with the same last rows share them."""
        key = (id(slots), then)
        if key not in seen:
            seen[key] = table.stack(slots, self.k, then=then)
        return seen[key]

    def _column(self, request: Request, valid: Tensor) -> Column:
        blank = ~valid if self.padding == "zeros" else None
        return Column(request, (self.k,), None, blank, self.merge)
