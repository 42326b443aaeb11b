"""`HERReplayBuffer`: a `TensorDictReplayBuffer` that relabels part of each batch with goals that were achieved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from ostinato.buffers.tensordict import TensorDictReplayBuffer
from ostinato.core.episodes.tracker import Episodes, as_path
from ostinato.units import Hindsight, HindsightStrategy, SampleUnit

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.buffers.options import BufferOptions
    from ostinato.core.episodes.tracker import Key

_FLAGS = ("done", "terminated", "truncated")


class HERReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with hindsight experience replay (Andrychowicz et al. 2017), as in TorchRL.

    The first `int(B * her_ratio)` rows of every batch are relabelled: row `t` gets the goal that was achieved before
    step `u` of its episode, which the strategy chooses as in `Hindsight`, under `goal_key` and, where rows have it,
    under `("next", goal_key)`, and the reward that `reward_fn` computes from it. The other rows stay as they are. The
    batch has the field `relabelled`, bool `[B]`. No goal comes from another episode, except with "random". Relabelling
    comes before `collate_fn` and transforms.

    The same as `TensorDictReplayBuffer(sample_unit=Hindsight(..., exact_ratio=True, next_goals=False))`. `Hindsight`
    itself takes, by default, goals achieved after the step, and relabels each row with the probability `her_ratio`.

    Args:
        reward_fn: gets the relabelled rows, a TensorDict `[n]` with their new goals, and returns their rewards `[n]` or
            `[n, 1]`. It may run in the prefetch thread.
        her_ratio: share of relabelled rows, in [0, 1].
        strategy: a `HindsightStrategy` or its name: "future", "final", "episode" or "random".
        goal_key: field of the goal.
        achieved_goal_key: field of the goal achieved before the step.
        reward_key: field of the reward.
        end_key: field that ends episodes. An episode ends as well where a field `done`, `terminated` or `truncated`
            beside it is True; one of these fields is needed.
        priority_key: see `TensorDictReplayBuffer`.
        **options: see `ReplayBuffer`; units in `sample_unit` are combined with the relabelling.

    Raises:
        OptionError: for ratios and strategies out of range.
        KindError: if `reward_fn` is not callable.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import HERReplayBuffer, LazyTensorStorage
        >>> def reward_fn(batch):
        ...     return (batch["achieved_goal"] == batch["desired_goal"]).float()
        >>> rb = HERReplayBuffer(reward_fn, strategy="final", storage=LazyTensorStorage(100), batch_size=5)
        >>> place = torch.arange(4.0)
        >>> rows = TensorDict({"achieved_goal": place, "desired_goal": torch.full((4,), 9.0)}, [4])
        >>> _ = rb.extend(rows.set("next", TensorDict({"reward": torch.zeros(4), "done": place == 3}, [4])))
        >>> rb.sample()["desired_goal"]
        tensor([3., 3., 3., 3., 9.])
    """

    def __init__(
        self,
        reward_fn: Callable[[Any], Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = "future",
        goal_key: Key = "desired_goal",
        achieved_goal_key: Key = "achieved_goal",
        reward_key: Key = ("next", "reward"),
        end_key: Key = ("next", "done"),
        priority_key: str | tuple[str, ...] = "td_error",
        **options: Unpack[BufferOptions],
    ) -> None:
        self._goals = Hindsight(
            reward_fn,
            her_ratio=her_ratio,
            strategy=strategy,
            goal_key=goal_key,
            achieved_goal_key=achieved_goal_key,
            reward_key=reward_key,
            exact_ratio=True,
            next_goals=False,
        )
        self.goal_key = goal_key
        self.achieved_goal_key = achieved_goal_key
        self.reward_key = reward_key
        self.end_key = end_key
        given = options.get("sample_unit")
        units = [] if given is None else [given] if isinstance(given, SampleUnit) else list(given)
        options["sample_unit"] = [self._goals, *units]
        if options.get("episodes") is None:
            *level, name = as_path(end_key)
            ends = dict.fromkeys([(*level, name), *((*level, flag) for flag in _FLAGS)])
            options["episodes"] = Episodes(end_key=list(ends), optional=True)
        super().__init__(priority_key=priority_key, **options)

    @property
    def reward_fn(self) -> Callable[[Any], Tensor]:
        """Computes the rewards of relabelled rows."""
        return self._goals.reward_fn

    @property
    def her_ratio(self) -> float:
        """Share of relabelled rows."""
        return self._goals.her_ratio

    @property
    def strategy(self) -> HindsightStrategy:
        """Which achieved goals are used."""
        return self._goals.strategy

    def __repr__(self) -> str:
        """Relabelling, parts and options."""
        name, parts = super().__repr__().split("(", 1)
        return (
            f"{name}(\n    strategy={self.strategy.value!r}, her_ratio={self.her_ratio}, goal_key={self.goal_key!r}, "
            f"achieved_goal_key={self.achieved_goal_key!r}, reward_key={self.reward_key!r},{parts}"
        )
