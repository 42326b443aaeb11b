"""Samplers that draw by stored fields: rows of recent policies, and groups of rows that share a key."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final

import numpy as np
import torch

from ostinato.core.episodes.tracker import as_path
from ostinato.core.options import LARGEST, check_choice, check_integer
from ostinato.core.records import Draw, ring_range
from ostinato.errors import EmptyBufferError, KindError, OptionError, PriorityError, SchemaError
from ostinato.samplers.base import Sampler, check_replacement, require
from ostinato.samplers.uniform import draw_distinct, draw_weighted

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import View
    from ostinato.core.ring import Ring
    from ostinato.core.rows import Path
    from ostinato.core.shared_ring import SharedRing

    Strategy: TypeAlias = Literal["random", "recency", "reward", "variance"]
    Values: TypeAlias = Tensor | list[Any]

_STRATEGIES = ("random", "recency", "reward", "variance")


@final
class RowValues:
    """One stored field as a tensor with one value for each row. A draw reads the rows written since the last one.

    Not part of a state: a copy, and a sampler that was loaded, read all rows again.

    Args:
        path: the field.
        convert: makes a tensor `[n]` of what the storage returns for `n` rows, and checks it.
    """

    def __init__(self, path: Path, convert: Callable[[Values], Tensor]) -> None:
        self.path = path
        self.values = torch.empty(0, dtype=torch.int64, device="cpu")
        """`[rows]`, as of the last `update`."""
        self._convert = convert
        self._ring: Ring | SharedRing | None = None
        self._serial = self._rows = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the field alone."""
        return {"path": self.path, "convert": self._convert}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read all rows with the next draw."""
        RowValues.__init__(self, state["path"], state["convert"])

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    def forget(self) -> None:
        """Read all rows with the next draw."""
        self._ring = None

    def update(self, view: View) -> bool:
        """Read the rows written or edited since the last call; return whether there are any.

        Raises:
            KeyMissingError: if rows lack the field.
            KindError: if the storage has no fields.
        """
        slots = None
        if view.ring is self._ring and view.rows >= self._rows:
            slots = changed_slots(view, self._serial)
            if not slots.shape[0]:
                return False
        with torch.inference_mode(mode=False):  # changed in place in any mode
            self._read(view, slots)
        self._ring, self._serial, self._rows = view.ring, view.ring.written, view.rows
        return True

    def _read(self, view: View, slots: Tensor | None) -> None:
        """Read the rows at `slots`, or all rows."""
        if slots is None:
            self.values = self._convert(view.read(torch.arange(view.rows, device=view.device), self.path))
            return
        found = self._convert(view.read(slots, self.path))
        if self.values.shape[0] < view.rows:
            more = view.rows - self.values.shape[0]
            self.values = torch.cat((self.values, self.values.new_zeros(more)))
        self.values[slots] = found.to(self.values.dtype)


def changed_slots(view: View, serial: int) -> Tensor:
    """Return the slots written or edited after the row with a serial number, int64 `[n]`.

    Cost: O(n) if they were written in ring order, else O(rows).
    """
    ring = cast("Ring", view.ring)  # buffers shared by processes have other samplers
    count = ring.written - serial
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=view.device)
    if count < view.rows:  # if these rows account for all serial numbers since then, there was no other change
        slots = ring_range((view.cursor - count) % view.capacity, count, view.capacity, view.device)
        if int(slots.max()) < view.rows and bool((ring.generations(slots) > serial).all()):
            return slots
    slots = torch.arange(view.rows, device=view.device)
    return slots[ring.changed(slots, serial)]


def freshness(staleness: Tensor) -> Tensor:
    """Return the default weights, `1 / (staleness + 1)`.

    Args:
        staleness: float32 `[n]`, at least 0; rows newer than the consumer count as fresh.
    """
    return 1.0 / (staleness.clamp(min=0) + 1.0)


@final
class StalenessAwareSampler(Sampler):
    """Draws rows in proportion to a weight that decreases with their staleness, and none beyond a limit.

    The staleness of a row is `consumer_version` less the version in its field `version_key`, the version of the policy
    that made it. The learner sets `consumer_version` as its policy changes. Rows of a staleness above `max_staleness`
    are not drawn. A batch has no row twice; the rows are drawn one after the other, each in proportion to the weights
    of those not drawn yet. If fewer rows than the batch can be drawn, it is drawn with replacement. The info of a
    sample holds the `staleness` of its rows, float32 `[B]`, and so do TensorDict samples.

    Versions are read as rows are written, not with every draw. Cost of a draw: O(rows) after a write or a new
    `consumer_version`, and with weights of one's own; else O(B log rows).

    Args:
        max_staleness: the limit; -1 is none.
        staleness_weight_fn: maps the staleness of rows, float32 `[n]`, to their weights, finite and at least 0, `[n]`;
            None is `1 / (staleness + 1)`.
        version_key: field with one number for each row; nested ones as a tuple.
        replacement: must be True; a batch has a row twice only if there are too few.

    Raises:
        KindError: for `replacement=False`, or an argument of another kind.
        OptionError: if `max_staleness` is below -1.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, StalenessAwareSampler, TensorDictReplayBuffer
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=3)
        >>> _ = rb.extend(TensorDict({"policy_version": torch.tensor([0, 1, 2, 2])}, [4]))
        >>> sampler.consumer_version = 2
        >>> sorted(rb.sample()["policy_version"].tolist())
        [1, 2, 2]
    """

    reads = True
    by_age = True
    row_values = ()

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[Tensor], Tensor] | None = None,
        version_key: Key = "policy_version",
        *,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        weight_fn: Any = freshness if staleness_weight_fn is None else staleness_weight_fn
        if not callable(weight_fn):
            msg = f"staleness_weight_fn must be callable or None, got {type(weight_fn).__name__}"
            raise KindError(msg)
        self.max_staleness = max_staleness
        self.consumer_version = 0
        self._weight_fn: Callable[[Tensor], Any] = weight_fn
        self.version_key = version_key
        self._versions = RowValues(as_path(version_key), _versions)
        self._table: tuple[Any, Tensor | None, Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        """Show versions and limit."""
        return (
            f"StalenessAwareSampler(consumer_version={self.consumer_version}, max_staleness={self.max_staleness}, "
            f"version_key={self.version_key!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what is computed from the rows."""
        return {**vars(self), "_table": None}

    @property
    def consumer_version(self) -> int:
        """Version of the policy that learns now; 0 after the buffer was emptied."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        self._consumer_version = check_integer("consumer_version", version)

    @property
    def max_staleness(self) -> int:
        """Largest staleness of rows that are drawn; -1 for no limit."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, limit: int) -> None:
        self._max_staleness = check_integer("max_staleness", limit, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of versions and weights, once they were read."""
        tensors = () if self._table is None else self._table[1:]
        return self._versions.nbytes + sum(0 if tensor is None else tensor.nbytes for tensor in tensors)

    def increment_consumer_version(self) -> None:
        """Add 1 to `consumer_version`."""
        self._consumer_version += 1

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw rows by their weights.

        Raises:
            EmptyBufferError: if all rows are too stale.
            KeyMissingError: if rows lack the version.
            PriorityError: if weights are negative or not finite, or all are 0.
        """
        slots, sums, weights = self._weights(view)
        distinct = batch_size <= weights.shape[0]
        drawn = draw_weighted(sums, weights, batch_size, generator, distinct=distinct)
        drawn = drawn if slots is None else slots[drawn]
        return Draw(drawn, info={"staleness": self._staleness(drawn)})

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise what `draw` would raise."""
        self._weights(view)

    def _staleness(self, slots: Tensor | None) -> Tensor:
        """Return the staleness of rows, float32; the difference is exact for integers."""
        versions = self._versions.values if slots is None else self._versions.values[slots]
        return (self._consumer_version - versions).to(torch.float32)

    def _weights(self, view: View) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the slots of weight above 0 (None for all), the cumulative sums of their weights, and the weights."""
        changed = self._versions.update(view)
        key = (self._consumer_version, self._max_staleness)
        fixed = self._weight_fn is freshness and view.starts is None
        if self._table is not None and fixed and not changed and self._table[0] == key:
            return self._table[1:]
        staleness = self._staleness(None)
        allowed = view.allowed()
        if self._max_staleness >= 0:
            fresh = staleness <= self._max_staleness
            allowed = fresh if allowed is None else allowed & fresh
        slots = None if allowed is None else allowed.nonzero().flatten()
        if slots is not None and not slots.shape[0]:
            self._raise_stale(view)
        weights = self._checked_weights(staleness if slots is None else staleness[slots])
        good = (weights > 0).nonzero().flatten()
        if good.shape[0] < weights.shape[0]:
            slots = good if slots is None else slots[good]
            weights = weights[good]
        self._table = (key if fixed else None, slots, weights.cumsum(0), weights)
        return self._table[1:]

    def _checked_weights(self, staleness: Tensor) -> Tensor:
        weights = self._weight_fn(staleness)
        if not isinstance(weights, torch.Tensor) or weights.shape != staleness.shape:
            shown = list(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
            msg = f"staleness_weight_fn must return one weight for each of {staleness.shape[0]} rows, got {shown}"
            raise SchemaError(msg)
        weights = weights.detach().to(staleness.device, torch.float64)
        total = weights.sum()
        if not (bool(total.isfinite()) and bool((weights >= 0).all()) and bool(total > 0)):
            msg = (
                "staleness_weight_fn must return finite weights of at least 0, not all of them 0, got weights from "
                f"{float(weights.min()):g} to {float(weights.max()):g}"
            )
            raise PriorityError(msg)
        return weights

    def _raise_stale(self, view: View) -> None:
        oldest, newest = self._versions.values.min(), self._versions.values.max()
        msg = (
            f"All {view.rows} entries in the buffer exceed max_staleness={self._max_staleness} (consumer_version="
            f"{self._consumer_version}, versions from {oldest:g} to {newest:g}), or are left out by other rules: raise "
            "max_staleness, or collect with a newer policy"
        )
        raise EmptyBufferError(msg)

    def recheck(self) -> None:
        """Read the versions of all rows with the next draw."""
        self._versions.forget()

    def clear(self) -> None:
        """Begin with `consumer_version` 0, as TorchRL does."""
        self._consumer_version = 0
        self._versions.forget()

    def move(self) -> None:
        """Keep `consumer_version`, and read the rows of the new buffer."""
        self._versions.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return `consumer_version` and `max_staleness`."""
        return {"consumer_version": self._consumer_version, "max_staleness": self._max_staleness}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Check a state.

        Raises:
            CheckpointError: if it does not hold two integers.
        """
        version, limit = state["consumer_version"], state["max_staleness"]
        good = type(version) is int and abs(version) < LARGEST and type(limit) is int and -1 <= limit < LARGEST
        require(good, f"consumer_version={version!r}, max_staleness={limit!r}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.consumer_version, self.max_staleness = int(state["consumer_version"]), int(state["max_staleness"])
        self._versions.forget()


def _versions(found: Tensor | list[Any]) -> Tensor:
    """Return versions as int64 or float64 `[n]`.

    Raises:
        SchemaError: if there is not one real number for each row.
    """
    if not isinstance(found, torch.Tensor) or found.numel() != found.shape[0] or found.is_complex():
        shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else "Python objects"
        msg = f"version_key must name a field with one number for each row, got {shown}"
        raise SchemaError(msg)
    return found.detach().reshape(-1).to(torch.float64 if found.dtype.is_floating_point else torch.int64)


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
        self.num_groups = None if num_groups is None else check_integer("num_groups", num_groups, 1)
        self.samples_per_group = (
            None if samples_per_group is None else check_integer("samples_per_group", samples_per_group, 1)
        )
        self.group_key = group_key
        self.strategy = check_choice("strategy", strategy, _STRATEGIES)
        self.reward_key = reward_key
        self.cache_groups = cache_groups
        self._codes: dict[Any, int] = {}  # number of each group that was ever seen since `clear`
        self._groups = RowValues(as_path(group_key), self._numbers)
        self._rewards = RowValues(as_path(reward_key), _rewards) if strategy in {"reward", "variance"} else None
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
        chosen = _filled(None, number, groups.count, generator, view.device)
        smallest = int(groups.sizes[chosen].min())
        if not self._warned and (groups.count < number or smallest < each):
            self._warn_of_few(groups.count, smallest, number, each)
        rows = [self._rows_of(view, groups.rows(group), each, generator) for group in chosen.tolist()]
        return Draw(torch.from_numpy(np.concatenate(rows)).to(view.device))

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

    def _rows_of(
        self, view: View, slots: NDArray[np.int64], each: int, generator: torch.Generator | None
    ) -> NDArray[np.int64]:
        """Return `each` rows of a group, by the strategy."""
        count, found = min(each, slots.size), None
        if self.strategy == "recency":
            written = view.ring.arrivals(torch.from_numpy(slots).to(view.device)).cpu().numpy()
            found = np.argsort(written, kind="stable")[-count:]
        elif self._rewards is not None:
            rewards = self._rewards.values.numpy()[slots]
            by_reward = self.strategy == "reward"
            found = np.argsort(-rewards, kind="stable")[:count] if by_reward else _widest(rewards, count)
        return slots[_filled(found, each, slots.size, generator, view.device)]

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
        self._slots = slots[np.argsort(codes[slots], kind="stable")]
        _, starts, sizes = np.unique(codes[self._slots], return_index=True, return_counts=True)
        by_slot = np.argsort(self._slots[starts], kind="stable")
        self._starts, self.count = starts[by_slot], int(starts.size)
        self.sizes = sizes[by_slot]
        """Rows of each group."""

    def rows(self, group: int) -> NDArray[np.int64]:
        """Return the slots of a group, ascending. A *view*."""
        return self._slots[self._starts[group] : self._starts[group] + self.sizes[group]]


def _filled(
    found: NDArray[np.int64] | None, count: int, total: int, generator: torch.Generator | None, device: torch.device
) -> NDArray[np.int64]:
    """Return `count` numbers of `[0, total)`: those found, by default different ones, then independent ones."""
    if found is None:
        found = draw_distinct(total, min(count, total), generator, device).cpu().numpy()
    if found.size < count:
        more = torch.randint(0, total, (count - found.size,), generator=generator, device=device)
        found = np.concatenate((found, more.cpu().numpy()))
    return found


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
