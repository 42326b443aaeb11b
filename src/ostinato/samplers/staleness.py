"""`StalenessAwareSampler`: rows of recent policies more often, and none older than a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.options import LARGEST, check_integer
from ostinato.core.records import Draw
from ostinato.errors import EmptyBufferError, KindError, PriorityError, SchemaError
from ostinato.samplers.base import Sampler, check_replacement
from ostinato.samplers.distinct import draw_weighted
from ostinato.samplers.row_values import RowValues
from ostinato.samplers.state import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ostinato.core.episodes.tracker import Key
    from ostinato.core.records import View


def freshness(staleness: Tensor) -> Tensor:
    """Return the default weights, `1 / (staleness + 1)`.

    Args:
        staleness: float32 `[n]`, at least 0; rows newer than the consumer count as fresh.
    """
    return 1.0 / (staleness.clamp(min=0) + 1.0)


@final
class StalenessAwareSampler(Sampler):
    """Draws rows in proportion to a weight that decreases with their staleness, and none beyond a limit.

    The staleness of a row is `consumer_version` less the version in its field `version_key`, the version of the policy
    that made it. The learner sets `consumer_version` as its policy changes. Rows of a staleness above `max_staleness`
    are not drawn. A batch has no row twice; the rows are drawn one after the other, each in proportion to the weights
    of those not drawn yet. If fewer rows than the batch can be drawn, it is drawn with replacement. The info of a
    sample holds the `staleness` of its rows, float32 `[B]`, and so do TensorDict samples.

    Versions are read as rows are written, not with every draw. Cost of a draw: O(rows) after a write or a new
    `consumer_version`, and with weights of one's own; else O(B log rows).

    Args:
        max_staleness: the limit; -1 is none.
        staleness_weight_fn: maps the staleness of rows, float32 `[n]`, to their weights, finite and at least 0, `[n]`;
            None is `1 / (staleness + 1)`.
        version_key: field with one number for each row; nested ones as a tuple.
        replacement: must be True; a batch has a row twice only if there are too few.

    Raises:
        KindError: for `replacement=False`, or an argument of another kind.
        OptionError: if `max_staleness` is below -1.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ostinato import LazyTensorStorage, StalenessAwareSampler, TensorDictReplayBuffer
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=3)
        >>> _ = rb.extend(TensorDict({"policy_version": torch.tensor([0, 1, 2, 2])}, [4]))
        >>> sampler.consumer_version = 2
        >>> sorted(rb.sample()["policy_version"].tolist())
        [1, 2, 2]
    """

    reads = True
    by_age = True
    row_values = ()

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[Tensor], Tensor] | None = None,
        version_key: Key = "policy_version",
        *,
        replacement: bool = True,
    ) -> None:
        check_replacement(type(self), replacement=replacement)
        weight_fn: Any = freshness if staleness_weight_fn is None else staleness_weight_fn
        if not callable(weight_fn):
            msg = f"staleness_weight_fn must be callable or None, got {type(weight_fn).__name__}"
            raise KindError(msg)
        self.max_staleness = max_staleness
        self.consumer_version = 0
        self._weight_fn: Callable[[Tensor], Any] = weight_fn
        self.version_key = version_key
        self._versions = RowValues((version_key,) if isinstance(version_key, str) else tuple(version_key), _versions)
        self._table: tuple[Any, Tensor | None, Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        """Show versions and limit."""
        return (
            f"StalenessAwareSampler(consumer_version={self.consumer_version}, max_staleness={self.max_staleness}, "
            f"version_key={self.version_key!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what is computed from the rows."""
        return {**vars(self), "_table": None}

    @property
    def consumer_version(self) -> int:
        """Version of the policy that learns now; 0 after the buffer was emptied."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        self._consumer_version = check_integer("consumer_version", version)

    @property
    def max_staleness(self) -> int:
        """Largest staleness of rows that are drawn; -1 for no limit."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, limit: int) -> None:
        self._max_staleness = check_integer("max_staleness", limit, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of versions and weights, once they were read."""
        tensors = () if self._table is None else self._table[1:]
        return self._versions.nbytes + sum(0 if tensor is None else tensor.nbytes for tensor in tensors)

    def increment_consumer_version(self) -> None:
        """Add 1 to `consumer_version`."""
        self._consumer_version += 1

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw rows by their weights.

        Raises:
            EmptyBufferError: if all rows are too stale.
            KeyMissingError: if rows lack the version.
            PriorityError: if weights are negative or not finite, or all are 0.
        """
        slots, sums, weights = self._weights(view)
        distinct = batch_size <= weights.shape[0]
        drawn = draw_weighted(sums, weights, batch_size, generator, distinct=distinct)
        drawn = drawn if slots is None else slots[drawn]
        return Draw(drawn, info={"staleness": self._staleness(drawn)})

    def check_draw(self, view: View, batch_size: int) -> None:  # noqa: ARG002
        """Raise what `draw` would raise."""
        self._weights(view)

    def _staleness(self, slots: Tensor | None) -> Tensor:
        """Return the staleness of rows, float32; the difference is exact for integers."""
        versions = self._versions.values if slots is None else self._versions.values[slots]
        return (self._consumer_version - versions).to(torch.float32)

    def _weights(self, view: View) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the slots of weight above 0 (None for all), the cumulative sums of their weights, and the weights."""
        changed = self._versions.update(view)
        key = (self._consumer_version, self._max_staleness)
        fixed = self._weight_fn is freshness and view.starts is None
        if self._table is not None and fixed and not changed and self._table[0] == key:
            return self._table[1:]
        staleness = self._staleness(None)
        allowed = view.allowed()
        if self._max_staleness >= 0:
            fresh = staleness <= self._max_staleness
            allowed = fresh if allowed is None else allowed & fresh
        slots = None if allowed is None else allowed.nonzero().flatten()
        if slots is not None and not slots.shape[0]:
            self._raise_stale(view)
        weights = self._checked_weights(staleness if slots is None else staleness[slots])
        good = (weights > 0).nonzero().flatten()
        if good.shape[0] < weights.shape[0]:
            slots = good if slots is None else slots[good]
            weights = weights[good]
        self._table = (key if fixed else None, slots, weights.cumsum(0), weights)
        return self._table[1:]

    def _checked_weights(self, staleness: Tensor) -> Tensor:
        weights = self._weight_fn(staleness)
        if not isinstance(weights, torch.Tensor) or weights.shape != staleness.shape:
            shown = list(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
            msg = f"staleness_weight_fn must return one weight for each of {staleness.shape[0]} rows, got {shown}"
            raise SchemaError(msg)
        weights = weights.detach().to(staleness.device, torch.float64)
        total = weights.sum()
        if not (bool(total.isfinite()) and bool((weights >= 0).all()) and bool(total > 0)):
            msg = (
                "staleness_weight_fn must return finite weights of at least 0, not all of them 0, got weights from "
                f"{float(weights.min()):g} to {float(weights.max()):g}"
            )
            raise PriorityError(msg)
        return weights

    def _raise_stale(self, view: View) -> None:
        oldest, newest = self._versions.values.min(), self._versions.values.max()
        msg = (
            f"All {view.rows} entries in the buffer exceed max_staleness={self._max_staleness} (consumer_version="
            f"{self._consumer_version}, versions from {oldest:g} to {newest:g}), or are left out by other rules: raise "
            "max_staleness, or collect with a newer policy"
        )
        raise EmptyBufferError(msg)

    def recheck(self) -> None:
        """Read the versions of all rows with the next draw."""
        self._versions.forget()

    def clear(self) -> None:
        """Begin with `consumer_version` 0, as TorchRL does."""
        self._consumer_version = 0
        self._versions.forget()

    def move(self) -> None:
        """Keep `consumer_version`, and read the rows of the new buffer."""
        self._versions.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return `consumer_version` and `max_staleness`."""
        return {"consumer_version": self._consumer_version, "max_staleness": self._max_staleness}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Check a state.

        Raises:
            CheckpointError: if it does not hold two integers.
        """
        version, limit = state["consumer_version"], state["max_staleness"]
        good = type(version) is int and abs(version) < LARGEST and type(limit) is int and -1 <= limit < LARGEST
        require(good, f"consumer_version={version!r}, max_staleness={limit!r}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.consumer_version, self.max_staleness = int(state["consumer_version"]), int(state["max_staleness"])
        self._versions.forget()


def _versions(found: Tensor | list[Any]) -> Tensor:
    """Return versions as int64 or float64 `[n]`.

    Raises:
        SchemaError: if there is not one real number for each row.
    """
    if not isinstance(found, torch.Tensor) or found.numel() != found.shape[0] or found.is_complex():
        shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else "Python objects"
        msg = f"version_key must name a field with one number for each row, got {shown}"
        raise SchemaError(msg)
    return found.detach().reshape(-1).to(torch.float64 if found.dtype.is_floating_point else torch.int64)
