"""The replay buffer of the AMP agent of IsaacGymEnvs, on top of Ostinato.

`docs/compat/isaacgymenvs.md` lists the differences from the original.
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
    """A ring buffer of observations on one device, sampled without replacement in passes.

    The first `store` allocates the memory for the shapes and dtypes of its tensors. Samples are drawn with the global
    generator of the device. Thread-safe.

    Args:
        buffer_size: Capacity; further rows replace the oldest.
        device: Device of the rows, of the data to store and of samples.

    Raises:
        KindError: `buffer_size` is not an integer.
        OptionError: `buffer_size` is below 1, or the device does not exist.

    Examples:
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
            storage=LazyTensorStorage(positive("buffer_size", buffer_size), device=_as_device(device)),
            sampler=SamplerWithoutReplacement(endless=True),
        )

    def reset(self) -> None:
        """Remove all rows and start a new pass in a new random order. Memory and schema are kept."""
        self._rows.empty()

    def get_buffer_size(self) -> int:
        """Return the capacity."""
        return self._rows.storage.capacity

    def get_total_count(self) -> int:
        """Return the number of rows stored since creation or the last reset, including rows replaced since."""
        return self._rows.write_count

    def store(self, data_dict: dict[str, Tensor]) -> None:
        """Write rows; if the buffer is full, they replace the oldest rows. One copy; on CUDA the host does not wait.

        Args:
            data_dict: Tensors `[B, *shape]` on the device of the buffer, with the same keys, shapes and dtypes in each
                call. If there are more rows than the capacity, the last rows are kept.

        Raises:
            KindError: `data_dict` is not a dict of tensors.
            OptionError: A tensor is on another device; rows are not copied between devices.
            SchemaError: Keys, batch sizes, shapes or dtypes do not match; nothing is changed.
            StorageMemoryError: In the first call, if there is not enough memory.
            UsageError: A CUDA graph is being captured: its replays would write to the same rows again.
        """
        self._check_data(data_dict)
        self._rows.extend(dict(data_dict))

    def sample(self, n: int) -> dict[str, Tensor]:
        """Sample rows without replacement: each pass has every stored row once, and each pass has a new random order.

        If a pass ends during a call, the next pass continues the batch. Rows stored during a pass join the rows not yet
        sampled. On CUDA the host does not wait, and all calls but the first can be captured in a CUDA graph, whose
        replays sample further rows.

        Args:
            n: Number of rows, at least 1. Can exceed the number of stored rows, which are then repeated.

        Returns:
            Tensors `[n, *shape]` under the stored keys. Copies.

        Raises:
            EmptyBufferError: The buffer is empty.
            KindError: `n` is not an integer.
            OptionError: `n` is below 1.
        """
        batch: dict[str, Tensor] = self._rows.sample(positive("n", n))
        return batch

    def __repr__(self) -> str:
        """Return sizes and device."""
        storage = self._rows.storage
        return (
            f"{type(self).__name__}(buffer_size={storage.capacity}, device={storage.device}, rows={len(storage)}, "
            f"total_count={self.get_total_count()})"
        )

    def _check_data(self, data: Any) -> None:
        """Check the data; messages name the key."""
        if not isinstance(data, dict):
            msg = f"store() takes a dict of named tensors, got {type(data).__name__}"
            raise KindError(msg)
        device = self._rows.storage.device
        for key, value in data.items():
            if not isinstance(value, torch.Tensor):
                msg = f"field {key!r} must be a tensor, got {type(value).__name__}"
                raise KindError(msg)
            if value.device != device:
                msg = f"field {key!r} is on {value.device}, but this buffer is on {device}: move it there first"
                raise OptionError(msg)
            if value.ndim == 0:
                msg = f"field {key!r} must hold rows [B, *shape], got a tensor without dimensions"
                raise SchemaError(msg)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            msg = "store() cannot be captured in a CUDA graph: its replays would write the same rows; capture sample()"
            raise UsageError(msg)


def _as_device(device: Any) -> torch.device:
    """Convert to a `torch.device`; "auto" is not a device here."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = f"device must be a torch.device or its name, got {device!r} ({error})"
        raise OptionError(msg) from None
