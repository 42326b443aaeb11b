"""Prioritized replay buffers: buffers with a `PrioritizedSampler` of the storage's size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ostinato.buffers.options import part
from ostinato.buffers.replay import ReplayBuffer, TensorDictReplayBuffer
from ostinato.samplers import PrioritizedSampler, Sampler
from ostinato.storages import ListStorage, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostinato.buffers.rate_limit import RateLimiter
    from ostinato.core.episodes.keys import Episodes
    from ostinato.units import SampleUnit
    from ostinato.writers import Writer

__all__ = ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws rows in proportion to their priority; see `PrioritizedSampler` for the distribution.

    `sample(return_info=True)` returns index, importance weights and generations in the info. Pass the info, with the
    new priorities, to `update_priority`. New rows get the default priority: the largest one given so far.

    Args:
        alpha: how much priorities matter.
        beta: how much the importance weights correct for it.
        eps: added to every priority.
        dtype: floating dtype of the weights.
        storage: stores the rows, or a callable that returns it; None is `ListStorage(1000)`.
        sampler: another sampler instead of `PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)`.
        writer: see `ReplayBuffer`, also for the arguments not listed here.
        sync: no effect: there is no other copy of the data.

    Example:
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
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        sync: bool = True,  # noqa: ARG002
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool = False,
        delayed_init: bool = False,
        sample_unit: SampleUnit | Sequence[SampleUnit] | None = None,
        episodes: Episodes | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        made = part("storage", storage, Storage, lambda: ListStorage(1000))
        own = PrioritizedSampler(made.max_size, alpha, beta, eps, dtype)
        super().__init__(
            storage=made,
            sampler=own if sampler is None else sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            batch_size=batch_size,
            dim_extend=dim_extend,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            episodes=episodes,
            rate_limiter=rate_limiter,
        )


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that draws rows in proportion to their priority; see `PrioritizedSampler`.

    Samples carry `index`, `priority_weight` and `index_generation`; write the new priorities under `priority_key` and
    pass the batch to `update_tensordict_priority`.

    Args:
        alpha: how much priorities matter.
        beta: how much the importance weights correct for it.
        priority_key: field that holds priorities.
        eps: added to every priority.
        storage: stores the rows, or a callable that returns it; None is `ListStorage(1000)`.
        writer: see `ReplayBuffer`, also for the arguments not listed here.
        sync: no effect: there is no other copy of the data.
        reduction: how the priorities of an item's steps become one: "max", "min", "mean" or "median".

    Example:
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
        storage: Storage | Callable[[], Storage] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        sync: bool = True,  # noqa: ARG002
        reduction: str = "max",
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool = False,
        delayed_init: bool = False,
        sample_unit: SampleUnit | Sequence[SampleUnit] | None = None,
        episodes: Episodes | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        made = part("storage", storage, Storage, lambda: ListStorage(1000))
        super().__init__(
            priority_key=priority_key,
            storage=made,
            sampler=PrioritizedSampler(made.max_size, alpha, beta, eps, reduction=reduction),
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            batch_size=batch_size,
            dim_extend=dim_extend,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            episodes=episodes,
            rate_limiter=rate_limiter,
        )
