"""`Trajectory`: one batched rollout, as users pass it and as files hold it."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from ostinato.core.kinds import require_eager
from ostinato.durable.arrays import check_plain
from ostinato.durable.tensorfile import MAX_DEPTH, flatten, nest, show
from ostinato.errors import CheckpointError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FIELDS", "Trajectory", "as_trajectory", "check_weights_id", "new_weights_id", "owned_tree"]

_NAMED = ("max_episode_length", "model_weights_id")
_DICTS = ("forward_inputs", "curr_obs", "next_obs")
_MAX_WEIGHTS_ID = 200


@final
@dataclass(kw_only=True, eq=False)
class Trajectory:
    """A batched rollout: `T` steps of `B` environments, `T * B` transitions, one episode or several.

    Fields that the rollout does not have are None, or empty dicts (`forward_inputs`, `curr_obs`, `next_obs`, `extra`).
    Tensors are `[T, B, ...]`, on any device, with two exceptions:

    - flags (`terminations`, `truncations`, `dones`, `intervene_flags`) may have `T + E` rows for a rollout of `E`
      epochs of `T / E` steps: one row before the first step of each epoch, which belongs to no transition;
    - `prev_values` may have `T + E` rows: one bootstrap row after the last step of each epoch (`T + 1` for one epoch).

    NumPy arrays are converted to tensors. Other values, such as lists of text, are saved but are not part of batches.
    """

    max_episode_length: int | None = 0
    """Most steps of an episode."""
    model_weights_id: str | None = ""
    """Weights of the policy: `{uuid}_{updates}`, or any text valid in a file name; `""` or None: a new uuid and 0."""
    actions: Tensor | None = None
    """`[T, B, *A]`."""
    intervene_flags: Tensor | None = None
    """`[T, B, ...]`, bool: steps in which a human took over."""
    rewards: Tensor | None = None
    """`[T, B, ...]`; this or `prev_logprobs` is required."""
    terminations: Tensor | None = None
    """`[T, B, ...]` or `[T + E, B, ...]`, bool."""
    truncations: Tensor | None = None
    """`[T, B, ...]` or `[T + E, B, ...]`, bool."""
    dones: Tensor | None = None
    """`[T, B, ...]` or `[T + E, B, ...]`, bool."""
    prev_logprobs: Tensor | None = None
    """`[T, B, ...]`."""
    prev_values: Tensor | None = None
    """`[T, B, ...]` or `[T + E, B, ...]`."""
    versions: Tensor | None = None
    """`[T, B, ...]`: version of the weights for each step."""
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    """Inputs that the policy needs to compute its actions again, `[T, B, ...]` each."""
    curr_obs: dict[str, Any] = field(default_factory=dict)
    """Observations before the action, `[T, B, ...]` each."""
    next_obs: dict[str, Any] = field(default_factory=dict)
    """Observations after the action, `[T, B, ...]` each."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional fields by name; tensors `[T, B, ...]` are part of batches, other values are only saved."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trajectory:
        """Make a trajectory of a plain dict, as files hold it; unknown names go to `extra`. No copy.

        Fields that are missing or None get their defaults.
        """
        known = {name: value for name, value in values.items() if name in FIELDS and value is not None}
        return cls(**known, extra={name: value for name, value in values.items() if name not in FIELDS})

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict without None and empty dicts; extra fields are merged into it. No copy.

        Raises:
            OptionError: An extra field has the name of a field of `Trajectory`.
        """
        clash = sorted(set(self.extra) & FIELDS)
        if clash:
            msg = f"extra holds {', '.join(clash)}: these are fields of Trajectory, pass them by their own names"
            raise OptionError(msg)
        values = {name: getattr(self, name) for name in _ORDER}
        empty = {name for name in _DICTS if isinstance(values[name], dict) and not values[name]}
        return {name: v for name, v in (values | self.extra).items() if v is not None and name not in empty}


_ORDER = tuple(item.name for item in dataclasses.fields(Trajectory) if item.name != "extra")
FIELDS = frozenset(_ORDER)


def as_trajectory(value: object) -> Trajectory:
    """Convert a plain dict, or any dataclass with such fields, to a `Trajectory`.

    Raises:
        KindError: The value is neither of these nor a `Trajectory`.
    """
    if isinstance(value, Trajectory):
        return value
    if isinstance(value, dict):
        return Trajectory.from_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Trajectory.from_dict({item.name: getattr(value, item.name) for item in dataclasses.fields(value)})
    msg = f"add_trajectories takes a list of Trajectory, got {type(value).__name__}"
    raise KindError(msg)


def owned_tree(trajectory: Trajectory, where: str) -> dict[str, Any]:
    """Return the fields as nested dicts of new contiguous CPU tensors and copies of plain values.

    Raises:
        KindError: A value has a type that cannot be saved, or a field has a wrong type.
        OptionError: The weights id is not valid in a file name.
    """
    require_eager("adding trajectories")
    values = trajectory.to_dict()
    weights = values.get("model_weights_id") or new_weights_id()
    values["model_weights_id"] = check_weights_id(weights)
    for name in FIELDS.difference(_NAMED).intersection(values):
        kinds, words = (dict, "a dict of tensors") if name in _DICTS else ((Tensor, np.ndarray), "a tensor")
        if not isinstance(values[name], kinds):
            msg = f"{where}: {name} must be {words} [T, B, ...], got {type(values[name]).__name__}"
            raise KindError(msg)
    length = values.get("max_episode_length", 0)
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or not 0 <= length < 2**63:
        msg = f"{where}: max_episode_length must be an integer of 0 or more (64 bits), got {length!r:.80}"
        raise KindError(msg)
    values["max_episode_length"] = int(length)
    leaves = flatten(values, where=where)
    for path in leaves:
        for key in path:
            _check_text(key, f"{where}: the key {key!r}")
    return nest(
        {tuple(map(str.__str__, path)): _owned(value, f"{where}: {show(path)}") for path, value in leaves.items()}
    )


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = f"{where} cannot be saved: {error}"
        raise KindError(msg) from error


def _owned(value: Any, where: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUSMmV":
            return _plain_copy(value.tolist(), where)
        try:  # of any byte order and strides
            value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C", copy=True))
        except (TypeError, ValueError) as error:
            msg = f"{where}: torch has no dtype for NumPy's {value.dtype}: convert the array first"
            raise KindError(msg) from error
    if not isinstance(value, Tensor):
        return _plain_copy(value, where)
    try:
        plain = check_plain(value, where).resolve_conj().resolve_neg()
    except CheckpointError as error:
        raise KindError(str(error)) from error
    with torch.inference_mode(mode=False):
        return torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)


def _plain_copy(value: Any, where: str, depth: int = 0) -> Any:
    """Copy as plain Python types: NumPy scalars and enums are subclasses, which files without pickle cannot hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_text(value, f"{where}: text")
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
        return [_plain_copy(part, where, depth + 1) for part in value]
    if isinstance(value, dict) and depth < MAX_DEPTH and all(isinstance(key, str) for key in value):
        return {_plain_copy(key, where): _plain_copy(part, where, depth + 1) for key, part in value.items()}
    msg = (
        f"{where} holds a {type(value).__name__}, which cannot be saved: tensors, numpy arrays, text, numbers, "
        "None, and lists and dicts of these can"
    )
    raise KindError(msg)


def new_weights_id() -> str:
    """Return an id for unnamed weights: a random uuid and the count 0."""
    return f"{uuid.uuid4()}_0"


def check_weights_id(value: object) -> str:
    """Check and return the id of weights, which becomes part of file names.

    Raises:
        OptionError: It is no text, too long, or has path separators.
    """
    good = isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= _MAX_WEIGHTS_ID
    if not good or set(str(value)) & set("/\\"):
        msg = (
            f"model_weights_id must be text of 1 to {_MAX_WEIGHTS_ID} bytes that is valid in a file name "
            f"(printable, no '/' and '\\'), got {str(value)[:200]!r}"
        )
        raise OptionError(msg)
    return str.__str__(value)  # plain text, even if it is a subclass
