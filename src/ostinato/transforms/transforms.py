"""Chains of transforms: forward in order at sampling, inverse in reverse order at writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from ostinato.core.kinds import is_non_tensor, is_tensor_collection
from ostinato.errors import CheckpointError, KeyMissingError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Cast", "Compose", "Exclude", "Rename", "RewardScale", "Select", "ToDevice"]

Key: TypeAlias = "str | tuple[str, ...]"


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _map(batch: Any, change: Callable[[tuple[str, ...], Any], tuple[tuple[str, ...], Any] | None]) -> Any:
    """Rebuild a nested batch leaf by leaf; `change` gives each leaf's new place and value, or None to leave it out."""
    if isinstance(batch, dict):
        return _nest(_leaves(batch), change, {})
    if hasattr(batch, "empty") and hasattr(batch, "batch_size"):
        return _nest(_leaves(batch), change, batch.empty())
    msg = f"this transform takes a dict or a TensorDict, got {type(batch).__name__}: use a callable of your own"
    raise KindError(msg)


def _leaves(batch: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    out = []
    for key, value in batch.items():
        nested = isinstance(value, dict) or (is_tensor_collection(value) and not is_non_tensor(value))
        out += _leaves(value, (*path, key)) if nested else [((*path, key), value)]
    return out


def _nest(leaves: list[tuple[tuple[Any, ...], Any]], change: Callable[..., Any], out: Any) -> Any:
    taken = set()
    for path, value in leaves:
        changed = change(path, value)
        if changed is None:
            continue
        place, new = changed
        if place in taken:
            msg = f"two fields of the batch would become {place}: choose another name, or exclude one of them"
            raise OptionError(msg)
        taken.add(place)
        if isinstance(out, dict):
            level = out
            for key in place[:-1]:
                level = level.setdefault(key, {})
            level[place[-1]] = new
        else:
            out.set(place, new)
    return out


def _require(seen: set[tuple[str, ...]], wanted: set[tuple[str, ...]], known: list[Any]) -> None:
    missing = wanted - seen
    if missing:
        msg = f"the batch has no field {sorted(missing)}: its fields are {known}"
        raise KeyMissingError(msg)


class _Named:
    """Shared by transforms that name fields: finds them, nested ones below a name too, and reports missing ones."""

    def __init__(self, *keys: Key) -> None:
        if not keys:
            msg = "give at least one key"
            raise OptionError(msg)
        self.keys = tuple(_path(key) for key in keys)

    def __call__(self, batch: Any) -> Any:
        """Apply to a batch that was read."""
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """Apply to a batch that was read."""
        return self._walk(batch, self._change)

    def _walk(self, batch: Any, change: Callable[[tuple[str, ...] | None, tuple[str, ...], Any], Any]) -> Any:
        """Rebuild a batch; `change` gets for each leaf the key that names it (or None), its path and its value."""
        seen: set[tuple[str, ...]] = set()
        known: list[Any] = []

        def visit(path: tuple[str, ...], value: Any) -> Any:
            known.append(path)
            hit = next((key for key in self.keys if path[: len(key)] == key), None)
            if hit is not None:
                seen.add(hit)
            return change(hit, path, value)

        out = _map(batch, visit)
        _require(seen, set(self.keys), known)
        return out

    def inv(self, batch: Any) -> Any:
        """Rows are stored as they are."""
        return batch

    def _change(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        raise NotImplementedError


@final
class Select(_Named):
    """Keep only the named fields of a batch.

    Args:
        *keys: names; a tuple names a nested field; a name of a group keeps the group.

    Raises:
        KeyMissingError: when a batch lacks one.
    """

    def _change(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        return None if hit is None else (path, value)


@final
class Exclude(_Named):
    """Leave the named fields out of a batch; see `Select` for names."""

    def _change(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        return (path, value) if hit is None else None


@final
class Rename(_Named):
    """Give fields of a batch new names.

    Args:
        names: old name -> new name; tuples name nested fields.
    """

    def __init__(self, names: Mapping[Key, Key]) -> None:
        super().__init__(*names)
        self._names = {_path(old): _path(new) for old, new in names.items()}

    def _change(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        return (path, value) if hit is None else ((*self._names[hit], *path[len(hit) :]), value)


@final
class RewardScale(_Named):
    """Scale rewards at sampling: `scale * reward + loc`. Rewards are stored as they came.

    There is no inverse: rows read through it and written back are stored scaled.

    Args:
        scale: factor.
        loc: added after scaling.
        key: field of the reward.
    """

    def __init__(self, scale: float, loc: float = 0.0, key: Key = "reward") -> None:
        super().__init__(key)
        self.scale, self.loc = scale, loc

    def _change(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        return (path, value) if hit is None else (path, value * self.scale + self.loc)


@final
class Cast(_Named):
    """Change the dtype of fields at sampling, and, if asked, at writing: floats in the batch, bytes in the storage.

    Values are cast as `tensor.to` casts them: what a dtype cannot hold wraps or loses its fraction.

    Args:
        dtype: dtype in the batch.
        *keys: the fields.
        stored: dtype in the storage; None stores what comes.
    """

    def __init__(self, dtype: torch.dtype, *keys: Key, stored: torch.dtype | None = None) -> None:
        super().__init__(*keys)
        self.dtype, self.stored = dtype, stored

    def _change(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        return (path, value) if hit is None else (path, value.to(self.dtype))

    def inv(self, batch: Any) -> Any:
        """Cast the fields to the stored dtype."""
        return batch if self.stored is None else self._walk(batch, self._store)

    def _store(self, hit: tuple[str, ...] | None, path: tuple[str, ...], value: Any) -> Any:
        if hit is None:
            return path, value
        return path, (value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value), device="cpu")).to(
            self.stored
        )


@final
class ToDevice:
    """Move batches to a device, without waiting for the copy where they lie in page-locked memory (`pin_memory=True`).

    A copy to the CPU is complete when the batch is returned.

    Args:
        device: name or object.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    @property
    def _ahead(self) -> bool:
        """Whether a copy may go on after the call: not to the CPU, where nothing waits for it before it is read."""
        return self.device.type != "cpu"

    def __call__(self, batch: Any) -> Any:
        """Move a batch: a TensorDict, or a pytree of tensors."""
        if hasattr(batch, "batch_size") and hasattr(batch, "to"):
            return batch.to(self.device, non_blocking=self._ahead)
        return _pytree.tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=self._ahead), batch)

    def forward(self, batch: Any) -> Any:
        """Move a batch."""
        return self(batch)

    def inv(self, batch: Any) -> Any:
        """Rows are copied to the storage's device by the storage itself."""
        return batch


class _Step(NamedTuple):
    """A transform as the user gave it, and what it does in each direction (None: nothing)."""

    origin: Any
    forward: Callable[[Any], Any] | None
    inverse: Callable[[Any], Any] | None


@final
class Compose:
    """Transforms applied one after another.

    A transform is any callable `batch -> batch`, or an object with `forward` (run when rows are read) and `inv` (run
    when rows are written), as TorchRL's transforms are. Modules are put into evaluation mode.

    Args:
        *transforms: in the order in which they see a sampled batch.

    Raises:
        KindError: if one is neither callable nor has `forward` and `inv`.

    Example:
        >>> import torch
        >>> from ostinato.transforms import Compose, RewardScale, Select
        >>> chain = Compose(Select("reward"), RewardScale(0.5))
        >>> chain({"obs": torch.zeros(2), "reward": torch.ones(2)})
        {'reward': tensor([0.5000, 0.5000])}
    """

    def __init__(self, *transforms: Any) -> None:
        self.steps = [_adapt(transform, invert=False) for transform in transforms]

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """Return a chain as it is, and anything else (None: nothing) in a chain of its own."""
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
        """List the transforms."""
        return f"Compose({', '.join(repr(step.origin) for step in self.steps)})"

    def __call__(self, batch: Any) -> Any:
        """Apply all to a batch that was read."""
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """Apply all to a batch that was read, first to last."""
        for step in self.steps:
            if step.forward is not None:
                batch = step.forward(batch)
        return batch

    def inv(self, batch: Any) -> Any:
        """Apply the inverses to rows about to be written, last to first."""
        for step in reversed(self.steps):
            if step.inverse is not None:
                batch = step.inverse(batch)
        return batch

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end; `invert` makes a plain callable run at writing instead of at reading."""
        self.steps.append(_adapt(transform, invert=invert))

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before position `index`, in `[-len, len]`.

        Raises:
            OptionError: if the position is out of range.
        """
        if not -len(self.steps) <= index <= len(self.steps):
            msg = f"index must be in [{-len(self.steps)}, {len(self.steps)}] (transforms present), got {index}"
            raise OptionError(msg)
        self.steps.insert(index, _adapt(transform, invert=invert))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the transforms that have one, by position."""
        return {
            str(i): dict(s.origin.state_dict()) for i, s in enumerate(self.steps) if hasattr(s.origin, "state_dict")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: if a transform with a state is missing here.
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


def _adapt(transform: Any, *, invert: bool) -> _Step:
    if isinstance(transform, torch.nn.Module):
        transform.eval()
    forward, inverse = getattr(transform, "forward", None), getattr(transform, "inv", None)
    if callable(forward) and callable(inverse):
        if invert:
            msg = f"invert=True is for plain callables, got {type(transform).__name__}, which has an inverse of its own"
            raise OptionError(msg)
        return _Step(transform, transform if callable(transform) else forward, inverse)
    if not callable(transform):
        msg = f"a transform must be callable, or have forward and inv, got {type(transform).__name__}: {transform!r}"
        raise KindError(msg)
    return _Step(transform, None, transform) if invert else _Step(transform, transform, None)
