"""LazyStackStorage: TensorDicts whose fields differ in shape, as one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, final

import torch

from ostinato.core import kinds
from ostinato.errors import KeyMissingError, KindError, OptionError, SchemaError
from ostinato.storages.list import ListStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.rows import Path

__all__ = ["LazyStackStorage"]

_LAYOUTS = ("lazy", "nested", "padded")


@final
class LazyStackStorage(ListStorage):
    """A list of TensorDicts or tensorclasses of different shapes, such as token sequences, read as one batch.

    Each row is a copy in memory of its own; a batch copies its rows.

    Args:
        max_size: capacity in rows; None for no limit.
        stack_dim: dimension of the batch among the batch dimensions of the rows; negative ones count from the end.
            Rows without batch dimensions have only 0 (or -1).
        layout: of batches, and of `storage[index]` for several rows. "lazy": a `LazyStackedTensorDict`, whose fields
            are stacked when they are read; those of different shapes are read row by row. "nested": fields of
            different lengths are jagged nested tensors (values and offsets). "padded": fields are padded at the end of
            their first dimension with 0, and the batch, a TensorDict, has a bool mask of the same name under "masks".
        device: where the tensors of rows are moved when they are written; None leaves each where it is.
        allow_pickle: see `ListStorage`.
        compilable: no effect, see `ListStorage`.

    Raises:
        CapacityError: if `max_size` is not a positive integer.
        OptionError: for another layout, a `stack_dim` that is no integer, or one with "nested" or "padded".
        MissingExtraError: tensordict is not installed (`pip install 'ostinato[tensordict]'`).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100), batch_size=8)
        >>> _ = rb.add(TensorDict({"tokens": torch.arange(3), "reward": torch.tensor(1.0)}))
        >>> _ = rb.add(TensorDict({"tokens": torch.arange(5), "reward": torch.tensor(0.0)}))
        >>> batch = rb.sample()
        >>> batch["reward"].shape, sorted({len(row["tokens"]) for row in batch.unbind(0)})
        (torch.Size([8]), [3, 5])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        layout: Literal["lazy", "nested", "padded"] = "lazy",
        device: torch.device | str | int | None = None,
        allow_pickle: bool = False,
        compilable: bool = False,
    ) -> None:
        kinds.require_tensordict("LazyStackStorage", "use RaggedTensorStorage, which also stores dicts")
        super().__init__(max_size, device=device, allow_pickle=allow_pickle, compilable=compilable)
        if layout not in _LAYOUTS:
            msg = f"layout must be one of {_LAYOUTS}, got {layout!r}"
            raise OptionError(msg)
        if layout != "lazy" and stack_dim not in {0, -1}:
            msg = f"layout={layout!r} makes batches along dimension 0, got stack_dim={stack_dim}: use layout='lazy'"
            raise OptionError(msg)
        if isinstance(stack_dim, bool) or not isinstance(stack_dim, int):
            msg = f"stack_dim must be an integer, got {stack_dim!r}"
            raise OptionError(msg)
        self.stack_dim = stack_dim
        self.layout = layout

    def __repr__(self) -> str:
        """Class, number of rows and layout."""
        return f"LazyStackStorage(rows={len(self)}, capacity={self.capacity}, layout={self.layout!r})"

    @property
    def default_collate(self) -> Callable[[Any], Any]:
        """Stack rows into a batch."""
        return self.stack

    def stack(self, rows: Any) -> Any:
        """Return a list of rows as one batch of the layout; a batch is returned as it is. Copy.

        Raises:
            SchemaError: if "nested" or "padded" rows differ in more than the length of their fields.
        """
        if not isinstance(rows, list) or not rows:
            return rows
        copies = [row.clone() for row in rows]
        if self.layout == "lazy":
            dims = rows[0].batch_dims + 1
            if not -dims <= self.stack_dim < dims:
                msg = f"stack_dim={self.stack_dim} is out of range for rows with {dims - 1} batch dimensions"
                raise SchemaError(msg)
            return kinds.lazy_stack(copies, self.stack_dim % dims)
        try:
            return kinds.stack_lengths(copies, padded=self.layout == "padded")
        except (RuntimeError, ValueError) as error:
            msg = (
                f"rows cannot be a {self.layout} batch ({error}): fields may differ in their first dimension alone; "
                "layout='lazy' takes any rows"
            )
            raise SchemaError(msg) from error

    def field_at(self, slots: Tensor, path: Path) -> Tensor | list[Any]:
        """Return one field of the rows at `slots`: a tensor if their shapes are equal, else a list.

        Raises:
            KeyMissingError: if a row lacks the field.
        """
        values = [kinds.find_field(row, path) for row in self.gather(slots)]
        missing = sum(value is None for value in values)
        if missing:
            msg = (
                f"Could not find key {kinds.show_path(path)} in the replay buffer: {missing} of {len(values)} rows "
                "lack it; write the field, or name another"
            )
            raise KeyMissingError(msg)
        if all(isinstance(value, torch.Tensor) for value in values):
            same = len({(value.shape, value.dtype) for value in values}) == 1
            return torch.stack(values) if same else [value.tolist() for value in values]
        return [value.tolist() if hasattr(value, "tolist") else value for value in values]

    def admit(self, data: Any, lead: int) -> tuple[list[Any], int]:
        """Check one TensorDict or tensorclass, or a list or batch of these.

        Raises:
            KindError: for other rows.
        """
        rows, count = super().admit(data, lead)
        _require_collections(rows)
        return rows, count

    def prepare_edit(self, slots: torch.Tensor, data: Any, batch: tuple[int, ...]) -> Callable[[], None]:
        """Check that there is one TensorDict for each slot; return a function that writes them."""
        _require_collections(kinds.unstack(data) if batch else [data])
        return super().prepare_edit(slots, data, batch)

    def read(self, index: Any, *, swap: bool = False) -> Any:
        """Return one row, or a batch of the rows at a slice, tensor or mask. Copy of several rows."""
        return self.stack(super().read(index, swap=swap))


def _require_collections(rows: list[Any]) -> None:
    for row in rows:
        if not kinds.is_tensor_collection(row):
            msg = f"LazyStackStorage holds TensorDicts and tensorclasses, got {type(row).__name__}: use ListStorage"
            raise KindError(msg)
