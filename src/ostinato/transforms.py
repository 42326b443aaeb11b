"""Transforms, and `Compose`, which applies several: forward when rows are sampled, inverse when rows are written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from ostinato.core.episodes.tracker import as_path
from ostinato.core.kinds import is_plain_tensordict, leaves_by_path, put, with_fields
from ostinato.core.options import check_number
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"]

Key: TypeAlias = "str | tuple[str, ...]"


class _FieldTransform:
    """Base of transforms of named fields, and of fields nested below a name."""

    _named, _others = True, True
    """Whether fields that a key names stay, and whether others do."""

    def __init__(self, *keys: Key, names: Mapping[Key, Key] | None = None) -> None:
        if not keys:
            msg = "give at least one key"
            raise OptionError(msg)
        self._names = {as_path(key): as_path(key if names is None else names[key]) for key in keys}
        self.keys = tuple(self._names)

    def __call__(self, batch: Any) -> Any:
        """Transform a sampled batch."""
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """Transform a sampled batch."""
        return self._apply(batch, self._change)

    def inv(self, batch: Any) -> Any:
        """Return rows unchanged: there is no inverse."""
        return batch

    def _change(self, value: Any) -> Any:
        """Return the value of a field that a key names."""
        return value

    def _apply(self, batch: Any, change: Callable[[Any], Any]) -> Any:
        """Return a new batch with new names, and the values that `change` returns."""
        if not (isinstance(batch, dict) or (hasattr(batch, "empty") and hasattr(batch, "batch_size"))):
            msg = f"this transform takes a dict or a TensorDict, got {type(batch).__name__}: use a callable of your own"
            raise KindError(msg)
        leaves = leaves_by_path(batch)
        keys = {path: next((key for key in self.keys if path[: len(key)] == key), None) for path in leaves}
        missing = set(self.keys) - set(keys.values())
        if missing:
            msg = f"the batch has no field {sorted(missing)}: its fields are {list(leaves)}"
            raise KeyMissingError(msg)
        made: Any = {} if isinstance(batch, dict) else batch.empty()
        paths = set()
        for path, key in keys.items():
            if not (self._others if key is None else self._named):
                continue
            to = path if key is None else (*self._names[key], *path[len(key) :])
            if to in paths:
                msg = f"two fields of the batch would become {to}: choose another name, or exclude one of them"
                raise OptionError(msg)
            paths.add(to)
            value = leaves[path] if key is None else change(leaves[path])
            if isinstance(batch, dict):
                with_fields(made, {to: value})
            elif isinstance(value, Tensor) and len(to) == 1 and is_plain_tensordict(made):
                put(made, {to[0]: value}, made.batch_dims)
            else:
                made.set(to, value)
        return made


@final
class Select(_FieldTransform):
    """Keep only the named fields of a batch.

    Args:
        *keys: names; a tuple names a nested field; the name of a group selects the whole group.

    Raises:
        KeyMissingError: if a batch has no such field.
    """

    _others = False

    def __init__(self, *keys: Key) -> None:  # errors of Python then name this class
        super().__init__(*keys)


@final
class Exclude(_FieldTransform):
    """Remove the named fields from a batch; see `Select` for names."""

    _named = False

    def __init__(self, *keys: Key) -> None:  # errors of Python then name this class
        super().__init__(*keys)


@final
class Rename(_FieldTransform):
    """Give fields of a batch new names.

    Args:
        names: old name -> new name; tuples name nested fields.
    """

    def __init__(self, names: Mapping[Key, Key]) -> None:
        super().__init__(*names, names=names)


@final
class RewardScale(_FieldTransform):
    """Scale rewards at sampling: `scale * reward + loc`. Rewards are stored unscaled.

    There is no inverse: rows that are read and written back are stored scaled.

    Args:
        scale: factor.
        loc: added after scaling.
        key: field of the reward.

    Raises:
        OptionError: if `scale` or `loc` is neither a finite number nor a tensor.
    """

    def __init__(self, scale: float, loc: float = 0.0, key: Key = "reward") -> None:
        super().__init__(key)
        given: dict[str, Any] = {"scale": scale, "loc": loc}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                check_number(name, value, "a finite number", math.isfinite)
        self.scale, self.loc = scale, loc

    def _change(self, value: Any) -> Any:
        return value * self.scale + self.loc


@final
class Cast(_FieldTransform):
    """Cast fields at sampling, and optionally at writing: floats in the batch, bytes in the storage.

    Values are cast with `tensor.to`: values out of range wrap, and fractions are lost.

    Args:
        dtype: dtype in the batch.
        *keys: the fields.
        stored: dtype in the storage; None does not cast at writing.
    """

    def __init__(self, dtype: torch.dtype, *keys: Key, stored: torch.dtype | None = None) -> None:
        super().__init__(*keys)
        self.dtype, self.stored = dtype, stored

    def _change(self, value: Any) -> Any:
        return value.to(self.dtype)

    def inv(self, batch: Any) -> Any:
        """Cast the fields to the stored dtype."""
        return batch if self.stored is None else self._apply(batch, self._store)

    def _store(self, value: Any) -> Any:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value), device="cpu")
        return tensor.to(self.stored)


@final
class ToDevice:
    """Move batches to a device, asynchronously if they are in page-locked memory (`pin_memory=True`).

    A copy to the CPU is complete when the batch is returned.

    Args:
        device: name or object.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    @property
    def _ahead(self) -> bool:
        """Whether a copy may complete after the call: not to the CPU, where reads do not wait for it."""
        return self.device.type != "cpu"

    def __call__(self, batch: Any) -> Any:
        """Move a batch, a TensorDict or a pytree of tensors."""
        if hasattr(batch, "batch_size") and hasattr(batch, "to"):
            return batch.to(self.device, non_blocking=self._ahead)
        return _pytree.tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=self._ahead), batch)

    def forward(self, batch: Any) -> Any:
        """Move a batch."""
        return self(batch)

    def inv(self, batch: Any) -> Any:
        """Return rows unchanged: the storage copies them to its device."""
        return batch


