"""Transition and Sequence: the drawn row itself, and windows of rows around it."""

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
    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.records import View

__all__ = ["Sequence", "SequenceUnit", "Transition"]

_BOUNDARIES = ("pad", "stop", "strict", "include_reset")


@final
class Transition(SampleUnit):
    """Each row drawn is one record of the batch, as in a buffer without a unit.

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
        """The class."""
        return "Transition()"

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Return the plan unchanged."""
        return plan


@final
class Sequence(SampleUnit):
    """Turns each row drawn, the anchor, into a window of `burn_in + length + bootstrap` rows of its episode.

    The window has `burn_in` rows before the anchor, `length` rows from the anchor on, and `bootstrap` rows after these,
    `dilation` rows apart. No window contains rows of two episodes, or continues past the newest row. The batch is flat,
    `[B * T, *shape]`. The info and a TensorDict sample have five more fields, `[B * T]` each: `validity_mask` (False
    where the window reaches out of the episode, and its first or last row is repeated), `learning_mask` (True for the
    `length` rows), `sequence_id`, `step_in_sequence` and `anchor_index`.

    In prioritized buffers the weight is that of the anchor, `index_generation` has the generation of each row, and
    `anchor_generation` that of the anchor. `update_tensordict_priority` or `update_priority` with a sample gives the
    anchor the largest priority of its valid rows.

    Burn-in for recurrent learners: Kapturowski et al. 2019, section 3.

    Args:
        length: rows to learn from.
        episode_boundary: what to do if the episode is too short after the anchor. "pad" repeats its last row, so that
            every row can be an anchor. "stop" moves the window back until it fits, but not before the first row of the
            episode. "strict" draws only anchors with all of the rows. "include_reset" continues with the next episode
            of the environment, up to the newest row; rows of no episode are replaced by the anchor, and not valid.
        done_key: field that ends episodes; None: all rows are one episode. With the default, the buffer's `episodes`
            are used, or the usual flags.
        burn_in: rows before the anchor; before the start of the episode its first row is repeated.
        bootstrap: rows after the rows to learn from.
        dilation: distance between the rows.

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
        """Rows that an anchor must have in its episode, counted from itself: all of them with "strict", else one."""
        return self._ahead + 1 if self.episode_boundary == "strict" else 1

    @property
    def span(self) -> int:
        """Rows from the first to the last row of a window."""
        return self._ahead + 1 + self.dilation * self.burn_in

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:  # noqa: ARG002
        """Turn each record into a window."""
        table, anchors = view.require_episodes(), plan.records
        if self.episode_boundary == "include_reset":
            rows, valid = self._in_environment(anchors, view, table)
        else:
            if self.episode_boundary == "stop":
                short = (self._ahead - table.ahead(anchors)).clamp_(min=0)
                anchors = table.shift(anchors, -short)
            rows, valid = table.window(anchors, self.burn_in, self.length + self.bootstrap - 1, self.dilation)
        notes = self._notes(plan.records, valid)
        return Plan(plan.schema, plan.anchors, rows.view(-1), repeat=self.rows, notes=notes)

    def _in_environment(self, anchors: Tensor, view: View, table: EpisodeTable) -> tuple[Tensor, Tensor]:
        """Return windows over consecutive rows of an environment, whatever their episodes."""
        capacity, num_envs = view.capacity, table.num_envs
        oldest = view.cursor if view.rows == capacity else 0
        offsets = torch.arange(-self.burn_in, self.length + self.bootstrap, device=anchors.device) * self.dilation
        at = ((anchors - oldest) % capacity // num_envs)[:, None] + offsets
        inside = at.clamp(0, view.rows // num_envs - 1)
        rows, valid = (inside * num_envs + anchors[:, None] % num_envs + oldest) % capacity, inside == at
        if table.masked:  # rows of no episode are in no window
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
