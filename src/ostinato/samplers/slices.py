"""Slice samplers: pieces of episodes, drawn episode by episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

import torch

from ostinato.core.draw import Draw, episodes_of
from ostinato.errors import CheckpointError, OptionError
from ostinato.samplers.base import Sampler
from ostinato.samplers.slicing import (
    TOP,
    SliceOptions,
    Slicing,
    check_ignored,
    slice_episodes,
)
from ostinato.samplers.uniform import SamplerWithoutReplacement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ostinato.core.boundaries import Key
    from ostinato.core.draw import View
    from ostinato.core.plan import Plan
    from ostinato.core.rows import Path

__all__ = ["SliceSampler", "SliceSamplerWithoutReplacement"]


class SliceSampler(Sampler):
    """Draws slices of episodes: an episode uniformly among those that are long enough, then a start uniformly in it.

    A batch of `num_slices` slices of `slice_len` rows each comes flat, `[num_slices * slice_len, *shape]`. No slice
    spans two episodes, nor the write cursor, and every start that leaves room for a slice can be drawn. With
    interleaved rows of several episodes (`traj_key`) a slice follows its own.

    The batch's flags: the last row of each slice is True under `truncated_key` and under `done` beside it, other
    `done` and all `terminated` flags are those stored; `init_key`, where rows have it, is True on the first row of each
    slice. They stand in the info of a sample and in TensorDict samples.

    Cost: O(slices), whatever the size of the buffer.

    Args:
        num_slices: slices in a batch; their length is `batch_size // num_slices`. Exclusive with `slice_len`.
        slice_len: rows of a slice; a batch has `batch_size // slice_len` of them.
        end_key: field that ends episodes. Without this and `traj_key`, `("collector", "traj_ids")` or `episode` are
            taken where rows have them, and with them or alone the usual flags (see `Episodes`).
        end_keys: several of them: any one ends an episode; those that rows lack are left out.
        traj_key: field with the id of a row's episode.
        step_key: no effect: the order of writing is the order of steps.
        fragmented: must be False: `traj_key` tells interleaved episodes apart.
        ends: bool `[rows]` for rows that stay as they are; needs `cache_values=True`.
        trajectories: ids `[rows]`, likewise.
        cache_values: no effect but to allow these two: boundaries are noted when rows are written, never searched for.
        truncated_key: see above; None adds no flags.
        init_key: see above; None leaves the stored flags alone.
        strict_length: False lets an episode shorter than a slice be drawn too, whole.
        pad_output: repeat the last row of shorter slices; the mask `("collector", "mask")` is False there.
        span: let slices reach out of their episode on the left and the right, which makes them shorter: True down to
            one row, a number by so many rows; a pair for each side.
        compile: must be False; there is nothing to compile.
        use_gpu: must be False, likewise.
        replacement: False makes a `SliceSamplerWithoutReplacement` instead.

    Raises:
        KindError: if not exactly one of `num_slices` and `slice_len` is given.
        UsageError: if ways to tell the episodes exclude each other.
        OptionError: for other options that exclude each other, or are out of range.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=3, end_key="done")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> done = torch.zeros(20, dtype=torch.bool)
        >>> done[[6, 13, 19]] = True
        >>> _ = rb.extend({"step": torch.arange(20), "done": done})
        >>> steps = rb.sample()["step"].view(2, 3)
        >>> bool((steps.diff() == 1).all())
        True
    """

    slices = True

    def __new__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Self:  # noqa: ARG004
        """Make the sampler that `replacement` asks for."""
        made = cls if replacement or cls is not SliceSampler else SliceSamplerWithoutReplacement
        return object.__new__(made)  # type: ignore[return-value]

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        step_key: Key | None = "step_count",  # noqa: ARG002
        fragmented: bool = False,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool | torch.device = False,
        replacement: bool = True,
    ) -> None:
        del replacement  # read by __new__
        check_ignored(compiled=compile, use_gpu=use_gpu, fragmented=fragmented)
        self._slicing = Slicing(
            SliceOptions(num_slices, slice_len, truncated_key, init_key, strict_length, pad_output, span)
        )
        self.episodes = slice_episodes(end_key, end_keys, traj_key, ends, trajectories, cache_values=cache_values)
        self.span = 1 if slice_len is None or not strict_length else slice_len

    def __repr__(self) -> str:
        """Options."""
        options = self._slicing.options
        return (
            f"{type(self).__name__}(num_slices={options.num_slices}, slice_len={options.slice_len}, {self.episodes!r}, "
            f"strict_length={options.strict_length})"
        )

    @property
    def num_slices(self) -> int | None:
        """Slices in a batch, if that is fixed."""
        return self._slicing.options.num_slices

    @property
    def slice_len(self) -> int | None:
        """Rows of a slice, if that is fixed."""
        return self._slicing.options.slice_len

    def check_draw(self, view: View, batch_size: int) -> None:
        """Raise what `draw` would raise.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
        """
        length, table = self._slicing.split(batch_size)[1], episodes_of(view)
        self._slicing.require(table.starts(self._slicing.need(length)).rows, length, table)

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slices: their first rows and their lengths.

        Raises:
            EmptyBufferError: if no episode is long enough.
            UsageError: if the batch size is no multiple.
        """
        slicing = self._slicing
        number, length = slicing.split(batch_size)
        table = episodes_of(view)
        starts = table.starts(slicing.need(length))
        slicing.require(starts.rows, length, table)
        randoms = torch.randint(0, TOP, (2 * number,), generator=generator, device=view.device)
        rows = starts.draw_episodes(randoms)
        if slicing.plain:
            return Draw(rows, length=length)
        first, lengths = slicing.place(rows, length, view, generator)
        return Draw(first, lengths=lengths, pad=length if slicing.options.pad_output else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what slices look like."""
        return {"slices": self._slicing.form}

    def check_state(self, state: dict[str, Any], rows: int) -> None:  # noqa: ARG002
        """Compare with what `state_dict` returned.

        Raises:
            CheckpointError: if the state is that of other slices.
        """
        self._slicing.check_form(state)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the state as it is: it names no slots."""
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with what `state_dict` returned; see `check_state`."""
        self._slicing.check_form(state)

    def marks(self, plan: Plan, data: Any) -> dict[Path, Tensor]:
        """Return the flags of the slices; see the class."""
        return self._slicing.marks(plan, data)


@final
class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices so that within one pass every episode that is long enough is drawn exactly once.

    The start within the episode is uniform. Writing to the buffer begins a new pass, and so does
    a batch with slices of another length (`num_slices`). The last batch of a pass has what is
    left, unless `drop_last`. An instance of both classes, as TorchRL's is.

    Args:
        num_slices: see `SliceSampler`, also for the arguments not listed here; slices neither span nor are padded.
        drop_last: leave out the last batch of a pass where it has fewer slices.
        shuffle: False goes through the episodes by age.

    Example:
        >>> import torch
        >>> from ostinato import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = rb.extend({"episode": torch.arange(12) // 4})
        >>> [len(batch["episode"]) for batch in rb]
        [4, 2]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,  # noqa: A002 (TorchRL's name)
        use_gpu: bool | torch.device = False,
        replacement: bool = False,
    ) -> None:
        if replacement:
            msg = "SliceSamplerWithoutReplacement draws without replacement, got replacement=True: use SliceSampler"
            raise OptionError(msg)
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            compile=compile,
            use_gpu=use_gpu,
        )
        SamplerWithoutReplacement.__init__(self, drop_last=drop_last, shuffle=shuffle)
        self._firsts = torch.empty(0, dtype=torch.int64, device="cpu")
        self._seen, self._length = -1, 0

    def __repr__(self) -> str:
        """Options and place in the pass."""
        return f"{SliceSampler.__repr__(self)[:-1]}, drawn={self._at} of {self._firsts.shape[0]} episodes)"

    def restart(self) -> None:
        """Begin a new pass with the next draw."""
        SamplerWithoutReplacement.restart(self)
        self._seen = -1

    def draw(self, view: View, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw the next slices of the pass.

        Raises:
            EmptyBufferError: if no episode is long enough.
        """
        slicing = self._slicing
        number, length = slicing.split(batch_size)
        fresh = (view.stamps.written, length) != (self._seen, self._length)
        firsts = self._find(view, length) if fresh else self._firsts
        if self.drop_last and firsts.shape[0] < number:
            msg = (
                f"a batch of {number} slices needs as many episodes with drop_last=True, there are "
                f"{firsts.shape[0]} of {slicing.need(length)} rows or more: add some or lower batch_size"
            )
            raise OptionError(msg)
        if fresh:  # only now: a draw that raises leaves the pass as it was
            SamplerWithoutReplacement.restart(self)
            self._firsts, self._seen, self._length = firsts, view.stamps.written, length
        # its rows are the episodes of the pass, numbered by age
        episodes = view._replace(rows=firsts.shape[0], capacity=firsts.shape[0], starts=None)
        picked = SamplerWithoutReplacement.draw(self, episodes, number, generator).slots
        first, lengths = slicing.place(firsts[picked], length, view, generator)
        return Draw(first, lengths=lengths)

    def _find(self, view: View, length: int) -> Tensor:
        """Return the first rows of the episodes that are long enough, int64 `[n]`.

        Raises:
            EmptyBufferError: if there is none.
        """
        table = episodes_of(view)
        spans = table.episodes()
        firsts = spans.first[spans.rows >= self._slicing.need(length)].to(view.device)
        self._slicing.require(firsts.shape[0], length, table)
        return firsts

    def state_dict(self) -> dict[str, Any]:
        """Return order and place in the pass."""
        return {
            **SliceSampler.state_dict(self),
            **SamplerWithoutReplacement.state_dict(self),
            "firsts": self._firsts,
            "seen": self._seen,
            "length": self._length,
        }

    def check_state(self, state: dict[str, Any], rows: int) -> None:
        """Raise if a state is damaged, or of other options.

        Raises:
            CheckpointError: naming what differs.
        """
        firsts = state["firsts"]
        sound = firsts.dtype is torch.int64 and firsts.ndim == 1 and int(state["rows"]) <= firsts.shape[0]
        if not sound or (firsts.numel() and int(firsts.min()) < 0):
            msg = "the sampler's state is damaged: it names more episodes than it holds"
            raise CheckpointError(msg)
        SliceSampler.check_state(self, state, rows)
        SamplerWithoutReplacement.check_state(self, state, rows)

    def turn_state(self, state: dict[str, Any], seam: int, rows: int) -> dict[str, Any]:
        """Return a state for rows that have moved: the pass is one over episodes, known by their first rows."""
        return {**state, "firsts": (state["firsts"] - seam).remainder_(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; see `check_state`."""
        SamplerWithoutReplacement.load_state_dict(self, state)
        firsts = state["firsts"]
        self._firsts, self._seen, self._length = firsts.clone(), int(state["seen"]), int(state["length"])
