"""The layout of a trajectory: steps, environments, fields, and the row of each field that belongs to a transition."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import numpy as np

from ostinato.durable.arrays import DTYPES, shape_nbytes
from ostinato.durable.tensorfile import show
from ostinato.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from ostinato.durable.tensorfile import TreePath

__all__ = ["Field", "Layout", "RowSchema", "Signature", "make_layout", "rows_of"]

Signature: TypeAlias = "dict[TreePath, tuple[str, tuple[int, ...]]]"
"""The fields of a batch: dtype and shape of a row by path."""

_FLAGS = ("terminations", "truncations", "dones", "intervene_flags")
_VALUES = ("prev_values",)
_KNOWN = (
    *_FLAGS,
    *_VALUES,
    "actions",
    "rewards",
    "prev_logprobs",
    "versions",
    "forward_inputs",
    "curr_obs",
    "next_obs",
)
_SIZING_FIELDS = ("prev_logprobs", "rewards")
"""Fields that give the number of steps and environments; the first one present counts."""
_MAX_SAMPLES = 2**40


class Field(NamedTuple):
    """One tensor of a trajectory: keys from the root, name of the dtype, shape `[rows, B, *row]`."""

    path: TreePath
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one transition's value."""
        return self.shape[2:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition's value."""
        return shape_nbytes(self.row_shape, self.torch_dtype)


@final
class RowSchema:
    """Dtype and row shape of each field, for any number of steps and environments. Immutable; equal ones are shared."""

    __slots__ = ("row_bytes", "signature")

    def __init__(self, fields: tuple[tuple[TreePath, str, tuple[int, ...]], ...]) -> None:
        self.signature = {path: (dtype, row_shape) for path, dtype, row_shape in fields}
        """Dtype and shape of a row by path."""
        self.row_bytes = np.array([shape_nbytes(shape, DTYPES[dtype]) for _, dtype, shape in fields], dtype=np.int64)
        """Bytes of a row of each field, int64 `[F]`."""


_row_schema = lru_cache(maxsize=4096)(RowSchema)


class RowOffset(NamedTuple):
    """Which row of a field belongs to step `t`: `t + t // epoch_steps + lead`."""

    epoch_steps: int
    lead: int


@final
class Layout:
    """Steps `T`, environments `B` and fields of a trajectory. Immutable; trajectories of equal layout share one object.

    Transition `(t, b)` has the number `t * B + b`.
    """

    __slots__ = ("envs", "field_bytes", "fields", "row_offsets", "schema", "shape", "steps")

    def __init__(self, fields: tuple[Field, ...], shape: tuple[int, ...], row_offsets: list[RowOffset]) -> None:
        self.fields = fields
        self.schema = _row_schema(tuple((field.path, field.dtype, field.row_shape) for field in fields))
        """Dtypes and row shapes of the fields."""
        self.shape = shape
        """Shape of `prev_logprobs`, else of `rewards`."""
        self.steps, self.envs = shape[:2]
        self.field_bytes = tuple(shape_nbytes(field.shape, field.torch_dtype) for field in fields)
        """Bytes of all rows of each field."""
        self.row_offsets = np.array(row_offsets, dtype=np.int64)
        """The `RowOffset` of each field, int64 `[F, 2]`."""

    @property
    def signature(self) -> Signature:
        """Dtype and shape of a row by path."""
        return self.schema.signature

    @property
    def num_samples(self) -> int:
        """Number of transitions, T * B."""
        return self.steps * self.envs


def rows_of(layouts: Sequence[Layout], which: np.ndarray, transitions: np.ndarray) -> np.ndarray:
    """Return the row of each transition in each field, its first two dimensions flattened, int64 `[N, F]`.

    Args:
        layouts: Layouts with one number of fields.
        which: Position in `layouts` of each transition's layout, `[N]`.
        transitions: Numbers of the transitions within their trajectories, `[N]`.
    """
    first = layouts[0]
    envs, offsets = np.array(first.envs), first.row_offsets
    if any(layout is not first for layout in layouts):
        envs = np.array([layout.envs for layout in layouts])[which]
        offsets = np.stack([layout.row_offsets for layout in layouts])[which]
    steps, columns = np.divmod(transitions, envs)
    steps = steps[:, None]
    rows: np.ndarray = (steps + steps // offsets[..., 0] + offsets[..., 1]) * envs[..., None] + columns[:, None]
    return rows


def make_layout(fields: Iterable[Field], where: object) -> Layout:
    """Return the layout of the tensors of a trajectory. Extra fields that are not `[T, B, ...]` are left out.

    Args:
        fields: All tensors of the trajectory.
        where: What error messages begin with.

    Raises:
        SchemaError: Neither `prev_logprobs` nor `rewards` is present, or a field has the wrong number of rows.
    """
    try:
        return _make_layout(tuple(fields))
    except SchemaError as error:
        msg = f"{where}: {error}"
        raise SchemaError(msg) from None


@lru_cache(maxsize=4096)
def _make_layout(fields: tuple[Field, ...]) -> Layout:
    shapes = {field.path[0]: field.shape for field in fields if len(field.path) == 1}
    shape = next((shapes[name] for name in _SIZING_FIELDS if name in shapes), None)
    if shape is None:
        msg = "a trajectory needs prev_logprobs or rewards, which give its number of steps and environments"
        raise SchemaError(msg)
    if len(shape) < 2 or 0 in shape[:2]:
        msg = f"prev_logprobs or rewards must be [T, B, ...] with T and B of 1 or more, got {list(shape)}"
        raise SchemaError(msg)
    steps, envs = shape[:2]
    if steps * envs > _MAX_SAMPLES:
        msg = f"a trajectory has at most {_MAX_SAMPLES} transitions, got {steps} steps of {envs} environments"
        raise SchemaError(msg)
    found = [(field, _row_offset(field, steps, envs)) for field in fields]
    kept = [(field, offset) for field, offset in found if offset is not None]
    return Layout(tuple(field for field, _ in kept), shape, [offset for _, offset in kept])


def _row_offset(field: Field, steps: int, envs: int) -> RowOffset | None:
    """Return which row of a field belongs to which step; None for an extra field that is not `[T, B, ...]`."""
    name, shape = field.path[0], field.shape
    fits = len(shape) >= 2 and shape[1] == envs
    if fits and shape[0] == steps:
        return RowOffset(steps, 0)
    epochs = shape[0] - steps if fits else 0
    if epochs > 0 and steps % epochs == 0 and name in (*_FLAGS, *_VALUES):
        # Flags have an extra row before each epoch, values one after it.
        return RowOffset(steps // epochs, 1 if name in _FLAGS else 0)
    if name not in _KNOWN:
        return None
    allowed = f"[{steps}, {envs}, ...]"
    if name in (*_FLAGS, *_VALUES):
        allowed += f", or one row more for each rollout epoch (a divisor of {steps})"
    msg = f"{show(field.path)} must be {allowed} (T and B of prev_logprobs, else of rewards), got {list(shape)}"
    raise SchemaError(msg)
