"""Transition and Sequence: a drawn row as it is, and windows of rows around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from ostinato.core.episodes.keys import Episodes, as_path
from ostinato.core.records import Plan
from ostinato.errors import OptionError
from ostinato.units.base import SampleUnit, check_count

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.core.episodes.keys import Key
    from ostinato.core.records import View

__all__ = ["Sequence", "SequenceUnit", "Transition"]

_BOUNDARIES = ("pad", "stop", "strict", "include_reset")


@final
class Transition(SampleUnit):
    """Each row drawn is one record of the batch: what a buffer does without a unit.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, Transition
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Transition(), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.sample().shape
        torch.Size([4])
    """

    plain = True

    def __repr__(self) -> str:
        """Class alone."""
        return "Transition()"

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Return the plan as it is."""
        return plan


@final
class Sequence(SampleUnit):
    """Each row drawn (the anchor) becomes a window of `burn_in + length + bootstrap` rows of its episode.

    The window holds `burn_in` rows before the anchor, `length` rows from the anchor on, and `bootstrap` rows after
    these, `dilation` rows apart. No window spans two episodes, nor the write cursor. The batch is flat,
    `[B * T, *shape]`; the info (and a TensorDict sample) has, `[B * T]` each: `validity_mask` (False where a row
    repeats the episode's first or last one, because the window reaches beyond), `learning_mask` (True for the `length`
    rows), `sequence_id`, `step_in_sequence` and `anchor_index`.

    In prioritized buffers the weight is that of the anchor, `index_generation` the stamp of each row, and
    `anchor_generation` that of the anchor; handing the sample to `update_tensordict_priority` or `update_priority`
    gives the anchor the largest priority of its valid rows.

    Burn-in for recurrent learners: Kapturowski et al. 2019, section 3.

    Args:
        length: rows to learn from.
        episode_boundary: what happens where the episode is too short after the anchor: "pad" repeats its last row
            (every row can be an anchor); "stop" moves the window back until it fits, as far as the episode goes;
            "strict" draws only anchors with all of the rows; "include_reset" goes on into the next episode of the
            lane, up to the newest row (rows of no episode are replaced by the anchor, and not valid).
        done_key: field that ends episodes; None is one endless episode. With the default, the buffer's `episodes` or
            the usual flags are taken.
        burn_in: rows before the anchor; those before the episode's start repeat its first row.
        bootstrap: rows after the ones to learn from.
        dilation: distance of the rows.

    Raises:
        OptionError: for numbers or boundaries out of range.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SequenceUnit
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=SequenceUnit(3), batch_size=2)
        >>> done = torch.zeros(10, dtype=torch.bool)
        >>> done[4] = done[9] = True
        >>> _ = rb.extend({"obs": torch.arange(10), "done": done})
        >>> rb.sample()["obs"].shape
        torch.Size([6])
    """

    notes = ("validity_mask", "learning_mask", "sequence_id", "step_in_sequence", "anchor_index")
    single = True
    options = ("length", "episode_boundary", "done_key", "burn_in", "bootstrap", "dilation")
    rank = 0

    def __init__(
        self,
        length: int,
        episode_boundary: str = "pad",
        done_key: Key | None = ("next", "done"),
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        self.length = check_count("length", length, 1)
        self.burn_in = check_count("burn_in", burn_in, 0)
        self.bootstrap = check_count("bootstrap", bootstrap, 0)
        self.dilation = check_count("dilation", dilation, 1)
        if episode_boundary not in _BOUNDARIES:
            msg = f"episode_boundary must be one of {list(_BOUNDARIES)}, got {episode_boundary!r}"
            raise OptionError(msg)
        self.episode_boundary = episode_boundary
        self.done_key = done_key
        if done_key is None:
            self.episodes = Episodes(end_key=[])
        else:
            self.episodes = Episodes() if as_path(done_key) == ("next", "done") else Episodes(end_key=as_path(done_key))

    def __repr__(self) -> str:
        """Options."""
        return (
            f"Sequence(length={self.length}, episode_boundary={self.episode_boundary!r}, done_key={self.done_key!r}, "
            f"burn_in={self.burn_in}, bootstrap={self.bootstrap}, dilation={self.dilation})"
        )

    @property
    def rows(self) -> int:
        """Rows of a window."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def _ahead(self) -> int:
        return self.dilation * (self.length + self.bootstrap - 1)

    @property
    def need(self) -> int:
        """Rows that an anchor must have from itself on: all of them if strict, else one."""
        return self._ahead + 1 if self.episode_boundary == "strict" else 1

    @property
    def span(self) -> int:
        """Rows from the first to the last of a window."""
        return self._ahead + 1 + self.dilation * self.burn_in

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Let each record become a window."""
        table, anchors = view.require_episodes(), plan.records
        if self.episode_boundary == "include_reset":
            rows, valid = self._in_lane(anchors, view, table.num_envs)
        else:
            if self.episode_boundary == "stop":
                short = (self._ahead - table.ahead(anchors)).clamp_(min=0)
                anchors = table.shift(anchors, -short)
            rows, valid = table.window(anchors, self.burn_in, self.length + self.bootstrap - 1, self.dilation)
        notes = self._notes(plan.records, valid)
        return Plan(plan.schema, plan.anchors, rows.view(-1), repeat=self.rows, notes=notes)

    def _in_lane(self, anchors: Tensor, view: View, lanes: int) -> tuple[Tensor, Tensor]:
        """Windows over whatever rows follow each other in a lane, from its oldest to its newest row."""
        capacity, steps = view.capacity, view.rows // lanes
        oldest = view.cursor if view.rows == capacity else 0
        offsets = torch.arange(-self.burn_in, self.length + self.bootstrap, device=anchors.device) * self.dilation
        at = ((anchors - oldest) % capacity // lanes)[:, None] + offsets
        inside = at.clamp(0, steps - 1)
        rows, valid = (inside * lanes + anchors[:, None] % lanes + oldest) % capacity, inside == at
        table = view.require_episodes()
        if table.masked:  # rows of no episode are in no window: the anchor takes their place
            known = table.ahead(rows.view(-1)).view(rows.shape) >= 0
            rows, valid = torch.where(known, rows, anchors[:, None]), valid & known
        return rows, valid

    def _notes(self, anchors: Tensor, valid: Tensor) -> dict[str, Tensor]:
        count, rows = valid.shape
        steps = torch.arange(rows, device=anchors.device)
        learning = (steps >= self.burn_in) & (steps < self.burn_in + self.length)
        return {
            "validity_mask": valid.reshape(-1),
            "learning_mask": learning.repeat(count),
            "sequence_id": torch.arange(count, device=anchors.device).repeat_interleave(rows),
            "step_in_sequence": steps.repeat(count),
            "anchor_index": anchors.repeat_interleave(rows),
        }


SequenceUnit = Sequence
"""The name at the root of the package: `Sequence` there would hide `typing.Sequence` after `import *`."""
