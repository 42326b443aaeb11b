"""Hindsight: relabels rows with goals that were achieved later in the episode (Andrychowicz et al. 2017)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.episodes.tracker import as_path
from ostinato.core.options import check_choice, check_real
from ostinato.core.records import Column, Request, next_path
from ostinato.core.rows import map_leaves
from ostinato.errors import KindError, OptionError, SchemaError
from ostinato.units.base import SampleUnit, episodes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import Plan, View


class HindsightStrategy(StrEnum):
    """Which achieved goal replaces the goal of a row; each is equal to its name as text. See `Hindsight`."""

    FUTURE = "future"
    """One achieved at this step or later in the episode."""
    FINAL = "final"
    """The last one of the episode."""
    EPISODE = "episode"
    """Any one of the episode."""
    RANDOM = "random"
    """Any one in the buffer."""


_STRATEGIES = tuple(strategy.value for strategy in HindsightStrategy)


class _Fields(NamedTuple):
    """Positions of the fields; None if rows have no such `next` field."""

    goal: int
    achieved: int
    next_goal: int | None
    next_achieved: int | None


@final
class Hindsight(SampleUnit):
    """Relabels rows at random: replaces the goal by one that was achieved later, and computes the reward again.

    Hindsight experience replay (Andrychowicz et al. 2017, sections 3.2 and 4.5). A relabelled row `t` gets the goal
    that was achieved after step `u` of its own episode. With T rows in the episode so far:

    - "future": `u` is uniform in `[t, T)`
    - "final": `u = T - 1`
    - "episode": `u` is uniform over the rows of the episode that are present
    - "random": `u` is uniform over all rows of the buffer

    If rows have no `next` field of the achieved goal, that of the following row is used: "future" is then `u` in
    `(t, T)`, and the last row of an episode keeps its goal. No goal comes from another episode (except with "random"),
    or from a row that was overwritten.

    With `next_goals=False` the new goal is the one that was achieved before step `u`, for all strategies, also where
    rows have a `next` field of it. The batch has the field `relabelled`, bool `[B]`.

    Args:
        reward_fn: gets the batch with its new goals, nested like the rows that were added, and returns the rewards
            `[B]` or `[B, 1]`; those of relabelled rows are used. It may run in the prefetch thread.
        her_ratio: probability of relabelling a row, in [0, 1]; 0.8 is the paper's k = 4.
        strategy: see above; a `HindsightStrategy` or its name.
        goal_key: field of the goal; its `next` field, if rows have it, gets the new goal as well.
        achieved_goal_key: field of the goal achieved before the step; its `next` field has the goal achieved after it.
        reward_key: field of the reward; None: `("next", "reward")` if rows have it, else `reward`.
        done_key: field that ends episodes; None: the buffer's `episodes`, or the usual flags.
        exact_ratio: relabel the first `int(B * her_ratio)` rows of every batch, instead of each row with a probability.
            `reward_fn` then gets these rows alone, and is not called if there are none.
        next_goals: take goals from the `next` field of the achieved goal, if rows have it.

    Raises:
        OptionError: for numbers or strategies out of range.
        KindError: if `reward_fn` is not callable.

    Examples:
        >>> import torch
        >>> from ostinato import Hindsight, LazyTensorStorage, ReplayBuffer
        >>> def reward(batch):
        ...     return (batch["next_achieved_goal"] == batch["desired_goal"]).float()
        >>> unit = Hindsight(reward, her_ratio=1.0, strategy="final")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=unit, batch_size=2)
        >>> place = torch.arange(4.0)
        >>> rows = {"achieved_goal": place, "next_achieved_goal": place + 1, "desired_goal": torch.full((4,), 9.0)}
        >>> _ = rb.extend({**rows, "reward": torch.zeros(4), "done": place == 3})
        >>> rb.sample()["desired_goal"]
        tensor([4., 4.])
    """

    plan_fields = ("relabelled",)
    options = (
        "reward_fn",
        "her_ratio",
        "strategy",
        "goal_path",
        "achieved_path",
        "reward_path",
        "exact_ratio",
        "next_goals",
    )
    rank = 1

    def __init__(
        self,
        reward_fn: Callable[[Any], Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = "future",
        goal_key: Key = "desired_goal",
        achieved_goal_key: Key = "achieved_goal",
        reward_key: Key | None = None,
        done_key: Key | None = None,
        exact_ratio: bool = False,
        next_goals: bool = True,
    ) -> None:
        if not callable(cast("Any", reward_fn)):
            msg = f"reward_fn must be a function from a batch to its rewards, got {type(reward_fn).__name__}"
            raise KindError(msg)
        self.reward_fn = reward_fn
        self.her_ratio = check_real("her_ratio", her_ratio, 0.0, 1.0)
        self.strategy = HindsightStrategy(check_choice("strategy", strategy, _STRATEGIES))
        self.goal_path = as_path(goal_key)
        self.achieved_path = as_path(achieved_goal_key)
        self.reward_path = None if reward_key is None else as_path(reward_key)
        self.exact_ratio = bool(exact_ratio)
        self.next_goals = bool(next_goals)
        self.episodes = episodes_of(done_key)

    def __repr__(self) -> str:
        """Options."""
        exact = ", exact_ratio=True" if self.exact_ratio else ""
        goals = "" if self.next_goals else ", next_goals=False"
        return f"Hindsight(her_ratio={self.her_ratio:g}, strategy={self.strategy.value!r}{exact}{goals})"

    def roll(self, records: int, view: View, generator: torch.Generator | None) -> Tensor:
        """Return two random numbers for each record, float64 `[2, R]`: whether to relabel it, and with which goal."""
        return torch.rand(2, records, dtype=torch.float64, generator=generator, device=view.device)

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:
        """Read the goal of relabelled rows from the row that achieved it."""
        if dice is None or dice.shape != (2, plan.records.shape[0]):
            got = "none" if dice is None else list(dice.shape)
            msg = f"Hindsight needs the random numbers of roll(), [2, {plan.records.shape[0]}], got {got}"
            raise OptionError(msg)
        fields: _Fields = self._fields(plan)
        late = fields.next_achieved is None and self.next_goals
        chosen, relabelled = self._choose(plan.records, view, dice, late=late)
        source = fields.achieved if fields.next_achieved is None else fields.next_achieved
        slots = torch.where(relabelled, chosen, plan.records)
        goals = [position for position in (fields.goal, fields.next_goal) if position is not None]
        columns = {position: Column(Request(position, slots), other=source, pick=relabelled) for position in goals}
        fields_added = {**plan.fields, "relabelled": relabelled}
        return plan._replace(changed={**plan.changed, **columns}, fields=fields_added)

    def _choose(self, rows: Tensor, view: View, dice: Tensor, *, late: bool) -> tuple[Tensor, Tensor]:
        """Return the row with the new goal of each row, and which rows are relabelled.

        `late` goals are those achieved before the step of a row, so they were achieved after the row before it.
        """
        table = view.require_episodes()
        relabelled = dice[0] < self.her_ratio
        if self.exact_ratio:
            relabelled = torch.arange(rows.shape[0], device=rows.device) < self._exactly(rows.shape[0])
        if self.strategy == "random":
            return table.starts(1).draw((dice[1] * 2.0**53).to(torch.int64) << 10), relabelled
        ahead = table.ahead(rows)
        if self.strategy == "final":
            return table.shift(rows, ahead), relabelled & ((ahead > 0) if late else (ahead >= 0))
        first = int(late) - (table.behind(rows) if self.strategy == "episode" else 0)
        last = ahead - first  # of the steps from the first one on
        steps = (dice[1] * (last + 1)).to(torch.int64).clamp_(max=last) + first
        return table.shift(rows, steps), relabelled & (last >= 0)

    def _exactly(self, rows: int) -> int:
        """Return the number of relabelled rows of a batch with `exact_ratio`."""
        return int(rows * self.her_ratio)

    def _find(self, plan: Plan) -> _Fields:
        """Return the positions of the fields for the rows' schema."""
        known = {leaf.path for leaf in plan.schema.leaves}
        goal = plan.require(self.goal_path, "goal_key")
        achieved = plan.require(self.achieved_path, "achieved_goal_key")
        next_achieved = next_path(self.achieved_path, known) if self.next_goals else None
        found = _Fields(goal, achieved, plan.find(next_path(self.goal_path, known)), plan.find(next_achieved))
        plan.require_alike(*(position for position in found if position is not None))
        plan.require_absent("relabelled")
        return found

    def finish(self, data: Any, plan: Plan) -> Any:
        """Replace the rewards of relabelled rows."""
        known = {leaf.path for leaf in plan.schema.leaves}
        path = self.reward_path or (("next", "reward") if ("next", "reward") in known else ("reward",))
        plan.require(path, "the reward of a step")
        rewards, relabelled = kinds.find_field(data, path), plan.fields["relabelled"]
        rows = rewards.shape[0]
        count = self._exactly(rows) if self.exact_ratio else rows
        if count == 0:
            return data
        part, old = data, rewards
        if count < rows:
            part, old, relabelled = map_leaves(data, lambda leaf: leaf[:count]), rewards[:count], relabelled[:count]
        new: Any = self.reward_fn(part)
        new = new.to(old.device) if isinstance(new, Tensor) else torch.as_tensor(np.asarray(new), device=old.device)
        if new.numel() != old.numel():
            msg = f"reward_fn must return one reward per row, shape {list(old.shape)}, got {list(new.shape)}"
            raise SchemaError(msg)
        relabelled = relabelled.view(-1, *[1] * (old.ndim - 1))
        new = torch.where(relabelled, new.reshape(old.shape).to(old.dtype), old)
        return kinds.with_fields(data, {path: new if count == rows else torch.cat([new, rewards[count:]])})
