"""The form of a trajectory: steps, environments and fields, and which row of each field belongs to which transition."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from ostinato.durable.dtypes import DTYPES
from ostinato.durable.trees import show
from ostinato.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ostinato.durable.trees import TreePath

__all__ = ["Field", "Form", "make_form"]

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
class Form:
    """Steps `T`, environments `B` and fields of a trajectory. Immutable; trajectories of one form share one object.

    A transition has the number `t * B + b`.
    """

    __slots__ = ("_maps", "_of", "envs", "field_bytes", "fields", "row_bytes", "shape", "signature", "steps")

    def __init__(self, fields: tuple[Field, ...], shape: tuple[int, ...], maps: list[list[int]], of: list[int]) -> None:
        self.fields = fields
        self.shape = shape
        """Shape of `prev_logprobs`, else of `rewards`."""
        self.steps, self.envs = shape[:2]
        self.row_bytes = np.array([field.row_bytes for field in fields], dtype=np.int64)
        """Bytes of a row of each field, `[F]`."""
        self.field_bytes = tuple(field.row_bytes * field.shape[0] * field.shape[1] for field in fields)
        """Bytes of all rows of each field."""
        self.signature = {field.path: (field.dtype, field.row_shape) for field in fields}
        """What a batch of such rows holds: by path, dtype and shape of a row."""
        self._maps = np.array(maps, dtype=np.int64).reshape(-1, self.steps)
        self._of = np.array(of, dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """Transitions: T * B."""
        return self.steps * self.envs

    def rows(self, transitions: np.ndarray) -> np.ndarray:
        """Return where transitions lie in each field, as rows of its first two dimensions flattened, int64 `[N, F]`."""
        steps, envs = np.divmod(transitions, self.envs)
        return (self._maps[:, steps] * self.envs + envs)[self._of].T


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
    kept, maps, of = [], [list(range(steps))], []
    for field in fields:
        pairing = _pairing(field, steps, envs)
        if pairing is None:
            continue
        kept.append(field)
        if pairing not in maps:
            maps.append(pairing)
        of.append(maps.index(pairing))
    return Form(tuple(kept), shape, maps, of)


def _pairing(field: Field, steps: int, envs: int) -> list[int] | None:
    """Return the row of each step; None for an extra field that has none."""
    name, shape = field.path[0], field.shape
    fits = len(shape) >= 2 and shape[1] == envs
    if fits and shape[0] == steps:
        return list(range(steps))
    epochs = shape[0] - steps if fits else 0
    if epochs > 0 and steps % epochs == 0 and name in (*_FLAGS, *_VALUES):
        # Flags have a row before each epoch, values one after it.
        lead = 1 if name in _FLAGS else 0
        return [step + step // (steps // epochs) + lead for step in range(steps)]
    if name not in _KNOWN:
        return None
    allowed = f"[{steps}, {envs}, ...]"
    if name in (*_FLAGS, *_VALUES):
        allowed += f", or one row more for each rollout epoch (a divisor of {steps})"
    msg = f"{show(field.path)} must be {allowed} (T and B of prev_logprobs, else of rewards), got {list(shape)}"
    raise SchemaError(msg)
