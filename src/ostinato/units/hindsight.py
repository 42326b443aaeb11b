"""Hindsight: goals that were reached after all (Andrychowicz et al. 2017), chosen when rows are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core import kinds
from ostinato.core.episodes.keys import Episodes, as_path
from ostinato.core.records import Column, Request, next_path
from ostinato.errors import KindError, OptionError, SchemaError
from ostinato.units.base import SampleUnit, refuse_fields, require_field, require_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.core.episodes.keys import Key
    from ostinato.core.records import Plan, View

__all__ = ["Hindsight"]

_STRATEGIES = ("future", "final", "episode", "random")


class _Fields(NamedTuple):
    """Positions of the fields that play a part; the last two None where rows have no such field."""

    goal: int
    achieved: int
    next_goal: int | None
    next_achieved: int | None


@final
class Hindsight(SampleUnit):
    """Gives a share of the rows drawn another goal, one that their episode reached later, and the reward that follows.

    Hindsight experience replay (Andrychowicz et al. 2017, section 3.2 and 4.5). A row `t` that is relabelled takes its
    goal from a state that was reached after step `u` of its own episode: "future": `u` uniform in `[t, T)`, `T` the
    rows of the episode so far; "final": `u = T - 1`; "episode": `u` uniform over the rows of the episode that are
    present; "random": `u` uniform over all rows of the buffer. Rows that hold no achieved goal for the end of a step
    take that of the step after it instead, so "future" is `u` in `(t, T)` there, and the last row of an episode keeps
    its goal. No goal comes from another episode (but with "random"), nor from a row that has been overwritten.

    The batch has the bool field `relabelled`, `[B]`.

    Args:
        reward_fn: gets the batch with its new goals, nested as rows were put in, and returns the rewards `[B]` or
            `[B, 1]`; those of relabelled rows are kept. It may run in the prefetch thread.
        her_ratio: probability of a row to be relabelled, in [0, 1]; 0.8 is the paper's k = 4.
        strategy: see above.
        goal_key: field of the goal; its `next` field, where there is one, takes the new goal as well.
        achieved_goal_key: field of what was achieved before the step; its `next` field holds what was achieved by it.
        reward_key: field of the reward; None is `("next", "reward")`, or `reward` where that is not there.
        done_key: field that ends episodes; None takes the buffer's `episodes`, or the usual flags.

    Raises:
        OptionError: for numbers or strategies out of range.
        KindError: if `reward_fn` cannot be called.

    Example:
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

    options = ("reward_fn", "her_ratio", "strategy", "goal_path", "achieved_path", "reward_path")
    rank = 2

    def __init__(
        self,
        reward_fn: Callable[[Any], Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: str = "future",
        goal_key: Key = "desired_goal",
        achieved_goal_key: Key = "achieved_goal",
        reward_key: Key | None = None,
        done_key: Key | None = None,
    ) -> None:
        if not callable(cast("Any", reward_fn)):
            msg = f"reward_fn must be a callable that gives rewards for a batch, got {type(reward_fn).__name__}"
            raise KindError(msg)
        if not 0.0 <= float(her_ratio) <= 1.0:
            msg = f"her_ratio must be in [0, 1], got {her_ratio!r}"
            raise OptionError(msg)
        if strategy not in _STRATEGIES:
            msg = f"strategy must be one of {list(_STRATEGIES)}, got {strategy!r}"
            raise OptionError(msg)
        self.reward_fn = reward_fn
        self.her_ratio = float(her_ratio)
        self.strategy = strategy
        self.goal_path = as_path(goal_key)
        self.achieved_path = as_path(achieved_goal_key)
        self.reward_path = None if reward_key is None else as_path(reward_key)
        self.episodes = Episodes() if done_key is None else Episodes(end_key=as_path(done_key))

    def __repr__(self) -> str:
        """Options."""
        return f"Hindsight(her_ratio={self.her_ratio:g}, strategy={self.strategy!r})"

    def roll(self, records: int, view: View, generator: torch.Generator | None) -> Tensor:
        """Return two numbers for each record: whether it is relabelled, and with which row's goal; float64 `[2, R]`."""
        return torch.rand(2, records, dtype=torch.float64, generator=generator, device=view.device)

    def expand(self, plan: Plan, view: View, dice: Tensor | None) -> Plan:
        """Read the goal of relabelled rows from the row that reached it."""
        if dice is None or dice.shape != (2, plan.records.shape[0]):
            got = "none" if dice is None else list(dice.shape)
            msg = f"Hindsight needs the random numbers that roll() gives, [2, {plan.records.shape[0]}], got {got}"
            raise OptionError(msg)
        fields = self._find(plan)
        chosen, relabelled = self._choose(plan.records, view, dice, late=fields.next_achieved is None)
        source = fields.achieved if fields.next_achieved is None else fields.next_achieved
        slots = torch.where(relabelled, chosen, plan.records)
        goals = [position for position in (fields.goal, fields.next_goal) if position is not None]
        columns = {position: Column(Request(position, slots, source, relabelled)) for position in goals}
        return plan.with_columns(columns)._replace(fields={**plan.fields, "relabelled": relabelled})

    def _choose(self, rows: Tensor, view: View, dice: Tensor, *, late: bool) -> tuple[Tensor, Tensor]:
        """Return the row whose goal each row takes, and which rows take one. `late` goals come from the row after."""
        table = view.require_episodes()
        relabelled = dice[0] < self.her_ratio
        if self.strategy == "random":
            top = table.starts(1)
            return top.draw((dice[1] * 2.0**53).to(torch.int64) << 10), relabelled
        ahead = table.ahead(rows)
        if self.strategy == "final":
            return table.shift(rows, ahead), relabelled & ((ahead > 0) if late else (ahead >= 0))
        first = 1 if late else 0
        behind = table.behind(rows) if self.strategy == "episode" else torch.zeros_like(rows)
        count = ahead + behind + 1 - first
        steps = (dice[1] * count).to(torch.int64).clamp_(max=count - 1) + first - behind
        return table.shift(rows, steps), relabelled & (count > 0)

    def _find(self, plan: Plan) -> _Fields:
        known = {leaf.path for leaf in plan.schema.leaves}
        goal = require_field(plan, self.goal_path, "the goal")
        achieved = require_field(plan, self.achieved_path, "what was achieved")
        next_goal, next_achieved = next_path(self.goal_path, known), next_path(self.achieved_path, known)
        found = _Fields(
            goal,
            achieved,
            None if next_goal is None else plan.find(next_goal),
            None if next_achieved is None else plan.find(next_achieved),
        )
        require_like(plan, *(position for position in found if position is not None))
        refuse_fields(plan, "relabelled")
        return found

    def finish(self, data: Any, plan: Plan) -> Any:
        """Compute the rewards of relabelled rows."""
        known = {leaf.path for leaf in plan.schema.leaves}
        path = self.reward_path or (("next", "reward") if ("next", "reward") in known else ("reward",))
        require_field(plan, path, "the reward of a step")
        old = kinds.find_field(data, path)
        new: Any = self.reward_fn(data)
        new = new.to(old.device) if isinstance(new, Tensor) else torch.as_tensor(np.asarray(new), device=old.device)
        if new.numel() != old.numel():
            msg = f"reward_fn must return one reward per row, shape {list(old.shape)}, got {list(new.shape)}"
            raise SchemaError(msg)
        relabelled = plan.fields["relabelled"].view(-1, *[1] * (old.ndim - 1))
        return kinds.with_fields(data, {path: torch.where(relabelled, new.reshape(old.shape).to(old.dtype), old)})
