"""Slices that begin at rows drawn by priority."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, final

import torch

from ostinato.core.draw import episodes_of
from ostinato.errors import CheckpointError
from ostinato.samplers.prioritized import PrioritizedSampler
from ostinato.samplers.slicing import SliceOptions, Slicing, check_ignored, slice_episodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.boundaries import Key
    from ostinato.core.draw import Draw, View
    from ostinato.core.episodes import EpisodeTable, Starts
    from ostinato.core.plan import Plan
    from ostinato.core.rows import Path

__all__ = ["PrioritizedSliceSampler"]


@final
class PrioritizedSliceSampler(PrioritizedSampler):
    """Draws slices of episodes that begin at rows drawn in proportion to their priority.

    The distribution of a start is that of `PrioritizedSampler` over the rows that have room for a slice in their
    episode; others keep their priority, but are not drawn until they have. With `strict_length=False` the first row
    present of an episode can always be drawn, so that an episode shorter than a slice is drawn whole; a slice of a
    longer episode has full length. Weights are those of the first row, repeated for all rows of its slice; generations
    are those of each row, and `update_priority` with a sample gives priorities to all of its rows. An instance of
    `PrioritizedSampler`, as TorchRL's is.

    With `num_slices` the length of a slice follows from the batch size; a new one costs one pass over the rows.

    Args:
        max_capacity: see `PrioritizedSampler`, also for `alpha` to `reduction` and `max_priority_within_buffer`.
        num_slices: see `SliceSampler`, also for the arguments that follow.
        span: lets slices end early at the end of their episode, True by any number of rows, a number by at most so
            many; the left side has no effect, and warns.

    Raises:
        KindError: if not exactly one of `num_slices` and `slice_len` is given.
        OptionError: if options exclude each other.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
        >>> sampler = PrioritizedSliceSampler(100, alpha=0.7, beta=0.5, slice_len=3, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> index = rb.extend({"episode": torch.arange(12) // 4})
        >>> batch, info = rb.sample(return_info=True)
        >>> info["priority_weight"].shape
        torch.Size([6])
    """

    slices = True

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: bool | int | tuple[bool | int, bool | int] = False,
        max_priority_within_buffer: bool = False,
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        check_ignored(compiled=compile, use_gpu=False)
        left, right = span if isinstance(span, tuple) else (span, span)
        if left:
            warnings.warn(
                "PrioritizedSliceSampler draws the first row of a slice: span has no effect on its left side",
                UserWarning,
                stacklevel=2,
            )
        options = SliceOptions(num_slices, slice_len, truncated_key, init_key, strict_length, False, (False, right))  # noqa: FBT003
        self._slicing = Slicing(options)
        self.episodes = slice_episodes(end_key, end_keys, traj_key, ends, trajectories, cache_values=cache_values)
        self._length = slice_len
        self.span = 1 if slice_len is None or not strict_length else slice_len

    def __repr__(self) -> str:
        """Options and rows."""
        options = self._slicing.options
        return (
            f"PrioritizedSliceSampler(num_slices={options.num_slices}, slice_len={options.slice_len}, "
            f"{self.episodes!r}, "
            f"{PrioritizedSampler.__repr__(self).partition('(')[2]}"
        )

    def _starts(self, view: View) -> Starts | None:
        if view.rows == 0:
            return None  # an empty buffer keeps no account of episodes yet
        return self._starts_of(self._length, view)

    def _starts_of(self, length: int | None, view: View) -> Starts | None:
        """Return the rows at which a slice of this length may begin; None stands for all of them."""
        table = episodes_of(view)
        need = 1 if length is None else self._slicing.least(length)
        return None if need == 1 and not table.masked else table.starts(need)

    def _reached(self, slots: Tensor, starts: Starts, episodes: EpisodeTable) -> Tensor:
        older = super()._reached(slots, starts, episodes)
        if self._slicing.options.strict_length:
            return older
        episodes.track_firsts()
        return torch.cat((older, episodes.moved_firsts(slots)))

    def _allowed(self, slots: Tensor, view: View) -> Tensor | None:
        """Return which rows have room for a slice; without `strict_length` also the first row of each episode."""
        allowed = super()._allowed(slots, view)
        if allowed is None or self._slicing.options.strict_length:
            return allowed
        return allowed | (episodes_of(view).behind(slots) == 0)

    def begin(self, view: View) -> None:
        """Give the rows present the default priority, but those that a state brought priorities for."""
        if view.rows and not self._slicing.options.strict_length:
            episodes_of(view).track_firsts()
        super().begin(view)

    def mass(self, view: View) -> None:  # noqa: ARG002
        """Return None: it draws slices, not single rows."""
        return

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
            PriorityError: if no row that a slice may begin with has a priority above 0.
        """
        if self._check_slices(view, batch_size) == self._length:
            super().check_draw(view, batch_size)

    def _check_slices(self, view: View, batch_size: int) -> int:
        """Return the length of slices in a batch, if there is one to draw."""
        length = self._slicing.split(batch_size)[1]
        table, starts = episodes_of(view), self._starts_of(length, view)
        if starts is not None:
            rows = starts.rows if self._slicing.options.strict_length else table.rows
            self._slicing.require(rows, starts.need, table)
        return length

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows with weights and stamps, and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
        """
        self._check_slices(view, batch_size)
        number, length = self._slicing.split(batch_size)
        table = episodes_of(view)
        if length != self._length:  # only now: a draw that raises leaves the sampler as it was
            self._length = length
            self.begin(view)
        drawn = super().draw(view, number, generator)
        if self._slicing.plain:
            return drawn._replace(length=length)
        return drawn._replace(lengths=(table.ahead(drawn.slots) + 1).clamp_(max=length))

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of the slices; see `SliceSampler`."""
        return self._slicing.marks(plan, data)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of priorities, and the length that rows were last drawn for."""
        return {**super().state_dict(), "length": self._length, "slices": self._slicing.form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Raise if a state is damaged, or of other options; see `PrioritizedSampler`."""
        self._slicing.check_form(state)
        length = state["length"]
        if length is not None and (type(length) is not int or length < 1):
            msg = f"the sampler's state is damaged: it was drawn for slices of {length!r} rows"
            raise CheckpointError(msg)
        super().check_state(state, rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `PrioritizedSampler`."""
        super().load_state_dict(state)
        self._length = state["length"]
