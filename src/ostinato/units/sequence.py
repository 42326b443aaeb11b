"""Transition and Sequence: the drawn row itself, and windows of rows around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import torch

from ostinato.core.episodes.tracker import Episodes, EpisodeTracker, TrackedRows, as_path
from ostinato.core.index import as_index, read_slots
from ostinato.core.options import check_choice, check_integer
from ostinato.core.records import Plan
from ostinato.core.ring import Ring
from ostinato.errors import KindError, OptionError
from ostinato.units.base import SampleUnit, episodes_of

if TYPE_CHECKING:
    from torch import Tensor

    Index: TypeAlias = Tensor | tuple[Tensor, ...]

    from ostinato.core.episodes.table import EpisodeTable
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import View

_BOUNDARIES = ("pad", "stop", "strict", "include_reset")


@final
class Transition(SampleUnit):
    """Each row drawn is one record of the batch, as in a buffer without a unit.

    Examples:
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

    def expand(self, plan: Any, view: Any, dice: Any) -> Any:  # noqa: ARG002
        """Return the plan unchanged; of `expand(index, info, storage)`, index and info."""
        return plan if isinstance(plan, Plan) else (plan, view)


class BareRows(TrackedRows, Protocol):
    """A storage as `Sequence.expand` reads it without a buffer; every storage of tensors is one."""

    @property
    def ndim(self) -> int:
        """Dimensions of an index: 1, or 2 for `(step, environment)`."""


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

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SequenceUnit
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=SequenceUnit(3), batch_size=2)
        >>> done = torch.zeros(10, dtype=torch.bool)
        >>> done[4] = done[9] = True
        >>> _ = rb.extend({"obs": torch.arange(10), "done": done})
        >>> rb.sample()["obs"].shape
        torch.Size([6])
    """

    episodes: Episodes
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
        self.length = check_integer("length", length, 1, OptionError, below=2**30)
        self.burn_in = check_integer("burn_in", burn_in, 0, OptionError, below=2**30)
        self.bootstrap = check_integer("bootstrap", bootstrap, 0, OptionError, below=2**30)
        self.dilation = check_integer("dilation", dilation, 1, OptionError, below=2**30)
        self.episode_boundary = check_choice("episode_boundary", episode_boundary, _BOUNDARIES)
        self.done_key = done_key if done_key is None or isinstance(done_key, str) else tuple(done_key)
        usual = done_key is not None and as_path(done_key) == ("next", "done")
        self.episodes = Episodes(end_key=[]) if done_key is None else episodes_of(None if usual else done_key)

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
    def joins(self) -> bool:
        """Whether a window has several rows."""
        return self.span > 1

    @property
    def span(self) -> int:
        """Rows from the first to the last row of a window."""
        return self._ahead + 1 + self.dilation * self.burn_in

    def expand(self, plan: Any, view: Any, dice: Any) -> Any:
        """Turn each record into a window.

        Without a buffer, `expand(index, info, storage)` returns the index of the windows' rows, int64 `[B * T]`, or a
        pair of these with `ndim=2`, and the info: tensors `[B, ...]` are repeated for each row of a window, others
        stay as they are, and the five fields of a sample are added. Cost: O(rows of the storage), for the episodes.

        Args:
            plan: of the rows drawn; or the index of the anchors, int64 `[B]`, with `ndim=2` a pair or `[B, 2]`.
            view: of the buffer; or the info of the anchors.
            dice: not used; or the storage, which no buffer writes at the same time.

        Raises:
            KindError: if the storage has no fields.
        """
        return self._window(plan, view) if isinstance(plan, Plan) else self._expand_bare(plan, view, dice)

    def _expand_bare(self, index: Index, info: dict[Any, Any], storage: BareRows) -> tuple[Index, dict[Any, Any]]:
        schema = storage.schema
        if schema is None:
            msg = (
                f"Sequence requires a TensorDict-backed TensorStorage, whose rows tell where episodes end, got "
                f"{type(storage).__name__} with {len(storage)} rows: use LazyTensorStorage, and write rows first"
            )
            raise KindError(msg)
        anchors, _ = read_slots(index, storage)
        ring = Ring(storage.capacity, storage.device)
        ring.take_over(len(storage), storage.cursor)
        episodes, _ = EpisodeTracker(self.episodes, need=1, span=1).view(storage)
        plan = self._window(Plan(schema, anchors, anchors), ring.view()._replace(episodes=episodes))

        def per_record(value: Any) -> Any:
            each = isinstance(value, torch.Tensor) and value.ndim > 0
            return value.repeat_interleave(self.rows, dim=0) if each else value

        found = {key: per_record(value) for key, value in info.items()} | plan.notes
        if storage.ndim > 1:
            found["anchor_index"] = per_record(torch.stack(tuple(as_index(anchors, storage)), -1))
        return as_index(plan.records, storage), found

    def _window(self, plan: Plan, view: View) -> Plan:
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
