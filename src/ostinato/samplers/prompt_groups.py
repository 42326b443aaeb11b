"""`PromptGroupSampler`: whole groups of rows that share a key, such as the responses to one prompt."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final

import numpy as np
import torch

from ostinato.core.options import check_integer
from ostinato.core.records import Draw
from ostinato.errors import EmptyBufferError, KindError, OptionError, SchemaError
from ostinato.samplers.base import Sampler, check_replacement
from ostinato.samplers.distinct import draw_distinct
from ostinato.samplers.row_values import RowValues

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import View

    Strategy: TypeAlias = Literal["random", "recency", "reward", "variance"]

_STRATEGIES = ("random", "recency", "reward", "variance")


@final
class PromptGroupSampler(Sampler):
    """Draws groups of rows that share the value of a field: for post-training of language models, one prompt.

    A batch has `samples_per_group` rows of each of `num_groups` different groups, group by group: the layout of
    group-relative objectives (GRPO). Groups are drawn uniformly among those present. With a buffer that keeps rows of
    earlier policies this is replay-enhanced policy optimization (Li et al., 2025, *RePO*, arXiv:2506.09340).

    Which rows of a group are drawn is the `strategy`:

    | strategy | rows |
    |---|---|
    | `random` | uniform, without repetition |
    | `recency` | those written last |
    | `reward` | those of the largest reward |
    | `variance` | those whose rewards have the largest variance; of several such sets the one of the largest sum |

    If there are too few groups, or rows in a group, all are drawn, and then further ones with replacement; a warning
    says so once. With `sample(max_age=)` only the rows young enough form groups, and with a `rate_limiter` every row
    counts as for other samplers. Keys and rewards are read as rows are written, not with every draw. Cost of a draw:
    O(rows log rows) after a write, else that of the batch and O(rows of the groups drawn).

    Args:
        num_groups: groups in a batch; give either this or `samples_per_group`, the batch size says the other.
        samples_per_group: rows of each group.
        group_key: field that names the group of a row: numbers, vectors of numbers, or text.
        strategy: see above.
        reward_key: field with the reward of a row, for `reward` and `variance`; the mean over its dimensions is used.
        cache_groups: False reads keys and rewards of all rows with every draw: for edits through views.
        replacement: must be True; a batch has a row twice only if there are too few.

    Raises:
        KindError: if not exactly one of `num_groups` and `samples_per_group` is given, or it is no integer; for
            `replacement=False`.
        OptionError: if a number is below 1, or the strategy is unknown.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, PromptGroupSampler, ReplayBuffer
        >>> sampler = PromptGroupSampler(samples_per_group=2, group_key="prompt")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"prompt": torch.arange(12) // 4, "reward": torch.arange(12.0)})
        >>> pairs = rb.sample()["prompt"].view(2, 2)
        >>> (pairs[:, 0] == pairs[:, 1]).all(), (pairs[0] != pairs[1]).all()
        (tensor(True), tensor(True))
    """

    reads = True
    by_age = True

    def __init__(
        self,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        group_key: Key = "query",
        strategy: Strategy = "random",
        reward_key: Key = ("next", "reward"),
        cache_groups: bool = True,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        if (num_groups is None) == (samples_per_group is None):
            msg = (
                f"Exactly one of num_groups or samples_per_group must be provided, got num_groups={num_groups} and "
                f"samples_per_group={samples_per_group}"
            )
            raise KindError(msg)
        if strategy not in _STRATEGIES:
            msg = f"Unknown strategy={strategy!r}: use one of {', '.join(map(repr, _STRATEGIES))}"
            raise OptionError(msg)
        self.num_groups = None if num_groups is None else check_integer("num_groups", num_groups, 1)
        self.samples_per_group = (
            None if samples_per_group is None else check_integer("samples_per_group", samples_per_group, 1)
        )
        self.group_key = group_key
        self.strategy = strategy
        self.reward_key = reward_key
        self.cache_groups = cache_groups
        self._codes: dict[Any, int] = {}  # number of each group that was ever seen since `clear`
        self._groups = RowValues(_path(group_key), self._numbers)
        self._rewards = RowValues(_path(reward_key), _rewards) if strategy in {"reward", "variance"} else None
        self._table: _Groups | None = None
        self._warned = False

    def __repr__(self) -> str:
        """Show the options."""
        return (
            f"PromptGroupSampler(num_groups={self.num_groups}, samples_per_group={self.samples_per_group}, "
            f"group_key={self.group_key!r}, strategy={self.strategy!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what is computed from the rows."""
        return {**vars(self), "_table": None, "_codes": {}}

    @property
    def nbytes(self) -> int:
        """Bytes of group numbers and rewards, once they were read, and of the rows by group."""
        rewards = 0 if self._rewards is None else self._rewards.nbytes
        return self._groups.nbytes + rewards + (0 if self._table is None else self._table.nbytes)

    def _numbers(self, keys: Tensor | list[Any]) -> Tensor:
        """Return the number of the group of each key, int64 `[n]`; a new key is a new group."""
        values = keys.tolist() if isinstance(keys, torch.Tensor) else keys
        codes = self._codes
        try:
            numbers = [codes.setdefault(_hashable(value), len(codes)) for value in values]
        except TypeError as error:
            msg = f"group_key={self.group_key!r} must hold numbers or text, got a value of another kind: {error}"
            raise SchemaError(msg) from error
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _split(self, batch_size: int) -> tuple[int, int]:
        """Return the number of groups in a batch, and the rows of each.

        Raises:
            OptionError: if the batch size is not a multiple of the option.
        """
        name = "samples_per_group" if self.num_groups is None else "num_groups"
        part = cast("int", getattr(self, name))
        if batch_size % part:
            msg = f"batch_size={batch_size} is not divisible by {name}={part}: use a multiple of it"
            raise OptionError(msg)
        return (batch_size // part, part) if self.num_groups is None else (part, batch_size // part)

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise."""
        self._split(batch_size)
        self._present(view)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw groups, and rows of each.

        Raises:
            EmptyBufferError: if no row may be drawn.
            KeyMissingError: if rows lack the key or the reward.
            OptionError: if the batch size is not a multiple of the option.
        """
        number, each = self._split(batch_size)
        groups = self._present(view)
        dice = _Dice(generator, view.device)
        chosen = dice.distinct(groups.count, min(number, groups.count))
        if number > groups.count:
            chosen = np.concatenate((chosen, dice.any(groups.count, number - groups.count)))
        smallest = int(groups.sizes[chosen].min())
        if not self._warned and (groups.count < number or smallest < each):
            self._warn_of_few(groups.count, smallest, number, each)
        slots = np.concatenate([self._rows_of(view, groups.rows(group), each, dice) for group in chosen.tolist()])
        return Draw(torch.from_numpy(slots).to(view.device))

    def _present(self, view: View) -> _Groups:
        """Return the groups of the rows that may be drawn, in the order of their lowest slots.

        Raises:
            EmptyBufferError: if there are none.
        """
        if not self.cache_groups:
            self.recheck()
        changed = self._groups.update(view)
        if self._rewards is not None:
            changed = self._rewards.update(view) or changed
        allowed = view.allowed()
        if self._table is None or changed or allowed is not None or self._table.partial:
            self._table = _Groups(self._groups.values.numpy(), None if allowed is None else allowed.cpu().numpy())
            if len(self._codes) > 2 * self._groups.values.shape[0] + 64:
                self._codes = {}  # most groups are gone
                self.recheck()
        if not self._table.count:
            msg = f"none of the {view.rows} rows may be drawn: they are masked, or too old for max_age"
            raise EmptyBufferError(msg)
        return self._table

    def _warn_of_few(self, groups: int, smallest: int, number: int, each: int) -> None:
        warnings.warn(
            f"a batch has {number} groups of {each} rows. There are {groups} groups, and a group drawn has {smallest} "
            "rows: this is smaller than the requested sample size; completing the draw with replacement. Write more "
            "rows, or lower num_groups or samples_per_group",
            UserWarning,
            stacklevel=2,
        )
        self._warned = True

    def _rows_of(self, view: View, slots: NDArray[np.int64], each: int, dice: _Dice) -> NDArray[np.int64]:
        """Return `each` rows of a group, by the strategy."""
        count = min(each, slots.size)
        if self.strategy == "random":
            found = slots[dice.distinct(slots.size, count)]
        elif self._rewards is None:
            written = view.ring.arrivals(torch.from_numpy(slots).to(view.device)).cpu().numpy()
            found = slots[np.argsort(written, kind="stable")[-count:]]
        else:
            rewards = self._rewards.values.numpy()[slots]
            by_reward = self.strategy == "reward"
            found = slots[np.argsort(-rewards, kind="stable")[:count] if by_reward else _widest(rewards, count)]
        if each > count:
            found = np.concatenate((found, slots[dice.any(slots.size, each - count)]))
        return found

    def recheck(self) -> None:
        """Read keys and rewards of all rows with the next draw."""
        self._groups.forget()
        if self._rewards is not None:
            self._rewards.forget()

    def clear(self) -> None:
        """Forget all groups."""
        self._codes, self._table, self._warned = {}, None, False
        self.recheck()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Read the groups of the rows that were loaded; there is no other state."""
        self.clear()


@final
class _Groups:
    """Rows that may be drawn, by group; groups are numbered in the order of their lowest slots.

    Args:
        codes: number of the group of each row, int64 `[rows]`.
        allowed: bool `[rows]`, or None for all.
    """

    def __init__(self, codes: NDArray[np.int64], allowed: NDArray[np.bool_] | None) -> None:
        self.partial = allowed is not None
        self.nbytes = 8 * codes.size
        slots = np.arange(codes.size) if allowed is None else np.flatnonzero(allowed)
        order = np.argsort(codes[slots], kind="stable")
        self._slots = slots[order]
        ranked = codes[self._slots]
        starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]]) if slots.size else np.zeros(0, np.int64)
        stops = np.r_[starts[1:], slots.size] if slots.size else starts
        by_slot = np.argsort(self._slots[starts], kind="stable")
        self._starts, self._stops = starts[by_slot], stops[by_slot]
        self.count = int(starts.size)
        self.sizes = self._stops - self._starts
        """Rows of each group."""

    def rows(self, group: int) -> NDArray[np.int64]:
        """Return the slots of a group, ascending. A *view*."""
        return self._slots[self._starts[group] : self._stops[group]]


@final
class _Dice:
    """Random numbers of one draw, as numpy arrays."""

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self._generator, self._device = generator, device

    def distinct(self, total: int, count: int) -> NDArray[np.int64]:
        """Return different numbers of `[0, total)`."""
        return draw_distinct(total, count, self._generator, self._device).cpu().numpy()

    def any(self, total: int, count: int) -> NDArray[np.int64]:
        """Return independent numbers of `[0, total)`."""
        return torch.randint(0, total, (count,), generator=self._generator, device=self._device).cpu().numpy()


def _widest(rewards: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the positions of the `count` rewards of the largest variance; of several sets the one of the largest sum.

    Such a set has the `k` lowest and the `count - k` highest rewards, for some `k` (Li et al., 2025).
    """
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order] - rewards.mean()
    sums, squares = np.r_[0.0, ranked.cumsum()], np.r_[0.0, (ranked**2).cumsum()]
    low = np.arange(count + 1)
    high = ranked.size - (count - low)
    total = sums[low] + sums[-1] - sums[high]
    variance = (squares[low] + squares[-1] - squares[high]) / count - (total / count) ** 2
    best = np.isclose(variance, variance.max(), rtol=1e-12, atol=1e-12)
    split = int(np.where(best, total, -np.inf).argmax())
    return np.concatenate((order[:split], order[ranked.size - (count - split) :]))


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _rewards(found: Tensor | list[Any]) -> Tensor:
    """Return rewards as float64 `[n]`, the mean over further dimensions.

    Raises:
        KindError: if they are no tensor.
        SchemaError: if they are not real and finite.
    """
    if not isinstance(found, torch.Tensor) or found.is_complex():
        msg = f"reward_key must name a field to hold a tensor of real numbers, got {type(found).__name__}"
        raise KindError(msg)
    rewards = found.detach().reshape(found.shape[0], -1).to("cpu", torch.float64).mean(-1)
    if not bool(rewards.isfinite().all()):
        msg = "rewards must be finite to draw rows by them, got NaN or infinite ones"
        raise SchemaError(msg)
    return rewards
