"""The replay buffer of IsaacGymEnvs' AMP agent: rows of named tensors that stay on one device.

A door: storage, sampler and ring are the engine's. How it differs from the original: `docs/compat/isaacgymenvs.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato import buffers
from ostinato.buffers.options import positive
from ostinato.errors import KindError, OptionError, SchemaError, UsageError
from ostinato.samplers import SamplerWithoutReplacement
from ostinato.storages import LazyTensorStorage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ReplayBuffer"]


@final
class ReplayBuffer:
    """A ring of past observations on one device, sampled without replacement pass by pass.

    Memory is taken with the first `store`, in the shapes and dtypes of its tensors. Draws follow torch's global
    generator of the device. Safe to use from several threads.

    Args:
        buffer_size: most rows kept; further ones replace the oldest.
        device: where rows are kept, stored from and sampled to.

    Raises:
        KindError: if `buffer_size` is not an integer.
        OptionError: if it is below 1, or torch has no such device here.

    Example:
        >>> import torch
        >>> buffer = ReplayBuffer(buffer_size=1000, device=torch.device("cpu"))
        >>> buffer.store({"amp_obs": torch.randn(256, 64)})
        >>> buffer.sample(128)["amp_obs"].shape
        torch.Size([128, 64])
        >>> buffer.get_buffer_size(), buffer.get_total_count()
        (1000, 256)
    """

    def __init__(self, buffer_size: int, device: torch.device | str | int) -> None:
        self._rows = buffers.ReplayBuffer(
            storage=LazyTensorStorage(positive("buffer_size", buffer_size), device=_known(device)),
            sampler=SamplerWithoutReplacement(endless=True),
        )

    def reset(self) -> None:
        """Forget all rows and begin a new pass, newly shuffled; memory, and the form of a row, are kept."""
        self._rows.empty()

    def get_buffer_size(self) -> int:
        """Return the most rows that are kept."""
        return self._rows.storage.capacity

    def get_total_count(self) -> int:
        """Return how many rows were stored since the buffer was made or reset, those replaced since included."""
        return self._rows.write_count

    def store(self, data_dict: dict[str, Tensor]) -> None:
        """Write rows, the newest in the place of the oldest. One copy; on CUDA the host does not wait.

        Args:
            data_dict: tensors `[B, *shape]` on the buffer's device, the same keys, shapes and dtypes each time. Of more
                rows than the buffer keeps, the last ones stay.

        Raises:
            KindError: if it is no dict of tensors.
            OptionError: if a tensor lies on another device; nothing is copied between devices behind your back.
            SchemaError: naming the key, if keys, batch sizes, shapes or dtypes do not match; nothing is changed.
            StorageMemoryError: at the first call, if there is not enough memory.
            UsageError: while a CUDA graph is captured: its replays would write to the same rows again.
        """
        self._check(data_dict)
        self._rows.extend(dict(data_dict))

    def sample(self, n: int) -> dict[str, Tensor]:
        """Draw rows: each row stored comes once in a pass, and the next pass is shuffled anew.

        A pass that ends in the middle of a call is followed by the next one; rows stored during a pass join those not
        yet drawn. On CUDA the host does not wait, and all calls but the first can be captured in a CUDA graph, whose
        replays draw on.

        Args:
            n: rows, at least 1; may exceed the rows stored, which then come several times.

        Returns:
            Tensors `[n, *shape]` under the keys that were stored. Copies.

        Raises:
            EmptyBufferError: if nothing is stored.
            KindError: if `n` is not an integer.
            OptionError: if it is below 1.
        """
        batch: dict[str, Tensor] = self._rows.sample(positive("n", n))
        return batch

    def __repr__(self) -> str:
        """Sizes and device."""
        storage = self._rows.storage
        return (
            f"{type(self).__name__}(buffer_size={storage.capacity}, device={storage.device}, rows={len(storage)}, "
            f"total_count={self.get_total_count()})"
        )

    def _check(self, data: Any) -> None:
        """Refuse what the original cannot take, in words that name the key."""
        if not isinstance(data, dict):
            msg = f"store() takes a dict of named tensors, got {type(data).__name__}"
            raise KindError(msg)
        device = self._rows.storage.device
        for key, value in data.items():
            if not isinstance(value, torch.Tensor):
                msg = f"field {key!r} must be a tensor, got {type(value).__name__}"
                raise KindError(msg)
            if value.device != device:
                msg = f"field {key!r} lies on {value.device}, this buffer on {device}: move it there first"
                raise OptionError(msg)
            if value.ndim == 0:
                msg = f"field {key!r} must hold rows [B, *shape], got a tensor without dimensions"
                raise SchemaError(msg)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            msg = "store() cannot be captured in a CUDA graph: its replays would write the same rows; capture sample()"
            raise UsageError(msg)


def _known(device: Any) -> torch.device:
    """Return a device that is one: here "auto" means nothing."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = f"device must be a torch.device or its name, got {device!r} ({error})"
        raise OptionError(msg) from None
