"""Buffers with other defaults: rows that are TensorDicts, a prioritized sampler, hindsight."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ostinato.buffers.direct import direct_rows
from ostinato.buffers.options import part, warn_of_sampler
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.sampling import INFO
from ostinato.buffers.updates import priorities_of_batch, row_names
from ostinato.core import kinds
from ostinato.core.episodes.tracker import Episodes, as_path
from ostinato.core.records import Plan
from ostinato.errors import NoTensorDictError, OptionError
from ostinato.samplers import PrioritizedSampler, PrioritySampler
from ostinato.storages import ListStorage, Storage
from ostinato.units import Hindsight, HindsightStrategy, SampleUnit
from ostinato.writers import TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato._native import Direct
    from ostinato.buffers.options import BufferOptions
    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import Draw
    from ostinato.core.rows import Path, Schema

_FLAGS = ("done", "terminated", "truncated")
_SLICES = 3
"""Parts of what a direct call returns for slices: the batch, its slots, and the length of a slice."""


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for TensorDict rows: samples carry the key `index` (int64 `[B]`; with `ndim=2` `[B, 2]`).

    With a prioritized sampler they also carry `priority_weight` `[B]` and the generations `index_generation`,
    int64 `[B]`. A subclass of `ReplayBuffer` because TorchRL's is, and users' annotations say so. None of the three is
    stored; they are dropped from written data.

    Args:
        priority_key: field, nested ones as a tuple, that holds the first priority of a row where written data has it,
            and its new one for `update_tensordict_priority`; used with prioritized samplers.
        **options: see `ReplayBuffer`; the default writer is `TensorDictRoundRobinWriter`.

    Raises:
        KindError: when other data is written.
        MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(4, 3)}, [4]))
        >>> sorted(rb.sample().keys())
        ['index', 'obs']
    """

    _writer_class = TensorDictRoundRobinWriter

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **options: Unpack[BufferOptions]) -> None:
        kinds.require_tensordict(type(self).__name__, "use ReplayBuffer with rows that are dicts of tensors")
        self.priority_key = priority_key
        super().__init__(**options)

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Field that holds priorities."""
        return self._priority_key

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        self._priority_key = key
        self._priority_path = as_path(key)
        if "_engine" in self.__dict__:  # else it is told when it is made
            with self._engine.lock:
                self._engine.parts_changed()
                self._engine.set_priority_path(self._priority_path)

    def _accept(self, data: Any) -> Any:
        if not (all(map(kinds.is_tensordict, data)) if type(data) is list else kinds.is_tensordict(data)):
            msg = (
                f"{type(self).__name__} takes TensorDicts: it only accepts TensorDictBase subclasses or lists of them, "
                f"got {type(data).__name__}; use ReplayBuffer for other data"
            )
            raise NoTensorDictError(msg)
        unit = self._engine.unit
        own = INFO if unit is None or not unit.notes else (*INFO, "anchor_generation", *unit.notes)
        rows = [_without_own(row, own) for row in data] if type(data) is list else _without_own(data, own)
        return self._transform.inv(rows) if self._transform else rows

    def _direct_rows(self, data: Any, lead: int, direct: Direct) -> Any:
        return None if type(data) is dict else direct_rows(data, direct.lead - 1 + lead, by_path=direct.by_path)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,  # noqa: FBT001, FBT002
        include_info: bool | None = None,  # noqa: FBT001
        *,
        max_age: int | None = None,
        timeout_s: float | None = None,
        min_batch: int | None = None,
        out: Any = None,
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`.

        `include_info` has no effect but a warning: samples always carry their index.
        """
        if include_info is not None:
            warnings.warn(
                f"include_info is going to be deprecated in TorchRL, and include_info={include_info!r} has no effect "
                "here: samples of TensorDict buffers always carry their index; leave it out",
                UserWarning,
                stacklevel=2,
            )
        return super().sample(
            batch_size, return_info, max_age=max_age, timeout_s=timeout_s, min_batch=min_batch, out=out
        )

    def _finish(self, data: Any, draw: Draw, notes: dict[Any, Tensor]) -> Any:
        data = super()._finish(data, draw, notes)
        if kinds.is_tensor_collection(data):
            names = row_names(self._engine, draw, {**draw.record_info, **notes}, self._flat_index)
            nested = {key: names.pop(key) for key in notes if type(key) is tuple} if notes else None
            kinds.put(data, names)
            if nested:
                kinds.with_fields(data, nested)
        return data

    def _presented(self, found: tuple[Any, ...], schema: Schema | None, size: int, *, return_info: bool) -> Any:
        flags: dict[Path, Tensor] = {}
        if len(found) == _SLICES and schema is not None:
            fields, slots, length = found
            rows = kinds.with_fields({}, {as_path(key): value for key, value in fields.items()})
            flags = self._engine.sampler.marks(Plan(schema, slots[::length], slots, repeat=length), rows)
            found = (fields, self._flat_index(slots))
        result = super()._presented(found, schema, size, return_info=return_info)
        batch = result[0] if return_info else result
        if not self._transform.steps or kinds.is_tensor_collection(batch):  # a transform may make something else of it
            kinds.put(batch, dict(zip(INFO, found[1:], strict=False)))
            kinds.with_fields(batch, flags)
        return result

    def _filled(
        self,
        direct: Direct,  # noqa: ARG002
        schema: Schema | None,  # noqa: ARG002
        out: Any,  # noqa: ARG002
        size: int,  # noqa: ARG002
    ) -> tuple[Any, ...] | None:
        return None  # batches have fields that are not stored

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities that stand under its `priority_key`.

        Rows that were overwritten since they were drawn are skipped (see `update_priority`), as the sample carries
        their generations. Items that are trajectories, `[B, T]`, get one priority each, reduced as the sampler says.

        Args:
            data: a sampled TensorDict with the keys `index` and `priority_key`.

        Raises:
            KeyMissingError: if one of the keys is missing.
            PriorityError: for priorities that are negative, NaN or infinite, naming the positions; nothing is changed.
        """
        engine = self._engine
        sampler, storage = engine.sampler, engine.store.source.storage
        if not isinstance(sampler, PrioritySampler):
            warn_of_sampler(sampler)
            return
        self.update_priority(*priorities_of_batch(data, self._priority_key, sampler.reduce, storage.ndim))


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws rows in proportion to their priority; see `PrioritizedSampler` for the distribution.

    `sample(return_info=True)` gives index, importance weights and generations in the info, which goes, with the new
    priorities, to `update_priority`. New rows get the default priority: the largest one given so far.

    Args:
        alpha: how much priorities matter.
        beta: how much the importance weights correct for it.
        eps: added to every priority.
        dtype: floating dtype of the weights.
        sampler_device: None, or the device of the storage, where priorities are; others raise.
        sync: no effect: there is no other copy of the data to keep in step.
        **options: see `ReplayBuffer`; the default sampler is
            `PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)`.

    Examples:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4)
        >>> index = rb.extend({"obs": torch.zeros(8, 3)})
        >>> batch, info = rb.sample(return_info=True)
        >>> rb.update_priority(info, torch.rand(4))
        >>> sorted(info)
        ['index', 'index_generation', 'priority_weight']
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        sampler_device: torch.device | str | int | None = None,
        sync: bool = True,  # noqa: ARG002
        **options: Unpack[BufferOptions],
    ) -> None:
        storage = _storage_on(sampler_device, options)
        if options.get("sampler") is None:
            options["sampler"] = PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)
        super().__init__(**options)

    prioritized_sampler = ReplayBuffer.sampler


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that draws rows in proportion to their priority; see `PrioritizedSampler`.

    Samples carry `index`, `priority_weight` and `index_generation`; write the new priorities under `priority_key` and
    hand the batch to `update_tensordict_priority`.

    Args:
        alpha: how much priorities matter.
        beta: how much the importance weights correct for it.
        priority_key: field that holds priorities.
        eps: added to every priority.
        sampler_device: None, or the device of the storage, where priorities are; others raise.
        sync: no effect: there is no other copy of the data to keep in step.
        reduction: reduces the priorities of an item's steps to one: "max", "min", "mean" or "median".
        **options: see `ReplayBuffer`; the default sampler is
            `PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4)
        >>> index = rb.extend(TensorDict({"obs": torch.zeros(8, 3), "td_error": torch.rand(8)}, [8]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4)
        >>> rb.update_tensordict_priority(batch)
        >>> sorted(batch.keys())
        ['index', 'index_generation', 'obs', 'priority_weight', 'td_error']
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: str | tuple[str, ...] = "td_error",
        eps: float = 1e-8,
        sampler_device: torch.device | str | int | None = None,
        sync: bool = True,  # noqa: ARG002
        reduction: str = "max",
        **options: Unpack[BufferOptions],
    ) -> None:
        storage = _storage_on(sampler_device, options)
        if options.get("sampler") is None:
            options["sampler"] = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, **options)

    prioritized_sampler = ReplayBuffer.sampler


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


def _storage_on(device: torch.device | str | int | None, options: BufferOptions) -> Storage:
    """Return the storage of a prioritized buffer, made and put into its options.

    Raises:
        OptionError: if the priorities are to be on another device than the storage.
    """
    storage = options["storage"] = part("storage", options.get("storage"), Storage, lambda: ListStorage(1000))
    if device is not None and torch.device(device).type != storage.device.type:
        msg = (
            f"sampler_device={str(device)!r} is not available: priorities are on the device of the storage, "
            f"{storage.device}, so that a draw needs no copy; leave it out, or put the storage there"
        )
        raise OptionError(msg)
    return storage


def _without_own(row: Any, own: tuple[str, ...]) -> Any:
    keys = row.keys()
    found = [key for key in own if key in keys]
    return row.exclude(*found) if found else row
