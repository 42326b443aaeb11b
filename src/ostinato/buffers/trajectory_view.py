"""`Trajectory`: the rows of one trajectory as queries return them; imported late, since it needs tensordict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato._optional import require
from ostinato.core.kinds import require_tensordict
from ostinato.errors import SchemaError

if TYPE_CHECKING:
    import tensordict
    import torch
    from torch import Tensor
else:
    require_tensordict("ostinato.compat.torchrl.Trajectory")
    tensordict = require("tensordict", "tensordict")


def _with_fields(cls: Any) -> Any:
    """Give a tensorclass the fields of its data as attributes.

    tensordict sets `__getattr__` and `__repr__` of a tensorclass after the body of the class, so they are set here.
    """
    own = cls.__getattr__

    def find(self: Any, name: str) -> Any:
        try:
            return own(self, name)
        except AttributeError:
            value = None if name.startswith("_") else self.get(name)
            if value is None:
                raise AttributeError(_missing(self.data, name)) from None
            return value

    cls.__getattr__ = find
    cls.__repr__ = cls._show
    return cls


def _missing(data: Any, name: str) -> str:
    known = sorted(map(str, data.keys(include_nested=True, leaves_only=True)))
    return (
        f"Trajectory has no entry {name!r} in its data, neither at the root nor under 'next'. Available keys: {known}"
    )


@_with_fields
@tensordict.tensorclass(nocast=True)
class Trajectory:
    """Rows of one trajectory, in order: TorchRL's class of this name.

    A tensorclass around a TensorDict. Its fields are attributes: those at the root first, then those under `next`, so
    that `trajectory.reward` is the reward after the step. An index of steps gives a `Trajectory`, a key a field.
    `tensordict.lazy_stack` makes a batch of trajectories of different lengths.

    Args:
        data: TensorDict `[T]`, not copied.

    Raises:
        SchemaError: if the data has several batch dimensions (also a `ValueError`).
        AttributeError: for an attribute that is no field.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato.compat.torchrl import Trajectory
        >>> trajectory = Trajectory(TensorDict({"obs": torch.zeros(3, 2), "next": {"reward": torch.ones(3, 1)}}, [3]))
        >>> trajectory.length, float(trajectory.total_reward), trajectory[1:].obs.shape
        (3, 3.0, torch.Size([2, 2]))
    """

    data: tensordict.TensorDictBase

    if TYPE_CHECKING:  # made by tensordict
        batch_size: torch.Size

        def __init__(self, data: Any, *, batch_size: torch.Size | None = None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        """Take the batch size of the data."""
        data = self.data
        if self.batch_size or data is None or not data.batch_dims:
            return
        if data.batch_dims != 1:
            msg = f"Trajectory expects data with a single batch dimension, got batch_size={list(data.batch_size)}"
            raise SchemaError(msg)
        self.batch_size = data.batch_size

    @property
    def length(self) -> int:
        """Number of rows."""
        return int(self.batch_size[0])

    @property
    def total_reward(self) -> Tensor:
        """Sum of the rewards, a scalar."""
        total: Tensor = self.reward.sum()
        return total

    def get(self, key: str | tuple[str, ...], default: Any = None) -> Any:
        """Return the field at a key, or else under `next`, or else the default. No copy."""
        value = self.data.get(key, None)
        if value is None and isinstance(key, str):
            value = self.data.get(("next", key), None)
        return default if value is None else value

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """Return the keys of the data; arguments as of `TensorDict.keys`."""
        return self.data.keys(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        """Return the steps at an index as a `Trajectory`, or the field at a key. Views as of a TensorDict."""
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return self.data[index]
        data = self.data[index]
        return type(self)(data=data, batch_size=data.batch_size)

    def _show(self) -> str:
        shape = f"length={self.length}" if len(self.batch_size) == 1 else f"batch_size={tuple(self.batch_size)}"
        keys = None if self.data is None else sorted(map(str, self.data.keys()))
        return f"Trajectory({shape}, keys={keys})"