class _Step(NamedTuple):
    """A transform as it was given, and its functions for both directions; None for none."""

    origin: Any
    forward: Callable[[Any], Any] | None
    inverse: Callable[[Any], Any] | None

    def check_waiting(self) -> None:
        """Check that a step which returned no rows may do so.

        Raises:
            KindError: if it is a plain callable, which more probably lacks its `return`.
        """
        if not hasattr(self.origin, "inv"):
            msg = (
                f"the transform {self.origin!r} returned None for rows about to be written: return the rows, or, to "
                "write none yet, return None from the method `inv` of an object"
            )
            raise KindError(msg)

    @classmethod
    def of(cls, transform: Any, *, invert: bool) -> _Step:
        """Return the step of a transform; `invert` applies a plain callable at writing.

        Raises:
            KindError: if it is neither callable nor has `forward` and `inv`.
            OptionError: for `invert` with a transform that has an inverse.
        """
        if isinstance(transform, torch.nn.Module):
            transform.eval()
        forward, inverse = getattr(transform, "forward", None), getattr(transform, "inv", None)
        if callable(forward) and callable(inverse):
            if invert:
                msg = (
                    f"invert=True is for plain callables, got {type(transform).__name__}, which has an inverse already"
                )
                raise OptionError(msg)
            return cls(transform, transform if callable(transform) else forward, inverse)
        if not callable(transform):
            kind = type(transform).__name__
            msg = f"a transform must be callable, or have forward and inv, got {kind}: {transform!r}"
            raise KindError(msg)
        return cls(transform, None, transform) if invert else cls(transform, transform, None)


@final
class Compose:
    """Transforms applied one after another.

    A transform is any callable `batch -> batch`, or an object with `forward` (called when rows are sampled) and
    `inv` (called when rows are written), as TorchRL's transforms are. Modules are put into evaluation mode.

    Args:
        *transforms: in the order in which they are applied to a sampled batch.

    Raises:
        KindError: if one is neither callable nor has `forward` and `inv`.

    Examples:
        >>> import torch
        >>> from ostinato.transforms import Compose, RewardScale, Select
        >>> chain = Compose(Select("reward"), RewardScale(0.5))
        >>> chain({"obs": torch.zeros(2), "reward": torch.ones(2)})
        {'reward': tensor([0.5000, 0.5000])}
    """

    def __init__(self, *transforms: Any) -> None:
        self.steps = [_Step.of(transform, invert=False) for transform in transforms]

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """Return a `Compose` unchanged, another transform in a `Compose`, and an empty one for None."""
        if isinstance(transform, Compose):
            return transform
        return cls() if transform is None else cls(transform)

    def __len__(self) -> int:
        """Number of transforms."""
        return len(self.steps)

    def __getitem__(self, index: int) -> Any:
        """Return a transform as it was given."""
        return self.steps[index].origin

    def __repr__(self) -> str:
        """Show the transforms."""
        return f"Compose({', '.join(repr(step.origin) for step in self.steps)})"

    def __call__(self, batch: Any) -> Any:
        """Apply all transforms to a sampled batch."""
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """Apply all transforms to a sampled batch, first to last."""
        for step in self.steps:
            if step.forward is not None:
                batch = step.forward(batch)
        return batch

    def inv(self, batch: Any) -> Any:
        """Apply the inverses to rows about to be written, last to first.

        Returns:
            The rows to write; None if the `inv` of a transform returned None, because it waits for more of them.

        Raises:
            KindError: if a plain callable returned None.
        """
        for step in reversed(self.steps):
            if step.inverse is None:
                continue
            batch = step.inverse(batch)
            if batch is None:
                step.check_waiting()
                return None
        return batch

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end; with `invert`, a plain callable is applied at writing instead of at sampling."""
        self.steps.append(_Step.of(transform, invert=invert))

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before position `index`, in `[-len, len]`.

        Raises:
            OptionError: if the position is out of range.
        """
        if not -len(self.steps) <= index <= len(self.steps):
            msg = f"index must be in [{-len(self.steps)}, {len(self.steps)}] (transforms present), got {index}"
            raise OptionError(msg)
        self.steps.insert(index, _Step.of(transform, invert=invert))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the transforms that have one, by position."""
        return {
            str(i): dict(s.origin.state_dict()) for i, s in enumerate(self.steps) if hasattr(s.origin, "state_dict")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: if the transforms with a state are at other positions.
        """
        mine = self.state_dict()
        if set(mine) != set(state):
            msg = (
                f"the state has transforms with a state at positions {sorted(state)}, this chain at "
                f"{sorted(mine)}: append the same transforms first"
            )
            raise CheckpointError(msg)
        for position, value in state.items():
            self.steps[int(position)].origin.load_state_dict(value)
