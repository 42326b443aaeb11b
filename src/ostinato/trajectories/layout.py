"""The form of a trajectory: steps, environments and fields, and which row of each field belongs to which transition."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import numpy as np

from ostinato.durable.dtypes import DTYPES
from ostinato.durable.trees import show
from ostinato.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ostinato.durable.trees import TreePath

__all__ = ["Field", "Form", "Layout", "Signature", "make_form", "rows_of"]

Signature: TypeAlias = "dict[TreePath, tuple[str, tuple[int, ...]]]"
"""What a batch holds: by path, dtype and shape of a row."""

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
_SHAPERS = ("prev_logprobs", "rewards")
_MOST_SAMPLES = 2**40


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
        return math.prod(self.row_shape) * self.torch_dtype.itemsize


@final
class Layout:
    """What a row of each field is, whatever the number of steps and environments. Immutable and shared."""

    __slots__ = ("row_bytes", "signature")

    def __init__(self, fields: tuple[tuple[TreePath, str, tuple[int, ...]], ...]) -> None:
        self.signature = {path: (dtype, row_shape) for path, dtype, row_shape in fields}
        """What a batch of such rows holds: by path, dtype and shape of a row."""
        self.row_bytes = np.array(
            [math.prod(row_shape) * DTYPES[dtype].itemsize for _, dtype, row_shape in fields], dtype=np.int64
        )
        """Bytes of a row of each field, `[F]`."""


_layout = lru_cache(maxsize=4096)(Layout)


class Pairing(NamedTuple):
    """Which row of a field belongs to step `t`: `t + t // length + lead`."""

    length: int
    lead: int


@final
class Form:
    """Steps `T`, environments `B` and fields of a trajectory. Immutable; trajectories of one form share one object.

    A transition has the number `t * B + b`.
    """

    __slots__ = ("envs", "field_bytes", "fields", "layout", "pairings", "shape", "steps")

    def __init__(self, fields: tuple[Field, ...], shape: tuple[int, ...], pairings: list[Pairing]) -> None:
        self.fields = fields
        self.layout = _layout(tuple((field.path, field.dtype, field.row_shape) for field in fields))
        """What its rows are."""
        self.shape = shape
        """Shape of `prev_logprobs`, else of `rewards`."""
        self.steps, self.envs = shape[:2]
        self.field_bytes = tuple(field.row_bytes * field.shape[0] * field.shape[1] for field in fields)
        """Bytes of all rows of each field."""
        self.pairings = np.array(pairings, dtype=np.int64)
        """Which row of each field belongs to which step, `[F, 2]`: see `Pairing`."""

    @property
    def signature(self) -> Signature:
        """What a batch of its rows holds: by path, dtype and shape of a row."""
        return self.layout.signature

    @property
    def num_samples(self) -> int:
        """Transitions: T * B."""
        return self.steps * self.envs

    def rows(self, transitions: np.ndarray) -> np.ndarray:
        """Return where transitions lie in each field, as rows of its first two dimensions flattened, int64 `[N, F]`."""
        return rows_of(transitions, np.array(self.envs), self.pairings)


def rows_of(transitions: np.ndarray, envs: np.ndarray, pairings: np.ndarray) -> np.ndarray:
    """Return where transitions lie in each field, as rows of its first two dimensions flattened, int64 `[N, F]`.

    Args:
        transitions: Their numbers within their trajectories, `[N]`.
        envs: Environments of the trajectory of each, `[N]`, or of all, `[]`.
        pairings: `Form.pairings` of the trajectory of each, `[N, F, 2]`, or of all, `[F, 2]`.
    """
    steps, places = np.divmod(transitions, envs)
    steps = steps[:, None]
    rows: np.ndarray = (steps + steps // pairings[..., 0] + pairings[..., 1]) * envs[..., None] + places[:, None]
    return rows


def make_form(fields: Iterable[Field], where: object) -> Form:
    """Work out the form of the tensors of a trajectory; extra fields that are not `[T, B, ...]` are left out.

    Raises:
        SchemaError: Neither `prev_logprobs` nor `rewards` is there, or a field has another number of rows than it may.
    """
    try:
        return _make_form(tuple(fields))
    except SchemaError as error:
        msg = f"{where}: {error}"
        raise SchemaError(msg) from None


@lru_cache(maxsize=4096)
def _make_form(fields: tuple[Field, ...]) -> Form:
    shapes = {field.path[0]: field.shape for field in fields if len(field.path) == 1}
    shape = next((shapes[name] for name in _SHAPERS if name in shapes), None)
    if shape is None:
        msg = "a trajectory needs prev_logprobs or rewards, which say how many steps and environments it has"
        raise SchemaError(msg)
    if len(shape) < 2 or 0 in shape[:2]:
        msg = f"prev_logprobs or rewards must be [T, B, ...] with T and B of 1 or more, got {list(shape)}"
        raise SchemaError(msg)
    steps, envs = shape[:2]
    if steps * envs > _MOST_SAMPLES:
        msg = f"a trajectory has at most {_MOST_SAMPLES} transitions, got {steps} steps of {envs} environments"
        raise SchemaError(msg)
    kept, pairings = [], []
    for field in fields:
        pairing = _pairing(field, steps, envs)
        if pairing is None:
            continue
        kept.append(field)
        pairings.append(pairing)
    return Form(tuple(kept), shape, pairings)


def _pairing(field: Field, steps: int, envs: int) -> Pairing | None:
    """Return which row belongs to which step; None for an extra field that has none."""
    name, shape = field.path[0], field.shape
    fits = len(shape) >= 2 and shape[1] == envs
    if fits and shape[0] == steps:
        return Pairing(steps, 0)
    epochs = shape[0] - steps if fits else 0
    if epochs > 0 and steps % epochs == 0 and name in (*_FLAGS, *_VALUES):
        # Flags have a row before each epoch, values one after it.
        return Pairing(steps // epochs, 1 if name in _FLAGS else 0)
    if name not in _KNOWN:
        return None
    allowed = f"[{steps}, {envs}, ...]"
    if name in (*_FLAGS, *_VALUES):
        allowed += f", or one row more for each rollout epoch (a divisor of {steps})"
    msg = f"{show(field.path)} must be {allowed} (T and B of prev_logprobs, else of rewards), got {list(shape)}"
    raise SchemaError(msg)
