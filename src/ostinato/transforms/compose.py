"""Chains of transforms: forward in order at sampling, inverse in reverse order at writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ostinato.errors import CheckpointError, KindError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Compose"]


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
        >>> from ostinato import Compose, RewardScale, Select
        >>> chain = Compose(Select("reward"), RewardScale(0.5))
        >>> chain({"obs": torch.zeros(2), "reward": torch.ones(2)})
        {'reward': tensor([0.5000, 0.5000])}
    """

    def __init__(self, *transforms: Any) -> None:
        self._steps = [_adapt(transform, invert=False) for transform in transforms]

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """Return a chain as it is, and anything else (None: nothing) in a chain of its own."""
        if isinstance(transform, Compose):
            return transform
        return cls() if transform is None else cls(transform)

    def __len__(self) -> int:
        """Number of transforms."""
        return len(self._steps)

    def __getitem__(self, index: int) -> Any:
        """Return a transform as it was given."""
        return self._steps[index].origin

    def __repr__(self) -> str:
        """List the transforms."""
        return f"Compose({', '.join(repr(step.origin) for step in self._steps)})"

    def __call__(self, batch: Any) -> Any:
        """Apply all to a batch that was read."""
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """Apply all to a batch that was read, first to last."""
        for step in self._steps:
            if step.forward is not None:
                batch = step.forward(batch)
        return batch

    def inv(self, batch: Any) -> Any:
        """Apply the inverses to rows about to be written, last to first."""
        for step in reversed(self._steps):
            if step.inverse is not None:
                batch = step.inverse(batch)
        return batch

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end; `invert` makes a plain callable run at writing instead of at reading."""
        self._steps.append(_adapt(transform, invert=invert))

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before position `index`, in `[-len, len]`.

        Raises:
            OptionError: if the position is out of range.
        """
        if not -len(self._steps) <= index <= len(self._steps):
            msg = f"index must be in [{-len(self._steps)}, {len(self._steps)}] (transforms present), got {index}"
            raise OptionError(msg)
        self._steps.insert(index, _adapt(transform, invert=invert))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the transforms that have one, by position."""
        return {
            str(i): dict(s.origin.state_dict()) for i, s in enumerate(self._steps) if hasattr(s.origin, "state_dict")
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
            self._steps[int(position)].origin.load_state_dict(value)


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
