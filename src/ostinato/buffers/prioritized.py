"""Prioritized replay buffers: a `ReplayBuffer` with a `PrioritizedSampler` of the storage's size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch

from ostinato.buffers.options import check_sampler_device, part
from ostinato.buffers.replay import ReplayBuffer
from ostinato.buffers.tensordict import TensorDictReplayBuffer
from ostinato.samplers import PrioritizedSampler, Sampler
from ostinato.storages import ListStorage, Storage

if TYPE_CHECKING:
    from ostinato.buffers.options import BufferOptions


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
        storage = part("storage", options.get("storage"), Storage, lambda: ListStorage(1000))
        check_sampler_device(sampler_device, storage)
        options["storage"] = storage
        if options.get("sampler") is None:
            options["sampler"] = PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype)
        super().__init__(**options)

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler that keeps the priorities: that of the buffer."""
        return self.sampler


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
        storage = part("storage", options.get("storage"), Storage, lambda: ListStorage(1000))
        check_sampler_device(sampler_device, storage)
        options["storage"] = storage
        if options.get("sampler") is None:
            options["sampler"] = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, **options)

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler that keeps the priorities: that of the buffer."""
        return self.sampler
